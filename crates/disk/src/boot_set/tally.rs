//! Tally: how a boot went, in numbers, and what it had to read from the images.

use std::collections::BTreeMap;
use std::ops::{AddAssign, Range};
use std::time::Duration;

use crate::block::DiskId;
use crate::warm::Answered;

/// Runs of missed blocks that are listed; more are only counted. The guest decides how many there are.
const RUNS_MAX: usize = 1024;
/// The same for blocks that the next boot will read: 400 volumes have some thousand.
const PLANNED_RUNS_MAX: usize = 8192;

/// Times are counted in steps of this, up to a thousand of them.
const STEP: Duration = Duration::from_nanos(250);
const STEPS: usize = 1000;

/// Reads that were answered from memory alone: their number, and the time to their answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answers {
    /// How many they were.
    pub reads: u64,
    /// Number of these that were answered before the disk's thread turned to anything else.
    pub in_line: u64,
    /// Number of these that were answered while a change of the same disk was in flight to the image.
    pub beside_writes: u64,
    by_time: Times,
    by_time_beside_writes: Times,
}

/// Reads by step; the last one counts all that took longer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Times(Vec<u32>);

impl Default for Answers {
    fn default() -> Self {
        let none = Times(vec![0; STEPS]);
        Self { reads: 0, in_line: 0, beside_writes: 0, by_time: none.clone(), by_time_beside_writes: none }
    }
}

impl Times {
    fn add(&mut self, took: Duration) {
        let step = (took.as_nanos() / STEP.as_nanos()) as usize;
        self.0[step.min(STEPS - 1)] += 1;
    }

    fn us(&self, percent: f64) -> Option<f64> {
        let reads: u64 = self.0.iter().copied().map(u64::from).sum();
        let rank = (percent / 100.0 * reads as f64).ceil().max(1.0) as u64;
        let mut counted = 0;
        let step = self.0.iter().position(|&reads| {
            counted += u64::from(reads);
            counted >= rank
        })?;
        Some((step + 1) as f64 * STEP.as_nanos() as f64 / 1e3)
    }
}

impl Answers {
    pub(super) fn add(&mut self, how: Answered) {
        self.reads += 1;
        self.in_line += u64::from(how.in_line);
        self.beside_writes += u64::from(how.beside_writes);
        self.by_time.add(how.took);
        if how.beside_writes {
            self.by_time_beside_writes.add(how.took);
        }
    }

    /// The given percentile of the time to an answer, in microseconds.
    pub fn us(&self, percent: f64) -> Option<f64> {
        self.by_time.us(percent)
    }

    /// The same, only of reads that were answered while a change was on its way to the image.
    pub fn us_beside_writes(&self, percent: f64) -> Option<f64> {
        self.by_time_beside_writes.us(percent)
    }
}

/// Numbers of one disk in a boot and for the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskTally {
    /// Blocks that the last boot read, so the next one is expected to.
    pub blocks: u64,
    /// Number of these that are held.
    pub held: u64,
    /// Blocks held for their heat.
    pub late: u64,
    /// From reset to ready.
    pub boot: PhaseTally,
    /// From ready on.
    pub later: PhaseTally,
    /// Blocks that could not become members because of the limit.
    pub no_room: u64,
}

/// Numbers of a part of a disk in a boot and for the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Blocks that the last boot read, so the next one is expected to.
    pub blocks: u64,
    /// Number of these that are held.
    pub held: u64,
    /// Blocks that memory answered from reset to ready, boot set or ember.
    pub hits: u64,
    /// Blocks that the image answered; without those that could not become members because of the limit.
    pub misses: u64,
    /// From ready on, if the parts were the same then.
    pub later: PhaseTally,
}

/// Numbers of blocks that were read, by what answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTally {
    /// Answered by the boot set.
    pub hits: u64,
    /// Answered by the ember.
    pub ember_hits: u64,
    /// Answered by the image.
    pub misses: u64,
}

impl AddAssign for PhaseTally {
    fn add_assign(&mut self, Self { hits, ember_hits, misses }: Self) {
        self.hits += hits;
        self.ember_hits += ember_hits;
        self.misses += misses;
    }
}

impl AddAssign for DiskTally {
    fn add_assign(&mut self, Self { blocks, held, late, boot, later, no_room }: Self) {
        self.blocks += blocks;
        self.held += held;
        self.late += late;
        self.boot += boot;
        self.later += later;
        self.no_room += no_room;
    }
}

impl AddAssign for Share {
    fn add_assign(&mut self, Self { blocks, held, hits, misses, later }: Self) {
        self.blocks += blocks;
        self.held += held;
        self.hits += hits;
        self.misses += misses;
        self.later += later;
    }
}

/// Neighbouring blocks that the last boot read one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedRun {
    /// Their disk.
    pub disk: DiskId,
    /// The blocks.
    pub blocks: Range<u64>,
    /// Whether they are held: all of them, or none.
    pub held: bool,
}

/// A boot set's contents for the next boot, and how the last one went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Whether the boot is still going on.
    pub learning: bool,
    /// Each disk.
    pub disks: BTreeMap<DiskId, DiskTally>,
    /// Blocks that the next boot is expected to read, in that order.
    pub reads: Vec<PlannedRun>,
    /// Blocks of it that are not listed.
    pub reads_unlisted: u64,
    /// Blocks that the image answered, in the order of reading; neighbours that were read one after the other are one run.
    pub missed: Vec<(DiskId, Range<u64>)>,
    /// Misses that are not listed.
    pub missed_unlisted: u64,
    /// Reads of the last boot that memory answered.
    pub answers: Answers,
    /// Copies that were dropped because their bytes were not what they should be.
    pub damaged: u64,
}

