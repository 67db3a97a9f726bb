//! The server over a real socket, with a machine that only records its commands.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use hearth_api::{CrashMethod, CrashRequest, DiskSize, EventKind, EventRecord, Order, RebootRequest, StopRequest};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::slots::FOLLOWERS_MAX;
use super::*;
use crate::control::{Answer, Command};
use crate::sample;

struct Fixture {
    _folder: TempDir,
    socket: PathBuf,
    server: Server,
    events: EventLog,
    asked: Receiver<Command>,
}

fn fixture() -> Fixture {
    fixture_with(Duration::from_secs(60), Duration::from_secs(60))
}

fn fixture_with(client_patience: Duration, heartbeat: Duration) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("api.sock");
    let events = EventLog::in_memory("web");
    let (ask, asked) = channel();
    let control = Control::new(move |command, reply| {
        let answer = machine_answer(&command, &ask);
        reply.send(answer).unwrap();
    });
    let context = Context { control, events: events.clone(), config: Arc::new(Mutex::new(json!({"name": "web"}))) };
    let server = Server::start_with(&socket, context, client_patience, heartbeat).unwrap();
    Fixture { _folder: folder, socket, server, events, asked }
}

fn machine_answer(command: &Command, ask: &Sender<Command>) -> Result<Answer, ApiError> {
    ask.send(command.clone()).unwrap();
    match command {
        Command::Status => Ok(Answer::Status(Box::new(sample::status()))),
        Command::Age => Ok(Answer::Age(Box::new(sample::signs()))),
        Command::RemountPlan => Ok(Answer::RemountPlan(Box::new(sample::remount_plan()))),
        Command::Resize { disk } if disk == "root" => {
            Ok(Answer::Resized(DiskSize { disk: disk.clone(), bytes: 1 << 30 }))
        }
        Command::Resize { disk } => Err(ApiError::new(ErrorWord::NoSuchDisk, format!("web has no disk {disk}"))),
        Command::Order(Order::Stop(_)) => Err(ApiError::new(ErrorWord::WrongState, "web is stopping already")),
        Command::Order(_) => Ok(Answer::Accepted),
    }
}

impl Fixture {
    fn connect(&self, text: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        // A refused request may be answered before it was fully read.
        let _ = stream.write_all(text.as_bytes());
        stream
    }

    /// Status code and body of the answer to these bytes.
    fn raw(&self, text: &str) -> (u16, String) {
        let mut answer = Vec::new();
        // A client that sends more than was read sees a reset after the answer.
        let _ = self.connect(text).read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {answer:?}"));
        let status = head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
        (status, body.to_owned())
    }

    fn request(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let (status, body) = self.raw(&text);
        (status, serde_json::from_str(&body).unwrap())
    }

    fn check_error(&self, method: &str, path: &str, body: &str, word: ErrorWord, message: &str) {
        let (status, answer) = self.request(method, path, body);
        assert_eq!((status, &answer["error"]), (word.status(), &json!(word.name())), "{method} {path}: {answer}");
        assert_eq!(answer["message"], message);
    }
}

const OVERDUE: &str = "QEMU is 2700000 s old, and rejuvenate.every is 2592000 s";

#[test]
fn status_config_and_metrics_are_answered() {
    let fixture = fixture();
    let (status, answer) = fixture.request("GET", "/v1/status", "");
    assert_eq!((status, answer), (200, serde_json::to_value(sample::status()).unwrap()));
    assert_eq!(fixture.request("GET", "/v1/config", "").1, json!({"name": "web"}));
    let (_, explanation) = fixture.request("GET", "/v1/explain", "");
    assert_eq!(explanation["recovery"]["phases"][3]["phase"], "launch");
    let (_, age) = fixture.request("GET", "/v1/age", "");
    assert_eq!((&age["qemu"]["descriptors"]["now"], &age["reasons"][0]), (&json!(33), &json!(OVERDUE)));
    let (status, text) = fixture.raw("GET /metrics HTTP/1.0\r\n\r\n");
    assert_eq!((status, text), (200, crate::metrics::text(&sample::status())));
}

