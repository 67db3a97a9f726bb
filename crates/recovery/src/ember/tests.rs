//! Tests of what the ember serves, releases, trims and holds.

use hearth_disk::block::RamPage;

use super::*;
use std::os::unix::fs::FileExt;

const PAGES: u32 = 64;
const DISK: DiskId = DiskId(0);

/// A memory folder with dead incarnations; page p of each holds block p, filled with a byte of its own.
struct Folder {
    folder: tempfile::TempDir,
    tagger: Tagger,
}

impl Folder {
    fn new() -> Self {
        Self { folder: tempfile::tempdir_in("/dev/shm").unwrap(), tagger: Tagger::new(b"a key like noise") }
    }

    fn ember(&self) -> Ember {
        Ember::new(self.folder.path(), self.tagger.clone())
    }

    fn dead(&self, number: u32, pages: Range<u32>) -> Incarnation {
        let incarnation = Incarnation::create(self.folder.path(), number, u64::from(PAGES) * PAGE_BYTES, true).unwrap();
        for page in pages {
            self.write(&incarnation, page, fill(page));
            let ledger = incarnation.ledger.as_ref().unwrap();
            lock(ledger).record(RamPage(page), DISK, u64::from(page), self.tagger.tag(&[fill(page); BLOCK_BYTES]));
        }
        incarnation
    }

    fn write(&self, incarnation: &Incarnation, page: u32, byte: u8) {
        let file = std::fs::File::options().write(true).open(incarnation.ram.path()).unwrap();
        file.write_all_at(&[byte; BLOCK_BYTES], u64::from(page) * PAGE_BYTES).unwrap();
    }
}

fn fill(page: u32) -> u8 {
    page as u8 + 1
}

/// Reads a block and returns the byte that it is filled with.
fn read(ember: &Ember, block: u64, after: AfterServing) -> Option<u8> {
    let mut served = None;
    let tag = ember.serve(DISK, block, after, &mut |bytes| served = Some(bytes[BLOCK_BYTES - 1]));
    assert_eq!(tag.is_some(), served.is_some());
    served
}

#[test]
fn clean_block_is_served_once_and_released() {
    let folder = Folder::new();
    let ember = folder.ember();
    ember.bank(folder.dead(1, 0..PAGES)).unwrap();
    let before = ember.resident_bytes().unwrap();
    assert_eq!(read(&ember, 5, AfterServing::Keep), Some(fill(5)));
    assert_eq!(read(&ember, 5, AfterServing::Release), Some(fill(5)));
    assert_eq!(read(&ember, 5, AfterServing::Release), None);
    assert_eq!(ember.sweep().unwrap(), PAGE_BYTES);
    assert_eq!(ember.resident_bytes().unwrap(), before - PAGE_BYTES);
    let counts = ember.counts();
    assert_eq!((counts.kept, counts.served, counts.served_in_part, counts.remaining), (64, 1, 1, 63));
}

#[test]
fn a_page_that_changed_is_never_served() {
    let folder = Folder::new();
    let ember = folder.ember();
    let dead = folder.dead(1, 0..PAGES);
    folder.write(&dead, 7, 0);
    ember.bank(dead).unwrap();
    assert_eq!(read(&ember, 7, AfterServing::Keep), None);
    assert_eq!(read(&ember, 8, AfterServing::Keep), Some(fill(8)));
    assert_eq!(ember.counts().tag_mismatch, 1);
}

/// A process to which QEMU gave its memory may outlive QEMU.
#[test]
fn served_bytes_are_the_ones_that_were_tested() {
    let folder = Folder::new();
    let ember = folder.ember();
    let dead = folder.dead(1, 0..PAGES);
    let file = std::fs::File::options().write(true).open(dead.ram.path()).unwrap();
    ember.bank(dead).unwrap();
    let mut served = 0;
    ember.serve(DISK, 7, AfterServing::Release, &mut |bytes| {
        file.write_all_at(&[0xee; BLOCK_BYTES], 7 * PAGE_BYTES).unwrap();
        served = bytes[0];
    });
    assert_eq!(served, fill(7));
}

