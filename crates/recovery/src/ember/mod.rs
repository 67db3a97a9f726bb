//! Ember: the RAM of dead incarnations, kept as a source of clean disk blocks.
//!
//! bank -> serve / forget / trim (disk threads, budget) -> sweep (memory goes back to the host) -> empty
//!
//! A dump may claim a dead incarnation as well (`hold`): pages that it has not written are not released, not even for
//! the budget, and the files stay until the dump is over.
//!
//! The ember trusts no page. It serves a block only if its bytes, in a private copy, have the tag of what the disk
//! holds. Pages that were dirty, reused or corrupted fail that test. A page always leaves its ledger before it leaves
//! the RAM file. So a keeper that is killed in between leaves a ledger that promises too little, never too much.
//!
//! Serving takes two memory copies a page. Mapping the old page into the new RAM would avoid them. But QEMU has already
//! mapped the new RAM file, and no system call moves a page between two tmpfs files.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::ledger::{Ledger, LedgerError};
use hearth_disk::tag::{Tag, Tagger};
use hearth_disk::warm::{AfterServing, WarmSource};
use hearth_memory::{MemoryError, PAGE_BYTES, RamFile};

use crate::hold::Hold;
use crate::incarnation::{Incarnation, discard_files, ledger_path, lock};

mod source;

pub(crate) use source::trim_order;
use source::{Claims, Source, release_strangers};

/// Pages that background work handles each time it takes the lock: 64 tags take 50 us, so a disk thread never waits
/// longer.
const PAGES_PER_HOLD: u32 = 64;

/// Maximum number of dead incarnations kept. Every read asks all of them, and blocks that three reboots did not read
/// are rarely read. One that waits for its dump is kept beyond that.
const SOURCES_MAX: usize = 4;

/// Remains of the dead incarnations of one machine.
pub struct Ember {
    folder: PathBuf,
    tagger: Tagger,
    /// Oldest incarnation first. No block is in two of them: a block that the guest reads moves, one that it writes is
    /// forgotten.
    sources: Mutex<Vec<Source>>,
    /// Incarnations whose kernel's own memory is not released (`Spared`).
    spared: Mutex<Vec<u32>>,
    /// Some of it would have been released.
    wants_spared: AtomicBool,
    counters: Counters,
}

/// While this lives, the kernel's own memory of a dead incarnation is not released, because it is being read: nothing is settled, nor
/// let go when a dump has written it. It may be made before the incarnation is banked.
#[must_use = "dropping it ends it"]
pub struct Spared {
    ember: Arc<Ember>,
    incarnation: u32,
}

impl Spared {
    /// Spares this incarnation.
    pub fn new(ember: &Arc<Ember>, incarnation: u32) -> Self {
        lock(&ember.spared).push(incarnation);
        Self { ember: ember.clone(), incarnation }
    }
}

impl Drop for Spared {
    fn drop(&mut self) {
        let mut spared = lock(&self.ember.spared);
        if let Some(at) = spared.iter().position(|incarnation| *incarnation == self.incarnation) {
            spared.swap_remove(at);
        }
        self.ember.wants_spared.store(false, Relaxed);
    }
}

#[derive(Default)]
struct Counters {
    kept: AtomicU64,
    served: AtomicU64,
    served_in_part: AtomicU64,
    tag_mismatch: AtomicU64,
    overwritten: AtomicU64,
    trimmed: AtomicU64,
}

/// Page counts since the last `bank`: kept = served + tag_mismatch + overwritten + trimmed + remaining.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmberCounts {
    /// Pages in the ember right after the last `bank`.
    pub kept: u64,
    /// Served whole and released.
    pub served: u64,
    /// Reads answered in part or into untracked memory; the page stays.
    pub served_in_part: u64,
    /// Refused because the bytes are not what the disk holds (dirty, reused or corrupted).
    pub tag_mismatch: u64,
    /// Forgotten because the guest wrote or discarded the block, or because its disk was forgotten.
    pub overwritten: u64,
    /// Given up for the budget, oldest first.
    pub trimmed: u64,
    /// Pages still in the ember.
    pub remaining: u64,
}

