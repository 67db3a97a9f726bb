//! Place: where a snapshot lies, a folder of this host or a prefix of an object store. The files are the same, but for disks
//! (`stored_disk`).

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use hearth_store::{Cache, Object, Store, Turns};

use super::manifest::{Modified, disk_file};
use super::pages::{PageReader, PageSource, PagesExpected};
use super::{DiskPart, Part, SnapshotError, stored_disk};

/// A snapshot in an object store: who is asked, and where on this host what came of it is kept.
#[derive(Clone, Debug)]
pub struct Far {
    pub store: Arc<Store>,
    pub cache: Arc<Cache>,
    /// Of all that is fetched for the same guest.
    pub turns: Arc<Turns>,
    /// A folder for a file on its way up.
    pub scratch: PathBuf,
}

#[derive(Debug)]
pub enum Place {
    Folder(PathBuf),
    Far(Far),
}

impl Place {
    /// How a file is called; what opens it, if the place is a folder.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Self::Folder(folder) => folder.join(name),
            Self::Far(far) => PathBuf::from(far.store.url(name)),
        }
    }

    pub fn name(&self) -> PathBuf {
        match self {
            Self::Folder(folder) => folder.clone(),
            Self::Far(far) => PathBuf::from(far.store.address().to_string()),
        }
    }

    /// A small file whole. None: it is not there. One of more than `bytes_max` is refused, and not read.
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

    /// One that belongs to the snapshot, and is what it was.
    pub fn part(&self, name: &str, part: &Part, bytes_max: u64) -> Result<Vec<u8>, SnapshotError> {
        let missing = || SnapshotError::Io { path: self.path(name), what: "read", source: ErrorKind::NotFound.into() };
        // The manifest's word is sealed; what a store says of the length is not.
        let bytes = self.read(name, bytes_max.min(part.bytes))?.ok_or_else(missing)?;
        super::check_part(&self.path(name), part, bytes)
    }

    /// A file of pages. None: it is not there.
    pub fn pages(&self, name: &str, expected: &PagesExpected) -> Result<Option<PageReader>, SnapshotError> {
        let path = self.path(name);
        let source = match self {
            Self::Folder(_) if !path.exists() => return Ok(None),
            Self::Folder(_) => PageSource::open(&path)?,
            Self::Far(far) => match Object::open(&far.store, &far.cache, &far.turns, name)? {
                Some(object) => PageSource::Object(object),
                None => return Ok(None),
            },
        };
        PageReader::of(source, &path, expected).map(Some)
    }

    /// When a file was written, and what changes whenever it is replaced. None: it is not there.
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

    /// A disk is there, as long as it was, and in a folder as old. Its content is not looked at.
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

    pub fn far(&self) -> Option<&Far> {
        match self {
            Self::Folder(_) => None,
            Self::Far(far) => Some(far),
        }
    }

    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Folder(folder) => Some(folder),
            Self::Far(_) => None,
        }
    }
}
