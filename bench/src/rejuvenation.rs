//! Bench `rejuvenation`: how long a guest stands still when its QEMU is replaced, and what else one would do.
//!
//! for each size of RAM, mostly filled: Hearth hops -> QEMU's own `cpr-transfer` -> all of RAM to a file and back -> a cold
//! reboot. One side at a time. A pause is from the old QEMU's STOP to the new one's RESUME, by their own clocks, and for
//! Hearth from when the disks are asked to stop, which is earlier; for the reboot it is from the order to a guest that takes commands.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_vmtest::{Disk, Drives, PlainVm, TestVm, artifacts, patience};
use serde_json::{Value, json};

use crate::host::facts::Accelerator;
use crate::record::Record;
use crate::stats;
use crate::table::{Table, figure_or_dash};

pub const NAME: &str = "rejuvenation";

const HEARTH: &str = "hearth";
const CPR: &str = "cpr-transfer";
const FILE: &str = "file";
const COLD: &str = "cold-reboot";

#[derive(Debug, thiserror::Error)]
pub enum RejuvenationError {
    #[error("machine {side}")]
    Machine { side: &'static str, source: hearth_vmtest::Error },
    #[error("{side} at {memory_mib} MiB: {what}")]
    Odd { side: &'static str, memory_mib: u64, what: String },
}

pub struct Options {
    pub quick: bool,
    pub accelerator: Accelerator,
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), RejuvenationError> {
    let (sizes, hops): (&[u64], u32) = if options.quick { (&[512], 3) } else { (&[512, 2048, 6144], 20) };
    for &memory_mib in sizes {
        hearth(options, memory_mib, hops, record)?;
        // What cannot be done here is a finding, not the end of the bench.
        for (side, measured) in [
            (CPR, plain(options, CPR, memory_mib, hops.min(5), record)),
            (FILE, plain(options, FILE, memory_mib, hops.min(3), record)),
        ] {
            if let Err(error) = measured {
                record.left_out.push(format!("{side}@{memory_mib}: {}", crate::chain(&error)));
            }
        }
    }
    summarise(record, sizes);
    Ok(())
}

fn case(side: &str, memory_mib: u64) -> String {
    format!("{side}@{memory_mib}")
}

/// Memory that the guest keeps dirtied: most of it.
fn fill(vm: &impl Drives, memory_mib: u64) -> hearth_vmtest::Result<()> {
    let mib = memory_mib * 3 / 4 - 64;
    let command = format!("(probe hog {mib} >/tmp/hog &) ; while ! grep -q hogging /tmp/hog; do sleep 0.2; done");
    vm.run_within(&command, patience(120)).map(drop)
}

fn hearth(options: &Options, memory_mib: u64, hops: u32, record: &mut Record) -> Result<(), RejuvenationError> {
    let failed = |source| RejuvenationError::Machine { side: HEARTH, source };
    let builder = TestVm::busybox("bench").memory_mib(memory_mib).disk(Disk::empty(64));
    let vm = builder.setting("accelerator", options.accelerator.name()).boot().map_err(failed)?;
    fill(&vm, memory_mib).map_err(failed)?;
    let nonce = vm.nonce().map_err(failed)?;
    let load = "(while :; do dd if=/dev/urandom of=/dev/vda bs=64k count=64 oflag=direct || echo bad >>/tmp/bad; done) >/dev/null 2>&1 &";
    vm.sh(load).map_err(failed)?;
    for _ in 0..hops {
        vm.rejuvenate().map_err(failed)?;
        let status = vm.status().map_err(failed)?;
        let last = &status["last_rejuvenation"];
        let figure = |key: &str| last[key].as_f64().unwrap_or(f64::NAN);
        record.add(&case(HEARTH, memory_mib), "pause_ms", "ms", figure("pause_ms"));
        record.add(&case(HEARTH, memory_mib), "state_kib", "KiB", figure("state_bytes") / 1024.0);
    }
    if vm.nonce().map_err(failed)? != nonce {
        return Err(RejuvenationError::Odd { side: HEARTH, memory_mib, what: "the guest was rebooted".into() });
    }
    let bad = vm.run("cat /tmp/bad 2>/dev/null | wc -l").map_err(failed)?.text();
    record.add(&case(HEARTH, memory_mib), "io_errors", "", bad.trim().parse().unwrap_or(f64::NAN));
    let began = Instant::now();
    vm.cli(&["reboot", vm.name(), "--cold", "--force"]).map_err(failed)?;
    vm.wait_incarnation(2).map_err(failed)?;
    record.add(&case(COLD, memory_mib), "pause_ms", "ms", began.elapsed().as_secs_f64() * 1e3);
    Ok(())
}

/// QEMU alone: by `cpr-transfer`, or with its memory through a file.
fn plain(
    options: &Options,
    side: &'static str,
    memory_mib: u64,
    hops: u32,
    record: &mut Record,
) -> Result<(), RejuvenationError> {
    let failed = |source| RejuvenationError::Machine { side, source };
    let folder = tempfile::Builder::new().prefix("hearth-bench-").tempdir_in("/dev/shm");
    let folder = folder.map_err(|error| RejuvenationError::Odd { side, memory_mib, what: error.to_string() })?;
    let qemu = if side == CPR { artifacts::qemu_10() } else { artifacts::installed_qemu() }.map_err(failed)?;
    let boot = |incoming: &[String]| {
        let machine = match side {
            CPR => "pc-q35-10.0,memory-backend=ram,aux-ram-share=on",
            _ => "pc-q35-7.2,memory-backend=ram",
        };
        let ram = format!(
            "memory-backend-file,id=ram,size={memory_mib}M,mem-path={}/ram{},share=on",
            folder.path().display(),
            if side == CPR {
                ""
            } else if incoming.is_empty() {
                "-0"
            } else {
                "-1"
            }
        );
        let builder = PlainVm::busybox("plain").memory_mib(memory_mib).machine(machine).qemu(&qemu);
        let data = data_folders(&qemu).into_iter().flat_map(|folder| ["-L".to_owned(), folder]);
        builder
            .accelerator(options.accelerator.name())
            .args(data)
            .args(["-vga", "none", "-object", &ram])
            .args(incoming)
    };
    for _ in 0..hops {
        let old = boot(&[]).boot().map_err(failed)?;
        fill(&old, memory_mib).map_err(failed)?;
        let pause = match side {
            CPR => cpr(&old, &boot, folder.path()),
            _ => through_file(&old, &boot, folder.path()),
        };
        record.add(&case(side, memory_mib), "pause_ms", "ms", pause.map_err(failed)?.as_secs_f64() * 1e3);
    }
    Ok(())
}

type Boot<'a> = &'a dyn Fn(&[String]) -> hearth_vmtest::PlainVmBuilder;

fn through_file(old: &PlainVm, boot: Boot<'_>, folder: &Path) -> hearth_vmtest::Result<Duration> {
    let new = boot(&["-incoming".into(), "defer".into()]).start()?;
    for vm in [old, &new] {
        let events = json!({ "capabilities": [{ "capability": "events", "state": true }] });
        vm.qmp().execute("migrate-set-capabilities", events)?;
        vm.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 40 }))?;
    }
    let file = folder.join("state");
    old.qmp().execute("stop", json!({}))?;
    old.qmp().execute("migrate", json!({ "uri": format!("exec:cat > {}", file.display()) }))?;
    wait_completed(old)?;
    new.qmp().execute("migrate-incoming", json!({ "uri": format!("exec:cat {}", file.display()) }))?;
    between(old, &new)
}

