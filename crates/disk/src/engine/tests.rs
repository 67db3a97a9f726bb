//! Tests that every engine must pass, on every kind of file that this host has: a model disk in memory goes through the
//! same operations, and in the end image and model are equal.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::file::FileEngine;
use super::target::Target;
use super::uring::{Mode, UringEngine};
use super::{Completion, Engine, Operation, Submission};
use crate::buffer::{BufferPool, Slot};

const IMAGE_BYTES: usize = 4 << 20;
/// The slot size of the tests' pools. Takes no memory by itself.
pub(crate) const SLOT_BYTES: usize = 128 << 10;

pub(crate) fn pool_of(slots: usize) -> Arc<BufferPool> {
    BufferPool::new(slots * SLOT_BYTES).unwrap()
}

pub(crate) fn slot_at(number: u16) -> Slot {
    let pages = (SLOT_BYTES / 4096) as u16;
    Slot::at(number * pages, pages)
}

/// Numbers without a pattern, the same in every run.
pub(crate) struct Noise(pub u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        // SplitMix64 (Steele et al. 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Carries one operation to its end.
pub(crate) fn run(engine: &mut dyn Engine, operation: Operation, offset: usize, bytes: usize) -> std::io::Result<()> {
    engine.push(Submission { token: 7, operation, offset: offset as u64, bytes: bytes as u64 });
    engine.submit().unwrap();
    let mut ended = Vec::new();
    while ended.is_empty() {
        engine.wait(Duration::from_secs(10)).unwrap();
        engine.reap(&mut ended);
    }
    assert_eq!((ended.len(), ended[0].token, engine.in_flight()), (1, 7, 0));
    ended.remove(0).result
}

pub(crate) fn fill(pool: &BufferPool, slot: Slot, bytes: usize, noise: &mut Noise) -> Vec<u8> {
    let data: Vec<u8> = (0..bytes).map(|_| noise.next() as u8).collect();
    // SAFETY: the tests' slots are taken, and filled and read only while no operation is in flight on them.
    let slot_bytes = unsafe { pool.bytes_mut(slot) };
    slot_bytes[..bytes].copy_from_slice(&data);
    data
}

pub(crate) fn bytes_of(pool: &BufferPool, slot: Slot, bytes: usize) -> &[u8] {
    // SAFETY: as in `fill`.
    let slot_bytes = unsafe { pool.bytes_mut(slot) };
    &slot_bytes[..bytes]
}

fn target(path: &Path, alignment: u64) -> Arc<Target> {
    let direct = if alignment > 1 { libc::O_DIRECT } else { 0 };
    let file = File::options().read(true).write(true).custom_flags(direct).open(path).unwrap();
    Arc::new(Target { file, device_sector_bytes: None, read_only: false, alignment, tape: None })
}

struct Rig {
    name: String,
    engine: Box<dyn Engine>,
    pool: Arc<BufferPool>,
    file: File,
}

/// Both engines over a file on disk and one on tmpfs, through the page cache and with O_DIRECT.
fn each_engine(mut check: impl FnMut(Rig)) {
    // /tmp may be a tmpfs, /var/tmp is not.
    for (folder, alignment) in [("/var/tmp", 4096), ("/var/tmp", 1), ("/dev/shm", 1)] {
        for kind in [Kind::Uring, Kind::OldUring(Mode::Cooperative), Kind::OldUring(Mode::Plain), Kind::File] {
            let file = tempfile::NamedTempFile::new_in(folder).unwrap();
            file.as_file().set_len(IMAGE_BYTES as u64).unwrap();
            let pool = pool_of(8);
            let target = target(file.path(), alignment);
            let engine: Box<dyn Engine> = match kind {
                Kind::Uring => Box::new(UringEngine::new(target, pool.clone(), 8).unwrap()),
                Kind::OldUring(mode) => Box::new(UringEngine::in_mode(mode, false, target, pool.clone(), 8).unwrap()),
                Kind::File => FileEngine::start(target, pool.clone()).unwrap(),
            };
            let name = format!("{kind:?} in {folder}, alignment {alignment}");
            check(Rig { name, engine, pool, file: file.into_file() });
        }
    }
}

#[derive(Debug)]
enum Kind {
    Uring,
    /// Without registered buffers.
    OldUring(Mode),
    File,
}

/// One step of a batch: what to do, where, and for a write the data.
struct Step {
    operation: Operation,
    range: std::ops::Range<usize>,
    data: Vec<u8>,
}

/// Operations on ranges that do not overlap but often share a 4096-byte block.
fn random_batch(noise: &mut Noise, pool: &BufferPool) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let centre = noise.below(IMAGE_BYTES / 512);
    for slot in 0..1 + noise.below(8) {
        let slot = slot_at(slot as u16);
        let sectors = [1, 1, 3, 8, 16, 100, 256][noise.below(7)];
        let start = (centre + noise.below(300)).min(IMAGE_BYTES / 512 - sectors) * 512;
        let range = start..start + sectors * 512;
        if steps.iter().any(|step| step.range.start < range.end && range.start < step.range.end) {
            continue;
        }
        let (operation, data) = match noise.below(6) {
            0 | 1 => (Operation::Read(slot), Vec::new()),
            2 | 3 => (Operation::Write(slot), fill(pool, slot, range.len(), noise)),
            4 => (Operation::WriteZeroes { unmap: noise.below(2) == 0 }, Vec::new()),
            _ => (Operation::Discard, Vec::new()),
        };
        steps.push(Step { operation, range, data });
    }
    steps
}

