//! Which configuration counts: a living or parked guest's own, together with the file of today.
//!
//! The guest's own is in the journal, or in the note of a parked guest, from the moment its QEMU was started. Its next QEMUs
//! (hops, a resume) are started with it, and saves and dumps describe it. When the guest has ended the next one gets what
//! the file said at the keeper's start.

use std::fs;
use std::path::PathBuf;

use hearth_api::{EventKind, PendingChange, PendingUntil};
use hearth_qemu::AcceleratorChoice;
use hearth_recovery::incarnation::ram_path;
use hearth_recovery::journal::Journal;
use hearth_recovery::rejuvenation::parked::{self, Parked};

use super::{Machine, MachineError};
use crate::check::{self, life};
use crate::config::{Config, Configured, InForce};
use crate::host_reload::Record;
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

/// The configuration of the machine that this file describes, as it is right now. The error lists what this program does not
/// understand of a guest's own configuration.
pub fn in_force(mut today: Configured, root: &RuntimeRoot) -> Result<InForce, Vec<Problem>> {
    let started_with = living_guest(&today, root).or_else(|| parked_guest(&today, root));
    match started_with {
        Some(started_with) => InForce::of_living(&today, &started_with, root),
        None => {
            if let Some(kept) = kept_machine_type(&today.config, root) {
                today.or_machine_type(kept);
            }
            Ok(today.into())
        }
    }
}

/// The type that a machine without a guest had last.
pub fn kept_machine_type(config: &Config, root: &RuntimeRoot) -> Option<String> {
    journal(config, root)?.machine_type
}

fn journal(config: &Config, root: &RuntimeRoot) -> Option<Journal> {
    runtime_folders(config, root).find_map(|folder| Journal::load(&folder.join("journal.json")).ok().flatten())
}

/// The runtime folder in the file, and the one that the machine had under its name before the file was changed.
fn runtime_folders(config: &Config, root: &RuntimeRoot) -> impl Iterator<Item = PathBuf> {
    let entered = fs::canonicalize(root.machine(&config.name)).ok();
    [Some(config.runtime_folder.clone()), entered].into_iter().flatten()
}

fn living_guest(today: &Configured, root: &RuntimeRoot) -> Option<String> {
    let mut folders = runtime_folders(&today.config, root);
    let (folder, journal) = folders.find_map(|folder| Some((folder.clone(), life::living_guest(&folder)?)))?;
    Some(journal.started_with.clone().unwrap_or_else(|| of_earlier_keeper(today, folder, &journal)))
}

/// An earlier keeper noted little: the file of today, but for that.
fn of_earlier_keeper(today: &Configured, runtime_folder: PathBuf, journal: &Journal) -> String {
    let mut then = today.clone();
    let ram = fs::metadata(ram_path(&today.config.memory_folder, journal.incarnation));
    let ram_bytes = ram.map_or(journal.ram_bytes, |ram| ram.len());
    then.typed.memory = Some(format!("{}MiB", ram_bytes >> 20));
    then.typed.guest_agent = journal.qemu.as_ref().map(|qemu| qemu.guest_agent);
    if runtime_folder != today.config.runtime_folder {
        then.typed.runtime_folder = Some(runtime_folder.display().to_string());
    }
    then.for_journal()
}

fn parked_guest(today: &Configured, root: &RuntimeRoot) -> Option<String> {
    let (_, parked) = find_parked(&today.config, root)?;
    // An earlier keeper noted nothing: the file of today.
    Some(parked.started_with.unwrap_or_else(|| today.for_journal()))
}

/// The parked guest of this machine, and the memory folder it is in: not the one in the file if that was changed.
pub fn find_parked(config: &Config, root: &RuntimeRoot) -> Option<(PathBuf, Parked)> {
    let left_in = match journal(config, root) {
        Some(journal) => journal.parked_in,
        None => Record::of_this_host().and_then(|record| record.left_in(root.path(), &config.name)),
    };
    let mut folders = left_in.iter().chain([&config.memory_folder]);
    folders.find_map(|folder| Some((folder.clone(), parked::find(folder).ok().flatten()?)))
}

/// The configuration of the machine's next guest, where it is another one.
pub struct Next {
    /// None: the same configuration.
    pub configured: Option<Box<Configured>>,
    /// What the next guest runs under. A living guest keeps what it has.
    pub accelerator: AcceleratorChoice,
    /// What counted before, until a QEMU has been started with what counts now.
    pub last: Option<Box<Last>>,
}

