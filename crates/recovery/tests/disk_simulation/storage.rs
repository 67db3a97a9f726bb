//! Storage: the disk's content, the durable part of it, and the engine that carries out operations when the schedule
//! says so.
//!
//! push -> submit -> apply (to the image: completely, partly or not at all) -> report -> reap
//!
//! Each sector holds a stamp, the number of the write that put it there, so its bytes tell their origin. A sector
//! remembers its whole history, because a power cut may bring back any value that is not older than the durable one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_disk::buffer::BufferPool;
use hearth_disk::clock::Clock;
use hearth_disk::engine::{Completion, Engine, Operation, Submission};
use hearth_disk::limit::Limits;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::random::Random;

pub const SECTOR: u64 = 512;
pub const BLOCK: u64 = 4096;
pub const SECTORS_A_BLOCK: u64 = BLOCK / SECTOR;

/// Number of a write. 0 stands for zeroes.
pub type Stamp = u32;

/// Content of the disk before the first write.
pub const FIRST_STAMP: Stamp = 1;

/// Payload of a panic that kills a keeper during its work.
pub struct Killed {
    /// At a fault point of the server: the rings or the inflight region are half written.
    pub at_fault_point: bool,
}

/// Bytes of a sector with this stamp.
pub fn fill(sector: u64, stamp: Stamp, out: &mut [u8]) {
    let word = if stamp == 0 { 0 } else { sector << 32 | u64::from(stamp) };
    out.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word.to_le_bytes()));
}

/// Stamp of these bytes. None if they are not a value of this sector.
pub fn stamp_of(sector: u64, bytes: &[u8]) -> Option<Stamp> {
    let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let is_whole = bytes.chunks_exact(8).all(|chunk| chunk == word.to_le_bytes());
    let is_here = word == 0 || word >> 32 == sector;
    (is_whole && is_here).then_some(word as Stamp)
}

#[derive(Clone)]
struct Sector {
    durable_turn: u64,
    /// Everything it has held, newest last.
    history: Vec<Change>,
}

#[derive(Clone, Copy)]
struct Change {
    stamp: Stamp,
    turn: u64,
    operation: u64,
}

impl Sector {
    fn new(stamp: Stamp) -> Self {
        Self { durable_turn: 0, history: vec![Change { stamp, turn: 0, operation: 0 }] }
    }

    fn last(&self) -> Change {
        *self.history.last().expect("there is a first one")
    }
}

struct Pending {
    /// Number of operations so far.
    number: u64,
    submission: Submission,
    is_submitted: bool,
    pushed: u64,
}

struct Applied {
    number: u64,
    completion: Completion,
}

/// How an operation ends.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    Well,
    /// Only this many sectors are changed.
    Fails {
        after: u64,
    },
    /// As before, because space is missing.
    Full {
        after: u64,
    },
}

/// The disk under the server. It outlives keepers.
pub struct Storage {
    file: File,
    sectors: Vec<Sector>,
    pending: Vec<Pending>,
    applied: Vec<Applied>,
    ended: Vec<Completion>,
    /// When each operation was reported.
    reported: Vec<u64>,
    turn: u64,
    bell: Option<OwnedFd>,
    pool: Option<Arc<BufferPool>>,
    pub meter: Meter,
    /// The keeper dies after this many more accesses to engine or memory, and fault points.
    pub fuse: Option<u64>,
    /// The next submits fail.
    pub refusals: u64,
    /// The first violation that was found.
    pub problem: Option<String>,
}

pub type Shared = Arc<Mutex<Storage>>;

pub fn lock(storage: &Mutex<Storage>) -> MutexGuard<'_, Storage> {
    // A keeper that panics leaves the storage whole, so a poisoned lock is ignored.
    storage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts down to the keeper's death.
pub fn burn(storage: &Mutex<Storage>) {
    burn_at(storage, false);
}

/// Counts down to the keeper's death at a fault point of the server.
pub fn burn_at_fault_point(storage: &Mutex<Storage>) {
    burn_at(storage, true);
}

fn burn_at(storage: &Mutex<Storage>, at_fault_point: bool) {
    let mut found = lock(storage);
    match &mut found.fuse {
        Some(0) => {
            found.fuse = None;
            drop(found);
            std::panic::panic_any(Killed { at_fault_point });
        }
        Some(left) => *left -= 1,
        None => {}
    }
}

