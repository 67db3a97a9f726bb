//! Guest: RAM, virtqueues, and the driver that submits requests and checks the answers.
//!
//! ```text
//! page of a queue: 0 descriptors | 0x200 available | 0x400 used | 0x800 header and status of each request
//! ```

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use hearth_recovery::incarnation::Incarnation;
use rustix::event::{EventfdFlags, eventfd};

use crate::model::Id;
use crate::random::Random;
use crate::storage::{BLOCK, SECTOR, Stamp, fill, stamp_of};

pub const QUEUES: usize = 3;
pub const QUEUE_SIZE: u16 = 32;
/// Descriptors of a request: header, at most two pieces of data, status.
const DESCRIPTORS: u16 = 4;
/// Requests that fit into a queue.
pub const SLOTS: u16 = QUEUE_SIZE / DESCRIPTORS;
pub const AVAILABLE: u64 = 0x200;
pub const USED: u64 = 0x400;
const SLIPS: u64 = 0x800;
const SLIP_BYTES: u64 = 64;
pub const RAM_BYTES: u64 = 128 * BLOCK;
const FIRST_DATA_PAGE: u64 = 8;
pub const PAGES: u64 = RAM_BYTES / BLOCK;
/// A bit for each page of RAM.
pub type Pages = u128;
const _: () = assert!(PAGES == Pages::BITS as u64);
pub const BLOCKS_A_REQUEST: u64 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    Identify,
    Discard,
    WriteZeroes,
    /// A request type that no device supports.
    Odd,
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Flush => 4,
            Self::Identify => 8,
            Self::Discard => 11,
            Self::WriteZeroes => 13,
            Self::Odd => 99,
        }
    }
}

/// A request that has not been answered.
#[derive(Debug)]
pub struct Request {
    pub id: Id,
    pub kind: Kind,
    /// First sector on the disk.
    pub sectors: Range<u64>,
    /// Guest addresses and lengths of its data.
    pieces: Vec<(u64, u64)>,
    /// The answers before the flush was submitted, and the time of its submission.
    pub answered: Vec<u64>,
    pub submitted: u64,
    /// It was submitted while the write cache was off.
    pub is_through: bool,
    /// The disk became too short for the request.
    pub is_gone: bool,
}

/// An answer that the driver has received.
pub struct Answer {
    pub request: Request,
    /// Status byte. 255: none was written.
    pub status: u8,
    pub bytes: u32,
    /// Data of a read.
    pub found: Vec<Option<Stamp>>,
}

pub struct Ring {
    pub kick: OwnedFd,
    pub call: OwnedFd,
    slots: Vec<Option<Request>>,
    next_available: u16,
    next_used: u16,
}

impl Ring {
    fn new() -> Self {
        let counter = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let slots = (0..SLOTS).map(|_| None).collect();
        Self { kick: counter(), call: counter(), slots, next_available: 0, next_used: 0 }
    }
}

pub struct Guest {
    pub ram: File,
    pub rings: Vec<Ring>,
    /// For each page, the request whose data it holds.
    owners: Vec<Option<Id>>,
    /// Pages that the guest itself has written.
    written: Cell<Pages>,
    pub event_index: bool,
}

pub fn page_of(queue: usize) -> u64 {
    (queue as u64 + 1) * BLOCK
}

impl Guest {
    pub fn new(incarnation: &Incarnation) -> Self {
        let ram = File::options().read(true).write(true).open(incarnation.ram.path()).unwrap();
        let rings = (0..QUEUES).map(|_| Ring::new()).collect();
        Self { ram, rings, owners: vec![None; PAGES as usize], written: Cell::new(0), event_index: true }
    }

    fn write(&self, bytes: &[u8], address: u64) {
        self.ram.write_all_at(bytes, address).unwrap();
        let end = (address + bytes.len() as u64).div_ceil(BLOCK);
        (address / BLOCK..end).for_each(|page| self.written.set(self.written.get() | 1 << page));
    }

    /// Returns the pages that the guest has written since the last call.
    pub fn take_written(&self) -> Pages {
        self.written.take()
    }

    pub fn is_waiting(&self) -> bool {
        self.rings.iter().any(|ring| ring.slots.iter().any(Option::is_some))
    }

    pub fn waiting(&self) -> impl Iterator<Item = &Request> {
        self.rings.iter().flat_map(|ring| ring.slots.iter().flatten())
    }

    /// The write cache is switched on again: requests in flight may now be answered before they are durable too.
    pub fn rely_on_flushes(&mut self) {
        let waiting = self.rings.iter_mut().flat_map(|ring| ring.slots.iter_mut().flatten());
        waiting.for_each(|request| request.is_through = false);
    }

