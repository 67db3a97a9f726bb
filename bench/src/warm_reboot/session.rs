//! One machine on one side at one disk profile, from its first boot to its last read.

use std::time::{Duration, Instant};

use hearth_vmtest::{Output, patience, residency};

use super::{Shape, WarmRebootError, targets};
use crate::host::profile::Profile;
use crate::load::queries::{self, Rows};
use crate::load::{self, Load, LoadError, Targets};
use crate::record::Record;
use crate::sides::{Machine, Rig, Stack, Way};
use crate::stats::{self, degradation_pct};

const MIB: f64 = 1048576.0;
/// Seeds of the rows that are asked for.
const BEFORE: u64 = 1;
const AFTER: u64 = 2;

/// Runs the whole session, and adds its rows.
pub fn measure(
    rig: &Rig,
    stack: Stack,
    profile: Profile,
    shape: Shape,
    record: &mut Record,
) -> Result<(), WarmRebootError> {
    let mut session = Session::start(rig, stack, profile, shape)?;
    // Without a disk all profiles are equal: the full session runs once, at the profile whose figures are quoted.
    if stack == Stack::Ram && (profile != Profile::Paper || !shape.reads_apart) {
        return session.boot_again(record);
    }
    session.fill()?;
    session.read_before(record)?;
    for &way in stack.ways() {
        session.crash_and_serve(way, record)?;
        session.fill()?;
        if session.stack == Stack::Hearth && way == Way::Warm {
            session.serve_hot(record)?;
        }
    }
    if stack == Stack::HearthRefill {
        let folder = session.machine.memory_folder().expect("a keeper runs it");
        rig.keep_map(folder)?;
    }
    if shape.reads_apart {
        for &way in stack.ways() {
            session.crash_and_read(way, record)?;
            session.fill()?;
            session.crash_and_read_at_random(way, record)?;
            session.fill()?;
            session.crash_and_query(way, record)?;
            session.fill()?;
            if session.stack == Stack::Hearth && way == Way::Warm {
                session.query_hot(record)?;
            }
        }
    }
    session.memory(record)
}

/// Boots a machine as `measure` does, and returns it ready, with its file cache full.
pub fn started(rig: &Rig, stack: Stack, profile: Profile, shape: Shape) -> Result<Session<'_>, WarmRebootError> {
    let session = Session::start(rig, stack, profile, shape)?;
    session.fill()?;
    Ok(session)
}

pub struct Session<'a> {
    rig: &'a Rig,
    stack: Stack,
    profile: Profile,
    shape: Shape,
    machine: Box<dyn Machine>,
    watch: Option<residency::Watch>,
    targets: Targets,
    boots: usize,
}

impl<'a> Session<'a> {
    fn start(rig: &'a Rig, stack: Stack, profile: Profile, shape: Shape) -> Result<Self, WarmRebootError> {
        eprintln!("warm-reboot: [{}] {}: starting", profile.name(), stack.name());
        let machine = rig.start(shape.guest, stack, profile)?;
        let targets = targets(machine.as_ref());
        let mut session = Session { rig, stack, profile, shape, machine, watch: None, targets, boots: 1 };
        session.serve()?;
        session.wait_service(Instant::now())?;
        session.wait_agent()?;
        let watch = session.machine.memory_folder().map(residency::Watch::start).transpose();
        session.watch = watch.map_err(|error| session.machine_error(error))?;
        Ok(session)
    }

    pub fn machine(&self) -> &dyn Machine {
        self.machine.as_ref()
    }

    pub fn targets(&self) -> &Targets {
        &self.targets
    }

    /// Reads every file once at the disk's full speed, so that the cache is full.
    pub fn fill(&self) -> Result<(), WarmRebootError> {
        self.rig.limit(Profile::Asis)?;
        self.read_all()?;
        Ok(self.rig.limit(self.profile)?)
    }

    fn read_before(&self, record: &mut Record) -> Result<(), WarmRebootError> {
        let speed = self.read_all()?;
        for &way in self.stack.ways() {
            record.add(&self.case(way), "read_before_mib_s", "MiB/s", speed);
        }
        Ok(())
    }

