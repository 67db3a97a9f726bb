//! Admission: a QEMU gets its guest's memory unit by unit, and its threads wait where none is to be had.
//!
//! register (QEMU holds still) -> a thread touches a unit for the first time -> may it be had? -> granted: the unit is
//! unregistered, the kernel serves the rest of it by itself | not now: the thread waits, and is asked for again -> finish
//!
//! One fault a unit of 2 MiB comes here, not one a page: what is granted is a right to memory and not the memory. The
//! price is that a unit counts whole from its first page on. Looking often at what the guest has taken cannot replace
//! this: between two looks a guest takes what it likes.
//!
//! A keeper that dies leaves its guest waiting, not harmed: QEMU's own copy of the userfaultfd keeps the registration. The
//! next keeper fetches that copy and reads from the kernel what is still registered; the rest was granted.
//!
//! Every granted unit may cut a mapping of QEMU in two, and the kernel allows 65530 mappings: so units grow with the RAM.
//! Huge pages: a unit is never smaller than the file's own page, so that one fault never takes more than was granted.
//! Holes that were punched into a granted unit are filled again without a fault: what is granted stays granted.
//!
//! Needs Linux 4.14.

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

/// What is granted at a time unless the caller or the RAM's size want more: one fault costs about 10 us, so a guest that
/// takes memory at 2 GiB/s loses 1 % of its time.
pub const UNIT_BYTES: u64 = 2 << 20;
/// A quarter of the mappings that the kernel allows a process by default.
const UNITS_MAX: u64 = 1 << 14;
/// How often those who wait are asked for again. Only while somebody waits.
const ASK_EVERY: Duration = Duration::from_millis(2);

/// May this unit be had?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// `GatedRam::grant` has been called for it.
    Granted,
    Wait,
}

/// The RAM of a QEMU whose memory is granted by this process.
#[derive(Debug)]
pub struct GatedRam {
    fd: OwnedFd,
    qemu_pid: u32,
    pieces: Vec<Piece>,
    ram_bytes: u64,
    unit_bytes: u64,
    /// One bit a unit.
    granted: Vec<AtomicU64>,
    /// Pages of each unit that the file held before anything could be granted.
    early_pages: Vec<u32>,
    committed_bytes: AtomicU64,
    granted_bytes: AtomicU64,
    finished: AtomicBool,
    bell: Bell,
    faults: AtomicU64,
    waiting: AtomicU64,
    waited_us: AtomicU64,
}

