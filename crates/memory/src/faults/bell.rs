//! Bell: lets one thread end the fault loop of another.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// An eventfd that the fault loop polls beside the userfaultfd.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// Makes a bell that has not been rung.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Ends the fault loop, now and at each later call of `await_faults`.
    pub fn ring(&self) {
        // The write fails only if the counter is full, and then the bell has been rung already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Sleeps until a fault arrives, the bell rings or `at_most` has passed. Returns true if the bell has been rung.
    pub fn await_faults(&self, faults: BorrowedFd<'_>, at_most: Option<Duration>) -> io::Result<bool> {
        let limit = at_most.map(|time| Timespec::try_from(time).expect("waits are seconds at most"));
        let mut watched = [PollFd::new(&faults, PollFlags::IN), PollFd::new(&self.0, PollFlags::IN)];
        match poll(&mut watched, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(!watched[1].revents().is_empty()),
            Err(errno) => Err(errno.into()),
        }
    }
}