    /// Measures service before and after a crash. A quick session also reads the files in the same incarnation.
    fn crash_and_serve(&mut self, way: Way, record: &mut Record) -> Result<(), WarmRebootError> {
        let case = self.case(way);
        let to_refill_pct = self.to_refill_pct()?;
        let (load, begun_s) = self.load_for_a_window()?;
        let read_before = self.read_bytes()?;
        let crashed_s = load.now_s();
        self.machine.crash(way).map_err(|error| self.machine_error(error))?;
        load.announce_outage();
        self.boots += 1;
        self.serve()?;
        let back_s = load.wait_back(patience(20)).map_err(|error| self.load_error(error))?;
        let at_service = self.read_bytes()?;
        self.ready()?;
        load.run_until(back_s + self.shape.window_s);
        let trace = load.trace();
        drop(load);
        self.wait_agent()?;
        let before = trace.requests_per_second(begun_s, crashed_s);
        let after = trace.requests_per_second(back_s, back_s + self.shape.window_s);
        let degraded = degradation_pct(before, after);
        eprintln!(
            "warm-reboot: [{}] {}: {:.1} s without service, {before:.1} -> {after:.1} requests/s ({degraded:.1} % less)",
            self.profile.name(),
            self.stack.side(way),
            back_s - crashed_s
        );
        record.add(&case, "boot_s", "s", back_s - crashed_s);
        record.add(&case, "web_before_rps", "1/s", before);
        record.add(&case, "web_after_rps", "1/s", after);
        record.add(&case, "web_degradation_pct", "%", degraded);
        let late = |from_s: f64, to_s: f64| stats::percentile(&trace.latencies_ms(from_s, to_s), 99.0);
        let windows =
            [("web_before_p99_ms", begun_s, crashed_s), ("web_after_p99_ms", back_s, back_s + self.shape.window_s)];
        for (metric, from_s, to_s) in windows {
            if let Some(latency_ms) = late(from_s, to_s) {
                record.add(&case, metric, "ms", latency_ms);
            }
        }
        if let Some(full_s) = trace.full_speed_s(back_s, back_s + self.shape.window_s, before) {
            record.add(&case, "full_speed_s", "s", full_s - crashed_s);
        }
        if !self.shape.reads_apart {
            self.refilled(&case, to_refill_pct, record)?;
            self.read_after(&case, read_before, at_service, record)?;
        }
        Ok(())
    }

    /// Starts the load, and lets it run for one window. Returns it with the time of its first answer.
    fn load_for_a_window(&self) -> Result<(Load, f64), WarmRebootError> {
        let load = Load::start(self.targets.clone()).map_err(|error| self.load_error(error))?;
        let begun_s = load.wait_back(patience(5)).map_err(|error| self.load_error(error))?;
        load.run_until(begun_s + self.shape.window_s);
        Ok((load, begun_s))
    }

    /// Measures service in a guest that has rebooted, and has read every file since: what a fresh QEMU alone costs.
    fn serve_hot(&self, record: &mut Record) -> Result<(), WarmRebootError> {
        let (load, begun_s) = self.load_for_a_window()?;
        let hot = load.trace().requests_per_second(begun_s, begun_s + self.shape.window_s);
        record.add(&self.case(Way::Warm), "web_hot_rps", "1/s", hot);
        Ok(())
    }

    /// Crashes, and reads every file in a guest that has served none yet.
    fn crash_and_read(&mut self, way: Way, record: &mut Record) -> Result<(), WarmRebootError> {
        let case = self.case(way);
        let read_before = self.read_bytes()?;
        let boot_s = self.crash_and_wait(way)?;
        record.add(&case, "boot_s", "s", boot_s);
        let at_service = self.read_bytes()?;
        record.add(&case, "cached_before_read_pct", "%", self.cached_pct()?);
        self.read_after(&case, read_before, at_service, record)
    }

    /// Measures random reads of a large file before a crash and when the guest serves again.
    fn crash_and_read_at_random(&mut self, way: Way, record: &mut Record) -> Result<(), WarmRebootError> {
        let Some(file) = self.shape.guest.large_file() else { return Ok(()) };
        let case = self.case(way);
        let before = self.random_read_us(file)?;
        let to_refill_pct = self.to_refill_pct()?;
        self.crash_and_wait(way)?;
        let after = self.random_read_us(file)?;
        eprintln!("warm-reboot: {case}: random reads of 4 KiB in {before:.0} us, then {after:.0} us");
        record.add(&case, "random_read_before_us", "us", before);
        record.add(&case, "random_read_us", "us", after);
        self.refilled(&case, to_refill_pct, record)
    }

