//! Intake: requests come off the queues, are judged, and begin. Those that need memory which the guest has not been granted yet
//! are parked.

use std::time::Instant;

use super::{Disk, JOBS_MAX, Job};
use crate::server::connection::Connection;
use crate::server::counters::add;
use crate::server::overlap::RequestId;
use crate::server::parked::Parked;
use crate::server::request::{Bounds, Kind, Refusal, Request, Status, parse};
use crate::server::transfer;

/// Where a request came from, and when, if that is of interest.
struct Place {
    queue: u16,
    head: u16,
    taken: Option<Instant>,
    /// Since when it had to wait for memory, if it had to.
    parked: Option<Instant>,
}

impl Disk {
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
            if self.jobs.len() + self.parking.len() >= JOBS_MAX {
                break;
            }
            let Some(taken) = connection.take(queue) else { break };
            any = true;
            if taken.resumed {
                add(&self.counters.resumed, 1);
            }
            self.begin(connection, queue, taken.head, None);
        }
        any
    }

    /// A request has come, or can go on that was parked: judges it and starts it.
    pub(super) fn begin(&mut self, connection: &mut Connection, queue: u16, head: u16, parked: Option<Instant>) {
        let taken = self.recorder.learns().then(|| parked.unwrap_or_else(|| self.clock.now()));
        let clock = self.clock.clone();
        let park = |connection| {
            let taken = parked.or(taken).unwrap_or_else(|| clock.now());
            Parked { connection, queue, head, taken }
        };
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
                    self.parking.park(park(connection.id));
                    return self.recycle(request);
                }
                self.start(connection, Place { queue, head, taken, parked }, request)
            }
            Ok(request) => {
                let answer = Some((request.status, Status::IoError));
                let reason = "its data is outside of guest memory";
                self.refuse(connection, park(connection.id), Refusal { reason, answer });
                self.recycle(request);
            }
            Err(refusal) => self.refuse(connection, park(connection.id), refusal),
        }
    }

    fn refuse(&mut self, connection: &mut Connection, request: Parked, refusal: Refusal) {
        if refusal.answer.is_some_and(|(address, _)| !connection.memory.admit(address, 1)) {
            return self.parking.park(request);
        }
        tracing::debug!(reason = refusal.reason, "a request of the guest is refused");
        add(&self.counters.bad_requests, 1);
        let written =
            refusal.answer.is_some_and(|(address, status)| connection.memory.write(address, &[status as u8]).is_ok());
        connection.answer(request.queue, request.head, u32::from(written));
    }

    fn start(&mut self, connection: &mut Connection, place: Place, request: Request) {
        let Place { queue, head, taken, parked } = place;
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
            alone: false,
            pending: 0,
            status: Status::Ok,
            flush_after,
            taken,
            waits_since: parked,
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

    /// Hits are served now whoever waits; misses queue up until all that has come is known, and behind those that wait
    /// already. A flush is about what has ended, so it need not wait for those that have not begun.
    fn go_on_or_wait(&mut self, connection: &mut Connection, id: RequestId) {
        self.find_run(connection, id);
        let is_flush = self.jobs.get(id).is_some_and(|job| job.request.kind == Kind::Flush);
        let handed_over = is_flush && self.advance(connection, id).is_ok();
        if handed_over || self.jobs.get(id).is_none_or(|job| job.all_handed_over()) {
            return self.finish_if_done(Some(connection), id);
        }
        if let Some(job) = self.jobs.get_mut(id) {
            job.waits_since = Some(self.clock.now());
        }
        self.waiting.push_back(id);
    }
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
