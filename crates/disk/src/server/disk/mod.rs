//! The disk behind the connections: requests in, operations on the image out, answers back.
//!
//! `intake`: taken -> what it changes is void -> `carriage`: hits answered in line -> misses wait their turn (slots, limits) ->
//! image -> `completion`: tagged, noted, copied to the guest -> answered (no space: kept and tried again, `space`)
//!
//! Requests wait in the order they came, so a large one cannot be starved by small ones, but for those that wait for something of
//! their own; RAM hits do not wait. What is
//! read or written in one piece is one operation on the image, and so are requests that wait side by side (`joining`) and flushes
//! that can be one (`flushing`); only what is longer than the longest slot is carried out piece by piece. Whoever waits for a slot waits for operations that
//! have begun, and these need nothing more: that ends. Requests of a connection that is gone are finished towards the image
//! (the bytes are ours) and forgotten: nothing is copied, nothing recorded.

mod carriage;
mod completion;
mod filling;
mod flushing;
mod intake;
mod joining;
mod space;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slab::Slab;

use super::chain::Descriptor;
use super::config::Device;
use super::connection::Stop;
use super::counters::Counters;
use super::overlap::{Overlaps, RequestId};
use super::parked::Parking;
use super::recorder::{Recorder, Tracking};
use super::request::{Kind, Request, SERIAL_BYTES, Segment, Status};
use super::running::Running;
use super::{Backing, DiskOptions, Tell};
use crate::block::BLOCK_BYTES;
use crate::buffer::BufferPool;
use crate::clock::Clock;
use crate::engine::{Completion, Engine};
use crate::gate::Gate;
use crate::image::{FrozenImage, Image};
use crate::limit::RateLimiter;
use crate::pressure::Pressure;
use crate::write_log::WriteLog;
use flushing::Flushes;
use space::Kept;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Requests that are looked after at a time; further ones stay in their queues. Much of what is done for one is done for all
/// others that wait.
const JOBS_MAX: usize = 4096;
/// A request of the guest that has been taken and not been answered.
struct Job {
    connection: u32,
    queue: u16,
    head: u16,
    request: Request,
    /// How far it has been looked at.
    next: u64,
    /// What the image has to do next: contiguous, looked at, not yet handed to the engine.
    run: Range<u64>,
    /// The limiter has let the run pass.
    admitted: bool,
    /// Not to be joined with others: together they failed.
    alone: bool,
    /// Operations with the engine.
    pending: u32,
    status: Status,
    /// A flush has to follow before the answer (write-through).
    flush_after: bool,
    /// When it was taken, if that is of interest.
    taken: Option<Instant>,
    /// Since when it waits, for its turn at the image or, before that, for memory, if it had to.
    waits_since: Option<Instant>,
    /// The image had a part in it.
    from_image: bool,
}

impl Job {
    fn all_handed_over(&self) -> bool {
        self.run.is_empty() && self.next == self.work()
    }

    /// Requests without data count as one byte of work.
    fn work(&self) -> u64 {
        if self.is_single() { 1 } else { self.request.bytes }
    }

    /// One operation without a buffer, whatever the length.
    fn is_single(&self) -> bool {
        !matches!(self.request.kind, Kind::Read | Kind::Write)
    }

    /// Nothing more is started for it.
    fn cut_short(&mut self) {
        self.next = self.work();
        self.run = self.next..self.next;
    }

    /// Of the disk.
    fn place(&self) -> Range<u64> {
        self.request.offset..self.request.offset + self.request.bytes
    }

    fn blocks(&self) -> Range<u64> {
        touched(&self.request)
    }
}

pub struct Disk {
    name: String,
    tell: Option<Tell>,
    pub device: Device,
    serial: [u8; SERIAL_BYTES],
    read_only: bool,
    image: Image,
    engine: Box<dyn Engine>,
    depth: usize,
    clock: Clock,
    hold_back: Duration,
    pool: Arc<BufferPool>,
    limiter: RateLimiter,
    /// The stop whose requests passed on credit that is not paid yet.
    lent_to: Option<Stop>,
    throttled_since: Option<Instant>,
    tracked: bool,
    pub recorder: Recorder,
    overlaps: Overlaps,
    jobs: Slab<Job>,
    running: Slab<Running>,
    flushes: Flushes,
    kept: Kept,
    /// What lies between writes and was not held: it is read, so that the next boot finds it.
    wanted: VecDeque<Range<u64>>,
    /// The blocks that are being read for that.
    reading: Range<u64>,
    waiting: VecDeque<RequestId>,
    /// The slowest read of late.
    read_took: Duration,
    /// Before the guest's memory, while that is short.
    pub gate: Option<Gate>,
    /// Of the guest's memory, while somebody copies it.
    pub write_log: Option<Arc<WriteLog>>,
    parking: Parking,
    pub counters: Arc<Counters>,
    pressure: Pressure,
    unsubmitted: bool,
    /// Reused, so that a request needs no allocation.
    descriptors: Vec<Descriptor>,
    segments: Vec<Vec<Segment>>,
    ended: Vec<Completion>,
}

