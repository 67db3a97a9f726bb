//! A process that serves an image is killed at each system call by which its engine touches the image, and the image is looked
//! at afterwards. (`crash` has the states that a power cut leaves.)
//!
//! ```text
//! child: open -> steps of SCRIPT, each operation that ends is reported -> close        killed at one call of one stage
//! parent: qemu-img check -> opened as the next keeper does: what was reported is there | as after a reboot: what was flushed is
//! ```
//! strace counts the calls of each thread by itself, and workers take operations as they come. So only one stage of a child's
//! life is armed: then its files have other paths, which are the ones that strace looks for.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;

use strace_faults::{Injection, Strace};

use super::crash::check_with_qemu;
use super::*;
use crate::engine::file::FileEngine;
use crate::image::Contents;

/// Calls on an image's file, or on the log of its tables.
const FILE_CALLS: &[&str] =
    &["pread64", "preadv", "pwrite64", "pwritev", "fallocate", "fdatasync", "fsync", "ftruncate", "sync_file_range"];
/// All that a ring does for its engine goes through this one, and no other ring is made.
const RING_CALL: &str = "io_uring_enter";
/// The child's working folder, and its other name while a stage is armed.
const QUIET: &str = "quiet";
const ARMED: &str = "armed";
const LOG: &str = "tables";

const SECTOR: usize = 512;
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Write,
    Flush,
    Discard,
    Zero { unmap: bool },
}

/// What, where, and how many bytes.
type Step = &'static [(What, usize, usize)];

/// Operations of one step are in flight together, and do not overlap. At first the disk has data in `FULL`; an L2 table of the
/// qcow2 image is for 2 MiB.
const SCRIPT: [Step; 12] = [
    &[(What::Write, 0, 8 * KIB)],
    &[(What::Write, 3 * SECTOR, SECTOR)],
    &[(What::Write, 40 * KIB + SECTOR, 2 * SECTOR)],
    &[(What::Write, 3 * MIB, 16 * KIB)],
    &[(What::Flush, 0, 0)],
    &[(What::Write, 64 * KIB, 16 * KIB)],
    &[(What::Write, 5 * MIB, 4 * KIB), (What::Write, 96 * KIB + SECTOR, SECTOR), (What::Write, MIB, 128 * KIB)],
    &[(What::Discard, 72 * KIB, 12 * KIB)],
    &[(What::Zero { unmap: true }, 108 * KIB + SECTOR, 9 * KIB)],
    &[(What::Flush, 0, 0)],
    &[(What::Zero { unmap: false }, 3 * MIB + 4 * KIB, 8 * KIB)],
    &[(What::Write, 7 * MIB - SECTOR, 4 * KIB)],
];
const FULL: std::ops::Range<usize> = 64 * KIB..128 * KIB;
/// Stages of a child's life: it opens the image, takes the steps one by one, and closes the image.
const OPEN: usize = 0;
const CLOSE: usize = SCRIPT.len() + 1;

/// What an operation writes.
fn data(step: usize, number: usize, bytes: usize) -> Vec<u8> {
    let mut noise = Noise((step * 16 + number) as u64);
    (0..bytes).map(|_| noise.next() as u8).collect()
}

fn apply(disk: &mut [u8], step: usize, number: usize) {
    let (what, offset, bytes) = SCRIPT[step - 1][number];
    let range = &mut disk[offset..offset + bytes];
    match what {
        What::Write => range.copy_from_slice(&data(step, number, bytes)),
        What::Discard | What::Zero { .. } => range.fill(0),
        What::Flush => {}
    }
}

/// The disk at first, and after each step.
fn disks() -> Vec<Vec<u8>> {
    let mut disk = vec![0; DISK_BYTES];
    disk[FULL].copy_from_slice(&data(0, 0, FULL.len()));
    let mut disks = vec![disk];
    for (step, operations) in (1..).zip(SCRIPT) {
        let mut disk = disks[step - 1].clone();
        (0..operations.len()).for_each(|number| apply(&mut disk, step, number));
        disks.push(disk);
    }
    disks
}

