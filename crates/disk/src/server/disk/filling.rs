//! Filling: while the machine boots, writes that wait at the same time are one operation on the image over what lies between
//! them, if memory holds that.
//!
//! A kernel that recovers a journal writes a superblock, and some blocks behind it. Those are two operations, of which a disk
//! with a limit does so many a second; or one that writes what is between them once more. That is safe because it changes
//! nothing: what is written there are the very bytes that the disk holds, so that whoever reads them meanwhile, or finds the
//! write torn by a loss of power, finds them as they were. It stays so only if nobody changes them meanwhile:
//!
//! * A block that a request changes, or waits to change, is void in the source: it is not held, so that no gap is filled with it.
//! * A change that comes later waits until the operation has ended (`must_wait`).
//! * Where the file has a hole none is filled: it would cost room.
//!
//! A gap in which a block was never read, such as one that is kept for the growth of a file system, is read for the next boot.

use std::ops::Range;

use super::{BLOCK, Disk};
use crate::block::BLOCK_BYTES;
use crate::buffer::Slot;
use crate::engine::Operation;
use crate::server::counters::add;
use crate::server::overlap::RequestId;

/// The longest gap. In a small ext4 the superblock is in front of the journal, and the inodes behind its beginning: 136 KiB. That
/// is 1.1 ms at 125 MiB a second, for which a disk with 200 operations a second spares 5.
const GAP_BYTES_MAX: u64 = 160 << 10;
/// The longest operation with filled gaps: clouds count so much as one.
const FILLED_BYTES_MAX: u64 = 256 << 10;
/// Gaps that wait to be read.
const WANTED_MAX: usize = 256;
/// Among the requests that touch blocks: a read of the disk's own. No request has this number, since no slab is so long.
const OWN_READ: RequestId = RequestId::MAX;

/// Of bytes that begin and end with a block.
pub(super) fn blocks(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / BLOCK..bytes.end / BLOCK
}

pub(super) fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Disk {
    /// May these bytes be written too, as a part of one operation on all, if memory holds them?
    pub(super) fn may_fill(&self, gap: &Range<u64>, all: Range<u64>) -> bool {
        gap.end - gap.start <= GAP_BYTES_MAX
            && all.end - all.start <= FILLED_BYTES_MAX
            && (gap.start | gap.end).is_multiple_of(BLOCK)
            && self.recorder.fills_gaps()
            && !self.overlaps.changing(&blocks(gap))
            && self.image.is_allocated(gap.clone())
    }

    /// Puts what the disk holds in the gaps into the slot of an operation that begins at `start`. False: it is not held.
    pub(super) fn fill(&self, gaps: &[Range<u64>], slot: Slot, start: u64) -> bool {
        // SAFETY: the slot was just taken, nothing is in flight on it, and the reference ends with the copies.
        let buffer = unsafe { self.pool.bytes_mut(slot) };
        for gap in gaps {
            let place = &mut buffer[(gap.start - start) as usize..(gap.end - start) as usize];
            for (block, place) in (gap.start / BLOCK..).zip(place.chunks_exact_mut(BLOCK_BYTES)) {
                let Some(bytes) = self.recorder.copy_of(block) else { return false };
                place.copy_from_slice(&bytes);
            }
        }
        true
    }

    pub(super) fn count_filled(&self, gaps: &[Range<u64>]) {
        add(&self.counters.gaps_filled, gaps.len() as u64);
        add(&self.counters.gap_bytes, gaps.iter().map(|gap| gap.end - gap.start).sum());
    }

    /// These gaps could have been filled, but for blocks in them that no boot has read.
    pub(super) fn want(&mut self, gaps: Vec<Range<u64>>) {
        for gap in gaps {
            if self.wanted.len() < WANTED_MAX && !self.wanted.contains(&gap) {
                self.wanted.push_back(gap);
            }
        }
    }

    /// Reads what is missing in the next gap that is wanted: one at a time, where nothing has to wait for it.
    pub(super) fn read_wanted(&mut self) {
        if !self.recorder.fills_gaps() {
            self.wanted.clear();
        }
        if self.wanted.is_empty()
            || self.running.len() >= self.depth
            || self.running.iter().any(|(_, running)| running.is_own())
        {
            return;
        }
        let Some(gap) = self.wanted.pop_front() else { return };
        blocks(&gap).for_each(|block| self.recorder.gather(block));
        let Some(missing) = self.missing(&gap) else { return };
        let bytes = (missing.end - missing.start) * BLOCK;
        let Some(slot) = self.pool.take(bytes as usize) else { return };
        if self.overlaps.changing(&missing) || self.admit_operation(bytes, None).is_err() {
            return self.pool.give_back(slot);
        }
        self.overlaps.begin(OWN_READ, missing.clone(), false);
        let start = missing.start * BLOCK;
        self.push(Vec::new(), Operation::Read(slot), Vec::new(), start..start + bytes);
        self.reading = missing;
    }

    /// What was wanted has been read: memory holds it, if nobody has changed it meanwhile.
    pub(super) fn wanted_is_read(&mut self, slot: Slot, went_well: bool) {
        let certain = went_well && !self.overlaps.is_tainted(OWN_READ);
        self.overlaps.end(OWN_READ);
        if certain {
            // SAFETY: the operation on the slot has ended, the slot is still ours, and the reference ends with this call.
            let data = unsafe { self.pool.bytes_mut(slot) };
            for (block, bytes) in self.reading.clone().zip(data.as_chunks().0) {
                self.recorder.read_for_gap(block, bytes);
            }
        }
    }

    /// From the first block of a gap that memory does not hold to the last one.
    fn missing(&self, gap: &Range<u64>) -> Option<Range<u64>> {
        let is_missing = |block: &u64| !self.recorder.holds_all(*block..block + 1);
        let first = blocks(gap).find(is_missing)?;
        let last = blocks(gap).rfind(is_missing)?;
        Some(first..last + 1)
    }

    /// Must this change wait until what lies there is written?
    pub(super) fn must_wait(&self, id: RequestId) -> bool {
        self.jobs.get(id).is_some_and(|job| self.meets_filled(&job.place()))
    }

    pub(super) fn meets_filled(&self, bytes: &Range<u64>) -> bool {
        let mut filled = self.running.iter().flat_map(|(_, running)| &running.filled);
        filled.any(|gap| meet(gap, bytes))
    }
}
