//! Where a machine's parked guest is found: its journal, or the record of the host reload, names the memory folder.

use std::fs;
use std::path::{Path, PathBuf};

use hearth_recovery::journal::Journal;
use hearth_recovery::rejuvenation::parked::{self, Parked};

use crate::config::Config;
use crate::host_reload::Record;
use crate::runtime_root::RuntimeRoot;

/// The parked guest of this machine, and the memory folder it is in: not the one in the file if that was changed.
pub fn find_parked(config: &Config, root: &RuntimeRoot) -> Option<(PathBuf, Parked)> {
    let left_in = match journal(config, root) {
        Some(journal) => journal.guest.parked_in().map(Path::to_owned),
        None => Record::of_this_host().and_then(|record| record.left_in(root.path(), &config.name)),
    };
    let mut folders = left_in.iter().chain([&config.folders.memory]);
    folders.find_map(|folder| Some((folder.clone(), parked::find(folder).ok().flatten()?)))
}

/// The journal of this machine, if there is one that can be read.
pub fn journal(config: &Config, root: &RuntimeRoot) -> Option<Journal> {
    runtime_folders(config, root).find_map(|folder| Journal::load(&folder.join("journal.json")).ok().flatten())
}

/// The runtime folder in the file, and the one that the machine had under its name before the file was changed.
pub fn runtime_folders(config: &Config, root: &RuntimeRoot) -> impl Iterator<Item = PathBuf> {
    let entered = fs::canonicalize(root.machine(&config.name)).ok();
    [Some(config.folders.runtime.clone()), entered].into_iter().flatten()
}
