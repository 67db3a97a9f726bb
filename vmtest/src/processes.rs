//! Ends all processes of a machine, including those whose parent is gone.
//!
//! A QEMU outlives its keeper by design, so killing children is not enough. Every process of a machine has one of the machine's
//! own folders in its command line (sockets, RAM file, configuration), and no other process has.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, pidfd_send_signal};

/// Processes, other than this one, that have `folder` in their command line.
pub fn mentioning(folder: &Path) -> Vec<Pid> {
    let wanted = folder.as_os_str().as_encoded_bytes();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let others = pids.filter_map(Pid::from_raw).filter(|&pid| pid != rustix::process::getpid());
    others.filter(|pid| mentions(*pid, wanted)).collect()
}

fn mentions(pid: Pid, wanted: &[u8]) -> bool {
    let command_line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    command_line.windows(wanted.len()).any(|window| window == wanted)
}

/// A number in a process's `/proc/PID/status`: a count, or KiB. 0 if the process is gone.
pub fn figure(pid: u32, key: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Kills all processes that mention `folder`.
pub fn end_all(folder: &Path) {
    // A process that is just being started may appear after the first round, so there are three.
    for _ in 0..3 {
        for pid in mentioning(folder) {
            end(pid, folder);
        }
    }
}

/// Kills one process, and never another that has got its number meanwhile.
fn end(pid: Pid, folder: &Path) {
    let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    if !mentions(pid, folder.as_os_str().as_encoded_bytes()) {
        return;
    }
    let _already_dead = pidfd_send_signal(&handle, Signal::KILL);
    is_over(&handle, Duration::from_secs(10));
    // A child of this process stays a zombie until its status is collected.
    let _not_a_child = rustix::process::waitid(WaitId::PidFd(handle.as_fd()), WaitIdOptions::EXITED);
}

/// Waits until a process ends, without collecting its status. Returns false after `limit`.
pub fn wait_end(pid: Pid, limit: Duration) -> bool {
    let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return true };
    is_over(&handle, limit)
}

/// Waits until the process is dead, which makes its handle readable, whoever its parent is.
fn is_over(handle: &OwnedFd, limit: Duration) -> bool {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: 0 };
    let mut wait = [PollFd::new(handle, PollFlags::IN)];
    poll(&mut wait, Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// Sends SIGKILL to a process by number.
pub fn kill(pid: Pid) -> std::io::Result<()> {
    Ok(kill_process(pid, Signal::KILL)?)
}

/// Sends SIGTERM to a process by number.
pub fn terminate(pid: Pid) -> std::io::Result<()> {
    Ok(kill_process(pid, Signal::TERM)?)
}

/// The open files of a process: paths, and the kernel's names for the rest.
pub fn open_files(pid: Pid) -> std::io::Result<Vec<PathBuf>> {
    let open = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()))?;
    // A file that was closed meanwhile has no link any more.
    Ok(open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).collect())
}

/// The names of a process's threads. Linux keeps 15 bytes of each.
pub fn threads(pid: Pid) -> std::io::Result<Vec<String>> {
    let tasks = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()))?;
    let names = tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    Ok(names.map(|name| name.trim_end().to_owned()).collect())
}

/// Sends SIGSTOP to a process by number, and waits until none of its threads runs.
pub fn freeze(pid: Pid) -> std::io::Result<()> {
    kill_process(pid, Signal::STOP)?;
    while runs(pid)? {
        std::thread::yield_now();
    }
    Ok(())
}

/// Continues a frozen process.
pub fn thaw(pid: Pid) -> std::io::Result<()> {
    Ok(kill_process(pid, Signal::CONT)?)
}

/// Whether any thread of a process still runs. Each thread stops when it next leaves the kernel.
fn runs(pid: Pid) -> std::io::Result<bool> {
    for task in fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()))? {
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        // The state follows the name, which is in parentheses and may hold any bytes.
        let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
        if state != Some('T') {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn only_processes_that_mention_the_folder_end() {
        let (mine, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let start = |folder: &Path| {
            let script = format!("read forever # {}", folder.display());
            Command::new("sh").args(["-c", &script]).stdin(Stdio::piped()).spawn().unwrap()
        };
        let (mut ended, mut kept) = (start(mine.path()), start(other.path()));
        end_all(mine.path());
        assert!(mentioning(mine.path()).is_empty());
        assert!(kept.try_wait().unwrap().is_none());
        kept.kill().unwrap();
        kept.wait().unwrap();
        // `end_all` has collected the status, so this fails, but it must not hang.
        let _ = ended.wait();
    }
}
