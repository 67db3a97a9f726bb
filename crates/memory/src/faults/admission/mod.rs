//! Admission: guest memory is granted to QEMU unit by unit; QEMU's threads wait for units that are not granted yet.
//!
//! register (QEMU is stopped) -> a thread first touches a unit -> the caller decides -> granted: the unit is
//! unregistered and the kernel serves the rest of it | refused for now: the thread waits, and the caller is asked again
//! -> finish
//!
//! One fault arrives per unit of 2 MiB, not per page: a grant gives the right to use memory, not the memory itself. The
//! price: a unit counts in full from its first page on. Periodic measurement cannot replace admission, because between
//! two measurements a guest can take any amount.
//!
//! If the keeper dies, the guest waits and is not harmed: QEMU's own copy of the userfaultfd keeps the registration.
//! The next keeper fetches that copy and reads from the kernel which parts are still registered; the rest was granted.
//!
//! Each granted unit may split a mapping of QEMU, and the kernel allows 65530 mappings per process; so the unit size
//! grows with the RAM. With huge pages, a unit is at least as large as a page of the file, so that no fault takes more
//! than was granted. Holes punched into a granted unit are refilled without a fault: a grant is permanent.
//!
//! Needs Linux 4.14, and a RAM file on a tmpfs or of huge pages: Linux reports no page faults of other files.

mod queue;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Userfault;
use super::bell::Bell;
use super::handover::watch_process;
use super::mapping::{self, Piece};
use super::userfault;
use crate::{PAGE_BYTES, RamFile};
use queue::Queue;

/// Default unit size in bytes; the caller or a large RAM may need larger units. A fault costs about 10 us, so a guest
/// that takes memory at 2 GiB/s loses 1 % of its time.
pub const UNIT_BYTES: u64 = 2 << 20;
/// Maximum number of units: a quarter of the mappings that the kernel allows a process by default.
const UNITS_MAX: u64 = 1 << 14;
/// Interval between two requests for the units that threads wait for.
const ASK_EVERY: Duration = Duration::from_millis(2);

/// The caller's decision about a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The caller has called `GatedRam::grant` for the unit.
    Granted,
    /// No memory is available now; the thread waits and the caller is asked again.
    Wait,
}

/// The RAM of one QEMU, whose memory this process grants unit by unit.
#[derive(Debug)]
pub struct GatedRam {
    fd: OwnedFd,
    qemu_pid: u32,
    pieces: Vec<Piece>,
    ram_bytes: u64,
    unit_bytes: u64,
    /// One bit per unit.
    granted: Vec<AtomicU64>,
    /// Pages of each unit that the file held at the time of registration.
    early_pages: Vec<u32>,
    committed_bytes: AtomicU64,
    granted_bytes: AtomicU64,
    finished: AtomicBool,
    bell: Bell,
    faults: AtomicU64,
    waiting: AtomicU64,
    waited_us: AtomicU64,
}

/// Cost of admission for the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Number of faults, counted once for each thread and unit that it waited for.
    pub faults: u64,
    /// Number of threads that wait now.
    pub waiting: u64,
    /// Sum of the waiting times of all threads.
    pub waited: Duration,
}

