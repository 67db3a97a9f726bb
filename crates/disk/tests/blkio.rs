//! A client that others wrote (the driver behind libblkio) against every engine: random requests, compared with a model.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::time::Duration;

use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use common::*;
use hearth_disk::engine::Engine;
use hearth_disk::engine::flaky::{Fault, FlakyEngine, Plan};
use hearth_disk::image::{Format, Image};
use hearth_disk::server::{Backing, DiskServer};

const DISK_BYTES: u64 = 16 << 20;
/// Of the disk; the rest is read only.
const MODEL_BYTES: usize = 4 << 20;
const QUEUES: usize = 3;
const BUFFER_BYTES: usize = 1 << 20;

struct Client {
    queues: Vec<Blkioq>,
    /// One buffer a queue.
    buffers: *mut u8,
    _blkio: Blkio,
}

impl Client {
    fn connect(place: &Place) -> Self {
        let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
        blkio.set_str("path", place.socket().to_str().unwrap()).unwrap();
        blkio.connect().unwrap();
        assert_eq!(blkio.get_u64("capacity").unwrap(), DISK_BYTES);
        blkio.set_i32("num-queues", QUEUES as i32).unwrap();
        blkio.set_i32("queue-size", i32::from(QUEUE_SIZE)).unwrap();
        let queues = blkio.start().unwrap().queues;
        let region = blkio.alloc_mem_region(QUEUES * BUFFER_BYTES).unwrap();
        blkio.map_mem_region(&region).unwrap();
        Self { queues, buffers: region.addr as *mut u8, _blkio: blkio }
    }

    fn pointer(&self, queue: usize) -> *mut u8 {
        assert!(queue < QUEUES);
        // SAFETY: the region has a buffer for each queue.
        unsafe { self.buffers.add(queue * BUFFER_BYTES) }
    }

    fn buffer(&mut self, queue: usize, bytes: usize) -> &mut [u8] {
        assert!(bytes <= BUFFER_BYTES);
        // SAFETY: the buffer is part of the mapped region, and no request uses it while the test looks at it.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(queue), bytes) }
    }

    fn finish(&mut self, queue: usize) -> i32 {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }];
        let mut patience = PATIENCE;
        assert_eq!(self.queues[queue].do_io(&mut completions, 1, Some(&mut patience), None).unwrap(), 1);
        // SAFETY: `do_io` says that it has filled one.
        unsafe { completions[0].assume_init_ref().ret }
    }

    fn read(&mut self, queue: usize, offset: u64, bytes: usize) -> Vec<u8> {
        let pointer = self.pointer(queue);
        self.queues[queue].read(offset, pointer, bytes, 0, ReqFlags::empty());
        assert_eq!(self.finish(queue), 0);
        self.buffer(queue, bytes).to_vec()
    }
}

fn check(image: Image, place: &Place, wrap: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine>) {
    let backing = Backing::with(image, |_, engine| wrap(engine)).unwrap();
    let server = DiskServer::start_with(place.options(), backing, None).unwrap();
    let mut client = Client::connect(place);
    let mut random = Random(7);
    let mut model = Vec::new();
    while model.len() < MODEL_BYTES {
        let read = client.read(0, model.len() as u64, BUFFER_BYTES);
        model.extend_from_slice(&read);
    }
    for turn in 0..1500 {
        let queue = random.below(QUEUES as u64) as usize;
        let offset = random.below((MODEL_BYTES - 400 * 512) as u64 / 512) as usize * 512;
        let bytes = if random.below(8) == 0 { 400 * 512 } else { 512 * (1 + random.below(64) as usize) };
        match random.below(10) {
            0..=3 => {
                let fill = random.next().to_le_bytes().repeat(bytes / 8);
                client.buffer(queue, bytes).copy_from_slice(&fill);
                let pointer = client.pointer(queue);
                client.queues[queue].write(offset as u64, pointer, bytes, 0, ReqFlags::empty());
                assert_eq!(client.finish(queue), 0, "turn {turn}");
                model[offset..offset + bytes].copy_from_slice(&fill);
            }
            4..=7 => assert!(client.read(queue, offset as u64, bytes) == model[offset..offset + bytes], "turn {turn}"),
            8 => {
                let flags = if random.below(2) == 0 { ReqFlags::empty() } else { ReqFlags::NO_UNMAP };
                client.queues[queue].write_zeroes(offset as u64, bytes as u64, 0, flags);
                assert_eq!(client.finish(queue), 0, "turn {turn}");
                model[offset..offset + bytes].fill(0);
            }
            _ if random.below(2) == 0 => {
                client.queues[queue].flush(0, ReqFlags::empty());
                assert_eq!(client.finish(queue), 0, "turn {turn}");
            }
            _ => {
                client.queues[queue].discard(offset as u64, bytes as u64, 0, ReqFlags::empty());
                assert_eq!(client.finish(queue), 0, "turn {turn}");
                // The image may return any bytes for a discarded range.
                let read = client.read(queue, offset as u64, bytes);
                model[offset..offset + bytes].copy_from_slice(&read);
            }
        }
    }
    let pointer = client.pointer(0);
    client.queues[0].read(DISK_BYTES, pointer, 512, 0, ReqFlags::empty());
    assert_ne!(client.finish(0), 0, "past the end");
    let counters = server.counters();
    assert_eq!((counters.io_errors, counters.bad_requests), (0, 1));
}

#[test]
fn raw_image_by_its_best_engine() {
    let place = Place::new(DISK_BYTES);
    check(place.open(), &place, |engine| engine);
}

#[test]
fn raw_image_by_a_flaky_engine() {
    let place = Place::new(DISK_BYTES);
    let plan = Plan::new(3);
    plan.shuffle();
    plan.sometimes(5, Fault::Overtaken(2));
    check(place.open(), &place, |engine| Box::new(FlakyEngine::new(engine, plan).unwrap()));
    let plan = Plan::new(4);
    plan.sometimes(9, Fault::Delay(Duration::from_micros(200)));
    check(place.open(), &place, |engine| Box::new(FlakyEngine::new(engine, plan).unwrap()));
}

#[test]
fn raw_image_on_tmpfs() {
    let mut place = Place::new(DISK_BYTES);
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let image: PathBuf = folder.path().join("disk.raw");
    std::fs::copy(&place.image, &image).unwrap();
    place.image = image;
    check(place.open(), &place, |engine| engine);
}

#[test]
fn qcow2_image() {
    let place = Place::new(DISK_BYTES);
    let image = place.folder.path().join("disk.qcow2");
    let made = std::process::Command::new("qemu-img")
        .args(["convert", "-O", "qcow2"])
        .args([&place.image, &image])
        .status()
        .expect("qemu-img is installed (package qemu-utils)");
    assert!(made.success());
    check(place.open_as(Format::Qcow2, &image), &place, |engine| engine);
}
