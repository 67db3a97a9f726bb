//! Bell: ends the serving of faults from another thread.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub fn ring(&self) {
        // It fails only when the counter is full, and then the bell has been rung long ago.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Sleeps until there are faults, or the time is over. True: the bell has been rung.
    pub fn await_faults(&self, faults: BorrowedFd<'_>, at_most: Option<Duration>) -> io::Result<bool> {
        let limit = at_most.map(|time| Timespec::try_from(time).expect("waits are seconds at most"));
        let mut watched = [PollFd::new(&faults, PollFlags::IN), PollFd::new(&self.0, PollFlags::IN)];
        match poll(&mut watched, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(!watched[1].revents().is_empty()),
            Err(errno) => Err(errno.into()),
        }
    }
}
