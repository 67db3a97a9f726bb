//! Fill: loads the rest of a restored guest's memory in the background, and gives way to page faults.

use std::time::{Duration, Instant};

use hearth_recovery::lazy_restore::{Counts, LazyRam, Pace, Step};

use super::RestoreReporter;
use crate::drill::drill;
use crate::event::RestoreMessage;

/// Time between two checks whether a guest still waits for a page.
const GIVE_WAY: Duration = Duration::from_micros(100);
/// How long after the last page fault the fill stays slow and reads at most a chunk at a time: a guest that touches one
/// page will touch others.
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// Bytes requested from the disk at once while the guest waits for nothing. They take 2 ms at 125 MiB/s, and a page
/// fault may have to wait that long.
const AHEAD_BYTES: u64 = 256 << 10;
/// How long to wait before a failed read is tried again.
const FILL_AGAIN: Duration = Duration::from_millis(500);

/// Fills until no page is missing, or it is told to stop.
pub(super) fn fill(lazy: &LazyRam, teller: &RestoreReporter) {
    let began = Instant::now();
    let mut pace = Pace::begin(began.elapsed(), lazy.counts().prefetched > 0);
    loop {
        let mut read_from = None;
        let ahead_bytes = |lazy: &LazyRam, bytes: u64| {
            let Counts { stored, missing, .. } = lazy.counts();
            if missing * 2 <= stored {
                drill(Step::Fill.name());
            }
            // Requests to an object store are paced by slots, whoever makes them.
            if lazy.is_far() {
                return AHEAD_BYTES;
            }
            if let Some(read_from) = read_from {
                pace.took(began.elapsed(), began.elapsed().saturating_sub(read_from));
            }
            while lazy.is_asked() && !lazy.is_stopped() {
                std::thread::sleep(GIVE_WAY);
            }
            let is_idle = lazy.idle_for() >= IDLE_AFTER;
            std::thread::sleep(pace.wait(began.elapsed(), bytes, is_idle));
            read_from = Some(began.elapsed());
            if is_idle { AHEAD_BYTES } else { 0 }
        };
        match lazy
            .fill(ahead_bytes)
            .and_then(|complete| if complete { lazy.finish().map(|()| true) } else { Ok(false) })
        {
            Ok(true) => {
                drill(Step::Finish.name());
                return teller.say(RestoreMessage::Complete);
            }
            Ok(false) if lazy.is_stopped() => return,
            Ok(false) => std::thread::sleep(FILL_AGAIN),
            Err(error) => return teller.say_end(&error),
        }
    }
}
