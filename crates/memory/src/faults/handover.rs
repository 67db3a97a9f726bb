//! Hand-over: how the keeper gets the userfaultfd that was made inside QEMU.
//!
//! bind -> QEMU starts, its preload library connects -> check the peer -> receive message and descriptors ->
//! acknowledge
//!
//! QEMU itself must make the descriptor, because it acts on the memory of the process that made it. QEMU keeps a copy:
//! if the keeper held the only one and died, the guest would silently read zeroes. With it comes one end of the channel
//! to a thread of the preload library (`access`). QEMU keeps a copy of that end too, for the next keeper.
//!
//! ```text
//! one message, 128 bytes, native byte order         answer, 1 byte
//! |  0 magic "HRTHUFFD"                             | 'K' the keeper has the descriptor
//! |  8 u32 version = 2
//! | 12 i32 descriptor's number in QEMU, -1 if there is none
//! | 16 i32 errno, 0 if there is a descriptor
//! | 20 i32 number of the channel's end in QEMU, -1 if there is none
//! | 24 104 bytes of text: why there is no descriptor, padded with zeroes
//! ```
//! The descriptor and the channel's end, where they exist, come with the message (SCM_RIGHTS). Every wait is bounded: a
//! silent QEMU costs at most the given time, and one that ends is noticed at once.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use plain_text::printable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

const MAGIC: &[u8; 8] = b"HRTHUFFD";
const VERSION: u32 = 2;
const MESSAGE_BYTES: usize = 128;
const WHY_OFFSET: usize = 24;
const ACKNOWLEDGED: &[u8] = b"K";
/// Maximum number of connections from other processes; each one is logged. After that, the wait fails.
const STRANGERS_MAX: u32 = 16;

/// Listening socket for a QEMU that is about to start.
#[derive(Debug)]
pub struct HandoverListener {
    socket: UnixListener,
    path: PathBuf,
}

/// A userfaultfd that QEMU made; its ioctls act on QEMU's memory.
#[derive(Debug)]
pub struct Userfault {
    /// The keeper's copy of the descriptor.
    pub fd: OwnedFd,
    /// Number of QEMU's own copy. If this keeper dies, the next one fetches the copy by this number (pidfd_getfd).
    pub fd_in_qemu: i32,
    /// Process ID of QEMU.
    pub qemu_pid: u32,
    /// Channel to the helper thread. None if an older preload library is loaded or QEMU could not start the thread.
    pub helper: Option<Helper>,
}

/// The keeper's end of the channel to a thread in QEMU, which does what only QEMU itself can do: see `access`.
#[derive(Debug)]
pub struct Helper {
    /// The keeper's copy of the descriptor.
    pub fd: OwnedFd,
    /// Number of QEMU's own copy.
    pub fd_in_qemu: i32,
}

/// Errors of the hand-over.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum HandoverError {
    #[error("{path}: cannot listen on this socket")]
    Bind { path: PathBuf, source: io::Error },
    #[error(
        "{path}: no userfaultfd from QEMU (pid {pid}) within {patience:?}; was it started with the preload library?"
    )]
    TimedOut { path: PathBuf, pid: u32, patience: Duration },
    #[error("QEMU (pid {pid}) ended before it handed over its userfaultfd")]
    Ended { pid: u32 },
    #[error("QEMU (pid {pid}) has no userfaultfd: {why}")]
    Refused { pid: u32, why: String },
    #[error(
        "QEMU (pid {pid}) sent an invalid hand-over message: {why}; do keeper and preload library have the same version?"
    )]
    Garbled { pid: u32, why: &'static str },
    #[error("the hand-over from QEMU (pid {pid}) failed")]
    Io { pid: u32, source: io::Error },
    #[error("QEMU (pid {pid}): its copy of the userfaultfd, descriptor {fd}, cannot be fetched")]
    Fetch { pid: u32, fd: i32, source: io::Error },
}

impl Userfault {
    /// Fetches QEMU's copies after the keeper that received the descriptors has died. Needs the right to trace QEMU.
    pub fn fetch(qemu_pid: u32, fd_in_qemu: i32, helper_in_qemu: Option<i32>) -> Result<Self, HandoverError> {
        let qemu = watch_process(qemu_pid)?;
        let fetch = |number: i32, kind: &str| {
            let failed = |source| HandoverError::Fetch { pid: qemu_pid, fd: number, source };
            let fd = pidfd_getfd(&qemu, number, PidfdGetfdFlags::empty()).map_err(|errno| failed(errno.into()))?;
            // The number comes from a file, and QEMU may use it for another file by now.
            let target = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(failed)?;
            if !target.as_os_str().as_encoded_bytes().starts_with(kind.as_bytes()) {
                return Err(failed(io::Error::other(format!("it is {} now", target.display()))));
            }
            Ok(fd)
        };
        let fd = fetch(fd_in_qemu, "anon_inode:[userfaultfd]")?;
        let helper = helper_in_qemu.and_then(|number| Some((number, fetch(number, "socket:").ok()?)));
        let helper = helper.map(|(fd_in_qemu, fd)| Helper { fd, fd_in_qemu });
        Ok(Self { fd, fd_in_qemu, qemu_pid, helper })
    }
}

