//! Requests in flight, in memory that outlives this process: QEMU keeps the region and hands it to the next server.
//!
//! QEMU itself resumes a ring after the last answered request, which loses requests as soon as answers are out of order,
//! as they are whenever a RAM hit overtakes a disk read. The layout is the one of the vhost-user specification for
//! split rings, one area a queue, areas at multiples of 64 bytes:
//!
//! ```text
//! 0   features u64 | version u16 | entries u16 | last_batch_head u16 | used_index u16
//! 16  for each head: in_flight u8 | padding u8[5] | next u16 | counter u64
//! ```
//!
//! `features` is the server's own; of the first queue it holds whether the guest switched its write cache off. QEMU knows
//! that too, but does not tell the next server, which would then owe the guest a flush after every write and not know it.
//!
//! Answering a request: `last_batch_head` = head -> used ring -> in_flight = 0 -> `used_index`. A server that finds the two
//! used indices apart knows that the server died in between and that this head was answered.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use super::foreign::MemoryFile;
use super::ring::ENTRIES_MAX;
use super::wire::InflightSpec;
use crate::fault_point;

const VERSION: u16 = 1;
const AREA_ALIGNMENT: usize = 64;
/// In `features` of the first queue: the guest relies on a write when it is answered.
const WRITE_THROUGH: u64 = 1 << 63;

/// Layout of the head of a queue's area; only its offsets are used, the bytes are shared.
#[repr(C)]
struct AreaHead {
    features: u64,
    version: u16,
    entries: u16,
    last_batch_head: u16,
    used_index: u16,
}

/// Layout of one entry.
#[repr(C)]
struct Entry {
    in_flight: u8,
    padding: [u8; 5],
    next: u16,
    counter: u64,
}

const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const _: () = assert!(size_of::<AreaHead>() == HEAD_BYTES && size_of::<Entry>() == ENTRY_BYTES);
const _: () = assert!(std::mem::offset_of!(AreaHead, used_index) == 14 && std::mem::offset_of!(Entry, counter) == 8);

