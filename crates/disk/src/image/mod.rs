//! Disk images: opened, checked and locked, and the engine that fits.
//!
//! path -> kind of file -> format -> lock (as QEMU locks) -> size, alignment -> engine: io_uring, else worker threads
//!
//! A missing feature (O_DIRECT on tmpfs, io_uring in a container) is replaced by the next best and named by `describe`;
//! it is never an error by itself.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::arrival::Arrivals;
use crate::block::BLOCK_BYTES;
use crate::buffer::BufferPool;
use crate::engine::Engine;

mod checkpoints;
mod device_note;
mod frozen;
mod guarded;
mod header;
mod lock;
mod note;
mod open;
mod overlay;
mod qcow2;
mod raw;
mod reader;
mod tables;
#[cfg(test)]
pub(crate) mod tape;
#[cfg(test)]
mod tests;

pub use checkpoints::{CHECKPOINTS_MAX, Checkpoints};
pub use device_note::{DeviceNote, Unnotable};
pub use frozen::FrozenImage;
pub(crate) use guarded::GuardedFile;
pub use lock::{LockOwner, lock_alone};
pub(crate) use lock::{inheritable_lock, lock_image};
pub use note::{ImageFile, ImageNote};
pub use overlay::{
    OverlayError, create_overlay, create_overlay_over_arriving, create_overlay_with_bitmap, is_own_overlay,
};
use qcow2::Qcow2Image;
pub use qcow2::{add_backing_images, arriving_images, backing_images};
use raw::RawImage;
pub use reader::{ImageReader, next_data};
pub use tables::Committer;
pub(crate) use tables::Tables;

/// How the bytes of the virtual disk lie in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Raw, unless the file says that it is qcow2: then opening fails and asks for the format to be named. A guest can
    /// write a qcow2 header into its raw disk, and with it the name of any file of the host.
    #[default]
    Auto,
    /// The bytes of the disk, one after the other.
    Raw,
    /// QEMU's qcow2.
    Qcow2,
}

/// Which image to open, and how.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// The image's file, or block device.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Open it for reading only.
    pub read_only: bool,
    /// Around the host's page cache where the file system can; `describe` says if not.
    pub direct: bool,
    /// How long to wait for another holder of the image to let go (a killed keeper's last writes).
    pub lock_patience: Duration,
    /// The machine whose QEMU inherits the lock. `None` if no QEMU does.
    pub owner: Option<LockOwner>,
}

/// Why an image cannot be used.
#[allow(missing_docs, reason = "each variant's message describes it")]
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("disk image {path} does not exist")]
    Missing { path: PathBuf },
    #[error("cannot {action} disk image {path}")]
    Access { path: PathBuf, action: &'static str, source: io::Error },
    #[error("disk image {path} is {kind}; it must be a regular file or a block device")]
    WrongKind { path: PathBuf, kind: &'static str },
    #[error("disk image {path} is empty; make one with qemu-img create")]
    Empty { path: PathBuf },
    #[error(
        "disk image {path} begins with a qcow2 header; set format = \"qcow2\" if it is a qcow2 image, or format = \"raw\" if a guest wrote that header to its raw disk"
    )]
    FormatNotNamed { path: PathBuf },
    #[error("disk image {path} is in use by {holder}")]
    InUse { path: PathBuf, holder: String },
    #[error("cannot lock disk image {path}; its file system must support open file description locks")]
    Lock { path: PathBuf, source: io::Error },
    #[error("{path} is not a qcow2 image; set format = \"raw\" if it is a raw image")]
    NotQcow2 { path: PathBuf },
    #[error("qcow2 image {path} {problem}; {remedy}")]
    Qcow2 { path: PathBuf, problem: String, remedy: &'static str },
    #[error("cannot open the backing image of {path}")]
    Backing { path: PathBuf, source: Box<ImageError> },
    #[error(
        "disk image {path} is still being fetched from an object store; run the machine that was restored from it until \
         all of it has arrived"
    )]
    Arriving { path: PathBuf },
    #[error("disk image {path} already has an engine; one owner must keep the metadata of a qcow2 image")]
    HasEngine { path: PathBuf },
    #[error("cannot start the engine of disk image {path}")]
    Engine { path: PathBuf, source: io::Error },
}

