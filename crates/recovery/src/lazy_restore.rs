//! Lazy restore: a saved guest runs before its memory has been loaded.
//!
//! ```text
//! working set -> RAM file (one sequential read) ... QEMU waits for its guest -> register its memory -> load device state
//!   -> THE GUEST RUNS -> load what it touches and is missing | fill in the rest in the background -> nothing is missing
//! ```
//! QEMU's threads and the machine's disks touch memory. A missing page causes a page fault in QEMU's threads. The disks
//! have mappings of their own, which cause none: an unguarded access would leave a page of zeroes there for good. So
//! the disks ask first (`RamGate::bring`).
//!
//! A page that cannot be loaded, because the image is damaged or gone, holds up whoever touched it, and is tried again.
//! The guest waits and never sees anything but what was saved.

mod figures;
mod gate;
mod order;
mod pace;
mod step;
mod waits;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use figures::Counts;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::admission::AdmissionError;
use hearth_memory::faults::supply::{SuppliedRam, Wake};
use hearth_memory::{FileOffset, MemoryError, PAGE_BYTES, RamFile};
use hearth_store::Urgency;
pub use order::{Order, OrderError};
pub use pace::Pace;
use serde::{Deserialize, Serialize};
pub use step::Step;
use waits::Waits;

use crate::incarnation::lock;
use crate::snapshot::pages::{PageReader, Reading};
use crate::snapshot::{Snapshot, SnapshotError};

/// Maximum number of unavailable chunks reported one by one. In a file that was cut off every missing chunk is one.
const TOLD_MAX: usize = 16;
/// Size of the block of zero pages installed around a faulting one, where they are missing. A new process takes
/// hundreds of pages that were free, most of them adjacent, and would wait for the keeper at each.
const ZEROES_PAGES: usize = 16;
static ZEROES: [u8; ZEROES_PAGES * PAGE_BYTES as usize] = [0; ZEROES_PAGES * PAGE_BYTES as usize];

/// Why a restore failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum RestoreError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Ram(#[from] AdmissionError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(
        "QEMU has touched page {page} of the guest's memory before its saved contents could be supplied, so the guest would lose \
         them; use `hearth restore --eager`"
    )]
    Touched { page: u64 },
    #[error("it was cancelled")]
    CalledOff,
}

/// Why a touched page could not be loaded.
#[derive(Debug, thiserror::Error)]
enum BringError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Ram(#[from] AdmissionError),
}

/// Memory that is loaded before the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// All memory.
    Eager,
    /// Nothing.
    Lazy,
    /// Pages that a restored guest used first, if they were recorded.
    WorkingSet,
}

impl Mode {
    /// Name of the mode, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Lazy => "lazy",
            Self::WorkingSet => "working-set",
        }
    }
}

/// Writes these pages into RAM that nobody uses yet. Returns their number. Calls `go_on` before each chunk; false
/// cancels.
pub fn prefetch(pages: &PageReader, ram: &RamFile, mut go_on: impl FnMut(u32) -> bool) -> Result<u64, RestoreError> {
    let (mut reading, mut asked_to) = (pages.reading_for(Urgency::WorkingSet), 0);
    for chunk in 0..pages.chunks() {
        if !go_on(chunk) {
            return Err(RestoreError::CalledOff);
        }
        if pages.offset_of(chunk) >= asked_to {
            asked_to = pages.prefetch_ahead(chunk);
        }
        let raw = pages.read(chunk, &mut reading)?;
        for (first, bytes) in runs(pages.pages_of(chunk), raw, None) {
            ram.write(FileOffset(u64::from(first) * PAGE_BYTES), bytes)?;
        }
    }
    Ok(pages.pages().len() as u64)
}

/// Pages to load beside one that was touched.
enum Beside<'a> {
    Nothing,
    /// The missing zero pages around it.
    Zeroes,
    /// The other pages of the chunk that was read for it.
    Chunk {
        chunk: u32,
        raw: &'a [u8],
    },
}

/// Whether the RAM file can grow.
#[derive(Default)]
struct Room {
    /// Why there is no space for it, in words.
    lacks: Option<String>,
    /// How often space was found again. A request that began before that and found none reports nothing new.
    found: u64,
}

/// A reason why pages cannot be brought now.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// The reason, for the operator.
    pub why: String,
    /// True if only a repair of the snapshot helps. Otherwise it may pass by itself.
    pub is_damage: bool,
}

