//! The keeper's own I/O buffers: guest data passes through them in both directions, so that what is tagged is what is on
//! the disk, whatever the guest scribbles meanwhile.
//!
//! One anonymous mapping, page-aligned as O_DIRECT wants it, registered once with io_uring so that the kernel pins its
//! pages once and not per request. Slots are cut from it in the length that is asked for: a request of the guest is one
//! operation on the image, because a volume with a limit on operations counts them (1 MiB as 8 operations came at a third
//! of the speed on one with 200 a second). A slot is a pair of numbers that travels with the operation: the pool hands
//! its pages out once, and whoever holds it may reach their bytes. The device thread fills or empties a slot while no
//! operation uses it, the engine in between; a borrowed guard could not cross that boundary.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The longest slot. Linux asks for 1.25 MiB at most unless told otherwise; what is longer goes in several operations.
pub(crate) const SLOT_BYTES_MAX: usize = 2 << 20;
/// Shorter slots than this (in pages) are cut from the pool's low end, others from its high end: small requests that
/// come and go leave no gaps where the large ones must fit.
const LOW_END_PAGES: u16 = 32;
const PAGE_BYTES: usize = 4096;

/// A run of pages of the pool, held by one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    page: u16,
    pages: u16,
}

impl Slot {
    /// The number of bytes that fit.
    pub fn bytes(self) -> usize {
        usize::from(self.pages) * PAGE_BYTES
    }

    fn range(self) -> Range<u16> {
        self.page..self.page + self.pages
    }

    /// For tests of engines, which have a pool to themselves.
    #[cfg(test)]
    pub(crate) const fn at(page: u16, pages: u16) -> Self {
        Self { page, pages }
    }
}

/// Zeroed, page-aligned memory that O_DIRECT accepts.
pub(crate) struct Pages {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is private to its owner and lives as long as it; its bytes are reached through raw pointers only,
// whose users answer for exclusive access.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        let pages = Self { base: NonNull::new(base.cast()).expect("mmap never returns page zero"), bytes };
        // A fork would copy all pages that are pinned for the kernel: 8 MiB for each disk whenever QEMU is started.
        // SAFETY: the range is the mapping made above, and no child of a fork reads it.
        unsafe { madvise(base, bytes, Advice::LinuxDontFork)? };
        Ok(pages)
    }

    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this size, is initialised (zero), and its owner lends it out here alone.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody uses it past its owner's end.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// All buffers of one disk; shared by its device thread and its engine.
pub struct BufferPool {
    mapping: Pages,
    pages: u16,
    free: Mutex<FreePages>,
}

impl BufferPool {
    /// A pool of `bytes` bytes, at most 255 MiB.
    pub fn new(bytes: usize) -> io::Result<Arc<Self>> {
        let pages = u16::try_from(bytes / PAGE_BYTES).ok().filter(|&pages| pages > 0);
        let Some(pages) = pages else {
            let text = format!("a buffer pool has 1 to {} pages; {bytes} bytes are not possible", u16::MAX);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        };
        let mapping = Pages::new(usize::from(pages) * PAGE_BYTES)?;
        // SAFETY: the range is the mapping made above. Huge pages are a wish: fewer segments a request, no matter if not.
        let _ = unsafe { madvise(mapping.base.as_ptr().cast(), mapping.bytes, Advice::LinuxHugepage) };
        Ok(Arc::new(Self { mapping, pages, free: Mutex::new(FreePages::all(pages)) }))
    }

    /// Takes a free slot for `bytes` bytes (or for as many as a slot holds at most). `None` if there is none: then the
    /// caller waits for a completion.
    pub fn take(&self, bytes: usize) -> Option<Slot> {
        let pages = bytes.min(self.slot_bytes_max()).div_ceil(PAGE_BYTES).max(1) as u16;
        self.free().take(pages)
    }

    /// The longest slot: one that the whole pool, empty, can always give.
    pub(crate) fn slot_bytes_max(&self) -> usize {
        SLOT_BYTES_MAX.min(self.mapping.bytes)
    }

    /// Ends the holder's use of the slot. No operation may be in flight on it.
    pub fn give_back(&self, slot: Slot) {
        self.check(slot);
        self.free().give_back(slot.range());
    }

    /// The bytes of a slot.
    ///
    /// # Safety
    /// The caller holds the slot (took it and did not give it back), no operation is in flight on it, and no other
    /// reference to its bytes is alive.
    #[expect(clippy::mut_from_ref, reason = "the slot is the proof of exclusive use, see Safety")]
    pub unsafe fn bytes_mut(&self, slot: Slot) -> &mut [u8] {
        // SAFETY: the slot lies in the mapping, which is initialised (anonymous memory is zero); exclusivity is the
        // caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(slot).as_ptr(), slot.bytes()) }
    }

    /// First byte of a slot, page-aligned; for engines, which pass it to the kernel.
    pub fn pointer(&self, slot: Slot) -> NonNull<u8> {
        self.check(slot);
        // SAFETY: the slot was just checked to lie in the mapping.
        unsafe { self.mapping.base.add(usize::from(slot.page) * PAGE_BYTES) }
    }

    /// The pool as one io_uring buffer: registered whole, any slot is then an address in buffer 0.
    pub(crate) fn as_iovecs(&self) -> [libc::iovec; 1] {
        [libc::iovec { iov_base: self.mapping.base.as_ptr().cast(), iov_len: self.mapping.bytes }]
    }

    fn check(&self, slot: Slot) {
        let inside = slot.page.checked_add(slot.pages).is_some_and(|end| end <= self.pages);
        assert!(inside, "{slot:?} is not of this pool of {} pages", self.pages);
    }