/// An image and the engine that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    RawByRing,
    RawByWorkers,
    Qcow2,
}

impl Served {
    const ALL: [Self; 3] = [Self::RawByRing, Self::RawByWorkers, Self::Qcow2];

    fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|served| format!("{served:?}") == name).unwrap()
    }

    fn format(self) -> Format {
        if self == Self::Qcow2 { Format::Qcow2 } else { Format::Raw }
    }

    fn make(self, path: &Path, disk: &[u8]) {
        let file = File::create(path).unwrap();
        file.set_len(DISK_BYTES as u64).unwrap();
        file.write_all_at(&disk[FULL], FULL.start as u64).unwrap();
        if self == Self::Qcow2 {
            let raw = path.with_extension("raw");
            fs::rename(path, &raw).unwrap();
            let names = [as_str(&raw), as_str(path)];
            qemu_img(&[&["convert", "-q", "-O", "qcow2", "-o", "cluster_size=4k"], &names[..]].concat()).unwrap();
        }
    }

    fn open(self, path: &Path, log: &Path, unwritten: Unwritten) -> Image {
        // The kernel lets go of a dead process's ring a moment after its end.
        let lock_patience = Duration::from_secs(60);
        let mut image = Image::open(&ImageOptions { lock_patience, ..options(path, self.format()) }).unwrap();
        image.note_changes_in(log, unwritten);
        if let Contents::Raw(raw) = &mut image.contents {
            // As on a disk with blocks of this size: a write of less is one of a whole block.
            Arc::get_mut(&mut raw.target).unwrap().alignment = BLOCK_BYTES as u64;
        }
        image
    }

    fn engine(self, image: &Image, pool: Arc<BufferPool>) -> Box<dyn Engine> {
        match &image.contents {
            Contents::Raw(raw) if self == Self::RawByWorkers => {
                image.guard(FileEngine::start(raw.target.clone(), pool).unwrap())
            }
            _ => image.engine(pool, 8).unwrap(),
        }
    }

    /// All of the disk, to whoever opens it next. It is closed again.
    fn read(self, path: &Path, log: &Path, unwritten: Unwritten) -> Vec<u8> {
        let image = self.open(path, log, unwritten);
        let pool = pool_of(1);
        let mut engine = self.engine(&image, pool.clone());
        let mut disk = Vec::new();
        for start in (0..DISK_BYTES).step_by(SLOT_BYTES) {
            run(&mut *engine, Operation::Read(slot_at(0)), start, SLOT_BYTES).unwrap();
            disk.extend(bytes_of(&pool, slot_at(0), SLOT_BYTES));
        }
        disk
    }
}

const CHILD: &str = "image::tests::kills::the_child_serves_an_image";
const SERVED_VARIABLE: &str = "HEARTH_TEST_SERVED";
const HOME_VARIABLE: &str = "HEARTH_TEST_HOME";
const ARMED_VARIABLE: &str = "HEARTH_TEST_ARMED";

#[test]
#[ignore = "part of the other tests: it runs in a process of its own"]
fn the_child_serves_an_image() {
    let Ok(served) = env::var(SERVED_VARIABLE) else { return };
    let (served, home) = (Served::named(&served), PathBuf::from(env::var_os(HOME_VARIABLE).unwrap()));
    let armed = env::var(ARMED_VARIABLE).unwrap().parse().ok();
    env::set_current_dir(home.join(QUIET)).unwrap();
    let rename = |stage, from, to| {
        if armed == Some(stage) {
            fs::rename(home.join(from), home.join(to)).unwrap();
        }
    };
    rename(OPEN, QUIET, ARMED);
    let image = served.open(Path::new("disk"), Path::new(LOG), Unwritten::Keep);
    let pool = pool_of(4);
    let mut engine = served.engine(&image, pool.clone());
    rename(OPEN, ARMED, QUIET);
    for (step, operations) in (1..).zip(SCRIPT) {
        rename(step, QUIET, ARMED);
        take(&mut *engine, &pool, step, operations);
        rename(step, ARMED, QUIET);
    }
    rename(CLOSE, QUIET, ARMED);
    drop((engine, image));
    rename(CLOSE, ARMED, QUIET);
}

