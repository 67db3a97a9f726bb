//! Holding back: a small read waits a moment for neighbours that may come.
//!
//! Neighbours that come one by one would each find the image free to take them: so a small read that follows closely on one
//! that the image is busy with is held back for a moment, in which others may come that go with it. This is not done where
//! reads take no longer than that moment, nor where a queue is being stopped.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::merge::{LOOKED_AT_MAX, share};
use super::view::View;
use crate::engine::Operation;
use crate::server::disk::blocks::GAP_BYTES;
use crate::server::disk::overlap::RequestId;
use crate::server::disk::running::Running;

/// Reads up to here are held back,
const HELD_BACK_MAX: u64 = 32 << 10;
/// until together they are this long: as much as guests read ahead at a time.
const LONG_ENOUGH: u64 = 128 << 10;
/// Assumed time of a read before any has ended, in units of the time that a read is held back: long.
const WITHOUT_A_READ: u32 = 40;

/// Requests that wait for neighbours, and how long at most until the first of them goes on.
#[derive(Default)]
pub struct HeldBack {
    pub requests: Vec<RequestId>,
    pub wait: Option<Duration>,
}

/// How long reads are held back, and whether that pays.
pub struct HoldBack {
    moment: Duration,
    /// The slowest of the recent reads.
    read_took: Duration,
}

/// A read that waits and may be held back.
struct Small {
    job: RequestId,
    bytes: Range<u64>,
    since: Instant,
}

impl HoldBack {
    pub fn new(moment: Duration) -> Self {
        Self { moment, read_took: moment * WITHOUT_A_READ }
    }

    /// Small reads that wait beside each other, and behind one that the image was given just before.
    pub fn held_back(&self, view: View<'_>, waiting: &VecDeque<RequestId>, now: Instant) -> HeldBack {
        let (mut held_back, moment) = (HeldBack::default(), self.moment);
        if self.read_took < moment {
            return held_back;
        }
        let small = waiting.iter().take(LOOKED_AT_MAX).filter_map(|&id| small(view, id));
        let mut small: Vec<Small> = small.collect();
        small.sort_unstable_by_key(|small| small.bytes.start);
        for beside in small.chunk_by(|one, next| next.bytes.start <= one.bytes.end + GAP_BYTES) {
            let (first, last) = (&beside[0], &beside[beside.len() - 1]);
            let newest = beside.iter().map(|small| small.since).max().unwrap_or(now);
            let quiet_for = now.saturating_duration_since(newest);
            let follows = |running: &Running| {
                running.is_read_before(first.bytes.start, GAP_BYTES) && first.since < running.begun + moment
            };
            let is_short = last.bytes.end - first.bytes.start < LONG_ENOUGH;
            if quiet_for < moment && is_short && view.operations.iter().any(follows) {
                held_back.requests.extend(beside.iter().map(|small| small.job));
                held_back.wait = held_back.wait.into_iter().chain([moment - quiet_for]).min();
            }
        }
        held_back
    }

    /// An operation has ended. A disk that counts operations lets some pass at once and has the next one wait, so the slowest
    /// of the last forty or so shows what they cost.
    pub fn note_time(&mut self, running: &Running, now: Instant) {
        if matches!(running.operation, Operation::Read(_)) {
            let took = now.saturating_duration_since(running.begun);
            self.read_took = took.max(self.read_took * 7 / 8);
        }
    }
}

fn small(view: View<'_>, id: RequestId) -> Option<Small> {
    let job = view.jobs.get(id)?;
    let share = if job.request.bytes <= HELD_BACK_MAX { share(view, id, job)? } else { return None };
    Some(Small { job: id, bytes: share.bytes, since: job.waits_since? })
}
