//! Model: what a guest may find in each sector of its disk, given its writes and their answers.
//!
//! A write may take effect at any moment between its submission and its answer. So a sector may hold the value of any
//! write in flight, or of an ended write that was not certainly replaced. A successful write replaces all values of
//! writes that had ended before it began. A failed write replaces nothing, but may have taken effect.
//!
//! A power cut may bring back a replaced value, until its replacement is durable. It is durable if a flush was
//! submitted after its answer and was itself answered, or if the write was submitted while the write cache was off.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::storage::{FIRST_STAMP, SECTORS_A_BLOCK, Stamp, Storage};

/// Number of a request.
pub type Id = u64;

#[derive(Clone)]
struct Value {
    stamp: Stamp,
    writer: Id,
    /// None while the write is in flight.
    ended: Option<u64>,
    /// The time since which only a power cut can bring it back.
    replaced: Option<u64>,
}

impl Value {
    fn zeroes(now: u64) -> Self {
        Self { stamp: 0, writer: 0, ended: Some(now), replaced: None }
    }

    /// It was written, or may have been, before a write that began at this time.
    fn is_before(&self, began: u64) -> bool {
        self.ended.is_some_and(|ended| ended < began)
    }
}

#[derive(Clone, Default)]
struct Cell {
    values: Vec<Value>,
    writers: u32,
    /// A read was answered with this value, which the storage held at this turn or a later one.
    turn: u64,
}

impl Cell {
    /// Values that a read may find.
    fn found(&self) -> impl Iterator<Item = Stamp> {
        self.values.iter().filter(|value| value.replaced.is_none()).map(|value| value.stamp)
    }

    /// A read found this value while no write was in flight.
    fn must_be(&mut self, stamp: Stamp, now: u64) {
        for other in self.values.iter_mut().filter(|value| value.stamp != stamp) {
            other.replaced.get_or_insert(now);
        }
    }
}

struct Read {
    sectors: Range<u64>,
    allowed: Vec<Vec<Stamp>>,
    /// Nothing has been written there meanwhile, so it must be what the disk holds.
    quiet: Vec<bool>,
    /// The disk became shorter: any value is possible.
    gone: bool,
}

struct Write {
    sectors: Range<u64>,
    began: u64,
    /// Turn of the storage at that time.
    turn: u64,
}

pub struct Model {
    cells: Vec<Cell>,
    /// Length of the disk.
    sectors: u64,
    time: u64,
    reads: BTreeMap<Id, Read>,
    writes: BTreeMap<Id, Write>,
}

/// How a write ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The bytes are on the disk; they may be in its write cache.
    Well,
    /// The bytes survive a power cut.
    Durable,
    /// The bytes may be there or not: the write failed, was only a hint, or the guest died before the answer.
    Unknown,
}

impl Model {
    pub fn new(blocks: u64) -> Self {
        let first = Value { stamp: FIRST_STAMP, ..Value::zeroes(0) };
        let cell = Cell { values: vec![first], ..Cell::default() };
        let sectors = blocks * SECTORS_A_BLOCK;
        let (reads, writes) = (BTreeMap::new(), BTreeMap::new());
        Self { cells: vec![cell; sectors as usize], sectors, time: 0, reads, writes }
    }

    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    pub fn begin_read(&mut self, id: Id, sectors: Range<u64>) {
        let cells = || self.cells[sectors.start as usize..sectors.end as usize].iter();
        let allowed = cells().map(|cell| cell.found().collect()).collect();
        let quiet = cells().map(|cell| cell.writers == 0).collect();
        self.reads.insert(id, Read { sectors, allowed, quiet, gone: false });
    }

    pub fn begin_write(&mut self, id: Id, sectors: Range<u64>, stamp: Stamp, storage: &Storage) {
        self.time += 1;
        self.writes.insert(id, Write { sectors: sectors.clone(), began: self.time, turn: storage.turn() });
        for cell in &mut self.cells[sectors.start as usize..sectors.end as usize] {
            cell.writers += 1;
        }
        self.may_write(id, stamp);
    }

    /// Whether a write in flight may also have put this value there.
    pub fn may_write(&mut self, id: Id, stamp: Stamp) {
        let Some(write) = self.writes.get(&id) else { return };
        for sector in write.sectors.clone() {
            self.cells[sector as usize].values.push(Value { stamp, writer: id, ended: None, replaced: None });
            for read in self.reads.values_mut().filter(|read| read.sectors.contains(&sector)) {
                let at = (sector - read.sectors.start) as usize;
                read.allowed[at].push(stamp);
                read.quiet[at] = false;
            }
        }
    }

