//! A guest's requests and their answers: data, errors, configuration, resize, limits.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::limit::Limits;
use hearth_disk::server::{DiskServer, ServerError};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const DISK_BYTES: u64 = 4 << 20;

#[test]
fn written_data_is_on_disk_and_readable() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 2);
    assert!(guest.read_disk(4096, 1 << 20) == place.disk_bytes(4096, 1 << 20));
    let data: Vec<u8> = (0..300 * 1024).map(|at| (at / 7) as u8).collect();
    guest.write_ram(DATA, &data);
    assert_eq!(guest.run(1, WRITE, 512, DATA, data.len() as u32).status, OK);
    let flushed = guest.submit_flush(0);
    assert_eq!(guest.wait(0).head, flushed);
    assert!(place.disk_bytes(512, data.len()) == data);
    guest.write_ram(DATA, &vec![0; data.len()]);
    assert!(guest.read_disk(512, data.len() as u32) == data);
    let counters = server.counters();
    assert_eq!((counters.reads, counters.writes, counters.flushes, counters.bad_requests), (2, 1, 1, 0));
    assert_eq!((counters.bytes_written, counters.io_errors), (300 * 1024, 0));
    assert!(counters.connected);
}

#[test]
fn scattered_requests_keep_their_order() {
    let place = Place::new(DISK_BYTES);
    let _server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    // Pieces that fit neither sectors nor pages.
    let pieces =
        [(DATA + 100, 1000, true), (DATA + 9000, 24, true), (DATA + 5001, 3072, true), (DATA + 40000, 4096, true)];
    guest.submit_pieces(0, READ, 3, &pieces);
    assert_eq!(guest.wait(0).status, OK);
    let read: Vec<u8> = pieces.iter().flat_map(|(at, bytes, _)| guest.read_ram(*at, *bytes as usize)).collect();
    assert!(read == place.disk_bytes(3 * 512, 8192));
}

#[test]
fn one_request_is_one_operation() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 1);
    // As long as Linux makes them; half a block off, and scattered over pages.
    let bytes = 5 << 18;
    assert!(guest.read_disk(2048, bytes) == place.disk_bytes(2048, bytes as usize));
    assert_eq!(plan.seen(), 1);
    let data: Vec<u8> = (0..bytes).map(|at| (at / 7) as u8).collect();
    guest.write_ram(DATA, &data);
    assert_eq!(guest.run(0, WRITE, 2048, DATA, bytes).status, OK);
    assert_eq!(plan.seen(), 2);
    assert!(place.disk_bytes(2048, bytes as usize) == data);
}

#[test]
fn more_requests_than_buffers_wait_and_none_starves() {
    let place = Place::new(24 << 20);
    let plan = Plan::new(1);
    // Ends are shuffled and some come late, so the buffers are given back in all orders.
    plan.shuffle();
    let server = place.serve_flaky(&plan, None);
    let queues = 4;
    let mut guest = Guest::connect(&place.socket(), queues);
    let mut random = Random(5);
    let mut sent = 0;
    for _ in 0..40 {
        for queue in 0..queues {
            for _ in 0..6 {
                let sectors = [1, 8, 64, 2560, 5000][random.below(5) as usize];
                let offset = random.below((24 << 11) - sectors) * 512;
                guest.submit(queue, READ, offset, DATA, (sectors * 512) as u32);
                sent += 1;
            }
        }
        for queue in 0..queues {
            (0..6).for_each(|_| assert_eq!(guest.wait(queue).status, OK));
        }
    }
    assert_eq!((server.counters().reads, server.counters().in_flight), (sent, 0));
}

#[test]
fn request_larger_than_all_buffers_is_served() {
    let place = Place::new(24 << 20);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    // Half a block off, so that no slot ends where a block does.
    assert!(guest.read_disk(2048, 20 << 20) == place.disk_bytes(2048, 20 << 20));
    assert_eq!(server.counters().bytes_read_image, 20 << 20);
}

/// A larger ring than the device offers has no room for longer requests: each holds memory of the server.
#[test]
fn chain_longer_than_the_device_offers_is_refused() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect_oversized(&place.socket(), 4 * QUEUE_SIZE);
    for (pieces, bad_requests) in [(QUEUE_SIZE - 2, 0), (QUEUE_SIZE - 1, 1)] {
        let pieces: Vec<_> = (0..pieces).map(|piece| (DATA + u64::from(piece) * 512, 512, false)).collect();
        guest.submit_pieces(0, WRITE, 0, &pieces);
        guest.wait(0);
        assert_eq!(server.counters().bad_requests, bad_requests, "{} pieces", pieces.len());
    }
}

