//! How many machines run at once: a machine under emulation keeps a processor busy, and more of them than processors only
//! make each other's waits longer. `HEARTH_VM_SLOTS` changes the number. `make test` runs each test as a process, and limits
//! those itself; this limit is for `cargo test`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::wait::Watched;

/// The right to run one machine; given back when dropped.
pub struct Slot {
    free: Arc<Watched<usize>>,
}

/// Waits for a slot of this process.
pub fn take() -> Slot {
    static SLOTS: OnceLock<Arc<Watched<usize>>> = OnceLock::new();
    take_from(SLOTS.get_or_init(|| Arc::new(Watched::new(count()))))
}

fn count() -> usize {
    let asked = std::env::var("HEARTH_VM_SLOTS").ok().and_then(|text| text.parse().ok());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    asked.unwrap_or(processors).max(1)
}

fn take_from(free: &Arc<Watched<usize>>) -> Slot {
    // Every holder gives its slot back, also when its test fails: there is no end to wait for.
    let forever = Duration::from_secs(u32::MAX.into());
    free.wait(forever, |free| {
        *free = free.checked_sub(1)?;
        Some(())
    });
    Slot { free: Arc::clone(free) }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.free.change(|free| *free += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn never_more_than_the_slots_and_all_get_their_turn() {
        let free = Arc::new(Watched::new(2));
        let (inside, most, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let _slot = take_from(&free);
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        assert!(most.into_inner() <= 2);
        assert_eq!((done.into_inner(), *free.lock()), (8, 2));
    }
}
