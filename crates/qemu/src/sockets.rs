//! Sockets: the keeper makes QEMU's listening sockets and the console's transcript, and QEMU inherits them.
//!
//! So they exist before QEMU, are private from the start, and nobody polls for them. If QEMU dies during its start, a
//! client's connection is closed at once.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fd::BorrowedFd;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::{Launch, Transcript};

/// Listening sockets for a QEMU that is about to start.
#[derive(Debug)]
pub struct Sockets {
    qmp: UnixListener,
    serial: UnixListener,
    transcript: Transcript,
    agent: Option<UnixListener>,
    /// Descriptors of networks and locks; the maker of the launch keeps them open.
    others: Vec<RawFd>,
}

/// Descriptor numbers in QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketNumbers {
    /// QMP socket.
    pub qmp: RawFd,
    /// Socket of the serial console.
    pub serial: RawFd,
    /// Log of the serial console.
    pub transcript: RawFd,
    /// Socket of the guest agent, if there is one.
    pub agent: Option<RawFd>,
}

impl Sockets {
    /// Makes the sockets, the folder for the one that QEMU makes itself, and the transcript. An error names what it is about.
    pub fn bind(launch: &Launch) -> Result<Self, (PathBuf, io::Error)> {
        let bind = |path: &Path| bind(path).map_err(|error| (path.to_owned(), error));
        let networks = launch.nets.iter().filter_map(|net| net.backend.number());
        let others = networks.chain(launch.inherited.iter().copied()).collect();
        let agent = launch.agent_socket.as_deref().map(bind).transpose()?;
        if let Some(folder) = &launch.screen_folder {
            make_empty(folder).map_err(|error| (folder.clone(), error))?;
        }
        let transcript = Transcript::create().map_err(|error| (PathBuf::from("the console's transcript"), error))?;
        Ok(Self { qmp: bind(&launch.qmp_socket)?, serial: bind(&launch.serial_socket)?, transcript, agent, others })
    }

    /// Numbers of the descriptors, the same here and in QEMU.
    pub fn numbers(&self) -> SocketNumbers {
        let agent = self.agent.as_ref().map(AsRawFd::as_raw_fd);
        let transcript = self.transcript.log().as_raw_fd();
        SocketNumbers { qmp: self.qmp.as_raw_fd(), serial: self.serial.as_raw_fd(), transcript, agent }
    }

    /// Lets the program of `command` inherit the descriptors, and no other program. They must stay open until it
    /// starts.
    pub fn hand_to(&self, command: &mut Command) {
        let SocketNumbers { qmp, serial, transcript, agent } = self.numbers();
        let numbers = [&[qmp, serial, transcript], agent.as_slice(), &*self.others].concat();
        let keep_open = move || {
            for &number in &numbers {
                // SAFETY: the child has a copy of each descriptor under the same number as the parent, which keeps it
                // open until the program starts.
                let socket = unsafe { BorrowedFd::borrow_raw(number) };
                fcntl_setfd(socket, FdFlags::empty())?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec this only makes system calls and allocates nothing.
        unsafe {
            command.pre_exec(keep_open);
        }
    }

    /// Closes the sockets and returns the transcript.
    pub fn into_transcript(self) -> Transcript {
        self.transcript
    }
}

/// Makes a private folder; what is there is removed.
fn make_empty(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(folder)
}

/// Makes a listening socket; replaces the stale one of a dead QEMU.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(socket)
}
