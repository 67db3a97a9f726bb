//! An S3 server for tests and benches: `s3s-fs` over a folder, on loopback. The wire in front of it can be slow, answer
//! 500, break inside an answer, or be dead. Beside it a web server (`web`).

#![warn(missing_docs)]

pub mod web;

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;

/// Name of the only bucket.
pub const BUCKET: &str = "bucket";
const KEY_ID: &str = "tester";
const SECRET: &str = "known to tests only";
/// Interval at which a connection checks whether the wire has changed.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Traffic that an idle line may carry at once, as time: a sleep is about this inexact.
const SLACK: Duration = Duration::from_millis(2);

/// Behaviour of the connections to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Connections work normally.
    Whole,
    /// New connections are closed without an answer, and existing ones break.
    Dead,
    /// Each request is answered with 500.
    Failing,
    /// Each request is answered with 403.
    Refusing,
    /// Bytes per second in each direction, for each connection.
    Slow(u64),
    /// Connections break after this number of bytes of answers.
    Cut(u64),
    /// Conditional requests are answered with 501, as by a store without support for them.
    Unconditional,
    /// Answers to the completion of an upload in parts are lost.
    LosesCompletions,
    /// All connections share this rate in each direction, and each request is delayed by `request`.
    #[allow(missing_docs, reason = "described above")]
    Line { bytes_per_s: u64, request: Duration },
}

/// A running server. Dropping it removes its objects.
pub struct S3Server {
    folder: tempfile::TempDir,
    address: SocketAddr,
    state: Arc<State>,
    _runtime: tokio::runtime::Runtime,
}

struct State {
    wire: Mutex<(Wire, u64)>,
    answer_bytes: AtomicU64,
    /// Ranges of objects in the order of the requests.
    asked: Mutex<Vec<(String, u64)>>,
    /// Number of requests that have begun and are not answered.
    requests: AtomicUsize,
    /// When the line for requests and the line for answers become free.
    lines: [Mutex<Instant>; 2],
    /// Whether a conditional PUT is in flight. Others wait for it: unlike a real store, this server checks and writes
    /// in two steps.
    conditional: Mutex<bool>,
    unconditional: Condvar,
}

#[derive(Clone, Copy)]
enum Way {
    Up,
    Down,
}

impl State {
    /// The wire, and the number of its changes.
    fn wire(&self) -> (Wire, u64) {
        *self.wire.lock().expect("nobody panics with it")
    }

    fn begin_conditional(&self) {
        let conditional = self.conditional.lock().expect("nobody panics with it");
        *self.unconditional.wait_while(conditional, |is_taken| *is_taken).expect("nobody panics with it") = true;
    }

    fn end_conditional(&self) {
        *self.conditional.lock().expect("nobody panics with it") = false;
        self.unconditional.notify_one();
    }

    /// Waits until a line of this rate has carried `bytes` more.
    fn carry(&self, way: Way, bytes: u64, bytes_per_s: u64) {
        let until = {
            let mut taken = self.lines[way as usize].lock().expect("nobody panics with it");
            let begins = (*taken).max(Instant::now() - SLACK);
            *taken = begins + Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64);
            *taken
        };
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

impl S3Server {
    /// Starts a server with its objects in a temporary folder.
    pub fn start() -> Self {
        Self::start_in(&std::env::temp_dir())
    }

    /// Starts a server with its objects in a new folder below `parent`.
    pub fn start_in(parent: &Path) -> Self {
        let folder = tempfile::tempdir_in(parent).expect("a folder");
        fs::create_dir(folder.path().join(BUCKET)).expect("a bucket");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(folder.path()).expect("a store"));
        service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        let service = service.build();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
        let behind = listener.local_addr().expect("it is bound");
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                // Without this, the last part of an answer waits for an acknowledgement, up to 40 ms.
                let _ = socket.set_nodelay(true);
                let service = service.clone();
                tokio::spawn(async move {
                    // Tests break connections on purpose.
                    let _ = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        let front = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = front.local_addr().expect("it is bound");
        let lines = [(); 2].map(|()| Mutex::new(Instant::now()));
        let state = Arc::new(State {
            wire: Mutex::new((Wire::Whole, 0)),
            answer_bytes: AtomicU64::new(0),
            asked: Mutex::default(),
            requests: AtomicUsize::new(0),
            lines,
            conditional: Mutex::new(false),
            unconditional: Condvar::new(),
        });
        let accepting = state.clone();
        std::thread::spawn(move || {
            for client in front.incoming().flatten() {
                let state = accepting.clone();
                std::thread::spawn(move || carry(client, behind, &state));
            }
        });
        Self { folder, address, state, _runtime: runtime }
    }

    /// Environment variables for clients of this server.
    pub fn environment(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://{}", self.address);
        let pairs = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", KEY_ID),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ALLOW_HTTP", "true"),
        ];
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec()
    }

