//! The demo's machines, and each of their crashes: from the load before it to the service after it.

use std::path::Path;
use std::time::Duration;

use hearth_api::{EmberStatus, QemuStatus, Recovery};
use hearth_vmtest::patience;

use super::{DemoError, Progress};
use crate::host::profile::Profile;
use crate::load::trace::Trace;
use crate::load::{self, Load};
use crate::report::Run;
use crate::sides::{DomainMachine, DomainOptions, Guest, HearthMachine, HearthOptions, Machine, Way};
use crate::warm_reboot::targets;

/// Seconds of load before and after the crash.
const BEFORE_S: f64 = 10.0;
pub const AFTER_S: f64 = 24.0;
const PLOT_STEP_S: f64 = 0.5;
const MIB: f64 = 1048576.0;

/// Measurements of one crash.
pub struct Life {
    pub run: Run,
    /// Read from the disk since the crash.
    pub from_disk_mib: f64,
    /// `None` of a domain without Hearth.
    pub ember: Option<EmberStatus>,
    pub recovery: Option<Recovery>,
    trace: Trace,
    begun_s: f64,
    crashed_s: f64,
    back_s: f64,
}

impl Life {
    /// Requests per second before the crash.
    pub fn web_before(&self) -> f64 {
        self.trace.requests_per_second(self.begun_s, self.crashed_s)
    }

    /// Requests per second from the first answer after the crash on.
    pub fn web_after(&self) -> f64 {
        self.trace.requests_per_second(self.back_s, self.back_s + AFTER_S)
    }

    /// Seconds from the crash to the first answer.
    pub fn outage_s(&self) -> f64 {
        self.back_s - self.crashed_s
    }

    /// Seconds from the crash until 95 % of `rate` requests a second are served for good; `None` if they were not.
    pub fn full_speed_s(&self, rate: f64) -> Option<f64> {
        let at_s = self.trace.full_speed_s(self.back_s, self.back_s + AFTER_S, rate)?;
        Some(at_s - self.crashed_s)
    }

    /// Requests per second over time; the crash is at time zero.
    pub fn series(&self) -> Vec<(f64, f64)> {
        self.trace.series(self.crashed_s, self.begun_s - self.crashed_s, self.outage_s() + AFTER_S, PLOT_STEP_S)
    }

    #[cfg(test)]
    pub fn with_answers(run: Run, trace: Trace, [begun_s, crashed_s, back_s]: [f64; 3]) -> Self {
        Life { run, from_disk_mib: 0.0, ember: None, recovery: None, trace, begun_s, crashed_s, back_s }
    }
}

/// What runs the web server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runner {
    /// A machine of Hearth.
    Machine { refill: bool },
    /// A domain of libvirt that is attached to Hearth.
    Attached { refill: bool },
    /// A domain of libvirt.
    Domain,
}

/// A machine of the demo.
pub struct Server<'a> {
    machine: Box<dyn Machine>,
    runner: Runner,
    boots: usize,
    progress: &'a Progress,
}

impl<'a> Server<'a> {
    /// Starts a machine on this image, and waits until it serves.
    pub fn start(image: &Path, runner: Runner, profile: Profile, progress: &'a Progress) -> Result<Self, DemoError> {
        let (guest, rate) = (Guest::Debian, profile.rate());
        progress.tell(match runner {
            Runner::Machine { refill: true } => "a Debian machine with refill boots under Hearth",
            Runner::Machine { refill: false } => "a Debian machine boots under Hearth",
            Runner::Attached { refill: true } => "a Debian domain with refill boots under libvirt, attached to Hearth",
            Runner::Attached { refill: false } => "a Debian domain boots under libvirt, attached to Hearth",
            Runner::Domain => "a Debian domain boots under libvirt alone",
        });
        let machine: Box<dyn Machine> = match runner {
            Runner::Machine { refill } => {
                let options = HearthOptions { guest, image, accelerator: "auto", rate, warm: true, refill };
                Box::new(HearthMachine::start(&options)?)
            }
            Runner::Attached { .. } | Runner::Domain => {
                let is_attached = runner != Runner::Domain;
                Box::new(DomainMachine::start(&DomainOptions { guest, image, rate, is_attached })?)
            }
        };
        let server = Server { machine, runner, boots: 1, progress };
        server.wait_ready()?;
        load::wait_for_service(&targets(server.machine.as_ref()), patience(20))?;
        if runner == (Runner::Attached { refill: false }) {
            server.machine.run_within("systemctl mask hearth-refill", patience(5))?;
        }
        server.machine.ready()?;
        Ok(server)
    }

