//! Client of a machine's keeper: typed calls over its unix socket, one connection each.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use hearth_api::{
    ApiError, Call, DiskSize, ErrorWord, EventRecord, MachineStatus, ResizeRequest, Resource, Route, RouteId,
};
use serde::de::DeserializeOwned;

/// Longer than the keeper waits for its machine, so that the keeper reports a timeout first.
const ANSWER_PATIENCE: Duration = Duration::from_secs(40);
/// Four heartbeats of the keeper.
const STREAM_PATIENCE: Duration = Duration::from_secs(60);
const HEAD_BYTES_MAX: usize = 16 << 10;
/// A list of all events that a keeper holds has some 2 MB.
const BODY_BYTES_MAX: u64 = 64 << 20;

/// Client of one machine's keeper.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no keeper answers at {socket}")]
    NotRunning { socket: PathBuf },
    #[error("cannot open {socket}: it belongs to another user; try as root")]
    Forbidden { socket: PathBuf },
    #[error("the keeper at {socket} does not answer; see its log (`journalctl -u hearth@NAME.service`)")]
    Silent { socket: PathBuf, source: io::Error },
    #[error("the program at {socket} is not a keeper of this version: {what}; use the `hearth` of its version")]
    NotUnderstood { socket: PathBuf, what: String },
    #[error(transparent)]
    Refused(ApiError),
}

impl ClientError {
    pub fn is_refusal(&self, word: ErrorWord) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.error == word)
    }
}