#[test]
fn requests_reach_the_machine_unchanged() {
    let fixture = fixture();
    fixture.events.record(EventKind::GuestPanicked);
    assert_eq!(fixture.request("POST", "/v1/reboot", "{\"cold\": true, \"force\": true}"), (200, json!({"since": 1})));
    assert_eq!(fixture.request("POST", "/v1/reboot", "").0, 200);
    assert_eq!(fixture.request("POST", "/v1/crash", "{\"method\": \"sysrq\"}").0, 200);
    assert_eq!(fixture.request("POST", "/v1/disks/root/resize", ""), (200, json!({"disk": "root", "bytes": 1 << 30})));
    let asked: Vec<Command> = fixture.asked.try_iter().collect();
    assert_eq!(
        asked,
        [
            Command::Order(Order::Reboot(RebootRequest { cold: true, force: true })),
            Command::Order(Order::Reboot(RebootRequest::default())),
            Command::Order(Order::Crash(CrashRequest { method: CrashMethod::Sysrq })),
            Command::Resize { disk: "root".into() },
        ]
    );
}

#[test]
fn refusals_carry_their_word_and_status() {
    let fixture = fixture();
    let check = |method, path, body, word, message| fixture.check_error(method, path, body, word, message);
    check("GET", "/v2/status", "", ErrorWord::NoSuchRoute, "no such route: /v2/status");
    check("GET", "/v1/reboot", "", ErrorWord::WrongMethod, "/v1/reboot does not accept GET");
    check("POST", "/v1/stop", "{\"force\": true}", ErrorWord::WrongState, "web is stopping already");
    check("POST", "/v1/disks/data/resize", "", ErrorWord::NoSuchDisk, "web has no disk data");
    check("GET", "/v1/events?since=x", "", ErrorWord::BadRequest, "since=x is not a number");
    let unknown = "cannot understand the body: unknown field `warm`, expected `cold` or `force` at line 1 column 7";
    check("POST", "/v1/reboot", "{\"warm\": true}", ErrorWord::BadRequest, unknown);
    let torn = "cannot understand the body: EOF while parsing an object at line 1 column 1";
    check("POST", "/v1/reboot", "{", ErrorWord::BadRequest, torn);
    assert_eq!(
        fixture.asked.try_iter().collect::<Vec<_>>(),
        [Command::Order(Order::Stop(StopRequest { force: true })), Command::Resize { disk: "data".into() },]
    );
}

#[test]
fn malformed_requests_are_refused() {
    let fixture = fixture();
    for (text, status) in [
        ("hello\r\n\r\n".to_owned(), 400),
        ("POST /v1/reboot HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(), 400),
        ("POST /v1/reboot HTTP/1.1\r\nContent-Length: -1\r\n\r\n".to_owned(), 400),
        ("POST /v1/reboot HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n".to_owned(), 400),
        ("POST /v1/reboot HTTP/1.1\r\nContent-Length: 65537\r\n\r\n".to_owned(), 413),
        (format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(16 << 10)), 413),
        (format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65)), 400),
    ] {
        let (found, body) = fixture.raw(&text);
        assert_eq!(found, status, "{body}");
        serde_json::from_str::<ApiError>(&body).unwrap();
    }
    assert_eq!(fixture.request("GET", "/v1/status", "").0, 200);
}

