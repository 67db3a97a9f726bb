//! The disk behind the connections: requests in, operations on the image out, answers back.
//!
//! taken -> what it changes is void -> hits answered in line -> misses wait their turn (slots, limits) -> image ->
//! tagged, noted, copied to the guest -> answered
//!
//! Requests wait in the order they came, so a large one cannot be starved by small ones; RAM hits do not wait. What is
//! read or written in one piece is one operation on the image; only what is longer than the longest slot is carried out
//! piece by piece. Whoever waits for a slot waits for operations that have begun, and these need nothing more: that ends. Requests of a connection that is gone are
//! finished towards the image (the bytes are ours) and forgotten: nothing is copied, nothing recorded.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chain::Descriptor;
use super::config::Device;
use super::connection::Connection;
use super::counters::{Counters, add};
use super::overlap::{Overlaps, RequestId};
use super::parked::{Parked, Parking};
use super::recorder::{Recorder, Tracking};
use super::request::{Bounds, Kind, Refusal, Request, SERIAL_BYTES, Segment, Status, parse};
use super::running::{Around, Running};
use super::slab::Slab;
use super::transfer::{self, Cursor};
use super::{Backing, DiskOptions};
use crate::block::BLOCK_BYTES;
use crate::buffer::{BufferPool, Slot};
use crate::engine::{Completion, Engine, Operation, Submission};
use crate::gate::Gate;
use crate::image::{FrozenImage, Image};
use crate::limit::RateLimiter;
use crate::pressure::Pressure;
use crate::write_log::WriteLog;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// A run of misses goes on over fewer bytes of hits than these. They are read for nothing, but another operation would
/// take longer: on a volume with 3000 operations and 125 MiB a second, as long as 42 KiB.
const GAP_BYTES: u64 = 32 << 10;

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
    /// Operations with the engine.
    pending: u32,
    status: Status,
    /// A flush has to follow before the answer (write-through).
    flush_after: bool,
    /// When it was taken, if that is of interest.
    taken: Option<Instant>,
    /// It had to wait for its turn at the image.
    has_waited: bool,
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

    fn blocks(&self) -> Range<u64> {
        touched(&self.request)
    }
}

/// Why a request cannot go on now.
#[derive(Clone, Copy)]
enum Stall {
    /// Until an operation ends.
    Busy,
    /// Until the limiter allows it.
    Limited(Duration),
}

