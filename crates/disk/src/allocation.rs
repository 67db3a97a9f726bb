//! Peak of the memory that a thread has allocated: tests of code that reads untrusted bytes set a ceiling for it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Upper limit for one allocation on behalf of a guest, of QEMU or of a partition table: none needs more.
pub(crate) const FOREIGN_BYTES_MAX: usize = 64 << 10;

thread_local! {
    /// Allocated and not given back by this thread, and the most of it since it was last asked.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(bytes: isize) {
    // A thread that ends has no number any more, and nobody asks for it.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: all is left to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // Both may be there at the same time.
        count(bytes as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// Runs `work`. Fails if this thread held more than `bytes_max` of what was allocated meanwhile at any moment.
#[track_caller]
pub(crate) fn with_ceiling<T>(bytes_max: usize, work: impl FnOnce() -> T) -> T {
    let before = HELD.with(|held| {
        let (now, _) = held.get();
        held.set((now, now));
        now
    });
    let result = work();
    let most = HELD.with(|held| held.get().1 - before);
    assert!(most <= bytes_max as isize, "{most} bytes were allocated where {bytes_max} are enough");
    result
}

#[test]
fn freed_allocation_above_the_ceiling_is_seen() {
    let hold = |bytes: usize| std::panic::catch_unwind(|| with_ceiling(1000, || drop(Vec::<u8>::with_capacity(bytes))));
    assert!(hold(1000).is_ok());
    assert!(hold(1001).is_err());
    assert!(hold(1000).is_ok(), "it counts anew each time");
}
