//! A QEMU that does not notice that its disks have a new keeper (before 9.1; `machine/stale_session.rs` tells why).
//!
//! a disk stays silent -> suspend and resume, which makes QEMU start its disks again -> QEMU ended by that, which it does if it was
//! connecting to the last keeper when that died -> start
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
        let note = root.machine(domain).join(NOTE);
        if note.exists() {
            resume_left(&virsh, domain, &note)?;
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
        virsh.suspend(domain).inspect_err(|_| remove(&note))?;
        let resumed = virsh.resume(domain);
        if resumed.is_ok() {
            remove(&note);
        }
        self.note(domain, keeper);
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
        Ok(resumed?)
    }

    fn is_known(&self, domain: &str, keeper: u32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(domain) == Some(&keeper)
    }

    fn note(&self, domain: &str, keeper: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(domain.to_owned(), keeper);
    }
}

/// Resumes a domain whose suspender was killed, or could not resume it.
fn resume_left(virsh: &Virsh, domain: &str, note: &Path) -> Result<(), RecoveryError> {
    if virsh.state(domain)? == PAUSED {
        tracing::warn!(domain, "resuming the domain, which was suspended for a moment only");
        virsh.resume(domain)?;
    }
    remove(note);
    Ok(())
}

fn remove(note: &Path) {
    if let Err(error) = fs::remove_file(note) {
        tracing::warn!(path = %note.display(), %error, "cannot remove");
    }
}
