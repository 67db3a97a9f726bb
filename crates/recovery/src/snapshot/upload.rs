//! Upload: a snapshot that is whole in a folder goes to an object store.
//!
//! is there one already? -> machine, state, disks, ram, working set -> manifest: from here on it is a snapshot
//!
//! What fails or is stopped before the manifest is removed again.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hearth_store::{Store, StoreError, UploadError};

use super::manifest::{DiskPart, Manifest, Part, StoredDisk, disk_file};
use super::stored_disk::{Content, INDEX_BYTES_MAX, Survey, index_file};
use super::{MACHINE, MANIFEST, MANIFEST_BYTES_MAX, RAM, STATE, SnapshotError, WORKING_SET};
use crate::snapshot::save::SaveError;

/// Hears how many bytes more have arrived; its error ends the upload.
pub type Watch<'a> = dyn FnMut(u64) -> Result<(), SaveError> + 'a;

impl From<StoreError> for SaveError {
    fn from(error: StoreError) -> Self {
        Self::Snapshot(error.into())
    }
}

/// A place in a store where there is no snapshot.
pub fn must_be_free(store: &Store) -> Result<(), SnapshotError> {
    match store.meta(MANIFEST)? {
        None => Ok(()),
        Some(_) => Err(SnapshotError::Exists { path: store.address().to_string().into() }),
    }
}

/// Bytes that an upload of this folder sends, about.
pub fn bytes_of(folder: &Path) -> Result<u64, SnapshotError> {
    let mut bytes = 0;
    for name in [MACHINE, STATE, RAM, WORKING_SET, MANIFEST] {
        bytes += std::fs::metadata(folder.join(name)).map_or(0, |file| file.blocks() * 512);
    }
    for disk in &manifest_of(folder)?.disks {
        let path = folder.join(disk_file(&disk.name));
        let content = Content::open(&path, disk)?;
        bytes += content.allocated_bytes().map_err(SnapshotError::io(&path, "read"))?;
    }
    Ok(bytes)
}

fn manifest_of(folder: &Path) -> Result<Manifest, SnapshotError> {
    let path = folder.join(MANIFEST);
    let text = std::fs::read_to_string(&path).map_err(SnapshotError::io(&path, "read"))?;
    Manifest::parse(&text, &path)
}

/// Sends it all.
pub fn upload(folder: &Path, store: &Store, watch: &mut Watch<'_>) -> Result<(), SaveError> {
    let mut sending = Sending { folder, store, sent: Vec::new(), watch };
    let sent = sending.send_all();
    if sent.is_err() {
        for name in &sending.sent {
            if let Err(error) = store.remove(name) {
                tracing::warn!(%error, "left behind: cannot be removed");
                // The others would take as long.
                break;
            }
        }
    }
    sent
}

struct Sending<'a, 'b> {
    folder: &'a Path,
    store: &'a Store,
    /// Objects that are there, or may be.
    sent: Vec<String>,
    watch: &'a mut Watch<'b>,
}

impl Sending<'_, '_> {
    fn send_all(&mut self) -> Result<(), SaveError> {
        must_be_free(self.store)?;
        let mut manifest = manifest_of(self.folder)?;
        self.send_file(MACHINE)?;
        self.send_file(STATE)?;
        for disk in &mut manifest.disks {
            *disk = self.send_disk(disk)?;
        }
        self.send_file(RAM)?;
        if self.folder.join(WORKING_SET).exists() {
            self.send_file(WORKING_SET)?;
        }
        let text = manifest.to_text().into_bytes();
        debug_assert!(text.len() as u64 <= MANIFEST_BYTES_MAX);
        self.send(MANIFEST, text.len() as u64, &mut &text[..])
    }

    fn send_file(&mut self, name: &str) -> Result<(), SaveError> {
        let path = self.folder.join(name);
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, mut file) = opened.map_err(SnapshotError::io(&path, "read"))?;
        self.send(name, bytes, &mut file)
    }

    /// What the manifest has to say of it.
    fn send_disk(&mut self, disk: &DiskPart) -> Result<DiskPart, SaveError> {
        let (name, index_name) = (disk_file(&disk.name), index_file(&disk.name));
        let path = self.folder.join(&name);
        let unreadable = |source| SaveError::Image { path: path.clone(), source };
        let content = Content::open(&path, disk)?;
        let survey = Survey::of(&content, || (self.watch)(0).map_err(SurveyEnd::Stopped)).map_err(|end| match end {
            SurveyEnd::Io(source) => SaveError::Image { path: path.clone(), source },
            SurveyEnd::Stopped(error) => error,
        })?;
        if survey.index.len() as u64 > INDEX_BYTES_MAX {
            return Err(unreadable(io::Error::other("it is too large for an object store")));
        }
        self.send(&name, survey.bytes, &mut survey.reader(&content))?;
        let blake3 = blake3::hash(&survey.index).to_hex().to_string();
        let index = Part { bytes: survey.index.len() as u64, blake3 };
        self.send(&index_name, index.bytes, &mut &survey.index[..])?;
        let stored = Some(StoredDisk { bytes: survey.bytes, index });
        Ok(DiskPart { stored, ..content.part(disk).map_err(unreadable)? })
    }

    fn send(&mut self, name: &str, bytes: u64, source: &mut dyn io::Read) -> Result<(), SaveError> {
        self.sent.push(name.to_owned());
        let mut stopped = Ok(());
        let sent = self.store.upload(name, bytes, source, &mut |bytes| {
            stopped = (self.watch)(bytes);
            stopped.is_ok()
        });
        stopped?;
        sent.map_err(|error| match error {
            UploadError::Store(error) => error.into(),
            UploadError::Read(source) => SnapshotError::io(&self.folder.join(name), "read")(source).into(),
            UploadError::Stopped => SaveError::Abandoned,
        })
    }
}

enum SurveyEnd {
    Io(io::Error),
    Stopped(SaveError),
}

impl From<io::Error> for SurveyEnd {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
