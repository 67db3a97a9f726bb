//! A guest without a guest: RAM in a file, virtqueues written by hand, a vhost-user frontend that is not ours. Tests
//! decide the order of everything, look into the inflight region, and may send what no driver would.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::engine::flaky::{FlakyEngine, Plan};
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_disk::ledger::Ledger;
use hearth_disk::server::{Backing, DiskOptions, DiskServer, Expected, Peer, RamPart, Tracking};
use hearth_disk::tag::Tagger;
use hearth_disk::warm::WarmMemory;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Long enough for a busy machine; only failing tests wait this long.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const DISK: DiskId = DiskId(3);
pub const QUEUE_SIZE: u16 = 64;

pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const VERSION_1: u64 = 1 << 32;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const EVENT_INDEX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const LOG_ALL: u64 = 1 << 26;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const FLUSH_FEATURE: u64 = 1 << 9;

const RAM_BYTES: u64 = 32 << 20;
const LOG_BYTES: u64 = 4096;
/// Where the frontend claims to have RAM mapped: not where the guest sees it.
const USER_BASE: u64 = 0x7000_0000_0000;
/// Rings of a queue, then its headers and status bytes.
const QUEUE_BYTES: u64 = 0x10000;
const AVAILABLE: u64 = 0x4000;
/// Flags and index end a page, entries begin the next: the log must have both.
const USED: u64 = 0x8ffc;
const SLIPS: u64 = 0xc000;
const SLIP_BYTES: u64 = 64;
/// From here on RAM belongs to the data of tests.
pub const DATA: u64 = 1 << 20;

const DESCRIPTOR_NEXT: u16 = 1;
const DESCRIPTOR_WRITABLE: u16 = 2;

/// A raw image and a folder for sockets, gone with the test.
pub struct Place {
    pub folder: tempfile::TempDir,
    pub image: PathBuf,
}

impl Place {
    /// An image of random blocks, each different.
    pub fn new(bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.raw");
        let mut random = Random(bytes | 1);
        let contents: Vec<u8> = (0..bytes / 8).flat_map(|_| random.next().to_le_bytes()).collect();
        std::fs::write(&image, contents).unwrap();
        Self { folder, image }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    pub fn open(&self) -> Image {
        self.open_as(Format::Raw, &self.image)
    }

    pub fn open_as(&self, format: Format, path: &Path) -> Image {
        let lock_patience = PATIENCE;
        Image::open(&ImageOptions {
            path: path.into(),
            format,
            read_only: false,
            direct: true,
            lock_patience,
            owner: None,
        })
        .unwrap()
    }

    pub fn options(&self) -> DiskOptions {
        DiskOptions {
            serial: "serial-of-test".into(),
            queues: 4,
            queue_size: QUEUE_SIZE,
            memory_slots: true,
            expected: Expected::these([Peer::this_process().unwrap()]),
            ..DiskOptions::new(DISK, "test", self.socket())
        }
    }

    pub fn serve(&self, tracking: Option<Tracking>) -> DiskServer {
        DiskServer::start(self.options(), self.open(), tracking).unwrap()
    }

    pub fn serve_flaky(&self, plan: &Plan, tracking: Option<Tracking>) -> DiskServer {
        DiskServer::start_with(self.options(), flaky(self.open(), plan), tracking).unwrap()
    }

    pub fn disk_bytes(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        File::open(&self.image).unwrap().read_exact_at(&mut out, offset).unwrap();
        out
    }
}

pub fn flaky(image: Image, plan: &Plan) -> Backing {
    Backing::with(image, |_, engine| Box::new(FlakyEngine::new(engine, plan.clone()).unwrap())).unwrap()
}

/// One descriptor of a request: guest address, length, for the device to write.
pub type Piece = (u64, u32, bool);

struct Ring {
    index: usize,
    entries: u16,
    kick: EventFd,
    call: EventFd,
    free: Vec<u16>,
    next_available: u16,
    next_used: u16,
    /// Descriptors of each head, and where its status byte is.
    chains: Vec<(Vec<u16>, u64)>,
}

impl Ring {
    fn new(index: usize, entries: u16) -> Self {
        Self {
            index,
            entries,
            kick: EventFd::new(0).unwrap(),
            call: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            free: (0..entries).rev().collect(),
            next_available: 0,
            next_used: 0,
            chains: vec![(Vec::new(), 0); usize::from(entries)],
        }
    }

