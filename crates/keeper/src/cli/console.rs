//! `hearth console`: the terminal becomes the guest's serial console until Ctrl-].

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

use super::{CliError, Context, Exit};
use crate::client::ClientError;

/// Ctrl-], as in telnet and virsh.
const DETACH: u8 = 0x1d;
/// How long to wait for a keeper that does not accept connections.
const PATIENCE: Duration = Duration::from_secs(10);

pub fn connect(context: &mut Context<'_>, name: &str) -> Result<Exit, CliError> {
    let path = context.root.console_socket(name);
    let mut socket = match hearth_qemu::connect_within(&path, PATIENCE) {
        Ok(socket) => socket,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Err(context.not_running(name));
        }
        Err(source) if source.kind() == io::ErrorKind::WouldBlock => {
            return Err(ClientError::Silent { socket: path, source }.into());
        }
        Err(source) => return Err(CliError::File { path, source }),
    };
    let stdin = io::stdin();
    let terminal = isatty(&stdin);
    let end = {
        let _raw = if terminal {
            eprintln!("connected to {name}; Ctrl-] disconnects");
            Some(Raw::enter(stdin.as_fd())?)
        } else {
            None
        };
        relay(stdin.as_fd(), &mut socket, context.out, terminal)?
    };
    if terminal {
        eprintln!("{}", end.words(name));
    }
    Ok(Exit::Done)
}

/// Why a console ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Detached,
    Closed,
}

impl End {
    fn words(self, name: &str) -> String {
        match self {
            Self::Detached => format!("\ndisconnected; {name} keeps running"),
            Self::Closed => format!("\nthe keeper of {name} has ended"),
        }
    }
}

/// The terminal in raw mode: no echo, line editing or signals. Dropping this restores it.
struct Raw<'a> {
    terminal: BorrowedFd<'a>,
    before: Termios,
}

impl<'a> Raw<'a> {
    fn enter(terminal: BorrowedFd<'a>) -> Result<Self, CliError> {
        let failed = |error: rustix::io::Errno| CliError::Terminal(error.into());
        let before = tcgetattr(terminal).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(terminal, OptionalActions::Flush, &raw).map_err(failed)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        // If the terminal is gone, nobody sees its mode.
        let _ = tcsetattr(self.terminal, OptionalActions::Flush, &self.before);
    }
}

/// Copies both ways until the keeper closes or, with a terminal, Ctrl-] is typed. The end of other input is passed on.
fn relay(input: BorrowedFd<'_>, socket: &mut UnixStream, out: &mut dyn Write, terminal: bool) -> Result<End, CliError> {
    let mut typing = true;
    let mut buffer = [0; 4096];
    loop {
        let (input_ready, socket_ready) = wait(input, socket, typing)?;
        if socket_ready {
            match socket.read(&mut buffer) {
                Ok(0) => return Ok(End::Closed),
                Ok(length) => {
                    out.write_all(&buffer[..length])?;
                    out.flush()?;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(End::Closed),
                Err(error) => return Err(error.into()),
            }
        }
        if input_ready {
            let length = rustix::io::read(input, &mut buffer).map_err(|error| CliError::Terminal(error.into()))?;
            let typed = &buffer[..length];
            let detach = typed.iter().position(|byte| terminal && *byte == DETACH);
            if socket.write_all(&typed[..detach.unwrap_or(length)]).is_err() {
                return Ok(End::Closed);
            }
            if detach.is_some() {
                return Ok(End::Detached);
            }
            if length == 0 {
                typing = false;
                socket.shutdown(std::net::Shutdown::Write)?;
            }
        }
    }
}

/// Which of the two has something to read, or has ended.
fn wait(input: BorrowedFd<'_>, socket: &UnixStream, typing: bool) -> Result<(bool, bool), CliError> {
    let mut fds = vec![PollFd::new(socket, PollFlags::IN)];
    if typing {
        fds.push(PollFd::from_borrowed_fd(input, PollFlags::IN));
    }
    loop {
        match poll(&mut fds, None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(CliError::Terminal(error.into())),
        }
    }
    Ok((fds.get(1).is_some_and(|fd| !fd.revents().is_empty()), !fds[0].revents().is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The guest's input, the console's output, and how it ended.
    fn check(input: &[u8], output: &[u8], terminal: bool, close: bool, expect: (&[u8], &[u8], End)) {
        let (mut hub, mut socket) = UnixStream::pair().unwrap();
        let (keyboard, mut fingers) = UnixStream::pair().unwrap();
        hub.write_all(output).unwrap();
        fingers.write_all(input).unwrap();
        fingers.shutdown(std::net::Shutdown::Write).unwrap();
        if close {
            hub.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let mut shown = Vec::new();
        let end = relay(keyboard.as_fd(), &mut socket, &mut shown, terminal).unwrap();
        drop(socket);
        let mut got = Vec::new();
        hub.read_to_end(&mut got).unwrap();
        assert_eq!((&got[..], &shown[..], end), expect);
    }

    #[test]
    fn detach_key_disconnects_and_is_not_sent() {
        check(b"ls\n\x1drest", b"login: ", true, false, (b"ls\n", b"login: ", End::Detached));
    }

    #[test]
    fn without_a_terminal_every_byte_is_passed_on() {
        // Both ends are ready at once, and the keeper's end ends it: what was typed may or may not have been sent.
        let (mut hub, mut socket) = UnixStream::pair().unwrap();
        let (keyboard, mut fingers) = UnixStream::pair().unwrap();
        fingers.write_all(b"a\x1db").unwrap();
        drop(fingers);
        let reader = std::thread::spawn(move || {
            let mut got = [0; 3];
            hub.read_exact(&mut got).unwrap();
            hub.write_all(b"done").unwrap();
            got
        });
        let mut shown = Vec::new();
        assert_eq!(relay(keyboard.as_fd(), &mut socket, &mut shown, false).unwrap(), End::Closed);
        assert_eq!((reader.join().unwrap(), &shown[..]), (*b"a\x1db", &b"done"[..]));
    }

    #[test]
    fn the_keepers_end_is_the_consoles_end() {
        let (hub, mut socket) = UnixStream::pair().unwrap();
        let (keyboard, _fingers) = UnixStream::pair().unwrap();
        drop(hub);
        assert_eq!(relay(keyboard.as_fd(), &mut socket, &mut Vec::new(), true).unwrap(), End::Closed);
    }
}