#[test]
fn wrong_requests_get_the_error_that_qemu_gives() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let end = DISK_BYTES / 512;
    let check = |guest: &mut Guest, expected: u8| {
        let answer = guest.wait(0);
        assert_eq!((answer.status, answer.bytes), (expected, 1));
    };
    for kind in [READ, WRITE] {
        guest.submit(0, kind, DISK_BYTES, DATA, 512);
        check(&mut guest, IO_ERROR);
        guest.submit(0, kind, DISK_BYTES - 512, DATA, 1024);
        check(&mut guest, IO_ERROR);
        guest.submit(0, kind, 0, DATA, 100);
        check(&mut guest, IO_ERROR);
        guest.submit(0, kind, 0, 1 << 40, 512);
        check(&mut guest, IO_ERROR);
        guest.submit_pieces(0, kind, u64::MAX, &[(DATA, 512, kind == READ)]);
        check(&mut guest, IO_ERROR);
    }
    for kind in [DISCARD, WRITE_ZEROES] {
        guest.submit_ranges(0, kind, &[(0, 8, 0), (8, 8, 0)]);
        check(&mut guest, UNSUPPORTED);
        guest.submit_ranges(0, kind, &[(0, 8, 1 << 5)]);
        check(&mut guest, UNSUPPORTED);
        guest.submit_ranges(0, kind, &[(end, 1, 0)]);
        check(&mut guest, IO_ERROR);
        guest.submit_ranges(0, kind, &[(0, u32::MAX, 0)]);
        check(&mut guest, IO_ERROR);
    }
    guest.submit_pieces(0, 99, 0, &[]);
    check(&mut guest, UNSUPPORTED);
    assert_eq!(server.counters().bad_requests, 19);
    assert!(guest.read_disk(0, 4096) == place.disk_bytes(0, 4096), "the disk goes on");
}

#[test]
fn hostile_chains_come_back_and_harm_nobody() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let slip = 0xf000;
    guest.write_ram(slip, &[0; 64]);
    // A circle.
    let head = guest.add_chain(0, &[(slip, 16, false), (DATA, 512, true)], slip + 16);
    guest.write_descriptor(guest.descriptor_address(0, head), slip, 16, 1, head);
    guest.publish(0);
    assert_eq!(guest.wait(0).bytes, 0);
    // An indirect table that lies about its length.
    let head = guest.add_chain(0, &[(slip, 16, false)], slip + 16);
    guest.write_descriptor(guest.descriptor_address(0, head), DATA, u32::MAX, 4, 0);
    guest.publish(0);
    assert_eq!(guest.wait(0).bytes, 0);
    // No status byte.
    guest.add_chain(0, &[(slip, 16, false), (DATA, 512, false)], slip + 16);
    guest.publish(0);
    assert_eq!(guest.wait(0).bytes, 0);
    // No memory behind the header, but behind the status byte.
    guest.add_chain(0, &[(1 << 50, 16, false), (DATA, 512, true), (slip + 16, 1, true)], slip + 16);
    guest.publish(0);
    assert_eq!(guest.wait(0).status, IO_ERROR);
    assert_eq!(server.counters().bad_requests, 4);
    assert!(guest.read_disk(0, 4096) == place.disk_bytes(0, 4096), "the disk goes on");
}

#[test]
fn reset_mends_a_broken_queue() {
    let place = Place::new(DISK_BYTES);
    let _server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 2);
    guest.corrupt_available_index(0, 4000);
    assert_eq!(guest.run(1, READ, 0, DATA, 512).status, OK, "other queues go on");
    assert_eq!(guest.stop_queue(0), 0);
    guest.corrupt_available_index(0, 0);
    guest.start_queue(0, false);
    assert_eq!(guest.run(0, READ, 0, DATA, 512).status, OK);
    guest.frontend.reset_device().unwrap();
}

