//! Context: what every part of a machine uses. A part borrows it, and owns its own fields.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hearth_api::{EventKind, PendingChange};
use hearth_qemu::{AcceleratorChoice, Binary};
use hearth_recovery::journal::{GuestNote, Journal, JournalError};

use super::inherited_locks::InheritedLocks;
use super::launch_job::Run;
use super::lazy_restore::RestoreOrder;
use crate::config::{Config, ConfigFile, Configured};
use crate::console::Hub;
use crate::control::LastAnswer;
use crate::event::Event;
use crate::event_log::EventLog;
use crate::folders::Folders;
use crate::host_reload::Record;
use crate::runtime_root::RuntimeRoot;
use crate::watchdog::Watchdog;

/// What a machine is made from, and what its parts share. All of it has been checked.
pub struct Context {
    /// Configuration of the living guest, even if the file has changed since.
    pub config: Config,
    pub file: ConfigurationFile,
    pub folders: Folders,
    /// Runtime root, in which machines are found by their names.
    pub root: RuntimeRoot,
    pub qemu: QemuChoice,
    /// A snapshot to restore at the start, instead of a boot.
    pub restore: Option<RestoreOrder>,
    /// The machine is a rehearsal's clone: it never starts a second guest.
    pub rehearses: bool,
    pub outside: Outside,
    /// State that a new keeper reads.
    pub journal: Journal,
}

/// The configuration file, where it differs from the configuration of the living guest.
pub struct ConfigurationFile {
    /// The text that `Context::config` was made from; a snapshot stores it.
    pub typed: ConfigFile,
    /// The configuration of the next guest.
    pub next: Next,
    /// Changed keys of the file that do not count yet.
    pub pending: Vec<PendingChange>,
    /// `Context::config` as the API shows it.
    pub shown: Arc<Mutex<serde_json::Value>>,
}

/// The next guest's configuration, where it differs from the living guest's.
pub struct Next {
    /// None if the configuration is the same.
    pub configured: Option<Box<Configured>>,
    /// Accelerator of the next guest. A living guest keeps its own accelerator.
    pub accelerator: AcceleratorChoice,
    /// The last guest's configuration, until a QEMU has been started with the new one.
    pub last: Option<Box<Last>>,
}

/// The configuration of the last guest.
pub struct Last {
    pub configured: Configured,
    pub pending: Vec<PendingChange>,
    pub accelerator: AcceleratorChoice,
}

/// How QEMU is started.
pub struct QemuChoice {
    /// None if no QEMU program was found when this keeper took over a living QEMU.
    pub binary: Option<Binary>,
    pub accelerator: AcceleratorChoice,
    /// Locks on the images, inherited by each QEMU.
    pub locks: InheritedLocks,
    /// QEMUs whose start was given up, until they have ended.
    pub given_up: Vec<Run>,
}

/// The parts of the keeper outside the machine's loop.
pub struct Outside {
    pub event_log: EventLog,
    pub watchdog: Watchdog,
    pub console: Hub,
    pub started: Instant,
    /// Sends events to the machine's loop.
    pub tell: Sender<Event>,
    /// A signal has asked the keeper to stop. The loop also gets it as an event, unless it ends before.
    pub terminated: Arc<AtomicBool>,
    /// The answer to requests that come when the loop has ended.
    pub last_answer: LastAnswer,
}

/// Loads the journal that a dead keeper left. Without one the machine has not run since the host started; but the
/// record of a host reload may name a parked guest.
pub fn load_journal(config: &Config, folders: &Folders, root: &RuntimeRoot) -> Result<Journal, JournalError> {
    let name = &config.name;
    Ok(Journal::load(&folders.journal())?.unwrap_or_else(|| {
        let left_in = Record::of_this_host().and_then(|record| record.left_in(root.path(), name));
        let guest = left_in.map_or(GuestNote::Runs, |folder| GuestNote::Parked { folder });
        Journal { guest, ..Journal::new(name, config.guest.memory_bytes) }
    }))
}

impl Context {
    /// Shows the configuration that counts now in the API.
    pub fn show_config(&self) {
        let shown = serde_json::to_value(&self.config).expect("a configuration is plain data");
        *self.file.shown.lock().expect("holders only copy and assign") = shown;
    }

    /// Lets viewers find the screen of the guest, if it has one, at this QEMU.
    pub fn show_screen_of(&self, generation: u32) {
        if !self.config.guest.screen {
            return;
        }
        if let Err(error) = self.folders.show_screen_of(generation) {
            tracing::warn!(generation, %error, "cannot link vnc.sock: `hearth view` does not find this QEMU");
        }
    }

    /// The configuration of the living guest, in the journal's format.
    pub fn started_with(&self) -> String {
        Configured { config: self.config.clone(), typed: self.file.typed.clone() }.for_journal()
    }

    pub fn record(&self, kind: EventKind) {
        self.outside.event_log.record(kind);
    }

    /// Writes the journal where the machine can continue without it. A failure is logged.
    pub fn save_journal(&self) {
        if let Err(error) = self.must_save_journal() {
            tracing::warn!(
                error = crate::chain(&error),
                "journal cannot be written: a new keeper would not know the machine's state"
            );
        }
    }

    pub fn must_save_journal(&self) -> Result<(), JournalError> {
        self.journal.save(&self.folders.journal())
    }
}
