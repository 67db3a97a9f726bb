//! While a machine boots, writes are one operation over a gap that memory holds: the gap stays as it is, whatever happens.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use common::*;
use hearth_disk::boot_set::BootSet;
use hearth_disk::engine::flaky::{Fault, Plan};
use hearth_disk::image::{Format, create_overlay};
use hearth_disk::ledger::Ledger;
use hearth_disk::server::DiskServer;
use hearth_disk::tag::Tagger;
use hearth_disk::warm::WarmMemory;
use rustix::fs::{FallocateFlags, fallocate};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const DISK_BYTES: u64 = 4 << 20;
/// At the end of the disk: what holds up the others.
const LAST_BLOCK: u64 = DISK_BYTES / 4096 - 1;

/// A disk that carries out so many operations at a time, and a boot set that holds its first 128 blocks.
struct Bench {
    place: Place,
    plan: Plan,
    set: Arc<BootSet>,
    server: DiskServer,
    guest: Guest,
}

impl Bench {
    fn new(depth: u32) -> Self {
        Self::over(Place::new(DISK_BYTES), Format::Raw, depth)
    }

    fn over(place: Place, format: Format, depth: u32) -> Self {
        let plan = Plan::new(1);
        let set = Arc::new(BootSet::open(place.folder.path(), 4 << 20, Tagger::new(b"a key like noise")).unwrap());
        set.begin();
        let (ram, ledger) = (ram_file(), Ledger::create(&place.folder.path().join("ledger"), 8192).unwrap());
        let tracking =
            Guest::tracking(&ram, &Arc::new(Mutex::new(ledger)), Some(WarmMemory::in_all_roles(set.clone())));
        let mut backing = flaky(place.open_as(format, &place.image), &plan);
        backing.depth = depth;
        let server = DiskServer::start_with(place.options(), backing, Some(tracking)).unwrap();
        let features = VERSION_1 | PROTOCOL_FEATURES | EVENT_INDEX | FLUSH_FEATURE;
        let mut guest = Guest::with_ram(&place.socket(), 1, features, ram);
        for part in 0..4 {
            guest.read_disk(part << 17, 128 << 10);
        }
        assert_eq!(set.plan().disks[&DISK].held, 128);
        Self { place, plan, set, server, guest }
    }

    fn write(&mut self, block: u64, fill: u8) {
        let address = DATA + (1 << 20) + block * 4096;
        self.guest.write_ram(address, &[fill; 4096]);
        self.guest.submit(0, WRITE, block * 4096, address, 4096);
    }

    /// The next operation is held, and this write is it.
    fn hold_up(&mut self, block: u64, fault: Fault) -> u64 {
        let number = self.plan.seen();
        self.plan.on(number, fault);
        self.write(block, 0xee);
        assert!(self.plan.wait_until_held(number, PATIENCE));
        number
    }

    /// Whatever was submitted has been taken, and begun if it can be.
    fn let_it_look(&mut self) {
        // The second answer comes from a round after the first.
        for _ in 0..2 {
            let head = self.guest.submit(0, READ, 0, DATA, 4096);
            assert_eq!(
                (self.guest.wait(0).head, self.guest.read_ram(DATA, 4096)),
                (head, self.place.disk_bytes(0, 4096))
            );
        }
    }

    /// These come together while the image is busy. Returns how many operations they are, and their answers in any order.
    fn together(&mut self, requests: u64, submit: impl FnOnce(&mut Self)) -> (u64, Vec<u8>) {
        let busy = self.hold_up(LAST_BLOCK, Fault::HoldEnd);
        let taken = self.taken();
        submit(self);
        wait_until("all are taken", || self.taken() == taken + requests);
        self.plan.release(busy);
        let mut answers: Vec<u8> = (0..=requests).map(|_| self.guest.wait(0).status).collect();
        answers.remove(0);
        (self.plan.seen() - busy - 1, answers)
    }

    fn taken(&self) -> u64 {
        let counters = self.server.counters();
        counters.writes + counters.discards
    }

