//! The two folders of a machine, and the locks that make its keeper the only one.
//!
//! Runtime folder: sockets, journal, logs (small). Memory folder: RAM files, ledgers, logs of qcow2 tables, tag key
//! (large, in host memory).

pub mod memory_owner;
pub mod own_user;

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_disk::boot_set;
use hearth_disk::image::LockOwner;
use hearth_disk::nvram;
use hearth_disk::tag::{TAG_KEY_BYTES, Tagger};
use hearth_memory::{Durability, replace_file};
use hearth_qemu::launch::SCREEN_SOCKET;
use hearth_recovery::rejuvenation::parked;
use hearth_recovery::{images, random};
use rustix::fs::{FlockOperation, flock};

const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;
const TABLES_PREFIX: &str = "tables-";
/// The file with the keeper's lock, in the runtime folder.
pub const KEEPER_LOCK: &str = "keeper.lock";
/// The file of the disk with the cache map, in the memory folder.
pub const CACHE_MAP: &str = "cache-map";
/// The link to the VNC server of the QEMU that has the guest, in the runtime folder.
pub const VNC_SOCKET: &str = "vnc.sock";
/// How long to wait for another process that tests the lock. The test takes microseconds.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);

/// The two folders of one machine, locked until the last copy of this is dropped.
#[derive(Clone, Debug)]
pub struct Folders {
    pub runtime: PathBuf,
    pub memory: PathBuf,
    /// Locks of the runtime folder and of the memory folder. They go when the keeper goes, however it dies.
    locks: Arc<[File; 2]>,
}

#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("cannot create or use {path}")]
    Unusable { path: PathBuf, source: io::Error },
    #[error("cannot use {path}, which {why}; remove it, or choose another folder")]
    Foreign { path: PathBuf, why: String },
    #[error("memory folder {path} belongs to another machine: {why}; {}", memory_owner::HINT)]
    OthersMemory { path: PathBuf, why: String },
    #[error("{name} is already running: another keeper holds {path}; see `hearth status {name}`")]
    Running { name: String, path: PathBuf },
}

/// The folder itself, or its closest parent that exists.
pub fn existing(folder: &Path) -> &Path {
    folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"))
}

/// Identity under which this machine locks its images. None if the runtime folder cannot be read: then no QEMU inherits
/// the locks.
pub fn lock_owner(runtime: &Path) -> Option<LockOwner> {
    LockOwner::with_folder(runtime).ok()
}

/// Path of a restored machine's disk image, in the machine's own folder.
pub fn restored_disk(machine_folder: &Path, disk: &str) -> PathBuf {
    machine_folder.join(format!("disk-{disk}.qcow2"))
}

/// Path of a disk's vhost-user socket, in the runtime folder.
pub fn disk_socket(runtime: &Path, disk: &str) -> PathBuf {
    runtime.join(format!("disk-{disk}.sock"))
}

/// Name of the disk that has this socket, if it is one in the runtime folder.
pub fn disk_at(runtime: &Path, socket: &Path) -> Option<String> {
    let file = socket.strip_prefix(runtime).ok()?.to_str()?;
    file.strip_prefix("disk-")?.strip_suffix(".sock").map(str::to_owned)
}

fn screen_name(generation: u32) -> String {
    format!("screen-{generation}")
}

/// Path of the registers of an incarnation that will be dumped, in the runtime folder.
pub fn registers(runtime: &Path, incarnation: u32) -> PathBuf {
    runtime.join(format!("registers-{incarnation}"))
}

/// Path of the log of a qcow2 image's tables, in the memory folder.
pub fn disk_tables(memory: &Path, disk: &str) -> PathBuf {
    memory.join(format!("{TABLES_PREFIX}{disk}"))
}

impl Folders {
    /// Makes the folders (mode 0700) and takes their locks.
    pub fn prepare(name: &str, runtime: &Path, memory: &Path) -> Result<Self, FolderError> {
        let lock = lock_runtime(name, runtime)?;
        make_private(memory)?;
        let of_memory = memory_owner::own(runtime, memory)?;
        let locks = Arc::new([lock, of_memory]);
        Ok(Self { runtime: runtime.to_owned(), memory: memory.to_owned(), locks })
    }