#[test]
fn overwritten_blocks_are_never_served() {
    let folder = Folder::new();
    let ember = folder.ember();
    ember.bank(folder.dead(1, 0..PAGES)).unwrap();
    ember.forget(DISK, 3..5);
    ember.forget(DISK, 60..u64::MAX);
    let served: Vec<_> = (0..64).filter(|&block| read(&ember, block, AfterServing::Keep).is_some()).collect();
    assert_eq!(served, (0..3).chain(5..60).collect::<Vec<_>>());
    assert_eq!(ember.counts().overwritten, 6);
}

#[test]
fn settle_releases_pages_outside_the_ledger() {
    let folder = Folder::new();
    let ember = folder.ember();
    let dead = folder.dead(1, 10..20);
    (0..PAGES).for_each(|page| folder.write(&dead, page, fill(page)));
    ember.bank(dead).unwrap();
    assert_eq!(ember.settle().unwrap(), 54 * PAGE_BYTES);
    assert_eq!(lock(&ember.sources)[0].ram.residency_bytes().unwrap(), 10 * PAGE_BYTES);
    assert!((10..20).all(|block| read(&ember, block, AfterServing::Keep).is_some()));
}

#[test]
fn untouched_memory_does_not_count_as_released() {
    let folder = Folder::new();
    let ember = folder.ember();
    ember.bank(folder.dead(1, 10..20)).unwrap();
    assert_eq!(ember.settle().unwrap(), 0);
}

#[test]
fn trim_gives_up_oldest_pages_first() {
    let folder = Folder::new();
    let ember = folder.ember();
    ember.bank(folder.dead(1, 0..32)).unwrap();
    ember.bank(folder.dead(2, 32..PAGES)).unwrap();
    ember.settle().unwrap();
    assert_eq!(ember.trim(40 * PAGE_BYTES).unwrap(), 40 * PAGE_BYTES);
    assert_eq!(ember.incarnations(), [2]);
    assert_eq!((ember.counts().trimmed, ember.counts().remaining), (40, 24));
    assert!((0..32).all(|block| read(&ember, block, AfterServing::Keep).is_none()));
    assert_eq!(ember.trim(u64::MAX).unwrap(), 24 * PAGE_BYTES);
    assert_eq!(ember.resident_bytes().unwrap(), 0);
    assert_eq!(std::fs::read_dir(folder.folder.path()).unwrap().count(), 0);
}

#[test]
fn only_the_last_incarnations_are_kept() {
    let folder = Folder::new();
    let ember = folder.ember();
    for number in 1..=6 {
        ember.bank(folder.dead(number, number..number + 1)).unwrap();
    }
    assert_eq!(ember.incarnations(), [3, 4, 5, 6]);
    let served: Vec<_> = (0..8).filter(|&block| read(&ember, block, AfterServing::Keep).is_some()).collect();
    assert_eq!(served, [3, 4, 5, 6]);
    assert_eq!(std::fs::read_dir(folder.folder.path()).unwrap().count(), 8);
}

#[test]
fn assay_drops_bad_pages_and_ends() {
    let folder = Folder::new();
    let ember = folder.ember();
    let dead = folder.dead(1, 0..PAGES);
    (0..8).for_each(|page| folder.write(&dead, page, 0xee));
    ember.bank(dead).unwrap();
    while ember.assay(10) {}
    assert_eq!((ember.counts().tag_mismatch, ember.counts().remaining), (8, 56));
}

