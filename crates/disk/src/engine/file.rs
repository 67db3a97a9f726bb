//! The plain engine, for hosts without io_uring: worker threads with pread, pwrite, fallocate, fdatasync.
//!
//! Threads and not calls in place: the disk's thread also answers from memory, and a slow disk must not hold that up.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::Engine;
use super::target::Target;
use super::transfer::{Call, Job, Next, Scratch, Transfer};
use super::worker::{Outcome, Perform, WorkerEngine};
use crate::buffer::BufferPool;

/// Enough to keep a disk busy; the engine is a fallback, not a race winner.
const WORKERS: usize = 4;

pub struct FileEngine;

impl FileEngine {
    /// Any depth: what the workers do not do yet waits in their queue.
    pub fn start(target: Arc<Target>, pool: Arc<BufferPool>) -> io::Result<Box<dyn Engine>> {
        let scratch = Arc::new(Scratch::new(&target)?);
        let alignment = target.alignment;
        let workers =
            (0..WORKERS).map(|_| FileWorker { target: target.clone(), pool: pool.clone(), scratch: scratch.clone() });
        Ok(Box::new(WorkerEngine::start("disk-file", workers.collect(), alignment)?))
    }
}

struct FileWorker {
    target: Arc<Target>,
    pool: Arc<BufferPool>,
    scratch: Arc<Scratch>,
}

impl Perform for FileWorker {
    fn perform(&mut self, job: Job) -> Outcome {
        let (mut transfer, mut next) = Transfer::start(job, &self.target, &self.pool, &self.scratch);
        loop {
            match next {
                Next::Call(call) => {
                    let result = make_call(&self.target, call);
                    next = transfer.ended(result, &self.target, &self.pool, &self.scratch);
                }
                Next::Again(job) => return Outcome::Again(job),
                Next::Done(result) => return Outcome::Done(result),
            }
        }
    }
}

fn make_call(target: &Target, call: Call) -> io::Result<usize> {
    let fd = target.file.as_raw_fd();
    let count = match call {
        // SAFETY: the transfer owns these bytes of pool or scratch while its call runs; the kernel keeps to them.
        Call::Read { memory, bytes, offset, .. } => unsafe {
            libc::pread(fd, memory.as_ptr().cast(), bytes as usize, offset as i64)
        },
        // SAFETY: as above.
        Call::Write { memory, bytes, offset, .. } => unsafe {
            libc::pwrite(fd, memory.as_ptr().cast(), bytes as usize, offset as i64)
        },
        Call::Allocate { mode, offset, bytes } => {
            // SAFETY: plain numbers.
            unsafe { libc::fallocate(fd, mode, offset as i64, bytes as i64) as isize }
        }
        Call::DiscardDevice { offset, bytes } => return target.discard_device(offset, bytes).map(|()| 0),
        Call::SyncData => return target.file.sync_data().map(|()| 0),
    };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}
