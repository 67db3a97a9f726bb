//! The sides under Hearth: one snapshot, restored with all memory, none, or its working set prefetched.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use hearth_api::RestoreStatus;
use hearth_vmtest::{Disk, Drives, TestVm, event, page_cache, patience};
use serde_json::Value;

use super::{
    Bench, COUNTED_REQUESTS, MIB, RestoreError, await_answers, case, guest,
    store::{Far, STORE},
    waits::{self, Waits},
};
use crate::host::profile::Profile;
use crate::load::Load;
use crate::record::Record;
use crate::responsiveness::Responsiveness;
use crate::sides::Ports;

const HEARTH: &str = "hearth";

/// A restore mode: its name here, the option of `hearth restore`, and the file of its working set beside the snapshot.
#[derive(Clone, Copy)]
pub struct Side {
    pub name: &'static str,
    option: &'static str,
    set: Option<&'static str>,
}

/// Sides that are also measured with an object store.
pub const STORE_SIDES: [Side; 2] = [SIDES[1], SIDES[3]];

const SCANNED: &str = "working-set.scan";
const TRACED: &str = "working-set.trace";

pub const SIDES: [Side; 4] = [
    Side { name: "eager", option: "--eager", set: None },
    Side { name: "lazy", option: "--lazy", set: None },
    Side { name: "scan", option: "--working-set", set: Some(SCANNED) },
    Side { name: "trace", option: "--working-set", set: Some(TRACED) },
];

impl Side {
    pub fn is_lazy(&self) -> bool {
        self.name != SIDES[0].name
    }
}

/// Seeds of the requests. Each scan, trace and round has its own.
const TRACE_SEEDS: [u64; 2] = [1, 2];
const SCAN_SEED: u64 = 3;
const AFTER_SCAN_SEED: u64 = 4;
const SLOWDOWN_SEED: u64 = 5;
const ROUND_SEED: u64 = 100;
/// Time limit of a trace that ends after a number of answers: longer than those take.
const COUNTED_TRACE_S: u64 = 3600;
const SCAN_PERIOD: &str = "1s";

pub fn machine(source: hearth_vmtest::Error) -> RestoreError {
    RestoreError::Machine { side: HEARTH, source }
}

pub fn restore_status(clone: &TestVm) -> Result<RestoreStatus, RestoreError> {
    let status = clone.status().map_err(machine)?;
    let no_figure = || RestoreError::NoFigure { side: HEARTH, figure: "restore", said: format!("{status:?}") };
    status.restore.clone().ok_or_else(no_figure)
}

/// Measures the pause of a guest that is saved while it writes to its memory, and that has a disk to be copied.
pub fn measure_pause(bench: &Bench<'_>, record: &mut Record) -> Result<(), RestoreError> {
    let accelerator = record.machine.accelerator.name();
    let builder = TestVm::busybox("pause").memory_mib(bench.shape.memory_mib).setting("accelerator", accelerator);
    let vm = builder.disk(Disk::empty(bench.shape.pause_disk_mib)).boot().map_err(machine)?;
    guest::hog(&vm, bench.shape).map_err(machine)?;
    vm.sh(&format!("dd if=/dev/urandom of=/dev/vda bs=1M count={} conv=fsync 2>&1", bench.shape.pause_disk_mib / 4))
        .map_err(machine)?;
    guest::start_writer(&vm).map_err(machine)?;
    let responsiveness = Responsiveness::watch(vm.api());
    for round in 0..bench.shape.pause_rounds {
        let folder = bench.rig.folder().join(format!("pause-{round}"));
        let (began, before) = (Instant::now(), guest::written_mib(&vm).map_err(machine)?);
        vm.save(&folder).map_err(machine)?;
        let written = guest::written_mib(&vm).map_err(machine)? - before;
        record.add("save", "written_mib_s", "MiB/s", written / began.elapsed().as_secs_f64());
        let path = folder.display().to_string();
        let rows = event!(Saved { folder, pause_ms, duration_ms, rounds, pages_held, bytes, .. } if folder == path => [
            ("pause_ms", "ms", pause_ms),
            ("live_s", "s", duration_ms / 1e3),
            ("rounds", "", rounds.into()),
            ("pages_held", "", pages_held as f64),
            ("pause_mib", "MiB", bytes as f64 / MIB),
        ]);
        let rows = vm.wait_event("the save's end", rows).map_err(machine)?;
        for (metric, unit, value) in rows {
            record.add("save", metric, unit, value);
        }
        eprintln!("{}: saved while it ran: {rows:?}", super::NAME);
        let removed = std::fs::remove_dir_all(&folder);
        removed.map_err(|source| RestoreError::File { path: folder, source })?;
    }
    responsiveness.end("save", record);
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), RestoreError> {
    fs::copy(from, to).map(drop).map_err(|source| RestoreError::File { path: from.to_owned(), source })
}