    fn filled(&self) -> (u64, u64) {
        let counters = self.server.counters();
        (counters.gaps_filled, counters.gap_bytes / 4096)
    }

    fn disk(&self) -> Vec<u8> {
        self.place.disk_bytes(0, DISK_BYTES as usize)
    }
}

/// With these blocks changed.
fn with(disk: &[u8], changes: &[(u64, u8)]) -> Vec<u8> {
    let mut disk = disk.to_vec();
    for &(block, fill) in changes {
        disk[block as usize * 4096..][..4096].fill(fill);
    }
    disk
}

#[test]
fn writes_are_one_operation_over_what_memory_holds() {
    let mut bench = Bench::new(1);
    let before = bench.disk();
    let told = bench.together(4, |bench| {
        [(40, 4), (1, 1), (3, 2), (4, 3)].into_iter().for_each(|(at, fill)| bench.write(at, fill))
    });
    assert_eq!(told, (1, vec![OK; 4]));
    assert_eq!(bench.filled(), (2, 1 + 35));
    assert!(bench.disk() == with(&before, &[(1, 1), (3, 2), (4, 3), (40, 4), (LAST_BLOCK, 0xee)]));
    // What lies between is held as before, and what was written is held too.
    assert_eq!((bench.set.plan().disks[&DISK].held, bench.server.counters().tainted), (128, 0));
}

#[test]
fn what_is_not_held_is_not_written() {
    let mut bench = Bench::new(1);
    let two = |bench: &mut Bench, blocks: [u64; 2]| {
        let (operations, answers) =
            bench.together(2, |bench| blocks.into_iter().for_each(|block| bench.write(block, 7)));
        assert_eq!(answers, [OK; 2]);
        operations
    };
    assert_eq!(two(&mut bench, [10, 51]), 1, "160 KiB");
    assert_eq!(two(&mut bench, [10, 52]), 2, "a longer gap");
    let seen = bench.plan.seen();
    two(&mut bench, [120, 130]);
    wait_until("what was never read of it is read", || bench.set.plan().disks[&DISK].held == 130);
    assert_eq!((bench.plan.seen() - seen, two(&mut bench, [120, 130])), (1 + 2 + 1, 1));
    bench.guest.submit_ranges(0, DISCARD, &[(8 * 20, 8, 0)]);
    assert_eq!(bench.guest.wait(0).status, OK);
    assert_eq!(two(&mut bench, [10, 30]), 2, "a block was discarded, and is a hole");
    assert_eq!(two(&mut bench, [21, 30]), 1);
    // A write that waits, too: it is one of them. What only a part of a block is written to is not filled.
    let (operations, _) = bench.together(3, |bench| [40, 45, 60].into_iter().for_each(|block| bench.write(block, 8)));
    assert_eq!(operations, 1);
    let (operations, _) = bench.together(2, |bench| {
        bench.write(40, 9);
        bench.guest.submit(0, WRITE, 45 * 4096 + 512, DATA + (2 << 20), 1024);
    });
    assert_eq!(operations, 2);
    let (operations, _) = bench.together(3, |bench| {
        [70, 80].into_iter().for_each(|block| bench.write(block, 10));
        bench.guest.submit_ranges(0, WRITE_ZEROES, &[(8 * 75, 8, 0)]);
    });
    assert_eq!(operations, 3, "a change of it waits");
    bench.set.ready();
    let filled = bench.filled();
    assert_eq!((two(&mut bench, [90, 95]), bench.filled()), (2, filled), "the boot is over");
}

/// However long two writes wait beside it, a gap takes one place among those that are to be read.
#[test]
fn what_is_missing_is_wanted_once() {
    let mut bench = Bench::new(1);
    let busy = bench.hold_up(LAST_BLOCK, Fault::HoldEnd);
    [200, 202, 400, 402].into_iter().for_each(|block| bench.write(block, 7));
    for _ in 0..150 {
        bench.let_it_look();
    }
    bench.plan.release(busy);
    assert_eq!([0; 5].map(|_| bench.guest.wait(0).status), [OK; 5]);
    // What was written is no member; the two gaps are.
    wait_until("both are read", || bench.set.plan().disks[&DISK].held == 130);
}