#[test]
fn requests_taken_never_exceed_ring_size() {
    let (place, plan) = (Place::new(DISK_BYTES), Plan::new(1));
    plan.sometimes(1, Fault::HoldEnd);
    let server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 2);
    let head = guest.submit(0, READ, 0, DATA, 4096);
    // Each time as many as a ring could hold, and none of them is answered.
    for _ in 0..4 {
        (1..QUEUE_SIZE).for_each(|_| guest.make_available(0, head));
        guest.publish(0);
        for _ in 0..2 {
            guest.submit_pieces(1, GET_ID, 0, &[(DATA + 4096, 20, true)]);
            assert_eq!(guest.wait(1).status, OK, "other queues go on");
        }
    }
    assert_eq!(server.counters().reads, u64::from(QUEUE_SIZE));
    let pressure = server.pressure();
    wait_until("what was taken comes to its end", || {
        plan.release_all();
        pressure.read(std::time::Instant::now()).in_flight == 0
    });
    assert_eq!(guest.used_index(0), 0, "nothing is said to a queue that makes no sense");
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zeroes() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    for (kind, sector, flags) in [(DISCARD, 0, 0), (WRITE_ZEROES, 80, 0), (WRITE_ZEROES, 161, 1)] {
        guest.submit_ranges(0, kind, &[(sector, 16, flags)]);
        assert_eq!(guest.wait(0).status, OK, "type {kind}");
        assert!(place.disk_bytes(sector * 512, 8192) == vec![0; 8192], "type {kind}");
        let untouched = place.disk_bytes(sector * 512 + 8192, 512);
        assert_ne!(untouched, vec![0; 512]);
    }
    assert_eq!(server.counters().discards, 3);
}

#[test]
fn the_serial_number_is_twenty_bytes() {
    let place = Place::new(DISK_BYTES);
    let _server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.write_ram(DATA, &[7; 24]);
    guest.submit_pieces(0, GET_ID, 0, &[(DATA, 20, true)]);
    let answer = guest.wait(0);
    assert_eq!((answer.status, answer.bytes), (OK, 21));
    assert_eq!(&guest.read_ram(DATA, 24), b"serial-of-test\0\0\0\0\0\0\x07\x07\x07\x07");
}

#[test]
fn read_only_disk_announces_and_refuses_changes() {
    let place = Place::new(DISK_BYTES);
    let mut options = place.options();
    options.read_only = true;
    let _server = DiskServer::start(options, place.open(), None).unwrap();
    let mut guest = Guest::connect(&place.socket(), 1);
    assert_ne!(guest.frontend.get_features().unwrap() & 1 << 5, 0);
    guest.submit(0, WRITE, 0, DATA, 512);
    assert_eq!(guest.wait(0).status, IO_ERROR);
    guest.submit_ranges(0, WRITE_ZEROES, &[(0, 8, 0)]);
    assert_eq!(guest.wait(0).status, IO_ERROR);
    guest.submit_flush(0);
    assert_eq!(guest.wait(0).status, OK);
    assert!(guest.read_disk(0, 512) == place.disk_bytes(0, 512));
}

#[test]
fn failing_images_fail_requests_and_nothing_else() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 1);
    for kind in [READ, WRITE] {
        // The second piece of a request of two.
        plan.on(plan.seen() + 1, Fault::Fail(libc::EIO));
        assert_eq!(guest.run(0, kind, 0, DATA, DISK_BYTES as u32).status, IO_ERROR);
    }
    plan.on(plan.seen(), Fault::Fail(libc::ENOSPC));
    guest.submit_flush(0);
    assert_eq!(guest.wait(0).status, IO_ERROR);
    assert_eq!(server.counters().io_errors, 3);
    assert_eq!(guest.run(0, READ, 0, DATA, DISK_BYTES as u32).status, OK);
}

#[test]
fn write_through_waits_for_the_flush() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, None);
    let features = VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | FLUSH_FEATURE | CONFIG_WCE;
    let mut guest = Guest::connect_with(&place.socket(), 1, features);
    let set_writeback = |guest: &mut Guest, on: u8| {
        guest.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[on]).unwrap();
        let (_, space) = guest.frontend.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
        assert_eq!(space[32], on);
    };
    set_writeback(&mut guest, 0);
    plan.on(1, Fault::HoldEnd);
    guest.submit(0, WRITE, 0, DATA, 4096);
    assert!(plan.wait_until_held(1, PATIENCE), "the flush follows the write");
    assert_eq!(guest.poll(0), None, "the write is not answered before it is durable");
    plan.release(1);
    assert_eq!(guest.wait(0).status, OK);
    assert_eq!(plan.seen(), 2);
    set_writeback(&mut guest, 1);
    assert_eq!(guest.run(0, WRITE, 0, DATA, 4096).status, OK);
    assert_eq!(plan.seen(), 3, "no flush of our own any more");
}

#[test]
fn guest_without_flush_gets_write_through() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect_with(&place.socket(), 1, VERSION_1 | PROTOCOL_FEATURES);
    assert_eq!(guest.run(0, WRITE, 0, DATA, 4096).status, OK);
    assert_eq!(plan.seen(), 2, "a write and a flush");
}

