//! The disk on which the next guest finds the cache map: what the dead guest had in its page cache.
//!
//! a guest dies -> pending -> the memory monitor has a thread read the map from its memory -> ready, or empty
//!
//! The dead kernel's own memory stays meanwhile (`Spared`), and only then is the ember settled. The reading is given up when it takes
//! too long, when the next guest needs the memory, and when that guest has died too.
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
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_disk::ledger::{Entry, Ledger};
use hearth_memory::{Durability, RamFile, replace_file};
use hearth_recovery::ember::{Ember, Spared};
use hearth_recovery::fast_remount::WarmSources;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::vmcore::Notes;
use hearth_recovery::warm_reboot::cache_map::{Blocks, CacheMap, GiveUp};
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
/// How long the reading of a map may take: several times what it takes on a busy host (0.3 s a GiB). Meanwhile dead memory stays.
const PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE_PER_GIB: Duration = Duration::from_secs(1);
const END_LOOK_EVERY: Duration = Duration::from_millis(5);

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
    fn map_bytes(&self) -> io::Result<Option<usize>> {
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
            return map.and(Err("another guest has died since".to_owned()));
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

/// A map that a thread is reading.
pub struct Reading {
    thread: JoinHandle<MemoryMessage>,
    give_up: Arc<GiveUp>,
    began: Instant,
    patience: Duration,
}

impl Reading {
    /// Begins to read the map that is awaited, and puts it into the file. None: none is awaited, or its guest is not banked yet.
    pub fn begin(file: &Arc<CacheMapFile>, ember: &Ember) -> Option<Self> {
        let awaited = file.awaited().clone()?;
        let (ram, ledger) = ember.unsettled_memory(awaited.incarnation)?;
        let (of_thread, patience, give_up) = (file.clone(), patience(&ram), awaited.give_up.clone());
        let begun = Self::start(patience, give_up, move || {
            let map = of_thread.map_of(ram, &ledger, &awaited);
            of_thread.finish(&awaited, map)
        });
        if begun.is_none() {
            file.clear();
        }
        begun
    }

    /// Begins to read the map of the machine's last guest, and keeps it for the next start.
    pub fn begin_keeping(
        file: Arc<CacheMapFile>,
        dead: &Incarnation,
        awaited: Awaited,
        ember: Arc<Ember>,
    ) -> Option<Self> {
        let (number, ram, ledger) = (dead.number, dead.ram.clone(), dead.ledger.clone()?);
        Self::start(patience(&ram), awaited.give_up.clone(), move || {
            let map = file.map_of(ram, &ledger, &awaited);
            // No settling follows at a stop: what a dump has written meanwhile is released now.
            drop(awaited);
            if let Err(error) = ember.let_go(number, 0..u64::MAX) {
                tracing::warn!(%error, "cannot release dead memory");
            }
            let map = map?;
            file.keep(&map).map_err(|error| format!("{} cannot be written: {error}", file.kept.display()))?;
            Ok(map)
        })
    }

    fn start(
        patience: Duration,
        give_up: Arc<GiveUp>,
        read: impl FnOnce() -> Result<CacheMap, String> + Send + 'static,
    ) -> Option<Self> {
        let began = Instant::now();
        let timed = move || {
            let size =
                |map: CacheMap| CacheMapSize { pages: map.pages(), files: map.files(), bytes: map.text().len() as u64 };
            MemoryMessage::CacheMap { read: read().map(size), took: began.elapsed() }
        };
        let thread = std::thread::Builder::new().name("cache-map".to_owned()).spawn(timed);
        let failed = |error| tracing::warn!(%error, "cannot start the thread that reads the cache map");
        Some(Self { thread: thread.map_err(failed).ok()?, give_up, began, patience })
    }

    /// Whether it is over. One that takes too long is given up, and soon is.
    pub fn is_over(&self) -> bool {
        if self.began.elapsed() > self.patience {
            self.give_up("it took too long");
        }
        self.thread.is_finished()
    }

    /// Ends it soon, without a map.
    pub fn give_up(&self, why: &'static str) {
        self.give_up.because(why);
    }

    /// Waits until it is over, and returns what became of it.
    pub fn end(self) -> Option<MemoryMessage> {
        let ended = self.thread.join();
        ended.map_err(|_| tracing::error!("the thread that reads the cache map panicked")).ok()
    }

    /// As `end`, but gives it up if it does not end by itself in this time.
    pub fn end_within(self, limit: Duration, why: &'static str) -> Option<MemoryMessage> {
        let until = Instant::now() + limit;
        while !self.is_over() && Instant::now() < until {
            std::thread::sleep(END_LOOK_EVERY);
        }
        self.give_up(why);
        self.end()
    }
}

fn patience(ram: &RamFile) -> Duration {
    PATIENCE + PATIENCE_PER_GIB * (ram.bytes() >> 30) as u32
}

/// Where the file is.
pub fn path(memory_folder: &Path) -> PathBuf {
    memory_folder.join(NAME)
}

#[cfg(test)]
mod tests {
    use hearth_disk::block::{DiskId, RamPage};
    use hearth_disk::tag::Tagger;
    use hearth_memory::PAGE_BYTES;

    use super::*;

    const RAM_BYTES: u64 = 1 << 30;

    struct Machine {
        folder: tempfile::TempDir,
        warm: WarmSources,
    }

    impl Machine {
        fn new() -> Self {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            let ember = Arc::new(Ember::new(folder.path(), Tagger::new(b"a key like noise")));
            Self { folder, warm: WarmSources { ember, boot_set: None } }
        }

        fn kept(&self) -> PathBuf {
            self.folder.path().join("state/web/cache-map")
        }

        fn open(&self) -> Arc<CacheMapFile> {
            Arc::new(CacheMapFile::open(self.folder.path(), self.kept(), RAM_BYTES).unwrap())
        }

        fn header(&self) -> String {
            let text = String::from_utf8(fs::read(path(self.folder.path())).unwrap()).unwrap();
            text.lines().next().unwrap().strip_prefix("hearth-cache-map 1 ").unwrap().to_owned()
        }

        /// A guest that has one page of a disk and one of its own.
        fn dead(&self, number: u32) -> Incarnation {
            let dead = Incarnation::create(self.folder.path(), number, RAM_BYTES, true).unwrap();
            let ram = File::options().write(true).open(dead.ram.path()).unwrap();
            ram.write_all_at(&[7; 2 * PAGE_BYTES as usize], 0).unwrap();
            let tag = Tagger::new(b"a key like noise").tag(&[7; PAGE_BYTES as usize]);
            dead.ledger.as_ref().unwrap().lock().unwrap().record(RamPage(0), DiskId(0), 5, tag);
            dead
        }

        fn awaited(&self, dead: &Incarnation) -> Awaited {
            Awaited::new(dead, &self.warm, None)
        }
    }

    fn why(message: MemoryMessage) -> String {
        match message {
            MemoryMessage::CacheMap { read: Err(why), .. } => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn unfinished_map_of_a_dead_keeper_is_dropped() {
        let machine = Machine::new();
        let file = machine.open();
        assert_eq!((machine.header(), file.limit_bytes), ("empty".to_owned(), 1 << 20));
        file.begin(machine.awaited(&machine.dead(1)));
        assert_eq!(machine.header(), "pending");
        let file = machine.open();
        assert_eq!(machine.header(), "empty");
        file.put_map(b"a map", "").unwrap();
        machine.open().memory_is_gone();
        assert_eq!(machine.header(), "ready 5 disk", "a finished map stays, and is read from the disk");
        machine.open().memory_is_gone();
        assert_eq!(machine.header(), "ready 5 disk");
    }

    #[test]
    fn kept_map_is_there_until_a_guest_has_run() {
        let machine = Machine::new();
        machine.open().keep(&CacheMap::default()).unwrap();
        for _ in 0..2 {
            fs::remove_file(path(machine.folder.path())).unwrap();
            machine.open();
            assert_eq!(machine.header(), "ready 0 disk");
        }
        machine.open().forget_kept();
        machine.open().forget_kept();
        fs::remove_file(path(machine.folder.path())).unwrap();
        machine.open();
        assert_eq!(machine.header(), "empty");
    }

    #[test]
    fn kept_map_that_is_too_long_is_not_used() {
        let machine = Machine::new();
        fs::create_dir_all(machine.kept().parent().unwrap()).unwrap();
        fs::write(machine.kept(), [b'x'; 2048]).unwrap();
        CacheMapFile::open(machine.folder.path(), machine.kept(), 1 << 20).unwrap();
        assert_eq!(machine.header(), "empty");
    }

    #[test]
    fn next_death_gives_up_the_map_before() {
        let machine = Machine::new();
        let (file, ember) = (machine.open(), machine.warm.ember.clone());
        let (first, second) = (machine.dead(1), machine.dead(2));
        file.begin(machine.awaited(&first));
        ember.bank(first).unwrap();
        let reading = Reading::begin(&file, &ember).unwrap();
        file.begin(machine.awaited(&second));
        assert!(Reading::begin(&file, &ember).is_none(), "the second guest is not banked yet");
        ember.bank(second).unwrap();
        assert!(why(reading.end().unwrap()).contains("another guest has died since"));
        assert_eq!(machine.header(), "pending");
        assert!(ember.settle().unwrap() > 0 && ember.unsettled_memory(2).is_some(), "the second one's memory stays");
        let reading = Reading::begin(&file, &ember).unwrap();
        assert_eq!(why(reading.end().unwrap()), "no Linux kernel was found in the guest's memory");
        assert_eq!(machine.header(), "empty");
        assert!(ember.settle().unwrap() > 0);
    }

    #[test]
    fn reading_that_is_given_up_says_why() {
        let machine = Machine::new();
        let (file, ember, dead) = (machine.open(), machine.warm.ember.clone(), machine.dead(1));
        file.begin(machine.awaited(&dead));
        ember.bank(dead).unwrap();
        let awaited = file.awaited().clone().unwrap();
        awaited.give_up.because("the next guest needs the memory");
        drop(awaited);
        let reading = Reading::begin(&file, &ember).unwrap();
        let ended = reading.end_within(Duration::from_secs(60), "the machine stops");
        assert_eq!(why(ended.unwrap()), "reading it was given up: the next guest needs the memory");
        assert_eq!(machine.header(), "empty");
    }

    #[test]
    fn kept_reading_releases_what_was_spared() {
        let machine = Machine::new();
        let (file, ember, dead) = (machine.open(), machine.warm.ember.clone(), machine.dead(1));
        let hold = Arc::new(hearth_recovery::hold::Hold::everything(dead.ram.pages()));
        let awaited = machine.awaited(&dead);
        ember.bank_held(dead.clone(), hold.clone()).unwrap();
        hold.let_go(0..u64::MAX);
        assert_eq!(ember.let_go_written(1, 0..u64::MAX).unwrap(), 0);
        let reading = Reading::begin_keeping(file, &dead, awaited, ember).unwrap();
        reading.end().unwrap();
        assert_eq!(dead.ram.residency_bytes().unwrap(), PAGE_BYTES, "the disk's page");
        assert!(!machine.kept().exists());
    }
}