#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    #[error("inflight region for {queues} queues of {queue_size}: {what}")]
    Region { queues: u16, queue_size: u16, what: &'static str },
    #[error("inflight region cannot be created or mapped")]
    Memory(#[source] io::Error),
}

fn area_bytes(queue_size: u16) -> usize {
    (HEAD_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(AREA_ALIGNMENT)
}

/// Name of the memory file of a disk's region, by which it is found among the descriptors of a QEMU that says nothing.
pub fn memory_name(disk: &str) -> String {
    format!("hearth-inflight-{disk}")
}

/// The region in a file that was made for this many queues of this size, or for larger ones.
pub fn spec_of(file: &OwnedFd, queues: u16, queue_size: u16) -> Result<InflightSpec, InflightError> {
    let bytes = fstat(file).map_err(|error| InflightError::Memory(error.into()))?.st_size as u64;
    Ok(InflightSpec { bytes, offset: 0, queues, queue_size })
}

/// Makes a region for a frontend that asks for one. It comes back through `Inflight::open`.
pub fn create(disk: &str, queues: u16, queue_size: u16) -> Result<(InflightSpec, OwnedFd), InflightError> {
    let bytes = area_bytes(queue_size) as u64 * u64::from(queues);
    if bytes == 0 || queue_size == 0 {
        return Err(InflightError::Region { queues, queue_size, what: "is empty" });
    }
    let spec = InflightSpec { bytes, offset: 0, queues, queue_size };
    let make = || -> rustix::io::Result<OwnedFd> {
        let file = memfd_create(memory_name(disk), MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, spec.bytes)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    };
    let file = make().map_err(|error| InflightError::Memory(error.into()))?;
    Ok((spec, file))
}

/// Notes in the file of a new region that the guest switched its write cache off: its QEMU may give it to another server.
pub fn note_write_through(file: &OwnedFd) -> Result<(), InflightError> {
    match rustix::io::pwrite(file, &WRITE_THROUGH.to_ne_bytes(), 0) {
        Ok(_) => Ok(()),
        Err(error) => Err(InflightError::Memory(error.into())),
    }
}

/// Whether the guest switched its write cache off, as a region in this file says.
pub fn is_write_through(file: &MemoryFile) -> io::Result<bool> {
    let mut features = [0; 8];
    rustix::io::pread(file, &mut features, 0)?;
    Ok(u64::from_ne_bytes(features) & WRITE_THROUGH != 0)
}

/// The entries that a used region says its areas have. They may be more than the frontend asked for.
fn noted_entries(file: &MemoryFile, offset: u64) -> Result<Option<u16>, InflightError> {
    let mut noted = [0; 4];
    let at = offset + std::mem::offset_of!(AreaHead, version) as u64;
    rustix::io::pread(file, &mut noted, at).map_err(|error| InflightError::Memory(error.into()))?;
    let [version, entries] = [[noted[0], noted[1]], [noted[2], noted[3]]].map(u16::from_ne_bytes);
    Ok((version != 0).then_some(entries))
}

/// The region of a connection: all its queues.
pub struct Inflight {
    memory: MmapRegion<()>,
    queues: u16,
    /// Entries of each area.
    queue_size: u16,
    /// Order in which requests of each queue came, over the life of the region.
    counters: Vec<u64>,
}

impl Inflight {
    /// Takes a region, new or used by a server that is gone. Nothing in it is believed without a check.
    pub fn open(spec: InflightSpec, file: MemoryFile) -> Result<Self, InflightError> {
        let InflightSpec { bytes, offset, queues, queue_size } = spec;
        let refuse = |what| Err(InflightError::Region { queues, queue_size, what });
        let areas = |entries| area_bytes(entries) as u64 * u64::from(queues);
        if queues == 0 || queue_size == 0 || bytes < areas(queue_size) {
            return refuse("is too small");
        }
        let stat = fstat(file.as_fd()).map_err(|error| InflightError::Memory(error.into()))?;
        if offset.checked_add(bytes).is_none_or(|end| end > stat.st_size as u64) {
            return refuse("is cut off");
        }
        let queue_size = match noted_entries(&file, offset)? {
            Some(noted) => noted,
            None if bytes >= areas(ENTRIES_MAX) => ENTRIES_MAX,
            None => queue_size,
        };
        let needed = areas(queue_size);
        if queue_size == 0 || queue_size > ENTRIES_MAX || bytes < needed {
            return refuse("is too small for what it says");
        }
        let file = FileOffset::from_arc(Arc::new(File::from(file)), offset);
        let memory = MmapRegion::from_file(file, needed as usize)
            .map_err(|error| InflightError::Memory(io::Error::other(error)))?;
        let mut region = Self { memory, queues, queue_size, counters: vec![0; usize::from(queues)] };
        for queue in 0..queues {
            region.adopt(queue)?;
        }
        Ok(region)
    }

    /// Marks a new area as ours, or checks that a used one is of our kind.
    fn adopt(&mut self, queue: u16) -> Result<(), InflightError> {
        let (version, entries) = (self.head_u16(queue, 8), self.head_u16(queue, 10));
        let found = (version.load(Ordering::Acquire), entries.load(Ordering::Relaxed));
        if found.0 == 0 {
            entries.store(self.queue_size, Ordering::Relaxed);
            version.store(VERSION, Ordering::Release);
        } else if found != (VERSION, self.queue_size) {
            let what = "was written by another kind of server";
            return Err(InflightError::Region { queues: self.queues, queue_size: self.queue_size, what });
        }
        Ok(())
    }

    pub fn is_write_through(&self) -> bool {
        self.features().load(Ordering::Acquire) & WRITE_THROUGH != 0
    }

    pub fn set_write_through(&self, on: bool) {
        self.features().store(if on { WRITE_THROUGH } else { 0 }, Ordering::Release);
    }

    pub fn covers(&self, queue: u16, size: u16) -> bool {
        queue < self.queues && size <= self.queue_size
    }

    /// Repairs the area after a crash and lists the heads to take up again, oldest first. `used_index` is that of the
    /// ring: with as many requests in flight, the next available one is `used_index` plus their number.
    pub fn resume(&mut self, queue: u16, used_index: u16) -> Vec<u16> {
        let recorded = self.head_u16(queue, 14).load(Ordering::Acquire);
        let mut head = self.head_u16(queue, 12).load(Ordering::Relaxed);
        // Requests that were answered, but not yet marked so. A new region differs by any number and has no heads in flight.
        for _ in 0..used_index.wrapping_sub(recorded).min(self.queue_size) {
            if head >= self.queue_size {
                break;
            }
            self.flag(queue, head).store(0, Ordering::Relaxed);
            head = self.entry_next(queue, head).load(Ordering::Relaxed);
        }
        self.head_u16(queue, 14).store(used_index, Ordering::Release);
        let mut pending: Vec<(u64, u16)> = (0..self.queue_size)
            .filter(|&head| self.flag(queue, head).load(Ordering::Acquire) == 1)
            .map(|head| (self.entry_counter(queue, head).load(Ordering::Relaxed), head))
            .collect();
        pending.sort_unstable();
        self.counters[usize::from(queue)] = pending.last().map_or(0, |(newest, _)| newest.wrapping_add(1));
        pending.into_iter().map(|(_, head)| head).collect()
    }

    /// A request was taken off the ring.
    pub fn begin(&mut self, queue: u16, head: u16) {
        if head >= self.queue_size {
            return; // Its chain will be refused: such a head has no descriptor.
        }
        let counter = &mut self.counters[usize::from(queue)];
        let order = *counter;
        *counter = counter.wrapping_add(1);
        self.entry_counter(queue, head).store(order, Ordering::Relaxed);
        self.flag(queue, head).store(1, Ordering::Release);
    }

    /// A request will be answered next.
    pub fn ending(&self, queue: u16, head: u16) {
        if head < self.queue_size {
            // Batches of one: the chain ends here.
            self.entry_next(queue, head).store(u16::MAX, Ordering::Relaxed);
            self.head_u16(queue, 12).store(head, Ordering::Release);
        }
    }

    /// The answer is in the used ring, whose index is now `used_index`.
    pub fn ended(&self, queue: u16, head: u16, used_index: u16) {
        if head < self.queue_size {
            self.flag(queue, head).store(0, Ordering::Release);
        }
        fault_point::reach();
        self.head_u16(queue, 14).store(used_index, Ordering::Release);
    }

    fn area(&self, queue: u16) -> usize {
        assert!(queue < self.queues, "queue {queue} has no area among {}", self.queues);
        area_bytes(self.queue_size) * usize::from(queue)
    }

    fn entry(&self, queue: u16, head: u16) -> usize {
        assert!(head < self.queue_size, "head {head} has no entry among {}", self.queue_size);
        self.area(queue) + HEAD_BYTES + ENTRY_BYTES * usize::from(head)
    }

    fn features(&self) -> &AtomicU64 {
        self.memory.get_atomic_ref(self.area(0)).expect("areas lie in the region and are aligned")
    }

    fn head_u16(&self, queue: u16, field: usize) -> &AtomicU16 {
        self.memory.get_atomic_ref(self.area(queue) + field).expect("areas lie in the region and are aligned")
    }

    fn flag(&self, queue: u16, head: u16) -> &AtomicU8 {
        self.memory.get_atomic_ref(self.entry(queue, head)).expect("entries lie in the region")
    }

    fn entry_next(&self, queue: u16, head: u16) -> &AtomicU16 {
        self.memory.get_atomic_ref(self.entry(queue, head) + 6).expect("entries lie in the region and are aligned")
    }

    fn entry_counter(&self, queue: u16, head: u16) -> &AtomicU64 {
        self.memory.get_atomic_ref(self.entry(queue, head) + 8).expect("entries lie in the region and are aligned")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::foreign::ForeignFd;

    fn opened(spec: InflightSpec, file: &OwnedFd) -> Result<Inflight, InflightError> {
        let file = ForeignFd::from(file.try_clone().unwrap());
        Inflight::open(spec, file.sealed_memory().expect("it was made to be safe"))
    }

    /// A region and a way to open it once more, as a second server would.
    fn region(queues: u16, size: u16) -> (Inflight, impl Fn() -> Result<Inflight, InflightError>) {
        let (spec, file) = create("disk", queues, size).unwrap();
        let again = move || opened(spec, &file);
        (again().unwrap(), again)
    }

    #[test]
    fn unanswered_requests_are_resumed_in_order() {
        let (mut first, again) = region(2, 8);
        assert!(first.resume(1, 100).is_empty());
        for head in [5, 2, 7, 0] {
            first.begin(1, head);
        }
        first.ending(1, 2);
        first.ended(1, 2, 101);
        let mut second = again().unwrap();
        assert_eq!(second.resume(1, 101), [5, 7, 0]);
        assert!(second.resume(0, 0).is_empty(), "the other queue is empty");
        second.begin(1, 2);
        assert_eq!(again().unwrap().resume(1, 101), [5, 7, 0, 2], "order goes on after the oldest");
    }

    #[test]
    fn published_answer_is_not_repeated() {
        let (mut first, again) = region(1, 8);
        first.resume(0, 65535);
        first.begin(0, 3);
        first.begin(0, 4);
        first.ending(0, 3);
        // Died before the used ring was written: 3 is still to be done ...
        assert_eq!(again().unwrap().resume(0, 65535), [3, 4]);
        // ... or after it: the ring's index has moved (over its end).
        assert_eq!(again().unwrap().resume(0, 0), [4]);
        assert_eq!(again().unwrap().resume(0, 0), [4]);
    }

    #[test]
    fn batches_of_other_servers_are_understood() {
        let (mut first, again) = region(1, 8);
        first.resume(0, 0);
        for head in 0..4 {
            first.begin(0, head);
        }
        // A batch 3 -> 1, linked, published at once.
        first.entry_next(0, 3).store(1, Ordering::Relaxed);
        first.head_u16(0, 12).store(3, Ordering::Relaxed);
        assert_eq!(again().unwrap().resume(0, 2), [0, 2]);
    }

    #[test]
    fn the_write_cache_is_remembered() {
        let (first, again) = region(2, 8);
        assert!(!first.is_write_through());
        first.set_write_through(true);
        assert!(again().unwrap().is_write_through());
        first.set_write_through(false);
        assert!(!again().unwrap().is_write_through());
    }

    #[test]
    fn regions_that_lie_are_refused_or_bounded() {
        let (spec, file) = create("disk", 2, 8).unwrap();
        let open = |spec| opened(spec, &file);
        for wrong in [
            InflightSpec { queues: 3, ..spec },
            InflightSpec { queue_size: 256, ..spec },
            InflightSpec { queues: 0, ..spec },
            InflightSpec { bytes: u64::MAX, offset: 8, ..spec },
            InflightSpec { bytes: spec.bytes + 1, ..spec },
        ] {
            assert!(open(wrong).is_err(), "{wrong:?}");
        }
        let mut scribbled = open(spec).unwrap();
        scribbled.head_u16(0, 12).store(999, Ordering::Relaxed);
        assert!(scribbled.resume(0, 5).is_empty(), "a last head beyond the table");
        scribbled.begin(0, 999);
        scribbled.ended(0, 999, 6);
        scribbled.head_u16(1, 8).store(2, Ordering::Relaxed);
        assert!(open(spec).is_err(), "another version");
    }
}