#[test]
fn configuration_is_given_as_long_as_asked() {
    let place = Place::new(DISK_BYTES);
    let _server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let mut get = |offset, bytes: u32| {
        let buffer = vec![0; bytes as usize];
        guest.frontend.get_config(offset, bytes, VhostUserConfigFlags::empty(), &buffer).unwrap().1
    };
    let space = get(0, 60);
    assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), DISK_BYTES / 512);
    assert_eq!(u32::from_le_bytes(space[12..16].try_into().unwrap()), u32::from(QUEUE_SIZE) - 2, "segments");
    assert_eq!(u32::from_le_bytes(space[20..24].try_into().unwrap()), 512, "block size");
    assert_eq!(u16::from_le_bytes(space[34..36].try_into().unwrap()), 4, "queues");
    assert_eq!(get(0, 8), space[..8]);
    assert_eq!(get(20, 4), space[20..24]);
    let longer = get(0, 256);
    assert_eq!((&longer[..60], &longer[60..]), (&space[..], &[0u8; 196][..]));
}

#[test]
fn a_new_size_is_announced_and_usable() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&theirs).unwrap();
    drop(theirs);
    std::fs::File::options().write(true).open(&place.image).unwrap().set_len(2 * DISK_BYTES).unwrap();
    assert_eq!(server.resize().unwrap(), 2 * DISK_BYTES);
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut message = [0; 12];
    std::io::Read::read_exact(&mut &ours, &mut message).unwrap();
    // CONFIG_CHANGE_MSG, version 1 without a wish for a reply, no payload.
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let (_, space) = guest.frontend.get_config(0, 8, VhostUserConfigFlags::empty(), &[0; 8]).unwrap();
    assert_eq!(u64::from_le_bytes(space.try_into().unwrap()), 2 * DISK_BYTES / 512);
    assert_eq!(guest.run(0, WRITE, 2 * DISK_BYTES - 4096, DATA, 4096).status, OK);
}

#[test]
fn limits_hold_back_the_image_and_are_counted() {
    let place = Place::new(DISK_BYTES);
    let mut options = place.options();
    options.limits = Limits { bytes_per_second: None, operations_per_second: Some(200) };
    let server = DiskServer::start(options, place.open(), None).unwrap();
    let mut guest = Guest::connect(&place.socket(), 1);
    let started = std::time::Instant::now();
    for at in 0..16 {
        // Too far from each other to be joined.
        guest.submit(0, READ, at << 16, DATA + at * 4096, 4096);
    }
    let answered = (0..16).filter(|_| guest.wait(0).status == OK).count();
    assert_eq!(answered, 16);
    // 16 operations at 5 ms each, less the first and what 10 ms of idling have saved up. Only a lower bound can be
    // promised on a busy machine; the exact steps are tested with the limiter, whose clock is a number.
    assert!(started.elapsed() >= Duration::from_millis(60), "{:?}", started.elapsed());
    assert!(server.counters().throttled_us >= 50_000, "{}", server.counters().throttled_us);
}

#[test]
fn pressure_ignores_waits_for_limits() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    plan.on(0, Fault::HoldEnd);
    let mut options = place.options();
    options.limits = Limits { bytes_per_second: None, operations_per_second: Some(1) };
    let server = DiskServer::start_with(options, flaky(place.open(), &plan), None).unwrap();
    let pressure = server.pressure();
    let read = || pressure.read(std::time::Instant::now());
    assert_eq!((read().in_flight, read().latency), (0, Duration::ZERO));
    let mut guest = Guest::connect(&place.socket(), 1);
    let held = guest.submit(0, READ, 0, DATA, 4096);
    guest.submit(0, READ, 1 << 20, DATA, 4096);
    wait_until("the first is on its way, the second limited", || read().in_flight == 1);
    plan.release(0);
    assert_eq!(guest.wait(0).head, held);
    wait_until("the second waits", || read().in_flight == 0);
    drop(server);
    assert_eq!(read().in_flight, 0, "may be asked when the disk is gone");
}

#[test]
fn stopped_queue_drains_while_others_go_on() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 2);
    plan.on(0, Fault::HoldEnd);
    let held = guest.submit(0, WRITE, 0, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    let frontend = guest.frontend.clone();
    let stopper = std::thread::spawn(move || frontend.get_vring_base(0).unwrap());
    for _ in 0..10 {
        assert_eq!(guest.run(1, READ, 8192, DATA + 8192, 4096).status, OK, "the other queue is served meanwhile");
    }
    assert!(!stopper.is_finished(), "the base is not known before the last answer");
    assert_eq!(guest.poll(0), None);
    plan.release(0);
    assert_eq!(stopper.join().unwrap(), 1);
    assert_eq!(guest.poll(0).map(|answer| answer.head), Some(held), "answered before the base was");
}

