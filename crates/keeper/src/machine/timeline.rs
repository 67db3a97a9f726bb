//! Timeline: how long each phase took between the end of one guest and the start of the next. `hearth explain` shows the
//! timeline of the last recovery.

use std::time::{Duration, Instant, SystemTime};

use hearth_api::{DumpStatus, EndCause, EventKind, PhaseTime, Recovery, rfc3339};
use hearth_memory::PAGE_BYTES;
use hearth_recovery::ember::Ember;

use super::Context;

/// The recovery that is under way, or the last one.
#[derive(Default)]
pub struct LastRecovery {
    pub timeline: Option<Timeline>,
    /// When the first attempt to start failed because something was missing that the machine waits for.
    pub waits_since: Option<Instant>,
}

impl LastRecovery {
    /// Records the end of a phase. Attempts of a machine that waits are not recorded: there may be thousands.
    pub fn phase_ended(&mut self, context: &Context, phase: &str, began: Instant, took: Duration) {
        if self.waits_since.is_some() {
            return;
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.ended(phase, began, took);
        }
        context.record(EventKind::Phase { phase: phase.to_owned(), duration_ms: ms(took) });
    }

    /// This recovery, if it is the one from the guest of this incarnation: a queued dump is of an earlier guest, and one of a
    /// living guest is of none that ended.
    pub fn from(&mut self, dead: u32) -> Option<&mut Self> {
        let is_from = self.timeline.as_ref().is_some_and(|timeline| dead + 1 == timeline.recovery.incarnation);
        is_from.then_some(self)
    }

    /// The recovery, with the dump of the guest that was recovered from.
    pub fn shown(&self, dumps: &[DumpStatus]) -> Option<Recovery> {
        let mut recovery = self.timeline.as_ref()?.recovery().clone();
        recovery.dump = dumps.iter().find(|dump| !dump.live && dump.incarnation + 1 == recovery.incarnation).cloned();
        Some(recovery)
    }

    /// Records the dead guest's own message about its crash.
    pub fn crash_reason(&mut self, message: &str) {
        if let Some(timeline) = &mut self.timeline {
            timeline.recovery.panic = Some(message.to_owned());
        }
    }

    /// Records that the dead guest's memory cannot be kept after all.
    pub fn set_cold(&mut self, why: String) {
        if let Some(timeline) = &mut self.timeline {
            timeline.set_cold(why);
        }
    }

    /// Records how much of the dead guest's memory is kept.
    pub fn kept(&mut self, context: &Context, ember: &Ember) {
        let counts = ember.counts();
        let bytes = counts.kept * PAGE_BYTES;
        if let Some(timeline) = &mut self.timeline {
            timeline.kept(counts.kept, bytes);
        }
        context.record(EventKind::EmberKept { pages: counts.kept, bytes });
    }
}

/// Clock of one recovery. It starts when the dead incarnation ends.
pub struct Timeline {
    start: Instant,
    recovery: Recovery,
}

impl Timeline {
    /// `why_cold` is None for a warm reboot.
    pub fn start(incarnation: u32, cause: EndCause, why_cold: Option<String>) -> Self {
        let recovery = Recovery {
            incarnation,
            cause,
            warm: why_cold.is_none(),
            why_cold,
            started_at: rfc3339(SystemTime::now()),
            duration_ms: 0.0,
            phases: Vec::new(),
            pages_kept: 0,
            kept_bytes: 0,
            released_bytes: 0,
            panic: None,
            dump: None,
        };
        Self { start: Instant::now(), recovery }
    }

    /// Sets the start of the recovery, if it began before this clock was created.
    pub fn began(&mut self, start: Instant) {
        self.start = start;
    }

    /// Records the end of a phase.
    pub fn ended(&mut self, phase: &str, began: Instant, took: Duration) {
        let began = began.saturating_duration_since(self.start);
        let phase = phase.to_owned();
        self.recovery.phases.push(PhaseTime { phase, started_ms: ms(began), duration_ms: ms(took) });
    }

    pub fn kept(&mut self, pages: u64, bytes: u64) {
        self.recovery.pages_kept = pages;
        self.recovery.kept_bytes = bytes;
    }

    /// Records that the memory cannot be kept after all.
    pub fn set_cold(&mut self, why: String) {
        self.recovery.warm = false;
        self.recovery.why_cold = Some(why);
    }

    pub fn released(&mut self, bytes: u64) {
        self.recovery.released_bytes = bytes;
    }

    /// Records that the new guest runs.
    pub fn recovered(&mut self) {
        self.recovery.duration_ms = ms(self.start.elapsed());
    }

    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dumps_of_other_guests_are_not_part_of_a_recovery() {
        let timeline = Some(Timeline::start(3, EndCause::Panic, None));
        let mut recovery = LastRecovery { timeline, waits_since: None };
        assert_eq!([1, 2, 3].map(|dead| recovery.from(dead).is_some()), [false, true, false]);
        assert!(LastRecovery::default().from(2).is_none());
    }
}
