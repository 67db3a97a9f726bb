//! Storage: the file that a dump is written to.
//!
//! Page data bypasses the page cache where the file system allows it (O_DIRECT): a dump is written to free the host's
//! memory, and a failing disk is noticed before a page is released. Elsewhere data is synced before it counts as
//! written. Tables are small and rewritten. They go through the page cache and are synced at the end.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use hearth_memory::PAGE_BYTES;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use super::bytes::ReadAt;

/// File operations that a dump needs. Tests have an implementation that fails.
pub(super) trait Storage: ReadAt + Send {
    /// Writes headers, bitmaps or descriptors.
    fn write_table(&mut self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Writes page data, whose offset and length are whole pages. Later failures of the disk cannot undo it.
    fn write_data(&mut self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Reserves disk space, so that later writes there find it.
    fn reserve(&mut self, at: u64, bytes: u64) -> io::Result<()>;

    /// Sets the length of the file.
    fn set_bytes(&mut self, bytes: u64) -> io::Result<()>;

    /// Syncs the whole file.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file on the host.
pub(super) struct DumpFile {
    file: File,
    direct: Option<File>,
}

impl DumpFile {
    /// Makes a new file that only its owner can read, because it holds a guest's memory.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Self { file, direct: direct(path) })
    }

    /// Opens an existing file for reading and writing.
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
                // The file system accepts O_DIRECT but not these writes: some require larger units than a page.
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => self.direct = None,
                done => return done,
            }
        }
        self.file.write_all_at(bytes, at)?;
        self.file.sync_data()
    }

    fn reserve(&mut self, at: u64, bytes: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), at, bytes) {
            // A full disk then shows when the table is written.
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