/// Treatment of changes that an earlier process has noted and not written into the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwritten {
    /// They count: the guest that was told they were written still lives.
    Keep,
    /// They are dropped: the image is as its guest last flushed it.
    Drop,
}

/// A disk image, locked for as long as it or one of its engines lives.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    read_only: bool,
    owner: Option<LockOwner>,
    contents: Contents,
}

#[derive(Debug)]
enum Contents {
    Raw(RawImage),
    Qcow2(Qcow2Image),
}

impl Image {
    /// Opens, checks and locks an image.
    pub fn open(options: &ImageOptions) -> Result<Self, ImageError> {
        Self::open_over(options, &Arrivals::default())
    }

    /// As `open`, where files below the top one may still be arriving: a reader of what is not there waits.
    pub fn open_over(options: &ImageOptions, arrivals: &Arrivals) -> Result<Self, ImageError> {
        check_kind(&options.path)?;
        let contents = match options.format {
            Format::Raw => Contents::Raw(RawImage::open(options, arrivals)?),
            Format::Auto if has_qcow2_magic(&options.path)? => {
                return Err(ImageError::FormatNotNamed { path: options.path.clone() });
            }
            Format::Auto => Contents::Raw(RawImage::open(options, arrivals)?),
            Format::Qcow2 => Contents::Qcow2(Qcow2Image::open(options, arrivals)?),
        };
        Ok(Self { path: options.path.clone(), read_only: options.read_only, owner: options.owner, contents })
    }

    /// Sets the file in host memory where an engine notes changes of the image's tables that it has not written yet, for the next
    /// process if this one is killed. Without it such changes are lost with this process, back to the last flush.
    pub fn note_changes_in(&mut self, file: &Path, unwritten: Unwritten) {
        if let Contents::Qcow2(qcow2) = &mut self.contents {
            qcow2.note_changes_in(file, unwritten);
        }
    }

    /// Checkpoints of the disk: an engine of this image notes in them what it is about to write.
    pub fn checkpoints(&self) -> &Checkpoints {
        match &self.contents {
            Contents::Raw(raw) => raw.checkpoints(),
            Contents::Qcow2(qcow2) => qcow2.checkpoints(),
        }
    }

    /// Brings the image's file up to date, from any thread.
    pub(crate) fn committer(&self) -> Committer {
        match &self.contents {
            Contents::Raw(_) => Committer::default(),
            Contents::Qcow2(qcow2) => qcow2.committer(),
        }
    }

    /// Path of the image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open files: the image and its backing images, the base last.
    pub fn files(&self) -> io::Result<Vec<ImageFile>> {
        self.open_files().into_iter().map(|(path, file, _)| ImageFile::of_open(path, file)).collect()
    }

    /// Locks on all of its files for the owner's QEMU to inherit, so that they outlive the keeper. Empty without an owner.
    pub fn inheritable_locks(&self) -> Result<Vec<OwnedFd>, ImageError> {
        let Some(owner) = self.owner else { return Ok(Vec::new()) };
        let lock = |(path, file, read_only): (&Path, &File, bool)| {
            let inheritable = lock::inheritable_lock(file, read_only, owner);
            inheritable.map_err(|source| ImageError::Lock { path: path.into(), source })
        };
        self.open_files().into_iter().map(lock).collect()
    }

    /// Another descriptor of the top image's open file.
    pub(crate) fn open_file(&self) -> io::Result<File> {
        match &self.contents {
            Contents::Raw(raw) => raw.file(),
            Contents::Qcow2(qcow2) => qcow2.file(),
        }
    }

    /// Each with its path, and whether it is only read.
    fn open_files(&self) -> Vec<(&Path, &File, bool)> {
        match &self.contents {
            Contents::Raw(raw) => vec![(&self.path, raw.open_file(), self.read_only)],
            Contents::Qcow2(qcow2) => qcow2.open_files(),
        }
    }

    /// Size of the virtual disk.
    pub fn bytes(&self) -> u64 {
        match &self.contents {
            Contents::Raw(raw) => raw.bytes(),
            Contents::Qcow2(qcow2) => qcow2.bytes(),
        }
    }

    /// Whether it was opened for reading only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The guest's sector size. Always 512, as with QEMU: it is part of what partition tables on the disk mean.
    pub(crate) fn logical_block_bytes(&self) -> u32 {
        512
    }

