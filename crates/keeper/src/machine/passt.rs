//! passt beside QEMU: a user-mode network that is a process of its own, so that it can outlive a QEMU.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::config::{Forward, Protocol};

/// passt listens within milliseconds of its start.
const START_PATIENCE: Duration = Duration::from_secs(10);

/// A running passt. It ends by itself when nobody is connected any more; dropping this only collects it.
#[derive(Debug)]
pub struct Passt {
    child: Child,
}

#[derive(Debug, thiserror::Error)]
pub enum PasstError {
    #[error("passt cannot be started; install it (Debian: apt-get install passt) or use kind = \"user\"")]
    Start { source: io::Error },
    #[error("passt does not listen on {socket}: {why}")]
    Silent { socket: PathBuf, why: String },
}

impl Passt {
    /// And a connection to it.
    pub fn start(socket: &Path, forward: &[Forward]) -> Result<(Self, UnixStream), PasstError> {
        let child = Command::new("passt")
            .args(arguments(socket, forward, rustix::process::geteuid().is_root()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Away from the keeper's terminal: ^C there must not cut the guest's network.
            .process_group(0)
            .spawn()
            .map_err(|source| PasstError::Start { source })?;
        let mut passt = Self { child };
        let connection = passt.connect(socket)?;
        Ok((passt, connection))
    }

    fn connect(&mut self, socket: &Path) -> Result<UnixStream, PasstError> {
        let deadline = Instant::now() + START_PATIENCE;
        let silent = |why: String| PasstError::Silent { socket: socket.to_owned(), why };
        loop {
            match UnixStream::connect(socket) {
                Ok(connection) => return Ok(connection),
                // It has not made it yet, or does not listen yet.
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {}
                Err(error) => return Err(silent(error.to_string())),
            }
            match self.child.try_wait() {
                Ok(Some(status)) => return Err(silent(format!("it ended with {status}; is a forwarded port taken?"))),
                Ok(None) if Instant::now() > deadline => return Err(silent("it hangs".to_owned())),
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => return Err(silent(error.to_string())),
            }
        }
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        // Either it has ended with QEMU, or it is about to; a zombie until the keeper ends is the worst case.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn arguments(socket: &Path, forward: &[Forward], is_root: bool) -> Vec<String> {
    let mut arguments =
        vec!["--foreground".into(), "--one-off".into(), "--socket".into(), socket.display().to_string()];
    if is_root {
        // It would become nobody, who cannot make its socket in the runtime folder, and end without a word. It gives up
        // all capabilities either way, in a user name space and an empty file system of its own.
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
    fn forwards_become_passt_ports() {
        let forward =
            Forward { protocol: Protocol::Tcp, host: "127.0.0.1".parse().unwrap(), host_port: 8080, guest_port: 80 };
        let expected = ["--foreground", "--one-off", "--socket", "/run/p.sock", "--tcp-ports", "127.0.0.1/8080:80"];
        assert_eq!(arguments(Path::new("/run/p.sock"), &[forward], false), expected);
        let as_root = arguments(Path::new("/run/p.sock"), &[forward], true);
        assert_eq!(as_root[4..6], ["--runas", "0"]);
    }
}
