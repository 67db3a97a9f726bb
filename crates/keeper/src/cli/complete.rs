//! Completion: what a shell offers for the word under the cursor. The shell's script runs this program, with `COMPLETE` set.
//!
//! Only files are read: a keeper that hangs must not hold up a shell.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::PathBuf;

use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
use hearth_api::EventKind;

use crate::config::{Config, Field, Section};
use crate::event_log;
use crate::home::Home;
use crate::runtime_root::RuntimeRoot;

/// Names of machines.
pub fn machines() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(names(&root())))
}

/// Names of the disks of the machine that the command line names.
pub fn disks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(named_machine().into_iter().flat_map(|name| disks_of(&root(), &name))))
}

/// Folders, and first the snapshots that machines were saved to.
pub fn snapshots() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let begins = |folder: &String| folder.starts_with(&*current.to_string_lossy());
        let saved = saved(&root()).into_iter().filter(begins);
        candidates(saved).into_iter().chain(PathCompleter::dir().complete(current)).collect()
    })
}

/// Keys of the configuration, each with its `=`. Keys of repeated sections are those of the first one.
pub fn keys() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let fields =
            Section::ALL.into_iter().flat_map(|section| Field::of_section(section).map(move |field| (section, field)));
        let key = |(section, field): (Section, &Field)| match section.table() {
            None => format!("{}=", field.key),
            Some(table) if section.repeats() => format!("{table}[0].{}=", field.key),
            Some(table) => format!("{table}.{}=", field.key),
        };
        candidates(fields.map(key))
    })
}

fn candidates(words: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    words.into_iter().map(CompletionCandidate::new).collect()
}

/// The root that the command line would use, unless it says so itself.
fn root() -> RuntimeRoot {
    std::env::var_os("HEARTH_RUNTIME_ROOT").map_or_else(RuntimeRoot::for_this_user, RuntimeRoot::new)
}

fn names(root: &RuntimeRoot) -> BTreeSet<String> {
    root.names().into_iter().chain(Home::names()).collect()
}

/// The first word of the command line that is a machine's name.
fn named_machine() -> Option<String> {
    let names = names(&root());
    let words = std::env::args().skip_while(|word| word != "--").skip(2);
    words.into_iter().find(|word| names.contains(word))
}

/// Names of a machine's disks: of the configuration in its home, or of the sockets of the running machine.
fn disks_of(root: &RuntimeRoot, name: &str) -> Vec<String> {
    if let Ok(config) = Config::load(&Home::of(name).file(), root) {
        return config.devices.disks.into_iter().map(|disk| disk.name).collect();
    }
    let entries = std::fs::read_dir(root.machine(name)).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.file_name().into_string().ok());
    files.filter_map(|file| Some(file.strip_prefix("disk-")?.strip_suffix(".sock")?.to_owned())).collect()
}

/// Folders to which the machines' keepers have saved, and which still exist.
fn saved(root: &RuntimeRoot) -> BTreeSet<String> {
    let records =
        root.names().into_iter().flat_map(|name| event_log::read_file(&root.machine(&name)).unwrap_or_default());
    let folders = records.filter_map(|record| match record.event {
        EventKind::Saved { folder, .. } => Some(folder),
        _ => None,
    });
    folders.filter(|folder| PathBuf::from(folder).is_dir()).collect()
}
