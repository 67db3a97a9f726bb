//! Sockets: what QEMU listens on is made by the keeper and handed to it open, and with it what QEMU logs its console to.
//!
//! So they are there before QEMU is, are private from the first moment, and nobody polls for them; and a QEMU that dies
//! during its start hangs up at once on whoever connected.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fd::BorrowedFd;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::{Launch, Transcript};

/// Listening sockets on their way to QEMU.
#[derive(Debug)]
pub struct Sockets {
    qmp: UnixListener,
    serial: UnixListener,
    transcript: Transcript,
    agent: Option<UnixListener>,
    /// Of networks, and locks; whoever made the launch holds them open.
    others: Vec<RawFd>,
}

/// Their numbers in QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketNumbers {
    pub qmp: RawFd,
    pub serial: RawFd,
    /// Where what comes over the serial console is logged.
    pub transcript: RawFd,
    pub agent: Option<RawFd>,
}

impl Sockets {
    /// The error names the socket that cannot be made.
    pub fn bind(launch: &Launch) -> Result<Self, (PathBuf, io::Error)> {
        let bind = |path: &Path| bind(path).map_err(|error| (path.to_owned(), error));
        let networks = launch.nets.iter().filter_map(|net| net.backend.number());
        let others = networks.chain(launch.inherited.iter().copied()).collect();
        let agent = launch.agent_socket.as_deref().map(bind).transpose()?;
        let transcript = Transcript::create().map_err(|error| (PathBuf::from("the console's transcript"), error))?;
        Ok(Self { qmp: bind(&launch.qmp_socket)?, serial: bind(&launch.serial_socket)?, transcript, agent, others })
    }

    pub fn numbers(&self) -> SocketNumbers {
        let agent = self.agent.as_ref().map(AsRawFd::as_raw_fd);
        let transcript = self.transcript.log().as_raw_fd();
        SocketNumbers { qmp: self.qmp.as_raw_fd(), serial: self.serial.as_raw_fd(), transcript, agent }
    }

    /// Leaves them open in the program that `command` starts, and only there. They must live until then.
    pub fn hand_to(&self, command: &mut Command) {
        let SocketNumbers { qmp, serial, transcript, agent } = self.numbers();
        let numbers = [&[qmp, serial, transcript], agent.as_slice(), &*self.others].concat();
        let keep_open = move || {
            for &number in &numbers {
                // SAFETY: the child has a copy of each descriptor under the number it has in the parent, where it is kept
                // open until the program is started.
                let socket = unsafe { BorrowedFd::borrow_raw(number) };
                fcntl_setfd(socket, FdFlags::empty())?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec only a system call is made, and nothing is allocated.
        unsafe {
            command.pre_exec(keep_open);
        }
    }

    pub fn into_transcript(self) -> Transcript {
        self.transcript
    }
}

/// One that a dead QEMU left behind is replaced.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(socket)
}
