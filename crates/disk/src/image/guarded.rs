//! Guarded: an image's engine, or its file, that asks before each change (`frozen`); the file also asks before each read while its
//! bytes are arriving (`arrival`).

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use imago::Storage;
use imago::file::File as ImageFile;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::PreallocateMode;
use imago::storage::drivers::CommonStorageHelper;

use super::checkpoints::Checkpoints;
use super::frozen::Guard;
use super::tables::Tables;
use crate::arrival::Arrival;
use crate::block::BLOCK_BYTES;
use crate::engine::{Completion, Engine, Operation, Submission};

/// Asked before the engine gets an operation.
pub(super) enum Witness {
    /// Of changes, where the file is the disk byte for byte.
    Changes(Guard, Checkpoints),
    /// Of changes of the disk. The file asks its guard itself.
    DiskChanges(Checkpoints),
    /// Of reads, where the lowest file is: they come one after the other, and what they need at once.
    Arrival(Arc<Arrival>),
}

impl Witness {
    fn hear(&self, Submission { operation, offset, bytes, .. }: Submission) {
        let is_change = match operation {
            Operation::Read(_) | Operation::Flush => false,
            Operation::Write(_) | Operation::Discard | Operation::WriteZeroes { .. } => true,
        };
        match self {
            Self::Arrival(arrival) if matches!(operation, Operation::Read(_)) => {
                arrival.announce(offset..offset.saturating_add(bytes));
            }
            Self::Changes(guard, checkpoints) if is_change => {
                checkpoints.note(offset, bytes);
                guard.before_change(offset, bytes);
            }
            Self::DiskChanges(checkpoints) if is_change => checkpoints.note(offset, bytes),
            _ => {}
        }
    }
}

/// An engine with a witness.
pub(super) struct GuardedEngine {
    /// Dropped first: a copy of the image must know that it is no longer guarded before its lock goes.
    witness: Witness,
    engine: Box<dyn Engine>,
}

impl GuardedEngine {
    pub(super) fn new(engine: Box<dyn Engine>, witness: Witness) -> Self {
        Self { witness, engine }
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

/// The file of an image that has tables in it: where a change goes only the format library knows. Clones are of the same file; the
/// library has one for tables and one for data.
#[derive(Clone, Debug)]
pub(crate) struct GuardedFile {
    /// Dropped before the files, as in `GuardedEngine`.
    guard: Guard,
    file: Arc<ImageFile>,
    /// The same, for what the library does not do.
    descriptor: Arc<File>,
    arrival: Option<Arc<Arrival>>,
    /// Alignment of offsets and lengths; 1 through the page cache.
    alignment: usize,
    /// The highest offset where changes may end: an entry of a damaged table may lead anywhere.
    reach: u64,
    /// Whether the library may free clusters; so it is once a change has failed. Shared by all clones.
    may_free: Arc<AtomicBool>,
    /// If this is for the tables.
    tables: Option<Arc<Tables>>,
    #[cfg(test)]
    pub tape: Option<super::tape::Tape>,
}

impl GuardedFile {
    /// `alignment` is what the kernel tells. The library finds out by reading the file's start; if that is a hole, Linux
    /// takes any alignment there, and refuses it (EINVAL) where there is data: each write into a new cluster failed.
    pub(super) fn new(
        file: ImageFile,
        descriptor: File,
        guard: Guard,
        arrival: Option<Arc<Arrival>>,
        alignment: u64,
        reach: u64,
    ) -> Self {
        Self {
            file: Arc::new(file),
            descriptor: Arc::new(descriptor),
            guard,
            arrival,
            alignment: alignment as usize,
            reach,
            may_free: Arc::default(),
            tables: None,
            #[cfg(test)]
            tape: None,
        }
    }

    /// The same file, for the library's changes of tables.
    pub(super) fn of_tables(&self, tables: Arc<Tables>) -> Self {
        Self { tables: Some(tables), ..self.clone() }
    }

    /// All that was written to the file is on the disk.
    pub(super) fn sync_data(&self) -> io::Result<()> {
        #[cfg(test)]
        let before = super::tape::length(&self.tape);
        self.descriptor.sync_data()?;
        #[cfg(test)]
        super::tape::note(&self.tape, || super::tape::Event::Sync { before });
        Ok(())
    }

    /// As [`Tables::let_free`]. Returns what held until now.
    pub(super) fn let_free(&self, may_free: bool) -> bool {
        self.may_free.swap(may_free, Relaxed)
    }

    /// The library gives back at once what it has taken for a change that failed. (One that is not supported it makes otherwise.)
    fn ended(&self, change: io::Result<()>) -> io::Result<()> {
        if change.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::Unsupported) {
            self.may_free.store(true, Relaxed);
        }
        change
    }

    /// Before a change of the file.
    fn may_change(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.reach) {
            let problem = "a table of this image leads out of it; repair it with qemu-img check -r all";
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        #[cfg(test)]
        super::tape::may_change(&self.tape)?;
        self.guard.before_change(offset, bytes);
        Ok(())
    }

    /// Tables are written as bytes: the library does that where this is refused.
    fn must_be_data(&self) -> io::Result<()> {
        match &self.tables {
            Some(_) => Err(io::ErrorKind::Unsupported.into()),
            None => Ok(()),
        }
    }
}

impl fmt::Display for GuardedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl Storage for GuardedFile {
    fn mem_align(&self) -> usize {
        if self.tables.is_some() {
            return 1;
        }
        let least = if self.alignment > 1 { BLOCK_BYTES } else { 1 };
        self.file.mem_align().max(least)
    }

