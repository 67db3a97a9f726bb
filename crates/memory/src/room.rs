//! Room: the space for guest RAM in a folder and on its host.
//!
//! tmpfs has a size limit (half of the host's memory by default), and a guest that exceeds it gets its QEMU killed by
//! SIGBUS. tmpfs may also promise more than the host has. So both limits are checked before a machine starts, and a
//! refusal names the limit and the remedy.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatFs, StatxAttributes, StatxFlags, open, statfs, statx};

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// `f_type` of other file systems that hold folders of hosts, from linux/magic.h and the file systems' own headers.
const NAMES: [(u64, &str); 9] = [
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0xf2f5_2010, "f2fs"),
    (0x794c_7630, "overlayfs"),
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
];

/// Kind of a file system, by where it keeps its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their numbers are")]
pub enum FileSystemKind {
    /// Host memory, up to the size of the file system.
    Tmpfs,
    /// Host memory, without a limit.
    Ramfs,
    /// Huge pages that the host has reserved; the size of one in bytes.
    Hugetlbfs { huge_page_bytes: u64 },
    /// Persistent or reserved memory, mapped without the page cache.
    Dax,
    /// A disk or a network, which would write guest RAM back all the time; `magic` is the `f_type` of statfs(2).
    Other { magic: u64 },
}

/// Free space of a folder's file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Kind of the file system.
    pub kind: FileSystemKind,
    /// Free space in bytes as the file system reports it. None if it has no limit.
    pub free_bytes: Option<u64>,
    /// Size in bytes. None if the file system has no limit.
    pub total_bytes: Option<u64>,
}

/// Reasons why a folder or host cannot hold a machine, or why that is unknown.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum RoomError {
    #[error("{folder}: its free space cannot be read")]
    Folder { folder: PathBuf, source: io::Error },
    #[error("the host's free memory cannot be read from {path}: {why}")]
    HostMemory { path: &'static str, why: String },
    #[error("{folder}: too little free space: {wanted_mib} MiB are needed and {free_mib} MiB are free; {}", .kind.remedy())]
    FolderTooSmall { folder: PathBuf, kind: FileSystemKind, wanted_mib: u64, free_mib: u64 },
    #[error(
        "too little host memory: {wanted_mib} MiB are needed and {available_mib} MiB are available; \
         free some (a running machine holds its own) or give this machine less memory"
    )]
    HostTooSmall { wanted_mib: u64, available_mib: u64 },
    #[error(
        "too little host memory: {wanted_mib} MiB are needed and the host has {total_mib} MiB; give this machine less memory"
    )]
    MoreThanHost { wanted_mib: u64, total_mib: u64 },
}

/// Memory that a machine needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Size of the files in its memory folder, in bytes.
    pub folder_bytes: u64,
    /// Memory of the keeper itself, in bytes.
    pub keeper_bytes: u64,
}

/// Memory of the host, from /proc/meminfo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// MemTotal, in bytes.
    pub total_bytes: u64,
    /// MemAvailable, in bytes: the kernel's estimate of what it can hand out without swapping.
    pub available_bytes: u64,
}

impl FileSystemKind {
    /// Whether its files use the memory that `HostMemory` counts.
    pub fn is_host_memory(self) -> bool {
        matches!(self, Self::Tmpfs | Self::Ramfs)
    }

    /// Whether Linux reports page faults in mappings of its files to a userfaultfd. Registering others fails (EINVAL).
    pub fn reports_faults(self) -> bool {
        matches!(self, Self::Tmpfs | Self::Hugetlbfs { .. })
    }

    /// Advice for a folder of this kind that is too small, on a host that has enough memory.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Tmpfs | Self::Ramfs => "enlarge that tmpfs (mount -o remount,size=...) or choose another folder",
            Self::Hugetlbfs { .. } => "reserve more huge pages (vm.nr_hugepages) or choose another folder",
            Self::Dax | Self::Other { .. } => "make room there or choose another folder",
        }
    }
}