    pub fn qemu(&self) -> Result<Option<QemuStatus>, DemoError> {
        Ok(self.machine.status()?.and_then(|status| status.qemu))
    }

    /// Its error shows the console of a guest that does not boot.
    fn wait_ready(&self) -> Result<(), DemoError> {
        Ok(self.machine.wait_agent(self.boots)?)
    }

    /// Fills the file cache, and measures the web load over a crash.
    pub fn crash(&mut self, run: Run) -> Result<Life, DemoError> {
        let (word, way) = match run {
            Run::Refill => ("warm with refill", Way::Warm),
            Run::Warm => ("warm", Way::Warm),
            Run::Cold if self.runner == Runner::Domain => ("cold (without Hearth)", Way::Warm),
            Run::Cold => ("cold (nothing kept)", Way::Cold),
        };
        let tell = |what: &str| self.progress.tell(&format!("{word}: {what}"));
        tell("its 512 files of 1 MiB are read into its file cache");
        let read = format!("cat {} >/dev/null", Guest::Debian.files());
        self.machine.run_within(&read, Duration::from_secs(300))?;
        tell(&format!("web load for {BEFORE_S:.0} s"));
        let load = Load::start(targets(self.machine.as_ref()))?;
        let begun_s = load.wait_back(patience(5))?;
        load.run_until(begun_s + BEFORE_S);
        let read_bytes = || self.machine.own_read_bytes().unwrap_or(0);
        let (crashed_s, read_before) = (load.now_s(), read_bytes());
        self.machine.crash(way)?;
        load.announce_outage();
        self.boots += 1;
        match (self.runner, way) {
            (_, Way::Cold) => tell("the machine was reset, and its memory dropped"),
            (Runner::Machine { .. }, _) => tell("the kernel panicked (sysrq); Hearth starts the next incarnation"),
            _ => tell("the kernel panicked (sysrq), and the guest was reset"),
        }
        let back_s = load.wait_back(patience(20))?;
        self.machine.ready()?;
        tell(&format!("it serves again after {:.1} s; load for {AFTER_S:.0} s", back_s - crashed_s));
        load.run_until(back_s + AFTER_S);
        let from_disk_mib = read_bytes().saturating_sub(read_before) as f64 / MIB;
        let trace = load.trace();
        drop(load);
        self.wait_ready()?;
        let status = self.machine.status()?;
        tell(&format!("done; {from_disk_mib:.0} MiB came from the disk since the crash"));
        let (ember, recovery) = status.map(|status| (status.ember, status.last_recovery)).unzip();
        let recovery = recovery.flatten();
        Ok(Life { run, from_disk_mib, ember, recovery, trace, begun_s, crashed_s, back_s })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::trace::Sample;

    #[test]
    fn rates_cover_the_windows_around_the_outage() {
        let ends = (0..200).chain(300..600).map(|tenth| f64::from(tenth) / 10.0);
        let trace = Trace { samples: ends.map(|end| Sample { begun_s: end, ended_s: end, bytes: 1 }).collect() };
        let life = Life::with_answers(Run::Warm, trace, [0.0, 20.0, 30.0]);
        assert_eq!((life.web_before(), life.web_after(), life.outage_s()), (10.0, 10.0, 10.0));
        assert_eq!((life.full_speed_s(10.0), life.full_speed_s(20.0)), (Some(10.0), None));
        let series = life.series();
        assert_eq!(series.first().map(|point| point.0), Some(-19.75));
        assert_eq!(series.last().map(|point| point.0), Some(10.0 + AFTER_S - 0.25));
        let outage: f64 = series.iter().filter(|point| (0.0..10.0).contains(&point.0)).map(|p| p.1).sum();
        assert_eq!(outage, 0.0);
    }
}
