//! Supply: a QEMU's RAM file is empty at first, and its pages are brought as the guest touches them, or before.
//!
//! register (QEMU has no guest yet) -> a thread touches a page that is missing -> it is brought | it cannot be brought
//! now: the thread waits, and it is tried again -> nothing is missing -> finish: the kernel serves the memory by itself
//!
//! A page is put whole and only where none is (UFFDIO_COPY): whoever comes second changes nothing. So the guest, its disks
//! and whoever fills ahead may all bring the same page.
//!
//! As with `admission`, a keeper that dies leaves a guest that waits: the next one fetches QEMU's copy of the descriptor,
//! and which pages are there the file itself says.
//!
//! Needs Linux 4.14, and a RAM file of ordinary pages: a huge page would have to be brought whole.

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

/// Between two attempts to bring a page that could not be brought.
const TRY_AGAIN: Duration = Duration::from_millis(250);

/// The RAM of a QEMU whose missing pages are brought by this process.
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
    /// Takes charge of a QEMU that waits for its guest: nothing of its memory has been touched.
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

    /// Takes charge after the keeper that did it has died. None if nothing is registered any more. Whoever waits reports
    /// again.
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

    /// Puts pages, from this one on, where they are missing. How many were missing.
    pub fn supply(&self, first_page: u64, bytes: &[u8], wake: Wake) -> Result<u64, AdmissionError> {
        let start = first_page * PAGE_BYTES;
        let put = |(address, part): (u64, Range<u64>)| {
            self.put(address, &bytes[(part.start - start) as usize..(part.end - start) as usize], wake)
        };
        mapping::places(&self.pieces, start..start + bytes.len() as u64).map(put).sum()
    }

    /// Who waits for this page looks again whether it is there.
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
                    // Somebody was faster; who waits for it may not have been woken.
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

    /// A file system that is full says "no memory", as a QEMU that has ended does.
    fn not_put(&self, errno: Errno) -> AdmissionError {
        match (self.failure("filling", errno), errno) {
            (AdmissionError::Userfault { .. }, Errno::NOMEM | Errno::NOSPC) => {
                AdmissionError::NoRoom { path: self.path.clone() }
            }
            (failure, _) => failure,
        }
    }

    /// Serves QEMU's faults until `finish`, `stop` or QEMU's end. `bring` puts the page that was touched, and hears when that was
    /// heard of; or says that it cannot now, and is asked again. `follows`: this thread stays on the processor of whoever waited, until
    /// it is over; not if `bring` starts threads.
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

    /// Ends `serve` and leaves everything as it is: QEMU is gone, or another keeper comes.
    pub fn stop(&self) {
        self.bell.ring();
    }

    /// Nothing is missing any more, but pages of zeroes: from now on the kernel alone serves this memory. Ends `serve`.
    pub fn finish(&self) -> Result<(), AdmissionError> {
        for piece in &self.pieces {
            userfault::unregister(&self.fd, piece.address, piece.bytes)
                .map_err(|errno| self.failure("giving back", errno))?;
        }
        self.stop();
        Ok(())
    }

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

    /// A machine whose QEMU is this very process.
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
            // SAFETY: a new mapping at an address of the kernel's choice touches no other memory. It stays for good.
            let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }.unwrap();
            // SAFETY: a descriptor that acts on the mapping above only, as nothing else is registered with it.
            let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }.unwrap();
            let userfault = Userfault { fd, fd_in_qemu: 0, qemu_pid: std::process::id(), helper: None };
            Self { _folder: folder, ram, userfault, start: start as usize }
        }

        /// As a processor of the guest's does.
        fn touch(&self, page: u64) -> u8 {
            let address = (self.start + (page * PAGE_BYTES) as usize) as *const u8;
            // SAFETY: within the mapping, which stays; any byte is a valid one.
            unsafe { address.read_volatile() }
        }
    }

    fn pages(fill: impl IntoIterator<Item = u8>) -> Vec<u8> {
        fill.into_iter().flat_map(|byte| [byte; PAGE_BYTES as usize]).collect()
    }

    #[test]
    fn what_is_touched_is_brought_and_nothing_is_put_twice() {
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
    fn another_keeper_goes_on_with_what_is_missing() {
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
    fn who_waits_for_a_page_that_was_put_quietly_goes_on_when_it_is_woken() {
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
