//! A kill or a power cut at every write of an image: all that an engine does is recorded, and every state that could have been
//! left is made again, opened, read and checked.
//!
//! A kill leaves every write so far, and the log: all that was reported must be there. A power cut leaves what was synced, and of
//! the rest any sectors: each sector must be as at the last flush or later.

use std::ops::Range;

use references::check_references;
pub(super) use references::check_with_qemu;

use super::served::Served;
use super::*;
use crate::image::tables::{TableLog, unit_bytes};
use crate::image::tape::{Event, Played, SECTOR, Tape};

mod references;

/// One run of an engine.
struct Recording {
    served: Served,
    folder: TempDir,
    /// The image's file as it was before.
    start: Vec<u8>,
    events: Vec<Event>,
    /// The disk before the first operation, and after each.
    models: Vec<Vec<u8>>,
    /// Each flush operation, with the last operation that it makes durable.
    flushes: Vec<(usize, usize)>,
    cluster_bytes: u64,
}

/// In memory: what is durable here is decided by the tape.
fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

impl Recording {
    /// `make` makes the image in a folder, with that name, and returns what it holds.
    fn of(served: Served, seed: u64, batches: usize, make: impl FnOnce(&Path) -> Vec<u8>) -> Self {
        let folder = in_memory();
        let path = folder.path().join("disk");
        let model = make(&path);
        let start = fs::read(&path).unwrap();
        let tape = Tape::default();
        let mut image = served.open(&path, &folder.path().join("log"), Unwritten::Drop).unwrap();
        Served::record(&mut image, &tape);
        let cluster_bytes = image.optimal_io_bytes().into();
        let pool = pool_of(4);
        let slots: Vec<_> = (0..4).map(|_| pool.take(SLOT_BYTES).unwrap()).collect();
        let mut engine = served.engine(&image, pool.clone()).unwrap();
        let (mut noise, mut models, mut flushes) = (Noise(seed), vec![model], Vec::new());
        for _ in 0..batches {
            let (before, mut together) = (models.len() - 1, Vec::<Range<usize>>::new());
            for slot in &slots[..1 + noise.below(4)] {
                let mut model = models.last().unwrap().clone();
                let sectors = [1, 8, 9, 64, 128, 200][noise.below(6)].min(model.len() / SECTOR / 2);
                // Half of them near the start, so that they meet.
                let reach = (model.len() / SECTOR - sectors) >> [0, 3][noise.below(2)];
                let start = noise.below(reach) * SECTOR;
                let range = start..start + sectors * SECTOR;
                // Where operations overtake each other, the result of two that overlap is undefined.
                if !served.is_in_order() && together.iter().any(|one| one.start < range.end && range.start < one.end) {
                    continue;
                }
                let operation = match noise.below(8) {
                    0 => Operation::Flush,
                    1 => Operation::WriteZeroes { unmap: noise.below(2) == 0 },
                    2 if image.supports_discard() => Operation::Discard,
                    _ => Operation::Write(*slot),
                };
                match operation {
                    Operation::Write(_) => {
                        model[range.clone()].copy_from_slice(&fill(&pool, *slot, range.len(), &mut noise))
                    }
                    Operation::Flush if served.is_in_order() => flushes.push((models.len(), models.len())),
                    Operation::Flush => flushes.push((models.len(), before)),
                    _ => model[range.clone()].fill(0),
                }
                models.push(model);
                engine.push(Submission { token: 0, operation, offset: start as u64, bytes: range.len() as u64 });
                together.push(range);
            }
            engine.submit().unwrap();
            let mut ended = Vec::new();
            while ended.len() < together.len() {
                engine.wait(Duration::from_secs(60)).unwrap();
                engine.reap(&mut ended);
            }
            ended.into_iter().for_each(|completion| completion.result.unwrap());
            tape.push(Event::Done(models.len() - 1));
        }
        drop(engine);
        let events = tape.take();
        Self { served, folder, start, events, models, flushes, cluster_bytes }
    }

