//! Joining: requests that wait for the image at the same time and lie side by side on it are one operation there.
//!
//! Guests ask for neighbours one by one: a kernel that reads ahead in a journal of 1 KiB blocks sends a request for each, 128
//! in a row. A disk with a limit on operations counts them: the mount of 400 such volumes took twice as long on one with 200 a
//! second as with QEMU's own disk, which joins them too.
//!
//! Neighbours that come one by one would each find the image free to take them: so a small read that follows closely on one that
//! the image is busy with is held back for a moment (`held_back`), in which others may come that go with it. Not where reads
//! take no longer than that moment, nor where a queue is being stopped.
//!
//! Reads are joined over a short gap as well, and where they are widened to whole blocks, also those of one block; writes only
//! where nothing lies between them, or what memory holds (`filling`), and none of those that wait overlaps another. What fails
//! together is carried out one by one.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::carriage::{GAP_BYTES, Stall};
use super::filling::blocks;
use super::{BLOCK, Disk, Job};
use crate::engine::Operation;
use crate::server::connection::Connection;
use crate::server::overlap::RequestId;
use crate::server::request::{Kind, Status};
use crate::server::running::{Part, Running};
use crate::server::transfer;

/// So many waiting requests are looked at: a queue of QEMU's default length, half full.
const LOOKED_AT_MAX: usize = 128;

/// Reads up to here are held back,
const HELD_BACK_MAX: u64 = 32 << 10;
/// until together they are this long: as much as guests read ahead at a time.
const LONG_ENOUGH: u64 = 128 << 10;
/// What a read takes before any has ended, in times that one is held back: long.
pub(super) const WITHOUT_A_READ: u32 = 40;

/// Requests that wait for neighbours, and how long at most until the first of them goes on.
#[derive(Default)]
pub(super) struct HeldBack {
    pub(super) requests: Vec<RequestId>,
    pub(super) wait: Option<Duration>,
}

/// A read that waits and may be held back.
struct Small {
    job: RequestId,
    bytes: Range<u64>,
    since: Instant,
}

/// What an operation would carry out for one request.
struct Share {
    part: Part,
    /// Of the disk, with what is read around it.
    bytes: Range<u64>,
}

impl Disk {
    /// Small reads that wait beside each other, and behind one that the image was given just before.
    pub(super) fn held_back(&self, now: Instant) -> HeldBack {
        let (mut held_back, quiet) = (HeldBack::default(), self.hold_back);
        if self.read_took < quiet {
            return held_back;
        }
        let mut small: Vec<Small> = self.waiting.iter().take(LOOKED_AT_MAX).filter_map(|&id| self.small(id)).collect();
        small.sort_unstable_by_key(|small| small.bytes.start);
        for beside in small.chunk_by(|one, next| next.bytes.start <= one.bytes.end + GAP_BYTES) {
            let (first, last) = (&beside[0], &beside[beside.len() - 1]);
            let newest = beside.iter().map(|small| small.since).max().unwrap_or(now);
            let quiet_for = now.saturating_duration_since(newest);
            let follows = |running: &Running| {
                running.is_read_before(first.bytes.start, GAP_BYTES) && first.since < running.begun + quiet
            };
            let is_short = last.bytes.end - first.bytes.start < LONG_ENOUGH;
            if quiet_for < quiet && is_short && self.running.iter().any(|(_, running)| follows(running)) {
                held_back.requests.extend(beside.iter().map(|small| small.job));
                held_back.wait = held_back.wait.into_iter().chain([quiet - quiet_for]).min();
            }
        }
        held_back
    }

    fn small(&self, id: RequestId) -> Option<Small> {
        let job = self.jobs.get(id)?;
        let is_small = job.request.kind == Kind::Read && job.request.bytes <= HELD_BACK_MAX;
        let share = if is_small { self.share(id, job)? } else { return None };
        Some(Small { job: id, bytes: share.bytes, since: job.waits_since? })
    }

    /// An operation has ended. A disk that counts operations lets some pass at once, and has the next one wait: the slowest of the
    /// last forty or so tells what they cost.
    pub(super) fn note_time(&mut self, running: &Running, now: Instant) {
        if matches!(running.operation, Operation::Read(_)) {
            let took = now.saturating_duration_since(running.begun);
            self.read_took = took.max(self.read_took * 7 / 8);
        }
    }

