//! Storage: the file a dump is written to.
//!
//! Page data goes past the page cache where the file system can (O_DIRECT): the host's memory is what a dump is written
//! to free, and a failing disk is heard of before a page is released. Where it cannot, data is synced before it counts
//! as written. Tables are small and rewritten: they go through the page cache and are synced at the end.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use hearth_memory::PAGE_BYTES;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use super::bytes::ReadAt;

/// What dumps need of a file. In tests there is one that fails.
pub(super) trait Storage: ReadAt + Send {
    /// Headers, bitmaps, descriptors.
    fn write_table(&mut self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Page data: place and length in whole pages. Later failures of the disk cannot undo it.
    fn write_data(&mut self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Takes disk space, so that writing there later finds it.
    fn reserve(&mut self, at: u64, bytes: u64) -> io::Result<()>;

    fn set_bytes(&mut self, bytes: u64) -> io::Result<()>;

    fn sync(&mut self) -> io::Result<()>;
}

/// A file of the host.
pub(super) struct DumpFile {
    file: File,
    direct: Option<File>,
}

impl DumpFile {
    /// A new file, for its owner's eyes only: a guest's memory is in it.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Self { file, direct: direct(path) })
    }

    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Self { file, direct: direct(path) })
    }
}

fn direct(path: &Path) -> Option<File> {
    OpenOptions::new().write(true).custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path).ok()
}

impl ReadAt for DumpFile {
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        ReadAt::read_exact_at(&self.file, into, at)
    }

    fn file_bytes(&self) -> io::Result<u64> {
        self.file.file_bytes()
    }
}

impl Storage for DumpFile {
    fn write_table(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    fn write_data(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        debug_assert!(at.is_multiple_of(PAGE_BYTES) && (bytes.len() as u64).is_multiple_of(PAGE_BYTES));
        if let Some(direct) = &self.direct {
            match direct.write_all_at(bytes, at) {
                // The file system takes O_DIRECT, but not this way: some want larger units than a page.
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => self.direct = None,
                done => return done,
            }
        }
        self.file.write_all_at(bytes, at)?;
        self.file.sync_data()
    }

    fn reserve(&mut self, at: u64, bytes: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), at, bytes) {
            // Then a full disk shows when the table is written.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            done => Ok(done?),
        }
    }

    fn set_bytes(&mut self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}
