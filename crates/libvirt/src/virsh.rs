//! virsh: libvirt's command line, the way in that every host with libvirt has, whatever its version.
//!
//! Each call is one process. What virsh says when it fails is the error.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

const STANDARD_INPUT: &str = "/dev/stdin";
/// What virsh calls a domain whose guest has crashed, and whose QEMU is kept.
const CRASHED: &str = "crashed";
const OFF: &str = "shut off";
/// What it calls one whose QEMU has died, with the reason.
const DIED: [&str; 2] = ["shut off (crashed)", "shut off (failed)"];
/// How long a guest's agent may take to freeze or thaw.
const FREEZE_PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The program, and the connection that it uses.
#[derive(Clone, Debug)]
pub struct Virsh {
    program: PathBuf,
    uri: String,
}

/// A domain that libvirt knows, running or not.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct KnownDomain {
    pub uuid: String,
    pub name: String,
}

/// What happens to a guest, as libvirt reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DomainEvent {
    /// It is reset inside its QEMU.
    Reset,
    /// It has panicked. What follows is in the domain's definition (`on_crash`).
    Crashed,
}

/// Why virsh did not do what it was told.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum VirshError {
    #[error("virsh is not installed (Debian: apt install libvirt-clients)")]
    Missing,
    #[error("cannot run virsh")]
    Run(#[source] io::Error),
    #[error("virsh {what}: {said}")]
    Failed { what: String, said: String },
    #[error("virsh {what}: no answer within {} s", .patience.as_secs())]
    Silent { what: String, patience: Duration },
}

impl Virsh {
    /// The host's own libvirt.
    pub fn system() -> Self {
        Self::with_program("virsh".into())
    }

    /// The same, reached by this program.
    pub fn with_program(program: PathBuf) -> Self {
        Self { program, uri: "qemu:///system".to_owned() }
    }

    /// All domains that libvirt knows. An error says that libvirt does not answer.
    pub fn domains(&self) -> Result<Vec<KnownDomain>, VirshError> {
        self.run(&["list", "--all", "--uuid", "--name"]).map(|list| list.lines().filter_map(known_domain).collect())
    }

    /// The definition with which the domain starts next, with its secrets.
    pub fn definition(&self, domain: &str) -> Result<String, VirshError> {
        self.run(&["dumpxml", "--inactive", "--security-info", domain])
    }

    /// The definition with which the domain runs.
    pub fn live_definition(&self, domain: &str) -> Result<String, VirshError> {
        self.run(&["dumpxml", domain])
    }

    /// Defines a domain by this definition.
    pub fn define(&self, xml: &str) -> Result<(), VirshError> {
        self.run_with(&["define", STANDARD_INPUT], xml).map(drop)
    }

    /// Starts a domain by this definition that ends without a trace. Its processors stand still.
    pub fn create_paused(&self, xml: &str) -> Result<(), VirshError> {
        self.run_with(&["create", "--paused", STANDARD_INPUT], xml).map(drop)
    }

    /// Ends the domain's QEMU.
    pub fn destroy(&self, domain: &str) -> Result<(), VirshError> {
        self.run(&["destroy", domain]).map(drop)
    }

    /// Starts the domain.
    pub fn start(&self, domain: &str) -> Result<(), VirshError> {
        self.run(&["start", domain]).map(drop)
    }

    /// Has the guest stand still.
    pub fn suspend(&self, domain: &str) -> Result<(), VirshError> {
        self.run(&["suspend", domain]).map(drop)
    }

    /// Has the guest go on.
    pub fn resume(&self, domain: &str) -> Result<(), VirshError> {
        self.run(&["resume", domain]).map(drop)
    }

    /// Has QEMU write its guest's memory into this file, registers first. virsh is given up after `patience`; its request may then
    /// still be under way in libvirt's daemon.
    pub fn dump_memory(&self, domain: &str, file: &Path, patience: Duration) -> Result<(), VirshError> {
        let arguments = ["dump", "--memory-only", "--format", "elf", domain, &file.display().to_string()];
        run_within(self.command(&arguments), &arguments, patience)
    }

