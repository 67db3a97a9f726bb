//! A connection to a guest, from a port that no earlier one had.
//!
//! A guest that goes on from what was saved still knows the connections it had then. One that it closed last it does not take anew from
//! the same port, for a minute of its own: QEMU's user network, which passes the port on, asks again after seconds.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

/// How often a waiting read looks whether it should give up.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Below those that Linux gives out by itself.
const PORTS: std::ops::Range<u16> = 12000..32000;

pub fn open(address: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let socket = loop {
        match bound(next_port(), address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            outcome => break outcome?,
        }
    };
    socket.connect_timeout(&address.into(), patience)?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LOOK_INTERVAL))?;
    stream.set_write_timeout(Some(patience))?;
    Ok(stream)
}

fn bound(port: u16, to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    let from = if to.ip().is_loopback() { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
    socket.bind(&SocketAddr::from((from, port)).into())?;
    Ok(socket)
}

/// In turn: after all of them the first is a minute old.
fn next_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    PORTS.start + NEXT.fetch_add(1, Relaxed) % (PORTS.end - PORTS.start)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn no_two_connections_come_from_one_port() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ports = (0..50).map(|_| {
            let _ours = open(address, Duration::from_secs(20)).unwrap();
            let (_theirs, from) = listener.accept().unwrap();
            from.port()
        });
        assert_eq!(ports.collect::<BTreeSet<u16>>().len(), 50);
    }
}
