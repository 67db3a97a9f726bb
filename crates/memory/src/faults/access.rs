//! Access: which pages of its RAM a running QEMU uses, reads included.
//!
//! forget (a thread of QEMU's own drops its page tables; the memory stays) -> a while -> touched (what is mapped again)
//!
//! A page that is touched again is mapped again by the kernel, which costs the guest a microsecond; no fault comes to this
//! process. What others touch through mappings of their own is not seen.
//!
//! Not with MADV_PAGEOUT, which needs no thread in QEMU: on a host with swap that writes the memory out, and it passes by
//! pages that a disk's server has mapped.
//!
//! ```text
//! request, 24 bytes, to the thread    u64 sequence, address, bytes
//! answer, 16 bytes                    u64 sequence, i32 errno or 0, i32 0
//! ```
//! In the host's byte order. The thread is `helper.c` of the preload library; the channel comes with the userfaultfd.

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

/// Dropped at once: 2 to 7 ms for pages that are all in use.
const FORGET_BYTES: u64 = 64 << 20;
/// A QEMU that is stopped does not answer.
const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_BYTES: usize = 16;

#[derive(Debug, thiserror::Error)]
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
    #[error("QEMU's helper (pid {pid}) cannot be talked to")]
    Channel { pid: u32, source: io::Error },
    #[error("QEMU's helper (pid {pid}) did not answer within {PATIENCE:?}")]
    Silent { pid: u32 },
}

/// The RAM of a running QEMU, of which one can see what is used.
#[derive(Debug)]
pub struct AccessWatch {
    tables: Tables,
    helper: OwnedFd,
    /// Of the next request. An answer to a keeper that died may still come.
    sequence: AtomicU64,
}

impl AccessWatch {
    /// Nobody else has registered this memory.
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

    /// Nothing counts as touched any more.
    pub fn forget(&self) -> Result<(), AccessError> {
        for piece in self.tables.pieces() {
            let end = piece.address + piece.bytes;
            for start in (piece.address..end).step_by(FORGET_BYTES as usize) {
                self.drop_tables(start, FORGET_BYTES.min(end - start))?;
            }
        }
        Ok(())
    }

    /// Pages of the file that were touched since `forget`, as ascending runs.
    pub fn touched(&self, found: impl FnMut(Range<u64>)) -> Result<(), AccessError> {
        Ok(self.tables.look(Look::Present, found)?)
    }

    /// From now on it is writes that are seen.
    pub fn then_writes(self) -> Result<WriteWatch, WatchError> {
        WriteWatch::over(self.tables)
    }

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

    /// Its QEMU has a helper.
    struct Helped {
        stand: Stand,
        /// The helper's end.
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

        /// As the preload library's, until its channel is shut.
        fn help(&self) -> JoinHandle<()> {
            let channel = self.channel.try_clone().unwrap();
            std::thread::spawn(move || {
                let mut request = [0; 24];
                while let Ok((24, _)) = recv(&channel, &mut request, RecvFlags::empty()) {
                    let word = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
                    let address = word(8) as *mut std::ffi::c_void;
                    // SAFETY: a range of the mapping above: its pages are the file's, and come back when they are touched.
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
    fn what_is_read_or_written_is_told_and_nothing_around_it_and_memory_stays_as_it_is() {
        let helped = Helped::new();
        helped.help();
        let stand = &helped.stand;
        stand.write(0..300);
        let watch = match helped.watch() {
            // Nothing can be promised on an older kernel but that it is said.
            Err(AccessError::Watch(error @ WatchError::Kernel { .. })) => {
                return assert!(error.to_string().contains("6.7"));
            }
            watch => watch.unwrap(),
        };
        watch.forget().unwrap();
        assert_eq!(touched(&watch), BTreeSet::new());
        assert_eq!((stand.read(5), stand.read(299)), (5, 43));
        stand.write([17, 400]);
        // What others do with the file is not QEMU's doing.
        stand.ram.write(FileOffset(2 * PAGE_BYTES), &[9; 4096]).unwrap();
        assert_eq!(touched(&watch), [5, 17, 299, 400].into());
        assert_eq!(touched(&watch), [5, 17, 299, 400].into(), "looking changes nothing");
        watch.forget().unwrap();
        assert_eq!(stand.read(2), 9);
        assert_eq!(touched(&watch), [2].into());
        assert!((3..300).all(|page| stand.read(page) == page as u8 | 1));
    }

    #[test]
    fn writes_can_be_watched_from_where_it_ends() {
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
    fn a_helper_that_is_not_there_refuses_or_answers_somebody_else_is_told() {
        let mut helped = Helped::new();
        let refusal = |helped: &Helped| helped.watch().unwrap_err();
        // An answer that a dead keeper was waiting for, and then one's own.
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
