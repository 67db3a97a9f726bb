//! The boot set behind a disk server: its answers are what the disk holds, after any requests in any order, and it never
//! exceeds its limit.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use hearth_disk::block::BLOCK_BYTES;
use hearth_disk::boot_set::{BootSet, DiskTally};
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::ledger::Ledger;
use hearth_disk::server::{DiskServer, Tracking};
use hearth_disk::tag::Tagger;
use hearth_disk::warm::{AfterServing, WarmMemory, WarmSource};

const DISK_BYTES: u64 = 2 << 20;
const BLOCKS: u64 = DISK_BYTES / 4096;
/// Room for every block of the disk.
const AMPLE: u64 = 4 << 20;

fn open(folder: &Path, limit_bytes: u64) -> Arc<BootSet> {
    Arc::new(BootSet::open(folder, limit_bytes, Tagger::new(b"a key like noise")).unwrap())
}

/// A disk, its boot set, and a guest.
struct Bench {
    place: Place,
    memory: tempfile::TempDir,
    set: Arc<BootSet>,
    server: DiskServer,
    guest: Guest,
}

impl Bench {
    fn new(plan: &Plan, queues: usize, limit_bytes: u64) -> Self {
        Self::with_depth(plan, queues, limit_bytes, 128)
    }

    /// With so many operations at a time.
    fn with_depth(plan: &Plan, queues: usize, limit_bytes: u64, depth: u32) -> Self {
        let place = Place::new(DISK_BYTES);
        // Only in memory does a file take just the pages that were written.
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let set = open(memory.path(), limit_bytes);
        let ram = ram_file();
        let ledger = Ledger::create(&place.folder.path().join("ledger"), 8192).unwrap();
        let tracking: Tracking =
            Guest::tracking(&ram, &Arc::new(Mutex::new(ledger)), Some(WarmMemory::in_both_roles(set.clone())));
        let mut backing = flaky(place.open(), plan);
        backing.depth = depth;
        let server = DiskServer::start_with(place.options(), backing, Some(tracking)).unwrap();
        let guest =
            Guest::with_ram(&place.socket(), queues, VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | FLUSH_FEATURE, ram);
        set.begin();
        Self { place, memory, set, server, guest }
    }

    /// Reads and compares with the image, which nobody is writing.
    #[track_caller]
    fn read(&mut self, offset: u64, bytes: u32) {
        assert!(self.guest.read_disk(offset, bytes) == self.place.disk_bytes(offset, bytes as usize), "at {offset}");
    }

    fn write(&mut self, offset: u64, fill: u8, bytes: u32) {
        self.guest.write_ram(DATA, &vec![fill; bytes as usize]);
        assert_eq!(self.guest.run(0, WRITE, offset, DATA, bytes).status, 0);
    }

    /// Bytes of a read that the image answers.
    fn image_bytes_of(&mut self, offset: u64, bytes: u32) -> u64 {
        let before = self.server.counters().bytes_read_image;
        self.read(offset, bytes);
        self.server.counters().bytes_read_image - before
    }

    fn tally(&self) -> DiskTally {
        self.set.plan().disks.get(&DISK).copied().unwrap_or_default()
    }

    /// Every block that is held is as it is on the disk. Returns how many are.
    #[track_caller]
    fn check(&self) -> usize {
        all_true(&self.set, &self.place)
    }
}

/// Compares what is held with the disk. Returns how much it is.
#[track_caller]
fn all_true(set: &BootSet, place: &Place) -> usize {
    let disk = place.disk_bytes(0, DISK_BYTES as usize);
    let found = (0..BLOCKS).filter_map(|block| Some((block, held(set, block)?)));
    let is_true = |(block, bytes): &(u64, Vec<u8>)| bytes[..] == disk[*block as usize * BLOCK_BYTES..][..BLOCK_BYTES];
    found.inspect(|found| assert!(is_true(found), "block {} is not what the disk holds", found.0)).count()
}

fn held(set: &BootSet, block: u64) -> Option<Vec<u8>> {
    let mut bytes = None;
    set.serve(DISK, block, AfterServing::Keep, &mut |found| bytes = Some(found.to_vec()))?;
    bytes
}

