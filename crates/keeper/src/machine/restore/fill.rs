//! Fill: brings the rest of a restored guest's memory behind its back, and gives way to whoever waits for a page.

use std::time::{Duration, Instant};

use hearth_recovery::lazy_restore::{Counts, LazyRam, Pace, Step};

use super::Teller;
use crate::drill::drill;
use crate::event::RestoreMessage;

/// Between two looks whether a guest that waits for a page still does.
const GIVE_WAY: Duration = Duration::from_micros(100);
/// So long after somebody waited for a page no more than a chunk is read at a time, and slowly: a guest that touches one page
/// touches others.
const CALM_AFTER: Duration = Duration::from_millis(100);
/// Asked of the disk at once behind a guest that waits for nothing: 2 ms at 125 MiB/s, which is what a page that is touched
/// then waits.
const AHEAD_BYTES: u64 = 256 << 10;
/// Until what could not be read is tried again.
const FILL_AGAIN: Duration = Duration::from_millis(500);

/// Until nothing is missing, or it is told to stop.
pub(super) fn fill(lazy: &LazyRam, teller: &Teller) {
    let began = Instant::now();
    let mut pace = Pace::begin(began.elapsed(), lazy.counts().prefetched > 0);
    loop {
        let mut read_from = None;
        let ahead_bytes = |lazy: &LazyRam, bytes: u64| {
            let Counts { stored, missing, .. } = lazy.counts();
            if missing * 2 <= stored {
                drill(Step::Fill.name());
            }
            // Requests to a store have turns, whoever makes them.
            if lazy.is_far() {
                return AHEAD_BYTES;
            }
            if let Some(read_from) = read_from {
                pace.took(began.elapsed(), began.elapsed().saturating_sub(read_from));
            }
            while lazy.is_asked() && !lazy.is_stopped() {
                std::thread::sleep(GIVE_WAY);
            }
            let is_calm = lazy.calm_for() >= CALM_AFTER;
            std::thread::sleep(pace.wait(began.elapsed(), bytes, is_calm));
            read_from = Some(began.elapsed());
            if is_calm { AHEAD_BYTES } else { 0 }
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