impl Storage {
    pub fn new(blocks: u64, meter: Meter) -> Shared {
        let file: File = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap().into();
        let sectors = blocks * SECTORS_A_BLOCK;
        let mut bytes = vec![0; (sectors * SECTOR) as usize];
        for (sector, bytes) in (0..).zip(bytes.chunks_exact_mut(SECTOR as usize)) {
            fill(sector, FIRST_STAMP, bytes);
        }
        file.write_all_at(&bytes, 0).unwrap();
        Arc::new(Mutex::new(Self {
            file,
            sectors: vec![Sector::new(FIRST_STAMP); sectors as usize],
            pending: Vec::new(),
            applied: Vec::new(),
            ended: Vec::new(),
            reported: vec![0],
            turn: 0,
            bell: None,
            pool: None,
            meter,
            fuse: None,
            refusals: 0,
            problem: None,
        }))
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// An engine for the next keeper.
    pub fn engine(storage: &Shared, pool: &Arc<BufferPool>) -> Box<dyn Engine> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut found = lock(storage);
        found.bell = Some(bell.try_clone().unwrap());
        found.pool = Some(Arc::clone(pool));
        Box::new(SimulatedEngine { storage: Arc::clone(storage), bell })
    }

    pub fn now(&self, sector: u64) -> Stamp {
        self.sectors.get(sector as usize).map_or(0, |sector| sector.last().stamp)
    }

    /// Bytes of a block.
    pub fn block(&self, block: u64) -> [u8; BLOCK as usize] {
        let mut bytes = [0; BLOCK as usize];
        for (sector, bytes) in (block * SECTORS_A_BLOCK..).zip(bytes.chunks_exact_mut(SECTOR as usize)) {
            fill(sector, self.now(sector), bytes);
        }
        bytes
    }

    /// The turn at which a write of this stamp reached the sector, the last one if there were several. Zeroes carry no
    /// number, so for them it is the first turn after `since`.
    pub fn turn_of(&self, sector: u64, stamp: Stamp, since: u64) -> Option<u64> {
        let history = &self.sectors.get(sector as usize)?.history;
        let mut found = history.iter().filter(|change| change.stamp == stamp && change.turn > since);
        let found = if stamp == 0 { found.next() } else { found.next_back() };
        found.map(|change| change.turn)
    }

    pub fn turn(&self) -> u64 {
        self.turn
    }

    pub fn durable_turn(&self, sector: u64) -> u64 {
        self.sectors.get(sector as usize).map_or(u64::MAX, |sector| sector.durable_turn)
    }

    /// The operator resizes the file and syncs it.
    pub fn set_blocks(&mut self, blocks: u64) {
        let sectors = blocks * SECTORS_A_BLOCK;
        self.file.set_len(sectors * SECTOR).unwrap();
        self.turn += 1;
        for at in sectors..self.sectors.len() as u64 {
            self.change(at, 0, 0);
            self.sectors[at as usize].durable_turn = self.turn;
        }
        self.reach(sectors);
    }

    fn reach(&mut self, sectors: u64) {
        if (self.sectors.len() as u64) < sectors {
            self.sectors.resize(sectors as usize, Sector::new(0));
        }
    }

    fn change(&mut self, sector: u64, stamp: Stamp, operation: u64) {
        self.reach(sector + 1);
        let change = Change { stamp, turn: self.turn, operation };
        self.sectors[sector as usize].history.push(change);
    }

    /// Operations that may be applied now.
    pub fn waiting(&self) -> usize {
        self.pending.iter().filter(|pending| pending.is_submitted).count()
    }

