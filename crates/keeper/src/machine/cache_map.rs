//! The disk on which the next guest finds the cache map: what the dead guest had in its page cache.
//!
//! a guest dies -> pending -> the memory monitor reads the map from its memory -> ready, or empty
//!
//! It is a read-only file in the memory folder, served after all other disks. Its first block says whether there is a map; the
//! guest's `hearth-refill` reads it until that is decided. The next guest boots meanwhile.
//!
//! When the machine stops, the map of its last guest goes into its state folder. Its next guest has nothing in memory, but reads
//! from the disk in large requests, and what was used most first.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use hearth_disk::ledger::{Entry, Ledger};
use hearth_memory::{Durability, RamFile, replace_file};
use hearth_recovery::ember::Ember;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::warm_reboot::cache_map::{Blocks, CacheMap};
use rustix::fs::{FallocateFlags, fallocate};

use crate::event::{CacheMapSize, MemoryMessage};
use crate::folders::CACHE_MAP;

/// Name of the disk, and of its file in the memory folder.
pub const NAME: &str = CACHE_MAP;
/// The helper in the guest finds the disk by this.
pub const SERIAL: &str = "hearth-cache-map";
/// First word of the header, and version of the format.
const MAGIC: &str = "hearth-cache-map 1";
const HEADER_BYTES: usize = 4096;
/// The header's last word if the listed pages are not in memory: then the guest leaves half of the disk's time to its boot.
const FROM_DISK: &str = " disk";
/// The file has holes; only the map itself takes memory.
const FILE_BYTES: u64 = 64 << 20;
/// A map takes at most 1/1024 of the guest's memory.
const RAM_BYTES_PER_MAP_BYTE: u64 = 1024;

/// The file that the guest reads.
pub struct CacheMapFile {
    file: File,
    /// The file that keeps the map while the machine is stopped.
    kept: PathBuf,
    limit_bytes: usize,
    is_pending: AtomicBool,
    /// What the awaited map's ledger has lost to the boot set.
    parted: Mutex<Vec<Entry>>,
}

impl CacheMapFile {
    /// Opens the file of this machine, or makes it. An earlier keeper's map stays, if it was finished. Otherwise the map that the
    /// machine's last stop has left in `kept` is taken from there: it is good for one start.
    pub fn open(memory_folder: &Path, kept: PathBuf, ram_bytes: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let path = path(memory_folder);
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let limit_bytes = (ram_bytes / RAM_BYTES_PER_MAP_BYTE).min(FILE_BYTES - HEADER_BYTES as u64) as usize;
        let file = Self { file, kept, limit_bytes, is_pending: AtomicBool::new(false), parted: Mutex::default() };
        let is_ready = file.file.metadata()?.len() == FILE_BYTES && file.has_map()?;
        if !is_ready {
            file.file.set_len(FILE_BYTES)?;
            file.set_empty()?;
            file.take_kept();
        }
        Ok(file)
    }

    fn take_kept(&self) {
        let mut text = Vec::new();
        let opened = File::open(&self.kept);
        let read = opened.and_then(|kept| kept.take(self.limit_bytes as u64 + 1).read_to_end(&mut text));
        let taken = read.and_then(|_| fs::remove_file(&self.kept)).and_then(|()| {
            // A machine with less memory than it had.
            if text.len() > self.limit_bytes { Ok(()) } else { self.put_map(&text, FROM_DISK) }
        });
        if let Err(error) = taken
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, kept = %self.kept.display(), "cannot use the cache map that was kept");
        }
    }

    fn has_map(&self) -> io::Result<bool> {
        let mut header = [0; HEADER_BYTES];
        self.file.read_exact_at(&mut header, 0)?;
        Ok(header.starts_with(format!("{MAGIC} ready ").as_bytes()))
    }

    /// Whether a map is awaited.
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Relaxed)
    }

    /// Tells the next guest that a map is being made. `parted`: what the dead guest's ledger loses to the boot set.
    pub fn begin(&self, parted: Vec<Entry>) {
        *self.parted.lock().expect("holders only assign") = parted;
        self.written(self.set_pending());
    }

    /// Tells the next guest that there is no map.
    pub fn clear(&self) {
        self.written(self.set_empty());
    }

    fn written(&self, written: io::Result<()>) {
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write the cache map for the next guest");
        }
    }

    /// There is no map for the next guest.
    fn set_empty(&self) -> io::Result<()> {
        self.is_pending.store(false, Relaxed);
        self.put_header("empty")?;
        // Gives the last map's memory back.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, HEADER_BYTES as u64, FILE_BYTES - HEADER_BYTES as u64)?)
    }

    /// A map is being made.
    fn set_pending(&self) -> io::Result<()> {
        self.set_empty()?;
        self.is_pending.store(true, Relaxed);
        self.put_header("pending")
    }

    /// This is the map.
    pub fn set(&self, map: &CacheMap) -> io::Result<()> {
        self.is_pending.store(false, Relaxed);
        self.put_map(map.text().as_bytes(), "")
    }

    /// `source`: empty, or `FROM_DISK`.
    fn put_map(&self, text: &[u8], source: &str) -> io::Result<()> {
        self.file.write_all_at(text, HEADER_BYTES as u64)?;
        self.put_header(&format!("ready {}{source}", text.len()))
    }

    /// Keeps a map for the machine's next start.
    fn keep(&self, map: &CacheMap) -> io::Result<()> {
        if let Some(folder) = self.kept.parent() {
            fs::create_dir_all(folder)?;
        }
        replace_file(&self.kept, Durability::PowerCut, |kept| kept.write_all(map.text().as_bytes()))
    }

    /// Reads the map of a dead guest.
    fn map_of(&self, ram: Arc<RamFile>, ledger: &Mutex<Ledger>, parted: &[Entry]) -> Result<CacheMap, String> {
        let blocks = Blocks::new(ledger, parted);
        CacheMap::read(ram, &blocks, self.limit_bytes).map_err(|error| error.to_string())
    }

    fn put_header(&self, state: &str) -> io::Result<()> {
        let mut header = format!("{MAGIC} {state}\n").into_bytes();
        header.resize(HEADER_BYTES, 0);
        self.file.write_all_at(&header, 0)
    }
}