    fn base(&self) -> u64 {
        self.index as u64 * QUEUE_BYTES
    }
}

/// A request that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub head: u16,
    /// As the device counts what it wrote.
    pub bytes: u32,
    /// 255: it wrote none.
    pub status: u8,
}

/// RAM, rings, and a connection that may be lost and made again.
pub struct Guest {
    pub frontend: Frontend,
    pub ram: File,
    rings: Vec<Ring>,
    features: u64,
    inflight: Option<(VhostUserInflight, File)>,
}

impl Guest {
    /// Connects, negotiates everything that a modern QEMU does, and starts the queues.
    pub fn connect(socket: &Path, queues: usize) -> Self {
        Self::connect_with(socket, queues, VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | INDIRECT | FLUSH_FEATURE)
    }

    pub fn connect_with(socket: &Path, queues: usize, features: u64) -> Self {
        let ram = ram_file();
        Self::with_ram(socket, queues, features, ram)
    }

    pub fn with_ram(socket: &Path, queues: usize, features: u64, ram: File) -> Self {
        Self::with_rings(socket, features, ram, (0..queues).map(|index| Ring::new(index, QUEUE_SIZE)).collect())
    }

    /// One whose only queue is larger than the device offers, as QEMU 10.0.13 allows. Its last entries are used first.
    pub fn connect_oversized(socket: &Path, entries: u16) -> Self {
        let mut ring = Ring::new(0, entries);
        ring.free.reverse();
        Self::with_rings(socket, VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | FLUSH_FEATURE, ram_file(), vec![ring])
    }

    fn with_rings(socket: &Path, features: u64, ram: File, rings: Vec<Ring>) -> Self {
        let queues = rings.len();
        let mut guest = Self { frontend: negotiate(socket, queues, features), ram, rings, features, inflight: None };
        let asked = VhostUserInflight::new(0, 0, queues as u16, QUEUE_SIZE);
        guest.inflight = Some(guest.frontend.get_inflight_fd(&asked).unwrap());
        guest.start();
        guest
    }

    /// The server is another one now; the rings, and what is in flight in them, are the same.
    pub fn reconnect(&mut self, socket: &Path) {
        self.frontend = negotiate(socket, self.rings.len(), self.features);
        // As QEMU does when it could not ask for the base: it resumes after the last answered request.
        self.start();
    }

    /// As `reconnect`, but the queues are not enabled yet.
    pub fn reconnect_disabled(&mut self, socket: &Path) {
        self.frontend = negotiate(socket, self.rings.len(), self.features);
        self.tell_memory();
        (0..self.rings.len()).for_each(|queue| self.set_up_queue(queue, false, self.used_index(queue)));
    }

    /// A second QEMU: connected and negotiated, no more.
    pub fn successor(&self, socket: &Path) -> Frontend {
        negotiate(socket, self.rings.len(), self.features)
    }

    /// Goes on through another QEMU, which has an inflight region of its own; gives back the one before.
    pub fn hop(&mut self, successor: Frontend) -> Frontend {
        let before = std::mem::replace(&mut self.frontend, successor);
        let asked = VhostUserInflight::new(0, 0, self.rings.len() as u16, QUEUE_SIZE);
        self.inflight = Some(self.frontend.get_inflight_fd(&asked).unwrap());
        self.start();
        before
    }

    /// QEMU's inflight region, for a keeper that finds it among QEMU's descriptors.
    pub fn inflight_file(&self) -> OwnedFd {
        let (_, file) = self.inflight.as_ref().expect("it is asked for when the guest connects");
        file.try_clone().unwrap().into()
    }

    pub fn set_log_all(&mut self, on: bool) {
        let features = if on { self.features | LOG_ALL } else { self.features };
        self.frontend.set_features(features).unwrap();
    }

    fn start(&mut self) {
        self.tell_memory();
        for at in 0..self.rings.len() {
            self.start_queue(at, false);
        }
    }

