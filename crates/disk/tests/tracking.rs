//! Contents of the ledger, and requests to a warm source: the first invariant, from the side of the disk server.
//!
//! The rule that is checked: whenever a page of the guest carries the tag that its ledger entry names, its bytes are
//! the bytes on the disk. An entry may be stale (the guest reused the page, the tag no longer fits); it may never lie.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use hearth_disk::block::{BLOCK_BYTES, DiskId, RamPage};
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::ledger::Ledger;
use hearth_disk::limit::Limits;
use hearth_disk::server::{DiskOptions, DiskServer, Question};
use hearth_disk::tag::{Tag, Tagger};
use hearth_disk::warm::{AfterServing, WarmMemory, WarmSource};

const DISK_BYTES: u64 = 2 << 20;
const RAM_PAGES: u32 = 8192;
const DATA_PAGE: u32 = (DATA / 4096) as u32;

/// A ledger, RAM that it is about, and the rule.
struct Truth {
    ledger: Arc<Mutex<Ledger>>,
    ram: std::fs::File,
    tagger: Tagger,
}

impl Truth {
    fn new(place: &Place) -> Self {
        let path = place.folder.path().join("ledger");
        let ledger = Arc::new(Mutex::new(Ledger::create(&path, RAM_PAGES).unwrap()));
        Self { ledger, ram: ram_file(), tagger: Tagger::new(b"a key like noise") }
    }

    fn tracking(&self, warm: Option<Arc<dyn WarmSource>>) -> Option<hearth_disk::server::Tracking> {
        Some(Guest::tracking(&self.ram, &self.ledger, warm.map(WarmMemory::only_serving)))
    }

    fn connect(&self, place: &Place, queues: usize) -> Guest {
        let features = VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | FLUSH_FEATURE;
        Guest::with_ram(&place.socket(), queues, features, self.ram.try_clone().unwrap())
    }

    fn page_of(&self, block: u64) -> Option<u32> {
        self.ledger.lock().unwrap().find(DISK, block).map(|entry| entry.page.0)
    }

    /// Checks the rule for all entries; returns how many would be served.
    fn check(&self, place: &Place) -> usize {
        let ledger = self.ledger.lock().unwrap();
        let mut servable = 0;
        for entry in ledger.entries() {
            let mut page = vec![0; BLOCK_BYTES];
            let at = u64::from(entry.page.0) * BLOCK_BYTES as u64;
            std::os::unix::fs::FileExt::read_exact_at(&self.ram, &mut page, at).unwrap();
            if self.tagger.tag(block(&page)) == entry.tag {
                servable += 1;
                let disk = place.disk_bytes(entry.block * BLOCK_BYTES as u64, BLOCK_BYTES);
                assert!(
                    page == disk,
                    "block {} in page {} would be served and is not on the disk",
                    entry.block,
                    entry.page.0
                );
            }
        }
        servable
    }
}

#[test]
fn only_whole_blocks_in_whole_pages_are_recorded() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let _server = place.serve(truth.tracking(None));
    let mut guest = truth.connect(&place, 1);
    // Half a block at both ends of the request, two whole ones between.
    assert_eq!(guest.run(0, READ, 2048, DATA + 2048, 3 * 4096).status, 0);
    assert_eq!([0, 1, 2, 3].map(|block| truth.page_of(block)), [None, Some(DATA_PAGE + 1), Some(DATA_PAGE + 2), None]);
    // A whole block over two pages.
    assert_eq!(guest.run(0, READ, 8 * 4096, DATA + 0x8200, 4096).status, 0);
    assert_eq!(truth.page_of(8), None);
    // A whole block in one page, but of several pieces.
    guest.submit_pieces(0, READ, 9 * 8, &[(DATA + 0x10000, 2048, true), (DATA + 0x10800, 2048, true)]);
    assert_eq!(guest.wait(0).status, 0);
    assert_eq!(truth.page_of(9), None);
    assert_eq!(truth.check(&place), 2);
}

