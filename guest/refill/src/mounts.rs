//! Mounted file systems, by UUID.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fstat, major, minor};
use rustix::ioctl::{Updater, ioctl, opcode};

/// A mounted file system: its kind, a folder of it, and its device. It is busy while this lives.
pub struct Mount {
    pub kind: Kind,
    pub root: File,
    /// `None` if it may have several.
    pub device: Option<PathBuf>,
}

/// File systems whose files are found by the number of their inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// ext2, ext3 and ext4.
    Ext,
    Xfs,
    /// One of its subvolumes, which number their inodes by themselves.
    Btrfs {
        subvolume: u64,
    },
}

/// Part of the device that has the superblock.
const SUPERBLOCK_BYTES: usize = 4096;
/// Magic number and UUID of `struct ext4_super_block`, which begins at 1024.
const EXT_MAGIC: (usize, [u8; 2]) = (1024 + 0x38, [0x53, 0xef]);
const EXT_UUID: usize = 1024 + 0x68;
/// The same of `struct xfs_dsb`.
const XFS_MAGIC: (usize, [u8; 4]) = (0, *b"XFSB");
const XFS_UUID: usize = 32;

/// `struct btrfs_ioctl_fs_info_args` (include/uapi/linux/btrfs.h).
#[repr(C)]
struct BtrfsInfo {
    devices: [u64; 2],
    uuid: [u8; 16],
    rest: [u8; 992],
}

/// `struct btrfs_ioctl_ino_lookup_args`.
#[repr(C)]
struct BtrfsLookup {
    subvolume: u64,
    inode: u64,
    path: [u8; 4080],
}

const BTRFS_MAGIC: u8 = 0x94;
/// `BTRFS_IOC_FS_INFO` and `BTRFS_IOC_INO_LOOKUP`.
const BTRFS_INFO: u32 = opcode::read::<BtrfsInfo>(BTRFS_MAGIC, 31);
const BTRFS_LOOKUP: u32 = opcode::read_write::<BtrfsLookup>(BTRFS_MAGIC, 18);
/// Inode of the first folder of each subvolume (`BTRFS_FIRST_FREE_OBJECTID`).
const BTRFS_ROOT_INODE: u64 = 256;

/// The list of mounts, and whether it has changed.
pub struct Mounts {
    list: File,
}

impl Mounts {
    /// Opens the list.
    pub fn open() -> io::Result<Self> {
        Ok(Self { list: File::open("/proc/self/mountinfo")? })
    }

    /// Finds those of these file systems, by UUID as 32 hexadecimal digits, that are mounted now; of btrfs each subvolume.
    pub fn find(&self, wanted: &[&str]) -> Vec<(String, Mount)> {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mut found: Vec<(String, Mount)> = Vec::new();
        for line in text.lines() {
            let Some((uuid, mount)) = mount(line, wanted) else { continue };
            if !found.iter().any(|(other, known)| (other, known.kind) == (&uuid, mount.kind)) {
                found.push((uuid, mount));
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
    let Entry { device_number, mount_point, kind } = parse(line)?;
    if kind == "btrfs" {
        // Its files are on several devices, of which it has none as its own, so its folder tells which one it is.
        let root = open_folder(&mount_point)?;
        let (kind, uuid) = identify_btrfs(&root)?;
        return wanted.contains(&&*uuid).then_some((uuid, Mount { kind, root, device: None }));
    }
    let uevent = fs::read_to_string(format!("/sys/dev/block/{device_number}/uevent")).ok()?;
    let device = Path::new("/dev").join(uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?);
    let mut superblock = vec![0; SUPERBLOCK_BYTES];
    File::open(&device).ok()?.read_exact_at(&mut superblock, 0).ok()?;
    let (kind, uuid) = identify(&superblock)?;
    let root = wanted.contains(&&*uuid).then(|| open_folder_of(&mount_point, device_number))??;
    Some((uuid, Mount { kind, root, device: Some(device) }))
}

fn open_folder(path: &str) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Some(rustix::fs::open(path, flags, Mode::empty()).ok()?.into())
}

/// Opens a mounted folder. `None` if something else is at this path, such as another file system that was mounted over it.
fn open_folder_of(path: &str, device_number: &str) -> Option<File> {
    let folder = open_folder(path)?;
    let device = fstat(&folder).ok()?.st_dev;
    (format!("{}:{}", major(device), minor(device)) == device_number).then_some(folder)
}

/// A line of the list.
#[derive(Debug, PartialEq, Eq)]
struct Entry<'a> {
    device_number: &'a str,
    mount_point: String,
    kind: &'a str,
}

fn parse(line: &str) -> Option<Entry<'_>> {
    let (place, system) = line.split_once(" - ")?;
    let mut words = place.split(' ');
    let device_number = words.nth(2)?;
    let mount_point = unescaped(words.nth(1)?);
    Some(Entry { device_number, mount_point, kind: system.split(' ').next()? })
}

/// The kernel writes blanks and the like as three octal digits.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

fn identify(superblock: &[u8]) -> Option<(Kind, String)> {
    if superblock[EXT_MAGIC.0..].starts_with(&EXT_MAGIC.1) {
        return Some((Kind::Ext, hex(&superblock[EXT_UUID..][..16])));
    }
    let is_xfs = superblock[XFS_MAGIC.0..].starts_with(&XFS_MAGIC.1);
    is_xfs.then(|| (Kind::Xfs, hex(&superblock[XFS_UUID..][..16])))
}

/// Asks for the file system and the subvolume of a folder. `None` if it is none of btrfs.
fn identify_btrfs(folder: &File) -> Option<(Kind, String)> {
    let mut info = BtrfsInfo { devices: [0; 2], uuid: [0; 16], rest: [0; 992] };
    // Without a subvolume it tells that of the folder.
    let mut lookup = BtrfsLookup { subvolume: 0, inode: BTRFS_ROOT_INODE, path: [0; 4080] };
    // SAFETY: the requests write these structures, which may hold any bytes.
    unsafe {
        ioctl(folder, Updater::<BTRFS_INFO, _>::new(&mut info)).ok()?;
        ioctl(folder, Updater::<BTRFS_LOOKUP, _>::new(&mut lookup)).ok()?;
    }
    Some((Kind::Btrfs { subvolume: lookup.subvolume }, hex(&info.uuid)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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
        assert!(open_folder_of(path, &number).is_some());
        assert!(open_folder_of("/proc", &number).is_none(), "another one is there");
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(open_folder(file.to_str().unwrap()).is_none());
    }

    #[test]
    fn mount_points_are_unescaped() {
        let line = "25 1 254:1 / /srv/two\\040words rw,noatime shared:1 - ext4 /dev/vda1 rw";
        let entry = Entry { device_number: "254:1", mount_point: "/srv/two words".to_owned(), kind: "ext4" };
        assert_eq!(parse(line), Some(entry));
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
