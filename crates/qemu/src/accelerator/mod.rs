//! Accelerator: KVM if it works, else TCG.
//!
//! /dev/kvm exists? -> can it be opened? -> does a guest run on it? (tried once per QEMU, CPU model, user and host
//! boot)
//!
//! An open /dev/kvm proves little. On some hosts, themselves virtual, QEMU then aborts ("failed to set MSR 0x10a") or
//! the guest hangs or takes minutes. So a tiny guest is run: real mode, protected mode, long mode with paging, some
//! counting against the clock, and an exit code through a debug port. Any other exit code means that KVM does not work.

mod cache;
pub use cache::host_boot;
mod guest;

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use crate::Binary;
use crate::bounded::{self, Finished};
use crate::environment;

const DEVICE: &str = "/dev/kvm";
/// Time limit of the trial guest. It takes 0.1 to 0.3 s, or more than 3 s on a busy host that is itself emulated. A KVM
/// that hangs must not delay the machine's start for long.
const PROBE_PATIENCE: Duration = Duration::from_secs(20);

/// Executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accelerator {
    /// The host's processor, through KVM.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

/// The accelerator that the operator requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// KVM if it works, else TCG.
    Auto,
    /// KVM only.
    Kvm,
    /// Emulation, even if KVM works.
    Tcg,
}

/// The accelerator that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceleratorChoice {
    /// The accelerator to use.
    pub accelerator: Accelerator,
    /// Reason for the choice, for the operator.
    pub why: String,
}

/// Errors of the choice.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum AcceleratorError {
    #[error("KVM does not work here: {why}; use accelerator = \"auto\" or \"tcg\"")]
    NoKvm { why: String },
}

impl Accelerator {
    /// Name of the accelerator in QEMU's options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    /// QEMU's `-cpu` value if the machine names none. Under TCG, `erms` and `fsrm` are off, because TCG executes
    /// `rep movsb` bytewise (page-cache reads are 3.6 times faster without them). `cx16` is off, because QEMU 7.2's
    /// cmpxchg16b crashes Linux 6.12.
    pub fn default_cpu_model(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max,-erms,-fsrm,-cx16",
        }
    }
}

/// Chooses the accelerator. Tries KVM with the machine's CPU model unless TCG is requested.
pub fn choose(binary: &Binary, wanted: Wanted, cpu_model: Option<&str>) -> Result<AcceleratorChoice, AcceleratorError> {
    decide(wanted, || try_kvm(binary, cpu_model, None))
}

/// As `choose`, but caches the trial's verdict in `folder`.
pub fn choose_once(
    binary: &Binary,
    wanted: Wanted,
    cpu_model: Option<&str>,
    folder: &Path,
) -> Result<AcceleratorChoice, AcceleratorError> {
    decide(wanted, || try_kvm(binary, cpu_model, Some(folder)))
}

fn decide(wanted: Wanted, kvm: impl FnOnce() -> Verdict) -> Result<AcceleratorChoice, AcceleratorError> {
    let chosen = |accelerator, why: String| Ok(AcceleratorChoice { accelerator, why });
    if wanted == Wanted::Tcg {
        return chosen(Accelerator::Tcg, "it is configured".to_owned());
    }
    let verdict = kvm();
    match (verdict.works, wanted) {
        (true, Wanted::Kvm) => chosen(Accelerator::Kvm, "it is configured, and works".to_owned()),
        (true, _) => chosen(Accelerator::Kvm, verdict.why),
        (false, Wanted::Kvm) => Err(AcceleratorError::NoKvm { why: verdict.why }),
        (false, _) => chosen(Accelerator::Tcg, format!("KVM does not work here: {}", verdict.why)),
    }
}

/// The verdict of one trial.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Verdict {
    works: bool,
    why: String,
}

impl Verdict {
    fn no(why: String) -> Self {
        Self { works: false, why }
    }
}

fn try_kvm(binary: &Binary, cpu_model: Option<&str>, folder: Option<&Path>) -> Verdict {
    // Permissions may change while the host is up, so this is checked every time; it costs nothing.
    if let Err(error) = OpenOptions::new().read(true).write(true).open(DEVICE) {
        return Verdict::no(cannot_open(&error));
    }
    let cpu_model = cpu_model.unwrap_or(Accelerator::Kvm.default_cpu_model());
    let question = cache::Question::about(binary, cpu_model);
    if let Some(verdict) = folder.and_then(|folder| cache::recall(folder, &question)) {
        return verdict;
    }
    let finished = match run_guest(binary, &["-accel", "kvm"], cpu_model, PROBE_PATIENCE) {
        Ok(finished) => finished,
        Err(error) => return Verdict::no(format!("the trial cannot be made: {error}")),
    };
    let verdict = judge(&finished);
    // A guest that did not end in time may only have met a busy host: do not cache that.
    if let Some(folder) = folder.filter(|_| finished.status.is_some()) {
        cache::remember(folder, &question, &verdict);
    }
    verdict
}

fn cannot_open(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!("there is no {DEVICE}"),
        io::ErrorKind::PermissionDenied => format!("no access to {DEVICE}; join the group kvm"),
        _ => format!("{DEVICE}: {error}"),
    }
}

fn run_guest(binary: &Binary, accelerator: &[&str], cpu_model: &str, at_most: Duration) -> io::Result<Finished> {
    let image = guest::Image::write()?;
    let mut command = Command::new(binary.path());
    for folder in binary.data_folders() {
        command.arg("-L").arg(folder);
    }
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-m", "16M"])
        .args(accelerator)
        .args(["-cpu", cpu_model])
        .args(["-action", "reboot=shutdown", "-device", guest::EXIT_DEVICE])
        .arg("-bios")
        .arg(image.path());
    bounded::run(environment::confine(&mut command), at_most)
}

