//! Snapshot: a machine on disk, from which any number of machines can be restored.
//!
//! ```text
//! folder/
//!   machine.toml   its configuration, with absolute paths
//!   disk-NAME      each disk as it was at that moment; the manifest has its length and modification time
//!   state          its device state, as QEMU writes it
//!   ram            its memory (`pages`)
//!   manifest       lists the files above with sizes and checksums; comes last
//!   working-set    pages that the guest used before the save, and restored guests first (`pages`); may come later, or never
//! ```
//! A file that is cut off, altered, missing or of another moment is refused by name before a guest runs from it; a
//! chunk of memory is refused when it is read. The manifest ties each file to the others: by checksums, by the seal of
//! the memory, and for a disk by its length and time. The working set comes and goes by itself, and carries the seal of
//! its memory. Only disks are not checked byte by byte, except for blocks that hold pages of memory: reading them whole
//! would take longer than all the rest.
//!
//! A snapshot may also be in an object store (`place`): whoever restores it fetches what is needed.

mod arriving_disk;
pub mod blocks;
pub mod dedup;
mod disk;
mod faults;
mod manifest;
pub mod outgoing;
pub mod pages;
mod place;
pub mod save;
pub mod scan;
pub(crate) mod seal;
pub mod state;
mod stored_disk;
mod trace;
pub mod upload;
mod working_set;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

pub use arriving_disk::ArrivingDisk;
use blocks::DiskBlocks;
use hearth_disk::arrival::{Arrival, Arrivals};
use hearth_disk::image::ImageError;
use hearth_store::StoreError;

pub use disk::{backing, backing_image, can_share, share_image};
pub use manifest::{DiskPart, Manifest, Modified, Part, RamPart, SNAPSHOT_VERSION, StoredDisk};
use pages::{PageReader, PagesExpected, Sealed};
pub use place::Far;
use place::Place;
pub use stored_disk::disk_objects;
pub use working_set::{AGE_END, AgedPage, Source, aged_pages};

const PAGE: usize = hearth_memory::PAGE_BYTES as usize;
const MANIFEST: &str = "manifest";
const MACHINE: &str = "machine.toml";
const STATE: &str = "state";
const RAM: &str = "ram";
const WORKING_SET: &str = "working-set";
/// Maximum size of device state. It has some 300 KiB, and 17 MiB with a graphics card.
pub(crate) const STATE_BYTES_MAX: u64 = 1 << 30;
const MACHINE_BYTES_MAX: u64 = 1 << 20;
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Why a snapshot could not be made or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum SnapshotError {
    #[error("{path}: cannot be {what}")]
    Io { path: PathBuf, what: &'static str, source: io::Error },
    #[error("{path}: exists already; choose another folder")]
    Exists { path: PathBuf },
    #[error("{path}: there is no such folder")]
    Missing { path: PathBuf },
    #[error(
        "{path}: is not a snapshot, or an unfinished one: it has no manifest; `hearth save NAME -o FOLDER` makes one"
    )]
    NoManifest { path: PathBuf },
    #[error(
        "{path}: has version {found}, but this Hearth knows only 1 to {SNAPSHOT_VERSION}; use the one that wrote it"
    )]
    Version { path: PathBuf, found: u32 },
    #[error(
        "{path}: is a file of a snapshot folder that was copied here; copy the whole folder to a host and restore it from there, or \
         `hearth save` to the store"
    )]
    CopiedFolder { path: PathBuf },
    #[error("{path}: is damaged: {what}")]
    Damaged { path: PathBuf, what: String },
    #[error("{path}: belongs to another snapshot; remove it, and `hearth rehearse` writes a new one")]
    OtherWorkingSet { path: PathBuf },
    #[error(
        "{path}: was written by an earlier Hearth and does not name its snapshot; `hearth rehearse` writes a new one"
    )]
    UnsealedWorkingSet { path: PathBuf },
    #[error("{path}: was replaced by another snapshot meanwhile; the pages that the guest used first are not recorded")]
    Replaced { path: PathBuf },
    #[error(
        "{path}: is another file than the one that was saved, or was written to: it was changed at {found}, and was saved at {saved}; \
         put the saved one back, or, if this is a copy of it that lost its time, run `touch -d {saved} {path}`"
    )]
    OtherDisk { path: PathBuf, found: Modified, saved: Modified },
    #[error("{path}: is not a regular file; a disk of a snapshot must be one, and not a link to one")]
    NoFile { path: PathBuf },
    #[error("{path}: pages {first} to {last} of the guest's memory are damaged: {what}")]
    DamagedPages { path: PathBuf, first: u32, last: u32, what: String },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("pages {first} to {last} of the guest's memory cannot be fetched now")]
    AwayPages { first: u32, last: u32, source: StoreError },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("disk {disk}: {path}: {what}")]
    Disk { disk: String, path: PathBuf, what: String },
}

