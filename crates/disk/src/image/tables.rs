//! Changed tables of a qcow2 image that are not in it yet. The format library changes tables in place and at once. Then a power
//! cut may leave an entry without what it names, and a keeper that is killed may leave a table without its reference count. So
//! what the library writes into tables is held back here, and goes into the image in an order that is safe to stop anywhere:
//!
//! ```text
//! library: write --> held --> settled: also in the log (`log`), which outlives this process; only now the guest is told
//!                     |
//! flush, or too much: \-> 1 new tables, reference counts -> sync, of the data too -> 2 header, refcount table -> sync
//!                           -> 3 entries of L1 and L2 tables -> sync -> nothing is held, the log is empty
//! ```
//! After a power cut the image is as at its last flush, and may have reference counts that are too high: clusters that are lost,
//! no more. After the death of the keeper alone the next one reads the log, and goes on with what is held.
//!
//! This is only right because no cluster changes hands in between: none that the image's tables name is freed (`let_free`). A
//! cluster that is discarded stays where it is, marked as zeroes, and is a hole in the file.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::{Storage as _, StorageExt as _};

use super::guarded::GuardedFile;
use super::header::{offsets_in, read_entries};

mod log;

use log::checksum;
pub(super) use log::{Change, TableLog};

/// Tables are held in units of this size, or of a cluster if that is smaller: no unit may hold data beside a table.
const UNIT_BYTES_MAX: u64 = 4096;
/// More than a guest changes between two flushes; the memory that this may take.
const HELD_BYTES_MAX: usize = 4 << 20;
const LOG_BYTES_MAX: u64 = 8 << 20;
const CLEAN_BYTES_MAX: usize = 16 << 20;
/// A batch of changes takes milliseconds, unless the storage hangs.
const SETTLE_PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Tables {
    file: GuardedFile,
    cluster_bytes: u64,
    unit_bytes: u64,
    state: Mutex<State>,
    /// Nothing is unsettled.
    settled: Condvar,
}

#[derive(Default)]
struct State {
    /// Not in the image yet. By offset.
    held: BTreeMap<u64, Held>,
    /// Parts of `held` that are not in the log yet.
    unsettled: BTreeSet<u64>,
    /// The image's contents, as far as they are known.
    clean: HashMap<u64, Box<[u8]>>,
    layout: Layout,
    log: Option<TableLog>,
}

struct Held {
    bytes: Box<[u8]>,
    /// Of what the image holds in its place.
    before: u64,
}

/// Which tables the image names: what lies in none of them is new.
#[derive(Default)]
struct Layout {
    cluster_bytes: u64,
    header: Range<u64>,
    refcount_table: Range<u64>,
    l1: Range<u64>,
    l2: HashSet<u64>,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tables").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Tables {
    /// `log` is where they are kept for the next process, and what a process before this one left there.
    pub(super) fn new(file: GuardedFile, cluster_bytes: u64, log: Option<(TableLog, Vec<Change>)>) -> io::Result<Self> {
        // Another process may have written what is in the file, and not have waited for the disk.
        file.sync_data()?;
        let unit_bytes = unit_bytes(cluster_bytes);
        let tables = Self { file, cluster_bytes, unit_bytes, state: Mutex::default(), settled: Condvar::new() };
        {
            let mut state = tables.state();
            state.layout = Layout::read(&tables.file, cluster_bytes)?;
            if let Some((log, changes)) = log {
                state.log = Some(log);
                tables.take_over(&mut state, changes)?;
            }
        }
        Ok(tables)
    }

    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    pub fn read(&self, mut into: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let mut bytes = vec![0; into.len() as usize];
        // Before the file is read: another thread may write what is held into it.
        let mut state = self.state();
        self.file.read(&mut bytes[..], offset)?;
        for (unit, bytes) in self.units(offset).zip(bytes.chunks_mut(self.unit_bytes as usize)) {
            match state.held.get(&unit) {
                Some(held) => bytes.copy_from_slice(&held.bytes[..bytes.len()]),
                None if bytes.len() == self.unit_bytes as usize => state.know(unit, (&*bytes).into()),
                None => {}
            }
        }
        into.copy_from_slice(&bytes);
        Ok(())
    }

