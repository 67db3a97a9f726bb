//! Bench `rejuvenate`: the pause of a guest whose QEMU is replaced, and the alternatives.
//!
//! for each size of RAM, mostly filled: Hearth hops, and a cold reboot -> QEMU's own `cpr-transfer`; then once more; then all of
//! RAM to a file and back. One side runs at a time. A pause is from the old QEMU's STOP to the new one's RESUME, by their own
//! clocks, for all sides; for the reboot it is from the request to a guest that takes commands. All have a disk under the same
//! load, as is usual for their QEMU: Hearth's is served by the keeper, the others' is an image that QEMU opens.
//! `cpr-transfer-bare` has no disk.
//! `cpr-transfer` needs QEMU 10, so it is compared with Hearth on that same QEMU, `hearth-qemu10`.
//!
//! STOP comes when the disks have drained (Hearth's pause begins when they are asked to), and RESUME before the guest has done
//! anything. So there is a second measure: a process in the guest writes to the console all the time, and the gap is the longest
//! silence around a hop, heard from outside. The longest silence without a hop, over the same time, is recorded beside it.
//!
//! Then `networks`: a busy TCP connection on each kind of network. Then `many`: machines that hop at the same time, and reboot at
//! the same time. `host_reload`: the guests of an emulated host whose kernel was replaced.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_vmtest::clock::Reading;
use hearth_vmtest::{Disk, Drives, PlainVm, TestVm, artifacts, patience};
use serde_json::{Value, json};

use crate::host::facts::Accelerator;
use crate::record::Record;
use crate::responsiveness::{self, Responsiveness};
use crate::stats::{self, ratio};
use crate::table::{Table, figure_or_dash};

mod host_reload;
mod many;
mod networks;
mod silence;

use silence::Silence;

pub const NAME: &str = "rejuvenate";

const HEARTH: &str = "hearth";
const HEARTH_10: &str = "hearth-qemu10";
const CPR: &str = "cpr-transfer";
const CPR_BARE: &str = "cpr-transfer-bare";
const FILE: &str = "file";
const COLD: &str = "cold-reboot";

