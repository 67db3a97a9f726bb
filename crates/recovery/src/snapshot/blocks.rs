//! Blocks: the blocks of a snapshot's disks that hold pages of its memory.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hearth_disk::arrival::Arrivals;
use hearth_disk::image::{Format, ImageError, ImageReader};

use super::manifest::{DiskPart, disk_file};
use super::{LocalDisks, PAGE, SnapshotError};
use crate::incarnation::lock;

/// A block of one of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockRef {
    /// Position of the disk in the manifest.
    pub disk: u32,
    /// Number of the block on that disk.
    pub block: u64,
}

impl BlockRef {
    /// Whether `next` begins where this block ends.
    pub(super) fn is_followed_by(&self, next: &Self) -> bool {
        self.disk == next.disk && self.block.checked_add(1) == Some(next.block)
    }
}

/// The disks of one snapshot. Nobody writes to them while this value exists.
#[derive(Debug)]
pub struct DiskBlocks(Vec<OneDisk>);

#[derive(Debug)]
struct OneDisk {
    path: PathBuf,
    format: Format,
    arrivals: Arrivals,
    /// Reader of the file that had this name when it was last opened.
    reader: Mutex<Arc<ImageReader>>,
}

impl OneDisk {
    fn open(path: PathBuf, format: Format, arrivals: &Arrivals) -> Result<Self, ImageError> {
        let reader = ImageReader::open_over(&path, format, arrivals)?;
        Ok(Self { path, format, arrivals: arrivals.clone(), reader: Mutex::new(Arc::new(reader)) })
    }
}

impl DiskBlocks {
    /// Opens the disks of a snapshot on this host.
    pub fn open(local: &LocalDisks<'_>, disks: &[DiskPart]) -> Result<Self, SnapshotError> {
        let open = |disk: &DiskPart| {
            let format = if disk.format == "qcow2" { Format::Qcow2 } else { Format::Raw };
            Ok(OneDisk::open(local.folder.join(disk_file(&disk.name)), format, &local.arrivals)?)
        };
        disks.iter().map(open).collect::<Result<_, _>>().map(Self)
    }

    /// Path of a disk's image; `None` if there is no such disk.
    pub fn path(&self, disk: u32) -> Option<&Path> {
        Some(&self.0.get(disk as usize)?.path)
    }

    /// Reads from now on the file that has the disk's name now, if it is an image. The reader must check what its
    /// blocks hold.
    pub(crate) fn look_again(&self, disk: u32) {
        let Some(disk) = self.0.get(disk as usize) else { return };
        if let Ok(found) = ImageReader::open_over(&disk.path, disk.format, &disk.arrivals) {
            *lock(&disk.reader) = Arc::new(found);
        }
    }

    /// Fills `pages`, one after the other, with the contents of these blocks.
    pub fn read(&self, blocks: &[BlockRef], pages: &mut [u8]) -> io::Result<()> {
        let mut rest = pages;
        for run in blocks.chunk_by(BlockRef::is_followed_by) {
            let (ours, others) = rest.split_at_mut(run.len() * PAGE);
            let disk = self.0.get(run[0].disk as usize).ok_or(io::ErrorKind::NotFound)?;
            let reader = lock(&disk.reader).clone();
            reader.read(run[0].block, ours)?;
            rest = others;
        }
        Ok(())
    }
}
