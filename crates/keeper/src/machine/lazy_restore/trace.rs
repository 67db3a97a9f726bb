//! Trace: records what a restored guest touches first, for a time or until a probe from outside succeeds.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hearth_recovery::lazy_restore::LazyRam;
use rustix::process::{Pid, Signal, kill_process_group};

use super::RestoreReporter;
use crate::event::RestoreMessage;

/// How long to wait for bytes. QEMU closes a connection that nobody in the guest accepts sooner than this.
const HANGS_UP_WITHIN: Duration = Duration::from_millis(500);
/// Time between two probes of a traced guest.
const TRACE_STEP: Duration = Duration::from_millis(50);
/// Time between two checks whether the probe's command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How long first touches are recorded.
#[derive(Clone, Debug)]
pub struct Trace {
    pub window: Duration,
    /// Ends the trace sooner.
    pub until: Option<Probe>,
    /// The machine is not needed afterwards: it is a rehearsal's clone.
    pub then_stop: bool,
}

/// A probe from outside the guest.
#[derive(Clone, Debug)]
pub enum Probe {
    /// Something answers at this port of the host.
    Port(u16),
    /// A shell command that succeeds.
    Command(String),
}

impl Probe {
    /// Probes once, and stops when `is_over`.
    fn succeeds(&self, is_over: impl Fn() -> bool) -> bool {
        match self {
            Self::Port(port) => is_served(*port),
            Self::Command(command) => ends_well(command, is_over),
        }
    }
}

/// Runs a command. If it does not end in time it is killed, with everything that it has started.
fn ends_well(command: &str, is_over: impl Fn() -> bool) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    let Ok(mut shell) = shell.spawn() else { return false };
    loop {
        match shell.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if !is_over() => std::thread::sleep(LOOK_EVERY),
            _ => break,
        }
    }
    let _ = kill_process_group(Pid::from_child(&shell), Signal::KILL);
    let _ = shell.wait();
    false
}

/// Whether something in the guest serves the port. QEMU accepts every connection, and closes those that its guest does
/// not accept.
fn is_served(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let Ok(mut stream) = TcpStream::connect_timeout(&address, HANGS_UP_WITHIN) else { return false };
    if stream.set_read_timeout(Some(HANGS_UP_WITHIN)).is_err() {
        return false;
    }
    match stream.read(&mut [0]) {
        Ok(length) => length > 0,
        // The connection stays open.
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

pub(super) fn note_first_touches(lazy: &LazyRam, trace: &Trace, teller: &RestoreReporter) {
    let deadline = Instant::now() + trace.window;
    let is_over = || Instant::now() >= deadline || lazy.is_stopped();
    while !is_over() && !trace.until.as_ref().is_some_and(|probe| probe.succeeds(is_over)) {
        std::thread::sleep(TRACE_STEP.min(deadline.saturating_duration_since(Instant::now())));
    }
    let used = lazy.end_trace();
    if lazy.is_stopped() {
        return;
    }
    match lazy.snapshot().add_trace(&used) {
        Ok(pages) => teller.say(RestoreMessage::Traced { pages }),
        Err(error) => {
            let message = format!("cannot record the working set: {}", crate::chain(&error));
            teller.say(RestoreMessage::Failed { message });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hanging_probe_command_is_killed_with_its_children() {
        assert!(ends_well("exit 0", || false) && !ends_well("exit 1", || false));
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let hangs = format!("sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait", pid.display());
        assert!(!ends_well(&hangs, || pid.exists()));
        let pid = std::fs::read_to_string(pid).unwrap();
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        let deadline = Instant::now() + Duration::from_secs(60);
        // The process that inherits it may not have collected it yet.
        while stat().is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(Instant::now() < deadline, "it lives on: {stat:?}", stat = stat());
            std::thread::yield_now();
        }
    }
}
