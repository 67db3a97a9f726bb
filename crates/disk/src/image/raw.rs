//! Raw images: the file or block device is the disk.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, open};

use super::checkpoints::Checkpoints;
use super::frozen::{FrozenImage, Guard};
use super::guarded::{GuardedEngine, Witness};
use super::open::{Opened, file_bytes, open_file, reopen, stop_read_ahead};
use super::{Format, ImageError, ImageOptions, access_error, lock};
use crate::arrival::{Arrival, Arrivals};
use crate::block::{BLOCK_BYTES, SECTOR_BYTES};
use crate::buffer::BufferPool;
use crate::engine::Engine;
use crate::engine::file::FileEngine;
use crate::engine::target::Target;
use crate::engine::uring::{self, UringEngine};

#[derive(Debug)]
pub(super) struct RawImage {
    pub target: Arc<Target>,
    bytes: u64,
    optimal_io_bytes: u32,
    path: PathBuf,
    /// Known after the first time it was asked for: a look at the image must make no files.
    supports_discard: OnceLock<bool>,
    /// How data goes through or around the page cache, and why.
    cache: String,
    /// Which engine was made, and why: known after the first.
    engine: OnceLock<String>,
    guard: Guard,
    checkpoints: Checkpoints,
    /// While its bytes are on their way.
    arrival: Option<Arc<Arrival>>,
}

impl RawImage {
    pub(super) fn open(options: &ImageOptions, arrivals: &Arrivals) -> Result<Self, ImageError> {
        let path = &options.path;
        let Opened { file, alignment, cache } =
            open_file(options, Format::Raw).map_err(|error| access_error(path, "open", error))?;
        lock::lock_image(&file, path, options.read_only, options.lock_patience, options.owner)?;
        let arrival =
            arrivals.of(&file, path).map_err(|error| access_error(path, "look for what is missing of", error))?;
        let kind = file.metadata().map_err(|error| access_error(path, "look at", error))?.file_type();
        let is_device = kind.is_block_device();
        let device_sector_bytes = is_device.then(|| queue_limit(&file, "logical_block_size").max(SECTOR_BYTES));
        let target = Target {
            file,
            device_sector_bytes,
            read_only: options.read_only,
            alignment,
            #[cfg(test)]
            tape: None,
        };
        let bytes = disk_bytes(&target).map_err(|error| access_error(path, "measure", error))?;
        if bytes == 0 {
            return Err(ImageError::Empty { path: path.clone() });
        }
        Ok(Self {
            bytes,
            optimal_io_bytes: if is_device { queue_limit(&target.file, "optimal_io_size") as u32 } else { 0 },
            path: path.clone(),
            supports_discard: OnceLock::new(),
            target: Arc::new(target),
            cache,
            engine: OnceLock::new(),
            guard: Guard::default(),
            checkpoints: Checkpoints::default(),
            arrival,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// At least the ledger's block: a guest that writes less makes the keeper forget the block.
    pub(super) fn physical_block_bytes(&self) -> u32 {
        (BLOCK_BYTES as u64).max(self.target.alignment) as u32
    }

    pub(super) fn optimal_io_bytes(&self) -> u32 {
        self.optimal_io_bytes
    }

    pub(super) fn supports_discard(&self) -> bool {
        !self.target.read_only && *self.supports_discard.get_or_init(|| supports_discard(&self.target, &self.path))
    }

    pub(super) fn refresh_bytes(&mut self) -> io::Result<u64> {
        self.bytes = disk_bytes(&self.target)?;
        Ok(self.bytes)
    }

    pub(super) fn engine(&self, pool: Arc<BufferPool>, depth: u32) -> io::Result<Box<dyn Engine>> {
        if self.target.alignment == 1 {
            stop_read_ahead(&self.target.file);
        }
        Ok(self.guard(self.unguarded_engine(pool, depth)?))
    }

    pub(super) fn guard(&self, engine: Box<dyn Engine>) -> Box<dyn Engine> {
        Box::new(GuardedEngine::new(engine, Witness::Changes(self.guard.clone(), self.checkpoints.clone())))
    }

    pub(super) fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    pub(super) fn freeze(&self, target: File) -> io::Result<Arc<FrozenImage>> {
        self.guard.freeze(reopen(&self.target.file)?, target)
    }

    /// Of which the lock is this image's.
    pub(super) fn file(&self) -> io::Result<File> {
        self.target.file.try_clone()
    }

    pub(super) fn open_file(&self) -> &File {
        &self.target.file
    }

    pub(super) fn arrival(&self) -> Option<&Arc<Arrival>> {
        self.arrival.as_ref()
    }

    fn unguarded_engine(&self, pool: Arc<BufferPool>, depth: u32) -> io::Result<Box<dyn Engine>> {
        match UringEngine::new(self.target.clone(), pool.clone(), depth) {
            Ok(engine) => {
                let _ = self.engine.set("io_uring".into());
                Ok(Box::new(engine))
            }
            Err(error) => {
                tracing::info!(%error, "no io_uring, the disk is served by worker threads");
                let _ = self.engine.set(worker_reason(&error));
                FileEngine::start(self.target.clone(), pool)
            }
        }
    }

    pub(super) fn describe(&self) -> String {
        let engine = self.engine.get().cloned().unwrap_or_else(|| match uring::check_available() {
            Ok(()) => "io_uring".into(),
            Err(error) => worker_reason(&error),
        });
        format!("raw, {engine}, {}", self.cache)
    }
}

fn worker_reason(error: &io::Error) -> String {
    format!("worker threads (io_uring is not available: {error})")
}

/// A disk consists of whole sectors: as with QEMU, a last partial sector counts and reads as zeroes past the file's end.
/// With O_DIRECT, a file that was resized to an odd length ends at its last whole unit.
fn disk_bytes(target: &Target) -> io::Result<u64> {
    let bytes = file_bytes(&target.file)?;
    Ok(match target.alignment {
        1 => bytes.next_multiple_of(SECTOR_BYTES),
        alignment => bytes - bytes % alignment,
    })
}

fn supports_discard(target: &Target, path: &Path) -> bool {
    if target.device_sector_bytes.is_some() {
        return queue_limit(&target.file, "discard_max_bytes") > 0;
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Some(beside) = nameless_beside(path) {
        return fallocate(&beside, mode, 0, BLOCK_BYTES as u64).is_ok();
    }
    // Punching behind the end changes nothing of what the image holds.
    let end = file_bytes(&target.file).unwrap_or(0).next_multiple_of(BLOCK_BYTES as u64);
    fallocate(&target.file, mode, end, BLOCK_BYTES as u64).is_ok()
}

/// A file of the same file system, to try things on: whatever is done to the image itself sets its times, by which is known
/// whether somebody wrote to it. None where no file can be made.
fn nameless_beside(path: &Path) -> Option<OwnedFd> {
    let path = path.canonicalize().ok()?;
    open(path.parent()?, OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR).ok()
}

/// A limit of a block device's queue; 0 if it has none or does not tell.
fn queue_limit(file: &File, name: &str) -> u64 {
    let Ok(metadata) = file.metadata() else { return 0 };
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has no queue of its own, its disk (the parent folder) has.
    let read = |place: &Path| fs::read_to_string(place.join("queue").join(name)).ok();
    read(&device).or_else(|| read(&device.join(".."))).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