fn judge(finished: &Finished) -> Verdict {
    match finished.status.and_then(|status| status.code()) {
        Some(guest::EXIT_CODE) => return Verdict { works: true, why: "it works".to_owned() },
        Some(guest::EXIT_CODE_SLOW) => {
            return Verdict::no("it runs a guest one emulated instruction at a time, more slowly than TCG".to_owned());
        }
        _ => {}
    }
    let why = match telling_line(&finished.stderr) {
        Some(line) => format!("QEMU said \"{line}\", and {}", finished.how()),
        None => format!("the trial guest did not get through: {}", finished.how()),
    };
    Verdict::no(why)
}

/// The last line that contains an error, else the last line. The explanation often precedes a failed assertion.
pub(crate) fn telling_line(stderr: &str) -> Option<&str> {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    lines().rfind(|line| line.contains("error:")).or_else(|| lines().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than the keeper's 20 s, because this runs beside a whole test suite.
    const LONG: Duration = Duration::from_secs(60);
    const TCG: &[&str] = &["-accel", "tcg"];

    fn binary() -> Binary {
        Binary::find(None).expect("these tests need QEMU: apt-get install qemu-system-x86")
    }

    fn try_tcg(cpu_model: &str) -> Verdict {
        judge(&run_guest(&binary(), TCG, cpu_model, LONG).unwrap())
    }

    #[test]
    fn trial_guest_succeeds_under_tcg() {
        let verdict = try_tcg(Accelerator::Tcg.default_cpu_model());
        assert_eq!(verdict, Verdict { works: true, why: "it works".to_owned() });
    }

    #[test]
    fn too_slow_trial_guest_is_refused() {
        let slow = [TCG, &["-icount", "shift=10"]].concat();
        let verdict = judge(&run_guest(&binary(), &slow, "max", LONG).unwrap());
        assert_eq!(
            verdict,
            Verdict::no("it runs a guest one emulated instruction at a time, more slowly than TCG".into())
        );
    }

    #[test]
    fn trial_guest_fails_without_long_mode() {
        let verdict = try_tcg("max,-lm");
        assert!(!verdict.works, "{verdict:?}");
        assert!(verdict.why.starts_with("the trial guest did not get through: it ended with code 0"), "{verdict:?}");
    }

    #[test]
    fn qemus_error_is_the_reason() {
        let verdict = try_tcg("no-such-cpu");
        assert!(!verdict.works && verdict.why.contains("unable to find CPU model 'no-such-cpu'"), "{verdict:?}");
    }

    #[test]
    fn hanging_trial_guest_is_refused() {
        let finished = run_guest(&binary(), TCG, "max", Duration::ZERO).unwrap();
        assert_eq!(judge(&finished).why, "the trial guest did not get through: it did not end in time");
    }

    #[test]
    fn kvm_verdict_matches_this_host() {
        let choice = choose(&binary(), Wanted::Auto, None).unwrap();
        let forced = choose(&binary(), Wanted::Kvm, None);
        match choice.accelerator {
            Accelerator::Kvm => {
                assert_eq!(choice.why, "it works");
                assert_eq!(forced.unwrap().why, "it is configured, and works");
            }
            Accelerator::Tcg => {
                assert!(choice.why.starts_with("KVM does not work here: "), "{}", choice.why);
                let refusal = forced.unwrap_err().to_string();
                assert!(refusal.ends_with("; use accelerator = \"auto\" or \"tcg\""), "{refusal}");
            }
        }
    }

    #[test]
    fn verdict_is_cached() {
        if !Path::new(DEVICE).exists() {
            // Without KVM there is no trial; the cache has tests of its own.
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let binary = binary();
        let question = cache::Question::about(&binary, "planted");
        cache::remember(folder.path(), &question, &Verdict::no("it was planted".to_owned()));
        let choice = choose_once(&binary, Wanted::Auto, Some("planted"), folder.path()).unwrap();
        assert_eq!(choice.why, "KVM does not work here: it was planted");
    }

    #[test]
    fn choice_follows_request_and_verdict() {
        let verdict = |works| move || Verdict { works, why: "because".to_owned() };
        let why = |wanted, works| decide(wanted, verdict(works)).map(|choice| (choice.accelerator, choice.why));
        assert_eq!(why(Wanted::Tcg, true).unwrap(), (Accelerator::Tcg, "it is configured".to_owned()));
        assert_eq!(why(Wanted::Auto, true).unwrap(), (Accelerator::Kvm, "because".to_owned()));
        assert_eq!(why(Wanted::Kvm, true).unwrap(), (Accelerator::Kvm, "it is configured, and works".to_owned()));
        let fallback = (Accelerator::Tcg, "KVM does not work here: because".to_owned());
        assert_eq!(why(Wanted::Auto, false).unwrap(), fallback);
        assert!(why(Wanted::Kvm, false).is_err());
    }

    #[test]
    fn explaining_line_is_quoted() {
        let stderr = "qemu: warning: a\nqemu: error: failed to set MSR 0x10a\nqemu: kvm.c:3183: Assertion failed.\n\n";
        assert_eq!(telling_line(stderr), Some("qemu: error: failed to set MSR 0x10a"));
        assert_eq!(
            telling_line("first\nCould not access KVM kernel module\n"),
            Some("Could not access KVM kernel module")
        );
        assert_eq!(telling_line(" \n"), None);
    }

    #[test]
    fn unusable_device_error_says_what_to_do() {
        let why = |kind: io::ErrorKind| cannot_open(&io::Error::from(kind));
        assert_eq!(why(io::ErrorKind::PermissionDenied), "no access to /dev/kvm; join the group kvm");
        assert_eq!(why(io::ErrorKind::NotFound), "there is no /dev/kvm");
    }
}