/// What admission has cost the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Times that a thread of QEMU touched a unit for the first time.
    pub faults: u64,
    /// Threads that wait now.
    pub waiting: u64,
    /// All waiting together; two threads that wait one second are two seconds.
    pub waited: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    #[error("the mappings of QEMU (pid {pid}) cannot be read")]
    Maps { pid: u32, source: io::Error },
    #[error("{path}: QEMU (pid {pid}) has not mapped all of it once: {mapped} of {bytes} bytes")]
    Mapping { path: PathBuf, pid: u32, mapped: u64, bytes: u64 },
    #[error("QEMU (pid {pid}): {what} its memory failed; is the kernel older than 4.14?")]
    Userfault { pid: u32, what: &'static str, source: io::Error },
    #[error("{path}: is made of pages of {page_bytes} bytes, which cannot be brought one by one; use ordinary ones")]
    HugePages { path: PathBuf, page_bytes: u64 },
    #[error(
        "{path}: has no room for what the guest misses; enlarge its file system (for tmpfs: mount -o remount,size=...) or \
         raise the memory limit of its QEMU"
    )]
    NoRoom { path: PathBuf },
    #[error("QEMU (pid {pid}) has ended")]
    Gone { pid: u32 },
    #[error(transparent)]
    Memory(#[from] crate::MemoryError),
    #[error("no event counter")]
    Bell(#[source] io::Error),
}

impl GatedRam {
    /// Takes charge of a QEMU that holds still: started with `-S`, and its guest has not run yet.
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

    /// Takes charge after the keeper that did it has died. None if nothing is registered any more.
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
        // The dead keeper may have taken reports that it did not answer: whoever waits is to report again.
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

    /// Memory that QEMU took before its memory was registered: a few pages of firmware.
    fn count_early(&mut self, ram: &RamFile) -> Result<(), AdmissionError> {
        let resident = ram.residency_bytes()?;
        let ranges = if resident == 0 { Vec::new() } else { ram.resident_ranges()? };
        // hugetlbfs says that everything is there. Then what is there counts beside the units that it lies in.
        if ranges.iter().map(|range| range.end - range.start).sum::<u64>() * PAGE_BYTES == resident {
            let unit_pages = self.unit_bytes / PAGE_BYTES;
            for page in ranges.into_iter().flatten() {
                self.early_pages[(page / unit_pages) as usize] += 1;
            }
        }
        self.committed_bytes = AtomicU64::new(resident);
        Ok(())
    }

    pub fn qemu_pid(&self) -> u32 {
        self.qemu_pid
    }

    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// The units that a part of the file lies in.
    pub fn units_of(&self, file: Range<u64>) -> Range<usize> {
        let end = file.end.min(self.ram_bytes).div_ceil(self.unit_bytes);
        (file.start / self.unit_bytes) as usize..end as usize
    }

    /// May QEMU and the keeper take memory in this unit? One load: this is asked for every disk request.
    pub fn is_granted(&self, unit: usize) -> bool {
        self.granted[unit / 64].load(Acquire) & 1 << (unit % 64) != 0
    }

    /// The most that the file can hold as things stand: what is granted, and what was there before.
    pub fn committed_bytes(&self) -> u64 {
        self.committed_bytes.load(Relaxed)
    }

    pub fn granted_bytes(&self) -> u64 {
        self.granted_bytes.load(Relaxed)
    }

    /// What granting this unit would add to `committed_bytes`.
    pub fn charge_bytes(&self, unit: usize) -> u64 {
        if self.is_granted(unit) {
            return 0;
        }
        let range = self.range(unit);
        range.end - range.start - u64::from(self.early_pages[unit]) * PAGE_BYTES
    }

    /// Hands a unit over to the kernel; who waits in it goes on. Granting twice does no harm. One caller at a time.
    pub fn grant(&self, unit: usize) -> Result<(), AdmissionError> {
        let act = if self.is_granted(unit) {
            userfault::wake
        } else {
            // In the books before anybody can act on it.
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

    /// Serves the faults of QEMU until `finish`, `stop` or QEMU's end. `admit` grants or says that there is nothing now;
    /// it is asked in the order in which the threads came, and again every 2 ms.
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

    /// Ends `serve` and leaves everything as it is: QEMU is gone, or another keeper comes.
    pub fn stop(&self) {
        self.bell.ring();
    }

    /// Grants all there is, wakes everybody, and ends `serve`: from now on the kernel alone serves this QEMU's memory.
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

    pub fn is_finished(&self) -> bool {
        self.finished.load(Relaxed)
    }

    pub fn waits(&self) -> Waits {
        Waits {
            faults: self.faults.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
            waited: Duration::from_micros(self.waited_us.load(Relaxed)),
        }
    }

    /// The bytes of the file that a unit is.
    fn range(&self, unit: usize) -> Range<u64> {
        let start = unit as u64 * self.unit_bytes;
        start..(start + self.unit_bytes).min(self.ram_bytes)
    }

    fn unit_at(&self, address: u64) -> Option<usize> {
        Some((mapping::file_offset(&self.pieces, address)? / self.unit_bytes) as usize)
    }

    /// Every place at which QEMU has a part of the file mapped.
    fn each_piece(&self, file: Range<u64>, mut act: impl FnMut(u64, u64) -> Result<(), Errno>) -> Result<(), Errno> {
        mapping::places(&self.pieces, file).try_for_each(|(address, part)| act(address, part.end - part.start))
    }

    fn failure(&self, what: &'static str, errno: Errno) -> AdmissionError {
        failure(self.qemu_pid, what, errno)
    }
}

/// Does this QEMU wait for somebody to grant it memory?
pub fn is_registered(qemu_pid: u32, ram: &RamFile) -> io::Result<bool> {
    Ok(mapping::find_registered(qemu_pid, ram.identity())?.iter().any(|piece| piece.registered))
}

/// The kernel says "no memory" where the memory's owner has ended.
pub(super) fn failure(pid: u32, what: &'static str, errno: Errno) -> AdmissionError {
    let ended = matches!(errno, Errno::NOMEM | Errno::SRCH) && has_ended(pid);
    if ended { AdmissionError::Gone { pid } } else { AdmissionError::Userfault { pid, what, source: errno.into() } }
}

/// Its memory goes a moment before the process is seen to end.
fn has_ended(pid: u32) -> bool {
    let Ok(process) = watch_process(pid) else { return true };
    let mut watched = [PollFd::new(&process, PollFlags::IN)];
    let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    matches!(poll(&mut watched, Some(&moment)), Ok(1..))
}

/// The mappings as few pieces as can be; refused unless they are the whole file, each byte once.
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

/// At least what is wanted and what one page of the file takes, and so large that there are not too many.
fn fitting_unit(wanted_bytes: u64, page_bytes: u64, ram_bytes: u64) -> u64 {
    let mut unit_bytes = wanted_bytes.max(page_bytes).max(PAGE_BYTES).next_power_of_two();
    while ram_bytes.div_ceil(unit_bytes) > UNITS_MAX {
        unit_bytes *= 2;
    }
    unit_bytes
}

#[cfg(test)]
mod tests;