#[test]
fn pages_that_a_read_overwrites_are_free_again() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let _server = place.serve(truth.tracking(None));
    let mut guest = truth.connect(&place, 1);
    guest.read_disk(0, 4 * 4096);
    assert_eq!(truth.ledger.lock().unwrap().len(), 4);
    // The end of one page and the start of the next: no block is whole in either.
    assert_eq!(guest.run(0, READ, 64 * 4096, DATA + 4096 + 512, 4096).status, 0);
    assert_eq!([0, 1, 2, 3].map(|block| truth.page_of(block).is_some()), [true, false, false, true]);
}

#[test]
fn writes_void_old_entries_and_are_recorded() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, truth.tracking(None));
    let mut guest = truth.connect(&place, 1);
    guest.read_disk(0, 16 * 4096);
    assert_eq!(truth.check(&place), 16);
    let fresh = DATA + 0x40000;
    guest.write_ram(fresh, &[0x5a; 8192]);
    plan.on(1, Fault::HoldStart);
    guest.submit(0, WRITE, 4096 + 512, fresh, 8192);
    assert!(plan.wait_until_held(1, PATIENCE));
    assert_eq!([1, 2, 3].map(|block| truth.page_of(block)), [None; 3], "void before the image is touched");
    plan.release(1);
    assert_eq!(guest.wait(0).status, 0);
    // The request starts within block 1: of block 2 it has all, but not in one page.
    assert_eq!([1, 2, 3].map(|block| truth.page_of(block)), [None; 3]);
    assert_eq!(guest.run(0, WRITE, 4 * 4096, fresh, 8192).status, 0);
    let page = (fresh / 4096) as u32;
    assert_eq!([4, 5].map(|block| truth.page_of(block)), [Some(page), Some(page + 1)]);
    assert_eq!(truth.check(&place), 13);
    guest.write_ram(fresh, b"the guest goes on");
    assert_eq!(truth.check(&place), 12, "the entry stays, its tag no longer fits");
}

#[test]
fn pages_changed_during_write_are_not_served() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, truth.tracking(None));
    let mut guest = truth.connect(&place, 1);
    guest.write_ram(DATA, &[1; 4096]);
    plan.on(0, Fault::HoldEnd);
    guest.submit(0, WRITE, 0, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    guest.write_ram(DATA, &[2; 4096]);
    plan.release(0);
    assert_eq!(guest.wait(0).status, 0);
    assert!(place.disk_bytes(0, 4096) == [1; 4096]);
    assert_eq!(truth.check(&place), 0);
    guest.write_ram(DATA, &[1; 4096]);
    assert_eq!(truth.check(&place), 1, "and is again, once it is what the disk has");
}

#[test]
fn failed_and_torn_writes_record_nothing() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, truth.tracking(None));
    let mut guest = truth.connect(&place, 1);
    guest.read_disk(0, 64 * 4096);
    guest.write_ram(DATA + 0x100000, &[9; 64 * 4096]);
    for fault in [Fault::Fail(libc::EIO), Fault::Tear { bytes: 5000, errno: libc::EIO }] {
        plan.on(plan.seen(), fault);
        assert_eq!(guest.run(0, WRITE, 0, DATA + 0x100000, 64 * 4096).status, 1);
        assert!((0..32).all(|block| truth.page_of(block).is_none()), "of the piece that failed");
        truth.check(&place);
    }
    plan.on(plan.seen(), Fault::Fail(libc::EIO));
    assert_eq!(guest.run(0, READ, 0, DATA, 4096).status, 1);
    assert_eq!(truth.page_of(0), None);
}