/// The configuration of the last guest.
pub struct Last {
    configured: Configured,
    pending: Vec<PendingChange>,
    accelerator: AcceleratorChoice,
}

impl Machine {
    /// There is no guest, and one is about to be started: what waited for that counts from now on, if it can.
    pub(super) fn take_next_configuration(&mut self) {
        if let Some(next) = self.parts.next.configured.take() {
            let problems = check::of_next_guest(&self.parts.config, &next.config);
            if let Some(problem) = problems.first() {
                let message = format!("the next guest is started with the configuration of the last one: {problem}");
                self.record(EventKind::Error { message });
                self.parts.next.configured = Some(next);
                return;
            }
            let pending = self.parts.pending.clone();
            let configured = self.exchange_configuration(*next);
            let accelerator = self.parts.accelerator.clone();
            self.parts.next.last = Some(Box::new(Last { configured, pending, accelerator }));
            self.parts.pending.retain(|change| change.until == PendingUntil::NextStart);
            self.parts.show_config();
        }
        self.parts.accelerator = self.parts.next.accelerator.clone();
    }

    /// No QEMU could be started with what has just begun to count: the last guest's configuration counts again, and the other one
    /// waits for the guest after the next. False: nothing had changed.
    pub(super) fn take_back_configuration(&mut self, error: &MachineError) -> bool {
        let Some(last) = self.parts.next.last.take() else { return false };
        let Last { configured, pending, accelerator } = *last;
        let keys: Vec<_> = pending.iter().filter(|change| change.until == PendingUntil::NextGuest).collect();
        let keys: Vec<_> = keys.iter().map(|change| change.key.as_str()).collect();
        let message = format!(
            "the next guest is started with the configuration of the last one: QEMU does not start with what was changed ({}): {}",
            keys.join(", "),
            crate::chain(error)
        );
        self.record(EventKind::Error { message });
        self.parts.next.configured = Some(Box::new(self.exchange_configuration(configured)));
        (self.parts.pending, self.parts.accelerator) = (pending, accelerator);
        self.parts.show_config();
        true
    }

    /// Returns what counted before.
    fn exchange_configuration(&mut self, configured: Configured) -> Configured {
        let Configured { config, typed } = configured;
        let config = std::mem::replace(&mut self.parts.config, config);
        let typed = std::mem::replace(&mut self.parts.typed, typed);
        self.set_budget();
        Configured { config, typed }
    }

    /// What the machine may hold depends on the size of its guest.
    fn set_budget(&mut self) {
        self.budget = super::budget(&self.parts.config);
        self.warden.set_budget(self.budget);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a machine without a line for it is started with, above a journal like this.
    fn check(journal: Option<Journal>, typed: &str, expect: Option<&str>) {
        let folder = tempfile::tempdir().unwrap();
        let (root, file) = (RuntimeRoot::new(folder.path()), folder.path().join("web.toml"));
        fs::write(&file, format!("name = \"web\"\nmemory = \"64MiB\"\n{typed}\n[boot]\nkernel = \"k\"\n")).unwrap();
        let today = Configured::load(&file, &root).unwrap();
        if let Some(journal) = journal {
            fs::create_dir_all(&today.config.runtime_folder).unwrap();
            journal.save(&today.config.runtime_folder.join("journal.json")).unwrap();
        }
        let now = in_force(today, &root).unwrap().now;
        assert_eq!(now.config.machine_type.as_deref(), expect);
        assert_eq!(now.typed.machine_type.as_deref(), expect, "for journal and snapshot");
    }

    #[test]
    fn machine_type_is_kept_unless_the_file_names_one() {
        let journal = |machine_type: Option<&str>| {
            let machine_type = machine_type.map(str::to_owned);
            Some(Journal { machine_type, ..Journal::new("web", 64 << 20) })
        };
        let named = "machine_type = \"pc-q35-8.0\"";
        check(None, "", None);
        check(journal(None), "", None);
        check(journal(Some("pc-q35-9.1")), "", Some("pc-q35-9.1"));
        check(journal(Some("pc-q35-9.1")), named, Some("pc-q35-8.0"));
        check(None, named, Some("pc-q35-8.0"));
    }
}
