//! A minimal HTTP/1.1 client for a load generator: GET over a kept connection, with a content length.
//!
//! It is our own because it must give up at once when the server is about to crash: a guest that is reset in place sends no FIN,
//! and behind QEMU's user network a connect succeeds even when no guest listens.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::connection;

const HEAD_BYTES_MAX: usize = 16 << 10;

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("cannot connect to {address}")]
    Connect { address: SocketAddr, source: std::io::Error },
    #[error("connection to {address} broke")]
    Broken { address: SocketAddr, source: std::io::Error },
    #[error("{address} closed the connection within an answer")]
    Closed { address: SocketAddr },
    #[error("no answer from {address} in {} ms", .after.as_millis())]
    Late { address: SocketAddr, after: Duration },
    #[error("given up: the server went down")]
    GivenUp,
    #[error("{address} sent an invalid answer: {what}")]
    Malformed { address: SocketAddr, what: &'static str },
}

/// A client of one server with at most one connection.
pub struct Client {
    address: SocketAddr,
    connection: Option<TcpStream>,
    received: Vec<u8>,
}

/// An answer. Its body stays in the client, which reuses its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    pub status: u16,
    pub body: &'a [u8],
}

struct Head {
    status: u16,
    body_start: usize,
    body_bytes: usize,
    closes: bool,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Client { address, connection: None, received: Vec::new() }
    }

    pub fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Requests `path`. After an error the next call reconnects. `give_up` is called every 20 ms while waiting.
    pub fn get(&mut self, path: &str, patience: Duration, give_up: &dyn Fn() -> bool) -> Result<Answer<'_>, HttpError> {
        let deadline = Instant::now() + patience;
        let outcome = self.exchange(path, patience, deadline, give_up);
        match outcome {
            Ok(head) => {
                if head.closes {
                    self.disconnect();
                }
                let body = &self.received[head.body_start..head.body_start + head.body_bytes];
                Ok(Answer { status: head.status, body })
            }
            Err(error) => {
                self.disconnect();
                Err(error)
            }
        }
    }

    fn exchange(
        &mut self,
        path: &str,
        patience: Duration,
        deadline: Instant,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Head, HttpError> {
        self.send(path, patience)?;
        self.received.clear();
        let head = loop {
            if let Some(head) = parse_head(&self.received, self.address)? {
                break head;
            }
            self.receive(patience, deadline, give_up)?;
        };
        while self.received.len() < head.body_start + head.body_bytes {
            self.receive(patience, deadline, give_up)?;
        }
        Ok(head)
    }

    fn send(&mut self, path: &str, patience: Duration) -> Result<(), HttpError> {
        let address = self.address;
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let opened = connection::open(address, patience);
                none.insert(opened.map_err(|source| HttpError::Connect { address, source })?)
            }
        };
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        connection.write_all(request.as_bytes()).map_err(|source| HttpError::Broken { address, source })
    }

    fn receive(&mut self, patience: Duration, deadline: Instant, give_up: &dyn Fn() -> bool) -> Result<(), HttpError> {
        let address = self.address;
        let connection = self.connection.as_mut().expect("send() made a connection");
        let filled = self.received.len();
        self.received.resize(filled + (256 << 10), 0);
        let outcome = connection.read(&mut self.received[filled..]);
        self.received.truncate(filled + *outcome.as_ref().unwrap_or(&0));
        match outcome {
            Ok(0) => Err(HttpError::Closed { address }),
            Ok(_) => Ok(()),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) =>
            {
                match (give_up(), Instant::now() >= deadline) {
                    (true, _) => Err(HttpError::GivenUp),
                    (_, true) => Err(HttpError::Late { address, after: patience }),
                    _ => Ok(()),
                }
            }
            Err(source) => Err(HttpError::Broken { address, source }),
        }
    }
}

/// The header of an answer, once it is complete.
fn parse_head(received: &[u8], address: SocketAddr) -> Result<Option<Head>, HttpError> {
    let malformed = |what| HttpError::Malformed { address, what };
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else {
        return if received.len() > HEAD_BYTES_MAX { Err(malformed("endless head")) } else { Ok(None) };
    };
    let text = std::str::from_utf8(&received[..end]).map_err(|_| malformed("head is not text"))?;
    let mut lines = text.split("\r\n");
    let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok());
    let mut head =
        Head { status: status.ok_or(malformed("no status"))?, body_start: end + 4, body_bytes: 0, closes: false };
    let mut length = None;
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok(),
            "connection" => head.closes = value.trim().eq_ignore_ascii_case("close"),
            _ => {}
        }
    }
    head.body_bytes = length.ok_or(malformed("no content length"))?;
    Ok(Some(head))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::testing::{Script, Server};

    const PATIENCE: Duration = Duration::from_secs(20);

    fn never() -> bool {
        false
    }

    #[test]
    fn one_connection_serves_many_requests() {
        let server = Server::start(Script::Files { bytes: 300_000 });
        let mut client = Client::new(server.address());
        for _ in 0..3 {
            let answer = client.get("/a", PATIENCE, &never).unwrap();
            assert_eq!((answer.status, answer.body.len()), (200, 300_000));
        }
        assert_eq!(server.connections(), 1);
    }

    #[test]
    fn closed_connection_is_opened_again() {
        let server = Server::start(Script::CloseEach);
        let mut client = Client::new(server.address());
        for _ in 0..3 {
            assert_eq!(client.get("/a", PATIENCE, &never).unwrap().status, 200);
        }
        assert_eq!(server.connections(), 3);
    }

    #[test]
    fn truncated_answer_is_an_error() {
        let server = Server::start(Script::HalfBody);
        let error = Client::new(server.address()).get("/a", PATIENCE, &never).unwrap_err();
        assert!(matches!(error, HttpError::Closed { .. }), "{error}");
    }

    #[test]
    fn waiting_ends_by_give_up_and_limit() {
        let server = Server::start(Script::Silent);
        let mut client = Client::new(server.address());
        assert!(matches!(client.get("/a", PATIENCE, &|| true), Err(HttpError::GivenUp)));
        let short = Duration::from_millis(30);
        assert_eq!(
            client.get("/a", short, &never).unwrap_err().to_string(),
            format!("no answer from {} in 30 ms", server.address())
        );
    }

    #[test]
    fn invalid_answers_are_refused() {
        let address = "127.0.0.1:1".parse().unwrap();
        for (bytes, what) in [
            (&b"SSH-2.0\r\n\r\n"[..], "no status"),
            (b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n", "no content length"),
            (b"HTTP/1.1 \xff\xff\r\n\r\n", "head is not text"),
            (&[b'x'; HEAD_BYTES_MAX + 1], "endless head"),
        ] {
            let error = parse_head(bytes, address).err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(error, format!("127.0.0.1:1 sent an invalid answer: {what}"));
        }
        assert!(parse_head(b"HTTP/1.1 200 OK\r\n", address).unwrap().is_none());
    }
}
