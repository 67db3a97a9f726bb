//! Intake: requests come off the queues, are judged, and begin. Those that need memory which the guest has not been granted yet
//! are parked.

use std::time::{Duration, Instant};

use super::job::{Job, Origin};
use super::parked::{Parked, Parking};
use super::parts::Parts;
use crate::gate::Gate;
use crate::server::chain::Descriptor;
use crate::server::config::Device;
use crate::server::connection::Connection;
use crate::server::counters::{Counters, add};
use crate::server::request::{Bounds, Kind, Refusal, Request, SERIAL_BYTES, Status, parse};

/// Requests that are looked after at a time; further ones stay in their queues. Much of what is done for one is done for all
/// others that wait.
const JOBS_MAX: usize = 4096;

/// The device that the guest sees.
pub struct Intake {
    pub device: Device,
    serial: [u8; SERIAL_BYTES],
    read_only: bool,
    /// Before the guest's memory, while that is short.
    pub gate: Option<Gate>,
    parking: Parking,
    /// Reused, so that a request needs no allocation.
    descriptors: Vec<Descriptor>,
}

impl Intake {
    /// `serial` has at most as many bytes as the guest is shown.
    pub fn new(device: Device, serial: &str, read_only: bool, gate: Option<Gate>) -> Self {
        let mut shown = [0; SERIAL_BYTES];
        let length = serial.len().min(SERIAL_BYTES);
        shown[..length].copy_from_slice(&serial.as_bytes()[..length]);
        Self { device, serial: shown, read_only, gate, parking: Parking::default(), descriptors: Vec::new() }
    }

    /// Whether no request waits for memory.
    pub fn is_empty(&self) -> bool {
        self.parking.is_empty()
    }

    /// Forgets what is parked for a connection.
    pub fn abandon(&mut self, connection: u32) {
        self.parking.abandon(connection);
    }

    /// When to ask for memory again, if anything waits for it.
    pub fn wait(&mut self) -> Option<Duration> {
        self.parking.wait()
    }

    /// Takes requests off one queue, at most a queue's worth. True: there was something.
    pub fn take(&mut self, parts: &mut Parts, connection: &mut Connection, queue: u16) -> bool {
        let Connection { memory, queues, .. } = connection;
        let Some(found) = queues.get_mut(usize::from(queue)).filter(|queue| queue.is_ready()) else { return false };
        if !found.may_answer(memory) {
            self.parking.park_ring();
            return false;
        }
        found.begin_round(memory);
        let mut any = false;
        for _ in 0..self.device.queue_size {
            if parts.jobs.len() + self.parking.len() >= JOBS_MAX {
                break;
            }
            let Some(taken) = connection.take(queue) else { break };
            any = true;
            if taken.resumed {
                add(&parts.context.counters.resumed, 1);
            }
            let origin = Origin { connection: connection.id, queue, head: taken.head };
            self.begin(parts, connection, origin, None);
        }
        any
    }

    /// Judges anew what waits for memory, and starts what has it now.
    pub fn begin_parked(&mut self, parts: &mut Parts, connection: &mut Connection) {
        for Parked { origin, taken } in self.parking.leave() {
            self.begin(parts, connection, origin, Some(taken));
        }
    }

