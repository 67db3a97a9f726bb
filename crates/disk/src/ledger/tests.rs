//! The ledger against a simple model, killed keepers, and hostile files.

use std::collections::HashMap;
use std::os::unix::fs::{FileExt, MetadataExt};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::populate::Small;

const DISK: DiskId = DiskId(0);

fn new_ledger(ram_pages: u32) -> (TempDir, Ledger) {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(&folder.path().join("ledger"), ram_pages).unwrap();
    (folder, ledger)
}

/// The same promises, kept by two maps.
#[derive(Default)]
struct Model {
    blocks: HashMap<u32, (DiskId, u64, Tag)>,
    pages: HashMap<(DiskId, u64), u32>,
}

impl Model {
    fn record(&mut self, page: u32, disk: DiskId, block: u64, tag: Tag) {
        self.forget_page(page);
        if let Some(old) = self.pages.remove(&(disk, block)) {
            self.blocks.remove(&old);
        }
        self.blocks.insert(page, (disk, block, tag));
        self.pages.insert((disk, block), page);
    }

    fn forget_page(&mut self, page: u32) {
        if let Some((disk, block, _)) = self.blocks.remove(&page) {
            self.pages.remove(&(disk, block));
        }
    }

    fn forget(&mut self, disk: DiskId, blocks: Range<u64>) {
        let gone: Vec<u32> = self
            .pages
            .iter()
            .filter_map(|(&(d, block), &page)| (d == disk && blocks.contains(&block)).then_some(page))
            .collect();
        gone.into_iter().for_each(|page| self.forget_page(page));
    }

