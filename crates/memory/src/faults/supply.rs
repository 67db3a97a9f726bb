//! Supply: QEMU's RAM file is empty at first; its pages are brought when the guest touches them, or before.
//!
//! register (the guest has not run) -> a thread touches a missing page -> the page is brought | it cannot be brought
//! now: the thread waits, and the caller is asked again -> no page is missing -> finish: the kernel alone serves the
//! memory
//!
//! A page is installed whole and only where none is (UFFDIO_COPY): a second copy changes nothing. So the guest, its
//! disks and the background fill may all bring the same page.
//!
//! As with `admission`, the guest waits if the keeper dies: the next keeper fetches QEMU's copy of the descriptor, and
//! the file itself shows which pages are there.
//!
//! Needs Linux 4.14 and a RAM file on a tmpfs (see `admission`) of ordinary pages: a huge page could only be brought whole.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Userfault;
use super::admission::{AdmissionError, failure, whole};
use super::bell::Bell;
use super::mapping::{self, Piece};
use super::processor::Follower;
pub use super::userfault::Wake;
use super::userfault::{self, Waiter};
use crate::{PAGE_BYTES, RamFile};

/// Interval between attempts to bring a page.
const TRY_AGAIN: Duration = Duration::from_millis(250);

/// The RAM of one QEMU, whose missing pages this process brings.
#[derive(Debug)]
pub struct SuppliedRam {
    fd: OwnedFd,
    qemu_pid: u32,
    path: PathBuf,
    pieces: Vec<Piece>,
    ram_bytes: u64,
    bell: Bell,
}

impl SuppliedRam {
    /// Registers the RAM of a QEMU whose guest has not run and has touched no memory yet.
    pub fn register(userfault: &Userfault, ram: &RamFile) -> Result<Self, AdmissionError> {
        let pid = userfault.qemu_pid;
        let page_bytes = std::fs::metadata(ram.path()).map_or(PAGE_BYTES, |file| file.blksize());
        if page_bytes != PAGE_BYTES {
            return Err(AdmissionError::HugePages { path: ram.path().to_owned(), page_bytes });
        }
        let found = mapping::find(pid, ram.identity()).map_err(|source| AdmissionError::Maps { pid, source })?;
        let supplied = Self::new(userfault, ram, whole(found, pid, ram)?)?;
        userfault::enable(&supplied.fd).map_err(|errno| supplied.failure("enabling the userfaultfd for", errno))?;
        for piece in &supplied.pieces {
            userfault::register_missing(&supplied.fd, piece.address, piece.bytes)
                .map_err(|errno| supplied.failure("registering", errno))?;
        }
        Ok(supplied)
    }

    /// Takes over from a dead keeper and makes waiting threads report again. Returns None if nothing is registered any
    /// more.
    pub fn resume(userfault: &Userfault, ram: &RamFile) -> Result<Option<Self>, AdmissionError> {
        let pid = userfault.qemu_pid;
        let found = mapping::find_registered(pid, ram.identity());
        let found = found.map_err(|source| AdmissionError::Maps { pid, source })?;
        if !found.iter().any(|piece| piece.registered) {
            return Ok(None);
        }
        let supplied = Self::new(userfault, ram, whole(found, pid, ram)?)?;
        for piece in &supplied.pieces {
            userfault::wake(&supplied.fd, piece.address, piece.bytes)
                .map_err(|errno| supplied.failure("waking", errno))?;
        }
        Ok(Some(supplied))
    }

    fn new(userfault: &Userfault, ram: &RamFile, pieces: Vec<Piece>) -> Result<Self, AdmissionError> {
        Ok(Self {
            fd: userfault.fd.try_clone().map_err(AdmissionError::Bell)?,
            qemu_pid: userfault.qemu_pid,
            path: ram.path().to_owned(),
            pieces,
            ram_bytes: ram.bytes(),
            bell: Bell::new().map_err(AdmissionError::Bell)?,
        })
    }

    /// Installs whole pages from `first_page` on, where they are missing. Returns the number of pages that were
    /// missing.
    pub fn supply(&self, first_page: u64, bytes: &[u8], wake: Wake) -> Result<u64, AdmissionError> {
        let start = first_page * PAGE_BYTES;
        let put = |(address, part): (u64, Range<u64>)| {
            self.put(address, &bytes[(part.start - start) as usize..(part.end - start) as usize], wake)
        };
        mapping::places(&self.pieces, start..start + bytes.len() as u64).map(put).sum()
    }