pub struct Disk {
    pub device: Device,
    serial: [u8; SERIAL_BYTES],
    read_only: bool,
    image: Image,
    engine: Box<dyn Engine>,
    depth: usize,
    pool: Arc<BufferPool>,
    limiter: RateLimiter,
    throttled_since: Option<Instant>,
    tracked: bool,
    pub recorder: Recorder,
    overlaps: Overlaps,
    jobs: Slab<Job>,
    running: Slab<Running>,
    waiting: VecDeque<RequestId>,
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
    ) -> Self {
        let Backing { image, pool, engine, depth } = backing;
        let read_only = options.read_only || image.read_only();
        let mut serial = [0; SERIAL_BYTES];
        let mut device = Device::of(&image, read_only, options.queues, options.queue_size);
        if options.memory_slots {
            device.offer_memory_slots();
        }
        let length = options.serial.len().min(SERIAL_BYTES);
        serial[..length].copy_from_slice(&options.serial.as_bytes()[..length]);
        Self {
            device,
            serial,
            read_only,
            image,
            engine,
            depth: depth as usize,
            pool,
            limiter: RateLimiter::new(options.limits, Instant::now()),
            throttled_since: None,
            tracked: options.tracked,
            recorder: Recorder::new(options.id, tracking.filter(|_| options.tracked)),
            overlaps: Overlaps::default(),
            jobs: Slab::default(),
            running: Slab::default(),
            waiting: VecDeque::new(),
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

    /// The image as it is now, on its way into another file. None: something is in flight, and would be half in it.
    pub fn freeze(&self, target: File) -> Option<io::Result<Arc<FrozenImage>>> {
        self.is_idle().then(|| self.image.freeze(target))
    }

    /// What the next connection's requests are recorded in.
    pub fn attach(&mut self, tracking: Option<Tracking>) {
        self.recorder.attach(tracking.filter(|_| self.tracked));
    }

    /// Reads the size of the image again; what lay past a new end is void.
    pub fn resize(&mut self) -> io::Result<u64> {
        let before = self.image.bytes();
        let after = self.image.refresh_bytes()?;
        if after < before {
            self.recorder.void(after / BLOCK..before.div_ceil(BLOCK));
        }
        self.device.resize(after);
        Ok(after)
    }

    /// Takes requests off one queue, at most a queue's worth. True: there was something.
    pub fn take_requests(&mut self, connection: &mut Connection, queue: u16) -> bool {
        let Connection { memory, queues, .. } = connection;
        let Some(found) = queues.get_mut(usize::from(queue)).filter(|queue| queue.is_ready()) else { return false };
        if !found.may_answer(memory) {
            self.parking.park_ring();
            return false;
        }
        found.begin_round(memory);
        let mut any = false;
        for _ in 0..self.device.queue_size {
            let Some(taken) = connection.take(queue) else { break };
            any = true;
            if taken.resumed {
                add(&self.counters.resumed, 1);
            }
            self.begin(connection, queue, taken.head);
        }
        any
    }

    /// A request has come: judges it and starts it.
    fn begin(&mut self, connection: &mut Connection, queue: u16, head: u16) {
        self.descriptors.clear();
        let found = &connection.queues[usize::from(queue)];
        let walked = found.descriptors(head, &connection.memory, connection.agreed(), &mut self.descriptors);
        if let Err(fault) = walked {
            tracing::debug!(%fault, "a request of the guest has a broken chain of descriptors");
            add(&self.counters.bad_requests, 1);
            return connection.answer(queue, head, 0);
        }
        let bounds =
            Bounds { bytes: self.image.bytes(), read_only: self.read_only, discard: self.image.supports_discard() };
        let memory = &connection.memory;
        let read = |address: u64, out: &mut [u8]| memory.read(address, out).is_ok();
        match parse(&self.descriptors, bounds, &read, self.segments.pop().unwrap_or_default()) {
            Ok(request) if all_mapped(&request, connection) => {
                if self.gate.is_some() && !all_admitted(&request, connection) {
                    self.parking.park(Parked { connection: connection.id, queue, head });
                    return self.recycle(request);
                }
                self.start(connection, queue, head, request)
            }
            Ok(request) => {
                let answer = Some((request.status, Status::IoError));
                self.refuse(connection, queue, head, Refusal { reason: "its data is outside of guest memory", answer });
                self.recycle(request);
            }
            Err(refusal) => self.refuse(connection, queue, head, refusal),
        }
    }

    fn refuse(&mut self, connection: &mut Connection, queue: u16, head: u16, refusal: Refusal) {
        if refusal.answer.is_some_and(|(address, _)| !connection.memory.admit(address, 1)) {
            return self.parking.park(Parked { connection: connection.id, queue, head });
        }
        tracing::debug!(reason = refusal.reason, "a request of the guest is refused");
        add(&self.counters.bad_requests, 1);
        let written =
            refusal.answer.is_some_and(|(address, status)| connection.memory.write(address, &[status as u8]).is_ok());
        connection.answer(queue, head, u32::from(written));
    }

    fn start(&mut self, connection: &mut Connection, queue: u16, head: u16, request: Request) {
        self.count(&request);
        if request.kind == Kind::Identify {
            return self.identify(connection, queue, head, request);
        }
        let changes = request.kind.changes_blocks();
        let flush_after = changes && connection.writes_through();
        let job = Job {
            connection: connection.id,
            queue,
            head,
            request,
            next: 0,
            run: 0..0,
            admitted: false,
            pending: 0,
            status: Status::Ok,
            flush_after,
            taken: self.recorder.learns().then(Instant::now),
            has_waited: false,
            from_image: false,
        };
        let blocks = job.blocks();
        let id = self.jobs.insert(job);
        if changes {
            // Before anything of it can reach the disk, and before a later read can ask for what was there.
            self.recorder.void(blocks.clone());
        }
        self.overlaps.begin(id, blocks, changes);
        self.go_on_or_wait(connection, id);
    }

    fn count(&self, request: &Request) {
        let counter = match request.kind {
            Kind::Read => &self.counters.reads,
            Kind::Write => &self.counters.writes,
            Kind::Flush => &self.counters.flushes,
            Kind::Discard | Kind::WriteZeroes { .. } => &self.counters.discards,
            Kind::Identify => return,
        };
        add(counter, 1);
    }

    fn identify(&mut self, connection: &mut Connection, queue: u16, head: u16, request: Request) {
        let serial = &self.serial[..request.bytes as usize];
        let copied = transfer::deliver(&connection.memory, &mut self.recorder, &request, 0, serial, false);
        self.recorder.commit();
        let status = if copied.is_ok() { Status::Ok } else { Status::IoError };
        let _ = connection.memory.write(request.status, &[status as u8]);
        connection.answer(queue, head, request.bytes as u32 + 1);
        self.recycle(request);
    }

    /// Hits are served now whoever waits; misses queue up behind those that do. A flush is about what has ended, so it
    /// need not wait for those that have not begun.
    fn go_on_or_wait(&mut self, connection: &mut Connection, id: RequestId) {
        let Some(kind) = self.jobs.get_mut(id).map(|job| job.request.kind) else { return };
        if kind == Kind::Read {
            self.look(connection, id);
        }
        let is_next = self.waiting.is_empty() || kind == Kind::Flush;
        let handed_over = is_next && self.advance(connection, id).is_ok();
        if handed_over || self.jobs.get_mut(id).is_some_and(|job| job.all_handed_over()) {
            return self.finish_if_done(Some(connection), id);
        }
        if let Some(job) = self.jobs.get_mut(id) {
            job.has_waited = true;
        }
        self.waiting.push_back(id);
    }

    /// Lets waiting requests go on. Says how long to wait if limiter or memory are the reason that it ends.
    pub fn pump(&mut self, connection: &mut Connection) -> Option<Duration> {
        for Parked { queue, head, .. } in self.parking.leave() {
            self.begin(connection, queue, head);
        }
        let limited = self.pump_waiting(connection);
        limited.into_iter().chain(self.parking.wait()).min()
    }

    fn pump_waiting(&mut self, connection: &mut Connection) -> Option<Duration> {
        while let Some(&id) = self.waiting.front() {
            match self.advance(connection, id) {
                Ok(()) => {
                    self.waiting.pop_front();
                    self.finish_if_done(Some(connection), id);
                }
                Err(Stall::Busy) => return None,
                Err(Stall::Limited(wait)) => return Some(wait),
            }
        }
        None
    }

    /// Hands over to the engine as much as goes.
    fn advance(&mut self, connection: &mut Connection, id: RequestId) -> Result<(), Stall> {
        loop {
            let Some(job) = self.jobs.get_mut(id) else { return Ok(()) };
            if job.all_handed_over() {
                return Ok(());
            }
            if job.run.is_empty() {
                match job.request.kind {
                    Kind::Read => self.look(connection, id),
                    _ => (job.run, job.next) = (0..job.work(), job.work()),
                }
                continue;
            }
            self.admit(id, connection.is_waiting())?;
            self.hand_over(connection, id)?;
        }
    }

    /// Looks at what follows in a read: hits are served, the misses after them become the run. Hits in a short gap
    /// between misses are served too (the page moves), and the bytes from the image are the same.
    fn look(&mut self, connection: &mut Connection, id: RequestId) {
        let tainted = self.overlaps.is_tainted(id);
        let Some(job) = self.jobs.get_mut(id) else { return };
        let request = &job.request;
        let mut at = job.next;
        let blocks = (request.offset + at) / BLOCK..(request.offset + request.bytes).div_ceil(BLOCK);
        job.admitted = false;
        // What a write in flight is changing is void in the source, so it would miss; not asking makes that certain.
        if self.overlaps.changing(&blocks) || !self.recorder.may_be_warm(blocks) {
            job.run = at..request.bytes;
            job.next = request.bytes;
            return;
        }
        let mut cursor = Cursor::at(request, at);
        let mut run = at..at;
        // Hits since the last miss: warm, unless the run goes on behind them.
        let (mut warm, mut gap) = (0, 0);
        while at < request.bytes {
            let step = transfer::step(request, at);
            let place = (request.offset + at, step);
            let served = transfer::serve(&connection.memory, &mut self.recorder, place, cursor, !tainted);
            let hit = served.unwrap_or_else(|_| {
                job.status = Status::IoError;
                true
            });
            cursor.advance(step);
            at += step;
            if !hit {
                run.end = at;
                gap = 0;
                continue;
            }
            if run.is_empty() {
                warm += step;
                run = at..at;
                continue;
            }
            gap += step;
            if gap >= GAP_BYTES {
                break;
            }
        }
        (job.run, job.next) = (run, at);
        add(&self.counters.bytes_read_warm, warm + gap);
        self.recorder.commit();
    }

    /// Limits apply to what goes to the image: a run of misses, a write, a change is one operation. A queue that is
    /// stopped is not held up: QEMU as a whole waits for that.
    fn admit(&mut self, id: RequestId, stopping: bool) -> Result<(), Stall> {
        let Some(job) = self.jobs.get_mut(id) else { return Ok(()) };
        if job.admitted || stopping || job.request.kind == Kind::Flush {
            return Ok(());
        }
        let bytes = if job.is_single() { 0 } else { job.run.end - job.run.start };
        let now = Instant::now();
        if let Err(wait) = self.limiter.admit(now, bytes) {
            self.throttled_since.get_or_insert(now);
            return Err(Stall::Limited(wait));
        }
        if let Some(since) = self.throttled_since.take() {
            add(&self.counters.throttled_us, now.duration_since(since).as_micros() as u64);
        }
        job.admitted = true;
        Ok(())
    }

    fn hand_over(&mut self, connection: &mut Connection, id: RequestId) -> Result<(), Stall> {
        loop {
            let Some(job) = self.jobs.get_mut(id) else { return Ok(()) };
            if job.run.is_empty() {
                return Ok(());
            }
            if self.running.len() >= self.depth {
                return Err(Stall::Busy);
            }
            let kind = job.request.kind;
            if job.is_single() {
                job.run.start = job.run.end;
                let (offset, bytes) = (job.request.offset, job.request.bytes);
                let operation = match kind {
                    Kind::Flush => Operation::Flush,
                    Kind::Discard => Operation::Discard,
                    Kind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
                    Kind::Read | Kind::Write | Kind::Identify => unreachable!("these have data"),
                };
                self.push(Running::without_data(id), operation, offset, bytes);
                return Ok(());
            }
            let (offset, left) = (job.request.offset + job.run.start, job.run.end - job.run.start);
            let wanted = kind == Kind::Read && self.recorder.wants(job.request.bytes);
            let room = self.around(wanted, offset, left).with(left);
            let slot = self.pool.take(room as usize).ok_or(Stall::Busy)?;
            self.hand_over_piece(connection, id, slot, wanted);
        }
    }

    /// The run, or as much of it as the longest slot holds, up to a block border, so that blocks are tagged whole.
    fn hand_over_piece(&mut self, connection: &mut Connection, id: RequestId, slot: Slot, wanted: bool) {
        let Some(job) = self.jobs.get_mut(id) else { return self.pool.give_back(slot) };
        let position = job.run.start;
        let offset = job.request.offset + position;
        let left = job.run.end - position;
        let whole = self.around(wanted, offset, left);
        let room = slot.bytes() as u64 - whole.before;
        let bytes = if left <= room { left } else { room - (offset - whole.before) % BLOCK };
        // A piece that is not the last one ends with a block.
        let around = Around { after: if bytes == left { whole.after } else { 0 }, ..whole };
        let Some(job) = self.jobs.get_mut(id) else { return self.pool.give_back(slot) };
        job.run.start += bytes;
        job.from_image = true;
        let operation = if job.request.kind == Kind::Write {
            // SAFETY: the slot was just taken, nothing is in flight on it, and the reference ends with the copy.
            let buffer = unsafe { self.pool.bytes_mut(slot) };
            if transfer::fetch(&connection.memory, &job.request, position, &mut buffer[..bytes as usize]).is_err() {
                job.status = Status::IoError;
                job.cut_short();
                return self.pool.give_back(slot);
            }
            Operation::Write(slot)
        } else {
            Operation::Read(slot)
        };
        let running = Running { slot: Some(slot), position, bytes, around, ..Running::without_data(id) };
        self.push(running, operation, offset - around.before, around.with(bytes));
    }

    /// What of the image is read along with these bytes: nothing, unless blocks that are read are to be held.
    fn around(&self, wanted: bool, offset: u64, bytes: u64) -> Around {
        if !wanted {
            return Around::default();
        }
        let end = offset + bytes;
        let whole = end.next_multiple_of(BLOCK).min(self.image.bytes().max(end));
        Around { before: offset % BLOCK, after: whole - end }
    }

    fn push(&mut self, running: Running, operation: Operation, offset: u64, bytes: u64) {
        if let Some(job) = self.jobs.get_mut(running.job) {
            job.pending += 1;
        }
        let token = u64::from(self.running.insert(running));
        self.engine.push(Submission { token, operation, offset, bytes });
        self.unsubmitted = true;
    }

    /// Starts what was handed over. An engine that cannot start it now is asked again.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.unsubmitted {
            self.engine.submit()?;
            self.unsubmitted = false;
        }
        Ok(())
    }

    /// Takes what the engine has ended, if it has anything or has rung. True: there was something.
    pub fn reap(&mut self, mut connection: Option<&mut Connection>, rung: bool) -> bool {
        if self.running.is_empty() && !rung {
            return false;
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.engine.reap(&mut ended);
        let any = !ended.is_empty();
        for completion in ended.drain(..) {
            self.complete(connection.as_deref_mut(), completion);
        }
        self.ended = ended;
        let in_flight = self.running.len() as u64;
        self.counters.in_flight.store(in_flight, std::sync::atomic::Ordering::Relaxed);
        self.pressure.set_in_flight(in_flight);
        any
    }

    fn complete(&mut self, connection: Option<&mut Connection>, completion: Completion) {
        let running = u32::try_from(completion.token).ok().and_then(|token| self.running.remove(token));
        let Some(running) = running else {
            tracing::error!(token = completion.token, "an engine ended an operation that it was not given");
            return;
        };
        self.pressure.ended(running.begun, Instant::now(), running.bytes);
        let id = running.job;
        let Some(job) = self.jobs.get_mut(id) else { unreachable!("a request outlives its operations") };
        job.pending -= 1;
        let connection = connection.filter(|connection| connection.id == job.connection);
        match (&completion.result, &connection) {
            (Err(error), _) => {
                tracing::warn!(%error, offset = job.request.offset + running.position, "the disk image failed");
                add(&self.counters.io_errors, 1);
                job.status = Status::IoError;
                job.cut_short();
                self.waiting.retain(|&waiting| waiting != id);
            }
            (Ok(()), connection) => {
                self.tell_source(&running);
                if let Some(connection) = connection {
                    self.use_completion(connection, &running);
                }
            }
        }
        if let Some(slot) = running.slot {
            self.pool.give_back(slot);
        }
        self.finish_if_done(connection, id);
    }

    /// What is now known of the blocks, whoever asked: memory that holds some of them is kept current.
    fn tell_source(&mut self, running: &Running) {
        let (Some(slot), Some(job)) = (running.slot, self.jobs.get_mut(running.job)) else { return };
        let certain = !self.overlaps.is_tainted(running.job);
        // SAFETY: the operation on the slot has ended, the slot is still ours, and the reference ends with this call.
        let data = unsafe { &self.pool.bytes_mut(slot)[..running.all_bytes()] };
        if job.request.kind == Kind::Read {
            let offset = job.request.offset + running.position - running.around.before;
            if self.recorder.wants(job.request.bytes) {
                transfer::tell_read(&self.recorder, offset, data, certain);
            } else {
                self.recorder.missed((data.len() as u64).div_ceil(BLOCK));
            }
        } else if certain {
            transfer::tell_written(&self.recorder, &job.request, running.position, data);
        }
    }

    /// An operation with data went well: what of it is the guest's, and which of its pages hold what?
    fn use_completion(&mut self, connection: &Connection, running: &Running) {
        let (Some(slot), Some(job)) = (running.slot, self.jobs.get_mut(running.job)) else { return };
        let recordable = !self.overlaps.is_tainted(running.job);
        // SAFETY: the operation on the slot has ended, the slot is still ours, and the reference ends with this call.
        let data = unsafe { &self.pool.bytes_mut(slot)[running.own_bytes()] };
        let (memory, recorder, position) = (&connection.memory, &mut self.recorder, running.position);
        if job.request.kind == Kind::Write {
            add(&self.counters.bytes_written, running.bytes);
            if recordable {
                transfer::note_written(memory, recorder, &job.request, position, data);
            }
        } else {
            add(&self.counters.bytes_read_image, running.bytes);
            if transfer::deliver(memory, recorder, &job.request, position, data, recordable).is_err() {
                job.status = Status::IoError;
            }
        }
        self.recorder.commit();
    }

    /// Answers a request if all of it is done. `None`: its connection is gone.
    fn finish_if_done(&mut self, connection: Option<&mut Connection>, id: RequestId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.pending > 0 || !job.all_handed_over() {
            return;
        }
        if std::mem::take(&mut job.flush_after) && job.status == Status::Ok && connection.is_some() {
            return self.push(Running::without_data(id), Operation::Flush, 0, 0);
        }
        if self.overlaps.is_tainted(id) {
            add(&self.counters.tainted, 1);
        }
        self.overlaps.end(id);
        let Some(job) = self.jobs.remove(id) else { return };
        if let Some(taken) = job.taken.filter(|_| job.request.kind == Kind::Read && !job.from_image) {
            self.recorder.answered(!job.has_waited, taken.elapsed());
        }
        if let Some(connection) = connection {
            let _ = connection.memory.write(job.request.status, &[job.status as u8]);
            let read = job.request.kind == Kind::Read && job.status == Status::Ok;
            let bytes = if read { job.request.bytes as u32 + 1 } else { 1 };
            connection.answer(job.queue, job.head, bytes);
        }
        self.recycle(job.request);
    }

    /// A connection is gone: its requests are not carried any further.
    pub fn abandon(&mut self, connection: u32) {
        for id in self.jobs.keys() {
            let Some(job) = self.jobs.get_mut(id).filter(|job| job.connection == connection) else { continue };
            job.cut_short();
            self.waiting.retain(|&waiting| waiting != id);
            self.finish_if_done(None, id);
        }
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

/// Checked before anything is started, so that a half-mapped request changes nothing.
fn all_mapped(request: &Request, connection: &Connection) -> bool {
    let memory = &connection.memory;
    memory.covers(request.status, 1)
        && request.data.iter().all(|segment| memory.covers(segment.address, u64::from(segment.bytes)))
}

/// Is there memory for all that the answer will write?
fn all_admitted(request: &Request, connection: &Connection) -> bool {
    let memory = &connection.memory;
    let into_guest = matches!(request.kind, Kind::Read | Kind::Identify);
    let data = if into_guest { request.data.as_slice() } else { &[] };
    memory.admit(request.status, 1)
        && data.iter().all(|segment| memory.admit(segment.address, u64::from(segment.bytes)))
}