    fn tell_memory(&mut self) {
        if let Some((region, file)) = &self.inflight {
            self.frontend.set_inflight_fd(region, file.as_raw_fd()).unwrap();
        }
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: RAM_BYTES,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.ram.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region]).unwrap();
    }

    pub fn start_queue(&mut self, queue: usize, log_used: bool) {
        self.start_queue_at(queue, log_used, self.used_index(queue));
    }

    pub fn start_queue_at(&mut self, queue: usize, log_used: bool, base: u16) {
        self.set_up_queue(queue, log_used, base);
        self.frontend.set_vring_enable(queue, true).unwrap();
    }

    fn set_up_queue(&mut self, queue: usize, log_used: bool, base: u16) {
        let ring = &self.rings[queue];
        self.frontend.set_vring_num(queue, ring.entries).unwrap();
        self.frontend.set_vring_base(queue, base).unwrap();
        self.set_addresses(queue, log_used);
        self.frontend.set_vring_call(queue, &ring.call).unwrap();
        self.frontend.set_vring_kick(queue, &ring.kick).unwrap();
    }

    /// Another descriptor to be woken through, as a frontend sets that had its guest's interrupts masked.
    pub fn replace_call(&mut self, queue: usize) {
        let fresh = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        self.frontend.set_vring_call(queue, &fresh).unwrap();
        self.rings[queue].call = fresh;
    }

    /// Waits to be woken, without a look at the ring.
    #[track_caller]
    pub fn sleep(&self, queue: usize) {
        let call = &self.rings[queue].call;
        assert!(wait_readable(call, Instant::now() + PATIENCE), "the guest is woken");
        call.read().unwrap();
    }

    pub fn set_addresses(&self, queue: usize, log_used: bool) {
        let (base, entries) = (self.rings[queue].base(), self.rings[queue].entries);
        let config = VringConfigData {
            queue_max_size: entries,
            queue_size: entries,
            flags: u32::from(log_used),
            desc_table_addr: USER_BASE + base,
            used_ring_addr: USER_BASE + base + USED,
            avail_ring_addr: USER_BASE + base + AVAILABLE,
            log_addr: log_used.then_some(base + USED),
        };
        self.frontend.set_vring_addr(queue, &config).unwrap();
    }

    /// Tells how a driver that wants interrupts sees the ring.
    pub fn used_index(&self, queue: usize) -> u16 {
        self.load_u16(self.rings[queue].base() + USED + 2)
    }

    /// When the used index passes this, we are to be woken.
    pub fn wish(&self, queue: usize, used: u16) {
        self.store_u16(self.rings[queue].base() + AVAILABLE + 4 + u64::from(self.rings[queue].entries) * 2, used);
    }

    pub fn used_address(&self, queue: usize) -> u64 {
        self.rings[queue].base() + USED
    }

    /// Which RAM the ledger is about.
    pub fn tracking(ram: &File, ledger: &Arc<Mutex<Ledger>>, warm: Option<WarmMemory>) -> Tracking {
        let identity = ram.metadata().unwrap();
        Tracking {
            ram: Arc::new([RamPart { device: identity.dev(), inode: identity.ino(), pages: identity.len() / 4096 }]),
            tagger: Tagger::new(b"a key like noise"),
            ledger: Arc::clone(ledger),
            warm,
        }
    }

    pub fn write_ram(&self, address: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, address).unwrap();
    }

    pub fn read_ram(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.ram.read_exact_at(&mut out, address).unwrap();
        out
    }

    fn load_u16(&self, address: u64) -> u16 {
        u16::from_le_bytes(self.read_ram(address, 2).try_into().unwrap())
    }

    fn store_u16(&self, address: u64, value: u16) {
        self.write_ram(address, &value.to_le_bytes());
    }

    /// Submits a read or write of `bytes` at `offset` of the disk, with its data at `address`.
    pub fn submit(&mut self, queue: usize, kind: u32, offset: u64, address: u64, bytes: u32) -> u16 {
        self.submit_pieces(queue, kind, offset / 512, &[(address, bytes, kind == READ)])
    }

    pub fn submit_flush(&mut self, queue: usize) -> u16 {
        self.submit_pieces(queue, FLUSH, 0, &[])
    }

    /// Submits a discard or write-zeroes of several ranges: sector, sectors, flags.
    pub fn submit_ranges(&mut self, queue: usize, kind: u32, ranges: &[(u64, u32, u32)]) -> u16 {
        let bytes: Vec<u8> = ranges
            .iter()
            .flat_map(|(sector, sectors, flags)| {
                [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
            })
            .collect();
        let address = DATA - 4096;
        self.write_ram(address, &bytes);
        self.submit_pieces(queue, kind, 0, &[(address, bytes.len() as u32, false)])
    }

    /// Submits a request with a header and a status byte around `pieces`.
    pub fn submit_pieces(&mut self, queue: usize, kind: u32, sector: u64, pieces: &[Piece]) -> u16 {
        let ring = &self.rings[queue];
        let head = *ring.free.last().expect("the ring has a free descriptor");
        let slip = ring.base() + SLIPS + u64::from(head) * SLIP_BYTES;
        let mut header = [kind.to_le_bytes(), [0; 4]].concat();
        header.extend_from_slice(&sector.to_le_bytes());
        self.write_ram(slip, &header);
        self.write_ram(slip + 16, &[255]);
        let mut all = vec![(slip, 16, false)];
        all.extend_from_slice(pieces);
        all.push((slip + 16, 1, true));
        let head = self.add_chain(queue, &all, slip + 16);
        self.publish(queue);
        head
    }

    /// Writes a chain and makes it available, without telling the device.
    pub fn add_chain(&mut self, queue: usize, pieces: &[Piece], status: u64) -> u16 {
        let base = self.rings[queue].base();
        let ring = &mut self.rings[queue];
        let taken: Vec<u16> = pieces.iter().map(|_| ring.free.pop().expect("the ring has room")).collect();
        let head = taken[0];
        ring.chains[usize::from(head)] = (taken.clone(), status);
        for (at, &(address, bytes, writable)) in pieces.iter().enumerate() {
            let next = taken.get(at + 1);
            let flags = if writable { DESCRIPTOR_WRITABLE } else { 0 } | next.map_or(0, |_| DESCRIPTOR_NEXT);
            let next = next.copied().unwrap_or(0);
            self.write_descriptor(base + u64::from(taken[at]) * 16, address, bytes, flags, next);
        }
        self.make_available(queue, head);
        head
    }

    pub fn write_descriptor(&self, at: u64, address: u64, bytes: u32, flags: u16, next: u16) {
        let raw = [&address.to_le_bytes()[..], &bytes.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
        self.write_ram(at, &raw.concat());
    }

    pub fn descriptor_address(&self, queue: usize, index: u16) -> u64 {
        self.rings[queue].base() + u64::from(index) * 16
    }

    pub fn make_available(&mut self, queue: usize, head: u16) {
        let base = self.rings[queue].base();
        let slot = u64::from(self.rings[queue].next_available % self.rings[queue].entries);
        self.store_u16(base + AVAILABLE + 4 + slot * 2, head);
        self.rings[queue].next_available = self.rings[queue].next_available.wrapping_add(1);
    }

    /// Lets the device see what was made available, and kicks it.
    pub fn publish(&mut self, queue: usize) {
        let ring = &self.rings[queue];
        // The next answer shall wake us.
        self.wish(queue, ring.next_used);
        self.store_u16(ring.base() + AVAILABLE + 2, ring.next_available);
        ring.kick.write(1).unwrap();
    }

    /// Makes the available index what no driver would.
    pub fn corrupt_available_index(&mut self, queue: usize, index: u16) {
        let ring = &self.rings[queue];
        self.store_u16(ring.base() + AVAILABLE + 2, index);
        ring.kick.write(1).unwrap();
    }

    /// An answer that is there already.
    pub fn poll(&mut self, queue: usize) -> Option<Answer> {
        let base = self.rings[queue].base();
        let used = self.used_index(queue);
        let ring = &mut self.rings[queue];
        if used == ring.next_used {
            return None;
        }
        let slot = u64::from(ring.next_used % ring.entries);
        ring.next_used = ring.next_used.wrapping_add(1);
        let next_used = ring.next_used;
        self.wish(queue, next_used);
        // The next look at the used index must not come before the device can see this wish.
        fence(Ordering::SeqCst);
        let entry = self.read_ram(base + USED + 4 + slot * 8, 8);
        let head = u32::from_le_bytes(entry[..4].try_into().unwrap());
        let bytes = u32::from_le_bytes(entry[4..].try_into().unwrap());
        let head = u16::try_from(head).expect("the device returns heads");
        let ring = &mut self.rings[queue];
        let (descriptors, status) = std::mem::take(&mut ring.chains[usize::from(head)]);
        assert!(!descriptors.is_empty(), "head {head} was answered and not in flight");
        ring.free.extend(descriptors.iter().rev());
        Some(Answer { head, bytes, status: self.read_ram(status, 1)[0] })
    }

    /// The next answer, woken by the device's call as a guest would be.
    #[track_caller]
    pub fn wait(&mut self, queue: usize) -> Answer {
        self.wait_at_most(queue, PATIENCE).expect("an answer comes")
    }

    pub fn wait_at_most(&mut self, queue: usize, at_most: Duration) -> Option<Answer> {
        let until = Instant::now() + at_most;
        loop {
            if let Some(answer) = self.poll(queue) {
                return Some(answer);
            }
            if !wait_readable(&self.rings[queue].call, until) {
                return None;
            }
            let _ = self.rings[queue].call.read();
        }
    }

    /// A request from submission to answer.
    pub fn run(&mut self, queue: usize, kind: u32, offset: u64, address: u64, bytes: u32) -> Answer {
        let head = self.submit(queue, kind, offset, address, bytes);
        let answer = self.wait(queue);
        assert_eq!(answer.head, head, "only one request was in flight");
        answer
    }

    pub fn read_disk(&mut self, offset: u64, bytes: u32) -> Vec<u8> {
        let answer = self.run(0, READ, offset, DATA, bytes);
        assert_eq!((answer.status, answer.bytes), (0, bytes + 1));
        self.read_ram(DATA, bytes as usize)
    }

    pub fn stop_queue(&mut self, queue: usize) -> u16 {
        self.frontend.get_vring_base(queue).unwrap() as u16
    }
}

pub fn wait_readable(fd: &impl AsRawFd, until: Instant) -> bool {
    // SAFETY: the descriptor lives as long as the reference.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let left = until.saturating_duration_since(Instant::now());
    let timeout = rustix::event::Timespec::try_from(left).unwrap();
    let mut polled = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    matches!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(1..) | Err(rustix::io::Errno::INTR))
}

