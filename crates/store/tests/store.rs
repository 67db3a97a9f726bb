//! A real store behind an unreliable wire: the bytes sent come back, each block is fetched once, and errors name their
//! reason.
//!
//! `houses`: what every provider must support. `lengths`: stores that announce false lengths. `web`: a web server, which
//! is read-only.

#[path = "store/houses.rs"]
mod houses;
#[path = "store/lengths.rs"]
mod lengths;
#[path = "store/web.rs"]
mod web;

use std::io::{self, Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hearth_store::{
    Address, Cache, Object, Parts, Replaced, Scheduler, Settings, Store, StoreError, UploadError, Urgency, part_bytes,
};
use loopback_s3::{BUCKET, S3Server, Wire};

const MIB: usize = 1 << 20;

struct Stand {
    server: S3Server,
    folder: tempfile::TempDir,
    store: Arc<Store>,
    scheduler: Arc<Scheduler>,
}

impl Stand {
    fn new() -> Self {
        let (server, folder) = (S3Server::start(), tempfile::tempdir().expect("a folder"));
        let file = folder.path().join("s3.env");
        let lines = server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
        std::fs::write(&file, lines.collect::<String>()).expect("it can be written");
        let settings = Settings::from_file(&file).expect("it was written");
        let store = open(&format!("s3://{BUCKET}/place"), &settings);
        Self { server, folder, store, scheduler: Arc::default() }
    }

    fn object(&self, name: &str) -> Arc<Object> {
        let cache = Cache::open(&self.folder.path().join("cache"), 0).expect("a folder");
        Object::open(&self.store, &cache, &self.scheduler, name).expect("the store answers").expect("it was sent")
    }

    fn send(&self, name: &str, bytes: &[u8]) -> Result<u64, UploadError> {
        self.store.upload(name, bytes.len() as u64, &mut Cursor::new(bytes), &mut |_| true)
    }
}

fn open(address: &str, settings: &Settings) -> Arc<Store> {
    Arc::new(Store::open(Address::parse(address).expect("it is one"), settings).expect("it asks nobody"))
}

/// A reader that returns `WouldBlock` at every other call.
struct Halting<'a>(&'a [u8], bool);

impl Read for Halting<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.1 = !self.1;
        if self.1 { Err(io::ErrorKind::WouldBlock.into()) } else { self.0.read(into) }
    }
}

/// A reader of this many bytes, which then fails.
struct Torn(usize);

impl Read for Torn {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(into.len().min(MIB)).ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(into.len().min(MIB))
    }
}

/// Bytes in which no two blocks are alike.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes as u64 / 8).flat_map(|word| (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 5).to_le_bytes()).collect()
}

#[test]
fn sent_bytes_return_and_blocks_are_fetched_once() {
    let stand = Stand::new();
    let sent = pattern(21 * MIB);
    stand.send("ram", &sent).unwrap();
    stand.send("small", b"little").unwrap();
    stand.send("empty", b"").unwrap();
    // The source is shorter than announced and returns `WouldBlock` at times.
    let halting = stand.store.upload("halting", 90 << 20, &mut Halting(&sent, false), &mut |_| true);
    assert_eq!(halting.unwrap(), sent.len() as u64);
    assert!(std::fs::read(stand.server.file("place/halting")).unwrap() == sent);
    assert_eq!(stand.store.read("small", 100).unwrap().as_deref(), Some(&b"little"[..]));
    assert_eq!(stand.store.read("empty", 100).unwrap().as_deref(), Some(&b""[..]));
    assert_eq!(stand.store.read("none", 100).unwrap(), None);
    let refused = stand.store.read("small", 5).unwrap_err().to_string();
    assert!(refused.contains("place/small") && refused.contains("it has 6 bytes"), "{refused}");

    assert!(std::fs::read(stand.server.file("place/ram")).unwrap() == sent);
    let object = stand.object("ram");
    assert_eq!(object.meta().bytes, sent.len() as u64);
    let before = stand.server.answer_bytes();
    object.read_ahead(2 * MIB as u64..9 * MIB as u64, Urgency::Memory);
    std::thread::scope(|scope| {
        for reader in 0..4 {
            let (object, sent) = (&object, &sent);
            scope.spawn(move || {
                for at in (reader * 1000..sent.len() - 70_000).step_by(65_536) {
                    let mut bytes = vec![0; 65_536];
                    object.read_at(&mut bytes, at as u64, Urgency::Demand).unwrap();
                    assert!(bytes == sent[at..at + 65_536], "at {at}");
                }
            });
        }
    });
    let mut end = [0; 100];
    object.read_at(&mut end, sent.len() as u64 - 100, Urgency::Demand).unwrap();
    assert_eq!(end, sent[sent.len() - 100..]);
    assert!(
        object
            .read_at(&mut end, sent.len() as u64 - 99, Urgency::Demand)
            .unwrap_err()
            .to_string()
            .contains("it ends at")
    );
    let all = stand.server.answer_bytes() - before;
    assert!(all < sent.len() as u64 * 102 / 100, "{all} bytes came of {}", sent.len());

    // Another reader finds the block in the cache until it is forgotten.
    let (again, before) = (stand.object("ram"), stand.server.answer_bytes());
    let mut bytes = vec![0; MIB];
    again.read_at(&mut bytes, 0, Urgency::Demand).unwrap();
    assert_eq!(stand.server.answer_bytes(), before);
    again.forget(0..10);
    again.read_at(&mut bytes, 0, Urgency::Demand).unwrap();
    assert!(bytes == sent[..MIB] && stand.server.answer_bytes() > before);
}

