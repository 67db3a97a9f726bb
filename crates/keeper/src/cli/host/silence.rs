//! A QEMU that does not notice that its disks have a new keeper (before 9.1; `machine/stale_session.rs` tells why).
//!
//! a disk stays silent -> suspend: if QEMU has not seen the last keeper's end, it tells the next one to stop queues that it does not
//! know, and is cut off -> it connects again -> resume, which makes QEMU start its disks again -> QEMU ended by that, which it does if
//! it was connecting to the last keeper when that died -> start
//!
//! This is done once for each keeper: a disk that the guest does not use stays silent, too. Whoever has suspended the domain has QEMU
//! start its disks by resuming it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hearth_api::{MachineState, MachineStatus};
use hearth_libvirt::virsh::Virsh;

use super::recovery::RecoveryError;
use crate::client::Client;
use crate::runtime_root::RuntimeRoot;

/// How long a QEMU that notices its keeper may take for its first messages. It takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long QEMU may take to use its disks or to end, once it goes on.
const OUTCOME_PATIENCE: Duration = Duration::from_secs(10);
/// How long QEMU may take to connect again. It tries once a second.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const RUNNING: &str = "running";
const PAUSED: &str = "paused";
/// Name of the file in the machine's runtime folder that says that the domain is to be resumed.
const NOTE: &str = "resume";

/// Whether QEMU does not use a disk that it is connected to, as far as its keeper knows.
pub fn is_silent(status: &MachineStatus) -> bool {
    status.disks.iter().any(|disk| disk.silent)
}

/// Whether QEMU uses all its disks. One that has just died is neither silent nor uses any.
fn uses_disks(status: &MachineStatus) -> bool {
    status.state == MachineState::Running && status.disks.iter().all(|disk| disk.connected && !disk.silent)
}

/// The keeper's pid for each domain whose QEMU was silent.
#[derive(Default)]
pub struct Silences(Mutex<HashMap<String, u32>>);

impl Silences {
    /// Makes the domain's QEMU use its disks, if it does not.
    pub fn end(&self, root: &RuntimeRoot, domain: &str) -> Result<(), RecoveryError> {
        let (virsh, client) = (Virsh::system(), Client::new(root.api_socket(domain)));
        let silent_under = || client.status().ok().filter(is_silent).map(|status| status.keeper.pid);
        let uses_disks = || client.status().is_ok_and(|status| uses_disks(&status));
        let await_connection =
            || await_connection(|| client.status().is_ok_and(|status| status.disks.iter().all(|disk| disk.connected)));
        let folder = root.machine(domain);
        let note = folder.join(NOTE);
        if is_noted(&folder) && resume(&virsh, domain, &note, await_connection)? {
            tracing::warn!(domain, "resumed, because it was suspended for a moment only");
            return await_outcome(&virsh, domain, uses_disks);
        }
        let Some(keeper) = silent_under().filter(|keeper| !self.is_known(domain, *keeper)) else { return Ok(()) };
        thread::sleep(PATIENCE);
        if silent_under() != Some(keeper) || virsh.state(domain)? != RUNNING {
            return Ok(());
        }
        tracing::warn!(domain, "QEMU does not use its disks: suspending and resuming the domain");
        if let Err(error) = fs::write(&note, "") {
            tracing::warn!(domain, %error, "whoever follows would not resume the domain; it is left as it is");
            return Ok(());
        }
        suspend_and_resume(&virsh, domain, &note, await_connection)?;
        self.note(domain, keeper);
        await_outcome(&virsh, domain, uses_disks)
    }

    fn is_known(&self, domain: &str, keeper: u32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(domain) == Some(&keeper)
    }

    fn note(&self, domain: &str, keeper: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(domain.to_owned(), keeper);
    }
}

/// Whether the domain in whose runtime folder this is may have to be resumed.
pub fn is_noted(folder: &Path) -> bool {
    folder.join(NOTE).exists()
}

/// libvirt may do either although its daemon ends before it answers. So its state decides, and the note stays until that is known.
fn suspend_and_resume(
    virsh: &Virsh,
    domain: &str,
    note: &Path,
    await_connection: impl Fn(),
) -> Result<(), RecoveryError> {
    let suspended = virsh.suspend(domain);
    if !resume(virsh, domain, note, await_connection)? {
        suspended?;
    }
    Ok(())
}