    /// The size that the guest should align to: a smaller write is a read-modify-write somewhere.
    pub(crate) fn physical_block_bytes(&self) -> u32 {
        match &self.contents {
            Contents::Raw(raw) => raw.physical_block_bytes(),
            Contents::Qcow2(_) => BLOCK_BYTES as u32,
        }
    }

    /// Preferred size of an operation: 0 if there is none; a cluster for qcow2, so that writes fill what they allocate.
    pub(crate) fn optimal_io_bytes(&self) -> u32 {
        match &self.contents {
            Contents::Raw(raw) => raw.optimal_io_bytes(),
            Contents::Qcow2(qcow2) => qcow2.cluster_bytes(),
        }
    }

    /// Whether its storage can give space back.
    pub(crate) fn supports_discard(&self) -> bool {
        match &self.contents {
            Contents::Raw(raw) => raw.supports_discard(),
            Contents::Qcow2(qcow2) => !self.read_only && qcow2.supports_discard(),
        }
    }

    /// Makes an engine for this image that carries out `depth` operations at once. It may be made on one thread and used on
    /// another, but must stay on the first thread that submits.
    pub fn engine(&self, pool: Arc<BufferPool>, depth: u32) -> Result<Box<dyn Engine>, ImageError> {
        match &self.contents {
            Contents::Raw(raw) if raw.arrival().is_some() => Err(ImageError::Arriving { path: self.path.clone() }),
            Contents::Raw(raw) => {
                raw.engine(pool, depth).map_err(|source| ImageError::Engine { path: self.path.clone(), source })
            }
            Contents::Qcow2(qcow2) => qcow2.engine(pool),
        }
    }

    /// Wraps an engine of the caller's, so that a frozen image keeps what it is about to change, as with the image's own engine.
    /// Only for raw images.
    pub fn guard(&self, engine: Box<dyn Engine>) -> Box<dyn Engine> {
        match &self.contents {
            Contents::Raw(raw) => raw.guard(engine),
            Contents::Qcow2(_) => engine,
        }
    }

    /// Starts a copy of the image's file as it is now into `target`, a new file. Nothing may be in flight. Blocks that
    /// the image's engine changes from now on are copied first.
    pub fn freeze(&self, target: File) -> io::Result<Arc<FrozenImage>> {
        match &self.contents {
            Contents::Raw(raw) => raw.freeze(target),
            Contents::Qcow2(qcow2) => qcow2.freeze(target),
        }
    }

    /// Reads the image's size again, after it was resized from outside.
    pub(crate) fn refresh_bytes(&mut self) -> io::Result<u64> {
        match &mut self.contents {
            Contents::Raw(raw) => {
                // It may have been cut off first.
                raw.checkpoints().forget_all();
                raw.refresh_bytes()
            }
            // Its size is in its header, which nobody else may write while we hold it.
            Contents::Qcow2(qcow2) => Ok(qcow2.bytes()),
        }
    }

    /// Describes which engine is used, whether around the page cache or through it, and why.
    pub fn describe(&self) -> String {
        match &self.contents {
            Contents::Raw(raw) => raw.describe(),
            Contents::Qcow2(qcow2) => qcow2.describe(),
        }
    }
}

fn check_kind(path: &Path) -> Result<(), ImageError> {
    let kind = fs::metadata(path).map_err(|error| access_error(path, "look at", error))?.file_type();
    let kind = match kind {
        kind if kind.is_file() || kind.is_block_device() => return Ok(()),
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a character device",
    };
    Err(ImageError::WrongKind { path: path.into(), kind })
}

fn has_qcow2_magic(path: &Path) -> Result<bool, ImageError> {
    use std::io::Read;
    let mut magic = Vec::with_capacity(4);
    let read = File::open(path).and_then(|file| file.take(4).read_to_end(&mut magic));
    read.map_err(|error| access_error(path, "read", error))?;
    Ok(magic == *b"QFI\xfb")
}

fn access_error(path: &Path, action: &'static str, source: io::Error) -> ImageError {
    match source.kind() {
        io::ErrorKind::NotFound => ImageError::Missing { path: path.into() },
        _ => ImageError::Access { path: path.into(), action, source },
    }
}
