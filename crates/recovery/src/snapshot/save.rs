//! Save: copies a guest's memory into a file of pages.
//!
//! ```text
//! all of it -> what was written meanwhile -> ... -> little, or no less than before -> THE GUEST STANDS STILL -> the last of
//!   it, into the keeper's memory -> THE GUEST RUNS AGAIN -> and from there into the file -> checksums, index
//! ```
//! Each page has one slot in the file, so a page that is copied twice takes no more space. Where writes cannot be seen
//! the guest stands still from the beginning.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_disk::write_log::WriteLog;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::access::AccessError;
use hearth_memory::faults::writes::{WatchError, WriteWatch};
use hearth_memory::{FileOffset, MemoryError, PAGE_BYTES, RamFile};
use hearth_qemu::agent::AgentError;

use super::SnapshotError;
use super::outgoing::Outgoing;
use super::pages::{Compression, Elsewhere, PageReader, PageWriter, Sealed};
use crate::vmcore::Bitmap;

/// Pages read at a time. The watcher is asked after each such step.
const STEP_PAGES: u64 = 256;
/// Few enough pages to be copied while the guest stands still, into memory in 5 ms.
const FEW_PAGES: u64 = 2048;
/// A round is in vain if it finds more than this part of what the one before found.
const PROGRESS_PERCENT: u64 = 75;
/// Number of rounds in vain before the approach ends: a guest may write less in the next moment.
const VAIN_ROUNDS_MAX: u32 = 3;
const ROUNDS_MAX: u32 = 30;
/// Maximum number of pages kept in memory until the guest runs again, because a write to the file may block.
const KEPT_PAGES_MAX: usize = 4096;

/// Why a save failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum SaveError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Watch(#[from] WatchError),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("disk image {path}: its copy failed")]
    Image { path: PathBuf, source: std::io::Error },
    #[error("the guest's file systems are not frozen; start qemu-guest-agent in the guest, or save without `--freeze`")]
    Freeze(#[source] AgentError),
    #[error("the thread for the upload cannot be started")]
    Thread(#[source] std::io::Error),
    #[error("the keeper cancelled it")]
    Abandoned,
    #[error("it was cancelled: {why}")]
    CalledOff { why: String },
}

/// Number of pages that hold memory, which are the pages to read.
pub fn resident_pages(ram: &RamFile) -> Result<u64, MemoryError> {
    Ok(ram.resident_ranges()?.iter().map(|range| range.end - range.start).sum())
}

/// All that write to the memory of a running guest: QEMU, seen by its page tables, and the machine's disks.
pub struct Writers {
    pub(super) watch: WriteWatch,
    pub(super) log: Arc<WriteLog>,
}

impl Writers {
    /// Sees QEMU's writes from now on. The disks' writes are in `log`, which they were given before.
    pub fn watch(userfault: &Userfault, ram: &RamFile, log: Arc<WriteLog>) -> Result<Self, WatchError> {
        Ok(Self { watch: WriteWatch::start(userfault, ram)?, log })
    }

    /// Pages written to since the last call.
    fn take(&self, ram_pages: u64) -> Result<Bitmap, WatchError> {
        let mut written = Bitmap::new(ram_pages);
        self.watch.take(|run| written.set_range(run))?;
        self.log.take(|page| written.set(page));
        Ok(written)
    }
}

/// How the approach to the last pass ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Approach {
    /// Number of rounds after the first copy of all memory.
    pub rounds: u32,
    /// Whether the guest writes no faster than it is copied.
    pub settled: bool,
}

impl Approach {
    /// Adds an approach that came after this one.
    pub fn add(&mut self, other: Self) {
        *self = Self { rounds: self.rounds + other.rounds, settled: other.settled };
    }
}

/// Follows the progress of a save, and decides whether it continues.
pub trait Watcher {
    /// Adds to the number of pages to be copied.
    fn more(&mut self, pages: u64);
    /// Adds to the number of copied pages. An error ends the save.
    fn done(&mut self, pages: u64) -> Result<(), SaveError>;
}

/// A copy of a guest's memory that is being made.
pub struct RamCopy {
    ram: Arc<RamFile>,
    writer: PageWriter,
    step: Vec<u8>,
    kept: Vec<u32>,
    kept_bytes: Vec<u8>,
}