impl SnapshotError {
    pub(crate) fn io(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), what, source }
    }

    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), what: what.into() }
    }

    /// Whether a store does not answer; then nothing is wrong with the snapshot.
    pub(crate) fn is_away(&self) -> bool {
        matches!(self, Self::Store(_) | Self::AwayPages { .. })
    }
}

/// A snapshot that is being made. If it is dropped before `finish`, it is removed again.
#[derive(Debug)]
pub struct Draft {
    folder: PathBuf,
    files: Vec<PathBuf>,
    finished: bool,
}

impl Draft {
    /// Makes a new folder that only its owner can read, because the guest's secrets are in it.
    pub fn create(folder: &Path) -> Result<Self, SnapshotError> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) => Ok(Self { folder: folder.to_owned(), files: Vec::new(), finished: false }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(SnapshotError::Exists { path: folder.to_owned() })
            }
            Err(source) => Err(SnapshotError::Io { path: folder.to_owned(), what: "made", source }),
        }
    }

    /// Folder of the snapshot.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Path of a file that is about to be made here, and is removed with the draft.
    fn claim(&mut self, name: &str) -> PathBuf {
        let path = self.folder.join(name);
        self.files.push(path.clone());
        path
    }

    /// Path of the memory's file.
    pub fn ram_path(&mut self) -> PathBuf {
        self.claim(RAM)
    }

    /// Path of memory that is still to be compressed.
    pub fn plain_ram_path(&mut self) -> PathBuf {
        self.claim("ram.plain")
    }

    /// Removes the file at `plain_ram_path`.
    pub fn remove_plain_ram(&mut self) -> Result<(), SnapshotError> {
        let path = self.plain_ram_path();
        fs::remove_file(&path).map_err(SnapshotError::io(&path, "removed"))
    }

    /// Makes the empty file of a disk.
    pub fn make_disk(&mut self, disk: &str) -> Result<File, SnapshotError> {
        let path = self.claim(&manifest::disk_file(disk));
        create_file(&path).map_err(SnapshotError::io(&path, "made"))
    }

    /// Modification time of a disk that is complete.
    pub fn disk_modified(&self, disk: &str) -> Result<Modified, SnapshotError> {
        let path = self.folder.join(manifest::disk_file(disk));
        Ok(Modified::of(&fs::metadata(&path).map_err(SnapshotError::io(&path, "read"))?))
    }

    /// Writes the machine's configuration.
    pub fn write_machine(&mut self, text: &str) -> Result<Part, SnapshotError> {
        let path = self.claim(MACHINE);
        write_part(&path, text.as_bytes())
    }

    /// Writes the device state.
    pub fn write_state(&mut self, state: &[u8]) -> Result<Part, SnapshotError> {
        let path = self.claim(STATE);
        write_part(&path, state)
    }

    /// Writes the pages that the guest used before the save, best first. The memory must have been written before.
    /// Returns how many of these pages are not zeroes.
    pub fn write_working_set(&mut self, used: &[u32], disks: &[DiskPart]) -> Result<u64, SnapshotError> {
        let local = LocalDisks::complete(&self.folder);
        let ram = open_ram(&Place::Folder(self.folder.clone()), disks, Some(&local), &PagesExpected::default())?;
        let scanned = used.iter().map(|&page| AgedPage { page, age: 0, source: Source::Scan });
        Ok(working_set::write(&self.claim(WORKING_SET), scanned, &ram)?.pages)
    }

    /// Writes the manifest: from here on the folder is a snapshot.
    pub fn finish(mut self, manifest: &Manifest) -> Result<(), SnapshotError> {
        let (path, temporary) = (self.claim(MANIFEST), self.claim("manifest.new"));
        write_part(&temporary, manifest.to_text().as_bytes())?;
        let renamed = faults::may_write().and_then(|()| fs::rename(&temporary, &path));
        renamed.map_err(SnapshotError::io(&path, "written"))?;
        sync_folder(&self.folder)?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // The manifest goes first, if it exists: without it there is no snapshot.
        for file in self.files.iter().rev() {
            match fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %file.display(), %error, "left behind: cannot be removed");
                }
                _ => {}
            }
        }
        if let Err(error) = fs::remove_dir(&self.folder) {
            tracing::warn!(path = %self.folder.display(), %error, "left behind: cannot be removed");
        }
    }
}

