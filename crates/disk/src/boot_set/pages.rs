//! The pages of a boot set: the bytes of its copies, in a file of host memory.
//!
//! Journals, tables of inodes and bitmaps are zeroes for the greater part. A block of zeroes is a hole of the file: it
//! reads as what it is and takes no memory.
//!
//! Pages are read and written through a mapping, without a system call, but only where the file has memory: a look at a hole
//! would take some. A hole has its memory taken before it is filled (see `populate`), a page of 4 KiB and no more.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use super::{BLOCK, BootSetError, PAGES_FILE};
use crate::block::BLOCK_BYTES;
use crate::populate;

pub(super) const ZEROES: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

pub(super) struct Pages {
    file: File,
    mapping: MmapRegion<()>,
    path: PathBuf,
    /// For each page, whether it takes memory.
    filled: Vec<bool>,
    filled_pages: usize,
}

impl Pages {
    pub(super) fn create(folder: &Path, pages: u32) -> Result<Self, BootSetError> {
        let path = folder.join(PAGES_FILE);
        let failed = |action| {
            let path = path.clone();
            move |source| BootSetError::File { path, action, source }
        };
        let options = &mut OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path).map_err(failed("make"))?;
        file.set_len(u64::from(pages) * BLOCK).map_err(failed("size"))?;
        let mapping = map(&file, pages).map_err(failed("map"))?;
        Ok(Self { file, mapping, path, filled: vec![false; pages as usize], filled_pages: 0 })
    }

    /// None: there is nothing that fits.
    pub(super) fn open(folder: &Path, pages: u32) -> Option<Self> {
        let path = folder.join(PAGES_FILE);
        let file = OpenOptions::new().read(true).write(true).open(&path).ok()?;
        let fits = file.metadata().ok()?.len() == u64::from(pages) * BLOCK;
        let filled = if fits { filled(&file, pages as usize).ok()? } else { return None };
        let mapping = map(&file, pages).ok()?;
        let filled_pages = filled.iter().filter(|filled| **filled).count();
        Some(Self { file, mapping, path, filled, filled_pages })
    }

    pub(super) fn is_filled(&self, page: u32) -> bool {
        self.filled[page as usize]
    }

    /// How many take memory.
    pub(super) fn filled_pages(&self) -> usize {
        self.filled_pages
    }

    pub(super) fn read(&self, page: u32, bytes: &mut [u8; BLOCK_BYTES]) {
        if !self.is_filled(page) {
            return bytes.fill(0);
        }
        self.mapped(page).copy_to(bytes);
    }

    pub(super) fn write(&mut self, page: u32, bytes: &[u8; BLOCK_BYTES]) -> io::Result<()> {
        if *bytes == ZEROES && self.give_back(page).is_ok() {
            return Ok(());
        }
        if !self.is_filled(page) {
            let start = page as usize * BLOCK_BYTES;
            // SAFETY: the mapping has all pages, and each begins where a page of the host does.
            unsafe { populate::take(&self.file, start_of(&self.mapping), start..start + BLOCK_BYTES)? };
            self.filled_pages += 1;
            self.filled[page as usize] = true;
        }
        self.mapped(page).copy_from(bytes);
        Ok(())
    }

    /// To be touched only if it takes memory.
    fn mapped(&self, page: u32) -> VolatileSlice<'_> {
        self.mapping.get_slice(page as usize * BLOCK_BYTES, BLOCK_BYTES).expect("the mapping has all pages")
    }

    /// The page reads as zeroes from now on, and takes no memory.
    pub(super) fn give_back(&mut self, page: u32) -> io::Result<()> {
        if self.is_filled(page) {
            self.punch(page)?;
            self.filled[page as usize] = false;
            self.filled_pages -= 1;
        }
        Ok(())
    }

    fn punch(&self, page: u32) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, how, u64::from(page) * BLOCK, BLOCK)?)
    }

    pub(super) fn give_back_all(&mut self) -> Result<(), BootSetError> {
        let bytes = self.filled.len() as u64 * BLOCK;
        let failed = |source| BootSetError::File { path: self.path.clone(), action: "empty", source };
        self.file.set_len(0).and_then(|()| self.file.set_len(bytes)).map_err(failed)?;
        self.filled.fill(false);
        self.filled_pages = 0;
        Ok(())
    }

    /// Host memory that they take.
    pub(super) fn resident_bytes(&self) -> u64 {
        resident(self.file.metadata())
    }
}

fn map(file: &File, pages: u32) -> io::Result<MmapRegion<()>> {
    let whole = FileOffset::new(file.try_clone()?, 0);
    let mapping = MmapRegion::from_file(whole, pages as usize * BLOCK_BYTES).map_err(io::Error::other)?;
    // SAFETY: this is the mapping.
    unsafe { populate::in_small_pages(start_of(&mapping), mapping.size()) };
    Ok(mapping)
}

fn start_of(mapping: &MmapRegion<()>) -> NonNull<u8> {
    NonNull::new(mapping.as_ptr()).expect("mmap never returns page zero")
}

/// For each page, whether the file holds anything there.
fn filled(file: &File, pages: usize) -> io::Result<Vec<bool>> {
    let mut filled = vec![false; pages];
    let mut from = 0;
    loop {
        let start = match seek(file, SeekFrom::Data(from)) {
            Ok(start) => start,
            // Only holes up to the end.
            Err(Errno::NXIO) => return Ok(filled),
            Err(error) => return Err(error.into()),
        };
        from = seek(file, SeekFrom::Hole(start))?;
        filled[(start / BLOCK) as usize..from.div_ceil(BLOCK) as usize].fill(true);
    }
}

