//! Lazy restore: a saved guest goes on before its memory is there.
//!
//! ```text
//! working set -> RAM file (one sequential read) ... QEMU waits for a guest -> its memory is registered -> devices' state
//!   -> THE GUEST RUNS -> what it touches and is missing is brought | the rest is filled in behind -> nothing is missing
//! ```
//! Who touches memory: QEMU's threads (page faults), and the disks of the machine, which have mappings of their own and are
//! told apart from nobody: an unguarded look at a missing page would plant a page of zeroes for good. So they ask first
//! (`RamGate::bring`).
//!
//! A page that cannot be brought (the image is damaged, or gone) holds up whoever touched it, and is tried again: the guest
//! waits, and never sees anything but what was saved.

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

/// So many chunks that cannot be brought are told one by one: of a file that was cut off, all that are missing are such.
const TOLD_MAX: usize = 16;
/// Of zeroes: so many around one that is touched come with it, where they are missing. A process that is started takes hundreds of
/// pages that were free, most of them side by side, and waits for each as long as the keeper takes to hear of it.
const ZEROES_PAGES: usize = 16;
static ZEROES: [u8; ZEROES_PAGES * PAGE_BYTES as usize] = [0; ZEROES_PAGES * PAGE_BYTES as usize];

#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Ram(#[from] AdmissionError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(
        "QEMU has touched page {page} of the guest's memory before what is missing could be brought, and the guest would not find \
         there what was saved; `hearth restore --eager` does without that"
    )]
    Touched { page: u64 },
    #[error("it was called off")]
    CalledOff,
}

/// Why a page that was touched does not come.
#[derive(Debug, thiserror::Error)]
enum BringError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Ram(#[from] AdmissionError),
}

/// What is there before the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Everything.
    Eager,
    /// Nothing.
    Lazy,
    /// What a restored guest used first, if that was noted.
    WorkingSet,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Lazy => "lazy",
            Self::WorkingSet => "working-set",
        }
    }
}

/// Writes these pages into RAM that nobody uses yet. How many there are. `go_on` is asked before each chunk.
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

/// What comes with a page that was touched.
enum Beside<'a> {
    Nothing,
    /// Those around it that are missing.
    Zeroes,
    /// The rest of what was read for it.
    Chunk {
        chunk: u32,
        raw: &'a [u8],
    },
}

/// Of the file of a guest's RAM.
#[derive(Default)]
struct Room {
    /// Why there is none, in words.
    lacks: Option<String>,
    /// How often there was some again: who began before that and found none says nothing new.
    found: u64,
}

/// A reason why pages cannot be brought now.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub why: String,
    /// True if only a repair of the snapshot helps. Otherwise it may pass by itself.
    pub is_damage: bool,
}

/// Why a chunk cannot be brought now.
struct Stuck {
    why: String,
    /// The store that has it does not answer; then it has none of the others either.
    away: bool,
}

/// The memory of one incarnation under one QEMU, on its way out of a snapshot.
pub struct LazyRam {
    ram: SuppliedRam,
    identity: (u64, u64),
    snapshot: Arc<Snapshot>,
    /// One bit a page: it is certainly there.
    there: Vec<AtomicU64>,
    prefetched: u64,
    lazy: AtomicU64,
    filled: AtomicU64,
    missing: AtomicU64,
    /// Of QEMU's threads, from when it was heard of until the page was there: for any page, and for one that is stored.
    waits: Waits,
    waits_stored: Waits,
    /// While set, a touch brings one page and no more, so that every first touch is seen.
    tracing: AtomicBool,
    touched: Mutex<Vec<u32>>,
    /// Those who wait for a page at this moment, and when one last did, in microseconds since `began`.
    asking: AtomicU64,
    asked_us: AtomicU64,
    began: Instant,
    /// Chunks that cannot be brought now, and why.
    stuck: Mutex<BTreeMap<u32, Stuck>>,
    room: Mutex<Room>,
    tell: Box<dyn Fn(Trouble) + Send + Sync>,
    stopped: AtomicBool,
    /// Nothing is missing: who finds its memory not registered any more is right to go on.
    finished: AtomicBool,
}

