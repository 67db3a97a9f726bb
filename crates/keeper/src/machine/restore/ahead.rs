//! Ahead: the pages that are read before the guest runs. The machine's loop waits for them, so how far it is it says in its
//! events, and whoever asks the loop hears it instead of an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_memory::{PAGE_BYTES, RamFile};
use hearth_recovery::lazy_restore::{Mode, RestoreError, Step, prefetch};
use hearth_recovery::snapshot::Snapshot;
use hearth_recovery::snapshot::pages::PageReader;

use super::super::Parts;
use super::super::rejuvenate::drill;
use crate::control::Occupation;
use crate::event_log::EventLog;

/// Between two words on how far it is. What takes less is not told of.
const EVERY: Duration = Duration::from_secs(2);
const MIB: f64 = 1048576.0;

/// What is read before the guest runs.
pub(super) fn ahead(snapshot: &Snapshot, mode: Mode) -> Option<&PageReader> {
    match mode {
        Mode::Eager => Some(&snapshot.ram),
        Mode::Lazy => None,
        Mode::WorkingSet => snapshot.working_set.as_ref().ok().and_then(Option::as_ref),
    }
}

/// Reads ahead for one machine.
pub(super) struct Reading {
    machine: String,
    event_log: EventLog,
    occupation: Occupation,
    terminated: Arc<AtomicBool>,
}

impl Reading {
    pub(super) fn of(parts: &Parts) -> Self {
        Self {
            machine: parts.config.name.clone(),
            event_log: parts.event_log.clone(),
            occupation: parts.occupation.clone(),
            terminated: parts.terminated.clone(),
        }
    }

    /// Unless a signal ends it: all of a guest's memory takes as long as its disk does, and the loop waits for it.
    pub(super) fn read(&self, pages: &PageReader, ram: &RamFile) -> Result<u64, RestoreError> {
        let (began, mut told, mut done) = (Instant::now(), Duration::ZERO, 0);
        let read = prefetch(pages, ram, |chunk| {
            if chunk >= pages.chunks() / 2 {
                drill(Step::Prefetch.name());
            }
            let took = began.elapsed();
            if took - told >= EVERY {
                told = took;
                self.tell(Progress::of(done, pages.pages().len(), took));
            }
            done += pages.pages_of(chunk).len();
            !self.terminated.load(Relaxed)
        });
        self.occupation.end();
        read
    }

    fn tell(&self, progress: Progress) {
        let Progress { percent, mib_per_s, eta_s } = progress;
        let eta = eta_s.map_or_else(String::new, |eta_s| format!(", {eta_s:.0} s to go"));
        let what = format!("{}: its memory is read before the guest runs: {percent:.0} %{eta}", self.machine);
        let hint = "ask again later; a signal to its keeper (Ctrl-C, SIGTERM) gives it up";
        self.occupation.begin(what, hint);
        self.event_log.record(EventKind::RestoreProgress { percent, mib_per_s, eta_s });
    }
}

#[derive(Debug, PartialEq)]
struct Progress {
    percent: f64,
    mib_per_s: f64,
    eta_s: Option<f64>,
}

impl Progress {
    fn of(pages_done: usize, pages: usize, took: Duration) -> Self {
        let per_s = pages_done as f64 / took.as_secs_f64();
        Self {
            percent: 100.0 * pages_done as f64 / pages.max(1) as f64,
            mib_per_s: per_s * PAGE_BYTES as f64 / MIB,
            eta_s: (pages_done > 0).then(|| (pages - pages_done) as f64 / per_s),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_takes_as_long_as_it_did_so_far() {
        let progress = Progress::of(1024, 4096, Duration::from_secs(2));
        assert_eq!(progress, Progress { percent: 25.0, mib_per_s: 2.0, eta_s: Some(6.0) });
        assert_eq!(Progress::of(0, 4096, Duration::from_secs(2)).eta_s, None, "nothing has come");
    }
}
