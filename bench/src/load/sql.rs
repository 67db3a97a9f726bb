//! A minimal PostgreSQL client for a load generator: one query at a time over a kept connection, its only row as text.
//!
//! It is our own for the same reason as the HTTP client: it must give up on request. The server accepts every user (`trust`);
//! protocol 3.0, simple queries.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::connection;

const PROTOCOL: u32 = 3 << 16;
/// Largest message: each query returns one short row.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum SqlError {
    #[error("connection to {address} broke")]
    Broken { address: SocketAddr, source: std::io::Error },
    #[error("{address} closed the connection")]
    Closed { address: SocketAddr },
    #[error("no answer from {address} in {} ms", .after.as_millis())]
    Late { address: SocketAddr, after: Duration },
    #[error("given up: the server went down")]
    GivenUp,
    #[error("{address} refused: {what}")]
    Refused { address: SocketAddr, what: String },
    #[error("{address} sent an invalid answer: {what}")]
    Malformed { address: SocketAddr, what: &'static str },
}

/// A client of one server with at most one connection.
pub struct Client {
    address: SocketAddr,
    connection: Option<TcpStream>,
}

/// A wait: its time limit, and a function that tells whether to give up early.
struct Wait<'a> {
    patience: Duration,
    deadline: Instant,
    give_up: &'a dyn Fn() -> bool,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Client { address, connection: None }
    }

    pub fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Sends a query, and returns the columns of its last row as text. After an error the next call reconnects. `give_up` is
    /// called every 20 ms while waiting.
    pub fn row(
        &mut self,
        query: &str,
        patience: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<String>, SqlError> {
        let wait = Wait { patience, deadline: Instant::now() + patience, give_up };
        let outcome = self.exchange(query, &wait);
        if outcome.is_err() {
            self.connection = None;
        }
        outcome
    }

    fn exchange(&mut self, query: &str, wait: &Wait<'_>) -> Result<Vec<String>, SqlError> {
        let address = self.address;
        let broken = |source| SqlError::Broken { address, source };
        if self.connection.is_none() {
            self.connection = Some(connection::open(address, wait.patience).map_err(broken)?);
            let mut hello = PROTOCOL.to_be_bytes().to_vec();
            hello.extend(b"user\0postgres\0database\0postgres\0\0");
            self.send(&[], &hello)?;
            self.answer(wait)?;
        }
        self.send(b"Q", &[query.as_bytes(), b"\0"].concat())?;
        self.answer(wait)
    }

    /// Sends a message. Its length includes itself, but not the kind.
    fn send(&mut self, kind: &[u8], body: &[u8]) -> Result<(), SqlError> {
        let address = self.address;
        let connection = self.connection.as_mut().ok_or(SqlError::Closed { address })?;
        let message = [kind, &(body.len() as u32 + 4).to_be_bytes(), body].concat();
        connection.write_all(&message).map_err(|source| SqlError::Broken { address, source })
    }

    /// Reads messages until the server is ready for the next query.
    fn answer(&mut self, wait: &Wait<'_>) -> Result<Vec<String>, SqlError> {
        let address = self.address;
        let mut row = Vec::new();
        loop {
            let mut head = [0; 5];
            self.receive(&mut head, wait)?;
            let length = u32::from_be_bytes(head[1..].try_into().expect("4 bytes")) as usize;
            if !(4..=MESSAGE_BYTES_MAX).contains(&length) {
                return Err(SqlError::Malformed { address, what: "a message of invalid length" });
            }
            let mut body = vec![0; length - 4];
            self.receive(&mut body, wait)?;
            match head[0] {
                b'Z' => return Ok(row),
                b'D' => row = columns(&body).ok_or(SqlError::Malformed { address, what: "a row" })?,
                b'E' => {
                    let what = String::from_utf8_lossy(&body).replace('\0', " ");
                    return Err(SqlError::Refused { address, what });
                }
                _ => {}
            }
        }
    }

    fn receive(&mut self, bytes: &mut [u8], wait: &Wait<'_>) -> Result<(), SqlError> {
        let address = self.address;
        let connection = self.connection.as_mut().ok_or(SqlError::Closed { address })?;
        let mut filled = 0;
        while filled < bytes.len() {
            match connection.read(&mut bytes[filled..]) {
                Ok(0) => return Err(SqlError::Closed { address }),
                Ok(length) => filled += length,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                }
                Err(source) => return Err(SqlError::Broken { address, source }),
            }
            if filled < bytes.len() && (wait.give_up)() {
                return Err(SqlError::GivenUp);
            }
            if filled < bytes.len() && Instant::now() > wait.deadline {
                return Err(SqlError::Late { address, after: wait.patience });
            }
        }
        Ok(())
    }
}

