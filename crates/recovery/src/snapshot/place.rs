//! Place: the location of a snapshot, a folder on this host or a prefix of an object store. The files are the same,
//! except for disks (`stored_disk`).

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use hearth_store::{Cache, Object, Scheduler, Store};

use super::manifest::{Modified, disk_file};
use super::pages::{PageReader, PageSource, PagesExpected};
use super::{DiskPart, Part, SnapshotError, stored_disk};

/// A snapshot in an object store: the store, and where this host keeps what was fetched from it.
#[derive(Clone, Debug)]
pub struct Far {
    /// The store with the snapshot's objects.
    pub store: Arc<Store>,
    /// Cache of blocks that were fetched.
    pub cache: Arc<Cache>,
    /// Scheduler of everything that is fetched for the same guest.
    pub scheduler: Arc<Scheduler>,
    /// Folder for a file that is being uploaded.
    pub scratch: PathBuf,
}

/// Location of a snapshot.
#[derive(Debug)]
pub enum Place {
    /// A folder of this host.
    Folder(PathBuf),
    /// An object store.
    Far(Far),
}

impl Place {
    /// Path or address of a file. In a folder this path opens it.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Self::Folder(folder) => folder.join(name),
            Self::Far(far) => PathBuf::from(far.store.url(name)),
        }
    }

    /// Path or address of the snapshot.
    pub fn name(&self) -> PathBuf {
        match self {
            Self::Folder(folder) => folder.clone(),
            Self::Far(far) => PathBuf::from(far.store.address().to_string()),
        }
    }

    /// Reads a small file whole; `None` if it does not exist. A file of more than `bytes_max` is refused unread.
    pub fn read(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, SnapshotError> {
        match self {
            Self::Folder(folder) => {
                let path = folder.join(name);
                let file = match File::open(&path) {
                    Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                    file => file.map_err(SnapshotError::io(&path, "read"))?,
                };
                let found = file.metadata().map_err(SnapshotError::io(&path, "read"))?.len();
                if found > bytes_max {
                    let what = format!("it has {found} bytes, and {bytes_max} are possible");
                    return Err(SnapshotError::damaged(&path, what));
                }
                let mut bytes = Vec::new();
                file.take(bytes_max).read_to_end(&mut bytes).map_err(SnapshotError::io(&path, "read"))?;
                Ok(Some(bytes))
            }
            Self::Far(far) => Ok(far.store.read(name, bytes_max)?),
        }
    }

    /// Reads a part of the snapshot and checks it against the manifest.
    pub fn part(&self, name: &str, part: &Part, bytes_max: u64) -> Result<Vec<u8>, SnapshotError> {
        let missing = || SnapshotError::Io { path: self.path(name), what: "read", source: ErrorKind::NotFound.into() };
        // The length in the manifest is sealed; the length that a store reports is not.
        let bytes = self.read(name, bytes_max.min(part.bytes))?.ok_or_else(missing)?;
        super::check_part(&self.path(name), part, bytes)
    }

    /// Opens a file of pages; `None` if it does not exist.
    pub fn pages(&self, name: &str, expected: &PagesExpected) -> Result<Option<PageReader>, SnapshotError> {
        let path = self.path(name);
        let source = match self {
            Self::Folder(_) if !path.exists() => return Ok(None),
            Self::Folder(_) => PageSource::open(&path)?,
            Self::Far(far) => match Object::open(&far.store, &far.cache, &far.scheduler, name)? {
                Some(object) => PageSource::Object(object),
                None => return Ok(None),
            },
        };
        PageReader::of(source, &path, expected).map(Some)
    }

    /// When a file was written, and a string that changes whenever it is replaced; `None` if it does not exist.
    pub fn version(&self, name: &str) -> Result<Option<(SystemTime, String)>, SnapshotError> {
        match self {
            Self::Folder(folder) => {
                use std::os::unix::fs::MetadataExt;
                let Ok(found) = fs::metadata(folder.join(name)) else { return Ok(None) };
                let modified = found.modified().map_err(SnapshotError::io(folder, "read"))?;
                Ok(Some((modified, found.ino().to_string())))
            }
            Self::Far(far) => Ok(far.store.meta(name)?.map(|meta| (meta.modified, meta.version))),
        }
    }

    /// Checks that a disk exists with its noted length and, in a folder, its noted time. Its content is not read.
    pub fn check_disk(&self, disk: &DiskPart) -> Result<(), SnapshotError> {
        let name = disk_file(&disk.name);
        let path = self.path(&name);
        let mut modified = None;
        let (found, expected) = match self {
            Self::Folder(_) => {
                // A link would lead to any file of this host.
                let metadata = fs::symlink_metadata(&path).map_err(SnapshotError::io(&path, "found"))?;
                if !metadata.is_file() {
                    return Err(SnapshotError::NoFile { path });
                }
                modified = Some(Modified::of(&metadata));
                (metadata.len(), disk.bytes)
            }
            Self::Far(far) => {
                let stored = stored_disk::of(disk, &path)?;
                (far.store.meta(&name)?.map_or(0, |meta| meta.bytes), stored.bytes)
            }
        };
        if found != expected {
            let what = format!("it has {found} bytes, and had {expected} when it was saved");
            return Err(SnapshotError::damaged(&path, what));
        }
        match disk.modified.zip(modified) {
            Some((saved, found)) if !saved.is_still(found) => Err(SnapshotError::OtherDisk { path, found, saved }),
            _ => Ok(()),
        }
    }

    /// The store, if the snapshot is in one.
    pub fn far(&self) -> Option<&Far> {
        match self {
            Self::Folder(_) => None,
            Self::Far(far) => Some(far),
        }
    }

    /// The folder, if the snapshot is in one.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Folder(folder) => Some(folder),
            Self::Far(_) => None,
        }
    }
}