/// A machine that was saved and stopped.
pub struct Saved<'a> {
    bench: &'a Bench<'a>,
    vm: TestVm,
    ports: Ports,
    snapshot: PathBuf,
    /// The object store, with a slightly earlier snapshot.
    far: Far,
}

/// A restore to measure.
struct Measured<'a> {
    side: Side,
    place: &'static str,
    profile: Profile,
    round: u32,
    snapshot: &'a Path,
    options: Vec<String>,
}

/// A working set as `hearth working-set` shows it.
struct Shown(Value);

impl Shown {
    fn pages(&self) -> Result<f64, RestoreError> {
        let no_figure = || RestoreError::NoFigure { side: HEARTH, figure: "pages", said: self.0.to_string() };
        self.0["pages"].as_f64().ok_or_else(no_figure)
    }

    fn pages_of_age(&self, age: u64) -> f64 {
        let ages = self.0["ages"].as_array().into_iter().flatten();
        ages.filter(|entry| entry["age"] == age).filter_map(|entry| entry["pages"].as_f64()).sum()
    }

    /// The number of pages of the earlier set that the last trace used, and of others that it used.
    fn skipped_and_lazy(&self, before: f64) -> (f64, f64) {
        let skipped = before - self.pages_of_age(1);
        (skipped, self.pages_of_age(0) - skipped)
    }
}

impl<'a> Saved<'a> {
    pub fn make(bench: &'a Bench<'a>, record: &mut Record) -> Result<Self, RestoreError> {
        let (image, snapshot) = (bench.rig.folder().join("hearth.img"), bench.rig.folder().join("snapshot"));
        guest::make_image(bench.shape, &image)?;
        let ports = Ports::free();
        let builder = guest::machine(bench.shape, "saved", &image).memory_mib(bench.shape.memory_mib);
        let builder = ports.under_hearth(builder).setting("accelerator", record.machine.accelerator.name());
        let far = Far::start(bench.rig.folder())?;
        let vm = far.known_to(builder).boot().map_err(machine)?;
        guest::fill(&vm, bench.shape).map_err(machine)?;
        let saved = Saved { bench, vm, ports, snapshot, far };
        saved.save_without_what_disks_hold(record)?;
        saved.vm.save(&saved.far.address()).map_err(machine)?;
        saved.save(record)?;
        Ok(saved)
    }

    fn save_without_what_disks_hold(&self, record: &mut Record) -> Result<(), RestoreError> {
        let folder = self.bench.rig.folder().join("dedup");
        self.vm.save_with(&folder, &["--dedup-disk"]).map_err(machine)?;
        let path = folder.display().to_string();
        let saved = event!(Saved { folder, bytes, pages_on_disks, .. } if folder == path => (bytes, pages_on_disks));
        let (bytes, pages_on_disks) = self.vm.wait_event("the save's end", saved).map_err(machine)?;
        record.add("save", "snapshot_mib_dedup", "MiB", bytes as f64 / MIB);
        record.add("save", "pages_on_disks", "", pages_on_disks as f64);
        fs::remove_dir_all(&folder).map_err(|source| RestoreError::File { path: folder, source })
    }