    pub fn write(&self, from: &IoVector<'_>, offset: u64) -> io::Result<()> {
        let mut bytes = vec![0; from.len() as usize];
        from.copy_into_slice(&mut bytes);
        let file_bytes = self.file.size()?;
        let mut state = self.state();
        let mut changes = Vec::new();
        for (unit, bytes) in self.units(offset).zip(bytes.chunks(self.unit_bytes as usize)) {
            let before = match state.held.get(&unit) {
                Some(held) if *held.bytes == *bytes => continue,
                Some(held) => held.before,
                None => match self.in_image(&mut state, unit)? {
                    // A unit behind the file's end must be there once it is named.
                    same if *same == *bytes && unit < file_bytes => continue,
                    other => checksum(other),
                },
            };
            changes.push((unit, Held { bytes: bytes.into(), before }));
        }
        // All of them or, if the image cannot be read, none.
        for (unit, change) in changes {
            state.held.insert(unit, change);
            state.unsettled.insert(unit);
        }
        Ok(())
    }

    /// Makes all writes so far consistent, and lets them outlive this process.
    pub fn settle(&self) -> io::Result<()> {
        let mut state = self.state();
        let State { held, unsettled, log, .. } = &mut *state;
        if unsettled.is_empty() {
            return Ok(());
        }
        let changes = unsettled.iter().map(|unit| (*unit, held[unit].before, &*held[unit].bytes));
        if let Err(error) = log.as_mut().map_or(Ok(()), |log| log.append(changes)) {
            tracing::warn!(%error, "the log of a disk's tables cannot be written: they go into the image at once");
            return self.commit_held(&mut state);
        }
        unsettled.clear();
        self.settled.notify_all();
        self.commit_if_large(&mut state)
    }

    /// Makes all writes so far consistent, and lets them survive a power cut, with all data.
    pub fn commit(&self) -> io::Result<()> {
        self.commit_held(&mut self.state())
    }

    /// The same for all that was settled, from any thread.
    pub fn commit_settled(&self) -> io::Result<()> {
        let is_unsettled = |state: &mut State| !state.unsettled.is_empty();
        let waited = self.settled.wait_timeout_while(self.state(), SETTLE_PATIENCE, is_unsettled);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        match waited.timed_out() {
            true => Err(io::Error::new(io::ErrorKind::TimedOut, "its changes are not settled")),
            false => self.commit_held(&mut state),
        }
    }

    /// Nothing is held, and nobody will go on: the log is removed.
    pub fn finish(&self) -> io::Result<()> {
        let mut state = self.state();
        self.commit_held(&mut state)?;
        state.log.take().map_or(Ok(()), TableLog::remove)
    }

    /// Whether the library may free clusters now. It gives them to the next who needs some, long before the image's tables have
    /// ceased to name them; what it is refused it forgets, and the cluster is lost until `qemu-img check -r leaks`. So this is
    /// only for what a failed operation took in vain, and `commit` must follow.
    pub fn let_free(&self, may_free: bool) {
        if self.file.let_free(may_free) || may_free {
            // Of what was a table and may be one again.
            self.state().clean.clear();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn units(&self, offset: u64) -> impl Iterator<Item = u64> {
        (offset..).step_by(self.unit_bytes as usize)
    }

    /// The image's contents of a unit that is not held.
    fn in_image<'a>(&self, state: &'a mut State, unit: u64) -> io::Result<&'a [u8]> {
        if !state.clean.contains_key(&unit) {
            let mut bytes = vec![0; self.unit_bytes as usize];
            self.file.read(&mut bytes[..], unit)?;
            state.know(unit, bytes.into());
        }
        Ok(&state.clean[&unit])
    }

    /// Changes of a process that was killed, in their order. The image must be as it left it, in all that they replace: as it
    /// was before them, or, if it was just being written to, as one of them has it.
    fn take_over(&self, state: &mut State, changes: Vec<Change>) -> io::Result<()> {
        let mut expected: HashMap<u64, Vec<u64>> = HashMap::new();
        for Change { offset, before, bytes } in &changes {
            expected.entry(*offset).or_default().extend([*before, checksum(bytes)]);
        }
        for Change { offset, bytes, .. } in changes {
            let before = checksum(self.in_image(state, offset)?);
            if bytes.len() as u64 != self.unit_bytes || !expected[&offset].contains(&before) {
                return Err(changed());
            }
            state.held.insert(offset, Held { bytes, before });
        }
        Ok(())
    }

    fn commit_if_large(&self, state: &mut State) -> io::Result<()> {
        let log_bytes = state.log.as_ref().map_or(0, TableLog::bytes);
        match state.held.len() * self.unit_bytes as usize > HELD_BYTES_MAX || log_bytes > LOG_BYTES_MAX {
            true => self.commit_held(state),
            false => Ok(()),
        }
    }

