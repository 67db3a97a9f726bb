//! A client's connection, over a unix socket or TCP.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub trait Stream: Read + Write + AsFd + Sized {
    fn set_read_timeout(&self, patience: Duration) -> io::Result<()>;
    fn set_write_timeout(&self, patience: Duration) -> io::Result<()>;
    /// Ends the connection, even while a clone of it lives.
    fn close(&self);

    /// Whether the client is gone.
    fn has_hung_up(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(self, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default()))?;
        Ok(fds[0].revents().contains(PollFlags::HUP))
    }
}

macro_rules! stream {
    ($type:ty) => {
        impl Stream for $type {
            fn set_read_timeout(&self, patience: Duration) -> io::Result<()> {
                <$type>::set_read_timeout(self, Some(patience))
            }

            fn set_write_timeout(&self, patience: Duration) -> io::Result<()> {
                <$type>::set_write_timeout(self, Some(patience))
            }

            fn close(&self) {
                // Fails only if the client has closed it.
                let _ = self.shutdown(Shutdown::Both);
            }
        }
    };
}

stream!(UnixStream);
stream!(TcpStream);