    /// Mean microseconds of a read of 4 KiB.
    fn random_read_us(&self, file: &str) -> Result<f64, WarmRebootError> {
        const READS: u32 = 4000;
        let command = format!("probe randread {file} {READS}");
        let output = self.machine.run_within(&command, Duration::from_secs(120));
        let output = output.map_err(|error| self.machine_error(error))?;
        Ok(self.figure(&output, &command, "seconds")? * 1e6 / f64::from(READS))
    }

    /// Measures the database before and after a crash, from its first answer on.
    fn crash_and_query(&mut self, way: Way, record: &mut Record) -> Result<(), WarmRebootError> {
        let Some(count) = self.shape.guest.rows() else { return Ok(()) };
        let case = self.case(way);
        let before = self.rows_per_second(count, BEFORE)?;
        self.machine.crash(way).map_err(|error| self.machine_error(error))?;
        self.boots += 1;
        let after = self.rows_per_second(count, AFTER)?;
        self.wait_service(Instant::now())?;
        self.wait_agent()?;
        let degraded = degradation_pct(before, after);
        eprintln!("warm-reboot: {case}: {before:.0} -> {after:.0} rows/s ({degraded:.1} % less)");
        record.add(&case, "pg_before_tps", "1/s", before);
        record.add(&case, "pg_after_tps", "1/s", after);
        record.add(&case, "pg_degradation_pct", "%", degraded);
        Ok(())
    }

    /// Measures the database in a guest that has rebooted, and has read every file since.
    fn query_hot(&self, record: &mut Record) -> Result<(), WarmRebootError> {
        let Some(count) = self.shape.guest.rows() else { return Ok(()) };
        record.add(&self.case(Way::Warm), "pg_hot_tps", "1/s", self.rows_per_second(count, BEFORE)?);
        Ok(())
    }

    fn rows_per_second(&self, count: usize, seed: u64) -> Result<f64, WarmRebootError> {
        let rows = Rows { address: self.machine.ports().database(), count };
        let window = Duration::from_secs_f64(self.shape.window_s);
        queries::rows_per_second(rows, window, patience(20), seed).map_err(|error| self.load_error(error))
    }

    /// Reads every file. `read_before` and `at_service` are the bytes read from the disk at the crash and when the guest served
    /// again.
    fn read_after(
        &self,
        case: &str,
        read_before: u64,
        at_service: u64,
        record: &mut Record,
    ) -> Result<(), WarmRebootError> {
        let first = self.read_all()?;
        let mib = |from: u64, to: u64| to.saturating_sub(from) as f64 / MIB;
        let (for_files, for_boot) = (mib(at_service, self.read_bytes()?), mib(read_before, at_service));
        let second = self.read_all()?;
        eprintln!(
            "warm-reboot: {case}: files at {first:.0}, then {second:.0} MiB/s; {for_files:.1} MiB from the disk for them, {for_boot:.1} for the boot"
        );
        record.add(case, "read_first_mib_s", "MiB/s", first);
        record.add(case, "read_second_mib_s", "MiB/s", second);
        record.add(case, "disk_read_after_mib", "MiB", for_files);
        record.add(case, "disk_read_for_boot_mib", "MiB", for_boot);
        self.ember(case, record)
    }

    /// Waits until `hearth-refill` is done, and records what it says of itself, how much of the files that were cached is cached
    /// again, and the cache map's size and time. `before_pct`: as `to_refill_pct` was before the crash.
    fn refilled(&self, case: &str, before_pct: Option<f64>, record: &mut Record) -> Result<(), WarmRebootError> {
        let Some(before_pct) = before_pct else { return Ok(()) };
        let output = self.machine.run_within(self.shape.guest.refill_report(), patience(120));
        let said = output.map_err(|error| self.machine_error(error))?.text();
        let refilled_pct = self.cached_pct()? / before_pct * 100.0;
        eprintln!("warm-reboot: {case}: {}; {refilled_pct:.1} % of what was cached is", said.trim());
        record.add(case, "refilled_pct", "%", refilled_pct);
        if let Some(Refilled { mib, took_s, processor_s }) = Refilled::parse(&said) {
            record.add(case, "refill_s", "s", took_s);
            record.add(case, "refill_us_per_page", "us", processor_s * 1e6 / (mib * MIB / 4096.0));
        }
        if let Some((pages, bytes, took_ms)) = self.machine.cache_map() {
            record.add(case, "map_s", "s", took_ms / 1e3);
            record.add(case, "map_bytes_per_mib", "B", bytes as f64 / (pages as f64 * 4096.0 / MIB));
        }
        Ok(())
    }