/// Says of each operation that it has ended.
fn take(engine: &mut dyn Engine, pool: &Arc<BufferPool>, step: usize, operations: Step) {
    for (number, &(what, offset, bytes)) in operations.iter().enumerate() {
        let slot = slot_at(number as u16);
        let operation = match what {
            What::Write => {
                // SAFETY: as in `fill`.
                let slot_bytes = unsafe { pool.bytes_mut(slot) };
                slot_bytes[..bytes].copy_from_slice(&data(step, number, bytes));
                Operation::Write(slot)
            }
            What::Flush => Operation::Flush,
            What::Discard => Operation::Discard,
            What::Zero { unmap } => Operation::WriteZeroes { unmap },
        };
        engine.push(Submission { token: number as u64, operation, offset: offset as u64, bytes: bytes as u64 });
    }
    engine.submit().unwrap();
    let (mut ended, mut left) = (Vec::new(), operations.len());
    while left > 0 {
        engine.wait(Duration::from_secs(60)).unwrap();
        engine.reap(&mut ended);
        for completion in ended.drain(..) {
            completion.result.unwrap();
            println!("{ENDED} {step} {}", completion.token);
            left -= 1;
        }
    }
}

const ENDED: &str = "ended";

/// Operations that a child said had ended.
fn reported(said: &[u8]) -> BTreeSet<(usize, usize)> {
    let lines = std::str::from_utf8(said).unwrap().lines();
    // What the test harness says stands on the first one's line.
    let numbers = lines.filter_map(|line| line.split_once(ENDED)?.1.trim().split_once(' '));
    numbers.map(|(step, number)| (step.parse().unwrap(), number.parse().unwrap())).collect()
}

struct Bed {
    served: Served,
    home: TempDir,
    disks: Vec<Vec<u8>>,
    /// The image's file at first.
    image: Vec<u8>,
}

impl Bed {
    fn make(served: Served) -> Self {
        let (home, disks) = (folder(), disks());
        let path = home.path().join("made");
        served.make(&path, &disks[0]);
        Self { served, image: fs::read(&path).unwrap(), home, disks }
    }

    /// Where the child's files are when it has ended.
    fn found(&self) -> PathBuf {
        let [quiet, armed] = [QUIET, ARMED].map(|name| self.home.path().join(name));
        if armed.exists() { armed } else { quiet }
    }

    fn fresh(&self) {
        let _ = fs::remove_dir_all(self.found());
        let quiet = self.home.path().join(QUIET);
        fs::create_dir(&quiet).unwrap();
        let file = File::create(quiet.join("disk")).unwrap();
        file.set_len(self.image.len() as u64).unwrap();
        // A hole stays a hole.
        for (at, bytes) in (0..).step_by(4 * KIB).zip(self.image.chunks(4 * KIB)) {
            if bytes.iter().any(|byte| *byte != 0) {
                file.write_all_at(bytes, at).unwrap();
            }
        }
    }

    fn child(
        &self,
        armed: Option<usize>,
        strace: &Strace<'_>,
        injection: Option<&Injection<'_>>,
    ) -> std::process::Output {
        self.fresh();
        let (served, armed) = (format!("{:?}", self.served), armed.map_or_else(String::new, |stage| stage.to_string()));
        let environment = [
            (SERVED_VARIABLE, OsStr::new(&served)),
            (HOME_VARIABLE, self.home.path().as_os_str()),
            (ARMED_VARIABLE, OsStr::new(&armed)),
        ];
        strace.run_test(CHILD, &environment, injection)
    }

