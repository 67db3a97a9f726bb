//! Blocks: a snapshot's disks, as far as they hold pages of its memory.

use std::io;
use std::path::Path;

use hearth_disk::image::{Format, ImageReader};

use super::manifest::{DiskPart, disk_file};
use super::{LocalDisks, PAGE, SnapshotError};

/// A block of one of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockRef {
    /// By its position in the manifest.
    pub disk: u32,
    pub block: u64,
}

impl BlockRef {
    /// It begins where this one ends.
    pub(super) fn is_followed_by(&self, next: &Self) -> bool {
        self.disk == next.disk && self.block.checked_add(1) == Some(next.block)
    }
}

/// The disks of one snapshot. Nobody writes to them as long as this lives.
#[derive(Debug)]
pub struct DiskBlocks(Vec<ImageReader>);

impl DiskBlocks {
    pub fn open(local: &LocalDisks<'_>, disks: &[DiskPart]) -> Result<Self, SnapshotError> {
        let open = |disk: &DiskPart| {
            let format = if disk.format == "qcow2" { Format::Qcow2 } else { Format::Raw };
            Ok(ImageReader::open_over(&local.folder.join(disk_file(&disk.name)), format, &local.arrivals)?)
        };
        disks.iter().map(open).collect::<Result<_, _>>().map(Self)
    }

    pub fn path(&self, disk: u32) -> Option<&Path> {
        Some(self.0.get(disk as usize)?.path())
    }

    /// Fills `pages`, one after the other, with what these blocks hold.
    pub fn read(&self, blocks: &[BlockRef], pages: &mut [u8]) -> io::Result<()> {
        let mut rest = pages;
        for run in blocks.chunk_by(BlockRef::is_followed_by) {
            let (ours, others) = rest.split_at_mut(run.len() * PAGE);
            let disk = self.0.get(run[0].disk as usize).ok_or(io::ErrorKind::NotFound)?;
            disk.read(run[0].block, ours)?;
            rest = others;
        }
        Ok(())
    }
}