#[derive(Debug, thiserror::Error)]
pub enum RejuvenationError {
    #[error("machine {side}")]
    Machine { side: &'static str, source: hearth_vmtest::Error },
    #[error("{side} at {memory_mib} MiB: {what}")]
    Odd { side: &'static str, memory_mib: u64, what: String },
}

/// Parts of the bench, which can be run separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The pause, at several sizes of memory, and other ways to replace QEMU
    Memory,
    /// A TCP connection on each kind of network
    Networks,
    /// Another host kernel
    HostReload,
    /// Machines that hop, and reboot, together
    Many,
}

impl Part {
    pub const ALL: [Self; 4] = [Self::Memory, Self::Networks, Self::HostReload, Self::Many];
}

pub struct Options {
    pub quick: bool,
    pub accelerator: Accelerator,
    pub parts: Vec<Part>,
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), RejuvenationError> {
    let (accelerator, quick) = (options.accelerator.name(), options.quick);
    for part in &options.parts {
        match part {
            Part::Memory => sizes(options, record)?,
            Part::Networks => networks::run(accelerator, quick, record)?,
            Part::HostReload if quick => host_reload::drill(accelerator, record)?,
            Part::HostReload => host_reload::take_up(record),
            Part::Many => many::run(accelerator, quick, record)?,
        }
    }
    Ok(())
}

fn sizes(options: &Options, record: &mut Record) -> Result<(), RejuvenationError> {
    let (sizes, rounds, hops): (&[u64], u32, u32) =
        if options.quick { (&[512], 1, 2) } else { (&[512, 2048, 6144], 2, 10) };
    for &memory_mib in sizes {
        for _ in 0..rounds {
            hearth(options, HEARTH, memory_mib, hops, record)?;
            for (side, hops) in [(HEARTH_10, hops), (CPR, hops), (CPR_BARE, hops.min(5))] {
                other(options, side, memory_mib, hops, record);
            }
        }
        other(options, FILE, memory_mib, if options.quick { 1 } else { 3 }, record);
    }
    summarise(record, sizes);
    Ok(())
}

/// Measures another side. One that does not run here is recorded as left out; it does not end the bench.
fn other(options: &Options, side: &'static str, memory_mib: u64, hops: u32, record: &mut Record) {
    let measured = match side {
        HEARTH_10 => hearth(options, side, memory_mib, hops, record),
        _ => plain(options, side, memory_mib, hops, record),
    };
    if let Err(error) = measured {
        record.left_out.push(format!("{side}@{memory_mib}: {}", crate::chain(&error)));
    }
}

fn case(side: &str, memory_mib: u64) -> String {
    format!("{side}@{memory_mib}")
}

/// A file in the guest's memory whose contents can be checked word by word.
const PATTERN: &str = "/tmp/pattern";
const PATTERN_BYTES: u64 = 32 << 20;
const SEED: u64 = 11;

/// Script that writes to the disk all the time.
const LOAD: &str = "(while :; do dd if=/dev/urandom of=/dev/vda bs=64k count=64 oflag=direct || echo bad >>/tmp/bad; done) >/dev/null 2>&1 &";
const DISK_MIB: u64 = 64;
/// Time after a hop in which the old QEMU releases its resources.
const AFTERMATH: Duration = Duration::from_secs(1);

/// Fills most of the guest's memory with dirty pages.
fn fill(vm: &impl Drives, memory_mib: u64) -> hearth_vmtest::Result<()> {
    let mib = memory_mib * 3 / 4 - 64;
    let command = format!("(probe hog {mib} >/tmp/hog &) ; while ! grep -q hogging /tmp/hog; do sleep 0.2; done");
    vm.run_within(&command, patience(120)).map(drop)
}

fn hearth(
    options: &Options,
    side: &'static str,
    memory_mib: u64,
    hops: u32,
    record: &mut Record,
) -> Result<(), RejuvenationError> {
    let failed = |source| RejuvenationError::Machine { side, source };
    let builder = TestVm::busybox("bench").memory_mib(memory_mib).disk(Disk::empty(DISK_MIB));
    let builder = builder.setting("accelerator", options.accelerator.name());
    let builder = match side {
        HEARTH_10 => builder.setting("qemu", artifacts::qemu_10().map_err(failed)?.display().to_string()),
        _ => builder,
    };
    let vm = builder.boot().map_err(failed)?;
    fill(&vm, memory_mib).map_err(failed)?;
    let nonce = vm.nonce().map_err(failed)?;
    vm.sh(&format!("probe fill {PATTERN} {PATTERN_BYTES} {SEED}")).map_err(failed)?;
    vm.sh(LOAD).map_err(failed)?;
    let clocks = Reading::take(&vm).map_err(failed)?;
    let silence = Silence::listen(vm.guest()).map_err(failed)?;
    let responsiveness = Responsiveness::watch(vm.api());
    for _ in 0..hops {
        let began = Instant::now();
        vm.rejuvenate().map_err(failed)?;
        let ended = Instant::now();
        record.add(&case(side, memory_mib), "gap_ms", "ms", silence.longest(&[vm.guest()], began, ended));
        // Then measure as long again without a hop.
        std::thread::sleep(AFTERMATH + (ended - began));
        let quiet = silence.longest(&[vm.guest()], ended + AFTERMATH, Instant::now());
        record.add(&case(side, memory_mib), "gap_without_ms", "ms", quiet);
        let last = vm.status().map_err(failed)?.last_rejuvenation;
        let pause_ms = last.as_ref().and_then(|last| last.pause_ms).unwrap_or(f64::NAN);
        let state_bytes = last.and_then(|last| last.state_bytes).map_or(f64::NAN, |bytes| bytes as f64);
        record.add(&case(side, memory_mib), "pause_ms", "ms", pause_ms);
        record.add(&case(side, memory_mib), "state_kib", "KiB", state_bytes / 1024.0);
    }
    responsiveness.end(&case(side, memory_mib), record);
    silence.end(&vm).map_err(failed)?;
    let behind_s = Reading::take(&vm).map_err(failed)?.behind_s(&clocks);
    let behind = (behind_s.start() + behind_s.end()) / 2.0 * 1e3 / f64::from(hops);
    record.add(&case(side, memory_mib), "clock_behind_ms_per_hop", "ms", behind);
    if vm.nonce().map_err(failed)? != nonce {
        return Err(RejuvenationError::Odd { side, memory_mib, what: "the guest has rebooted".into() });
    }
    let bad = vm.run("cat /tmp/bad 2>/dev/null | wc -l").map_err(failed)?.text();
    record.add(&case(side, memory_mib), "io_errors", "", bad.trim().parse().unwrap_or(f64::NAN));
    let verified = vm.run_within(&format!("probe verify {PATTERN} {SEED}"), patience(60)).map_err(failed)?;
    record.add(&case(side, memory_mib), "ram_errors", "", f64::from(verified.status.min(1)));
    if side == HEARTH_10 {
        return Ok(());
    }
    let began = Instant::now();
    vm.cli(&["reboot", vm.name(), "--cold", "--force"]).map_err(failed)?;
    vm.wait_incarnation(2).map_err(failed)?;
    record.add(&case(COLD, memory_mib), "pause_ms", "ms", began.elapsed().as_secs_f64() * 1e3);
    Ok(())
}

/// Measures QEMU alone: with `cpr-transfer`, or with its memory through a file.
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
    let image = tempfile::Builder::new().prefix("hearth-bench-").tempfile();
    let image = image.and_then(|image| image.as_file().set_len(DISK_MIB << 20).map(|()| image));
    let image = image.map_err(|error| RejuvenationError::Odd { side, memory_mib, what: error.to_string() })?;
    let qemu = if side == FILE { artifacts::installed_qemu() } else { artifacts::qemu_10() }.map_err(failed)?;
    let boot = |number: u32, incoming: &[String]| {
        // With `cpr-transfer` memory stays where it is; through a file it moves to another file.
        let (machine, ram) = match side {
            FILE => ("pc-q35-7.2,memory-backend=ram", number % 2),
            _ => ("pc-q35-10.0,memory-backend=ram,aux-ram-share=on", 0),
        };
        let path = folder.path().join(format!("ram-{ram}"));
        let ram = format!("memory-backend-file,id=ram,size={memory_mib}M,mem-path={},share=on", path.display());
        let builder = PlainVm::busybox("plain").memory_mib(memory_mib).machine(machine).qemu(&qemu);
        let builder = match side {
            CPR_BARE => builder,
            _ => builder.drive(image.path(), "cache.direct=on,aio=io_uring"),
        };
        builder.accelerator(options.accelerator.name()).args(["-vga", "none", "-object", &ram]).args(incoming)
    };
    let mut old = boot(0, &[]).boot().map_err(failed)?;
    fill(&old, memory_mib).map_err(failed)?;
    if side != CPR_BARE {
        old.sh(LOAD).map_err(failed)?;
    }
    let silence = Silence::listen(old.guest()).map_err(failed)?;
    for number in 1..=hops {
        let boot = |incoming: &[String]| boot(number, incoming);
        let hop = match side {
            FILE => through_file(&old, &boot, folder.path()),
            _ => cpr(&old, &boot, folder.path()),
        };
        let Hop { new, pause, began } = hop.map_err(failed)?;
        record.add(&case(side, memory_mib), "pause_ms", "ms", pause.as_secs_f64() * 1e3);
        let gap = silence.longest(&[old.guest(), new.guest()], began, Instant::now());
        record.add(&case(side, memory_mib), "gap_ms", "ms", gap);
        old = new;
        if side == FILE {
            // This was the memory of the QEMU that has just ended.
            let _ = std::fs::remove_file(folder.path().join(format!("ram-{}", (number + 1) % 2)));
        }
    }
    Ok(())
}

