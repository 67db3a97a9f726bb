//! Access: which pages of its RAM a running QEMU uses, reads included.
//!
//! forget (a thread in QEMU drops QEMU's page tables; the memory stays) -> some time passes -> touched (the pages that
//! are mapped again)
//!
//! When the guest touches such a page again, the kernel maps it again, which costs a microsecond; no fault reaches this
//! process. Accesses through mappings of other processes are not seen.
//!
//! MADV_PAGEOUT would need no thread in QEMU. But on a host with swap it writes the memory out, and it skips pages that
//! a disk's server has mapped.
//!
//! ```text
//! request, 24 bytes, to the thread    u64 sequence, address, bytes
//! answer, 16 bytes                    u64 sequence, i32 errno or 0, i32 0
//! ```
//! All fields are in the host's byte order. The thread is in `helper.c` of the preload library; its channel arrives
//! with the userfaultfd.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::Userfault;
use super::tables::{Look, Tables, WatchError};
use super::writes::WriteWatch;
use crate::{PAGE_BYTES, RamFile};

/// Bytes dropped per request: 2 to 7 ms if all pages are in use.
const FORGET_BYTES: u64 = 64 << 20;
/// How long to wait for an answer. A stopped QEMU does not answer.
const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_BYTES: usize = 16;

/// Errors of watching accesses.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum AccessError {
    #[error(transparent)]
    Watch(#[from] WatchError),
    #[error(
        "QEMU (pid {pid}) has no helper: it was started by an older Hearth, or had no thread to spare; `hearth rejuvenate` \
         starts another"
    )]
    NoHelper { pid: u32 },
    #[error("QEMU's helper (pid {pid}) cannot drop page tables")]
    Refused { pid: u32, source: io::Error },
    #[error("the connection to QEMU's helper (pid {pid}) failed")]
    Channel { pid: u32, source: io::Error },
    #[error("QEMU's helper (pid {pid}) did not answer within {PATIENCE:?}")]
    Silent { pid: u32 },
}

/// Watches the accesses to the RAM of a running QEMU.
#[derive(Debug)]
pub struct AccessWatch {
    tables: Tables,
    helper: OwnedFd,
    /// Sequence number of the next request. It starts at the current time, because an answer to a dead keeper may still
    /// arrive.
    sequence: AtomicU64,
}

impl AccessWatch {
    /// Starts watching. Nothing else may have registered this memory: neither `admission` nor `supply` nor another
    /// watch.
    pub fn start(userfault: &Userfault, ram: &RamFile) -> Result<Self, AccessError> {
        let pid = userfault.qemu_pid;
        let helper = userfault.helper.as_ref().ok_or(AccessError::NoHelper { pid })?;
        let helper = helper.fd.try_clone().map_err(WatchError::Descriptor)?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let sequence = AtomicU64::new(now.as_nanos() as u64);
        let watch = Self { tables: Tables::register(userfault, ram)?, helper, sequence };
        watch.tables.try_look(Look::Present)?;
        let first = watch.tables.pieces().first();
        first.map_or(Ok(()), |first| watch.drop_tables(first.address, PAGE_BYTES))?;
        Ok(watch)
    }

    /// Marks all pages as untouched.
    pub fn forget(&self) -> Result<(), AccessError> {
        for piece in self.tables.pieces() {
            let end = piece.address + piece.bytes;
            for start in (piece.address..end).step_by(FORGET_BYTES as usize) {
                self.drop_tables(start, FORGET_BYTES.min(end - start))?;
            }
        }
        Ok(())
    }

    /// Reports the pages of the file that were touched since `forget`, as ascending runs of page numbers.
    pub fn touched(&self, found: impl FnMut(Range<u64>)) -> Result<(), AccessError> {
        Ok(self.tables.look(Look::Present, found)?)
    }

    /// Ends the watch of accesses and starts a watch of writes.
    pub fn then_writes(self) -> Result<WriteWatch, WatchError> {
        WriteWatch::over(self.tables)
    }

