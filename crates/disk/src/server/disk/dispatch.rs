//! Dispatch: requests on their way to the image. Hits are served, misses become runs, and runs go to the engine as slots and
//! limits allow, reads together with others that wait beside them (`schedule::merge`).

use std::ops::Range;
use std::time::Duration;

use super::job::{BLOCK, Job};
use super::overlap::RequestId;
use super::parts::Parts;
use super::running::{Around, Part, Running};
use super::schedule::Stall;
use super::schedule::hold_back::HeldBack;
use super::schedule::merge::{self, Share};
use crate::buffer::Slot;
use crate::engine::Operation;
use crate::server::connection::Connection;
use crate::server::request::Kind;
use crate::server::transfer;

impl Parts {
    /// Hits of a request that has just begun are served, whoever waits. Misses queue up until all that has come is known, and
    /// behind those that wait already. A flush is about what has ended, so it need not wait for those that have not begun.
    pub fn go_on_or_wait(&mut self, connection: &mut Connection, id: RequestId) {
        self.find_run(connection, id);
        let is_flush = self.jobs.get(id).is_some_and(|job| job.request.kind == Kind::Flush);
        let handed_over = is_flush && self.advance(connection, id).is_ok();
        if handed_over || self.jobs.get(id).is_none_or(Job::all_handed_over) {
            return self.finish_if_done(Some(connection), id);
        }
        if let Some(job) = self.jobs.get_mut(id) {
            job.waits_since = Some(self.context.now());
        }
        self.schedule.waiting.push_back(id);
    }