#[test]
fn broken_and_slow_connections_only_delay_reads() {
    let stand = Stand::new();
    let sent = pattern(20 * MIB);
    stand.send("ram", &sent).unwrap();
    // Each connection breaks inside an answer.
    stand.server.set_wire(Wire::Cut(700 << 10));
    let object = stand.object("ram");
    let mut bytes = vec![0; 3 * MIB / 2];
    for at in (0..sent.len() - bytes.len()).step_by(bytes.len()) {
        while let Err(error) = object.read_at(&mut bytes, at as u64, Urgency::Demand) {
            assert!(matches!(error, StoreError::Away { .. }), "{error}");
            stand.server.set_wire(Wire::Slow(20 << 20));
        }
        assert!(bytes == sent[at..at + bytes.len()], "at {at}");
    }
}

#[test]
fn missing_store_is_named_until_it_returns() {
    let stand = Stand::new();
    let sent = pattern(MIB);
    stand.send("ram", &sent).unwrap();
    let object = stand.object("ram");
    let mut bytes = vec![0; 100_000];
    for (wire, expect) in [(Wire::Failing, "500"), (Wire::Dead, "place/ram: the store gave no valid answer")] {
        stand.server.set_wire(wire);
        let error = object.read_at(&mut bytes, 5, Urgency::Demand).unwrap_err().to_string();
        assert!(error.contains("s3://bucket/place/ram") && error.contains(expect), "{error}");
        assert!(!error.contains("known to tests only"), "{error}");
    }
    stand.server.set_wire(Wire::Whole);
    object.read_at(&mut bytes, 5, Urgency::Demand).unwrap();
    assert!(bytes == sent[5..100_005]);
}