/// A finished hop.
struct Hop {
    new: PlainVm,
    pause: Duration,
    began: Instant,
}

type Boot<'a> = &'a dyn Fn(&[String]) -> hearth_vmtest::PlainVmBuilder;

fn through_file(old: &PlainVm, boot: Boot<'_>, folder: &Path) -> hearth_vmtest::Result<Hop> {
    let new = boot(&["-incoming".into(), "defer".into()]).start()?;
    new.guest().watch_arrivals();
    for vm in [old, &new] {
        vm.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 40 }))?;
    }
    let file = folder.join("state");
    let began = Instant::now();
    old.qmp().execute("stop", json!({}))?;
    old.qmp().execute("migrate", json!({ "uri": format!("exec:cat > {}", file.display()) }))?;
    wait_completed(old)?;
    new.qmp().execute("migrate-incoming", json!({ "uri": format!("exec:cat {}", file.display()) }))?;
    // A guest that was stopped before it was sent arrives stopped.
    wait_completed(&new)?;
    new.qmp().execute("cont", json!({}))?;
    let pause = between(old, &new)?;
    Ok(Hop { new, pause, began })
}

fn cpr(old: &PlainVm, boot: Boot<'_>, folder: &Path) -> hearth_vmtest::Result<Hop> {
    let (main, cpr) = (folder.join("main.sock"), folder.join("cpr.sock"));
    for socket in [&main, &cpr] {
        // The previous hop's socket may be left.
        let _ = std::fs::remove_file(socket);
    }
    let channel = |kind: &str, path: &PathBuf| json!({ "channel-type": kind, "addr": { "transport": "socket", "type": "unix", "path": path } });
    let incoming =
        ["-incoming".into(), format!("unix:{}", main.display()), "-incoming".into(), channel("cpr", &cpr).to_string()];
    let new = boot(&incoming).start()?;
    new.guest().watch_arrivals();
    let deadline = Instant::now() + patience(10);
    while !cpr.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    old.qmp().execute("migrate-set-parameters", json!({ "mode": "cpr-transfer" }))?;
    let began = Instant::now();
    old.qmp().execute("migrate", json!({ "channels": [channel("main", &main), channel("cpr", &cpr)] }))?;
    let pause = between(old, &new)?;
    Ok(Hop { new, pause, began })
}

