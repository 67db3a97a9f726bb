//! Room: how much guest RAM a folder and its host can still hold.
//!
//! tmpfs has a limit of its own (half of the host's memory unless said otherwise), and a guest that runs into it gets its
//! QEMU killed by SIGBUS. tmpfs also promises more than the host may have. So both are asked before a machine starts, and
//! a refusal names the one that is short and what to do about it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatFs, StatxAttributes, StatxFlags, open, statfs, statx};

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// What a folder's file system keeps its files in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystemKind {
    /// Host memory, up to the file system's own size.
    Tmpfs,
    /// Host memory without a limit.
    Ramfs,
    /// Huge pages reserved by the host.
    Hugetlbfs { huge_page_bytes: u64 },
    /// Persistent or reserved memory, mapped without a page cache.
    Dax,
    /// A disk or a network: guest RAM there would be written back all the time.
    Other { magic: u64 },
}

/// What a folder can still hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub kind: FileSystemKind,
    /// The file system's own word; None if it has no limit.
    pub free_bytes: Option<u64>,
    pub total_bytes: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum RoomError {
    #[error("{folder}: cannot be asked for its free space")]
    Folder { folder: PathBuf, source: io::Error },
    #[error("the host's free memory cannot be read from {path}: {why}")]
    HostMemory { path: &'static str, why: String },
    #[error(
        "{folder}: too little room: {wanted_mib} MiB are needed and {free_mib} MiB are free; \
         enlarge it (for tmpfs: mount -o remount,size=...), choose another folder, or stop another machine"
    )]
    FolderTooSmall { folder: PathBuf, wanted_mib: u64, free_mib: u64 },
    #[error(
        "too little host memory: {wanted_mib} MiB are needed and {available_mib} MiB are available; \
         stop another machine or give this one less memory"
    )]
    HostTooSmall { wanted_mib: u64, available_mib: u64 },
}

impl FileSystemKind {
    /// Its files take the memory that `host_available_bytes` counts.
    pub fn is_host_memory(self) -> bool {
        matches!(self, Self::Tmpfs | Self::Ramfs)
    }
}

impl Room {
    pub fn of(folder: &Path) -> Result<Self, RoomError> {
        let failed = |errno: rustix::io::Errno| RoomError::Folder { folder: folder.to_owned(), source: errno.into() };
        let told = statfs(folder).map_err(failed)?;
        Ok(Self::from_statfs(&told, maps_files_directly(folder)))
    }

    fn from_statfs(told: &StatFs, dax: bool) -> Self {
        let block_bytes = told.f_bsize as u64;
        // The kernel's type is signed; the magic numbers are not.
        let kind = match u64::from(told.f_type as u32) {
            TMPFS_MAGIC => FileSystemKind::Tmpfs,
            RAMFS_MAGIC => FileSystemKind::Ramfs,
            HUGETLBFS_MAGIC => FileSystemKind::Hugetlbfs { huge_page_bytes: block_bytes },
            _ if dax => FileSystemKind::Dax,
            magic => FileSystemKind::Other { magic },
        };
        // Memory file systems without a limit say 0 blocks in all.
        let limited = told.f_blocks != 0;
        Self {
            kind,
            free_bytes: limited.then(|| told.f_bavail * block_bytes),
            total_bytes: limited.then(|| told.f_blocks * block_bytes),
        }
    }
}

/// Refuses RAM that the folder or the host cannot hold. Returns what the folder is, for the log.
pub fn must_hold(folder: &Path, wanted_bytes: u64) -> Result<Room, RoomError> {
    let room = Room::of(folder)?;
    check(folder, &room, wanted_bytes, host_available_bytes()?)?;
    Ok(room)
}

fn check(folder: &Path, room: &Room, wanted_bytes: u64, available_bytes: u64) -> Result<(), RoomError> {
    let mib = |bytes: u64| bytes >> 20;
    let wanted_mib = wanted_bytes.div_ceil(1 << 20);
    if let Some(free) = room.free_bytes.filter(|&free| free < wanted_bytes) {
        return Err(RoomError::FolderTooSmall { folder: folder.to_owned(), wanted_mib, free_mib: mib(free) });
    }
    if room.kind.is_host_memory() && available_bytes < wanted_bytes {
        return Err(RoomError::HostTooSmall { wanted_mib, available_mib: mib(available_bytes) });
    }
    Ok(())
}

