//! Limits the number of machines that run at once. A machine under emulation keeps a processor busy, so more machines than
//! processors only make every wait longer. `HEARTH_VM_SLOTS` changes the number. `make test` runs each test as a process and has
//! its own limit; this one is for `cargo test`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::wait::Watched;

/// Permission to run one machine, returned when dropped.
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
    // Every slot is returned, even when its test fails, so this wait needs no limit.
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
    fn slots_limit_machines_and_all_get_one() {
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