    /// Every state that could have been left.
    fn check(&self, name: &str, noise: &mut Noise) {
        let (mut played, mut log, mut done) = (Played::new(&self.start), Vec::new(), 0);
        for (at, event) in self.events.iter().enumerate() {
            let place = format!("{name}, event {at}");
            played.play(at, event);
            match event {
                Event::Write { .. } | Event::Zero { .. } | Event::Sync { .. } => {}
                Event::Log { offset, bytes } => {
                    log.truncate(*offset as usize - LOG_HEAD_BYTES);
                    log.extend(bytes);
                }
                Event::LogEnds { length } => log.truncate(*length as usize - LOG_HEAD_BYTES),
                Event::Done(count) => done = *count,
            }
            let next = self.events[at..].iter().find_map(|event| match event {
                Event::Done(count) if *count > done => Some(*count),
                _ => None,
            });
            let last = next.unwrap_or(done);
            self.judge(&format!("{place}, killed"), &played.full, Some(&log), done..last + 1, at % 40 == 0);
            let flushed = self.flushes.iter().filter(|(flush, _)| *flush <= done).map(|(_, durable)| *durable);
            let flushed = flushed.max().unwrap_or(0);
            for (cut, state) in played.cut(noise).iter().enumerate() {
                self.judge(&format!("{place}, power cut {cut}"), state, None, flushed..last + 1, at % 40 == 20);
            }
        }
    }

    /// Each sector must be as in one of these models.
    fn judge(&self, place: &str, state: &[u8], log: Option<&[u8]>, models: Range<usize>, ask_qemu: bool) {
        let (path, log_path) = (self.folder.path().join("state"), self.folder.path().join("state.log"));
        let is_qcow2 = self.served == Served::Qcow2;
        // The kernel releases a ring some time after its end, and opening the next state would wait for that.
        let served = if is_qcow2 { Served::Qcow2 } else { Served::RawByWorkers };
        fs::write(&path, state).unwrap();
        if is_qcow2 {
            check_references(place, state);
            self.make_log(&path, &log_path, log.unwrap_or_default());
        }
        let ask_qemu = ask_qemu && is_qcow2;
        if ask_qemu && log.is_none() {
            self.ask_qemu(place, &path, models.clone());
        }
        let image = served.open(&path, &log_path, Unwritten::Keep).unwrap_or_else(|error| panic!("{place}: {error}"));
        let pool = pool_of(1);
        let slot = pool.take(SLOT_BYTES).unwrap();
        let mut engine = served.engine(&image, pool.clone()).unwrap_or_else(|error| panic!("{place}: {error:?}"));
        let bytes = self.models[0].len();
        let mut disk = Vec::new();
        for start in (0..bytes).step_by(SLOT_BYTES) {
            let length = SLOT_BYTES.min(bytes - start);
            run(&mut *engine, Operation::Read(slot), start, length).unwrap_or_else(|error| panic!("{place}: {error}"));
            disk.extend(bytes_of(&pool, slot, length));
        }
        self.compare(place, &disk, models);
        // The next process writes on.
        let data = fill(&pool, slot, 4096, &mut Noise(state.len() as u64));
        let end = bytes - 4096;
        run(&mut *engine, Operation::Write(slot), end, 4096).unwrap();
        disk[end..].copy_from_slice(&data);
        drop((engine, image));
        if is_qcow2 {
            check_references(&format!("{place}, written on"), &fs::read(&path).unwrap());
        }
        if ask_qemu {
            let expected = self.folder.path().join("expected");
            fs::write(&expected, &disk).unwrap();
            check_with_qemu(place, &path);
            qemu_img(&["compare", "-U", "-f", "qcow2", "-F", "raw", as_str(&path), as_str(&expected)])
                .unwrap_or_else(|error| panic!("{place}: {error}"));
        }
    }

