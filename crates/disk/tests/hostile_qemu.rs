//! A QEMU that its guest has taken over: sequences of valid and invalid messages, odd descriptors, silence. The server goes on
//! answering others, stops in time, and takes no more memory than it would for an honest one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use common::*;
use hearth_disk::engine::{Completion, Engine, Submission};
use hearth_disk::server::{Backing, DiskServer};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::EventFd;

const DISK_BYTES: u64 = 4 << 20;
/// Memory that a server may take beside what it has for honest guests. Most of it is kept by the allocator.
const MEMORY_MAX_KIB: u64 = 64 << 10;
/// Long for a busy machine, and no time to one that is held up for good.
const STOP_PATIENCE: Duration = Duration::from_secs(20);
const SEEDS: u64 = 60;
const STEPS: u64 = 30;

const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_ERR: u32 = 14;
const SET_INFLIGHT: u32 = 32;

/// Memory is the process's, so tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Ends the server, and fails if that takes too long.
#[track_caller]
fn must_stop(server: DiskServer) {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        server.stop();
        let _ = done.send(());
    });
    assert_eq!(is_done.recv_timeout(STOP_PATIENCE), Ok(()), "the server stops in time");
}

fn must_answer(place: &Place) {
    let mut guest = Guest::connect(&place.socket(), 1);
    assert!(guest.read_disk(4096, 4096) == place.disk_bytes(4096, 4096));
}

fn counter(flags: EventfdFlags, count: u64) -> OwnedFd {
    let fd = eventfd(0, flags).unwrap();
    if count > 0 {
        rustix::io::write(&fd, &count.to_ne_bytes()).unwrap();
    }
    fd
}

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// One of each kind that may hurt, and of each that is right.
fn descriptor(random: &mut Random, own: BorrowedFd<'_>) -> OwnedFd {
    let open = |path: &str| File::options().read(true).open(path).unwrap().into();
    match random.below(18) {
        0 => counter(EventfdFlags::empty(), u64::MAX - 1),
        1 => counter(EventfdFlags::empty(), 0),
        2 => counter(EventfdFlags::SEMAPHORE, 1000),
        3 | 4 => counter(EventfdFlags::NONBLOCK, 0),
        5 => rustix::pipe::pipe().unwrap().0,
        6 => rustix::pipe::pipe().unwrap().1,
        7 => UnixStream::pair().unwrap().0.into(),
        8 => std::net::TcpListener::bind("127.0.0.1:0").unwrap().into(),
        9 => open("/"),
        10 => open("/dev/zero"),
        11 => open("/proc/self/maps"),
        12 => own.try_clone_to_owned().unwrap(),
        13 => memory(1 << 20, SealFlags::empty()),
        14 => memory(64 << 40, SealFlags::SHRINK),
        15 => tempfile::tempfile_in("/dev/shm").unwrap().into(),
        _ => memory(1 << 20, SealFlags::SHRINK),
    }
}

