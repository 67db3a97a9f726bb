//! Snapshots in object stores: the credentials for a store, and this host's folders for cached and uploaded data.
//!
//! ```text
//! FOLDER/cache               blocks of objects, up to a limit; all machines share it
//! FOLDER/staging-MACHINE/    a save that is being uploaded; the next save first removes what a dead keeper left there
//! ```
//! A machine restored from a store has its snapshot's disks in a folder of its own, with notes of the missing blocks.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_disk::arrival::Arrivals;
use hearth_recovery::snapshot::{Far, LocalDisks, Snapshot, SnapshotError};
use hearth_store::{Address, Cache, Scheduler, Settings, Store, StoreError};

use crate::config::ObjectStoreConfig;

/// Folder beside a restored machine's file, with its snapshot's disks.
const SAVED_DISKS: &str = "saved-disks";

/// Whether this is an address rather than a path of this host.
pub fn is_address(path: &Path) -> bool {
    path.to_str().is_some_and(Address::is_meant)
}

/// The folder of a machine's snapshot disks, inside the machine's own folder.
pub fn saved_disks(machine_folder: &Path) -> PathBuf {
    machine_folder.join(SAVED_DISKS)
}

/// Opens the store of an address. Sends no request yet.
pub fn store(address: &Path, config: &ObjectStoreConfig) -> Result<Store, StoreError> {
    let address = Address::parse(&address.to_string_lossy())?;
    let settings = match &config.credentials {
        Some(path) => Settings::from_file(path)?,
        None => Settings::from_environment(),
    };
    Store::open(address, &settings)
}

/// Opens the snapshot at an address. Sends no request yet. All stores of one guest share a scheduler.
pub fn far(address: &Path, config: &ObjectStoreConfig, scheduler: &Arc<Scheduler>) -> Result<Far, StoreError> {
    let store = Arc::new(store(address, config)?);
    let cache = Cache::open(&config.folder.join("cache"), config.cache_bytes)?;
    Ok(Far { store, cache, scheduler: scheduler.clone(), scratch: config.folder.clone() })
}

/// Opens a snapshot in a folder or in an object store. For the latter, `disks` is the folder of its disks, if any.
pub fn open_snapshot(
    path: &Path,
    config: &ObjectStoreConfig,
    scheduler: &Arc<Scheduler>,
    disks: Option<(&Path, Arrivals)>,
) -> Result<Snapshot, SnapshotError> {
    if !is_address(path) {
        return Snapshot::open(path);
    }
    let disks = disks.map(|(folder, arrivals)| LocalDisks { folder, arrivals });
    Snapshot::open_far(far(path, config, scheduler)?, disks.as_ref())
}

/// A staging folder for a save. Dropping it removes it with its content.
#[derive(Debug)]
pub struct Staging(PathBuf);

impl Staging {
    pub fn make(config: &ObjectStoreConfig, machine: &str) -> io::Result<Self> {
        let path = config.folder.join(format!("staging-{machine}"));
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// The snapshot's folder, which is created later.
    pub fn snapshot(&self) -> PathBuf {
        self.0.join("snapshot")
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "left behind: cannot be removed");
        }
    }
}
