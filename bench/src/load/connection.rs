//! A connection to a guest, from a port that no earlier connection used.
//!
//! A restored guest still knows the connections of its snapshot. For a minute of its own time it does not accept a new one from
//! the port of a connection that it closed last: QEMU's user network, which keeps the port, retries only after seconds.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

/// Time between two checks of a waiting read whether to give up.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Ports below those that Linux assigns itself.
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

/// The next port. When all have been used, the first was last used more than a minute ago.
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
    fn each_connection_has_its_own_port() {
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
