//! One appliance on one side: its boots, and its work in between.

use std::time::Instant;

use hearth_vmtest::{Disk, Drives, Guest, PlainVm, Result, TestVm, patience};

use super::trace::{self, Trace};
use super::{Bench, MEMORY_MIB, MIB, MIRROR, NAME, RemountError, Side, case};
use crate::host::profile::{DiskRate, Profile};
use crate::record::Record;
use crate::sides;

/// A machine of either kind.
enum Vm {
    Hearth(TestVm),
    Plain(PlainVm),
}

impl Drives for Vm {
    fn guest(&self) -> &Guest {
        match self {
            Vm::Hearth(vm) => vm.guest(),
            Vm::Plain(vm) => vm.guest(),
        }
    }

    fn check_alive(&self, waited: &str) -> Result<()> {
        match self {
            Vm::Hearth(vm) => vm.check_alive(waited),
            Vm::Plain(vm) => vm.check_alive(waited),
        }
    }
}

pub struct Life<'b, 'a> {
    bench: &'b mut Bench<'a>,
    side: Side,
    profile: Profile,
    volumes: usize,
    vm: Vm,
    boots: usize,
}

impl<'b, 'a> Life<'b, 'a> {
    /// Starts the appliance and brings it to the state before the first measured crash: in use, and not for the first time.
    /// `traced`: the guest
    /// records its reads.
    pub fn start(
        bench: &'b mut Bench<'a>,
        side: Side,
        profile: Profile,
        volumes: usize,
        traced: bool,
    ) -> std::result::Result<Self, RemountError> {
        eprintln!("{NAME}: [{}] {volumes} volumes, {}: starting", profile.name(), side.name());
        bench.evict()?;
        bench.rig.limit(Profile::Asis)?;
        let accelerator = bench.rig.accelerator().name();
        let start = |rate| start(bench, side, accelerator, rate, traced);
        let vm =
            bench.rig.launch(profile, start)?.map_err(|source| RemountError::Machine { side: side.name(), source })?;
        let mut life = Life { bench, side, profile, volumes, vm, boots: 0 };
        life.wait_boot()?;
        life.mount_and_look()?;
        life.ready()?;
        life.work()?;
        if side.has_boot_set() {
            // The first boot had no journals to replay, so a boot set needs a second one.
            life.crash(side)?;
            life.wait_boot()?;
            life.mount_and_look()?;
            life.ready()?;
            life.work()?;
        }
        Ok(life)
    }

    /// Crashes the appliance, and measures until it is ready. `side` names the case.
    pub fn crash_and_return(&mut self, side: Side, record: &mut Record) -> std::result::Result<(), RemountError> {
        let case = case(side, self.volumes, self.profile);
        self.bench.rig.limit(self.profile)?;
        let read_before = self.bench.rig.group_read_bytes()?;
        let operations_before = self.bench.rig.group_operations()?;
        let crashed = Instant::now();
        self.crash(side)?;
        self.wait_boot()?;
        let mounted = Instant::now();
        self.mount()?;
        let mount_s = mounted.elapsed().as_secs_f64();
        self.look()?;
        let ready_s = crashed.elapsed().as_secs_f64();
        self.ready()?;
        let read_after = self.bench.rig.group_read_bytes()?;
        let operations_after = self.bench.rig.group_operations()?;
        self.bench.rig.limit(Profile::Asis)?;
        eprintln!(
            "{NAME}: [{}] {} volumes, {}: mounted in {mount_s:.1} s, ready {ready_s:.1} s after the crash",
            self.profile.name(),
            self.volumes,
            side.name()
        );
        record.add(&case, "mount_s", "s", mount_s);
        record.add(&case, "ready_s", "s", ready_s);
        if let Some((before, after)) = read_before.zip(read_after) {
            record.add(&case, "read_mib", "MiB", (after - before) as f64 / MIB);
        }
        if let Some((before, after)) = operations_before.zip(operations_after) {
            record.add(&case, "read_ops", "", (after.0 - before.0) as f64);
            record.add(&case, "write_ops", "", (after.1 - before.1) as f64);
        }
        if side.has_boot_set() {
            self.note_plan(&case, record)?;
        }
        if let (Vm::Hearth(vm), Side::Nvram) = (&self.vm, side) {
            let bytes = vm.status().map_err(|error| self.failed(error))?.memory.nvram_bytes;
            record.add(&case, "nvram_mib", "MiB", bytes as f64 / MIB);
        }
        let extra = match side {
            Side::BootSet | Side::Nvram | Side::Ember | Side::Direct => 0,
            Side::HostCache | Side::HostCacheDropped => self.bench.host_cache_bytes()?,
        };
        record.add(&case, "host_cache_mib", "MiB", extra as f64 / MIB);
        self.work()
    }

    /// Crashes an appliance whose guest records its reads, and returns every read from the crash until it is ready.
    pub fn traced_return(mut self) -> std::result::Result<Trace, RemountError> {
        self.bench.rig.limit(self.profile)?;
        let crashed = Instant::now();
        self.crash(self.side)?;
        self.wait_boot()?;
        self.mount_and_look()?;
        self.sh(trace::READY)?;
        let ready_s = crashed.elapsed().as_secs_f64();
        self.bench.rig.limit(Profile::Asis)?;
        let said = self.sh(trace::TELL)?;
        let side = self.side.name();
        Trace::parse(side, &said, ready_s).ok_or(RemountError::NoFigure { side, figure: "mark of being ready", said })
    }

    /// Crashes the guest. `side` says whether the host keeps its page cache.
    fn crash(&self, side: Side) -> std::result::Result<(), RemountError> {
        self.vm.panic().map_err(|error| self.failed(error))?;
        if side == Side::HostCacheDropped { self.bench.evict() } else { Ok(()) }
    }

