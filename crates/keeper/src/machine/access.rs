//! Access: a QEMU that runs as another user (`qemu_user`) gets access to the sockets of its disks, and to nothing else.
//!
//! QEMU connects to its disks while it is still root. When it connects again (its keeper was killed, another one serves
//! the disks) it is the other user, to whom the runtime folder (0700) is closed: the guest would hang for ever. So the
//! user's group may pass through the folder (0710), and the disks' sockets belong to the user (0600).
//!
//! The process itself tells its user and group: user databases may be remote and slow, and may have changed.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use hearth_disk::server::DiskServer;

/// Gives the process access. Does nothing if it runs as the keeper's own user.
pub fn admit(pid: u32, runtime: &Path, disks: &[DiskServer]) -> io::Result<()> {
    let (user, group) = owner(&fs::read_to_string(format!("/proc/{pid}/status"))?)?;
    if user == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    for disk in disks {
        chown(disk.socket(), Some(user), None)?;
    }
    chown(runtime, None, Some(group))?;
    fs::set_permissions(runtime, Permissions::from_mode(0o710))
}

/// Effective user and group in a process's `status`: the second of four numbers.
fn owner(status: &str) -> io::Result<(u32, u32)> {
    let id = |key: &str| {
        let numbers = status.lines().find_map(|line| line.strip_prefix(key));
        numbers.and_then(|numbers| numbers.split_whitespace().nth(1)?.parse().ok())
    };
    id("Uid:")
        .zip(id("Gid:"))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/PID/status names no user"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_ids_are_used() {
        let status = "Name:\tqemu\nUid:\t0\t65534\t1\t2\nGid:\t5\t6\t7\t8\n";
        assert_eq!(owner(status).unwrap(), (65534, 6));
        assert!(owner("Name:\tqemu\n").is_err());
    }

    #[test]
    fn a_process_of_the_same_user_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
        admit(std::process::id(), folder.path(), &[]).unwrap();
        assert_eq!(fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
