//! Peer: API and console serve no QEMU. One that its guest has taken over could stop the machine, or type into its guest, and do so to
//! other machines of the same user.
//!
//! The sockets' mode lets in a user's processes, and without `qemu_user` QEMU is one of them. It is known by its program, which it
//! cannot change: its sandbox allows it no other program and no other process. A process can hide its program even from its own
//! user's processes; so do a few that must not be watched, such as sshd's. But only a QEMU also forgoes all privileges for ever.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;

/// What the programs of QEMU that run machines are called, whoever built them. (`qemu` in the configuration may name any other.)
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
    if hearth_qemu::is_like_started(pid.unsigned_abs()) {
        return true;
    }
    match fs::read_link(format!("/proc/{pid}/exe")) {
        Ok(program) => {
            let name = program.file_name().unwrap_or_default().as_bytes();
            PROGRAMS.iter().any(|qemu| name.windows(qemu.len()).any(|part| part == *qemu))
        }
        // Root may look after the machine of a user, who cannot see root's programs.
        Err(_) => user == rustix::process::geteuid().as_raw() && may_be_confined(pid),
    }
}

/// Whether a process has given up all new privileges, or has ended.
fn may_be_confined(pid: libc::pid_t) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    status.map_or(true, |status| !status.lines().any(|line| line == "NoNewPrivs:\t0"))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn is_one(child: &Child) -> bool {
        is_qemu_process(child.id() as libc::pid_t, rustix::process::getuid().as_raw())
    }

    fn end(children: &mut [Child]) {
        for child in children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn qemu_and_what_may_be_one_is_not_served() {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-M", "none", "-nodefaults", "-display", "none", "-S"]).stdin(Stdio::null());
        let qemu = qemu.spawn().expect("these tests need QEMU");
        let other = Command::new("sleep").arg("60").spawn().unwrap();
        let mut children = [qemu, other];
        let found = [is_one(&children[0]), is_one(&children[1])];
        end(&mut children);
        assert_eq!(found, [true, false]);
        assert!(is_one(&children[1]), "it has ended");
        assert!(!is_qemu_process(0, 0), "a process of another PID namespace");
    }

    #[test]
    fn only_processes_without_privileges_may_be_a_hidden_qemu() {
        let ordinary = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut confined = Command::new("setpriv");
        let confined = confined.args(["--no-new-privs", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut children = [ordinary, confined.spawn().unwrap()];
        for child in &mut children {
            // What comes back shows that `cat` runs.
            io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
            io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        }
        let found = [0, 1].map(|child| may_be_confined(children[child].id() as libc::pid_t));
        end(&mut children);
        assert_eq!(found, [false, true]);
    }

    #[test]
    fn this_program_is_served() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(!is_qemu(&ours));
    }
}
