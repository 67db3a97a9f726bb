//! Space: an operation that fails because the image's file system (or a quota) is full is kept and tried again.
//!
//! no space -> kept, keeper told -> one of those kept is tried every second -> it succeeds -> all are tried -> keeper told
//!
//! The guest sees a request that takes long, where an error would turn its file system read-only. QEMU's own disks pause
//! the guest instead (`werror=enospc`). That is not possible here: QEMU that pauses a guest stops its queues first, and
//! then handles nothing else until each request is answered. For the same reason a kept operation gets one last try, and
//! then its error, when QEMU stops the queue: the keeper starts nothing that stops it meanwhile.
//!
//! A kept request is still in flight: if the keeper dies, the next one resumes it. If QEMU dies, it is forgotten.
//! A flush is not tried again: the kernel reports a lost write once, and a second flush would report success.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slab::Slab;

use crate::engine::{Completion, Operation};
use crate::server::Notice;
use crate::server::disk::context::Context;
use crate::server::disk::job::Jobs;
use crate::server::disk::running::Running;

/// Time between two tries.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// Operations that wait for space.
#[derive(Default)]
pub struct Space {
    /// Their places among those that run; the engine does not have them.
    pub kept: Vec<usize>,
    /// When the first of them failed. `None` if there is space.
    since: Option<Instant>,
    try_at: Option<Instant>,
    /// There is space again: all are tried, and not just one.
    all: bool,
}

impl Space {
    /// An operation has failed. True: it is kept, so the guest is told nothing.
    pub fn keep(&mut self, context: &Context, running: &mut Slab<Running>, place: usize, error: &io::Error) -> bool {
        let now = context.now();
        let Some(failed) = running.get_mut(place) else { return false };
        if !is_out_of_space(error) || failed.operation == Operation::Flush {
            return false;
        }
        failed.waited_for_space = true;
        self.kept.push(place);
        self.all = false;
        self.try_at = Some(now + TRY_EVERY);
        if self.since.is_none() {
            self.since = Some(now);
            tracing::warn!(disk = context.name, %error, "the image cannot grow; the guest's requests wait for space");
            context.tell(Notice::OutOfSpace { why: error.to_string() });
        }
        count(context, running);
        true
    }

    /// Takes out what is to be tried again now.
    pub fn due(&mut self, now: Instant, stopping: bool) -> impl Iterator<Item = usize> {
        let is_time = self.try_at.is_none_or(|at| at <= now);
        let count = match self.kept.len() {
            kept if self.all || stopping => kept,
            kept => kept.min(usize::from(is_time)),
        };
        if count > 0 {
            self.try_at = Some(now + TRY_EVERY);
        }
        self.kept.drain(..count)
    }

    /// Time until the next try, if anything is kept.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.try_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        (!self.kept.is_empty()).then_some(left)
    }

    /// An operation has ended that had to wait for space. `running` are the others.
    pub fn ended(&mut self, context: &Context, running: &Slab<Running>, went_well: bool) {
        self.all = went_well;
        if !running.iter().any(|(_, running)| running.waited_for_space)
            && let Some(since) = self.since.take()
        {
            self.all = false;
            if went_well {
                tracing::info!(disk = context.name, "the image can grow again");
                let waited = context.now().saturating_duration_since(since);
                context.tell(Notice::SpaceAgain { waited });
            }
        }
        count(context, running);
    }

    /// Gives up what is kept for a connection that is gone, as failed: nobody waits for it.
    pub fn give_up(&mut self, running: &Slab<Running>, jobs: &Jobs, connection: u32) -> Vec<Completion> {
        let is_its_own = |running: &Running| {
            let of_another = |job| jobs.get(job).is_some_and(|job| job.origin.connection != connection);
            !running.parts.iter().any(|part| of_another(part.job))
        };
        let gone: Vec<usize> = self.kept.extract_if(.., |place| running.get(*place).is_none_or(is_its_own)).collect();
        let fail = |place: usize| {
            let result = Err(io::Error::from(io::ErrorKind::StorageFull));
            Completion { token: place as u64, result }
        };
        gone.into_iter().map(fail).collect()
    }
}

fn count(context: &Context, running: &Slab<Running>) {
    let kept = running.iter().filter(|(_, running)| running.waited_for_space).count();
    context.counters.waiting_for_space.store(kept as u64, Ordering::Relaxed);
}

fn is_out_of_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
