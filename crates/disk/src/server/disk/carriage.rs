//! Carriage: a request on its way to the image. Hits are served, misses join to runs, and runs go to the engine as slots and
//! limits allow, together with those of other requests that wait beside them (`joining`).

use std::io;
use std::ops::Range;
use std::time::Duration;

use super::filling::meet;
use super::joining::HeldBack;
use super::{BLOCK, Disk, Job};
use crate::buffer::Slot;
use crate::engine::{Operation, Submission};
use crate::server::connection::{Connection, Stop};
use crate::server::counters::add;
use crate::server::overlap::RequestId;
use crate::server::parked::Parked;
use crate::server::request::{Kind, Status};
use crate::server::running::{Around, Part, Running};
use crate::server::transfer::{self, Cursor};

/// A run of misses goes on over fewer bytes of hits than these. They are read for nothing, but another operation would
/// take longer: on a volume with 3000 operations and 125 MiB a second, as long as 42 KiB.
pub(super) const GAP_BYTES: u64 = 32 << 10;

/// Why a request cannot go on now.
#[derive(Clone, Copy)]
pub(super) enum Stall {
    /// Until an operation ends.
    Busy,
    /// Until the operation ends that writes what lies there: no other request waits for that.
    Filled,
    /// Until the limiter allows it.
    Limited(Duration),
}

impl Disk {
    /// Lets waiting requests go on. Says how long to wait if limiter or memory are the reason that it ends.
    pub fn pump(&mut self, connection: &mut Connection) -> Option<Duration> {
        for Parked { queue, head, taken, .. } in self.parking.leave() {
            self.begin(connection, queue, head, Some(taken));
        }
        let limited = self.pump_waiting(connection);
        if !connection.is_waiting() {
            self.read_wanted();
        }
        let kept = self.try_kept(connection.is_waiting());
        limited.into_iter().chain(self.parking.wait()).chain(kept).min()
    }

    fn pump_waiting(&mut self, connection: &mut Connection) -> Option<Duration> {
        // A queue that is stopped is not held up: QEMU as a whole waits for that.
        let held_back = if connection.is_waiting() { HeldBack::default() } else { self.held_back(self.clock.now()) };
        let mut passed: Vec<Range<u64>> = Vec::new();
        let (mut at, mut wait) = (0, held_back.wait);
        while let Some(&id) = self.waiting.get(at) {
            let place = self.jobs.get(id).map_or(0..0, Job::place);
            let comes_later = passed.iter().any(|passed| meet(passed, &place));
            if comes_later || held_back.requests.contains(&id) {
                at += 1;
                continue;
            }
            match self.advance(connection, id) {
                Ok(()) => {
                    // Those that went with it have left the queue, also in front of it.
                    at = self.waiting.iter().position(|&waiting| waiting == id).expect("it leaves the queue here");
                    self.waiting.remove(at);
                    self.finish_if_done(Some(connection), id);
                }
                Err(Stall::Filled) => {
                    passed.push(place);
                    at += 1;
                }
                Err(Stall::Busy) => return wait,
                Err(Stall::Limited(limited)) => {
                    wait = wait.into_iter().chain([limited]).min();
                    // Behind it there may be what a stop waits for, which may go on credit.
                    if !connection.is_waiting() {
                        return wait;
                    }
                    at += 1;
                }
            }
        }
        wait
    }

    /// Hands over to the engine as much as goes.
    pub(super) fn advance(&mut self, connection: &mut Connection, id: RequestId) -> Result<(), Stall> {
        loop {
            let Some(job) = self.jobs.get_mut(id) else { return Ok(()) };
            if job.all_handed_over() {
                return Ok(());
            }
            if job.run.is_empty() {
                self.find_run(connection, id);
            } else if job.request.kind.changes_blocks() && self.must_wait(id) {
                return Err(Stall::Filled);
            } else if !self.hand_over_joined(connection, id)? {
                self.admit(connection, id)?;
                self.hand_over(connection, id)?;
            }
        }
    }

