//! Stream: a connection to a QEMU that delivers bytes and no descriptors.
//!
//! A QEMU that its guest has taken over may attach descriptors to its messages (SCM_RIGHTS). The kernel closes those that nobody
//! receives, in the thread that reads the message, or in the one that closes the connection. Closing a socket can take as long as
//! the sender likes: with SO_LINGER up to 68 years. So a stream receives descriptors, fails the read, and has them closed in the
//! background.

use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Maximum number of descriptors in one message (SCM_MAX_FD in Linux).
const HANDED_MAX: usize = 253;

/// A connection to a QEMU. Dropping it never blocks.
#[derive(Debug)]
pub struct Stream(UnixStream);

impl From<UnixStream> for Stream {
    fn from(socket: UnixStream) -> Self {
        Self(socket)
    }
}

impl Stream {
    /// A connected pair: our end, and the end for QEMU.
    pub fn pair() -> io::Result<(Self, UnixStream)> {
        UnixStream::pair().map(|(ours, theirs)| (Self(ours), theirs))
    }

    /// Shares the connection. Once either of the two is dropped, nothing can be read from the other.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// As [`UnixStream::set_nonblocking`].
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.0.set_nonblocking(nonblocking)
    }

    /// As [`UnixStream::set_read_timeout`].
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(timeout)
    }

    /// As [`UnixStream::set_write_timeout`].
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_write_timeout(timeout)
    }

    /// As [`UnixStream::shutdown`].
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.0.shutdown(how)
    }

    fn receive(&self, buffer: &mut [u8], flags: RecvFlags) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let bytes = recvmsg(&self.0, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags)?.bytes;
        let mut handed = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                handed.extend(descriptors);
            }
        }
        Ok((bytes, handed))
    }
}

impl Read for Stream {
    /// Fails with `InvalidData` if descriptors came with the bytes.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (bytes, handed) = self.receive(buffer, RecvFlags::empty())?;
        if handed.is_empty() {
            return Ok(bytes);
        }
        handed.into_iter().for_each(background_close::close_descriptor);
        Err(io::Error::new(ErrorKind::InvalidData, "QEMU sent unrequested descriptors"))
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Stream {
    /// Unread messages may carry descriptors too.
    fn drop(&mut self) {
        // No message arrives after this. It fails only if the connection is already closed.
        let _ = self.0.shutdown(Shutdown::Read);
        let mut buffer = [0; 4096];
        while let Ok((bytes, handed)) = self.receive(&mut buffer, RecvFlags::DONTWAIT) {
            if bytes == 0 && handed.is_empty() {
                break;
            }
            handed.into_iter().for_each(background_close::close_descriptor);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::channel;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);
    const LINGERS: Duration = Duration::from_secs(3600);

    /// Sends a socket that takes an hour to close, without keeping a copy. Returns the listener behind its other end.
    fn send_a_lingering_socket(to: &UnixStream) -> TcpListener {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 65536]).is_ok() {}
        socket.set_nonblocking(false).unwrap();
        sockopt::set_socket_linger(&socket, Some(LINGERS)).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [socket.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(to, &[IoSlice::new(b"words")], &mut ancillary, SendFlags::empty()).unwrap();
        listener
    }

    /// Checks that an action on a connection with such a message returns.
    fn check(act: impl FnOnce(Stream) + Send + 'static) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let _listener = send_a_lingering_socket(&theirs);
        let (ended, end) = channel();
        std::thread::spawn(move || {
            act(ours.into());
            ended.send(()).unwrap();
        });
        end.recv_timeout(PATIENCE).unwrap();
    }

    #[test]
    fn descriptors_that_come_along_block_nobody() {
        check(|mut stream| assert_eq!(stream.read(&mut [0; 64]).unwrap_err().kind(), ErrorKind::InvalidData));
        check(drop);
    }
}