    /// Wakes the threads that wait for this page; they continue if the page is there.
    pub fn wake(&self, page: u64) -> Result<(), AdmissionError> {
        let start = page * PAGE_BYTES;
        mapping::places(&self.pieces, start..start + PAGE_BYTES).try_for_each(|(address, _)| self.wake_at(address))
    }

    fn put(&self, address: u64, bytes: &[u8], wake: Wake) -> Result<u64, AdmissionError> {
        let (mut done, mut put) = (0, 0);
        while done < bytes.len() {
            let (copied, ended) = userfault::copy(&self.fd, address + done as u64, &bytes[done..], wake);
            done += copied as usize;
            put += copied / PAGE_BYTES;
            match ended {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::EXIST) if copied == 0 => {
                    // Another thread was faster, and the waiting thread may not have been woken.
                    if wake == Wake::AtOnce {
                        self.wake_at(address + done as u64)?;
                    }
                    done += PAGE_BYTES as usize;
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(self.not_put(errno)),
            }
        }
        Ok(put)
    }

    fn wake_at(&self, address: u64) -> Result<(), AdmissionError> {
        userfault::wake(&self.fd, address, PAGE_BYTES).map_err(|errno| self.failure("waking", errno))
    }

    /// Tells a full file system from an ended QEMU: for both, the kernel may return ENOMEM.
    fn not_put(&self, errno: Errno) -> AdmissionError {
        match (self.failure("filling", errno), errno) {
            (AdmissionError::Userfault { .. }, Errno::NOMEM | Errno::NOSPC) => {
                AdmissionError::NoRoom { path: self.path.clone() }
            }
            (failure, _) => failure,
        }
    }

    /// Serves QEMU's faults until `finish`, `stop` or an error, such as the end of QEMU. `bring` gets a page and the
    /// time of its fault. It installs the page and returns true, or returns false and is called again later. With
    /// `follows`, the calling thread stays on the processor of the thread that waited last; not suitable if `bring`
    /// starts threads.
    pub fn serve(
        &self,
        follows: bool,
        mut bring: impl FnMut(u64, Instant) -> Result<bool, AdmissionError>,
    ) -> Result<(), AdmissionError> {
        let (mut found, mut waiting): (Vec<Waiter>, Vec<(u64, Instant)>) = (Vec::new(), Vec::new());
        let mut follower = follows.then(|| Follower::new(self.qemu_pid));
        while !self
            .bell
            .await_faults(self.fd.as_fd(), (!waiting.is_empty()).then_some(TRY_AGAIN))
            .map_err(AdmissionError::Bell)?
        {
            userfault::read(self.fd.as_fd(), &mut found).map_err(|errno| self.failure("reading faults of", errno))?;
            let heard = Instant::now();
            let last = found.last().map(|waiter| waiter.thread);
            let touched = found.drain(..).filter_map(|waiter| Some((self.page_at(waiter.address)?, heard)));
            let pages: Vec<_> = touched.chain(waiting.drain(..)).collect();
            for (page, heard) in pages {
                if bring(page, heard)? {
                    continue;
                }
                match waiting.iter_mut().find(|(other, _)| *other == page) {
                    Some((_, first)) => *first = heard.min(*first),
                    None => waiting.push((page, heard)),
                }
            }
            if let Some((follower, last)) = follower.as_mut().zip(last) {
                follower.follow(last);
            }
        }
        Ok(())
    }

    /// Ends `serve` and changes nothing else: QEMU has ended, or another keeper takes over.
    pub fn stop(&self) {
        self.bell.ring();
    }

    /// Ends `serve` when only pages of zeroes are missing: from now on the kernel alone serves this memory.
    pub fn finish(&self) -> Result<(), AdmissionError> {
        for piece in &self.pieces {
            userfault::unregister(&self.fd, piece.address, piece.bytes)
                .map_err(|errno| self.failure("giving back", errno))?;
        }
        self.stop();
        Ok(())
    }

    /// Size of the RAM in pages.
    pub fn pages(&self) -> u64 {
        self.ram_bytes / PAGE_BYTES
    }

    fn page_at(&self, address: u64) -> Option<u64> {
        Some(mapping::file_offset(&self.pieces, address)? / PAGE_BYTES)
    }

    fn failure(&self, what: &'static str, errno: Errno) -> AdmissionError {
        failure(self.qemu_pid, what, errno)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap, userfaultfd};

    use super::*;
    use crate::FileOffset;

    const PAGES: u64 = 64;