    /// A child is killed at each call that strace sees. How many were.
    fn each_call_is_the_last(&self, armed: Option<usize>, calls: &[&str], paths: &[String]) -> usize {
        let (log, paths) = (self.home.path().join("log"), paths.iter().cloned().collect());
        let strace = Strace { calls, paths: &paths, log: &log };
        let whole = self.child(armed, &strace, None);
        assert!(whole.status.success(), "{:?}, stage {armed:?}: {whole:?}", self.served);
        self.judge(&format!("{:?}, not killed", self.served), &reported(&whole.stdout));
        let mut killed = 0;
        for (call, count) in strace.calls_made() {
            for number in 1..=count {
                let injection = Injection { call: &call, number, what: "signal=KILL" };
                let ended = self.child(armed, &strace, Some(&injection));
                let place = format!("{:?}, stage {armed:?}, {call} {number}", self.served);
                let is_killed = ended.status.signal() == Some(9);
                // How often a ring is waited for, and which worker takes which operation of a step, differs from run to run.
                assert!(is_killed || ended.status.success() && number > 1, "{place}: {ended:?}");
                self.judge(&place, &reported(&ended.stdout));
                killed += usize::from(is_killed);
            }
        }
        killed
    }

    /// What the child left, after it said that these operations had ended.
    fn judge(&self, place: &str, reported: &BTreeSet<(usize, usize)>) {
        let is_whole = |step: usize| (0..SCRIPT[step - 1].len()).all(|number| reported.contains(&(step, number)));
        let done = (1..=SCRIPT.len()).take_while(|step| is_whole(*step)).count();
        let next = (done + 1).min(SCRIPT.len());
        let mut least = self.disks[done].clone();
        reported
            .iter()
            .filter(|(step, _)| *step == done + 1)
            .for_each(|(step, number)| apply(&mut least, *step, *number));
        let found = self.found();
        let [disk, log] = ["disk", LOG].map(|name| found.join(name));
        if self.served == Served::Qcow2 {
            check_with_qemu(place, &disk);
            // The host's next boot knows no log: the image alone counts.
            let copy = found.join("copy");
            fs::copy(&disk, &copy).unwrap();
            let after_boot = self.served.read(&copy, &found.join("no-tables"), Unwritten::Drop);
            let flushed = (1..=done).rev().find(|step| SCRIPT[step - 1][0].0 == What::Flush).unwrap_or(0);
            let since: Vec<_> = self.disks[flushed..=next].iter().chain([&least]).collect();
            compare(&format!("{place}, after a boot"), &after_boot, &since);
        }
        let now = self.served.read(&disk, &log, Unwritten::Keep);
        compare(place, &now, &[&least, &self.disks[next]]);
        if self.served == Served::Qcow2 {
            check_with_qemu(&format!("{place}, closed"), &disk);
        }
    }
}

/// Each sector is as on one of these disks.
fn compare(place: &str, found: &[u8], disks: &[&Vec<u8>]) {
    for start in (0..DISK_BYTES).step_by(SECTOR) {
        let range = start..start + SECTOR;
        let is_one = disks.iter().any(|disk| disk[range.clone()] == found[range.clone()]);
        assert!(is_one, "{place}: the sector at {start} is neither old nor new");
    }
}

fn each_call_of_each_stage_is_the_last(served: Served) {
    let bed = Bed::make(served);
    let paths = ["disk", LOG].map(|name| bed.home.path().join(ARMED).join(name).display().to_string());
    let mut killed = 0;
    for stage in OPEN..=CLOSE {
        let of_stage = bed.each_call_is_the_last(Some(stage), FILE_CALLS, &paths);
        assert!(
            of_stage > 0 || stage == OPEN || stage == CLOSE,
            "{served:?}: stage {stage} makes no call on its files"
        );
        killed += of_stage;
    }
    eprintln!("{served:?}: {killed} kills");
}

#[test]
fn a_kill_at_any_call_of_io_uring_loses_nothing_that_was_reported() {
    let killed = Bed::make(Served::RawByRing).each_call_is_the_last(None, &[RING_CALL], &[]);
    assert!(killed >= SCRIPT.len(), "{killed} calls on the ring");
    eprintln!("{:?}: {killed} kills", Served::RawByRing);
}

#[test]
fn a_kill_at_any_call_of_the_file_engine_loses_nothing_that_was_reported() {
    each_call_of_each_stage_is_the_last(Served::RawByWorkers);
}

#[test]
fn a_kill_at_any_call_of_the_qcow2_engine_loses_nothing_that_was_reported() {
    each_call_of_each_stage_is_the_last(Served::Qcow2);
}