impl HandoverListener {
    /// Listens on `path` and replaces the stale socket of a dead keeper. The folder's permissions decide who may
    /// connect, and `accept` checks the peer's pid.
    pub fn bind(path: &Path) -> Result<Self, HandoverError> {
        let failed = |source| HandoverError::Bind { path: path.to_owned(), source };
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let socket = UnixListener::bind(path).map_err(failed)?;
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the QEMU with this pid. Closes connections of other processes.
    pub fn accept(&self, expected_pid: u32, at_most: Duration) -> Result<Userfault, HandoverError> {
        let io_failed = |source| HandoverError::Io { pid: expected_pid, source };
        let deadline = Instant::now() + at_most;
        let qemu = watch_process(expected_pid)?;
        let mut strangers = 0;
        loop {
            match wait_for(self.socket.as_fd(), qemu.as_fd(), deadline).map_err(io_failed)? {
                Heard::Words => {}
                Heard::End => return Err(HandoverError::Ended { pid: expected_pid }),
                Heard::Nothing => {
                    let (path, pid) = (self.path.clone(), expected_pid);
                    return Err(HandoverError::TimedOut { path, pid, patience: at_most });
                }
            }
            let connection = match self.socket.accept() {
                Ok((connection, _)) => connection,
                // The peer has closed its connection already.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(io_failed(error)),
            };
            let pid = peer_pid(&connection).map_err(io_failed)?;
            if pid == expected_pid && has_living_peer(&connection) {
                return self.take(connection, expected_pid, qemu.as_fd(), deadline, at_most);
            }
            // It may have sent descriptors, and closing those may take its time.
            background_close::close(connection);
            let socket = self.path.display();
            tracing::warn!(%socket, pid, qemu = expected_pid, "closed a connection of a process that this socket is not for");
            strangers += 1;
            if strangers == STRANGERS_MAX {
                let (path, pid) = (self.path.clone(), expected_pid);
                return Err(HandoverError::TimedOut { path, pid, patience: at_most });
            }
        }
    }

    fn take(
        &self,
        mut connection: UnixStream,
        pid: u32,
        qemu: BorrowedFd<'_>,
        deadline: Instant,
        patience: Duration,
    ) -> Result<Userfault, HandoverError> {
        let io_failed = |source| HandoverError::Io { pid, source };
        match wait_for(connection.as_fd(), qemu, deadline).map_err(io_failed)? {
            Heard::Words => {}
            Heard::End => return Err(HandoverError::Ended { pid }),
            Heard::Nothing => return Err(HandoverError::TimedOut { path: self.path.clone(), pid, patience }),
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        connection.set_nonblocking(false).map_err(io_failed)?;
        connection.set_read_timeout(Some(left)).map_err(io_failed)?;
        let (message, descriptors) = receive(&mut connection).map_err(io_failed)?;
        let told = Told::parse(&message).map_err(|why| HandoverError::Garbled { pid, why })?;
        if let Some(why) = told.refusal {
            return Err(HandoverError::Refused { pid, why });
        }
        let mut descriptors = descriptors.into_iter();
        let fd = descriptors.next().ok_or(HandoverError::Garbled { pid, why: "its descriptor is missing" })?;
        let helper = told.helper_in_qemu.zip(descriptors.next()).map(|(fd_in_qemu, fd)| Helper { fd, fd_in_qemu });
        connection.write_all(ACKNOWLEDGED).map_err(io_failed)?;
        Ok(Userfault { fd, fd_in_qemu: told.fd_in_qemu, qemu_pid: pid, helper })
    }
}

impl Drop for HandoverListener {
    fn drop(&mut self) {
        // The socket serves one QEMU. If this fails, the next `bind` replaces the file.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The message, parsed.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    fd_in_qemu: i32,
    helper_in_qemu: Option<i32>,
    refusal: Option<String>,
}

impl Told {
    fn parse(message: &[u8; MESSAGE_BYTES]) -> Result<Self, &'static str> {
        let word = |at: usize| [message[at], message[at + 1], message[at + 2], message[at + 3]];
        if &message[..8] != MAGIC {
            return Err("its magic is wrong");
        }
        if u32::from_ne_bytes(word(8)) != VERSION {
            return Err("its version differs from the keeper's");
        }
        let fd_in_qemu = i32::from_ne_bytes(word(12));
        let errno = i32::from_ne_bytes(word(16));
        let helper_in_qemu = Some(i32::from_ne_bytes(word(20))).filter(|number| *number >= 0);
        if fd_in_qemu >= 0 {
            return Ok(Self { fd_in_qemu, helper_in_qemu, refusal: None });
        }
        let text = message[WHY_OFFSET..].split(|&byte| byte == 0).next().unwrap_or_default();
        let why = format!("{}: {}", printable(&String::from_utf8_lossy(text)), io::Error::from_raw_os_error(errno));
        Ok(Self { fd_in_qemu, helper_in_qemu, refusal: Some(why) })
    }
}

/// Reads the message; the descriptors arrive with its first byte.
fn receive(connection: &mut UnixStream) -> io::Result<([u8; MESSAGE_BYTES], Vec<OwnedFd>)> {
    let mut message = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let buffer = &mut [IoSliceMut::new(&mut message)];
    let received = recvmsg(&*connection, buffer, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(come) = part {
            descriptors.extend(come);
        }
    }
    connection.read_exact(&mut message[received.bytes..])?;
    Ok((message, descriptors))
}

/// Opens a pidfd, which becomes readable when the process ends.
pub(super) fn watch_process(pid: u32) -> Result<OwnedFd, HandoverError> {
    let known = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(HandoverError::Ended { pid })?;
    match pidfd_open(known, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(pidfd),
        Err(rustix::io::Errno::SRCH) => Err(HandoverError::Ended { pid }),
        Err(errno) => Err(HandoverError::Io { pid, source: errno.into() }),
    }
}

fn peer_pid(connection: &UnixStream) -> io::Result<u32> {
    let peer = rustix::net::sockopt::socket_peercred(connection)?;
    Ok(peer.pid.as_raw_nonzero().get().unsigned_abs())
}

/// Whether the process that connected still lives; if not, its pid may be QEMU's by now. Kernels before 6.5 do not
/// tell, so the answer is true there. A mix-up then needs a reuse of the pid between `bind` and the start of QEMU.
fn has_living_peer(connection: &UnixStream) -> bool {
    let mut number: libc::c_int = -1;
    let mut bytes = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to `number`, and both live until then.
    let asked = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut number).cast(),
            &raw mut bytes,
        )
    };
    if asked != 0 {
        return io::Error::last_os_error().raw_os_error() == Some(libc::ENOPROTOOPT);
    }
    // SAFETY: the kernel has just opened this descriptor for us, and nobody else knows its number.
    let peer = unsafe { OwnedFd::from_raw_fd(number) };
    matches!(poll(&mut [PollFd::new(&peer, PollFlags::IN)], Some(&Timespec::default())), Ok(0))
}

