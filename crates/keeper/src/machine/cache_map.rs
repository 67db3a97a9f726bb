//! The disk on which the next guest finds the cache map: what the dead guest had in its page cache.
//!
//! a guest dies -> pending -> the memory monitor reads the map from its memory -> ready, or empty
//!
//! It is a read-only file in the memory folder, served after all other disks. Its first block says whether there is a map; the
//! guest's `hearth-refill` reads it until that is decided. The next guest boots meanwhile.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use hearth_disk::block::DiskId;
use hearth_disk::gate::Gate;
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_disk::ledger::Entry;
use hearth_disk::server::{DiskOptions, DiskServer};
use hearth_recovery::ember::Ember;
use hearth_recovery::warm_reboot::cache_map::{Blocks, CacheMap};
use rustix::fs::{FallocateFlags, fallocate};

use super::disks::Disks;
use super::{Context, MachineError, launch};
use crate::event::{CacheMapSize, MemoryMessage};
use crate::folders::CACHE_MAP;

/// Name of the disk, and of its file in the memory folder.
pub const NAME: &str = CACHE_MAP;
/// The helper in the guest finds the disk by this.
const SERIAL: &str = "hearth-cache-map";
/// First word of the header, and version of the format.
const MAGIC: &str = "hearth-cache-map 1";
const HEADER_BYTES: usize = 4096;
/// The file has holes; only the map itself takes memory.
const FILE_BYTES: u64 = 64 << 20;
/// A map takes at most 1/1024 of the guest's memory.
const RAM_BYTES_PER_MAP_BYTE: u64 = 1024;

/// The file that the guest reads.
pub struct CacheMapFile {
    file: File,
    limit_bytes: usize,
    is_pending: AtomicBool,
    /// What the awaited map's ledger has lost to the boot set.
    parted: Mutex<Vec<Entry>>,
}

impl CacheMapFile {
    /// Opens the file of this machine, or makes it. An earlier keeper's map stays, if it was finished.
    pub fn open(memory_folder: &Path, ram_bytes: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let path = path(memory_folder);
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let limit_bytes = (ram_bytes / RAM_BYTES_PER_MAP_BYTE).min(FILE_BYTES - HEADER_BYTES as u64) as usize;
        let file = Self { file, limit_bytes, is_pending: AtomicBool::new(false), parted: Mutex::default() };
        let is_ready = file.file.metadata()?.len() == FILE_BYTES && file.has_map()?;
        if !is_ready {
            file.file.set_len(FILE_BYTES)?;
            file.set_empty()?;
        }
        Ok(file)
    }

    fn has_map(&self) -> io::Result<bool> {
        let mut header = [0; HEADER_BYTES];
        self.file.read_exact_at(&mut header, 0)?;
        Ok(header.starts_with(format!("{MAGIC} ready ").as_bytes()))
    }

    /// Longest map that the guest may get.
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes
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
        self.file.write_all_at(map.text().as_bytes(), HEADER_BYTES as u64)?;
        self.put_header(&format!("ready {}", map.text().len()))
    }

    fn put_header(&self, state: &str) -> io::Result<()> {
        let mut header = format!("{MAGIC} {state}\n").into_bytes();
        header.resize(HEADER_BYTES, 0);
        self.file.write_all_at(&header, 0)
    }
}

/// Starts the thread that reads the map that is awaited from the youngest dead guest's memory, and writes it. None: none is awaited.
pub fn begin_reading(file: &Option<Arc<CacheMapFile>>, ember: &Arc<Ember>) -> Option<JoinHandle<MemoryMessage>> {
    let file = file.as_ref().filter(|file| file.is_pending())?;
    let (of_thread, ember) = (file.clone(), ember.clone());
    let thread = std::thread::Builder::new().name("cache-map".to_owned()).spawn(move || read(&of_thread, &ember));
    let failed = |error| {
        tracing::warn!(%error, "cannot start the thread that reads the cache map");
        file.clear();
    };
    thread.map_err(failed).ok()
}

fn read(file: &CacheMapFile, ember: &Ember) -> MemoryMessage {
    let began = Instant::now();
    let read = ember.youngest_unsettled().ok_or_else(|| "its memory could not be kept".to_owned());
    let read = read.and_then(|(ram, ledger)| {
        let parted = std::mem::take(&mut *file.parted.lock().expect("holders only assign"));
        let blocks = Blocks::new(&ledger, &parted);
        let map = CacheMap::read(ram, &blocks, file.limit_bytes()).map_err(|error| error.to_string())?;
        file.set(&map).map_err(|error| format!("it cannot be written: {error}"))?;
        Ok(CacheMapSize { pages: map.pages(), files: map.files(), bytes: map.text().len() as u64 })
    });
    if read.is_err() {
        file.clear();
    }
    MemoryMessage::CacheMap { read, took: began.elapsed() }
}

fn path(memory_folder: &Path) -> PathBuf {
    memory_folder.join(NAME)
}

impl Disks {
    /// Serves the cache map, if the machine has one. Call it after all other disks are served: the guest sees it after them.
    pub fn open_cache_map(&mut self, context: &Context, gate: Option<&Gate>) -> Result<(), MachineError> {
        if !context.config.guest.refill {
            return Ok(());
        }
        let failed = |source| MachineError::Image { disk: NAME.to_owned(), source };
        let image = ImageOptions {
            path: path(&context.folders.memory),
            format: Format::Raw,
            read_only: true,
            direct: false,
            lock_patience: launch::LOCK_PATIENCE,
            owner: self.lock_owner(context),
        };
        let image = Image::open(&image).map_err(failed)?;
        let id = DiskId(u8::try_from(self.servers.len()).expect("a machine has fewer disks than PCI slots"));
        let options = DiskOptions {
            serial: SERIAL.to_owned(),
            read_only: true,
            tracked: false,
            gate: gate.cloned(),
            tell: Some(Self::notices(context, NAME)),
            ..DiskOptions::new(id, NAME, context.folders.disk_socket(NAME))
        };
        let server = DiskServer::start(options, image, None)
            .map_err(|source| MachineError::Server { disk: NAME.to_owned(), source })?;
        Self::watch(context, &server);
        self.servers.push(server);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_map_of_a_dead_keeper_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let open = || CacheMapFile::open(folder.path(), 1 << 30).unwrap();
        let header = || {
            let text = String::from_utf8(std::fs::read(path(folder.path())).unwrap()).unwrap();
            text.lines().next().unwrap().to_owned()
        };
        let file = open();
        assert_eq!((header(), file.limit_bytes()), ("hearth-cache-map 1 empty".to_owned(), 1 << 20));
        file.set_pending().unwrap();
        assert_eq!((header(), file.is_pending()), ("hearth-cache-map 1 pending".to_owned(), true));
        let file = open();
        assert_eq!((header(), file.is_pending()), ("hearth-cache-map 1 empty".to_owned(), false));
        file.set(&CacheMap::default()).unwrap();
        open();
        assert_eq!(header(), "hearth-cache-map 1 ready 0", "a finished map stays");
    }
}