/// An ember with one held incarnation. Its ledger knows the first half, and every page holds data.
fn banked_held(folder: &Folder) -> (Ember, Arc<Hold>) {
    let ember = folder.ember();
    let dead = folder.dead(1, 0..PAGES / 2);
    (PAGES / 2..PAGES).for_each(|page| folder.write(&dead, page, fill(page)));
    let hold = Arc::new(Hold::everything(u64::from(PAGES)));
    ember.bank_held(dead, hold.clone()).unwrap();
    (ember, hold)
}

fn resident_pages(ember: &Ember) -> Vec<Range<u64>> {
    lock(&ember.sources)[0].ram.resident_ranges().unwrap()
}

#[test]
fn undumped_pages_are_never_released() {
    let folder = Folder::new();
    let (ember, _hold) = banked_held(&folder);
    assert_eq!(ember.settle().unwrap(), 0);
    assert_eq!(read(&ember, 5, AfterServing::Release), Some(fill(5)));
    ember.forget(DISK, 6..9);
    assert_eq!(ember.trim(u64::MAX).unwrap(), 0);
    ember.extinguish();
    ember.sweep().unwrap();
    assert_eq!(resident_pages(&ember), [Range { start: 0, end: u64::from(PAGES) }]);
    assert_eq!(ember.held_bytes(), u64::from(PAGES) * PAGE_BYTES);
    assert_eq!(read(&ember, 10, AfterServing::Keep), None);
}

#[test]
fn unwanted_pages_go_unless_they_hold_blocks() {
    let folder = Folder::new();
    let (ember, hold) = banked_held(&folder);
    ember.settle().unwrap();
    hold.narrow(&crate::vmcore::Bitmap::of(64, &[30..33, 33..40]));
    assert_eq!(ember.let_go(1, 0..64).unwrap(), 24 * PAGE_BYTES);
    assert_eq!(resident_pages(&ember), [Range { start: 0, end: 40 }]);
    assert_eq!(ember.trim(u64::MAX).unwrap(), 30 * PAGE_BYTES);
    assert_eq!(resident_pages(&ember), [Range { start: 30, end: 40 }]);
}

#[test]
fn dumped_pages_are_released_or_become_trimmable() {
    let folder = Folder::new();
    let (ember, hold) = banked_held(&folder);
    ember.settle().unwrap();
    assert_eq!(ember.trim(4 * PAGE_BYTES).unwrap(), 0);
    assert_eq!(read(&ember, 31, AfterServing::Release), Some(fill(31)));
    ember.sweep().unwrap();
    hold.let_go(28..36);
    assert_eq!(ember.let_go(1, 28..36).unwrap(), 5 * PAGE_BYTES);
    assert_eq!(resident_pages(&ember), [0..31, 36..64]);
    assert_eq!(ember.trim(u64::MAX).unwrap(), 3 * PAGE_BYTES);
    hold.end();
    ember.let_go(1, 0..64).unwrap();
    assert_eq!(ember.trim(u64::MAX).unwrap(), 28 * PAGE_BYTES);
    assert_eq!(std::fs::read_dir(folder.folder.path()).unwrap().count(), 0);
}

#[test]
fn incarnation_without_ledger_can_be_dumped() {
    let folder = Folder::new();
    let ember = folder.ember();
    let mut dead = folder.dead(1, 0..PAGES);
    dead.ledger = None;
    let hold = Arc::new(Hold::everything(u64::from(PAGES)));
    ember.bank_held(dead, hold.clone()).unwrap();
    assert_eq!(ember.settle().unwrap() + ember.trim(u64::MAX).unwrap(), 0);
    assert_eq!(read(&ember, 1, AfterServing::Keep), None);
    hold.let_go(0..8);
    assert_eq!(ember.let_go(1, 0..8).unwrap(), 8 * PAGE_BYTES);
}

#[test]
fn waiting_dumps_survive_later_deaths() {
    let folder = Folder::new();
    let (ember, hold) = banked_held(&folder);
    for number in 2..=6 {
        ember.bank(folder.dead(number, number..number + 1)).unwrap();
    }
    assert_eq!(ember.incarnations(), [1, 4, 5, 6]);
    hold.end();
    ember.bank(folder.dead(7, 7..8)).unwrap();
    assert_eq!(ember.incarnations(), [4, 5, 6, 7]);
}

