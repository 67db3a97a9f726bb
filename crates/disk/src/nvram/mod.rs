//! NVRAM: a disk that is a file in host memory, for journals and logs whose every write is waited for.
//!
//! memory file exists -> it is the content : mirror exists -> read into memory : zeroes
//! a write -> memory, in line -> its blocks are dirty -> mirror: at the next flush (sync), within a second (async), never
//!
//! The memory file outlives guests, QEMUs and keepers; the mirror outlives the host's memory. A keeper that finds a memory file
//! takes all of it for dirty, because it cannot know what its predecessor had mirrored.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use serde::Serialize;

use crate::buffer::BufferPool;
use crate::engine::Engine;
use crate::image::{Format, Image, ImageError, ImageOptions, LockOwner, inheritable_lock, lock_image};
use crate::server::{Backing, BackingError};

mod engine;
mod mirror;
pub mod pmem;

use engine::NvramEngine;
use mirror::Mirror;

/// A killed keeper may need a moment to end.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// The same for its mirror, where nothing is in flight that ends after the process.
const MIRROR_PATIENCE: Duration = Duration::from_secs(1);
/// Prefix of NVRAM's memory files.
pub const FILE_PREFIX: &str = "nvram-";

/// When what is written also reaches the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MirrorPolicy {
    /// Within a second or so; a flush does not wait for it.
    Async,
    /// A flush returns when all that was written before is durable in the mirror.
    Sync,
}

impl MirrorPolicy {
    /// As spelled in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Async => "async",
            Self::Sync => "sync",
        }
    }
}

/// An NVRAM device as it is configured.
#[derive(Clone, Debug)]
pub struct NvramOptions {
    /// Name of the device.
    pub name: String,
    /// The folder in host memory.
    pub folder: PathBuf,
    /// Size of the device.
    pub bytes: u64,
    /// File of its mirror, and when that is written. `None` if it has no mirror.
    pub mirror: Option<(PathBuf, MirrorPolicy)>,
    /// The machine that locks the mirror. Without one, its next keeper does not get past a lock that QEMU has inherited.
    pub owner: Option<LockOwner>,
}

impl NvramOptions {
    /// The file in host memory that holds its content.
    pub fn memory_file(&self) -> PathBuf {
        memory_file(&self.folder, &self.name)
    }

    /// Checks what can be checked without making any file: sizes, and the kind of the mirror's file.
    pub fn check(&self) -> Result<(), NvramError> {
        let memory = self.memory_file();
        if let Some(has) = size_of(&memory).filter(|&has| has != self.bytes) {
            return Err(other_size(self, &memory, has));
        }
        let Some((mirror, _)) = &self.mirror else { return Ok(()) };
        let has = match OpenOptions::new().read(true).write(true).open(mirror).and_then(|file| file.metadata()) {
            Ok(found) if !found.is_file() => return Err(no_file(self, mirror)),
            Ok(found) => found.len(),
            // It will be made.
            Err(error) if error.kind() == io::ErrorKind::NotFound && mirror.parent().is_some_and(Path::is_dir) => 0,
            Err(error) => return Err(failed(self, mirror, "open its mirror", error)),
        };
        if has == 0 || has == self.bytes { Ok(()) } else { Err(other_size(self, mirror, has)) }
    }
}

/// The file in host memory that holds the content of the device with this name.
pub fn memory_file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{FILE_PREFIX}{name}"))
}

/// Host memory that the device with this name takes now, whether or not it is being served.
pub fn resident_bytes(folder: &Path, name: &str) -> u64 {
    fs::metadata(memory_file(folder, name)).map_or(0, |metadata| metadata.blocks() * 512)
}

