//! Ready: whether a guest says something at a port of the host that leads into it.
//!
//! QEMU takes every connection for its guest, also of one that does not listen, or is not there yet: only a word that
//! comes back tells. Some services greet; the others are asked for a page, and an answer of any kind will do.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::config::Forward;

/// Between two attempts.
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// A service that is up answers within this, or is asked again.
const PATIENCE: Duration = Duration::from_secs(2);
const QUESTION: &[u8] = b"GET / HTTP/1.0\r\n\r\n";

/// Asks until there is an answer; ends with this.
pub struct PortWatch {
    stop: Arc<AtomicBool>,
}

impl PortWatch {
    pub fn start(machine: &str, forward: Forward, answered: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let address = SocketAddr::new(reachable(forward.host), forward.host_port);
        thread::Builder::new().name(format!("ready-{machine}")).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if answers(address).unwrap_or(false) {
                    // Nobody wants to know it of a guest that has ended meanwhile.
                    if !stopped.load(Ordering::Relaxed) {
                        answered();
                    }
                    return;
                }
                thread::sleep(AGAIN_AFTER);
            }
        })?;
        Ok(Self { stop })
    }
}

impl Drop for PortWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A forward of all addresses is reached at the host's own.
fn reachable(host: IpAddr) -> IpAddr {
    match host {
        IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        address => address,
    }
}

fn answers(address: SocketAddr) -> io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(QUESTION)?;
    Ok(stream.read(&mut [0; 1])? > 0)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;
    use crate::config::Protocol;

    fn watch(listener: &TcpListener) -> (PortWatch, mpsc::Receiver<()>) {
        let address = listener.local_addr().unwrap();
        let forward =
            Forward { protocol: Protocol::Tcp, host: address.ip(), host_port: address.port(), guest_port: 80 };
        let (tell, told) = mpsc::channel();
        let watch = PortWatch::start("web", forward, move || tell.send(()).unwrap()).unwrap();
        (watch, told)
    }

    #[test]
    fn a_port_that_takes_connections_and_says_nothing_is_not_ready() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (_watch, told) = watch(&listener);
        // The same as QEMU for a guest that does not listen: taken, and closed.
        for _ in 0..3 {
            drop(listener.accept().unwrap());
            assert!(told.try_recv().is_err());
        }
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail\r\n").unwrap();
        told.recv().unwrap();
    }

    #[test]
    fn nobody_is_told_after_the_watch_has_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (watch, told) = watch(&listener);
        let (mut stream, _) = listener.accept().unwrap();
        drop(watch);
        stream.write_all(b"220 mail\r\n").unwrap();
        assert!(told.recv().is_err(), "its thread ends without a word");
    }
}
