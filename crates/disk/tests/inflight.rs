//! The server is killed, another one takes over: every request is answered once, and the data are right.
//!
//! The server runs in a child (this test program once more), because nothing else dies like a killed process does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::*;
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::server::{DiskOptions, DiskServer, Expected, Peer, ServerError, inflight_name};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vmm_sys_util::eventfd::EventFd;

const DISK_BYTES: u64 = 4 << 20;
/// Where the configuration says whether the guest's writes are cached.
const WRITEBACK: u32 = 32;
const IMAGE: &str = "HEARTH_TEST_IMAGE";
const SOCKET: &str = "HEARTH_TEST_SOCKET";
const HOLD: &str = "HEARTH_TEST_HOLD";

/// A server in a process of its own.
struct Victim(Child);

impl Victim {
    /// Holds back the operations with these numbers, at the image or after it.
    fn spawn(place: &Place, hold: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serve_until_killed", "--ignored"])
            .env(IMAGE, &place.image)
            .env(SOCKET, place.socket())
            .env(HOLD, hold)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let victim = Self(child);
        wait_until("the child listens", || std::os::unix::net::UnixStream::connect(place.socket()).is_ok());
        victim
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "not a test: other tests start it as the process to be killed"]
fn serve_until_killed() {
    let Ok(socket) = std::env::var(SOCKET) else { return };
    let image = std::env::var(IMAGE).unwrap();
    let place = Place { folder: tempfile::tempdir().unwrap(), image: image.into() };
    let plan = Plan::new(1);
    for held in std::env::var(HOLD).unwrap().split_whitespace() {
        let (kind, number) = held.split_at(1);
        let fault = if kind == "s" { Fault::HoldStart } else { Fault::HoldEnd };
        plan.on(number.parse().unwrap(), fault);
    }
    let mut options = place.options();
    options.socket = Path::new(&socket).into();
    options.expected = Expected::these([Peer::of(std::os::unix::process::parent_id()).unwrap()]);
    let mut backing = flaky(place.open(), &plan);
    // Requests that start together end in any order, on any disk; one by one shows in which order requests are taken up.
    if std::env::var(HOLD).unwrap().is_empty() {
        backing.depth = 1;
    }
    let _server = DiskServer::start_with(options, backing, None).unwrap();
    loop {
        std::thread::park();
    }
}

fn take_over(place: &Place, victim: Victim, guest: &mut Guest, hold: &str) -> Victim {
    victim.kill();
    let next = Victim::spawn(place, hold);
    guest.reconnect(&place.socket());
    next
}

#[test]
fn next_server_carries_out_overtaken_request() {
    for hold in ["s0", "e0"] {
        for kind in [READ, WRITE] {
            let place = Place::new(DISK_BYTES);
            let victim = Victim::spawn(&place, hold);
            let mut guest = Guest::connect(&place.socket(), 1);
            guest.write_ram(DATA, &[0xaa; 4096]);
            let held = guest.submit(0, kind, 0, DATA, 4096);
            for at in 1..8 {
                // Too far away to be joined with it.
                let later = guest.submit(0, READ, at << 16, DATA + at * 4096, 4096);
                assert_eq!(guest.wait(0).head, later, "overtakes");
            }
            let _next = take_over(&place, victim, &mut guest, "");
            let answer = guest.wait(0);
            assert_eq!((answer.head, answer.status), (held, 0), "{hold}, type {kind}");
            assert!(guest.read_ram(DATA, 4096) == place.disk_bytes(0, 4096));
            assert_eq!(guest.poll(0), None, "nothing is answered twice");
            assert!(guest.read_disk(8 * 4096, 4096) == place.disk_bytes(8 * 4096, 4096), "and it goes on");
        }
    }
}

/// The base that a stop reports cannot say which of several requests were answered, and the next QEMU's inflight region is
/// empty.
#[test]
fn queue_stopped_at_once_answers_what_it_resumed() {
    let place = Place::new(DISK_BYTES);
    let victim = Victim::spawn(&place, "s0");
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.write_ram(DATA, &[0xaa; 4096]);
    let held = guest.submit(0, WRITE, 0, DATA, 4096);
    for at in 1..3 {
        let later = guest.submit(0, READ, at << 16, DATA + at * 4096, 4096);
        assert_eq!(guest.wait(0).head, later, "overtakes");
    }
    victim.kill();
    let server = place.serve(None);
    server.set_handover(true).unwrap();
    guest.reconnect_disabled(&place.socket());
    let successor = guest.successor(&place.socket());
    assert_eq!(guest.stop_queue(0), 3);
    let _old = guest.hop(successor);
    assert_eq!(guest.wait(0).head, held);
    assert!(place.disk_bytes(0, 4096) == [0xaa; 4096]);
    assert_eq!(guest.poll(0), None, "nothing is answered twice");
    assert!(guest.read_disk(8 * 4096, 4096) == place.disk_bytes(8 * 4096, 4096), "and it goes on");
}

/// A migration would miss what is written before the server has QEMU's log, which comes after the start of the queues.
#[test]
fn queue_stopped_before_the_log_resumes_nothing() {
    let stops: [fn(&mut Guest); 2] =
        [|guest| drop(guest.frontend.get_vring_base(0)), |guest| drop(guest.frontend.reset_device())];
    for stop in stops {
        let place = Place::new(DISK_BYTES);
        let victim = Victim::spawn(&place, "s0");
        let mut guest = Guest::connect_with(&place.socket(), 1, VERSION_1 | PROTOCOL_FEATURES | LOG_ALL);
        let held = guest.submit(0, READ, 0, DATA, 4096);
        let later = guest.submit(0, READ, 1 << 16, DATA + 4096, 4096);
        assert_eq!(guest.wait(0).head, later, "overtakes");
        victim.kill();
        let _server = place.serve(None);
        guest.reconnect_disabled(&place.socket());
        stop(&mut guest);
        assert!(guest.frontend.get_features().is_err(), "the connection has ended");
        assert_eq!(guest.poll(0), None);
        guest.reconnect_disabled(&place.socket());
        let log = attach_log(&guest);
        stop(&mut guest);
        assert_eq!(guest.poll(0).map(|answer| answer.head), Some(held));
        assert!(take_log(&log).contains(&(DATA / 4096)));
    }
}

/// A QEMU whose greeting was cut off must not be started again, so the next keeper has to know.
#[test]
fn greeting_ends_with_the_call_descriptor_of_the_last_queue() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut frontend = negotiate(&place.socket(), 4, VERSION_1 | PROTOCOL_FEATURES);
    assert_eq!(frontend.get_queue_num().unwrap(), 4);
    let call = EventFd::new(0).unwrap();
    for queue in 0..3 {
        frontend.set_vring_call(queue, &call).unwrap();
    }
    frontend.get_features().unwrap();
    assert!(!server.counters().greeted, "a message is missing");
    frontend.set_vring_call(3, &call).unwrap();
    wait_until("the greeting is complete", || server.counters().greeted);
    drop(frontend);
    wait_until("the hang-up is seen", || !server.counters().greeted);
}

