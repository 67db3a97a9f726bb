//! The file of a cache map, and the reading of maps into it.

use std::time::Duration;

use hearth_disk::block::{DiskId, RamPage};
use hearth_disk::tag::Tagger;
use hearth_memory::PAGE_BYTES;
use hearth_recovery::ember::Ember;
use hearth_recovery::hold::Hold;

use super::*;
use crate::event::MemoryMessage;

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
    let hold = Arc::new(Hold::everything(dead.ram.pages()));
    let awaited = machine.awaited(&dead);
    ember.bank_held(dead.clone(), hold.clone()).unwrap();
    hold.let_go(0..u64::MAX);
    assert_eq!(ember.let_go_written(1, 0..u64::MAX).unwrap(), 0);
    let reading = Reading::begin_keeping(file, &dead, awaited, ember).unwrap();
    reading.end().unwrap();
    assert_eq!(dead.ram.residency_bytes().unwrap(), PAGE_BYTES, "the disk's page");
    assert!(!machine.kept().exists());
}