/// Resumes the domain if it is suspended, and removes the note once it is not. Returns whether it was.
fn resume(virsh: &Virsh, domain: &str, note: &Path, await_connection: impl Fn()) -> Result<bool, RecoveryError> {
    let is_suspended = virsh.state(domain)? == PAUSED;
    if is_suspended {
        await_connection();
        if let Err(error) = virsh.resume(domain) {
            // QEMU may have ended by that.
            if virsh.state(domain)? == PAUSED {
                return Err(error.into());
            }
        }
    }
    remove(note);
    Ok(is_suspended)
}

/// Waits until QEMU is connected to its disks. Without a connection it would not start them, and would not try again.
fn await_connection(is_connected: impl Fn() -> bool) {
    let deadline = Instant::now() + RECONNECT_PATIENCE;
    while !is_connected() && Instant::now() < deadline {
        thread::sleep(LOOK_EVERY);
    }
    // QEMU learns of a connection a little later than its keeper.
    thread::sleep(LOOK_EVERY);
}

/// Starts the domain if its QEMU ends by its restarted disks.
fn await_outcome(virsh: &Virsh, domain: &str, uses_disks: impl Fn() -> bool) -> Result<(), RecoveryError> {
    let deadline = Instant::now() + OUTCOME_PATIENCE;
    while Instant::now() < deadline {
        if virsh.has_died(domain)? {
            tracing::warn!(domain, "QEMU has ended by that: starting the domain");
            return Ok(virsh.start(domain)?);
        }
        if uses_disks() {
            break;
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn remove(note: &Path) {
    if let Err(error) = fs::remove_file(note) {
        tracing::warn!(path = %note.display(), %error, "cannot remove");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Suspends and resumes a domain by a virsh that does this for `suspend` and for `resume`, then resumes it by one that works.
    /// Returns whether each failed, and the domain's state and whether the note was there, after each.
    fn check(suspend: &str, resume_by: &str, state: &str) -> ([bool; 2], [(String, bool); 2]) {
        let folder = tempfile::tempdir().unwrap();
        let (note, states) = (folder.path().join(NOTE), folder.path().join("state"));
        fs::write(&note, "").unwrap();
        fs::write(&states, RUNNING).unwrap();
        let virsh_of = |name: &str, suspend: &str, resume: &str, state: &str| {
            let path = folder.path().join(name);
            let cases = format!("suspend) {suspend};; resume) {resume};; domstate) {state};;");
            let script = format!("#!/bin/sh\ncd {}\ncase $3 in {cases} esac\n", folder.path().display());
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            Virsh::with_program(path)
        };
        let after = || (fs::read_to_string(&states).unwrap().trim().to_owned(), note.exists());
        let first = suspend_and_resume(&virsh_of("first", suspend, resume_by, state), "web", &note, || ()).is_err();
        let after_first = after();
        let works = virsh_of("works", "exit 9", "echo running >state", "cat state");
        let second = note.exists() && resume(&works, "web", &note, || ()).is_err();
        ([first, second], [after_first, after()])
    }

    #[test]
    fn suspended_domain_is_resumed_though_libvirt_fails() {
        let running = ("running".to_owned(), false);
        let (pauses, resumes, says) = ("echo paused >state", "echo running >state", "cat state");
        let dies_after = |done: &str| format!("{done}; exit 1");
        let all_well = ([false, false], [running.clone(), running.clone()]);
        assert_eq!(check(pauses, resumes, says), all_well);
        assert_eq!(check(&dies_after(pauses), resumes, says), all_well);
        assert_eq!(check(pauses, &dies_after(resumes), says), all_well);
        // It does nothing.
        assert_eq!(check("exit 1", resumes, says), ([true, false], [running.clone(), running.clone()]));
        let left = ([true, false], [("paused".to_owned(), true), running.clone()]);
        assert_eq!(check(pauses, "exit 1", says), left);
        // It does not answer.
        assert_eq!(check(&dies_after(pauses), resumes, "exit 1"), left);
        // Its QEMU ends.
        let off = ("shut off".to_owned(), false);
        assert_eq!(check(pauses, "echo shut off >state; exit 1", says), ([false, false], [off.clone(), off]));
    }
}