/// A message of this kind whose fields are likely ones, or borders.
fn payload(request: u32, random: &mut Random) -> Vec<u8> {
    let longs = [0, 1, 4096, 8192, 1 << 20, 16 << 20, 1 << 40, 60 << 40, u64::MAX - 4095, u64::MAX];
    let mut long = || longs[random.below(longs.len() as u64) as usize].to_ne_bytes().to_vec();
    let fields: Vec<Vec<u8>> = match request {
        SET_MEM_TABLE => [vec![vec![1, 0, 0, 0, 0, 0, 0, 0]], (0..4).map(|_| long()).collect()].concat(),
        37 | 38 => (0..5).map(|_| long()).collect(),
        SET_VRING_ADDR => (0..5).map(|_| long()).collect(),
        SET_LOG_BASE => (0..2).map(|_| long()).collect(),
        31 | SET_INFLIGHT => {
            let shorts = [0u16, 1, 2, 4, 5, 64, 128, 1024, 0x8000, u16::MAX];
            let (bytes, offset) = (long(), long());
            let mut short = || shorts[random.below(shorts.len() as u64) as usize].to_ne_bytes().to_vec();
            vec![bytes, offset, short(), short()]
        }
        SET_VRING_NUM | 10 | 11 | 18 => {
            let numbers = [0u32, 1, 2, 3, 4, 64, 128, 1 << 15, 1 << 16, u32::MAX];
            (0..2).map(|_| numbers[random.below(numbers.len() as u64) as usize].to_ne_bytes().to_vec()).collect()
        }
        SET_VRING_KICK..=SET_VRING_ERR => vec![random.below(5).to_ne_bytes().to_vec()],
        2 | 16 => vec![
            [0x1_7000_0000u64, 0x1_3000_0000, 0, 0x9229, u64::MAX][random.below(5) as usize].to_ne_bytes().to_vec(),
        ],
        24 | 25 => {
            let bytes = random.below(300) as u32;
            vec![
                random.below(300).to_ne_bytes()[..4].to_vec(),
                bytes.to_ne_bytes().to_vec(),
                vec![0; 4],
                vec![1; bytes as usize],
            ]
        }
        _ => Vec::new(),
    };
    fields.concat()
}

/// A frontend that says what it likes.
struct Hostile {
    stream: UnixStream,
    /// Kept, so that what the server has of them changes under it.
    given: Vec<OwnedFd>,
}

impl Hostile {
    fn connect(place: &Place) -> Self {
        let stream = UnixStream::connect(place.socket()).unwrap();
        stream.set_nonblocking(true).unwrap();
        Self { stream, given: Vec::new() }
    }

    /// An honest one that its guest has taken over.
    fn turned(guest: &Guest) -> Self {
        // SAFETY: a duplicate of an open descriptor, owned by nobody else.
        let stream = unsafe { UnixStream::from_raw_fd(libc::dup(guest.frontend.as_raw_fd())) };
        stream.set_nonblocking(true).unwrap();
        Self { stream, given: vec![guest.ram.try_clone().unwrap().into()] }
    }