pub fn ram_file() -> File {
    let fd = memfd_create("guest-ram", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(fd.as_fd(), RAM_BYTES).unwrap();
    fd.into()
}

/// Connects, and negotiates features; no queue is set up.
pub fn negotiate(socket: &Path, queues: usize, features: u64) -> Frontend {
    let mut frontend = Frontend::connect(socket, queues as u64).unwrap();
    frontend.set_owner().unwrap();
    let offered = frontend.get_features().unwrap();
    assert_eq!(features & !offered, 0, "the device lacks a feature that the test needs");
    let protocol = frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(protocol).unwrap();
    frontend.set_features(features).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert!(protocol.contains(VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::INFLIGHT_SHMFD));
    frontend
}

/// The pages that are marked in the log; it is empty afterwards.
pub fn take_log(log: &File) -> BTreeSet<u64> {
    let mut bits = vec![0; LOG_BYTES as usize];
    log.read_exact_at(&mut bits, 0).unwrap();
    log.write_all_at(&vec![0; LOG_BYTES as usize], 0).unwrap();
    (0..LOG_BYTES * 8).filter(|page| bits[(page / 8) as usize] >> (page % 8) & 1 == 1).collect()
}

/// Gives the server a log of the pages that it writes.
pub fn attach_log(guest: &Guest) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let log: File = memfd_create("log", flags).unwrap().into();
    log.set_len(LOG_BYTES).unwrap();
    fcntl_add_seals(&log, SealFlags::SHRINK).unwrap();
    let region = VhostUserDirtyLogRegion { mmap_size: LOG_BYTES, mmap_offset: 0, mmap_handle: log.as_raw_fd() };
    guest.frontend.set_log_base(0, Some(region)).unwrap();
    log
}

/// Waits until it holds, looking again each time the machine lets us; for states that nothing announces.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what} does not come true");
        std::thread::yield_now();
    }
}

/// xorshift64*: tests print their seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// A block as the tagger takes it.
pub fn block(bytes: &[u8]) -> &[u8; BLOCK_BYTES] {
    bytes.try_into().unwrap()
}
