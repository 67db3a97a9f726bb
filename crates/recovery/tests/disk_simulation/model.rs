//! Model: what a guest may find on its disk, sector by sector, by what it wrote and what was answered.
//!
//! A write may take effect at any moment between its submission and its answer. So a sector may hold what any write in flight
//! puts there, and what had ended and was not surely replaced: a write that was answered replaces everything that had ended
//! before it began. One that failed replaces nothing, and may have taken effect all the same.

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
}

#[derive(Clone, Default)]
struct Cell {
    values: Vec<Value>,
    writers: u32,
    /// What was answered is of this turn of the storage, or a later one.
    turn: u64,
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
    Well,
    /// Its bytes may be there, or not: it failed, was a hint, or nobody was left to be answered.
    Unknown,
}

impl Model {
    pub fn new(blocks: u64) -> Self {
        let first = Value { stamp: FIRST_STAMP, writer: 0, ended: Some(0) };
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
        let allowed = cells().map(|cell| cell.values.iter().map(|value| value.stamp).collect()).collect();
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
            self.cells[sector as usize].values.push(Value { stamp, writer: id, ended: None });
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
                if end == End::Well {
                    cell.turn = cell.turn.max(storage.turn_of(sector, value.stamp, write.turn).unwrap_or(0));
                }
            }
            if end == End::Well {
                cell.values.retain(|value| value.ended.is_none_or(|ended| ended >= write.began));
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
                self.cells[sector as usize].values.retain(|value| value.stamp == stamp);
            }
        }
        Ok(())
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
        let zeroes = Value { stamp: 0, writer: 0, ended: Some(self.time) };
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
