//! A slower disk for all sides: a control group that limits the device below QEMU, keeper and the host's page cache alike.
//!
//! It limits direct I/O and page-cache misses but no hits, so a side that uses the host's page cache keeps its whole advantage.
//! It also counts the bytes that were read, in the same way for all sides. Both hierarchies are supported: cgroup v1
//! (`blkio.throttle.*`) and v2 (`io.max`, `io.stat`). Making a group needs root; without it each side uses its own limits
//! (`hearth`'s per disk, QEMU's
//! `throttling.*`), and the record says so.
//!
//! Processes inherit the group of their parent, so the bench enters the group while it starts a machine and leaves it again:
//! moving QEMU into it later would miss QEMU's first reads.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::profile::{DiskRate, Profile};

#[derive(Debug, thiserror::Error)]
pub enum ThrottleError {
    #[error("{folder} is on no block device that can be limited (device {major}:{minor})")]
    NoDevice { folder: PathBuf, major: u32, minor: u32 },
    #[error("no control group hierarchy with limits for block devices is mounted")]
    NoHierarchy,
    #[error("cannot use {path}")]
    Use { path: PathBuf, source: io::Error },
    #[error("{path} has no counter for device {device}")]
    NoCounter { path: PathBuf, device: Device },
}

/// A whole disk: the kernel refuses limits on a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub major: u32,
    pub minor: u32,
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// This bench's control group on the device that holds the images. Dropping it removes the group.
pub struct Throttle {
    version: Version,
    folder: PathBuf,
    home: PathBuf,
    device: Device,
}

impl Throttle {
    /// Makes a group for the device below `images`, without a limit at first.
    pub fn new(images: &Path) -> Result<Self, ThrottleError> {
        let device = device_of(images)?;
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let (version, root) = hierarchy(&mounts).ok_or(ThrottleError::NoHierarchy)?;
        let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let home = root.join(own_group(&membership, version).trim_start_matches('/'));
        let folder = root.join(format!("hearth-bench-{}", std::process::id()));
        if version == Version::V2 {
            write(&root.join("cgroup.subtree_control"), "+io")?;
        }
        fs::create_dir(&folder).map_err(|source| ThrottleError::Use { path: folder.clone(), source })?;
        let throttle = Throttle { version, folder, home, device };
        throttle.limit(Profile::Asis)?;
        Ok(throttle)
    }

    pub fn describe(&self) -> String {
        let version = if self.version == Version::V1 { "v1 blkio.throttle" } else { "v2 io.max" };
        format!("cgroup {version} on device {}", self.device)
    }

    /// Sets the limits, which take effect at once, also for running machines.
    pub fn limit(&self, profile: Profile) -> Result<(), ThrottleError> {
        limit_files(self.version, self.device, profile.rate())
            .iter()
            .try_for_each(|(file, value)| write(&self.folder.join(file), value))
    }

    /// Calls `start` inside the group, so that the processes that it starts are in the group.
    pub fn within<T>(&self, start: impl FnOnce() -> T) -> Result<T, ThrottleError> {
        let own_pid = std::process::id().to_string();
        write(&self.folder.join("cgroup.procs"), &own_pid)?;
        let started = start();
        write(&self.home.join("cgroup.procs"), &own_pid)?;
        Ok(started)
    }

    /// Bytes read from the device by all processes that ever ran in the group.
    pub fn read_bytes(&self) -> Result<u64, ThrottleError> {
        self.counter("blkio.throttle.io_service_bytes", "Read", "rbytes")
    }

    /// Reads and writes on the device by all processes that ever ran in the group.
    pub fn operations(&self) -> Result<(u64, u64), ThrottleError> {
        let of = |v1: &str, v2: &str| self.counter("blkio.throttle.io_serviced", v1, v2);
        Ok((of("Read", "rios")?, of("Write", "wios")?))
    }

    /// A counter: `v1` in this file, or `v2` in `io.stat`.
    fn counter(&self, v1_file: &str, v1: &str, v2: &str) -> Result<u64, ThrottleError> {
        let (file, name) = match self.version {
            Version::V1 => (v1_file, v1),
            Version::V2 => ("io.stat", v2),
        };
        let path = self.folder.join(file);
        let text = fs::read_to_string(&path).map_err(|source| ThrottleError::Use { path: path.clone(), source })?;
        // An unused device has no line yet.
        if !text.contains(&format!("{} ", self.device)) {
            return Ok(0);
        }
        counter(self.version, self.device, &text, name).ok_or(ThrottleError::NoCounter { path, device: self.device })
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // A machine that is still ending keeps the group busy; an empty leftover group does no harm.
        let _ = fs::remove_dir(&self.folder);
    }
}

fn write(path: &Path, value: &str) -> Result<(), ThrottleError> {
    fs::write(path, value).map_err(|source| ThrottleError::Use { path: path.to_owned(), source })
}

/// The whole disk below a folder. sysfs gives a partition's disk.
fn device_of(folder: &Path) -> Result<Device, ThrottleError> {
    let number = fs::metadata(folder).map_err(|source| ThrottleError::Use { path: folder.to_owned(), source })?.dev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let nothing = || ThrottleError::NoDevice { folder: folder.to_owned(), major, minor };
    let sys = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).map_err(|_| nothing())?;
    if !sys.join("partition").exists() {
        return Ok(Device { major, minor });
    }
    let disk = sys.parent().and_then(|disk| fs::read_to_string(disk.join("dev")).ok()).ok_or_else(nothing)?;
    parse_device(disk.trim()).ok_or_else(nothing)
}

