//! Writes: which pages of its RAM a running QEMU has written to, without a word from it.
//!
//! watch (its memory is write-protected) -> a first write: the kernel lifts the protection of that page by itself -> take
//! (what is not protected any more was written, and is protected again) -> ... -> drop
//!
//! No fault comes to this process and none waits for it: if it dies, a first write goes on costing a microsecond. What
//! others write through mappings of their own is not seen.
//!
//! Needs Linux 6.7 (asynchronous write protection, PAGEMAP_SCAN), and a RAM file of ordinary pages.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::io::Errno;

use super::Userfault;
use super::admission::{AdmissionError, whole};
use super::mapping::{self, Piece};
use super::userfault;
use crate::{PAGE_BYTES, RamFile};

/// `_IOWR('f', 16, struct pm_scan_arg)`
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const SCAN_PROTECT_MATCHING: u64 = 1 << 0;
/// Fails where a write to a protected page would wait for this process.
const SCAN_CHECK_ASYNC: u64 = 1 << 1;
/// Runs of pages that are told at once: 24 KiB.
const RUNS: usize = 1024;

/// struct pm_scan_arg.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Where it stopped: told by the kernel.
    walk_end: u64,
    runs: u64,
    runs_len: u64,
    pages_max: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_mask: u64,
    return_mask: u64,
}
const _: () = assert!(size_of::<Scan>() == 96);

/// struct page_region.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Run {
    start: u64,
    end: u64,
    categories: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error(transparent)]
    Mapping(#[from] AdmissionError),
    #[error("{path}: is made of pages of {page_bytes} bytes, whose writes cannot be told apart")]
    HugePages { path: std::path::PathBuf, page_bytes: u64 },
    #[error("the kernel does not tell what QEMU (pid {pid}) writes; Linux 6.7 and later do")]
    Kernel { pid: u32, source: io::Error },
    #[error("what QEMU (pid {pid}) has written cannot be read")]
    Scan { pid: u32, source: io::Error },
    #[error("no descriptor")]
    Descriptor(#[source] io::Error),
}

/// The RAM of a running QEMU, write-protected.
#[derive(Debug)]
pub struct WriteWatch {
    fd: OwnedFd,
    pagemap: File,
    pid: u32,
    pieces: Vec<Piece>,
}

impl WriteWatch {
    /// From now on writes are seen. Nobody else has registered this memory.
    pub fn start(userfault: &Userfault, ram: &RamFile) -> Result<Self, WatchError> {
        let pid = userfault.qemu_pid;
        let page_bytes = std::fs::metadata(ram.path()).map_or(PAGE_BYTES, |file| file.blksize());
        if page_bytes != PAGE_BYTES {
            return Err(WatchError::HugePages { path: ram.path().to_owned(), page_bytes });
        }
        let unsupported = |errno: Errno| WatchError::Kernel { pid, source: errno.into() };
        let found = mapping::find(pid, ram.identity()).map_err(|source| AdmissionError::Maps { pid, source })?;
        let watch = Self {
            fd: userfault.fd.try_clone().map_err(WatchError::Descriptor)?,
            pagemap: File::open(format!("/proc/{pid}/pagemap")).map_err(|source| WatchError::Scan { pid, source })?,
            pid,
            pieces: whole(found, pid, ram)?,
        };
        match userfault::enable(&watch.fd) {
            // It is enabled already, or cannot be; the next call tells.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(unsupported(errno)),
        }
        for piece in &watch.pieces {
            userfault::register_writes(&watch.fd, piece.address, piece.bytes).map_err(unsupported)?;
        }
        watch.take(|_| {}).map_err(|error| match error {
            WatchError::Scan { pid, source } => WatchError::Kernel { pid, source },
            error => error,
        })?;
        Ok(watch)
    }

    /// Pages of the file that may have been written to since the last time, as ascending runs.
    pub fn take(&self, mut found: impl FnMut(Range<u64>)) -> Result<(), WatchError> {
        let mut runs = [Run::default(); RUNS];
        for piece in &self.pieces {
            let (mut start, end) = (piece.address, piece.address + piece.bytes);
            while start < end {
                let (told, walked_to) = self.scan(start..end, &mut runs)?;
                for run in &runs[..told] {
                    let page = |address: u64| (address - piece.address + piece.file_offset) / PAGE_BYTES;
                    found(page(run.start)..page(run.end));
                }
                start = walked_to;
            }
        }
        Ok(())
    }

    fn scan(&self, range: Range<u64>, runs: &mut [Run]) -> Result<(usize, u64), WatchError> {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            flags: SCAN_PROTECT_MATCHING | SCAN_CHECK_ASYNC,
            start: range.start,
            end: range.end,
            runs: runs.as_mut_ptr() as u64,
            runs_len: runs.len() as u64,
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..Scan::default()
        };
        loop {
            // SAFETY: the ioctl reads and writes one `struct pm_scan_arg`, which `Scan` is, and writes at most `runs_len`
            // of `struct page_region`, which `Run` is, to `runs`, borrowed for that. It changes the page tables of another
            // process, and no memory of this one.
            let told = unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
            match usize::try_from(told) {
                Ok(told) if scan.walk_end > range.start => return Ok((told, scan.walk_end)),
                Ok(_) => {
                    let source = io::Error::other("the kernel makes no headway");
                    return Err(WatchError::Scan { pid: self.pid, source });
                }
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    source => return Err(WatchError::Scan { pid: self.pid, source }),
                },
            }
        }
    }
}