/// A QEMU that is connected to the next server and says nothing to it has the only note of its requests.
#[test]
fn silent_qemus_requests_pass_to_another() {
    let place = Place::new(DISK_BYTES);
    let victim = Victim::spawn(&place, "s0");
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.frontend.set_config(WRITEBACK, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    guest.write_ram(DATA, &[0xaa; 4096]);
    let held = guest.submit(0, WRITE, 0, DATA, 4096);
    for at in 1..3 {
        let later = guest.submit(0, READ, at << 16, DATA + at * 4096, 4096);
        assert_eq!(guest.wait(0).head, later, "overtakes");
    }
    let left = guest.inflight_file();
    let name = std::fs::read_link(format!("/proc/self/fd/{}", left.as_raw_fd())).unwrap();
    assert_eq!(name.to_str(), Some(format!("/memfd:{} (deleted)", inflight_name("test")).as_str()));
    victim.kill();
    let server = place.serve(None);
    let _silent = UnixStream::connect(place.socket()).unwrap();
    wait_until("the silent one is connected", || server.counters().connected);
    assert!(!server.counters().greeted);
    let unsealed = rustix::fs::memfd_create("foreign", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(matches!(server.set_handover_from_silent(unsealed), Err(ServerError::Left { .. })));
    server.set_handover_from_silent(left).unwrap();
    let successor = guest.successor(&place.socket());
    let _before = guest.hop(successor);
    assert_eq!(guest.wait(0).head, held);
    assert!(place.disk_bytes(0, 4096) == [0xaa; 4096]);
    assert_eq!(guest.poll(0), None, "nothing is answered twice");
    assert!(guest.read_disk(8 * 4096, 4096) == place.disk_bytes(8 * 4096, 4096), "and it goes on");
    let (_, space) = guest.frontend.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
    assert_eq!(space[WRITEBACK as usize], 0, "the write cache is still off");
}

/// A guest without a write cache sends no flushes. QEMU does not tell the next server so.
#[test]
fn next_server_knows_write_cache_is_off() {
    let place = Place::new(DISK_BYTES);
    let mut victim = Victim::spawn(&place, "");
    let mut guest = Guest::connect(&place.socket(), 1);
    for writeback in [0, 1, 0] {
        guest.frontend.set_config(WRITEBACK, VhostUserConfigFlags::WRITABLE, &[writeback]).unwrap();
        victim = take_over(&place, victim, &mut guest, "");
        let (_, space) = guest.frontend.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
        assert_eq!(space[WRITEBACK as usize], writeback);
    }
}

/// The successor of a hop gets its region before its first start, and its server may die in between.
#[test]
fn new_region_records_write_cache_off() {
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.frontend.set_config(WRITEBACK, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    server.set_handover(true).unwrap();
    let mut successor = guest.successor(&place.socket());
    let (region, file) = successor.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, QUEUE_SIZE)).unwrap();
    drop(server);
    let _next = place.serve(None);
    let mut successor = guest.successor(&place.socket());
    successor.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    let (_, space) = successor.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
    assert_eq!(space[WRITEBACK as usize], 0);
}

fn writeback(guest: &mut Guest) -> u8 {
    let (_, space) = guest.frontend.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
    space[WRITEBACK as usize]
}

/// The keeper notes it for a guest that comes to another QEMU, which has no region yet.
#[test]
fn noted_write_cache_state_is_kept() {
    let place = Place::new(DISK_BYTES);
    let options = DiskOptions { write_through: true, ..place.options() };
    let server = DiskServer::start(options, place.open(), None).unwrap();
    let mut guest = Guest::connect(&place.socket(), 1);
    assert_eq!((writeback(&mut guest), server.counters().write_through), (0, true));
    // The region that it got remembers it.
    drop(server);
    let server = place.serve(None);
    guest.reconnect(&place.socket());
    assert_eq!((writeback(&mut guest), server.counters().write_through), (0, true));
    // The next guest has a write cache.
    drop(guest);
    server.drain(PATIENCE).unwrap();
    server.attach(None).unwrap();
    let mut next = Guest::connect(&place.socket(), 1);
    assert_eq!((writeback(&mut next), server.counters().write_through), (1, false));
    next.frontend.set_config(WRITEBACK, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert_eq!((writeback(&mut next), server.counters().write_through), (0, true));
}

#[test]
fn requests_are_resumed_in_original_order() {
    let place = Place::new(DISK_BYTES);
    let victim = Victim::spawn(&place, "s0 s1 s2 s3 s4");
    let mut guest = Guest::connect(&place.socket(), 1);
    for turn in 0..5u8 {
        let address = DATA + u64::from(turn) * 4096;
        guest.write_ram(address, &[turn; 4096]);
        guest.submit(0, WRITE, 0, address, 4096);
    }
    guest.run(0, FLUSH, 0, DATA, 0);
    let _next = take_over(&place, victim, &mut guest, "");
    for _ in 0..5 {
        assert_eq!(guest.wait(0).status, 0);
    }
    assert_eq!(place.disk_bytes(0, 4096)[..8], [4; 8], "the last write wins");
}

/// QEMU asks for a region of the device's size, and its guest's heads go beyond that.
#[test]
fn queue_larger_than_the_device_offers_is_resumed() {
    let place = Place::new(DISK_BYTES);
    let victim = Victim::spawn(&place, "s0 s1 s2");
    let mut guest = Guest::connect_oversized(&place.socket(), 1024);
    let heads: Vec<u16> = (0..3u8)
        .map(|turn| {
            let address = DATA + u64::from(turn) * 4096;
            guest.write_ram(address, &[turn + 1; 4096]);
            guest.submit(0, WRITE, u64::from(turn) << 16, address, 4096)
        })
        .collect();
    assert!(heads.iter().all(|head| *head >= QUEUE_SIZE), "{heads:?}");
    let later = guest.submit(0, READ, 8 << 16, DATA + 0x10000, 4096);
    assert_eq!(guest.wait(0).head, later, "overtakes");
    let _next = take_over(&place, victim, &mut guest, "");
    let mut answered: Vec<u16> = (0..3).map(|_| guest.wait(0).head).collect();
    answered.sort_unstable();
    let mut sent = heads;
    sent.sort_unstable();
    assert_eq!(answered, sent);
    for turn in 0..3u8 {
        assert_eq!(place.disk_bytes(u64::from(turn) << 16, 4096)[..8], [turn + 1; 8]);
    }
}

#[test]
fn a_second_death_while_taking_over_loses_nothing() {
    let place = Place::new(DISK_BYTES);
    let victim = Victim::spawn(&place, "s0 e2");
    let mut guest = Guest::connect(&place.socket(), 2);
    let first = guest.submit(0, WRITE, 0, DATA, 4096);
    let other = guest.submit(0, READ, 4096, DATA + 4096, 4096);
    assert_eq!(guest.wait(0).head, other);
    let second = guest.submit(1, WRITE, 8192, DATA + 8192, 4096);
    let victim = take_over(&place, victim, &mut guest, "e0");
    assert_eq!(guest.wait(1).head, second);
    let third = guest.submit(0, READ, 12288, DATA + 12288, 4096);
    assert_eq!(guest.wait(0).head, third, "served beside what is held again");
    let _next = take_over(&place, victim, &mut guest, "");
    assert_eq!(guest.wait(0).head, first);
    assert_eq!((guest.poll(0), guest.poll(1)), (None, None));
}

#[test]
fn a_clean_stop_leaves_nothing_to_resume() {
    let place = Place::new(DISK_BYTES);
    let victim = Victim::spawn(&place, "");
    let mut guest = Guest::connect(&place.socket(), 1);
    for at in 0..70 {
        guest.run(0, READ, at * 4096, DATA, 4096);
    }
    assert_eq!(guest.stop_queue(0), 70);
    let _next = take_over(&place, victim, &mut guest, "");
    assert_eq!(guest.poll(0), None);
    assert!(guest.read_disk(0, 4096) == place.disk_bytes(0, 4096));
}

/// Kills at moments that nobody chose, under load on three queues. Each queue writes blocks of its own, so that it is
/// known what has to be on the disk.
#[test]
fn kill_loses_and_repeats_no_request() {
    let place = Place::new(DISK_BYTES);
    let mut random = Random(42);
    let mut victim = Victim::spawn(&place, "");
    let mut guest = Guest::connect(&place.socket(), 3);
    let mut expected: BTreeMap<u64, u8> = BTreeMap::new();
    for round in 0..12u8 {
        let mut waiting = [0; 3];
        for turn in 0..36u64 {
            let queue = (turn % 3) as usize;
            let block = queue as u64 * 256 + random.below(200);
            let address = DATA + turn * 8192;
            if random.below(2) == 0 && !expected.iter().any(|(at, fill)| *at == block && fill >> 4 == round) {
                let fill = round << 4 | (turn % 16) as u8;
                guest.write_ram(address, &[fill; 4096]);
                guest.submit(queue, WRITE, block * 4096, address, 4096);
                expected.insert(block, fill);
            } else {
                guest.submit(queue, READ, block * 4096, address, 4096);
            }
            waiting[queue] += 1;
        }
        // Between no and all answers.
        for _ in 0..random.below(12) {
            let queue = random.below(3) as usize;
            if waiting[queue] > 0 {
                assert_eq!(guest.wait(queue).status, 0);
                waiting[queue] -= 1;
            }
        }
        victim = take_over(&place, victim, &mut guest, "");
        for (queue, count) in waiting.iter().enumerate() {
            for _ in 0..*count {
                assert_eq!(guest.wait(queue).status, 0, "round {round} queue {queue}");
            }
            assert_eq!(guest.poll(queue), None);
        }
        for (block, fill) in &expected {
            assert!(place.disk_bytes(block * 4096, 4096) == [*fill; 4096], "round {round} block {block}");
        }
    }
}
