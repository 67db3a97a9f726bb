//! Fault injection: damages a guest's memory from outside, in its RAM file, as bad hardware or a broken driver would.
//!
//! Only pages that hold memory are damaged, each once. The same seed damages the same pages, so a failed round can be repeated.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::error::{Error, Result, at};

const PAGE_BYTES: usize = 4096;
type Page = [u8; PAGE_BYTES];

/// The damage done to a RAM file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    pub pages: u64,
    /// Pages that held memory, from which the damaged ones were drawn.
    pub resident_pages: u64,
}

/// Overwrites `pages` pages drawn at random: with noise, zeros or another page's bytes, or by flipping one bit.
pub fn overwrite_pages(ram: &Path, pages: u64, seed: u64) -> Result<Damage> {
    let file = at("open", ram, File::options().read(true).write(true).open(ram))?;
    let mut targets = resident_pages(&file, ram)?;
    let resident_pages = targets.len() as u64;
    if resident_pages < pages {
        return Err(Error::TooFewPages { path: ram.to_owned(), has: resident_pages, asked: pages });
    }
    let mut random = Random(seed | 1);
    for index in 0..pages as usize {
        let drawn = index + random.below(targets.len() - index);
        targets.swap(index, drawn);
        let donor = targets[random.below(targets.len())];
        let damage = |random: &mut Random| {
            let page = read_page(&file, targets[index])?;
            file.write_all_at(&damaged(page, read_page(&file, donor)?, random), targets[index] * PAGE_BYTES as u64)
        };
        at("damage", ram, damage(&mut random))?;
    }
    Ok(Damage { pages, resident_pages })
}

/// A damaged copy of `page`, always different from it.
fn damaged(page: Page, donor: Page, random: &mut Random) -> Page {
    let mut result = page;
    match random.below(4) {
        0 => result.fill_with(|| random.next() as u8),
        1 => result.fill(0),
        2 => result = donor,
        _ => {}
    }
    if result == page {
        result[random.below(PAGE_BYTES)] ^= 1 << random.below(8);
    }
    result
}

fn read_page(file: &File, number: u64) -> std::io::Result<Page> {
    let mut page = [0; PAGE_BYTES];
    file.read_exact_at(&mut page, number * PAGE_BYTES as u64)?;
    Ok(page)
}

/// The number of bytes that hold memory between two offsets of a sparse file.
pub fn resident_bytes(path: &Path, within: Range<u64>) -> Result<u64> {
    let file = at("open", path, File::open(path))?;
    let pages = resident_pages(&file, path)?;
    let inside = pages.iter().filter(|page| within.contains(&(*page * PAGE_BYTES as u64)));
    Ok(inside.count() as u64 * PAGE_BYTES as u64)
}

fn resident_pages(file: &File, path: &Path) -> Result<Vec<u64>> {
    let mut pages = Vec::new();
    let mut offset = 0;
    loop {
        let start = match seek(file, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(pages),
            Err(errno) => return at("look for memory in", path, Err(errno.into())),
        };
        offset = at("look for holes in", path, seek(file, SeekFrom::Hole(start)).map_err(Into::into))?;
        pages.extend(start / PAGE_BYTES as u64..offset / PAGE_BYTES as u64);
    }
}

/// xorshift64: the same seed gives the same faults.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 64 pages of memory behind 64 pages of hole.
    fn ram(folder: &Path, name: &str) -> std::path::PathBuf {
        let path = folder.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(128 * PAGE_BYTES as u64).unwrap();
        file.write_all_at(&crate::pattern::bytes("ram", 64 * PAGE_BYTES, 9), 64 * PAGE_BYTES as u64).unwrap();
        path
    }

    fn differing_pages(one: &Path, other: &Path) -> usize {
        let (one, other) = (std::fs::read(one).unwrap(), std::fs::read(other).unwrap());
        one.chunks(PAGE_BYTES).zip(other.chunks(PAGE_BYTES)).filter(|(one, other)| one != other).count()
    }

    #[test]
    fn same_seed_damages_the_same_pages() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let [sound, one, same, other] = ["sound", "one", "same", "other"].map(|name| ram(folder.path(), name));
        for (path, seed) in [(&one, 7), (&same, 7), (&other, 8)] {
            assert_eq!(overwrite_pages(path, 40, seed).unwrap(), Damage { pages: 40, resident_pages: 64 });
        }
        assert_eq!(differing_pages(&sound, &one), 40);
        assert_eq!(differing_pages(&one, &same), 0);
        assert_ne!(differing_pages(&one, &other), 0);
    }

    #[test]
    fn holes_are_not_damaged() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = ram(folder.path(), "ram");
        let half = 64 * PAGE_BYTES as u64;
        overwrite_pages(&path, 64, 3).unwrap();
        assert_eq!(
            (resident_bytes(&path, 0..half).unwrap(), resident_bytes(&path, half..2 * half).unwrap()),
            (0, half)
        );
        let error = overwrite_pages(&path, 65, 3).unwrap_err().to_string();
        assert!(error.ends_with("it holds only 64"), "{error}");
    }
}