impl Drop for WriteWatch {
    fn drop(&mut self) {
        for piece in &self.pieces {
            // A QEMU that is gone has taken its page tables along.
            let _ = userfault::unregister(&self.fd, piece.address, piece.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap, munmap, userfaultfd};

    use super::*;
    use crate::FileOffset;

    const PAGES: u64 = 600;

    /// A machine whose QEMU is this very process.
    struct Stand {
        _folder: tempfile::TempDir,
        ram: RamFile,
        userfault: Userfault,
        start: *mut u8,
    }

    impl Stand {
        fn new() -> Self {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            let path = folder.path().join("ram-1");
            let ram = RamFile::create(&path, PAGES * PAGE_BYTES).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let (bytes, access) = ((PAGES * PAGE_BYTES) as usize, ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: a new mapping at an address of the kernel's choice.
            let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }.unwrap();
            // SAFETY: nothing of this process's memory is registered with it but the mapping above.
            let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }.unwrap();
            let userfault = Userfault { fd, fd_in_qemu: -1, qemu_pid: std::process::id() };
            Self { _folder: folder, ram, userfault, start: start.cast() }
        }

        fn write(&self, pages: impl IntoIterator<Item = u64>) {
            for page in pages {
                // SAFETY: inside the mapping, which nobody else uses.
                unsafe { self.start.add((page * PAGE_BYTES + 9) as usize).write_volatile(7) };
            }
        }

        fn read(&self, page: u64) -> u8 {
            // SAFETY: as above.
            unsafe { self.start.add((page * PAGE_BYTES + 9) as usize).read_volatile() }
        }
    }

    impl Drop for Stand {
        fn drop(&mut self) {
            // SAFETY: the mapping was made here, and nobody uses it any more.
            unsafe { munmap(self.start.cast(), (PAGES * PAGE_BYTES) as usize) }.unwrap();
        }
    }

    fn taken(watch: &WriteWatch) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        watch.take(|run| pages.extend(run)).unwrap();
        pages
    }

    #[test]
    fn what_was_written_is_told_once_and_reading_is_not_writing() {
        let stand = Stand::new();
        stand.write(0..300);
        let watch = match WriteWatch::start(&stand.userfault, &stand.ram) {
            // Nothing can be promised on an older kernel but that it is said.
            Err(error @ WatchError::Kernel { .. }) => return assert!(error.to_string().contains("6.7"), "{error}"),
            watch => watch.unwrap(),
        };
        stand.write([3, 4, 5, 299]);
        stand.write([400]);
        // Around a page that was never touched before, others may be told along with it.
        let mut first = taken(&watch);
        assert!(first.contains(&400), "{first:?}");
        first.retain(|page| *page < 300);
        assert_eq!(first, [3, 4, 5, 299].into());
        assert_eq!(taken(&watch), BTreeSet::new());
        assert_eq!((stand.read(3), stand.read(17)), (7, 7));
        assert_eq!(taken(&watch), BTreeSet::new());
        stand.write((0..PAGES).step_by(2));
        let all: BTreeSet<u64> = (0..PAGES).step_by(2).collect();
        assert!(taken(&watch).is_superset(&all));
        stand.write([4]);
        assert_eq!(taken(&watch), [4].into());
    }

    #[test]
    fn it_can_begin_again_and_what_others_write_to_the_file_is_not_seen() {
        let stand = Stand::new();
        stand.write(0..10);
        for _ in 0..3 {
            let Ok(watch) = WriteWatch::start(&stand.userfault, &stand.ram) else { return };
            stand.ram.write(FileOffset(2 * PAGE_BYTES), &[9; 4096]).unwrap();
            assert_eq!(taken(&watch), BTreeSet::new(), "which is why the disks keep a log of their own");
            assert_eq!(stand.read(2), 9);
            stand.write([2]);
            assert_eq!(taken(&watch), [2].into());
        }
        stand.write(0..PAGES);
    }
}