    /// Keeps the locks until this process ends or becomes another program, whatever happens to the copies of this.
    pub fn stay_locked(&self) {
        Box::leak(Box::new(self.locks.clone()));
    }

    pub fn journal(&self) -> PathBuf {
        self.runtime.join("journal.json")
    }

    pub fn qmp_socket(&self, generation: u32) -> PathBuf {
        self.runtime.join(format!("qmp-{generation}.sock"))
    }

    pub fn serial_socket(&self, generation: u32) -> PathBuf {
        self.runtime.join(format!("serial-{generation}.sock"))
    }

    pub fn agent_socket(&self, generation: u32) -> PathBuf {
        self.runtime.join(format!("agent-{generation}.sock"))
    }

    /// The folder with the socket of a QEMU's VNC server, in which that QEMU can make sockets.
    pub fn screen(&self, generation: u32) -> PathBuf {
        self.runtime.join(screen_name(generation))
    }

    pub fn userfault_socket(&self, generation: u32) -> PathBuf {
        self.runtime.join(format!("userfault-{generation}.sock"))
    }

    pub fn passt_pid(&self, net: usize, generation: u32) -> PathBuf {
        self.runtime.join(format!("passt-{net}-{generation}.pid"))
    }

    /// File with the packet gates between a QEMU and its networks.
    pub fn gates(&self, generation: u32) -> PathBuf {
        self.runtime.join(format!("valves-{generation}"))
    }

    pub fn qemu_log(&self, generation: u32) -> PathBuf {
        self.runtime.join(format!("qemu-{generation}.log"))
    }

    /// Points `vnc.sock` at the VNC server of the QEMU that has the guest.
    pub fn show_screen_of(&self, generation: u32) -> io::Result<()> {
        let (link, draft) = (self.runtime.join(VNC_SOCKET), self.runtime.join(format!("{VNC_SOCKET}.new")));
        if let Err(error) = fs::remove_file(&draft)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        symlink(Path::new(&screen_name(generation)).join(SCREEN_SOCKET), &draft)?;
        fs::rename(draft, link)
    }

    /// Registers of an incarnation that will be dumped.
    pub fn registers(&self, incarnation: u32) -> PathBuf {
        registers(&self.runtime, incarnation)
    }

    pub fn disk_socket(&self, disk: &str) -> PathBuf {
        disk_socket(&self.runtime, disk)
    }

    /// Log of the changes of a qcow2 image's tables that are not in the image yet.
    pub fn disk_tables(&self, disk: &str) -> PathBuf {
        disk_tables(&self.memory, disk)
    }

    /// The machine's tag secret: read from the memory folder, or created on the first start. It is never stored on a
    /// disk.
    pub fn tagger(&self) -> Result<Tagger, FolderError> {
        let path = self.memory.join("tag.key");
        tag_key(&path).map(|key| Tagger::new(&key)).map_err(|source| FolderError::Unusable { path, source })
    }

    /// Removes the sockets, the screen's folder and the packet gates of a QEMU that has ended.
    pub fn discard_generation(&self, generation: u32) {
        let nets = (0..8).map(|net| self.passt_pid(net, generation));
        let sockets = [Self::qmp_socket, Self::serial_socket, Self::agent_socket, Self::userfault_socket];
        let sockets = sockets.map(|socket| socket(self, generation));
        for path in sockets.into_iter().chain(nets).chain([self.gates(generation)]) {
            // Most of these never existed; a file that stays is replaced by its next user.
            let _ = fs::remove_file(path);
        }
        let _ = fs::remove_dir_all(self.screen(generation));
    }

