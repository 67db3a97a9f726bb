//! What a kill or a power cut leaves of a qcow2 image, at every one of its writes: all that an engine does is recorded, every state
//! that could have been left is made again, opened, read and checked.
//!
//! A kill leaves every write so far, and the log: all that was reported must be there. A power cut leaves what was synced, and of
//! the rest any sectors: each sector must be as at the last flush or later.

use std::collections::HashMap;
use std::ops::Range;

use super::*;
use crate::image::Contents;
use crate::image::tables::{TableLog, unit_bytes};
use crate::image::tape::{Event, Tape};

const SECTOR: usize = 512;

/// One run of an engine.
struct Recording {
    folder: TempDir,
    /// The image's file as it was before.
    start: Vec<u8>,
    events: Vec<Event>,
    /// The disk before the first operation, and after each.
    models: Vec<Vec<u8>>,
    /// Operations that were flushes.
    flushes: Vec<usize>,
    cluster_bytes: u64,
}

/// In memory: what is durable here is decided by the tape.
fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn opened(path: &Path, log: &Path, unwritten: Unwritten) -> Result<Image, ImageError> {
    // Another test's child may have the file for a moment, between its fork and its exec.
    let lock_patience = Duration::from_secs(60);
    let mut image = Image::open(&ImageOptions { direct: false, lock_patience, ..options(path, Format::Qcow2) })?;
    image.note_changes_in(log, unwritten);
    Ok(image)
}

/// Its engine's work goes onto the tape. Returns the size of its clusters.
fn record(image: &mut Image, tape: &Tape) -> u64 {
    match &mut image.contents {
        Contents::Qcow2(qcow2) => {
            qcow2.tape = Some(tape.clone());
            u64::from(qcow2.cluster_bytes())
        }
        Contents::Raw(_) => unreachable!("it was opened as qcow2"),
    }
}

