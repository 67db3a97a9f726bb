//! The disk on which the next guest finds the cache map: what the dead guest had in its page cache.
//!
//! a guest dies -> pending -> the memory monitor has a thread read the map from its memory -> ready, or empty
//!
//! The dead kernel's own memory stays meanwhile (`Spared`), and only then is the ember settled. The reading is given up when it takes
//! too long, when the next guest needs the memory, and when that guest has died too (`reading`).
//!
//! It is a read-only file in the memory folder, served after all other disks. Its first block says whether there is a map; the
//! guest's `hearth-refill` reads it until that is decided. The next guest boots meanwhile.
//!
//! When the machine stops, the map of its last guest goes into its state folder. Its next guest has nothing in memory, but reads
//! from the disk in large requests, and what was used most first.

mod reading;
#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use hearth_disk::ledger::{Entry, Ledger};
use hearth_memory::{Durability, RamFile, replace_file};
use hearth_recovery::ember::Spared;
use hearth_recovery::fast_remount::WarmSources;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::vmcore::Notes;
use hearth_recovery::warm_reboot::cache_map::{Blocks, CacheMap, CacheMapError, GiveUp};
use rustix::fs::{FallocateFlags, fallocate};

use crate::folders::CACHE_MAP;
pub use reading::Reading;

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
    /// The map that is being made for the next guest.
    awaited: Mutex<Option<Arc<Awaited>>>,
}

/// A map that is to be made of a dead guest's memory. Until then its kernel's own memory stays.
pub struct Awaited {
    incarnation: u32,
    /// What the guest's ledger loses to the boot set.
    parted: Vec<Entry>,
    /// Its registers, as QEMU's notes; may be empty.
    notes: Vec<u8>,
    give_up: Arc<GiveUp>,
    _spared: Spared,
}

impl Awaited {
    /// The map of this guest. Call it before the boot set's blocks are removed from its ledger, and before it is banked.
    pub fn new(dead: &Incarnation, warm: &WarmSources, registers: Option<Vec<u8>>) -> Self {
        let notes = registers.and_then(|bytes| Notes::of_tiny_dump(&bytes).ok()).unwrap_or_default();
        Self {
            incarnation: dead.number,
            parted: warm.in_boot_set(dead),
            notes: notes.to_bytes(),
            give_up: Arc::default(),
            _spared: Spared::new(&warm.ember, dead.number),
        }
    }
}

impl CacheMapFile {
    /// Opens the file of this machine, or makes it. An earlier keeper's map stays, if it was finished. Otherwise it gets the map that
    /// the machine's last stop has left in `kept`.
    pub fn open(memory_folder: &Path, kept: PathBuf, ram_bytes: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let path = path(memory_folder);
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let limit_bytes = (ram_bytes / RAM_BYTES_PER_MAP_BYTE).min(FILE_BYTES - HEADER_BYTES as u64) as usize;
        let file = Self { file, kept, limit_bytes, awaited: Mutex::default() };
        let is_ready = file.file.metadata()?.len() == FILE_BYTES && file.map_bytes()?.is_some();
        if !is_ready {
            file.file.set_len(FILE_BYTES)?;
            file.put_nothing()?;
            file.load_kept();
        }
        Ok(file)
    }

