//! Ahead: the pages that are read before the guest runs. The machine's loop waits for them, so how far it is it says in its
//! events, if that takes long, and whoever asks the loop hears it instead of an answer.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_memory::{PAGE_BYTES, RamFile};
use hearth_recovery::lazy_restore::{Mode, RestoreError, Step, prefetch};
use hearth_recovery::snapshot::Snapshot;
use hearth_recovery::snapshot::pages::PageReader;

use super::super::Context;
use super::super::work::{TELL_EVERY, Work};
use crate::drill::drill;

const MIB: f64 = 1048576.0;

/// What is read before the guest runs.
pub(super) fn ahead(snapshot: &Snapshot, mode: Mode) -> Option<&PageReader> {
    match mode {
        Mode::Eager => Some(&snapshot.ram),
        Mode::Lazy => None,
        Mode::WorkingSet => snapshot.working_set.as_ref().ok().and_then(Option::as_ref),
    }
}

/// Unless a signal ends it: all of a guest's memory takes as long as its disk does, and the loop waits for it.
pub(super) fn read_ahead(pages: &PageReader, ram: &RamFile, context: &Context) -> Result<u64, RestoreError> {
    let (began, mut told, mut done) = (Instant::now(), Duration::ZERO, 0);
    let read = prefetch(pages, ram, |chunk| {
        if chunk >= pages.chunks() / 2 {
            drill(Step::Prefetch.name());
        }
        let took = began.elapsed();
        if took - told >= TELL_EVERY {
            told = took;
            tell(context, &Work::of(done, pages.pages().len() as u64, Some((took, 0))));
        }
        done += pages.pages_of(chunk).len() as u64;
        !context.outside.terminated.load(Relaxed)
    });
    context.outside.occupation.end();
    read
}

/// `work`: in pages.
fn tell(context: &Context, work: &Work) {
    let (percent, eta_s) = (work.percent(), work.left_s());
    let mib_per_s = work.per_s.unwrap_or(0.0) * PAGE_BYTES as f64 / MIB;
    let eta = eta_s.map_or_else(String::new, |eta_s| format!(", {eta_s:.0} s to go"));
    let what = format!("{} is loading its memory before the guest runs: {percent:.0} %{eta}", context.config.name);
    let hint = "try again later, or cancel with Ctrl-C or SIGTERM to its keeper";
    context.outside.occupation.begin(what, hint);
    context.outside.event_log.record(EventKind::RestoreProgress { percent, mib_per_s, eta_s });
}
