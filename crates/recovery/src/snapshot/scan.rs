//! Access scan: which pages a guest uses, found while it runs and before it is saved.
//!
//! QEMU's page tables are dropped -> a period -> what is mapped again, or was written to by a disk, was used -> ... rounds
//! -> THE MEMORY IS COPIED -> what is mapped by then was used since the last round began; unless that was longer ago than all
//! rounds together take: what a guest uses in minutes is no working set
//!
//! What is used in many rounds comes first, and of that what was used last: the order of use itself is not seen. What a disk
//! only reads of the guest's memory is not counted; the guest put it there, or looks at it, itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_disk::write_log::WriteLog;
use hearth_memory::RamFile;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::access::{AccessError, AccessWatch};
use hearth_memory::faults::writes::WatchError;

use super::save::{SaveError, Writers};

/// How long is looked, and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanPlan {
    pub period: Duration,
    pub rounds: u32,
}

/// Whoever uses the memory of a guest that runs: QEMU, by its page tables, and the disks of the machine as far as they write.
pub struct AccessScan {
    watch: AccessWatch,
    log: Arc<WriteLog>,
    ram_pages: u64,
}

/// A page's use.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Uses {
    rounds: u32,
    /// 1 for the first round; 0: in none.
    last: u32,
}

/// What was seen of all pages, round by round.
pub struct Used {
    pages: Vec<Uses>,
    round: u32,
    plan: ScanPlan,
    /// The last round.
    began: Instant,
}

impl AccessScan {
    /// The error says why it cannot be seen here. The disks were given `log` before.
    pub fn begin(userfault: &Userfault, ram: &RamFile, log: Arc<WriteLog>) -> Result<Self, AccessError> {
        Ok(Self { watch: AccessWatch::start(userfault, ram)?, log, ram_pages: ram.pages() })
    }

    /// `wait` waits for a period, and is told how many rounds are over.
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

    /// From now on it is writes that are seen.
    pub fn then_writes(self) -> Result<Writers, WatchError> {
        Ok(Writers { watch: self.watch.then_writes()?, log: self.log })
    }
}

impl Used {
    pub(super) fn of(pages: u64, plan: ScanPlan) -> Self {
        Self { pages: vec![Uses::default(); pages as usize], round: 0, plan, began: Instant::now() }
    }

    /// One more round: whatever QEMU has used since the last one began, if that is not too long ago.
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

    /// How many.
    pub fn count(&self) -> u64 {
        self.pages.iter().filter(|uses| uses.rounds > 0).count() as u64
    }

    /// Pages that were used.
    pub fn best_first(&self) -> Vec<u32> {
        let of = |page: &u32| self.pages[*page as usize];
        let mut pages: Vec<u32> = (0..self.pages.len() as u32).filter(|page| of(page).rounds > 0).collect();
        // Stable: neighbours of the same use stay neighbours.
        pages.sort_by_key(|page| std::cmp::Reverse(of(page)));
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_often_comes_first_and_then_what_was_used_last() {
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