#[test]
fn hung_client_loses_only_its_own_slot() {
    let fixture = fixture_with(Duration::from_millis(50), Duration::from_secs(60));
    let mut silent = fixture.connect("");
    let mut half = fixture.connect("POST /v1/reboot HTTP/1.1\r\nContent-Length: 10\r\n\r\n{");
    assert_eq!(fixture.request("GET", "/v1/status", "").0, 200);
    // The server closes both, so these reads end.
    assert_eq!(silent.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(half.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn client_limit_leaves_room_for_requests() {
    let fixture = fixture();
    let follow = || {
        let mut stream = fixture.connect("GET /v1/events?follow=1 HTTP/1.1\r\n\r\n");
        let mut start = [0; 12];
        stream.read_exact(&mut start).unwrap();
        (stream, String::from_utf8(start.to_vec()).unwrap())
    };
    let followers: Vec<UnixStream> = (0..FOLLOWERS_MAX)
        .map(|_| {
            let (stream, start) = follow();
            assert_eq!(start, "HTTP/1.1 200");
            stream
        })
        .collect();
    assert_eq!(follow().1, "HTTP/1.1 503");
    assert_eq!(fixture.request("GET", "/v1/status", "").0, 200);

    wait_for(&fixture, FOLLOWERS_MAX);
    let silent: Vec<UnixStream> = (FOLLOWERS_MAX..CLIENTS_MAX).map(|_| fixture.connect("")).collect();
    wait_for(&fixture, CLIENTS_MAX);
    let (status, body) = fixture.raw("");
    assert_eq!((status, body.contains("too_many_clients")), (503, true), "{body}");

    drop(silent);
    wait_for(&fixture, FOLLOWERS_MAX);
    // Their slots are free again, although no event or heartbeat was written.
    drop(followers);
    wait_for(&fixture, 0);
}

/// Waits until this many clients are connected.
fn wait_for(fixture: &Fixture, clients: usize) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while fixture.server.shared.slots.taken() != clients {
        assert!(std::time::Instant::now() < deadline, "{} clients", fixture.server.shared.slots.taken());
        std::thread::yield_now();
    }
}

#[test]
fn events_are_listed_or_streamed() {
    let fixture = fixture();
    for pages in 1..=3 {
        fixture.events.record(EventKind::EmberTrimmed { pages, bytes: 0 });
    }
    let (_, list) = fixture.request("GET", "/v1/events?since=1", "");
    let list: Vec<EventRecord> = serde_json::from_value(list).unwrap();
    assert_eq!(list.iter().map(|record| record.sequence).collect::<Vec<_>>(), [2, 3]);

    let mut stream =
        fixture.connect("GET /v1/events HTTP/1.1\r\nAccept: text/event-stream\r\nLast-Event-ID: 2\r\n\r\n");
    wait_for(&fixture, 1);
    fixture.events.record(EventKind::GuestPanicked);
    fixture.events.close();
    fixture.server.finish(Duration::from_secs(60));
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("Content-Type: text/event-stream"), "{head}");
    let events: Vec<&str> = body.split_terminator("\n\n").collect();
    assert_eq!(events.len(), 2, "{body}");
    assert!(events[0].starts_with("id: 3\nevent: ember_trimmed\ndata: {\"bytes\":0,"), "{body}");
    assert!(events[1].starts_with("id: 4\nevent: guest_panicked\ndata: {"), "{body}");
    assert!(!fixture.socket.exists());
}

#[test]
fn a_quiet_stream_has_a_heartbeat() {
    let fixture = fixture_with(Duration::from_secs(60), Duration::from_millis(1));
    let mut stream = fixture.connect("GET /v1/events?follow=1 HTTP/1.1\r\n\r\n");
    let mut text = String::new();
    while !text.ends_with("\r\n\r\n:\n\n:\n\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        text.push(char::from(byte[0]));
        assert!(text.len() < 1000, "{text}");
    }
}

/// A connection over which a socket came that takes an hour to close, and the listener behind that one's other end.
fn connection_with_a_lingering_socket() -> (UnixStream, UnixStream, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 65536]).is_ok() {}
    socket.set_nonblocking(false).unwrap();
    sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [socket.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(&theirs, &[IoSlice::new(b"GET /v1/status")], &mut ancillary, SendFlags::empty()).unwrap();
    (ours, theirs, listener)
}

#[test]
fn refusal_does_not_wait_for_descriptors() {
    let fixture = fixture();
    let taken: Vec<Slot> = (0..CLIENTS_MAX).map(|_| fixture.server.shared.slots.take().unwrap()).collect();
    let (ours, mut theirs, _listener) = connection_with_a_lingering_socket();
    let shared = fixture.server.shared.clone();
    let (refused, refusal) = channel();
    std::thread::spawn(move || {
        serve(&shared, ours);
        refused.send(()).unwrap();
    });
    refusal.recv_timeout(Duration::from_secs(60)).unwrap();
    let mut answer = [0; 12];
    theirs.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 503");
    drop(taken);
}

#[test]
fn a_qemu_is_refused() {
    let fixture = fixture_with(Duration::from_secs(3600), Duration::from_secs(3600));
    let mut qemu = std::process::Command::new("qemu-system-x86_64");
    qemu.args(["-M", "none", "-nodefaults", "-display", "none", "-qmp", "stdio", "-chardev"]);
    qemu.arg(format!("socket,id=api,path={}", fixture.socket.display()));
    qemu.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
    let mut qemu = qemu.spawn().expect("these tests need QEMU");
    // Its greeting comes after it has connected.
    qemu.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    assert_eq!(fixture.request("GET", "/v1/status", "").0, 200);
    // A client that is silent would keep its slot.
    wait_for(&fixture, 0);
    qemu.kill().unwrap();
    qemu.wait().unwrap();
}
