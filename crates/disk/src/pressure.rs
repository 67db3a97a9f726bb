//! Pressure: whether this disk makes its guest wait. For other users of the same device, such as the writer of a crash dump.
//!
//! operation ends -> how long it took, compared with what its kind usually takes -> worst of the last 100 ms
//!
//! Written by the disk's thread alone and read without locks: a reader may see the figures of two moments, which is
//! near enough for a decision that is made again a few milliseconds later. Only operations that went to the image count;
//! what waits for the guest's own limits is nobody's fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// "Recently": at least this long ago, and at most twice as long.
pub(crate) const RECENT: Duration = Duration::from_millis(100);
/// Longer operations are compared with each other and not with these: a seek is not a stream. Nor is a flush either.
const SHORT_BYTES: u64 = 64 << 10;
/// The usual time falls by a quarter of the difference when an operation is faster, and rises by 1/512 of it when one
/// is slower: thousands of slow ones are the disk as it is, hundreds are somebody in its way.
const FALL: u64 = 4;
const RISE: u64 = 512;

/// State of a disk at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Operations that the image has not ended yet.
    pub in_flight: u64,
    /// Time since the image ended an operation, or since the server started.
    pub quiet: Duration,
    /// Time of the longest recent operation. Zero if there was none.
    pub latency: Duration,
    /// Time of the worst recent operation in percent of the usual: 300 is three times as long. 0 if there was none.
    pub slowdown_pct: u64,
}

/// The view of a disk from outside. Clones see the same disk.
#[derive(Clone)]
pub struct Pressure(Arc<Gauge>);

struct Gauge {
    /// Times below are nanoseconds from here.
    epoch: Instant,
    in_flight: AtomicU64,
    last_end: AtomicU64,
    /// When the window in `now` began.
    began: AtomicU64,
    now: Worst,
    before: Worst,
    /// Usual time of an operation: without data, short, long.
    usual: [AtomicU64; 3],
}

/// The worst figures of a window.
#[derive(Default)]
struct Worst {
    latency: AtomicU64,
    slowdown_pct: AtomicU64,
}

impl Worst {
    fn set(&self, (latency, slowdown_pct): (u64, u64)) {
        self.latency.store(latency, Relaxed);
        self.slowdown_pct.store(slowdown_pct, Relaxed);
    }

    fn get(&self) -> (u64, u64) {
        (self.latency.load(Relaxed), self.slowdown_pct.load(Relaxed))
    }
}

impl Pressure {
    pub(crate) fn new(now: Instant) -> Self {
        let zero = AtomicU64::default;
        let gauge = Gauge {
            epoch: now,
            in_flight: zero(),
            last_end: zero(),
            began: zero(),
            now: Worst::default(),
            before: Worst::default(),
            usual: std::array::from_fn(|_| zero()),
        };
        Self(Arc::new(gauge))
    }

    /// The disk's state now. Cheap: a handful of loads.
    pub fn read(&self, now: Instant) -> Reading {
        let gauge = &*self.0;
        let now_ns = gauge.since_epoch(now);
        let windows = now_ns.saturating_sub(gauge.began.load(Relaxed)) / RECENT.as_nanos() as u64;
        let (latency, slowdown_pct) = match windows {
            0 => worse(gauge.now.get(), gauge.before.get()),
            1 => gauge.now.get(),
            _ => (0, 0),
        };
        Reading {
            in_flight: gauge.in_flight.load(Relaxed),
            quiet: Duration::from_nanos(now_ns.saturating_sub(gauge.last_end.load(Relaxed))),
            latency: Duration::from_nanos(latency),
            slowdown_pct,
        }
    }

    /// Sets the number of operations that the image has not ended.
    pub(crate) fn set_in_flight(&self, operations: u64) {
        self.0.in_flight.store(operations, Relaxed);
    }

    /// The image has ended an operation that it was given at `begun`; 0 bytes: one without data.
    pub(crate) fn ended(&self, begun: Instant, now: Instant, bytes: u64) {
        let gauge = &*self.0;
        let now_ns = gauge.since_epoch(now);
        let latency = now.saturating_duration_since(begun).as_nanos() as u64;
        let [flush, short, long] = &gauge.usual;
        let usual = match bytes {
            0 => flush,
            1..=SHORT_BYTES => short,
            _ => long,
        };
        let seen = (latency, compare(usual, latency));
        match now_ns.saturating_sub(gauge.began.load(Relaxed)) / RECENT.as_nanos() as u64 {
            0 => gauge.now.set(worse(gauge.now.get(), seen)),
            windows => {
                gauge.before.set(if windows == 1 { gauge.now.get() } else { (0, 0) });
                gauge.now.set(seen);
                gauge.began.store(now_ns, Relaxed);
            }
        }
        gauge.last_end.store(now_ns, Relaxed);
    }
}

