//! A held disk: what its guest feels, and what a copy of that moment holds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use common::*;
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::server::ServerError;

const DISK_BYTES: u64 = 4 << 20;
/// Longer than any answer that is not held up takes.
const A_WHILE: Duration = Duration::from_millis(200);

#[test]
fn requests_wait_for_the_release_and_none_is_lost() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let observer = server.observer();
    let before = place.disk_bytes(0, DISK_BYTES as usize);
    guest.write_ram(DATA, &[7; 8192]);
    let held = observer.hold(PATIENCE).unwrap();
    guest.submit(0, WRITE, 0, DATA, 4096);
    guest.submit(0, READ, 8192, DATA + 8192, 4096);
    assert!(guest.wait_at_most(0, A_WHILE).is_none(), "the disk is held");
    assert!(place.disk_bytes(0, DISK_BYTES as usize) == before);
    let target = tempfile::tempfile().unwrap();
    let frozen = held.freeze(target.try_clone().unwrap()).unwrap();
    assert!(matches!(observer.hold(PATIENCE), Err(ServerError::HeldAlready { .. })));
    drop(held);
    for _ in 0..2 {
        assert_eq!(guest.wait(0).status, 0);
    }
    assert!(place.disk_bytes(0, 4096) == [7; 4096]);
    frozen.copy(|_| true).unwrap();
    let mut copy = vec![0; DISK_BYTES as usize];
    target.read_exact_at(&mut copy, 0).unwrap();
    assert!(copy == before, "the copy is of the held moment");
}

#[test]
fn hold_waits_for_what_is_in_flight() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    plan.on(0, Fault::Delay(A_WHILE));
    let server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.write_ram(DATA, &[7; 4096]);
    guest.submit(0, WRITE, 0, DATA, 4096);
    wait_until("it is in flight", || plan.seen() == 1);
    let (observer, began) = (server.observer(), Instant::now());
    let held = observer.hold(PATIENCE).unwrap();
    assert!(began.elapsed() >= A_WHILE / 2, "{:?}", began.elapsed());
    assert!(place.disk_bytes(0, 4096) == [7; 4096], "what was begun is in the image");
    drop(held);
    assert_eq!(guest.wait(0).status, 0);
}

#[test]
fn storage_that_hangs_fails_the_hold_and_not_the_guest() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    plan.on(0, Fault::HoldEnd);
    let server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.submit(0, READ, 0, DATA, 4096);
    wait_until("it is in flight", || plan.seen() == 1);
    let observer = server.observer();
    assert!(matches!(observer.hold(A_WHILE), Err(ServerError::Unfinished { .. })));
    // The disk takes requests again.
    guest.submit(0, READ, 8192, DATA + 8192, 4096);
    assert_eq!(guest.wait(0).status, 0);
    plan.release_all();
    assert_eq!(guest.wait(0).status, 0);
    drop(observer.hold(PATIENCE).unwrap());
}

#[test]
fn guest_that_comes_and_goes_finds_a_held_disk() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let observer = server.observer();
    // Nobody is connected.
    let held = observer.hold(PATIENCE).unwrap();
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.submit(0, READ, 0, DATA, 4096);
    assert!(guest.wait_at_most(0, A_WHILE).is_none());
    drop(guest);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.submit(0, READ, 0, DATA, 4096);
    drop(held);
    assert_eq!(guest.wait(0).status, 0);
}