    fn assert_equals(&self, ledger: &Ledger) {
        assert_eq!(ledger.len(), self.blocks.len());
        let listed: HashMap<u32, (DiskId, u64, Tag)> =
            ledger.entries().map(|entry| (entry.page.0, (entry.disk, entry.block, entry.tag))).collect();
        assert_eq!(listed, self.blocks);
        for (&(disk, block), &page) in &self.pages {
            let found = ledger.find(disk, block).expect("the ledger finds what the model holds");
            assert_eq!((found.page.0, found.tag), (page, self.blocks[&page].2));
            assert_eq!(ledger.entry(RamPage(page)), Some(found));
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Record(u32, DiskId, u64, u64),
    Forget(DiskId, Range<u64>),
    ForgetPage(u32),
    Reopen,
}

fn any_action(ram_pages: u32) -> impl Strategy<Value = Action> {
    let disk = (0..3u8).prop_map(|disk| DiskId(disk * 127));
    let block = prop_oneof![8 => 0..60u64, 1 => Just(BLOCK_MAX)];
    let far = prop_oneof![3 => 1..8u64, 1 => Just(u64::MAX / 2)];
    prop_oneof![
        12 => (0..ram_pages, disk.clone(), block.clone(), any::<u64>()).prop_map(|(p, d, b, t)| Action::Record(p, d, b, t)),
        3 => (disk, block, far).prop_map(|(d, start, length)| Action::Forget(d, start..start.saturating_add(length))),
        2 => (0..ram_pages).prop_map(Action::ForgetPage),
        1 => Just(Action::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn behaves_as_two_maps(
        (ram_pages, actions) in (1..70u32).prop_flat_map(|n| (Just(n), prop::collection::vec(any_action(n), 1..150)))
    ) {
        let (folder, mut ledger) = new_ledger(ram_pages);
        let mut model = Model::default();
        for action in actions {
            match action {
                Action::Record(page, disk, block, tag) => {
                    ledger.record(RamPage(page), disk, block, Tag(tag));
                    model.record(page, disk, block, Tag(tag));
                }
                Action::Forget(disk, blocks) => {
                    ledger.forget(disk, blocks.clone());
                    model.forget(disk, blocks);
                }
                Action::ForgetPage(page) => {
                    ledger.forget_page(RamPage(page));
                    model.forget_page(page);
                }
                Action::Reopen => {
                    drop(ledger);
                    ledger = Ledger::open(&folder.path().join("ledger")).unwrap();
                    prop_assert_eq!(ledger.dropped_at_open(), 0);
                }
            }
            model.assert_equals(&ledger);
        }
    }
}

#[test]
fn full_ledger_takes_24_bytes_a_page() {
    let pages = 100_003;
    let (_folder, mut ledger) = new_ledger(pages);
    for page in 0..pages {
        ledger.record(RamPage(page), DISK, u64::from(page) * 7, Tag(page.into()));
    }
    assert_eq!(ledger.len(), pages as usize);
    assert!(ledger.bytes_per_page() <= 24.0, "{} bytes a page", ledger.bytes_per_page());
    // Against the file as the file system counts it, not only against our own sum.
    let on_disk = ledger.path().metadata().unwrap().blocks() * 512;
    let in_memory = ledger.index.bytes() as u64;
    assert!((on_disk + in_memory) as f64 / f64::from(pages) <= 24.0, "{on_disk} + {in_memory} bytes");
    for page in (0..pages).step_by(997) {
        assert_eq!(ledger.find(DISK, u64::from(page) * 7).unwrap().page, RamPage(page));
    }
    ledger.forget(DISK, 0..u64::MAX);
    assert!(ledger.is_empty());
}

#[test]
fn an_untouched_ledger_takes_no_space() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("ledger");
    let mut ledger = Ledger::create(&path, 16 << 20).unwrap();
    ledger.record(RamPage(5), DISK, 1, Tag(2));
    ledger.forget(DISK, 10..u64::MAX);
    assert_eq!((ledger.entry(RamPage(9_999_999)), ledger.entries().count()), (None, 1));
    drop(ledger);
    let ledger = Ledger::open(&path).unwrap();
    assert_eq!(ledger.find(DISK, 1).unwrap().page, RamPage(5));
    assert!(path.metadata().unwrap().blocks() * 512 <= 2 * 4096, "head and one part");
}

#[test]
fn full_folder_costs_entries_only() {
    // Room for the head and two parts of four.
    let Some(small) = Small::new("full_folder_costs_entries_only", "size=12k") else { return };
    let path = small.path().join("ledger");
    let mut ledger = Ledger::create(&path, 1024).unwrap();
    let record_all = |ledger: &mut Ledger| {
        (0..1024).step_by(64).for_each(|page| ledger.record(RamPage(page), DISK, page.into(), Tag(page.into())));
    };
    record_all(&mut ledger);
    assert_eq!((ledger.len(), ledger.unrecorded()), (8, 8));
    assert_eq!((ledger.entry(RamPage(448)).map(|entry| entry.block), ledger.find(DISK, 512)), (Some(448), None));
    drop(ledger);
    let mut ledger = Ledger::open(&path).unwrap();
    assert_eq!((ledger.len(), ledger.entries().count()), (8, 8));
    ledger.forget(DISK, 0..u64::MAX);
    let options = "remount,size=64k";
    let remount = std::process::Command::new("mount").args(["-o", options]).arg(small.path()).status();
    assert!(remount.unwrap().success());
    record_all(&mut ledger);
    assert_eq!((ledger.len(), ledger.unrecorded()), (16, 0), "there is room again");
    drop(ledger);
    std::fs::write(small.path().join("other"), [1; 64 << 10]).unwrap_err();
    let error = Ledger::create(&small.path().join("next"), 1024).map(|_| ()).unwrap_err();
    assert!(matches!(error, LedgerError::Access { action: "create", .. }), "{error}");
}

#[test]
fn keeper_killed_anywhere_leaves_no_false_entry() {
    let (folder, mut ledger) = new_ledger(10);
    ledger.record(RamPage(3), DISK, 30, Tag(1));
    let path = folder.path().join("ledger");
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let line = 4096 + 3 * 16;
    let mut old = [0; 16];
    file.read_exact_at(&mut old, line).unwrap();
    // The states that `Table::set` passes through when it puts block 31, tag 2 in the place of block 30, tag 1.
    for (place, tag) in [(0u64, 1u64), (0, 2)] {
        file.write_all_at(&place.to_le_bytes(), line).unwrap();
        file.write_all_at(&tag.to_le_bytes(), line + 8).unwrap();
        let seen = Ledger::open(&path).unwrap();
        assert_eq!((seen.len(), seen.entry(RamPage(3)), seen.dropped_at_open()), (0, None, 0));
    }
}

#[test]
fn new_page_of_block_voids_old_one() {
    let (_folder, mut ledger) = new_ledger(10);
    ledger.record(RamPage(1), DISK, 5, Tag(1));
    ledger.record(RamPage(2), DISK, 5, Tag(2));
    assert_eq!(ledger.entry(RamPage(1)), None);
    assert_eq!(ledger.find(DISK, 5).map(|entry| (entry.page, entry.tag)), Some((RamPage(2), Tag(2))));
}

#[test]
fn unrecordable_blocks_are_forgotten() {
    let (_folder, mut ledger) = new_ledger(10);
    ledger.record(RamPage(1), DISK, 5, Tag(1));
    ledger.record(RamPage(1), DISK, BLOCK_MAX + 1, Tag(2));
    assert!(ledger.is_empty(), "the page no longer holds block 5");
    ledger.record(RamPage(1), DISK, 5, Tag(1));
    ledger.record(RamPage(10), DISK, 5, Tag(3));
    assert!(ledger.is_empty(), "block 5 was seen with another tag, in a page outside the RAM");
    assert_eq!(ledger.find(DISK, u64::MAX), None);
    assert_eq!(ledger.entry(RamPage(u32::MAX)), None);
    ledger.forget(DISK, u64::MAX - 1..u64::MAX);
}

#[test]
fn ages_order_entries_even_across_the_wrap() {
    let (folder, mut ledger) = new_ledger(512);
    ledger.table.set_age(Age(u16::MAX));
    for page in 0..6 {
        ledger.record(RamPage(page), DISK, page.into(), Tag(0));
    }
    let ages: Vec<u16> = ledger.entries().map(|entry| entry.age.0).collect();
    assert_eq!(ages, [u16::MAX, u16::MAX, 0, 0, 1, 1]);
    let mut entries: Vec<Entry> = ledger.entries().collect();
    entries.reverse();
    entries.sort_by(|one, other| ledger.older_first(one.age, other.age));
    assert_eq!(entries.iter().map(|entry| entry.age.0).collect::<Vec<_>>(), ages);
    drop(ledger);
    assert_eq!(Ledger::open(&folder.path().join("ledger")).unwrap().age(), Age(2), "time goes on where it was");
}

#[test]
fn hostile_tables_are_cleaned_not_trusted() {
    let (folder, mut ledger) = new_ledger(300);
    for page in 0..3 {
        ledger.record(RamPage(page), DISK, 100 + u64::from(page), Tag(page.into()));
    }
    drop(ledger);
    let path = folder.path().join("ledger");
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut first = [0; 16];
    file.read_exact_at(&mut first, 4096).unwrap();
    file.write_all_at(&first, 4096 + 7 * 16).unwrap();
    file.write_all_at(&(0xff00_0000_0000_0000u64).to_le_bytes(), 4096 + 8 * 16).unwrap();
    file.write_all_at(&[0xff; 16], 4096 + 299 * 16).unwrap();
    for dropped in [2, 0] {
        let ledger = Ledger::open(&path).unwrap();
        assert_eq!((ledger.len(), ledger.dropped_at_open()), (4, dropped), "a second opening finds it clean");
        assert_eq!(ledger.find(DISK, 100).unwrap().page, RamPage(0));
        assert_eq!(ledger.find(DiskId(255), BLOCK_MAX).unwrap().page, RamPage(299));
    }
}

#[test]
fn a_table_full_of_noise_opens() {
    let (folder, ledger) = new_ledger(1000);
    drop(ledger);
    let path = folder.path().join("ledger");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let noise: Vec<u8> = (0..16_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    file.write_all_at(&noise, 4096).unwrap();
    let mut ledger = Ledger::open(&path).unwrap();
    assert_eq!(ledger.entries().count(), ledger.len());
    for disk in 0..=255 {
        ledger.forget(DiskId(disk), 0..u64::MAX);
    }
    assert_eq!((ledger.len(), ledger.entries().count()), (0, 0));
}

#[track_caller]
fn refused(change: impl FnOnce(&std::fs::File), expect: &str) {
    let (folder, ledger) = new_ledger(10);
    drop(ledger);
    let path = folder.path().join("ledger");
    change(&std::fs::File::options().write(true).open(&path).unwrap());
    let error = Ledger::open(&path).map(|_| ()).unwrap_err().to_string();
    assert_eq!(error.replace(path.to_str().unwrap(), "L"), expect);
}

#[test]
fn damaged_files_are_refused_by_name() {
    refused(|file| file.set_len(0).unwrap(), "L is not a ledger; remove it to start cold");
    refused(|file| file.write_all_at(b"QFI", 0).unwrap(), "L is not a ledger; remove it to start cold");
    refused(
        |file| file.write_all_at(&[2], 8).unwrap(),
        "ledger L has version 2, this is version 1; remove it to start cold",
    );
    refused(|file| file.write_all_at(&[11], 12).unwrap(), "the head of ledger L is damaged; remove it to start cold");
    refused(
        |file| file.set_len(4096 + 100).unwrap(),
        "ledger L is 4196 bytes long and should be 4256; remove it to start cold",
    );
}

#[test]
fn ledger_needs_new_file_and_ram() {
    let (_folder, ledger) = new_ledger(10);
    assert!(matches!(
        Ledger::create(ledger.path(), 10).map(|_| ()),
        Err(LedgerError::Access { action: "create", source, .. }) if source.kind() == io::ErrorKind::AlreadyExists
    ));
    assert!(matches!(Ledger::create(Path::new("x"), 0).map(|_| ()), Err(LedgerError::RamSize { .. })));
    assert!(matches!(
        Ledger::open(&ledger.path().with_extension("missing")).map(|_| ()),
        Err(LedgerError::Access { action: "open", .. })
    ));
}
