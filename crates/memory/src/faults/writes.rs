//! Writes: which pages of its RAM a running QEMU has written to, without a word from it.
//!
//! watch (its memory is write-protected) -> a first write: the kernel lifts the protection of that page by itself -> take
//! (what is not protected any more was written, and is protected again) -> ... -> drop
//!
//! No fault comes to this process and none waits for it: if it dies, a first write goes on costing a microsecond. What
//! others write through mappings of their own is not seen.

use std::ops::Range;

use super::Userfault;
pub use super::tables::WatchError;
use super::tables::{Look, Tables};
use crate::RamFile;

/// The RAM of a running QEMU, write-protected.
#[derive(Debug)]
pub struct WriteWatch(Tables);

impl WriteWatch {
    /// From now on writes are seen. Nobody else has registered this memory.
    pub fn start(userfault: &Userfault, ram: &RamFile) -> Result<Self, WatchError> {
        Self::over(Tables::register(userfault, ram)?)
    }

    pub(super) fn over(tables: Tables) -> Result<Self, WatchError> {
        tables.try_look(Look::Written)?;
        Ok(Self(tables))
    }

    /// Pages of the file that may have been written to since the last time, as ascending runs.
    pub fn take(&self, found: impl FnMut(Range<u64>)) -> Result<(), WatchError> {
        self.0.look(Look::Written, found)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::File;

    use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap, munmap, userfaultfd};

    use super::*;
    use crate::{FileOffset, PAGE_BYTES};

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
            let userfault = Userfault { fd, fd_in_qemu: -1, qemu_pid: std::process::id(), helper: None };
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