fn cpr(old: &PlainVm, boot: Boot<'_>, folder: &Path) -> hearth_vmtest::Result<Duration> {
    let (main, cpr) = (folder.join("main.sock"), folder.join("cpr.sock"));
    let channel = |kind: &str, path: &PathBuf| json!({ "channel-type": kind, "addr": { "transport": "socket", "type": "unix", "path": path } });
    let incoming =
        ["-incoming".into(), format!("unix:{}", main.display()), "-incoming".into(), channel("cpr", &cpr).to_string()];
    let new = boot(&incoming).start()?;
    let deadline = Instant::now() + patience(10);
    while !cpr.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    old.qmp().execute("migrate-set-parameters", json!({ "mode": "cpr-transfer" }))?;
    old.qmp().execute("migrate", json!({ "channels": [channel("main", &main), channel("cpr", &cpr)] }))?;
    let pause = between(old, &new);
    for socket in [main, cpr] {
        // The next hop makes its own.
        let _ = std::fs::remove_file(socket);
    }
    pause
}

fn wait_completed(vm: &PlainVm) -> hearth_vmtest::Result<()> {
    let over = |event: &Value| matches!(event["data"]["status"].as_str(), Some("completed" | "failed"));
    let event = vm.qmp().find_event("MIGRATION", patience(60), over)?;
    if event["data"]["status"] == "completed" {
        return Ok(());
    }
    Err(hearth_vmtest::Error::Qmp { command: "migrate".into(), message: "failed".into() })
}

