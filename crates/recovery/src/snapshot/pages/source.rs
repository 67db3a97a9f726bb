//! Source: where the bytes of a file of pages come from: a file on this host or an object in a store.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

use hearth_store::{Object, Urgency};
use rustix::fs::{Advice, fadvise};

use crate::incarnation::lock;
use crate::snapshot::SnapshotError;

/// Bytes of an object to read ahead while memory is filled in the background. Its slots (`hearth_store::Scheduler`) say
/// when, and how many at once; one request always waits for its slot.
const FILL_BYTES: u64 = 4 << 20;
/// Bytes of an object to read ahead when all of it is read before the guest runs.
const PREFETCH_BYTES: u64 = 32 << 20;

/// Where to read a file of pages.
#[derive(Debug)]
pub enum Source {
    /// The file that had the name when it was last opened.
    File(Mutex<Arc<File>>),
    /// An object in a store.
    Object(Arc<Object>),
}

/// Result of opening a file again by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A copy of it, which is read from now on.
    Ours,
    /// Another file.
    Another,
    /// No file, or the same one as before.
    Nothing,
}

impl Source {
    /// Opens a file on this host.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let file = File::open(path).map_err(SnapshotError::io(path, "read"))?;
        Ok(Self::File(Mutex::new(Arc::new(file))))
    }

    /// Length in bytes. `path` names the file in messages.
    pub fn bytes(&self, path: &Path) -> Result<u64, SnapshotError> {
        match self {
            Self::File(file) => Ok(lock(file).metadata().map_err(SnapshotError::io(path, "read"))?.len()),
            Self::Object(object) => Ok(object.meta().bytes),
        }
    }

    /// Fills `into` with the bytes at `offset`.
    pub fn read(&self, path: &Path, into: &mut [u8], offset: u64, urgency: Urgency) -> Result<(), SnapshotError> {
        match self {
            Self::File(file) => {
                let file = lock(file).clone();
                file.read_exact_at(into, offset).map_err(SnapshotError::io(path, "read"))
            }
            Self::Object(object) => Ok(object.read_at(into, offset, urgency)?),
        }
    }

    /// Drops kept copies of bytes that were found to be wrong. Returns true if another read may give other bytes.
    pub fn forget(&self, offset: u64, bytes: u64) -> bool {
        match self {
            Self::File(_) => false,
            Self::Object(object) => {
                object.forget(offset..offset + bytes);
                true
            }
        }
    }

    /// Opens a file again by its name, because one that cannot be read may have been replaced by a whole one.
    pub fn look_again(&self, path: &Path, is_ours: impl FnOnce(&File) -> io::Result<bool>) -> Found {
        let Self::File(known) = self else { return Found::Nothing };
        let Ok(found) = File::open(path) else { return Found::Nothing };
        if is_ours(&found).unwrap_or(false) {
            advise(&found, path, 0, 0, Advice::Random);
            *lock(known) = Arc::new(found);
            return Found::Ours;
        }
        let identity = |file: &File| file.metadata().map(|file| (file.dev(), file.ino())).ok();
        if identity(&found) == identity(&lock(known)) { Found::Nothing } else { Found::Another }
    }

    /// Announces that chunks are read in no order. The host's own read-ahead may be megabytes, and a thread
    /// that needs a page waits behind them.
    pub fn expect_random(&self, path: &Path) {
        if let Self::File(file) = self {
            advise(&lock(file), path, 0, 0, Advice::Random);
        }
    }

    /// Starts reading ahead for the background fill: `bytes` of a local file, more of an object. Returns the offset at
    /// which to call it again.
    pub fn fill_ahead(&self, path: &Path, from: u64, bytes: u64) -> u64 {
        match self {
            _ if bytes == 0 => from,
            Self::File(file) => {
                let file = lock(file).clone();
                advise(&file, path, from, bytes, Advice::WillNeed);
                from + bytes
            }
            Self::Object(object) => ask(object, from, FILL_BYTES, Urgency::Memory),
        }
    }

    /// Starts reading ahead everything from `from` on. Returns the offset at which to call it again. For files the host
    /// does that by itself.
    pub fn prefetch_ahead(&self, from: u64) -> u64 {
        match self {
            Self::File(_) => u64::MAX,
            Self::Object(object) => ask(object, from, PREFETCH_BYTES, Urgency::WorkingSet),
        }
    }
}

/// Returns half of the range as the next offset, so that something is always in flight.
fn ask(object: &Arc<Object>, from: u64, bytes: u64, urgency: Urgency) -> u64 {
    object.read_ahead(from..from + bytes, urgency);
    from + bytes / 2
}

fn advise(file: &File, path: &Path, offset: u64, bytes: u64, advice: Advice) {
    if let Err(error) = fadvise(file, offset, NonZeroU64::new(bytes), advice) {
        tracing::debug!(path = %path.display(), %error, "the host takes no advice on it");
    }
}