#[test]
fn next_boot_finds_in_memory_what_one_read() {
    let mut bench = Bench::new(&Plan::new(1), 1, AMPLE);
    bench.read(0, 8 * 4096);
    bench.read(20 * 4096 + 1024, 1024);
    bench.read(40 * 4096 + 512, 4096);
    assert_eq!((bench.tally().boot.misses, bench.tally().boot.hits), (11, 0));
    assert!(bench.set.ready() && !bench.set.ready(), "a boot ends once");
    bench.read(100 * 4096, 4096);
    assert_eq!(held(&bench.set, 100), None, "read after the boot");
    bench.set.begin();
    for (offset, bytes) in [(0, 8 * 4096), (20 * 4096, 4096), (20 * 4096 + 1024, 1024), (41 * 4096, 512)] {
        assert_eq!(bench.image_bytes_of(offset, bytes), 0, "{bytes} bytes at {offset}");
    }
    assert_eq!(bench.image_bytes_of(200 * 4096, 4096), 4096);
    let tally = bench.tally();
    assert_eq!((tally.boot.hits, tally.boot.misses, tally.blocks, tally.held), (11, 1, 12, 12));
    assert_eq!(bench.set.plan().missed, [(DISK, 200..201)]);
}

#[test]
fn writes_are_followed_whole_and_in_part() {
    let mut bench = Bench::new(&Plan::new(1), 1, AMPLE);
    bench.read(0, 16 * 4096);
    bench.set.ready();
    bench.write(4096, 0xaa, 8192);
    bench.write(4 * 4096 + 512, 0xbb, 1024);
    bench.write(6 * 4096 + 2048, 0xcc, 4096);
    bench.write(30 * 4096, 0xdd, 128 << 10);
    assert_eq!(bench.check(), 16, "all are held still, and nothing else is");
    bench.guest.submit_ranges(0, DISCARD, &[(8 * 8, 8, 0)]);
    assert_eq!(bench.guest.wait(0).status, 0);
    bench.guest.submit_ranges(0, WRITE_ZEROES, &[(9 * 8, 8, 0)]);
    assert_eq!(bench.guest.wait(0).status, 0);
    assert_eq!(bench.check(), 14);
    bench.write(8 * 4096, 0xee, 512);
    assert_eq!(bench.check(), 14, "a part of a block that is not known");
    bench.write(8 * 4096, 0xee, 4096);
    assert_eq!(bench.check(), 15, "a whole block is known again");
}

#[test]
fn each_part_of_a_disk_has_its_share() {
    let mut bench = Bench::new(&Plan::new(1), 1, AMPLE);
    [0, 21, 30].into_iter().for_each(|block| bench.read(block * 4096, 4096));
    bench.set.ready();
    bench.set.begin();
    assert_eq!([20, 21, 30].map(|block| bench.image_bytes_of(block * 4096, 4096)), [4096, 0, 0]);
    let shares = bench.set.shares(DISK, &[0..10, 20..21, 25..31]);
    let told: Vec<_> = shares.iter().map(|share| (share.hits, share.misses, share.held)).collect();
    assert_eq!(told, [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 0, 1)], "the last one is for all blocks beside the parts");
}

#[test]
fn requests_that_meet_a_write_void_the_block() {
    let plan = Plan::new(1);
    let mut bench = Bench::new(&plan, 2, AMPLE);
    bench.read(0, 8 * 4096);
    for (other, block) in [(WRITE, 1), (READ, 2)] {
        let operation = plan.seen();
        plan.on(operation, Fault::HoldEnd);
        bench.guest.write_ram(DATA, &[7; 4096]);
        bench.guest.submit(0, WRITE, block * 4096, DATA, 4096);
        assert!(plan.wait_until_held(operation, PATIENCE));
        assert_eq!(held(&bench.set, block), None, "a change is on its way");
        bench.guest.write_ram(DATA + 8192, &[9; 4096]);
        assert_eq!(bench.guest.run(1, other, block * 4096, DATA + 8192, 4096).status, 0);
        plan.release(operation);
        assert_eq!(bench.guest.wait(0).status, 0);
        assert_eq!(held(&bench.set, block), None, "which of the two came last is not known");
    }
    bench.read(4096, 8192);
    assert_eq!(bench.check(), 8, "the next read tells");
}