impl Recording {
    /// `make` makes the image in a folder, with that name, and returns what it holds.
    fn of(seed: u64, batches: usize, make: impl FnOnce(&Path) -> Vec<u8>) -> Self {
        let folder = in_memory();
        let path = folder.path().join("disk.qcow2");
        let model = make(&path);
        let start = fs::read(&path).unwrap();
        let tape = Tape::default();
        let mut image = opened(&path, &folder.path().join("log"), Unwritten::Drop).unwrap();
        let cluster_bytes = record(&mut image, &tape);
        let pool = pool_of(4);
        let slots: Vec<_> = (0..4).map(|_| pool.take(SLOT_BYTES).unwrap()).collect();
        let mut engine = image.engine(pool.clone(), 8).unwrap();
        let (mut noise, mut models, mut flushes) = (Noise(seed), vec![model], Vec::new());
        for _ in 0..batches {
            let mut pushed = 0;
            for slot in &slots[..1 + noise.below(4)] {
                let mut model = models.last().unwrap().clone();
                let sectors = [1, 8, 9, 64, 128, 200][noise.below(6)].min(model.len() / SECTOR / 2);
                // Half of them near the start, so that they meet.
                let reach = (model.len() / SECTOR - sectors) >> [0, 3][noise.below(2)];
                let start = noise.below(reach) * SECTOR;
                let range = start..start + sectors * SECTOR;
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
                    Operation::Flush => flushes.push(models.len()),
                    _ => model[range.clone()].fill(0),
                }
                models.push(model);
                engine.push(Submission { token: 0, operation, offset: start as u64, bytes: range.len() as u64 });
                pushed += 1;
            }
            engine.submit().unwrap();
            let mut ended = Vec::new();
            while ended.len() < pushed {
                engine.wait(Duration::from_secs(60)).unwrap();
                engine.reap(&mut ended);
            }
            ended.into_iter().for_each(|completion| completion.result.unwrap());
            tape.push(Event::Done(models.len() - 1));
        }
        drop(engine);
        let events = tape.take();
        Self { folder, start, events, models, flushes, cluster_bytes }
    }

    /// Every state that could have been left.
    fn check(&self, name: &str, noise: &mut Noise) {
        let (mut full, mut durable) = (self.start.clone(), self.start.clone());
        let (mut pending, mut log, mut done) = (Vec::new(), Vec::new(), 0);
        for (at, event) in self.events.iter().enumerate() {
            let place = format!("{name}, event {at}");
            match event {
                Event::Write { .. } | Event::Zero { .. } => {
                    apply(&mut full, event, |_| true);
                    pending.push(event.clone());
                }
                Event::Sync => {
                    durable.clone_from(&full);
                    pending.clear();
                }
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
            self.judge(&format!("{place}, killed"), &full, Some(&log), done..last + 1, at % 40 == 0);
            let flushed = self.flushes.iter().copied().filter(|flush| *flush <= done).max().unwrap_or(0);
            for cut in 0..if pending.is_empty() { 1 } else { 4 } {
                let mut state = durable.clone();
                let odd = noise.below(pending.len().max(1));
                for (index, event) in pending.iter().enumerate() {
                    let seed = noise.next();
                    apply(&mut state, event, |sector| match cut {
                        0 => false,
                        // All but one, one alone, any sectors.
                        1 => index != odd,
                        2 => index == odd,
                        _ => Noise(seed ^ sector as u64).below(2) == 0,
                    });
                }
                self.judge(&format!("{place}, power cut {cut}"), &state, None, flushed..last + 1, at % 40 == 20);
            }
        }
    }

    /// Each sector must be as in one of these models.
    fn judge(&self, place: &str, state: &[u8], log: Option<&[u8]>, models: Range<usize>, ask_qemu: bool) {
        let (path, log_path) = (self.folder.path().join("state.qcow2"), self.folder.path().join("state.log"));
        fs::write(&path, state).unwrap();
        check_references(place, state);
        let file = File::open(&path).unwrap();
        drop(TableLog::create(&log_path, &file, unit_bytes(self.cluster_bytes)).unwrap());
        if let Some(log) = log {
            fs::OpenOptions::new()
                .write(true)
                .open(&log_path)
                .unwrap()
                .write_all_at(log, LOG_HEAD_BYTES as u64)
                .unwrap();
        }
        if ask_qemu && log.is_none() {
            self.ask_qemu(place, &path, models.clone());
        }
        let image = opened(&path, &log_path, Unwritten::Keep).unwrap_or_else(|error| panic!("{place}: {error}"));
        let pool = pool_of(1);
        let slot = pool.take(SLOT_BYTES).unwrap();
        let mut engine = image.engine(pool.clone(), 8).unwrap_or_else(|error| panic!("{place}: {error:?}"));
        let bytes = self.models[0].len();
        let mut disk = Vec::new();
        for start in (0..bytes).step_by(SLOT_BYTES) {
            let length = SLOT_BYTES.min(bytes - start);
            run(&mut *engine, Operation::Read(slot), start, length).unwrap_or_else(|error| panic!("{place}: {error}"));
            disk.extend(bytes_of(&pool, slot, length));
        }
        self.compare(place, &disk, models);
        // Whoever comes next writes on.
        let data = fill(&pool, slot, 4096, &mut Noise(state.len() as u64));
        let end = bytes - 4096;
        run(&mut *engine, Operation::Write(slot), end, 4096).unwrap();
        disk[end..].copy_from_slice(&data);
        drop(engine);
        check_references(&format!("{place}, written on"), &fs::read(&path).unwrap());
        if ask_qemu {
            drop(image);
            let expected = self.folder.path().join("expected");
            fs::write(&expected, &disk).unwrap();
            check_with_qemu(place, &path);
            qemu_img(&["compare", "-U", "-f", "qcow2", "-F", "raw", as_str(&path), as_str(&expected)])
                .unwrap_or_else(|error| panic!("{place}: {error}"));
        }
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

/// Sectors of a write that reached the disk.
fn apply(file: &mut Vec<u8>, event: &Event, reached: impl Fn(usize) -> bool) {
    let (offset, length, grows) = match event {
        Event::Write { offset, bytes } => (*offset as usize, bytes.len(), true),
        Event::Zero { offset, length, grows } => (*offset as usize, *length as usize, *grows),
        _ => return,
    };
    for sector in 0..length.div_ceil(SECTOR) {
        let from = sector * SECTOR;
        let (start, end) = (offset + from, offset + (from + SECTOR).min(length));
        if !reached(sector) {
            continue;
        }
        if grows && file.len() < end {
            file.resize(end, 0);
        }
        let end = end.min(file.len());
        if start >= end {
            continue;
        }
        match event {
            Event::Write { bytes, .. } => file[start..end].copy_from_slice(&bytes[from..][..end - start]),
            _ => file[start..end].fill(0),
        }
    }
}

/// What stock QEMU finds may be lost clusters, and nothing else.
pub(super) fn check_with_qemu(place: &str, path: &Path) {
    // Without a lock, which another test's child may have for a moment, between its fork and its exec.
    let output = Command::new("qemu-img").args(["check", "-q", "-U", "-f", "qcow2", as_str(path)]).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{place}: {output:?}");
}

/// Whatever a table names has a reference count of at least its references, and is whole. As `qemu-img check`, in no time. Returns
/// how many references are counted and not there.
fn check_references(place: &str, file: &[u8]) -> u64 {
    let u64_at = |at: usize| file.get(at..at + 8).map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().unwrap()));
    let u32_at = |at: usize| u32::from_be_bytes(file[at..at + 4].try_into().unwrap());
    let (version, cluster_bits) = (u32_at(4), u32_at(20));
    let cluster = 1_usize << cluster_bits;
    let order = if version == 2 { 4 } else { u32_at(96) };
    let offset_of = |entry: u64| (entry & 0x00ff_ffff_ffff_fe00) as usize;
    let mut references: HashMap<usize, u64> = HashMap::new();
    let mut name = |offset: usize, bytes: usize| {
        assert!(bytes == 0 || offset.is_multiple_of(cluster), "{place}: {offset:#x} is not aligned");
        for at in (offset..offset + bytes).step_by(cluster) {
            *references.entry(at >> cluster_bits).or_default() += 1;
        }
    };
    let (l1_entries, l1, refcounts) = (u32_at(36) as usize, u64_at(40) as usize, u64_at(48) as usize);
    let refcount_clusters = u32_at(56) as usize;
    name(0, cluster);
    name(l1, l1_entries * 8);
    name(refcounts, refcount_clusters * cluster);
    let blocks: Vec<usize> =
        (0..refcount_clusters * cluster / 8).map(|at| offset_of(u64_at(refcounts + 8 * at))).collect();
    blocks.iter().filter(|block| **block > 0).for_each(|block| name(*block, cluster));
    let mut compressed = Vec::new();
    for entry in (0..l1_entries).map(|at| offset_of(u64_at(l1 + 8 * at))).filter(|entry| *entry > 0) {
        assert!(entry < file.len(), "{place}: an L2 table lies behind the end");
        name(entry, cluster);
        for entry in (0..cluster / 8).map(|at| u64_at(entry + 8 * at)) {
            if entry >> 62 & 1 == 1 {
                let shift = 62 - (cluster_bits - 8);
                let start = (entry & ((1 << shift) - 1)) as usize;
                let sectors = (entry >> shift & ((1 << (cluster_bits - 8)) - 1)) as usize + 1;
                compressed.push(start & !(cluster - 1)..(start & !511) + sectors * SECTOR);
            } else if offset_of(entry) > 0 {
                name(offset_of(entry), cluster);
            }
        }
    }
    compressed.into_iter().for_each(|range| name(range.start, range.len()));
    let per_block = (cluster * 8) >> order;
    let count_of = |index: usize| {
        let block = blocks.get(index / per_block).copied().unwrap_or(0);
        let bit = (index % per_block) << order;
        match (block, order) {
            (0, _) => 0,
            (_, 0..3) => {
                u64::from(file.get(block + bit / 8).copied().unwrap_or(0)) >> (bit % 8) & ((1 << (1 << order)) - 1)
            }
            (_, 3) => u64::from(file.get(block + bit / 8).copied().unwrap_or(0)),
            (_, 4) => u64_at(block + bit / 8) >> 48,
            (_, 6) => u64_at(block + bit / 8),
            _ => unimplemented!("no test has those of 32 bits"),
        }
    };
    let lost = (0..(file.len() * 2) >> cluster_bits).map(|index| {
        let (needed, count) = (references.get(&index).copied().unwrap_or(0), count_of(index));
        assert!(needed <= count, "{place}: cluster {index} is named {needed} times, and counted {count} times");
        count - needed
    });
    lost.sum()
}

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
    let recording = Recording::of(seed, batches, make);
    recording.check(&format!("{name}, seed {seed}"), &mut Noise(seed));
}