    /// Asks the helper to drop the page tables of a range in QEMU, and waits for its answer.
    fn drop_tables(&self, address: u64, bytes: u64) -> Result<(), AccessError> {
        let pid = self.tables.pid();
        let failed = |errno: Errno| AccessError::Channel { pid, source: errno.into() };
        let sequence = self.sequence.fetch_add(1, Relaxed);
        let mut request = [0; 24];
        for (field, value) in request.chunks_exact_mut(8).zip([sequence, address, bytes]) {
            field.copy_from_slice(&value.to_ne_bytes());
        }
        send(&self.helper, &request, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map_err(failed)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if !self.hears_by(deadline).map_err(failed)? {
                return Err(AccessError::Silent { pid });
            }
            let mut answer = [0; ANSWER_BYTES];
            match recv(&self.helper, &mut answer, RecvFlags::DONTWAIT) {
                Ok((ANSWER_BYTES, _)) => {}
                Ok(_) => return Err(failed(Errno::PIPE)),
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno)),
            }
            let (heard, errno) = answer.split_at(8);
            if heard == sequence.to_ne_bytes() {
                let errno = i32::from_ne_bytes(errno[..4].try_into().expect("4 bytes"));
                let source = io::Error::from_raw_os_error(errno);
                return if errno == 0 { Ok(()) } else { Err(AccessError::Refused { pid, source }) };
            }
        }
    }

    /// Waits for readable data. Returns false if the deadline passes first.
    fn hears_by(&self, deadline: Instant) -> Result<bool, Errno> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).expect("patience is seconds");
        let helper = self.helper.as_fd();
        match poll(&mut [PollFd::new(&helper, PollFlags::IN)], Some(&timeout)) {
            Err(Errno::INTR) => Ok(true),
            ready => Ok(ready? > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::thread::JoinHandle;

    use rustix::mm::{Advice, madvise};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::super::Helper;
    use super::super::stand::{PAGES, Stand};
    use super::*;
    use crate::FileOffset;

    /// A stand-in QEMU with a helper.
    struct Helped {
        stand: Stand,
        /// The helper's end of the channel.
        channel: OwnedFd,
    }

    impl Helped {
        fn new() -> Self {
            let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let (ours, channel) = pair.unwrap();
            let mut stand = Stand::new();
            stand.userfault.helper = Some(Helper { fd: ours, fd_in_qemu: -1 });
            Self { stand, channel }
        }

        fn watch(&self) -> Result<AccessWatch, AccessError> {
            AccessWatch::start(&self.stand.userfault, &self.stand.ram)
        }

        /// Answers requests as the preload library does, until the channel is shut down.
        fn help(&self) -> JoinHandle<()> {
            let channel = self.channel.try_clone().unwrap();
            std::thread::spawn(move || {
                let mut request = [0; 24];
                while let Ok((24, _)) = recv(&channel, &mut request, RecvFlags::empty()) {
                    let word = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
                    let address = word(8) as *mut std::ffi::c_void;
                    // SAFETY: the range is in the mapping above; its pages belong to the file and return at the next
                    // touch.
                    let done = unsafe { madvise(address, word(16) as usize, Advice::LinuxDontNeed) };
                    let errno = done.err().map_or(0, |errno| errno.raw_os_error());
                    answer(&channel, word(0), errno);
                }
            })
        }
    }

    impl Drop for Helped {
        fn drop(&mut self) {
            let _ = rustix::net::shutdown(&self.channel, rustix::net::Shutdown::Both);
        }
    }

    fn answer(channel: &OwnedFd, sequence: u64, errno: i32) {
        let mut bytes = sequence.to_ne_bytes().to_vec();
        bytes.extend(errno.to_ne_bytes());
        bytes.extend([0; 4]);
        assert_eq!(send(channel, &bytes, SendFlags::NOSIGNAL).unwrap(), 16);
    }

    fn touched(watch: &AccessWatch) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        watch.touched(|run| pages.extend(run)).unwrap();
        pages
    }

    #[test]
    fn accesses_are_reported_exactly_and_memory_stays() {
        let helped = Helped::new();
        helped.help();
        let stand = &helped.stand;
        stand.write(0..300);
        let watch = match helped.watch() {
            // An older kernel can only report that it lacks the feature.
            Err(AccessError::Watch(error @ WatchError::Kernel { .. })) => {
                return assert!(error.to_string().contains("6.7"));
            }
            watch => watch.unwrap(),
        };
        watch.forget().unwrap();
        assert_eq!(touched(&watch), BTreeSet::new());
        assert_eq!((stand.read(5), stand.read(299)), (5, 43));
        stand.write([17, 400]);
        // A write through the file is not an access by QEMU.
        stand.ram.write(FileOffset(2 * PAGE_BYTES), &[9; 4096]).unwrap();
        assert_eq!(touched(&watch), [5, 17, 299, 400].into());
        assert_eq!(touched(&watch), [5, 17, 299, 400].into(), "looking changes nothing");
        watch.forget().unwrap();
        assert_eq!(stand.read(2), 9);
        assert_eq!(touched(&watch), [2].into());
        assert!((3..300).all(|page| stand.read(page) == page as u8 | 1));
    }

    #[test]
    fn watch_of_accesses_becomes_watch_of_writes() {
        let helped = Helped::new();
        helped.help();
        let stand = &helped.stand;
        stand.write(0..PAGES);
        let Ok(watch) = helped.watch() else { return };
        watch.forget().unwrap();
        assert_eq!(stand.read(3), 3);
        let writes = watch.then_writes().unwrap();
        stand.write(100..200);
        let mut written = BTreeSet::new();
        writes.take(|run| written.extend(run)).unwrap();
        assert!(written.is_superset(&(100..200).collect()) && !written.contains(&3), "{written:?}");
    }

    #[test]
    fn missing_refusing_and_misaddressed_helpers_are_told_apart() {
        let mut helped = Helped::new();
        let refusal = |helped: &Helped| helped.watch().unwrap_err();
        // First an answer to a dead keeper's request, then the answer to this one.
        let channel = helped.channel.try_clone().unwrap();
        let helper = std::thread::spawn(move || {
            let mut request = [0; 24];
            recv(&channel, &mut request, RecvFlags::empty()).unwrap();
            answer(&channel, 1, 0);
            answer(&channel, u64::from_ne_bytes(request[..8].try_into().unwrap()), Errno::INVAL.raw_os_error());
        });
        let refused = refusal(&helped);
        helper.join().unwrap();
        if matches!(refused, AccessError::Watch(_)) {
            return;
        }
        assert!(matches!(refused, AccessError::Refused { .. }), "{refused}");
        rustix::net::shutdown(&helped.channel, rustix::net::Shutdown::Both).unwrap();
        assert!(matches!(refusal(&helped), AccessError::Channel { .. }));
        helped.stand.userfault.helper = None;
        assert!(matches!(refusal(&helped), AccessError::NoHelper { .. }));
    }
}
