//! A machine's disk as a test describes it. The image is made with the machine, in the machine's own folder.

use std::path::{Path, PathBuf};

use crate::error::{Result, at};
use crate::images::{self, File};

const BLOCK_BYTES: usize = 4096;

#[derive(Clone, Debug)]
enum Contents {
    Empty {
        mib: u64,
    },
    Ext4 {
        mib: u64,
    },
    Ext4OfSmallBlocks {
        mib: u64,
    },
    Xfs {
        mib: u64,
    },
    Btrfs {
        mib: u64,
    },
    CopyOf(PathBuf),
    Script(String),
    /// Used where it is, for tests that look at the image file.
    InPlace(PathBuf),
}

/// One disk.
#[derive(Clone, Debug)]
pub struct Disk {
    contents: Contents,
    files: Vec<File>,
    settings: toml::Table,
}

impl Disk {
    fn of(contents: Contents) -> Self {
        Self { contents, files: Vec::new(), settings: toml::Table::new() }
    }

    /// A disk full of zeros.
    pub fn empty(mib: u64) -> Self {
        Self::of(Contents::Empty { mib })
    }

    pub fn ext4(mib: u64) -> Self {
        Self::of(Contents::Ext4 { mib })
    }

    /// An ext4 disk with blocks of 1 KiB, of which the files' pages have four each.
    pub fn ext4_of_small_blocks(mib: u64) -> Self {
        Self::of(Contents::Ext4OfSmallBlocks { mib })
    }

    /// An XFS disk of at least 300 MiB, even if less is asked for.
    pub fn xfs(mib: u64) -> Self {
        Self::of(Contents::Xfs { mib })
    }

    /// A btrfs disk of at least 256 MiB, even if less is asked for.
    pub fn btrfs(mib: u64) -> Self {
        Self::of(Contents::Btrfs { mib })
    }

    pub fn copy_of(image: &Path) -> Self {
        Self::of(Contents::CopyOf(image.to_owned()))
    }

    /// A disk that holds only a shell script.
    pub(crate) fn script(text: &str) -> Self {
        Self::of(Contents::Script(text.to_owned()))
    }

    /// An image that the machine uses and changes where it is.
    pub fn in_place(image: &Path) -> Self {
        Self::of(Contents::InPlace(image.to_owned()))
    }

    /// Puts files into the new file system.
    pub fn with_files(mut self, files: impl IntoIterator<Item = File>) -> Self {
        self.files.extend(files);
        self
    }

    /// Limits throughput and operations per second, to act like a slower disk.
    pub fn limited(self, mib_per_second: i64, iops: i64) -> Self {
        self.setting("mib_per_second", mib_per_second).setting("iops", iops)
    }

    pub fn read_only(self) -> Self {
        self.setting("read_only", true)
    }

    /// Sets any other key of `[[disks]]` in `machine.toml`.
    pub fn setting(mut self, key: &str, value: impl Into<toml::Value>) -> Self {
        self.settings.insert(key.into(), value.into());
        self
    }

    /// Whether the machine uses an image that belongs to its test.
    pub(crate) fn is_in_place(&self) -> bool {
        matches!(self.contents, Contents::InPlace(_))
    }

    /// Makes the image `diskN.img` in `folder`, and returns its path.
    pub(crate) fn make(&self, folder: &Path, index: usize) -> Result<PathBuf> {
        let image = folder.join(format!("disk{index}.img"));
        match &self.contents {
            Contents::Empty { mib } => images::empty(&image, *mib)?,
            Contents::Ext4 { mib } => images::ext4(&image, *mib, &self.files)?,
            Contents::Ext4OfSmallBlocks { mib } => images::ext4_of_small_blocks(&image, *mib, &self.files)?,
            Contents::Xfs { mib } => images::xfs(&image, *mib, &self.files)?,
            Contents::Btrfs { mib } => images::btrfs(&image, *mib, &self.files)?,
            Contents::CopyOf(source) => images::copy(source, &image)?,
            // Disks have whole blocks, and empty lines mean nothing to a shell.
            Contents::Script(text) => {
                let blank = "\n".repeat(text.len().next_multiple_of(BLOCK_BYTES) - text.len());
                at("write", &image, std::fs::write(&image, format!("{text}{blank}")))?;
            }
            Contents::InPlace(path) => return Ok(path.clone()),
        }
        Ok(image)
    }

    /// The `[[disks]]` entry for an image made by [`Disk::make`].
    pub(crate) fn entry(&self, image: &Path) -> toml::Table {
        let mut entry = self.settings.clone();
        entry.insert("path".into(), image.display().to_string().into());
        entry.entry("format").or_insert_with(|| "raw".into());
        entry
    }
}
