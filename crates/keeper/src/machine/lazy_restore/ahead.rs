//! Ahead: pages that are read before the guest runs. The machine's loop waits for them. If that takes long, events
//! report the progress, and whoever asks the loop gets the progress as the answer.

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

/// The pages to read before the guest runs, if there are any.
pub(super) fn ahead(snapshot: &Snapshot, mode: Mode) -> Option<&PageReader> {
    match mode {
        Mode::Eager => Some(&snapshot.ram),
        Mode::Lazy => None,
        Mode::WorkingSet => snapshot.working_set.as_ref().ok().and_then(Option::as_ref),
    }
}

/// Reads the pages, unless a signal ends it. This may take as long as reading all of a guest's memory from the disk,
/// and the loop waits for it.
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

/// `work` counts pages.
fn tell(context: &Context, work: &Work) {
    let (percent, eta_s) = (work.percent(), work.left_s());
    let mib_per_s = work.per_s.unwrap_or(0.0) * PAGE_BYTES as f64 / MIB;
    let eta = eta_s.map_or_else(String::new, |eta_s| format!(", {eta_s:.0} s to go"));
    let what = format!("{} is loading its memory before the guest runs: {percent:.0} %{eta}", context.config.name);
    let hint = "try again later, or cancel with Ctrl-C or SIGTERM to its keeper";
    context.outside.occupation.begin(what, hint);
    context.outside.event_log.record(EventKind::RestoreProgress { percent, mib_per_s, eta_s });
}
