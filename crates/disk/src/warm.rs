//! Memory that may answer a read in the disk's place: the ember of a dead incarnation, and the boot set.

use std::ops::Range;
use std::time::Duration;

use crate::block::{BLOCK_BYTES, DiskId};
use crate::tag::Tag;

/// What happens to the source's copy after it was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterServing {
    /// The guest holds the block in a page the ledger knows: the source gives its copy up.
    Release,
    /// The guest's copy is not tracked (partial or unaligned read): the source keeps its own.
    Keep,
}

/// How a read was answered that the image had no part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Before the disk's thread turned to anything else.
    pub in_line: bool,
    /// While a change of the same disk was on its way to the image.
    pub beside_writes: bool,
    /// From when it was taken.
    pub took: Duration,
}

/// Blocks held in memory. Called from the disk threads, in line: an implementation answers in microseconds.
pub trait WarmSource: Send + Sync {
    /// Hands the block to `copy` if it is held and its bytes carry the right tag; returns that tag.
    /// `copy` runs at most once, only with bytes that are on the disk now.
    fn serve(
        &self,
        disk: DiskId,
        block: u64,
        after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag>;

    /// Cheap test without checking the tag: may this source hold any of these blocks?
    fn may_hold(&self, disk: DiskId, blocks: Range<u64>) -> bool;

    /// The guest is about to change these blocks, wholly or in part: what is held of them is void.
    fn forget(&self, disk: DiskId, blocks: Range<u64>);

    /// Does it hold all of these blocks (`copy_of`)?
    fn holds_all(&self, _disk: DiskId, _blocks: Range<u64>) -> bool {
        false
    }

    /// A block that is held, if its bytes carry the right tag: those that are on the disk now. A boot that asks needs it.
    fn copy_of(&self, _disk: DiskId, _block: u64) -> Option<[u8; BLOCK_BYTES]> {
        None
    }

    /// This boot would have needed the block (`copy_of`), and it holds these bytes.
    fn needed(&self, _disk: DiskId, _block: u64, _bytes: &[u8; BLOCK_BYTES]) {}

    /// This boot needs the block (`copy_of`): what holds it elsewhere gives it there.
    fn take_up(&self, _disk: DiskId, _block: u64) {}

    /// Is it worth the while to make changes fewer operations, by writing what lies between them too?
    fn joins_writes(&self) -> bool {
        false
    }

    /// Is everything that is read now noted, and how soon it was answered?
    fn learns(&self) -> bool {
        false
    }

    /// Are the blocks of a read of so many bytes wanted (`read_from_image`)? Then the image is read in whole blocks.
    fn wants(&self, _bytes: u64) -> bool {
        false
    }

    /// The image answered a read of this block. `bytes`: what the block holds; none if a change met the read.
    fn read_from_image(&self, _disk: DiskId, _block: u64, _bytes: Option<&[u8; BLOCK_BYTES]>) {}

    /// The image answered a read of these blocks, of which no word more is wanted.
    fn missed(&self, _disk: DiskId, _blocks: Range<u64>) {}

    /// A read was answered from memory alone. Called while the source learns.
    fn answered(&self, _disk: DiskId, _how: Answered) {}

    /// A write of `request_bytes` is over, and met no other request: from `start` on the block holds these bytes of it.
    /// Comes after the `forget` that the same write began with.
    fn written(&self, _disk: DiskId, _block: u64, _start: usize, _bytes: &[u8], _request_bytes: u64) {}
}
