//! Side (d): the machine under Hearth, which dumps the dead incarnation while the next one boots.
//!
//! panic -> first HTTP 200 -> the dump is complete. Memory of both incarnations is measured from outside all the while.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Instant;

use hearth_api::{EventKind, EventRecord};
use hearth_vmtest::{Disk, Drives, TestVm, event, patience, residency};

use super::{Bench, CrashError, MIB, guest};
use crate::host::profile::{DiskRate, Profile};
use crate::host::scratch::Scratch;
use crate::load;
use crate::record::Record;
use crate::report::Held;
use crate::responsiveness::Responsiveness;
use crate::sides::{self, copy_root};
use hearth_vmtest::page_cache;

/// The settings of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub level: u8,
    pub chunk_mib: u64,
    /// Policy for the disk's time, in runs whose boot needs the disk.
    pub policy: Option<&'static str>,
}

impl Case {
    /// The side's name in the record's rows.
    pub fn side(self) -> String {
        match self.policy {
            Some(policy) => format!("hearth-{policy}"),
            None => format!("hearth-level-{}-chunk-{}", self.level, self.chunk_mib),
        }
    }
}

/// One crash and its recovery, for the plots. Times are in seconds from the panic.
pub struct Life {
    pub case: Case,
    pub profile: Profile,
    pub back_s: f64,
    pub dumped_s: f64,
    pub memory: Vec<Held>,
}

pub struct Machine<'a> {
    bench: &'a Bench<'a>,
    profile: Profile,
    case: Case,
    image: PathBuf,
    vm: TestVm,
    _dumps: Scratch,
    incarnation: u64,
    /// Sequence number of the event at the last dump's end.
    last_dump: u64,
}

impl<'a> Machine<'a> {
    /// Starts the machine without waiting.
    pub fn launch(bench: &'a Bench<'a>, profile: Profile, case: Case) -> Result<Self, CrashError> {
        eprintln!("crash: [{}] {}: starting", profile.name(), case.side());
        let failed = |source| machine_error(case, source);
        let image = bench.rig.folder().join(format!("{}.img", case.side()));
        copy_root(&image)?;
        let file_error = |source| CrashError::File { path: image.clone(), source };
        page_cache::evict(&image).and_then(|()| page_cache::evict(&bench.data)).map_err(file_error)?;
        let dumps = Scratch::new(bench.rig.folder(), &case.side()).map_err(file_error)?;
        bench.rig.limit(Profile::Asis)?;
        let start = |rate| builder(bench, case, &image, dumps.path().to_owned(), rate).start();
        let vm = bench.rig.launch(profile, start)?.map_err(failed)?;
        Ok(Machine { bench, profile, case, image, vm, _dumps: dumps, incarnation: 1, last_dump: 0 })
    }

    /// Crashes `crashes` times, and returns the last crash for the plot.
    pub fn measure(mut self, crashes: u32, record: &mut Record) -> Result<Option<Life>, CrashError> {
        // This wait comes first, because it notices a keeper that refuses to start, and reports why.
        self.vm.wait_incarnation(1).map_err(|error| self.error(error))?;
        // The keeper must have made the folder.
        let watch = residency::Watch::start(self.vm.memory_folder()).map_err(|error| self.error(error))?;
        self.wait_service()?;
        if self.case.policy.is_some() {
            guest::make_boot_copy(&self.vm, self.bench.shape).map_err(|error| self.error(error))?;
        }
        let mut life = None;
        let responsiveness = Responsiveness::watch(self.vm.api());
        for _ in 0..crashes {
            life = Some(self.crash(&watch, record)?);
        }
        responsiveness.end(&format!("{}@{}", self.case.side(), self.profile.name()), record);
        let peak_bytes = watch.end().map_err(|error| self.error(error))?.peak_bytes;
        self.budget(peak_bytes, record)?;
        // Makes space for the next case. A file that cannot be removed now is removed with the folder.
        let _ = std::fs::remove_file(&self.image);
        Ok(life)
    }

