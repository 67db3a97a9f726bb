//! Rate limits of a disk, or of another writer beside it: a token bucket each for bytes and for operations.
//!
//! A bucket is kept as the moment at which its debt is paid. A request is admitted whenever there is no debt, however
//! large it is, and then adds its own price; so a request larger than any bucket passes, and pays afterwards. An idle
//! disk saves up at most 10 ms: enough to hide that callers wake late by a timer's tick, too little to be seen as a burst.

use std::time::{Duration, Instant};

/// Time whose allowance an idle bucket saves up at most.
const SAVED_NS_MAX: u64 = 10_000_000;

/// Limits of one disk; `None` means unlimited. A limit of 0 counts as 1: a disk that never answers is not a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes per second.
    pub bytes_per_second: Option<u64>,
    /// Maximum operations per second.
    pub operations_per_second: Option<u64>,
}

/// Token buckets for bytes and for operations.
#[derive(Debug)]
pub struct RateLimiter {
    /// Times below count from here.
    epoch: Instant,
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

impl RateLimiter {
    /// A limiter without debt.
    pub fn new(limits: Limits, now: Instant) -> Self {
        Self {
            epoch: now,
            bytes: limits.bytes_per_second.map(Bucket::new),
            operations: limits.operations_per_second.map(Bucket::new),
        }
    }

    /// Admits one request of `bytes` now, or returns how long to wait before asking again (then nothing is charged).
    pub fn admit(&mut self, now: Instant, bytes: u64) -> Result<(), Duration> {
        // 64 bits of nanoseconds are 584 years.
        let now_ns = now.saturating_duration_since(self.epoch).as_nanos() as u64;
        let buckets = || self.bytes.iter().chain(&self.operations);
        let wait_ns = buckets().map(|bucket| bucket.paid_ns.saturating_sub(now_ns)).max().unwrap_or(0);
        if wait_ns > 0 {
            return Err(Duration::from_nanos(wait_ns));
        }
        self.charge(now, bytes);
        Ok(())
    }

    /// Admits one request of `bytes` whatever is owed, and adds its price: later requests wait for that.
    pub(crate) fn charge(&mut self, now: Instant, bytes: u64) {
        let now_ns = now.saturating_duration_since(self.epoch).as_nanos() as u64;
        if let Some(bucket) = &mut self.bytes {
            bucket.charge(now_ns, bytes);
        }
        if let Some(bucket) = &mut self.operations {
            bucket.charge(now_ns, 1);
        }
    }

    /// Changes the limits. A debt stays and is paid at the new rate: changing back and forth between two rates
    /// admits no more than the higher one.
    pub fn set(&mut self, limits: Limits, now: Instant) {
        let now_ns = now.saturating_duration_since(self.epoch).as_nanos() as u64;
        let change = |bucket: Option<Bucket>, per_second: Option<u64>| {
            let owed = bucket.map_or(0, |bucket| bucket.owed(now_ns));
            per_second.map(|per_second| {
                let mut bucket = Bucket { paid_ns: now_ns, ..Bucket::new(per_second) };
                bucket.charge(now_ns, owed);
                bucket
            })
        };
        self.bytes = change(self.bytes.take(), limits.bytes_per_second);
        self.operations = change(self.operations.take(), limits.operations_per_second);
    }
}

#[derive(Debug)]
struct Bucket {
    per_second: u64,
    /// When the debt is paid. In the past: so much is saved up.
    paid_ns: u64,
    /// Remainder of the last division, in 1 / `per_second` nanoseconds: at 10 GB/s a request costs 400 ns, and rounding
    /// each would be a quarter of a percent.
    remainder: u64,
}

impl Bucket {
    fn new(per_second: u64) -> Self {
        Self { per_second: per_second.max(1), paid_ns: 0, remainder: 0 }
    }

    /// Bytes or operations that are admitted and not yet paid.
    fn owed(&self, now_ns: u64) -> u64 {
        let debt_ns = u128::from(self.paid_ns.saturating_sub(now_ns));
        u64::try_from(debt_ns * u128::from(self.per_second) / 1_000_000_000).unwrap_or(u64::MAX)
    }

