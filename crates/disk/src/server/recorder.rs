//! Recorder: reports the blocks that pass through the server to ledger and warm memory.
//!
//! Newly known blocks are collected while a request is worked on, and written to the ledger under one lock. Void blocks are
//! written at once, before the change can reach the disk.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::block::{BLOCK_BYTES, DiskId, RamPage};
use crate::ledger::Ledger;
use crate::tag::{Tag, Tagger};
use crate::warm::{AfterServing, Answered, RequestObserver, WarmMemory};

/// A file that holds RAM of an incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamPart {
    /// Device number of its file system.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
    /// Number of its pages.
    pub pages: u64,
}

/// Tracks the blocks of one incarnation. Only guest pages inside its RAM are recorded.
#[derive(Clone)]
pub struct Tracking {
    /// The files of the RAM, in the order of its pages. Usually one.
    pub ram: Arc<[RamPart]>,
    /// Makes the tags of blocks.
    pub tagger: Tagger,
    /// Takes what the guest's pages hold.
    pub ledger: Arc<Mutex<Ledger>>,
    /// Memory that answers reads, if there is any.
    pub warm: Option<WarmMemory>,
}

enum Mark {
    Record(RamPage, u64, Tag),
    Forget(RamPage),
}

pub struct Recorder {
    disk: DiskId,
    tracking: Option<Tracking>,
    marks: Vec<Mark>,
}

impl Recorder {
    pub fn new(disk: DiskId, tracking: Option<Tracking>) -> Self {
        Self { disk, tracking, marks: Vec::new() }
    }

    pub fn attach(&mut self, tracking: Option<Tracking>) {
        self.tracking = tracking;
    }

    pub fn ram(&self) -> Arc<[RamPart]> {
        self.tracking.as_ref().map(|tracking| Arc::clone(&tracking.ram)).unwrap_or_default()
    }

    pub fn tag(&self, block: &[u8; BLOCK_BYTES]) -> Option<Tag> {
        self.tracking.as_ref().map(|tracking| tracking.tagger.tag(block))
    }

    /// These blocks are about to change: what is known or held of them is void.
    pub fn void(&mut self, blocks: Range<u64>) {
        if let Some(tracking) = &self.tracking {
            lock(&tracking.ledger).forget(self.disk, blocks.clone());
            if let Some(warm) = &tracking.warm {
                warm.source.forget(self.disk, blocks);
            }
        }
    }

    pub fn may_be_warm(&self, blocks: Range<u64>) -> bool {
        self.warm().is_some_and(|warm| warm.source.may_hold(self.disk, blocks))
    }

    /// Serves a block from memory, if it is held there.
    pub fn serve(&self, block: u64, after: AfterServing, copy: &mut dyn FnMut(&[u8; BLOCK_BYTES])) -> Option<Tag> {
        self.warm()?.source.serve(self.disk, block, after, copy)
    }

    /// Whether the blocks of a read of `bytes` are wanted in memory.
    pub fn wants(&self, bytes: u64) -> bool {
        self.observer().is_some_and(|observer| observer.wants(bytes))
    }

    /// Whether it is noted how soon a read was answered.
    pub fn learns(&self) -> bool {
        self.observer().is_some_and(|observer| observer.learns())
    }

    /// The image answered a read of this block; with its bytes if they are certain.
    pub fn read_from_image(&self, block: u64, bytes: Option<&[u8; BLOCK_BYTES]>) {
        if let Some(observer) = self.observer() {
            observer.read_from_image(self.disk, block, bytes);
        }
    }

    /// The image answered a read of these blocks, which are not wanted.
    pub fn missed(&self, blocks: Range<u64>) {
        if let Some(observer) = self.observer() {
            observer.missed(self.disk, blocks);
        }
    }

    /// A read was answered from memory alone.
    pub fn answered(&self, how: Answered) {
        if let Some(observer) = self.observer() {
            observer.answered(self.disk, how);
        }
    }

    /// A write ended and met no other request: from `start` on the block holds these bytes.
    pub fn written(&self, block: u64, start: usize, bytes: &[u8]) {
        if let Some(observer) = self.observer() {
            observer.written(self.disk, block, start, bytes);
        }
    }

    fn warm(&self) -> Option<&WarmMemory> {
        self.tracking.as_ref()?.warm.as_ref()
    }

    fn observer(&self) -> Option<&dyn RequestObserver> {
        self.warm()?.observer.as_deref()
    }

    /// The page holds the block, and the block has this tag.
    pub fn holds(&mut self, page: RamPage, block: u64, tag: Tag) {
        self.marks.push(Mark::Record(page, block, tag));
    }

    /// The page holds something else from now on. (Its tag would not fit anyway; this frees its entry.)
    pub fn overwritten(&mut self, page: RamPage) {
        self.marks.push(Mark::Forget(page));
    }

    /// Writes what was collected to the ledger.
    pub fn commit(&mut self) {
        if self.marks.is_empty() {
            return;
        }
        let Some(tracking) = &self.tracking else {
            self.marks.clear();
            return;
        };
        let mut ledger = lock(&tracking.ledger);
        for mark in self.marks.drain(..) {
            match mark {
                Mark::Record(page, block, tag) => ledger.record(page, self.disk, block, tag),
                Mark::Forget(page) => ledger.forget_page(page),
            }
        }
    }
}

/// The ledger is whole after any panic elsewhere: each of its changes is one entry.
fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}
