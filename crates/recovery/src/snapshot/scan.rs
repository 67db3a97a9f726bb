//! Access scan: finds the pages that a guest uses, while it runs and before it is saved.
//!
//! drop QEMU's page tables -> wait for a period -> pages that are mapped again, or were written to by a disk, were used
//! -> ... rounds -> THE MEMORY IS COPIED -> pages that are mapped by then were used since the last round began; unless
//! that was longer ago than all rounds together take: what a guest uses in minutes is no working set
//!
//! Pages used in many rounds come first, and among these the ones used last: the order of use itself is not visible. A
//! disk's reads of guest memory do not count, because the guest itself writes or reads that memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_disk::write_log::WriteLog;
use hearth_memory::RamFile;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::access::{AccessError, AccessWatch};
use hearth_memory::faults::writes::WatchError;

use super::save::{SaveError, Writers};

/// Length of a round, and number of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanPlan {
    /// Length of a round.
    pub period: Duration,
    /// Number of rounds.
    pub rounds: u32,
}

/// Sees who uses the memory of a running guest: QEMU, by its page tables, and the machine's disks as far as they write.
pub struct AccessScan {
    watch: AccessWatch,
    log: Arc<WriteLog>,
    ram_pages: u64,
}

/// A page's use.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Uses {
    rounds: u32,
    /// Last round in which it was used, from 1; 0 if it was used in none.
    last: u32,
}

/// Use of all pages, round by round.
pub struct Used {
    pages: Vec<Uses>,
    round: u32,
    plan: ScanPlan,
    /// When the last round began.
    began: Instant,
}

impl AccessScan {
    /// Starts a scan. An error says why accesses cannot be seen here. The disks were given `log` before.
    pub fn begin(userfault: &Userfault, ram: &RamFile, log: Arc<WriteLog>) -> Result<Self, AccessError> {
        Ok(Self { watch: AccessWatch::start(userfault, ram)?, log, ram_pages: ram.pages() })
    }

    /// Runs all rounds. `wait` waits for a period; it is given the number of rounds that are over.
    pub fn run(
        &self,
        plan: ScanPlan,
        mut wait: impl FnMut(u32, Duration) -> Result<(), SaveError>,
    ) -> Result<Used, SaveError> {
        let mut used = Used::of(self.ram_pages, plan);
        for rounds_done in 0..plan.rounds {
            self.log.take(|_| {});
            self.watch.forget()?;
            used.began = Instant::now();
            wait(rounds_done, plan.period)?;
            used.round += 1;
            self.watch.touched(|run| run.for_each(|page| used.see(page)))?;
            self.log.take(|page| used.see(page));
        }
        Ok(used)
    }

    /// Sees writes instead, from now on.
    pub fn then_writes(self) -> Result<Writers, WatchError> {
        Ok(Writers { watch: self.watch.then_writes()?, log: self.log })
    }
}

impl Used {
    pub(super) fn of(pages: u64, plan: ScanPlan) -> Self {
        Self { pages: vec![Uses::default(); pages as usize], round: 0, plan, began: Instant::now() }
    }

    /// Adds one more round: what QEMU has used since the last one began, unless that is too long ago.
    pub fn add_mapped(&mut self, writers: &Writers) -> Result<(), WatchError> {
        if self.began.elapsed() > self.plan.period * self.plan.rounds {
            return Ok(());
        }
        self.round += 1;
        writers.watch.mapped(|run| run.for_each(|page| self.see(page)))
    }

    fn see(&mut self, page: u64) {
        let round = self.round;
        if let Some(uses) = self.pages.get_mut(page as usize).filter(|uses| uses.last != round) {
            *uses = Uses { rounds: uses.rounds + 1, last: round };
        }
    }

    /// Number of pages that were used.
    pub fn count(&self) -> u64 {
        self.pages.iter().filter(|uses| uses.rounds > 0).count() as u64
    }

    /// Pages that were used, in the order of the module head.
    pub fn best_first(&self) -> Vec<u32> {
        let of = |page: &u32| self.pages[*page as usize];
        let mut pages: Vec<u32> = (0..self.pages.len() as u32).filter(|page| of(page).rounds > 0).collect();
        // The sort is stable: neighbours with the same use stay neighbours.
        pages.sort_by_key(|page| std::cmp::Reverse(of(page)));
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_used_pages_come_first_then_latest() {
        let plan = ScanPlan { period: Duration::from_secs(1), rounds: 5 };
        let mut used = Used::of(7, plan);
        for seen in [vec![2, 5, 6], vec![2, 3, 5], vec![2, 3, 5], vec![2, 4, 5], vec![0, 2, 2, 4, 5, 7]] {
            used.round += 1;
            seen.into_iter().for_each(|page| used.see(page));
        }
        assert_eq!((used.best_first(), used.count()), (vec![2, 5, 4, 3, 0, 6], 6));
        let nothing = Used::of(0, plan);
        assert_eq!((nothing.best_first(), nothing.count()), (vec![], 0));
    }
}
