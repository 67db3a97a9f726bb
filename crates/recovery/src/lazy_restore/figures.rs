//! Figures: how far a lazy restore is, and what its guest has waited.

use std::sync::atomic::Ordering::Relaxed;

use super::LazyRam;

/// What became of the pages, counted since the guest went on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of the snapshot, without those of zeroes.
    pub stored: u64,
    /// Before the guest ran.
    pub prefetched: u64,
    /// Because somebody touched them.
    pub lazy: u64,
    /// With one that was touched, or behind the guest's back.
    pub filled: u64,
    pub missing: u64,
}

impl LazyRam {
    pub fn counts(&self) -> Counts {
        Counts {
            stored: self.snapshot.ram.pages().len() as u64,
            prefetched: self.prefetched,
            lazy: self.lazy.load(Relaxed),
            filled: self.filled.load(Relaxed),
            missing: self.missing.load(Relaxed),
        }
    }

    /// How long so many of a hundred page faults took at most, in us. None: there was none.
    pub fn wait_us(&self, percent: u64) -> Option<u64> {
        self.waits.percentile_us(percent)
    }

    /// The same of pages that are stored: those of zeroes take no read.
    pub fn wait_us_stored(&self, percent: u64) -> Option<u64> {
        self.waits_stored.percentile_us(percent)
    }

    /// Page faults that are over.
    pub fn waits(&self) -> u64 {
        self.waits.count()
    }

    /// All page faults together, in us.
    pub fn waited_us(&self) -> u64 {
        self.waits.total_us()
    }
}
