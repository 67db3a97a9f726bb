//! Disk images: opened, checked and locked, and the engine that fits.
//!
//! path -> kind of file -> format -> lock (as QEMU locks) -> size, alignment -> engine: io_uring, else worker threads
//!
//! What cannot be had (O_DIRECT on tmpfs, io_uring in a container) is replaced by the next best and told by `describe`;
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

pub use frozen::FrozenImage;
pub(crate) use guarded::GuardedFile;
pub use lock::LockOwner;
pub(crate) use lock::{inheritable_lock, lock_image};
pub use note::{ImageFile, ImageNote};
pub use overlay::{OverlayError, create_overlay, create_overlay_over_arriving};
use qcow2::Qcow2Image;
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
    Raw,
    Qcow2,
}

#[derive(Clone, Debug)]
pub struct ImageOptions {
    pub path: PathBuf,
    pub format: Format,
    pub read_only: bool,
    /// Around the host's page cache where the file system can; `describe` says if not.
    pub direct: bool,
    /// How long to wait for another holder of the image to let go (a killed keeper's last writes).
    pub lock_patience: Duration,
    /// None: nobody's QEMU is to inherit the lock.
    pub owner: Option<LockOwner>,
}

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
    #[error("disk image {path} looks like qcow2; say format = \"qcow2\", or \"raw\" if that is meant")]
    FormatNotNamed { path: PathBuf },
    #[error("disk image {path} is in use by {holder}")]
    InUse { path: PathBuf, holder: String },
    #[error("cannot lock disk image {path}; its file system must support open file description locks")]
    Lock { path: PathBuf, source: io::Error },
    #[error("{path} is not a qcow2 image; say format = \"raw\" if that is meant")]
    NotQcow2 { path: PathBuf },
    #[error("qcow2 image {path} {problem}; {remedy}")]
    Qcow2 { path: PathBuf, problem: String, remedy: &'static str },
    #[error("cannot open the backing image of {path}")]
    Backing { path: PathBuf, source: Box<ImageError> },
    #[error(
        "disk image {path} is still on its way out of an object store; run the machine that was restored from it until \
         all is there"
    )]
    Arriving { path: PathBuf },
    #[error("disk image {path} already has an engine; one owner must keep the metadata of a qcow2 image")]
    HasEngine { path: PathBuf },
    #[error("cannot start the engine of disk image {path}")]
    Engine { path: PathBuf, source: io::Error },
}

/// What becomes of changes that a process before this one has noted, and not written into the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwritten {
    /// They count: the guest that was told of them lives.
    Keep,
    /// The image counts, as its guest flushed it last.
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
    pub fn open(options: &ImageOptions) -> Result<Self, ImageError> {
        Self::open_over(options, &Arrivals::default())
    }

    /// Of which some files below the top one are still on their way: who reads what is not there of them waits.
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

    /// Where an engine notes changes of the image's tables that it has not written into them yet, for the process that follows
    /// if this one is killed: a file in host memory. Without it they end with this process, back to the last flush.
    pub fn note_changes_in(&mut self, file: &Path, unwritten: Unwritten) {
        if let Contents::Qcow2(qcow2) = &mut self.contents {
            qcow2.note_changes_in(file, unwritten);
        }
    }

    /// For whoever wants the image's file to be up to date.
    pub fn committer(&self) -> Committer {
        match &self.contents {
            Contents::Raw(_) => Committer::default(),
            Contents::Qcow2(qcow2) => qcow2.committer(),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that are open: the image and what it is based on, base last.
    pub fn files(&self) -> io::Result<Vec<ImageFile>> {
        self.open_files().into_iter().map(|(path, file, _)| ImageFile::of_open(path, file)).collect()
    }

    /// Locks on all of its files for the owner's QEMU to inherit, so that they outlive its keeper. Without an owner, none.
    pub fn inheritable_locks(&self) -> Result<Vec<OwnedFd>, ImageError> {
        let Some(owner) = self.owner else { return Ok(Vec::new()) };
        let lock = |(path, file, read_only): (&Path, &File, bool)| {
            let inheritable = lock::inheritable_lock(file, read_only, owner);
            inheritable.map_err(|source| ImageError::Lock { path: path.into(), source })
        };
        self.open_files().into_iter().map(lock).collect()
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

    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The guest's sector size. Always 512, as with QEMU: it is part of what partition tables on the disk mean.
    pub fn logical_block_bytes(&self) -> u32 {
        512
    }

    /// What the guest should align to: below this, a write is read-modify-write somewhere.
    pub fn physical_block_bytes(&self) -> u32 {
        match &self.contents {
            Contents::Raw(raw) => raw.physical_block_bytes(),
            Contents::Qcow2(_) => BLOCK_BYTES as u32,
        }
    }

    /// 0 where there is no preference; a cluster for qcow2, so that writes fill what they allocate.
    pub fn optimal_io_bytes(&self) -> u32 {
        match &self.contents {
            Contents::Raw(raw) => raw.optimal_io_bytes(),
            Contents::Qcow2(qcow2) => qcow2.cluster_bytes(),
        }
    }

    pub fn supports_discard(&self) -> bool {
        match &self.contents {
            Contents::Raw(raw) => raw.supports_discard(),
            Contents::Qcow2(qcow2) => !self.read_only && qcow2.supports_discard(),
        }
    }

    /// An engine for this image, `depth` operations at once. It may be made on one thread and used on another, but the
    /// first thread that submits keeps it.
    pub fn engine(&self, pool: Arc<BufferPool>, depth: u32) -> Result<Box<dyn Engine>, ImageError> {
        match &self.contents {
            Contents::Raw(raw) if raw.arrival().is_some() => Err(ImageError::Arriving { path: self.path.clone() }),
            Contents::Raw(raw) => {
                raw.engine(pool, depth).map_err(|source| ImageError::Engine { path: self.path.clone(), source })
            }
            Contents::Qcow2(qcow2) => qcow2.engine(pool),
        }
    }

    /// Sees to it that a frozen image keeps what an engine of the caller's is about to change, as the image's own does. For raw
    /// images.
    pub fn guard(&self, engine: Box<dyn Engine>) -> Box<dyn Engine> {
        match &self.contents {
            Contents::Raw(raw) => raw.guard(engine),
            Contents::Qcow2(_) => engine,
        }
    }

    /// The image's file as it is now, on its way into another file, which is new. Nothing is in flight; what the image's
    /// engine changes from now on is copied first.
    pub fn freeze(&self, target: File) -> io::Result<Arc<FrozenImage>> {
        match &self.contents {
            Contents::Raw(raw) => raw.freeze(target),
            Contents::Qcow2(qcow2) => qcow2.freeze(target),
        }
    }

    /// Looks again how long the image is, after it was resized from outside.
    pub fn refresh_bytes(&mut self) -> io::Result<u64> {
        match &mut self.contents {
            Contents::Raw(raw) => raw.refresh_bytes(),
            // Its size is in its header, which nobody else may write while we hold it.
            Contents::Qcow2(qcow2) => Ok(qcow2.bytes()),
        }
    }

    /// Which engine, around the page cache or through it, and why.
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
