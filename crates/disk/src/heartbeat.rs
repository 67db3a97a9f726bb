//! Heartbeat: how long a loop has been at one piece of work, and the longest it ever was. For a watchdog.
//!
//! begin -> work -> end -> the loop waits for the next piece, for as long as it likes

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The heartbeat of one loop. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Heartbeat {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Nanoseconds since `EPOCH`, plus one, at which the work began; 0: the loop waits.
    since: AtomicU64,
    /// Nanoseconds that the longest piece of work took.
    longest: AtomicU64,
}

impl Heartbeat {
    /// A piece of work begins.
    pub fn begin(&self) {
        self.shared.since.store(EPOCH.elapsed().as_nanos() as u64 + 1, Relaxed);
    }

    /// The piece of work has ended.
    pub fn end(&self) {
        self.shared.longest.fetch_max(self.busy_for().as_nanos() as u64, Relaxed);
        self.shared.since.store(0, Relaxed);
    }

    /// How long the loop has been at its piece of work. Zero while it waits.
    pub fn busy_for(&self) -> Duration {
        match self.shared.since.load(Relaxed) {
            0 => Duration::ZERO,
            since => EPOCH.elapsed().saturating_sub(Duration::from_nanos(since - 1)),
        }
    }

    /// How long the longest piece of work took; one that has not ended does not count yet.
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.shared.longest.load(Relaxed))
    }

    /// Whether the loop is gone: nobody else has this one.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_and_waiting_does_not() {
        let heartbeat = Heartbeat::default();
        assert_eq!((heartbeat.busy_for(), heartbeat.is_alone()), (Duration::ZERO, true));
        let of_the_loop = heartbeat.clone();
        of_the_loop.begin();
        std::thread::sleep(Duration::from_millis(20));
        assert!(heartbeat.busy_for() >= Duration::from_millis(19) && !heartbeat.is_alone());
        assert_eq!(heartbeat.longest(), Duration::ZERO);
        of_the_loop.end();
        assert_eq!(heartbeat.busy_for(), Duration::ZERO);
        of_the_loop.begin();
        of_the_loop.end();
        assert!(heartbeat.longest() >= Duration::from_millis(20));
    }
}
