//! Image locks, byte for byte those of QEMU's file driver (block/file-posix.c), so that a stock QEMU or qemu-img and
//! Hearth refuse each other.
//!
//! A process that uses a permission holds a shared lock on byte 100 + permission; one that denies it to others, on byte
//! 200 + permission. First take all of one's own, then look whether somebody holds the counterpart:
//!
//! ```text
//! permission        writer uses, forbids     reader uses, forbids     bytes
//! consistent read   uses                     uses                     100, 200
//! write             uses, forbids            forbids                  101, 201
//! write unchanged                                                     102, 202
//! resize            uses, forbids            forbids                  103, 203
//! ```
//!
//! The locks belong to the open file description that also carries the I/O. A request that io_uring still has in flight
//! keeps that description, and with it the locks, past the death of its process: whoever waits for the lock waits for
//! the last write.
//!
//! A guest outlives its keeper, and so must the lock. QEMU inherits a second description with the same locks, open for
//! reading only, which ends with the last QEMU of the machine. The machine's next keeper has to get past that lock, and
//! nobody else may. Two more bytes, different ones for each machine, tell it what it meets:
//!
//! ```text
//! (1 << 40) + 2 * machine       held by a keeper that writes: its last requests may still be in flight
//! (1 << 40) + 2 * machine + 1   inherited by QEMU
//! ```
//!
//! While the second byte is held, everybody whom the dead keeper kept out is still kept out. The next keeper then waits
//! for the first byte only.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::{ImageError, access_error};

const USED: i64 = 100;
const FORBIDDEN: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Behind all bytes that QEMU locks.
const MACHINES: i64 = 1 << 40;
const MACHINE_MASK: u64 = (1 << 40) - 1;

/// Between two tries. A killed process' last requests end within milliseconds.
const PAUSE: Duration = Duration::from_millis(10);

/// The machine that uses an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockOwner {
    machine: u64,
    qemu_lives: bool,
}

impl LockOwner {
    /// The machine that owns this folder.
    pub fn with_folder(folder: &Path) -> io::Result<Self> {
        let found = fs::metadata(folder)?;
        // Spread over all bits: folders that are made one after the other have numbers that follow each other.
        let mixed = (found.ino() ^ found.dev().rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Self { machine: (mixed ^ (mixed >> 29)) & MACHINE_MASK, qemu_lives: false })
    }

    /// `qemu_lives`: the machine's QEMU may hold an inherited lock, which the keeper that takes it over gets past.
    pub fn with_living_qemu(self, qemu_lives: bool) -> Self {
        Self { qemu_lives, ..self }
    }

    fn keeper_byte(self) -> i64 {
        MACHINES + 2 * self.machine as i64
    }

    fn qemu_byte(self) -> i64 {
        self.keeper_byte() + 1
    }
}

/// Locks an image as its only user for as long as the file lives. It need not be an image of any format.
pub fn lock_alone(path: &Path) -> Result<File, ImageError> {
    let file = File::open(path).map_err(|error| access_error(path, "open", error))?;
    lock_image(&file, path, false, Duration::ZERO, None)?;
    Ok(file)
}

/// Locks the image behind `file`, waiting up to `patience` for others to let go.
pub(crate) fn lock_image(
    file: &File,
    path: &Path,
    read_only: bool,
    patience: Duration,
    owner: Option<LockOwner>,
) -> Result<(), ImageError> {
    let deadline = Instant::now() + patience;
    loop {
        let taken =
            try_lock(file, read_only, owner).map_err(|source| ImageError::Lock { path: path.into(), source })?;
        if taken {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(ImageError::InUse { path: path.into(), holder: describe_holder(file, path) });
        }
        thread::sleep(PAUSE);
    }
}

