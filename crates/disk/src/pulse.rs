//! Pulse: how long a loop has been at one piece of work, for whoever watches over it.
//!
//! begin -> work -> end -> the loop waits for the next piece, for as long as it likes

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Of one loop. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Pulse {
    /// Milliseconds since `EPOCH`, and one more, at which the work began; 0: the loop waits.
    since: Arc<AtomicU64>,
}

impl Pulse {
    pub fn begin(&self) {
        self.since.store(EPOCH.elapsed().as_millis() as u64 + 1, Relaxed);
    }

    pub fn end(&self) {
        self.since.store(0, Relaxed);
    }

    /// Zero for a loop that waits.
    pub fn busy_for(&self) -> Duration {
        match self.since.load(Relaxed) {
            0 => Duration::ZERO,
            since => EPOCH.elapsed().saturating_sub(Duration::from_millis(since - 1)),
        }
    }

    /// The loop is gone: nobody else has this pulse.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.since) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_and_waiting_does_not() {
        let pulse = Pulse::default();
        assert_eq!((pulse.busy_for(), pulse.is_alone()), (Duration::ZERO, true));
        let of_the_loop = pulse.clone();
        of_the_loop.begin();
        std::thread::sleep(Duration::from_millis(20));
        assert!(pulse.busy_for() >= Duration::from_millis(19) && !pulse.is_alone());
        of_the_loop.end();
        assert_eq!(pulse.busy_for(), Duration::ZERO);
    }
}
