//! Space: an operation that fails because the image's file system (or a quota) is full is kept and tried again.
//!
//! no space -> kept, told -> one of those kept is tried every second -> it succeeds -> all are tried -> told
//!
//! The guest sees a request that takes long, where an error would turn its file system read-only. QEMU's own disks pause
//! the guest instead (`werror=enospc`). That is not possible here: QEMU that pauses a guest stops its queues first, and
//! waits, deaf to everything, until each request is answered. For the same reason a kept operation gets one last try, and
//! then its error, when QEMU stops the queue: the keeper starts nothing that stops it meanwhile.
//!
//! A kept request is still in flight: if the keeper dies, the next one resumes it. If QEMU dies, it is forgotten.
//! A flush is not tried again: the kernel reports a lost write once, and a second flush would report success.

use std::io;
use std::time::{Duration, Instant};

use super::Disk;
use crate::engine::{Completion, Operation, Submission};
use crate::server::Notice;
use crate::server::running::Running;

/// Between two tries.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// Operations that wait for space.
#[derive(Default)]
pub(super) struct Kept {
    /// Their places among those that run; the engine does not have them.
    pub(super) waiting: Vec<usize>,
    /// When the first of them failed; none if there is space.
    since: Option<Instant>,
    try_at: Option<Instant>,
    /// There is space again: all are tried, and not just one.
    all: bool,
}

impl Disk {
    /// An operation has failed. True: it is kept, so the guest is told nothing.
    pub(super) fn keep(&mut self, place: usize, stopping: bool, error: &io::Error) -> bool {
        let now = self.clock.now();
        let Some(running) = self.running.get_mut(place) else { return false };
        if stopping || !is_out_of_space(error) || running.is_own() || running.operation == Operation::Flush {
            return false;
        }
        running.waited_for_space = true;
        self.kept.waiting.push(place);
        self.kept.all = false;
        self.kept.try_at = Some(now + TRY_EVERY);
        if self.kept.since.is_none() {
            self.kept.since = Some(now);
            tracing::warn!(disk = self.name, %error, "the image cannot grow; the guest's requests wait for space");
            self.tell(Notice::OutOfSpace { why: error.to_string() });
        }
        self.count_kept();
        true
    }

    /// Tries again what was kept, if it is time. Says how long until then.
    pub(super) fn try_kept(&mut self, stopping: bool) -> Option<Duration> {
        if self.kept.waiting.is_empty() {
            return None;
        }
        let now = self.clock.now();
        let left = self.kept.try_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        if !left.is_zero() && !self.kept.all && !stopping {
            return Some(left);
        }
        let count = if self.kept.all || stopping { self.kept.waiting.len() } else { 1 };
        for place in self.kept.waiting.drain(..count) {
            let Some(running) = self.running.get_mut(place) else { continue };
            running.begun = now;
            let (operation, offset) = (running.operation, running.place.start);
            let bytes = running.place.end - offset;
            self.engine.push(Submission { token: place as u64, operation, offset, bytes });
            self.unsubmitted = true;
        }
        self.kept.try_at = Some(now + TRY_EVERY);
        (!self.kept.waiting.is_empty()).then_some(TRY_EVERY)
    }

    /// An operation has ended that had to wait for space.
    pub(super) fn kept_ended(&mut self, went_well: bool) {
        self.kept.all = went_well;
        if !self.running.iter().any(|(_, running)| running.waited_for_space)
            && let Some(since) = self.kept.since.take()
        {
            self.kept.all = false;
            if went_well {
                tracing::info!(disk = self.name, "the image can grow again");
                let waited = self.clock.now().saturating_duration_since(since);
                self.tell(Notice::SpaceAgain { waited });
            }
        }
        self.count_kept();
    }

    /// Those of a connection that is gone fail: nobody waits for them.
    pub(super) fn give_up_kept(&mut self, connection: u32) {
        let is_its_own = |running: &Running| {
            let of_another = |job| self.jobs.get(job).is_some_and(|job| job.connection != connection);
            !running.parts.iter().any(|part| of_another(part.job))
        };
        let (gone, stay) = std::mem::take(&mut self.kept.waiting)
            .into_iter()
            .partition(|&place| self.running.get(place).is_none_or(is_its_own));
        self.kept.waiting = stay;
        for place in gone {
            let result = Err(io::Error::from(io::ErrorKind::StorageFull));
            self.complete(None, Completion { token: place as u64, result });
        }
    }

    fn count_kept(&self) {
        let kept = self.running.iter().filter(|(_, running)| running.waited_for_space).count();
        self.counters.waiting_for_space.store(kept as u64, std::sync::atomic::Ordering::Relaxed);
    }

    fn tell(&self, notice: Notice) {
        if let Some(tell) = &self.tell {
            tell(notice);
        }
    }
}

fn is_out_of_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
