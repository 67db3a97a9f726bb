//! Jobs: requests of the guest that have been taken and not been answered.

use std::ops::Range;
use std::time::Instant;

use slab::Slab;

use super::overlap::RequestId;
use crate::block::BLOCK_BYTES;
use crate::server::request::{Kind, Request, Segment, Status};

pub const BLOCK: u64 = BLOCK_BYTES as u64;
/// Segment lists kept for the next requests: more than a guest usually has in flight.
const SPARE_LISTS_MAX: usize = 64;

/// The place where a request was taken, and where its answer goes.
#[derive(Clone, Copy)]
pub struct Origin {
    pub connection: u32,
    pub queue: u16,
    pub head: u16,
}

/// A request and how far it has come.
pub struct Job {
    pub origin: Origin,
    pub request: Request,
    /// How far it has been looked at, in bytes of its data.
    pub next: u64,
    /// The next range for the image: contiguous, looked up in memory, not yet handed to the engine.
    pub run: Range<u64>,
    /// The limiter has let the run pass.
    pub admitted: bool,
    /// Not to be merged with others: together they failed.
    pub alone: bool,
    /// Operations with the engine.
    pub pending: u32,
    pub status: Status,
    /// A flush has to follow before the answer (write-through).
    pub flush_after: bool,
    /// When it was taken, if a boot is being watched.
    pub taken: Option<Instant>,
    /// Since when it has waited for the image or, before that, for memory. `None` if it has not.
    pub waits_since: Option<Instant>,
    /// The image had a part in it.
    pub from_image: bool,
}

impl Job {
    pub fn new(origin: Origin, request: Request) -> Self {
        Self {
            origin,
            request,
            next: 0,
            run: 0..0,
            admitted: false,
            alone: false,
            pending: 0,
            status: Status::Ok,
            flush_after: false,
            taken: None,
            waits_since: None,
            from_image: false,
        }
    }

    pub fn all_handed_over(&self) -> bool {
        self.run.is_empty() && self.next == self.work()
    }

    /// Bytes of work. Requests without data count as one byte.
    pub fn work(&self) -> u64 {
        if self.is_single() { 1 } else { self.request.bytes }
    }

    /// One operation without a buffer, whatever the length.
    pub fn is_single(&self) -> bool {
        !matches!(self.request.kind, Kind::Read | Kind::Write)
    }

    /// Nothing more is started for it.
    pub fn cut_short(&mut self) {
        self.next = self.work();
        self.run = self.next..self.next;
    }

    /// Fails it: nothing more is started for it.
    pub fn fail(&mut self) {
        self.status = Status::IoError;
        self.cut_short();
    }

    /// Its bytes on the disk.
    pub fn place(&self) -> Range<u64> {
        self.request.offset..self.request.offset + self.request.bytes
    }

    /// Blocks that it touches, wholly or in part.
    pub fn blocks(&self) -> Range<u64> {
        self.request.offset / BLOCK..(self.request.offset + self.request.bytes).div_ceil(BLOCK)
    }
}

/// All jobs of a disk.
#[derive(Default)]
pub struct Jobs {
    active: Slab<Job>,
    /// Reused, so that a request needs no allocation.
    spare_lists: Vec<Vec<Segment>>,
}

impl Jobs {
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    pub fn len(&self) -> usize {
        self.active.len()
    }

    pub fn insert(&mut self, job: Job) -> RequestId {
        self.active.insert(job)
    }

    pub fn get(&self, id: RequestId) -> Option<&Job> {
        self.active.get(id)
    }

    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Job> {
        self.active.get_mut(id)
    }

    pub fn remove(&mut self, id: RequestId) -> Option<Job> {
        self.active.try_remove(id)
    }

    pub fn of_connection(&self, connection: u32) -> Vec<RequestId> {
        let own = self.active.iter().filter(|(_, job)| job.origin.connection == connection);
        own.map(|(id, _)| id).collect()
    }

    /// An empty list for the next request's segments.
    pub fn segment_list(&mut self) -> Vec<Segment> {
        self.spare_lists.pop().unwrap_or_default()
    }

    /// Keeps the list of a request that is over.
    pub fn recycle(&mut self, request: Request) {
        let mut segments = request.data;
        segments.clear();
        if self.spare_lists.len() < SPARE_LISTS_MAX {
            self.spare_lists.push(segments);
        }
    }
}