    fn commit_held(&self, state: &mut State) -> io::Result<()> {
        let mut steps = [const { Vec::new() }; 3];
        for unit in state.held.keys() {
            steps[state.layout.step_of(*unit)].push(*unit);
        }
        let [new, roots, entries] = steps;
        self.write_out(state, &new)?;
        self.file.sync_data()?;
        for step in [roots, entries] {
            if !step.is_empty() {
                self.write_out(state, &step)?;
                self.file.sync_data()?;
            }
        }
        let is_moved = state.held.range(state.layout.header.clone()).next().is_some();
        for (unit, Held { bytes, .. }) in std::mem::take(&mut state.held) {
            if state.layout.l1.contains(&unit) {
                state.layout.l2.extend(offsets_in(&bytes).filter(|offset| *offset > 0));
            }
            state.know(unit, bytes);
        }
        state.unsettled.clear();
        self.settled.notify_all();
        if is_moved {
            state.layout = Layout::read(&self.file, self.cluster_bytes)?;
        }
        state.log.as_mut().map_or(Ok(()), TableLog::clear)
    }

    fn write_out(&self, state: &State, units: &[u64]) -> io::Result<()> {
        for run in units.chunk_by(|one, next| one + self.unit_bytes == *next) {
            let bytes: Vec<u8> = run.iter().flat_map(|unit| &*state.held[unit].bytes).copied().collect();
            self.file.write(&bytes[..], run[0])?;
        }
        Ok(())
    }
}

impl State {
    fn know(&mut self, unit: u64, bytes: Box<[u8]>) {
        if self.clean.len() * bytes.len() > CLEAN_BYTES_MAX {
            self.clean.clear();
        }
        self.clean.insert(unit, bytes);
    }
}

impl Layout {
    /// As the image says now.
    fn read(file: &GuardedFile, cluster_bytes: u64) -> io::Result<Self> {
        let mut header = [0; 72];
        file.read(&mut header[..], 0)?;
        let u32_at = |at: usize| u64::from(u32::from_be_bytes(header[at..at + 4].try_into().expect("4 bytes")));
        let u64_at = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        let (l1_offset, l1_bytes) = (u64_at(40), u32_at(36) * 8);
        let (refcount_offset, refcount_bytes) = (u64_at(48), u32_at(56) * cluster_bytes);
        let l2 = read_entries(file, l1_offset, l1_bytes)?;
        Ok(Self {
            cluster_bytes,
            header: 0..cluster_bytes,
            refcount_table: refcount_offset..refcount_offset + refcount_bytes,
            l1: l1_offset..l1_offset + l1_bytes,
            l2: l2.into_iter().filter(|offset| *offset > 0).collect(),
        })
    }

    /// When a part of a table may be written: see the head of this file.
    fn step_of(&self, unit: u64) -> usize {
        let cluster = unit - unit % self.cluster_bytes;
        match unit {
            _ if self.header.contains(&unit) || self.refcount_table.contains(&unit) => 1,
            _ if self.l1.contains(&unit) || self.l2.contains(&cluster) => 2,
            // A table that is new, or the references to clusters, of which there can only be more.
            _ => 0,
        }
    }
}

/// Writes changed tables that an image's engine holds into the image, from any thread.
#[derive(Clone, Debug, Default)]
pub struct Committer(Arc<Mutex<Weak<Tables>>>);

impl Committer {
    pub(super) fn set(&self, tables: &Arc<Tables>) {
        *self.tables() = Arc::downgrade(tables);
    }

    /// Writes all that was reported to the guest into the image, durably. Without an engine, or for a raw image, nothing is held.
    pub fn commit(&self) -> io::Result<()> {
        let tables = self.tables().upgrade();
        tables.map_or(Ok(()), |tables| tables.commit_settled())
    }

    fn tables(&self) -> MutexGuard<'_, Weak<Tables>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of such an image's tables that are held as one unit.
pub(super) fn unit_bytes(cluster_bytes: u64) -> u64 {
    cluster_bytes.min(UNIT_BYTES_MAX)
}

fn changed() -> io::Error {
    let why = "it was changed, or exchanged, while no keeper held it and its guest was alive; start the guest anew";
    io::Error::new(io::ErrorKind::InvalidData, why)
}