impl Plan {
    /// In the order of reading.
    pub(super) fn list(&mut self, reads: impl Iterator<Item = ((DiskId, u64), bool)>) {
        for ((disk, block), held) in reads {
            let is_full = self.reads.len() >= PLANNED_RUNS_MAX;
            match self.reads.last_mut() {
                Some(run) if run.disk == disk && run.blocks.end == block && run.held == held => run.blocks.end += 1,
                _ if is_full => self.reads_unlisted += 1,
                _ => self.reads.push(PlannedRun { disk, blocks: block..block + 1, held }),
            }
        }
    }
}

/// Counts of one boot.
#[derive(Default)]
pub(super) struct Tally {
    disks: BTreeMap<DiskId, DiskTally>,
    missed: Vec<(DiskId, Range<u64>)>,
    missed_unlisted: u64,
    pub(super) answers: Answers,
    parts: BTreeMap<DiskId, Parts>,
}

/// Parts of a disk, and what was read of each since ready. One more at the end: what lies beside them.
struct Parts {
    blocks: Vec<Range<u64>>,
    later: Vec<PhaseTally>,
}

/// Which of these the block lies in; beside all of them it is the one after the last.
pub(super) fn part_of(parts: &[Range<u64>], block: u64) -> usize {
    let part = parts.partition_point(|part| part.end <= block);
    if parts.get(part).is_some_and(|part| part.contains(&block)) { part } else { parts.len() }
}

impl Tally {
    pub(super) fn of(&mut self, disk: DiskId) -> &mut DiskTally {
        self.disks.entry(disk).or_default()
    }

    pub(super) fn divide(&mut self, disk: DiskId, parts: &[Range<u64>]) {
        let later = vec![PhaseTally::default(); parts.len() + 1];
        self.parts.insert(disk, Parts { blocks: parts.to_vec(), later });
    }

    /// A block was read after ready.
    pub(super) fn later(&mut self, disk: DiskId, block: u64, count: impl Fn(&mut PhaseTally)) {
        count(&mut self.of(disk).later);
        if let Some(Parts { blocks, later }) = self.parts.get_mut(&disk) {
            count(&mut later[part_of(blocks, block)]);
        }
    }

    /// Nothing, if the disk was divided otherwise.
    pub(super) fn later_of(&self, disk: DiskId, parts: &[Range<u64>]) -> Vec<PhaseTally> {
        let same = self.parts.get(&disk).filter(|known| known.blocks == parts);
        same.map_or_else(|| vec![PhaseTally::default(); parts.len() + 1], |known| known.later.clone())
    }

    pub(super) fn missed(&mut self, disk: DiskId, block: u64) {
        self.of(disk).boot.misses += 1;
        let is_full = self.missed.len() >= RUNS_MAX;
        match self.missed.last_mut() {
            Some((last, run)) if *last == disk && run.end == block => run.end += 1,
            _ if is_full => self.missed_unlisted += 1,
            _ => self.missed.push((disk, block..block + 1)),
        }
    }

    pub(super) fn plan(&self) -> Plan {
        Plan {
            disks: self.disks.clone(),
            missed: self.missed.clone(),
            missed_unlisted: self.missed_unlisted,
            answers: self.answers.clone(),
            ..Plan::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: DiskId = DiskId(0);

    #[test]
    fn late_reads_are_counted_by_part() {
        let mut tally = Tally::default();
        let parts = [10..20, 30..40];
        tally.later(DISK, 12, |phase| phase.hits += 1);
        tally.divide(DISK, &parts);
        [9, 10, 19, 20, 30, 39, 40].into_iter().for_each(|block| tally.later(DISK, block, |phase| phase.misses += 1));
        let misses =
            |parts: &[Range<u64>]| tally.later_of(DISK, parts).iter().map(|phase| phase.misses).collect::<Vec<_>>();
        assert_eq!((misses(&parts), misses(&parts[..1])), (vec![2, 2, 3], vec![0, 0]), "of others nothing is known");
        assert_eq!(tally.disks[&DISK].later, PhaseTally { hits: 1, ember_hits: 0, misses: 7 });
    }

    #[test]
    fn neighbours_that_are_alike_are_one_run() {
        let mut plan = Plan::default();
        plan.list(
            [(5, true), (6, true), (7, false), (8, true), (3, true)]
                .into_iter()
                .map(|(block, held)| ((DISK, block), held)),
        );
        let told: Vec<_> = plan.reads.iter().map(|run| (run.blocks.clone(), run.held)).collect();
        assert_eq!(told, [(5..7, true), (7..8, false), (8..9, true), (3..4, true)]);
        plan.list((0..PLANNED_RUNS_MAX as u64).map(|block| ((DISK, 2 * block), true)));
        assert_eq!((plan.reads.len(), plan.reads_unlisted), (PLANNED_RUNS_MAX, 4));
    }

    #[test]
    fn answer_time_is_known_to_one_step() {
        let mut answers = Answers::default();
        assert_eq!(answers.us(50.0), None);
        for (us, in_line, beside_writes) in
            [(1, true, false), (2, true, true), (3, false, true), (1_000_000, false, true)]
        {
            answers.add(Answered { in_line, beside_writes, took: Duration::from_micros(us) });
        }
        assert_eq!((answers.reads, answers.in_line, answers.beside_writes), (4, 2, 3));
        assert_eq!((answers.us(50.0), answers.us(75.0)), (Some(2.25), Some(3.25)));
        assert_eq!((answers.us_beside_writes(50.0), Answers::default().us_beside_writes(50.0)), (Some(3.25), None));
        assert_eq!(answers.us(100.0), Some(250.0), "or more");
    }
}