impl fmt::Display for FileSystemKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tmpfs => formatter.write_str("tmpfs"),
            Self::Ramfs => formatter.write_str("ramfs"),
            Self::Hugetlbfs { .. } => formatter.write_str("hugetlbfs"),
            Self::Dax => formatter.write_str("a DAX file system"),
            Self::Other { magic } => match NAMES.iter().find(|(known, _)| known == magic) {
                Some((_, name)) => formatter.write_str(name),
                None => write!(formatter, "a file system of type {magic:#x}"),
            },
        }
    }
}

impl Room {
    /// Reads the free space of a folder's file system.
    pub fn of(folder: &Path) -> Result<Self, RoomError> {
        let failed = |errno: rustix::io::Errno| RoomError::Folder { folder: folder.to_owned(), source: errno.into() };
        let told = statfs(folder).map_err(failed)?;
        Ok(Self::from_statfs(&told, maps_files_directly(folder)))
    }

    fn from_statfs(told: &StatFs, dax: bool) -> Self {
        let block_bytes = told.f_bsize as u64;
        // The kernel's type is signed; the magic numbers are unsigned.
        let kind = match u64::from(told.f_type as u32) {
            TMPFS_MAGIC => FileSystemKind::Tmpfs,
            RAMFS_MAGIC => FileSystemKind::Ramfs,
            HUGETLBFS_MAGIC => FileSystemKind::Hugetlbfs { huge_page_bytes: block_bytes },
            _ if dax => FileSystemKind::Dax,
            magic => FileSystemKind::Other { magic },
        };
        // A memory file system without a limit reports 0 blocks in total.
        let limited = told.f_blocks != 0;
        Self {
            kind,
            free_bytes: limited.then(|| told.f_bavail * block_bytes),
            total_bytes: limited.then(|| told.f_blocks * block_bytes),
        }
    }
}

impl Needs {
    /// Host memory that the machine needs with a folder of this kind, in bytes.
    pub fn host_bytes(self, kind: FileSystemKind) -> u64 {
        self.keeper_bytes + if kind.is_host_memory() { self.folder_bytes } else { 0 }
    }
}

/// Fails if the host or the folder has too little space. Returns the folder's space for the log.
pub fn must_hold(folder: &Path, needs: Needs) -> Result<Room, RoomError> {
    let room = Room::of(folder)?;
    check(folder, &room, needs, HostMemory::now()?)?;
    Ok(room)
}

/// Checks the host first: if the host has too little memory, a larger folder does not help.
fn check(folder: &Path, room: &Room, needs: Needs, host: HostMemory) -> Result<(), RoomError> {
    let (needed, free) = (|bytes: u64| bytes.div_ceil(1 << 20), |bytes: u64| bytes >> 20);
    let host_bytes = needs.host_bytes(room.kind);
    let wanted_mib = needed(host_bytes);
    if host_bytes > host.total_bytes {
        return Err(RoomError::MoreThanHost { wanted_mib, total_mib: free(host.total_bytes) });
    }
    if host_bytes > host.available_bytes {
        return Err(RoomError::HostTooSmall { wanted_mib, available_mib: free(host.available_bytes) });
    }
    match room.free_bytes {
        Some(free_bytes) if free_bytes < needs.folder_bytes => Err(RoomError::FolderTooSmall {
            folder: folder.to_owned(),
            kind: room.kind,
            wanted_mib: needed(needs.folder_bytes),
            free_mib: free(free_bytes),
        }),
        _ => Ok(()),
    }
}