    /// Calls `tell` with each domain to whose guest this happens. Returns when virsh ends, which it does with libvirt's daemon: an
    /// error if it says why.
    pub fn follow(&self, event: DomainEvent, mut tell: impl FnMut(&str)) -> Result<(), VirshError> {
        // Other kinds of events have words of QEMU's, which could look like another domain's event.
        let kind = match event {
            DomainEvent::Reset => "reboot",
            DomainEvent::Crashed => "lifecycle",
        };
        let mut command = self.command(&["event", "--event", kind, "--loop"]);
        // It says little on standard error before it ends.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut virsh = command.spawn().map_err(failed)?;
        let lines = virsh.stdout.take().map(BufReader::new).into_iter().flat_map(|lines| lines.split(b'\n'));
        lines.map_while(Result::ok).for_each(|line| match event_in(&String::from_utf8_lossy(&line)) {
            Some((domain, happened)) if happened == event => tell(domain),
            _ => {}
        });
        // Fails if it has ended, as it should have.
        let _ = virsh.kill();
        judged(&["event"], virsh.wait_with_output().map_err(VirshError::Run)?).map(drop)
    }

    /// Whether the domain's guest has crashed, and its QEMU is kept.
    pub fn is_crashed(&self, domain: &str) -> Result<bool, VirshError> {
        self.state(domain).map(|state| state == CRASHED)
    }

    /// Whether the domain is off because its QEMU has died.
    pub fn has_died(&self, domain: &str) -> Result<bool, VirshError> {
        let state = self.run(&["domstate", "--reason", domain])?;
        Ok(DIED.contains(&state.trim()))
    }

    /// Whether the domain has no QEMU.
    pub fn is_off(&self, domain: &str) -> Result<bool, VirshError> {
        self.state(domain).map(|state| state == OFF)
    }

    /// What the domain is doing: `running`, `shut off`.
    pub fn state(&self, domain: &str) -> Result<String, VirshError> {
        self.run(&["domstate", domain]).map(|state| state.trim().to_owned())
    }

    /// Whether its memory was saved by `virsh managedsave`: its next start goes on from there, with the disks as they were then.
    pub fn has_saved_memory(&self, domain: &str) -> Result<bool, VirshError> {
        self.run(&["dominfo", domain]).map(|info| says(&info, "Managed save"))
    }

    /// The definition that the domain had when its memory was saved by `virsh managedsave`.
    pub fn saved_definition(&self, domain: &str) -> Result<String, VirshError> {
        self.run(&["managedsave-dumpxml", domain])
    }

    /// Whether libvirt still knows the domain when its QEMU has ended.
    pub fn is_persistent(&self, domain: &str) -> Result<bool, VirshError> {
        self.run(&["dominfo", domain]).map(|info| says(&info, "Persistent"))
    }

    /// Has the guest's agent freeze its file systems. The guest may make libvirt wait, but this no longer than `FREEZE_PATIENCE`.
    pub fn freeze(&self, domain: &str) -> Result<(), VirshError> {
        self.run_briefly(&["domfsfreeze", domain])
    }

    /// Has the guest's agent thaw its file systems, within the same time.
    pub fn thaw(&self, domain: &str) -> Result<(), VirshError> {
        self.run_briefly(&["domfsthaw", domain])
    }

    fn run_briefly(&self, arguments: &[&str]) -> Result<(), VirshError> {
        let mut command = self.command(arguments);
        // Ctrl-C must not cut off a thaw.
        command.process_group(0);
        run_within(command, arguments, FREEZE_PATIENCE)
    }

    fn run(&self, arguments: &[&str]) -> Result<String, VirshError> {
        self.run_with(arguments, "")
    }

    fn run_with(&self, arguments: &[&str], input: &str) -> Result<String, VirshError> {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut virsh = command.spawn().map_err(failed)?;
        if let Some(mut stdin) = virsh.stdin.take() {
            // One that ends without reading it says why.
            let _ = stdin.write_all(input.as_bytes());
        }
        judged(arguments, virsh.wait_with_output().map_err(VirshError::Run)?)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        // Its messages are read by people and, where it matters, compared: in one language.
        command.args(["--connect", &self.uri]).args(arguments).env("LC_ALL", "C");
        command
    }
}

/// Runs virsh, whose output is of no use, and gives it up after `patience`.
fn run_within(mut virsh: Command, arguments: &[&str], patience: Duration) -> Result<(), VirshError> {
    virsh.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut virsh = virsh.spawn().map_err(failed)?;
    if end_within(&mut virsh, patience).map_err(VirshError::Run)?.is_none() {
        return Err(VirshError::Silent { what: arguments.join(" "), patience });
    }
    judged(arguments, virsh.wait_with_output().map_err(VirshError::Run)?).map(drop)
}

