//! Source: where the bytes of a file of pages come from, a file of this host or an object of a store.

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

/// Of an object, asked for ahead by whoever fills memory behind a guest: when and how many at once its turns say
/// (`hearth_store::Turns`), and there is always one that waits for its turn.
const FILL_BYTES: u64 = 4 << 20;
/// And by whoever reads it all before the guest runs.
const PREFETCH_BYTES: u64 = 32 << 20;

#[derive(Debug)]
pub enum Source {
    /// The one that had the name when it was last looked for.
    File(Mutex<Arc<File>>),
    Object(Arc<Object>),
}

/// What is found when a file is looked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is read from now on.
    Ours,
    Another,
    Nothing,
}

impl Source {
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let file = File::open(path).map_err(SnapshotError::io(path, "read"))?;
        Ok(Self::File(Mutex::new(Arc::new(file))))
    }

    pub fn bytes(&self, path: &Path) -> Result<u64, SnapshotError> {
        match self {
            Self::File(file) => Ok(lock(file).metadata().map_err(SnapshotError::io(path, "read"))?.len()),
            Self::Object(object) => Ok(object.meta().bytes),
        }
    }

    pub fn read(&self, path: &Path, into: &mut [u8], offset: u64, urgency: Urgency) -> Result<(), SnapshotError> {
        match self {
            Self::File(file) => {
                let file = lock(file).clone();
                file.read_exact_at(into, offset).map_err(SnapshotError::io(path, "read"))
            }
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

    /// A file that cannot be read may have been replaced by a whole one, which only its name leads to.
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

    /// Chunks are read as they are asked for, and nothing besides: what the host reads ahead of its own accord may be
    /// megabytes, and whoever needs a page waits behind them.
    pub fn expect_random(&self, path: &Path) {
        if let Self::File(file) = self {
            advise(&lock(file), path, 0, 0, Advice::Random);
        }
    }

    /// So many bytes will be wanted behind the guest's back, on a local disk; of an object it is more. Where to ask again.
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