/// Why an NVRAM device cannot be used.
#[allow(missing_docs, reason = "each variant's message describes it")]
#[derive(Debug, thiserror::Error)]
pub enum NvramError {
    #[error("nvram {name}: cannot {action} {path}")]
    File { name: String, path: PathBuf, action: &'static str, source: io::Error },
    #[error("nvram {name}: {path} has {has} bytes instead of {wants}; set its size to that, or move the file away")]
    OtherSize { name: String, path: PathBuf, has: u64, wants: u64 },
    #[error("nvram {name}: {path} is not a regular file; a mirror must be one")]
    NoFile { name: String, path: PathBuf },
    #[error("nvram {name}: another process mirrors to {path}; give each device a mirror of its own")]
    MirrorInUse { name: String, path: PathBuf },
    #[error(
        "nvram {name}: {path} may be newer than its mirror; start and stop the machine once with device = \"disk\", or move the file \
         away"
    )]
    Unmirrored { name: String, path: PathBuf },
    #[error("nvram {name}")]
    Image { name: String, source: ImageError },
    #[error("nvram {name}")]
    Backing { name: String, source: BackingError },
}

/// Where a device's content came from when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From its memory file, which an earlier keeper left.
    Memory,
    /// From its mirror.
    Mirror,
    /// It is new.
    Zeroes,
}

/// One device: its memory, and its mirror if there is one.
pub struct Nvram {
    path: PathBuf,
    /// Where its content came from.
    pub origin: Origin,
    mirror: Option<Arc<Mirror>>,
    owner: Option<LockOwner>,
}

impl Nvram {
    /// Opens a device, with what a disk server serves it from. When that server ends, it writes what is not mirrored yet.
    pub fn open(options: &NvramOptions) -> Result<(Self, Backing), NvramError> {
        let path = options.memory_file();
        let mirror = options.mirror.as_ref().map(|(path, policy)| Ok((open_mirror(options, path)?, path, *policy)));
        let mirror = mirror.transpose()?;
        let origin = memory_or(options, mirror.as_ref().map(|(file, path, _)| (file, path.as_path())))?;
        let memory = OpenOptions::new().read(true).write(true).open(&path);
        let memory = Arc::new(memory.map_err(|source| failed(options, &path, "open", source))?);
        let mirror = mirror.map(|(file, path, policy)| {
            let is_dirty = origin == Origin::Memory;
            Arc::new(Mirror::new(&options.name, policy, Arc::clone(&memory), (file, path), options.bytes, is_dirty))
        });
        let image = ImageOptions {
            path: path.clone(),
            format: Format::Raw,
            read_only: false,
            direct: false,
            lock_patience: LOCK_PATIENCE,
            owner: None,
        };
        let image = Image::open(&image).map_err(|source| NvramError::Image { name: options.name.clone(), source })?;
        let start = |pool: &Arc<BufferPool>| {
            let engine = NvramEngine::start(memory, Arc::clone(pool), mirror.clone())?;
            Ok(Box::new(engine) as Box<dyn Engine>)
        };
        let backing = Backing::over(image, start);
        let backing = backing.map_err(|source| NvramError::Backing { name: options.name.clone(), source })?;
        Ok((Self { path, origin, mirror, owner: options.owner }, backing))
    }

    /// Bytes that the mirror does not have yet. `None` without a mirror.
    pub fn dirty_bytes(&self) -> Option<u64> {
        self.mirror.as_ref().map(|mirror| mirror.dirty_bytes())
    }

    /// A lock on the mirror for the owner's QEMU to inherit, so that it outlives this keeper. `None` without mirror or owner.
    pub fn inheritable_lock(&self) -> io::Result<Option<OwnedFd>> {
        let Some((mirror, owner)) = self.mirror.as_ref().zip(self.owner) else { return Ok(None) };
        inheritable_lock(mirror.file(), false, owner).map(Some)
    }

    /// Why the last write to the mirror failed, if it did.
    pub fn problem(&self) -> Option<String> {
        self.mirror.as_ref()?.problem()
    }

    /// Gives the memory back if the mirror has all of it. Call it when the machine has stopped and its server is gone. Returns
    /// whether it was given back: without a mirror the memory is the only copy, and stays.
    pub fn give_back(self) -> io::Result<bool> {
        if self.dirty_bytes() != Some(0) {
            return Ok(false);
        }
        fs::remove_file(&self.path).map(|()| true)
    }
}

