//! The hub between real sockets, with a QEMU that is only a listener.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::*;

struct Fixture {
    folder: TempDir,
    hub: Hub,
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let hub = Hub::start(&folder.path().join("console.sock")).unwrap();
    Fixture { folder, hub }
}

impl Fixture {
    fn client(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path().join("console.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn place(&self, name: &str) -> Place {
        Place { qemu: Endpoint::unchecked(self.path(name)), transcript: None }
    }

    /// A QEMU's end of its serial socket.
    fn qemu(&self, name: &str) -> UnixStream {
        let listener = UnixListener::bind(self.path(name)).unwrap();
        self.hub.attach(self.place(name));
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }
}

fn check_next(stream: &mut UnixStream, expect: &str) {
    let mut bytes = vec![0; expect.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(String::from_utf8_lossy(&bytes), expect);
}

#[test]
fn output_reaches_all_clients() {
    let fixture = fixture();
    let mut qemu = fixture.qemu("serial-1");
    let (mut one, mut other) = (fixture.client(), fixture.client());
    qemu.write_all(b"login: ").unwrap();
    check_next(&mut one, "login: ");
    check_next(&mut other, "login: ");
    one.write_all(b"root\n").unwrap();
    check_next(&mut qemu, "root\n");
}

#[test]
fn new_client_sees_recent_output_first() {
    let fixture = fixture();
    let mut qemu = fixture.qemu("serial-1");
    let mut witness = fixture.client();
    let output = "0123456789abcdef".repeat(SCROLLBACK_BYTES / 16) + "the end";
    qemu.write_all(output.as_bytes()).unwrap();
    check_next(&mut witness, &output);
    check_next(&mut fixture.client(), &output[output.len() - SCROLLBACK_BYTES..]);
}

#[test]
fn clients_stay_over_the_death_of_a_qemu() {
    let fixture = fixture();
    let mut client = fixture.client();
    let mut first = fixture.qemu("serial-1");
    first.write_all(b"Kernel panic - not syncing").unwrap();
    drop(first);
    let mut second = fixture.qemu("serial-2");
    second.write_all(b"Linux version 6").unwrap();
    check_next(&mut client, "Kernel panic - not syncingLinux version 6");
    client.write_all(b"x").unwrap();
    check_next(&mut second, "x");
}

#[test]
fn last_output_is_read_before_detach() {
    let fixture = fixture();
    let mut client = fixture.client();
    let mut qemu = fixture.qemu("serial-1");
    qemu.write_all(b"reboot: Power down").unwrap();
    fixture.hub.detach();
    check_next(&mut client, "reboot: Power down");
    // The hub has disconnected.
    assert_eq!(qemu.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn unread_input_goes_to_the_next_qemu() {
    let fixture = fixture();
    let mut old = fixture.qemu("serial-1");
    let mut client = fixture.client();
    client.write_all(b"abc").unwrap();
    check_next(&mut old, "a");
    let listener = UnixListener::bind(fixture.path("serial-2")).unwrap();
    fixture.hub.expect(fixture.place("serial-2"), Duration::from_millis(10));
    let (mut new, _) = listener.accept().unwrap();
    fixture.hub.end_switch(true);
    client.write_all(b"d").unwrap();
    check_next(&mut new, "bcd");
}

#[test]
fn hub_waits_for_a_late_qemu() {
    let fixture = fixture();
    fixture.hub.attach(fixture.place("late"));
    let mut client = fixture.client();
    client.write_all(b"early").unwrap();
    while typed::unread_cost(&client) > 0 {
        std::thread::yield_now();
    }
    let listener = UnixListener::bind(fixture.path("late")).unwrap();
    let (mut qemu, _) = listener.accept().unwrap();
    check_next(&mut qemu, "early");
    qemu.write_all(b"hello").unwrap();
    check_next(&mut client, "hello");
}

/// Writes output as QEMU does: to its client, and to its log.
fn say(qemu: Option<&mut UnixStream>, transcript: &Transcript, words: &str) {
    if let Some(qemu) = qemu {
        qemu.write_all(words.as_bytes()).unwrap();
    }
    assert_eq!(rustix::io::write(transcript.log(), words.as_bytes()).unwrap(), words.len());
}

#[test]
fn unread_console_output_is_shown_once() {
    let fixture = fixture();
    let transcript = Arc::new(Transcript::create().unwrap());
    transcript.fix_size().unwrap();
    let mut client = fixture.client();
    say(None, &transcript, "Kernel panic");
    let listener = UnixListener::bind(fixture.path("serial-1")).unwrap();
    let place = Place { transcript: Some(transcript.clone()), ..fixture.place("serial-1") };
    fixture.hub.attach(place);
    check_next(&mut client, "Kernel panic");
    // The hub has connected, and is not accepted yet.
    say(None, &transcript, " - not syncing");
    let (mut qemu, _) = listener.accept().unwrap();
    say(Some(&mut qemu), &transcript, ": dead");
    check_next(&mut client, " - not syncing: dead");
    say(Some(&mut qemu), &transcript, " and gone");
    check_next(&mut client, " and gone");
    check_next(&mut fixture.client(), "Kernel panic - not syncing: dead and gone");
    drop(fixture);
    assert_eq!(transcript.said().unwrap(), b"Kernel panic - not syncing: dead and gone", "for the next keeper");
}

#[test]
fn console_history_outlives_the_keeper() {
    let fixture = fixture();
    let mut client = fixture.client();
    let mut first = fixture.qemu("serial-1");
    first.write_all(b"Kernel panic").unwrap();
    drop(first);
    check_next(&mut client, "Kernel panic");
    let transcript = Arc::new(Transcript::create().unwrap());
    transcript.fix_size().unwrap();
    let listener = UnixListener::bind(fixture.path("serial-2")).unwrap();
    fixture.hub.attach(Place { transcript: Some(transcript.clone()), ..fixture.place("serial-2") });
    let (mut second, _) = listener.accept().unwrap();
    client.write_all(b"x").unwrap();
    // Input arrived, so the hub has finished connecting.
    check_next(&mut second, "x");
    say(Some(&mut second), &transcript, ", Linux version 6");
    check_next(&mut client, ", Linux version 6");
    drop(fixture);
    assert_eq!(transcript.said().unwrap(), b"Kernel panic, Linux version 6");
}

#[test]
fn a_transcript_never_fills_while_somebody_listens() {
    let fixture = fixture();
    let transcript = Arc::new(Transcript::create().unwrap());
    transcript.fix_size().unwrap();
    let listener = UnixListener::bind(fixture.path("serial-1")).unwrap();
    fixture.hub.attach(Place { transcript: Some(transcript.clone()), ..fixture.place("serial-1") });
    let (mut qemu, _) = listener.accept().unwrap();
    let mut client = fixture.client();
    let words = "0123456789abcdef".repeat(1 << 10);
    for _ in 0..64 {
        say(Some(&mut qemu), &transcript, &words);
        check_next(&mut client, &words);
    }
    drop(fixture);
    let said = transcript.said().unwrap();
    assert!(said.len() >= SCROLLBACK_BYTES && said.ends_with(words.as_bytes()), "{}", said.len());
}

#[test]
fn slow_console_client_is_dropped() {
    let fixture = fixture();
    let mut qemu = fixture.qemu("serial-1");
    let mut sleeper = fixture.client();
    sleeper.write_all(b"!").unwrap();
    check_next(&mut qemu, "!");
    // More than all buffers on the way to the sleeping client hold. The hub must take all of it.
    for _ in 0..64 {
        qemu.write_all(&[b'x'; CLIENT_BYTES_MAX / 16]).unwrap();
    }
    qemu.write_all(b"the end").unwrap();
    let mut reader = fixture.client();
    let mut seen = String::new();
    while !seen.ends_with("the end") {
        let mut buffer = [0; 4096];
        let length = reader.read(&mut buffer).unwrap();
        assert_ne!(length, 0);
        seen.push_str(str::from_utf8(&buffer[..length]).unwrap());
    }
    // The sleeping client gets what its socket held, then the end.
    let mut rest = Vec::new();
    let _ = sleeper.read_to_end(&mut rest);
    assert!(rest.len() < 4 * CLIENT_BYTES_MAX, "{}", rest.len());
}

#[test]
fn half_closed_client_still_reads() {
    let fixture = fixture();
    let mut qemu = fixture.qemu("serial-1");
    let mut client = fixture.client();
    client.write_all(b"ls\n").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    check_next(&mut qemu, "ls\n");
    qemu.write_all(b"files").unwrap();
    check_next(&mut client, "files");
}

#[test]
fn clients_beyond_the_bound_are_turned_away() {
    let fixture = fixture();
    let mut qemu = fixture.qemu("serial-1");
    qemu.write_all(b"x").unwrap();
    let mut clients: Vec<UnixStream> = (0..CLIENTS_MAX).map(|_| fixture.client()).collect();
    clients.iter_mut().for_each(|client| check_next(client, "x"));
    assert_eq!(fixture.client().read(&mut [0; 1]).unwrap(), 0);
    clients.pop();
    // The slot is free once the hub notices; input makes it check.
    clients[0].write_all(b"y").unwrap();
    check_next(&mut qemu, "y");
    check_next(&mut fixture.client(), "x");
}

#[test]
fn closing_the_hub_closes_all_clients() {
    let Fixture { folder, hub } = fixture();
    let mut client = UnixStream::connect(folder.path().join("console.sock")).unwrap();
    drop(hub);
    // Never accepted or closed; either way it has ended.
    assert!(matches!(client.read(&mut [0; 1]), Ok(0) | Err(_)));
    assert!(!folder.path().join("console.sock").exists());
}

/// The thread is late: request and input arrive together.
#[test]
fn later_input_goes_to_the_next_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let listener = listen(&path("console.sock")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (wake, woken) = UnixStream::pair().unwrap();
    woken.set_nonblocking(true).unwrap();
    let (orders, received) = channel();
    let mut relay = relay::Relay::new(listener, woken, received);
    let mut client = UnixStream::connect(path("console.sock")).unwrap();
    assert!(relay.round(), "the client is welcomed");
    let qemu = UnixListener::bind(path("serial-1")).unwrap();
    orders.send(Order::Attach(Place { qemu: Endpoint::unchecked(path("serial-1")), transcript: None })).unwrap();
    (&wake).write_all(&[0]).unwrap();
    client.write_all(b"date\n").unwrap();
    assert!(relay.round());
    let (mut qemu, _) = qemu.accept().unwrap();
    qemu.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    check_next(&mut qemu, "date\n");
}

#[test]
fn a_qemu_is_no_client() {
    let fixture = fixture();
    let mut qemu = fixture.qemu("serial-1");
    // It says who it is as soon as it is connected.
    let chardev = format!("socket,id=console,path={}", fixture.path("console.sock").display());
    let mut stranger = Command::new("qemu-system-x86_64");
    stranger.args(["-M", "none", "-nodefaults", "-display", "none", "-mon", "console,mode=control", "-qmp", "stdio"]);
    stranger.args(["-chardev", &chardev]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut stranger = stranger.spawn().expect("these tests need QEMU");
    let mut greeting = stranger.stdout.take().unwrap();
    greeting.read_exact(&mut [0; 1]).unwrap();
    let mut client = fixture.client();
    client.write_all(b"root\n").unwrap();
    check_next(&mut qemu, "root\n");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}
