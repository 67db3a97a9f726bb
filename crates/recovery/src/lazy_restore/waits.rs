//! Waits: how long guests waited for pages, counted in classes that widen with the wait, an eighth of an octave each.
//! So a percentile is at most an eighth too high, and millions of waits take no more memory than one.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of classes. They reach up to 2 s, and the last one holds all longer waits.
const CLASSES: usize = 152;

/// Histogram of waits.
pub struct Waits {
    counts: [AtomicU64; CLASSES],
    total_us: AtomicU64,
}

impl Waits {
    /// A histogram without waits.
    pub fn new() -> Self {
        Self { counts: std::array::from_fn(|_| AtomicU64::new(0)), total_us: AtomicU64::new(0) }
    }

    /// Counts one wait.
    pub fn add(&self, waited: Duration) {
        let us = waited.as_micros() as u64;
        self.counts[class_of(us)].fetch_add(1, Relaxed);
        self.total_us.fetch_add(us, Relaxed);
    }

    /// Number of waits.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Sum of all waits, in us.
    pub fn total_us(&self) -> u64 {
        self.total_us.load(Relaxed)
    }

    /// The given percentile of the waits, in us, as the upper end of its class; `None` if nobody waited.
    pub fn percentile_us(&self, percent: u64) -> Option<u64> {
        let counts = self.counts.each_ref().map(|count| count.load(Relaxed));
        let rank = (counts.iter().sum::<u64>() * percent).div_ceil(100);
        let mut below = 0;
        let class = counts.iter().position(|count| {
            below += count;
            rank > 0 && below >= rank
        });
        class.map(longest_us)
    }
}

/// Class of a wait: one a microsecond up to 7, then eight an octave.
fn class_of(us: u64) -> usize {
    match us {
        0..8 => us as usize,
        _ => {
            let octave = us.ilog2();
            let eighth = us >> (octave - 3) & 7;
            ((octave as usize - 2) * 8 + eighth as usize).min(CLASSES - 1)
        }
    }
}

/// Longest wait in a class, in us.
fn longest_us(class: usize) -> u64 {
    match class {
        0..8 => class as u64,
        _ => (((class % 8 + 9) as u64) << (class / 8 - 1)) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_ends_where_the_next_one_begins() {
        for class in 0..CLASSES - 1 {
            let longest = longest_us(class);
            assert_eq!((class_of(longest), class_of(longest + 1)), (class, class + 1), "{longest} us");
        }
        assert_eq!((class_of(u64::MAX), longest_us(CLASSES - 1)), (CLASSES - 1, (1 << 21) - 1));
    }

    #[test]
    fn percentiles_are_at_most_an_eighth_too_high() {
        let waits = Waits::new();
        assert_eq!(waits.percentile_us(50), None);
        (1..=1000).for_each(|us| waits.add(Duration::from_micros(us)));
        for percent in [1, 50, 99, 100] {
            let (found, exact) = (waits.percentile_us(percent).unwrap(), percent * 10);
            assert!((exact..=exact + exact / 8).contains(&found), "{percent}: {found}");
        }
        assert_eq!((waits.count(), waits.total_us()), (1000, 500_500));
    }
}
