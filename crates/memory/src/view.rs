//! RamView: a read-only mapping of a RAM file.
//!
//! Mind the holes: reading a page of tmpfs that holds no memory makes it hold a page of zeroes, which counts against the
//! budget. Look only at pages that something (ledger, `resident_ranges`) names. And mind a tmpfs that is full: such a read
//! ends in SIGBUS.

use std::fs::File;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::PAGE_BYTES;

const WORDS_PER_PAGE: usize = PAGE_BYTES as usize / size_of::<u64>();

/// The RAM as it is now. The mapping stays valid when the file is removed.
#[derive(Debug)]
pub struct RamView {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is read-only and belongs to no thread; it is unmapped once, by `drop`.
unsafe impl Send for RamView {}
// SAFETY: as above: nothing is ever written through it.
unsafe impl Sync for RamView {}

impl RamView {
    pub(crate) fn of(file: &File, bytes: u64) -> Result<Self, Errno> {
        let bytes = usize::try_from(bytes).map_err(|_| Errno::OVERFLOW)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
        let view = Self { start: NonNull::new(start.cast()).expect("mmap never succeeds with a null address"), bytes };
        // A core dump of the keeper must not hold the guest's memory.
        // SAFETY: the range is the mapping just made, and the advice changes nothing but what a dump holds.
        unsafe { madvise(start, bytes, Advice::LinuxDontDump)? };
        Ok(view)
    }

    pub fn pages(&self) -> u64 {
        self.bytes as u64 / PAGE_BYTES
    }

    /// Copies a page out while others may be writing to it. The copy may mix old and new words. There is no view of a page in
    /// place: what is looked at twice there may be two things.
    pub fn copy_page(&self, page: u64, copy: &mut [u8; PAGE_BYTES as usize]) {
        let words: *const u64 = self.page_pointer(page).cast();
        for (position, target) in copy.chunks_exact_mut(size_of::<u64>()).enumerate().take(WORDS_PER_PAGE) {
            // SAFETY: `page_pointer` checks the bounds of the page and gives a page-aligned address; the volatile read makes
            // no assumption about who else writes.
            let word = unsafe { words.add(position).read_volatile() };
            target.copy_from_slice(&word.to_ne_bytes());
        }
    }

    fn page_pointer(&self, page: u64) -> *const u8 {
        assert!(page < self.pages(), "page {page} of {}", self.pages());
        // SAFETY: the page lies within the mapping, as just checked.
        unsafe { self.start.as_ptr().add((page * PAGE_BYTES) as usize) }
    }
}

impl Drop for RamView {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `of`, with this length, and no reference into it outlives `self`.
        if let Err(errno) = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) } {
            debug_assert!(false, "unmapping a mapping of our own: {errno}");
        }
    }
}