    /// The disk's size changes to this many sectors.
    pub fn shrink_to(&mut self, sectors: u64) {
        let waiting = self.rings.iter_mut().flat_map(|ring| ring.slots.iter_mut().flatten());
        waiting.for_each(|request| request.is_gone |= request.sectors.end > sectors);
    }

    /// The driver starts again: requests in flight are forgotten.
    pub fn reset(&mut self) {
        for queue in 0..QUEUES {
            self.rings[queue] = Ring::new();
            self.write(&[0; BLOCK as usize], page_of(queue));
        }
        self.owners.fill(None);
    }

    pub fn used_index(&self, queue: usize) -> u16 {
        self.load(page_of(queue) + USED + 2)
    }

    /// Finds free RAM for this many bytes, at the start of a page or anywhere.
    fn place(&mut self, id: Id, bytes: u64, random: &mut Random) -> Option<u64> {
        let within = if random.one_in(4) { random.below(BLOCK / SECTOR) * SECTOR } else { 0 };
        let pages = (within + bytes).div_ceil(BLOCK);
        let first = FIRST_DATA_PAGE + random.below(PAGES - FIRST_DATA_PAGE - pages);
        let taken = &mut self.owners[first as usize..(first + pages) as usize];
        if taken.iter().any(Option::is_some) {
            return None;
        }
        taken.fill(Some(id));
        Some(first * BLOCK + within)
    }

    /// Puts a request into a queue. None if there is no space.
    pub fn submit(
        &mut self,
        queue: usize,
        id: Id,
        kind: Kind,
        sectors: Range<u64>,
        stamp: Stamp,
        random: &mut Random,
    ) -> Option<&mut Request> {
        let slot = self.rings[queue].slots.iter().position(Option::is_none)?;
        let data_bytes = match kind {
            Kind::Read | Kind::Write => (sectors.end - sectors.start) * SECTOR,
            Kind::Identify => 20,
            Kind::Discard | Kind::WriteZeroes => 16,
            Kind::Flush | Kind::Odd => 0,
        };
        let mut pieces = Vec::new();
        if data_bytes > 0 {
            let is_cut = data_bytes > SECTOR && data_bytes.is_multiple_of(SECTOR) && random.one_in(4);
            let cut = if is_cut { random.below(data_bytes / SECTOR - 1) * SECTOR + SECTOR } else { data_bytes };
            for bytes in [cut, data_bytes - cut].into_iter().filter(|bytes| *bytes > 0) {
                match self.place(id, bytes, random) {
                    Some(address) => pieces.push((address, bytes)),
                    None => {
                        self.release(id);
                        return None;
                    }
                }
            }
        }
        let request = Request {
            id,
            kind,
            sectors: sectors.clone(),
            pieces,
            answered: Vec::new(),
            submitted: 0,
            is_through: false,
            is_gone: false,
        };
        match kind {
            Kind::Write => self.put(&request, stamp),
            Kind::Discard | Kind::WriteZeroes => {
                let count = (sectors.end - sectors.start) as u32;
                let range = [&sectors.start.to_le_bytes()[..], &count.to_le_bytes(), &[0; 4]].concat();
                self.write(&range, request.pieces[0].0);
            }
            _ => {}
        }
        self.write_chain(queue, slot, &request);
        let ring = &mut self.rings[queue];
        ring.slots[slot] = Some(request);
        ring.slots[slot].as_mut()
    }

