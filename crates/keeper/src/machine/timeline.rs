//! Timeline: how long each phase of the last recovery took; what `hearth explain` shows.

use std::time::{Duration, Instant, SystemTime};

use hearth_api::{EndCause, PhaseTime, Recovery, rfc3339};

/// Clock of one recovery, started at the end of the dead incarnation.
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

    /// It began before this clock was started.
    pub fn began(&mut self, start: Instant) {
        self.start = start;
    }

    /// What the dead guest said of its end.
    pub fn crash_reason(&mut self, dead: u32, message: &str) {
        if dead + 1 == self.recovery.incarnation {
            self.recovery.panic = Some(message.to_owned());
        }
    }

    /// Notes a phase that has ended.
    pub fn ended(&mut self, phase: &str, began: Instant, took: Duration) {
        let began = began.saturating_duration_since(self.start);
        let phase = phase.to_owned();
        self.recovery.phases.push(PhaseTime { phase, started_ms: ms(began), duration_ms: ms(took) });
    }

    pub fn kept(&mut self, pages: u64, bytes: u64) {
        self.recovery.pages_kept = pages;
        self.recovery.kept_bytes = bytes;
    }

    /// The memory cannot be kept after all.
    pub fn turned_cold(&mut self, why: String) {
        self.recovery.warm = false;
        self.recovery.why_cold = Some(why);
    }

    pub fn released(&mut self, bytes: u64) {
        self.recovery.released_bytes = bytes;
    }

    /// The new guest runs.
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
