//! Flushes cost no operation that they do not need, and each is answered only when the writes before it are durable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use hearth_disk::engine::flaky::{Fault, FlakyEngine, Plan};
use hearth_disk::engine::{Completion, Engine, Operation, Submission};
use hearth_disk::server::{Backing, DiskServer};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const DISK_BYTES: u64 = 4 << 20;

fn served(place: &Place, plan: &Plan) -> (DiskServer, Guest) {
    let server = place.serve_flaky(plan, None);
    let guest = Guest::connect(&place.socket(), 2);
    (server, guest)
}

fn write(guest: &mut Guest, queue: usize, block: u64) {
    guest.submit(queue, WRITE, block * 4096, DATA + block * 4096, 4096);
}

#[track_caller]
fn flush(guest: &mut Guest) -> u8 {
    guest.submit_flush(0);
    guest.wait(0).status
}

#[test]
fn a_flush_with_nothing_new_is_no_operation() {
    let (place, plan) = (Place::new(DISK_BYTES), Plan::new(1));
    let (server, mut guest) = served(&place, &plan);
    // The server does not know of writes before its own time.
    assert_eq!((flush(&mut guest), plan.seen()), (OK, 1));
    assert_eq!((flush(&mut guest), flush(&mut guest), plan.seen()), (OK, OK, 1));
    write(&mut guest, 0, 3);
    assert_eq!((guest.wait(0).status, flush(&mut guest), plan.seen()), (OK, OK, 3));
    assert_eq!((flush(&mut guest), plan.seen()), (OK, 3));
    guest.submit_ranges(0, WRITE_ZEROES, &[(0, 8, 0)]);
    assert_eq!((guest.wait(0).status, flush(&mut guest), plan.seen()), (OK, OK, 5));
    assert_eq!((server.counters().flushes, server.counters().flushes_spared), (6, 3));
}

#[test]
fn flush_after_failed_one_reaches_image() {
    let (place, plan) = (Place::new(DISK_BYTES), Plan::new(1));
    let (_server, mut guest) = served(&place, &plan);
    assert_eq!(flush(&mut guest), OK);
    write(&mut guest, 0, 3);
    assert_eq!(guest.wait(0).status, OK);
    plan.on(2, Fault::Fail(libc::EIO));
    assert_eq!((flush(&mut guest), flush(&mut guest), plan.seen()), (IO_ERROR, OK, 4));
    // A write that failed may have changed something.
    plan.on(4, Fault::Tear { bytes: 512, errno: libc::EIO });
    write(&mut guest, 0, 3);
    assert_eq!((guest.wait(0).status, flush(&mut guest), plan.seen()), (IO_ERROR, OK, 6));
}

#[test]
fn a_flush_ends_with_one_that_covers_it() {
    let (place, plan) = (Place::new(DISK_BYTES), Plan::new(1));
    let (server, mut guest) = served(&place, &plan);
    write(&mut guest, 0, 3);
    assert_eq!(guest.wait(0).status, OK);
    plan.on(1, Fault::HoldStart);
    guest.submit_flush(0);
    guest.submit_flush(1);
    wait_until("both are taken", || server.counters().flushes == 2);
    assert_eq!((plan.seen(), guest.poll(0), guest.poll(1)), (2, None, None));
    plan.release(1);
    assert_eq!((guest.wait(0).status, guest.wait(1).status, plan.seen()), (OK, OK, 2));
}

#[test]
fn flush_does_not_cover_later_changes() {
    let (place, plan) = (Place::new(DISK_BYTES), Plan::new(1));
    let (server, mut guest) = served(&place, &plan);
    plan.on(0, Fault::HoldEnd);
    guest.submit_flush(0);
    assert!(plan.wait_until_held(0, PATIENCE));
    write(&mut guest, 1, 3);
    assert_eq!(guest.wait(1).status, OK);
    guest.submit_flush(1);
    assert_eq!((guest.wait(1).status, plan.seen(), guest.poll(0)), (OK, 3, None));
    plan.release(0);
    assert_eq!((guest.wait(0).status, flush(&mut guest), plan.seen()), (OK, OK, 3));
    assert_eq!(server.counters().flushes_spared, 1);
}

/// The image's contents after a loss of power: the writes that had ended when a flush began that ended well.
#[derive(Default)]
struct Journal {
    running: BTreeMap<u64, Running>,
    ended: BTreeSet<u64>,
    durable: BTreeSet<u64>,
    flushes: u64,
}

