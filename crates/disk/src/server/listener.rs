//! The listener: the socket at which a disk waits for QEMU.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::ServerError;

/// The socket of a disk, removed when its server ends.
pub struct SocketFile {
    /// Until it is dropped.
    listener: Option<UnixListener>,
    pub path: PathBuf,
}

impl SocketFile {
    pub fn listener(&self) -> &UnixListener {
        self.listener.as_ref().expect("it is there until the socket is dropped")
    }
}

impl AsFd for SocketFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener().as_fd()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // In connections that nobody has accepted there may be messages with descriptors that hold up whoever closes them.
        self.listener.take().into_iter().for_each(background_close::close);
    }
}

/// Listens at `path`, for this user only. A socket that nobody listens at is replaced, a living one is not.
pub fn listen(disk: &str, path: &Path) -> Result<SocketFile, ServerError> {
    if is_listened_at(path) {
        return Err(ServerError::SocketInUse { disk: disk.to_owned(), socket: path.to_owned() });
    }
    let make = || -> io::Result<UnixListener> {
        // Renamed into place with its mode set, so that there is no moment at which others could connect.
        let mut fresh = path.as_os_str().to_owned();
        fresh.push(".new");
        let fresh = PathBuf::from(fresh);
        match std::fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (),
        }
        let listener = UnixListener::bind(&fresh)?;
        std::fs::set_permissions(&fresh, Permissions::from_mode(0o600))?;
        std::fs::rename(&fresh, path)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let listener = make().map_err(|source| {
        let (disk, socket) = (disk.to_owned(), path.to_owned());
        ServerError::Listen { disk, socket, source }
    })?;
    Ok(SocketFile { listener: Some(listener), path: path.to_owned() })
}

/// Whether a process listens at `path`, be its backlog full or not.
fn is_listened_at(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let connected = socket.and_then(|socket| rustix::net::connect(&socket, &SocketAddrUnix::new(path)?));
    matches!(connected, Ok(()) | Err(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};

    use super::*;

    /// A stranger connects, and sends a socket that takes an hour to close.
    #[test]
    fn unaccepted_connection_does_not_hold_up_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.sock");
        let socket = listen("vda", &path).unwrap();
        let other_end = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut lingering = TcpStream::connect(other_end.local_addr().unwrap()).unwrap();
        lingering.set_nonblocking(true).unwrap();
        while lingering.write(&[0; 65536]).is_ok() {}
        lingering.set_nonblocking(false).unwrap();
        sockopt::set_socket_linger(&lingering, Some(Duration::from_secs(3600))).unwrap();
        let stranger = UnixStream::connect(&path).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [lingering.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&stranger, &[IoSlice::new(b"words")], &mut ancillary, SendFlags::empty()).unwrap();
        drop(lingering);
        let (ended, end) = channel();
        std::thread::spawn(move || {
            drop(socket);
            ended.send(()).unwrap();
        });
        end.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn socket_with_a_full_backlog_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.sock");
        let standing_still = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&standing_still, 0).unwrap();
        for _ in 0..3 {
            assert!(matches!(listen("vda", &path), Err(ServerError::SocketInUse { .. })));
        }
        drop(standing_still);
        listen("vda", &path).unwrap();
    }
}