    /// False: the server has hung up.
    fn send(&mut self, request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> bool {
        let mut bytes: Vec<u8> =
            [request, 1, payload.len() as u32].iter().flat_map(|field| field.to_ne_bytes()).collect();
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        assert!(borrowed.is_empty() || control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        let sent =
            sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        self.given.extend(fds);
        sent.is_ok()
    }

    fn step(&mut self, random: &mut Random) -> bool {
        let requests = [
            1, 2, 3, 5, 5, 6, 8, 8, 9, 10, 11, 12, 12, 13, 13, 14, 14, 15, 16, 17, 18, 21, 24, 25, 31, 32, 32, 34, 36,
            37, 38,
        ];
        match random.below(20) {
            // Memory that was handed over shrinks, or is filled.
            0 => {
                for fd in &self.given {
                    let _ = ftruncate(fd, 0);
                }
                true
            }
            1 => {
                for fd in &self.given {
                    let _ = rustix::io::ioctl_fionbio(fd, true);
                    let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
                    let _ = rustix::io::ioctl_fionbio(fd, false);
                }
                true
            }
            2 => {
                let garbage: Vec<u8> = (0..random.below(60)).map(|_| random.next() as u8).collect();
                self.stream.write_all(&garbage).is_ok()
            }
            3 => {
                let mut answers = [0; 4096];
                !matches!(self.stream.read(&mut answers), Ok(0))
            }
            _ => {
                let request = requests[random.below(requests.len() as u64) as usize];
                let payload = payload(request, random);
                let wants_fd = matches!(request, 5 | 6 | 12..=14 | 21 | 32 | 37);
                let count = if wants_fd != (random.below(12) == 0) { 1 } else { random.below(3) };
                let own = self.stream.try_clone().unwrap();
                let fds = (0..count).map(|_| descriptor(random, own.as_fd())).collect();
                self.send(request, &payload, fds)
            }
        }
    }
}

#[test]
fn no_message_sequence_blocks_or_fills_server() {
    let _alone = alone();
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    must_answer(&place);
    let before = resident_kib();
    for seed in 1..=SEEDS {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // Every other one has been set up as an honest QEMU is, and serves a guest.
        let guest = seed.is_multiple_of(2).then(|| Guest::connect(&place.socket(), 3));
        let mut hostile = guest.as_ref().map_or_else(|| Hostile::connect(&place), Hostile::turned);
        // Seed by seed, so that a failure names one.
        for _ in 0..STEPS {
            if !hostile.step(&mut random) {
                break;
            }
        }
        let grown = resident_kib().saturating_sub(before);
        assert!(grown < MEMORY_MAX_KIB, "{grown} KiB more after seed {seed}");
        // Some are killed; of the others the server has to get rid by itself when it stops.
        drop((hostile, guest));
        must_answer(&place);
    }
    let _silent = Hostile::connect(&place);
    must_stop(server);
}

/// A guest that is set up as usual, and what is then done to its QEMU's descriptors.
#[track_caller]
fn check_hostile_guest(act: impl FnOnce(&mut Guest)) {
    let _alone = alone();
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 3);
    assert_eq!(guest.read_disk(0, 4096).len(), 4096);
    act(&mut guest);
    drop(guest);
    must_answer(&place);
    must_stop(server);
}

#[test]
fn a_full_call_that_blocks_holds_up_nobody() {
    check_hostile_guest(|guest| {
        let full = EventFd::new(0).unwrap();
        full.write(u64::MAX - 1).unwrap();
        guest.frontend.set_vring_call(0, &full).unwrap();
        for _ in 0..3 {
            let used = guest.used_index(0);
            guest.submit(0, READ, 0, DATA, 4096);
            wait_until("the request is answered", || guest.used_index(0) != used);
        }
    });
}

#[test]
fn a_full_error_that_blocks_holds_up_nobody() {
    check_hostile_guest(|guest| {
        let full = EventFd::new(0).unwrap();
        full.write(u64::MAX - 1).unwrap();
        guest.frontend.set_vring_err(0, &full).unwrap();
        guest.corrupt_available_index(0, 9999);
        guest.submit(1, READ, 0, DATA, 4096);
        assert_eq!(guest.wait(1).status, 0, "the other queues are served");
    });
}

#[test]
fn shared_blocking_kick_holds_up_nobody() {
    check_hostile_guest(|guest| {
        let shared = EventFd::new(0).unwrap();
        guest.frontend.set_vring_kick(1, &shared).unwrap();
        guest.frontend.set_vring_kick(2, &shared).unwrap();
        for _ in 0..20 {
            shared.write(1).unwrap();
            guest.submit(0, READ, 0, DATA, 4096);
            assert_eq!(guest.wait(0).status, 0);
        }
    });
}

/// The counter is filled and emptied again and again by somebody else while the server signals it.
#[test]
fn changing_call_descriptor_blocks_nobody() {
    check_hostile_guest(|guest| {
        let call = EventFd::new(0).unwrap();
        guest.frontend.set_vring_call(0, &call).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    rustix::io::ioctl_fionbio(fd_of(&call), true).unwrap();
                    let _ = call.write(u64::MAX - 1);
                    rustix::io::ioctl_fionbio(fd_of(&call), false).unwrap();
                    rustix::io::ioctl_fionbio(fd_of(&call), true).unwrap();
                    let _ = call.read();
                }
            });
            for _ in 0..200 {
                let used = guest.used_index(0);
                guest.submit(0, READ, 0, DATA, 4096);
                wait_until("the request is answered", || guest.used_index(0) != used);
                let _ = guest.poll(0);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}

fn fd_of(counter: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor lives as long as the reference.
    unsafe { BorrowedFd::borrow_raw(counter.as_raw_fd()) }
}

#[test]
fn connection_that_holds_its_own_peer_ends() {
    let _alone = alone();
    let place = Place::new(DISK_BYTES);
    let server = place.serve(None);
    let guest = Guest::connect(&place.socket(), 1);
    // SAFETY: a duplicate of an open descriptor, owned by nobody else.
    let own = unsafe { EventFd::from_raw_fd(libc::dup(guest.frontend.as_raw_fd())) };
    assert!(guest.frontend.set_vring_err(0, &own).is_err(), "it is no event counter");
    drop(own);
    drop(guest);
    server.drain(STOP_PATIENCE).unwrap();
    must_stop(server);
}

#[test]
fn an_inflight_region_with_fewer_queues_is_refused() {
    check_hostile_guest(|guest| {
        let (small, file) = guest.frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, 16)).unwrap();
        assert!(guest.frontend.set_inflight_fd(&small, file.as_raw_fd()).is_err());
    });
}