impl LazyRam {
    /// From now on pages come when they are touched. QEMU waits for its guest; what was prefetched is in the file, and nothing else.
    /// `tell` hears, once a reason, of each chunk that cannot be brought, if there are not too many; of a store that does not answer, of
    /// the first one.
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

    /// Goes on where a keeper that died left off; none if nothing was missing any more. What was traced is lost.
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

    /// True the first time.
    fn arrived(&self, page: u32) -> bool {
        let Some(word) = self.there.get(page as usize / 64) else { return false };
        let new = word.fetch_or(1 << (page % 64), Release) >> (page % 64) & 1 == 0;
        let is_stored = self.snapshot.ram.chunk_of(page).is_some();
        if new && is_stored {
            self.missing.fetch_sub(1, Relaxed);
        }
        new && is_stored
    }

    /// It comes from an object store: a page may be long on its way, and another one must not wait behind it.
    pub fn is_far(&self) -> bool {
        self.snapshot.is_far()
    }

    /// Serves QEMU's page faults until `stop`, QEMU's end, or until nothing is missing. Several threads may do so at once.
    pub fn serve(&self) -> Result<(), AdmissionError> {
        let mut reading = self.snapshot.ram.reading();
        // What fetches from afar starts threads.
        self.ram.serve(!self.is_far(), |page, heard| self.answer(page as u32, heard, &mut reading))
    }