/// Where the disks of a snapshot are on this host, and which of them are still arriving.
#[derive(Clone, Debug)]
pub struct LocalDisks<'a> {
    /// Folder with the disks' files.
    pub folder: &'a Path,
    /// The disks that are still arriving.
    pub arrivals: Arrivals,
}

impl<'a> LocalDisks<'a> {
    /// Disks that have all arrived.
    pub fn complete(folder: &'a Path) -> Self {
        Self { folder, arrivals: Arrivals::default() }
    }
}

/// A snapshot whose files exist and belong together. Its memory is checked chunk by chunk, as it is read.
#[derive(Debug)]
pub struct Snapshot {
    place: Place,
    /// Description of the snapshot.
    pub manifest: Manifest,
    /// The machine's configuration, in TOML.
    pub machine: String,
    /// Device state, as QEMU wrote it.
    pub state: Vec<u8>,
    /// The guest's memory.
    pub ram: PageReader,
    /// A working set that cannot be read does not prevent a restore.
    pub working_set: Result<Option<PageReader>, SnapshotError>,
}

impl Snapshot {
    /// Opens a snapshot in a folder.
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        Self::open_at(Place::Folder(folder.to_owned()), Some(&LocalDisks::complete(folder)))
    }

    /// Opens a snapshot in an object store. `disks` tells where `expect_disk` has put its disks, if it has. They are
    /// needed to read a snapshot whose pages are partly on its disks.
    pub fn open_far(far: Far, disks: Option<&LocalDisks<'_>>) -> Result<Self, SnapshotError> {
        Self::open_at(Place::Far(far), disks)
    }

    fn open_at(place: Place, disks: Option<&LocalDisks<'_>>) -> Result<Self, SnapshotError> {
        let manifest = read_manifest(&place)?;
        let machine = place.part(MACHINE, &manifest.machine_file, MACHINE_BYTES_MAX)?;
        let machine = String::from_utf8(machine);
        let machine = machine.map_err(|_| SnapshotError::damaged(&place.path(MACHINE), "it is no text"))?;
        let state = place.part(STATE, &manifest.state, STATE_BYTES_MAX)?;
        for disk in &manifest.disks {
            place.check_disk(disk)?;
        }
        let expected = PagesExpected { bytes: Some(manifest.ram.bytes), ram_pages: Some(manifest.ram_pages()) };
        let ram = open_ram(&place, &manifest.disks, disks, &expected)?;
        let sealed = Sealed { bytes: manifest.ram.bytes, pages: manifest.ram.pages, seal: manifest.ram.seal.clone() };
        if ram.sealed() != &sealed {
            return Err(SnapshotError::damaged(&place.path(RAM), "it is not the one that the manifest names"));
        }
        let working_set = Self::open_working_set(&place, &ram);
        Ok(Self { place, manifest, machine, state, ram, working_set })
    }

    /// Its pages go into the guest unchanged, so they must be of the same moment as this memory.
    fn open_working_set(place: &Place, ram: &PageReader) -> Result<Option<PageReader>, SnapshotError> {
        let expected = PagesExpected { bytes: None, ram_pages: Some(ram.ram_pages()) };
        let Some(found) = place.pages(WORKING_SET, &expected)? else { return Ok(None) };
        let path = || place.path(WORKING_SET);
        match found.belongs_to() {
            Some(seal) if seal == ram.sealed().seal => Ok(Some(found)),
            Some(_) => Err(SnapshotError::OtherWorkingSet { path: path() }),
            None => Err(SnapshotError::UnsealedWorkingSet { path: path() }),
        }
    }

    /// Fails unless this snapshot is still in its location.
    fn must_be_there(&self) -> Result<(), SnapshotError> {
        match read_manifest(&self.place) {
            Ok(manifest) if manifest.ram.seal == self.manifest.ram.seal => Ok(()),
            Err(error) if error.is_away() => Err(error),
            _ => Err(SnapshotError::Replaced { path: self.place.name() }),
        }
    }

    /// Seal of the memory, which no other snapshot has.
    pub fn seal(&self) -> &str {
        &self.manifest.ram.seal
    }

    /// Path or address of one of its files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path(name)
    }

    /// Whether it is in an object store.
    pub fn is_far(&self) -> bool {
        self.place.far().is_some()
    }

    /// Path or address of one of its disks.
    pub fn disk_path(&self, disk: &str) -> PathBuf {
        self.place.path(&manifest::disk_file(disk))
    }

    /// Makes a disk arrive from a store in this folder, and returns its path there. A disk of a snapshot in a folder
    /// stays where it is. With `whole` the whole disk is fetched now, and `progress` is called with the bytes that are
    /// present and the total. Otherwise only what images over it need is fetched.
    pub fn expect_disk(
        &self,
        disk: &DiskPart,
        folder: &Path,
        whole: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf, SnapshotError> {
        let Some(far) = self.place.far() else { return Ok(self.disk_path(&disk.name)) };
        let path = folder.join(manifest::disk_file(&disk.name));
        stored_disk::expect(far, disk, &path)?;
        if let Some(arrival) = Arrival::open(&path).map_err(SnapshotError::io(&path, "read"))? {
            let arriving = ArrivingDisk::new(Arc::new(arrival), far.clone());
            match whole {
                true => arriving.bring_all(progress)?,
                false => arriving.bring_tables(disk)?,
            }
        }
        Ok(path)
    }

    /// When the working set was recorded, and a string that changes whenever it is; `None` if there is none.
    pub fn working_set_version(&self) -> Result<Option<(SystemTime, String)>, SnapshotError> {
        self.place.version(WORKING_SET)
    }
}

