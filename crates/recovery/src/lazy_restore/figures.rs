//! Figures: the progress of a lazy restore, and how long its guest has waited.

use std::sync::atomic::Ordering::Relaxed;

use super::LazyRam;

/// Page counts of a lazy restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages of the snapshot, without zero pages.
    pub stored: u64,
    /// Present when the restore was registered or resumed.
    pub prefetched: u64,
    /// Loaded because somebody touched them.
    pub lazy: u64,
    /// Loaded beside a touched page, or in the background.
    pub filled: u64,
    /// Stored pages that are not loaded yet.
    pub missing: u64,
}

impl LazyRam {
    /// The present page counts.
    pub fn counts(&self) -> Counts {
        Counts {
            stored: self.snapshot.ram.pages().len() as u64,
            prefetched: self.prefetched,
            lazy: self.lazy.load(Relaxed),
            filled: self.filled.load(Relaxed),
            missing: self.missing.load(Relaxed),
        }
    }

    /// The given percentile of fault waits, in us; `None` if there was none.
    pub fn wait_us(&self, percent: u64) -> Option<u64> {
        self.waits.percentile_us(percent)
    }

    /// Same as `wait_us`, for stored pages only: a zero page needs no read.
    pub fn wait_us_stored(&self, percent: u64) -> Option<u64> {
        self.waits_stored.percentile_us(percent)
    }

    /// Number of page faults that were served.
    pub fn waits(&self) -> u64 {
        self.waits.count()
    }

    /// Sum of all fault waits, in us.
    pub fn waited_us(&self) -> u64 {
        self.waits.total_us()
    }
}
