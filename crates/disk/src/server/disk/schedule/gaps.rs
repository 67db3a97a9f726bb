//! Gaps: while the machine boots, writes that wait at the same time are one operation on the image over what lies between
//! them, if memory holds that.
//!
//! A kernel that recovers a journal writes a superblock, and some blocks behind it. Those are two operations, and a disk may be
//! limited in operations a second; or one operation that writes what is between them once more. That is safe because it changes
//! nothing: what is written there are the very bytes that the disk holds, so that whoever reads them meanwhile, or finds the
//! write torn by a loss of power, finds them as they were. It stays so only if nobody changes them meanwhile:
//!
//! * A block that a request changes, or waits to change, is void in the source: it is not held, so that no gap is filled with it.
//! * A change that comes later waits until the operation has ended (`meets_filled`).
//! * A hole of the file is not filled: that would cost space.
//!
//! A gap in which a block was never read, such as one that is kept for the growth of a file system, is read for the next boot.

use std::collections::VecDeque;
use std::ops::Range;

use super::view::View;
use crate::block::BLOCK_BYTES;
use crate::buffer::Slot;
use crate::engine::Operation;
use crate::server::counters::{Counters, add};
use crate::server::disk::blocks::Blocks;
use crate::server::disk::job::BLOCK;
use crate::server::disk::operations::Operations;
use crate::server::disk::overlap::RequestId;
use crate::server::disk::running::Running;

/// The longest gap. In a small ext4 the superblock is in front of the journal, and the inodes behind its beginning: 136 KiB. That
/// is 1.1 ms at 125 MiB a second, for which a disk with 200 operations a second spares 5.
const GAP_BYTES_MAX: u64 = 160 << 10;
/// The longest operation with filled gaps: clouds count this much as one.
const FILLED_BYTES_MAX: u64 = 256 << 10;
/// The most gaps that wait to be read.
const WANTED_MAX: usize = 256;
/// The disk's own read, among the requests that touch blocks. No request has this number, since no slab is so long.
const OWN_READ: RequestId = RequestId::MAX;

/// Gaps that could not be filled, but for blocks in them that no boot has read. They are read, so that the next boot finds them.
#[derive(Default)]
pub struct Gaps {
    wanted: VecDeque<Range<u64>>,
    /// The blocks that are being read for that.
    reading: Range<u64>,
}

impl Gaps {
    /// These gaps could have been filled if memory had held them.
    pub fn want(&mut self, gaps: Vec<Range<u64>>) {
        for gap in gaps {
            if self.wanted.len() < WANTED_MAX && !self.wanted.contains(&gap) {
                self.wanted.push_back(gap);
            }
        }
    }

    /// Begins the next read of a gap: one at a time, where nothing has to wait for it. `admit`: whether the limits allow an
    /// operation of so many bytes. Returns the operation.
    pub fn next_read(
        &mut self,
        blocks: &mut Blocks,
        operations: &Operations,
        admit: impl FnOnce(u64) -> bool,
    ) -> Option<(Operation, Range<u64>)> {
        if !blocks.recorder.fills_gaps() {
            self.wanted.clear();
        }
        if self.wanted.is_empty() || operations.is_full() || operations.iter().any(Running::is_own) {
            return None;
        }
        let gap = self.wanted.pop_front()?;
        blocks_of(&gap).for_each(|block| blocks.recorder.gather(block));
        let missing = missing(blocks, &gap)?;
        let bytes = (missing.end - missing.start) * BLOCK;
        let slot = operations.pool.take(bytes as usize)?;
        if blocks.overlaps.changing(&missing) || !admit(bytes) {
            operations.pool.give_back(slot);
            return None;
        }
        blocks.overlaps.begin(OWN_READ, missing.clone(), false);
        let start = missing.start * BLOCK;
        self.reading = missing;
        Some((Operation::Read(slot), start..start + bytes))
    }

    /// The read of a gap has ended: memory holds it, if nobody has changed it meanwhile. `data` is `None` if it failed.
    pub fn was_read(&mut self, blocks: &mut Blocks, data: Option<&[u8]>) {
        let certain = !blocks.overlaps.is_tainted(OWN_READ);
        blocks.overlaps.end(OWN_READ);
        let Some(data) = data.filter(|_| certain) else { return };
        for (block, bytes) in self.reading.clone().zip(data.as_chunks().0) {
            blocks.recorder.read_for_gap(block, bytes);
        }
    }
}

/// Blocks of bytes that begin and end with a block.
pub fn blocks_of(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / BLOCK..bytes.end / BLOCK
}

pub fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Whether these bytes may be written too, as a part of one operation on all, if memory holds them.
pub fn may_fill(view: View<'_>, gap: &Range<u64>, all: Range<u64>) -> bool {
    gap.end - gap.start <= GAP_BYTES_MAX
        && all.end - all.start <= FILLED_BYTES_MAX
        && (gap.start | gap.end).is_multiple_of(BLOCK)
        && view.blocks.recorder.fills_gaps()
        && !view.blocks.overlaps.changing(&blocks_of(gap))
        && view.operations.image.is_allocated(gap.clone())
}

/// Puts what the disk holds in the gaps into the slot of an operation that begins at `start`. False: it is not held.
pub fn fill(view: View<'_>, gaps: &[Range<u64>], slot: Slot, start: u64) -> bool {
    // SAFETY: the slot was just taken, nothing is in flight on it, and the reference ends with the copies.
    let buffer = unsafe { view.operations.pool.bytes_mut(slot) };
    for gap in gaps {
        let place = &mut buffer[(gap.start - start) as usize..(gap.end - start) as usize];
        for (block, place) in (gap.start / BLOCK..).zip(place.chunks_exact_mut(BLOCK_BYTES)) {
            let Some(bytes) = view.blocks.recorder.copy_of(block) else { return false };
            place.copy_from_slice(&bytes);
        }
    }
    true
}

pub fn count_filled(counters: &Counters, gaps: &[Range<u64>]) {
    add(&counters.gaps_filled, gaps.len() as u64);
    add(&counters.gap_bytes, gaps.iter().map(|gap| gap.end - gap.start).sum());
}

/// Whether an operation that runs writes these bytes as part of a gap. A change of them waits until it has ended.
pub fn meets_filled(operations: &Operations, bytes: &Range<u64>) -> bool {
    operations.iter().flat_map(|running| &running.filled).any(|gap| meet(gap, bytes))
}

/// From the first block of a gap that memory does not hold to the last one.
fn missing(blocks: &Blocks, gap: &Range<u64>) -> Option<Range<u64>> {
    let is_missing = |block: &u64| !blocks.recorder.holds_all(*block..block + 1);
    let first = blocks_of(gap).find(is_missing)?;
    let last = blocks_of(gap).rfind(is_missing)?;
    Some(first..last + 1)
}