impl Gauge {
    fn since_epoch(&self, now: Instant) -> u64 {
        // 64 bits of nanoseconds are 584 years.
        now.saturating_duration_since(self.epoch).as_nanos() as u64
    }
}

fn worse(a: (u64, u64), b: (u64, u64)) -> (u64, u64) {
    (a.0.max(b.0), a.1.max(b.1))
}

/// Percent of what is usual; what is usual learns from it. The first operation is as usual.
fn compare(usual: &AtomicU64, latency: u64) -> u64 {
    let before = match usual.load(Relaxed) {
        0 => latency.max(1),
        before => before,
    };
    let after = if latency < before { before - (before - latency) / FALL } else { before + (latency - before) / RISE };
    usual.store(after.max(1), Relaxed);
    latency.saturating_mul(100) / before
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A disk and a clock; operations of 4 KiB, one after the other.
    struct Rig {
        pressure: Pressure,
        now: Instant,
    }

    impl Rig {
        fn new() -> Self {
            let now = Instant::now();
            Self { pressure: Pressure::new(now), now }
        }

        fn operations(&mut self, count: usize, took: Duration, bytes: u64) {
            for _ in 0..count {
                let begun = self.now;
                self.now += took;
                self.pressure.ended(begun, self.now, bytes);
            }
        }

        fn read(&self) -> Reading {
            self.pressure.read(self.now)
        }
    }

    #[test]
    fn an_idle_disk_is_not_under_pressure() {
        let mut rig = Rig::new();
        rig.now += 5000 * MS;
        assert_eq!(rig.read(), Reading { quiet: 5000 * MS, ..Reading::default() });
        rig.pressure.set_in_flight(3);
        assert_eq!(rig.read().in_flight, 3);
    }

    #[test]
    fn only_a_disk_that_becomes_slower_counts() {
        let mut rig = Rig::new();
        rig.operations(100, 5 * MS, 4096);
        assert_eq!((rig.read().latency, rig.read().slowdown_pct), (5 * MS, 100));
        rig.operations(1, 20 * MS, 4096);
        assert_eq!((rig.read().latency, rig.read().slowdown_pct, rig.read().quiet), (20 * MS, 400, Duration::ZERO));
        // It is remembered for 100 ms at least, and no longer than 200.
        rig.operations(20, 5 * MS, 4096);
        assert_eq!(rig.read().latency, 20 * MS);
        rig.operations(22, 5 * MS, 4096);
        assert_eq!(rig.read().latency, 5 * MS);
        assert!((95..=105).contains(&rig.read().slowdown_pct), "{:?}", rig.read());
    }

    #[test]
    fn usual_time_falls_fast_and_rises_slowly() {
        let mut rig = Rig::new();
        // The first operation came at a bad moment.
        rig.operations(1, 500 * MS, 4096);
        rig.operations(40, MS, 4096);
        rig.now += 1000 * MS;
        rig.operations(10, 4 * MS, 4096);
        assert!(rig.read().slowdown_pct > 380, "{:?}", rig.read());
        rig.operations(5000, 4 * MS, 4096);
        assert!(rig.read().slowdown_pct <= 101, "that is how the disk is now: {:?}", rig.read());
    }

    #[test]
    fn operations_are_compared_with_their_like() {
        let mut rig = Rig::new();
        rig.operations(50, MS, 4096);
        rig.operations(2, 12 * MS, 0);
        rig.operations(50, 15 * MS, 1 << 20);
        rig.operations(50, MS, 4096);
        assert_eq!(rig.read().slowdown_pct, 100);
        assert_eq!(rig.read().latency, 15 * MS, "of the window before");
    }

    #[test]
    fn old_figures_fade_without_operations() {
        let mut rig = Rig::new();
        rig.operations(1, 30 * MS, 4096);
        rig.now += 250 * MS;
        assert_eq!(rig.read(), Reading { quiet: 250 * MS, ..Reading::default() });
    }
}