    pub fn end_write(&mut self, id: Id, end: End, storage: &Storage) {
        self.time += 1;
        let Some(write) = self.writes.remove(&id) else { return };
        for sector in write.sectors {
            let cell = &mut self.cells[sector as usize];
            cell.writers -= 1;
            for value in cell.values.iter_mut().filter(|value| value.writer == id) {
                value.ended = Some(self.time);
                if end != End::Unknown {
                    cell.turn = cell.turn.max(storage.turn_of(sector, value.stamp, write.turn).unwrap_or(0));
                }
            }
            match end {
                End::Unknown => {}
                End::Durable => cell.values.retain(|value| !value.is_before(write.began)),
                End::Well => {
                    for value in cell.values.iter_mut().filter(|value| value.is_before(write.began)) {
                        value.replaced.get_or_insert(self.time);
                    }
                }
            }
        }
    }

    /// The guest has died: nobody is left to be answered.
    pub fn end_all(&mut self, storage: &Storage) {
        self.reads.clear();
        let writes: Vec<Id> = self.writes.keys().copied().collect();
        writes.into_iter().for_each(|id| self.end_write(id, End::Unknown, storage));
    }

    pub fn forget_read(&mut self, id: Id) {
        self.reads.remove(&id);
    }

    /// A read was answered with these sectors.
    pub fn end_read(&mut self, id: Id, found: &[Option<Stamp>], storage: &Storage) -> Result<(), String> {
        self.time += 1;
        let Some(read) = self.reads.remove(&id) else { return Ok(()) };
        if read.gone {
            return Ok(());
        }
        for (at, sector) in read.sectors.clone().enumerate() {
            let Some(stamp) = found[at].filter(|stamp| read.allowed[at].contains(stamp)) else {
                let (allowed, is) = (&read.allowed[at], storage.now(sector));
                return Err(format!(
                    "read {id}: sector {sector} is {:?}, may be {allowed:?}, is {is} on the disk",
                    found[at]
                ));
            };
            if read.quiet[at] {
                if stamp != storage.now(sector) {
                    let is = storage.now(sector);
                    return Err(format!("read {id}: sector {sector} is {stamp}, and {is} on the disk"));
                }
                self.cells[sector as usize].must_be(stamp, self.time);
            }
        }
        Ok(())
    }

    /// State at the submission of a flush, for `end_flush`.
    pub fn begin_flush(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// The flush was answered: values replaced before its submission do not come back.
    pub fn end_flush(&mut self, submitted: u64) {
        for cell in &mut self.cells {
            cell.values.retain(|value| value.replaced.is_none_or(|replaced| replaced > submitted));
        }
    }

    /// Power was cut, and nobody is left to be answered. The disk holds one of the possible values, and keeps it.
    pub fn lose_power(&mut self, storage: &Storage) -> Result<(), String> {
        self.time += 1;
        let mut wrong = Ok(());
        for (sector, cell) in (0..).zip(&mut self.cells) {
            let found = storage.now(sector);
            if wrong.is_ok() && !cell.values.iter().any(|value| value.stamp == found) {
                let allowed: Vec<Stamp> = cell.values.iter().map(|value| value.stamp).collect();
                wrong = Err(format!("after a power cut sector {sector} is {found}, may be {allowed:?}"));
            }
            cell.values = vec![Value { stamp: found, ..Value::zeroes(self.time) }];
        }
        wrong
    }

    /// All answers so far, with the turn of the storage that each belongs to.
    pub fn answered(&self) -> Vec<u64> {
        self.cells[..self.sectors as usize].iter().map(|cell| cell.turn).collect()
    }

    /// Every write answered by then is durable now.
    pub fn check_durable(&self, sectors: Range<u64>, answered: &[u64], storage: &Storage) -> Result<(), String> {
        for sector in sectors {
            let turn = answered.get(sector as usize).copied().unwrap_or(0);
            if storage.durable_turn(sector) < turn {
                let durable = storage.durable_turn(sector);
                return Err(format!("sector {sector}: turn {turn} was flushed, turn {durable} is durable"));
            }
        }
        Ok(())
    }

    /// The disk's size has changed.
    pub fn resize(&mut self, sectors: u64) {
        self.time += 1;
        let zeroes = Value::zeroes(self.time);
        let fresh = Cell { values: vec![zeroes.clone()], ..Cell::default() };
        if self.cells.len() < sectors as usize {
            self.cells.resize(sectors as usize, fresh);
        }
        if sectors < self.sectors {
            for cell in &mut self.cells[sectors as usize..] {
                cell.turn = 0;
                // A write in flight may go beyond the end of the disk, and be found there later.
                cell.values.retain(|value| value.ended.is_none());
                cell.values.push(zeroes.clone());
            }
            for read in self.reads.values_mut().filter(|read| read.sectors.end > sectors) {
                read.gone = true;
            }
        }
        self.sectors = sectors;
    }
}
