//! Age: how a QEMU has changed since its start, the reasons to replace it, and when the keeper replaces it by itself.
//!
//! signs (read by the machine's loop) -> assess (runs the installed QEMU, so not in the loop) -> `hearth age`
//! signs + `[rejuvenate]` + the time -> due -> a rejuvenation, as on request
//!
//! The keeper makes at most one attempt in each window, whether it succeeds or not. A QEMU that cannot be replaced
//! today is tried again tomorrow, and one that soon grows again is not replaced all night.

use std::path::PathBuf;
use std::time::Duration;

use hearth_api::{Age, QemuAge};
use hearth_qemu::Binary;

use crate::config::{DailyWindow, RejuvenateConfig};

/// The window of a policy that does not name one.
const WINDOW: Duration = Duration::from_secs(3600);
/// Growth that is reported where no policy sets a limit.
const OWN_BYTES_REMARKABLE: u64 = 256 << 20;
/// Growth that is reported where no policy sets a limit. A hop adds none, and most systems allow QEMU 1024.
const DESCRIPTORS_REMARKABLE: u64 = 128;
const MINUTES_PER_DAY: u32 = 24 * 60;

/// Signs of a QEMU's age that the keeper can see.
#[derive(Clone, Debug, PartialEq)]
pub struct Signs {
    pub machine: String,
    pub qemu: QemuAge,
    /// The QEMU that a rejuvenation would start. None: the first one on PATH.
    pub program: Option<PathBuf>,
    pub hindrance: Option<String>,
    pub policy: Option<RejuvenateConfig>,
}

impl Signs {
    /// Asks the installed QEMU for its version, which takes some 50 ms.
    pub fn assess(mut self) -> Age {
        let installed = Binary::find(self.program.as_deref());
        self.qemu.installed_version = installed.as_ref().ok().map(|binary| binary.version().to_string());
        if let Err(error) = installed {
            self.hindrance.get_or_insert_with(|| crate::chain(&error));
        }
        let reasons = reasons(&self.qemu, self.policy.as_ref());
        Age { name: self.machine, qemu: self.qemu, reasons, hindrance: self.hindrance }
    }
}

/// Reasons to rejuvenate, one sentence each.
fn reasons(qemu: &QemuAge, policy: Option<&RejuvenateConfig>) -> Vec<String> {
    let mut reasons: Vec<String> = overdue(qemu, policy).into_iter().collect();
    match &qemu.installed_version {
        Some(installed) if *installed != qemu.version => {
            reasons.push(format!("QEMU {installed} is installed, but the guest runs on {}", qemu.version));
        }
        _ if qemu.program_is_gone => {
            let what = "the QEMU program was replaced or removed since it started, perhaps by an update";
            reasons.push(what.to_owned());
        }
        _ => {}
    }
    let limited = policy.is_some_and(|policy| policy.rss_growth_mib.is_some());
    if let Some(grown) = qemu.own_bytes.grown().filter(|&grown| !limited && grown >= OWN_BYTES_REMARKABLE) {
        reasons.push(format!("QEMU's own memory has grown by {} MiB since its start", grown >> 20));
    }
    if let Some(grown) = qemu.descriptors.grown().filter(|&grown| grown >= DESCRIPTORS_REMARKABLE) {
        reasons.push(format!("QEMU has opened {grown} file descriptors more than it had at its start"));
    }
    reasons
}

/// The limit of the policy that is exceeded, in words.
pub fn overdue(qemu: &QemuAge, policy: Option<&RejuvenateConfig>) -> Option<String> {
    let policy = policy?;
    if let Some(every_s) = policy.every_s.filter(|&every_s| qemu.uptime_s >= every_s as f64) {
        return Some(format!("QEMU is {:.0} s old, and rejuvenate.every is {every_s} s", qemu.uptime_s));
    }
    let limit = policy.rss_growth_mib?;
    let grown = qemu.own_bytes.grown()? >> 20;
    (grown >= limit).then(|| {
        format!("QEMU's own memory has grown by {grown} MiB since its start, and rejuvenate.rss_growth_mib is {limit}")
    })
}

/// Whether the keeper may make an attempt now. `since_attempt`: time since the last one, if any.
pub fn is_open(window: Option<DailyWindow>, minute_of_day: u32, since_attempt: Option<Duration>) -> bool {
    let Some(window) = window else { return since_attempt.is_none_or(|since| since >= WINDOW) };
    let minutes = |from: u32, to: u32| (to + MINUTES_PER_DAY - from) % MINUTES_PER_DAY;
    let since_began = minutes(window.from_minute, minute_of_day);
    if since_began >= minutes(window.from_minute, window.to_minute) {
        return false;
    }
    // Whole minutes only: an attempt in the window's first minute must not look like one of the day before.
    since_attempt.is_none_or(|since| since > Duration::from_secs(u64::from(since_began + 1) * 60))
}

