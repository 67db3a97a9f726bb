//! Two QEMUs at one disk: the second waits, takes over when the first has stopped, and the guest misses nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use common::*;
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::server::{DiskServer, Expected, Peer};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

const DISK_BYTES: u64 = 4 << 20;
/// Where the configuration says whether the guest's writes are cached.
const WRITEBACK: u32 = 32;

fn wait_for_successor(server: &DiskServer, expect: bool) {
    wait_until("the server sees who is there", || server.counters().successor == expect);
}

#[test]
fn guest_moves_to_second_qemu_and_back() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 4);
    server.set_handover(true).unwrap();
    for round in 0..6 {
        let successor = guest.successor(&place.socket());
        wait_for_successor(&server, true);
        // The one that waits disturbs nothing.
        for queue in 0..4 {
            assert_eq!(guest.run(queue, READ, 4096 * (round * 4 + queue as u64), DATA, 4096).status, 0);
        }
        (0..4).for_each(|queue| {
            guest.stop_queue(queue);
        });
        let before = guest.hop(successor);
        let at = 4096 * (100 + round);
        guest.write_ram(DATA, &[round as u8 + 1; 4096]);
        for queue in 0..4 {
            assert_eq!(guest.run(queue, WRITE, at, DATA, 4096).status, 0);
        }
        assert!(place.disk_bytes(at, 4096) == [round as u8 + 1; 4096]);
        drop(before);
        wait_for_successor(&server, false);
    }
    assert_eq!(server.counters().bad_requests, 0);
}

#[test]
fn leaving_server_lets_qemu_finish_its_setup() {
    let place = Place::new(DISK_BYTES);
    let first = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    DiskServer::leave(vec![first]);
    let second = place.serve(None);
    let greeting = guest.successor(&place.socket());
    let leaving = std::thread::spawn(|| DiskServer::leave(vec![second]));
    wait_until("nobody else can come", || !place.socket().exists());
    guest.hop(greeting);
    // Nobody is waited for who says nothing more.
    leaving.join().unwrap();
    let third = place.serve(None);
    let silent = guest.successor(&place.socket());
    DiskServer::leave(vec![third]);
    drop(silent);
    let _last = place.serve(None);
    guest.reconnect(&place.socket());
    assert_eq!(guest.run(0, READ, 0, DATA, 4096).status, 0);
}

#[test]
fn failed_hand_over_leaves_the_first_serving() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    server.set_handover(true).unwrap();
    let successor = guest.successor(&place.socket());
    wait_for_successor(&server, true);
    let base = guest.stop_queue(0);
    drop(successor);
    wait_for_successor(&server, false);
    guest.start_queue_at(0, false, base);
    assert!(guest.read_disk(0, 4096) == place.disk_bytes(0, 4096));
    server.set_handover(false).unwrap();
    assert!(guest.read_disk(4096, 4096) == place.disk_bytes(4096, 4096));
}

#[test]
fn second_qemu_starts_after_the_firsts_last_answer() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    plan.on(0, Fault::HoldEnd);
    let server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 1);
    server.set_handover(true).unwrap();
    guest.submit(0, WRITE, 0, DATA, 4096);
    wait_until("the write is on its way", || server.counters().in_flight == 1);
    let ram = guest.ram.try_clone().unwrap();
    let hasty = || Guest::with_ram(&place.socket(), 1, VERSION_1 | PROTOCOL_FEATURES, ram);
    let cut_off = std::panic::catch_unwind(std::panic::AssertUnwindSafe(hasty));
    assert!(cut_off.is_err(), "it may not start its queues");
    wait_for_successor(&server, false);
    plan.release(0);
    assert_eq!(guest.wait(0).status, 0);
    assert_eq!(server.counters().connections, 2);
}

#[test]
fn second_connection_needs_a_hand_over() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let knocking = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
    assert!(guest.read_disk(0, 4096) == place.disk_bytes(0, 4096));
    assert_eq!(server.counters().connections, 1);
    server.set_handover(true).unwrap();
    wait_for_successor(&server, true);
    // And when it is over the one that waits goes.
    server.set_handover(false).unwrap();
    assert!(!server.counters().successor);
    assert!(guest.read_disk(4096, 4096) == place.disk_bytes(4096, 4096));
    drop(knocking);
}

/// A guest without a write cache sends no flushes. QEMU does not tell its successor so.
#[test]
fn write_cache_state_outlives_a_qemu() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.frontend.set_config(WRITEBACK, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    server.set_handover(true).unwrap();
    let successor = guest.successor(&place.socket());
    guest.stop_queue(0);
    drop(guest.hop(successor));
    let (_, space) = guest.frontend.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
    assert_eq!(space[WRITEBACK as usize], 0);
    assert_eq!(guest.run(0, WRITE, 0, DATA, 4096).status, 0);
}

fn this_process() -> Peer {
    Peer::this_process().unwrap()
}

/// Whether the server hangs up on this connection, or else answers on it.
fn is_turned_away(mut connection: UnixStream) -> bool {
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    // Fails if it has been closed already.
    let asked = connection.write_all(&get_features);
    asked.is_err() || !matches!(connection.read(&mut [0; 20]), Ok(bytes) if bytes > 0)
}

fn knock(place: &Place) -> UnixStream {
    UnixStream::connect(place.socket()).unwrap()
}

#[test]
fn only_expected_processes_are_served() {
    let place = Place::new(DISK_BYTES);
    let (me, other) = (this_process(), Peer { start_ticks: 0, ..this_process() });
    let server = place.serve(None);
    // A connection in the backlog while nobody is expected yet is judged by the processes expected later.
    for (expected, served) in [(vec![other], false), (vec![me], true), (vec![], false), (vec![other, me], true)] {
        server.expect(Expected::and_another([])).unwrap();
        let early = knock(&place);
        server.expect(Expected::these(expected)).unwrap();
        assert_eq!(is_turned_away(early), !served);
        wait_until("the connection is gone", || !server.counters().connected);
        let late = knock(&place);
        assert_eq!(is_turned_away(late), !served);
        wait_until("the connection is gone", || !server.counters().connected);
    }
}

#[test]
fn waiting_connection_is_not_served_next_guest() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let waiting = knock(&place);
    assert!(guest.read_disk(0, 4096) == place.disk_bytes(0, 4096));
    // The guest's QEMU has ended, and the next one is about to be started.
    server.expect(Expected::and_another([])).unwrap();
    assert!(is_turned_away(waiting));
    server.drain(PATIENCE).unwrap();
    let early = knock(&place);
    server.expect(Expected::these([this_process()])).unwrap();
    assert!(!is_turned_away(early));
}

#[test]
fn a_flood_of_strangers_holds_up_nobody() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let floods: Vec<_> = (0..100).map(|_| knock(&place)).collect();
    assert!(guest.read_disk(0, 4096) == place.disk_bytes(0, 4096));
    assert_eq!(server.counters().connections, 1);
    drop(floods);
}
