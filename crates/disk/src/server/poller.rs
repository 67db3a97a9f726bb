//! The one place where a disk's thread sleeps: epoll, with a closed list of what may wake it.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use super::signaller::Signaller;

/// Everything that can happen to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The keeper wants something.
    Command,
    /// QEMU knocks.
    Listener,
    /// The engine has completed something.
    Engine,
    /// The rate limiter's time has come.
    Timer,
    /// QEMU says something.
    Connection { id: u32 },
    /// The guest has put requests into a queue.
    Kick { connection: u32, queue: u16 },
}

impl Source {
    fn pack(self) -> u64 {
        match self {
            Self::Command => 0,
            Self::Listener => 1,
            Self::Engine => 2,
            Self::Timer => 3,
            Self::Connection { id } => 4 | u64::from(id) << 32,
            Self::Kick { connection, queue } => 5 | u64::from(queue) << 8 | u64::from(connection) << 32,
        }
    }

    fn unpack(token: u64) -> Self {
        let connection = (token >> 32) as u32;
        match token & 0xff {
            0 => Self::Command,
            1 => Self::Listener,
            2 => Self::Engine,
            3 => Self::Timer,
            4 => Self::Connection { id: connection },
            _ => Self::Kick { connection, queue: (token >> 8) as u16 },
        }
    }
}

/// One thing that happened; `gone`: the other end has hung up.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub source: Source,
    pub gone: bool,
}

const EVENTS_A_WAIT: usize = 32;

pub struct Poller {
    epoll: OwnedFd,
    /// By which this thread wakes others.
    pub signaller: Rc<Signaller>,
}

impl Poller {
    pub fn new() -> io::Result<Rc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Rc::new(Self { epoll, signaller: Rc::new(Signaller::new()?) }))
    }

    /// Sleeps until something happens, or the time is over; appends to `events`.
    pub fn wait(&self, at_most: Option<Duration>, events: &mut Vec<Event>) -> io::Result<()> {
        let timeout = at_most.map(|time| Timespec::try_from(time).expect("waits are seconds at most"));
        let mut raw = [MaybeUninit::<epoll::Event>::uninit(); EVENTS_A_WAIT];
        let ready = match epoll::wait(&self.epoll, &mut raw, timeout.as_ref()) {
            Ok((ready, _)) => ready,
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        events.extend(ready.iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            let gone = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
            Event { source: Source::unpack(data.u64()), gone }
        }));
        Ok(())
    }
}

/// Readable when `wait` would return at once.
impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A descriptor that wakes the thread while this lives. Closing alone would not end that: QEMU keeps a duplicate of
/// each kick descriptor, and epoll watches the file behind both.
pub struct Watched<F: AsFd> {
    fd: F,
    poller: Rc<Poller>,
    source: Source,
}

impl<F: AsFd> Watched<F> {
    pub fn new(poller: &Rc<Poller>, fd: F, source: Source) -> io::Result<Self> {
        epoll::add(&poller.epoll, &fd, epoll::EventData::new_u64(source.pack()), epoll::EventFlags::IN)?;
        Ok(Self { fd, poller: Rc::clone(poller), source })
    }

    /// While not listening, only a hang-up wakes the thread.
    pub fn listen(&self, on: bool) -> io::Result<()> {
        let flags = if on { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        Ok(epoll::modify(&self.poller.epoll, &self.fd, epoll::EventData::new_u64(self.source.pack()), flags)?)
    }

    pub fn get_mut(&mut self) -> &mut F {
        &mut self.fd
    }

    pub fn get(&self) -> &F {
        &self.fd
    }
}

impl<F: AsFd> Drop for Watched<F> {
    fn drop(&mut self) {
        let _ = epoll::delete(&self.poller.epoll, &self.fd);
    }
}

/// An event counter to wake the thread with.
pub fn wake_fd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Adds one to an event counter of our own. A counter that is full wakes just as well.
pub fn wake(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Clears an event counter or timer of our own.
pub fn clear(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(8) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Ok(_) => unreachable!("counters and timers are read as a whole"),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_survive_packing() {
        let kick = Source::Kick { connection: u32::MAX, queue: u16::MAX };
        for source in [Source::Command, Source::Listener, Source::Engine, Source::Timer, kick] {
            assert_eq!(Source::unpack(source.pack()), source);
        }
        let connection = Source::Connection { id: 7 };
        assert_eq!(Source::unpack(connection.pack()), connection);
    }

    #[test]
    fn unwatched_descriptor_wakes_nobody_despite_duplicate() {
        let poller = Poller::new().unwrap();
        let fd = wake_fd().unwrap();
        let duplicate = fd.try_clone().unwrap();
        let watched = Watched::new(&poller, fd, Source::Command).unwrap();
        let mut events = Vec::new();
        wake(duplicate.as_fd());
        poller.wait(Some(Duration::ZERO), &mut events).unwrap();
        assert_eq!(events.len(), 1);
        drop(watched);
        events.clear();
        poller.wait(Some(Duration::ZERO), &mut events).unwrap();
        assert!(events.is_empty());
    }
}
