//! One machine of the demo, from its first boot to the service after its panic.

use std::path::Path;
use std::time::Duration;

use hearth_api::{EmberStatus, Recovery};
use hearth_vmtest::patience;

use super::{DemoError, Progress};
use crate::host::profile::Profile;
use crate::load::trace::Trace;
use crate::load::{self, Load};
use crate::report::Run;
use crate::sides::{Guest, HearthMachine, HearthOptions, Machine, Way};
use crate::warm_reboot::targets;

/// Seconds of load before and after the panic.
const BEFORE_S: f64 = 15.0;
pub const AFTER_S: f64 = 24.0;
const PLOT_STEP_S: f64 = 0.5;
const MIB: f64 = 1048576.0;

/// Measurements of one machine.
pub struct Life {
    pub run: Run,
    pub accelerator: String,
    pub accelerator_why: String,
    pub qemu: String,
    pub web_before: f64,
    pub web_after: f64,
    pub boot_s: f64,
    /// From the panic until requests are served as before; `None` if they were not.
    pub full_speed_s: Option<f64>,
    /// Read from the disk since the panic.
    pub from_disk_mib: f64,
    pub ember: EmberStatus,
    pub recovery: Option<Recovery>,
    /// Requests per second; the panic is at time zero.
    pub series: Vec<(f64, f64)>,
}

pub fn live(image: &Path, run: Run, profile: Profile, progress: &Progress) -> Result<Life, DemoError> {
    let word = match run {
        Run::Refill => "warm with refill",
        Run::Warm => "warm",
        Run::Cold => "cold (nothing kept)",
    };
    progress.tell(&format!("{word}: a Debian machine boots under Hearth"));
    let machine = HearthMachine::start(&HearthOptions {
        guest: Guest::Debian,
        image,
        accelerator: "auto",
        rate: profile.rate(),
        warm: run != Run::Cold,
        refill: run == Run::Refill,
    })?;
    // This wait comes first, because its error shows the console of a guest that does not boot.
    machine.wait_agent(1)?;
    load::wait_for_service(&targets(&machine), patience(20))?;
    machine.ready()?;
    let qemu = machine.machine_status()?.qemu;
    progress.tell(&format!("{word}: it serves; its 512 files of 1 MiB are read into its file cache"));
    machine.run_within(&format!("cat {} >/dev/null", Guest::Debian.files()), Duration::from_secs(300))?;
    let served = serve_and_panic(&machine, word, progress)?;
    let status = machine.machine_status()?;
    progress.tell(&format!("{word}: done; {:.0} MiB came from the disk since the panic", served.from_disk_mib));
    let (accelerator, accelerator_why, version) =
        qemu.map_or_else(Default::default, |qemu| (qemu.accelerator, qemu.accelerator_why, qemu.version));
    Ok(Life {
        run,
        accelerator,
        accelerator_why,
        qemu: version,
        web_before: served.before,
        web_after: served.after,
        boot_s: served.back_s,
        full_speed_s: served.full_speed_s,
        from_disk_mib: served.from_disk_mib,
        ember: status.ember,
        recovery: status.last_recovery,
        series: served.series,
    })
}

struct Served {
    from_disk_mib: f64,
    before: f64,
    after: f64,
    back_s: f64,
    full_speed_s: Option<f64>,
    series: Vec<(f64, f64)>,
}

/// Measures the web load over a panic.
fn serve_and_panic(machine: &HearthMachine, word: &str, progress: &Progress) -> Result<Served, DemoError> {
    progress.tell(&format!("{word}: web load for {BEFORE_S:.0} s"));
    let load = Load::start(targets(machine))?;
    let begun_s = load.wait_back(patience(5))?;
    load.run_until(begun_s + BEFORE_S);
    let read_bytes = || machine.own_read_bytes().unwrap_or(0);
    let (panic_s, read_before) = (load.now_s(), read_bytes());
    machine.crash(Way::Warm)?;
    load.announce_outage();
    progress.tell(&format!("{word}: the kernel panicked (sysrq); Hearth starts the next incarnation"));
    let back_s = load.wait_back(patience(20))?;
    machine.ready()?;
    progress.tell(&format!("{word}: it serves again after {:.1} s; load for {AFTER_S:.0} s", back_s - panic_s));
    load.run_until(back_s + AFTER_S);
    let from_disk_mib = read_bytes().saturating_sub(read_before) as f64 / MIB;
    Ok(served(&load.trace(), begun_s, panic_s, back_s, from_disk_mib))
}

fn served(trace: &Trace, begun_s: f64, panic_s: f64, back_s: f64, from_disk_mib: f64) -> Served {
    let outage_s = back_s - panic_s;
    let before = trace.requests_per_second(begun_s, panic_s);
    Served {
        from_disk_mib,
        before,
        full_speed_s: trace.full_speed_s(back_s, back_s + AFTER_S, before).map(|at_s| at_s - panic_s),
        after: trace.requests_per_second(back_s, back_s + AFTER_S),
        back_s: outage_s,
        series: trace.series(panic_s, begun_s - panic_s, outage_s + AFTER_S, PLOT_STEP_S),
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
        let served = served(&trace, 0.0, 20.0, 30.0, 1.0);
        assert_eq!((served.before, served.after, served.back_s), (10.0, 10.0, 10.0));
        assert_eq!(served.full_speed_s, Some(10.0));
        assert_eq!(served.series.first().map(|point| point.0), Some(-19.75));
        assert_eq!(served.series.last().map(|point| point.0), Some(10.0 + AFTER_S - 0.25));
        let outage: f64 = served.series.iter().filter(|point| (0.0..10.0).contains(&point.0)).map(|p| p.1).sum();
        assert_eq!(outage, 0.0);
    }
}
