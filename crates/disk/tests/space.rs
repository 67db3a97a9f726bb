//! A full file system under an image: the guest's requests wait for space and see no error.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::mpsc::{Receiver, channel};

use common::*;
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::server::{DiskOptions, DiskServer, Notice};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const DISK_BYTES: u64 = 4 << 20;
const FULL: Fault = Fault::Fail(libc::ENOSPC);

struct Rig {
    place: Place,
    plan: Plan,
    server: DiskServer,
    notices: Receiver<Notice>,
    guest: Guest,
}

fn serve(place: &Place, plan: &Plan) -> (DiskServer, Receiver<Notice>) {
    let (tell, notices) = channel();
    let tell = std::sync::Arc::new(move |notice| drop(tell.send(notice)));
    let options = DiskOptions { tell: Some(tell), ..place.options() };
    (DiskServer::start_with(options, flaky(place.open(), plan), None).unwrap(), notices)
}

/// A disk whose image takes no change.
fn full() -> Rig {
    let (place, plan) = (Place::new(DISK_BYTES), Plan::new(1));
    let (server, notices) = serve(&place, &plan);
    let guest = Guest::connect(&place.socket(), 2);
    set_full(&plan, true);
    Rig { place, plan, server, notices, guest }
}

fn set_full(plan: &Plan, full: bool) {
    plan.sometimes(if full { 1 } else { u64::MAX }, FULL);
}

fn write(guest: &mut Guest, block: u64) {
    guest.write_ram(DATA + block * 4096, &[block as u8 + 1; 4096]);
    guest.submit(0, WRITE, block * 4096, DATA + block * 4096, 4096);
}

#[track_caller]
fn wait_kept(rig: &Rig, count: u64) {
    wait_until("they wait for space", || rig.server.counters().waiting_for_space == count);
}

#[test]
fn requests_wait_for_space_without_an_error() {
    let mut rig = full();
    // Apart from each other, so that none is joined with another.
    (0..8).for_each(|block| write(&mut rig.guest, block * 2));
    rig.guest.submit_ranges(1, WRITE_ZEROES, &[(2048, 8, 0)]);
    wait_kept(&rig, 9);
    assert_eq!(rig.notices.recv_timeout(PATIENCE).map(|notice| matches!(notice, Notice::OutOfSpace { .. })), Ok(true));
    let tries = rig.plan.seen();
    wait_until("it is tried again", || rig.plan.seen() > tries + 1);
    assert!(rig.plan.seen() <= tries + 4, "one of them at a time: {} more", rig.plan.seen() - tries);
    set_full(&rig.plan, false);
    (0..8).for_each(|_| assert_eq!(rig.guest.wait(0).status, OK));
    assert_eq!(rig.guest.wait(1).status, OK);
    let again = rig.notices.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(again, Notice::SpaceAgain { .. }), "{again:?}");
    (0..8).for_each(|block| assert_eq!(rig.place.disk_bytes(block * 8192, 4096), [block as u8 * 2 + 1; 4096]));
    assert_eq!(rig.place.disk_bytes(1 << 20, 4096), [0; 4096]);
    let counters = rig.server.counters();
    assert_eq!((counters.io_errors, counters.waiting_for_space), (0, 0));
    assert!(rig.notices.try_recv().is_err(), "each is told once");
}

#[test]
fn a_flush_that_finds_no_space_fails() {
    let mut rig = full();
    rig.guest.submit_flush(0);
    assert_eq!(rig.guest.wait(0).status, IO_ERROR);
}

#[test]
fn next_keeper_continues_waiting_requests() {
    let mut rig = full();
    write(&mut rig.guest, 3);
    wait_kept(&rig, 1);
    rig.server.stop();
    let (server, notices) = serve(&rig.place, &rig.plan);
    rig.guest.reconnect(&rig.place.socket());
    wait_until("it waits here as well", || server.counters().waiting_for_space == 1);
    assert!(matches!(notices.recv_timeout(PATIENCE), Ok(Notice::OutOfSpace { .. })));
    set_full(&rig.plan, false);
    assert_eq!(rig.guest.wait(0).status, OK);
    assert_eq!(rig.place.disk_bytes(3 * 4096, 4096), [4; 4096]);
}

#[test]
fn stopped_queue_does_not_wait_for_space() {
    let mut rig = full();
    write(&mut rig.guest, 3);
    wait_kept(&rig, 1);
    rig.guest.stop_queue(0);
    assert_eq!(rig.guest.poll(0).map(|answer| answer.status), Some(IO_ERROR));
    assert_eq!(rig.server.counters().waiting_for_space, 0);
}

#[test]
fn a_dead_qemu_leaves_nothing_that_waits() {
    let mut rig = full();
    write(&mut rig.guest, 3);
    wait_kept(&rig, 1);
    let Rig { server, guest, .. } = rig;
    drop(guest);
    server.drain(PATIENCE).unwrap();
    assert_eq!(server.counters().waiting_for_space, 0);
}

#[test]
fn nothing_waits_for_the_first_qemu_of_a_hop() {
    let (place, plan) = (Place::new(DISK_BYTES), Plan::new(1));
    plan.on(0, Fault::HoldFail(libc::ENOSPC));
    set_full(&plan, true);
    let (server, _) = serve(&place, &plan);
    let mut first = Guest::connect(&place.socket(), 1);
    server.set_handover(true).unwrap();
    write(&mut first, 3);
    assert!(plan.wait_until_held(0, PATIENCE));
    let second = first.successor(&place.socket());
    wait_until("the second QEMU waits", || server.counters().successor);
    drop(first);
    wait_until("the second QEMU is the only one", || !server.counters().successor);
    // The write finds no space while another connection than its own is served.
    plan.release(0);
    wait_until("the write has ended", || server.counters().in_flight == 0);
    assert_eq!(server.counters().waiting_for_space, 0);
    drop(second);
    server.drain(PATIENCE).unwrap();
}