    /// Records the counts of the ember's pages, if there is an ember.
    fn ember(&self, case: &str, record: &mut Record) -> Result<(), WarmRebootError> {
        let Some(status) = self.machine.status().map_err(|error| self.machine_error(error))? else { return Ok(()) };
        let ember = status.ember;
        let counts = [
            ("pages_kept", ember.pages_kept),
            ("pages_served", ember.pages_served),
            ("pages_refused", ember.refused.tag_mismatch),
            ("pages_overwritten", ember.refused.overwritten),
            ("pages_trimmed", ember.refused.trimmed),
        ];
        let lines: Vec<String> = counts.iter().map(|(metric, pages)| format!("{metric} {pages}")).collect();
        eprintln!("warm-reboot: {case}: {}", lines.join(", "));
        for (metric, pages) in counts {
            record.add(case, metric, "pages", pages as f64);
        }
        Ok(())
    }

    /// Measures only boots with the whole image in RAM, which is the limit for any disk.
    fn boot_again(&mut self, record: &mut Record) -> Result<(), WarmRebootError> {
        let crashes = if self.shape.reads_apart { 2 } else { 1 };
        for _ in 0..crashes {
            let boot_s = self.crash_and_wait(Way::Warm)?;
            eprintln!("warm-reboot: [{}] {}: {boot_s:.1} s without service", self.profile.name(), self.stack.name());
            record.add(&self.case(Way::Warm), "boot_s", "s", boot_s);
        }
        Ok(())
    }

    /// Crashes, waits for service and agent, and returns the seconds from the crash to the first answer.
    pub fn crash_and_wait(&mut self, way: Way) -> Result<f64, WarmRebootError> {
        let crashed = Instant::now();
        self.machine.crash(way).map_err(|error| self.machine_error(error))?;
        self.boots += 1;
        self.serve()?;
        let boot_s = self.wait_service(crashed)?;
        self.wait_agent()?;
        Ok(boot_s)
    }

    /// Waits until the service answers, which ends the boot. Returns the seconds since `crashed`.
    fn wait_service(&self, crashed: Instant) -> Result<f64, WarmRebootError> {
        load::wait_for_service(&self.targets, patience(20)).map_err(|error| self.load_error(error))?;
        let seconds = crashed.elapsed().as_secs_f64();
        self.ready()?;
        Ok(seconds)
    }

    /// Records the side's use of host memory.
    fn memory(&mut self, record: &mut Record) -> Result<(), WarmRebootError> {
        let case = self.case(Way::Warm);
        let ram_bytes = (self.shape.guest.memory_mib() << 20) as f64;
        match self.watch.take() {
            Some(watch) => {
                let seen = watch.end().map_err(|error| self.machine_error(error))?;
                record.add(&case, "budget_peak_pct", "%", seen.peak_bytes as f64 / ram_bytes * 100.0);
            }
            None => {
                let host_cache = self.rig.host_cache_bytes(self.stack)? as f64;
                record.add(&case, "host_page_cache_mib", "MiB", host_cache / MIB);
            }
        }
        for (pause_ms, pages) in self.machine.reset_pauses().map_err(|error| self.machine_error(error))? {
            record.add(&case, "reset_pause_ms", "ms", pause_ms);
            if pages > 0 {
                record.add(&case, "reset_pause_us_per_page", "us", pause_ms * 1e3 / pages as f64);
            }
        }
        if let Some(status) = self.machine.status().map_err(|error| self.machine_error(error))? {
            record.add(&case, "keeper_peak_pct", "%", status.memory.peak_bytes as f64 / ram_bytes * 100.0);
        }
        Ok(())
    }