/// Why a chunk cannot be loaded now.
struct Stuck {
    why: String,
    /// Its store does not answer, so no other chunk can be read from it either.
    away: bool,
}

/// The memory of one incarnation under one QEMU while it is loaded from a snapshot.
pub struct LazyRam {
    ram: SuppliedRam,
    identity: (u64, u64),
    snapshot: Arc<Snapshot>,
    /// One bit a page, set once the page is certainly present.
    there: Vec<AtomicU64>,
    prefetched: u64,
    lazy: AtomicU64,
    filled: AtomicU64,
    missing: AtomicU64,
    /// Waits of QEMU's threads, from receiving the fault until the page is present: for all pages, and for stored ones.
    waits: Waits,
    waits_stored: Waits,
    /// While set, a touch loads one page and no more, so that every first touch is seen.
    tracing: AtomicBool,
    touched: Mutex<Vec<u32>>,
    /// Number of threads that wait for a page now, and when such a wait last ended, in microseconds since `began`.
    asking: AtomicU64,
    asked_us: AtomicU64,
    began: Instant,
    /// Chunks that cannot be loaded now, and why.
    stuck: Mutex<BTreeMap<u32, Stuck>>,
    room: Mutex<Room>,
    tell: Box<dyn Fn(Trouble) + Send + Sync>,
    stopped: AtomicBool,
    /// Nothing is missing, so that memory which is no longer registered is no error.
    finished: AtomicBool,
}

impl LazyRam {
    /// Starts the restore: from now on pages are loaded when they are touched. QEMU waits for its guest, and of the
    /// stored pages only the prefetched ones may be in the file. Calls `tell` once a reason for each chunk that cannot
    /// be loaded, up to a limit. Of a store that does not answer, it tells the first chunk only.
    pub fn register(
        snapshot: Arc<Snapshot>,
        ram: &RamFile,
        userfault: &Userfault,
        prefetched: Option<&PageReader>,
        tracing: bool,
        tell: impl Fn(Trouble) + Send + Sync + 'static,
    ) -> Result<Self, RestoreError> {
        let supplied = SuppliedRam::register(userfault, ram)?;
        let is_zeroes = |page: u64| {
            let is_in = |pages: &PageReader| pages.chunk_of(page as u32).is_some();
            is_in(&snapshot.ram) && !prefetched.is_some_and(is_in)
        };
        if let Some(page) = ram.resident_ranges()?.into_iter().flatten().find(|page| is_zeroes(*page)) {
            return Err(RestoreError::Touched { page });
        }
        Ok(Self::new(supplied, snapshot, ram, tracing, Box::new(tell))?)
    }

    /// Continues the restore of a keeper that died. Returns `None` if nothing was missing any more. The trace is lost.
    pub fn resume(
        snapshot: Arc<Snapshot>,
        ram: &RamFile,
        userfault: &Userfault,
        tell: impl Fn(Trouble) + Send + Sync + 'static,
    ) -> Result<Option<Self>, RestoreError> {
        let Some(supplied) = SuppliedRam::resume(userfault, ram)? else { return Ok(None) };
        Ok(Some(Self::new(supplied, snapshot, ram, false, Box::new(tell))?))
    }

