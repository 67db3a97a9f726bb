//! Devices: the disks that a file is on. Two files that share no disk do not slow each other down.
//!
//! file -> its file system's device (or the device it is) -> partition's disk -> what that is made of (LVM, RAID, loop)
//! -> whole disks
//!
//! Some file systems (btrfs, overlayfs, network ones) do not say; then anything may be shared. Memory is no device.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Layers of devices on devices that are followed; real ones have three or four.
const LAYERS_MAX: usize = 16;
const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// The whole disks behind a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// Kernel names, as in /sys/block. Empty if the file is in memory.
    Disks(BTreeSet<String>),
    /// The file system does not say.
    Unknown,
}

impl Devices {
    /// The disks behind a file, folder or block device.
    pub fn of(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path)?;
        if found.file_type().is_block_device() {
            return Ok(Self::behind(found.rdev(), Path::new("/sys")));
        }
        let memory = [TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC];
        if memory.contains(&(rustix::fs::statfs(path)?.f_type as i64)) {
            return Ok(Self::Disks(BTreeSet::new()));
        }
        Ok(Self::behind(found.dev(), Path::new("/sys")))
    }

    /// Whether I/O on one can slow down I/O on the other.
    pub fn may_share(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Disks(these), Self::Disks(those)) => !these.is_disjoint(those),
            (Self::Disks(none), _) | (_, Self::Disks(none)) if none.is_empty() => false,
            _ => true,
        }
    }

    fn behind(device: u64, sys: &Path) -> Self {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let mut disks = BTreeSet::new();
        let folder = fs::canonicalize(sys.join(format!("dev/block/{major}:{minor}")));
        match folder.is_ok_and(|folder| collect(&folder, sys, LAYERS_MAX, &mut disks)) {
            true => Self::Disks(disks),
            false => Self::Unknown,
        }
    }
}

/// Adds the whole disks behind the device in this folder of sysfs. False: not all can be told.
fn collect(folder: &Path, sys: &Path, layers: usize, disks: &mut BTreeSet<String>) -> bool {
    let Some(deeper) = layers.checked_sub(1) else { return false };
    if folder.join("partition").exists() {
        return folder.parent().is_some_and(|disk| collect(disk, sys, deeper, disks));
    }
    let slaves: Vec<PathBuf> = fs::read_dir(folder.join("slaves"))
        .map(|entries| entries.flatten().filter_map(|entry| fs::canonicalize(entry.path()).ok()).collect())
        .unwrap_or_default();
    if !slaves.is_empty() {
        return slaves.iter().all(|slave| collect(slave, sys, deeper, disks));
    }
    if let Ok(file) = fs::read_to_string(folder.join("loop/backing_file")) {
        let below = fs::metadata(file.trim_end_matches('\n')).map(|file| Devices::behind(file.dev(), sys));
        let Ok(Devices::Disks(below)) = below else { return false };
        disks.extend(below);
        return true;
    }
    let name = folder.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| {
        disks.insert(name.to_owned());
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn disks(names: &[&str]) -> Devices {
        Devices::Disks(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn unknown_devices_may_be_shared() {
        assert!(disks(&["sda", "sdb"]).may_share(&disks(&["sdb"])));
        assert!(!disks(&["sda"]).may_share(&disks(&["sdb"])));
        assert!(Devices::Unknown.may_share(&disks(&["sda"])));
        assert!(Devices::Unknown.may_share(&Devices::Unknown));
        assert!(!disks(&[]).may_share(&Devices::Unknown), "memory shares with nobody");
        assert!(!disks(&[]).may_share(&disks(&[])));
    }

    /// sda with a partition, sdb whole, dm-0 over both, dm-1 over itself.
    #[test]
    fn layers_are_followed_to_the_whole_disks() {
        let sys = tempfile::tempdir().unwrap();
        let at = |path: &str| sys.path().join(path);
        for folder in ["devices/sda/sda1", "devices/sdb", "devices/dm-0/slaves", "devices/dm-1/slaves", "dev/block"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        fs::write(at("devices/sda/sda1/partition"), "1\n").unwrap();
        symlink(at("devices/sda/sda1"), at("devices/dm-0/slaves/sda1")).unwrap();
        symlink(at("devices/sdb"), at("devices/dm-0/slaves/sdb")).unwrap();
        symlink(at("devices/dm-1"), at("devices/dm-1/slaves/dm-1")).unwrap();
        for (number, folder) in [("8:1", "sda/sda1"), ("8:16", "sdb"), ("253:0", "dm-0"), ("253:1", "dm-1")] {
            symlink(at("devices").join(folder), at("dev/block").join(number)).unwrap();
        }
        let check = |major, minor, expected| {
            assert_eq!(Devices::behind(rustix::fs::makedev(major, minor), sys.path()), expected);
        };
        check(8, 1, disks(&["sda"]));
        check(8, 16, disks(&["sdb"]));
        check(253, 0, disks(&["sda", "sdb"]));
        check(253, 1, Devices::Unknown);
        check(0, 42, Devices::Unknown);
    }

    #[test]
    fn memory_is_no_device() {
        assert_eq!(Devices::of(Path::new("/dev/shm")).unwrap(), disks(&[]));
        assert!(Devices::of(Path::new("/no/such/file")).is_err());
    }
}