enum Heard {
    Words,
    End,
    Nothing,
}

/// Waits until the socket is readable, the process has ended or the deadline has passed. Data wins over the end: a QEMU
/// that sent its message and then ended has still sent it.
fn wait_for(socket: BorrowedFd<'_>, process: BorrowedFd<'_>, deadline: Instant) -> io::Result<Heard> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut watched = [PollFd::new(&socket, PollFlags::IN), PollFd::new(&process, PollFlags::IN)];
        match poll(&mut watched, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
            Ok(0) => return Ok(Heard::Nothing),
            Ok(_) if !watched[0].revents().is_empty() => return Ok(Heard::Words),
            Ok(_) => return Ok(Heard::End),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::IoSlice;
    use std::process::{Child, Command, Stdio};

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    struct Place {
        _folder: tempfile::TempDir,
        listener: HandoverListener,
    }

    fn place() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let listener = HandoverListener::bind(&folder.path().join("userfault.sock")).unwrap();
        Place { _folder: folder, listener }
    }

    fn message(fd: i32, errno: i32, helper: i32, why: &str) -> [u8; MESSAGE_BYTES] {
        let mut message = [0; MESSAGE_BYTES];
        message[..8].copy_from_slice(MAGIC);
        message[8..12].copy_from_slice(&VERSION.to_ne_bytes());
        message[12..16].copy_from_slice(&fd.to_ne_bytes());
        message[16..20].copy_from_slice(&errno.to_ne_bytes());
        message[20..24].copy_from_slice(&helper.to_ne_bytes());
        message[24..24 + why.len()].copy_from_slice(why.as_bytes());
        message
    }

    /// Sends a message from a thread of this process in QEMU's place. The thread returns the answer.
    fn speak(path: &Path, bytes: Vec<u8>, descriptors: Vec<File>) -> std::thread::JoinHandle<Vec<u8>> {
        let mut connection = UnixStream::connect(path).unwrap();
        std::thread::spawn(move || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            if !descriptors.is_empty() {
                assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
            }
            let mut answer = Vec::new();
            // If the listener closes early, any of these calls may fail; either way there is no answer.
            let _ = sendmsg(&connection, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
                .map_err(io::Error::from)
                .and_then(|_| connection.shutdown(std::net::Shutdown::Write))
                .and_then(|()| connection.read_to_end(&mut answer));
            answer
        })
    }

    #[test]
    fn the_descriptors_arrive_and_are_acknowledged() {
        for helped in [false, true] {
            let place = place();
            let files: Vec<_> = (0..1 + i32::from(helped)).map(|_| tempfile::tempfile().unwrap()).collect();
            let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
            let (sent, inodes) =
                (files[0].as_raw_fd(), files.iter().map(|file| inode(file.as_fd())).collect::<Vec<_>>());
            let helper = if helped { files[1].as_raw_fd() } else { -1 };
            let speaker = speak(place.listener.path(), message(sent, 0, helper, "").to_vec(), files);
            let got = place.listener.accept(std::process::id(), LONG).unwrap();
            assert_eq!((got.fd_in_qemu, got.qemu_pid), (sent, std::process::id()));
            let come = [Some(got.fd.as_fd()), got.helper.as_ref().map(|helper| helper.fd.as_fd())];
            assert_eq!(come.into_iter().flatten().map(inode).collect::<Vec<_>>(), inodes);
            assert_eq!(got.helper.map_or(-1, |end| end.fd_in_qemu), helper);
            assert_eq!(speaker.join().unwrap(), ACKNOWLEDGED);
        }
    }

    #[test]
    fn qemus_reason_for_no_userfaultfd_is_reported() {
        let place = place();
        let bytes = message(-1, libc::EPERM, -1, "userfaultfd is not allowed").to_vec();
        let speaker = speak(place.listener.path(), bytes, Vec::new());
        let refusal = place.listener.accept(std::process::id(), LONG).unwrap_err().to_string();
        assert!(
            refusal.ends_with("has no userfaultfd: userfaultfd is not allowed: Operation not permitted (os error 1)")
        );
        assert_eq!(speaker.join().unwrap(), b"");
    }

    #[track_caller]
    fn check_garbled(bytes: Vec<u8>, expect: &str) {
        let place = place();
        let speaker = speak(place.listener.path(), bytes, Vec::new());
        let refusal = place.listener.accept(std::process::id(), LONG).unwrap_err().to_string();
        assert!(refusal.contains(expect), "{refusal}");
        speaker.join().unwrap();
    }

    #[test]
    fn invalid_messages_are_refused() {
        check_garbled(vec![7; MESSAGE_BYTES], "its magic is wrong");
        let mut newer = message(3, 0, -1, "");
        newer[8] = 3;
        check_garbled(newer.to_vec(), "its version differs from the keeper's");
        check_garbled(message(3, 0, -1, "").to_vec(), "its descriptor is missing");
        check_garbled(message(3, 0, -1, "")[..40].to_vec(), "the hand-over from QEMU");
    }

    #[test]
    fn connections_of_other_processes_are_closed() {
        let place = place();
        let mut bystander = sleeper();
        let speaker = speak(place.listener.path(), message(0, 0, -1, "").to_vec(), vec![tempfile::tempfile().unwrap()]);
        let refusal = place.listener.accept(bystander.id(), Duration::from_millis(1)).unwrap_err();
        assert!(matches!(refusal, HandoverError::TimedOut { .. }), "{refusal}");
        assert_eq!(speaker.join().unwrap(), b"");
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }

    #[test]
    fn ended_qemu_is_noticed_at_once() {
        let place = place();
        let mut child = sleeper();
        child.kill().unwrap();
        let refusal = place.listener.accept(child.id(), LONG).unwrap_err();
        assert!(matches!(refusal, HandoverError::Ended { .. }), "{refusal}");
        let pid = child.id();
        child.wait().unwrap();
        assert!(matches!(place.listener.accept(pid, LONG), Err(HandoverError::Ended { .. })));
    }

    #[test]
    fn stale_socket_is_replaced_and_bad_path_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("userfault.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(HandoverListener::bind(&path).unwrap());
        assert!(!path.exists());
        let refusal = HandoverListener::bind(&path.join("deeper")).unwrap_err().to_string();
        assert!(refusal.ends_with("userfault.sock/deeper: cannot listen on this socket"), "{refusal}");
    }

    /// A process that lives until it is killed or this test ends, which closes its input.
    fn sleeper() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }
}
