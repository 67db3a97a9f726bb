//! Arrival: a file whose bytes are still being fetched, from wherever. A reader of bytes that are not there waits; whoever brings
//! bytes asks for the next ones.
//!
//! ```text
//! reader: wait(bytes) --> wanted -------------\
//!                                              next --> brought --> land: checked, written, readers go on --> noted
//! nobody: from where one was wanted last, up --/            \--> failed: readers wait on, or are told why
//! ```
//! Arrived blocks are noted beside the file (`note`), so that the next process to open it continues from there. When all have
//! arrived, the note is removed and the file is a normal one.

mod note;

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use note::Note;
pub use note::path_of as note_file;

#[cfg(test)]
use crate::image::tape::{Event, note as note_event};

/// Bytes of a unit: what is brought, checked and noted as one.
pub const UNIT_BYTES: u64 = 1 << 20;
/// First bytes of a unit's BLAKE3.
pub const CHECKSUM_BYTES: usize = 16;
/// Checksum of a unit.
pub type Checksum = [u8; CHECKSUM_BYTES];

/// Units noted together. Notes are behind the data on the disk, so this many units may have to be brought again.
const NOTED_TOGETHER: usize = 32;
/// Time after which permission to bring more is asked for again.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Treatment of a read of bytes that have not arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissPolicy {
    /// It gets an error: nobody brings anything.
    Refuse,
    /// It waits, unless the bytes cannot be brought now: then it gets the reason. Nothing else is brought.
    Urge,
    /// It waits, however long.
    Wait,
}

/// How much of a file has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Bytes of all units that are to arrive. The bytes between them are zeroes.
    pub bytes: u64,
    /// Bytes that have not arrived yet.
    pub missing_bytes: u64,
}

/// A unit that is to be brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Its number: the unit begins at byte `unit * UNIT_BYTES` of the file.
    pub unit: u64,
}

/// Why a unit cannot be brought now.
#[derive(Clone, Debug)]
struct Stuck {
    why: String,
    /// The source is away: nothing is wrong with this unit.
    away: bool,
}

#[derive(Debug)]
struct State {
    miss_policy: MissPolicy,
    missing: BTreeSet<u64>,
    under_way: HashSet<u64>,
    /// In the order in which readers asked for them.
    wanted: VecDeque<u64>,
    /// Where to continue with units that nobody waits for.
    next: u64,
    stuck: BTreeMap<u64, Stuck>,
    landed: Vec<u64>,
    stopped: bool,
}

/// A file whose bytes are still arriving. Shared by its readers and those who bring the bytes.
#[derive(Debug)]
pub struct Arrival {
    path: PathBuf,
    file: File,
    identity: (u64, u64),
    bytes: u64,
    source: String,
    /// In ascending order, each with its checksum.
    units: Vec<(u64, Checksum)>,
    /// Total length of all units.
    unit_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
    missing_bytes: AtomicU64,
    note: Mutex<Note>,
    #[cfg(test)]
    tape: Option<crate::image::tape::Tape>,
}