    fn make_log(&self, path: &Path, log_path: &Path, log: &[u8]) {
        let image = File::open(path).unwrap();
        drop(TableLog::create(log_path, &image, unit_bytes(self.cluster_bytes)).unwrap());
        let file = fs::OpenOptions::new().write(true).open(log_path).unwrap();
        file.write_all_at(log, LOG_HEAD_BYTES as u64).unwrap();
    }

    fn compare(&self, place: &str, disk: &[u8], models: Range<usize>) {
        for (sector, found) in disk.chunks(SECTOR).enumerate() {
            let range = sector * SECTOR..sector * SECTOR + found.len();
            let is_one = |model: &Vec<u8>| model[range.clone()] == *found;
            let ever = || self.models.iter().position(is_one);
            assert!(
                self.models[models.clone()].iter().any(is_one),
                "{place}: sector {sector} is as after none of the operations {models:?}, but {:?}",
                ever()
            );
        }
    }

    fn ask_qemu(&self, place: &str, path: &Path, models: Range<usize>) {
        check_with_qemu(place, path);
        let raw = self.folder.path().join("converted");
        qemu_img(&["convert", "-U", "-f", "qcow2", "-O", "raw", as_str(path), as_str(&raw)])
            .unwrap_or_else(|error| panic!("{place}: {error}"));
        self.compare(&format!("{place}, QEMU"), &fs::read(&raw).unwrap(), models);
    }
}

const LOG_HEAD_BYTES: usize = 48;

fn empty(arguments: &'static [&'static str]) -> impl FnOnce(&Path) -> Vec<u8> {
    move |path| {
        qemu_img(&[&["create", "-q", "-f", "qcow2"], arguments, &[as_str(path), "1M"]].concat()).unwrap();
        vec![0; 1 << 20]
    }
}

fn overlay(path: &Path) -> Vec<u8> {
    let base = path.with_extension("base");
    let data: Vec<u8> = (0..1 << 20).map(|at: usize| (at / SECTOR % 251) as u8 + 1).collect();
    fs::write(&base, &data).unwrap();
    create_overlay(path, &base, "raw").unwrap();
    data
}

fn noise_of(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 8192 % 251) as u8 + 1).collect()
}

fn converted(path: &Path, data: &[u8], arguments: &[&str]) {
    let source = path.with_extension("source");
    fs::write(&source, data).unwrap();
    qemu_img(&[&["convert", "-q", "-O", "qcow2"], arguments, &[as_str(&source), as_str(path)]].concat()).unwrap();
}

fn check(name: &str, seed: u64, batches: usize, make: impl FnOnce(&Path) -> Vec<u8>) {
    let recording = Recording::of(Served::Qcow2, seed, batches, make);
    recording.check(&format!("{name}, seed {seed}"), &mut Noise(seed));
}

/// Also with writes of parts of a block, which read, patch and write the whole block.
#[test]
fn a_raw_image_survives_kills_and_power_cuts() {
    for served in [Served::RawByRing, Served::RawByWorkers] {
        for seed in 1..4 {
            let recording = Recording::of(served, seed, 12, |path| {
                let data = noise_of(1 << 20);
                fs::write(path, &data).unwrap();
                data
            });
            assert!(!recording.flushes.is_empty(), "nothing was flushed");
            recording.check(&format!("{served:?}, seed {seed}"), &mut Noise(seed));
        }
    }
}

#[test]
fn overlay_survives_kill_and_power_cut() {
    (1..3).for_each(|seed| check("overlay", seed, 12, overlay));
}

#[test]
fn every_image_kind_survives_kill_and_power_cut() {
    check("64k", 3, 10, empty(&["-o", "cluster_size=64k"]));
    // Its refcount table moves, and it has many tables.
    check("512", 4, 10, empty(&["-o", "cluster_size=512,refcount_bits=16"]));
    check("4k, one bit", 5, 10, empty(&["-o", "cluster_size=4k,refcount_bits=1"]));
    check("version 2", 6, 10, empty(&["-o", "compat=0.10"]));
}

