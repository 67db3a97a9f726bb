//! Snapshot: a machine on disk, from which any number of machines can go on.
//!
//! ```text
//! folder/
//!   machine.toml   its configuration, with absolute paths
//!   disk-NAME      each disk as it was at that moment
//!   state          its devices, as QEMU writes them
//!   ram            its memory (`pages`)
//!   manifest       what belongs together, with sizes and checksums; comes last
//!   working-set    pages that the guest used before it was saved, and restored guests first (`pages`); may come later, or never
//! ```
//! Whatever is cut off, altered or missing is refused by name before a guest runs from it; a chunk of memory when it is
//! read. Disks are the one thing that is not checked byte by byte, but for blocks that hold pages of memory: to read them whole
//! would take longer than all the rest.

pub mod blocks;
pub mod dedup;
mod disk;
mod manifest;
pub mod pages;
pub mod save;
pub mod scan;
pub(crate) mod seal;
pub mod state;
mod working_set;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blocks::DiskBlocks;
use hearth_disk::image::ImageError;
use rustix::fs::{FlockOperation, flock};

pub use disk::{can_share, share_image};
pub use manifest::{DiskPart, Manifest, Part, RamPart, SNAPSHOT_VERSION};
use pages::{PageReader, Sealed};
pub use working_set::{AGE_END, AgedPage, Source, aged_pages};

const PAGE: usize = hearth_memory::PAGE_BYTES as usize;
const MANIFEST: &str = "manifest";
const MACHINE: &str = "machine.toml";
const STATE: &str = "state";
const RAM: &str = "ram";
const WORKING_SET: &str = "working-set";
/// Device state is some 300 KiB, and 17 MiB with a graphics card.
pub(crate) const STATE_BYTES_MAX: u64 = 1 << 30;
const MACHINE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("{path}: cannot be {what}")]
    Io { path: PathBuf, what: &'static str, source: io::Error },
    #[error("{path}: exists already; choose another folder")]
    Exists { path: PathBuf },
    #[error("{path}: is no snapshot, or one that was not finished: it has no manifest")]
    NoManifest { path: PathBuf },
    #[error("{path}: version {found}, this Hearth knows 1 to {SNAPSHOT_VERSION}; use the one that wrote it")]
    Version { path: PathBuf, found: u32 },
    #[error("{path}: is damaged: {what}")]
    Damaged { path: PathBuf, what: String },
    #[error("{path}: pages {first} to {last} of the guest's memory are damaged: {what}")]
    DamagedPages { path: PathBuf, first: u32, last: u32, what: String },
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
}

/// A snapshot that is being made. Dropped before `finish`, it is removed again.
#[derive(Debug)]
pub struct Draft {
    folder: PathBuf,
    files: Vec<PathBuf>,
    finished: bool,
}

