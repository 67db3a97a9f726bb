//! Endpoint: a socket on which a QEMU listens, with a check that the listener is that QEMU.
//!
//! The keeper creates these sockets, and QEMU calls `listen` on them again (`socket_listen` in QEMU's
//! util/qemu-sockets.c). From then on, the kernel reports QEMU as the peer of new connections; before that, it reports
//! the keeper.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::process::start_ticks;
use crate::{ProcessId, Stream};

/// Minimum interval between two warnings, in seconds: some callers retry several times a second.
const WARN_EVERY_S: u64 = 10;
static WARNED_S: AtomicU64 = AtomicU64::new(0);

/// A socket and its expected listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Path of the socket.
    pub socket: PathBuf,
    /// The expected QEMU. None accepts any listener, for tests and tools that belong to no machine.
    pub qemu: Option<ProcessId>,
}

/// Connects to the socket at `path`, or fails with `WouldBlock` after `patience`. A process that stands still keeps the connections of
/// callers that have given up in its backlog, and a full backlog holds the next caller.
pub fn connect_within(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

impl Endpoint {
    /// An endpoint that accepts any listener.
    pub fn unchecked(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), qemu: None }
    }

    /// Connects as `connect_within`. Fails if another process listens.
    pub fn connect(&self, patience: Duration) -> io::Result<Stream> {
        let stream = Stream::from(connect_within(&self.socket, patience)?);
        self.check(&stream)?;
        Ok(stream)
    }

    /// Fails if another process than the expected QEMU or this process listens.
    pub fn check(&self, stream: &Stream) -> io::Result<()> {
        let Some(qemu) = self.qemu else { return Ok(()) };
        let pid = socket_peercred(stream)?.pid.as_raw_nonzero().get().unsigned_abs();
        let is_qemu = || pid == qemu.pid && start_ticks(pid).is_ok_and(|ticks| ticks == qemu.start_ticks);
        if pid == std::process::id() || is_qemu() {
            return Ok(());
        }
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if now_s.saturating_sub(WARNED_S.swap(now_s, Ordering::Relaxed)) >= WARN_EVERY_S {
            let socket = self.socket.display();
            tracing::warn!(%socket, pid, qemu = qemu.pid, "closed a connection to a process that is not this machine's QEMU");
        }
        let message = format!("process {pid} listens there, and not QEMU (pid {})", qemu.pid);
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn only_the_expected_listener_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        Endpoint::unchecked(&socket).connect(LONG).unwrap();
        // QEMU has not called `listen` yet: this process is still the listener.
        let nobody = ProcessId { pid: 1, start_ticks: 0 };
        Endpoint { socket, qemu: Some(nobody) }.connect(LONG).unwrap();
        // Another process that listens.
        let other = folder.path().join("other.sock");
        let script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(flush=True); sys.stdin.read()";
        let mut python = Command::new("python3");
        let mut child =
            python.args(["-c", script]).arg(&other).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut String::new()).unwrap();
        let it = ProcessId { pid: child.id(), start_ticks: start_ticks(child.id()).unwrap() };
        Endpoint { socket: other.clone(), qemu: Some(it) }.connect(LONG).unwrap();
        for stranger in [nobody, ProcessId { start_ticks: 1, ..it }] {
            let refusal = Endpoint { socket: other.clone(), qemu: Some(stranger) }.connect(LONG).unwrap_err();
            assert_eq!(refusal.kind(), io::ErrorKind::PermissionDenied, "{refusal}");
        }
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn full_backlog_holds_nobody_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::unchecked(folder.path().join("agent.sock"));
        let standing_still = UnixListener::bind(&endpoint.socket).unwrap();
        // As QEMU does.
        rustix::net::listen(&standing_still, 1).unwrap();
        let refused = (0..3).find_map(|_| endpoint.connect(Duration::from_millis(20)).err());
        assert_eq!(refused.unwrap().kind(), io::ErrorKind::WouldBlock);
    }
}