    fn new(
        supplied: SuppliedRam,
        snapshot: Arc<Snapshot>,
        ram: &RamFile,
        tracing: bool,
        tell: Box<dyn Fn(Trouble) + Send + Sync>,
    ) -> Result<Self, MemoryError> {
        let stored = snapshot.ram.pages().len() as u64;
        snapshot.ram.expect_random();
        let mut lazy = Self {
            ram: supplied,
            identity: ram.identity(),
            there: (0..snapshot.ram.ram_pages().div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            snapshot,
            prefetched: 0,
            lazy: AtomicU64::new(0),
            filled: AtomicU64::new(0),
            missing: AtomicU64::new(stored),
            waits: Waits::new(),
            waits_stored: Waits::new(),
            tracing: AtomicBool::new(tracing),
            touched: Mutex::default(),
            asking: AtomicU64::new(0),
            asked_us: AtomicU64::new(0),
            began: Instant::now(),
            stuck: Mutex::default(),
            room: Mutex::default(),
            tell,
            stopped: AtomicBool::new(false),
            finished: AtomicBool::new(false),
        };
        for page in ram.resident_ranges()?.into_iter().flatten() {
            lazy.arrived(page as u32);
        }
        lazy.prefetched = stored - lazy.missing.load(Relaxed);
        Ok(lazy)
    }

    fn is_there(&self, page: u32) -> bool {
        let word = self.there.get(page as usize / 64);
        word.is_none_or(|word| word.load(Acquire) >> (page % 64) & 1 == 1)
    }

    /// Marks a page as present. Returns true if it is a stored page that was missing.
    fn arrived(&self, page: u32) -> bool {
        let Some(word) = self.there.get(page as usize / 64) else { return false };
        let new = word.fetch_or(1 << (page % 64), Release) >> (page % 64) & 1 == 0;
        let is_stored = self.snapshot.ram.chunk_of(page).is_some();
        if new && is_stored {
            self.missing.fetch_sub(1, Relaxed);
        }
        new && is_stored
    }

    /// Whether the snapshot is in an object store: a page may take long, and another one must not wait behind it.
    pub fn is_far(&self) -> bool {
        self.snapshot.is_far()
    }

    /// Serves QEMU's page faults until `stop`, until QEMU ends, or until nothing is missing. Several threads may call
    /// it at once.
    pub fn serve(&self) -> Result<(), AdmissionError> {
        let mut reading = self.snapshot.ram.reading();
        // A read from an object store starts threads.
        self.ram.serve(!self.is_far(), |page, heard| self.answer(page as u32, heard, &mut reading))
    }

    /// Answers a page fault of one of QEMU's threads. Returns false if the page cannot be loaded now.
    fn answer(&self, page: u32, heard: Instant, reading: &mut Reading) -> Result<bool, AdmissionError> {
        match passing(self.bring_touched(page, Some(heard), reading)) {
            // The fault came before the end, and its thread runs again by now.
            Err(_) if self.is_finished() => Ok(true),
            answered => Ok(answered?.is_some()),
        }
    }

    fn count_wait(&self, page: u32, waited: Duration) {
        self.waits.add(waited);
        if self.snapshot.ram.chunk_of(page).is_some() {
            self.waits_stored.add(waited);
        }
    }

    /// Puts pages where they are missing, and notes whether there is space for them.
    fn supply(&self, first_page: u32, bytes: &[u8], wake: Wake) -> Result<(), BringError> {
        let found_before = lock(&self.room).found;
        let put = self.ram.supply(first_page.into(), bytes, wake);
        if matches!(put, Ok(0)) {
            // All were present, which says nothing about space.
            return Ok(());
        }
        let mut room = lock(&self.room);
        match put.as_ref().err().filter(|error| is_no_room(error)).map(ToString::to_string) {
            None => room.found += u64::from(room.lacks.take().is_some()),
            Some(why) if room.lacks.is_none() && room.found == found_before => {
                room.lacks = Some(why.clone());
                drop(room);
                (self.tell)(Trouble { why, is_damage: false });
            }
            Some(_) => {}
        }
        Ok(put.map(drop)?)
    }

    /// Notes whether this chunk could be read.
    fn note<T>(&self, chunk: u32, result: Result<T, SnapshotError>) -> Result<T, BringError> {
        let mut stuck = lock(&self.stuck);
        match &result {
            Ok(_) => drop(stuck.remove(&chunk)),
            Err(error) => {
                let (why, away) = (words(error), error.is_away());
                let is_told = away && stuck.values().any(|other| other.away);
                let before = stuck.insert(chunk, Stuck { why: why.clone(), away });
                // Another reason is news, for example that the file was replaced by a wrong one.
                let is_new = before.is_none_or(|before| before.why != why);
                if is_new && !is_told && stuck.len() <= TOLD_MAX {
                    (self.tell)(Trouble { why, is_damage: !away });
                }
            }
        }
        Ok(result?)
    }

    /// Loads a touched page first, and what comes with it once the waiting thread runs again. `heard` is when a fault
    /// of QEMU's was received; `None` for a disk.
    fn bring_touched(&self, page: u32, heard: Option<Instant>, reading: &mut Reading) -> Result<(), BringError> {
        self.asking.fetch_add(1, Relaxed);
        let put = self.put_touched(page, reading);
        self.asked_us.store((self.began.elapsed().as_micros() as u64).max(1), Relaxed);
        self.asking.fetch_sub(1, Relaxed);
        let beside = put?;
        if let Some(heard) = heard {
            // Before the wake, because the woken thread may take this thread's processor.
            self.count_wait(page, heard.elapsed());
        }
        self.ram.wake(page.into())?;
        Ok(passing(self.bring_beside(page, beside)).map(drop)?)
    }

    /// Puts this page alone, and wakes nobody. Returns what to load beside it.
    fn put_touched<'a>(&self, page: u32, reading: &'a mut Reading) -> Result<Beside<'a>, BringError> {
        if self.is_there(page) {
            // It came meanwhile, or the guest has given it back since (a balloon): a page given back reads as zeroes.
            self.supply(page, zeroes(1), Wake::Later)?;
            return Ok(Beside::Nothing);
        }
        let tracing = self.tracing.load(Relaxed);
        let pages = &self.snapshot.ram;
        let (bytes, beside) = match pages.chunk_of(page) {
            None if tracing => (zeroes(1), Beside::Nothing),
            None => (zeroes(1), Beside::Zeroes),
            Some(chunk) => {
                let raw = self.note(chunk, pages.read(chunk, reading))?;
                if tracing {
                    // Before the waiting thread goes on and touches the next page.
                    lock(&self.touched).push(page);
                }
                let beside = if tracing { Beside::Nothing } else { Beside::Chunk { chunk, raw } };
                (pages.page_of(chunk, raw, page).as_slice(), beside)
            }
        };
        self.supply(page, bytes, Wake::Later)?;
        self.lazy.fetch_add(self.arrived(page).into(), Relaxed);
        Ok(beside)
    }

    fn bring_beside(&self, page: u32, beside: Beside<'_>) -> Result<(), BringError> {
        match beside {
            Beside::Nothing => Ok(()),
            Beside::Zeroes => self.bring_zeroes_beside(page),
            Beside::Chunk { chunk, raw } => {
                let new = self.put_chunk(chunk, raw, Some(page))?;
                self.filled.fetch_add(new, Relaxed);
                Ok(())
            }
        }
    }

    fn bring_zeroes_beside(&self, page: u32) -> Result<(), BringError> {
        let comes_along = |page: &u32| self.snapshot.ram.chunk_of(*page).is_none() && !self.is_there(*page);
        let first = page - page % ZEROES_PAGES as u32;
        let start = (first..page).rev().take_while(comes_along).last().unwrap_or(page);
        let last = (page + 1..first + ZEROES_PAGES as u32).take_while(comes_along).last().unwrap_or(page);
        for run in [start..page, page + 1..last + 1] {
            self.supply(run.start, zeroes(run.len()), Wake::AtOnce)?;
            for page in run {
                self.arrived(page);
            }
        }
        Ok(())
    }

    /// Loads a chunk. Returns how many of its pages were missing.
    fn bring_chunk(&self, chunk: u32, reading: &mut Reading) -> Result<u64, BringError> {
        let pages = &self.snapshot.ram;
        if pages.pages_of(chunk).iter().all(|page| self.is_there(*page)) {
            return Ok(0);
        }
        self.put_chunk(chunk, self.note(chunk, pages.read(chunk, reading))?, None)
    }

    /// Puts a chunk's pages, except `but`, which is present. Returns how many were missing.
    fn put_chunk(&self, chunk: u32, raw: &[u8], but: Option<u32>) -> Result<u64, BringError> {
        let mut new = 0;
        for (first, bytes) in runs(self.snapshot.ram.pages_of(chunk), raw, but) {
            self.supply(first, bytes, Wake::AtOnce)?;
            let run = first..first + (bytes.len() as u64 / PAGE_BYTES) as u32;
            new += run.map(|page| u64::from(self.arrived(page))).sum::<u64>();
        }
        Ok(new)
    }

    /// Loads everything, in the order of the file. Calls `ahead_bytes` before each missing chunk with its size in
    /// bytes; the answer limits how many bytes are read ahead. Returns false if it was stopped, or if something cannot
    /// be loaded now.
    pub fn fill(&self, mut ahead_bytes: impl FnMut(&Self, u64) -> u64) -> Result<bool, AdmissionError> {
        let pages = &self.snapshot.ram;
        let (mut reading, mut asked_to) = (pages.reading_for(Urgency::Memory), 0);
        for chunk in 0..pages.chunks() {
            if self.is_stopped() {
                return Ok(false);
            }
            if pages.pages_of(chunk).iter().all(|page| self.is_there(*page)) {
                continue;
            }
            let ahead_bytes = ahead_bytes(self, pages.read_bytes_of(chunk));
            if pages.offset_of(chunk) >= asked_to {
                asked_to = pages.fill_ahead(chunk, ahead_bytes);
            }
            let brought = self.bring_chunk(chunk, &mut reading);
            match &brought {
                // The next chunk would fail as well, or take as long to fail.
                Err(BringError::Snapshot(error)) if error.is_away() => return Ok(false),
                Err(BringError::Ram(error)) if is_no_room(error) => return Ok(false),
                _ => {}
            }
            let new = passing(brought)?;
            self.filled.fetch_add(new.unwrap_or_default(), Relaxed);
        }
        Ok(self.missing.load(Relaxed) == 0)
    }

    /// Ends the restore when nothing is missing: the kernel serves this memory from now on, and `serve` returns.
    pub fn finish(&self) -> Result<(), AdmissionError> {
        self.finished.store(true, Release);
        self.stopped.store(true, Relaxed);
        self.ram.finish()
    }

    fn is_finished(&self) -> bool {
        self.finished.load(Acquire)
    }

    /// Whether somebody waits for a page.
    pub fn is_asked(&self) -> bool {
        self.asking.load(Relaxed) > 0
    }

    /// Time since somebody last waited for a page; `Duration::MAX` if nobody has.
    pub fn idle_for(&self) -> Duration {
        match self.asked_us.load(Relaxed) {
            0 => Duration::MAX,
            asked_us => self.began.elapsed().saturating_sub(Duration::from_micros(asked_us)),
        }
    }

    /// Whether `stop` or `finish` was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Ends `serve` and all waits, and leaves everything else as it is.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
        self.ram.stop();
    }

    /// Ends the trace. Returns its pages in the order in which they were touched.
    pub fn end_trace(&self) -> Vec<u32> {
        self.tracing.store(false, Relaxed);
        let mut touched = std::mem::take(&mut *lock(&self.touched));
        // A page that two threads touched at once is in it twice.
        let mut seen = HashSet::new();
        touched.retain(|page| seen.insert(*page));
        touched
    }

    /// The snapshot that the memory is loaded from.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Why memory cannot be loaded now: the first reasons, and the number of the others. A thread that touches that
    /// memory waits.
    pub fn stuck(&self) -> Vec<String> {
        let stuck = lock(&self.stuck);
        let more = stuck.len().saturating_sub(TOLD_MAX);
        let rest = (more > 0).then(|| format!("and {more} more"));
        let chunks = stuck.values().take(TOLD_MAX).map(|stuck| stuck.why.clone());
        lock(&self.room).lacks.clone().into_iter().chain(chunks).chain(rest).collect()
    }
}