#[test]
fn early_kicks_are_not_lost() {
    let place = Place::new(DISK_BYTES);
    let _server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.frontend.set_vring_enable(0, false).unwrap();
    guest.submit(0, READ, 0, DATA, 4096);
    // An answered message means that the loop has been round, and the kick was before it.
    guest.frontend.get_features().unwrap();
    assert_eq!(guest.poll(0), None);
    guest.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(guest.wait(0).status, OK);
}

#[test]
fn next_call_descriptor_repeats_missed_signal() {
    for features in [VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX, VERSION_1 | PROTOCOL_FEATURES] {
        let place = Place::new(DISK_BYTES);
        let _server = place.serve(None);
        let mut guest = Guest::connect_with(&place.socket(), 1, features);
        // A server before this one may have answered and not woken.
        guest.sleep(0);
        guest.submit(0, READ, 0, DATA, 4096);
        guest.sleep(0);
        // Nobody may have read the old one.
        guest.replace_call(0);
        guest.sleep(0);
        assert_eq!(guest.wait(0).status, 0);
    }
}

#[test]
fn socket_is_private_and_never_stolen() {
    let place = Place::new(DISK_BYTES);
    drop(std::os::unix::net::UnixListener::bind(place.socket()).unwrap());
    let server = place.serve(None);
    assert_eq!(std::fs::metadata(place.socket()).unwrap().permissions().mode() & 0o777, 0o600);
    let other = Place::new(4096);
    let mut options = other.options();
    options.socket = place.socket();
    let error = DiskServer::start(options, other.open(), None).err().unwrap();
    assert!(matches!(&error, ServerError::SocketInUse { .. }), "{error}");
    server.stop();
    assert!(!place.socket().exists());
}

#[test]
fn unusable_options_are_refused_at_start() {
    let place = Place::new(4096);
    let check = |change: fn(&mut hearth_disk::server::DiskOptions), expected: &str| {
        let mut options = place.options();
        change(&mut options);
        let error = DiskServer::start(options, place.open(), None).err().unwrap().to_string();
        assert!(error.contains("disk test") && error.contains(expected), "{error}");
    };
    check(|options| options.queues = 0, "0 queues");
    check(|options| options.queue_size = 100, "queues of 100 requests");
    check(|options| options.serial = "x".repeat(21), "longer than 20 bytes");
    check(|options| options.socket = "/nonexistent/folder/x.sock".into(), "cannot listen at socket /nonexistent");
}

#[test]
fn tracking_changes_only_between_two_guests() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let server = place.serve_flaky(&plan, None);
    server.attach(None).unwrap();
    server.drain(PATIENCE).unwrap();
    let mut guest = Guest::connect(&place.socket(), 1);
    assert!(matches!(server.attach(None), Err(ServerError::Busy { .. })));
    plan.on(0, Fault::HoldEnd);
    guest.submit(0, WRITE, 0, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    drop(guest);
    wait_until("the hang-up is seen", || !server.counters().connected);
    assert!(matches!(server.attach(None), Err(ServerError::Busy { .. })), "its write is still in flight");
    let drained = server.drain(Duration::from_millis(1));
    assert!(matches!(drained, Err(ServerError::Timeout { .. })), "{drained:?}");
    plan.release(0);
    server.drain(PATIENCE).unwrap();
    server.attach(None).unwrap();
    let mut next = Guest::connect(&place.socket(), 1);
    assert!(next.read_disk(0, 4096) == place.disk_bytes(0, 4096));
    assert_eq!(server.counters().connections, 2);
}

/// As with a guest whose wish is on its way while the device looks for it: a CPU that QEMU emulates alone has no memory barriers.
#[test]
fn overslept_guest_is_woken_in_the_end() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(1);
    let _server = place.serve_flaky(&plan, None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.sleep(0);
    for number in 0..3 {
        plan.on(number, Fault::HoldEnd);
        guest.submit(0, WRITE, number * (1 << 20), DATA, 4096);
        assert!(plan.wait_until_held(number, PATIENCE));
    }
    guest.wish(0, u16::MAX);
    for (number, used) in [(0, 1), (1, 2)] {
        plan.release(number);
        wait_until("it is answered", || guest.used_index(0) == used);
    }
    // Of the first answer nobody asks any more whether it is wished for.
    guest.wish(0, 0);
    plan.release(2);
    guest.sleep(0);
}
