//! The qcow2 engine: one thread owns the image's metadata, so an allocation, a discard and a flush can never meet.
//! (Reports of lost qcow2 data elsewhere begin with two threads that free and reuse the same cluster.)
//!
//! Every change is settled before it is reported: tables go into the image at a flush only, but a keeper that follows a killed one
//! finds what is missing there (`image::Tables`). A QEMU that dies takes its guest along, so it may keep tables in its own
//! memory; our guest survives a killed keeper, and would then read back what it never wrote. Changes that wait together are
//! settled together.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imago::{FormatAccess, Mapping, StorageExt as _};

use super::transfer::Job;
use super::worker::{Outcome, Perform, WorkerEngine};
use super::{Engine, Operation, Submission};
use crate::buffer::BufferPool;
use crate::image::{GuardedFile, Tables};

/// An open chain of images, qcow2 on top.
pub(crate) type Chain = FormatAccess<GuardedFile>;

static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];

pub(crate) struct Qcow2Engine;

impl Qcow2Engine {
    /// `tables` are those of the top image, unless it is only read. `lease` is dropped when the image is no longer in use.
    pub(crate) fn start(
        chain: Chain,
        path: &Path,
        tables: Option<Arc<Tables>>,
        pool: Arc<BufferPool>,
        lease: Arc<()>,
    ) -> io::Result<Box<dyn Engine>> {
        // The kernel keeps 15 bytes of a thread's name.
        let stem: String = path.file_stem().unwrap_or_default().to_string_lossy().chars().take(4).collect();
        let worker = Qcow2Worker { chain, path: path.to_owned(), tables, pool, _lease: lease };
        Ok(Box::new(WorkerEngine::start(&format!("disk-{stem}-qcow2"), vec![worker], 1)?))
    }
}

struct Qcow2Worker {
    chain: Chain,
    path: PathBuf,
    /// None: it is only read.
    tables: Option<Arc<Tables>>,
    pool: Arc<BufferPool>,
    _lease: Arc<()>,
}

impl Qcow2Worker {
    fn run(&mut self, Submission { operation, offset, bytes, .. }: Submission) -> io::Result<()> {
        operation.fits(bytes)?;
        if self.tables.is_none() && !matches!(operation, Operation::Read(_) | Operation::Flush) {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        match operation {
            Operation::Read(slot) => {
                // SAFETY: the engine has the slot's bytes for the time of the operation (contract of `Engine::push`),
                // and this thread alone performs it.
                let slot_bytes = unsafe { self.pool.bytes_mut(slot) };
                self.chain.read(&mut slot_bytes[..bytes as usize], offset)
            }
            Operation::Write(slot) => {
                // SAFETY: as above.
                let slot_bytes = unsafe { self.pool.bytes_mut(slot) };
                self.chain.write(&slot_bytes[..bytes as usize], offset)
            }
            Operation::Flush => self.commit(),
            Operation::Discard => self.discard(offset, bytes),
            Operation::WriteZeroes { unmap } => self.write_zeroes(offset, bytes, unmap),
        }
    }

    /// All changes, also of tables, are on the disk.
    fn commit(&self) -> io::Result<()> {
        let Some(tables) = &self.tables else { return Ok(()) };
        self.chain.flush()?;
        tables.commit()
    }

    /// An operation has failed: what it has taken of the image for nothing is free again. (A disk that is full is written to again
    /// and again.)
    fn give_back(&self) {
        let Some(tables) = &self.tables else { return };
        tables.let_free(true);
        let flushed = self.chain.flush();
        tables.let_free(false);
        if let Err(error) = flushed.and_then(|()| tables.commit()) {
            tracing::debug!(%error, "what a failed operation took of a qcow2 image is lost to it");
        }
    }

    fn discard(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        // Never `discard_to_any`: what was discarded must not show the backing image's old data.
        match self.make_zero(offset, bytes) {
            // Version 2 has no zero clusters. A discard is a hint: nothing is given up.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        let result = match unmap {
            true => self.make_zero(offset, bytes),
            false => self.chain.write_zeroes(offset, bytes),
        };
        match result {
            // Some of the range may be zeroed already; once more does no harm.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                let end = offset + bytes;
                (offset..end).step_by(ZEROES.len()).try_for_each(|start| {
                    let piece = (end - start).min(ZEROES.len() as u64) as usize;
                    self.chain.write(&ZEROES[..piece], start)
                })
            }
            result => result,
        }
    }

    /// Clusters stay where they are, and what they held is given back to the host: a cluster that was freed could be used for other
    /// data while the image still names it (see `image::Tables`).
    fn make_zero(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let places = self.places(offset, bytes)?;
        self.chain.write_zeroes(offset, bytes)?;
        // Not before: a version 2 image does not come so far. It may be a hole before the table says so: zeroes are allowed by then.
        places.into_iter().try_for_each(|(storage, offset, bytes)| storage.discard(offset, bytes))
    }

    /// Where the range lies in the top image. No other image uses that space.
    fn places(&self, offset: u64, bytes: u64) -> io::Result<Vec<(&GuardedFile, u64, u64)>> {
        let (mut at, end) = (offset, offset + bytes);
        let mut places = Vec::new();
        while at < end {
            let (mapping, length) = self.chain.get_mapping(at, end - at)?;
            if length == 0 {
                break;
            }
            if let Mapping::Raw { storage, offset, writable: true, .. } = mapping {
                places.push((storage, offset, length));
            }
            at += length;
        }
        Ok(places)
    }
}

impl Perform for Qcow2Worker {
    fn perform(&mut self, job: Job) -> Outcome {
        if let Some(tables) = &self.tables {
            tables.let_free(false);
        }
        let result = self.run(job.submission);
        if result.is_err() && !matches!(job.submission.operation, Operation::Read(_) | Operation::Flush) {
            self.give_back();
        }
        Outcome::Done(result)
    }

    fn settle(&mut self) -> io::Result<()> {
        let Some(tables) = &self.tables else { return Ok(()) };
        self.chain.flush()?;
        tables.settle()
    }

    const SETTLED_TOGETHER: usize = 64;
}

impl Drop for Qcow2Worker {
    fn drop(&mut self) {
        let Some(tables) = &self.tables else { return };
        if let Err(error) = self.chain.flush().and_then(|()| tables.finish()) {
            let path = self.path.display();
            tracing::error!(%error, "the last changes of {path} could not be written; it is as at its last flush");
        }
    }
}