    fn write_chain(&mut self, queue: usize, slot: usize, request: &Request) {
        let base = page_of(queue);
        let head = slot as u16 * DESCRIPTORS;
        let slip = base + SLIPS + slot as u64 * SLIP_BYTES;
        let sector = if matches!(request.kind, Kind::Read | Kind::Write) { request.sectors.start } else { 0 };
        let header = [&request.kind.number().to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.write(&header, slip);
        self.write(&[255], slip + 16);
        let into_guest = matches!(request.kind, Kind::Read | Kind::Identify);
        let mut chain = vec![(slip, 16, false)];
        chain.extend(request.pieces.iter().map(|&(address, bytes)| (address, bytes, into_guest)));
        chain.push((slip + 16, 1, true));
        let mut table = Vec::new();
        for (at, &(address, bytes, writable)) in chain.iter().enumerate() {
            let is_last = at + 1 == chain.len();
            let flags = u16::from(!is_last) | u16::from(writable) << 1;
            let next = if is_last { 0 } else { head + at as u16 + 1 };
            table.extend_from_slice(&address.to_le_bytes());
            table.extend_from_slice(&(bytes as u32).to_le_bytes());
            table.extend_from_slice(&flags.to_le_bytes());
            table.extend_from_slice(&next.to_le_bytes());
        }
        self.write(&table, base + u64::from(head) * 16);
        let ring = &mut self.rings[queue];
        let place = u64::from(ring.next_available % QUEUE_SIZE);
        let before = ring.next_available;
        ring.next_available = before.wrapping_add(1);
        let after = ring.next_available;
        self.write(&head.to_le_bytes(), base + AVAILABLE + 4 + place * 2);
        self.write(&after.to_le_bytes(), base + AVAILABLE + 2);
        if self.wants_kick(queue, before, after) {
            rustix::io::write(&self.rings[queue].kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Whether the driver notifies the device, as real drivers decide it.
    fn wants_kick(&self, queue: usize, before: u16, after: u16) -> bool {
        let used = page_of(queue) + USED;
        if !self.event_index {
            return self.load(used) & 1 == 0;
        }
        let event = self.load(used + 4 + u64::from(QUEUE_SIZE) * 8);
        after.wrapping_sub(event).wrapping_sub(1) < after.wrapping_sub(before)
    }

    /// Fills the data of a write.
    fn put(&self, request: &Request, stamp: Stamp) {
        let mut bytes = vec![0; ((request.sectors.end - request.sectors.start) * SECTOR) as usize];
        for (sector, bytes) in request.sectors.clone().zip(bytes.chunks_exact_mut(SECTOR as usize)) {
            fill(sector, stamp, bytes);
        }
        let mut rest = &bytes[..];
        for &(address, length) in &request.pieces {
            let (now, later) = rest.split_at(length as usize);
            self.write(now, address);
            rest = later;
        }
    }

    /// Changes data of a write in flight. Returns the request.
    pub fn scribble_over_write(&self, stamp: Stamp, random: &mut Random) -> Option<Id> {
        let writes: Vec<&Request> = self.waiting().filter(|request| request.kind == Kind::Write).collect();
        let request = writes.get(random.below(writes.len().max(1) as u64) as usize)?;
        self.put(request, stamp);
        Some(request.id)
    }

    /// Uses a page of the page cache for something else.
    pub fn scribble(&self, random: &mut Random) {
        let page = FIRST_DATA_PAGE + random.below(PAGES - FIRST_DATA_PAGE);
        if self.owners[page as usize].is_none() {
            let start = page * BLOCK + random.below(BLOCK / 8) * 8;
            self.write(&random.next().to_le_bytes(), start);
        }
    }

    /// Takes the next answer from a queue, if there is one.
    pub fn look(&mut self, queue: usize) -> Option<Result<Answer, String>> {
        let used = page_of(queue) + USED;
        let next_used = self.rings[queue].next_used;
        if self.load(used + 2) == next_used {
            // Ask the device to interrupt the driver for the next answer.
            let wish = page_of(queue) + AVAILABLE + 4 + u64::from(QUEUE_SIZE) * 2;
            self.write(&next_used.to_le_bytes(), wish);
            return None;
        }
        let mut entry = [0; 8];
        self.ram.read_exact_at(&mut entry, used + 4 + u64::from(next_used % QUEUE_SIZE) * 8).unwrap();
        let head = u32::from_le_bytes(entry[..4].try_into().unwrap());
        let bytes = u32::from_le_bytes(entry[4..].try_into().unwrap());
        self.rings[queue].next_used = next_used.wrapping_add(1);
        let slot = (head / u32::from(DESCRIPTORS)) as usize;
        let request = self.rings[queue].slots.get_mut(slot).and_then(Option::take);
        let Some(request) = request.filter(|_| head % u32::from(DESCRIPTORS) == 0) else {
            return Some(Err(format!("queue {queue}: head {head} is answered and not in flight")));
        };
        let mut status = [0];
        self.ram.read_exact_at(&mut status, page_of(queue) + SLIPS + slot as u64 * SLIP_BYTES + 16).unwrap();
        let found = if request.kind == Kind::Read { self.found(&request) } else { Vec::new() };
        self.release(request.id);
        Some(Ok(Answer { request, status: status[0], bytes, found }))
    }

    fn found(&self, request: &Request) -> Vec<Option<Stamp>> {
        let mut bytes = vec![0; ((request.sectors.end - request.sectors.start) * SECTOR) as usize];
        let mut rest = &mut bytes[..];
        for &(address, length) in &request.pieces {
            let (now, later) = rest.split_at_mut(length as usize);
            self.ram.read_exact_at(now, address).unwrap();
            rest = later;
        }
        let sectors = request.sectors.clone().zip(bytes.chunks_exact(SECTOR as usize));
        sectors.map(|(sector, bytes)| stamp_of(sector, bytes)).collect()
    }

    fn release(&mut self, id: Id) {
        self.owners.iter_mut().filter(|owner| **owner == Some(id)).for_each(|owner| *owner = None);
    }

    fn load(&self, address: u64) -> u16 {
        let mut bytes = [0; 2];
        self.ram.read_exact_at(&mut bytes, address).unwrap();
        u16::from_le_bytes(bytes)
    }
}
