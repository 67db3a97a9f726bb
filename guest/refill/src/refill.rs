//! Reads ahead what the map lists, with some threads that take the reads in order.
//!
//! It begins with the file systems that are mounted, before the boot has mounted the others, and reads these as they come. From a
//! disk that the boot needs as well, one thread reads, and only half of the time.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use rustix::system::sysinfo;
use rustix::time::{ClockId, clock_gettime};

use crate::disk::Source;
use crate::handle;
use crate::map::{Map, Read};
use crate::mounts::{Kind, Mount, Mounts};

const PAGE_BYTES: u64 = 4096;
/// Reads between two looks at the free memory: at most 8 MiB.
const READS_PER_LOOK: usize = 8;
/// Threads beyond this only wait for each other in the disk's queue. Half of the processors are left to the boot and its services: on
/// two, one thread is not slower than two.
const THREADS_MAX: usize = 8;
/// Part of the memory that stays free, in percent; and at least so often what the kernel keeps free (`vm.min_free_kbytes`). With less
/// it would drop other pages for these.
const FREE_PERCENT: u64 = 3;
const KERNELS_FREE_TIMES: u64 = 2;

/// Time for the boot to mount the file systems.
const PATIENCE: Duration = Duration::from_secs(120);

/// What was done.
pub struct Report {
    bytes: u64,
    all_bytes: u64,
    missing_files: usize,
    took: Duration,
    processor_time: Duration,
    is_memory_full: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes >> 20;
        let [took_s, processor_s] = [self.took, self.processor_time].map(|time| time.as_secs_f64());
        write!(f, "read ahead {} of {} MiB in {took_s:.1} s", mib(self.bytes), mib(self.all_bytes))?;
        write!(f, " and {processor_s:.2} s of processor time")?;
        if self.missing_files > 0 {
            write!(f, "; {} files are gone or cannot be opened", self.missing_files)?;
        }
        if self.is_memory_full {
            write!(f, "; stopped because memory is full")?;
        }
        Ok(())
    }
}

/// Reads ahead what the map lists, as far as the memory is free and its file systems are mounted in time.
pub fn refill(map: &Map, source: Source) -> io::Result<Report> {
    let deadline = Instant::now() + PATIENCE;
    let mounts = Mounts::open()?;
    let mut report = Report {
        bytes: 0,
        all_bytes: map.reads.iter().map(|read| read.pages * PAGE_BYTES).sum(),
        missing_files: 0,
        took: Duration::ZERO,
        processor_time: Duration::ZERO,
        is_memory_full: false,
    };
    let is_opened: Vec<_> = map.files.iter().map(|_| AtomicBool::new(false)).collect();
    let mut awaited: BTreeSet<usize> = map.files.iter().map(|file| file.file_system).collect();
    let mut known = HashSet::new();
    loop {
        let uuid = |number: &usize| map.file_systems[*number].as_str();
        let mut mounted: HashMap<usize, Vec<Mount>> = HashMap::new();
        for (found, mount) in mounts.find(&awaited.iter().map(uuid).collect::<Vec<_>>()) {
            let number = *awaited.iter().find(|number| uuid(number) == found).expect("it was asked for");
            if known.insert((number, mount.kind)) {
                mounted.entry(number).or_default().push(mount);
            }
        }
        if !mounted.is_empty() {
            report.add(Work::new(map, &mounted, source, &is_opened));
            // The other files of btrfs may be in subvolumes that are mounted later.
            let has_more = |mount: &Mount| matches!(mount.kind, Kind::Btrfs { .. });
            awaited.retain(|number| mounted.get(number).is_none_or(|mounts| mounts.iter().any(has_more)));
            awaited.retain(|number| {
                map.files.iter().zip(&is_opened).any(|(file, is)| file.file_system == *number && !is.load(Relaxed))
            });
        }
        // A mount is busy while it is held.
        drop(mounted);
        let left = deadline.saturating_duration_since(Instant::now());
        if awaited.is_empty() || report.is_memory_full || !mounts.wait_changed(left) {
            break;
        }
    }
    if !report.is_memory_full {
        report.missing_files = is_opened.iter().filter(|is_opened| !is_opened.load(Relaxed)).count();
    }
    report.processor_time = processor_time();
    Ok(report)
}

