//! Source: where the bytes of a file of pages come from, a file of this host or an object of a store.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use hearth_store::{Object, Urgency};
use rustix::fs::{Advice, fadvise};

use crate::snapshot::SnapshotError;

/// Of an object, asked for ahead by whoever fills memory behind a guest: when and how many at once its turns say
/// (`hearth_store::Turns`), and there is always one that waits for its turn.
const FILL_BYTES: u64 = 4 << 20;
/// And by whoever reads it all before the guest runs.
const PREFETCH_BYTES: u64 = 32 << 20;

#[derive(Debug)]
pub enum Source {
    File(File),
    Object(Arc<Object>),
}

impl Source {
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        File::open(path).map(Self::File).map_err(SnapshotError::io(path, "read"))
    }

    pub fn bytes(&self, path: &Path) -> Result<u64, SnapshotError> {
        match self {
            Self::File(file) => Ok(file.metadata().map_err(SnapshotError::io(path, "read"))?.len()),
            Self::Object(object) => Ok(object.meta().bytes),
        }
    }

    pub fn read(&self, path: &Path, into: &mut [u8], offset: u64, urgency: Urgency) -> Result<(), SnapshotError> {
        match self {
            Self::File(file) => file.read_exact_at(into, offset).map_err(SnapshotError::io(path, "read")),
            Self::Object(object) => Ok(object.read_at(into, offset, urgency)?),
        }
    }

    /// What was read from there is not what it should be. True: it may be another time.
    pub fn forget(&self, offset: u64, bytes: u64) -> bool {
        match self {
            Self::File(_) => false,
            Self::Object(object) => {
                object.forget(offset..offset + bytes);
                true
            }
        }
    }

    /// Chunks are read as they are asked for, and nothing besides: what the host reads ahead of its own accord may be
    /// megabytes, and whoever needs a page waits behind them.
    pub fn expect_random(&self, path: &Path) {
        if let Self::File(file) = self {
            advise(file, path, 0, 0, Advice::Random);
        }
    }

    /// So many bytes will be wanted behind the guest's back, on a local disk; of an object it is more. Where to ask again.
    pub fn fill_ahead(&self, path: &Path, from: u64, bytes: u64) -> u64 {
        match self {
            _ if bytes == 0 => from,
            Self::File(file) => {
                advise(file, path, from, bytes, Advice::WillNeed);
                from + bytes
            }
            Self::Object(object) => ask(object, from, FILL_BYTES, Urgency::Memory),
        }
    }

    /// All will be wanted, one after the other. Where to ask again. The host does that for files by itself.
    pub fn prefetch_ahead(&self, from: u64) -> u64 {
        match self {
            Self::File(_) => u64::MAX,
            Self::Object(object) => ask(object, from, PREFETCH_BYTES, Urgency::WorkingSet),
        }
    }
}

/// Asked again at half of it, so that there is always something under way.
fn ask(object: &Arc<Object>, from: u64, bytes: u64, urgency: Urgency) -> u64 {
    object.read_ahead(from..from + bytes, urgency);
    from + bytes / 2
}

fn advise(file: &File, path: &Path, offset: u64, bytes: u64, advice: Advice) {
    if let Err(error) = fadvise(file, offset, NonZeroU64::new(bytes), advice) {
        tracing::debug!(path = %path.display(), %error, "the host takes no advice on it");
    }
}