    fn charge(&mut self, now_ns: u64, amount: u64) {
        let price = u128::from(amount) * 1_000_000_000 + u128::from(self.remainder);
        let price_ns = u64::try_from(price / u128::from(self.per_second)).unwrap_or(u64::MAX);
        self.remainder = (price % u128::from(self.per_second)) as u64;
        self.paid_ns = self.paid_ns.max(now_ns.saturating_sub(SAVED_NS_MAX)).saturating_add(price_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn limits(bytes_per_second: Option<u64>, operations_per_second: Option<u64>) -> Limits {
        Limits { bytes_per_second, operations_per_second }
    }

    /// Bytes that pass in each millisecond when requests of `request` bytes always wait and the caller looks once a
    /// millisecond.
    fn admitted_each_ms(limits: Limits, request: u64, milliseconds: usize) -> Vec<u64> {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(limits, start);
        let pass = |tick: usize| {
            let mut count = 0;
            while limiter.admit(start + MS * tick as u32, request).is_ok() {
                count += 1;
            }
            count
        };
        (0..milliseconds).map(pass).collect()
    }

    #[track_caller]
    fn check(limits: Limits, request: u64, requests_per_second: f64) {
        let passed = admitted_each_ms(limits, request, 2000);
        let expected = requests_per_second / 10.0;
        for (start, window) in passed.windows(100).enumerate() {
            let seen = window.iter().sum::<u64>() as f64;
            assert!((seen - expected).abs() <= expected * 0.01 + 1.0, "{seen} from ms {start}, expected {expected}");
        }
    }

    #[test]
    fn every_window_of_100_ms_holds_the_rate() {
        let mib = 1 << 20;
        check(limits(Some(125 * mib), None), 4096, 32000.0);
        check(limits(Some(70 * mib), Some(100_000)), 128 * 1024, 560.0);
        check(limits(None, Some(3000)), 4096, 3000.0);
        check(limits(None, Some(200)), 1 << 20, 200.0);
        check(limits(Some(10_000_000_000), None), 4096, 10e9 / 4096.0);
        check(limits(Some(1), None), 512, 0.0);
    }

    #[test]
    fn the_stricter_limit_holds() {
        check(limits(Some(4096 * 1000), Some(500)), 4096, 500.0);
        check(limits(Some(4096 * 500), Some(1000)), 4096, 500.0);
    }

    #[test]
    fn an_idle_disk_saves_up_10_ms() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(limits(None, Some(10_000)), start);
        let later = start + Duration::from_secs(3600);
        let burst = std::iter::from_fn(|| limiter.admit(later, 4096).ok()).count();
        assert_eq!(burst, 101, "100 saved up, and one on debt");
    }

    #[test]
    fn oversized_request_passes_and_pays_afterwards() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(limits(Some(1 << 20), None), start);
        assert_eq!(limiter.admit(start, 4 << 20), Ok(()));
        assert_eq!(limiter.admit(start, 1), Err(Duration::from_secs(4)));
        assert_eq!(limiter.admit(start + Duration::from_secs(3), 1), Err(Duration::from_secs(1)));
        assert_eq!(limiter.admit(start + Duration::from_secs(4), 1), Ok(()));
    }

    #[test]
    fn refused_request_is_not_charged() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(limits(Some(1 << 30), Some(1000)), start);
        assert_eq!(limiter.admit(start, 4096), Ok(()));
        let wait = limiter.admit(start, 4096).unwrap_err();
        for _ in 0..100 {
            assert_eq!(limiter.admit(start, 4096), Err(wait));
        }
        assert_eq!(wait, MS);
        assert_eq!(limiter.admit(start + wait, 4096), Ok(()));
    }

    #[test]
    fn other_limits_forgive_no_debt() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(limits(Some(1 << 20), None), start);
        assert_eq!(limiter.admit(start, 4 << 20), Ok(()));
        limiter.set(limits(Some(4 << 20), Some(10)), start + 2000 * MS);
        assert_eq!(limiter.admit(start + 2000 * MS, 1), Err(500 * MS), "2 MiB are left, at 4 MiB a second");
        assert_eq!(limiter.admit(start + 2500 * MS, 1), Ok(()));
        assert!(limiter.admit(start + 2501 * MS, 1).is_err(), "10 operations a second hold as well");
        limiter.set(Limits::default(), start + 2501 * MS);
        assert_eq!(limiter.admit(start + 2501 * MS, 1 << 40), Ok(()));
    }

    #[test]
    fn next_request_pays_for_credit() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(limits(Some(1 << 20), Some(100)), start);
        (0..3).for_each(|_| limiter.charge(start, 1 << 20));
        assert_eq!(limiter.admit(start + 1000 * MS, 1), Err(2000 * MS));
        assert_eq!(limiter.admit(start + 3000 * MS, 1), Ok(()));
    }

    #[test]
    fn absurd_limits_do_not_overflow() {
        let start = Instant::now();
        let mut free = RateLimiter::new(Limits::default(), start);
        assert!((0..1000).all(|_| free.admit(start, u64::MAX).is_ok()));
        let mut strict = RateLimiter::new(limits(Some(0), Some(u64::MAX)), start);
        assert_eq!(strict.admit(start, u64::MAX), Ok(()));
        assert!(strict.admit(start + Duration::from_secs(1 << 30), 1).is_err());
    }
}