    fn load_kept(&self) {
        let mut text = Vec::new();
        let opened = File::open(&self.kept);
        let read = opened.and_then(|kept| kept.take(self.limit_bytes as u64 + 1).read_to_end(&mut text));
        // A machine with less memory than it had gets none.
        let fits = |_| if text.len() > self.limit_bytes { Ok(()) } else { self.put_map(&text, FROM_DISK) };
        if let Err(error) = read.and_then(fits)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, kept = %self.kept.display(), "cannot use the cache map that was kept");
        }
    }

    /// Removes the kept map, which is good for one start. Call it when the guest runs.
    pub fn forget_kept(&self) {
        match fs::remove_file(&self.kept) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, kept = %self.kept.display(), "cannot remove the cache map that was kept");
            }
            _ => {}
        }
    }

    /// Tells the next guest that what an earlier keeper's map lists is not in memory.
    pub fn memory_is_gone(&self) {
        let told = self.map_bytes().and_then(|bytes| match bytes {
            Some(bytes) => self.put_header(&format!("ready {bytes}{FROM_DISK}")),
            None => Ok(()),
        });
        written(told);
    }

    /// Length of the map that is in the file.
    pub fn map_bytes(&self) -> io::Result<Option<usize>> {
        let mut header = [0; HEADER_BYTES];
        self.file.read_exact_at(&mut header, 0)?;
        let ready = str::from_utf8(&header).ok().and_then(|header| header.strip_prefix(&format!("{MAGIC} ready ")));
        Ok(ready.and_then(|rest| rest.split([' ', '\n']).next()?.parse().ok()))
    }

    /// Tells the next guest that this map is being made, and gives up an earlier one.
    pub fn begin(&self, awaited: Awaited) {
        self.change(Some(Arc::new(awaited)), "another guest has died since", || {
            self.put_nothing()?;
            self.put_header("pending")
        });
    }

    /// Tells the next guest that there is no map.
    pub fn clear(&self) {
        self.change(None, "the next guest begins cold", || self.put_nothing());
    }

    /// `why`: what becomes of the map that was awaited.
    fn change(&self, to: Option<Arc<Awaited>>, why: &'static str, write: impl FnOnce() -> io::Result<()>) {
        let mut awaited = self.awaited();
        if let Some(last) = std::mem::replace(&mut *awaited, to) {
            last.give_up.because(why);
        }
        written(write());
    }

    /// The map that is being made, if any.
    fn awaited(&self) -> MutexGuard<'_, Option<Arc<Awaited>>> {
        self.awaited.lock().expect("holders only assign and write")
    }

    /// The awaited map has been made, or cannot be made.
    fn finish(&self, of: &Arc<Awaited>, map: Result<CacheMap, String>) -> Result<CacheMap, String> {
        let mut awaited = self.awaited();
        if awaited.take_if(|current| Arc::ptr_eq(current, of)).is_none() {
            // Another one, or none, is awaited since, and this one was given up.
            let why = of.give_up.why().unwrap_or_default();
            return map.and(Err(CacheMapError::GivenUp(why).to_string()));
        }
        let put = |map: CacheMap| {
            let put = self.put_map(map.text().as_bytes(), "");
            put.map(|()| map).map_err(|error| format!("it cannot be written: {error}"))
        };
        map.and_then(put).inspect_err(|_| written(self.put_nothing()))
    }

    /// There is no map.
    fn put_nothing(&self) -> io::Result<()> {
        self.put_header("empty")?;
        // Gives the last map's memory back.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, HEADER_BYTES as u64, FILE_BYTES - HEADER_BYTES as u64)?)
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

    fn map_of(&self, ram: Arc<RamFile>, ledger: &Mutex<Ledger>, awaited: &Awaited) -> Result<CacheMap, String> {
        let Awaited { parted, notes, give_up, .. } = awaited;
        let map = CacheMap::read(ram, notes, &Blocks::new(ledger, parted), self.limit_bytes, give_up);
        map.map_err(|error| error.to_string())
    }

    fn put_header(&self, state: &str) -> io::Result<()> {
        let mut header = format!("{MAGIC} {state}\n").into_bytes();
        header.resize(HEADER_BYTES, 0);
        self.file.write_all_at(&header, 0)
    }
}

fn written(written: io::Result<()>) {
    if let Err(error) = written {
        tracing::warn!(%error, "cannot write the cache map for the next guest");
    }
}

/// Where the file is.
pub fn path(memory_folder: &Path) -> PathBuf {
    memory_folder.join(NAME)
}