enum Running {
    Write { first_block: u64, blocks: u64 },
    Flush { covers: BTreeSet<u64> },
}

/// Between the server and its engine.
struct Noting {
    engine: FlakyEngine,
    journal: Arc<Mutex<Journal>>,
}

impl Engine for Noting {
    fn push(&mut self, submission: Submission) {
        let mut journal = self.journal.lock().unwrap();
        let running = match submission.operation {
            Operation::Write(_) => {
                Some(Running::Write { first_block: submission.offset / 4096, blocks: submission.bytes / 4096 })
            }
            Operation::Flush => Some(Running::Flush { covers: journal.ended.clone() }),
            _ => None,
        };
        if let Some(running) = running {
            journal.flushes += u64::from(matches!(running, Running::Flush { .. }));
            journal.running.insert(submission.token, running);
        }
        self.engine.push(submission);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.engine.submit()
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        let mut journal = self.journal.lock().unwrap();
        let before = ended.len();
        self.engine.reap(ended);
        for Completion { token, result } in &ended[before..] {
            match journal.running.remove(token) {
                Some(Running::Write { first_block, blocks }) => journal.ended.extend(first_block..first_block + blocks),
                Some(Running::Flush { covers }) if result.is_ok() => journal.durable.extend(covers),
                _ => {}
            }
        }
    }

    fn wait(&mut self, at_most: Duration) -> io::Result<()> {
        self.engine.wait(at_most)
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.engine.notifier()
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }
}

/// Each block is written once, so that it is known of each whether it is durable.
#[test]
fn answered_flush_means_durable_writes() {
    let (mut asked, mut begun) = (0, 0);
    for seed in 1..=6 {
        let (place, plan) = (Place::new(DISK_BYTES), Plan::new(seed));
        plan.shuffle();
        match seed % 3 {
            0 => plan.sometimes(7, Fault::Fail(libc::EIO)),
            1 => plan.sometimes(3, Fault::Overtaken(3)),
            _ => plan.sometimes(3, Fault::Delay(Duration::from_micros(300))),
        }
        let journal = Arc::new(Mutex::new(Journal::default()));
        let noting = |_: &_, engine| {
            let engine = FlakyEngine::new(engine, plan.clone()).unwrap();
            Box::new(Noting { engine, journal: journal.clone() }) as Box<dyn Engine>
        };
        let backing = Backing::with(place.open(), noting).unwrap();
        let _server = DiskServer::start_with(place.options(), backing, None).unwrap();
        let mut guest = Guest::connect(&place.socket(), 2);
        let mut random = Random(seed * 0x9e37_79b9);
        let (mut next_block, mut answered) = (0, BTreeSet::new());
        let mut writes: BTreeMap<(usize, u16), u64> = BTreeMap::new();
        let mut flushes: BTreeMap<(usize, u16), BTreeSet<u64>> = BTreeMap::new();
        while next_block < DISK_BYTES / 4096 || !writes.is_empty() || !flushes.is_empty() {
            let queue = random.below(2) as usize;
            let is_full = writes.len() + flushes.len() > 10;
            match random.below(4) {
                0 if !is_full => drop(flushes.insert((queue, guest.submit_flush(queue)), answered.clone())),
                1 if !is_full && next_block < DISK_BYTES / 4096 => {
                    let head = guest.submit(queue, WRITE, next_block * 4096, DATA + (queue as u64) * 4096, 4096);
                    writes.insert((queue, head), next_block);
                    next_block += 1;
                }
                _ => {}
            }
            let Some(answer) = guest.poll(queue) else { continue };
            assert!(answer.status == OK || seed % 3 == 0, "seed {seed}: status {}", answer.status);
            match flushes.remove(&(queue, answer.head)) {
                Some(told) if answer.status == OK => {
                    let missing: Vec<_> = told.difference(&journal.lock().unwrap().durable).copied().collect();
                    assert!(missing.is_empty(), "seed {seed}: blocks {missing:?} are not durable");
                    asked += 1;
                }
                Some(_) => {}
                None => {
                    let block = writes.remove(&(queue, answer.head)).expect("it was written or flushed");
                    if answer.status == OK {
                        answered.insert(block);
                    }
                }
            }
        }
        begun += journal.lock().unwrap().flushes;
    }
    assert!(
        begun > 200 && asked > begun + 200,
        "{asked} flushes were {begun} operations: neither rule was put to the test"
    );
}
