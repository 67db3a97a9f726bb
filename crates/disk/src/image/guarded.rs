//! Guarded: an image's engine, or its file, that asks before each change (`frozen`), and the file before each read while its bytes
//! are on their way (`arrival`).

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use imago::Storage;
use imago::file::File as ImageFile;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::PreallocateMode;
use imago::storage::drivers::CommonStorageHelper;

use super::frozen::Guard;
use crate::arrival::Arrival;
use crate::block::BLOCK_BYTES;
use crate::engine::{Completion, Engine, Operation, Submission};

/// Who hears of an operation before the engine has it.
pub(super) enum Witness {
    /// Of changes, where the file is the disk byte for byte.
    Guard(Guard),
    /// Of reads, where the lowest file is: they come one after the other, and what they need at once.
    Arrival(Arc<Arrival>),
}

impl Witness {
    fn hear(&self, Submission { operation, offset, bytes, .. }: Submission) {
        match (self, operation) {
            (Self::Arrival(arrival), Operation::Read(_)) => arrival.announce(offset..offset.saturating_add(bytes)),
            (Self::Arrival(_), _) | (Self::Guard(_), Operation::Read(_) | Operation::Flush) => {}
            (Self::Guard(guard), Operation::Write(_) | Operation::Discard | Operation::WriteZeroes { .. }) => {
                guard.before_change(offset, bytes);
            }
        }
    }
}

/// An engine with a witness.
pub(super) struct GuardedEngine {
    engine: Box<dyn Engine>,
    witness: Witness,
}

impl GuardedEngine {
    pub(super) fn new(engine: Box<dyn Engine>, witness: Witness) -> Self {
        Self { engine, witness }
    }
}

impl Engine for GuardedEngine {
    fn push(&mut self, submission: Submission) {
        self.witness.hear(submission);
        self.engine.push(submission);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.engine.submit()
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        self.engine.reap(ended);
    }

    fn wait(&mut self, at_most: Duration) -> io::Result<()> {
        self.engine.wait(at_most)
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.engine.notifier()
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }
}

/// The file of an image that has tables in it: where a change goes only the format library knows.
#[derive(Debug)]
pub(crate) struct GuardedFile {
    file: ImageFile,
    guard: Guard,
    arrival: Option<Arc<Arrival>>,
    /// Of offsets and lengths; 1 through the page cache.
    alignment: usize,
}

impl GuardedFile {
    /// `alignment` is what the kernel tells. The library finds out by reading the file's start; if that is a hole, Linux
    /// takes any alignment there, and refuses it (EINVAL) where there is data: each write into a new cluster failed.
    pub(super) fn new(file: ImageFile, guard: Guard, arrival: Option<Arc<Arrival>>, alignment: u64) -> Self {
        Self { file, guard, arrival, alignment: alignment as usize }
    }
}

impl fmt::Display for GuardedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl Storage for GuardedFile {
    fn mem_align(&self) -> usize {
        let least = if self.alignment > 1 { BLOCK_BYTES } else { 1 };
        self.file.mem_align().max(least)
    }

    fn req_align(&self) -> usize {
        self.file.req_align().max(self.alignment)
    }

    fn zero_align(&self) -> usize {
        self.file.zero_align().max(self.alignment)
    }

    fn discard_align(&self) -> usize {
        self.file.discard_align().max(self.alignment)
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn resolve_relative_path<P: AsRef<Path>>(&self, relative: P) -> io::Result<PathBuf> {
        self.file.resolve_relative_path(relative)
    }

    fn get_filename(&self) -> Option<PathBuf> {
        self.file.get_filename()
    }

    unsafe fn pure_readv(&self, buffers: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        if let Some(arrival) = &self.arrival {
            arrival.wait(offset..offset.saturating_add(buffers.len()))?;
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.file.pure_readv(buffers, offset) }
    }

    unsafe fn pure_writev(&self, buffers: IoVector<'_>, offset: u64) -> io::Result<()> {
        self.guard.before_change(offset, buffers.len());
        // SAFETY: as above.
        unsafe { self.file.pure_writev(buffers, offset) }
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.guard.before_change(offset, length);
        // SAFETY: as above.
        unsafe { self.file.pure_write_zeroes(offset, length) }
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.guard.before_change(offset, length);
        // SAFETY: as above.
        unsafe { self.file.pure_write_allocated_zeroes(offset, length) }
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.guard.before_change(offset, length);
        // SAFETY: as above.
        unsafe { self.file.pure_discard(offset, length) }
    }

    fn flush(&self) -> io::Result<()> {
        self.file.flush()
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn settle_writes(&self) -> io::Result<()> {
        self.file.settle_writes()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        // SAFETY: as above.
        unsafe { self.file.invalidate_cache() }
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        self.file.get_storage_helper()
    }

    fn resize(&self, new_size: u64, prealloc_mode: PreallocateMode) -> io::Result<()> {
        self.file.resize(new_size, prealloc_mode)
    }
}
