//! Relay: takes a guest's state from one QEMU and gives it to another, with a time limit.
//!
//! The state is relayed whole (`receive_while` until its QEMU hangs up, then `send`), or as it arrives (`Transfer`): the
//! new QEMU then loads what the old one has saved already, and neither can hold up the other.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hearth_qemu::Stream;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Maximum size of a state. It has some 300 KiB, and 17 MiB with a graphics card; a larger one includes RAM.
const STATE_BYTES_MAX: usize = 1 << 30;
const PIECE_BYTES: usize = 256 << 10;

/// Receives what `ask` makes a QEMU send, until it hangs up. QEMU may hold the lock that its answer needs while its
/// state waits for space. So the state is received while `ask` runs. An error of `ask` ends both.
pub fn receive_while<E>(
    source: Stream,
    deadline: Instant,
    ask: impl FnOnce() -> Result<(), E>,
) -> io::Result<Result<Vec<u8>, E>> {
    let ours = source.try_clone()?;
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(source, deadline));
        let asked = ask();
        if asked.is_err() {
            // Fails only if the other side has hung up, and then receiving ends anyway.
            let _ = ours.shutdown(Shutdown::Both);
        }
        let received = receiving.join().unwrap_or_else(|panic| resume_unwind(panic));
        match asked {
            Ok(()) => received.map(Ok),
            Err(error) => Ok(Err(error)),
        }
    })
}

/// Receives everything until the other side hangs up. Fails with `TimedOut` at the deadline.
fn receive(mut source: Stream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut state = Vec::with_capacity(2 * PIECE_BYTES);
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        source.set_read_timeout(Some(left(deadline)?))?;
        match source.read(&mut piece) {
            Ok(0) => return Ok(state),
            Ok(length) => state.extend_from_slice(&piece[..length]),
            Err(error) => passing(error)?,
        }
        if state.len() > STATE_BYTES_MAX {
            return Err(too_much());
        }
    }
}

/// Sends all of the state, and then its end.
pub fn send(mut target: Stream, mut state: &[u8], deadline: Instant) -> io::Result<()> {
    while !state.is_empty() {
        target.set_write_timeout(Some(left(deadline)?))?;
        match target.write(state) {
            Ok(length) => state = &state[length..],
            Err(error) => passing(error)?,
        }
    }
    Ok(())
}

/// Wakes the thread that waits at a passage.
#[derive(Clone)]
pub struct Bell(Arc<OwnedFd>);

