//! Reads that wait side by side are one operation on the image, and each has its own answer.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use common::*;
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::server::DiskServer;

const OK: u8 = 0;
const DISK_BYTES: u64 = 4 << 20;

/// A disk that carries out one operation at a time, and whose first is held: what comes meanwhile waits together.
fn held_up(place: &Place, plan: &Plan) -> (DiskServer, Guest) {
    let mut backing = flaky(place.open(), plan);
    backing.depth = 1;
    plan.on(0, Fault::HoldEnd);
    let server = DiskServer::start_with(place.options(), backing, None).unwrap();
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.submit(0, READ, DISK_BYTES - 4096, DATA + (8 << 20), 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    (server, guest)
}

/// Lets the first operation end once the disk has taken this many requests, and waits for all answers.
fn statuses(server: &DiskServer, guest: &mut Guest, plan: &Plan, requests: u64) -> Vec<u8> {
    wait_until("all are taken", || server.counters().reads + server.counters().writes == requests);
    plan.release(0);
    let mut answers: Vec<_> = (0..requests).map(|_| guest.wait(0)).collect();
    answers.sort_by_key(|answer| answer.head);
    answers.iter().map(|answer| answer.status).collect()
}

#[test]
fn adjacent_waiting_reads_are_one_operation() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let (server, mut guest) = held_up(&place, &plan);
    // Two stretches of reads, the second with a short gap, out of order; and writes side by side.
    for kib in [2, 0, 3, 1, 512, 520] {
        guest.submit(0, READ, kib << 10, DATA + (kib << 10), 1024);
    }
    for (fill, kib) in [(1, 1024), (2, 1025)] {
        guest.write_ram(DATA + (kib << 10), &[fill; 1024]);
        guest.submit(0, WRITE, kib << 10, DATA + (kib << 10), 1024);
    }
    let before = place.disk_bytes(1024 << 10, 8 << 10);
    assert!(statuses(&server, &mut guest, &plan, 9).iter().all(|&status| status == OK));
    assert_eq!(plan.seen(), 1 + 2 + 2, "each write is one of its own");
    assert!(guest.read_ram(DATA, 4096) == place.disk_bytes(0, 4096));
    for kib in [512, 520] {
        assert!(guest.read_ram(DATA + (kib << 10), 1024) == place.disk_bytes(kib << 10, 1024));
    }
    let expected = [&[1; 1024], &[2; 1024], &before[2048..]].concat();
    assert!(place.disk_bytes(1024 << 10, 8 << 10) == expected);
}

#[test]
fn reads_that_fail_together_are_retried_singly() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let (server, mut guest) = held_up(&place, &plan);
    for at in 0..4 {
        guest.submit(0, READ, at * 4096, DATA + at * 4096, 4096);
    }
    // All four, then the third of them alone.
    [1, 4].into_iter().for_each(|number| plan.on(number, Fault::Fail(libc::EIO)));
    let told = statuses(&server, &mut guest, &plan, 5);
    assert_eq!((told.iter().filter(|&&status| status == OK).count(), plan.seen()), (4, 6));
    assert_eq!(server.counters().io_errors, 1);
    for at in [0, 1, 3] {
        assert!(guest.read_ram(DATA + at * 4096, 4096) == place.disk_bytes(at * 4096, 4096));
    }
}

/// A disk that could take each read as it comes, and is busy with one of block 0. `hold_back`: how long those that follow wait
/// for neighbours.
fn one_by_one(place: &Place, plan: &Plan, hold_back: Duration) -> (DiskServer, Guest) {
    let mut backing = flaky(place.open(), plan);
    backing.hold_back = hold_back;
    plan.on(0, Fault::HoldEnd);
    let server = DiskServer::start_with(place.options(), backing, None).unwrap();
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.submit(0, READ, 0, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    (server, guest)
}

fn read_one_by_one(server: &DiskServer, guest: &mut Guest, places: impl IntoIterator<Item = u64>, bytes: u32) {
    for at in places {
        let before = server.counters().reads;
        guest.submit(0, READ, at, DATA + at, bytes);
        wait_until("it is taken", || server.counters().reads > before);
    }
}

/// Like a kernel that reads ahead in a journal.
#[test]
fn single_adjacent_reads_are_one_operation() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let (server, mut guest) = one_by_one(&place, &plan, PATIENCE);
    read_one_by_one(&server, &mut guest, (0..16).map(|at| 4096 + at * 8192), 8192);
    let followers: Vec<_> = (0..16).map(|_| guest.wait(0).status).collect();
    plan.release(0);
    assert_eq!((followers, guest.wait(0).status), (vec![OK; 16], OK));
    assert_eq!(plan.seen(), 2, "128 KiB wait for no more, nor for the first one");
    assert!(guest.read_ram(DATA, 132 << 10) == place.disk_bytes(0, 132 << 10));
}

#[test]
fn held_back_reads_start_after_previous_read() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let (server, mut guest) = one_by_one(&place, &plan, PATIENCE);
    read_one_by_one(&server, &mut guest, [4096, 8192, 12288], 4096);
    read_one_by_one(&server, &mut guest, [1 << 20], 4096);
    assert_eq!((guest.wait(0).status, plan.seen()), (OK, 2), "one elsewhere waits for nobody");
    plan.release(0);
    assert_eq!(([0; 4].map(|_| guest.wait(0).status), plan.seen()), ([OK; 4], 3));
}

#[test]
fn without_more_neighbours_a_read_goes_on() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let (server, mut guest) = one_by_one(&place, &plan, Duration::from_millis(1));
    read_one_by_one(&server, &mut guest, [4096], 4096);
    assert_eq!((guest.wait(0).status, plan.seen()), (OK, 2));
    plan.release(0);
    assert_eq!(guest.wait(0).status, OK);
}