/// Why a dead incarnation could not be banked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum EmberError {
    #[error("RAM of incarnation {incarnation} cannot be kept as ember")]
    Ram { incarnation: u32, source: MemoryError },
    #[error("incarnation {incarnation} cannot be kept for its dump")]
    Ledger { incarnation: u32, source: LedgerError },
}

impl Ember {
    /// An empty ember in the memory folder `folder`. `tagger` has the key of the ledgers' tags.
    pub fn new(folder: &Path, tagger: Tagger) -> Self {
        Self {
            folder: folder.to_owned(),
            tagger,
            sources: Mutex::default(),
            spared: Mutex::default(),
            wants_spared: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// Takes over a dead incarnation. Nothing may run in its RAM, and no I/O to it may be in flight. Returns quickly:
    /// `settle` does what takes time. Without a ledger nothing is kept, and the files are removed.
    pub fn bank(&self, dead: Incarnation) -> Result<(), EmberError> {
        match dead.ledger.clone() {
            Some(ledger) => self.keep(dead, ledger, None),
            None => {
                discard_files(&self.folder, dead.number);
                Ok(())
            }
        }
    }

    /// Takes over a dead incarnation that is to be dumped. One without a ledger is kept for the dump alone.
    pub fn bank_held(&self, dead: Incarnation, hold: Arc<Hold>) -> Result<(), EmberError> {
        let ledger = match dead.ledger.clone() {
            Some(ledger) => ledger,
            None => self.no_ledger(&dead)?,
        };
        self.keep(dead, ledger, Some(hold))
    }

    /// An empty ledger in place of one that cannot be trusted.
    fn no_ledger(&self, dead: &Incarnation) -> Result<Arc<Mutex<Ledger>>, EmberError> {
        let path = ledger_path(&self.folder, dead.number);
        // Fails if there is none. If one cannot be removed, creating the new one fails and reports why.
        let _ = fs::remove_file(&path);
        let pages = u32::try_from(dead.ram.pages()).unwrap_or(u32::MAX);
        Ledger::create(&path, pages)
            .map(|ledger| Arc::new(Mutex::new(ledger)))
            .map_err(|source| EmberError::Ledger { incarnation: dead.number, source })
    }

    fn keep(&self, dead: Incarnation, ledger: Arc<Mutex<Ledger>>, hold: Option<Arc<Hold>>) -> Result<(), EmberError> {
        let number = dead.number;
        let view = dead.ram.map().map_err(|source| EmberError::Ram { incarnation: number, source })?;
        let mut sources = lock(&self.sources);
        while sources.len() >= SOURCES_MAX {
            let Some(oldest) = sources.iter().position(|source| !source.is_dumped()) else { break };
            let oldest = sources.remove(oldest);
            discard_files(&self.folder, oldest.incarnation);
        }
        sources.push(Source {
            incarnation: number,
            ram: dead.ram,
            view,
            ledger,
            hold,
            trim_order: None,
            trimmed: 0,
            passed_over: Vec::new(),
            stuck_at: None,
            assayed: 0,
            released: Vec::new(),
        });
        self.counters.restart(sources.iter().map(Source::remaining).sum());
        Ok(())
    }

    /// Releases pages that neither the ledger nor a dump claims, and decides the order of trimming. Runs beside the
    /// guest's boot. Leaves out what is spared. Returns the bytes released.
    pub fn settle(&self) -> Result<u64, MemoryError> {
        let mut released_bytes = 0;
        while let Some((ram, ledger, hold)) = self.unsettled() {
            released_bytes += release_strangers(&ram, &ledger, hold.as_deref(), 0..ram.pages())?;
            let order = trim_order(&lock(&ledger));
            if let Some(source) = lock(&self.sources).iter_mut().find(|source| Arc::ptr_eq(&source.ram, &ram)) {
                source.trim_order = Some(order);
            }
        }
        Ok(released_bytes)
    }

    /// RAM and ledger of a dead incarnation, if it is not settled: only until then is its kernel's own memory there.
    pub fn unsettled_memory(&self, incarnation: u32) -> Option<(Arc<RamFile>, Arc<Mutex<Ledger>>)> {
        let sources = lock(&self.sources);
        let source = sources.iter().find(|source| source.incarnation == incarnation && !source.is_settled())?;
        Some((source.ram.clone(), source.ledger.clone()))
    }

    fn unsettled(&self) -> Option<Claims> {
        let sources = lock(&self.sources);
        sources.iter().find(|source| !source.is_settled() && !self.is_spared(source.incarnation)).map(Source::claims)
    }

    /// Ends the sparing of an incarnation before all its `Spared` are dropped.
    pub fn spare_no_more(&self, incarnation: u32) {
        lock(&self.spared).retain(|spared| *spared != incarnation);
        self.wants_spared.store(false, Relaxed);
    }

    fn is_spared(&self, incarnation: u32) -> bool {
        lock(&self.spared).contains(&incarnation)
    }

    /// Whether memory would have been released that is spared.
    pub fn wants_spared(&self) -> bool {
        self.wants_spared.load(Relaxed)
    }

    /// As `let_go`, for pages that a dump has written: its kernel's own memory is among them. Nothing while it is spared.
    pub fn let_go_written(&self, incarnation: u32, pages: Range<u64>) -> Result<u64, MemoryError> {
        if self.is_spared(incarnation) {
            self.wants_spared.store(true, Relaxed);
            return Ok(0);
        }
        self.let_go(incarnation, pages)
    }

    /// Releases those of the pages that nobody claims any more, after the hold on an incarnation has shrunk. Returns
    /// the bytes released.
    pub fn let_go(&self, incarnation: u32, pages: Range<u64>) -> Result<u64, MemoryError> {
        let claims = lock(&self.sources).iter().find(|source| source.incarnation == incarnation).map(Source::claims);
        let Some((ram, ledger, hold)) = claims else { return Ok(0) };
        let end = pages.end.min(ram.pages());
        release_strangers(&ram, &ledger, hold.as_deref(), pages.start..end)
    }

    /// Bytes of host memory that wait to be dumped.
    pub fn held_bytes(&self) -> u64 {
        lock(&self.sources).iter().map(Source::held_bytes).sum()
    }

    /// Bytes of one incarnation's host memory that wait to be dumped.
    pub(crate) fn held_bytes_of(&self, incarnation: u32) -> u64 {
        lock(&self.sources).iter().filter(|source| source.incarnation == incarnation).map(Source::held_bytes).sum()
    }

    /// Whether memory of any dead incarnation waits to be dumped.
    pub fn is_held(&self) -> bool {
        lock(&self.sources).iter().any(Source::is_held)
    }

    /// Tests up to `pages` pages ahead of any read and drops those that fail, so that bad pages neither hold memory nor
    /// push out good ones. Returns false once every page has been tested.
    pub fn assay(&self, pages: u32) -> bool {
        let mut left = pages;
        while left > 0 {
            let mut sources = lock(&self.sources);
            let Some(source) = sources.iter_mut().find(|source| !source.is_assayed()) else { return false };
            let step = source.assay(left.min(PAGES_PER_HOLD), &self.tagger, &self.counters);
            left -= step.min(left);
        }
        true
    }

    /// Gives up at least `bytes`, oldest pages first, and releases them. Returns the bytes given up, which are fewer
    /// only if the ember can give up no more.
    pub fn trim(&self, bytes: u64) -> Result<u64, MemoryError> {
        let wanted = bytes.div_ceil(PAGE_BYTES);
        let mut given_up = 0;
        for source in lock(&self.sources).iter_mut() {
            if given_up == wanted {
                break;
            }
            given_up += source.trim(wanted - given_up);
        }
        self.counters.trimmed.fetch_add(given_up, Relaxed);
        self.sweep()?;
        Ok(given_up * PAGE_BYTES)
    }

    /// Returns released pages to the host, in runs as long as possible, and drops empty sources. One that is not settled stays:
    /// the dead kernel's own memory may still be read. Returns the bytes released.
    pub fn sweep(&self) -> Result<u64, MemoryError> {
        let mut swept = 0;
        for (ram, mut pages) in self.take_released() {
            pages.sort_unstable();
            swept += ram.release_pages(pages.into_iter().map(u64::from))?;
        }
        lock(&self.sources).retain(|source| {
            let holds = source.remaining() > 0 || !source.released.is_empty();
            let keep = !source.is_settled() || source.is_dumped() || holds;
            if !keep {
                discard_files(&self.folder, source.incarnation);
            }
            keep
        });
        Ok(swept * PAGE_BYTES)
    }

    fn take_released(&self) -> Vec<(Arc<RamFile>, Vec<u32>)> {
        let mut sources = lock(&self.sources);
        let taken = sources.iter_mut().map(|source| (source.ram.clone(), source.take_released()));
        taken.filter(|(_, pages)| !pages.is_empty()).collect()
    }

    /// Drops everything held of this disk. Returns the number of pages dropped.
    pub fn forget_disk(&self, disk: DiskId) -> u64 {
        let forgotten = lock(&self.sources).iter_mut().map(|source| source.forget(disk, 0..u64::MAX)).sum();
        self.counters.overwritten.fetch_add(forgotten, Relaxed);
        forgotten
    }

    /// Drops everything, for a cold start. Memory that waits for its dump stays.
    pub fn extinguish(&self) {
        lock(&self.sources).retain_mut(|source| {
            let keep = source.is_dumped();
            if keep {
                source.forget_everything();
            } else {
                discard_files(&self.folder, source.incarnation);
            }
            keep
        });
        self.counters.restart(0);
    }

    /// Gives up everything but the last dead incarnation's ledger, which is returned: its guest is about to be restored into other
    /// memory. `None`, and nothing is given up, if there is none, or if it waits for its dump.
    pub fn leave_ledger(&self) -> Option<Arc<Mutex<Ledger>>> {
        let ledger =
            lock(&self.sources).last().filter(|source| !source.is_dumped()).map(|source| source.ledger.clone())?;
        self.extinguish();
        Some(ledger)
    }

    /// Numbers of the dead incarnations that still hold something, oldest first.
    pub fn incarnations(&self) -> Vec<u32> {
        lock(&self.sources).iter().map(|source| source.incarnation).collect()
    }

    /// Host memory that the dead incarnations' files hold, in bytes.
    pub fn resident_bytes(&self) -> Result<u64, MemoryError> {
        lock(&self.sources).iter().map(Source::resident_bytes).sum()
    }

    /// Page counts since the last `bank`.
    pub fn counts(&self) -> EmberCounts {
        let remaining = lock(&self.sources).iter().map(Source::remaining).sum();
        self.counters.snapshot(remaining)
    }
}

impl WarmSource for Ember {
    fn serve(
        &self,
        disk: DiskId,
        block: u64,
        after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        lock(&self.sources)
            .iter_mut()
            .find_map(|source| source.serve(disk, block, after, &self.tagger, &self.counters, copy))
    }

    fn may_hold(&self, disk: DiskId, blocks: Range<u64>) -> bool {
        lock(&self.sources).iter().any(|source| {
            let ledger = lock(&source.ledger);
            blocks.clone().any(|block| ledger.find(disk, block).is_some())
        })
    }

    fn forget(&self, disk: DiskId, blocks: Range<u64>) {
        for source in lock(&self.sources).iter_mut() {
            let forgotten = source.forget(disk, blocks.clone());
            self.counters.overwritten.fetch_add(forgotten, Relaxed);
        }
    }
}

impl Counters {
    fn restart(&self, kept: u64) {
        self.kept.store(kept, Relaxed);
        for counter in [&self.served, &self.served_in_part, &self.tag_mismatch, &self.overwritten, &self.trimmed] {
            counter.store(0, Relaxed);
        }
    }

    fn snapshot(&self, remaining: u64) -> EmberCounts {
        EmberCounts {
            kept: self.kept.load(Relaxed),
            served: self.served.load(Relaxed),
            served_in_part: self.served_in_part.load(Relaxed),
            tag_mismatch: self.tag_mismatch.load(Relaxed),
            overwritten: self.overwritten.load(Relaxed),
            trimmed: self.trimmed.load(Relaxed),
            remaining,
        }
    }
}

#[cfg(test)]
mod tests;