/// What virsh printed, or why it failed.
fn judged(arguments: &[&str], Output { status, stdout, stderr }: Output) -> Result<String, VirshError> {
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let mut said = error_of(&String::from_utf8_lossy(&stderr));
    if said.contains("failed to get domain") {
        said += " (`virsh list --all` shows all domains)";
    }
    Err(VirshError::Failed { what: arguments.join(" "), said })
}

fn failed(error: io::Error) -> VirshError {
    match error.kind() {
        io::ErrorKind::NotFound => VirshError::Missing,
        _ => VirshError::Run(error),
    }
}

/// Whether `virsh dominfo` says yes to this.
fn says(info: &str, wanted: &str) -> bool {
    info.lines().filter_map(|line| line.split_once(':')).any(|(key, value)| key == wanted && value.trim() == "yes")
}

/// What virsh said, in one line.
fn error_of(said: &str) -> String {
    let lines = said.lines().map(|line| line.trim_start_matches("error: ")).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

/// Waits for the process's end, and kills it after `patience`. None: it was killed.
fn end_within(process: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        if let Some(status) = process.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    process.kill()?;
    process.wait().map(|_| None)
}

/// The domain in a line of `virsh list --uuid --name`. Its name may have spaces.
fn known_domain(line: &str) -> Option<KnownDomain> {
    let (uuid, name) = line.trim().split_once(' ')?;
    Some(KnownDomain { uuid: uuid.to_owned(), name: name.trim().to_owned() })
}

/// The event in a line that virsh prints: `event 'lifecycle' for domain 'web': Crashed Panicked`.
fn event_in(line: &str) -> Option<(&str, DomainEvent)> {
    if let Some((_, rest)) = line.split_once("event 'reboot' for domain '") {
        return rest.strip_suffix('\'').map(|domain| (domain, DomainEvent::Reset));
    }
    let (_, rest) = line.split_once("event 'lifecycle' for domain '")?;
    rest.strip_suffix("': Crashed Panicked").map(|domain| (domain, DomainEvent::Crashed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yes_is_found_in_what_virsh_prints() {
        let saved = |info: &str| says(info, "Managed save");
        assert!(saved("Id:             -\nName:           web\nPersistent:     no\nManaged save:   yes\n"));
        assert!(!saved("Name:           yes\nPersistent:     yes\nManaged save:   no\n") && !saved(""));
    }

    #[test]
    fn known_domains_are_found_in_what_virsh_prints() {
        let of = |uuid: &str, name: &str| Some(KnownDomain { uuid: uuid.to_owned(), name: name.to_owned() });
        assert_eq!(known_domain("6695eb01-f6a4 test"), of("6695eb01-f6a4", "test"));
        // Older ones print columns.
        assert_eq!(known_domain("6695eb01-f6a4  two words   "), of("6695eb01-f6a4", "two words"));
        assert_eq!(known_domain(""), None);
    }

    #[test]
    fn events_are_found_in_what_virsh_prints() {
        use DomainEvent::{Crashed, Reset};
        for (line, expect) in [
            ("event 'reboot' for domain 'web'", ("web", Reset)),
            ("2026-01-01 00:00:00.000+0000: event 'reboot' for domain 'it's'", ("it's", Reset)),
            ("event 'lifecycle' for domain 'web': Crashed Panicked", ("web", Crashed)),
            ("event 'lifecycle' for domain 'it's': Crashed Panicked", ("it's", Crashed)),
        ] {
            assert_eq!(event_in(line), Some(expect), "{line}");
        }
        for other in [
            "",
            "event 'lifecycle' for domain 'web': Started Booted",
            "event 'lifecycle' for domain 'web': Stopped Crashed",
            "event 'reboot' for domain 'web",
        ] {
            assert_eq!(event_in(other), None, "{other}");
        }
    }

    #[test]
    fn process_that_does_not_end_is_given_up() {
        let mut sleeps = Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(end_within(&mut sleeps, Duration::from_millis(30)).unwrap().is_none());
        let mut ends = Command::new("true").spawn().unwrap();
        assert!(end_within(&mut ends, Duration::from_secs(60)).unwrap().unwrap().success());
    }
}
