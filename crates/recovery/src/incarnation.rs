//! Incarnation: one life of the guest OS, and the two files that outlive it, its RAM and its ledger.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::{fs, io};

use hearth_disk::block::DiskId;
use hearth_disk::ledger::{Ledger, LedgerError};
use hearth_memory::{MemoryError, RamFile};

/// The files of one incarnation in the machine's memory folder.
#[derive(Clone)]
pub struct Incarnation {
    /// Number of the incarnation. A machine's first one is 1.
    pub number: u32,
    /// The guest's RAM.
    pub ram: Arc<RamFile>,
    /// `None` with `ember = "off"`: nothing of this incarnation is reused.
    pub ledger: Option<Arc<Mutex<Ledger>>>,
}

/// Why an incarnation's files could not be created or opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum IncarnationError {
    #[error("RAM of incarnation {number}")]
    Ram { number: u32, source: MemoryError },
    #[error("ledger of incarnation {number}")]
    Ledger { number: u32, source: LedgerError },
}

impl Incarnation {
    /// Creates empty files, in place of those that a dead keeper left under this number. `tracked` asks for a ledger.
    pub fn create(folder: &Path, number: u32, ram_bytes: u64, tracked: bool) -> Result<Self, IncarnationError> {
        remove(&ram_path(folder, number));
        let ram = RamFile::create(&ram_path(folder, number), ram_bytes);
        let ram = ram.map_err(|source| IncarnationError::Ram { number, source })?;
        Self::with_ram(folder, number, Arc::new(ram), tracked)
    }

    /// As `create`, in RAM that exists.
    pub fn with_ram(folder: &Path, number: u32, ram: Arc<RamFile>, tracked: bool) -> Result<Self, IncarnationError> {
        remove(&ledger_path(folder, number));
        let ram_pages = ram.pages() as u32;
        let ledger = tracked
            .then(|| Ledger::create(&ledger_path(folder, number), ram_pages))
            .transpose()
            .map_err(|source| IncarnationError::Ledger { number, source })?;
        Ok(Self { number, ram, ledger: ledger.map(|ledger| Arc::new(Mutex::new(ledger))) })
    }

    /// Opens the files that a dead keeper left.
    pub fn open(folder: &Path, number: u32) -> Result<Self, IncarnationError> {
        let ram = RamFile::open(&ram_path(folder, number));
        Self::open_with_ram(folder, number, ram.map_err(|source| IncarnationError::Ram { number, source })?)
    }

    /// As `open`, with RAM that QEMU has made.
    pub fn open_with_ram(folder: &Path, number: u32, ram: RamFile) -> Result<Self, IncarnationError> {
        let ledger_path = ledger_path(folder, number);
        let ledger = ledger_path
            .exists()
            .then(|| Ledger::open(&ledger_path))
            .transpose()
            .map_err(|source| IncarnationError::Ledger { number, source })?;
        Ok(Self { number, ram: Arc::new(ram), ledger: ledger.map(|ledger| Arc::new(Mutex::new(ledger))) })
    }

    /// Number of pages whose disk block is known.
    pub fn ledger_pages(&self) -> u64 {
        self.ledger.as_ref().map_or(0, |ledger| lock(ledger).len() as u64)
    }

    /// Forgets all blocks of this disk. Returns the number of pages forgotten.
    pub fn forget_disk(&self, disk: DiskId) -> u64 {
        self.ledger.as_ref().map_or(0, |ledger| lock(ledger).forget_disk(disk))
    }

    /// Host memory that the two files hold now, in bytes.
    pub fn resident_bytes(&self) -> Result<u64, MemoryError> {
        let ledger_bytes = self.ledger.as_ref().map_or(0, |ledger| file_residency_bytes(lock(ledger).path()));
        Ok(self.ram.residency_bytes()? + ledger_bytes)
    }
}

/// Host memory that a file in a memory file system holds, in bytes; zero if the file is gone.
pub fn file_residency_bytes(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds a lock of the disk path")
}

/// Path of an incarnation's RAM file.
pub fn ram_path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("ram-{number}"))
}

/// Path of an incarnation's ledger.
pub(crate) fn ledger_path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("ledger-{number}"))
}

/// Numbers of the incarnations that have files in a memory folder.
pub fn numbers_in(folder: &Path) -> BTreeSet<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix("ram-").or(name.strip_prefix("ledger-"))?.parse().ok()).collect()
}

/// Removes an incarnation's files, if they exist.
pub fn discard_files(folder: &Path, number: u32) {
    [ram_path(folder, number), ledger_path(folder, number)].iter().for_each(|path| remove(path));
}

/// Removes an incarnation's RAM file, if it exists.
pub fn discard_ram(folder: &Path, number: u32) {
    remove(&ram_path(folder, number));
}

pub(crate) fn remove(path: &Path) {
    match fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(path = %path.display(), %error, "left behind: cannot be removed"),
    }
}