    /// Removes RAM files, ledgers, table logs, the boot set and the tag key. Call it when the machine has stopped.
    pub fn discard_memory(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.memory)? {
            let entry = entry?;
            if is_of_a_run(&entry.file_name().to_string_lossy()) {
                fs::remove_file(entry.path())?;
            }
        }
        memory_owner::leave_if_empty(&self.memory)
    }
}

/// Whether a file of this name in the memory folder ends with the machine's run.
fn is_of_a_run(name: &str) -> bool {
    let numbered = |prefix| name.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok());
    let ours = [TABLES_PREFIX, boot_set::FILE_PREFIX, images::NOTES_FILE, parked::FILE_PREFIX];
    let is_ours = numbered("ram-") || numbered("ledger-") || ours.iter().any(|prefix| name.starts_with(prefix));
    is_ours || name == "tag.key" || name == CACHE_MAP
}

/// Whether Hearth makes files of this name in a memory folder. The file `owner` is not among them.
pub fn is_in_memory(name: &str) -> bool {
    is_of_a_run(name) || name.starts_with(nvram::FILE_PREFIX)
}

/// Makes a machine's folders and what a keeper stores there before it starts a guest.
pub fn prepare(name: &str, runtime: &Path, memory: &Path) -> io::Result<()> {
    let folders = Folders::prepare(name, runtime, memory).map_err(io::Error::other)?;
    folders.tagger().map(drop).map_err(io::Error::other)
}

/// Makes a machine's runtime folder (mode 0700), and takes the keeper's lock in it until the file is dropped.
pub fn lock_runtime(name: &str, runtime: &Path) -> Result<File, FolderError> {
    make_private(runtime)?;
    let path = runtime.join(KEEPER_LOCK);
    let unusable = |source| FolderError::Unusable { path: path.clone(), source };
    let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path).map_err(unusable)?;
    match take(&lock) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(FolderError::Running { name: name.to_owned(), path }),
        Err(error) => Err(unusable(error.into())),
    }
}

/// Creates a folder that only this machine uses.
fn make_private(folder: &Path) -> Result<(), FolderError> {
    let unusable = |source| FolderError::Unusable { path: folder.to_owned(), source };
    make(folder).map_err(unusable)?;
    // Check before changing anything: the path may be another user's link.
    refuse_foreign(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o700)).map_err(unusable)
}

