//! Mounted file systems, by UUID.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fstat, major, minor};

/// A mounted file system: its kind, a folder of it, and its device.
pub struct Mount {
    pub kind: Kind,
    pub root: File,
    pub device: PathBuf,
}

/// File systems whose files are found by the number of their inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// ext2, ext3 and ext4.
    Ext,
    Xfs,
}

/// Part of the device that has the superblock.
const SUPERBLOCK_BYTES: usize = 4096;
/// Magic number and UUID of `struct ext4_super_block`, which begins at 1024.
const EXT_MAGIC: (usize, [u8; 2]) = (1024 + 0x38, [0x53, 0xef]);
const EXT_UUID: usize = 1024 + 0x68;
/// The same of `struct xfs_dsb`.
const XFS_MAGIC: (usize, [u8; 4]) = (0, *b"XFSB");
const XFS_UUID: usize = 32;

/// The list of mounts, and whether it has changed.
pub struct Mounts {
    list: File,
}

impl Mounts {
    /// Opens the list.
    pub fn open() -> io::Result<Self> {
        Ok(Self { list: File::open("/proc/self/mountinfo")? })
    }

    /// Finds those of these file systems, by UUID as 32 hexadecimal digits, that are mounted now. Each is busy while its `Mount` lives.
    pub fn find(&self, wanted: &[&str]) -> HashMap<String, Mount> {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mut found = HashMap::new();
        for line in text.lines() {
            if let Some((uuid, mount)) = mount(line, wanted) {
                found.entry(uuid).or_insert(mount);
            }
        }
        found
    }

    /// Waits until something was mounted or unmounted since `open` or the last call. Returns false once the time is over.
    pub fn wait_changed(&self, limit: Duration) -> bool {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // The kernel's way to report a change (`mounts_poll` in fs/proc_namespace.c).
        let mut changes = [PollFd::new(&self.list, PollFlags::PRI)];
        poll(&mut changes, Some(&limit)).is_ok_and(|changed| changed > 0)
    }
}

fn mount(line: &str, wanted: &[&str]) -> Option<(String, Mount)> {
    let (device_number, mount_point) = parse(line)?;
    let uevent = fs::read_to_string(format!("/sys/dev/block/{device_number}/uevent")).ok()?;
    let device = Path::new("/dev").join(uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?);
    let mut superblock = vec![0; SUPERBLOCK_BYTES];
    File::open(&device).ok()?.read_exact_at(&mut superblock, 0).ok()?;
    let (kind, uuid) = identify(&superblock)?;
    let root = wanted.contains(&&*uuid).then(|| open_folder(&mount_point, device_number))??;
    Some((uuid, Mount { kind, root, device }))
}

/// Opens a mounted folder. `None` if something else is at this path, such as another file system that was mounted over it.
fn open_folder(path: &str, device_number: &str) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let device = fstat(&folder).ok()?.st_dev;
    (format!("{}:{}", major(device), minor(device)) == device_number).then(|| folder.into())
}

/// Number of the device, and where it is mounted.
fn parse(line: &str) -> Option<(&str, String)> {
    let mut words = line.split(' ');
    let device = words.nth(2)?;
    let mount_point = words.nth(1)?;
    Some((device, unescaped(mount_point)))
}

/// The kernel writes blanks and the like as three octal digits.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

fn identify(superblock: &[u8]) -> Option<(Kind, String)> {
    let hex = |at: usize| superblock[at..at + 16].iter().map(|byte| format!("{byte:02x}")).collect();
    if superblock[EXT_MAGIC.0..].starts_with(&EXT_MAGIC.1) {
        return Some((Kind::Ext, hex(EXT_UUID)));
    }
    superblock[XFS_MAGIC.0..].starts_with(&XFS_MAGIC.1).then(|| (Kind::Xfs, hex(XFS_UUID)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_changes_while_nothing_is_mounted() {
        let mounts = Mounts::open().unwrap();
        assert!(!mounts.wait_changed(Duration::ZERO));
    }

    #[test]
    fn only_the_mounted_file_system_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let device = fstat(File::open(path).unwrap()).unwrap().st_dev;
        let number = format!("{}:{}", major(device), minor(device));
        assert!(open_folder(path, &number).is_some());
        assert!(open_folder("/proc", &number).is_none(), "another one is there");
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(open_folder(file.to_str().unwrap(), &number).is_none());
    }

    #[test]
    fn mount_points_are_unescaped() {
        let line = "25 1 254:1 / /srv/two\\040words rw,noatime shared:1 - ext4 /dev/vda1 rw";
        assert_eq!(parse(line), Some(("254:1", "/srv/two words".to_owned())));
        assert_eq!(parse("25 1"), None);
    }

    #[test]
    fn file_systems_are_known_by_their_superblock() {
        let mut block = vec![0; SUPERBLOCK_BYTES];
        assert_eq!(identify(&block), None);
        block[..4].copy_from_slice(b"XFSB");
        block[32] = 0xab;
        assert_eq!(identify(&block), Some((Kind::Xfs, format!("ab{}", "0".repeat(30)))));
        block[0x438..0x43a].copy_from_slice(&[0x53, 0xef]);
        assert_eq!(identify(&block).map(|(kind, _)| kind), Some(Kind::Ext));
    }
}
