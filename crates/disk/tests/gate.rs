//! While guest memory is short, disks take none that was not granted, and hold up nothing else.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use common::*;
use hearth_disk::boot_set::BootSet;
use hearth_disk::gate::{Gate, RamGate};
use hearth_disk::ledger::Ledger;
use hearth_disk::server::{DiskServer, Tracking};
use hearth_disk::tag::Tagger;
use hearth_disk::warm::WarmMemory;

const OK: u8 = 0;
const DISK_BYTES: u64 = 2 << 20;
const PAGE: u64 = 4096;
/// Pages that hold the rings of the tests, and their headers and status bytes.
const RINGS: Range<u64> = 0..DATA / PAGE;

/// Grants pages as long as it has some to give.
#[derive(Default)]
struct Keeper {
    granted: Mutex<BTreeSet<u64>>,
    credit: AtomicU64,
    refused: AtomicU64,
}

impl Keeper {
    fn grant(&self, pages: Range<u64>) {
        self.granted.lock().unwrap().extend(pages);
    }
}

fn pages(file: Range<u64>) -> Range<u64> {
    file.start / PAGE..file.end.div_ceil(PAGE)
}

impl RamGate for Keeper {
    fn is_granted(&self, file: Range<u64>) -> bool {
        let granted = self.granted.lock().unwrap();
        pages(file).all(|page| granted.contains(&page))
    }

    fn admit(&self, file: Range<u64>) -> bool {
        let mut granted = self.granted.lock().unwrap();
        pages(file).all(|page| {
            let there = granted.contains(&page)
                || self.credit.fetch_update(SeqCst, SeqCst, |credit| credit.checked_sub(1)).is_ok();
            if there {
                granted.insert(page);
            } else {
                self.refused.fetch_add(1, SeqCst);
            }
            there
        })
    }
}

struct Short {
    place: Place,
    keeper: Arc<Keeper>,
    server: DiskServer,
    ram: std::fs::File,
}

impl Short {
    fn new(granted: Range<u64>) -> Self {
        Self::tracked(granted, |_, _| None)
    }

    fn tracked(granted: Range<u64>, tracking: impl FnOnce(&Place, &std::fs::File) -> Option<Tracking>) -> Self {
        let (place, ram, keeper) = (Place::new(DISK_BYTES), ram_file(), Arc::new(Keeper::default()));
        keeper.grant(granted);
        let identity = ram.metadata().unwrap();
        let gate = Gate { ram_device: identity.dev(), ram_inode: identity.ino(), keeper: keeper.clone() };
        let mut options = place.options();
        options.gate = Some(gate);
        let server = DiskServer::start(options, place.open(), tracking(&place, &ram)).unwrap();
        Self { place, keeper, server, ram }
    }

    fn connect(&self, queues: usize) -> Guest {
        let features = VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | INDIRECT | FLUSH_FEATURE;
        Guest::with_ram(&self.place.socket(), queues, features, self.ram.try_clone().unwrap())
    }

    fn ram_bytes(&self) -> u64 {
        self.ram.metadata().unwrap().blocks() * 512
    }

    fn wait_refused(&self) {
        let before = self.keeper.refused.load(SeqCst);
        wait_until("a refusal", || self.keeper.refused.load(SeqCst) > before);
    }
}

#[test]
fn only_requests_without_memory_wait() {
    let short = Short::new(RINGS);
    let mut guest = short.connect(2);
    short.keeper.grant(DATA / PAGE..DATA / PAGE + 1);
    let far = DATA + (4 << 20);
    let waiting = guest.submit(0, READ, 0, far, 65536);
    short.wait_refused();
    assert_eq!(guest.run(1, READ, 8192, DATA, 4096).status, OK);
    let flushed = guest.submit_flush(0);
    assert_eq!(guest.wait(0).head, flushed, "it overtakes the one that waits");
    let before = short.ram_bytes();
    short.keeper.credit.fetch_add(15, SeqCst);
    short.wait_refused();
    assert_eq!((guest.poll(0), short.ram_bytes()), (None, before), "it began without all of its memory");
    short.keeper.credit.fetch_add(1, SeqCst);
    let answer = guest.wait(0);
    assert_eq!((answer.head, answer.status), (waiting, OK));
    assert!(guest.read_ram(far, 65536) == short.place.disk_bytes(0, 65536));
    assert_eq!(short.server.counters().reads, 2, "counted once, however often it was looked at");
}