    /// A thread of QEMU's waits for this page. False: it cannot be brought now.
    fn answer(&self, page: u32, heard: Instant, reading: &mut Reading) -> Result<bool, AdmissionError> {
        match passing(self.bring_touched(page, Some(heard), reading)) {
            // It was heard of before, and goes on by now.
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

    /// Puts pages where they are missing, and notes whether there is room for them.
    fn supply(&self, first_page: u32, bytes: &[u8], wake: Wake) -> Result<(), BringError> {
        let found_before = lock(&self.room).found;
        let put = self.ram.supply(first_page.into(), bytes, wake);
        if matches!(put, Ok(0)) {
            // All were there, which says nothing of room.
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

    /// Notes whether this chunk could be brought.
    fn note<T>(&self, chunk: u32, result: Result<T, SnapshotError>) -> Result<T, BringError> {
        let mut stuck = lock(&self.stuck);
        match &result {
            Ok(_) => drop(stuck.remove(&chunk)),
            Err(error) => {
                let (why, away) = (words(error), error.is_away());
                let is_told = away && stuck.values().any(|other| other.away);
                let before = stuck.insert(chunk, Stuck { why: why.clone(), away });
                // Another reason is news: a file was put in its place, and it is not the one.
                let is_new = before.is_none_or(|before| before.why != why);
                if is_new && !is_told && stuck.len() <= TOLD_MAX {
                    (self.tell)(Trouble { why, is_damage: !away });
                }
            }
        }
        Ok(result?)
    }

    /// Somebody has touched this page: it comes first, and what comes with it when whoever waits goes on. `heard`: of a thread of
    /// QEMU's, when.
    fn bring_touched(&self, page: u32, heard: Option<Instant>, reading: &mut Reading) -> Result<(), BringError> {
        self.asking.fetch_add(1, Relaxed);
        let put = self.put_touched(page, reading);
        self.asked_us.store((self.began.elapsed().as_micros() as u64).max(1), Relaxed);
        self.asking.fetch_sub(1, Relaxed);
        let beside = put?;
        if let Some(heard) = heard {
            // Before the wake: who is woken may take this thread's processor.
            self.count_wait(page, heard.elapsed());
        }
        self.ram.wake(page.into())?;
        Ok(passing(self.bring_beside(page, beside)).map(drop)?)
    }

    /// And no more; who waits for it is not woken. What is to come with it.
    fn put_touched<'a>(&self, page: u32, reading: &'a mut Reading) -> Result<Beside<'a>, BringError> {
        if self.is_there(page) {
            // It came meanwhile; or the guest has given it back since (a balloon), and what is given back reads as zeroes.
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
                    // Before whoever waits goes on and touches the next.
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

    /// How many of its pages were missing.
    fn bring_chunk(&self, chunk: u32, reading: &mut Reading) -> Result<u64, BringError> {
        let pages = &self.snapshot.ram;
        if pages.pages_of(chunk).iter().all(|page| self.is_there(*page)) {
            return Ok(0);
        }
        self.put_chunk(chunk, self.note(chunk, pages.read(chunk, reading))?, None)
    }

    /// How many of its pages were missing. `but`: this one is there.
    fn put_chunk(&self, chunk: u32, raw: &[u8], but: Option<u32>) -> Result<u64, BringError> {
        let mut new = 0;
        for (first, bytes) in runs(self.snapshot.ram.pages_of(chunk), raw, but) {
            self.supply(first, bytes, Wake::AtOnce)?;
            let run = first..first + (bytes.len() as u64 / PAGE_BYTES) as u32;
            new += run.map(|page| u64::from(self.arrived(page))).sum::<u64>();
        }
        Ok(new)
    }

    /// Brings everything, in the order of the file. `ahead_bytes` is asked before each chunk that is missing, of so many bytes: so
    /// much may be asked of the disk at once. False: it was told to stop, or something cannot be brought now.
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
                // The next one would take as long to fail, or fail as well.
                Err(BringError::Snapshot(error)) if error.is_away() => return Ok(false),
                Err(BringError::Ram(error)) if is_no_room(error) => return Ok(false),
                _ => {}
            }
            let new = passing(brought)?;
            self.filled.fetch_add(new.unwrap_or_default(), Relaxed);
        }
        Ok(self.missing.load(Relaxed) == 0)
    }

    /// Nothing is missing: the kernel serves this memory by itself from now on, and `serve` ends.
    pub fn finish(&self) -> Result<(), AdmissionError> {
        self.finished.store(true, Release);
        self.stopped.store(true, Relaxed);
        self.ram.finish()
    }

    fn is_finished(&self) -> bool {
        self.finished.load(Acquire)
    }

    /// Somebody waits for a page.
    pub fn is_asked(&self) -> bool {
        self.asking.load(Relaxed) > 0
    }

    /// Since somebody last waited for one.
    pub fn calm_for(&self) -> Duration {
        match self.asked_us.load(Relaxed) {
            0 => Duration::MAX,
            asked_us => self.began.elapsed().saturating_sub(Duration::from_micros(asked_us)),
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Ends `serve` and whoever waits, and leaves everything as it is.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
        self.ram.stop();
    }

    /// Pages in the order in which they were touched; from now on nothing is noted any more.
    pub fn end_trace(&self) -> Vec<u32> {
        self.tracing.store(false, Relaxed);
        let mut touched = std::mem::take(&mut *lock(&self.touched));
        // Two who touched a page at once are both in it.
        let mut seen = HashSet::new();
        touched.retain(|page| seen.insert(*page));
        touched
    }

    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// What cannot be brought now, and how much more; whoever touches it waits.
    pub fn stuck(&self) -> Vec<String> {
        let stuck = lock(&self.stuck);
        let more = stuck.len().saturating_sub(TOLD_MAX);
        let rest = (more > 0).then(|| format!("and {more} more"));
        let chunks = stuck.values().take(TOLD_MAX).map(|stuck| stuck.why.clone());
        lock(&self.room).lacks.clone().into_iter().chain(chunks).chain(rest).collect()
    }
}

/// At most as many pages as there are of them.
fn zeroes(pages: usize) -> &'static [u8] {
    &ZEROES[..pages * PAGE_BYTES as usize]
}

/// With what is behind it.
fn words(error: &SnapshotError) -> String {
    match std::error::Error::source(error) {
        Some(source) if error.is_away() => format!("{error}: {source}"),
        _ => error.to_string(),
    }
}

fn is_no_room(error: &AdmissionError) -> bool {
    matches!(error, AdmissionError::NoRoom { .. })
}

/// What is wrong with the image may be mended, and room be made; all else is the end. None: not now.
fn passing<T>(result: Result<T, BringError>) -> Result<Option<T>, AdmissionError> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(BringError::Snapshot(_)) => Ok(None),
        Err(BringError::Ram(error)) if is_no_room(&error) => Ok(None),
        Err(BringError::Ram(error)) => Err(error),
    }
}

/// Pages that follow each other in RAM and in the file, with their bytes; without one of them.
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
