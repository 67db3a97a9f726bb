//! Incoming connections: the processes that connect to a disk's socket, and which of them may.
//!
//! connect -> whose process is it? -> expected: served, or kept in the lobby until there is a place
//!                                 -> anybody else: turned away, with a warning
//!
//! The mode of the socket lets in a whole user, and several QEMUs may run as one. So every connection is checked against
//! the processes that the owner of the server expects. The kernel notes the process at `connect`, so a connection that
//! waited in the backlog, or that was passed on, still belongs to whoever made it. A process is known by pid and start
//! time. The pid of a connection whose maker has ended may belong to another process by now: a pidfd of the peer tells
//! (Linux 6.5). Older kernels have none; there only what connected before the expected process was started can be such
//! a connection, and `Expected::undecided` turns that away beforehand.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Two QEMUs at a disk at most, each of which may have connected again before its last connection was cleared away.
const LOBBY_MAX: usize = 4;
/// Connections that are turned away are reported at most this often, so that nobody can fill the log.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// A process that may connect to a disk's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process id.
    pub pid: u32,
    /// Start time: field 22 of /proc/PID/stat.
    pub start_ticks: u64,
}

impl Peer {
    /// The process that has this pid now.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, start_ticks: start_ticks(pid)? })
    }

    /// This process, for tests and tools that are their own frontend.
    pub fn this_process() -> io::Result<Self> {
        Self::of(std::process::id())
    }
}

/// Processes that may connect to a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// These processes.
    pub peers: Vec<Peer>,
    /// Another process is being started. Until it is known, new connections wait in the backlog.
    pub undecided: bool,
    /// Any process that can open the socket. Only for servers that are not a machine's.
    pub anyone: bool,
}

impl Expected {
    /// Only these processes may connect.
    pub fn these(peers: impl Into<Vec<Peer>>) -> Self {
        Self { peers: peers.into(), ..Self::default() }
    }

    /// These processes may connect, and one that is being started.
    pub fn and_another(peers: impl Into<Vec<Peer>>) -> Self {
        Self { undecided: true, ..Self::these(peers) }
    }

    /// Any process that can open the socket may connect. Only for servers that are not a machine's.
    pub fn anyone() -> Self {
        Self { anyone: true, ..Self::default() }
    }

    pub(super) fn includes(&self, pid: u32) -> bool {
        self.anyone || self.peers.iter().any(|peer| peer.pid == pid)
    }
}

/// Judges connections, and keeps those for which there is no place yet.
pub(super) struct IncomingConnections {
    pub expected: Expected,
    lobby: VecDeque<IncomingConnection>,
    turned_away: u64,
    warned: Option<Instant>,
}

/// A connection that may be served.
pub(super) struct IncomingConnection {
    pub pid: u32,
    pub stream: UnixStream,
}

impl IncomingConnections {
    pub fn new(expected: Expected) -> Self {
        Self { expected, lobby: VecDeque::new(), turned_away: 0, warned: None }
    }

    /// Connections in the lobby that are not expected any more are closed.
    pub fn expect(&mut self, expected: Expected) {
        self.expected = expected;
        for incoming_connection in std::mem::take(&mut self.lobby) {
            if self.expected.includes(incoming_connection.pid) {
                self.lobby.push_back(incoming_connection);
            } else {
                background_close::close(incoming_connection.stream);
            }
        }
    }

    /// A new connection: it comes to the lobby, or is closed.
    pub fn arrived(&mut self, disk: &str, socket: &Path, stream: UnixStream) {
        match identify(&stream, &self.expected) {
            Ok(pid) => {
                if self.lobby.len() == LOBBY_MAX {
                    self.lobby.pop_front().into_iter().for_each(|oldest| background_close::close(oldest.stream));
                }
                self.lobby.push_back(IncomingConnection { pid, stream });
            }
            Err(pid) => {
                // Descriptors may be on their way in it, and closing those may take its time.
                background_close::close(stream);
                self.turn_away(disk, socket, pid);
            }
        }
    }

    /// The one that has waited longest.
    pub fn next(&mut self) -> Option<IncomingConnection> {
        self.lobby.pop_front()
    }

    fn turn_away(&mut self, disk: &str, socket: &Path, pid: Option<u32>) {
        self.turned_away += 1;
        if self.warned.is_some_and(|warned| warned.elapsed() < WARN_EVERY) {
            return;
        }
        self.warned = Some(Instant::now());
        let (socket, turned_away) = (socket.display(), self.turned_away);
        tracing::warn!(disk, %socket, pid, turned_away, "closed a connection of a process that this socket is not for");
    }
}

