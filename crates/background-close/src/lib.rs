//! Background close: threads of their own close what may block whoever closes it.
//!
//! A QEMU that its guest has taken over chooses the descriptors that it sends. Closing a socket can take as long as its linger
//! time says, up to 68 years; closing a file of FUSE takes as long as its server likes. A socket closes the descriptors in
//! its unread messages, too, and these may be another machine's QEMU's: whoever may open a disk's socket can leave some there.
//!
//! A signal ends a socket's linger time. So each close has a thread of its own, and is interrupted from the moment on at which it takes
//! long, while the next one begins. What is left to wait for is the server of a file system.

#![warn(missing_docs)]

use std::os::fd::OwnedFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt;
use signal_hook::consts::SIGURG;

/// Number of closes that may be waiting. More are those of a QEMU that is hostile.
pub const BACKLOG_MAX: usize = 64;
/// How long a close may take before it is interrupted, and how often it is.
const INTERRUPT_EVERY: Duration = Duration::from_millis(10);

type Closable = Box<dyn Send>;

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
    static CLOSER: OnceLock<Option<Sender<Closable>>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let (closer, closables) = channel::<Closable>();
        let started = std::thread::Builder::new().name("close".into()).spawn(move || close_all(&closables));
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

/// Drops one after the other, each on a thread of its own. Those that take their time are interrupted, and the next one begins.
fn close_all(closables: &Receiver<Closable>) {
    // Only a signal that has a handler interrupts anything. Without one this signal is ignored.
    if let Err(error) = signal_hook::flag::register(SIGURG, Arc::default()) {
        tracing::warn!(%error, "a socket of QEMU's may stay open for as long as it lingers");
    }
    let mut late: Vec<JoinHandle<()>> = Vec::new();
    loop {
        let next = match late.is_empty() {
            true => closables.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => closables.recv_timeout(INTERRUPT_EVERY),
        };
        match next {
            Ok(closable) => late.extend(close_apart(closable)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        late.retain(|thread| !thread.is_finished());
        for thread in &late {
            // SAFETY: the thread may have ended, but its handle is there.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGURG) };
        }
    }
}

/// Returns the thread if it takes its time.
fn close_apart(closable: Closable) -> Option<JoinHandle<()>> {
    let (runs, ended) = channel::<()>();
    let close = move || {
        drop(closable);
        has_closed();
        drop(runs);
    };
    let thread = std::thread::Builder::new().name("close-one".into()).spawn(close);
    if thread.is_err() {
        // It was dropped here.
        has_closed();
    }
    let is_late = ended.recv_timeout(INTERRUPT_EVERY) == Err(RecvTimeoutError::Timeout);
    thread.ok().filter(|_| is_late)
}

fn has_closed() {
    if BACKLOG.fetch_sub(1, Ordering::Relaxed) == BACKLOG_MAX {
        wake_waiters();
    }
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
    // A closing thread looks for waiters after it has shortened the backlog. So either it finds this one, or the backlog is
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
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

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

    /// A socket in which an unread message holds these.
    fn socket_holding(descriptors: &[BorrowedFd<'_>]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
        sendmsg(&theirs, &[IoSlice::new(b"words")], &mut ancillary, SendFlags::empty()).unwrap();
        ours
    }

    #[test]
    fn lingering_sockets_in_unread_messages_are_closed() {
        let [(one, _listener), (other, _other_listener)] = [lingering_socket(), lingering_socket()];
        let inner = socket_holding(&[one.as_fd()]);
        // The kernel closes one of these last.
        let [(first, first_writer), (last, last_writer)] =
            [rustix::pipe::pipe().unwrap(), rustix::pipe::pipe().unwrap()];
        let outer = socket_holding(&[first_writer.as_fd(), inner.as_fd(), other.as_fd(), last_writer.as_fd()]);
        drop((one, other, inner, first_writer, last_writer));
        close(outer);
        [first, last].iter().for_each(|reader| wait_for(reader, PollFlags::empty()));
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
