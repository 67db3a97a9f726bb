//! For tests: this very process in QEMU's place.

use std::fs::File;

use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap, munmap, userfaultfd};

use super::Userfault;
use crate::{PAGE_BYTES, RamFile};

/// Size of the test RAM in pages.
pub const PAGES: u64 = 600;

/// A RAM file, mapped as QEMU maps it.
pub struct Stand {
    _folder: tempfile::TempDir,
    /// The RAM file.
    pub ram: RamFile,
    /// The userfaultfd of the process.
    pub userfault: Userfault,
    start: *mut u8,
}

impl Stand {
    /// Makes a RAM file in `/dev/shm`, maps it and opens a userfaultfd.
    pub fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("ram-1");
        let ram = RamFile::create(&path, PAGES * PAGE_BYTES).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let (bytes, access) = ((PAGES * PAGE_BYTES) as usize, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }.unwrap();
        // SAFETY: nothing of this process's memory is registered with it but the mapping above.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }.unwrap();
        let userfault = Userfault { fd, fd_in_qemu: -1, qemu_pid: std::process::id(), helper: None };
        Self { _folder: folder, ram, userfault, start: start.cast() }
    }

    /// Writes one byte into each page, which identifies the page.
    pub fn write(&self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            // SAFETY: inside the mapping, which nobody else uses.
            unsafe { self.start.add((page * PAGE_BYTES + 9) as usize).write_volatile(page as u8 | 1) };
        }
    }

    /// Reads the byte that `write` writes.
    pub fn read(&self, page: u64) -> u8 {
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