    /// Saves the guest while it gets requests, with a scan.
    fn save(&self, record: &mut Record) -> Result<(), RestoreError> {
        let load = self.load(SCAN_SEED)?;
        await_answers(&load, self.bench.shape.steady_requests, HEARTH)?;
        let plan = format!("{SCAN_PERIOD},{}", self.bench.shape.scan_rounds);
        self.vm.save_with(&self.snapshot, &["--stop", "--scan", &plan]).map_err(machine)?;
        self.vm.wait_keeper_end().map_err(machine)?;
        drop(load);
        let scanned = event!(SaveScanned { duration_ms, .. } => duration_ms);
        let scan_ms = self.vm.wait_event("the scan's end", scanned).map_err(machine)?;
        let path = self.snapshot.display().to_string();
        let saved =
            event!(Saved { folder, duration_ms, bytes, pages, .. } if folder == path => (duration_ms, bytes, pages));
        let (save_ms, bytes, pages) = self.vm.wait_event("the save's end", saved).map_err(machine)?;
        record.add("scan", "scan_s", "s", scan_ms / 1e3);
        record.add("save", "save_s", "s", (save_ms - scan_ms) / 1e3);
        record.add("save", "snapshot_mib", "MiB", bytes as f64 / MIB);
        record.add("save", "stored_pages", "", pages as f64);
        Ok(())
    }

    fn load(&self, seed: u64) -> Result<Load, RestoreError> {
        let targets = guest::targets(self.ports, self.bench.shape, seed);
        Load::start(targets).map_err(|source| RestoreError::Load { side: HEARTH, source })
    }

    /// Traces what a guest uses after a scan; then traces it twice, each time with other requests: pages that only the second
    /// trace saw would have been waited for. A trace whose pages count lasts until the guest has given as many answers as the
    /// counts are for.
    pub fn trace(&self, record: &mut Record) -> Result<(), RestoreError> {
        self.keep_set(SCANNED)?;
        let scanned = self.shown()?.pages()?;
        self.trace_counted_here(AFTER_SCAN_SEED, record)?;
        let (skipped, lazy) = self.shown()?.skipped_and_lazy(scanned);
        for (metric, pages) in [("pages", scanned), ("skipped_pages", skipped), ("lazy_pages", lazy)] {
            record.add("scan", metric, "", pages);
        }
        let set = self.snapshot.join("working-set");
        fs::remove_file(&set).map_err(|source| RestoreError::File { path: set, source })?;
        self.trace_for_a_while(TRACE_SEEDS[0])?;
        let first = self.shown()?.pages()?;
        self.trace_counted_here(TRACE_SEEDS[1], record)?;
        let shown = self.shown()?;
        let (skipped, lazy) = shown.skipped_and_lazy(first);
        for (metric, pages) in [
            ("first_pages", first),
            ("second_pages", shown.pages_of_age(0)),
            ("skipped_pages", skipped),
            ("lazy_pages", lazy),
        ] {
            record.add("traces", metric, "", pages);
        }
        self.keep_set(TRACED)
    }

    fn trace_counted_here(&self, seed: u64, record: &mut Record) -> Result<(), RestoreError> {
        let requests = self.trace_counted(seed, &format!("counted-{seed}"), &self.snapshot, &[])?;
        record.add("traces", "counted_requests", "", requests as f64);
        Ok(())
    }

    /// Traces until the last request that counts is answered, and no later ones are sent. Returns the number of answers.
    fn trace_counted(&self, seed: u64, name: &str, snapshot: &Path, options: &[String]) -> Result<usize, RestoreError> {
        let over = self.bench.rig.folder().join(name);
        let (seconds, until) = (COUNTED_TRACE_S.to_string(), format!("test -e '{}'", over.display()));
        let load = self.load(seed)?;
        let options = [&["--trace", &seconds, "--until", &until], &words(options)[..]].concat();
        let traced = self.vm.restore(snapshot, name, &options).map_err(machine)?;
        await_answers(&load, COUNTED_REQUESTS, HEARTH)?;
        let requests = load.answered();
        drop(load);
        fs::write(&over, "").map_err(|source| RestoreError::File { path: over, source })?;
        await_traced(&traced)?;
        traced.stop_at_once().map_err(machine)?;
        Ok(requests)
    }

    /// Traces the snapshot in the store like the other one, and then adds the store's delay.
    pub fn trace_in_store(&self) -> Result<(), RestoreError> {
        for seed in TRACE_SEEDS {
            self.trace_counted(seed, &format!("far-{seed}"), &self.far.address(), &self.far.options("tracing"))?;
        }
        self.far.forget("tracing")?;
        self.far.move_away(self.bench.shape.store_request)
    }