    fn wait_boot(&mut self) -> std::result::Result<(), RemountError> {
        self.boots += 1;
        self.vm.wait_boots(self.boots).map(drop).map_err(|error| self.failed(error))
    }

    fn mount_and_look(&self) -> std::result::Result<(), RemountError> {
        self.mount()?;
        self.look()
    }

    fn mount(&self) -> std::result::Result<(), RemountError> {
        self.bench.volumes.mount(&self.vm).map_err(|error| self.failed(error))
    }

    /// Reads every folder and inode of every volume, and checks the lines written earlier.
    fn look(&self) -> std::result::Result<(), RemountError> {
        self.sh("ls -lR /v >/dev/null")?;
        if self.bench.lines.is_empty() {
            return Ok(());
        }
        let lines: Vec<&str> = self.bench.lines.iter().map(String::as_str).collect();
        let got = self.bench.volumes.read(&self.vm).map_err(|error| self.failed(error))?;
        let wanted = self.bench.volumes.expected(&lines);
        if got == wanted {
            return Ok(());
        }
        Err(RemountError::Lost { side: self.side.name(), got: got.len(), wanted: wanted.len() })
    }

    /// Writes to each volume, so that its journal is dirty; then the guest reads other data.
    fn work(&mut self) -> std::result::Result<(), RemountError> {
        let line = format!("line-{}", self.bench.lines.len());
        self.bench.volumes.append(&self.vm, &line).map_err(|error| self.failed(error))?;
        self.bench.lines.push(line);
        let letter = char::from(b'a' + self.bench.volumes.images().len() as u8);
        self.sh(&format!("cat /dev/vd{letter} >/dev/null")).map(drop)
    }

    /// Tells Hearth that the boot is over.
    fn ready(&self) -> std::result::Result<(), RemountError> {
        match (&self.vm, self.side) {
            (Vm::Hearth(vm), side) if side.has_boot_set() => sides::ready(vm).map_err(|error| self.failed(error)),
            _ => Ok(()),
        }
    }

    fn note_plan(&self, case: &str, record: &mut Record) -> std::result::Result<(), RemountError> {
        let Vm::Hearth(vm) = &self.vm else { return Ok(()) };
        let plan = vm.remount_plan().map_err(|error| self.failed(error))?;
        for (metric, unit, value) in [
            ("hit_pct", "%", plan.hit_pct),
            ("hit_inline_pct", "%", plan.in_line_pct),
            ("hit_us_p50", "us", plan.memory_read_us_p50),
            ("hit_us_p99", "us", plan.memory_read_us_p99),
            ("cached_mib", "MiB", Some(plan.resident_bytes as f64 / MIB)),
            ("boot_blocks", "", Some(plan.blocks as f64)),
            ("memory_reads", "", Some(plan.memory_reads as f64)),
            ("reads_beside_writes", "", Some(plan.memory_reads_beside_writes as f64)),
        ] {
            let side = self.side.name();
            let no_figure = || RemountError::NoFigure { side, figure: metric, said: format!("{plan:?}") };
            record.add(case, metric, unit, value.ok_or_else(no_figure)?);
        }
        // A boot with all its journals in NVRAM may read nothing while it writes.
        for (metric, us) in [
            ("hit_beside_writes_us_p50", plan.memory_read_beside_writes_us_p50),
            ("hit_beside_writes_us_p99", plan.memory_read_beside_writes_us_p99),
        ] {
            if let Some(us) = us {
                record.add(case, metric, "us", us);
            }
        }
        Ok(())
    }

    fn sh(&self, command: &str) -> std::result::Result<String, RemountError> {
        self.vm.sh_within(command, patience(60)).map_err(|error| self.failed(error))
    }

    fn failed(&self, source: hearth_vmtest::Error) -> RemountError {
        RemountError::Machine { side: self.side.name(), source }
    }
}

/// Starts the machine. `rate` sets its own limits on hosts without a control group.
fn start(bench: &Bench<'_>, side: Side, accelerator: &str, rate: Option<DiskRate>, traced: bool) -> Result<Vm> {
    let words = if traced { trace::CMDLINE } else { "" };
    let images = || bench.volumes.images().iter().chain([&bench.churn]);
    match side {
        Side::BootSet | Side::Nvram | Side::Ember => {
            let builder =
                TestVm::busybox(NAME).memory_mib(MEMORY_MIB).setting("accelerator", accelerator).cmdline(words);
            let builder =
                images().fold(builder, |builder, image| builder.disk(sides::limited(Disk::in_place(image), rate)));
            let builder = if side.has_boot_set() { sides::with_boot_set(builder) } else { builder };
            let builder = match side {
                Side::Nvram => builder.setting("nvram", bench.volumes.nvram(MIRROR)?),
                _ => builder,
            };
            builder.start().map(Vm::Hearth)
        }
        Side::Direct | Side::HostCache | Side::HostCacheDropped => {
            let builder = PlainVm::busybox(NAME)
                .memory_mib(MEMORY_MIB)
                .accelerator(accelerator)
                .cmdline("panic=-1")
                .cmdline(words);
            // Without these, QEMU would power off at pvpanic's report.
            let builder = builder.args(["-action", "panic=none"]);
            let cache = if side == Side::Direct { "cache=none,aio=io_uring" } else { "cache=writeback" };
            let throttling = rate.map_or_else(String::new, DiskRate::qemu_throttling);
            let drive = format!("{cache}{throttling}");
            images().fold(builder, |builder, image| builder.drive(image, &drive)).start().map(Vm::Plain)
        }
    }
}