fn failed(options: &NvramOptions, path: &Path, action: &'static str, source: io::Error) -> NvramError {
    NvramError::File { name: options.name.clone(), path: path.to_owned(), action, source }
}

fn other_size(options: &NvramOptions, path: &Path, has: u64) -> NvramError {
    NvramError::OtherSize { name: options.name.clone(), path: path.to_owned(), has, wants: options.bytes }
}

fn no_file(options: &NvramOptions, path: &Path) -> NvramError {
    NvramError::NoFile { name: options.name.clone(), path: path.to_owned() }
}

fn size_of(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.len())
}

/// The mirror's file; a new one has no length yet.
fn open_mirror(options: &NvramOptions, path: &Path) -> Result<File, NvramError> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(|source| failed(options, path, "open its mirror", source))?;
    // As an image is: a guest that writes to the mirror itself (persistent memory) outlives its keeper.
    match lock_image(&file, path, false, MIRROR_PATIENCE, options.owner) {
        Ok(()) => {}
        Err(ImageError::InUse { .. }) => {
            return Err(NvramError::MirrorInUse { name: options.name.clone(), path: path.to_owned() });
        }
        Err(source) => return Err(NvramError::Image { name: options.name.clone(), source }),
    }
    let found = file.metadata().map_err(|source| failed(options, path, "look at its mirror", source))?;
    let has = found.len();
    if !found.is_file() {
        return Err(no_file(options, path));
    }
    if has == 0 {
        // Its name must last as well.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let lasting = File::open(folder).and_then(|folder| folder.sync_all());
        lasting.map_err(|source| failed(options, folder, "write the folder of its mirror,", source))?;
    }
    if has != 0 && has != options.bytes {
        return Err(other_size(options, path, has));
    }
    Ok(file)
}

/// The memory file that is there, or one that is made from what the mirror holds.
fn memory_or(options: &NvramOptions, mirror: Option<(&File, &Path)>) -> Result<Origin, NvramError> {
    let path = options.memory_file();
    match size_of(&path) {
        Some(has) if has == options.bytes => Ok(Origin::Memory),
        Some(has) => Err(other_size(options, &path, has)),
        None => fill(options, &path, mirror),
    }
}

/// Makes the memory file, whole before it has its name.
fn fill(options: &NvramOptions, path: &Path, mirror: Option<(&File, &Path)>) -> Result<Origin, NvramError> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = Path::new(&fresh);
    let filled = fill_under(fresh, options, mirror).and_then(|origin| {
        fs::rename(fresh, path).map(|()| origin).map_err(|source| failed(options, path, "name", source))
    });
    filled.inspect_err(|_| {
        // It would keep its memory.
        let _ = fs::remove_file(fresh);
    })
}

/// Fills a new memory file. All of its memory is allocated now, so that no write finds none.
fn fill_under(fresh: &Path, options: &NvramOptions, mirror: Option<(&File, &Path)>) -> Result<Origin, NvramError> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(fresh);
    let file = file.map_err(|source| failed(options, fresh, "make", source))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, options.bytes)
        .map_err(|error| failed(options, fresh, "take the memory of", error.into()))?;
    let mut origin = Origin::Zeroes;
    if let Some((mirror, mirror_path)) = mirror {
        let unreadable = |source| failed(options, mirror_path, "read its mirror", source);
        if mirror.metadata().map_err(unreadable)?.len() == options.bytes {
            mirror::copy(mirror, &file, 0..options.bytes).map_err(unreadable)?;
            origin = Origin::Mirror;
        } else {
            let unusable = |source| failed(options, mirror_path, "make its mirror", source);
            mirror.set_len(options.bytes).and_then(|()| mirror.sync_all()).map_err(unusable)?;
        }
    }
    Ok(origin)
}

#[cfg(test)]
mod tests;