/// A journal that is replayed is written to the disk while the next volume is read: who reads does not wait for that.
#[test]
fn reads_are_answered_while_writes_are_stuck() {
    const WRITES: u64 = 16;
    let plan = Plan::new(1);
    let mut bench = Bench::new(&plan, 2, AMPLE);
    bench.read(0, 32 * 4096);
    bench.set.ready();
    bench.set.begin();
    // On both queues, none beside another, and behind them a flush.
    let first = plan.seen();
    (first..=first + WRITES).for_each(|operation| plan.on(operation, Fault::HoldStart));
    for number in 0..WRITES {
        let (block, address) = (100 + 2 * number, DATA + (64 + number) * 4096);
        bench.guest.write_ram(address, &[number as u8; 4096]);
        bench.guest.submit(number as usize % 2, WRITE, block * 4096, address, 4096);
        assert!(plan.wait_until_held(first + number, PATIENCE));
    }
    bench.guest.submit_flush(1);
    assert!(plan.wait_until_held(first + WRITES, PATIENCE));
    for block in 0..32 {
        assert_eq!(bench.image_bytes_of(block * 4096, 4096), 0, "block {block} is held");
    }
    assert_eq!(bench.image_bytes_of(200 * 4096, 8192), 8192, "nor does a read of the image wait");
    let told = |bench: &Bench| {
        let answers = bench.set.plan().answers;
        (answers.reads, answers.in_line, answers.beside_writes)
    };
    assert_eq!((plan.held().len() as u64, told(&bench)), (WRITES + 1, (32, 32, 32)));
    plan.release_all();
    for queue in (0..WRITES as usize + 1).map(|number| usize::min(number, WRITES as usize - 1) % 2) {
        assert_eq!(bench.guest.wait(queue).status, 0);
    }
    (0..WRITES).for_each(|number| {
        assert_eq!(bench.place.disk_bytes((100 + 2 * number) * 4096, 4096), [number as u8; 4096]);
    });
    bench.read(0, 4096);
    assert_eq!(told(&bench), (33, 33, 32), "nothing is written any more");
}

#[test]
fn read_that_meets_a_shrink_is_not_held() {
    let plan = Plan::new(1);
    let mut bench = Bench::new(&plan, 1, AMPLE);
    let last = DISK_BYTES - 4096;
    plan.on(0, Fault::HoldEnd);
    bench.guest.submit(0, READ, last, DATA, 4096);
    assert!(plan.wait_until_held(0, PATIENCE));
    let file = File::options().write(true).open(&bench.place.image).unwrap();
    for bytes in [DISK_BYTES / 2, DISK_BYTES] {
        file.set_len(bytes).unwrap();
        bench.server.resize().unwrap();
    }
    plan.release(0);
    bench.guest.wait(0);
    bench.read(last, 4096);
    bench.check();
}

#[test]
fn dead_guests_write_updates_the_boot_set() {
    let plan = Plan::new(1);
    let mut bench = Bench::new(&plan, 1, AMPLE);
    bench.read(0, 4 * 4096);
    plan.on(1, Fault::HoldStart);
    bench.guest.write_ram(DATA, &[5; 4096]);
    bench.guest.submit(0, WRITE, 4096, DATA, 4096);
    assert!(plan.wait_until_held(1, PATIENCE));
    let Bench { place, set, server, guest, .. } = bench;
    drop(guest);
    wait_until("the hang-up is seen", || !server.counters().connected);
    plan.release_all();
    server.drain(PATIENCE).unwrap();
    assert_eq!(held(&set, 1).unwrap(), place.disk_bytes(4096, 4096));
    assert_eq!(held(&set, 1).unwrap(), [5; 4096]);
}

#[test]
fn guest_that_reads_everything_stays_within_limit() {
    let limit = 64 * 4096;
    let mut bench = Bench::new(&Plan::new(1), 1, limit);
    bench.read(0, 32 * 4096);
    bench.set.ready();
    bench.set.begin();
    bench.read(32 * 4096, 16 * 4096);
    bench.set.ready();
    bench.set.begin();
    // Blocks 0 to 31 were not read by the last boot, so they go first; 32 to 47 stay, whatever this boot reads.
    (64..BLOCKS).step_by(8).for_each(|block| bench.read(block * 4096, 8 * 4096));
    assert!((32..48).all(|block| held(&bench.set, block).is_some()));
    assert!((0..32).all(|block| held(&bench.set, block).is_none()), "the oldest make room");
    let (held, tally) = (bench.check() as u64, bench.tally());
    assert!((48..=63).contains(&held), "{held} blocks are held");
    assert!(tally.no_room > 0 && tally.no_room + held - 16 == BLOCKS - 64, "{tally:?}");
    assert!(bench.set.resident_bytes() <= limit, "{} bytes are held", bench.set.resident_bytes());
}

#[test]
fn held_blocks_survive_the_keeper_unless_damaged() {
    let mut bench = Bench::new(&Plan::new(1), 1, AMPLE);
    bench.read(0, 16 * 4096);
    bench.write(3 * 4096, 0x33, 4096);
    bench.set.ready();
    let Bench { place, memory, set, server, guest } = bench;
    drop(guest);
    server.stop();
    drop(set);
    let reopen = || {
        let set = open(memory.path(), AMPLE);
        (all_true(&set, &place), set.plan().damaged)
    };
    assert_eq!(reopen(), (16, 0));
    let edit = |file: &str, at: u64| {
        let file = File::options().write(true).open(memory.path().join(file)).unwrap();
        file.write_all_at(&[0xff; 4], at).unwrap();
    };
    edit("boot-set-pages", 5 * 4096 + 17);
    assert_eq!(reopen(), (15, 1));
    assert_eq!(reopen(), (15, 0), "what was damaged is gone");
    edit("boot-set-ledger", 0);
    assert_eq!(reopen(), (0, 0));
}