/// Memory the host can hand out without swapping, by its own estimate.
pub fn host_available_bytes() -> Result<u64, RoomError> {
    const PATH: &str = "/proc/meminfo";
    let unreadable = |why: String| RoomError::HostMemory { path: PATH, why };
    let meminfo = fs::read_to_string(PATH).map_err(|error| unreadable(error.to_string()))?;
    available_in(&meminfo).ok_or_else(|| unreadable("it has no line MemAvailable".to_owned()))
}

fn available_in(meminfo: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// DAX is a property of files, not of folders: so a nameless file is made and asked. A file system that cannot make one is
/// no place for RAM anyway.
fn maps_files_directly(folder: &Path) -> bool {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    open(folder, flags, Mode::RUSR | Mode::WUSR).is_ok_and(|nameless| maps_directly(&File::from(nameless)))
}

/// Whether a file is mapped past the page cache.
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
    fn shared_memory_is_tmpfs_and_shrinks_as_it_is_filled() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let room = Room::of(folder.path()).unwrap();
        assert_eq!(room.kind, FileSystemKind::Tmpfs);
        let (free, total) = (room.free_bytes.unwrap(), room.total_bytes.unwrap());
        assert!(0 < free && free <= total, "{room:?}");
        // A sparse file takes no room: that is why wanted RAM must be added up, not read from the file system.
        RamFile::create(&folder.path().join("ram-1"), total * 2).unwrap();
        assert!(Room::of(folder.path()).unwrap().free_bytes.unwrap() > free / 2);
    }

    #[test]
    fn proc_is_no_place_for_ram() {
        let room = Room::of(Path::new("/proc")).unwrap();
        assert!(matches!(room.kind, FileSystemKind::Other { .. }), "{room:?}");
    }

    #[test]
    fn a_missing_folder_is_named() {
        let refusal = must_hold(Path::new("/no/such/folder"), MIB).unwrap_err().to_string();
        assert_eq!(refusal, "/no/such/folder: cannot be asked for its free space");
    }

    #[test]
    fn more_than_the_folder_holds_is_refused_by_name() {
        let refusal = must_hold(Path::new("/dev/shm"), 1 << 60).unwrap_err().to_string();
        assert!(refusal.starts_with("/dev/shm: too little room: 1099511627776 MiB are needed and "), "{refusal}");
        assert!(must_hold(Path::new("/dev/shm"), MIB).is_ok());
    }

    #[test]
    fn the_host_is_asked_where_the_file_system_promises_more_than_there_is() {
        let promising = Room { kind: FileSystemKind::Tmpfs, free_bytes: Some(64 * MIB), total_bytes: Some(64 * MIB) };
        let folder = Path::new("/ram");
        assert!(check(folder, &promising, 32 * MIB, 32 * MIB).is_ok());
        let refusal = check(folder, &promising, 32 * MIB, 31 * MIB).unwrap_err().to_string();
        assert!(refusal.starts_with("too little host memory: 32 MiB are needed and 31 MiB are available"), "{refusal}");
        let unlimited = Room { kind: FileSystemKind::Ramfs, free_bytes: None, total_bytes: None };
        assert!(check(folder, &unlimited, 32 * MIB, 31 * MIB).is_err());
        let reserved = Room { kind: FileSystemKind::Hugetlbfs { huge_page_bytes: 2 * MIB }, ..promising };
        assert!(check(folder, &reserved, 32 * MIB, 0).is_ok());
    }

    #[test]
    fn the_hosts_memory_is_read() {
        assert!(host_available_bytes().unwrap() > MIB);
        assert_eq!(available_in("MemFree: 1 kB\nMemAvailable:   2048 kB\n"), Some(2 * MIB));
        assert_eq!(available_in("MemFree: 1 kB\n"), None);
        assert_eq!(available_in("MemAvailable: many kB\n"), None);
    }
}