impl Disk {
    pub fn new(
        options: &DiskOptions,
        backing: Backing,
        tracking: Option<Tracking>,
        counters: Arc<Counters>,
        pressure: Pressure,
        clock: Clock,
    ) -> Self {
        let Backing { image, pool, engine, depth, hold_back } = backing;
        let read_only = options.read_only || image.read_only();
        let mut serial = [0; SERIAL_BYTES];
        let mut device = Device::of(&image, read_only, options.queues, options.queue_size);
        if options.memory_slots {
            device.offer_memory_slots();
        }
        let length = options.serial.len().min(SERIAL_BYTES);
        serial[..length].copy_from_slice(&options.serial.as_bytes()[..length]);
        Self {
            name: options.name.clone(),
            tell: options.tell.clone(),
            device,
            serial,
            read_only,
            image,
            engine,
            depth: depth as usize,
            hold_back,
            pool,
            limiter: RateLimiter::new(options.limits, clock.now()),
            clock,
            lent_to: None,
            throttled_since: None,
            tracked: options.tracked,
            recorder: Recorder::new(options.id, tracking.filter(|_| options.tracked)),
            overlaps: Overlaps::default(),
            jobs: Slab::default(),
            running: Slab::default(),
            flushes: Flushes::default(),
            kept: Kept::default(),
            wanted: VecDeque::new(),
            reading: 0..0,
            waiting: VecDeque::new(),
            read_took: hold_back * joining::WITHOUT_A_READ,
            gate: options.gate.clone(),
            write_log: None,
            parking: Parking::default(),
            counters,
            pressure,
            unsubmitted: false,
            descriptors: Vec::new(),
            segments: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub fn notifier(&self) -> std::os::fd::BorrowedFd<'_> {
        self.engine.notifier()
    }

    /// Nothing is in flight towards the image, and no request waits for it.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.jobs.is_empty() && self.parking.is_empty()
    }

    /// No request of a guest is in flight. What the disk reads for itself changes nothing and is answered to nobody.
    pub fn serves_nobody(&self) -> bool {
        self.jobs.is_empty() && self.parking.is_empty()
    }

    /// The image as it is now, on its way into another file. None: something is in flight, and would be half in it.
    pub fn freeze(&self, target: File) -> Option<io::Result<Arc<FrozenImage>>> {
        self.serves_nobody().then(|| self.image.freeze(target))
    }

    /// What the next connection's requests are recorded in.
    pub fn attach(&mut self, tracking: Option<Tracking>) {
        self.recorder.attach(tracking.filter(|_| self.tracked));
    }

    /// Reads the size of the image again; what lay past a new end is void, also what is on its way from there.
    pub fn resize(&mut self) -> io::Result<u64> {
        let before = self.image.bytes();
        let after = self.image.refresh_bytes()?;
        if after < before {
            let gone = after / BLOCK..before.div_ceil(BLOCK);
            self.overlaps.taint(&gone);
            self.recorder.void(gone);
        }
        self.device.resize(after);
        Ok(after)
    }

    /// A connection is gone: its requests are not carried any further.
    pub fn abandon(&mut self, connection: u32) {
        let jobs = &self.jobs;
        self.waiting.retain(|&waiting| jobs.get(waiting).is_some_and(|job| job.connection != connection));
        let ids: Vec<RequestId> = self.jobs.iter().map(|(id, _)| id).collect();
        for id in ids {
            let Some(job) = self.jobs.get_mut(id).filter(|job| job.connection == connection) else { continue };
            job.cut_short();
            self.finish_if_done(None, id);
        }
        self.give_up_kept(connection);
        self.parking.abandon(connection);
        self.throttled_since = None;
    }

    /// Waits for operations without taking part in anything else; for the end of the thread.
    pub fn drain(&mut self, at_most: Duration) {
        let until = Instant::now() + at_most;
        while !self.running.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let waited = self.submit().and_then(|()| self.engine.wait(left));
            if waited.is_err() || left.is_zero() {
                tracing::warn!(operations = self.running.len(), "a disk stops with operations in flight");
                return;
            }
            self.reap(None, true);
        }
    }

    fn recycle(&mut self, request: Request) {
        let mut segments = request.data;
        segments.clear();
        if self.segments.len() < 64 {
            self.segments.push(segments);
        }
    }
}

/// Blocks that a request touches, wholly or in part.
fn touched(request: &Request) -> Range<u64> {
    request.offset / BLOCK..(request.offset + request.bytes).div_ceil(BLOCK)
}
