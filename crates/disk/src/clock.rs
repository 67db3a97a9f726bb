//! Clock: the time by which a disk measures limits and waits.
//!
//! It is the host's. A simulation moves one by hand instead, so that the same seed is the same run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The host's clock, or one that stands still unless it is moved. Clones are the same clock.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<ByHand>>);

struct ByHand {
    start: Instant,
    passed_ns: AtomicU64,
}

impl Clock {
    /// A clock that stands still until `advance` moves it.
    pub fn by_hand() -> Self {
        Self(Some(Arc::new(ByHand { start: Instant::now(), passed_ns: AtomicU64::new(0) })))
    }

    /// The time now.
    pub fn now(&self) -> Instant {
        match &self.0 {
            None => Instant::now(),
            Some(by_hand) => by_hand.start + Duration::from_nanos(by_hand.passed_ns.load(Relaxed)),
        }
    }

    /// Moves a clock made by `by_hand`. The host's clock ignores it.
    pub fn advance(&self, time: Duration) {
        if let Some(by_hand) = &self.0 {
            by_hand.passed_ns.fetch_add(time.as_nanos() as u64, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_clock_stands_still_until_moved() {
        let clock = Clock::by_hand();
        let (same, start) = (clock.clone(), clock.now());
        assert_eq!(same.now(), start);
        clock.advance(Duration::from_millis(3));
        assert_eq!(same.now() - start, Duration::from_millis(3));
    }
}