    /// Changes the wire; existing connections break.
    pub fn set_wire(&self, wire: Wire) {
        let mut set = self.state.wire.lock().expect("nobody panics with it");
        *set = (wire, set.1 + 1);
    }

    /// Bytes of all answers since the start.
    pub fn answer_bytes(&self) -> u64 {
        self.state.answer_bytes.load(Relaxed)
    }

    /// Ranges requested since the start, in order: the last component of the object's name, and the first byte of the
    /// range.
    pub fn asked(&self) -> Vec<(String, u64)> {
        self.state.asked.lock().expect("nobody panics with it").clone()
    }

    /// Number of requests in flight, including those that are breaking off.
    pub fn requests(&self) -> usize {
        self.state.requests.load(Relaxed)
    }

    /// File behind an object.
    pub fn file(&self, key: &str) -> PathBuf {
        self.folder.path().join(BUCKET).join(key)
    }

    /// Waits until the server holds no files. Parts of aborted uploads may take a while to go.
    pub fn await_empty(&self) {
        self.wait_until(|server| server.files().is_empty());
    }

    /// Waits until no request is in flight.
    pub fn await_quiet(&self) {
        self.wait_until(|server| server.requests() == 0);
    }

    fn wait_until(&self, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so(self) {
            assert!(Instant::now() < deadline, "{} requests, {:?}", self.requests(), self.files());
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Forgets all unfinished uploads in parts.
    pub fn forget_uploads(&self) {
        for entry in fs::read_dir(self.folder.path()).expect("a folder").flatten() {
            let name = entry.file_name().into_string().unwrap_or_default();
            if name.starts_with(".upload-") && name.ends_with(".json") {
                fs::remove_file(entry.path()).expect("it is there");
            }
        }
    }

    /// All files: objects and parts of unfinished uploads, without the server's metadata.
    pub fn files(&self) -> Vec<String> {
        let (mut found, mut folders) = (Vec::new(), vec![self.folder.path().to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("a folder").flatten() {
                if entry.path().is_dir() {
                    folders.push(entry.path());
                } else {
                    let path = entry.path().strip_prefix(self.folder.path()).expect("inside").display().to_string();
                    found.push(path);
                }
            }
        }
        // The metadata of objects, which lie beside them.
        found.retain(|name| !name.ends_with(".json"));
        found.sort();
        found
    }
}

/// Passes bytes in both directions until one side closes or the wire changes.
fn carry(client: TcpStream, behind: SocketAddr, state: &State) {
    let (wire, number) = state.wire();
    match wire {
        Wire::Dead => return,
        Wire::Failing => return refuse(client, "500 Internal Server Error"),
        Wire::Refusing => return refuse(client, "403 Forbidden"),
        Wire::Whole
        | Wire::Slow(_)
        | Wire::Cut(_)
        | Wire::Unconditional
        | Wire::LosesCompletions
        | Wire::Line { .. } => {}
    }
    let Ok(server) = TcpStream::connect(behind) else { return };
    for end in [&client, &server] {
        let _ = end.set_nodelay(true);
    }
    let (Ok(from_client), Ok(to_server)) = (client.try_clone(), server.try_clone()) else { return };
    let exchange = Exchange::new(wire, state);
    std::thread::scope(|scope| {
        let exchange = &exchange;
        scope.spawn(move || {
            pass(&from_client, &to_server, state, number, |bytes| exchange.request(bytes, &from_client));
        });
        let mut passed = 0;
        pass(&server, &client, state, number, |bytes| exchange.answer(bytes, &mut passed));
    });
    // The connection broke before there was an answer.
    exchange.end();
}

/// The request on a connection, and its answer.
struct Exchange<'a> {
    wire: Wire,
    state: &'a State,
    /// The next bytes from the client begin a request.
    answered: AtomicBool,
    conditional: AtomicBool,
    completes: AtomicBool,
}

impl<'a> Exchange<'a> {
    fn new(wire: Wire, state: &'a State) -> Self {
        let (answered, conditional, completes) = (true.into(), false.into(), false.into());
        Self { wire, state, answered, conditional, completes }
    }

    /// Whether these bytes of a request are passed on.
    fn request(&self, bytes: &[u8], mut client: &TcpStream) -> bool {
        let state = self.state;
        if has_condition(bytes) {
            if self.wire == Wire::Unconditional {
                let _ = client.write_all(&refusal("501 Not Implemented"));
                return false;
            }
            state.begin_conditional();
            self.conditional.store(true, Relaxed);
        }
        if is_completion(bytes) {
            self.completes.store(true, Relaxed);
        }
        if self.answered.swap(false, Relaxed) {
            state.requests.fetch_add(1, Relaxed);
            state.asked.lock().expect("nobody panics with it").extend(range_of(bytes));
            if let Wire::Line { request, .. } = self.wire {
                std::thread::sleep(request);
            }
        }
        self.slow(Way::Up, bytes.len() as u64);
        true
    }

    /// Whether these bytes of an answer are passed on. `passed` counts all bytes of the connection's answers.
    fn answer(&self, bytes: &[u8], passed: &mut u64) -> bool {
        let is_completed = self.completes.swap(false, Relaxed) && bytes.starts_with(b"HTTP/1.1 200");
        let bytes = bytes.len() as u64;
        self.end();
        self.state.answer_bytes.fetch_add(bytes, Relaxed);
        *passed += bytes;
        self.slow(Way::Down, bytes);
        match self.wire {
            Wire::Cut(after) => *passed < after,
            Wire::LosesCompletions => !is_completed,
            _ => true,
        }
    }

    fn slow(&self, way: Way, bytes: u64) {
        match self.wire {
            Wire::Slow(bytes_per_s) => std::thread::sleep(Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64)),
            Wire::Line { bytes_per_s, .. } => self.state.carry(way, bytes, bytes_per_s),
            _ => {}
        }
    }

    /// The request in flight has ended, if there is one.
    fn end(&self) {
        if !self.answered.swap(true, Relaxed) {
            self.state.requests.fetch_sub(1, Relaxed);
        }
        if self.conditional.swap(false, Relaxed) {
            self.state.end_conditional();
        }
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, state: &State, number: u64, mut go_on: impl FnMut(&[u8]) -> bool) {
    let _ = from.set_read_timeout(Some(LOOK_EVERY));
    let mut buffer = vec![0; 64 << 10];
    while state.wire().1 == number {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) if go_on(&buffer[..length]) && to.write_all(&buffer[..length]).is_ok() => {}
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Ok(_) | Err(_) => break,
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn refuse(mut client: TcpStream, status: &str) {
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match client.read(&mut buffer) {
            Ok(length) if length > 0 => head.extend_from_slice(&buffer[..length]),
            _ => return,
        }
    }
    let _ = client.write_all(&refusal(status));
    // If the connection closed while the client still sends, the client would not read the answer.
    let _ = client.shutdown(Shutdown::Write);
    while client.read(&mut buffer).is_ok_and(|length| length > 0) {}
}

fn refusal(status: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops").into_bytes()
}

/// The name and first byte of a request for a range of an object.
fn range_of(request: &[u8]) -> Option<(String, u64)> {
    let head = String::from_utf8_lossy(request);
    let name = head.strip_prefix("GET ")?.split([' ', '?']).next()?.rsplit('/').next()?;
    let (_, range) = head.split_once("range: bytes=").or_else(|| head.split_once("Range: bytes="))?;
    Some((name.to_owned(), range.split('-').next()?.parse().ok()?))
}

/// Whether a request is a conditional PUT. The head of a request arrives in one piece.
fn has_condition(request: &[u8]) -> bool {
    if !request.starts_with(b"PUT ") {
        return false;
    }
    let head = request.windows(4).position(|end| end == b"\r\n\r\n").map_or(request, |end| &request[..end]);
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    head.contains("\r\nif-match:") || head.contains("\r\nif-none-match:")
}

/// Whether a request completes an upload in parts.
fn is_completion(request: &[u8]) -> bool {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    line.starts_with(b"POST ") && line.windows(9).any(|word| word == b"uploadId=")
}