/// Errors of `admission` and `supply`.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum AdmissionError {
    #[error("the mappings of QEMU (pid {pid}) cannot be read")]
    Maps { pid: u32, source: io::Error },
    #[error("{path}: QEMU (pid {pid}) must map the whole file exactly once, but has mapped {mapped} of {bytes} bytes")]
    Mapping { path: PathBuf, pid: u32, mapped: u64, bytes: u64 },
    #[error("QEMU (pid {pid}): {what} its memory failed; this needs memory on a tmpfs, and Linux 4.14 or later")]
    Userfault { pid: u32, what: &'static str, source: io::Error },
    #[error(
        "{path}: has pages of {page_bytes} bytes, but memory can only be supplied in pages of {PAGE_BYTES} bytes; \
         use a memory folder with ordinary pages"
    )]
    HugePages { path: PathBuf, page_bytes: u64 },
    #[error(
        "{path}: has no space for the guest's missing memory; enlarge its file system (for tmpfs: mount -o remount,size=...) or \
         raise the memory limit of its QEMU"
    )]
    NoRoom { path: PathBuf },
    #[error("QEMU (pid {pid}) has ended")]
    Gone { pid: u32 },
    #[error(transparent)]
    Memory(#[from] crate::MemoryError),
    #[error("the page faults of QEMU cannot be waited for")]
    Bell(#[source] io::Error),
}

impl GatedRam {
    /// Registers the RAM of a QEMU that was started with `-S` and whose guest has not run yet.
    pub fn register(userfault: &Userfault, ram: &RamFile, unit_bytes: u64) -> Result<Self, AdmissionError> {
        let pid = userfault.qemu_pid;
        let pieces = mapping::find(pid, ram.identity()).map_err(|source| AdmissionError::Maps { pid, source })?;
        let pieces = whole(pieces, pid, ram)?;
        let failed = |what| move |errno: Errno| failure(pid, what, errno);
        userfault::enable(&userfault.fd).map_err(failed("enabling the userfaultfd for"))?;
        for piece in &pieces {
            userfault::register_missing(&userfault.fd, piece.address, piece.bytes).map_err(failed("registering"))?;
        }
        Self::new(userfault, ram, unit_bytes, pieces, |_| false)
    }

    /// Takes over from a dead keeper. Returns None if nothing is registered any more.
    pub fn resume(userfault: &Userfault, ram: &RamFile, unit_bytes: u64) -> Result<Option<Self>, AdmissionError> {
        let pid = userfault.qemu_pid;
        let found = mapping::find_registered(pid, ram.identity());
        let found = found.map_err(|source| AdmissionError::Maps { pid, source })?;
        let registered: Vec<_> = found.iter().copied().filter(|piece| piece.registered).collect();
        let pieces = whole(found, pid, ram)?;
        if registered.is_empty() {
            return Ok(None);
        }
        let overlaps = |piece: &Piece, unit: &Range<u64>| {
            piece.file_offset < unit.end && unit.start < piece.file_offset + piece.bytes
        };
        let granted = |unit: Range<u64>| !registered.iter().any(|piece| overlaps(piece, &unit));
        let gated = Self::new(userfault, ram, unit_bytes, pieces, granted)?;
        // The dead keeper may have read faults and not answered them: wake the threads so that they report again.
        for piece in &gated.pieces {
            userfault::wake(&gated.fd, piece.address, piece.bytes).map_err(|errno| gated.failure("waking", errno))?;
        }
        Ok(Some(gated))
    }

    fn new(
        userfault: &Userfault,
        ram: &RamFile,
        unit_bytes: u64,
        pieces: Vec<Piece>,
        granted_before: impl Fn(Range<u64>) -> bool,
    ) -> Result<Self, AdmissionError> {
        let page_bytes = std::fs::metadata(ram.path()).map_or(PAGE_BYTES, |file| file.blksize());
        let unit_bytes = fitting_unit(unit_bytes, page_bytes, ram.bytes());
        let units = ram.bytes().div_ceil(unit_bytes) as usize;
        let mut gated = Self {
            fd: userfault.fd.try_clone().map_err(AdmissionError::Bell)?,
            qemu_pid: userfault.qemu_pid,
            pieces,
            ram_bytes: ram.bytes(),
            unit_bytes,
            granted: (0..units.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            early_pages: vec![0; units],
            committed_bytes: AtomicU64::new(0),
            granted_bytes: AtomicU64::new(0),
            finished: AtomicBool::new(false),
            bell: Bell::new().map_err(AdmissionError::Bell)?,
            faults: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            waited_us: AtomicU64::new(0),
        };
        gated.count_early(ram)?;
        for unit in 0..units {
            if granted_before(gated.range(unit)) {
                gated.note_granted(unit);
            }
        }
        Ok(gated)
    }

    /// Counts the memory that QEMU took before the registration: a few pages of firmware.
    fn count_early(&mut self, ram: &RamFile) -> Result<(), AdmissionError> {
        let resident = ram.residency_bytes()?;
        let ranges = if resident == 0 { Vec::new() } else { ram.resident_ranges()? };
        // hugetlbfs reports all pages as resident. Then the resident bytes are counted beside the units.
        if ranges.iter().map(|range| range.end - range.start).sum::<u64>() * PAGE_BYTES == resident {
            let unit_pages = self.unit_bytes / PAGE_BYTES;
            for page in ranges.into_iter().flatten() {
                self.early_pages[(page / unit_pages) as usize] += 1;
            }
        }
        self.committed_bytes = AtomicU64::new(resident);
        Ok(())
    }

    /// The units that overlap a byte range of the file.
    pub fn units_of(&self, file: Range<u64>) -> Range<usize> {
        let end = file.end.min(self.ram_bytes).div_ceil(self.unit_bytes);
        (file.start / self.unit_bytes) as usize..end as usize
    }

    /// Whether QEMU and the keeper may take memory in this unit. One atomic load, because each disk request asks.
    pub fn is_granted(&self, unit: usize) -> bool {
        self.granted[unit / 64].load(Acquire) & 1 << (unit % 64) != 0
    }

    /// Upper limit of what the file can hold now, in bytes: the granted units and the pages that were there before.
    pub fn committed_bytes(&self) -> u64 {
        self.committed_bytes.load(Relaxed)
    }

    /// Size of all granted units in bytes.
    pub fn granted_bytes(&self) -> u64 {
        self.granted_bytes.load(Relaxed)
    }

    /// Bytes that a grant of this unit would add to `committed_bytes`.
    pub fn charge_bytes(&self, unit: usize) -> u64 {
        if self.is_granted(unit) {
            return 0;
        }
        let range = self.range(unit);
        range.end - range.start - u64::from(self.early_pages[unit]) * PAGE_BYTES
    }

    /// Grants a unit: the kernel serves it from now on, and threads that wait in it continue. A second grant is
    /// harmless. Only one thread may call this at a time.
    pub fn grant(&self, unit: usize) -> Result<(), AdmissionError> {
        let act = if self.is_granted(unit) {
            userfault::wake
        } else {
            // Update the counters before any thread can use the memory.
            self.note_granted(unit);
            userfault::unregister
        };
        self.each_piece(self.range(unit), |start, bytes| act(self.fd.as_fd(), start, bytes))
            .map_err(|errno| self.failure("granting", errno))
    }

    fn note_granted(&self, unit: usize) {
        self.committed_bytes.fetch_add(self.charge_bytes(unit), Relaxed);
        let range = self.range(unit);
        self.granted_bytes.fetch_add(range.end - range.start, Relaxed);
        self.granted[unit / 64].fetch_or(1 << (unit % 64), Release);
    }

    /// Serves QEMU's faults until `finish`, `stop` or an error, such as the end of QEMU. `admit` grants a unit or
    /// answers `Wait`. It is called for the waiting threads in order of arrival, and again every 2 ms.
    pub fn serve(&self, mut admit: impl FnMut(usize) -> Result<Verdict, AdmissionError>) -> Result<(), AdmissionError> {
        let mut queue = Queue::default();
        let mut found = Vec::new();
        while !self
            .bell
            .await_faults(self.fd.as_fd(), (!queue.is_empty()).then_some(ASK_EVERY))
            .map_err(AdmissionError::Bell)?
        {
            userfault::read(self.fd.as_fd(), &mut found).map_err(|errno| self.failure("reading faults of", errno))?;
            for waiter in found.drain(..) {
                if let Some(unit) = self.unit_at(waiter.address) {
                    let new = queue.join(unit, waiter.thread);
                    self.faults.fetch_add(u64::from(new), Relaxed);
                }
            }
            queue.ask(&mut admit)?;
            self.waited_us.fetch_add(queue.take_waited().as_micros() as u64, Relaxed);
            self.waiting.store(queue.len() as u64, Relaxed);
        }
        self.waiting.store(0, Relaxed);
        Ok(())
    }

    /// Ends `serve` and changes nothing else: QEMU has ended, or another keeper takes over.
    pub fn stop(&self) {
        self.bell.ring();
    }

    /// Grants all units, wakes all threads and ends `serve`: from now on the kernel alone serves this QEMU's memory.
    pub fn finish(&self) -> Result<(), AdmissionError> {
        let ended =
            self.each_piece(0..self.ram_bytes, |start, bytes| userfault::unregister(self.fd.as_fd(), start, bytes));
        ended.map_err(|errno| self.failure("giving back", errno))?;
        self.finished.store(true, Relaxed);
        for word in &self.granted {
            word.store(u64::MAX, Release);
        }
        self.committed_bytes.store(self.ram_bytes, Relaxed);
        self.granted_bytes.store(self.ram_bytes, Relaxed);
        self.stop();
        Ok(())
    }

    /// Whether `finish` has succeeded.
    pub fn is_finished(&self) -> bool {
        self.finished.load(Relaxed)
    }

    /// Number of faults and waiting threads, and the time they waited.
    pub fn waits(&self) -> Waits {
        Waits {
            faults: self.faults.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
            waited: Duration::from_micros(self.waited_us.load(Relaxed)),
        }
    }

    /// The byte range of a unit in the file.
    fn range(&self, unit: usize) -> Range<u64> {
        let start = unit as u64 * self.unit_bytes;
        start..(start + self.unit_bytes).min(self.ram_bytes)
    }

    fn unit_at(&self, address: u64) -> Option<usize> {
        Some((mapping::file_offset(&self.pieces, address)? / self.unit_bytes) as usize)
    }

    /// Calls `act` with address and length in QEMU of each mapping of this part of the file.
    fn each_piece(&self, file: Range<u64>, mut act: impl FnMut(u64, u64) -> Result<(), Errno>) -> Result<(), Errno> {
        mapping::places(&self.pieces, file).try_for_each(|(address, part)| act(address, part.end - part.start))
    }

    fn failure(&self, what: &'static str, errno: Errno) -> AdmissionError {
        failure(self.qemu_pid, what, errno)
    }
}

/// Whether any part of this QEMU's RAM is registered for missing pages.
pub fn is_registered(qemu_pid: u32, ram: &RamFile) -> io::Result<bool> {
    Ok(mapping::find_registered(qemu_pid, ram.identity())?.iter().any(|piece| piece.registered))
}

/// Tells an ended QEMU from other failures: the kernel returns ENOMEM or ESRCH when the process that owns the memory
/// has ended.
pub(super) fn failure(pid: u32, what: &'static str, errno: Errno) -> AdmissionError {
    let ended = matches!(errno, Errno::NOMEM | Errno::SRCH) && has_ended(pid);
    if ended { AdmissionError::Gone { pid } } else { AdmissionError::Userfault { pid, what, source: errno.into() } }
}

/// Waits up to 100 ms, because a process loses its memory shortly before its pidfd reports the end.
fn has_ended(pid: u32) -> bool {
    let Ok(process) = watch_process(pid) else { return true };
    let mut watched = [PollFd::new(&process, PollFlags::IN)];
    let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    matches!(poll(&mut watched, Some(&moment)), Ok(1..))
}

/// Merges adjacent mappings. Refuses mappings that do not cover the whole file, each byte once.
pub(super) fn whole(found: Vec<Piece>, pid: u32, ram: &RamFile) -> Result<Vec<Piece>, AdmissionError> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut mapped = 0;
    let mut gapless = true;
    for piece in found {
        gapless &= piece.file_offset == mapped;
        mapped += piece.bytes;
        match pieces.last_mut() {
            Some(last) if last.address + last.bytes == piece.address && gapless => last.bytes += piece.bytes,
            _ => pieces.push(piece),
        }
    }
    if gapless && mapped == ram.bytes() {
        return Ok(pieces);
    }
    Err(AdmissionError::Mapping { path: ram.path().to_owned(), pid, mapped, bytes: ram.bytes() })
}

/// Unit size in bytes: at least the requested size and one page of the file, and large enough for `UNITS_MAX`.
fn fitting_unit(wanted_bytes: u64, page_bytes: u64, ram_bytes: u64) -> u64 {
    let mut unit_bytes = wanted_bytes.max(page_bytes).max(PAGE_BYTES).next_power_of_two();
    while ram_bytes.div_ceil(unit_bytes) > UNITS_MAX {
        unit_bytes *= 2;
    }
    unit_bytes
}

#[cfg(test)]
mod tests;
