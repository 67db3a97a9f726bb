//! The qcow2 engine: one thread owns the image's metadata, so an allocation, a discard and a flush can never meet.
//! (Reports of lost qcow2 data elsewhere begin with two threads that free and reuse the same cluster.)
//!
//! Every change is written to the file, metadata and all, before it is reported. A QEMU that dies takes its guest along,
//! so it may keep metadata in its memory until the guest flushes; our guest survives a killed keeper, and would then
//! read back what it never wrote. Changes that wait together are settled together.

use std::io;
use std::path::Path;
use std::sync::Arc;

use imago::FormatAccess;

use super::transfer::Job;
use super::worker::{Outcome, Perform, WorkerEngine};
use super::{Engine, Operation, Submission};
use crate::buffer::BufferPool;
use crate::image::GuardedFile;

/// An open chain of images, qcow2 on top.
pub(crate) type Chain = FormatAccess<GuardedFile>;

static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];

pub(crate) struct Qcow2Engine;

impl Qcow2Engine {
    /// `lease` is dropped when the image is no longer in use.
    pub(crate) fn start(
        chain: Chain,
        path: &Path,
        read_only: bool,
        pool: Arc<BufferPool>,
        lease: Arc<()>,
    ) -> io::Result<Box<dyn Engine>> {
        // The kernel keeps 15 bytes of a thread's name.
        let stem: String = path.file_stem().unwrap_or_default().to_string_lossy().chars().take(4).collect();
        let worker = Qcow2Worker { chain, read_only, pool, _lease: lease };
        Ok(Box::new(WorkerEngine::start(&format!("disk-{stem}-qcow2"), vec![worker], 1)?))
    }
}

struct Qcow2Worker {
    chain: Chain,
    read_only: bool,
    pool: Arc<BufferPool>,
    _lease: Arc<()>,
}

impl Qcow2Worker {
    fn run(&mut self, Submission { operation, offset, bytes, .. }: Submission) -> io::Result<()> {
        operation.fits(bytes)?;
        if self.read_only && !matches!(operation, Operation::Read(_) | Operation::Flush) {
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
            Operation::Flush if self.read_only => Ok(()),
            Operation::Flush => self.chain.flush().and_then(|()| self.chain.sync()),
            Operation::Discard => self.discard(offset, bytes),
            Operation::WriteZeroes { unmap } => self.write_zeroes(offset, bytes, unmap),
        }
    }

    fn discard(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        // Not `discard_to_any`: what was discarded must not show the backing image's old data.
        match self.chain.discard_to_zero(offset, bytes) {
            // Version 2 has no zero clusters. A discard is a hint: nothing is given up.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        let result = match unmap {
            true => self.chain.discard_to_zero(offset, bytes),
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
}

impl Perform for Qcow2Worker {
    fn perform(&mut self, job: Job) -> Outcome {
        Outcome::Done(self.run(job.submission))
    }

    fn settle(&mut self) -> io::Result<()> {
        if self.read_only { Ok(()) } else { self.chain.flush() }
    }

    const SETTLED_TOGETHER: usize = 64;
}
