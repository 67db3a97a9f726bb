//! A store that announces false lengths: no memory is taken for them, and the error says what is wrong.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use hearth_store::{Cache, Object, Settings, Urgency};

use super::open;

/// What a reader of a small object allows, as for a manifest.
const BYTES_MAX: u64 = 1 << 20;
/// More than the other tests of this process take, and less than each huge length.
const LITTLE_KIB: u64 = 8 << 20;

/// Answers to HEAD and GET: status, headers, body. The connection ends after each.
#[derive(Clone, Copy)]
struct Answers {
    head: &'static str,
    get: (&'static str, &'static [u8]),
}

fn serve(answers: Answers) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it is bound");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // A client may hang up in the middle of an answer.
            let _ = answer(client, answers);
        }
    });
    address
}

fn answer(mut client: TcpStream, answers: Answers) -> std::io::Result<()> {
    let mut lines = BufReader::new(client.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let (head, body) = if request.starts_with("HEAD") { (answers.head, &[][..]) } else { answers.get };
    client.write_all(format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n").as_bytes())?;
    client.write_all(body)
}

/// The largest address space that this process has had. An allocation counts before anything is written to it.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).expect("it has a peak");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

#[test]
fn false_lengths_take_no_memory_and_are_named() {
    const HONEST: &str = "200 OK\r\nContent-Length: 20";
    const UNASKED: (&str, &[u8]) = ("500 Unasked\r\nContent-Length: 0", b"");
    const RANGE: &str = "206 Partial Content\r\nContent-Range: bytes 0-19/20\r\nContent-Length: 68719476736";
    const SHORT: &str = "206 Partial Content\r\nContent-Range: bytes 0-19/20\r\nContent-Length: 5";
    const OTHER: &str = "206 Partial Content\r\nContent-Range: bytes 0-68719476735/68719476736\r\nContent-Length: 20";
    let cases = [
        (
            "200 OK\r\nContent-Length: 1152921504606846976",
            UNASKED,
            "it has 1152921504606846976 bytes, and at most 1048576",
        ),
        ("200 OK\r\nContent-Length: 18446744073709551615", UNASKED, "it has 18446744073709551615 bytes, and at most"),
        ("200 OK\r\nContent-Length: 99999999999999999999", UNASKED, "content-length header not a number"),
        ("200 OK\r\nContent-Length: -1", UNASKED, "content-length header not a number"),
        ("200 OK", UNASKED, "Content-Length"),
        (HONEST, (RANGE, &[7; 20]), "no valid answer: io: Peer disconnected"),
        (HONEST, (SHORT, &[7; 20]), "no valid answer: 5 bytes of 20 arrived"),
        (HONEST, (OTHER, &[7; 20]), "no valid answer: Requested 0..20, got 0..68719476736"),
        (HONEST, ("200 OK\r\nContent-Length: 68719476736", &[7; 20]), "no valid answer: io: Peer disconnected"),
    ];
    let before = peak_kib();
    // Most of them are requested several times, with pauses.
    std::thread::scope(|scope| {
        for (head, get, expect) in cases {
            scope.spawn(move || {
                let store = open(&format!("http://{}/place", serve(Answers { head, get })), &Settings::default());
                let error = store.read("manifest", BYTES_MAX).expect_err(head).to_string();
                assert!(error.contains("/place/manifest") && error.contains(expect), "{head}, {}: {error}", get.0);
            });
        }
        scope.spawn(|| {
            let (head, get) = ("200 OK\r\nContent-Length: 1152921504606846976", (RANGE, &[7; 20][..]));
            let store = open(&format!("http://{}/place", serve(Answers { head, get })), &Settings::default());
            let folder = tempfile::tempdir().unwrap();
            let cache = Cache::open(folder.path(), 0).unwrap();
            let object = Object::open(&store, &cache, &Default::default(), "ram").unwrap().expect("it is there");
            let mut bytes = [0; 4096];
            for at in [0, 1 << 40] {
                let error = object.read_at(&mut bytes, at, Urgency::Demand).unwrap_err().to_string();
                assert!(error.contains("/place/ram"), "{error}");
            }
        });
    });
    let taken = peak_kib() - before;
    assert!(taken < LITTLE_KIB, "{taken} KiB were taken");
}