    fn crash(&mut self, watch: &residency::Watch, record: &mut Record) -> Result<Life, CrashError> {
        guest::fill(&self.vm, self.bench.shape).map_err(|error| self.error(error))?;
        let cpu_before_s = self.keeper_cpu_s()?;
        self.bench.rig.limit(self.profile)?;
        let crashed = Instant::now();
        self.vm.panic().map_err(|error| self.error(error))?;
        let dead = self.incarnation;
        let ended = event!(|event| IncarnationEnded if u64::from(event.incarnation) == dead);
        let what = format!("the end of incarnation {dead}");
        self.vm.wait_event(&what, ended).map_err(|error| self.error(error))?;
        let ended_s = crashed.elapsed().as_secs_f64();
        let back_s = self.wait_service()?.duration_since(crashed).as_secs_f64();
        let (dump_mib, dump_s) = self.wait_dump()?;
        let both_s = crashed.elapsed().as_secs_f64();
        let cpu_s = self.keeper_cpu_s()? - cpu_before_s;
        self.incarnation += 1;
        self.vm.wait_incarnation(self.incarnation).map_err(|error| self.error(error))?;
        self.bench.rig.limit(Profile::Asis)?;
        let side = format!("{}@{}", self.case.side(), self.profile.name());
        eprintln!("crash: {side}: back after {back_s:.1} s, dump of {dump_mib:.0} MiB in {dump_s:.1} s");
        record.add(&side, "downtime_s", "s", back_s);
        record.add(&side, "dump_s", "s", dump_s);
        record.add(&side, "dump_mib", "MiB", dump_mib);
        record.add(&side, "cpu_pct", "%", cpu_s / both_s * 100.0);
        if let Some(rate) = self.profile.rate() {
            record.add(&side, "disk_utilisation", "", dump_mib / dump_s / rate.mib_per_second as f64);
        }
        if let Some(admission) = self.vm.status().map_err(|error| self.error(error))?.memory.admission {
            record.add(&side, "guest_wait_ms", "ms", admission.guest_wait_ms as f64);
        }
        let memory = memory(&watch.samples(crashed), crashed, dead);
        // The dump begins at the incarnation's end, while the wait above begins with the boot.
        Ok(Life { case: self.case, profile: self.profile, back_s, dumped_s: ended_s + dump_s, memory })
    }

    fn budget(&self, peak_bytes: u64, record: &mut Record) -> Result<(), CrashError> {
        let side = format!("{}@{}", self.case.side(), self.profile.name());
        let share = |bytes: f64| bytes / self.bench.shape.ram_bytes() * 100.0;
        record.add(&side, "budget_peak_pct", "%", share(peak_bytes as f64));
        let memory = self.vm.status().map_err(|error| self.error(error))?.memory;
        record.add(&side, "keeper_peak_pct", "%", share(memory.peak_bytes as f64));
        Ok(())
    }

    /// Waits for the end of the newest dump. Returns its size in MiB and its duration in seconds. A dump that cannot be completed
    /// is an error.
    fn wait_dump(&mut self) -> Result<(f64, f64), CrashError> {
        use EventKind::{DumpComplete, DumpIncomplete, DumpSkipped, DumpWaits};
        let seen = self.last_dump;
        let look = |event: &EventRecord| match event.event {
            DumpComplete { .. } | DumpWaits { .. } | DumpIncomplete { .. } | DumpSkipped { .. } => {
                (event.sequence > seen).then(|| event.clone())
            }
            _ => None,
        };
        let waited = self.vm.wait_event_within("the end of the dump", patience(60), look);
        let end = waited.map_err(|error| self.error(error))?;
        self.last_dump = end.sequence;
        match end.event {
            DumpComplete { bytes, duration_ms, .. } => Ok((bytes as f64 / MIB, duration_ms / 1e3)),
            other => Err(CrashError::Ended { what: "the dump", side: self.case.side(), how: format!("{other:?}") }),
        }
    }