#[test]
fn demand_overtakes_queued_requests_and_memory_precedes_disks() {
    let stand = Stand::new();
    let sent = pattern(12 * MIB);
    for name in ["ram", "disk"] {
        stand.send(name, &sent).unwrap();
    }
    let (ram, disk) = (stand.object("ram"), stand.object("disk"));
    // So slow that no answer arrives before the end of the test's first half.
    stand.server.set_wire(Wire::Slow(64 << 10));
    let asked = |count: usize| {
        for _ in 0..2000 {
            if stand.server.asked().len() >= count {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        stand.server.asked()
    };
    disk.read_ahead(0..6 * MIB as u64, Urgency::Disks);
    asked(2);
    ram.read_ahead(0..6 * MIB as u64, Urgency::Memory);
    std::thread::scope(|scope| {
        for (object, place) in [(&disk, 9), (&ram, 11)] {
            let before = stand.server.asked().len();
            let sent = &sent;
            scope.spawn(move || {
                let (mut bytes, at) = (vec![0; 4096], place * MIB);
                object.read_at(&mut bytes, at as u64, Urgency::Demand).unwrap();
                assert!(bytes == sent[at..at + 4096]);
            });
            let expect = (object.url().rsplit('/').next().unwrap().to_owned(), (place * MIB) as u64);
            assert_eq!(asked(before + 1).last(), Some(&expect));
        }
        assert_eq!(stand.server.asked().len(), 4);
        stand.server.set_wire(Wire::Whole);
    });
    // Background requests end as well.
    let mut bytes = vec![0; 6 * MIB];
    for object in [&ram, &disk] {
        object.read_at(&mut bytes, 0, Urgency::Disks).unwrap();
        assert!(bytes == sent[..6 * MIB]);
    }
    let all = stand.server.asked();
    let first_of = |name: &str, at: usize| all.iter().position(|asked| *asked == (name.to_owned(), (at * MIB) as u64));
    // Expected: the disk requests in flight, memory, then the rest of the disk.
    for (before, after) in [(1, 2), (3, 2), (4, 3)] {
        assert!(first_of("ram", before) < first_of("disk", after), "{all:?}");
    }
}

#[test]
fn stopped_upload_leaves_nothing() {
    let stand = Stand::new();
    let sent = pattern(40 * MIB);
    let (mut arrived, stopped) = (0, AtomicBool::new(false));
    let ended = stand.store.upload("ram", sent.len() as u64, &mut Cursor::new(&sent), &mut |bytes| {
        arrived += bytes;
        stopped.store(arrived > 0, Relaxed);
        arrived == 0
    });
    assert!(matches!(ended, Err(UploadError::Stopped)) && stopped.load(Relaxed), "{ended:?}");
    let torn = stand.store.upload("torn", 20 << 20, &mut Torn(9 * MIB), &mut |_| true);
    assert!(matches!(torn, Err(UploadError::Read(_))), "{torn:?}");
    assert_eq!(stand.store.meta("ram").unwrap(), None);
    stand.server.await_empty();
    stand.send("ram", &sent).unwrap();
    stand.store.remove("ram").unwrap();
    stand.store.remove("ram").unwrap();
    assert_eq!(stand.store.meta("ram").unwrap(), None);
}

#[test]
fn stopped_upload_never_arrives_after_its_removal() {
    let stand = Stand::new();
    let is_gone = || {
        stand.store.remove("ram").unwrap();
        stand.server.await_quiet();
        stand.server.await_empty();
    };
    // A stop inside the only request, and a stop after its body has been sent.
    for bytes in [6 * MIB, 100] {
        let sent = pattern(bytes);
        stand.server.set_wire(Wire::Line { bytes_per_s: 2 << 20, request: Duration::from_millis(500) });
        let mut is_stopped = false;
        let ended = stand.store.put("ram", sent, &mut |_| {
            is_stopped |= stand.server.requests() > 0;
            !is_stopped
        });
        assert!(matches!(ended, Err(UploadError::Stopped)), "{ended:?}");
        is_gone();
    }
    // A stop during the completion.
    let (sent, mut arrived, mut is_stopped) = (pattern(9 * MIB), 0, false);
    stand.server.set_wire(Wire::Line { bytes_per_s: 100 << 20, request: Duration::from_millis(500) });
    let ended = stand.store.upload("ram", sent.len() as u64, &mut Cursor::new(&sent), &mut |bytes| {
        arrived += bytes;
        is_stopped |= arrived == sent.len() as u64 && stand.server.requests() > 0;
        !is_stopped
    });
    assert!(is_stopped, "{ended:?}");
    is_gone();
}

#[test]
fn parts_come_in_any_order_and_last_counts() {
    let stand = Stand::new();
    let (sent, part) = (pattern(21 * MIB), part_bytes(0) as usize);
    let mut arrived = 0;
    let mut go_on = |bytes: u64| {
        arrived += bytes;
        true
    };
    let mut parts = Parts::begin(&stand.store, "ram", &mut go_on).unwrap();
    // Old contents of parts that change later.
    parts.send(1, vec![7; part], &mut go_on).unwrap();
    parts.send(0, vec![8; part], &mut go_on).unwrap();
    for number in [2, 0, 1] {
        let end = sent.len().min((number + 1) * part);
        parts.send(number, sent[number * part..end].to_vec(), &mut go_on).unwrap();
    }
    parts.complete(&mut go_on).unwrap();
    assert_eq!(arrived, (2 * part + sent.len()) as u64);
    assert!(std::fs::read(stand.server.file("place/ram")).unwrap() == sent);
    let mut given_up = Parts::begin(&stand.store, "other", &mut |_| true).unwrap();
    given_up.send(0, vec![7; part], &mut |_| true).unwrap();
    drop(given_up);
    stand.store.remove("ram").unwrap();
    stand.server.await_empty();
}

#[test]
fn upload_succeeds_when_the_last_answer_is_lost() {
    let stand = Stand::new();
    let sent = pattern(20 * MIB);
    stand.server.set_wire(Wire::LosesCompletions);
    assert_eq!(stand.send("ram", &sent).unwrap(), sent.len() as u64);
    assert!(std::fs::read(stand.server.file("place/ram")).unwrap() == sent);
}

#[test]
fn replacement_survives_the_end_of_idle_connections() {
    let stand = Stand::new();
    for round in 0..20_u8 {
        let over = stand.store.meta("set").unwrap();
        stand.server.set_wire(Wire::Whole);
        // `Changed` if the connection took the request and lost the answer.
        let replaced = stand.store.replace("set", vec![round; 9], over.as_ref());
        assert!(matches!(replaced, Replaced::Done | Replaced::Changed), "round {round}: {replaced:?}");
        assert_eq!(stand.store.read("set", 100).unwrap(), Some(vec![round; 9]));
    }
}

#[test]
fn older_object_is_not_mistaken_for_the_upload() {
    let stand = Stand::new();
    let (old, part) = (pattern(9 * MIB), part_bytes(0) as usize);
    stand.send("ram", &old).unwrap();
    let send_unknown = |sent: &[u8]| {
        let mut parts = Parts::begin(&stand.store, "ram", &mut |_| true).unwrap();
        for (number, bytes) in sent.chunks(part).enumerate() {
            parts.send(number, bytes.to_vec(), &mut |_| true).unwrap();
        }
        let mut arrived = 0;
        while arrived < sent.len() as u64 {
            let mut go_on = |bytes| {
                arrived += bytes;
                true
            };
            parts.land(Duration::from_secs(1), &mut go_on).unwrap();
        }
        stand.server.forget_uploads();
        parts.complete(&mut |_| true)
    };
    // The same length and number of parts.
    let mut new = old.clone();
    new[part + 5] ^= 1;
    let refused = send_unknown(&new).unwrap_err();
    assert!(matches!(&refused, UploadError::Store(StoreError::Refused { .. })), "{refused}");
    assert!(std::fs::read(stand.server.file("place/ram")).unwrap() == old);
    send_unknown(&old).unwrap();
}

#[test]
fn wrong_credentials_and_unallowed_http_are_refused() {
    let stand = Stand::new();
    stand.send("ram", b"secret").unwrap();
    let open = |pairs: Vec<(String, String)>| {
        let file = stand.folder.path().join("other.env");
        let lines = pairs.into_iter().map(|(key, value)| format!("{key}={value}\n"));
        std::fs::write(&file, lines.collect::<String>()).unwrap();
        let address = Address::parse("s3://bucket/place").unwrap();
        Store::open(address, &Settings::from_file(&file).unwrap()).unwrap().meta("ram").unwrap_err()
    };
    let mut pairs = stand.server.environment();
    pairs
        .iter_mut()
        .filter(|(key, _)| key == "AWS_SECRET_ACCESS_KEY")
        .for_each(|(_, value)| *value = "wrong".to_owned());
    let stranger = open(pairs);
    assert!(matches!(stranger, StoreError::Refused { .. }), "{stranger}");
    let mut pairs = stand.server.environment();
    pairs.retain(|(key, _)| key != "AWS_ALLOW_HTTP");
    let plain = open(pairs);
    assert!(matches!(plain, StoreError::Away { .. }), "{plain}");
}