/// Runs two requests on the same block of which the first ends last, and expects nothing to be known afterwards.
fn check_conflict(first: u32, second: u32) {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let server = place.serve_flaky(&plan, truth.tracking(None));
    let mut guest = truth.connect(&place, 2);
    guest.write_ram(DATA, &[1; 4096]);
    guest.write_ram(DATA + 4096, &[2; 4096]);
    // Its bytes are taken from (or given to) the image before the second request exists.
    plan.on(0, Fault::HoldEnd);
    guest.submit(0, first, 7 * 4096, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    guest.submit(1, second, 7 * 4096, DATA + 4096, 4096);
    assert_eq!(guest.wait(1).status, 0, "the second is done before the first is reported");
    plan.release(0);
    assert_eq!(guest.wait(0).status, 0);
    assert_eq!(truth.page_of(7), None, "types {first} and {second}");
    assert_eq!(server.counters().tainted, 2);
    assert_eq!(truth.check(&place), 0);
    assert_eq!(guest.run(0, READ, 7 * 4096, DATA, 4096).status, 0);
    assert_eq!(truth.page_of(7), Some(DATA_PAGE), "known again as soon as a request is alone");
}

#[test]
fn requests_that_meet_on_a_block_record_nothing() {
    check_conflict(READ, WRITE);
    check_conflict(WRITE, READ);
    check_conflict(WRITE, WRITE);
}

#[test]
fn late_read_of_old_data_is_not_recorded() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let server = place.serve_flaky(&plan, truth.tracking(None));
    let mut guest = truth.connect(&place, 2);
    // A long read: its first piece, with block 3, is back from the image when the write is started and reported last.
    plan.on(0, Fault::HoldEnd);
    guest.submit(0, READ, 0, DATA, 256 * 1024);
    assert!(plan.wait_until_held(0, PATIENCE));
    guest.write_ram(DATA + 0x100000, &[0xee; 4096]);
    guest.submit(1, WRITE, 3 * 4096, DATA + 0x100000, 4096);
    assert_eq!(guest.wait(1).status, 0);
    plan.release(0);
    assert_eq!(guest.wait(0).status, 0);
    assert_ne!(guest.read_ram(DATA + 3 * 4096, 4096), [0xee; 4096], "the read has old data");
    assert!(place.disk_bytes(3 * 4096, 4096) == [0xee; 4096]);
    assert!((0..32).all(|block| truth.page_of(block).is_none()), "nothing of a tainted read is believed");
    assert_eq!(server.counters().tainted, 2);
    truth.check(&place);
}

#[test]
fn completions_for_a_gone_guest_record_nothing() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let server = place.serve_flaky(&plan, truth.tracking(None));
    let mut guest = truth.connect(&place, 1);
    plan.on(0, Fault::HoldEnd);
    plan.on(1, Fault::HoldEnd);
    guest.write_ram(DATA, &[3; 4096]);
    guest.submit(0, WRITE, 0, DATA, 4096);
    guest.submit(0, READ, 8192, DATA + 8192, 4096);
    assert!(plan.wait_until_held(0, PATIENCE) && plan.wait_until_held(1, PATIENCE));
    let used = guest.used_index(0);
    let Guest { frontend, ram, .. } = guest;
    drop(frontend);
    wait_until("the hang-up is seen", || !server.counters().connected);
    plan.release_all();
    server.drain(PATIENCE).unwrap();
    let mut page = vec![1; 4096];
    std::os::unix::fs::FileExt::read_exact_at(&ram, &mut page, DATA + 8192).unwrap();
    assert_eq!((page, used), (vec![0; 4096], 0));
    assert!(truth.ledger.lock().unwrap().is_empty());
    assert!(place.disk_bytes(0, 4096) == [3; 4096], "a write that was started is not torn");
}

/// A warm source that logs what it is asked.
#[derive(Default)]
struct Hearth {
    held: Mutex<HashMap<u64, (Vec<u8>, Tag)>>,
    log: Mutex<Vec<String>>,
}

impl Hearth {
    fn hold(&self, block: u64, fill: u8, tag: u64) {
        self.held.lock().unwrap().insert(block, (vec![fill; BLOCK_BYTES], Tag(tag)));
    }

    fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }
}

impl WarmSource for Hearth {
    fn serve(
        &self,
        disk: DiskId,
        at: u64,
        after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        assert_eq!(disk, DISK);
        let mut held = self.held.lock().unwrap();
        let (bytes, tag) = held.get(&at).cloned()?;
        copy(block(&bytes));
        self.log.lock().unwrap().push(format!("{after:?} {at}"));
        if after == AfterServing::Release {
            held.remove(&at);
        }
        Some(tag)
    }