    /// Processor time of the keeper so far. While a dump is written, nearly all of it is the dump's.
    fn keeper_cpu_s(&self) -> Result<f64, CrashError> {
        let path = PathBuf::from(format!("/proc/{}/stat", self.vm.keeper_pid().unwrap_or_default()));
        let text = std::fs::read_to_string(&path).map_err(|source| CrashError::File { path: path.clone(), source })?;
        cpu_s(&text).ok_or_else(|| CrashError::NoFigure {
            side: self.case.side(),
            figure: "processor time",
            said: text,
        })
    }

    /// Waits until the service answers, which ends the boot, and returns the time.
    fn wait_service(&self) -> Result<Instant, CrashError> {
        let port = self.vm.http_port().expect("started with a web port");
        load::wait_for_service(&guest::targets((Ipv4Addr::LOCALHOST, port).into()), patience(20))
            .map_err(|source| CrashError::Load { side: self.case.side(), source })?;
        let answered = Instant::now();
        sides::ready(&self.vm).map_err(|error| self.error(error))?;
        Ok(answered)
    }

    fn error(&self, source: hearth_vmtest::Error) -> CrashError {
        machine_error(self.case, source)
    }
}

/// Memory of the dead incarnation and of the next, over time.
fn memory(samples: &[residency::Sample], crashed: Instant, dead: u64) -> Vec<Held> {
    let of = |sample: &residency::Sample, incarnation: u64| {
        let files = ["ram", "ledger"].map(|kind| format!("{kind}-{incarnation}"));
        files.iter().filter_map(|file| sample.bytes.get(file)).sum::<u64>() as f64 / MIB
    };
    let held = |sample: &residency::Sample| Held {
        second: sample.at.duration_since(crashed).as_secs_f64(),
        dead: of(sample, dead),
        living: of(sample, dead + 1),
    };
    samples.iter().map(held).collect()
}

fn builder(
    bench: &Bench<'_>,
    case: Case,
    image: &std::path::Path,
    dump_folder: PathBuf,
    rate: Option<DiskRate>,
) -> hearth_vmtest::TestVmBuilder {
    let limited = |disk| sides::limited(disk, rate);
    let builder = sides::with_boot_set(TestVm::debian("crash"))
        .root(limited(Disk::in_place(image)))
        .disk(limited(Disk::in_place(&bench.data).read_only()))
        .memory_mib(bench.shape.memory_mib)
        .http()
        .dumps()
        .crash_setting("dump_folder", dump_folder.display().to_string())
        .crash_setting("level", i64::from(case.level))
        .crash_setting("chunk", format!("{}MiB", case.chunk_mib))
        .crash_setting("headroom", "0%");
    let builder = match case.policy {
        Some(policy) => builder.crash_setting("disk_time", policy),
        None => builder,
    };
    match rate {
        Some(rate) => builder.crash_setting("mib_per_second", rate.mib_per_second as i64),
        None => builder,
    }
}

fn machine_error(case: Case, source: hearth_vmtest::Error) -> CrashError {
    CrashError::Machine { side: case.side(), source }
}

/// User and system time of `/proc/PID/stat`, in seconds.
fn cpu_s(stat: &str) -> Option<f64> {
    // The name is in parentheses and may hold any bytes.
    let mut fields = stat.rsplit(") ").next()?.split(' ').skip(11);
    let ticks = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_sums_user_and_kernel() {
        let ticks = rustix::param::clock_ticks_per_second();
        let stat = format!("7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 {} {} 0 0 20", 3 * ticks, 2 * ticks);
        assert_eq!(cpu_s(&stat), Some(5.0));
    }

    #[test]
    fn sides_are_named_after_their_settings() {
        let case = Case { level: 1, chunk_mib: 10, policy: None };
        assert_eq!(case.side(), "hearth-level-1-chunk-10");
        assert_eq!(Case { policy: Some("dump-first"), ..case }.side(), "hearth-dump-first");
    }
}