/// With clusters of 512 bytes and counts of 64 bits a table of one cluster is full at 2 MiB.
#[test]
fn moving_refcount_table_survives_kill_and_power_cut() {
    let make = |path: &Path| {
        let (mut data, full) = (noise_of(1970 << 10), 2600 << 10);
        converted(path, &data, &["-o", "cluster_size=512,refcount_bits=64"]);
        qemu_img(&["resize", "-q", "-f", "qcow2", as_str(path), &full.to_string()]).unwrap();
        data.resize(full, 0);
        data
    };
    let recording = Recording::of(Served::Qcow2, 11, 12, make);
    let is_header = |event: &Event| matches!(event, Event::Write { offset: 0, .. });
    assert!(recording.events.iter().any(is_header), "it has not moved");
    recording.check("refcount table", &mut Noise(11));
}

#[test]
fn replaced_clusters_survive_kill_and_power_cut() {
    let data = noise_of(1 << 20);
    check("compressed", 7, 10, |path| {
        converted(path, &data, &["-c", "-o", "cluster_size=4k"]);
        data.clone()
    });
    check("snapshot", 8, 10, |path| {
        converted(path, &data, &["-o", "cluster_size=16k"]);
        qemu_img(&["snapshot", "-q", "-c", "before", as_str(path)]).unwrap();
        data.clone()
    });
}

/// While the disk is full operations fail, and all that was written before is there; what they took of the image is given back.
#[test]
fn full_disk_fails_only_its_operations() {
    for after in 0..60 {
        let (folder, tape) = (in_memory(), Tape::default());
        let place = format!("full after {after} changes");
        let path = folder.path().join("disk.qcow2");
        let mut may_be = vec![overlay(&path)];
        let mut image = Served::Qcow2.open(&path, &folder.path().join("log"), Unwritten::Drop).unwrap();
        Served::record(&mut image, &tape);
        tape.fill_disk(after, 3);
        let pool = pool_of(1);
        let slot = pool.take(SLOT_BYTES).unwrap();
        let mut engine = image.engine(pool.clone(), 8).unwrap();
        let (mut noise, mut failures) = (Noise(after as u64), 0);
        for step in 0..40 {
            let sectors = [1, 8, 128, 200][noise.below(4)];
            let start = noise.below((1 << 20) / SECTOR - sectors) * SECTOR;
            let range = start..start + sectors * SECTOR;
            let data = fill(&pool, slot, range.len(), &mut noise);
            let failed = match step % 5 {
                4 => run(&mut *engine, Operation::Flush, 0, 0).is_err(),
                _ => {
                    let failed = run(&mut *engine, Operation::Write(slot), start, range.len()).is_err();
                    // Earlier contents are void; the result of a failed operation is unknown.
                    may_be
                        .iter_mut()
                        .skip(usize::from(failed))
                        .for_each(|disk| disk[range.clone()].copy_from_slice(&data));
                    if failed {
                        let mut other = may_be[0].clone();
                        other[range].copy_from_slice(&data);
                        may_be.push(other);
                    }
                    failed
                }
            };
            failures += u32::from(failed);
        }
        assert!(failures > 0 || after > 30, "{place}: nothing failed");
        run(&mut *engine, Operation::Flush, 0, 0).unwrap_or_else(|error| panic!("{place}: {error}"));
        let mut disk = Vec::new();
        for start in (0..1 << 20).step_by(SLOT_BYTES) {
            run(&mut *engine, Operation::Read(slot), start, SLOT_BYTES).unwrap();
            disk.extend(bytes_of(&pool, slot, SLOT_BYTES));
        }
        for (sector, found) in disk.chunks(SECTOR).enumerate() {
            let is_one = |disk: &Vec<u8>| disk[sector * SECTOR..][..SECTOR] == *found;
            assert!(may_be.iter().any(is_one), "{place}: sector {sector} is not what was written");
        }
        drop(engine);
        assert_eq!(check_references(&place, &fs::read(&path).unwrap()), 0, "{place}: clusters are lost");
    }
}
