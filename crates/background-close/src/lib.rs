//! Background close: one thread of the process closes what may block whoever closes it.
//!
//! A QEMU that its guest has taken over chooses the descriptors that it sends. Closing a socket can take as long as its linger
//! time says, up to 68 years; closing a file of FUSE takes as long as its server likes. A socket closes the descriptors in
//! its unread messages, too.

#![warn(missing_docs)]

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::net::sockopt;

/// Number of closes that may be waiting. More are those of a QEMU that is hostile.
pub const BACKLOG_MAX: usize = 64;

static BACKLOG: AtomicUsize = AtomicUsize::new(0);
/// Event counters to signal when the backlog is short again.
static WAITERS: Mutex<Vec<Arc<OwnedFd>>> = Mutex::new(Vec::new());

/// Closes a descriptor, without lingering if it is a socket.
pub fn close_descriptor(descriptor: OwnedFd) {
    // Fails for anything but a socket.
    let _ = sockopt::set_socket_linger(&descriptor, None);
    close(descriptor);
}

/// Drops something that holds descriptors.
pub fn close<T: Send + 'static>(closable: T) {
    type Closable = Box<dyn Send>;
    static CLOSER: OnceLock<Option<Sender<Closable>>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let (closer, closables) = channel::<Closable>();
        let close_all = move || {
            for closable in closables {
                drop(closable);
                if BACKLOG.fetch_sub(1, Ordering::Relaxed) == BACKLOG_MAX {
                    wake_waiters();
                }
            }
        };
        let started = std::thread::Builder::new().name("close".into()).spawn(close_all);
        if let Err(error) = &started {
            tracing::warn!(%error, "no thread can be started to close descriptors; those that QEMU sends stay open");
        }
        started.ok().map(|_| closer)
    });
    // Staying open is better than blocking.
    let Some(closer) = closer else { return std::mem::forget(closable) };
    BACKLOG.fetch_add(1, Ordering::Relaxed);
    closer.send(Box::new(closable)).expect("the thread lives as long as the process");
}

/// Do too many closes wait, because something does not close?
pub fn is_backed_up() -> bool {
    BACKLOG.load(Ordering::Relaxed) >= BACKLOG_MAX
}

/// As `is_backed_up`. If so, this event counter (non-blocking) is signalled once when the backlog is short again.
pub fn is_backed_up_for(waiter: &Arc<OwnedFd>) -> bool {
    if !is_backed_up() {
        return false;
    }
    // The closing thread looks for waiters after it has shortened the backlog. So either it finds this one, or the backlog is
    // seen to be short here.
    let mut waiters = waiters();
    let is_backed_up = is_backed_up();
    if is_backed_up && !waiters.iter().any(|other| Arc::ptr_eq(other, waiter)) {
        waiters.push(Arc::clone(waiter));
    }
    is_backed_up
}

fn wake_waiters() {
    for waiter in std::mem::take(&mut *waiters()) {
        // A counter that is full wakes just as well.
        let _ = rustix::io::write(&waiter, &1u64.to_ne_bytes());
    }
}

/// The list is whole after a panic: each of its changes is one entry.
fn waiters() -> MutexGuard<'static, Vec<Arc<OwnedFd>>> {
    WAITERS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    use super::*;

    const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

    /// Closing it takes until the lock is free.
    struct Held(Arc<Mutex<()>>);

    impl Drop for Held {
        fn drop(&mut self) {
            drop(self.0.lock());
        }
    }

    #[track_caller]
    fn wait_for(fd: &impl AsFd, flags: PollFlags) {
        assert_eq!(poll(&mut [PollFd::new(fd, flags)], Some(&PATIENCE)), Ok(1), "it does not come");
    }

    /// A socket that takes an hour to close, and the listener behind its other end.
    fn lingering_socket() -> (TcpStream, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 65536]).is_ok() {}
        socket.set_nonblocking(false).unwrap();
        sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
        (socket, listener)
    }

    #[test]
    fn lingering_socket_delays_no_other() {
        let (socket, _listener) = lingering_socket();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        close_descriptor(socket.into());
        close_descriptor(writer);
        wait_for(&reader, PollFlags::empty());
    }

    #[test]
    fn waiter_is_woken_when_the_backlog_is_short() {
        let waiter = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        assert!(!is_backed_up_for(&waiter));
        let lock = Arc::new(Mutex::new(()));
        for _ in 0..3 {
            let held = lock.lock().unwrap();
            // Twice as many, to see that none is forgotten.
            (0..2 * BACKLOG_MAX).for_each(|_| close(Held(Arc::clone(&lock))));
            (0..3).for_each(|_| assert!(is_backed_up_for(&waiter)));
            drop(held);
            wait_for(&waiter, PollFlags::IN);
            let mut count = [0; 8];
            assert_eq!(rustix::io::read(&waiter, &mut count), Ok(8));
            assert_eq!(u64::from_ne_bytes(count), 1, "once");
        }
    }
}