    /// Hands over what the image has to do for this request, if others that wait can go with it. False: none can.
    pub(super) fn hand_over_joined(&mut self, connection: &mut Connection, id: RequestId) -> Result<bool, Stall> {
        if self.running.len() >= self.depth {
            return Err(Stall::Busy);
        }
        let (shares, missing) = self.joined(id);
        self.want(missing);
        let (Some(first), Some(end)) = (shares.first(), shares.iter().map(|share| share.bytes.end).max()) else {
            return Ok(false);
        };
        if shares.len() == 1 {
            return Ok(false);
        }
        let all = first.bytes.start..end;
        let bytes = all.end - all.start;
        let slot = self.pool.take(bytes as usize).ok_or(Stall::Busy)?;
        let is_write = self.jobs.get(id).is_some_and(|job| job.request.kind == Kind::Write);
        let gaps = if is_write { gaps(&shares) } else { Vec::new() };
        if !self.fill(&gaps, slot, all.start) {
            self.pool.give_back(slot);
            return Ok(false);
        }
        let stop = self.jobs.get(id).and_then(|job| connection.stop_of(job.queue));
        if let Err(stall) = self.admit_operation(bytes, stop) {
            self.pool.give_back(slot);
            return Err(stall);
        }
        let place =
            |share: &Share| Part { start: share.bytes.start + share.part.around.before - all.start, ..share.part };
        let parts: Vec<Part> = shares.iter().map(place).collect();
        if is_write {
            // SAFETY: the slot was just taken, nothing is in flight on it, and the reference ends with the copies.
            let buffer = unsafe { self.pool.bytes_mut(slot) };
            let lost = parts.iter().find(|part| {
                let copied = self.jobs.get(part.job).map(|job| {
                    transfer::fetch(&connection.memory, &job.request, part.position, &mut buffer[part.own_bytes()])
                });
                !matches!(copied, Some(Ok(())))
            });
            if let Some(lost) = lost.map(|part| part.job) {
                self.pool.give_back(slot);
                self.data_is_nowhere(connection, lost, id);
                return Ok(true);
            }
        }
        for part in &parts {
            if let Some(job) = self.jobs.get_mut(part.job) {
                job.run.start = job.run.end;
                job.from_image = true;
            }
        }
        // Whoever asked for this one takes it off the queue.
        self.waiting.retain(|&waiting| waiting == id || parts.iter().all(|part| part.job != waiting));
        let operation = if is_write { Operation::Write(slot) } else { Operation::Read(slot) };
        self.count_filled(&gaps);
        self.push(parts, operation, gaps, all);
        Ok(true)
    }

    /// The data of a write cannot be read from guest memory. It goes no further; `front` is seen to by whoever asked.
    fn data_is_nowhere(&mut self, connection: &mut Connection, id: RequestId, front: RequestId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.status = Status::IoError;
        job.cut_short();
        if id != front {
            self.waiting.retain(|&waiting| waiting != id);
            self.finish_if_done(Some(connection), id);
        }
    }

    /// The request, and those that wait and lie beside it, in the order of the disk; and what is missing in memory, so that
    /// there are no more of them.
    fn joined(&self, id: RequestId) -> (Vec<Share>, Vec<Range<u64>>) {
        let nobody = || (Vec::new(), Vec::new());
        let Some(job) = self.jobs.get(id).filter(|_| self.waiting.len() > 1) else { return nobody() };
        let Some(own) = self.share(id, job) else { return nobody() };
        let (kind, connection) = (job.request.kind, job.connection);
        let others = self.waiting.iter().take(LOOKED_AT_MAX).filter(|&&other| other != id);
        let shares = others.filter_map(|&other| {
            let job = self.jobs.get(other)?;
            (job.request.kind == kind && job.connection == connection).then(|| self.share(other, job)).flatten()
        });
        let mut shares: Vec<Share> = shares.collect();
        if shares.is_empty() {
            return nobody();
        }
        shares.push(own);
        shares.sort_unstable_by_key(|share| share.bytes.start);
        // Which of two writes of the same bytes came last is seen on the disk: they go one by one, as they came.
        if kind == Kind::Write && shares.windows(2).any(|pair| pair[0].bytes.end > pair[1].bytes.start) {
            return nobody();
        }
        if kind == Kind::Write {
            shares.retain(|share| !self.meets_filled(&share.bytes));
        }
        let at = shares.iter().position(|share| share.part.job == id).unwrap_or_default();
        let ranges: Vec<Range<u64>> = shares.iter().map(|share| share.bytes.clone()).collect();
        let mut missing = Vec::new();
        let go_over = |gap: Range<u64>, all: Range<u64>| match kind {
            Kind::Read => gap.end <= gap.start + GAP_BYTES,
            _ if gap.is_empty() => true,
            _ if !self.may_fill(&gap, all) => false,
            _ if self.recorder.holds_all(blocks(&gap)) => true,
            _ => {
                missing.push(gap);
                false
            }
        };
        let joined = stretch(&ranges, at, go_over, self.pool.slot_bytes_max() as u64);
        shares.truncate(joined.end);
        shares.drain(..joined.start);
        (shares, missing)
    }

