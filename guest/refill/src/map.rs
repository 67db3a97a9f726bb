//! The cache map, parsed. `hearth_recovery::cache_map` describes the format.

use std::collections::HashMap;

/// What to read ahead, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Map {
    /// UUIDs of the file systems, as 32 hexadecimal digits.
    pub file_systems: Vec<String>,
    /// The files and devices.
    pub files: Vec<File>,
    /// What to read of them.
    pub reads: Vec<Read>,
}

/// A file, or the device of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File {
    /// Number of its file system in `Map::file_systems`.
    pub file_system: usize,
    /// Number and generation of the inode; `None` for the device.
    pub inode: Option<(u64, u32)>,
}

/// Pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Number of the file in `Map::files`.
    pub file: usize,
    /// The first page.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
}

impl Map {
    /// Lines that make no sense are passed over, and so is what refers to them.
    pub fn parse(text: &str) -> Self {
        let mut map = Self::default();
        let (mut systems, mut files) = (HashMap::new(), HashMap::new());
        for line in text.lines() {
            // Fails for a line that makes no sense.
            let _ = map.line(line, &mut systems, &mut files);
        }
        map
    }

    fn line(&mut self, line: &str, systems: &mut HashMap<u32, usize>, files: &mut HashMap<u32, usize>) -> Option<()> {
        let mut words = line.split(' ');
        let kind = words.next()?;
        let number = words.next()?.parse().ok()?;
        match kind {
            "fs" => {
                systems.insert(number, self.file_systems.len());
                self.file_systems.push(words.nth(1)?.to_owned());
            }
            "file" | "device" => {
                let file_system = *systems.get(&words.next()?.parse().ok()?)?;
                let inode = match kind {
                    "file" => Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?)),
                    _ => None,
                };
                files.insert(number, self.files.len());
                self.files.push(File { file_system, inode });
            }
            "read" => {
                let file = *files.get(&number)?;
                let (first, pages) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                self.reads.push(Read { file, first, pages });
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_make_no_sense_are_passed_over() {
        let text = "fs 3 ext4 00112233445566778899aabbccddeeff\nfile 7 3 12 99\ndevice 8 3\nread 8 0 4\nread 7 256 10\n\
            read 9 0 1\nfile 10 4 1 1\nread 10 0 1\nread 7 x 1\nsomething new\n\nread";
        let map = Map::parse(text);
        assert_eq!(map.file_systems, ["00112233445566778899aabbccddeeff"]);
        assert_eq!(map.files, [(Some((12, 99))), None].map(|inode| File { file_system: 0, inode }));
        let reads = [Read { file: 1, first: 0, pages: 4 }, Read { file: 0, first: 256, pages: 10 }];
        assert_eq!(map.reads, reads);
    }
}
