//! The sides under Hearth: one snapshot, restored with everything, nothing, or its working set read ahead.

use std::path::PathBuf;
use std::time::Instant;

use hearth_vmtest::{Disk, Drives, TestVm, patience};
use serde_json::Value;

use super::{
    Bench, COUNTED_REQUESTS, MIB, RestoreError, STEADY_REQUESTS, add_service, await_answers, case, evict_all, guest,
};
use crate::host::profile::Profile;
use crate::load::Load;
use crate::record::Record;
use crate::sides::copy_root;

const HEARTH: &str = "hearth";
const PAUSE_ROUNDS: u32 = 3;
const PAUSE_DISK_MIB: u64 = 256;

/// A way to restore: its name here, and the option of `hearth restore`.
#[derive(Clone, Copy)]
pub struct Side {
    pub name: &'static str,
    option: &'static str,
}

pub const SIDES: [Side; 3] = [
    Side { name: "eager", option: "--eager" },
    Side { name: "lazy", option: "--lazy" },
    Side { name: "trace", option: "--working-set" },
];

/// Seeds of the requests: each trace has its own, and each round.
const TRACE_SEEDS: [u64; 2] = [1, 2];
const ROUND_SEED: u64 = 100;

fn machine(source: hearth_vmtest::Error) -> RestoreError {
    RestoreError::Machine { side: HEARTH, source }
}

fn figure(said: &Value, figure: &'static str) -> Result<f64, RestoreError> {
    let number = said[figure].as_f64();
    number.ok_or_else(|| RestoreError::NoFigure { side: HEARTH, figure, said: said.to_string() })
}

/// How long a guest stands still that is saved while it writes to its memory, and has a disk to be copied.
pub fn measure_pause(bench: &Bench<'_>, record: &mut Record) -> Result<(), RestoreError> {
    let accelerator = record.machine.accelerator.name();
    let builder = TestVm::busybox("pause").memory_mib(bench.shape.memory_mib).setting("accelerator", accelerator);
    let vm = builder.disk(Disk::empty(PAUSE_DISK_MIB)).boot().map_err(machine)?;
    guest::hog(&vm, bench.shape).map_err(machine)?;
    vm.sh(&format!("dd if=/dev/urandom of=/dev/vda bs=1M count={} conv=fsync 2>&1", PAUSE_DISK_MIB / 4))
        .map_err(machine)?;
    guest::start_writer(&vm).map_err(machine)?;
    for round in 0..PAUSE_ROUNDS {
        let folder = bench.rig.folder().join(format!("pause-{round}"));
        let (began, before) = (Instant::now(), guest::written_mib(&vm).map_err(machine)?);
        vm.save(&folder).map_err(machine)?;
        let written = guest::written_mib(&vm).map_err(machine)? - before;
        record.add("save", "written_mib_s", "MiB/s", written / began.elapsed().as_secs_f64());
        let path = folder.display().to_string();
        let this = |event: &Value| event["kind"] == "saved" && event["folder"] == path.as_str();
        let saved = vm.wait_event("it is saved", this).map_err(machine)?;
        record.add("save", "pause_ms", "ms", figure(&saved, "pause_ms")?);
        record.add("save", "live_s", "s", figure(&saved, "duration_ms")? / 1e3);
        record.add("save", "rounds", "", figure(&saved, "rounds")?);
        record.add("save", "pages_held", "", figure(&saved, "pages_held")?);
        record.add("save", "pause_mib", "MiB", figure(&saved, "bytes")? / MIB);
        eprintln!("{}: saved while it ran: {saved}", super::NAME);
        let removed = std::fs::remove_dir_all(&folder);
        removed.map_err(|source| RestoreError::File { path: folder, source })?;
    }
    Ok(())
}

/// A machine that was saved, and is there no more.
pub struct Saved<'a> {
    bench: &'a Bench<'a>,
    vm: TestVm,
    port: u16,
    snapshot: PathBuf,
}

impl<'a> Saved<'a> {
    pub fn make(bench: &'a Bench<'a>, record: &mut Record) -> Result<Self, RestoreError> {
        let (image, snapshot) = (bench.rig.folder().join("hearth.img"), bench.rig.folder().join("snapshot"));
        copy_root(&image)?;
        let builder = TestVm::debian("saved").root(Disk::in_place(&image)).memory_mib(bench.shape.memory_mib).http();
        let builder = builder.setting("accelerator", record.machine.accelerator.name());
        let vm = builder.boot().map_err(machine)?;
        guest::fill(&vm, bench.shape).map_err(machine)?;
        vm.save_and_stop(&snapshot).map_err(machine)?;
        let saved = vm.wait_event("it is saved", |event| event["kind"] == "saved").map_err(machine)?;
        record.add("save", "save_s", "s", figure(&saved, "duration_ms")? / 1e3);
        record.add("save", "snapshot_mib", "MiB", figure(&saved, "bytes")? / MIB);
        record.add("save", "stored_pages", "", figure(&saved, "pages")?);
        let port = vm.http_port().expect("it was asked for");
        Ok(Saved { bench, vm, port, snapshot })
    }

