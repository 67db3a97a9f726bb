//! A QEMU that does not notice that its disks have a new keeper (before 9.1; `machine/stale_session.rs` tells why).
//!
//! a disk stays silent -> suspend and resume, which makes QEMU start its disks again -> QEMU ended by that, which it does if it was
//! connecting to the last keeper when that died -> start
//!
//! This is done once for each keeper: a disk that the guest does not use stays silent, too. Whoever has suspended the domain has QEMU
//! start its disks by resuming it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hearth_api::MachineStatus;
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

/// Whether QEMU does not use a disk that it is connected to, as far as its keeper knows.
pub fn is_silent(status: &MachineStatus) -> bool {
    status.disks.iter().any(|disk| disk.silent)
}

/// The keeper's pid for each domain whose QEMU was silent.
#[derive(Default)]
pub struct Silences(Mutex<HashMap<String, u32>>);

impl Silences {
    /// Makes the domain's QEMU use its disks, if it does not.
    pub fn end(&self, root: &RuntimeRoot, domain: &str) -> Result<(), RecoveryError> {
        let (virsh, client) = (Virsh::system(), Client::new(root.api_socket(domain)));
        let silent_under = || client.status().ok().filter(is_silent).map(|status| status.keeper.pid);
        let Some(keeper) = silent_under().filter(|keeper| !self.is_known(domain, *keeper)) else { return Ok(()) };
        thread::sleep(PATIENCE);
        if silent_under() != Some(keeper) || virsh.state(domain)? != RUNNING {
            return Ok(());
        }
        self.note(domain, keeper);
        tracing::warn!(domain, "QEMU does not use its disks: suspending and resuming the domain");
        virsh.suspend(domain)?;
        let resumed = virsh.resume(domain);
        let deadline = Instant::now() + OUTCOME_PATIENCE;
        while Instant::now() < deadline {
            if virsh.has_died(domain)? {
                tracing::warn!(domain, "QEMU has ended by that: starting the domain");
                return Ok(virsh.start(domain)?);
            }
            if silent_under().is_none() {
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