    fn req_align(&self) -> usize {
        match &self.tables {
            Some(tables) => tables.unit_bytes() as usize,
            None => self.file.req_align().max(self.alignment),
        }
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
        if let Some(tables) = &self.tables {
            return tables.read(buffers, offset);
        }
        if let Some(arrival) = &self.arrival {
            arrival.wait(offset..offset.saturating_add(buffers.len()))?;
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.file.pure_readv(buffers, offset) }
    }

    unsafe fn pure_writev(&self, buffers: IoVector<'_>, offset: u64) -> io::Result<()> {
        if let Some(tables) = &self.tables {
            return tables.write(&buffers, offset);
        }
        self.ended(self.may_change(offset, buffers.len()))?;
        #[cfg(test)]
        let bytes = {
            let mut bytes = vec![0; buffers.len() as usize];
            buffers.copy_into_slice(&mut bytes);
            bytes
        };
        // SAFETY: as above.
        self.ended(unsafe { self.file.pure_writev(buffers, offset) })?;
        #[cfg(test)]
        super::tape::note(&self.tape, || super::tape::Event::Write { offset, bytes });
        Ok(())
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.must_be_data()?;
        self.ended(self.may_change(offset, length))?;
        // SAFETY: as above.
        self.ended(unsafe { self.file.pure_write_zeroes(offset, length) })?;
        #[cfg(test)]
        super::tape::note(&self.tape, || super::tape::Event::Zero { offset, length, grows: true });
        Ok(())
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.must_be_data()?;
        self.ended(self.may_change(offset, length))?;
        // SAFETY: as above.
        self.ended(unsafe { self.file.pure_write_allocated_zeroes(offset, length) })?;
        #[cfg(test)]
        super::tape::note(&self.tape, || super::tape::Event::Zero { offset, length, grows: true });
        Ok(())
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.must_be_data()?;
        self.ended(self.may_change(offset, length))?;
        // SAFETY: as above.
        self.ended(unsafe { self.file.pure_discard(offset, length) })?;
        #[cfg(test)]
        super::tape::note(&self.tape, || super::tape::Event::Zero { offset, length, grows: false });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.file.flush()
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    /// The library is about to free clusters.
    fn settle_writes(&self) -> io::Result<()> {
        match &self.tables {
            Some(_) if !self.may_free.load(Relaxed) => Err(io::Error::other("the image's tables may still name them")),
            _ => self.file.settle_writes(),
        }
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