fn apply(step: &Step, model: &mut [u8], pool: &BufferPool, place: &str) {
    match step.operation {
        Operation::Read(slot) => assert!(
            bytes_of(pool, slot, step.range.len()) == &model[step.range.clone()],
            "{place}: read of {:?} differs",
            step.range
        ),
        Operation::Write(_) => model[step.range.clone()].copy_from_slice(&step.data),
        Operation::WriteZeroes { .. } | Operation::Discard => model[step.range.clone()].fill(0),
        Operation::Flush => {}
    }
}

#[test]
fn random_operations_leave_what_a_model_holds() {
    each_engine(|Rig { name, mut engine, pool, file }| {
        let mut noise = Noise(20_260_803);
        let mut model = vec![0; IMAGE_BYTES];
        let mut ended: Vec<Completion> = Vec::new();
        for round in 0..150 {
            let place = format!("{name}, round {round}");
            let batch = random_batch(&mut noise, &pool);
            for (token, step) in (0..).zip(&batch) {
                let (offset, bytes) = (step.range.start as u64, step.range.len() as u64);
                engine.push(Submission { token, operation: step.operation, offset, bytes });
            }
            engine.submit().unwrap();
            while ended.len() < batch.len() {
                engine.wait(Duration::from_secs(10)).unwrap();
                engine.reap(&mut ended);
            }
            for completion in ended.drain(..) {
                completion.result.unwrap_or_else(|error| panic!("{place}: {error}"));
                apply(&batch[completion.token as usize], &mut model, &pool, &place);
            }
            assert_eq!(engine.in_flight(), 0);
        }
        run(&mut *engine, Operation::Flush, 0, 0).unwrap();
        let mut image = vec![0; IMAGE_BYTES];
        file.read_exact_at(&mut image, 0).unwrap();
        assert!(image == model, "{name}: image and model differ");
    });
}

#[test]
fn reads_past_end_of_file_are_zeroes() {
    each_engine(|Rig { name, mut engine, pool, file }| {
        file.write_all_at(&[0xee; 4096], IMAGE_BYTES as u64 - 4096).unwrap();
        for (offset, held) in [(IMAGE_BYTES - 4096, 4096), (IMAGE_BYTES, 0), (IMAGE_BYTES - 512, 512)] {
            fill(&pool, slot_at(0), 8192, &mut Noise(1));
            run(&mut *engine, Operation::Read(slot_at(0)), offset, 8192).unwrap();
            let (data, zeroes) = bytes_of(&pool, slot_at(0), 8192).split_at(held);
            assert!(data.iter().all(|&byte| byte == 0xee), "{name} at {offset}");
            assert!(zeroes.iter().all(|&byte| byte == 0), "{name} at {offset}");
        }
    });
}

#[test]
fn impossible_operations_end_with_an_error() {
    each_engine(|Rig { name, mut engine, .. }| {
        let too_long = run(&mut *engine, Operation::Read(slot_at(0)), 0, SLOT_BYTES + 1).unwrap_err();
        assert_eq!(too_long.to_string(), "131073 bytes do not fit into a slot of 131072", "{name}");
        let too_far = run(&mut *engine, Operation::Discard, usize::MAX - 5, 4096).unwrap_err();
        assert_eq!(too_far.raw_os_error(), Some(libc::EFBIG), "{name}");
    });
}