#[test]
fn inflight_regions_larger_than_offered_are_refused() {
    for (queues, size) in [(1, 1025), (1, u16::MAX)] {
        check_hostile_guest(|guest| {
            let asked = VhostUserInflight::new(0, 0, queues, size);
            assert!(guest.frontend.get_inflight_fd(&asked).is_err(), "{queues} queues of {size}");
        });
    }
}

#[test]
fn queues_larger_than_qemu_allows_are_refused() {
    check_hostile_guest(|guest| {
        guest.stop_queue(0);
        assert!(guest.frontend.set_vring_num(0, 2048).is_err());
    });
}

/// The memory of a guest is cut off under its queues, and its QEMU is cut off for that; the process lives.
#[test]
fn guest_memory_that_shrinks_costs_only_its_connection() {
    check_hostile_guest(|guest| {
        guest.submit(1, READ, 0, DATA + 4096, 4096);
        guest.wait(1);
        ftruncate(&guest.ram, 0).unwrap();
        let asked = Instant::now();
        // The server looks at its rings by itself now and then only: this wakes it.
        let kick = EventFd::new(0).unwrap();
        let _ = guest.frontend.set_vring_kick(0, &kick);
        let _ = kick.write(1);
        while guest.frontend.get_features().is_ok() {
            assert!(asked.elapsed() < PATIENCE, "a QEMU without memory is cut off");
            let _ = kick.write(1);
        }
    });
}

#[test]
fn a_region_of_terabytes_takes_no_memory() {
    check_hostile_guest(|guest| {
        let before = resident_kib();
        let bytes = 60 << 40;
        let file = memory(bytes, SealFlags::empty());
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: bytes,
            userspace_addr: 1 << 46,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        guest.frontend.set_mem_table(&[region]).unwrap();
        let grown = resident_kib().saturating_sub(before);
        assert!(grown < MEMORY_MAX_KIB, "{grown} KiB");
    });
}

/// An engine that ends the disk's thread with the first operation.
struct Panicking(Box<dyn Engine>);

impl Engine for Panicking {
    fn push(&mut self, submission: Submission) {
        panic!("nobody expected an operation at {}", submission.offset);
    }

    fn submit(&mut self) -> std::io::Result<()> {
        self.0.submit()
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        self.0.reap(ended);
    }

    fn wait(&mut self, at_most: Duration) -> std::io::Result<()> {
        self.0.wait(at_most)
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.0.notifier()
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

#[test]
fn panicking_thread_is_reported_to_disks_owner() {
    let place = Place::new(DISK_BYTES);
    let backing = Backing::with(place.open(), |_, engine| Box::new(Panicking(engine))).unwrap();
    let server = DiskServer::start_with(place.options(), backing, None).unwrap();
    let (tell, told) = mpsc::channel();
    server.watch(move |why| tell.send(why).unwrap());
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.submit(0, READ, 8192, DATA, 4096);
    let why = told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(why, "it panicked: nobody expected an operation at 8192");
    assert!(guest.frontend.get_features().is_err(), "QEMU is not left with a dead socket");
    must_stop(server);
}