/// Minutes since midnight, in the host's local time.
pub fn minute_of_day() -> u32 {
    // SAFETY: `time` takes a null pointer; `localtime_r` writes into the `tm` it is given and nowhere else, and a zeroed
    // one is valid.
    let time = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut time: libc::tm = std::mem::zeroed();
        libc::localtime_r(&raw const now, &raw mut time);
        time
    };
    (time.tm_hour * 60 + time.tm_min).unsigned_abs() % MINUTES_PER_DAY
}

#[cfg(test)]
mod tests {
    use hearth_api::Growth;

    use super::*;

    fn growth(at_start: u64, now: u64) -> Growth {
        Growth { at_start: Some(at_start), now: Some(now) }
    }

    fn young() -> QemuAge {
        QemuAge {
            pid: 1,
            generation: 1,
            uptime_s: 60.0,
            version: "7.2.22".into(),
            installed_version: Some("7.2.22".into()),
            program_is_gone: false,
            own_bytes: growth(50 << 20, 60 << 20),
            descriptors: growth(30, 31),
        }
    }

    fn check(qemu: QemuAge, policy: Option<&RejuvenateConfig>, expect: &[&str]) {
        assert_eq!(reasons(&qemu, policy), expect, "{qemu:?}");
    }

    #[test]
    fn reasons_to_replace_qemu_are_listed() {
        check(young(), None, &[]);
        let newer = QemuAge { installed_version: Some("10.0.2".into()), program_is_gone: true, ..young() };
        check(newer, None, &["QEMU 10.0.2 is installed, but the guest runs on 7.2.22"]);
        let replaced = QemuAge { program_is_gone: true, ..young() };
        check(replaced, None, &["the QEMU program was replaced or removed since it started, perhaps by an update"]);
        let grown = || QemuAge { own_bytes: growth(50 << 20, 400 << 20), ..young() };
        check(grown(), None, &["QEMU's own memory has grown by 350 MiB since its start"]);
        let descriptors = QemuAge { descriptors: growth(30, 500), ..young() };
        check(descriptors, None, &["QEMU has opened 470 file descriptors more than it had at its start"]);
        let unseen = QemuAge { own_bytes: Growth::default(), descriptors: Growth::default(), ..young() };
        check(unseen, None, &[]);
        let policy = RejuvenateConfig { every_s: None, rss_growth_mib: Some(500), window: None };
        check(grown(), Some(&policy), &[]);
        let policy = RejuvenateConfig { rss_growth_mib: Some(350), ..policy };
        let expect = "QEMU's own memory has grown by 350 MiB since its start, and rejuvenate.rss_growth_mib is 350";
        check(grown(), Some(&policy), &[expect]);
    }

    #[test]
    fn policy_without_exceeded_limit_is_not_due() {
        let policy = RejuvenateConfig { every_s: Some(61), rss_growth_mib: Some(11), window: None };
        assert_eq!(overdue(&young(), Some(&policy)), None);
        let older = QemuAge { uptime_s: 61.0, ..young() };
        assert_eq!(overdue(&older, Some(&policy)).unwrap(), "QEMU is 61 s old, and rejuvenate.every is 61 s");
        let grown = QemuAge { own_bytes: growth(50 << 20, 61 << 20), ..young() };
        assert!(overdue(&grown, Some(&policy)).is_some());
        assert_eq!(overdue(&older, None), None);
    }

    #[test]
    fn each_window_sees_one_attempt() {
        let hours = |hours: u64| Some(Duration::from_secs(hours * 3600));
        let check = |window, minute, since, expect| assert_eq!(is_open(window, minute, since), expect, "{minute}");
        check(None, 0, None, true);
        check(None, 0, hours(0), false);
        check(None, 0, hours(1), true);
        let night = Some(DailyWindow { from_minute: 23 * 60, to_minute: 60 });
        for (minute, open) in [(22 * 60 + 59, false), (23 * 60, true), (0, true), (59, true), (60, false), (720, false)]
        {
            check(night, minute, None, open);
        }
        check(night, 30, hours(1), false);
        check(night, 30, hours(24), true);
        check(night, 23 * 60, hours(23), true);
        check(night, 23 * 60, Some(Duration::from_secs(30)), false);
    }

    #[test]
    fn the_day_has_1440_minutes() {
        assert!(minute_of_day() < MINUTES_PER_DAY);
    }
}
