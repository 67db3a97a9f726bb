//! Writes: which pages of its RAM a running QEMU has written to, without its help.
//!
//! start (the memory is write-protected) -> a first write: the kernel lifts the protection of that page -> take
//! (unprotected pages were written; they are reported and protected again) -> ... -> drop
//!
//! No fault reaches this process and no thread waits for it. If it dies, a first write still costs a microsecond.
//! Writes through mappings of other processes are not seen.

use std::ops::Range;

use super::Userfault;
pub use super::tables::WatchError;
use super::tables::{Look, Tables};
use crate::RamFile;

/// Watches the writes to the RAM of a running QEMU.
#[derive(Debug)]
pub struct WriteWatch(Tables);

impl WriteWatch {
    /// Starts watching. Nothing else may have registered this memory.
    pub fn start(userfault: &Userfault, ram: &RamFile) -> Result<Self, WatchError> {
        Self::over(Tables::register(userfault, ram)?)
    }

    /// Watches writes with page tables that are registered already.
    pub(super) fn over(tables: Tables) -> Result<Self, WatchError> {
        tables.try_look(Look::Written)?;
        Ok(Self(tables))
    }

    /// Reports the pages of the file that may have been written to since the last call, as ascending runs of page
    /// numbers.
    pub fn take(&self, found: impl FnMut(Range<u64>)) -> Result<(), WatchError> {
        self.0.look(Look::Written, found)
    }

    /// Reports the pages of the file that QEMU has mapped, as ascending runs: used since its page tables were last
    /// dropped, if ever.
    pub fn mapped(&self, found: impl FnMut(Range<u64>)) -> Result<(), WatchError> {
        self.0.look(Look::Present, found)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::stand::{PAGES, Stand};
    use super::*;
    use crate::{FileOffset, PAGE_BYTES};

    fn taken(watch: &WriteWatch) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        watch.take(|run| pages.extend(run)).unwrap();
        pages
    }

    #[test]
    fn writes_are_reported_once_and_reads_never() {
        let stand = Stand::new();
        stand.write(0..300);
        let watch = match WriteWatch::start(&stand.userfault, &stand.ram) {
            // An older kernel can only report that it lacks the feature.
            Err(error @ WatchError::Kernel { .. }) => return assert!(error.to_string().contains("6.7"), "{error}"),
            watch => watch.unwrap(),
        };
        stand.write([3, 4, 5, 299]);
        stand.write([400]);
        // Neighbours of a page that was never touched before may be reported with it.
        let mut first = taken(&watch);
        assert!(first.contains(&400), "{first:?}");
        first.retain(|page| *page < 300);
        assert_eq!(first, [3, 4, 5, 299].into());
        assert_eq!(taken(&watch), BTreeSet::new());
        assert_eq!((stand.read(3), stand.read(17)), (3, 17));
        assert_eq!(taken(&watch), BTreeSet::new());
        stand.write((0..PAGES).step_by(2));
        let all: BTreeSet<u64> = (0..PAGES).step_by(2).collect();
        assert!(taken(&watch).is_superset(&all));
        stand.write([4]);
        assert_eq!(taken(&watch), [4].into());
    }

    #[test]
    fn watch_restarts_and_ignores_writes_by_others() {
        let stand = Stand::new();
        stand.write(0..10);
        for _ in 0..3 {
            let Ok(watch) = WriteWatch::start(&stand.userfault, &stand.ram) else { return };
            stand.ram.write(FileOffset(2 * PAGE_BYTES), &[9; 4096]).unwrap();
            assert_eq!(taken(&watch), BTreeSet::new(), "which is why the disks keep a log of their own");
            assert_eq!(stand.read(2), 9);
            stand.write([2]);
            assert_eq!(taken(&watch), [2].into());
        }
        stand.write(0..PAGES);
    }
}