    fn may_hold(&self, _disk: DiskId, blocks: Range<u64>) -> bool {
        self.held.lock().unwrap().keys().any(|block| blocks.contains(block))
    }

    fn forget(&self, disk: DiskId, blocks: Range<u64>) {
        assert_eq!(disk, DISK);
        self.log.lock().unwrap().push(format!("forget {blocks:?}"));
        self.held.lock().unwrap().retain(|block, _| !blocks.contains(block));
    }
}

#[test]
fn hits_are_answered_while_the_image_is_stuck() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let hearth = Arc::new(Hearth::default());
    let server = place.serve_flaky(&plan, truth.tracking(Some(hearth.clone())));
    let mut guest = truth.connect(&place, 1);
    hearth.hold(5, 0x55, 55);
    hearth.hold(6, 0x66, 66);
    plan.on(0, Fault::HoldEnd);
    let miss = guest.submit(0, READ, 0, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    let hit = guest.submit(0, READ, 5 * 4096, DATA + 4096, 8192);
    let answer = guest.wait(0);
    assert_eq!((answer.head, answer.status, answer.bytes), (hit, 0, 8193), "overtakes the miss");
    assert!(guest.read_ram(DATA + 4096, 8192) == [[0x55; 4096], [0x66; 4096]].concat());
    assert_eq!(hearth.take_log(), ["Release 5", "Release 6"]);
    // Recorded with the tag that came with the block.
    let entry = truth.ledger.lock().unwrap().find(DISK, 6).unwrap();
    assert_eq!((entry.page, entry.tag), (RamPage(DATA_PAGE + 2), Tag(66)));
    plan.release(0);
    assert_eq!(guest.wait(0).head, miss);
    assert_eq!((server.counters().bytes_read_warm, server.counters().bytes_read_image), (8192, 4096));
}

#[test]
fn limits_apply_to_image_not_memory() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let hearth = Arc::new(Hearth::default());
    let mut options = place.options();
    options.limits = Limits { bytes_per_second: Some(1000), operations_per_second: None };
    let tracking = truth.tracking(Some(hearth.clone()));
    let _server = DiskServer::start_with(options, flaky(place.open(), &plan), tracking).unwrap();
    let mut guest = truth.connect(&place, 1);
    hearth.hold(5, 0x55, 55);
    // Admitted whole, and leaves a debt of 17 minutes.
    guest.read_disk(1 << 20, 1 << 20);
    assert_eq!(plan.seen(), 1);
    let miss = guest.submit(0, READ, 0, DATA, 4096);
    let hit = guest.submit(0, READ, 5 * 4096, DATA + 4096, 4096);
    assert_eq!(guest.wait(0).head, hit);
    let other = guest.submit(0, READ, 4 * 4096, DATA + 8192, 4096);
    let flush = guest.submit_flush(0);
    assert_eq!(guest.wait(0).head, flush);
    assert_eq!((guest.poll(0), plan.seen()), (None, 2), "the misses wait");
    // To stop a queue is not worth 17 minutes of QEMU's time.
    guest.stop_queue(0);
    let ended = [0; 2].map(|_| guest.poll(0).unwrap().head);
    assert!(ended == [miss, other] || ended == [other, miss]);
}

#[test]
fn request_combines_hits_and_misses() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let hearth = Arc::new(Hearth::default());
    let server = place.serve_flaky(&plan, truth.tracking(Some(hearth.clone())));
    let mut guest = truth.connect(&place, 1);
    let gap = 30..40;
    let held: Vec<u64> = [0, 3, 4].into_iter().chain(gap.clone()).chain([70, 99]).collect();
    held.iter().for_each(|block| hearth.hold(*block, *block as u8, 1000 + block));
    let read = guest.read_disk(0, 100 * 4096);
    let disk = place.disk_bytes(0, 100 * 4096);
    for (at, (got, expected)) in read.chunks(4096).zip(disk.chunks(4096)).enumerate() {
        let warm = [0, 99].contains(&at) || gap.contains(&(at as u64));
        assert!(if warm { got == [at as u8; 4096] } else { got == expected }, "block {at}");
    }
    assert_eq!(plan.seen(), 2, "blocks 1-29 and 40-98: short gaps are read along");
    let counters = server.counters();
    assert_eq!((counters.bytes_read_warm, counters.bytes_read_image), (12 * 4096, 88 * 4096));
    assert_eq!(hearth.take_log().len(), held.len(), "whatever was read along has moved too");
    assert_eq!(truth.ledger.lock().unwrap().len(), 100);
}