/// Parses a row: a u16 count, and for each column a u32 length and its bytes. Null becomes an empty text.
fn columns(body: &[u8]) -> Option<Vec<String>> {
    let (count, mut rest) = body.split_first_chunk::<2>()?;
    let mut columns = Vec::new();
    for _ in 0..u16::from_be_bytes(*count) {
        let (length, behind) = rest.split_first_chunk::<4>()?;
        let length = usize::try_from(i32::from_be_bytes(*length)).unwrap_or(0);
        let (bytes, behind) = behind.split_at_checked(length)?;
        columns.push(String::from_utf8_lossy(bytes).into_owned());
        rest = behind;
    }
    Some(columns)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        [&[kind][..], &(body.len() as u32 + 4).to_be_bytes(), body].concat()
    }

    fn row(columns: &[&str]) -> Vec<u8> {
        let mut body = (columns.len() as u16).to_be_bytes().to_vec();
        for column in columns {
            body.extend((column.len() as u32).to_be_bytes());
            body.extend(column.as_bytes());
        }
        message(b'D', &body)
    }

    /// A server that accepts one client, answers each query with the next of these answers, and then waits until the client hangs
    /// up.
    fn server(answers: Vec<Vec<u8>>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut hello = [0; 4];
            stream.read_exact(&mut hello).unwrap();
            let mut rest = vec![0; u32::from_be_bytes(hello) as usize - 4];
            stream.read_exact(&mut rest).unwrap();
            assert!(rest.starts_with(&[0, 3, 0, 0]) && rest.ends_with(b"postgres\0\0"));
            stream.write_all(&[message(b'R', &[0; 4]), message(b'Z', b"I")].concat()).unwrap();
            for answer in answers {
                let mut head = [0; 5];
                stream.read_exact(&mut head).unwrap();
                assert_eq!(head[0], b'Q');
                let mut query = vec![0; u32::from_be_bytes(head[1..].try_into().unwrap()) as usize - 4];
                stream.read_exact(&mut query).unwrap();
                stream.write_all(&answer).unwrap();
            }
            let _ = stream.read(&mut [0]);
        });
        address
    }

    #[test]
    fn rows_come_as_text_over_one_connection() {
        let ready = message(b'Z', b"I");
        let answers =
            [["7", "x"], ["", "9"]].map(|columns| [row(&columns), message(b'C', b"SELECT 1\0"), ready.clone()]);
        let mut client = Client::new(server(answers.map(|parts| parts.concat()).to_vec()));
        assert_eq!(client.row("select 1", PATIENCE, &|| false).unwrap(), ["7", "x"]);
        assert_eq!(client.row("select 2", PATIENCE, &|| false).unwrap(), ["", "9"]);
    }

    #[test]
    fn errors_are_reported_with_their_reason() {
        for (answer, expect) in [
            (message(b'E', b"SERROR\0Mno such table\0\0"), "refused: SERROR Mno such table"),
            (message(b'D', &[0, 1, 0, 0, 0, 9, 1]), "an invalid answer: a row"),
            (vec![b'D', 0xff, 0, 0, 0], "an invalid answer: a message of invalid length"),
        ] {
            let error = Client::new(server(vec![answer])).row("select 1", PATIENCE, &|| false).unwrap_err();
            assert!(error.to_string().contains(expect), "{error}");
        }
        let mut client = Client::new(server(vec![Vec::new()]));
        assert!(matches!(client.row("select 1", PATIENCE, &|| true), Err(SqlError::GivenUp)));
        let late = Client::new(server(vec![Vec::new()])).row("select 1", Duration::from_millis(30), &|| false);
        assert!(matches!(late, Err(SqlError::Late { .. })), "{late:?}");
    }
}
