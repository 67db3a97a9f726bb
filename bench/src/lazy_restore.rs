//! Bench `restore`: a guest with a large heap comes out of a snapshot on disk, in each way.
//!
//! one guest, most of its memory filled and a part of that in use -> saved -> for each side: host cache dropped, restored,
//! the part in use checked (`usable`), until all memory is there (`complete`). The working set is traced once, before.
//!
//! `qemu-file` is what QEMU alone does: all of memory through a file (`migrate exec:`), and then it runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_vmtest::{Drives, PlainVm, TestVm, patience};
use serde_json::{Value, json};

use crate::host::facts::Accelerator;
use crate::host::page_cache;
use crate::record::Record;
use crate::stats;
use crate::table::{Table, figure_or_dash};

pub const NAME: &str = "restore";

const QEMU: &str = "qemu-file";
/// Side, and the option of `hearth restore`.
const SIDES: [(&str, &str); 3] = [("eager", "--eager"), ("lazy", "--lazy"), ("trace", "--working-set")];
const SEED: u64 = 7;
/// The part of its memory that the guest uses: a tenth.
const IN_USE: u64 = 10;
const TRACE_S: &str = "20";

#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error("machine {side}")]
    Machine { side: &'static str, source: hearth_vmtest::Error },
    #[error("{path}: its pages cannot be dropped from the host's cache")]
    Cache { path: PathBuf, source: std::io::Error },
    #[error("a folder for the snapshot")]
    Folder(#[source] std::io::Error),
}

pub struct Options {
    pub quick: bool,
    pub accelerator: Accelerator,
    /// On the disk that is to be measured.
    pub folder: PathBuf,
}

/// Sizes and counts of one run.
struct Plan {
    memory_mib: u64,
    rounds: u32,
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), RestoreError> {
    let plan = if options.quick { Plan { memory_mib: 512, rounds: 1 } } else { Plan { memory_mib: 2048, rounds: 5 } };
    std::fs::create_dir_all(&options.folder).map_err(RestoreError::Folder)?;
    let home = tempfile::Builder::new().prefix("hearth-restore-").tempdir_in(&options.folder);
    let home = home.map_err(RestoreError::Folder)?;
    hearth(options, &plan, &home.path().join("snapshot"), record)?;
    if let Err(error) = qemu(options, &plan, &home.path().join("file"), record) {
        record.left_out.push(format!("{QEMU}: {}", crate::chain(&error)));
    }
    summarise(record);
    Ok(())
}

/// Nearly all of the memory, of which a part is used afterwards.
fn fill(vm: &impl Drives, memory_mib: u64) -> hearth_vmtest::Result<()> {
    let used = memory_mib / IN_USE;
    let command = format!(
        "probe fill /tmp/used {} {SEED} && probe fill /tmp/rest {} {SEED}",
        used << 20,
        (memory_mib * 7 / 10 - used) << 20
    );
    vm.run_within(&command, patience(300)).map(drop)
}

fn use_it(vm: &impl Drives) -> hearth_vmtest::Result<()> {
    let verified = vm.run_within(&format!("probe verify /tmp/used {SEED}"), patience(300))?;
    if verified.status == 0 {
        return Ok(());
    }
    let (command, status) = ("probe verify".to_owned(), verified.status);
    Err(hearth_vmtest::Error::GuestCommand { command, status, output: verified.text() })
}

fn seconds(began: Instant) -> f64 {
    began.elapsed().as_secs_f64()
}

fn hearth(options: &Options, plan: &Plan, snapshot: &Path, record: &mut Record) -> Result<(), RestoreError> {
    let failed = |source| RestoreError::Machine { side: "hearth", source };
    let builder = TestVm::busybox("bench").memory_mib(plan.memory_mib);
    let vm = builder.setting("accelerator", options.accelerator.name()).boot().map_err(failed)?;
    fill(&vm, plan.memory_mib).map_err(failed)?;
    let began = Instant::now();
    vm.save(snapshot).map_err(failed)?;
    record.add("save", "save_s", "s", seconds(began));
    let saved = vm.wait_event("it is saved", |event| event["kind"] == "saved").map_err(failed)?;
    record.add("save", "pause_ms", "ms", saved["pause_ms"].as_f64().unwrap_or(f64::NAN));
    record.add("save", "snapshot_mib", "MiB", saved["bytes"].as_f64().unwrap_or(f64::NAN) / f64::from(1 << 20));
    vm.stop_at_once().map_err(failed)?;
    let traced = vm.restore(snapshot, "traced", &["--trace", TRACE_S]).map_err(failed)?;
    traced.wait_running().map_err(failed)?;
    use_it(&traced).map_err(failed)?;
    let noted = |event: &Value| event["kind"] == "working_set_traced";
    traced.wait_event_within("the working set is noted", patience(60), noted).map_err(failed)?;
    traced.stop_at_once().map_err(failed)?;
    drop(traced);
    for _ in 0..plan.rounds {
        for (side, option) in SIDES {
            for name in ["ram", "working-set"] {
                let path = snapshot.join(name);
                page_cache::evict(&path).map_err(|source| RestoreError::Cache { path, source })?;
            }
            one_restore(&vm, snapshot, side, option, record)
                .map_err(|source| RestoreError::Machine { side, source })?;
        }
    }
    Ok(())
}

fn one_restore(
    vm: &TestVm,
    snapshot: &Path,
    side: &str,
    option: &str,
    record: &mut Record,
) -> hearth_vmtest::Result<()> {
    let began = Instant::now();
    let clone = vm.restore(snapshot, side, &[option])?;
    clone.run_within("true", patience(300))?;
    record.add(side, "first_answer_ms", "ms", seconds(began) * 1e3);
    use_it(&clone)?;
    record.add(side, "usable_s", "s", seconds(began));
    let complete = |event: &Value| event["kind"] == "restore_complete";
    let over = clone.wait_event_within("all memory is there", patience(300), complete)?;
    record.add(side, "complete_s", "s", over["duration_ms"].as_f64().unwrap_or(f64::NAN) / 1e3);
    for pages in ["pages_prefetched", "pages_lazy"] {
        record.add(side, pages, "", over[pages].as_f64().unwrap_or(f64::NAN));
    }
    clone.stop_at_once().map(drop)
}

fn qemu(options: &Options, plan: &Plan, file: &Path, record: &mut Record) -> Result<(), RestoreError> {
    let failed = |source| RestoreError::Machine { side: QEMU, source };
    let builder = || PlainVm::busybox("plain").memory_mib(plan.memory_mib).accelerator(options.accelerator.name());
    let old = builder().boot().map_err(failed)?;
    fill(&old, plan.memory_mib).map_err(failed)?;
    to_file(&old, file).map_err(failed)?;
    drop(old);
    for _ in 0..plan.rounds {
        page_cache::evict(file).map_err(|source| RestoreError::Cache { path: file.to_owned(), source })?;
        let began = Instant::now();
        let new = builder().args(["-incoming".to_owned(), format!("exec:cat {}", file.display())]).start();
        let new = new.map_err(failed)?;
        new.run_within("true", patience(300)).map_err(failed)?;
        record.add(QEMU, "first_answer_ms", "ms", seconds(began) * 1e3);
        use_it(&new).map_err(failed)?;
        record.add(QEMU, "usable_s", "s", seconds(began));
    }
    Ok(())
}

fn to_file(vm: &PlainVm, file: &Path) -> hearth_vmtest::Result<()> {
    let events = json!({ "capabilities": [{ "capability": "events", "state": true }] });
    vm.qmp().execute("migrate-set-capabilities", events)?;
    vm.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 40 }))?;
    vm.qmp().execute("stop", json!({}))?;
    vm.qmp().execute("migrate", json!({ "uri": format!("exec:cat > {}", file.display()) }))?;
    let over = |event: &Value| matches!(event["data"]["status"].as_str(), Some("completed" | "failed"));
    let event = vm.qmp().find_event("MIGRATION", Duration::from_secs(300), over)?;
    if event["data"]["status"] == "completed" {
        return Ok(());
    }
    Err(hearth_vmtest::Error::Qmp { command: "migrate".into(), message: "failed".into() })
}