/// Waits until the migration has completed. It polls, because a QEMU that took its guest from another one has an earlier
/// migration's event.
fn wait_completed(vm: &PlainVm) -> hearth_vmtest::Result<()> {
    let deadline = Instant::now() + patience(60);
    let failed = |message: &str| hearth_vmtest::Error::Qmp { command: "migrate".into(), message: message.into() };
    loop {
        let said = vm.qmp().execute("query-migrate", json!({}))?;
        match said["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => return Err(failed("failed")),
            _ if Instant::now() > deadline => return Err(failed("does not end")),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
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

fn summarise(record: &mut Record, sizes: &[u64]) {
    let values = |side: &str, size: u64, metric: &str| record.values(&case(side, size), metric).to_vec();
    let mut each = Vec::new();
    let sides = [HEARTH, HEARTH_10, CPR, CPR_BARE, FILE, COLD];
    for (side, prefix) in sides.into_iter().zip(["", "qemu10_", "cpr_", "cpr_bare_", "file_", "cold_"]) {
        for &size in sizes {
            let pauses = values(side, size, "pause_ms");
            if let Some(median) = stats::median(&pauses) {
                each.push((format!("{prefix}pause_ms_median_{size}"), median));
                each.push((format!("{prefix}pause_ms_max_{size}"), pauses.iter().copied().fold(0.0, f64::max)));
            }
            if let Some(median) = stats::median(&values(side, size, "gap_ms")) {
                each.push((format!("{prefix}gap_ms_median_{size}"), median));
            }
        }
    }
    let of_all_of =
        |side: &str, metric: &str| -> Vec<f64> { sizes.iter().flat_map(|&size| values(side, size, metric)).collect() };
    let of_all = |metric: &str| of_all_of(HEARTH, metric);
    let errors = |metric: &str| of_all(metric).into_iter().chain(of_all_of(HEARTH_10, metric)).sum();
    let all = of_all("pause_ms");
    let same_qemu = stats::median(&of_all_of(HEARTH_10, "pause_ms"));
    let (smallest, largest) = (sizes[0], sizes[sizes.len() - 1]);
    let median = |side: &str, size: u64| stats::median(&values(side, size, "pause_ms"));
    let slope = median(HEARTH, smallest).zip(median(HEARTH, largest)).filter(|_| smallest != largest);
    let figures = [
        ("pause_ms_median", stats::median(&all)),
        ("pause_ms_max", all.iter().copied().reduce(f64::max)),
        ("gap_ms_median", stats::median(&of_all("gap_ms"))),
        ("gap_ms_max", of_all("gap_ms").into_iter().reduce(f64::max)),
        ("gap_without_ms_median", stats::median(&of_all("gap_without_ms"))),
        ("gap_without_ms_max", of_all("gap_without_ms").into_iter().reduce(f64::max)),
        ("pause_slope_ms_per_gib", slope.map(|(low, high)| (high - low) / ((largest - smallest) as f64 / 1024.0))),
        ("pause_vs_cpr_ratio", ratio(same_qemu, stats::median(&of_all_of(CPR, "pause_ms")))),
        ("pause_vs_cpr_bare_ratio", ratio(same_qemu, stats::median(&of_all_of(CPR_BARE, "pause_ms")))),
        ("pause_installed_vs_cpr_ratio", ratio(stats::median(&all), stats::median(&of_all_of(CPR, "pause_ms")))),
        ("downtime_vs_cold_ratio", ratio(median(HEARTH, smallest), median(COLD, smallest))),
        ("state_kib", stats::median(&values(HEARTH, smallest, "state_kib"))),
        ("clock_behind_ms_per_hop", stats::median(&of_all("clock_behind_ms_per_hop"))),
        ("ram_errors", Some(errors("ram_errors"))),
        ("io_errors", Some(errors("io_errors"))),
    ];
    record.summarise_all(figures);
    record.summarise_all(each.into_iter().map(|(metric, value)| (metric, Some(value))));
    responsiveness::summarise(record);
}

pub fn table(record: &Record) -> Table {
    let mut table = Table::new([
        "side, RAM",
        "pause ms (median)",
        "pause ms (max)",
        "gap ms (median)",
        "gap ms (max)",
        "hops",
        "state KiB",
    ]);
    for case in record.cases() {
        let pauses = record.values(case, "pause_ms");
        if pauses.is_empty() {
            continue;
        }
        let (side, size) = case.split_once('@').unwrap_or((case, "?"));
        table.row([
            if size.parse::<u64>().is_ok() { format!("{side}, {size} MiB") } else { format!("{side}, {size}") },
            figure_or_dash(stats::median(pauses)),
            figure_or_dash(pauses.iter().copied().reduce(f64::max)),
            figure_or_dash(stats::median(record.values(case, "gap_ms"))),
            figure_or_dash(record.values(case, "gap_ms").iter().copied().reduce(f64::max)),
            pauses.len().to_string(),
            figure_or_dash(stats::median(record.values(case, "state_kib"))),
        ]);
    }
    table
}