    /// A request has come, or can go on that was parked: judges it and starts it.
    fn begin(&mut self, parts: &mut Parts, connection: &mut Connection, origin: Origin, parked: Option<Instant>) {
        let watched = parts.blocks.recorder.learns();
        let taken = watched.then(|| parked.unwrap_or_else(|| parts.context.now()));
        self.descriptors.clear();
        let found = &connection.queues[usize::from(origin.queue)];
        let walked = found.descriptors(origin.head, &connection.memory, connection.agreed(), &mut self.descriptors);
        if let Err(fault) = walked {
            tracing::debug!(%fault, "a request of the guest has a broken chain of descriptors");
            add(&parts.context.counters.bad_requests, 1);
            return connection.answer(origin.queue, origin.head, 0);
        }
        let image = &parts.operations.image;
        let bounds = Bounds { bytes: image.bytes(), read_only: self.read_only, discard: image.supports_discard() };
        let memory = &connection.memory;
        let read = |address: u64, out: &mut [u8]| memory.read(address, out).is_ok();
        let parsed = parse(&self.descriptors, bounds, &read, parts.jobs.segment_list());
        let parked_at = |parts: &Parts| parked.or(taken).unwrap_or_else(|| parts.context.now());
        match parsed {
            Ok(request) if all_mapped(&request, connection) => {
                if self.gate.is_some() && !all_admitted(&request, connection) {
                    self.parking.park(Parked { origin, taken: parked_at(parts) });
                    return parts.jobs.recycle(request);
                }
                count(&parts.context.counters, &request);
                if request.kind == Kind::Identify {
                    return self.identify(parts, connection, origin, request);
                }
                let flush_after = request.kind.changes_blocks() && connection.writes_through();
                let job = Job { flush_after, taken, waits_since: parked, ..Job::new(origin, request) };
                start(parts, connection, job);
            }
            Ok(request) => {
                let answer = Some((request.status, Status::IoError));
                let refusal = Refusal { reason: "its data is outside of guest memory", answer };
                self.refuse(parts, connection, Parked { origin, taken: parked_at(parts) }, refusal);
                parts.jobs.recycle(request);
            }
            Err(refusal) => self.refuse(parts, connection, Parked { origin, taken: parked_at(parts) }, refusal),
        }
    }

    fn refuse(&mut self, parts: &Parts, connection: &mut Connection, request: Parked, refusal: Refusal) {
        if refusal.answer.is_some_and(|(address, _)| !connection.memory.admit(address, 1)) {
            return self.parking.park(request);
        }
        tracing::debug!(reason = refusal.reason, "a request of the guest is refused");
        add(&parts.context.counters.bad_requests, 1);
        let written =
            refusal.answer.is_some_and(|(address, status)| connection.memory.write(address, &[status as u8]).is_ok());
        connection.answer(request.origin.queue, request.origin.head, u32::from(written));
    }

    fn identify(&self, parts: &mut Parts, connection: &mut Connection, origin: Origin, request: Request) {
        let serial = &self.serial[..request.bytes as usize];
        let copied = parts.blocks.deliver_reply(&request, &connection.memory, serial);
        let status = if copied.is_ok() { Status::Ok } else { Status::IoError };
        let _ = connection.memory.write(request.status, &[status as u8]);
        connection.answer(origin.queue, origin.head, request.bytes as u32 + 1);
        parts.jobs.recycle(request);
    }
}

fn start(parts: &mut Parts, connection: &mut Connection, job: Job) {
    let id = parts.jobs.insert(job);
    if let Some(job) = parts.jobs.get(id) {
        parts.blocks.begin(id, job);
    }
    parts.go_on_or_wait(connection, id);
}

fn count(counters: &Counters, request: &Request) {
    let counter = match request.kind {
        Kind::Read => &counters.reads,
        Kind::Write => &counters.writes,
        Kind::Flush => &counters.flushes,
        Kind::Discard | Kind::WriteZeroes { .. } => &counters.discards,
        Kind::Identify => return,
    };
    add(counter, 1);
}

/// Checked before anything is started, so that a half-mapped request changes nothing.
fn all_mapped(request: &Request, connection: &Connection) -> bool {
    let memory = &connection.memory;
    memory.covers(request.status, 1)
        && request.data.iter().all(|segment| memory.covers(segment.address, u64::from(segment.bytes)))
}

/// Whether there is memory for all that the answer will write.
fn all_admitted(request: &Request, connection: &Connection) -> bool {
    let memory = &connection.memory;
    let into_guest = matches!(request.kind, Kind::Read | Kind::Identify);
    let data = if into_guest { request.data.as_slice() } else { &[] };
    memory.admit(request.status, 1)
        && data.iter().all(|segment| memory.admit(segment.address, u64::from(segment.bytes)))
}