    fn free(&self) -> MutexGuard<'_, FreePages> {
        // A list of numbers is whole after any panic elsewhere.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Free runs of pages, ascending, none touching the next. A plain list: there is one more than operations in flight at
/// most.
struct FreePages(Vec<Range<u16>>);

impl FreePages {
    fn all(pages: u16) -> Self {
        Self(std::iter::once(0..pages).collect())
    }

    fn take(&mut self, pages: u16) -> Option<Slot> {
        let fits = |run: &Range<u16>| run.end - run.start >= pages;
        let is_low = pages < LOW_END_PAGES;
        let at = if is_low { self.0.iter().position(fits) } else { self.0.iter().rposition(fits) }?;
        let run = &mut self.0[at];
        let page = if is_low { run.start } else { run.end - pages };
        if is_low {
            run.start += pages;
        } else {
            run.end = page;
        }
        if run.start == run.end {
            self.0.remove(at);
        }
        Some(Slot { page, pages })
    }

    fn give_back(&mut self, pages: Range<u16>) {
        let at = self.0.partition_point(|run| run.start < pages.start);
        let (before, after) = (at.checked_sub(1).map(|before| self.0[before].end), self.0.get(at).map(|run| run.start));
        let apart = before.is_none_or(|end| end <= pages.start) && after.is_none_or(|start| pages.end <= start);
        assert!(apart, "pages {pages:?} were given back twice");
        match (before == Some(pages.start), after == Some(pages.end)) {
            (true, true) => self.0[at - 1].end = self.0.remove(at).end,
            (true, false) => self.0[at - 1].end = pages.end,
            (false, true) => self.0[at].start = pages.start,
            (false, false) => self.0.insert(at, pages),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::Noise;

    const PAGE: usize = PAGE_BYTES;

    #[test]
    fn fork_leaves_the_pool_out() {
        let pool = BufferPool::new(8 << 20).unwrap();
        let start = format!("{:x}-", pool.mapping.pointer().as_ptr() as usize);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let flags = maps.lines().skip_while(|line| !line.starts_with(&start)).find(|line| line.starts_with("VmFlags:"));
        assert!(flags.is_some_and(|flags| flags.contains(" dc")), "{flags:?}");
    }

    #[test]
    fn slots_are_aligned_apart_and_finite() {
        let pool = BufferPool::new(4 * PAGE).unwrap();
        let slots = [pool.take(PAGE).unwrap(), pool.take(1).unwrap(), pool.take(PAGE + 1).unwrap()];
        assert_eq!(slots.map(Slot::bytes), [PAGE, PAGE, 2 * PAGE]);
        for (mark, &slot) in (1..).zip(&slots) {
            assert_eq!(pool.pointer(slot).as_ptr() as usize % PAGE, 0);
            // SAFETY: taken above, nothing in flight, one reference at a time.
            unsafe { pool.bytes_mut(slot) }.fill(mark);
        }
        for (mark, &slot) in (1..).zip(&slots) {
            // SAFETY: as above.
            assert!(unsafe { pool.bytes_mut(slot) }.iter().all(|&byte| byte == mark));
        }
        assert_eq!(pool.take(1), None);
        pool.give_back(slots[1]);
        assert_eq!(pool.take(2 * PAGE), None, "one page is free");
        assert_eq!(pool.take(1), Some(slots[1]));
    }

    #[test]
    fn small_slots_leave_room_for_large_ones() {
        let pool = BufferPool::new(8 << 20).unwrap();
        let small: Vec<Slot> = (0..128).map(|_| pool.take(PAGE).unwrap()).collect();
        let large: Vec<Slot> = (0..6).map(|_| pool.take(5 << 18).unwrap()).collect();
        assert_eq!(pool.take(5 << 18), None);
        small.iter().step_by(2).chain(&large).for_each(|&slot| pool.give_back(slot));
        assert_eq!((0..6).filter_map(|_| pool.take(5 << 18)).count(), 6, "gaps between small ones do not matter");
    }

    #[test]
    fn whole_pool_is_free_in_the_end() {
        let pool = BufferPool::new(SLOT_BYTES_MAX).unwrap();
        let mut noise = Noise(1);
        let mut held: Vec<Slot> = Vec::new();
        let mut owners = vec![false; SLOT_BYTES_MAX / PAGE];
        for _ in 0..20_000 {
            if let Some(slot) = (noise.below(2) == 0).then(|| pool.take(1 + noise.below(300_000))).flatten() {
                let taken = slot.range().map(usize::from).all(|page| !std::mem::replace(&mut owners[page], true));
                assert!(taken, "{slot:?} was not free");
                held.push(slot);
            } else if !held.is_empty() {
                let slot = held.swap_remove(noise.below(held.len()));
                slot.range().for_each(|page| owners[usize::from(page)] = false);
                pool.give_back(slot);
            }
        }
        held.into_iter().for_each(|slot| pool.give_back(slot));
        assert_eq!(pool.take(usize::MAX).map(Slot::bytes), Some(SLOT_BYTES_MAX));
    }

    #[test]
    #[should_panic(expected = "were given back twice")]
    fn a_slot_is_given_back_once() {
        let pool = BufferPool::new(8 * PAGE).unwrap();
        let slot = pool.take(2 * PAGE).unwrap();
        pool.give_back(slot);
        pool.give_back(slot);
    }

    #[test]
    #[should_panic(expected = "is not of this pool of 3 pages")]
    fn a_foreign_slot_is_refused() {
        BufferPool::new(3 * PAGE).unwrap().give_back(Slot::at(2, 2));
    }

    #[test]
    fn impossible_pools_are_refused() {
        assert!(BufferPool::new(0).is_err());
        assert!(BufferPool::new(1 << 28).is_err());
    }
}
