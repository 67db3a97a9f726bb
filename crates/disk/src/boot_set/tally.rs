//! Tally: how a boot went, in numbers, and what it had to read from the images.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::block::DiskId;

/// Runs of missed blocks that are listed; more are only counted. The guest decides how many there are.
const RUNS_MAX: usize = 1024;

/// One disk in a boot, and in the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskTally {
    /// Read by the last boot, so expected to be read by the next one.
    pub blocks: u64,
    /// Of these, held.
    pub held: u64,
    /// Reads of blocks that the boot set answered.
    pub hits: u64,
    /// The same for the ember.
    pub ember_hits: u64,
    /// The same for the image.
    pub misses: u64,
    /// Blocks that could not become members because of the limit.
    pub no_room: u64,
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
    /// Copies that were dropped because their bytes were not what they should be.
    pub damaged: u64,
}

/// Counts of one boot.
#[derive(Default)]
pub(super) struct Tally {
    disks: BTreeMap<DiskId, DiskTally>,
    missed: Vec<(DiskId, Range<u64>)>,
    missed_unlisted: u64,
}

impl Tally {
    pub(super) fn of(&mut self, disk: DiskId) -> &mut DiskTally {
        self.disks.entry(disk).or_default()
    }

    pub(super) fn missed(&mut self, disk: DiskId, block: u64) {
        self.of(disk).misses += 1;
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
            ..Plan::default()
        }
    }
}
