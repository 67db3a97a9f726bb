//! Engines move bytes between the buffer pool and an image: `uring` (O_DIRECT), `file` (plain), `qcow2`, `flaky` (for tests).

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::buffer::Slot;

pub(crate) mod file;
pub mod flaky;
pub(crate) mod notify;
mod order;
pub(crate) mod qcow2;
pub(crate) mod target;
pub(crate) mod transfer;
pub(crate) mod uring;
mod worker;

/// Operation on a range of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Image -> the first `bytes` of the slot.
    Read(Slot),
    /// The first `bytes` of the slot -> image.
    Write(Slot),
    /// Everything that completed before it is durable afterwards; what is still in flight may be or not. Offset and length
    /// are ignored.
    Flush,
    /// A hint: the range may read as anything afterwards (zeroes, or what it held where space cannot be given up).
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// Whether the space may be given back.
        unmap: bool,
    },
}

impl Operation {
    /// Its slot, if it has one, holds so many bytes.
    fn fits(self, bytes: u64) -> io::Result<()> {
        match self {
            Self::Read(slot) | Self::Write(slot) if bytes > slot.bytes() as u64 => {
                let text = format!("{bytes} bytes do not fit into a slot of {}", slot.bytes());
                Err(io::Error::new(io::ErrorKind::InvalidInput, text))
            }
            _ => Ok(()),
        }
    }
}

/// One operation on its way to the image.
#[derive(Clone, Copy, Debug)]
pub struct Submission {
    /// Comes back in the completion; the engine gives it no meaning.
    pub token: u64,
    /// Operation to carry out.
    pub operation: Operation,
    /// Bytes from the start of the virtual disk.
    pub offset: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

/// The end of one operation: all of it, or an error. Short transfers are continued inside the engine.
#[derive(Debug)]
pub struct Completion {
    /// The token of its submission.
    pub token: u64,
    /// How it ended.
    pub result: io::Result<()>,
}

/// Asynchronous access to one image. Owned by the disk's thread.
pub trait Engine: Send {
    /// Takes the operation; it may start now or at the next `submit`. Until its completion is reaped, the bytes of its
    /// slot are the engine's.
    fn push(&mut self, submission: Submission);

    /// Starts everything pushed so far, in one batch.
    fn submit(&mut self) -> io::Result<()>;

    /// Appends what has ended since the last call. Does not block.
    fn reap(&mut self, ended: &mut Vec<Completion>);

    /// Blocks until `reap` would return something, or the time is over.
    fn wait(&mut self, at_most: Duration) -> io::Result<()>;

    /// The same descriptor for the engine's life. Readable when `reap` may have something; `reap` clears it.
    fn notifier(&self) -> BorrowedFd<'_>;

    /// Operations taken and not yet reaped.
    fn in_flight(&self) -> usize;
}

#[cfg(test)]
pub(crate) mod tests;
