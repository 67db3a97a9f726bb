//! Notifies systemd of the keeper's state: one datagram to the socket of a `Type=notify` unit. Without systemd: nothing.
//!
//! Not the crate `sd-notify` (0.5): it cannot reach the abstract sockets that systemd in containers uses, and a line break in a
//! status would begin another message.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// A message to systemd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The guest runs, so units that depend on this one may start.
    Ready,
    /// The keeper is stopping on purpose.
    Stopping,
    /// The keeper answers (`WatchdogSec=`).
    Alive,
    /// One line for `systemctl status`.
    Status(String),
}

/// Notifies systemd, if it has asked for it.
pub fn notify(notice: &Notice) {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&address, notice) {
        tracing::warn!(socket = %address.display(), %error, "cannot notify systemd");
    }
}

fn send(address: &OsStr, notice: &Notice) -> io::Result<()> {
    let text = match notice {
        Notice::Ready => "READY=1".to_owned(),
        Notice::Alive => "WATCHDOG=1".to_owned(),
        Notice::Stopping => "STOPPING=1".to_owned(),
        Notice::Status(text) => format!("STATUS={}", text.replace('\n', " ")),
    };
    // A leading @ stands for the zero byte of an abstract address.
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(notice: &Notice, expect: &str) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), notice).unwrap();
        let mut buffer = [0; 100];
        let length = systemd.recv(&mut buffer).unwrap();
        assert_eq!(str::from_utf8(&buffer[..length]).unwrap(), expect);
    }

    #[test]
    fn notices_are_the_words_systemd_knows() {
        check(&Notice::Ready, "READY=1");
        check(&Notice::Stopping, "STOPPING=1");
        check(&Notice::Status("incarnation 2\nruns".into()), "STATUS=incarnation 2 runs");
    }

    #[test]
    fn abstract_addresses_are_understood() {
        let name = format!("hearth-test-{}", std::process::id());
        let systemd = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(OsStr::new(&format!("@{name}")), &Notice::Ready).unwrap();
        assert_eq!(systemd.recv(&mut [0; 100]).unwrap(), "READY=1".len());
    }
}