#[test]
fn an_overlay_survives_a_kill_and_a_power_cut_at_every_write() {
    (1..3).for_each(|seed| check("overlay", seed, 12, overlay));
}

#[test]
fn an_image_of_each_kind_survives_a_kill_and_a_power_cut_at_every_write() {
    check("64k", 3, 10, empty(&["-o", "cluster_size=64k"]));
    // Its refcount table moves, and it has many tables.
    check("512", 4, 10, empty(&["-o", "cluster_size=512,refcount_bits=16"]));
    check("4k, one bit", 5, 10, empty(&["-o", "cluster_size=4k,refcount_bits=1"]));
    check("version 2", 6, 10, empty(&["-o", "compat=0.10"]));
}

/// With clusters of 512 bytes and counts of 64 bits a table of one cluster is full at 2 MiB.
#[test]
fn a_refcount_table_that_moves_survives_a_kill_and_a_power_cut_at_every_write() {
    let make = |path: &Path| {
        let (mut data, full) = (noise_of(1970 << 10), 2600 << 10);
        converted(path, &data, &["-o", "cluster_size=512,refcount_bits=64"]);
        qemu_img(&["resize", "-q", "-f", "qcow2", as_str(path), &full.to_string()]).unwrap();
        data.resize(full, 0);
        data
    };
    let recording = Recording::of(11, 12, make);
    let is_header = |event: &Event| matches!(event, Event::Write { offset: 0, .. });
    assert!(recording.events.iter().any(is_header), "it has not moved");
    recording.check("refcount table", &mut Noise(11));
}

#[test]
fn clusters_that_are_replaced_survive_a_kill_and_a_power_cut_at_every_write() {
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
fn a_full_disk_at_any_write_fails_no_more_than_its_operations() {
    for after in 0..60 {
        let (folder, tape) = (in_memory(), Tape::default());
        let place = format!("full after {after} changes");
        let path = folder.path().join("disk.qcow2");
        let mut may_be = vec![overlay(&path)];
        let mut image = opened(&path, &folder.path().join("log"), Unwritten::Drop).unwrap();
        record(&mut image, &tape);
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
                    // What was written before is void; what a failed operation has done nobody knows.
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