    fn load(&self, seed: u64) -> Result<Load, RestoreError> {
        let targets = guest::targets(self.port, self.bench.shape, seed);
        Load::start(targets).map_err(|source| RestoreError::Load { side: HEARTH, source })
    }

    /// Two traces, each with other requests: what the second saw and the first did not would have been waited for.
    pub fn trace(&self, record: &mut Record) -> Result<(), RestoreError> {
        let seconds = self.bench.shape.trace_s.to_string();
        let mut first = 0.0;
        for seed in TRACE_SEEDS {
            let load = self.load(seed)?;
            let name = format!("traced-{seed}");
            let traced = self.vm.restore(&self.snapshot, &name, &["--trace", &seconds]).map_err(machine)?;
            let noted = |event: &Value| event["kind"] == "working_set_traced";
            traced.wait_event_within("the working set is noted", patience(60), noted).map_err(machine)?;
            eprintln!("{}: traced, {} requests answered", super::NAME, load.answered());
            drop(load);
            traced.stop_at_once().map_err(machine)?;
            let said = self.vm.cli(&["working-set", &self.snapshot.display().to_string(), "--json"]);
            let said: Value = serde_json::from_str(&said.map_err(machine)?).unwrap_or_default();
            let set = &said["working_set"];
            if seed == TRACE_SEEDS[0] {
                first = figure(set, "pages")?;
                continue;
            }
            let of_age = |age: u64| {
                let ages = set["ages"].as_array().into_iter().flatten();
                ages.filter(|entry| entry["age"] == age).filter_map(|entry| entry["pages"].as_f64()).sum::<f64>()
            };
            let (second, unseen) = (of_age(0), of_age(1));
            let skipped = first - unseen;
            for (metric, pages) in [
                ("first_pages", first),
                ("second_pages", second),
                ("skipped_pages", skipped),
                ("lazy_pages", second - skipped),
            ] {
                record.add("traces", metric, "", pages);
            }
        }
        Ok(())
    }

    pub fn restore(&self, side: Side, profile: Profile, round: u32, record: &mut Record) -> Result<(), RestoreError> {
        evict_all(&self.snapshot)?;
        let (rig, case) = (self.bench.rig, case(side.name, profile));
        rig.limit(profile)?;
        let read_before = rig.group_read_bytes()?;
        let load = self.load(ROUND_SEED + u64::from(round))?;
        // Events of an earlier machine of the same name would be taken for its own.
        let name = format!("{}-{}-{round}", side.name, profile.name());
        let restore = |_| self.vm.restore(&self.snapshot, &name, &[side.option]);
        let clone = rig.launch(profile, restore)?.map_err(machine)?;
        let first_answer_s =
            load.wait_back(patience(20)).map_err(|source| RestoreError::Load { side: side.name, source })?;
        let running = |event: &Value| event["kind"] == "restored";
        let running = clone.wait_event("the guest runs", running).map_err(machine)?;
        record.add(&case, "running_ms", "ms", figure(&running, "duration_ms")?);
        await_answers(&load, COUNTED_REQUESTS, side.name)?;
        let status = clone.status().map_err(machine)?;
        record.add(&case, "faults", "", figure(&status["restore"], "pages_lazy")?);
        for metric in ["fault_us_p50", "fault_us_p99"] {
            if let Some(us) = status["restore"][metric].as_f64() {
                record.add(&case, metric, "us", us);
            }
        }
        let complete = |event: &Value| event["kind"] == "restore_complete";
        let over = clone.wait_event_within("all memory is there", patience(60), complete).map_err(machine)?;
        let read_after = rig.group_read_bytes()?;
        await_answers(&load, load.answered() + STEADY_REQUESTS, side.name)?;
        add_service(&load, side.name, profile, first_answer_s, record);
        drop(load);
        record.add(&case, "complete_s", "s", figure(&over, "duration_ms")? / 1e3);
        record.add(&case, "pages_prefetched", "", figure(&over, "pages_prefetched")?);
        if let Some((before, after)) = read_before.zip(read_after) {
            record.add(&case, "bytes_read_mib", "MiB", (after - before) as f64 / MIB);
        }
        clone.stop_at_once().map_err(machine)?;
        Ok(rig.limit(Profile::Asis)?)
    }
}
