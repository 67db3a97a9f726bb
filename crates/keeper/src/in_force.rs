//! The configuration that counts: a living or parked guest's own, merged with the current file.
//!
//! The guest's own configuration is in the journal, or in a parked guest's note, from the start of its QEMU on. Its
//! later QEMUs (hops, a resume) are started with it, and saves and dumps describe it. When the guest has ended, the
//! next one gets the configuration that the file had at the keeper's start.

use std::fs;
use std::path::PathBuf;

use hearth_recovery::incarnation::ram_path;
use hearth_recovery::journal::Journal;

use crate::check::life;
use crate::config::{Config, Configured, InForce};
use crate::parked_guest::{find_parked, journal, runtime_folders};
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

/// The current configuration of the machine that this file describes. The error lists what this program does not
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

/// Machine type of the last guest of a machine without a guest.
pub fn kept_machine_type(config: &Config, root: &RuntimeRoot) -> Option<String> {
    journal(config, root)?.machine_type
}

fn living_guest(today: &Configured, root: &RuntimeRoot) -> Option<String> {
    let mut folders = runtime_folders(&today.config, root);
    let (folder, journal) = folders.find_map(|folder| Some((folder.clone(), life::living_guest(&folder)?)))?;
    Some(journal.started_with.clone().unwrap_or_else(|| of_earlier_keeper(today, folder, &journal)))
}

/// For a guest of an earlier keeper, which noted little: the current file, except for what was noted.
fn of_earlier_keeper(today: &Configured, runtime_folder: PathBuf, journal: &Journal) -> String {
    let mut then = today.clone();
    let ram = fs::metadata(ram_path(&today.config.folders.memory, journal.incarnation));
    let ram_bytes = ram.map_or(journal.ram_bytes, |ram| ram.len());
    then.typed.memory = Some(format!("{}MiB", ram_bytes >> 20));
    then.typed.guest_agent = journal.qemu.as_ref().map(|qemu| qemu.guest_agent);
    if runtime_folder != today.config.folders.runtime {
        then.typed.runtime_folder = Some(runtime_folder.display().to_string());
    }
    then.for_journal()
}

fn parked_guest(today: &Configured, root: &RuntimeRoot) -> Option<String> {
    let (_, parked) = find_parked(&today.config, root)?;
    // An earlier keeper noted nothing: use the current file.
    Some(parked.started_with.unwrap_or_else(|| today.for_journal()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value with which a machine starts if its file has no such key, given this journal.
    fn check(journal: Option<Journal>, typed: &str, expect: Option<&str>) {
        let folder = tempfile::tempdir().unwrap();
        let (root, file) = (RuntimeRoot::new(folder.path()), folder.path().join("web.toml"));
        fs::write(&file, format!("name = \"web\"\nmemory = \"64MiB\"\n{typed}\n[boot]\nkernel = \"k\"\n")).unwrap();
        let today = Configured::load(&file, &root).unwrap();
        if let Some(journal) = journal {
            fs::create_dir_all(&today.config.folders.runtime).unwrap();
            journal.save(&today.config.folders.runtime.join("journal.json")).unwrap();
        }
        let now = in_force(today, &root).unwrap().now;
        assert_eq!(now.config.guest.machine_type.as_deref(), expect);
        assert_eq!(now.typed.machine_type.as_deref(), expect, "for journal and snapshot");
    }

    #[test]
    fn machine_type_is_kept_unless_configured() {
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
