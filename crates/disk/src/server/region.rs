//! A region of guest memory: a range of guest addresses, mapped from a file.
//!
//! A whole page is written through the file the first time, and through the mapping from then on. The mapping takes a fault for
//! the first touch of a page, and memory that is filled with zeroes before it is filled with the page: in the middle 2.9 us
//! while a guest boots under emulation, against 2.2 us. A boot mostly reads to fresh pages.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use super::foreign::MemoryFile;
use super::sigbus::Guard;
use super::wire::RegionSpec;
use crate::block::BLOCK_BYTES;

/// Which file, whatever its name: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
}

pub(super) struct Region {
    pub(super) spec: RegionSpec,
    /// Goes before the mapping does.
    guard: Guard,
    pub(super) mapping: MmapRegion<()>,
    pub(super) file: FileIdentity,
    /// A bit for each page: has all of it been written here before? Memory that takes none before it is touched: a region
    /// without end is a few pages of a sparse file.
    written: MmapRegion<()>,
    /// The file can be written to as a file, as far as is known.
    by_file: Cell<bool>,
}

impl Region {
    /// The file is as long as the region.
    pub(super) fn map(spec: RegionSpec, file: MemoryFile, identity: FileIdentity) -> io::Result<Self> {
        let file_offset = FileOffset::from_arc(Arc::new(File::from(file)), spec.file_offset);
        let mapping = MmapRegion::from_file(file_offset, spec.bytes as usize).map_err(io::Error::other)?;
        let guard = Guard::new(mapping.as_ptr(), mapping.size())?;
        let pages = (spec.bytes as usize).div_ceil(BLOCK_BYTES);
        let written = MmapRegion::new(pages.div_ceil(64) * size_of::<u64>()).map_err(io::Error::other)?;
        Ok(Self { spec, guard, mapping, file: identity, written, by_file: Cell::new(true) })
    }

    pub(super) fn end(&self) -> u64 {
        self.spec.guest + self.spec.bytes
    }

    /// Was something touched that was not there? What was read is void, and what was written nobody will see.
    pub(super) fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }

    /// Where in the file a part of the region lies.
    pub(super) fn in_file(&self, offset: usize, bytes: usize) -> Range<u64> {
        let start = self.spec.file_offset + offset as u64;
        start..start + bytes as u64
    }

    /// Through the file, without taking memory: through the mapping a hole would become a page.
    pub(super) fn read_file(&self, offset: usize, out: &mut [u8]) {
        let file = self.mapping.file_offset().map(|known| known.file());
        let read = file.map(|file| file.read_exact_at(out, self.in_file(offset, out.len()).start));
        if !matches!(read, Some(Ok(()))) {
            // The file is as long as the region (checked), so this is the host's fault; a driver copes with zeroes.
            out.fill(0);
        }
    }

    /// The range lies in the region.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        if self.is_first_time(offset, bytes.len()) && self.write_file(offset, bytes) {
            return;
        }
        let slice = self.mapping.get_slice(offset, bytes.len()).expect("the range was cut to the region");
        slice.copy_from(bytes);
    }

    /// Whether these are whole pages that were not written before.
    fn is_first_time(&self, offset: usize, bytes: usize) -> bool {
        if !self.by_file.get() || bytes == 0 || !(offset | bytes).is_multiple_of(BLOCK_BYTES) {
            return false;
        }
        let pages = offset / BLOCK_BYTES..(offset + bytes) / BLOCK_BYTES;
        pages.fold(true, |first, page| {
            let (word, bit) = (self.written_word(page / 64), 1 << (page % 64));
            let before = word.load(Ordering::Relaxed);
            word.store(before | bit, Ordering::Relaxed);
            first && before & bit == 0
        })
    }

    fn written_word(&self, word: usize) -> &AtomicU64 {
        self.written.get_atomic_ref(word * size_of::<u64>()).expect("there is a bit for each page of the region")
    }

    /// False: a file that cannot be written to like that, as those of huge pages cannot.
    fn write_file(&self, offset: usize, bytes: &[u8]) -> bool {
        let start = self.in_file(offset, bytes.len()).start;
        let file = self.mapping.file_offset().map(|known| known.file());
        let written = file.is_some_and(|file| file.write_all_at(bytes, start).is_ok());
        self.by_file.set(written);
        written
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;
    use crate::server::foreign::ForeignFd;

    const PAGES: usize = 4;
    /// The region begins behind the first page of its file.
    const BEFORE: usize = BLOCK_BYTES;

    fn region() -> (Region, File) {
        let file: File = memfd_create("region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap().into();
        file.set_len((BEFORE + PAGES * BLOCK_BYTES) as u64).unwrap();
        let bytes = (PAGES * BLOCK_BYTES) as u64;
        let spec = RegionSpec { guest: 0x10_0000, bytes, user: 0, file_offset: BEFORE as u64 };
        let region = Region::map(
            spec,
            ForeignFd::from(std::os::fd::OwnedFd::from(file.try_clone().unwrap())).guest_memory().unwrap(),
            FileIdentity { device: 0, inode: 0 },
        );
        (region.unwrap(), file)
    }

    /// Writes, and looks at what both ways see of the whole region.
    #[track_caller]
    fn check(region: &Region, file: &File, model: &mut [u8], offset: usize, bytes: &[u8]) {
        region.write(offset, bytes);
        model[offset..offset + bytes.len()].copy_from_slice(bytes);
        let (mut mapped, mut read) = (vec![0; model.len()], vec![0; model.len()]);
        region.mapping.get_slice(0, model.len()).unwrap().copy_to(&mut mapped);
        file.read_exact_at(&mut read, BEFORE as u64).unwrap();
        assert!(mapped == *model && read == *model, "after {} bytes at {offset}", bytes.len());
    }

    #[test]
    fn file_and_mapping_are_the_same_memory() {
        let (region, file) = region();
        let mut model = vec![0; PAGES * BLOCK_BYTES];
        for (fill, (offset, bytes)) in (1..).zip([
            (BLOCK_BYTES, BLOCK_BYTES),
            (BLOCK_BYTES + 512, 1024),
            (BLOCK_BYTES, BLOCK_BYTES),
            (BLOCK_BYTES, 2 * BLOCK_BYTES),
            (100, BLOCK_BYTES),
            (3 * BLOCK_BYTES, BLOCK_BYTES),
        ]) {
            check(&region, &file, &mut model, offset, &vec![fill; bytes]);
        }
        assert!(region.by_file.get());
    }

    #[test]
    fn file_writable_only_by_mapping_is_accepted() {
        let (region, file) = region();
        let mut model = vec![0; PAGES * BLOCK_BYTES];
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        for (fill, page) in [(1, 0), (2, 0), (3, 2)] {
            check(&region, &file, &mut model, page * BLOCK_BYTES, &[fill; BLOCK_BYTES]);
        }
        assert!(!region.by_file.get(), "it is asked once");
    }
}