impl Arrival {
    /// Makes a file of `bytes` bytes. `units` are to arrive, in ascending order; the rest is a hole. `source` tells whoever opens
    /// the file where the units come from.
    pub fn make(path: &Path, bytes: u64, source: &str, units: &[(u64, Checksum)]) -> io::Result<()> {
        if !units.is_empty() {
            // First: a file without a note is complete.
            Note::make(path, bytes, source, units)?;
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(bytes)?;
        file.sync_all()?;
        note::sync_folder(path)
    }

    /// Opens a file. `None` if it is complete. At first, readers are refused (`MissPolicy::Refuse`).
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let Some((note, noted)) = Note::open(path)? else { return Ok(None) };
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let found = file.metadata()?;
        if found.len() != noted.bytes {
            let what = format!("{}: has {} bytes and should have {}", path.display(), found.len(), noted.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let missing = noted.units.iter().zip(&noted.landed).filter(|(_, landed)| !**landed);
        let missing: BTreeSet<u64> = missing.map(|((unit, _), _)| *unit).collect();
        let missing_bytes = missing.iter().map(|unit| length_of(*unit, noted.bytes)).sum();
        Ok(Some(Self {
            path: path.to_owned(),
            file,
            identity: (found.dev(), found.ino()),
            bytes: noted.bytes,
            source: noted.source,
            unit_bytes: noted.units.iter().map(|(unit, _)| length_of(*unit, noted.bytes)).sum(),
            units: noted.units,
            state: Mutex::new(State {
                miss_policy: MissPolicy::Refuse,
                next: missing.first().copied().unwrap_or_default(),
                missing,
                under_way: HashSet::new(),
                wanted: VecDeque::new(),
                stuck: BTreeMap::new(),
                landed: Vec::new(),
                stopped: false,
            }),
            changed: Condvar::new(),
            missing_bytes: AtomicU64::new(missing_bytes),
            note: Mutex::new(note),
            #[cfg(test)]
            tape: None,
        }))
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are the same file, by whatever path.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// The source that was given when the file was made.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Where a unit lies if all units that are to arrive lie one behind the other. `None` if it is not one of them.
    pub fn place_of(&self, unit: u64) -> Option<Range<u64>> {
        let position = self.units.binary_search_by_key(&unit, |(unit, _)| *unit).ok()?;
        // Only the last one can be shorter.
        let start = position as u64 * UNIT_BYTES;
        Some(start..start + length_of(unit, self.bytes))
    }

    /// How much of the file has arrived.
    pub fn counts(&self) -> Counts {
        Counts { bytes: self.unit_bytes, missing_bytes: self.missing_bytes.load(Acquire) }
    }

    /// Whether all of it has arrived.
    pub fn is_complete(&self) -> bool {
        self.missing_bytes.load(Acquire) == 0
    }

    /// Why units cannot be brought now: a reason for each.
    pub fn stuck(&self) -> Vec<String> {
        self.state().stuck.values().map(|stuck| stuck.why.clone()).collect()
    }

    /// Sets what becomes of readers from now on, also of those that wait.
    pub fn set_miss_policy(&self, miss_policy: MissPolicy) {
        self.state().miss_policy = miss_policy;
        self.changed.notify_all();
    }

    /// Ends those who bring units. Readers that wait get an error.
    pub fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_all();
    }

    /// Whether `stop` was called.
    pub fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    /// Waits until these bytes are in the file, or as the policy says.
    pub fn wait(&self, bytes: Range<u64>) -> io::Result<()> {
        if bytes.is_empty() || self.is_complete() {
            return Ok(());
        }
        let mut state = self.state();
        loop {
            let lacking: Vec<u64> = state.missing.range(units_of(&bytes)).copied().collect();
            if lacking.is_empty() {
                return Ok(());
            }
            state.want(&lacking);
            if let Some(why) = state.refusal() {
                return Err(io::Error::other(format!("{}: has not arrived completely: {why}", self.path.display())));
            }
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Announces that these bytes will be read.
    pub fn announce(&self, bytes: Range<u64>) {
        if bytes.is_empty() || self.is_complete() {
            return;
        }
        let mut state = self.state();
        let lacking: Vec<u64> = state.missing.range(units_of(&bytes)).copied().collect();
        if !lacking.is_empty() {
            state.want(&lacking);
            self.changed.notify_all();
        }
    }

    /// Returns what to bring next, and waits until there is something. Units that a reader waits for come first. The others need
    /// the permission `leave`, which is asked for when nobody waits, and goes with the order. `None` if nothing is missing, or
    /// after `stop`.
    pub fn next<T>(&self, leave: impl Fn() -> Option<T>) -> Option<(Order, Option<T>)> {
        let mut state = self.state();
        while !state.stopped && !state.missing.is_empty() {
            if let Some(order) = state.take_wanted() {
                return Some((order, None));
            }
            if let Some(unit) = state.unwanted()
                && let Some(leave) = leave()
            {
                return Some((state.take(unit), Some(leave)));
            }
            state = self.changed.wait_timeout(state, LOOK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }

    /// The first unit that a reader wanted and was refused.
    pub fn take_wanted(&self) -> Option<Order> {
        self.state().take_wanted()
    }

    /// Puts the bytes of a unit into the file. False: their checksum is wrong.
    pub fn land(&self, order: Order, bytes: &[u8]) -> io::Result<bool> {
        let position = self.units.binary_search_by_key(&order.unit, |(unit, _)| *unit);
        let Ok(position) = position else { return Ok(false) };
        let is_long_enough = bytes.len() as u64 == length_of(order.unit, self.bytes);
        if !is_long_enough || blake3::hash(bytes).as_bytes()[..CHECKSUM_BYTES] != self.units[position].1 {
            return Ok(false);
        }
        self.write_out(bytes, order.unit * UNIT_BYTES)?;
        let to_note = {
            let mut state = self.state();
            state.end(order);
            state.stuck.remove(&order.unit);
            if state.missing.remove(&order.unit) {
                self.missing_bytes.fetch_sub(bytes.len() as u64, Release);
                state.landed.push(order.unit);
            }
            state.landed.len() >= NOTED_TOGETHER || state.missing.is_empty()
        };
        self.changed.notify_all();
        if to_note {
            self.note_landed()?;
        }
        Ok(true)
    }

    /// Writes bytes out to the disk: readers bypass the page cache, and read zeroes where the disk does not have the bytes yet.
    fn write_out(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        // The kernel reports a failed write once per file. One write at a time, so that it is known which one failed.
        let _note = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        self.file.write_all_at(bytes, offset)?;
        #[cfg(test)]
        note_event(&self.tape, || Event::Write { offset, bytes: bytes.to_vec() });
        let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        // SAFETY: no memory is passed, and the file is open.
        match unsafe { libc::sync_file_range(self.file.as_raw_fd(), offset as i64, bytes.len() as i64, flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Notes what has landed, once the disk has it; a complete file needs no note.
    pub fn note_landed(&self) -> io::Result<()> {
        let mut note = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        let (landed, is_complete) = {
            let mut state = self.state();
            (std::mem::take(&mut state.landed), state.missing.is_empty())
        };
        #[cfg(test)]
        let before = crate::image::tape::length(&self.tape);
        if let Err(error) = self.file.sync_data() {
            // Nobody knows what the disk has of them.
            self.miss_again(landed);
            return Err(error);
        }
        #[cfg(test)]
        note_event(&self.tape, || Event::Sync { before });
        if is_complete {
            #[cfg(test)]
            note_event(&self.tape, || Event::LogEnds { length: 0 });
            return note.remove(&self.path);
        }
        for unit in landed {
            if let Ok(position) = self.units.binary_search_by_key(&unit, |(unit, _)| *unit) {
                note.add(position, &self.units[position].1)?;
                #[cfg(test)]
                note_event(&self.tape, || {
                    let bytes = std::fs::read(note_file(&self.path)).expect("it was just written to");
                    Event::Log { offset: 0, bytes }
                });
            }
        }
        note.sync()
    }

    fn miss_again(&self, units: Vec<u64>) {
        let mut state = self.state();
        let bytes: u64 = units.iter().map(|unit| length_of(*unit, self.bytes)).sum();
        state.missing.extend(units);
        self.missing_bytes.fetch_add(bytes, Release);
    }

    /// It cannot be brought now; it stays under way until it is given back. True: that is news.
    pub fn failed(&self, order: Order, why: &str, away: bool) -> bool {
        let mut state = self.state();
        let is_told = away && state.stuck.values().any(|other| other.away);
        let is_new = state.stuck.insert(order.unit, Stuck { why: why.to_owned(), away }).is_none();
        drop(state);
        self.changed.notify_all();
        is_new && !is_told
    }

    /// After this time, or when it was told to stop, others may bring it.
    pub fn give_back(&self, order: Order, after: Duration) {
        let state = self.state();
        let waited = self.changed.wait_timeout_while(state, after, |state| !state.stopped);
        waited.unwrap_or_else(PoisonError::into_inner).0.end(order);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn want(&mut self, units: &[u64]) {
        for unit in units {
            if !self.under_way.contains(unit) && !self.wanted.contains(unit) {
                self.wanted.push_back(*unit);
            }
        }
    }

    fn refusal(&self) -> Option<&str> {
        match self.miss_policy {
            _ if self.stopped => Some("it was cancelled"),
            MissPolicy::Refuse => Some("no process fetches it now"),
            MissPolicy::Urge => self.stuck.values().next().map(|stuck| stuck.why.as_str()),
            MissPolicy::Wait => None,
        }
    }

    fn take_wanted(&mut self) -> Option<Order> {
        while let Some(unit) = self.wanted.pop_front() {
            if self.missing.contains(&unit) && !self.under_way.contains(&unit) {
                return Some(self.take(unit));
            }
        }
        None
    }

    /// A missing unit that nobody waits for.
    fn unwanted(&self) -> Option<u64> {
        if self.miss_policy != MissPolicy::Wait {
            return None;
        }
        let is_free = |unit: &&u64| !self.under_way.contains(unit);
        let ahead = self.missing.range(self.next..).find(is_free);
        ahead.or_else(|| self.missing.iter().find(is_free)).copied()
    }

    fn take(&mut self, unit: u64) -> Order {
        self.under_way.insert(unit);
        // A reader of one unit usually reads on.
        self.next = unit + 1;
        Order { unit }
    }

    fn end(&mut self, order: Order) {
        self.under_way.remove(&order.unit);
    }
}

fn units_of(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / UNIT_BYTES..bytes.end.div_ceil(UNIT_BYTES)
}

fn length_of(unit: u64, bytes: u64) -> u64 {
    UNIT_BYTES.min(bytes.saturating_sub(unit * UNIT_BYTES))
}

/// All files that are arriving, for opening images over them.
#[derive(Clone, Debug, Default)]
pub struct Arrivals(pub Vec<Arc<Arrival>>);

impl Arrivals {
    /// Finds the arrival of an open file by its identity, because paths may differ. A file that nobody brings here refuses
    /// readers.
    pub(crate) fn of(&self, file: &File, path: &Path) -> io::Result<Option<Arc<Arrival>>> {
        let found = file.metadata()?;
        let ours = self.0.iter().find(|arrival| arrival.identity == (found.dev(), found.ino()));
        match ours {
            Some(arrival) => Ok(Some(arrival.clone()).filter(|arrival| !arrival.is_complete())),
            None => Ok(Arrival::open(path)?.map(Arc::new)),
        }
    }
}

#[cfg(test)]
mod tests;
