//! Crash loop: a machine that crashes repeatedly waits before its next start, longer each time.
//!
//! crash, or a QEMU that does not start -> too many within the window? -> no: start the next guest at once | yes: back
//! off -> the delay has passed, or `hearth reboot` -> start the next guest
//!
//! The window counts only the time in which guests lived, because waiting does not make a machine healthy. Dumps
//! continue during the wait. A new keeper knows nothing of earlier crashes and starts at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

use hearth_api::{EndCause, EventKind, rfc3339};

use super::state::{BackOff, Input};
use super::{Machine, MachineError};
use crate::config::CrashLoopConfig;

/// More doublings make no difference: the shortest configurable delay (1 s) has become the longest (1 day).
const DOUBLINGS_MAX: usize = 17;

/// Crashes of one machine's guests.
#[derive(Default)]
pub struct Crashes {
    /// Total time that all guests have lived.
    lived: Duration,
    /// Value of `lived` at each crash, oldest first.
    at: VecDeque<Duration>,
}

impl Crashes {
    /// Counts the end of a guest that lived for this time. Returns how long to wait before the next start, if at all.
    pub fn ended(&mut self, lived: Duration, cause: EndCause, config: &CrashLoopConfig) -> Option<Duration> {
        self.lived += lived;
        if !matches!(cause, EndCause::Panic | EndCause::Watchdog | EndCause::QemuDied) {
            return None;
        }
        let (now, window, count) = (self.lived, Duration::from_secs(config.loop_window_s), config.loop_count as usize);
        self.at.push_back(now);
        self.at.retain(|&at| now - at < window);
        let doublings = self.at.len().checked_sub(count)?.min(DOUBLINGS_MAX);
        self.at.drain(..self.at.len() - count - doublings);
        let delay_s = (config.loop_delay_s << doublings).min(config.loop_delay_max_s);
        Some(Duration::from_secs(delay_s))
    }
}

impl BackOff {
    /// Begins now, after a start that failed for this reason.
    pub fn of_failed_start(delay: Duration, why: String) -> Self {
        Self::begin(delay, false, |_| why)
    }

    /// `why`: gets the time of the next start, as text.
    fn begin(delay: Duration, crash_loop: bool, why: impl FnOnce(&str) -> String) -> Self {
        let (began, next_start) = (Instant::now(), rfc3339(SystemTime::now() + delay));
        Self { began, until: began + delay, why: why(&next_start), next_start, crash_loop }
    }

    /// Begins now, in a crash loop. `at_once`: the command that starts the next guest before the time is up.
    pub fn of_crash_loop(delay: Duration, config: &CrashLoopConfig, at_once: &str) -> Self {
        let CrashLoopConfig { loop_count, loop_window_s, .. } = config;
        Self::begin(delay, true, |next_start| {
            format!(
                "crash loop: at least {loop_count} crashes within {loop_window_s} s; the next guest starts at \
                 {next_start}, or now with `{at_once}`"
            )
        })
    }
}

impl Machine {
    /// The dead guest is banked, and there is no other guest yet. `delay`: the crash loop's delay before the next
    /// start.
    pub(super) fn life_over(&mut self, delay: Option<Duration>) -> Result<(), MachineError> {
        let config = &self.context.config.crash.crash_loop;
        let back_off = delay.map(|delay| BackOff::of_crash_loop(delay, config, "hearth reboot"));
        self.apply(Input::LifeOver { back_off })
    }

    pub(super) fn begin_crash_loop(&mut self, delay: Duration, next_start: String) {
        self.warm_reboot.monitor.watch(None);
        self.disks.note_idle(&self.context, &self.warm_reboot);
        self.context.record(EventKind::CrashLoop { delay_s: delay.as_secs(), next_start });
    }

    /// Backs off after a start that failed.
    pub(super) fn start_failed(&mut self, delay: Duration, why: String) -> Result<(), MachineError> {
        let back_off = BackOff::of_failed_start(delay, format!("cannot start the next guest yet: {why}"));
        self.apply(Input::StartFails { why, back_off })
    }

    /// Waits for the next start. `tell` is false for repeated attempts, because the operator already knows why the
    /// machine waits.
    pub(super) fn wait_to_start(&mut self, why: String, next_start: String, tell: bool) {
        self.disks.note_idle(&self.context, &self.warm_reboot);
        self.recovery.waits_since.get_or_insert_with(Instant::now);
        if tell {
            self.context.record(EventKind::StartWaits { why, next_start });
        }
    }

    /// A next guest that QEMU did not start counts as a crash. Between two tries the machine takes orders.
    pub(super) fn try_again_later(&mut self, error: MachineError) -> Result<(), MachineError> {
        let MachineError::Launch(_) = error else { return Err(error) };
        self.discard_unused();
        let delay = self.crash_recovery.crashes.ended(
            Duration::ZERO,
            EndCause::QemuDied,
            &self.context.config.crash.crash_loop,
        );
        self.start_failed(delay.unwrap_or_default(), crate::chain(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::runtime_root::RuntimeRoot;

    fn config() -> CrashLoopConfig {
        let text = "name = \"web\"\nmemory = \"1GiB\"\n[boot]\nkernel = \"k\"\n[crash]\nloop_count = 3\nloop_window_s = 60\n\
                    loop_delay_s = 10\nloop_delay_max_s = 35\n";
        Config::parse(text, std::path::Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth"))
            .unwrap()
            .crash
            .crash_loop
    }

    /// Checks the delays after guests that lived for so many seconds.
    fn check(lives: &[(u64, EndCause)], expect: &[Option<u64>]) {
        let (config, mut crashes) = (config(), Crashes::default());
        let ended = |&(lived_s, cause)| crashes.ended(Duration::from_secs(lived_s), cause, &config);
        let delays: Vec<_> = lives.iter().map(ended).map(|delay| delay.map(|delay| delay.as_secs())).collect();
        assert_eq!(delays, expect, "{lives:?}");
    }

    #[test]
    fn delays_grow_up_to_a_limit() {
        let crash = (1, EndCause::Panic);
        check(&[crash; 6], &[None, None, Some(10), Some(20), Some(35), Some(35)]);
    }

    #[test]
    fn a_guest_that_lives_long_enough_ends_the_loop() {
        let (crash, later) = ((1, EndCause::QemuDied), (60, EndCause::Watchdog));
        check(&[crash, crash, crash, later, crash, crash], &[None, None, Some(10), None, None, Some(10)]);
    }

    #[test]
    fn other_ends_count_as_life_not_crashes() {
        let (crash, reset) = ((1, EndCause::Panic), (1, EndCause::GuestReset));
        check(&[crash, reset, crash, reset, crash], &[None, None, None, None, Some(10)]);
        check(&[crash, crash, (60, EndCause::OperatorReboot), crash], &[None; 4]);
    }

    #[test]
    fn endless_loop_keeps_bounded_history() {
        let (config, mut crashes) = (config(), Crashes::default());
        for _ in 0..1000 {
            crashes.ended(Duration::ZERO, EndCause::Panic, &config);
        }
        assert_eq!(crashes.at.len(), config.loop_count as usize + DOUBLINGS_MAX);
    }
}