#[test]
fn ember_of_a_killed_keeper_is_served() {
    let folder = Folder::new();
    {
        let ember = folder.ember();
        ember.bank(folder.dead(4, 0..PAGES)).unwrap();
        assert_eq!(read(&ember, 1, AfterServing::Release), Some(fill(1)));
        // The keeper dies here, before it sweeps.
    }
    let ember = folder.ember();
    ember.bank(Incarnation::open(folder.folder.path(), 4).unwrap()).unwrap();
    assert_eq!(ember.counts().kept, 63);
    assert_eq!(read(&ember, 1, AfterServing::Keep), None);
    assert_eq!(read(&ember, 2, AfterServing::Keep), Some(fill(2)));
}

#[test]
fn memory_without_blocks_stays_until_it_is_settled() {
    let folder = Folder::new();
    let ember = folder.ember();
    ember.bank(folder.dead(1, 0..0)).unwrap();
    ember.sweep().unwrap();
    assert!(ember.unsettled_memory(1).is_some(), "its kernel's own memory can be read");
    ember.settle().unwrap();
    ember.sweep().unwrap();
    assert!(ember.incarnations().is_empty());
}

#[test]
fn what_is_spared_is_released_afterwards() {
    let folder = Folder::new();
    let (ember, hold) = banked_held(&folder);
    let ember = Arc::new(ember);
    let [one, another] = [1, 1].map(|number| Spared::new(&ember, number));
    hold.narrow(&crate::vmcore::Bitmap::of(64, &[0..60, 60..61]));
    assert_eq!(ember.let_go(1, 0..64).unwrap(), 3 * PAGE_BYTES, "the dump does not want them");
    hold.end();
    assert!(!ember.wants_spared());
    assert_eq!((ember.let_go_written(1, 0..64).unwrap(), ember.settle().unwrap()), (0, 0));
    assert!(ember.wants_spared());
    drop(one);
    assert_eq!(ember.settle().unwrap(), 0);
    drop(another);
    assert_eq!(ember.settle().unwrap(), (u64::from(PAGES) / 2 - 3) * PAGE_BYTES);
    assert_eq!(resident_pages(&ember), [Range { start: 0, end: u64::from(PAGES) / 2 }]);
}

#[test]
fn sparing_ends_before_its_reader_does() {
    let folder = Folder::new();
    let (ember, hold) = banked_held(&folder);
    let ember = Arc::new(ember);
    let readers = [1, 1].map(|number| Spared::new(&ember, number));
    hold.end();
    assert_eq!(ember.settle().unwrap(), 0);
    ember.spare_no_more(1);
    assert_eq!(ember.settle().unwrap(), u64::from(PAGES) / 2 * PAGE_BYTES);
    drop(readers);
    assert!(lock(&ember.spared).is_empty());
}

#[test]
fn ledger_of_the_last_guest_is_all_that_is_left() {
    let folder = Folder::new();
    let ember = folder.ember();
    assert!(ember.leave_ledger().is_none());
    ember.bank(folder.dead(1, 0..8)).unwrap();
    ember.bank(folder.dead(2, 8..PAGES)).unwrap();
    let ledger = ember.leave_ledger().unwrap();
    assert_eq!(lock(&ledger).len(), 56);
    assert_eq!((ember.resident_bytes().unwrap(), ember.counts().remaining), (0, 0));
    assert_eq!(std::fs::read_dir(folder.folder.path()).unwrap().count(), 0);
    let (ember, _hold) = banked_held(&folder);
    assert!(ember.leave_ledger().is_none());
    assert_eq!(ember.counts().remaining, u64::from(PAGES / 2), "it waits for its dump");
}