impl Draft {
    /// A new folder that only its owner can read: the guest's secrets are in it.
    pub fn create(folder: &Path) -> Result<Self, SnapshotError> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) => Ok(Self { folder: folder.to_owned(), files: Vec::new(), finished: false }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(SnapshotError::Exists { path: folder.to_owned() })
            }
            Err(source) => Err(SnapshotError::Io { path: folder.to_owned(), what: "made", source }),
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of a file that is about to be made here.
    fn claim(&mut self, name: &str) -> PathBuf {
        let path = self.folder.join(name);
        self.files.push(path.clone());
        path
    }

    pub fn ram_path(&mut self) -> PathBuf {
        self.claim(RAM)
    }

    /// Of memory that is still to be compressed.
    pub fn plain_ram_path(&mut self) -> PathBuf {
        self.claim("ram.plain")
    }

    pub fn remove_plain_ram(&mut self) -> Result<(), SnapshotError> {
        let path = self.plain_ram_path();
        fs::remove_file(&path).map_err(SnapshotError::io(&path, "removed"))
    }

    pub fn make_disk(&mut self, disk: &str) -> Result<File, SnapshotError> {
        let path = self.claim(&manifest::disk_file(disk));
        create_file(&path).map_err(SnapshotError::io(&path, "made"))
    }

    pub fn write_machine(&mut self, text: &str) -> Result<Part, SnapshotError> {
        let path = self.claim(MACHINE);
        write_part(&path, text.as_bytes())
    }

    pub fn write_state(&mut self, state: &[u8]) -> Result<Part, SnapshotError> {
        let path = self.claim(STATE);
        write_part(&path, state)
    }

    /// What the guest used before it was saved, best first; after its memory. How many pages of that are not zeroes.
    pub fn write_working_set(&mut self, used: &[u32], disks: &[DiskPart]) -> Result<u64, SnapshotError> {
        let ram = open_ram(&self.folder, disks)?;
        let scanned = used.iter().map(|&page| AgedPage { page, age: 0, source: Source::Scan });
        Ok(working_set::write(&self.claim(WORKING_SET), scanned, &ram)?.pages)
    }

    /// From here on it is a snapshot.
    pub fn finish(mut self, manifest: &Manifest) -> Result<(), SnapshotError> {
        let (path, temporary) = (self.claim(MANIFEST), self.claim("manifest.new"));
        write_part(&temporary, manifest.to_text().as_bytes())?;
        fs::rename(&temporary, &path).map_err(SnapshotError::io(&path, "written"))?;
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
        for file in &self.files {
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

/// A snapshot whose parts are there and belong together. Its memory is checked chunk by chunk, as it is read.
#[derive(Debug)]
pub struct Snapshot {
    folder: PathBuf,
    pub manifest: Manifest,
    pub machine: String,
    pub state: Vec<u8>,
    pub ram: PageReader,
    /// One that cannot be read is no reason to do without the snapshot.
    pub working_set: Result<Option<PageReader>, SnapshotError>,
}

impl Snapshot {
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        let path = folder.join(MANIFEST);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(SnapshotError::NoManifest { path: folder.to_owned() });
            }
            text => text.map_err(SnapshotError::io(&path, "read"))?,
        };
        let manifest = Manifest::parse(&text, &path)?;
        let path = folder.join(MACHINE);
        let machine = read_part(&path, &manifest.machine_file, MACHINE_BYTES_MAX)?;
        let machine = String::from_utf8(machine).map_err(|_| SnapshotError::damaged(&path, "it is no text"))?;
        let state = read_part(&folder.join(STATE), &manifest.state, STATE_BYTES_MAX)?;
        for disk in &manifest.disks {
            let path = folder.join(manifest::disk_file(&disk.name));
            let found = fs::metadata(&path).map_err(SnapshotError::io(&path, "found"))?.len();
            if found != disk.bytes {
                let what = format!("it has {found} bytes, and had {} when it was saved", disk.bytes);
                return Err(SnapshotError::damaged(&path, what));
            }
        }
        let path = folder.join(RAM);
        let ram = open_ram(folder, &manifest.disks)?;
        let sealed = Sealed { bytes: manifest.ram.bytes, pages: manifest.ram.pages, seal: manifest.ram.seal.clone() };
        if ram.sealed() != &sealed || ram.ram_pages() != manifest.ram_pages() {
            return Err(SnapshotError::damaged(&path, "it is not the one that the manifest names"));
        }
        let working_set = Self::open_working_set(folder, ram.ram_pages());
        Ok(Self { folder: folder.to_owned(), manifest, machine, state, ram, working_set })
    }

    fn open_working_set(folder: &Path, ram_pages: u64) -> Result<Option<PageReader>, SnapshotError> {
        let path = folder.join(WORKING_SET);
        if !path.exists() {
            return Ok(None);
        }
        let found = PageReader::open(&path)?;
        if found.ram_pages() != ram_pages {
            return Err(SnapshotError::damaged(&path, "it is of another machine; remove it to do without"));
        }
        Ok(Some(found))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn disk_path(&self, disk: &str) -> PathBuf {
        self.folder.join(manifest::disk_file(disk))
    }

    pub fn working_set_path(&self) -> PathBuf {
        self.folder.join(WORKING_SET)
    }

    /// Adds what one more restored guest used first, in order of use, to what was noted before. A page that is not in the
    /// snapshot is one of zeroes, and needs no note. How many are in the set now.
    pub fn add_trace(&self, used: &[u32]) -> Result<u64, SnapshotError> {
        // Two clones may be traced at once.
        let folder = File::open(&self.folder).map_err(SnapshotError::io(&self.folder, "read"))?;
        flock(&folder, FlockOperation::LockExclusive)
            .map_err(|errno| SnapshotError::io(&self.folder, "locked")(errno.into()))?;
        // One that cannot be read is begun anew.
        let before = Self::open_working_set(&self.folder, self.ram.ram_pages()).ok().flatten();
        let merged = working_set::merge(used, before.iter().flat_map(aged_pages));
        let (path, temporary) = (self.working_set_path(), self.folder.join("working-set.new"));
        let sealed = working_set::write(&temporary, merged, &self.ram)?;
        fs::rename(&temporary, &path).map_err(SnapshotError::io(&path, "written"))?;
        folder.sync_all().map_err(SnapshotError::io(&self.folder, "written"))?;
        Ok(sealed.pages)
    }
}

/// The file of memory, with the disks that hold pages of it.
fn open_ram(folder: &Path, disks: &[DiskPart]) -> Result<PageReader, SnapshotError> {
    let ram = PageReader::open(&folder.join(RAM))?;
    if !ram.needs_disks() {
        return Ok(ram);
    }
    Ok(ram.with_disks(Arc::new(DiskBlocks::open(folder, disks)?)))
}

pub(crate) fn sync_folder(folder: &Path) -> Result<(), SnapshotError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(SnapshotError::io(folder, "written"))
}

/// A new file that only its owner can read.
fn create_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}

pub(crate) fn write_part(path: &Path, bytes: &[u8]) -> Result<Part, SnapshotError> {
    let written = create_file(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(SnapshotError::io(path, "written"))?;
    Ok(Part { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() })
}

pub(crate) fn read_part(path: &Path, part: &Part, bytes_max: u64) -> Result<Vec<u8>, SnapshotError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(SnapshotError::io(path, "read"))?;
    file.take(bytes_max).read_to_end(&mut bytes).map_err(SnapshotError::io(path, "read"))?;
    if bytes.len() as u64 != part.bytes {
        let what = format!("it has {} bytes, and had {} when it was saved", bytes.len(), part.bytes);
        return Err(SnapshotError::damaged(path, what));
    }
    if blake3::hash(&bytes).to_hex().as_str() != part.blake3 {
        return Err(SnapshotError::damaged(path, "its checksum is wrong"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