impl Bell {
    /// A bell that has not rung.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Wakes that thread, now or when it next waits.
    pub fn ring(&self) {
        // A full counter has rung already.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

/// Both ends of a transfer, and the bytes between them.
pub struct Transfer {
    /// `None` when nothing more comes.
    source: Option<Stream>,
    /// `None` when it takes nothing more.
    target: Option<UnixStream>,
    bell: Bell,
    piece: Vec<u8>,
    between: Vec<u8>,
    /// Number of the last bytes received that are kept back until the state is known to be whole.
    kept_back: usize,
    received: u64,
}

impl Transfer {
    /// A passage that keeps back the last `keep_back` bytes received.
    pub fn open(source: Stream, target: UnixStream, bell: Bell, keep_back: usize) -> io::Result<Self> {
        source.set_nonblocking(true)?;
        target.set_nonblocking(true)?;
        // The buffers are written to once: fresh memory would be faulted in page by page while the guest stands still.
        let (piece, mut between) = (vec![1; PIECE_BYTES], vec![1; 2 * PIECE_BYTES]);
        between.clear();
        Ok(Self { source: Some(source), target: Some(target), bell, piece, between, kept_back: keep_back, received: 0 })
    }

    /// Number of bytes received so far.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Receives while `ask` makes the old QEMU send: as with `receive_while`, QEMU may not answer before that.
    pub fn take_while<T>(&mut self, deadline: Instant, ask: impl FnOnce() -> T) -> (T, io::Result<()>) {
        let (bell, answered) = (self.bell.clone(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                while !answered.load(Ordering::Acquire) {
                    self.take()?;
                    self.sleep(None, deadline)?;
                }
                Ok(())
            });
            let answer = ask();
            answered.store(true, Ordering::Release);
            bell.ring();
            (answer, taking.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }

    /// Sleeps until there are bytes to take, or space for bytes that may be given, or the bell rings.
    pub fn wait(&self, deadline: Instant) -> io::Result<()> {
        self.sleep(self.target.as_ref().filter(|_| self.between.len() > self.kept_back), deadline)
    }

    fn sleep(&self, target: Option<&UnixStream>, deadline: Instant) -> io::Result<()> {
        let timeout = Timespec::try_from(left(deadline)?).map_err(|_| ErrorKind::InvalidInput)?;
        let mut fds = vec![PollFd::new(&*self.bell.0, PollFlags::IN)];
        fds.extend(self.source.as_ref().map(|source| PollFd::new(source, PollFlags::IN)));
        fds.extend(target.map(|target| PollFd::new(target, PollFlags::OUT)));
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.bell.silence();
        Ok(())
    }

    /// Takes everything that has arrived by now.
    pub fn take(&mut self) -> io::Result<()> {
        let Some(source) = &mut self.source else { return Ok(()) };
        loop {
            match source.read(&mut self.piece) {
                Ok(0) => {
                    self.source = None;
                    return Ok(());
                }
                Ok(length) => {
                    self.between.extend_from_slice(&self.piece[..length]);
                    self.received += length as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => passing(error)?,
            }
            if self.between.len() > STATE_BYTES_MAX {
                return Err(too_much());
            }
        }
    }

    /// The bytes that are not given yet.
    pub fn between(&mut self) -> &mut [u8] {
        &mut self.between
    }

    /// Sets how many of the last bytes received are kept back for now.
    pub fn keep_back(&mut self, bytes: usize) {
        self.kept_back = bytes;
    }

    /// Lets all bytes go, and the end after them: the state is whole.
    pub fn release(&mut self) {
        (self.source, self.kept_back) = (None, 0);
    }

    /// Gives as many bytes as may go and are taken. A target that hangs up reports the reason elsewhere.
    pub fn give(&mut self) {
        let Some(target) = &mut self.target else { return };
        let mut gone = 0;
        let free = self.between.len().saturating_sub(self.kept_back);
        while gone < free {
            match target.write(&self.between[gone..free]) {
                Ok(length) => gone += length,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.target = None;
                    return;
                }
            }
        }
        self.between.drain(..gone);
        if self.between.is_empty() && self.source.is_none() {
            // Closing would not do, because others may keep the socket open.
            let _ = target.shutdown(Shutdown::Write);
            self.target = None;
        }
    }
}

fn too_much() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "this is more than devices can have")
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Passes over errors that are no failure. The next round checks the deadline.
fn passing(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn whole_state_arrives_with_its_end() {
        let state: Vec<u8> = (0..3_000_000u32).map(|byte| byte as u8).collect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sent = state.clone();
        let sender = std::thread::spawn(move || send(ours.into(), &sent, Instant::now() + LONG));
        assert!(receive(theirs.into(), Instant::now() + LONG).unwrap() == state);
        sender.join().unwrap().unwrap();
    }

    /// Sends more than a socket holds, before the answer. Returns false if there was no space.
    fn send_before_answering(mut stream: UnixStream, state: &[u8]) -> bool {
        stream.set_write_timeout(Some(LONG)).unwrap();
        stream.write_all(state).is_ok()
    }

    #[test]
    fn state_is_received_before_qemu_answers() {
        let state = vec![7; 3_000_000];
        let deadline = || Instant::now() + 2 * LONG;
        let (old, ours) = UnixStream::pair().unwrap();
        let ask = || if send_before_answering(old, &state) { Ok(()) } else { Err("no room") };
        assert!(receive_while(ours.into(), deadline(), ask).unwrap() == Ok(state.clone()));

        let (old, source) = UnixStream::pair().unwrap();
        let (target, _new) = UnixStream::pair().unwrap();
        let mut passage = Transfer::open(source.into(), target, Bell::new().unwrap(), 4).unwrap();
        let (had_room, taken) = passage.take_while(deadline(), || send_before_answering(old, &state));
        assert!(had_room && taken.is_ok());
        passage.take().unwrap();
        assert!(passage.between() == state, "and nothing of it is given yet");
    }

    #[test]
    fn a_refusal_does_not_wait_for_a_state() {
        let (_old, ours) = UnixStream::pair().unwrap();
        let refused = receive_while(ours.into(), Instant::now() + Duration::from_secs(3600), || Err("no"));
        assert_eq!(refused.unwrap(), Err("no"));
    }

    #[test]
    fn state_passes_but_its_end_is_kept_back() {
        let (mut old, source) = UnixStream::pair().unwrap();
        let (target, mut new) = UnixStream::pair().unwrap();
        let bell = Bell::new().unwrap();
        let mut passage = Transfer::open(source.into(), target, bell.clone(), 4).unwrap();
        old.write_all(b"the whole state").unwrap();
        passage.take().unwrap();
        passage.give();
        let mut begin = [0; 11];
        new.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"the whole s");
        passage.between().make_ascii_uppercase();
        passage.release();
        passage.give();
        let mut end = String::new();
        new.read_to_string(&mut end).unwrap();
        assert_eq!((end.as_str(), passage.received()), ("TATE", 15));
        bell.ring();
        passage.wait(Instant::now() + LONG).unwrap();
        assert_eq!(passage.wait(Instant::now()).unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn hung_and_closed_sides_are_told_apart() {
        let soon = || Instant::now() + Duration::from_millis(10);
        let (ours, theirs) = Stream::pair().unwrap();
        assert_eq!(receive(ours.try_clone().unwrap(), soon()).unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(send(ours.try_clone().unwrap(), &vec![0; 8 << 20], soon()).unwrap_err().kind(), ErrorKind::TimedOut);
        drop(theirs);
        assert_eq!(send(ours, &[0], soon()).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
