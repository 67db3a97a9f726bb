//! Packet gates between a QEMU and its networks, one per network. While a gate is shut, packets wait where
//! they are.
//!
//! During a hop, two QEMUs have the same open tap or the same connection to passt. Each would read a packet as soon as
//! it arrives, whether its guest runs or not. A packet that the QEMU of a stopped guest reads is lost, and its sender
//! notices only by a timer, 200 ms later. Also, a QEMU that starts resets a tap to settings that no guest has agreed
//! on. One of them is the length of the header before each packet: from then on, the other QEMU reads garbage.
//!
//! So the preload library intercepts QEMU's system calls (`preload/valve.c`), and this file, which both sides map,
//! tells what may pass:
//!
//! ```text
//! 0 "HRTHVALV" | 8 version u32 | 12 count u32 | 16 worked u32 | 20 unused 12
//! 32 + 16 n: number i32, kind u32, shut u32, part u32
//! ```
//! All fields are in the host's byte order, because the reader is on the same host. `number` is the number of the
//! descriptor in QEMU, by which the next keeper fetches it. The library sets `worked` when it has found the file, and
//! `part` while QEMU has read a part of a packet.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::process::open_pidfd;

const MAGIC: [u8; 8] = *b"HRTHVALV";
const VERSION: u32 = 1;
/// Maximum number of gates; machines have at most seven networks.
const GATES_MAX: usize = 8;

#[repr(C)]
struct PacketGate {
    number: i32,
    kind: u32,
    shut: AtomicU32,
    part: AtomicU32,
}

#[repr(C)]
struct Shared {
    magic: [u8; 8],
    version: u32,
    count: u32,
    worked: AtomicU32,
    unused: [u32; 3],
    gates: [PacketGate; GATES_MAX],
}
const _: () = assert!(size_of::<Shared>() == 160);

/// How packets are separated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Each read returns one packet.
    Tap = 1,
    /// Each packet follows its length.
    Stream = 2,
}

/// The gates of one QEMU.
#[derive(Debug)]
pub struct PacketGates {
    shared: NonNull<Shared>,
    count: usize,
}

// SAFETY: the mapping lives as long as this and is not tied to a thread; its changing fields are atomic.
unsafe impl Send for PacketGates {}
// SAFETY: as for `Send`.
unsafe impl Sync for PacketGates {}

impl PacketGates {
    /// Creates the file for a QEMU that is about to start with these descriptors.
    pub fn make(path: &Path, nets: &[(RawFd, Kind)], shut: bool) -> io::Result<Self> {
        assert!(nets.len() <= GATES_MAX, "a machine has no more networks than that");
        let mut bytes = Vec::with_capacity(size_of::<Shared>());
        bytes.extend(MAGIC);
        bytes.extend([VERSION, nets.len() as u32, 0, 0, 0, 0].into_iter().flat_map(u32::to_ne_bytes));
        for (number, kind) in nets {
            bytes.extend(
                [number.cast_unsigned(), *kind as u32, u32::from(shut), 0].into_iter().flat_map(u32::to_ne_bytes),
            );
        }
        bytes.resize(size_of::<Shared>(), 0);
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(path)?;
        io::Write::write_all(&mut file, &bytes)?;
        Self::open(path)
    }

    /// Opens the file of a running QEMU.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let garbled =
            || io::Error::new(ErrorKind::InvalidData, format!("{} is no file of packet gates", path.display()));
        if file.metadata()?.len() != size_of::<Shared>() as u64 {
            return Err(garbled());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of a file that has as many bytes.
        let at = unsafe { mmap(std::ptr::null_mut(), size_of::<Shared>(), access, MapFlags::SHARED, &file, 0)? };
        let shared = NonNull::new(at.cast::<Shared>()).expect("a mapping is not at 0");
        let mut gates = Self { shared, count: 0 };
        let said = gates.shared();
        let count = said.count as usize;
        if said.magic != MAGIC || said.version != VERSION || count > GATES_MAX {
            return Err(garbled());
        }
        gates.count = count;
        Ok(gates)
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping lives as long as `self`. Any bytes are a valid `Shared`, and others change only its
        // atomic fields.
        unsafe { self.shared.as_ref() }
    }

    fn each(&self) -> &[PacketGate] {
        &self.shared().gates[..self.count]
    }

    /// Shuts all gates: packets wait from now on. QEMU may still be reading one.
    pub fn shut(&self) {
        self.each().iter().for_each(|gate| gate.shut.store(1, Ordering::Release));
    }

    /// Opens all gates.
    pub fn open_up(&self) {
        self.each().iter().for_each(|gate| gate.shut.store(0, Ordering::Release));
    }

    /// Whether QEMU's preload library obeys the gates, or there are none.
    pub fn are_worked(&self) -> bool {
        self.count == 0 || self.shared().worked.load(Ordering::Acquire) != 0
    }

    /// Whether QEMU has read each packet that it has begun.
    pub fn are_between_packets(&self) -> bool {
        self.each().iter().all(|gate| gate.part.load(Ordering::Acquire) == 0)
    }

    /// Copies the descriptors behind the gates from a QEMU that another keeper started. Needs the right to trace QEMU.
    pub fn fetch(&self, qemu_pid: u32) -> io::Result<Vec<OwnedFd>> {
        let qemu = open_pidfd(qemu_pid)?;
        let fetch = |gate: &PacketGate| Ok(pidfd_getfd(&qemu, gate.number, PidfdGetfdFlags::empty())?);
        self.each().iter().map(fetch).collect()
    }
}

impl Drop for PacketGates {
    fn drop(&mut self) {
        // SAFETY: `open` made the mapping, and nothing of it is borrowed any more.
        let _ = unsafe { munmap(self.shared.as_ptr().cast(), size_of::<Shared>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_valve_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gates");
        let ours = PacketGates::make(&path, &[(7, Kind::Tap), (9, Kind::Stream)], true).unwrap();
        let theirs = PacketGates::open(&path).unwrap();
        let shut =
            |gates: &PacketGates| gates.each().iter().map(|gate| gate.shut.load(Ordering::Acquire)).collect::<Vec<_>>();
        assert_eq!(shut(&theirs), [1, 1]);
        ours.open_up();
        assert_eq!(shut(&theirs), [0, 0]);
        ours.shut();
        assert_eq!(shut(&theirs), [1, 1]);
        assert!(!ours.are_worked() && ours.are_between_packets());
        theirs.each()[1].part.store(1, Ordering::Release);
        assert!(!ours.are_between_packets());
        assert!(PacketGates::make(&path, &[], false).unwrap().are_worked(), "there is nothing to be worked");
    }

    #[test]
    fn invalid_valve_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gates");
        std::fs::write(&path, [0; 160]).unwrap();
        assert!(PacketGates::open(&path).unwrap_err().to_string().ends_with("gates is no file of packet gates"));
        std::fs::write(&path, [0; 10]).unwrap();
        assert!(PacketGates::open(&path).is_err());
        assert_eq!(PacketGates::open(&folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
