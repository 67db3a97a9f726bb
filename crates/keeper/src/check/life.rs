//! Whether a machine is running, and with or without its keeper.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_qemu::{Process, ProcessId};
use hearth_recovery::journal::{Journal, QemuIdentity};
use rustix::fs::FlockOperation;

use crate::config::Config;
use crate::folders::memory_owner::qemus_of;

/// If a keeper is killed while it starts a process, that process holds its lock until it executes its program.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Nothing of it runs.
    None,
    /// Its QEMU runs without a keeper: `hearth run` takes it over, or ends it if it was not yet in the journal.
    Orphaned,
    /// Its keeper runs.
    Kept,
}

impl Life {
    pub fn of(config: &Config) -> Self {
        if has_keeper(&config.folders.runtime) { Self::Kept } else { Self::without_keeper(config) }
    }

    /// For whoever holds the keeper's lock.
    pub fn without_keeper(config: &Config) -> Self {
        match living_qemu(&config.folders.runtime) {
            Some(_) => Self::Orphaned,
            // Its keeper died before it could record it in the journal.
            None if !qemus_of(&config.folders.runtime, &config.folders.memory).is_empty() => Self::Orphaned,
            None => Self::None,
        }
    }

    /// For a new keeper: waits for a lock that is about to be released.
    pub fn settled(config: &Config) -> Self {
        let deadline = Instant::now() + LOCK_PATIENCE;
        while has_keeper(&config.folders.runtime) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        Self::of(config)
    }

    /// Whether the machine itself holds what its configuration asks for.
    pub fn holds_resources(self) -> bool {
        self != Self::None
    }
}

/// The pid of a QEMU whose keeper has died.
pub fn orphaned_qemu(runtime_folder: &Path) -> Option<u32> {
    if has_keeper(runtime_folder) {
        return None;
    }
    living_qemu(runtime_folder).map(|qemu| qemu.pid)
}

/// The QEMU that the journal names, if it lives.
pub fn living_qemu(runtime_folder: &Path) -> Option<QemuIdentity> {
    // `run` reports an unreadable journal better, because it knows what it needed it for.
    let journal = Journal::load(&runtime_folder.join("journal.json")).ok().flatten()?;
    journal.qemu.filter(is_alive)
}

/// The journal of the machine in this folder, if a QEMU that it names lives.
pub fn living_guest(runtime_folder: &Path) -> Option<Journal> {
    // As above, `run` reports an unreadable journal.
    let journal = Journal::load(&runtime_folder.join("journal.json")).ok().flatten()?;
    names_living_qemu(&journal).then_some(journal)
}

/// Whether a QEMU that this journal names lives.
pub fn names_living_qemu(journal: &Journal) -> bool {
    let successor = journal.hop.as_ref().map(|hop| &hop.successor);
    journal.qemu.iter().chain(successor).any(is_alive)
}

/// Tests the keeper's lock with a shared lock that is held only for a moment.
pub fn has_keeper(runtime_folder: &Path) -> bool {
    let Ok(file) = File::open(runtime_folder.join("keeper.lock")) else { return false };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}

/// Whether the machine is another user's, so that this process cannot learn anything of it.
pub fn is_anothers(runtime_folder: &Path) -> bool {
    let lock = File::open(runtime_folder.join("keeper.lock"));
    lock.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

fn is_alive(qemu: &QemuIdentity) -> bool {
    // Its log is not needed.
    Process::adopt(ProcessId { pid: qemu.pid, start_ticks: qemu.start_ticks }, Path::new("/dev/null")).is_ok()
}
