//! Reads one request, with limits on size and time.

use std::io;
use std::time::{Duration, Instant};

use hearth_api::{ApiError, ErrorWord, Order, OrderId};
use serde::de::DeserializeOwned;

use super::Stream;

/// No client of this API needs more; curl sends some 100 bytes.
const HEAD_BYTES_MAX: usize = 16 << 10;
const BODY_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 64;

/// One request.
#[derive(Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// The header `Host`.
    pub host: Option<String>,
    query: String,
    pub accepts_events: bool,
    pub last_event_id: Option<String>,
    body: Vec<u8>,
}

/// Why no request was read.
#[derive(Debug)]
pub enum ReadError {
    /// The client gets this error as answer.
    Refused(ApiError),
    /// The client is gone or too slow.
    Lost(io::Error),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

struct Head {
    request: Request,
    /// Where the body begins.
    bytes: usize,
    body_bytes: usize,
}

impl Request {
    /// Reads to the end of the body. The deadline covers all of it, so a slow client cannot extend it byte by byte.
    pub fn read(stream: &mut impl Stream, patience: Duration) -> Result<Self, ReadError> {
        let deadline = Instant::now() + patience;
        let mut bytes = Vec::with_capacity(1024);
        let head = loop {
            if let Some(head) = parse_head(&bytes)? {
                break head;
            }
            if bytes.len() >= HEAD_BYTES_MAX {
                return Err(too_large(format!("the request's head exceeds {HEAD_BYTES_MAX} bytes")));
            }
            read_some(stream, &mut bytes, deadline)?;
        };
        if head.body_bytes > BODY_BYTES_MAX {
            return Err(too_large(format!("the body has {} bytes; the limit is {BODY_BYTES_MAX}", head.body_bytes)));
        }
        while bytes.len() < head.bytes + head.body_bytes {
            read_some(stream, &mut bytes, deadline)?;
        }
        let mut request = head.request;
        request.body = bytes[head.bytes..head.bytes + head.body_bytes].to_vec();
        Ok(request)
    }

    /// A number in the query.
    pub fn query_number(&self, name: &str) -> Result<Option<u64>, ApiError> {
        self.query_value(name).map(|value| number(name, value)).transpose()
    }

    /// Whether the query contains `name=1`, `name=true` or `name` alone.
    pub fn query_flag(&self, name: &str) -> bool {
        matches!(self.query_value(name), Some("" | "1" | "true"))
    }

    fn query_value(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key == name).then_some(value)
        })
    }

    /// The body as a request of this type.
    pub fn body<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        serde_json::from_slice(self.json()).map_err(|error| not_understood(&error))
    }

    /// The body as this order.
    pub fn order(&self, id: OrderId) -> Result<Order, ApiError> {
        Order::parse(id, self.json()).map_err(|error| not_understood(&error))
    }

    /// No body is an empty object.
    fn json(&self) -> &[u8] {
        if self.body.is_empty() { b"{}" } else { &self.body }
    }
}

fn not_understood(error: &serde_json::Error) -> ApiError {
    bad_request(format!("cannot understand the body: {error}")).hint("see docs/api.md")
}

pub fn number(name: &str, text: &str) -> Result<u64, ApiError> {
    text.parse().map_err(|_| bad_request(format!("{name}={text} is not a number")))
}

fn bad_request(message: String) -> ApiError {
    ApiError::new(ErrorWord::BadRequest, message)
}

fn too_large(message: String) -> ReadError {
    ReadError::Refused(ApiError::new(ErrorWord::TooLarge, message))
}

fn refuse(message: impl Into<String>) -> ReadError {
    ReadError::Refused(bad_request(message.into()))
}

fn read_some(stream: &mut impl Stream, bytes: &mut Vec<u8>, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    stream.set_read_timeout(left)?;
    let mut buffer = [0; 4096];
    match stream.read(&mut buffer)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        length => {
            bytes.extend_from_slice(&buffer[..length]);
            Ok(())
        }
    }
}

/// None while the head is incomplete.
fn parse_head(bytes: &[u8]) -> Result<Option<Head>, ReadError> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let head_bytes = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(refuse(format!("this is not HTTP/1: {error}"))),
    };
    let header = |name: &str| {
        let found = parsed.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        str::from_utf8(found.value).ok().map(str::trim)
    };
    if header("transfer-encoding").is_some() {
        return Err(refuse("chunked bodies are not supported; send Content-Length"));
    }
    let body_bytes = match header("content-length").map(str::parse) {
        None => 0,
        Some(Ok(length)) => length,
        Some(Err(_)) => return Err(refuse("Content-Length is not a number")),
    };
    let target = parsed.path.unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let request = Request {
        method: parsed.method.unwrap_or_default().to_owned(),
        path: path.to_owned(),
        host: header("host").map(str::to_owned),
        query: query.to_owned(),
        accepts_events: header("accept").is_some_and(|types| types.contains("text/event-stream")),
        last_event_id: header("last-event-id").map(str::to_owned),
        body: Vec::new(),
    };
    Ok(Some(Head { request, bytes: head_bytes, body_bytes }))
}