#[test]
fn clear_frees_blocks_and_memory() {
    let mut bench = Bench::new(&Plan::new(1), 1, AMPLE);
    let empty = bench.set.resident_bytes();
    bench.read(0, 64 * 4096);
    assert!(bench.set.resident_bytes() >= empty + 64 * 4096);
    bench.set.clear().unwrap();
    assert_eq!(bench.check(), 0);
    assert!(bench.set.resident_bytes() <= empty + 2 * 4096, "the ledger keeps its pages");
    bench.read(0, 64 * 4096);
    assert_eq!(bench.check(), 64, "and it fills again");
}

/// One random request. Few blocks, so that requests meet; of one block each they may all the same be together.
fn submit_random(guest: &mut Guest, random: &mut Random, queue: usize, single: bool) {
    let offset = random.below(40) * if random.below(3) == 0 { 512 } else { 4096 };
    let bytes = match random.below(4) {
        0 => 512 * (1 + random.below(40)) as u32,
        1 => 256 * 1024,
        _ => 4096 * (1 + random.below(4)) as u32,
    };
    let (offset, bytes) = if single { (random.below(128) * 4096, 4096) } else { (offset, bytes) };
    let address = DATA + random.below(64) * 4096;
    let kind = random.below(12);
    // A part of the disk is written to and hardly ever read.
    let is_apart = kind <= 5 && random.below(2) == 0 || kind == 6 && random.below(4) == 0;
    let offset = if is_apart { (256 + random.below(180)) * 4096 + offset % 4096 } else { offset };
    match kind {
        0 => drop(guest.submit_ranges(queue, DISCARD, &[(offset / 512, bytes / 512, 0)])),
        1 => drop(guest.submit_ranges(queue, WRITE_ZEROES, &[(offset / 512, bytes / 512, 0)])),
        2..=5 => {
            let word = if random.below(4) == 0 { 0 } else { random.next() };
            guest.write_ram(address, &word.to_le_bytes().repeat(bytes as usize / 8));
            guest.submit(queue, WRITE, offset, address, bytes);
        }
        _ => drop(guest.submit(queue, READ, offset, address, bytes)),
    }
}

/// Boots begin and end at any time, requests meet, are late, overtake each other and fail: at every pause all that is held
/// is what the disk holds, and so is all that is read.
#[test]
fn held_blocks_are_true_after_any_requests() {
    let (mut checked, mut tainted, mut warm) = (0, 0, 0);
    for seed in 1..=12 {
        let plan = Plan::new(seed);
        plan.shuffle();
        match seed % 3 {
            0 => plan.sometimes(7, Fault::Fail(libc::EIO)),
            1 => plan.sometimes(3, Fault::Overtaken(3)),
            _ => plan.sometimes(4, Fault::Delay(Duration::from_micros(300))),
        }
        // The image falls behind, so that requests wait side by side.
        let busy = seed > 6;
        let limit = if busy || seed % 2 == 0 { AMPLE } else { 40 * 4096 };
        let (depth, most) = if busy { (1 + seed as u32 % 2, 18) } else { (128, 6) };
        let mut bench = Bench::with_depth(&plan, 3, limit, depth);
        let mut random = Random(seed * 0x9e37_79b9);
        for round in 0..120 {
            let mut submitted = [0; 3];
            for _ in 0..1 + random.below(most) {
                let queue = random.below(3) as usize;
                submit_random(&mut bench.guest, &mut random, queue, busy);
                submitted[queue] += 1;
                match random.below(16) {
                    0 => bench.set.begin(),
                    1 => drop(bench.set.ready()),
                    _ => {}
                }
            }
            for (queue, count) in submitted.iter().enumerate() {
                for _ in 0..*count {
                    let status = bench.guest.wait(queue).status;
                    assert!(status == 0 || seed % 3 == 0, "seed {seed} round {round}: status {status}");
                }
            }
            checked += bench.check();
            let answer = bench.guest.run(0, READ, 0, DATA, 64 * 4096);
            let read = bench.guest.read_ram(DATA, 64 * 4096);
            assert!(answer.status != 0 || read == bench.place.disk_bytes(0, 64 * 4096), "seed {seed} round {round}");
            assert!(bench.set.resident_bytes() <= limit);
        }
        tainted += bench.server.counters().tainted;
        warm += bench.server.counters().bytes_read_warm;
    }
    assert!(checked > 5_000, "the rule was put to the test {checked} times only");
    assert!(tainted > 200, "requests met {tainted} times only");
    assert!(warm > 1 << 20, "{warm} bytes only were answered from memory");
}
