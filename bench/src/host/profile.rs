//! Disk profiles: the speed of the disk, the same for every side of a comparison.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Profile {
    /// The disk as it is.
    Asis,
    /// A common cloud volume: 125 MiB/s, 3000 operations a second.
    Cloud,
    /// A 15,000 rpm disk, as in the paper that first measured warm reboots: 70 MiB/s, 200 operations a second.
    Paper,
}

/// Limits of a throttled disk, for reads and writes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRate {
    pub mib_per_second: u64,
    pub iops: u64,
}

impl DiskRate {
    pub fn bytes_per_second(self) -> u64 {
        self.mib_per_second << 20
    }

    /// QEMU's own limits, as properties of a drive, each preceded by a comma.
    pub fn qemu_throttling(self) -> String {
        let (bps, iops) = (self.bytes_per_second(), self.iops);
        format!(
            ",throttling.bps-read={bps},throttling.bps-write={bps},throttling.iops-read={iops},throttling.iops-write={iops}"
        )
    }
}

impl Profile {
    pub const ALL: [Profile; 3] = [Profile::Asis, Profile::Cloud, Profile::Paper];

    pub fn rate(self) -> Option<DiskRate> {
        match self {
            Profile::Asis => None,
            Profile::Cloud => Some(DiskRate { mib_per_second: 125, iops: 3000 }),
            Profile::Paper => Some(DiskRate { mib_per_second: 70, iops: 200 }),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Profile::Asis => "asis",
            Profile::Cloud => "cloud",
            Profile::Paper => "paper",
        }
    }

    /// The summary key of a metric: without a suffix at `paper`, with the profile's name elsewhere.
    pub fn key(self, metric: &str) -> String {
        match self {
            Profile::Paper => metric.to_owned(),
            _ => format!("{metric}_{}", self.name()),
        }
    }

    pub fn describe(self) -> String {
        match self.rate() {
            None => "the disk as it is".to_owned(),
            Some(rate) => format!("{} MiB/s, {} IOPS", rate.mib_per_second, rate.iops),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keys_at_paper_have_no_suffix() {
        let keys: Vec<String> = Profile::ALL.iter().map(|profile| profile.key("boot_warm_s")).collect();
        assert_eq!(keys, ["boot_warm_s_asis", "boot_warm_s_cloud", "boot_warm_s"]);
    }
}