#[test]
fn partial_reads_leave_the_block_in_the_source() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let hearth = Arc::new(Hearth::default());
    let _server = place.serve(truth.tracking(Some(hearth.clone())));
    let mut guest = truth.connect(&place, 1);
    (0..4).for_each(|block| hearth.hold(block, 7, 7));
    assert_eq!(guest.run(0, READ, 4096, DATA + 512, 4096).status, 0, "not in one page");
    assert!(guest.read_ram(DATA + 512, 4096) == [7; 4096]);
    assert_eq!(hearth.take_log(), ["Keep 1"]);
    assert_eq!(guest.run(0, READ, 512, DATA, 4096).status, 0, "not a whole block");
    assert!(guest.read_ram(DATA, 4096) == [7; 4096]);
    assert_eq!(hearth.take_log(), ["Keep 0", "Keep 1"]);
    assert_eq!(guest.run(0, READ, 5 * 4096 + 512, DATA, 1024).status, 0, "held by nobody");
    assert!(guest.read_ram(DATA, 1024) == place.disk_bytes(5 * 4096 + 512, 1024));
    assert!(truth.ledger.lock().unwrap().is_empty());
}

#[test]
fn source_forgets_before_the_image_changes() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let plan = Plan::new(1);
    let hearth = Arc::new(Hearth::default());
    let server = place.serve_flaky(&plan, truth.tracking(Some(hearth.clone())));
    let mut guest = truth.connect(&place, 2);
    plan.on(0, Fault::HoldStart);
    guest.submit(0, WRITE, 512, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    assert_eq!(hearth.take_log(), ["forget 0..2"]);
    // A source that (wrongly) still has the block is not asked for it while the write is in flight.
    hearth.hold(1, 0xbb, 1);
    guest.submit(1, READ, 4096, DATA + 8192, 4096);
    wait_until("the read is taken", || server.counters().reads == 1);
    plan.release(0);
    assert_eq!((guest.wait(0).status, guest.wait(1).status), (0, 0));
    assert!(hearth.take_log().is_empty());
    assert_eq!(truth.page_of(1), None, "the two have met");
    for (kind, expected) in [(DISCARD, "forget 2..4"), (WRITE_ZEROES, "forget 2..4")] {
        guest.submit_ranges(0, kind, &[(16, 16, 0)]);
        assert_eq!(guest.wait(0).status, 0);
        assert_eq!(hearth.take_log(), [expected]);
    }
    guest.submit(0, WRITE, DISK_BYTES, DATA, 4096);
    assert_eq!(guest.wait(0).status, 1);
    assert!(hearth.take_log().is_empty(), "a request that is refused changes nothing");
}

/// One random request. Few blocks and pages, so that requests meet.
fn submit_random(guest: &mut Guest, random: &mut Random, queue: usize) {
    let offset = random.below(40) * if random.below(3) == 0 { 512 } else { 4096 };
    let bytes = match random.below(4) {
        0 => 512 * (1 + random.below(40)) as u32,
        1 => 256 * 1024,
        _ => 4096 * (1 + random.below(4)) as u32,
    };
    let address = DATA + random.below(64) * 4096 + if random.below(5) == 0 { 512 } else { 0 };
    match random.below(12) {
        0 => drop(guest.submit_ranges(queue, DISCARD, &[(offset / 512, bytes / 512, 0)])),
        1 => drop(guest.submit_ranges(queue, WRITE_ZEROES, &[(offset / 512, bytes / 512, 0)])),
        2 => drop(guest.submit_flush(queue)),
        3..=6 => {
            // The guest fills some pages anew, and writes others as they are.
            if random.below(2) == 0 {
                let fill = random.next().to_le_bytes().repeat(bytes as usize / 8);
                guest.write_ram(address, &fill);
            }
            guest.submit(queue, WRITE, offset, address, bytes);
        }
        _ => drop(guest.submit(queue, READ, offset, address, bytes)),
    }
}