#[test]
fn memory_wait_is_not_counted_in_line() {
    let mut found = None;
    let short = Short::tracked(RINGS.start..RINGS.end + 1, |place, ram| {
        let ledger = Ledger::create(&place.folder.path().join("ledger"), 8192).unwrap();
        let set = BootSet::open(place.folder.path(), 1 << 20, Tagger::new(b"a key like noise")).unwrap();
        let set = found.insert(Arc::new(set)).clone();
        Some(Guest::tracking(ram, &Arc::new(Mutex::new(ledger)), Some(WarmMemory::in_both_roles(set))))
    });
    let set = found.unwrap();
    set.begin();
    let mut guest = short.connect(1);
    assert_eq!([0; 2].map(|_| guest.run(0, READ, 0, DATA, 4096).status), [OK; 2]);
    guest.submit(0, READ, 0, DATA + (4 << 20), 4096);
    short.wait_refused();
    short.wait_refused();
    short.keeper.credit.fetch_add(1, SeqCst);
    assert_eq!(guest.wait(0).status, OK);
    let answers = set.plan().answers;
    assert_eq!((answers.reads, answers.in_line), (2, 1), "the first of the three was read from the image");
}

#[test]
fn ungranted_memory_reads_zeroes_without_pages() {
    let mut ledger = None;
    let short = Short::tracked(RINGS, |place, ram| {
        let made = Arc::new(Mutex::new(Ledger::create(&place.folder.path().join("ledger"), 8192).unwrap()));
        ledger = Some(made.clone());
        Some(Guest::tracking(ram, &made, None))
    });
    let mut guest = short.connect(1);
    guest.submit_flush(0);
    guest.wait(0);
    let before = short.ram_bytes();
    assert_eq!(guest.run(0, WRITE, 0, DATA + (8 << 20), 65536).status, OK);
    assert!(short.place.disk_bytes(0, 65536) == vec![0; 65536]);
    assert_eq!(short.ram_bytes(), before);
    // A page that is a hole holds no block: whoever looked there later would fill it.
    assert_eq!(ledger.unwrap().lock().unwrap().len(), 0);
}

#[test]
fn ring_is_served_once_granted_memory() {
    let short = Short::new(0..0);
    let mut guest = short.connect(1);
    let before = short.ram_bytes();
    let head = guest.submit(0, READ, 0, DATA, 4096);
    short.wait_refused();
    // The slip of the request is the test's own doing.
    assert!(short.ram_bytes() <= before + 4 * PAGE && guest.poll(0).is_none());
    short.keeper.credit.fetch_add(64, SeqCst);
    assert_eq!(guest.wait(0).head, head);
}

#[test]
fn waiting_requests_continue_without_the_gate() {
    let short = Short::new(RINGS);
    let mut guest = short.connect(1);
    guest.submit(0, READ, 0, DATA, 65536);
    guest.submit_pieces(0, GET_ID, 0, &[(DATA + (1 << 20), 20, true)]);
    short.wait_refused();
    short.server.set_gate(None).unwrap();
    let answers = [guest.wait(0), guest.wait(0)];
    assert!(answers.iter().all(|answer| answer.status == OK), "{answers:?}");
    assert!(guest.read_ram(DATA, 65536) == short.place.disk_bytes(0, 65536));
}

