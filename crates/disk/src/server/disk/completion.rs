//! Completion: operations that the engine has ended are reported to memory, their data delivered to the guest, and their
//! requests answered.

use std::io;
use std::time::{Duration, Instant};

use super::parts::Parts;
use super::running::{Part, Running};
use crate::engine::Completion;
use crate::server::connection::Connection;
use crate::server::counters::add;

impl Parts {
    /// Takes what the engine has ended, if it has anything or has rung. True: there was something.
    pub fn reap(&mut self, mut connection: Option<&mut Connection>, rung: bool) -> bool {
        if self.operations.is_empty() && !rung {
            return false;
        }
        let mut ended = self.operations.take_ended();
        let any = !ended.is_empty();
        for completion in ended.drain(..) {
            self.complete(connection.as_deref_mut(), completion);
        }
        self.operations.looked(&self.context, ended);
        any
    }

    /// A connection is gone: its requests are not carried any further.
    pub fn abandon(&mut self, connection: u32) {
        let jobs = &self.jobs;
        let is_of_another = |job| jobs.get(job).is_some_and(|job| job.origin.connection != connection);
        self.schedule.waiting.retain(|&waiting| is_of_another(waiting));
        for id in self.jobs.of_connection(connection) {
            if let Some(job) = self.jobs.get_mut(id) {
                job.cut_short();
                self.finish_if_done(None, id);
            }
        }
        for completion in self.operations.give_up_kept(&self.jobs, connection) {
            self.complete(None, completion);
        }
        self.schedule.admission.abandon();
    }

    /// Waits for operations without taking part in anything else; for the end of the thread.
    pub fn drain(&mut self, at_most: Duration) {
        let until = Instant::now() + at_most;
        while !self.operations.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let waited = self.operations.submit().and_then(|()| self.operations.wait(left));
            if waited.is_err() || left.is_zero() {
                tracing::warn!(operations = self.operations.len(), "a disk stops with operations in flight");
                return;
            }
            self.reap(None, true);
        }
    }

    fn complete(&mut self, mut connection: Option<&mut Connection>, completion: Completion) {
        // Nobody waits for the requests of a connection that is gone, also while another one is served.
        let is_served = |connection: &&mut Connection| {
            !connection.is_waiting() && self.operations.is_for(&self.jobs, &completion, connection.id)
        };
        let stopping = completion.result.is_err() && !connection.as_ref().is_some_and(is_served);
        let now = self.context.now();
        let Some(running) = self.operations.end(&self.context, &completion, now, stopping) else { return };
        self.schedule.hold_back.note_time(&running, now);
        match completion.result {
            Err(error) => self.fail(connection.as_deref_mut(), &running, &error),
            Ok(()) => running.parts.iter().for_each(|part| self.end(connection.as_deref(), &running, part)),
        }
        if let Some(slot) = running.slot() {
            self.operations.pool.give_back(slot);
        }
        for part in &running.parts {
            let Some(job) = self.jobs.get_mut(part.job) else { unreachable!("a request outlives its operations") };
            job.pending -= 1;
            let connection = connection.as_deref_mut().filter(|connection| connection.id == job.origin.connection);
            self.finish_if_done(connection, part.job);
        }
    }

    /// Requests that failed together are carried out one by one: perhaps the fault is one's alone.
    fn fail(&mut self, connection: Option<&mut Connection>, running: &Running, error: &io::Error) {
        let connection = connection.map(|connection| connection.id);
        for part in running.parts.iter().rev() {
            let Some(job) = self.jobs.get_mut(part.job) else { continue };
            if running.parts.len() > 1 && running.slot().is_some() && connection == Some(job.origin.connection) {
                (job.run, job.alone) = (part.position..part.position + part.bytes, true);
                self.schedule.waiting.push_front(part.job);
                continue;
            }
            tracing::warn!(%error, offset = job.request.offset + part.position, "the disk image failed");
            add(&self.context.counters.io_errors, 1);
            job.fail();
            self.schedule.withdraw(part.job);
        }
    }

    /// An operation ended well: what that means for one of its requests.
    fn end(&mut self, connection: Option<&Connection>, running: &Running, part: &Part) {
        let (Some(slot), Some(job)) = (running.slot(), self.jobs.get_mut(part.job)) else { return };
        let connection = connection.filter(|connection| connection.id == job.origin.connection);
        // SAFETY: the operation on the slot has ended, the slot is still ours, and the reference ends with this call.
        let all = unsafe { self.operations.pool.bytes_mut(slot) };
        self.blocks.learn(job, part, &all[part.all_bytes()]);
        if let Some(connection) = connection {
            let data = &all[part.own_bytes()];
            self.blocks.deliver(job, part, &connection.memory, data, &self.context.counters);
        }
    }
}
