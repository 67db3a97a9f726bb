//! Sides (a), (b) and (c): the machine under QEMU alone, with QEMU's own features.
//!
//! panic -> paused -> [dump-guest-memory -> [makedumpfile]] -> system_reset, cont -> first HTTP 200
//!
//! The same QEMU process resets the guest, which is QEMU's quickest way back. Its disk is `cache=none,aio=io_uring`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use hearth_vmtest::artifacts::Debian;
use hearth_vmtest::{Drives, PlainVm, page_cache, patience, qemu_dump};
use serde_json::json;

use super::{Bench, CrashError, MIB, guest};
use crate::host::profile::{DiskRate, Profile};
use crate::load;
use crate::record::Record;
use crate::sides::{Ports, copy_root};

const SIDE: &str = "qemu";

pub struct Machine<'a> {
    bench: &'a Bench<'a>,
    profile: Profile,
    vm: PlainVm,
    ports: Ports,
    crashes: usize,
}

struct Outage {
    downtime_s: f64,
    dumped: Option<Dumped>,
}

struct Dumped {
    dump_s: f64,
    dump_mib: f64,
    filter_s: f64,
    filtered_mib: f64,
}

impl<'a> Machine<'a> {
    /// Starts the machine without waiting.
    pub fn launch(bench: &'a Bench<'a>, profile: Profile) -> Result<Self, CrashError> {
        eprintln!("crash: [{}] {SIDE}: starting", profile.name());
        let image = bench.rig.folder().join("qemu.img");
        copy_root(&image)?;
        let evicted = page_cache::evict(&image).and_then(|()| page_cache::evict(&bench.data));
        evicted.map_err(|source| CrashError::File { path: image.clone(), source })?;
        let ports = Ports::free();
        bench.rig.limit(Profile::Asis)?;
        let start = |rate| builder(bench, &image, ports, rate).start();
        let vm = bench.rig.launch(profile, start)?.map_err(machine_error)?;
        Ok(Machine { bench, profile, vm, ports, crashes: 0 })
    }

    /// Crashes without a dump `repeats` times, and once with one.
    pub fn measure(mut self, record: &mut Record) -> Result<(), CrashError> {
        self.wait_service()?;
        self.wait_agent()?;
        for _ in 0..self.bench.shape.repeats {
            let outage = self.crash(None)?;
            eprintln!("crash: [{}] plain reboot: {:.1} s", self.profile.name(), outage.downtime_s);
            self.add("plain-reboot", "downtime_s", outage.downtime_s, record);
        }
        // The writer of the dump and makedumpfile have no limits of their own.
        self.bench.rig.must_limit_all(self.profile, "qemu-dump")?;
        guest::fill(&self.vm, self.bench.shape).map_err(machine_error)?;
        let files = DumpFiles::in_folder(self.bench.rig.folder());
        let outage = self.crash(Some(&files))?;
        files.remove();
        self.dumped(&outage, record);
        Ok(())
    }

    fn dumped(&self, outage: &Outage, record: &mut Record) {
        let dumped = outage.dumped.as_ref().expect("a crash with files for a dump is dumped");
        eprintln!(
            "crash: [{}] dump {:.1} s, makedumpfile {:.1} s, then reboot: {:.1} s in all",
            self.profile.name(),
            dumped.dump_s,
            dumped.filter_s,
            outage.downtime_s
        );
        for (side, downtime_s, dump_s, dump_mib) in [
            // Without the filter's share this is the outage of an operator who does not filter, since the guest is paused
            // meanwhile.
            ("qemu-dump", outage.downtime_s - dumped.filter_s, dumped.dump_s, dumped.dump_mib),
            ("qemu-makedumpfile", outage.downtime_s, dumped.dump_s + dumped.filter_s, dumped.filtered_mib),
        ] {
            self.add(side, "downtime_s", downtime_s, record);
            self.add(side, "dump_s", dump_s, record);
            self.add(side, "dump_mib", dump_mib, record);
        }
        if self.bench.shape.repeats == 0 {
            // A quick run has no separate crash for this figure: it is the rest of this outage.
            let reboot_s = outage.downtime_s - dumped.dump_s - dumped.filter_s;
            self.add("plain-reboot", "downtime_s", reboot_s, record);
        }
    }

    fn add(&self, side: &str, metric: &str, value: f64, record: &mut Record) {
        let unit = if metric.ends_with("_mib") { "MiB" } else { "s" };
        record.add(&format!("{side}@{}", self.profile.name()), metric, unit, value);
    }

