//! Memory that may answer a read in the disk's place: the ember of a dead incarnation, and the boot set.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::block::{BLOCK_BYTES, DiskId};
use crate::tag::Tag;

/// Treatment of the source's copy after it was served.
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

/// Memory that answers reads: blocks of the disk as they are now. Called from the disks' threads, in line, so an implementation
/// answers in microseconds.
pub trait WarmSource: Send + Sync {
    /// Hands the block to `copy` if it is held and its bytes carry the right tag. Returns that tag.
    /// `copy` runs at most once, and only with bytes that are on the disk now.
    fn serve(
        &self,
        disk: DiskId,
        block: u64,
        after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag>;

    /// A cheap test that leaves tags alone: may any of these blocks be held?
    fn may_hold(&self, disk: DiskId, blocks: Range<u64>) -> bool;

    /// The guest is about to change these blocks, wholly or in part: what is held of them is void.
    fn forget(&self, disk: DiskId, blocks: Range<u64>);
}

/// Memory that learns from a disk's requests what to hold.
pub trait RequestObserver: Send + Sync {
    /// Whether a boot is being watched: every read is reported, with the time of its answer.
    fn learns(&self) -> bool;

    /// Whether the blocks of a read of `bytes` are to be reported one by one (`read_from_image`). The image is then read in
    /// whole blocks.
    fn wants(&self, bytes: u64) -> bool;

    /// The image answered a read of this block. `bytes` are the block's contents, or `None` if a change met the read.
    fn read_from_image(&self, disk: DiskId, block: u64, bytes: Option<&[u8; BLOCK_BYTES]>);

    /// The image answered a read of these blocks, which is not reported block by block.
    fn missed(&self, disk: DiskId, blocks: Range<u64>);

    /// A read was answered from memory alone. Called while `learns`.
    fn answered(&self, disk: DiskId, how: Answered);

    /// A write has ended, and met no other request: from `start` on the block holds these bytes. Comes after the `forget` that
    /// the same write began with.
    fn written(&self, disk: DiskId, block: u64, start: usize, bytes: &[u8]);
}

/// Host memory beside a disk, by its roles.
#[derive(Clone)]
pub struct WarmMemory {
    /// Answers reads.
    pub source: Arc<dyn WarmSource>,
    /// Learns from requests. `None` if nothing does.
    pub observer: Option<Arc<dyn RequestObserver>>,
}

impl WarmMemory {
    /// Memory that only answers reads.
    pub fn only_serving(source: Arc<dyn WarmSource>) -> Self {
        Self { source, observer: None }
    }

    /// One memory in both roles.
    pub fn in_both_roles<T: WarmSource + RequestObserver + 'static>(memory: Arc<T>) -> Self {
        Self { source: memory.clone(), observer: Some(memory) }
    }
}