    pub fn unreported(&self) -> usize {
        self.applied.len()
    }

    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.applied.is_empty() && self.ended.is_empty()
    }

    /// Whether the waiting operation at this index needs space.
    pub fn needs_space(&self, place: usize) -> bool {
        let pending = self.pending.iter().filter(|pending| pending.is_submitted).nth(place);
        pending.is_some_and(|pending| {
            matches!(pending.submission.operation, Operation::Write(_) | Operation::WriteZeroes { .. })
        })
    }

    /// Applies the waiting operation at this index to the image.
    pub fn apply(&mut self, place: usize, outcome: Outcome, random: &mut Random) {
        let submitted = |(_, pending): &(usize, &Pending)| pending.is_submitted;
        let Some((at, _)) = self.pending.iter().enumerate().filter(submitted).nth(place) else { return };
        let pending = self.pending.remove(at);
        let result = self.carry_out(&pending, outcome, random);
        let completion = Completion { token: pending.submission.token, result };
        self.applied.push(Applied { number: pending.number, completion });
    }

    fn carry_out(&mut self, pending: &Pending, outcome: Outcome, random: &mut Random) -> io::Result<()> {
        let Submission { operation, offset, bytes, .. } = pending.submission;
        self.turn += 1;
        let sectors = offset / SECTOR..(offset + bytes) / SECTOR;
        let changed = match outcome {
            Outcome::Well => sectors.clone(),
            Outcome::Fails { after } | Outcome::Full { after } => sectors.start..sectors.end.min(sectors.start + after),
        };
        match operation {
            Operation::Read(_) | Operation::Write(_) if !(offset | bytes).is_multiple_of(SECTOR) => {
                self.fault(format!("{operation:?} of {bytes} bytes at {offset} is not of whole sectors"));
            }
            Operation::Read(slot) => {
                let pool = Arc::clone(self.pool.as_ref().unwrap());
                // SAFETY: the operation is in flight, so the slot is the engine's; nobody else has a reference to it.
                let slot = unsafe { &mut pool.bytes_mut(slot)[..bytes as usize] };
                for (sector, bytes) in sectors.zip(slot.chunks_exact_mut(SECTOR as usize)) {
                    fill(sector, self.now(sector), bytes);
                }
            }
            Operation::Write(slot) => {
                let pool = Arc::clone(self.pool.as_ref().unwrap());
                // SAFETY: as above.
                let slot = unsafe { &pool.bytes_mut(slot)[..bytes as usize] };
                for (sector, bytes) in changed.zip(slot.chunks_exact(SECTOR as usize)) {
                    match stamp_of(sector, bytes) {
                        Some(stamp) => self.write(sector, stamp, pending.number),
                        None => self.fault(format!("sector {sector} is written with bytes that are nobody's")),
                    }
                }
            }
            Operation::Flush if matches!(outcome, Outcome::Well) => self.flush(pending.pushed, random),
            Operation::Flush => {}
            Operation::Discard => {
                for sector in changed.filter(|_| random.one_in(2)) {
                    self.write(sector, 0, pending.number);
                }
            }
            Operation::WriteZeroes { .. } => changed.for_each(|sector| self.write(sector, 0, pending.number)),
        }
        let errno = match outcome {
            Outcome::Well => return Ok(()),
            Outcome::Fails { .. } => rustix::io::Errno::IO,
            Outcome::Full { .. } => rustix::io::Errno::NOSPC,
        };
        Err(errno.into())
    }

    fn write(&mut self, sector: u64, stamp: Stamp, operation: u64) {
        let mut bytes = [0; SECTOR as usize];
        fill(sector, stamp, &mut bytes);
        self.file.write_all_at(&bytes, sector * SECTOR).unwrap();
        self.change(sector, stamp, operation);
    }

    /// Every write reported when the flush arrived is durable now. Later writes may be.
    fn flush(&mut self, pushed: u64, random: &mut Random) {
        let was_reported = |change: &Change| {
            let reported = self.reported[change.operation as usize];
            change.operation == 0 || (reported > 0 && reported <= pushed)
        };
        for sector in &mut self.sectors {
            let durable = match random.one_in(2) {
                true => Some(sector.last()),
                false => sector.history.iter().copied().rfind(was_reported),
            };
            sector.durable_turn = durable.map_or(0, |change| change.turn).max(sector.durable_turn);
        }
    }

    /// Reports an applied operation to the keeper.
    pub fn report(&mut self, place: usize) {
        if place >= self.applied.len() {
            return;
        }
        let Applied { number, completion } = self.applied.swap_remove(place);
        self.turn += 1;
        self.reported[number as usize] = self.turn;
        self.ended.push(completion);
        if let Some(bell) = &self.bell {
            rustix::io::write(bell, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// The keeper has died. Each operation in flight is applied completely, partly or not at all. All of them have
    /// ended when the next keeper starts, so its flushes cover them.
    pub fn abandon(&mut self, random: &mut Random) {
        for pending in std::mem::take(&mut self.pending) {
            let sectors = pending.submission.bytes / SECTOR;
            let outcome = match random.below(3) {
                0 => Outcome::Well,
                1 => Outcome::Fails { after: random.below(sectors + 1) },
                _ => Outcome::Fails { after: 0 },
            };
            let _ = self.carry_out(&pending, outcome, random);
        }
        self.turn += 1;
        self.reported.iter_mut().filter(|reported| **reported == 0).for_each(|reported| *reported = self.turn);
        self.applied.clear();
        self.ended.clear();
        (self.bell, self.pool, self.fuse) = (None, None, None);
    }

    /// The power is cut, which also kills the keeper. Any subset of the changes that no flush has made durable
    /// survives, drawn block by block or sector by sector. The disk's contents afterwards are durable.
    pub fn lose_power(&mut self, random: &mut Random) {
        self.abandon(random);
        let on_disk = self.file.metadata().unwrap().len() / SECTOR;
        let unit = random.pick(&[1, SECTORS_A_BLOCK]);
        let is_mixed = random.one_in(2);
        // Number of eighths of a unit's sectors that keep a change made since the last durable one.
        let mut eighths = random.pick(&[0, 8]);
        self.turn += 1;
        for (sector, found) in (0..).zip(&mut self.sectors) {
            if is_mixed && sector % unit == 0 {
                let some = random.below(9) as usize;
                eighths = random.pick(&[0, 8, some]);
            }
            let durable = found.history.partition_point(|change| change.turn <= found.durable_turn).saturating_sub(1);
            let newer = found.history.len() - 1 - durable;
            let stamp = match sector < on_disk {
                true => found.history[durable + (newer * eighths + 4) / 8].stamp,
                false => 0,
            };
            if sector < on_disk && stamp != found.last().stamp {
                let mut bytes = [0; SECTOR as usize];
                fill(sector, stamp, &mut bytes);
                self.file.write_all_at(&bytes, sector * SECTOR).unwrap();
            }
            *found = Sector { durable_turn: self.turn, history: vec![Change { stamp, turn: self.turn, operation: 0 }] };
        }
    }

    pub fn fault(&mut self, what: String) {
        self.problem.get_or_insert(what);
    }
}

struct SimulatedEngine {
    storage: Shared,
    bell: OwnedFd,
}

impl Engine for SimulatedEngine {
    fn push(&mut self, submission: Submission) {
        burn(&self.storage);
        let mut storage = lock(&self.storage);
        let number = storage.reported.len() as u64;
        storage.reported.push(0);
        if let Err(what) = storage.meter.passes(&submission) {
            storage.fault(what);
        }
        let pushed = storage.turn;
        storage.pending.push(Pending { number, submission, is_submitted: false, pushed });
    }

    fn submit(&mut self) -> io::Result<()> {
        burn(&self.storage);
        let mut storage = lock(&self.storage);
        if storage.refusals > 0 {
            storage.refusals -= 1;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        storage.pending.iter_mut().for_each(|pending| pending.is_submitted = true);
        Ok(())
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        burn(&self.storage);
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        ended.append(&mut lock(&self.storage).ended);
    }

    fn wait(&mut self, _at_most: Duration) -> io::Result<()> {
        Ok(())
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn in_flight(&self) -> usize {
        let storage = lock(&self.storage);
        storage.pending.len() + storage.applied.len() + storage.ended.len()
    }
}

/// Counts the operations on the image against the limits, independently of the server: nothing unpaid may pass, and no
/// more than was paid for.
pub struct Meter {
    limits: Limits,
    clock: Clock,
    start: Instant,
    bytes_paid_ns: u64,
    operations_paid_ns: u64,
    /// A stop may wait for operations in flight: then they pass on credit.
    pub is_stopping: bool,
    /// Most operations that one stop can wait for.
    pub credit: (u64, u64),
}

/// Most that an idle disk may have saved up.
const SAVED_NS: u64 = 10_000_000;

impl Meter {
    pub fn new(limits: Limits, clock: Clock, credit: (u64, u64)) -> Self {
        let start = clock.now();
        Self { limits, clock, start, bytes_paid_ns: 0, operations_paid_ns: 0, is_stopping: false, credit }
    }

    /// A keeper starts without debt.
    pub fn restart(&mut self) {
        (self.bytes_paid_ns, self.operations_paid_ns, self.is_stopping) = (0, 0, false);
    }

    fn passes(&mut self, submission: &Submission) -> Result<(), String> {
        // Lower limit: reads are widened to whole blocks.
        let bytes = match submission.operation {
            Operation::Flush => return Ok(()),
            Operation::Read(_) => submission.bytes.saturating_sub(2 * (BLOCK - SECTOR)).max(SECTOR),
            Operation::Write(_) => SECTOR,
            Operation::Discard | Operation::WriteZeroes { .. } => 0,
        };
        let bytes =
            if matches!(submission.operation, Operation::Write(_)) { submission.bytes.max(bytes) } else { bytes };
        let now = (self.clock.now() - self.start).as_nanos() as u64;
        let limits = [
            (self.limits.bytes_per_second, &mut self.bytes_paid_ns, bytes, self.credit.0),
            (self.limits.operations_per_second, &mut self.operations_paid_ns, 1, self.credit.1),
        ];
        for (limit, paid_ns, amount, credit) in limits {
            let Some(limit) = limit else { continue };
            let allowed = if self.is_stopping { now + credit * 1_000_000_000 / limit } else { now };
            if *paid_ns > allowed {
                let ahead = Duration::from_nanos(*paid_ns - now);
                return Err(format!("{submission:?} passes the limit of {limit} a second {ahead:?} too early"));
            }
            *paid_ns = (*paid_ns).max(now.saturating_sub(SAVED_NS)) + amount * 1_000_000_000 / limit;
        }
        Ok(())
    }
}