/// The pid of an expected process, or else of whoever it is, where that can be told.
fn identify(stream: &UnixStream, expected: &Expected) -> Result<u32, Option<u32>> {
    let Ok(credentials) = rustix::net::sockopt::socket_peercred(stream) else { return Err(None) };
    let pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
    if expected.anyone {
        return Ok(pid);
    }
    if !expected.includes(pid) {
        return Err(Some(pid));
    }
    let lives = match peer_pidfd(stream) {
        Ok(pidfd) => !has_ended(&pidfd),
        Err(error) => error.raw_os_error() == Some(libc::ENOPROTOOPT),
    };
    // The maker of the connection lives, so its pid means the same process there and here.
    let found = Peer::of(pid);
    if lives && found.is_ok_and(|found| expected.peers.contains(&found)) { Ok(pid) } else { Err(Some(pid)) }
}

/// The process that connected. `ENOPROTOOPT`: the kernel is older than 6.5.
fn peer_pidfd(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut number: libc::c_int = -1;
    let mut bytes = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to `number`, and both live until then.
    let asked = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut number).cast(),
            &raw mut bytes,
        )
    };
    if asked != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened this descriptor for us, and nobody else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn has_ended(pidfd: &impl AsFd) -> bool {
    !matches!(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&Timespec::default())), Ok(0))
}

fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything: count fields after its end.
    let after_name = stat.rsplit_once(')').map(|(_, rest)| rest);
    let field = after_name.and_then(|rest| rest.split_ascii_whitespace().nth(19));
    field.and_then(|ticks| ticks.parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

    use super::*;

    /// A connection that was made by a process which has ended since, and its pid. A child of that process keeps it open.
    fn orphan() -> (UnixStream, u32) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        let connect = move || {
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
            rustix::net::connect(&socket, &address)?;
            std::mem::forget(socket);
            Ok(())
        };
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 5 </dev/null >/dev/null 2>&1 &"]);
        // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
        unsafe {
            command.pre_exec(connect);
        }
        let mut child = command.spawn().unwrap();
        child.wait().unwrap();
        (listener.accept().unwrap().0, child.id())
    }

    fn pair_from_this_process() -> UnixStream {
        UnixStream::pair().unwrap().0
    }

    #[test]
    fn a_peer_is_its_pid_and_its_start() {
        let me = Peer::this_process().unwrap();
        let stream = pair_from_this_process();
        let check =
            |expected: Expected, expect: Result<u32, Option<u32>>| assert_eq!(identify(&stream, &expected), expect);
        check(Expected::these([me]), Ok(me.pid));
        check(Expected::anyone(), Ok(me.pid));
        check(Expected::these([]), Err(Some(me.pid)));
        check(Expected::and_another([]), Err(Some(me.pid)));
        check(Expected::these([Peer { pid: me.pid + 1, ..me }]), Err(Some(me.pid)));
        check(Expected::these([Peer { start_ticks: me.start_ticks + 1, ..me }]), Err(Some(me.pid)));
        check(Expected::these([Peer { pid: 1, start_ticks: 0 }, me]), Ok(me.pid));
    }

    #[test]
    fn a_connection_outlives_its_maker_and_is_refused() {
        let (stream, pid) = orphan();
        // Even if the pid now belongs to the expected process.
        let expected = Expected::these([Peer { pid, start_ticks: 0 }]);
        assert_eq!(identify(&stream, &expected), Err(Some(pid)));
        assert!(peer_pidfd(&stream).map_or(true, |pidfd| has_ended(&pidfd)));
    }

    #[test]
    fn lobby_is_bounded_and_closes_the_unexpected() {
        let me = Peer::this_process().unwrap();
        let mut incoming = IncomingConnections::new(Expected::these([me]));
        for _ in 0..10 {
            incoming.arrived("test", Path::new("/x"), pair_from_this_process());
        }
        assert_eq!(incoming.lobby.len(), LOBBY_MAX);
        incoming.expect(Expected::and_another([me]));
        assert_eq!(incoming.lobby.len(), LOBBY_MAX);
        incoming.expect(Expected::and_another([]));
        assert!(incoming.next().is_none());
    }

    #[test]
    fn strangers_are_counted_and_reported_once() {
        let mut incoming = IncomingConnections::new(Expected::these([]));
        for _ in 0..10 {
            incoming.arrived("test", Path::new("/x"), pair_from_this_process());
        }
        assert_eq!(incoming.turned_away, 10);
        let warned = incoming.warned.unwrap();
        incoming.arrived("test", Path::new("/x"), pair_from_this_process());
        assert_eq!(incoming.warned, Some(warned));
    }
}