impl RamCopy {
    /// Begins a copy in a new file.
    pub fn begin(ram: Arc<RamFile>, path: &Path) -> Result<Self, SaveError> {
        Ok(Self {
            writer: PageWriter::create_changeable(path, ram.pages())?,
            ram,
            step: vec![0; (STEP_PAGES * PAGE_BYTES) as usize],
            kept: Vec::new(),
            kept_bytes: Vec::new(),
        })
    }

    /// Reports to `outgoing`, by which the file is sent while it is written.
    pub fn going_out(self, outgoing: Option<Arc<Outgoing>>) -> Self {
        Self { writer: self.writer.going_out(outgoing), ..self }
    }

    /// Copies all pages in the order of their addresses. Returns their number.
    pub fn copy_all(&mut self, watcher: &mut dyn Watcher) -> Result<u64, SaveError> {
        let mut pages = 0;
        for range in self.ram.resident_ranges()? {
            pages += range.end - range.start;
            self.copy_run(range, watcher)?;
        }
        Ok(pages)
    }

    /// Copies what is written meanwhile, until that is little or does not become less.
    pub fn approach(&mut self, writers: &Writers, watcher: &mut dyn Watcher) -> Result<Approach, SaveError> {
        let (mut before, mut vain) = (u64::MAX, 0);
        for rounds in 1..=ROUNDS_MAX {
            let written = writers.take(self.ram.pages())?;
            let pages = written.count();
            watcher.more(pages);
            for run in written.runs() {
                self.copy_run(run, watcher)?;
            }
            if pages <= FEW_PAGES {
                return Ok(Approach { rounds, settled: true });
            }
            vain += u32::from(pages > before / 100 * PROGRESS_PERCENT);
            if vain == VAIN_ROUNDS_MAX {
                return Ok(Approach { rounds, settled: false });
            }
            before = pages;
        }
        Ok(Approach { rounds: ROUNDS_MAX, settled: false })
    }

    /// Copies what was written since, into memory as far as it has space there. The guest must stand still. Returns the
    /// number of pages.
    pub fn keep_rest(&mut self, writers: &Writers, watcher: &mut dyn Watcher) -> Result<u64, SaveError> {
        let written = writers.take(self.ram.pages())?;
        let pages = written.count();
        watcher.more(pages);
        for run in written.runs() {
            for first in run.clone().step_by(STEP_PAGES as usize) {
                let pages = self.read(first..run.end)?;
                if self.kept.len() + pages as usize > KEPT_PAGES_MAX {
                    self.write_kept()?;
                }
                self.kept.extend(first as u32..(first + pages) as u32);
                self.kept_bytes.extend_from_slice(&self.step[..(pages * PAGE_BYTES) as usize]);
                watcher.done(pages)?;
            }
        }
        Ok(pages)
    }

    /// Completes the file, which is of the moment when the guest stood still. The guest may run meanwhile.
    pub fn finish(mut self) -> Result<Sealed, SaveError> {
        self.write_kept()?;
        Ok(self.writer.finish()?)
    }

    fn copy_run(&mut self, run: std::ops::Range<u64>, watcher: &mut dyn Watcher) -> Result<(), SaveError> {
        for first in run.clone().step_by(STEP_PAGES as usize) {
            let pages = self.read(first..run.end)?;
            let bytes = &self.step[..(pages * PAGE_BYTES) as usize];
            put_all(&mut self.writer, first as u32.., bytes)?;
            watcher.done(pages)?;
        }
        Ok(())
    }

    /// Reads as many of these pages as are read at a time. Returns their number.
    fn read(&mut self, pages: std::ops::Range<u64>) -> Result<u64, MemoryError> {
        let count = STEP_PAGES.min(pages.end - pages.start);
        self.ram.read(FileOffset(pages.start * PAGE_BYTES), &mut self.step[..(count * PAGE_BYTES) as usize])?;
        Ok(count)
    }

    fn write_kept(&mut self) -> Result<(), SnapshotError> {
        put_all(&mut self.writer, self.kept.drain(..), &self.kept_bytes)?;
        self.kept_bytes.clear();
        Ok(())
    }
}

fn put_all(writer: &mut PageWriter, pages: impl Iterator<Item = u32>, bytes: &[u8]) -> Result<(), SnapshotError> {
    for (page, bytes) in pages.zip(bytes.chunks_exact(PAGE_BYTES as usize)) {
        writer.put(page, bytes.try_into().expect("a page"))?;
    }
    Ok(())
}

