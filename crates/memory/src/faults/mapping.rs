//! Where another process maps a file, and which parts of the mapping are registered with a userfaultfd.
//!
//! Both come from the kernel (/proc/PID/maps and smaps), so a keeper that dies takes no information with it.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

/// One mapping of a part of a file in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address in that process.
    pub address: u64,
    /// Offset in the file, in bytes.
    pub file_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether a fault on a missing page is reported to a userfaultfd. Only `find_registered` fills this in.
    pub registered: bool,
}

/// Each mapping of a byte range of the file: the address in the process, and the part of the range.
pub fn places(pieces: &[Piece], file: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
    pieces.iter().filter_map(move |piece| {
        let start = file.start.max(piece.file_offset);
        let end = file.end.min(piece.file_offset + piece.bytes);
        (start < end).then(|| (piece.address + (start - piece.file_offset), start..end))
    })
}

/// Converts an address in the process to an offset in the file.
pub fn file_offset(pieces: &[Piece], address: u64) -> Option<u64> {
    let piece = pieces.iter().find(|piece| address >= piece.address && address - piece.address < piece.bytes)?;
    Some(piece.file_offset + (address - piece.address))
}

/// Lists all mappings of a file (device and inode), sorted by file offset.
pub fn find(pid: u32, file: (u64, u64)) -> io::Result<Vec<Piece>> {
    parse(lines_of(pid, "maps")?, file)
}

/// Lists the mappings with `registered` filled in. The kernel walks all page tables for smaps: milliseconds per GiB.
pub fn find_registered(pid: u32, file: (u64, u64)) -> io::Result<Vec<Piece>> {
    parse(lines_of(pid, "smaps")?, file)
}

/// Line by line: a process has thousands of mappings if it likes, each with a path of 4 KiB.
fn lines_of(pid: u32, table: &str) -> io::Result<impl Iterator<Item = io::Result<String>>> {
    Ok(BufReader::new(File::open(format!("/proc/{pid}/{table}"))?).lines())
}

fn parse(lines: impl Iterator<Item = io::Result<String>>, file: (u64, u64)) -> io::Result<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut inside = false;
    for line in lines {
        let line = line?;
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if let Some(piece) = pieces.last_mut().filter(|_| inside) {
                piece.registered = flags.split_whitespace().any(|flag| flag == "um");
            }
        } else if let Some((piece, identity)) = mapping(&line) {
            inside = identity == file;
            if inside {
                pieces.push(piece);
            }
        }
    }
    pieces.sort_unstable_by_key(|piece| piece.file_offset);
    Ok(pieces)
}

/// Parses one line: `start-end permissions offset major:minor inode path`.
fn mapping(line: &str) -> Option<(Piece, (u64, u64))> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (address, end) = (hex(start)?, hex(end)?);
    let file_offset = hex(fields.nth(1)?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let device = rustix::fs::makedev(hex(major)? as u32, hex(minor)? as u32);
    let inode = fields.next()?.parse().ok()?;
    let bytes = end.checked_sub(address)?;
    Some((Piece { address, file_offset, bytes, registered: false }, (device, inode)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_and_smaps_are_parsed() {
        let text = "\
            7f0000400000-7f0000600000 rw-s 00200000 00:1b 77                         /dev/shm/a b/ram-1\n\
            Size:               2048 kB\n\
            VmFlags: rd wr sh mr mw me ms um sd \n\
            7f0000200000-7f0000400000 rw-s 00000000 00:1b 77                         /dev/shm/a b/ram-1\n\
            VmFlags: rd wr sh mr mw me ms sd \n\
            7f0000600000-7f0000800000 rw-s 00000000 00:1b 78                         /dev/shm/a b/ram-2\n\
            VmFlags: rd wr sh mr mw me ms um sd \n\
            7ffd1c5e1000-7ffd1c602000 rw-p 00000000 00:00 0                          [stack]\n";
        let lines = text.lines().map(|line| Ok(line.to_owned()));
        let pieces = parse(lines, (rustix::fs::makedev(0, 0x1b), 77)).unwrap();
        let piece = |address, file_offset, registered| Piece { address, file_offset, bytes: 2 << 20, registered };
        assert_eq!(pieces, [piece(0x7f00_0020_0000, 0, false), piece(0x7f00_0040_0000, 2 << 20, true)]);
    }

    #[test]
    fn mapped_file_is_found_by_identity() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = crate::RamFile::create(&folder.path().join("ram-1"), 1 << 20).unwrap();
        assert_eq!(find(std::process::id(), ram.identity()).unwrap(), []);
        let _view = ram.map().unwrap();
        let pieces = find_registered(std::process::id(), ram.identity()).unwrap();
        assert_eq!((pieces.len(), pieces[0].bytes, pieces[0].registered), (1, 1 << 20, false));
    }
}
