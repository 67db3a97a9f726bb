//! Access scan: which pages a guest uses, found while it runs and before it is saved.
//!
//! QEMU's page tables are dropped -> a period -> what is mapped again, or was written to by a disk, was used -> ... rounds
//!
//! What is used in many rounds comes first, and of that what was used last: the order of use itself is not seen. What a disk
//! only reads of the guest's memory is not counted; the guest put it there, or looks at it, itself.

use std::sync::Arc;
use std::time::Duration;

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

impl AccessScan {
    /// The error says why it cannot be seen here. The disks were given `log` before.
    pub fn begin(userfault: &Userfault, ram: &RamFile, log: Arc<WriteLog>) -> Result<Self, AccessError> {
        Ok(Self { watch: AccessWatch::start(userfault, ram)?, log, ram_pages: ram.pages() })
    }

    /// Pages that were used, best first. `wait` waits for a period, and is told how many rounds are over.
    pub fn run(
        &self,
        plan: ScanPlan,
        mut wait: impl FnMut(u32, Duration) -> Result<(), SaveError>,
    ) -> Result<Vec<u32>, SaveError> {
        let mut uses = vec![Uses::default(); self.ram_pages as usize];
        for round in 1..=plan.rounds {
            self.log.take(|_| {});
            self.watch.forget()?;
            wait(round - 1, plan.period)?;
            let mut used = |page: u64| {
                if let Some(uses) = uses.get_mut(page as usize).filter(|uses| uses.last != round) {
                    *uses = Uses { rounds: uses.rounds + 1, last: round };
                }
            };
            self.watch.touched(|run| run.for_each(&mut used))?;
            self.log.take(&mut used);
        }
        Ok(best_first(&uses))
    }

    /// From now on it is writes that are seen.
    pub fn then_writes(self) -> Result<Writers, WatchError> {
        Ok(Writers { watch: self.watch.then_writes()?, log: self.log })
    }
}

fn best_first(uses: &[Uses]) -> Vec<u32> {
    let mut pages: Vec<u32> = (0..uses.len() as u32).filter(|page| uses[*page as usize].rounds > 0).collect();
    // Stable: neighbours of the same use stay neighbours.
    pages.sort_by_key(|page| std::cmp::Reverse(uses[*page as usize]));
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_often_comes_first_and_then_what_was_used_last() {
        let used = |rounds, last| Uses { rounds, last };
        let uses = [used(1, 5), used(0, 0), used(5, 5), used(2, 3), used(2, 5), used(5, 5), used(1, 1)];
        assert_eq!(best_first(&uses), [2, 5, 4, 3, 0, 6]);
        assert_eq!(best_first(&[]), Vec::<u32>::new());
    }
}