    /// Measures the time from the request to panic to the first answer.
    fn crash(&mut self, dump: Option<&DumpFiles>) -> Result<Outage, CrashError> {
        self.bench.rig.limit(self.profile)?;
        self.crashes += 1;
        let crashed = Instant::now();
        self.vm.panic().map_err(machine_error)?;
        let qmp = self.vm.qmp();
        qmp.wait_nth_event("GUEST_PANICKED", self.crashes, patience(10)).map_err(machine_error)?;
        let dumped = dump.map(|files| self.dump(files)).transpose()?;
        for command in ["system_reset", "cont"] {
            qmp.execute(command, json!({})).map_err(machine_error)?;
        }
        self.wait_service()?;
        let downtime_s = crashed.elapsed().as_secs_f64();
        self.bench.rig.limit(Profile::Asis)?;
        self.wait_agent()?;
        Ok(Outage { downtime_s, dumped })
    }

    fn dump(&self, files: &DumpFiles) -> Result<Dumped, CrashError> {
        let begun = Instant::now();
        let mut writer = self.bench.rig.launch(self.profile, |_| files.start_writer())??;
        let protocol = format!("file:{}", files.pipe.display());
        let requested = self.vm.qmp().execute("dump-guest-memory", json!({ "paging": false, "protocol": protocol }));
        requested.map_err(machine_error)?;
        wait(&mut writer, "the writer of the dump")?;
        let dump_s = begun.elapsed().as_secs_f64();
        // makedumpfile refuses the file without this. It does not count: a fixed QEMU would not need it.
        qemu_dump::move_program_headers(&files.dump).map_err(machine_error)?;
        let begun = Instant::now();
        let mut filter = self.bench.rig.launch(self.profile, |_| files.start_filter())??;
        wait(&mut filter, "makedumpfile")?;
        let filter_s = begun.elapsed().as_secs_f64();
        Ok(Dumped { dump_s, dump_mib: mib(&files.dump)?, filter_s, filtered_mib: mib(&files.filtered)? })
    }

    fn wait_service(&self) -> Result<(), CrashError> {
        load::wait_for_service(&guest::targets(self.ports.web()), patience(20))
            .map_err(|source| CrashError::Load { side: SIDE.into(), source })
    }

    fn wait_agent(&self) -> Result<(), CrashError> {
        self.vm.wait_boots(self.crashes + 1).map(drop).map_err(machine_error)
    }
}

fn builder(bench: &Bench<'_>, image: &Path, ports: Ports, rate: Option<DiskRate>) -> hearth_vmtest::PlainVmBuilder {
    let cache = "cache=none,aio=io_uring";
    let throttled = rate.map_or_else(|| cache.into(), |rate| format!("{cache}{}", rate.qemu_throttling()));
    let builder = PlainVm::debian("crash", Debian::Web).memory_mib(bench.shape.memory_mib).args([
        "-action",
        "panic=pause",
        "-device",
        "vmcoreinfo",
    ]);
    ports.under_qemu(builder).drive(image, &throttled).drive(&bench.data, &format!("readonly=on,{throttled}"))
}

struct DumpFiles {
    pipe: PathBuf,
    dump: PathBuf,
    filtered: PathBuf,
}

impl DumpFiles {
    fn in_folder(folder: &Path) -> Self {
        Self { pipe: folder.join("dump.pipe"), dump: folder.join("dump.elf"), filtered: folder.join("dump.filtered") }
    }

    /// Starts a program that reads QEMU's pipe and writes past the page cache.
    fn start_writer(&self) -> Result<Child, CrashError> {
        self.remove();
        let failed = |source| CrashError::File { path: self.pipe.clone(), source };
        rustix::fs::mkfifoat(rustix::fs::CWD, &self.pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .map_err(|errno| failed(errno.into()))?;
        let mut writer = Command::new("dd");
        writer.arg(format!("if={}", self.pipe.display())).arg(format!("of={}", self.dump.display()));
        writer.args(["bs=1M", "iflag=fullblock", "oflag=direct", "conv=fsync", "status=none"]);
        writer.spawn().map_err(failed)
    }

    fn start_filter(&self) -> Result<Child, CrashError> {
        let mut filter = Command::new("makedumpfile");
        filter.args(["-l", "-d", "31", "--message-level", "4"]).arg(&self.dump).arg(&self.filtered);
        let started = filter.stdout(Stdio::null()).spawn();
        started.map_err(|source| CrashError::File { path: "makedumpfile".into(), source })
    }

    fn remove(&self) {
        for file in [&self.pipe, &self.dump, &self.filtered] {
            // A file that was never made cannot be removed; the rest is removed with the folder.
            let _ = std::fs::remove_file(file);
        }
    }
}

fn wait(child: &mut Child, what: &'static str) -> Result<(), CrashError> {
    let status = child.wait().map_err(|source| CrashError::File { path: what.into(), source })?;
    if status.success() {
        return Ok(());
    }
    Err(CrashError::Ended { what, side: SIDE.into(), how: status.to_string() })
}

fn mib(path: &Path) -> Result<f64, CrashError> {
    let metadata = std::fs::metadata(path).map_err(|source| CrashError::File { path: path.to_owned(), source })?;
    Ok(metadata.len() as f64 / MIB)
}

fn machine_error(source: hearth_vmtest::Error) -> CrashError {
    CrashError::Machine { side: SIDE.into(), source }
}