    /// All that is left of a request, if it has data, was looked at to its end and may be joined.
    fn share(&self, id: RequestId, job: &Job) -> Option<Share> {
        let is_last = !job.alone && !job.is_single() && job.next == job.work() && !job.run.is_empty();
        let bytes = job.run.end - job.run.start;
        if !is_last || bytes > self.pool.slot_bytes_max() as u64 / 2 {
            return None;
        }
        let offset = job.request.offset + job.run.start;
        let wanted = job.request.kind == Kind::Read && self.recorder.wants(job.request.bytes);
        let around = self.around(wanted, offset, bytes);
        let part = Part { job: id, position: job.run.start, bytes, around, start: 0 };
        Some(Share { part, bytes: offset - around.before..offset + bytes + around.after })
    }
}

/// What lies between requests in the order of the disk.
fn gaps(shares: &[Share]) -> Vec<Range<u64>> {
    let between = shares.windows(2).map(|pair| pair[0].bytes.end..pair[1].bytes.start);
    between.filter(|gap| !gap.is_empty()).collect()
}

/// Of ranges sorted by their start, those around the one at `at` that can be one operation of at most so many bytes.
/// `go_over`: may what lies between two of them (nothing, if they touch or overlap) be a part of an operation on all this?
fn stretch(
    ranges: &[Range<u64>],
    at: usize,
    mut go_over: impl FnMut(Range<u64>, Range<u64>) -> bool,
    bytes_max: u64,
) -> Range<usize> {
    let mut all = ranges[at].clone();
    let (mut from, mut to) = (at, at + 1);
    while let Some(next) = ranges.get(to) {
        let end = all.end.max(next.end);
        if end - all.start > bytes_max || !go_over(all.end..next.start, all.start..end) {
            break;
        }
        all.end = end;
        to += 1;
    }
    while let Some(before) = from.checked_sub(1).map(|at| &ranges[at]) {
        let end = all.end.max(before.end);
        if end - before.start > bytes_max || !go_over(before.end..all.start, before.start..end) {
            break;
        }
        all = before.start..end;
        from -= 1;
    }
    debug_assert!(all.end - all.start <= bytes_max.max(BLOCK), "an operation fits its slot");
    from..to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(ranges: &[Range<u64>], at: usize, is_read: bool, expected: Range<usize>) {
        let go_over = |gap: Range<u64>, _: Range<u64>| gap.end <= gap.start + if is_read { GAP_BYTES } else { 0 };
        assert_eq!(stretch(ranges, at, go_over, 64 << 10), expected);
    }

    #[test]
    fn neighbours_are_one_operation() {
        let ranges = [0..1024, 1024..2048, 2048..4096, 8192..9216];
        (0..3).for_each(|at| check(&ranges, at, false, 0..3));
        check(&ranges, 3, false, 3..4);
        (0..4).for_each(|at| check(&ranges, at, true, 0..4));
    }

    #[test]
    fn reads_may_overlap() {
        let ranges = [0..4096, 0..4096, 2048..3072, 4096..8192];
        check(&ranges, 0, true, 0..4);
        check(&ranges, 3, true, 0..4);
    }

    #[test]
    fn a_long_gap_ends_an_operation_and_so_does_its_length() {
        let kib = |from: u64, to: u64| from << 10..to << 10;
        check(&[kib(0, 4), kib(36, 40), kib(73, 76)], 0, true, 0..2);
        check(&[kib(0, 4), kib(36, 40), kib(73, 76)], 2, true, 2..3);
        let long = [kib(0, 32), kib(32, 64), kib(64, 96)];
        check(&long, 0, false, 0..2);
        check(&long, 1, false, 1..3);
        check(&long, 2, true, 1..3);
    }
}