    /// Reads all files in order, and returns the guest's rate in MiB/s.
    fn read_all(&self) -> Result<f64, WarmRebootError> {
        let command = format!("probe read-all {}", self.shape.guest.files());
        let limit = Duration::from_secs(300);
        let output = self.machine.run_within(&command, limit).map_err(|error| self.machine_error(error))?;
        self.figure(&output, &command, "mib_per_second")
    }

    /// A figure that a command of the guest has printed.
    fn figure(&self, output: &Output, command: &str, figure: &'static str) -> Result<f64, WarmRebootError> {
        let side = || self.stack.name().to_owned();
        let none = || WarmRebootError::NoFigure { side: side(), command: command.to_owned(), figure };
        output.number(figure).ok_or_else(none)
    }

    /// The part of the files that is to be cached again after a crash; `None` where no helper reads them back.
    fn to_refill_pct(&self) -> Result<Option<f64>, WarmRebootError> {
        let refills = matches!(self.stack, Stack::HearthRefill | Stack::ColdPrefetch);
        refills.then(|| self.cached_pct()).transpose()
    }

    /// The part of the files that is in the guest's page cache.
    fn cached_pct(&self) -> Result<f64, WarmRebootError> {
        let command = format!("probe cached {}", self.shape.guest.files());
        let output = self.machine.run_within(&command, patience(60)).map_err(|error| self.machine_error(error))?;
        let figure = |name| self.figure(&output, &command, name);
        Ok(figure("cached_pages")? / figure("all_pages")? * 100.0)
    }

    fn read_bytes(&self) -> Result<u64, WarmRebootError> {
        Ok(self.rig.read_bytes(self.stack, self.machine.as_ref())?)
    }

    fn ready(&self) -> Result<(), WarmRebootError> {
        self.machine.ready().map_err(|error| self.machine_error(error))
    }

    /// Starts the service if it does not start by itself.
    fn serve(&self) -> Result<(), WarmRebootError> {
        let Some(command) = self.shape.guest.serve() else { return Ok(()) };
        self.wait_agent()?;
        let output = self.machine.run_within(command, patience(20)).map_err(|error| self.machine_error(error))?;
        match output.status {
            0 => Ok(()),
            _ => Err(WarmRebootError::NotServing { side: self.stack.name().to_owned(), said: output.text() }),
        }
    }

    fn wait_agent(&self) -> Result<(), WarmRebootError> {
        self.machine.wait_agent(self.boots).map_err(|error| self.machine_error(error))
    }

    fn case(&self, way: Way) -> String {
        format!("{}@{}", self.stack.side(way), self.profile.name())
    }

    pub fn machine_error(&self, source: hearth_vmtest::Error) -> WarmRebootError {
        WarmRebootError::Machine { side: self.stack.name().to_owned(), source }
    }

    pub fn load_error(&self, source: LoadError) -> WarmRebootError {
        WarmRebootError::Load { side: self.stack.name().to_owned(), source }
    }
}

/// What `hearth-refill` says of itself: `read ahead 512 of 512 MiB in 2.6 s and 3.10 s of processor time`.
#[derive(Debug, PartialEq)]
struct Refilled {
    mib: f64,
    took_s: f64,
    processor_s: f64,
}

impl Refilled {
    /// `None` if it has not read anything.
    fn parse(said: &str) -> Option<Self> {
        let number = |after: &str| -> Option<f64> {
            let words = said.split_once("read ahead ")?.1.split_once(after)?.1;
            words.split_whitespace().next()?.parse().ok()
        };
        let refilled = Self { mib: number("")?, took_s: number(" in ")?, processor_s: number(" and ")? };
        (refilled.mib > 0.0).then_some(refilled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_the_helper_is_read_among_other_lines() {
        let said =
            "Started in time.\nread ahead 510 of 512 MiB in 2.6 s and 3.10 s of processor time; 2 files are gone\n";
        let expect = Refilled { mib: 510.0, took_s: 2.6, processor_s: 3.1 };
        assert_eq!(Refilled::parse(said), Some(expect));
        assert_eq!(Refilled::parse("there is nothing to bring back"), None);
        assert_eq!(Refilled::parse("read ahead 0 of 0 MiB in 0.0 s and 0.00 s of processor time"), None);
    }
}