impl Report {
    /// Does the work, and adds what was done.
    fn add(&mut self, work: Work<'_>) {
        let began = Instant::now();
        let threads = match work.source {
            Source::Memory => {
                let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
                (processors / 2).clamp(1, THREADS_MAX)
            }
            Source::Disk => 1,
        };
        std::thread::scope(|scope| {
            (0..threads).for_each(|_| drop(scope.spawn(|| work.run())));
        });
        self.bytes += work.bytes.into_inner();
        self.took += began.elapsed();
        self.is_memory_full = work.is_memory_full.into_inner();
    }
}

/// What to read of some file systems.
struct Work<'a> {
    map: &'a Map,
    source: Source,
    /// The file systems, by their number.
    mounts: &'a HashMap<usize, Vec<Mount>>,
    /// Reads of their files that were not opened before, in the map's order.
    reads: Vec<Read>,
    /// Whether a file was opened, by its number.
    is_opened: &'a [AtomicBool],
    next: AtomicUsize,
    bytes: AtomicU64,
    free_bytes_min: u64,
    is_memory_full: AtomicBool,
}

impl<'a> Work<'a> {
    fn new(map: &'a Map, mounts: &'a HashMap<usize, Vec<Mount>>, source: Source, is_opened: &'a [AtomicBool]) -> Self {
        let is_left = |read: &&Read| {
            mounts.contains_key(&map.files[read.file].file_system) && !is_opened[read.file].load(Relaxed)
        };
        Self {
            map,
            source,
            reads: map.reads.iter().filter(is_left).copied().collect(),
            mounts,
            is_opened,
            next: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            free_bytes_min: free_bytes_min(),
            is_memory_full: AtomicBool::new(false),
        }
    }

    fn run(&self) {
        // The last file, with its number: most reads of a file follow each other.
        let mut last: Option<(usize, Option<File>)> = None;
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            let Some(read) = self.reads.get(number) else { return };
            if number.is_multiple_of(READS_PER_LOOK) && free_bytes() < self.free_bytes_min {
                self.is_memory_full.store(true, Relaxed);
            }
            if self.is_memory_full.load(Relaxed) {
                return;
            }
            if last.as_ref().is_none_or(|(file, _)| *file != read.file) {
                last = Some((read.file, self.open(read.file)));
            }
            if let Some((_, Some(file))) = &last {
                self.read_ahead(file, read);
                self.bytes.fetch_add(read.pages * PAGE_BYTES, Relaxed);
            }
        }
    }

    fn read_ahead(&self, file: &File, read: &Read) {
        let began = Instant::now();
        let pages = NonZero::new(read.pages * PAGE_BYTES);
        // Fails only for a file that cannot be read ahead.
        let _ = fadvise(file, read.first * PAGE_BYTES, pages, Advice::WillNeed);
        if self.source == Source::Disk {
            // Waits for the last page. Fails if it is behind the file's end by now.
            let _ = file.read_at(&mut [0], (read.first + read.pages - 1) * PAGE_BYTES);
            std::thread::sleep(began.elapsed());
        }
    }

    fn open(&self, number: usize) -> Option<File> {
        let file = self.map.files[number];
        let opened = self.mounts[&file.file_system].iter().find_map(|mount| match file.inode {
            Some((inode, generation)) => handle::open(&mount.root, mount.kind, inode, generation).ok(),
            None => File::open(mount.device.as_ref()?).ok(),
        });
        self.is_opened[number].fetch_or(opened.is_some(), Relaxed);
        opened
    }
}

/// Processor time of this process so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn free_bytes() -> u64 {
    let memory = sysinfo();
    memory.freeram * u64::from(memory.mem_unit)
}

/// Bytes of memory that stay free.
fn free_bytes_min() -> u64 {
    let memory = sysinfo();
    let kernels = std::fs::read_to_string("/proc/sys/vm/min_free_kbytes");
    let kernels_kib: u64 = kernels.ok().and_then(|kib| kib.trim().parse().ok()).unwrap_or(0);
    let part = memory.totalram * u64::from(memory.mem_unit) * FREE_PERCENT / 100;
    part.max(kernels_kib * 1024 * KERNELS_FREE_TIMES)
}