/// Takes a keeper's lock. `life::has_keeper` tests the lock with a shared lock held for microseconds, so a busy lock is
/// retried for a second.
pub(super) fn take(lock: &File) -> rustix::io::Result<()> {
    let deadline = Instant::now() + LOOK_PATIENCE;
    loop {
        match flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {}
            taken => return taken,
        }
        flock(lock, FlockOperation::NonBlockingLockShared)?;
        flock(lock, FlockOperation::Unlock)?;
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn make(folder: &Path) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Refuses a folder that another user owns or could replace. Anyone may create entries in /tmp and /dev/shm.
fn refuse_foreign(folder: &Path) -> Result<(), FolderError> {
    let us = rustix::process::geteuid().as_raw();
    let ours = fs::symlink_metadata(folder);
    let around = folder.parent().map_or_else(|| fs::metadata(folder), fs::metadata);
    let (ours, around) = ours
        .and_then(|ours| Ok((ours, around?)))
        .map_err(|source| FolderError::Unusable { path: folder.to_owned(), source })?;
    let why = if ours.is_symlink() || ours.uid() != us {
        format!("is not a folder of user {us}")
    } else if ours.mode() & OTHERS_WRITE != 0 && !is_empty(folder) {
        "is a world-writable folder that is not empty".to_owned()
    } else if around.uid() != us && around.uid() != 0 {
        format!("is inside a folder of user {}", around.uid())
    } else if around.mode() & OTHERS_WRITE != 0 && around.mode() & STICKY == 0 {
        "is inside a world-writable folder".to_owned()
    } else {
        return Ok(());
    };
    Err(FolderError::Foreign { path: folder.to_owned(), why })
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

fn tag_key(path: &Path) -> io::Result<[u8; TAG_KEY_BYTES]> {
    let mut key = [0; TAG_KEY_BYTES];
    match File::open(path).and_then(|mut file| file.read_exact(&mut key)) {
        Ok(()) => return Ok(key),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    key = random::bytes();
    // On a disk, a key cut short would fail every later start, and one of zeroes would not be secret.
    replace_file(path, Durability::PowerCut, |file| file.write_all(&key))?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_keeper_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let (runtime, memory) = (folder.path().join("run/web"), folder.path().join("memory/web"));
        let first = Folders::prepare("web", &runtime, &memory).unwrap();
        let refusal = Folders::prepare("web", &runtime, &memory).unwrap_err().to_string();
        assert!(refusal.starts_with("web is already running: another keeper holds "), "{refusal}");
        drop(first);
        Folders::prepare("web", &runtime, &memory).unwrap();
    }

    #[test]
    fn brief_lock_test_does_not_refuse_a_keeper() {
        let folder = tempfile::tempdir().unwrap();
        let (runtime, memory) = (folder.path().join("web"), folder.path().join("memory"));
        drop(Folders::prepare("web", &runtime, &memory).unwrap());
        let look = File::open(runtime.join("keeper.lock")).unwrap();
        flock(&look, FlockOperation::NonBlockingLockShared).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                drop(look);
            });
            Folders::prepare("web", &runtime, &memory).unwrap();
        });
    }

    #[test]
    fn folders_others_can_replace_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = folder.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        let memory = folder.path().join("memory");
        let check = |runtime: &Path, expect: &str| {
            let refusal = Folders::prepare("web", runtime, &memory).unwrap_err().to_string();
            assert_eq!(
                refusal,
                format!("cannot use {}, which {expect}; remove it, or choose another folder", runtime.display())
            );
        };
        check(&open.join("web"), "is inside a world-writable folder");
        let elsewhere = folder.path().join("elsewhere");
        std::os::unix::fs::symlink(&open, &elsewhere).unwrap();
        check(&elsewhere, &format!("is not a folder of user {}", rustix::process::geteuid().as_raw()));
        fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
        Folders::prepare("web", &open.join("web"), &memory).unwrap();
    }

    #[test]
    fn machine_folders_are_closed_to_other_users() {
        let folder = tempfile::tempdir().unwrap();
        let (runtime, memory) = (folder.path().join("run"), folder.path().join("memory"));
        // One folder exists already, with the mode that `mkdir` gives it; the other does not.
        fs::create_dir(&runtime).unwrap();
        fs::set_permissions(&runtime, Permissions::from_mode(0o755)).unwrap();
        Folders::prepare("web", &runtime, &memory).unwrap();
        for folder in [runtime, memory] {
            assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700, "{}", folder.display());
        }
    }

    #[test]
    fn folders_of_other_users_are_refused() {
        if !rustix::process::geteuid().is_root() {
            // Only root can give a folder to another user. A link counts as another user's: see the test above.
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (runtime, memory) = (folder.path().join("run"), folder.path().join("memory"));
        fs::create_dir(&memory).unwrap();
        fs::set_permissions(&memory, Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::chown(&memory, Some(65534), None).unwrap();
        let refusal = Folders::prepare("web", &runtime, &memory).unwrap_err().to_string();
        assert!(refusal.contains("memory, which is not a folder of user 0"), "{refusal}");
        let untouched = fs::metadata(&memory).unwrap();
        assert_eq!((untouched.permissions().mode() & 0o777, fs::read_dir(&memory).unwrap().count()), (0o755, 0));
    }

    #[test]
    fn tag_key_outlives_keeper_not_machine() {
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::prepare("web", &folder.path().join("run"), &folder.path().join("memory")).unwrap();
        let path = folders.memory.join("tag.key");
        let first = tag_key(&path).unwrap();
        assert_eq!(tag_key(&path).unwrap(), first);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        folders.discard_memory().unwrap();
        assert_ne!(tag_key(&path).unwrap(), first);
    }
}