impl HostMemory {
    /// Reads /proc/meminfo.
    pub fn now() -> Result<Self, RoomError> {
        const PATH: &str = "/proc/meminfo";
        let unreadable = |why: String| RoomError::HostMemory { path: PATH, why };
        let meminfo = fs::read_to_string(PATH).map_err(|error| unreadable(error.to_string()))?;
        let line = |name: &str| line_of(&meminfo, name).ok_or_else(|| unreadable(format!("it has no line {name}")));
        Ok(Self { total_bytes: line("MemTotal")?, available_bytes: line("MemAvailable")? })
    }
}

fn line_of(meminfo: &str, name: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// DAX is a property of files, not of folders: so this makes an unnamed file and reads its attributes. A file system
/// that cannot make one is unsuitable for RAM anyway.
fn maps_files_directly(folder: &Path) -> bool {
    nameless_file(folder).is_some_and(|nameless| maps_directly(&nameless))
}

/// Size of the pages of files in this folder: that of huge pages in a hugetlbfs, or in a tmpfs with `huge=`. None if no file
/// can be made there.
pub fn page_bytes(folder: &Path) -> Option<u64> {
    Some(nameless_file(folder)?.metadata().ok()?.blksize())
}

fn nameless_file(folder: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    open(folder, flags, Mode::RUSR | Mode::WUSR).ok().map(File::from)
}

/// Whether mappings of this file bypass the page cache (DAX).
pub fn maps_directly(file: &File) -> bool {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
        .is_ok_and(|told| told.stx_attributes.contains(StatxAttributes::DAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RamFile;

    const MIB: u64 = 1 << 20;

    #[test]
    fn dev_shm_is_tmpfs_and_holes_are_free() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let room = Room::of(folder.path()).unwrap();
        assert_eq!(room.kind, FileSystemKind::Tmpfs);
        let (free, total) = (room.free_bytes.unwrap(), room.total_bytes.unwrap());
        assert!(0 < free && free <= total, "{room:?}");
        // A sparse file uses no space; so RAM sizes must be added up, not read from the file system.
        RamFile::create(&folder.path().join("ram-1"), total * 2).unwrap();
        assert!(Room::of(folder.path()).unwrap().free_bytes.unwrap() > free / 2);
    }

    #[test]
    fn file_systems_have_names() {
        let name = |magic| FileSystemKind::Other { magic }.to_string();
        assert_eq!([name(0xef53), name(0x5846_5342), name(0x17)], ["ext4", "xfs", "a file system of type 0x17"]);
        assert_eq!(Room::of(Path::new("/dev/shm")).unwrap().kind.to_string(), "tmpfs");
        assert_eq!(page_bytes(Path::new("/dev/shm")), Some(crate::PAGE_BYTES));
        assert_eq!(page_bytes(Path::new("/proc")), None);
    }

    #[test]
    fn proc_is_of_another_kind() {
        let room = Room::of(Path::new("/proc")).unwrap();
        assert!(matches!(room.kind, FileSystemKind::Other { .. }), "{room:?}");
    }

    #[test]
    fn missing_folder_is_named_in_error() {
        let refusal = must_hold(Path::new("/no/such/folder"), in_folder(MIB)).unwrap_err().to_string();
        assert_eq!(refusal, "/no/such/folder: its free space cannot be read");
    }

    fn in_folder(folder_bytes: u64) -> Needs {
        Needs { folder_bytes, keeper_bytes: 0 }
    }

    #[test]
    fn more_than_host_memory_is_refused() {
        let refusal = must_hold(Path::new("/dev/shm"), in_folder(1 << 60)).unwrap_err().to_string();
        assert!(
            refusal.starts_with("too little host memory: 1099511627776 MiB are needed and the host has "),
            "{refusal}"
        );
        assert!(must_hold(Path::new("/dev/shm"), in_folder(MIB)).is_ok());
    }

    /// All combinations of host, folder and machine sizes in each kind of folder: the suggested remedy works.
    #[test]
    fn each_suggested_remedy_works() {
        let folder = Path::new("/ram");
        let sizes = [1, 2, 3, 5].map(|mib| mib * MIB);
        let kinds = [
            FileSystemKind::Tmpfs,
            FileSystemKind::Ramfs,
            FileSystemKind::Hugetlbfs { huge_page_bytes: 2 * MIB },
            FileSystemKind::Dax,
            FileSystemKind::Other { magic: 0xef53 },
        ];
        let all = || sizes.iter().copied();
        let (mut refused, mut held) = (0, 0);
        for (kind, total_bytes, available_bytes) in
            kinds.into_iter().flat_map(|kind| all().flat_map(move |total| all().map(move |free| (kind, total, free))))
        {
            let host = HostMemory { total_bytes, available_bytes: available_bytes.min(total_bytes) };
            for (room_bytes, folder_bytes, keeper_bytes) in
                all().flat_map(|room| all().flat_map(move |folder| all().map(move |keeper| (room, folder, keeper))))
            {
                let room = Room { kind, free_bytes: Some(room_bytes), total_bytes: Some(room_bytes) };
                let needs = Needs { folder_bytes, keeper_bytes };
                let roomy = Room { free_bytes: None, ..room };
                let idle = HostMemory { available_bytes: total_bytes, ..host };
                match check(folder, &room, needs, host) {
                    Ok(()) => {
                        assert!(folder_bytes <= room_bytes && needs.host_bytes(kind) <= host.available_bytes);
                        held += 1;
                    }
                    // Remedy: a larger folder.
                    Err(RoomError::FolderTooSmall { .. }) => check(folder, &roomy, needs, host).unwrap(),
                    // Remedy: memory that other processes free.
                    Err(RoomError::HostTooSmall { .. }) => check(folder, &roomy, needs, idle).unwrap(),
                    // No remedy.
                    Err(RoomError::MoreThanHost { .. }) => assert!(check(folder, &roomy, needs, idle).is_err()),
                    Err(error) => panic!("{error}"),
                }
                refused += 1;
            }
        }
        assert!(held > 100 && refused > 2 * held, "{held} of {refused}");
    }

    #[test]
    fn host_memory_limits_an_oversized_tmpfs() {
        let promising = Room { kind: FileSystemKind::Tmpfs, free_bytes: Some(64 * MIB), total_bytes: Some(64 * MIB) };
        let folder = Path::new("/ram");
        let host = |mib| HostMemory { total_bytes: 64 * MIB, available_bytes: mib * MIB };
        assert!(check(folder, &promising, in_folder(32 * MIB), host(32)).is_ok());
        let refusal = check(folder, &promising, in_folder(32 * MIB), host(31)).unwrap_err().to_string();
        assert!(refusal.starts_with("too little host memory: 32 MiB are needed and 31 MiB are available"), "{refusal}");
        let unlimited = Room { kind: FileSystemKind::Ramfs, free_bytes: None, total_bytes: None };
        assert!(check(folder, &unlimited, in_folder(32 * MIB), host(31)).is_err());
        let reserved = Room { kind: FileSystemKind::Hugetlbfs { huge_page_bytes: 2 * MIB }, ..promising };
        assert!(check(folder, &reserved, in_folder(32 * MIB), host(0)).is_ok());
        let keeper = Needs { keeper_bytes: MIB, ..in_folder(32 * MIB) };
        assert!(check(folder, &reserved, keeper, host(0)).is_err(), "the keeper's own is the host's everywhere");
    }

    #[test]
    fn host_memory_is_read_from_meminfo() {
        let host = HostMemory::now().unwrap();
        assert!(host.total_bytes > host.available_bytes && host.available_bytes > MIB);
        assert_eq!(line_of("MemFree: 1 kB\nMemAvailable:   2048 kB\n", "MemAvailable"), Some(2 * MIB));
        assert_eq!(line_of("MemFree: 1 kB\n", "MemAvailable"), None);
        assert_eq!(line_of("MemAvailable: many kB\n", "MemAvailable"), None);
    }
}