/// Memory that a file in host memory takes.
pub(super) fn resident(metadata: io::Result<fs::Metadata>) -> u64 {
    metadata.map_or(0, |metadata| metadata.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::populate::Small;

    fn read(pages: &Pages, page: u32) -> [u8; BLOCK_BYTES] {
        let mut bytes = [0xff; BLOCK_BYTES];
        pages.read(page, &mut bytes);
        bytes
    }

    #[test]
    fn zeroes_take_no_memory() {
        // Only in memory does a file take just the pages that were written.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut pages = Pages::create(folder.path(), 4).unwrap();
        let mut resident = |page: u32, fill: u8| {
            pages.write(page, &[fill; BLOCK_BYTES]).unwrap();
            assert_eq!(read(&pages, page), [fill; BLOCK_BYTES]);
            pages.resident_bytes() / BLOCK
        };
        assert_eq!([resident(0, 0), resident(1, 7), resident(2, 8), resident(1, 0)], [0, 1, 2, 1]);
        drop(pages);
        let mut pages = Pages::open(folder.path(), 4).unwrap();
        assert_eq!((read(&pages, 1), read(&pages, 2)), (ZEROES, [8; BLOCK_BYTES]));
        pages.write(2, &ZEROES).unwrap();
        assert_eq!(pages.resident_bytes(), 0, "whoever opens it knows what is a hole");
        assert!(Pages::open(folder.path(), 5).is_none());
        pages.write(0, &[9; BLOCK_BYTES]).unwrap();
        pages.give_back_all().unwrap();
        pages.write(3, &[6; BLOCK_BYTES]).unwrap();
        assert_eq!((read(&pages, 0), read(&pages, 3)), (ZEROES, [6; BLOCK_BYTES]));
        assert_eq!(pages.resident_bytes() / BLOCK, 1, "a look takes no memory");
    }

    #[test]
    fn full_file_system_costs_only_a_copy() {
        let Some(small) = Small::new("full_file_system_costs_only_a_copy", "size=8k") else { return };
        let mut pages = Pages::create(small.path(), 4).unwrap();
        (0..2).for_each(|page| pages.write(page, &[7; BLOCK_BYTES]).unwrap());
        for _ in 0..2 {
            let error = pages.write(2, &[8; BLOCK_BYTES]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
            assert_eq!((pages.is_filled(2), pages.filled_pages(), read(&pages, 2)), (false, 2, ZEROES));
        }
        pages.give_back(0).unwrap();
        pages.write(2, &[8; BLOCK_BYTES]).unwrap();
        assert_eq!(read(&pages, 2), [8; BLOCK_BYTES]);
    }

    #[test]
    fn the_ledger_has_its_room_from_the_start() {
        use crate::tag::Tagger;
        let Some(small) = Small::new("the_ledger_has_its_room_from_the_start", "size=16k") else { return };
        let folder = small.path();
        // 26 entries: two pages of the four.
        let set = super::super::BootSet::open(folder, 68 << 10, Tagger::new(b"a key like noise")).unwrap();
        fs::write(folder.join("other"), [1; 2 * BLOCK_BYTES]).unwrap();
        assert!(fs::write(folder.join("more"), [1; 1]).is_err(), "nothing is left");
        let disk = crate::block::DiskId(0);
        set.begin();
        for block in 0..26 {
            crate::warm::RequestObserver::read_from_image(&set, disk, block, Some(&ZEROES));
        }
        assert_eq!(set.plan().disks[&disk].held, 26);
    }

    #[test]
    fn limit_holds_with_huge_pages() {
        use crate::tag::Tagger;
        const LIMIT: u64 = 8 << 20;
        let test = "limit_holds_with_huge_pages";
        let Some(huge) = Small::new(test, "huge=always,size=64M") else { return };
        fs::write(huge.path().join("one"), [1; 1]).unwrap();
        assert!(resident(fs::metadata(huge.path().join("one"))) > BLOCK, "there they are filled");
        let disk = crate::block::DiskId(0);
        let open = || super::super::BootSet::open(huge.path(), LIMIT, Tagger::new(b"a key like noise")).unwrap();
        let set = open();
        set.begin();
        // Every second one is a hole.
        for block in 0..2000 {
            let bytes = [if block % 2 == 0 { 7 } else { 0 }; BLOCK_BYTES];
            crate::warm::RequestObserver::read_from_image(&set, disk, block, Some(&bytes));
        }
        let held_bytes = set.resident_bytes();
        assert!((1000 * BLOCK..1300 * BLOCK).contains(&held_bytes), "{held_bytes}");
        (2000..4000).for_each(|block| {
            crate::warm::RequestObserver::read_from_image(&set, disk, block, Some(&[7; BLOCK_BYTES]));
        });
        assert!(set.plan().disks[&disk].no_room > 0, "as much as the limit allows");
        assert!((LIMIT * 8 / 10..=LIMIT).contains(&set.resident_bytes()), "{}", set.resident_bytes());
        set.ready();
        let held = set.plan().disks[&disk].held;
        drop(set);
        assert_eq!(open().plan().disks[&disk].held, held, "another keeper finds them");
    }
}
