//! The engine of NVRAM: memory is read and written where the request is taken, and only a flush that waits for the mirror
//! is ended elsewhere.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::mirror::{Flushed, Mirror};
use crate::buffer::{BufferPool, Slot};
use crate::engine::{Completion, Engine, Operation, Submission};

static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

pub(super) struct NvramEngine {
    memory: Arc<File>,
    pool: Arc<BufferPool>,
    mirror: Option<Arc<Mirror>>,
    ended: Vec<Completion>,
    /// Flushes that the mirror's thread has, and where it puts them.
    waiting: usize,
    flushed: Arc<Flushed>,
    thread: Option<JoinHandle<()>>,
}

impl NvramEngine {
    pub(super) fn start(memory: Arc<File>, pool: Arc<BufferPool>, mirror: Option<Arc<Mirror>>) -> io::Result<Self> {
        let flushed = Arc::new(Flushed::new()?);
        let thread = mirror.clone().map(|mirror| mirror.start(Arc::clone(&flushed))).transpose()?;
        Ok(Self { memory, pool, mirror, ended: Vec::new(), waiting: 0, flushed, thread })
    }

    fn read(&self, slot: Slot, offset: u64, bytes: u64) -> io::Result<()> {
        // SAFETY: the slot is the engine's until its completion is reaped, and no other reference to it is made here.
        let target = unsafe { &mut self.pool.bytes_mut(slot)[..bytes as usize] };
        self.memory.read_exact_at(target, offset)
    }

    fn write(&self, slot: Slot, offset: u64, bytes: u64) -> io::Result<()> {
        // SAFETY: as above.
        let source = unsafe { &self.pool.bytes_mut(slot)[..bytes as usize] };
        self.change(offset, bytes, || self.memory.write_all_at(source, offset))
    }

    fn write_zeroes(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.change(offset, bytes, || {
            let steps = (0..bytes).step_by(ZEROES.len());
            steps.into_iter().try_for_each(|at| {
                let piece = &ZEROES[..(bytes - at).min(ZEROES.len() as u64) as usize];
                self.memory.write_all_at(piece, offset + at)
            })
        })
    }

    fn change(&self, offset: u64, bytes: u64, change: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match &self.mirror {
            Some(mirror) => mirror.change(offset..offset + bytes, change),
            None => change(),
        }
    }
}

impl Engine for NvramEngine {
    fn push(&mut self, submission: Submission) {
        let Submission { token, operation, offset, bytes } = submission;
        let result = match operation {
            Operation::Read(slot) => self.read(slot, offset, bytes),
            Operation::Write(slot) => self.write(slot, offset, bytes),
            // The memory was taken for good: nothing is given up.
            Operation::Discard => Ok(()),
            Operation::WriteZeroes { .. } => self.write_zeroes(offset, bytes),
            Operation::Flush => match &self.mirror {
                Some(mirror) if mirror.must_wait(token) => {
                    self.waiting += 1;
                    return;
                }
                _ => Ok(()),
            },
        };
        self.ended.push(Completion { token, result });
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        ended.append(&mut self.ended);
        if self.waiting > 0 {
            self.waiting -= self.flushed.take(ended);
        }
    }

    fn wait(&mut self, at_most: Duration) -> io::Result<()> {
        if self.ended.is_empty() && self.waiting > 0 {
            self.flushed.wait(at_most);
        }
        Ok(())
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.flushed.notifier()
    }

    fn in_flight(&self) -> usize {
        self.ended.len() + self.waiting
    }
}

impl Drop for NvramEngine {
    /// Writes everything that is not mirrored yet before this returns.
    fn drop(&mut self) {
        if let (Some(mirror), Some(thread)) = (&self.mirror, self.thread.take()) {
            mirror.stop();
            // Its panic was printed when it happened; what it had not written stays dirty, and so in memory.
            let _ = thread.join();
        }
    }
}