    fn trace_for_a_while(&self, seed: u64) -> Result<(), RestoreError> {
        let load = self.load(seed)?;
        let seconds = self.bench.shape.trace_s.to_string();
        let traced = self.vm.restore(&self.snapshot, &format!("traced-{seed}"), &["--trace", &seconds]);
        let traced = traced.map_err(machine)?;
        await_traced(&traced)?;
        eprintln!("{}: traced, {} requests answered", super::NAME, load.answered());
        drop(load);
        traced.stop_at_once().map_err(machine).map(drop)
    }

    fn shown(&self) -> Result<Shown, RestoreError> {
        let said = self.vm.cli(&["working-set", &self.snapshot.display().to_string(), "--json"]).map_err(machine)?;
        let said: Value = serde_json::from_str(&said).unwrap_or_default();
        Ok(Shown(said["working_set"].clone()))
    }

    fn keep_set(&self, name: &str) -> Result<(), RestoreError> {
        copy(&self.snapshot.join("working-set"), &self.bench.rig.folder().join(name))
    }

    /// Measures how a scan slows a guest that gets requests: windows with and without a scan, in turn.
    pub fn measure_scan(&self, record: &mut Record) -> Result<(), RestoreError> {
        let load = self.load(SLOWDOWN_SEED)?;
        let clone = self.vm.restore(&self.snapshot, "slowed", &["--working-set"]).map_err(machine)?;
        let failed = |source| RestoreError::Load { side: HEARTH, source };
        load.wait_back(patience(20)).map_err(failed)?;
        await_complete(&clone)?;
        await_answers(&load, load.answered() + self.bench.shape.steady_requests, HEARTH)?;
        let window = || {
            let before = load.answered();
            std::thread::sleep(self.bench.shape.slowdown_window);
            (load.answered() - before) as f64
        };
        for round in 0..self.bench.shape.slowdown_rounds {
            let plain = window();
            let folder = self.bench.rig.folder().join(format!("never-{round}")).display().to_string();
            let plan = format!("{SCAN_PERIOD},1000");
            clone.cli(&["save", clone.name(), "-o", &folder, "--scan", &plan, "--no-wait"]).map_err(machine)?;
            let scanned = window();
            // The cancelled save exits with an error.
            clone.cli_output(&["save", clone.name(), "--cancel"]).map_err(machine)?;
            record.add("scan", "slowdown_pct", "%", (plain / scanned - 1.0) * 100.0);
            eprintln!("{}: {plain} requests answered without a scan, {scanned} with one", super::NAME);
        }
        drop(load);
        clone.stop_at_once().map_err(machine).map(drop)
    }

    pub fn restore(
        &self,
        side: Side,
        profile: Profile,
        round: u32,
        record: &mut Record,
    ) -> Result<Waits, RestoreError> {
        if let Some(set) = side.set {
            copy(&self.bench.rig.folder().join(set), &self.snapshot.join("working-set"))?;
        }
        page_cache::evict_all(&self.snapshot)
            .map_err(|source| RestoreError::File { path: self.snapshot.clone(), source })?;
        let (place, snapshot) = (profile.name(), &self.snapshot);
        let measured = Measured { side, place, profile, round, snapshot, options: Vec::new() };
        self.measure(&measured, &|| Ok(self.bench.rig.group_read_bytes()?), record)
    }

    /// Restores from the store with an empty cache. The disk has no limit, since it only stores what has arrived.
    pub fn restore_from_store(&self, side: Side, round: u32, record: &mut Record) -> Result<Waits, RestoreError> {
        let (cache, snapshot) = (format!("{}-{round}", side.name), self.far.address());
        let options = self.far.options(&cache);
        let measured = Measured { side, place: STORE, profile: Profile::Asis, round, snapshot: &snapshot, options };
        let waits = self.measure(&measured, &|| self.far.answer_bytes().map(Some), record)?;
        self.far.forget(&cache)?;
        Ok(waits)
    }

