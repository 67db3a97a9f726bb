//! Peer: the API serves no QEMU. One that its guest has taken over could stop the machine, and others of the same user.
//!
//! The socket's mode lets in a user's processes, and without `qemu_user` QEMU is one of them. It is known by its program, which it
//! cannot change: its sandbox allows it no other program and no other process. What does not show its program to a process of its
//! own user hides it, or has ended.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;

/// What the programs of QEMU that run machines are called, whoever built them.
const PROGRAMS: [&[u8]; 2] = [b"qemu-system-", b"qemu-kvm"];

/// Whether a QEMU has connected, or somebody who may be one.
pub fn is_qemu(stream: &UnixStream) -> bool {
    credentials(stream).is_ok_and(|peer| is_qemu_process(peer.pid, peer.uid))
}

/// (`rustix` has no process 0, which stands for one of another PID namespace.)
fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of_val(&peer) as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the kernel writes at most that many bytes, which the value has.
    let result = unsafe { libc::getsockopt(stream.as_raw_fd(), level, option, (&raw mut peer).cast(), &raw mut bytes) };
    if result == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

fn is_qemu_process(pid: libc::pid_t, user: libc::uid_t) -> bool {
    // QEMU is in the keeper's PID namespace.
    if pid == 0 {
        return false;
    }
    match fs::read_link(format!("/proc/{pid}/exe")) {
        Ok(program) => {
            let name = program.file_name().unwrap_or_default().as_bytes();
            PROGRAMS.iter().any(|qemu| name.windows(qemu.len()).any(|part| part == *qemu))
        }
        // Root may look after the machine of a user, who cannot see root's programs.
        Err(_) => user == rustix::process::geteuid().as_raw(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn is_one(child: &Child) -> bool {
        is_qemu_process(child.id() as libc::pid_t, rustix::process::getuid().as_raw())
    }

    #[test]
    fn qemu_and_what_may_be_one_is_not_served() {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-M", "none", "-nodefaults", "-display", "none", "-S"]).stdin(Stdio::null());
        let mut qemu = qemu.spawn().expect("these tests need QEMU");
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let (of_qemu, of_another) = (is_one(&qemu), is_one(&other));
        for child in [&mut qemu, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!((of_qemu, of_another), (true, false));
        assert!(is_one(&other), "it has ended");
        assert!(!is_qemu_process(0, 0), "a process of another PID namespace");
    }

    #[test]
    fn this_program_is_served() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(!is_qemu(&ours));
    }
}