impl Client {
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), patience: ANSWER_PATIENCE }
    }

    /// Sets a shorter timeout, for queries that are not worth a long wait.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    pub fn status(&self) -> Result<MachineStatus, ClientError> {
        self.get()
    }

    /// The answer of the type's route.
    pub fn get<T: Resource>(&self) -> Result<T, ClientError> {
        self.understand(&self.call(T::ROUTE, None, "", "")?)
    }

    /// Sends a request to the type's route.
    pub fn send<R: Call>(&self, request: &R) -> Result<R::Answer, ClientError> {
        self.post(None, request)
    }

    pub fn config(&self) -> Result<serde_json::Value, ClientError> {
        self.understand(&self.call(RouteId::Config, None, "", "")?)
    }

    pub fn resize(&self, disk: &str) -> Result<DiskSize, ClientError> {
        self.post(Some(disk), &ResizeRequest {})
    }

    /// Events with a greater sequence number than `since`.
    pub fn events(&self, since: u64) -> Result<Vec<EventRecord>, ClientError> {
        let body = self.call(RouteId::Events, None, &format!("?since={since}"), "")?;
        self.understand(&body)
    }

    /// These events and all later ones; ends when the keeper ends.
    pub fn follow(&self, since: u64) -> Result<EventStream, ClientError> {
        let (status, mut reader) = self.open(RouteId::Events, None, &format!("?follow=1&since={since}"), "")?;
        if status != 200 {
            return Err(self.refusal(&self.body(&mut reader)?));
        }
        reader.get_ref().set_read_timeout(Some(STREAM_PATIENCE)).map_err(|source| self.silent(source))?;
        Ok(EventStream { client: self.clone(), reader })
    }

    fn post<R: Call>(&self, parameter: Option<&str>, request: &R) -> Result<R::Answer, ClientError> {
        let request = serde_json::to_string(request).expect("requests are plain data");
        self.understand(&self.call(R::ROUTE, parameter, "", &request)?)
    }

    /// The body of a successful answer.
    fn call(&self, route: RouteId, parameter: Option<&str>, query: &str, body: &str) -> Result<Vec<u8>, ClientError> {
        let (status, mut reader) = self.open(route, parameter, query, body)?;
        let body = self.body(&mut reader)?;
        if status == 200 { Ok(body) } else { Err(self.refusal(&body)) }
    }

    /// Sends a request and reads the answer's head; the reader continues with the body.
    fn open(
        &self,
        route: RouteId,
        parameter: Option<&str>,
        query: &str,
        body: &str,
    ) -> Result<(u16, BufReader<UnixStream>), ClientError> {
        let route = Route::of(route);
        let connected = hearth_qemu::connect_within(&self.socket, self.patience);
        let mut stream = connected.map_err(|source| self.no_connection(source))?;
        stream.set_read_timeout(Some(self.patience)).map_err(|source| self.silent(source))?;
        stream.set_write_timeout(Some(self.patience)).map_err(|source| self.silent(source))?;
        let request = format!(
            "{} {}{query} HTTP/1.1\r\nHost: hearth\r\nContent-Length: {}\r\n\r\n{body}",
            route.method.name(),
            route.path_with(parameter),
            body.len()
        );
        // A keeper that refuses clients answers without reading the request. Its answer says more than this error.
        let written = stream.write_all(request.as_bytes());
        let mut reader = BufReader::new(stream);
        let status = self.status_number(&mut reader).map_err(|error| match (written, error) {
            (Err(source), ClientError::Silent { .. }) => self.silent(source),
            (_, error) => error,
        })?;
        Ok((status, reader))
    }

    fn status_number(&self, reader: &mut BufReader<UnixStream>) -> Result<u16, ClientError> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let room = HEAD_BYTES_MAX.saturating_sub(head.len());
            let length =
                reader.by_ref().take(room as u64).read_until(b'\n', &mut head).map_err(|source| self.silent(source))?;
            if length == 0 {
                return Err(match head.is_empty() {
                    true => self.silent(io::ErrorKind::UnexpectedEof.into()),
                    false => self.not_understood("its answer is cut off"),
                });
            }
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut answer = httparse::Response::new(&mut headers);
        match answer.parse(&head) {
            Ok(httparse::Status::Complete(_)) => Ok(answer.code.unwrap_or_default()),
            Ok(httparse::Status::Partial) => Err(self.not_understood("its answer is cut off")),
            Err(error) => Err(self.not_understood(error)),
        }
    }

    /// Reads until the keeper closes the connection, as it does after each answer.
    fn body(&self, reader: &mut BufReader<UnixStream>) -> Result<Vec<u8>, ClientError> {
        let mut body = Vec::new();
        reader.take(BODY_BYTES_MAX).read_to_end(&mut body).map_err(|source| self.silent(source))?;
        Ok(body)
    }

    fn understand<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(body).map_err(|error| self.not_understood(error))
    }

    fn refusal(&self, body: &[u8]) -> ClientError {
        self.understand(body).map_or_else(|error| error, ClientError::Refused)
    }

    fn no_connection(&self, source: io::Error) -> ClientError {
        let socket = self.socket.clone();
        match source.kind() {
            // The folder or socket is missing, or nobody listens on it.
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::NotADirectory => {
                ClientError::NotRunning { socket }
            }
            io::ErrorKind::PermissionDenied => ClientError::Forbidden { socket },
            _ => ClientError::Silent { socket, source },
        }
    }

    fn silent(&self, source: io::Error) -> ClientError {
        ClientError::Silent { socket: self.socket.clone(), source }
    }

    fn not_understood(&self, what: impl ToString) -> ClientError {
        ClientError::NotUnderstood { socket: self.socket.clone(), what: what.to_string() }
    }
}

/// Events as they happen.
pub struct EventStream {
    client: Client,
    reader: BufReader<UnixStream>,
}

