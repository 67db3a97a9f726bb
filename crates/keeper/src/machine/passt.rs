//! passt: a user-mode network in a process of its own, so that it can outlive a QEMU.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hearth_qemu::environment;
use rustix::fd::BorrowedFd;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::config::{Forward, Protocol};

/// How long to wait for passt to listen. It takes milliseconds.
const START_PATIENCE: Duration = Duration::from_secs(10);

/// A running passt. It ends by itself when nobody is connected any more; dropping this collects it, or ends it.
#[derive(Debug)]
pub struct Passt {
    /// None: it is left to its QEMU.
    child: Option<Child>,
}

#[derive(Debug, thiserror::Error)]
pub enum PasstError {
    #[error("cannot start passt; install it (Debian: apt-get install passt), or use kind = \"user\"")]
    Start { source: io::Error },
    #[error("passt does not start: {why}")]
    Silent { why: String },
}

impl Passt {
    /// Starts passt with a connection to it. passt inherits the other end, because others could connect first to a
    /// socket with a name. It writes its pid to `pid_file` when its ports are open.
    pub fn start(pid_file: &Path, forward: &[Forward]) -> Result<(Self, UnixStream), PasstError> {
        let failed = |source| PasstError::Start { source };
        let (connection, inherited) = UnixStream::pair().map_err(failed)?;
        match fs::remove_file(pid_file) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let number = inherited.as_raw_fd();
        let mut command = Command::new("passt");
        environment::confine(&mut command);
        // SAFETY: between fork and exec only a system call is made, on a descriptor that lives until then.
        unsafe {
            command.pre_exec(move || Ok(fcntl_setfd(BorrowedFd::borrow_raw(number), FdFlags::empty())?));
        }
        let mut child = command
            .args(arguments(number, pid_file, forward, rustix::process::geteuid().is_root()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Run it outside the keeper's terminal session: Ctrl-C there must not cut the guest's network.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        drop(inherited);
        let started = await_start(&mut child, pid_file);
        let passt = Self { child: Some(child) };
        started.map(|()| (passt, connection))
    }

    /// It goes on beside its QEMU.
    pub fn leave(mut self) {
        self.child = None;
    }
}

fn await_start(child: &mut Child, pid_file: &Path) -> Result<(), PasstError> {
    let deadline = Instant::now() + START_PATIENCE;
    let silent = |why: String| PasstError::Silent { why };
    while !fs::metadata(pid_file).is_ok_and(|file| file.len() > 0) {
        match child.try_wait() {
            Ok(Some(status)) => {
                return Err(silent(format!(
                    "it ended with {status}; check whether a forwarded port is already in use, or, in a unit of \
                     systemd, whether the machine was started by `hearth start`, which allows passt to it"
                )));
            }
            Ok(None) if Instant::now() > deadline => return Err(silent("it does not respond".to_owned())),
            Ok(None) => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(silent(error.to_string())),
        }
    }
    // It has served its purpose; what stays behind is cleared away with the other files of its QEMU.
    let _ = fs::remove_file(pid_file);
    Ok(())
}

impl Drop for Passt {
    fn drop(&mut self) {
        let Some(child) = &mut self.child else { return };
        // Either it has ended with QEMU, or it is about to; a zombie until the keeper ends is the worst case.
        if !matches!(child.try_wait(), Ok(Some(_))) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn arguments(connection: RawFd, pid_file: &Path, forward: &[Forward], is_root: bool) -> Vec<String> {
    let mut arguments = ["--foreground", "--fd"].map(String::from).to_vec();
    arguments.extend([connection.to_string(), "--pid".to_owned(), pid_file.display().to_string()]);
    if is_root {
        // passt would switch to the user nobody, who cannot create files in the runtime folder, and end silently. It
        // gives up all capabilities in any case, in its own user namespace with an empty file system.
        arguments.extend(["--runas".into(), "0".into()]);
    }
    for forward in forward {
        let option = match forward.protocol {
            Protocol::Tcp => "--tcp-ports",
            Protocol::Udp => "--udp-ports",
        };
        arguments.push(option.into());
        arguments.push(format!("{}/{}:{}", forward.host, forward.host_port, forward.guest_port));
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passt_that_is_left_goes_on() {
        let start = || Passt { child: Some(Command::new("sleep").arg("60").spawn().unwrap()) };
        let pid = |passt: &Passt| passt.child.as_ref().unwrap().id();
        let lives = |pid: u32| Path::new(&format!("/proc/{pid}/exe")).exists();
        let (left, dropped) = (start(), start());
        let (of_left, of_dropped) = (pid(&left), pid(&dropped));
        left.leave();
        drop(dropped);
        assert_eq!((lives(of_left), lives(of_dropped)), (true, false));
        let of_left = rustix::process::Pid::from_raw(i32::try_from(of_left).unwrap()).unwrap();
        rustix::process::kill_process(of_left, rustix::process::Signal::KILL).unwrap();
    }

    #[test]
    fn forwards_become_passt_ports() {
        let forward =
            Forward { protocol: Protocol::Tcp, host: "127.0.0.1".parse().unwrap(), host_port: 8080, guest_port: 80 };
        let expected = ["--foreground", "--fd", "9", "--pid", "/run/p.pid", "--tcp-ports", "127.0.0.1/8080:80"];
        assert_eq!(arguments(9, Path::new("/run/p.pid"), &[forward], false), expected);
        let as_root = arguments(9, Path::new("/run/p.pid"), &[forward], true);
        assert_eq!(as_root[5..7], ["--runas", "0"]);
    }
}