#[test]
fn a_read_only_image_is_never_changed() {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(8192).unwrap();
    let pool = pool_of(1);
    let target = || {
        Arc::new(Target {
            file: file.reopen().unwrap(),
            device_sector_bytes: None,
            read_only: true,
            alignment: 1,
            tape: None,
        })
    };
    let engines: [Box<dyn Engine>; 2] = [
        Box::new(UringEngine::new(target(), pool.clone(), 4).unwrap()),
        FileEngine::start(target(), pool.clone()).unwrap(),
    ];
    for mut engine in engines {
        for operation in [Operation::Write(slot_at(0)), Operation::Discard, Operation::WriteZeroes { unmap: false }] {
            let error = run(&mut *engine, operation, 0, 4096).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EROFS), "{operation:?}");
        }
        run(&mut *engine, Operation::Flush, 0, 0).unwrap();
    }
}

#[test]
fn kernel_error_reaches_the_caller() {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(8192).unwrap();
    let pool = pool_of(1);
    // Believed to be writable, and is not: the kernel says so.
    let target = || {
        let file = File::open(file.path()).unwrap();
        Arc::new(Target { file, device_sector_bytes: None, read_only: false, alignment: 1, tape: None })
    };
    let engines: [Box<dyn Engine>; 2] = [
        Box::new(UringEngine::new(target(), pool.clone(), 4).unwrap()),
        FileEngine::start(target(), pool.clone()).unwrap(),
    ];
    for mut engine in engines {
        for operation in [Operation::Write(slot_at(0)), Operation::Discard, Operation::WriteZeroes { unmap: true }] {
            let error = run(&mut *engine, operation, 0, 4096).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBADF), "{operation:?}");
        }
        run(&mut *engine, Operation::Read(slot_at(0)), 0, 4096).unwrap();
    }
}

#[test]
fn notifier_signals_completions_and_clears() {
    each_engine(|Rig { name, mut engine, .. }| {
        for token in 0..3 {
            engine.push(Submission {
                token,
                operation: Operation::Read(slot_at(token as u16)),
                offset: 0,
                bytes: 4096,
            });
        }
        engine.submit().unwrap();
        let mut ended = Vec::new();
        while ended.len() < 3 {
            assert!(is_readable(&*engine, 10_000), "{name}: no notice of {} completions", 3 - ended.len());
            engine.reap(&mut ended);
        }
        engine.reap(&mut ended);
        assert_eq!((ended.len(), is_readable(&*engine, 0)), (3, false), "{name}");
    });
}

pub(crate) fn is_readable(engine: &dyn Engine, timeout_ms: i64) -> bool {
    let notifier = engine.notifier();
    let mut poll = [rustix::event::PollFd::new(&notifier, rustix::event::PollFlags::IN)];
    let timeout = rustix::time::Timespec { tv_sec: timeout_ms / 1000, tv_nsec: timeout_ms % 1000 * 1_000_000 };
    rustix::event::poll(&mut poll, Some(&timeout)).unwrap() == 1
}

#[test]
fn engine_moves_between_threads() {
    each_engine(|Rig { name, mut engine, pool, file }| {
        let engine = std::thread::scope(|scope| {
            let serve = scope.spawn(|| {
                fill(&pool, slot_at(0), 4096, &mut Noise(5));
                run(&mut *engine, Operation::Write(slot_at(0)), 4096, 4096).unwrap();
                engine
            });
            serve.join().unwrap()
        });
        drop(engine);
        let mut block = [0; 4096];
        file.read_exact_at(&mut block, 4096).unwrap();
        assert!(bytes_of(&pool, slot_at(0), 4096) == block, "{name}");
    });
}

#[test]
fn engine_ends_after_its_operations() {
    each_engine(|Rig { name, mut engine, pool, file }| {
        for slot in 0..8 {
            fill(&pool, slot_at(slot), SLOT_BYTES, &mut Noise(9));
            let offset = u64::from(slot) * SLOT_BYTES as u64;
            let operation = Operation::Write(slot_at(slot));
            engine.push(Submission { token: 0, operation, offset, bytes: SLOT_BYTES as u64 });
        }
        engine.submit().unwrap();
        drop(engine);
        let mut image = vec![0; 8 * SLOT_BYTES];
        file.read_exact_at(&mut image, 0).unwrap();
        for (slot, written) in (0..).zip(image.chunks(SLOT_BYTES)) {
            assert!(bytes_of(&pool, slot_at(slot), SLOT_BYTES) == written, "{name}: slot {slot}");
        }
    });
}