    /// A RAM file, mapped by this very process in QEMU's place.
    struct Stand {
        _folder: tempfile::TempDir,
        ram: RamFile,
        userfault: Userfault,
        start: usize,
    }

    impl Stand {
        fn new() -> Self {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            let ram = RamFile::create(&folder.path().join("ram-1"), PAGES * PAGE_BYTES).unwrap();
            let file = File::options().read(true).write(true).open(ram.path()).unwrap();
            let (protection, bytes) = (ProtFlags::READ | ProtFlags::WRITE, (PAGES * PAGE_BYTES) as usize);
            // SAFETY: a new mapping at an address of the kernel's choice touches no other memory. It is never unmapped.
            let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }.unwrap();
            // SAFETY: the descriptor acts on the mapping above only, because nothing else is registered with it.
            let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }.unwrap();
            let userfault = Userfault { fd, fd_in_qemu: 0, qemu_pid: std::process::id(), helper: None };
            Self { _folder: folder, ram, userfault, start: start as usize }
        }

        /// Reads a page as a guest's processor does.
        fn touch(&self, page: u64) -> u8 {
            let address = (self.start + (page * PAGE_BYTES) as usize) as *const u8;
            // SAFETY: the address is within the mapping, which stays; any byte is valid.
            unsafe { address.read_volatile() }
        }
    }

    fn pages(fill: impl IntoIterator<Item = u8>) -> Vec<u8> {
        fill.into_iter().flat_map(|byte| [byte; PAGE_BYTES as usize]).collect()
    }

    #[test]
    fn touched_pages_are_brought_and_never_overwritten() {
        let stand = Stand::new();
        let supplied = SuppliedRam::register(&stand.userfault, &stand.ram).unwrap();
        let (asked, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                supplied.serve(true, |page, _| {
                    asked.fetch_add(1, Relaxed);
                    if page == 9 && refused.fetch_add(1, Relaxed) == 0 {
                        return Ok(false);
                    }
                    supplied.supply(page, &pages([page as u8]), Wake::AtOnce).map(|_| true)
                })
            });
            assert_eq!((stand.touch(7), stand.touch(63)), (7, 63));
            assert_eq!(stand.touch(9), 9, "what could not be brought is tried again");
            assert_eq!(refused.load(Relaxed), 2);
            assert_eq!(supplied.supply(6, &pages([60, 70, 80]), Wake::AtOnce).unwrap(), 2, "one was there");
            assert_eq!((stand.touch(6), stand.touch(7), stand.touch(8)), (60, 7, 80));
            assert_eq!(asked.load(Relaxed), 4);
            assert_eq!(stand.ram.resident_ranges().unwrap(), [6..10, 63..64]);
            supplied.finish().unwrap();
            server.join().unwrap().unwrap();
        });
        assert_eq!(stand.touch(20), 0, "the kernel serves what is left");
        assert!(SuppliedRam::resume(&stand.userfault, &stand.ram).unwrap().is_none());
    }

    #[test]
    fn next_keeper_brings_the_missing_pages() {
        let stand = Stand::new();
        stand.ram.write(FileOffset(PAGE_BYTES), &pages([1])).unwrap();
        SuppliedRam::register(&stand.userfault, &stand.ram).unwrap();
        let again = SuppliedRam::resume(&stand.userfault, &stand.ram).unwrap().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                again.serve(true, |page, _| again.supply(page, &pages([5]), Wake::AtOnce).map(|_| true)).unwrap()
            });
            assert_eq!((stand.touch(1), stand.touch(2)), (1, 5));
            again.stop();
        });
        again.finish().unwrap();
    }

    #[test]
    fn page_put_without_wake_wakes_its_thread_later() {
        let stand = Stand::new();
        let supplied = SuppliedRam::register(&stand.userfault, &stand.ram).unwrap();
        let woken = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let served = supplied.serve(true, |page, _| {
                    assert_eq!(supplied.supply(page, &pages([3]), Wake::Later)?, 1);
                    assert_eq!(
                        supplied.supply(page, &pages([4]), Wake::Later)?,
                        0,
                        "it is there, and that wakes nobody"
                    );
                    std::thread::sleep(Duration::from_millis(50));
                    woken.store(1, Relaxed);
                    supplied.wake(page).map(|()| true)
                });
                served.unwrap();
            });
            assert_eq!((stand.touch(40), woken.load(Relaxed)), (3, 1));
            supplied.stop();
        });
        supplied.finish().unwrap();
    }
}