    /// Measures a restore. `read_bytes` returns the bytes read from the snapshot so far.
    fn measure(
        &self,
        measured: &Measured<'_>,
        read_bytes: &dyn Fn() -> Result<Option<u64>, RestoreError>,
        record: &mut Record,
    ) -> Result<Waits, RestoreError> {
        let &Measured { side, place, profile, round, snapshot, .. } = measured;
        let (rig, case) = (self.bench.rig, case(side.name, place));
        rig.limit(profile)?;
        let read_before = read_bytes()?;
        let load = self.load(ROUND_SEED + u64::from(round))?;
        // The name must be new: events of an earlier machine of the same name would count as this one's.
        let name = format!("{}-{place}-{round}", side.name);
        let options = [&[side.option], &words(&measured.options)[..]].concat();
        let restore = |_| self.vm.restore(snapshot, &name, &options);
        let clone = rig.launch(profile, restore)?.map_err(machine)?;
        let over = AtomicBool::new(false);
        let (outcome, looks) = std::thread::scope(|scope| {
            let looks = scope.spawn(|| waits::look(&clone, &load, &over));
            let outcome = self.until_complete(measured, &case, &clone, &load, record);
            over.store(true, Relaxed);
            (outcome, looks.join().expect("a panic was printed when it happened"))
        });
        let Restored { running_s, first_answer_s } = outcome?;
        let read_after = read_bytes()?;
        await_answers(&load, load.answered() + self.bench.shape.steady_requests, side.name)?;
        self.bench.add_service(&load, side.name, place, first_answer_s, record);
        drop(load);
        if let Some((before, after)) = read_before.zip(read_after) {
            record.add(&case, "bytes_read_mib", "MiB", (after - before) as f64 / MIB);
        }
        clone.stop_at_once().map_err(machine)?;
        rig.limit(Profile::Asis)?;
        Ok(Waits::of(running_s, &looks))
    }

    /// Sends requests until the guest has all its memory, and all of its disk if that comes from the store.
    fn until_complete(
        &self,
        measured: &Measured<'_>,
        case: &str,
        clone: &TestVm,
        load: &Load,
        record: &mut Record,
    ) -> Result<Restored, RestoreError> {
        let side = measured.side;
        let first_answer_s =
            load.wait_back(patience(20)).map_err(|source| RestoreError::Load { side: side.name, source })?;
        let running = event!(Restored { duration_ms, .. } => duration_ms);
        let running_ms = clone.wait_event("a running guest", running).map_err(machine)?;
        record.add(case, "running_ms", "ms", running_ms);
        await_answers(load, COUNTED_REQUESTS, side.name)?;
        let restore = restore_status(clone)?;
        record.add(case, "faults", "", restore.pages_lazy as f64);
        record.add(case, "fault_wait_ms", "ms", restore.fault_us_total as f64 / 1e3);
        for (metric, us) in [("fault_us_p50", restore.fault_us_p50), ("fault_us_p99", restore.fault_us_p99)] {
            if let Some(us) = us {
                record.add(case, metric, "us", us as f64);
            }
        }
        let (complete_ms, pages_prefetched) = await_complete(clone)?;
        let keeper = clone.status().map_err(machine)?.keeper;
        record.add(case, "loop_stall_ms_max", "ms", keeper.loop_stall_ms_max);
        record.add(case, "complete_s", "s", complete_ms / 1e3);
        record.add(case, "pages_prefetched", "", pages_prefetched as f64);
        if measured.place == STORE {
            let complete = event!(DiskComplete { duration_ms, .. } => duration_ms);
            let disk_ms = clone.wait_event_within("a complete disk", patience(60), complete).map_err(machine)?;
            record.add(case, "disks_complete_s", "s", disk_ms / 1e3);
        }
        Ok(Restored { running_s: running_ms / 1e3, first_answer_s })
    }
}

/// Waits until all memory has arrived. Returns the milliseconds that it took, and the number of pages that came before the guest
/// ran.
pub fn await_complete(clone: &TestVm) -> Result<(f64, u64), RestoreError> {
    let complete = event!(RestoreComplete { duration_ms, pages_prefetched, .. } => (duration_ms, pages_prefetched));
    clone.wait_event_within("all memory is there", patience(60), complete).map_err(machine)
}

fn await_traced(traced: &TestVm) -> Result<(), RestoreError> {
    traced.wait_event_within("a noted working set", patience(60), event!(WorkingSetTraced)).map_err(machine).map(drop)
}

fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

/// Seconds from the request to restore.
struct Restored {
    running_s: f64,
    first_answer_s: f64,
}