/// A request that makes no sense is answered with a status byte, which needs memory like any other answer.
#[test]
fn refusals_wait_for_memory_too() {
    let short = Short::new(RINGS);
    let mut guest = short.connect(1);
    let far = DATA + (4 << 20);
    let header = [READ.to_le_bytes(), [0; 4], u32::MAX.to_le_bytes(), u32::MAX.to_le_bytes()].concat();
    guest.write_ram(DATA - 8192, &header);
    let head = guest.add_chain(0, &[(DATA - 8192, 16, false), (far, 512, true), (far + 8192, 1, true)], far + 8192);
    guest.publish(0);
    short.wait_refused();
    assert!(guest.poll(0).is_none());
    short.keeper.credit.fetch_add(1, SeqCst);
    let answer = guest.wait(0);
    assert_eq!((answer.head, answer.status), (head, 1));
}

#[test]
fn a_guest_that_goes_takes_what_waits_along() {
    let short = Short::new(RINGS);
    let mut guest = short.connect(1);
    guest.submit(0, READ, 0, DATA, 65536);
    short.wait_refused();
    drop(guest);
    short.server.drain(PATIENCE).unwrap();
}

/// The next server begins anew what the last one had taken and not begun.
#[test]
fn next_server_answers_waiting_requests() {
    let mut short = Short::new(RINGS);
    let mut guest = short.connect(1);
    let head = guest.submit(0, READ, 4096, DATA, 8192);
    short.wait_refused();
    let place = Place { folder: tempfile::tempdir().unwrap(), image: short.place.image.clone() };
    short.server.stop();
    short.server = place.serve(None);
    guest.reconnect(&place.socket());
    assert_eq!(guest.wait(0).head, head);
    assert!(guest.read_ram(DATA, 8192) == place.disk_bytes(4096, 8192));
}

/// Memory that is on its way: nothing is there until it is asked for.
struct Bringer {
    ram: std::fs::File,
    brought: Mutex<BTreeSet<u64>>,
}

impl RamGate for Bringer {
    fn is_granted(&self, _file: Range<u64>) -> bool {
        true
    }

    fn admit(&self, _file: Range<u64>) -> bool {
        true
    }

    fn bring(&self, file: Range<u64>) -> bool {
        let mut brought = self.brought.lock().unwrap();
        for page in pages(file) {
            if brought.insert(page) && !RINGS.contains(&page) {
                std::os::unix::fs::FileExt::write_all_at(&self.ram, &[page as u8 | 1; PAGE as usize], page * PAGE)
                    .unwrap();
            }
        }
        true
    }
}

#[test]
fn arriving_memory_is_brought_before_access() {
    let (place, ram) = (Place::new(DISK_BYTES), ram_file());
    let bringer = Arc::new(Bringer { ram: ram.try_clone().unwrap(), brought: Mutex::default() });
    let identity = ram.metadata().unwrap();
    let gate = Gate { ram_device: identity.dev(), ram_inode: identity.ino(), keeper: bringer.clone() };
    let mut options = place.options();
    options.gate = Some(gate);
    let _server = DiskServer::start(options, place.open(), None).unwrap();
    let features = VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | INDIRECT | FLUSH_FEATURE;
    let mut guest = Guest::with_ram(&place.socket(), 1, features, ram);
    let page = DATA / PAGE + 40;
    assert_eq!(guest.run(0, WRITE, 0, page * PAGE, 8192).status, OK);
    let expect = [[page as u8 | 1; PAGE as usize], [(page + 1) as u8 | 1; PAGE as usize]].concat();
    assert!(place.disk_bytes(0, 8192) == expect, "what was on its way, and no zeroes");
    // A part of a page is answered; the rest of it is what was brought.
    let page = page + 2;
    assert_eq!(guest.run(0, READ, 0, page * PAGE + 512, 512).status, OK);
    let mut expect = vec![page as u8 | 1; PAGE as usize];
    expect[512..1024].copy_from_slice(&place.disk_bytes(0, 512));
    assert!(guest.read_ram(page * PAGE, PAGE as usize) == expect);
    assert!(
        bringer.brought.lock().unwrap().iter().any(|page| RINGS.contains(page)),
        "rings are asked for like all else"
    );
}