/// Bytes of `pages` zero pages, of which there are at most `ZEROES_PAGES`.
fn zeroes(pages: usize) -> &'static [u8] {
    &ZEROES[..pages * PAGE_BYTES as usize]
}

/// The error, with its source if the store does not answer.
fn words(error: &SnapshotError) -> String {
    match std::error::Error::source(error) {
        Some(source) if error.is_away() => format!("{error}: {source}"),
        _ => error.to_string(),
    }
}

fn is_no_room(error: &AdmissionError) -> bool {
    matches!(error, AdmissionError::NoRoom { .. })
}

/// Maps errors that may pass to `None`: a bad image may be mended, and space be made. All others end the restore.
fn passing<T>(result: Result<T, BringError>) -> Result<Option<T>, AdmissionError> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(BringError::Snapshot(_)) => Ok(None),
        Err(BringError::Ram(error)) if is_no_room(&error) => Ok(None),
        Err(BringError::Ram(error)) => Err(error),
    }
}

/// Runs of pages that are adjacent in RAM and in the file, with their bytes, without the page `but`.
fn runs<'a>(pages: &'a [u32], raw: &'a [u8], but: Option<u32>) -> impl Iterator<Item = (u32, &'a [u8])> {
    let (mut at, is_it) = (0, move |page: u32| Some(page) == but);
    let runs = pages.chunk_by(move |one, next| one + 1 == *next && !is_it(*one) && !is_it(*next));
    let with_bytes = runs.map(move |run| {
        let from = at * PAGE_BYTES as usize;
        at += run.len();
        (run[0], &raw[from..at * PAGE_BYTES as usize])
    });
    with_bytes.filter(move |(first, _)| !is_it(*first))
}

#[cfg(test)]
mod tests;