    /// Lets waiting requests go on. Returns how long to wait if the limits or neighbours are the reason that it ends.
    pub fn go_on(&mut self, connection: &mut Connection) -> Option<Duration> {
        // A queue that is stopped is not held up: QEMU as a whole waits for that.
        let held_back = if connection.is_waiting() {
            HeldBack::default()
        } else {
            self.schedule.held_back(self.view(), self.context.now())
        };
        let (mut at, mut wait) = (0, held_back.wait);
        while let Some(&id) = self.schedule.waiting.get(at) {
            if held_back.requests.contains(&id) {
                at += 1;
                continue;
            }
            match self.advance(connection, id) {
                Ok(()) => {
                    // Those that went with it have left the queue, also in front of it.
                    let waiting = &mut self.schedule.waiting;
                    at = waiting.iter().position(|&waiting| waiting == id).expect("it leaves the queue here");
                    waiting.remove(at);
                    self.finish_if_done(Some(connection), id);
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

    /// Hands over to the engine as much of a request as possible.
    fn advance(&mut self, connection: &mut Connection, id: RequestId) -> Result<(), Stall> {
        loop {
            let Some(job) = self.jobs.get(id) else { return Ok(()) };
            if job.all_handed_over() {
                return Ok(());
            }
            if job.run.is_empty() {
                self.find_run(connection, id);
            } else if !self.hand_over_merged(connection, id)? {
                self.admit(connection, id)?;
                self.hand_over(connection, id)?;
            }
        }
    }

    /// Finds what the image has to do next for a request, after hits have been served.
    fn find_run(&mut self, connection: &Connection, id: RequestId) {
        if let Some(job) = self.jobs.get_mut(id) {
            self.blocks.find_run(id, job, &connection.memory, &self.context.counters);
        }
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
        let stop = connection.stop_of(job.origin.queue);
        let admitted = self.schedule.admission.admit(&self.context, bytes, stop);
        job.admitted = admitted.is_ok();
        admitted.map_err(Stall::Limited)
    }

    fn hand_over(&mut self, connection: &Connection, id: RequestId) -> Result<(), Stall> {
        loop {
            let Some(job) = self.jobs.get_mut(id) else { return Ok(()) };
            if job.run.is_empty() {
                return Ok(());
            }
            if self.operations.is_full() {
                return Err(Stall::Busy);
            }
            let kind = job.request.kind;
            if job.is_single() {
                job.run.start = job.run.end;
                let place = job.place();
                let operation = match kind {
                    Kind::Flush => {
                        self.operations.flush(&self.context, &mut self.jobs, id);
                        return Ok(());
                    }
                    Kind::Discard => Operation::Discard,
                    Kind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
                    Kind::Read | Kind::Write | Kind::Identify => unreachable!("these have data"),
                };
                self.start(vec![Part::without_data(id)], operation, place);
                return Ok(());
            }
            let (offset, left) = (job.request.offset + job.run.start, job.run.end - job.run.start);
            let wanted = kind == Kind::Read && self.blocks.recorder.wants(job.request.bytes);
            let room = self.operations.around(wanted, offset, left).with(left);
            let slot = self.operations.pool.take(room as usize).ok_or(Stall::Busy)?;
            self.hand_over_piece(connection, id, slot, wanted);
        }
    }

    /// The run, or as much of it as the longest slot holds, up to a block border, so that blocks are tagged whole.
    fn hand_over_piece(&mut self, connection: &Connection, id: RequestId, slot: Slot, wanted: bool) {
        let Some(job) = self.jobs.get_mut(id) else { return self.operations.pool.give_back(slot) };
        let position = job.run.start;
        let offset = job.request.offset + position;
        let left = job.run.end - position;
        let whole = self.operations.around(wanted, offset, left);
        let room = slot.bytes() as u64 - whole.before;
        let bytes = if left <= room { left } else { room - (offset - whole.before) % BLOCK };
        // A piece that is not the last one ends with a block.
        let around = Around { after: if bytes == left { whole.after } else { 0 }, ..whole };
        job.run.start += bytes;
        job.from_image = true;
        let operation = if job.request.kind == Kind::Write {
            // SAFETY: the slot was just taken, nothing is in flight on it, and the reference ends with the copy.
            let buffer = unsafe { self.operations.pool.bytes_mut(slot) };
            if transfer::fetch(&connection.memory, &job.request, position, &mut buffer[..bytes as usize]).is_err() {
                job.fail();
                return self.operations.pool.give_back(slot);
            }
            Operation::Write(slot)
        } else {
            Operation::Read(slot)
        };
        let part = Part { job: id, position, bytes, around, start: around.before };
        let start = offset - around.before;
        self.start(vec![part], operation, start..start + around.with(bytes));
    }

    /// Hands over what the image has to do for this read, if others that wait can go with it. False: none can.
    fn hand_over_merged(&mut self, connection: &Connection, id: RequestId) -> Result<bool, Stall> {
        if self.operations.is_full() {
            return Err(Stall::Busy);
        }
        let shares = merge::neighbours(self.view(), &self.schedule.waiting, id);
        let (Some(first), Some(end)) = (shares.first(), shares.iter().map(|share| share.bytes.end).max()) else {
            return Ok(false);
        };
        if shares.len() == 1 {
            return Ok(false);
        }
        let all = first.bytes.start..end;
        let bytes = all.end - all.start;
        let slot = self.operations.pool.take(bytes as usize).ok_or(Stall::Busy)?;
        let stop = self.jobs.get(id).and_then(|job| connection.stop_of(job.origin.queue));
        if let Err(wait) = self.schedule.admission.admit(&self.context, bytes, stop) {
            self.operations.pool.give_back(slot);
            return Err(Stall::Limited(wait));
        }
        let place =
            |share: &Share| Part { start: share.bytes.start + share.part.around.before - all.start, ..share.part };
        let parts: Vec<Part> = shares.iter().map(place).collect();
        for part in &parts {
            if let Some(job) = self.jobs.get_mut(part.job) {
                job.run.start = job.run.end;
                job.from_image = true;
            }
        }
        // `go_on` takes this one off the queue.
        self.schedule.waiting.retain(|&waiting| waiting == id || parts.iter().all(|part| part.job != waiting));
        self.start(parts, Operation::Read(slot), all);
        Ok(true)
    }

    /// Gives the engine an operation on these bytes of the disk.
    fn start(&mut self, parts: Vec<Part>, operation: Operation, bytes: Range<u64>) {
        let running = Running::new(parts, operation, bytes, self.context.now());
        self.operations.start(&mut self.jobs, running);
    }
}
