//! Kills a process that serves an image at each system call of its engine on the image, and checks the image afterwards.
//! (`crash` checks the states that a power cut can leave.)
//!
//! ```text
//! child:  open -> the steps of SCRIPT, reporting each completed operation -> close      killed at one call of one stage
//! parent: qemu-img check -> open with the log of tables, as the next keeper does: completed operations are there
//!                        -> open without it, as after a reboot of the host: flushed operations are there
//! ```
//! strace counts calls per thread, and which worker takes an operation differs from run to run. So one stage at a time is armed:
//! during that stage the files have different paths, and strace looks only for those.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;

use strace_faults::{Injection, Strace};

use super::crash::check_with_qemu;
use super::served::Served;
use super::*;
use crate::image::tape::SECTOR;

/// Calls on an image's file and on the log of its tables.
const FILE_CALLS: &[&str] =
    &["pread64", "preadv", "pwrite64", "pwritev", "fallocate", "fdatasync", "fsync", "ftruncate", "sync_file_range"];
/// The only call of the io_uring engine. No other ring exists in the child.
const RING_CALL: &str = "io_uring_enter";
/// The child's working folder, and its name while a stage is armed.
const QUIET: &str = "quiet";
const ARMED: &str = "armed";
const LOG: &str = "tables";

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Write,
    Flush,
    Discard,
    Zero { unmap: bool },
}

/// Operations that are in flight together and do not overlap: what to do, at which offset, with how many bytes.
type Step = &'static [(What, usize, usize)];

/// The disk has data in `FULL` before the first step. An L2 table of the qcow2 image covers 2 MiB.
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
/// Stages of a child: opening the image, the steps from 1 on, closing the image.
const OPEN: usize = 0;
const CLOSE: usize = SCRIPT.len() + 1;

/// The bytes that an operation writes.
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

/// The disk's content before the first step and after each step.
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

/// Makes an image with this content.
fn make(served: Served, path: &Path, disk: &[u8]) {
    let file = File::create(path).unwrap();
    file.set_len(DISK_BYTES as u64).unwrap();
    file.write_all_at(&disk[FULL], FULL.start as u64).unwrap();
    if served == Served::Qcow2 {
        let raw = path.with_extension("raw");
        fs::rename(path, &raw).unwrap();
        let names = [as_str(&raw), as_str(path)];
        qemu_img(&[&["convert", "-q", "-O", "qcow2", "-o", "cluster_size=4k"], &names[..]].concat()).unwrap();
    }
}

/// Opens an image, reads the whole disk and closes the image.
fn read(served: Served, path: &Path, log: &Path, unwritten: Unwritten) -> Vec<u8> {
    let image = served.open(path, log, unwritten).unwrap();
    let pool = pool_of(1);
    let mut engine = served.engine(&image, pool.clone()).unwrap();
    let mut disk = Vec::new();
    for start in (0..DISK_BYTES).step_by(SLOT_BYTES) {
        run(&mut *engine, Operation::Read(slot_at(0)), start, SLOT_BYTES).unwrap();
        disk.extend(bytes_of(&pool, slot_at(0), SLOT_BYTES));
    }
    disk
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
    let image = served.open(Path::new("disk"), Path::new(LOG), Unwritten::Keep).unwrap();
    let pool = pool_of(4);
    let mut engine = served.engine(&image, pool.clone()).unwrap();
    rename(OPEN, ARMED, QUIET);
    for (step, operations) in (1..).zip(SCRIPT) {
        rename(step, QUIET, ARMED);
        perform(&mut *engine, &pool, step, operations);
        rename(step, ARMED, QUIET);
    }
    rename(CLOSE, QUIET, ARMED);
    drop((engine, image));
    rename(CLOSE, ARMED, QUIET);
}

/// Performs a step and reports each operation that completes.
fn perform(engine: &mut dyn Engine, pool: &Arc<BufferPool>, step: usize, operations: Step) {
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

/// Step and number of each operation that a child reported as completed.
fn reported(said: &[u8]) -> BTreeSet<(usize, usize)> {
    let lines = std::str::from_utf8(said).unwrap().lines();
    // The test harness may write its own text before the first report, on the same line.
    let numbers = lines.filter_map(|line| line.split_once(ENDED)?.1.trim().split_once(' '));
    numbers.map(|(step, number)| (step.parse().unwrap(), number.parse().unwrap())).collect()
}

struct Bed {
    served: Served,
    home: TempDir,
    disks: Vec<Vec<u8>>,
    /// The image's file before the first step.
    image: Vec<u8>,
}

impl Bed {
    fn make(served: Served) -> Self {
        let (home, disks) = (folder(), disks());
        let path = home.path().join("made");
        make(served, &path, &disks[0]);
        Self { served, image: fs::read(&path).unwrap(), home, disks }
    }

    /// The folder with the child's files after its end.
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
        // Holes stay holes.
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

    /// Runs a child for each call that strace sees, and kills it there. Returns the number of killed children.
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
                // The number of waits for a ring, and which worker takes which operation, differ from run to run.
                assert!(is_killed || ended.status.success() && number > 1, "{place}: {ended:?}");
                self.judge(&place, &reported(&ended.stdout));
                killed += usize::from(is_killed);
            }
        }
        killed
    }

    /// Checks the files that the child left after it had reported these operations.
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
            // After a reboot of the host there is no log.
            let copy = found.join("copy");
            fs::copy(&disk, &copy).unwrap();
            let after_boot = read(self.served, &copy, &found.join("no-tables"), Unwritten::Drop);
            let flushed = (1..=done).rev().find(|step| SCRIPT[step - 1][0].0 == What::Flush).unwrap_or(0);
            let since: Vec<_> = self.disks[flushed..=next].iter().chain([&least]).collect();
            compare(&format!("{place}, after a boot"), &after_boot, &since);
        }
        let now = read(self.served, &disk, &log, Unwritten::Keep);
        compare(place, &now, &[&least, &self.disks[next]]);
        if self.served == Served::Qcow2 {
            check_with_qemu(&format!("{place}, closed"), &disk);
        }
    }
}

/// Checks that each sector is equal to that of one of these disks.
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
fn io_uring_kill_keeps_completed_writes() {
    let killed = Bed::make(Served::RawByRing).each_call_is_the_last(None, &[RING_CALL], &[]);
    assert!(killed >= SCRIPT.len(), "{killed} calls on the ring");
    eprintln!("{:?}: {killed} kills", Served::RawByRing);
}

#[test]
fn file_engine_kill_keeps_completed_writes() {
    each_call_of_each_stage_is_the_last(Served::RawByWorkers);
}

#[test]
fn qcow2_engine_kill_keeps_completed_writes() {
    each_call_of_each_stage_is_the_last(Served::Qcow2);
}