/// Random requests on several queues through an engine that delays, shuffles and fails; the rule holds at every pause.
#[test]
fn ledger_is_right_after_any_requests() {
    let (mut servable, mut tainted) = (0, 0);
    for seed in 1..=6 {
        let place = Place::new(DISK_BYTES);
        let truth = Truth::new(&place);
        let plan = Plan::new(seed);
        plan.shuffle();
        match seed % 3 {
            0 => plan.sometimes(7, Fault::Fail(libc::EIO)),
            1 => plan.sometimes(3, Fault::Overtaken(3)),
            _ => plan.sometimes(4, Fault::Delay(Duration::from_micros(300))),
        }
        let server = place.serve_flaky(&plan, truth.tracking(None));
        let mut guest = truth.connect(&place, 3);
        let mut random = Random(seed * 0x9e37_79b9);
        for round in 0..120 {
            let mut submitted = [0; 3];
            for _ in 0..1 + random.below(6) {
                let queue = random.below(3) as usize;
                submit_random(&mut guest, &mut random, queue);
                submitted[queue] += 1;
            }
            for (queue, count) in submitted.iter().enumerate() {
                for _ in 0..*count {
                    let status = guest.wait(queue).status;
                    assert!(status == 0 || seed % 3 == 0, "seed {seed} round {round}: status {status}");
                }
            }
            if random.below(3) == 0 {
                let page = DATA + random.below(64) * 4096;
                guest.write_ram(page + random.below(4096), &[random.next() as u8]);
            }
            servable += truth.check(&place);
        }
        tainted += server.counters().tainted;
    }
    assert!(servable > 10_000, "the rule was put to the test {servable} times only");
    assert!(tainted > 200, "requests met {tainted} times only");
}

/// Under libvirt the keeper does not know the memory before QEMU tells of it. No request is served until it has decided.
#[test]
fn memory_that_is_told_is_tracked_from_the_first_request() {
    let place = Place::new(DISK_BYTES);
    let truth = Truth::new(&place);
    let (tell, told) = std::sync::mpsc::channel();
    let tell = Mutex::new(tell);
    let options = DiskOptions {
        ask: Some(Arc::new(move |question| match question {
            Question::Memory(memory) => tell.lock().unwrap().send(memory).unwrap(),
            Question::Driver { .. } => panic!("the first driver is no question"),
        })),
        ..place.options()
    };
    let server = DiskServer::start(options, place.open(), None).unwrap();
    let guest = std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let mut guest = truth.connect(&place, 1);
            guest.run(0, READ, 0, DATA, 8192);
            guest
        });
        let memory = told.recv_timeout(PATIENCE).unwrap();
        assert_eq!(memory.pid, std::process::id());
        let [told] = &memory.files[..] else { panic!("{memory:?}") };
        let places: u64 = told.places.iter().map(|place| place.bytes).sum();
        assert_eq!((told.file.metadata().unwrap().ino(), places), (truth.ram.metadata().unwrap().ino(), 32 << 20));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!guest.is_finished(), "it waits for the keeper");
        server.answer(truth.tracking(None)).unwrap();
        guest.join().unwrap()
    });
    assert_eq!((truth.page_of(0), truth.page_of(1)), (Some(DATA_PAGE), Some(DATA_PAGE + 1)));
    truth.check(&place);
    drop(guest);
    // The next QEMU has other memory.
    let elsewhere = Place::new(DISK_BYTES);
    let other = Truth::new(&elsewhere);
    let mut guest = std::thread::scope(|scope| {
        let guest = scope.spawn(|| other.connect(&place, 1));
        told.recv_timeout(PATIENCE).unwrap();
        server.answer(None).unwrap();
        guest.join().unwrap()
    });
    guest.run(0, READ, 4096 * 8, DATA, 4096);
    assert_eq!(other.page_of(8), None, "nothing is tracked");
}
