//! The machine that a figure was measured on, and the date. A figure without them is not quoted.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The accelerator that runs the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    Kvm,
    /// QEMU's own emulation, which works everywhere and makes everything CPU-bound about ten times slower.
    Tcg,
}

impl Accelerator {
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostFacts {
    pub cpu: String,
    pub cpus: usize,
    pub memory_mib: u64,
    pub kernel: String,
    /// Accelerator of this bench's guests.
    pub accelerator: Accelerator,
    /// One-minute load average when the bench began. Figures from a busy machine should not be quoted.
    pub load_average: f64,
}

impl HostFacts {
    pub fn gather(accelerator: Accelerator) -> Self {
        HostFacts {
            cpu: cpu_name().unwrap_or_else(|| "unknown".to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory_mib().unwrap_or(0),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            accelerator,
            load_average: load_average().unwrap_or(0.0),
        }
    }

    pub fn describe(&self) -> String {
        format!(
            "{} × {}, {:.0} GiB, Linux {}, guests on {}",
            self.cpus,
            self.cpu,
            self.memory_mib as f64 / 1024.0,
            self.kernel,
            self.accelerator.name().to_uppercase()
        )
    }
}

fn cpu_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_mib() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("MemTotal:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// First line of `qemu-system-x86_64 --version`, or a note that it does not run.
pub fn qemu_version(binary: &Path) -> String {
    let output = Command::new(binary).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().map_or_else(|| format!("{} does not run", binary.display()), |line| line.trim().to_owned())
}

pub fn now_rfc3339() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    rfc3339(seconds)
}

/// Converts a time to text, in the proleptic Gregorian calendar, by 400-year eras that begin on 1 March.
fn rfc3339(unix_seconds: u64) -> String {
    let (days, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_times_become_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_709_164_799, "2024-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }

    #[test]
    fn this_machine_is_described() {
        let facts = HostFacts::gather(Accelerator::Tcg);
        assert!(facts.cpus >= 1 && facts.memory_mib > 0);
        assert!(facts.describe().contains("Linux "));
    }

    #[test]
    fn missing_qemu_is_named() {
        assert_eq!(qemu_version(Path::new("no-such-qemu")), "no-such-qemu does not run");
    }
}