fn summarise(record: &mut Record) {
    let median = |side: &str, metric: &str| stats::median(record.values(side, metric));
    let ratio = |one: Option<f64>, other: Option<f64>| Some(one? / other?);
    let usable = |side: &str| median(side, "usable_s");
    let mut figures: Vec<(String, Option<f64>)> = vec![
        ("usable_ws_over_eager".into(), ratio(usable("trace"), usable("eager"))),
        ("usable_ws_over_lazy".into(), ratio(usable("trace"), usable("lazy"))),
        ("usable_ws_over_qemu".into(), ratio(usable("trace"), usable(QEMU))),
        ("save_s".into(), median("save", "save_s")),
        ("save_pause_ms".into(), median("save", "pause_ms")),
        ("snapshot_mib".into(), median("save", "snapshot_mib")),
    ];
    let lazy = ratio(median("trace", "pages_lazy"), median("trace", "pages_prefetched"));
    figures.push(("pages_lazy_trace_pct".into(), lazy.map(|ratio| ratio * 100.0)));
    for side in SIDES.map(|(side, _)| side).into_iter().chain([QEMU]) {
        for metric in ["first_answer_ms", "usable_s", "complete_s", "pages_prefetched", "pages_lazy"] {
            let value = median(side, metric);
            if value.is_some() {
                figures.push((format!("{metric}_{}", side.replace('-', "_")), value));
            }
        }
    }
    for (metric, value) in figures {
        record.summarise(&metric, value);
    }
}

pub fn table(record: &Record) -> Table {
    let mut table = Table::new([
        "side",
        "first answer ms",
        "usable s",
        "complete s",
        "pages prefetched",
        "pages waited for",
        "runs",
    ]);
    for side in SIDES.map(|(side, _)| side).into_iter().chain([QEMU]) {
        let answers = record.values(side, "first_answer_ms");
        if answers.is_empty() {
            continue;
        }
        let figure = |metric: &str| figure_or_dash(stats::median(record.values(side, metric)));
        table.row([
            side.to_owned(),
            figure("first_answer_ms"),
            figure("usable_s"),
            figure("complete_s"),
            figure("pages_prefetched"),
            figure("pages_lazy"),
            answers.len().to_string(),
        ]);
    }
    table
}