impl Iterator for EventStream {
    type Item = Result<EventRecord, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let mut line = String::new();
            match self.reader.by_ref().take(BODY_BYTES_MAX).read_line(&mut line) {
                Ok(0) => return None,
                // A killed keeper resets the connection, which is a normal end for a reader.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return None,
                Err(error) => return Some(Err(self.client.silent(error))),
                Ok(_) => {}
            }
            // `id` and `event` repeat the data; other lines are heartbeats.
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(self.client.understand(data.as_bytes()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use hearth_api::{
        Accepted, Age, CrashRequest, ErrorWord, EventKind, Explanation, Order, ReadyRequest, RebootRequest,
        RemountPlan, StopRequest,
    };
    use serde_json::json;

    use super::*;
    use crate::control::{Answer, Command, Control};
    use crate::event_log::EventLog;
    use crate::http::{Context, Server};
    use crate::sample;

    fn keeper(socket: &Path) -> (Server, EventLog) {
        let events = EventLog::in_memory("web");
        let control = Control::new(|command, reply| {
            let answer = match command {
                Command::Status => Ok(Answer::Status(Box::new(sample::status()))),
                Command::Order(Order::Stop(_)) => Err(ApiError::new(ErrorWord::WrongState, "web is stopping already")),
                Command::Order(_) => Ok(Answer::Accepted),
                Command::Age => Ok(Answer::Age(Box::new(sample::signs()))),
                Command::RemountPlan => Ok(Answer::RemountPlan(Box::new(sample::remount_plan()))),
                Command::Resize { disk } => Ok(Answer::Resized(DiskSize { disk, bytes: 7 })),
            };
            reply.send(answer).unwrap();
        });
        let context = Context {
            control,
            events: events.clone(),
            config: std::sync::Arc::new(std::sync::Mutex::new(json!({"cpus": 2}))),
        };
        (Server::start(socket, context).unwrap(), events)
    }

    #[test]
    fn every_call_gets_its_typed_answer() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api.sock");
        let (_server, events) = keeper(&socket);
        let client = Client::new(&socket);
        assert_eq!(client.status().unwrap(), sample::status());
        assert_eq!(client.get::<Explanation>().unwrap().recovery, sample::status().last_recovery);
        assert_eq!(client.config().unwrap(), json!({"cpus": 2}));
        assert_eq!(client.resize("data").unwrap(), DiskSize { disk: "data".into(), bytes: 7 });
        assert_eq!(client.get::<Age>().unwrap(), sample::signs().assess());
        assert_eq!(client.get::<RemountPlan>().unwrap(), sample::remount_plan());
        events.record(EventKind::GuestPanicked);
        assert_eq!(client.send(&RebootRequest::default()).unwrap(), Accepted { since: 1 });
        assert_eq!(client.send(&ReadyRequest {}).unwrap(), Accepted { since: 1 });
        assert_eq!(client.send(&CrashRequest::default()).unwrap(), Accepted { since: 1 });
        assert_eq!(client.events(0).unwrap()[0].event, EventKind::GuestPanicked);
        let refusal = client.send(&StopRequest::default()).unwrap_err();
        assert!(matches!(&refusal, ClientError::Refused(error) if error.error == ErrorWord::WrongState));
        assert_eq!(refusal.to_string(), "web is stopping already");
    }

    #[test]
    fn stream_ends_with_the_keeper() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api.sock");
        let (_server, events) = keeper(&socket);
        events.record(EventKind::GuestPanicked);
        let mut stream = Client::new(&socket).follow(0).unwrap();
        assert_eq!(stream.next().unwrap().unwrap().sequence, 1);
        events.record(EventKind::GuestPanicked);
        assert_eq!(stream.next().unwrap().unwrap().sequence, 2);
        events.close();
        assert!(stream.next().is_none());
    }

    #[test]
    fn missing_silent_and_foreign_keepers_differ() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api.sock");
        let client = Client::new(&socket).with_patience(Duration::from_millis(20));
        let missing = client.status().unwrap_err();
        assert!(matches!(missing, ClientError::NotRunning { .. }), "{missing}");

        let listener = UnixListener::bind(&socket).unwrap();
        let silent = client.status().unwrap_err();
        assert!(matches!(silent, ClientError::Silent { .. }), "{silent}");

        let stranger = std::thread::spawn(move || {
            // The first connection is from the silent case.
            for stream in listener.incoming().take(2) {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n\r\n");
            }
        });
        let client = Client::new(&socket);
        let error = client.status().unwrap_err();
        assert!(matches!(error, ClientError::NotUnderstood { .. }), "{error}");
        stranger.join().unwrap();
        // Nobody listens any more, but the file still exists.
        assert!(matches!(client.status().unwrap_err(), ClientError::NotRunning { .. }));
    }
}
