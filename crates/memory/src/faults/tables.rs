//! Tables: reading and changing QEMU's page tables of its RAM from outside.
//!
//! The memory is registered for write protection even if nothing gets protected. In such memory the kernel maps only
//! the page that is touched and no neighbours (`uffd_disable_fault_around`); so the mapped pages are the touched ones.
//!
//! Needs Linux 6.7 (asynchronous write protection, PAGEMAP_SCAN) and a RAM file of ordinary pages.

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
const PAGE_IS_PRESENT: u64 = 1 << 3;
const SCAN_PROTECT_MATCHING: u64 = 1 << 0;
/// PM_SCAN_CHECK_WPASYNC: the scan fails if a write to a protected page would wait for this process.
const SCAN_CHECK_ASYNC: u64 = 1 << 1;
/// Maximum number of runs that one scan returns: 24 KiB.
const RUNS: usize = 1024;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Address at which the scan ended; written by the kernel.
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

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Run {
    start: u64,
    end: u64,
    categories: u64,
}

/// Which pages to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Pages written to since they were last protected; they are protected again.
    Written,
    /// Pages that are mapped.
    Present,
}

/// Errors of `access` and `writes`.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum WatchError {
    #[error(transparent)]
    Mapping(#[from] AdmissionError),
    #[error(
        "{path}: has pages of {page_bytes} bytes, but accesses and writes can only be tracked in pages of {PAGE_BYTES} bytes; \
         use a memory folder with ordinary pages"
    )]
    HugePages { path: std::path::PathBuf, page_bytes: u64 },
    #[error("the kernel cannot report the pages that QEMU (pid {pid}) uses and writes; this needs Linux 6.7 or later")]
    Kernel { pid: u32, source: io::Error },
    #[error("the pages that QEMU (pid {pid}) has used and written cannot be read from /proc/{pid}/pagemap")]
    Scan { pid: u32, source: io::Error },
    #[error("the userfaultfd of QEMU cannot be duplicated")]
    Descriptor(#[source] io::Error),
}

/// Page tables of one QEMU, registered for write protection until this is dropped.
#[derive(Debug)]
pub(super) struct Tables {
    fd: OwnedFd,
    pagemap: File,
    pid: u32,
    pieces: Vec<Piece>,
}

impl Tables {
    /// Registers the RAM. Nothing else may have registered this memory.
    pub fn register(userfault: &Userfault, ram: &RamFile) -> Result<Self, WatchError> {
        let pid = userfault.qemu_pid;
        let page_bytes = std::fs::metadata(ram.path()).map_or(PAGE_BYTES, |file| file.blksize());
        if page_bytes != PAGE_BYTES {
            return Err(WatchError::HugePages { path: ram.path().to_owned(), page_bytes });
        }
        let unsupported = |errno: Errno| WatchError::Kernel { pid, source: errno.into() };
        let found = mapping::find(pid, ram.identity()).map_err(|source| AdmissionError::Maps { pid, source })?;
        let tables = Self {
            fd: userfault.fd.try_clone().map_err(WatchError::Descriptor)?,
            pagemap: File::open(format!("/proc/{pid}/pagemap")).map_err(|source| WatchError::Scan { pid, source })?,
            pid,
            pieces: whole(found, pid, ram)?,
        };
        match userfault::enable(&tables.fd) {
            // EINVAL: it is enabled already, or cannot be enabled; the next call tells.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(unsupported(errno)),
        }
        for piece in &tables.pieces {
            userfault::register_writes(&tables.fd, piece.address, piece.bytes).map_err(unsupported)?;
        }
        Ok(tables)
    }

    /// Process ID of QEMU.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Mappings of the RAM file in QEMU.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Checks that the kernel supports this scan.
    pub fn try_look(&self, look: Look) -> Result<(), WatchError> {
        self.look(look, |_| {}).map_err(|error| match error {
            WatchError::Scan { pid, source } => WatchError::Kernel { pid, source },
            error => error,
        })
    }

    /// Reports matching pages of the file as ascending runs of page numbers.
    pub fn look(&self, look: Look, mut found: impl FnMut(Range<u64>)) -> Result<(), WatchError> {
        let mut runs = [Run::default(); RUNS];
        for piece in &self.pieces {
            let (mut start, end) = (piece.address, piece.address + piece.bytes);
            while start < end {
                let (told, walked_to) = self.scan(look, start..end, &mut runs)?;
                for run in &runs[..told] {
                    let page = |address: u64| (address - piece.address + piece.file_offset) / PAGE_BYTES;
                    found(page(run.start)..page(run.end));
                }
                start = walked_to;
            }
        }
        Ok(())
    }

    fn scan(&self, look: Look, range: Range<u64>, runs: &mut [Run]) -> Result<(usize, u64), WatchError> {
        let (flags, category) = match look {
            Look::Written => (SCAN_PROTECT_MATCHING | SCAN_CHECK_ASYNC, PAGE_IS_WRITTEN),
            Look::Present => (SCAN_CHECK_ASYNC, PAGE_IS_PRESENT),
        };
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            flags,
            start: range.start,
            end: range.end,
            runs: runs.as_mut_ptr() as u64,
            runs_len: runs.len() as u64,
            category_mask: category,
            return_mask: category,
            ..Scan::default()
        };
        loop {
            // SAFETY: the ioctl reads and writes one `struct pm_scan_arg`, which `Scan` is. It writes at most
            // `runs_len` of `struct page_region`, which `Run` is, to `runs`, which is borrowed here. It changes the
            // page tables of another process and no memory of this one.
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

impl Drop for Tables {
    fn drop(&mut self) {
        for piece in &self.pieces {
            // This fails if QEMU has ended; its page tables went with it.
            let _ = userfault::unregister(&self.fd, piece.address, piece.bytes);
        }
    }
}
