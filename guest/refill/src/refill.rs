//! Reads ahead what the map lists, with several threads that take the reads in order.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

use crate::handle;
use crate::map::Map;
use crate::mounts::Mount;

const PAGE_BYTES: u64 = 4096;
/// Reads between two looks at the free memory: at most 8 MiB.
const READS_PER_LOOK: usize = 8;
/// Threads beyond this only wait for each other in the disk's queue.
const THREADS_MAX: usize = 8;
/// Part of the memory that stays free, in percent: below it the kernel would drop other pages for these.
const FREE_PERCENT: u64 = 3;

/// What was done.
pub struct Report {
    bytes: u64,
    all_bytes: u64,
    missing_files: usize,
    took: Duration,
    is_memory_full: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes >> 20;
        write!(f, "read ahead {} of {} MiB in {:.1} s", mib(self.bytes), mib(self.all_bytes), self.took.as_secs_f64())?;
        if self.missing_files > 0 {
            write!(f, "; {} files are gone or cannot be opened", self.missing_files)?;
        }
        if self.is_memory_full {
            write!(f, "; stopped because memory is full")?;
        }
        Ok(())
    }
}

/// Reads ahead what the map lists, as far as the memory is free.
pub fn refill(map: &Map, mounts: &HashMap<String, Mount>) -> Report {
    let began = Instant::now();
    let work = Work {
        map,
        mounts: map.file_systems.iter().map(|uuid| mounts.get(uuid)).collect(),
        missing: map.files.iter().map(|_| AtomicBool::new(false)).collect(),
        next: AtomicUsize::new(0),
        bytes: AtomicU64::new(0),
        is_memory_full: AtomicBool::new(false),
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(THREADS_MAX);
    std::thread::scope(|scope| {
        (0..threads).for_each(|_| drop(scope.spawn(|| work.run())));
    });
    Report {
        bytes: work.bytes.into_inner(),
        all_bytes: map.reads.iter().map(|read| read.pages * PAGE_BYTES).sum(),
        missing_files: work.missing.iter().filter(|missing| missing.load(Relaxed)).count(),
        took: began.elapsed(),
        is_memory_full: work.is_memory_full.into_inner(),
    }
}

struct Work<'a> {
    map: &'a Map,
    mounts: Vec<Option<&'a Mount>>,
    /// Whether a file could not be opened, by its number.
    missing: Vec<AtomicBool>,
    next: AtomicUsize,
    bytes: AtomicU64,
    is_memory_full: AtomicBool,
}

impl Work<'_> {
    fn run(&self) {
        // The last file, with its number: most reads of a file follow each other.
        let mut last: Option<(usize, Option<File>)> = None;
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            let Some(read) = self.map.reads.get(number) else { return };
            if number.is_multiple_of(READS_PER_LOOK) && !is_memory_free() {
                self.is_memory_full.store(true, Relaxed);
            }
            if self.is_memory_full.load(Relaxed) {
                return;
            }
            if last.as_ref().is_none_or(|(file, _)| *file != read.file) {
                last = Some((read.file, self.open(read.file)));
            }
            if let Some((_, Some(file))) = &last {
                let pages = NonZero::new(read.pages * PAGE_BYTES);
                // Fails only for a file that cannot be read ahead.
                let _ = fadvise(file, read.first * PAGE_BYTES, pages, Advice::WillNeed);
                self.bytes.fetch_add(read.pages * PAGE_BYTES, Relaxed);
            }
        }
    }

    fn open(&self, number: usize) -> Option<File> {
        let file = self.map.files[number];
        let mount = self.mounts[file.file_system];
        let opened = mount.and_then(|mount| match file.inode {
            Some((inode, generation)) => handle::open(&mount.root, mount.kind, inode, generation).ok(),
            None => File::open(&mount.device).ok(),
        });
        if opened.is_none() {
            self.missing[number].store(true, Relaxed);
        }
        opened
    }
}

fn is_memory_free() -> bool {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let value = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    match (value("MemFree:"), value("MemTotal:")) {
        (Some(free), Some(total)) => free * 100 >= total * FREE_PERCENT,
        _ => false,
    }
}