#[test]
fn holes_stay_holes() {
    let place = Place::new(DISK_BYTES);
    let file = File::options().write(true).open(&place.image).unwrap();
    fallocate(file.as_fd(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 20 * 4096, 4096).unwrap();
    file.sync_all().unwrap();
    let mut bench = Bench::over(place, Format::Raw, 1);
    let (operations, _) = bench.together(2, |bench| [10, 30].into_iter().for_each(|block| bench.write(block, 7)));
    assert_eq!(operations, 2);
    let (operations, _) = bench.together(2, |bench| [21, 30].into_iter().for_each(|block| bench.write(block, 7)));
    assert_eq!((operations, bench.filled()), (1, (1, 8)));

    // What an image with tables has allocated is not looked up.
    let mut place = Place::new(DISK_BYTES);
    let top = place.folder.path().join("top.qcow2");
    create_overlay(&top, &place.image, "raw").unwrap();
    place.image = top;
    let mut bench = Bench::over(place, Format::Qcow2, 1);
    let (operations, _) = bench.together(2, |bench| [10, 30].into_iter().for_each(|block| bench.write(block, 7)));
    assert_eq!((operations, bench.filled()), (2, (0, 0)));
}

#[test]
fn a_change_of_what_is_being_written_waits() {
    for kind in [WRITE, DISCARD, WRITE_ZEROES] {
        let mut bench = Bench::new(2);
        let before = bench.disk();
        let first = bench.hold_up(LAST_BLOCK, Fault::HoldEnd);
        let second = bench.hold_up(LAST_BLOCK - 2, Fault::HoldEnd);
        [(10, 1), (30, 2)].into_iter().for_each(|(block, fill)| bench.write(block, fill));
        bench.let_it_look();
        bench.plan.on(second + 1, Fault::HoldStart);
        bench.plan.release(first);
        assert_eq!(bench.guest.wait(0).status, OK);
        assert!(bench.plan.wait_until_held(second + 1, PATIENCE));
        bench.plan.release(second);
        assert_eq!((bench.guest.wait(0).status, bench.filled()), (OK, (1, 19)));
        // The image could do one more at a time. What is between can be read, and one who changes it waits.
        assert!(bench.guest.read_disk(15 * 4096, 4096) == before[15 * 4096..16 * 4096]);
        match kind {
            WRITE => bench.write(20, 3),
            _ => drop(bench.guest.submit_ranges(0, kind, &[(8 * 20, 8, 0)])),
        }
        bench.let_it_look();
        assert_eq!(bench.plan.seen(), second + 2);
        // Nobody who reads elsewhere waits for that.
        assert!(bench.guest.read_disk(500 * 4096, 4096) == before[500 * 4096..501 * 4096]);
        bench.plan.release(second + 1);
        assert_eq!([0; 3].map(|_| bench.guest.wait(0).status), [OK; 3]);
        assert_eq!(bench.plan.seen(), second + 4);
        let last = if kind == WRITE { 3 } else { 0 };
        let changes = [(LAST_BLOCK, 0xee), (LAST_BLOCK - 2, 0xee), (10, 1), (30, 2), (20, last)];
        assert!(bench.disk() == with(&before, &changes), "request type {kind}");
    }
}

/// The write of a gap is busy, one more of what lies there waits for that, and nobody else does.
#[test]
fn a_change_that_waits_for_a_gap_is_waited_for_by_nobody() {
    let mut bench = Bench::new(2);
    let before = bench.disk();
    let first = bench.hold_up(LAST_BLOCK, Fault::HoldEnd);
    let second = bench.hold_up(LAST_BLOCK - 2, Fault::HoldEnd);
    [(10, 1), (30, 2)].into_iter().for_each(|(block, fill)| bench.write(block, fill));
    bench.let_it_look();
    let joined = second + 1;
    bench.plan.on(joined, Fault::HoldEnd);
    [first, second].into_iter().for_each(|number| bench.plan.release(number));
    assert!(bench.plan.wait_until_held(joined, PATIENCE));
    assert_eq!(([0; 2].map(|_| bench.guest.wait(0).status), bench.filled()), ([OK; 2], (1, 19)));
    bench.write(20, 3);
    bench.let_it_look();
    let elsewhere = 500 * 4096;
    assert!(bench.guest.read_disk(elsewhere, 4096) == before[elsewhere as usize..][..4096]);
    bench.write(21, 4);
    bench.write(510, 5);
    assert_eq!(bench.guest.wait(0).status, OK);
    assert_eq!(bench.plan.seen(), joined + 3, "neither of the two is begun");
    bench.plan.release(joined);
    assert_eq!([0; 4].map(|_| bench.guest.wait(0).status), [OK; 4]);
    let changes = [(LAST_BLOCK, 0xee), (LAST_BLOCK - 2, 0xee), (10, 1), (30, 2), (20, 3), (21, 4), (510, 5)];
    assert!(bench.disk() == with(&before, &changes));
}

#[test]
fn what_fails_together_is_carried_out_one_by_one_and_what_is_torn_is_as_it_was() {
    for (alone_fails, fault) in [
        (false, Fault::Fail(libc::EIO)),
        (false, Fault::Tear { bytes: 8 << 12, errno: libc::EIO }),
        (true, Fault::Tear { bytes: 8 << 12, errno: libc::EIO }),
    ] {
        let mut bench = Bench::new(1);
        let (before, busy) = (bench.disk(), bench.plan.seen());
        bench.plan.on(busy + 1, fault);
        if alone_fails {
            [busy + 2, busy + 3].into_iter().for_each(|number| bench.plan.on(number, Fault::Fail(libc::EIO)));
        }
        let told = bench
            .together(2, |bench| [(10, 1), (30, 2)].into_iter().for_each(|(block, fill)| bench.write(block, fill)));
        let status = if alone_fails { IO_ERROR } else { OK };
        assert_eq!(told, (3, vec![status; 2]));
        let written = if alone_fails { &[(10, 1)][..] } else { &[(10, 1), (30, 2)] };
        assert!(bench.disk() == with(&with(&before, written), &[(LAST_BLOCK, 0xee)]), "{fault:?}");
    }
}

#[test]
fn what_is_wanted_twice_leaves_room_for_others() {
    let mut bench = Bench::new(1);
    let busy = bench.hold_up(LAST_BLOCK, Fault::HoldEnd);
    [120, 130].into_iter().for_each(|block| bench.write(block, 1));
    for _ in 0..200 {
        bench.let_it_look();
    }
    [200, 210].into_iter().for_each(|block| bench.write(block, 2));
    bench.let_it_look();
    bench.plan.release(busy);
    assert_eq!([0; 5].map(|_| bench.guest.wait(0).status), [OK; 5]);
    wait_until("what is missing in both gaps is read", || bench.set.plan().disks[&DISK].held == 128 + 2 + 9);
}

/// A copy that is damaged in memory never reaches the disk.
#[test]
fn what_is_damaged_in_memory_is_not_written() {
    let mut bench = Bench::new(1);
    let before = bench.disk();
    let pages = File::options().write(true).open(bench.place.folder.path().join("boot-set-pages")).unwrap();
    for page in 0..256 {
        pages.write_all_at(&[0xff; 16], page * 4096 + 64).unwrap();
    }
    let told =
        bench.together(2, |bench| [(10, 1), (30, 2)].into_iter().for_each(|(block, fill)| bench.write(block, fill)));
    assert_eq!((told, bench.filled()), ((2, vec![OK; 2]), (0, 0)));
    assert!(bench.disk() == with(&before, &[(10, 1), (30, 2), (LAST_BLOCK, 0xee)]));
}