    /// What of a request the image has to do next, after hits have been served.
    pub(super) fn find_run(&mut self, connection: &mut Connection, id: RequestId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        match job.request.kind {
            Kind::Read => self.look(connection, id),
            _ => (job.run, job.next) = (0..job.work(), job.work()),
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
        // What a write in flight is changing is void in the source, so it would miss; not asking makes that certain. Of a single
        // block the source is asked once.
        let is_single = blocks.end - blocks.start == 1;
        if self.overlaps.changing(&blocks) || !is_single && !self.recorder.may_be_warm(blocks) {
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

    /// Limits apply to what goes to the image: a run of misses, a write, a change is one operation. Zeroes cost what writing
    /// them would, which is how some images make them; a discard moves nothing, and costs a block. A flush costs nothing: one
    /// goes to the image only if something that was paid for has changed since the last one.
    fn admit(&mut self, connection: &Connection, id: RequestId) -> Result<(), Stall> {
        let Some(job) = self.jobs.get_mut(id) else { return Ok(()) };
        let bytes = match job.request.kind {
            _ if job.admitted => return Ok(()),
            Kind::Flush => return Ok(()),
            Kind::Discard => BLOCK,
            Kind::WriteZeroes { .. } => job.request.bytes,
            Kind::Read | Kind::Write | Kind::Identify => job.run.end - job.run.start,
        };
        let stop = connection.stop_of(job.queue);
        let admitted = self.admit_operation(bytes, stop);
        if let Some(job) = self.jobs.get_mut(id) {
            job.admitted = admitted.is_ok();
        }
        admitted
    }

    /// `stop`: the one that waits for the operation, and QEMU as a whole with it. So all that waits in its queues passes at
    /// once, on credit, and what comes later pays for that. There is no second credit before the first is paid: a guest that
    /// stops its queues again and again gets no more than the limit, and waits for it with all of its QEMU.
    pub(super) fn admit_operation(&mut self, bytes: u64, stop: Option<Stop>) -> Result<(), Stall> {
        let now = self.clock.now();
        match self.limiter.admit(now, bytes) {
            Ok(()) => self.lent_to = None,
            Err(_) if stop.is_some() && self.lent_to.is_none_or(|lent_to| Some(lent_to) == stop) => {
                self.lent_to = stop;
                self.limiter.charge(now, bytes);
            }
            Err(wait) => {
                self.throttled_since.get_or_insert(now);
                return Err(Stall::Limited(wait));
            }
        }
        if let Some(since) = self.throttled_since.take() {
            add(&self.counters.throttled_us, now.duration_since(since).as_micros() as u64);
        }
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
                    Kind::Flush => {
                        self.flush(id);
                        return Ok(());
                    }
                    Kind::Discard => Operation::Discard,
                    Kind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
                    Kind::Read | Kind::Write | Kind::Identify => unreachable!("these have data"),
                };
                self.push(vec![Part::without_data(id)], operation, Vec::new(), offset..offset + bytes);
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
        let part = Part { job: id, position, bytes, around, start: around.before };
        let start = offset - around.before;
        self.push(vec![part], operation, Vec::new(), start..start + around.with(bytes));
    }

    /// What of the image is read along with these bytes: nothing, unless blocks that are read are to be held.
    pub(super) fn around(&self, wanted: bool, offset: u64, bytes: u64) -> Around {
        if !wanted {
            return Around::default();
        }
        let end = offset + bytes;
        let whole = end.next_multiple_of(BLOCK).min(self.image.bytes().max(end));
        Around { before: offset % BLOCK, after: whole - end }
    }

    /// Hands an operation on these bytes of the disk to the engine. Returns its place among those that run.
    pub(super) fn push(
        &mut self,
        parts: Vec<Part>,
        operation: Operation,
        filled: Vec<Range<u64>>,
        bytes: Range<u64>,
    ) -> usize {
        let (offset, length) = (bytes.start, bytes.end - bytes.start);
        for part in &parts {
            if let Some(job) = self.jobs.get_mut(part.job) {
                job.pending += 1;
            }
        }
        let running =
            Running { parts, operation, place: bytes, filled, begun: self.clock.now(), waited_for_space: false };
        let place = self.running.insert(running);
        self.engine.push(Submission { token: place as u64, operation, offset, bytes: length });
        self.unsubmitted = true;
        place
    }

    /// Starts what was handed over. An engine that cannot start it now is asked again.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.unsubmitted {
            self.engine.submit()?;
            self.unsubmitted = false;
        }
        Ok(())
    }
}
