//! RamView: a read-only mapping of a RAM file.
//!
//! On tmpfs, reading a hole through the mapping fills it with a page of zeroes, which counts against the budget. So
//! read only pages that the ledger or `resident_ranges` names. On a full tmpfs, reading a hole ends in SIGBUS.

use std::fs::File;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::PAGE_BYTES;

const WORDS_PER_PAGE: usize = PAGE_BYTES as usize / size_of::<u64>();

/// A read-only mapping that shows the RAM as it is now. It stays valid when the file is removed.
#[derive(Debug)]
pub struct RamView {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is read-only and not tied to a thread; only `drop` unmaps it.
unsafe impl Send for RamView {}
// SAFETY: as for `Send`; nothing writes through the mapping.
unsafe impl Sync for RamView {}

impl RamView {
    /// Maps files one after the other, the first so many bytes of each.
    pub(crate) fn of(files: &[(&File, u64)]) -> Result<Self, Errno> {
        let bytes = files.iter().try_fold(0_usize, |sum, (_, bytes)| sum.checked_add(usize::try_from(*bytes).ok()?));
        let bytes = bytes.ok_or(Errno::OVERFLOW)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE)? };
        let view = Self { start: NonNull::new(start.cast()).expect("mmap never succeeds with a null address"), bytes };
        let mut at = 0;
        for (file, bytes) in files {
            let bytes = *bytes as usize;
            // SAFETY: the files' sizes add up to that of the mapping just made, in which this one takes its place.
            unsafe { mmap(start.byte_add(at), bytes, ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED, file, 0)? };
            at += bytes;
        }
        // A core dump of the keeper must not hold the guest's memory.
        // SAFETY: the range is the mapping just made, and the advice changes nothing but what a dump holds.
        unsafe { madvise(start, bytes, Advice::LinuxDontDump)? };
        Ok(view)
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.bytes as u64 / PAGE_BYTES
    }

    /// Copies a page, while other processes may write to it; the copy may mix old and new words. There is no in-place
    /// access, because two reads of one word may differ. Panics if the page is past the end.
    pub fn copy_page(&self, page: u64, copy: &mut [u8; PAGE_BYTES as usize]) {
        let words: *const u64 = self.page_pointer(page).cast();
        for (position, target) in copy.chunks_exact_mut(size_of::<u64>()).enumerate().take(WORDS_PER_PAGE) {
            // SAFETY: `page_pointer` checks the bounds of the page and gives a page-aligned address; the volatile read
            // makes no assumption about who else writes.
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
