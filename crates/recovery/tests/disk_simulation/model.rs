//! Model: what a guest may find on its disk, sector by sector, by what it wrote and what was answered.
//!
//! A write may take effect at any moment between its submission and its answer. So a sector may hold what any write in flight
//! puts there, and what had ended and was not surely replaced: a write that was answered replaces everything that had ended
//! before it began. One that failed replaces nothing, and may have taken effect all the same.
//!
//! A value that was replaced may come back with a power cut, until what replaced it is durable: a flush was submitted after
//! that had been answered, and was answered as well; or the write was submitted without a write cache.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::storage::{FIRST_STAMP, SECTORS_A_BLOCK, Stamp, Storage};

/// Names a request.
pub type Id = u64;

#[derive(Clone)]
struct Value {
    stamp: Stamp,
    writer: Id,
    /// None: the write is in flight.
    ended: Option<u64>,
    /// Since when only a power cut can bring it back.
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
    /// What was answered is of this turn of the storage, or a later one.
    turn: u64,
}

impl Cell {
    /// What a read may find.
    fn found(&self) -> impl Iterator<Item = Stamp> {
        self.values.iter().filter(|value| value.replaced.is_none()).map(|value| value.stamp)
    }

    /// A read found this, and no write was in flight.
    fn must_be(&mut self, stamp: Stamp, now: u64) {
        for other in self.values.iter_mut().filter(|value| value.stamp != stamp) {
            other.replaced.get_or_insert(now);
        }
    }
}

struct Read {
    sectors: Range<u64>,
    allowed: Vec<Vec<Stamp>>,
    /// Nothing has written there meanwhile: then it must be what the disk holds.
    quiet: Vec<bool>,
    /// The disk became shorter: it may be anything.
    gone: bool,
}

struct Write {
    sectors: Range<u64>,
    began: u64,
    /// The turn of the storage then.
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
    /// They survive a power cut.
    Durable,
    /// Its bytes may be there, or not: it failed, was a hint, or nobody was left to be answered.
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

    /// A write in flight may as well put this there.
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

    /// Nobody is left to answer.
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

    /// When a flush is submitted, for `end_flush`.
    pub fn begin_flush(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// A flush was answered that was submitted then: what had been replaced by that time does not come back.
    pub fn end_flush(&mut self, submitted: u64) {
        for cell in &mut self.cells {
            cell.values.retain(|value| value.replaced.is_none_or(|replaced| replaced > submitted));
        }
    }

    /// Power was cut, and nobody is left to be answered: the disk holds what it may hold, and keeps it.
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

    /// All that was answered before now, by the turn of the storage that it is of.
    pub fn answered(&self) -> Vec<u64> {
        self.cells[..self.sectors as usize].iter().map(|cell| cell.turn).collect()
    }

    /// What was answered then is durable now.
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

    /// The disk has another length.
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
                // What is still in flight may be put behind the end of the disk, and be found there later.
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