/// Starts the thread that reads the map that is awaited from the youngest dead guest's memory, and writes it. None: none is awaited.
pub fn begin_reading(file: &Option<Arc<CacheMapFile>>, ember: &Arc<Ember>) -> Option<JoinHandle<MemoryMessage>> {
    let file = file.clone().filter(|file| file.is_pending())?;
    let (of_thread, ember) = (file.clone(), ember.clone());
    let started = spawn(move || read(&of_thread, &ember));
    if started.is_none() {
        file.clear();
    }
    started
}

/// Starts the thread that keeps the map of the machine's last guest for its next start. `parted`: what the guest's ledger loses to
/// the boot set.
pub fn begin_keeping(
    file: Arc<CacheMapFile>,
    dead: &Incarnation,
    parted: Vec<Entry>,
) -> Option<JoinHandle<MemoryMessage>> {
    let (ram, ledger) = (dead.ram.clone(), dead.ledger.clone()?);
    spawn(move || {
        let map = file.map_of(ram, &ledger, &parted)?;
        file.keep(&map).map_err(|error| format!("{} cannot be written: {error}", file.kept.display()))?;
        Ok(map)
    })
}

/// Starts a thread for work that ends with a map, or why there is none.
fn spawn(work: impl FnOnce() -> Result<CacheMap, String> + Send + 'static) -> Option<JoinHandle<MemoryMessage>> {
    let timed = move || {
        let began = Instant::now();
        let size =
            |map: CacheMap| CacheMapSize { pages: map.pages(), files: map.files(), bytes: map.text().len() as u64 };
        MemoryMessage::CacheMap { read: work().map(size), took: began.elapsed() }
    };
    let thread = std::thread::Builder::new().name("cache-map".to_owned()).spawn(timed);
    let failed = |error| tracing::warn!(%error, "cannot start the thread that reads the cache map");
    thread.map_err(failed).ok()
}

fn read(file: &CacheMapFile, ember: &Ember) -> Result<CacheMap, String> {
    let read = ember.youngest_unsettled().ok_or_else(|| "its memory could not be kept".to_owned());
    let read = read.and_then(|(ram, ledger)| {
        let parted = std::mem::take(&mut *file.parted.lock().expect("holders only assign"));
        let map = file.map_of(ram, &ledger, &parted)?;
        file.set(&map).map_err(|error| format!("it cannot be written: {error}"))?;
        Ok(map)
    });
    if read.is_err() {
        file.clear();
    }
    read
}

/// Where the file is.
pub fn path(memory_folder: &Path) -> PathBuf {
    memory_folder.join(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_map_of_a_dead_keeper_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let open = || CacheMapFile::open(folder.path(), folder.path().join("kept"), 1 << 30).unwrap();
        let header = || {
            let text = String::from_utf8(std::fs::read(path(folder.path())).unwrap()).unwrap();
            text.lines().next().unwrap().to_owned()
        };
        let file = open();
        assert_eq!((header(), file.limit_bytes), ("hearth-cache-map 1 empty".to_owned(), 1 << 20));
        file.set_pending().unwrap();
        assert_eq!((header(), file.is_pending()), ("hearth-cache-map 1 pending".to_owned(), true));
        let file = open();
        assert_eq!((header(), file.is_pending()), ("hearth-cache-map 1 empty".to_owned(), false));
        file.set(&CacheMap::default()).unwrap();
        open();
        assert_eq!(header(), "hearth-cache-map 1 ready 0", "a finished map stays");
    }

    #[test]
    fn kept_map_is_good_for_one_start_with_enough_memory() {
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("state/web/cache-map");
        let start = |ram_bytes| {
            let memory = tempfile::tempdir().unwrap();
            CacheMapFile::open(memory.path(), kept.clone(), ram_bytes).unwrap().has_map().unwrap()
        };
        let stop = || {
            let memory = tempfile::tempdir().unwrap();
            CacheMapFile::open(memory.path(), kept.clone(), 1 << 30).unwrap().keep(&CacheMap::default()).unwrap();
        };
        assert!(!start(1 << 30), "the first start");
        stop();
        assert!(start(1 << 30));
        assert!(!start(1 << 30), "it was taken");
        fs::write(&kept, [b'x'; 2048]).unwrap();
        assert!(!start(1 << 20), "it is too long for this memory");
        assert!(!kept.exists());
    }
}