/// Writes another file of the same pages, compressed, or without those that are on disks. The copy itself cannot be
/// compressed, because a page of another length has no slot to be put again.
pub fn pack(
    pages: &PageReader,
    target: &Path,
    compression: Compression,
    elsewhere: &[Elsewhere],
    outgoing: Option<Arc<Outgoing>>,
    watcher: &mut dyn Watcher,
) -> Result<Sealed, SaveError> {
    let mut writer = PageWriter::create(target, pages.ram_pages(), compression)?.going_out(outgoing);
    let mut reading = pages.reading();
    let mut left_out = Bitmap::new(pages.ram_pages());
    elsewhere.iter().flat_map(Elsewhere::pages).for_each(|page| left_out.set(u64::from(*page)));
    watcher.more(pages.pages().len() as u64);
    for chunk in 0..pages.chunks() {
        let bytes = pages.read(chunk, &mut reading)?;
        let numbers = pages.pages_of(chunk);
        for (page, bytes) in numbers.iter().zip(bytes.chunks_exact(PAGE_BYTES as usize)) {
            if !left_out.contains(u64::from(*page)) {
                writer.add(*page, bytes.try_into().expect("a page"))?;
            }
        }
        watcher.done(numbers.len() as u64)?;
    }
    for chunk in elsewhere {
        writer.add_elsewhere(chunk)?;
    }
    Ok(writer.finish()?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap, munmap, userfaultfd};

    use super::super::scan::{ScanPlan, Used};
    use super::*;

    const PAGES: u64 = 3000;

    #[derive(Default)]
    struct Counting {
        more: u64,
        done: u64,
        stop_at: Option<u64>,
    }

    impl Watcher for Counting {
        fn more(&mut self, pages: u64) {
            self.more += pages;
        }

        fn done(&mut self, pages: u64) -> Result<(), SaveError> {
            self.done += pages;
            match self.stop_at {
                Some(stop_at) if self.done > stop_at => Err(SaveError::CalledOff { why: "a test".into() }),
                _ => Ok(()),
            }
        }
    }

    /// A machine whose QEMU is this test process.
    struct Stand {
        home: tempfile::TempDir,
        ram: Arc<RamFile>,
        userfault: Userfault,
        start: *mut u8,
    }

    impl Stand {
        fn new() -> Self {
            let home = tempfile::tempdir_in("/dev/shm").unwrap();
            let path = home.path().join("ram-1");
            let ram = Arc::new(RamFile::create(&path, PAGES * PAGE_BYTES).unwrap());
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let (bytes, access) = ((PAGES * PAGE_BYTES) as usize, ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: a new mapping at an address of the kernel's choice.
            let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }.unwrap();
            // SAFETY: nothing of this process's memory is registered with it but the mapping above.
            let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }.unwrap();
            let userfault = Userfault { fd, fd_in_qemu: -1, qemu_pid: std::process::id(), helper: None };
            Self { home, ram, userfault, start: start.cast() }
        }

        fn write(&self, page: u64, word: u8) {
            // SAFETY: inside the mapping, which nobody else uses.
            unsafe { self.start.add((page * PAGE_BYTES + 9) as usize).write_volatile(word) };
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.home.path().join(name)
        }
    }

    impl Drop for Stand {
        fn drop(&mut self) {
            // SAFETY: the mapping was made here, and nobody uses it any more.
            unsafe { munmap(self.start.cast(), (PAGES * PAGE_BYTES) as usize) }.unwrap();
        }
    }

    fn check_copy(path: &Path, ram: &RamFile) {
        let (pages, mut now) = (PageReader::open(path).unwrap(), [0; PAGE_BYTES as usize]);
        let mut reading = pages.reading();
        for page in 0..PAGES {
            ram.read(FileOffset(page * PAGE_BYTES), &mut now).unwrap();
            let copied = pages.page(page as u32, &mut reading).unwrap().copied().unwrap_or([0; PAGE_BYTES as usize]);
            assert!(copied == now, "page {page}");
        }
    }

    #[test]
    fn copy_is_of_the_last_moment() {
        let stand = Stand::new();
        (0..2500).for_each(|page| stand.write(page, 1));
        let log = Arc::new(WriteLog::new(stand.ram.identity(), PAGES));
        let Ok(writers) = Writers::watch(&stand.userfault, &stand.ram, log) else { return };
        let mut watcher = Counting::default();
        let mut copy = RamCopy::begin(stand.ram.clone(), &stand.path("ram")).unwrap();
        copy.copy_all(&mut watcher).unwrap();
        // More than `FEW_PAGES`, so that another round follows.
        (0..2400).for_each(|page| stand.write(page, 2));
        let approach = copy.approach(&writers, &mut watcher).unwrap();
        assert!(approach.settled && approach.rounds >= 2, "{approach:?}");
        for page in [7, 8, 2499, 2600, PAGES - 1] {
            stand.write(page, 3);
        }
        assert!(copy.keep_rest(&writers, &mut watcher).unwrap() >= 5);
        stand.write(9, 0);
        copy.keep_rest(&writers, &mut watcher).unwrap();
        copy.finish().unwrap();
        check_copy(&stand.path("ram"), &stand.ram);
        assert!(watcher.done >= 2500 + 2400 + 6 && watcher.more >= 2400 + 6, "{} {}", watcher.done, watcher.more);
        let plain = PageReader::open(&stand.path("ram")).unwrap();
        let packed = pack(&plain, &stand.path("packed"), Compression::Zstd, &[], None, &mut watcher).unwrap();
        check_copy(&stand.path("packed"), &stand.ram);
        assert!(packed.bytes < std::fs::metadata(stand.path("ram")).unwrap().len() / 4);
    }

    #[test]
    fn restless_guest_is_not_waited_for_forever() {
        let stand = Stand::new();
        let log = Arc::new(WriteLog::new(stand.ram.identity(), PAGES));
        let Ok(writers) = Writers::watch(&stand.userfault, &stand.ram, log) else { return };
        /// Writes to all memory again while it is copied.
        struct Restless<'a>(&'a Stand, u8);
        impl Watcher for Restless<'_> {
            fn more(&mut self, _pages: u64) {
                self.1 += 1;
                (0..PAGES).for_each(|page| self.0.write(page, self.1));
            }

            fn done(&mut self, _pages: u64) -> Result<(), SaveError> {
                Ok(())
            }
        }
        let mut copy = RamCopy::begin(stand.ram.clone(), &stand.path("ram")).unwrap();
        (0..PAGES).for_each(|page| stand.write(page, 200));
        copy.copy_all(&mut Counting::default()).unwrap();
        let approach = copy.approach(&writers, &mut Restless(&stand, 0)).unwrap();
        assert_eq!(approach, Approach { rounds: VAIN_ROUNDS_MAX + 1, settled: false });
        let rest = copy.keep_rest(&writers, &mut Counting::default()).unwrap();
        (0..PAGES).for_each(|page| stand.write(page, 201));
        assert!(rest + copy.keep_rest(&writers, &mut Counting::default()).unwrap() > KEPT_PAGES_MAX as u64);
        copy.finish().unwrap();
        check_copy(&stand.path("ram"), &stand.ram);
    }

    #[test]
    fn use_during_the_copy_counts_unless_too_late() {
        let stand = Stand::new();
        let log = Arc::new(WriteLog::new(stand.ram.identity(), PAGES));
        let Ok(writers) = Writers::watch(&stand.userfault, &stand.ram, log) else { return };
        [3, 4, 900].into_iter().for_each(|page| stand.write(page, 1));
        for (period, seen) in [(Duration::from_secs(1000), vec![3, 4, 900]), (Duration::ZERO, vec![])] {
            let mut used = Used::of(PAGES, ScanPlan { period, rounds: 5 });
            used.add_mapped(&writers).unwrap();
            assert_eq!(used.best_first(), seen, "{period:?}");
        }
    }

    #[test]
    fn save_can_be_cancelled_at_each_step() {
        let stand = Stand::new();
        (0..1000).for_each(|page| stand.write(page, 1));
        let mut copy = RamCopy::begin(stand.ram.clone(), &stand.path("ram")).unwrap();
        let mut watcher = Counting { stop_at: Some(300), ..Counting::default() };
        assert!(matches!(copy.copy_all(&mut watcher), Err(SaveError::CalledOff { .. })));
        assert_eq!(watcher.done, 2 * STEP_PAGES);
    }
}