/// A second lock on the locked image behind `file`, for its owner's QEMU to inherit.
pub(crate) fn inheritable_lock(file: &File, read_only: bool, owner: LockOwner) -> io::Result<OwnedFd> {
    // The same file, whatever its path leads to by now.
    let second = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    for byte in bytes_of(read_only).chain([owner.qemu_byte()]) {
        if !set_lock(&second, byte, libc::F_RDLCK)? {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
    }
    Ok(second.into())
}

fn uses(read_only: bool) -> &'static [i64] {
    if read_only { &[CONSISTENT_READ] } else { &[CONSISTENT_READ, WRITE, RESIZE] }
}

const FORBIDS: [i64; 2] = [WRITE, RESIZE];

/// Which bytes whoever uses an image locks.
fn bytes_of(read_only: bool) -> impl Iterator<Item = i64> {
    uses(read_only).iter().map(|used| USED + used).chain(FORBIDS.map(|forbidden| FORBIDDEN + forbidden))
}

fn try_lock(file: &File, read_only: bool, owner: Option<LockOwner>) -> io::Result<bool> {
    let keeper_byte = owner.filter(|_| !read_only).map(LockOwner::keeper_byte);
    let own = || bytes_of(read_only).chain(keeper_byte);
    for byte in own() {
        if !set_lock(file, byte, libc::F_RDLCK)? {
            release(file, own())?;
            return Ok(false);
        }
    }
    let counterparts: Vec<i64> = match owner.filter(|owner| owner.qemu_lives) {
        Some(owner) if is_held_by_another(file, owner.qemu_byte())? => keeper_byte.into_iter().collect(),
        _ => {
            let used = FORBIDS.map(|forbidden| USED + forbidden);
            used.into_iter().chain(uses(read_only).iter().map(|used| FORBIDDEN + used)).collect()
        }
    };
    for byte in counterparts {
        if is_held_by_another(file, byte)? {
            release(file, own())?;
            return Ok(false);
        }
    }
    Ok(true)
}

fn release(file: &File, bytes: impl Iterator<Item = i64>) -> io::Result<()> {
    for byte in bytes {
        set_lock(file, byte, libc::F_UNLCK)?;
    }
    Ok(())
}

/// False when an exclusive lock of somebody else is in the way.
fn set_lock(file: &File, byte: i64, kind: libc::c_int) -> io::Result<bool> {
    match call(file, libc::F_OFD_SETLK, &mut one_byte(byte, kind)) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Asks for an exclusive lock without taking it: any lock of another description answers.
fn is_held_by_another(file: &File, byte: i64) -> io::Result<bool> {
    let mut lock = one_byte(byte, libc::F_WRLCK);
    call(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

fn one_byte(byte: i64, kind: libc::c_int) -> libc::flock {
    libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: byte, l_len: 1, l_pid: 0 }
}

fn call(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: both commands take a pointer to one flock, which lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The kernel does not say who holds such a lock; the processes' descriptor tables do, where we may read them.
fn describe_holder(file: &File, path: &Path) -> String {
    let unknown = || format!("another process (fuser -v {} names it)", path.display());
    let Ok(metadata) = file.metadata() else { return unknown() };
    let Ok(processes) = fs::read_dir("/proc") else { return unknown() };
    let holders: Vec<String> = processes
        .flatten()
        .filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok())
        .filter(|&pid| holds_lock(pid, metadata.ino()))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim())
        })
        .collect();
    if holders.is_empty() { unknown() } else { holders.join(", ") }
}

fn holds_lock(pid: u32, inode: u64) -> bool {
    // "lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 100". The device number there is that of the file system, which
    // need not be what stat says (btrfs); lock kind, inode and our bytes are enough.
    let place = format!(":{inode} ");
    let is_ours = |line: &str| line.starts_with("lock:") && line.contains("OFDLCK") && line.contains(&place);
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return false };
    descriptors
        .flatten()
        .filter_map(|descriptor| fs::read_to_string(descriptor.path()).ok())
        .any(|text| text.lines().any(is_ours))
}