fn read_manifest(place: &Place) -> Result<Manifest, SnapshotError> {
    let path = place.path(MANIFEST);
    let text = place.read(MANIFEST, MANIFEST_BYTES_MAX)?;
    let text = text.ok_or_else(|| match place {
        Place::Folder(folder) if !folder.exists() => SnapshotError::Missing { path: folder.clone() },
        place => SnapshotError::NoManifest { path: place.name() },
    })?;
    let text = String::from_utf8(text).map_err(|_| SnapshotError::damaged(&path, "it is no text"))?;
    Manifest::parse(&text, &path)
}

/// Opens the file of memory with the disks in `disks`, if any, that hold pages of it.
fn open_ram(
    place: &Place,
    parts: &[DiskPart],
    disks: Option<&LocalDisks<'_>>,
    expected: &PagesExpected,
) -> Result<PageReader, SnapshotError> {
    let missing = || SnapshotError::Io { path: place.path(RAM), what: "read", source: io::ErrorKind::NotFound.into() };
    let ram = place.pages(RAM, expected)?.ok_or_else(missing)?;
    match disks.filter(|_| ram.needs_disks()) {
        None => Ok(ram),
        Some(local) => Ok(ram.with_disks(Arc::new(DiskBlocks::open(local, parts)?))),
    }
}

pub(crate) fn sync_folder(folder: &Path) -> Result<(), SnapshotError> {
    let synced = faults::may_write().and_then(|()| File::open(folder)?.sync_all());
    synced.map_err(SnapshotError::io(folder, "written"))
}

/// Makes a file that only its owner can read.
fn create_file(path: &Path) -> io::Result<File> {
    faults::may_write()?;
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}

pub(crate) fn write_part(path: &Path, bytes: &[u8]) -> Result<Part, SnapshotError> {
    let written = create_file(path).and_then(|mut file| {
        faults::may_write()?;
        file.write_all(bytes)?;
        faults::may_write()?;
        file.sync_all()
    });
    written.map_err(SnapshotError::io(path, "written"))?;
    Ok(Part { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() })
}

pub(crate) fn read_part(path: &Path, part: &Part, bytes_max: u64) -> Result<Vec<u8>, SnapshotError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(SnapshotError::io(path, "read"))?;
    file.take(bytes_max).read_to_end(&mut bytes).map_err(SnapshotError::io(path, "read"))?;
    check_part(path, part, bytes)
}

fn check_part(path: &Path, part: &Part, bytes: Vec<u8>) -> Result<Vec<u8>, SnapshotError> {
    if bytes.len() as u64 != part.bytes {
        let what = format!("it has {} bytes, and had {} when it was saved", bytes.len(), part.bytes);
        return Err(SnapshotError::damaged(path, what));
    }
    if blake3::hash(&bytes).to_hex().as_str() != part.blake3 {
        return Err(SnapshotError::damaged(path, "its checksum is wrong: it was altered, or is of another moment"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
