//! Completion: what the engine has ended is told to the memory that holds blocks, delivered to the guest, and answered.

use std::io;

use super::{BLOCK, Disk};
use crate::buffer::Slot;
use crate::engine::Completion;
use crate::server::connection::Connection;
use crate::server::counters::add;
use crate::server::overlap::RequestId;
use crate::server::request::{Kind, Status};
use crate::server::running::{Part, Running};
use crate::server::transfer;
use crate::warm::Answered;

impl Disk {
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
        let in_flight = (self.running.len() - self.kept.waiting.len()) as u64;
        self.counters.in_flight.store(in_flight, std::sync::atomic::Ordering::Relaxed);
        self.pressure.set_in_flight(in_flight);
        any
    }

    pub(super) fn complete(&mut self, connection: Option<&mut Connection>, completion: Completion) {
        let place = usize::try_from(completion.token).ok();
        // Nobody waits for the requests of a connection that is gone.
        let stopping = connection.as_ref().is_none_or(|connection| connection.is_waiting());
        if let (Some(place), Err(error)) = (place, &completion.result)
            && self.keep(place, stopping, error)
        {
            return;
        }
        let Some((place, running)) = place.and_then(|place| Some((place, self.running.try_remove(place)?))) else {
            tracing::error!(token = completion.token, "an engine ended an operation that it was not given");
            return;
        };
        let now = self.clock.now();
        self.note_time(&running, now);
        if !running.is_own() {
            self.pressure.ended(running.begun, now, running.bytes());
        }
        self.note_for_flushes(place, &running, completion.result.is_ok());
        if running.waited_for_space {
            self.kept_ended(completion.result.is_ok());
        }
        let mut connection = connection;
        if let Some(slot) = running.slot().filter(|_| running.is_own()) {
            self.wanted_is_read(slot, completion.result.is_ok());
        }
        match completion.result {
            Err(error) => self.fail(connection.as_deref_mut(), &running, &error),
            Ok(()) => running.parts.iter().for_each(|part| self.end(connection.as_deref(), &running, part)),
        }
        if let Some(slot) = running.slot() {
            self.pool.give_back(slot);
        }
        for part in &running.parts {
            let Some(job) = self.jobs.get_mut(part.job) else { unreachable!("a request outlives its operations") };
            job.pending -= 1;
            let connection = connection.as_deref_mut().filter(|connection| connection.id == job.connection);
            self.finish_if_done(connection, part.job);
        }
    }

    /// Requests that failed together are carried out one by one: the fault is one's alone, perhaps.
    fn fail(&mut self, connection: Option<&mut Connection>, running: &Running, error: &io::Error) {
        let connection = connection.map(|connection| connection.id);
        for part in running.parts.iter().rev() {
            let Some(job) = self.jobs.get_mut(part.job) else { continue };
            if running.parts.len() > 1 && running.slot().is_some() && connection == Some(job.connection) {
                (job.run, job.alone) = (part.position..part.position + part.bytes, true);
                self.waiting.push_front(part.job);
                continue;
            }
            tracing::warn!(%error, offset = job.request.offset + part.position, "the disk image failed");
            add(&self.counters.io_errors, 1);
            job.status = Status::IoError;
            job.cut_short();
            self.waiting.retain(|&waiting| waiting != part.job);
        }
    }

    /// An operation went well: what that means for one of its requests.
    fn end(&mut self, connection: Option<&Connection>, running: &Running, part: &Part) {
        let (Some(slot), Some(job)) = (running.slot(), self.jobs.get(part.job)) else { return };
        let connection = connection.filter(|connection| connection.id == job.connection);
        self.tell_source(slot, part);
        if let Some(connection) = connection {
            self.use_completion(connection, slot, part);
        }
    }

    /// What is now known of the blocks, whoever asked: memory that holds some of them is kept current.
    fn tell_source(&mut self, slot: Slot, part: &Part) {
        let Some(job) = self.jobs.get(part.job) else { return };
        let certain = !self.overlaps.is_tainted(part.job);
        // SAFETY: the operation on the slot has ended, the slot is still ours, and the reference ends with this call.
        let data = unsafe { &self.pool.bytes_mut(slot)[part.all_bytes()] };
        if job.request.kind == Kind::Read {
            let offset = job.request.offset + part.position - part.around.before;
            if self.recorder.wants(job.request.bytes) {
                transfer::tell_read(&self.recorder, offset, data, certain);
            } else {
                self.recorder.missed(offset / BLOCK..(offset + data.len() as u64).div_ceil(BLOCK));
            }
        } else if certain {
            transfer::tell_written(&self.recorder, &job.request, part.position, data);
        }
    }

    /// An operation with data went well: what of it is the guest's, and which of its pages hold what?
    fn use_completion(&mut self, connection: &Connection, slot: Slot, part: &Part) {
        let Some(job) = self.jobs.get_mut(part.job) else { return };
        let recordable = !self.overlaps.is_tainted(part.job);
        // SAFETY: the operation on the slot has ended, the slot is still ours, and the reference ends with this call.
        let data = unsafe { &self.pool.bytes_mut(slot)[part.own_bytes()] };
        let (memory, recorder, position) = (&connection.memory, &mut self.recorder, part.position);
        if job.request.kind == Kind::Write {
            add(&self.counters.bytes_written, part.bytes);
            if recordable {
                transfer::note_written(memory, recorder, &job.request, position, data);
            }
        } else {
            add(&self.counters.bytes_read_image, part.bytes);
            if transfer::deliver(memory, recorder, &job.request, position, data, recordable).is_err() {
                job.status = Status::IoError;
            }
        }
        self.recorder.commit();
    }

    /// Answers a request if all of it is done. `None`: its connection is gone.
    pub(super) fn finish_if_done(&mut self, connection: Option<&mut Connection>, id: RequestId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.pending > 0 || !job.all_handed_over() {
            return;
        }
        if std::mem::take(&mut job.flush_after) && job.status == Status::Ok && connection.is_some() {
            self.flush(id);
            return self.finish_if_done(connection, id);
        }
        if self.overlaps.is_tainted(id) {
            add(&self.counters.tainted, 1);
        }
        self.overlaps.end(id);
        let Some(job) = self.jobs.try_remove(id) else { return };
        if let Some(taken) = job.taken.filter(|_| job.request.kind == Kind::Read && !job.from_image) {
            let beside_writes = self.overlaps.is_changing();
            self.recorder.answered(Answered {
                in_line: job.waits_since.is_none(),
                beside_writes,
                took: self.clock.now().saturating_duration_since(taken),
            });
        }
        if let Some(connection) = connection {
            let _ = connection.memory.write(job.request.status, &[job.status as u8]);
            let read = job.request.kind == Kind::Read && job.status == Status::Ok;
            let bytes = if read { job.request.bytes as u32 + 1 } else { 1 };
            connection.answer(job.queue, job.head, bytes);
        }
        self.recycle(job.request);
    }
}