fn between(old: &PlainVm, new: &PlainVm) -> hearth_vmtest::Result<Duration> {
    let at = |event: &Value| {
        let part = |key: &str| event["timestamp"][key].as_u64().unwrap_or(0);
        Duration::from_secs(part("seconds")) + Duration::from_micros(part("microseconds"))
    };
    let stopped = old.qmp().find_event("STOP", patience(20), |event| event["event"] == "STOP")?;
    let resumed = new.qmp().find_event("RESUME", patience(60), |event| event["event"] == "RESUME")?;
    Ok(at(&resumed).saturating_sub(at(&stopped)))
}

/// Firmware of a QEMU that was unpacked rather than installed.
fn data_folders(qemu: &Path) -> Vec<String> {
    let Some(usr) = qemu.parent().and_then(Path::parent) else { return Vec::new() };
    let folders = ["share/seabios", "share/qemu", "lib/ipxe/qemu"].map(|folder| usr.join(folder));
    folders.iter().filter(|folder| folder.is_dir()).map(|folder| folder.display().to_string()).collect()
}

fn summarise(record: &mut Record, sizes: &[u64]) {
    let values = |side: &str, size: u64, metric: &str| record.values(&case(side, size), metric).to_vec();
    let mut each = Vec::new();
    for (side, prefix) in [(HEARTH, ""), (CPR, "cpr_"), (FILE, "file_"), (COLD, "cold_")] {
        for &size in sizes {
            let pauses = values(side, size, "pause_ms");
            if let Some(median) = stats::median(&pauses) {
                each.push((format!("{prefix}pause_ms_median_{size}"), median));
                each.push((format!("{prefix}pause_ms_max_{size}"), pauses.iter().copied().fold(0.0, f64::max)));
            }
        }
    }
    let all: Vec<f64> = sizes.iter().flat_map(|&size| values(HEARTH, size, "pause_ms")).collect();
    let (smallest, largest) = (sizes[0], sizes[sizes.len() - 1]);
    let median = |side: &str, size: u64| stats::median(&values(side, size, "pause_ms"));
    let slope = median(HEARTH, smallest).zip(median(HEARTH, largest)).filter(|_| smallest != largest);
    let ratio = |one: Option<f64>, other: Option<f64>| Some(one? / other?);
    let figures = [
        ("pause_ms_median", stats::median(&all)),
        ("pause_ms_max", all.iter().copied().reduce(f64::max)),
        ("pause_slope_ms_per_gib", slope.map(|(low, high)| (high - low) / ((largest - smallest) as f64 / 1024.0))),
        ("pause_vs_cpr_ratio", ratio(median(HEARTH, smallest), median(CPR, smallest))),
        ("downtime_vs_cold_ratio", ratio(median(HEARTH, smallest), median(COLD, smallest))),
        ("state_kib", stats::median(&values(HEARTH, smallest, "state_kib"))),
        ("io_errors", Some(sizes.iter().flat_map(|&size| values(HEARTH, size, "io_errors")).sum())),
    ];
    for (metric, value) in figures.into_iter().chain(each.iter().map(|(metric, value)| (metric.as_str(), Some(*value))))
    {
        record.summarise(metric, value);
    }
}

pub fn table(record: &Record) -> Table {
    let mut table = Table::new(["side, RAM", "pause ms (median)", "pause ms (max)", "hops", "state KiB"]);
    let mut cases: Vec<&str> = record.rows.iter().map(|row| row.case.as_str()).collect();
    cases.dedup();
    for case in cases {
        let pauses = record.values(case, "pause_ms");
        if pauses.is_empty() {
            continue;
        }
        let (side, size) = case.split_once('@').unwrap_or((case, "?"));
        table.row([
            format!("{side}, {size} MiB"),
            figure_or_dash(stats::median(pauses)),
            figure_or_dash(pauses.iter().copied().reduce(f64::max)),
            pauses.len().to_string(),
            figure_or_dash(stats::median(record.values(case, "state_kib"))),
        ]);
    }
    table
}
