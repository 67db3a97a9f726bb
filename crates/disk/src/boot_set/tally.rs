//! Tally: how a boot went, in numbers, and what it had to read from the images.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use crate::block::DiskId;
use crate::warm::Answered;

/// Runs of missed blocks that are listed; more are only counted. The guest decides how many there are.
const RUNS_MAX: usize = 1024;

/// Times are counted in steps of this, up to a thousand of them.
const STEP: Duration = Duration::from_nanos(250);
const STEPS: usize = 1000;

/// Reads that were answered from memory alone: how many, and how soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answers {
    pub reads: u64,
    /// Of these, answered before the disk's thread turned to anything else.
    pub in_line: u64,
    /// Of these, answered while a change of the same disk was on its way to the image.
    pub beside_writes: u64,
    /// By step; the last one counts all that took longer.
    by_time: Vec<u32>,
}

impl Default for Answers {
    fn default() -> Self {
        Self { reads: 0, in_line: 0, beside_writes: 0, by_time: vec![0; STEPS] }
    }
}

impl Answers {
    pub(super) fn add(&mut self, how: Answered) {
        self.reads += 1;
        self.in_line += u64::from(how.in_line);
        self.beside_writes += u64::from(how.beside_writes);
        let step = (how.took.as_nanos() / STEP.as_nanos()) as usize;
        self.by_time[step.min(STEPS - 1)] += 1;
    }

    /// What so many percent of the reads did not exceed, in microseconds.
    pub fn us(&self, percent: f64) -> Option<f64> {
        let rank = (percent / 100.0 * self.reads as f64).ceil().max(1.0) as u64;
        let mut counted = 0;
        let step = self.by_time.iter().position(|&reads| {
            counted += u64::from(reads);
            counted >= rank
        })?;
        Some((step + 1) as f64 * STEP.as_nanos() as f64 / 1e3)
    }
}

/// One disk in a boot, and in the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskTally {
    /// Read by the last boot, so expected to be read by the next one.
    pub blocks: u64,
    /// Of these, held.
    pub held: u64,
    /// Held for their heat.
    pub late: u64,
    /// Held because they were written lately.
    pub written: u64,
    /// From reset to ready, and from then on.
    pub boot: PhaseTally,
    pub later: PhaseTally,
    /// Blocks that could not become members because of the limit.
    pub no_room: u64,
}

/// A part of a disk in a boot, and in the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Read by the last boot, so expected to be read by the next one.
    pub blocks: u64,
    /// Of these, held.
    pub held: u64,
    /// Blocks that memory answered from reset to ready, boot set or ember.
    pub hits: u64,
    /// Blocks that the image answered; without those that could not become members because of the limit.
    pub misses: u64,
}

/// Blocks that were read, by who answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTally {
    /// The boot set.
    pub hits: u64,
    pub ember_hits: u64,
    /// The image.
    pub misses: u64,
}

/// What a boot set holds for the next boot, and how the last one went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The boot is not over yet.
    pub learning: bool,
    pub disks: BTreeMap<DiskId, DiskTally>,
    /// What the image answered, in the order of reading; neighbours that were read one after the other are one run.
    pub missed: Vec<(DiskId, Range<u64>)>,
    /// Misses that are not listed.
    pub missed_unlisted: u64,
    /// What the last boot did not have to ask the image for.
    pub answers: Answers,
    /// Copies that were dropped because their bytes were not what they should be.
    pub damaged: u64,
}

/// Counts of one boot.
#[derive(Default)]
pub(super) struct Tally {
    disks: BTreeMap<DiskId, DiskTally>,
    missed: Vec<(DiskId, Range<u64>)>,
    missed_unlisted: u64,
    pub(super) answers: Answers,
}

impl Tally {
    pub(super) fn of(&mut self, disk: DiskId) -> &mut DiskTally {
        self.disks.entry(disk).or_default()
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

    #[test]
    fn the_time_of_an_answer_is_known_to_a_step() {
        let mut answers = Answers::default();
        assert_eq!(answers.us(50.0), None);
        for (us, in_line, beside_writes) in
            [(1, true, false), (2, true, true), (3, false, true), (1_000_000, false, true)]
        {
            answers.add(Answered { in_line, beside_writes, took: Duration::from_micros(us) });
        }
        assert_eq!((answers.reads, answers.in_line, answers.beside_writes), (4, 2, 3));
        assert_eq!((answers.us(50.0), answers.us(75.0)), (Some(2.25), Some(3.25)));
        assert_eq!(answers.us(100.0), Some(250.0), "or more");
    }
}