fn parse_device(text: &str) -> Option<Device> {
    let (major, minor) = text.split_once(':')?;
    Some(Device { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

/// The hierarchy that limits block devices: a v1 `blkio` mount if there is one, since a controller is never in both.
fn hierarchy(mounts: &str) -> Option<(Version, PathBuf)> {
    let fields = || mounts.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let v1 =
        fields().find(|mount| mount.len() > 3 && mount[2] == "cgroup" && mount[3].split(',').any(|o| o == "blkio"));
    let v2 = || fields().find(|mount| mount.len() > 3 && mount[2] == "cgroup2");
    v1.map(|mount| (Version::V1, PathBuf::from(mount[1]))).or_else(|| v2().map(|m| (Version::V2, PathBuf::from(m[1]))))
}

fn own_group(membership: &str, version: Version) -> &str {
    let of_line = |line: &'_ str| -> Option<(usize, usize)> {
        let first = line.find(':')?;
        Some((first, first + 1 + line[first + 1..].find(':')?))
    };
    for line in membership.lines() {
        let Some((first, second)) = of_line(line) else { continue };
        let controllers = &line[first + 1..second];
        let matches = match version {
            Version::V1 => controllers.split(',').any(|controller| controller == "blkio"),
            Version::V2 => controllers.is_empty(),
        };
        if matches {
            return &line[second + 1..];
        }
    }
    "/"
}

/// File names and values that set a rate, or remove all limits. Reads and writes have separate limits, as on a real volume.
fn limit_files(version: Version, device: Device, rate: Option<DiskRate>) -> Vec<(&'static str, String)> {
    match version {
        Version::V1 => {
            // In v1, 0 means no limit.
            let (bps, iops) = rate.map_or((0, 0), |rate| (rate.bytes_per_second(), rate.iops));
            vec![
                ("blkio.throttle.read_bps_device", format!("{device} {bps}")),
                ("blkio.throttle.write_bps_device", format!("{device} {bps}")),
                ("blkio.throttle.read_iops_device", format!("{device} {iops}")),
                ("blkio.throttle.write_iops_device", format!("{device} {iops}")),
            ]
        }
        Version::V2 => {
            let max = || "max".to_owned();
            let bps = rate.map_or_else(max, |rate| rate.bytes_per_second().to_string());
            let iops = rate.map_or_else(max, |rate| rate.iops.to_string());
            vec![("io.max", format!("{device} rbps={bps} wbps={bps} riops={iops} wiops={iops}"))]
        }
    }
}

fn counter(version: Version, device: Device, text: &str, name: &str) -> Option<u64> {
    let device = device.to_string();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(&device)?.strip_prefix(' '));
    match version {
        Version::V1 => lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok()),
        Version::V2 => {
            lines.next()?.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Device = Device { major: 254, minor: 0 };

    #[test]
    fn v1_mount_is_preferred_to_v2() {
        let v1 = "cgroup /sys/fs/cgroup/blkio cgroup rw,relatime,blkio 0 0\n";
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,relatime 0 0\n";
        assert_eq!(hierarchy(&format!("{v2}{v1}")), Some((Version::V1, "/sys/fs/cgroup/blkio".into())));
        assert_eq!(hierarchy(v2), Some((Version::V2, "/sys/fs/cgroup".into())));
        assert_eq!(hierarchy("tmpfs /dev/shm tmpfs rw 0 0\n"), None);
    }

    #[test]
    fn own_group_is_found_in_both_versions() {
        let membership = "8:pids:/\n7:blkio:/user/a:b\n0::/user.slice\n";
        assert_eq!(own_group(membership, Version::V1), "/user/a:b");
        assert_eq!(own_group(membership, Version::V2), "/user.slice");
        assert_eq!(own_group("", Version::V2), "/");
    }

    #[test]
    fn limits_name_the_device_and_both_directions() {
        let rate = Profile::Paper.rate();
        let v1 = limit_files(Version::V1, DISK, rate);
        assert_eq!(v1[0], ("blkio.throttle.read_bps_device", "254:0 73400320".into()));
        assert_eq!(v1[3], ("blkio.throttle.write_iops_device", "254:0 200".into()));
        let v2 = limit_files(Version::V2, DISK, None);
        assert_eq!(v2, [("io.max", "254:0 rbps=max wbps=max riops=max wiops=max".into())]);
    }

    #[test]
    fn counters_are_read_for_the_device() {
        let v1 = "8:0 Read 11\n254:0 Write 5\n254:0 Read 42\nTotal 58\n";
        assert_eq!(counter(Version::V1, DISK, v1, "Read"), Some(42));
        let v2 = "8:0 rbytes=11 wbytes=0\n254:0 rbytes=42 wbytes=7 rios=1\n";
        let of = |name: &str| counter(Version::V2, DISK, v2, name);
        assert_eq!((of("rbytes"), of("rios"), of("wios")), (Some(42), Some(1), None));
        assert_eq!(counter(Version::V2, DISK, "1254:0 rbytes=3\n", "rbytes"), None);
    }

    #[test]
    fn folder_without_a_disk_is_named() {
        let text = device_of(Path::new("/proc")).unwrap_err().to_string();
        assert!(text.starts_with("/proc is on no block device that can be limited"), "{text}");
    }
}
