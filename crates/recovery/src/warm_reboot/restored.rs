//! Restored: a guest that was saved by another program comes back in other memory, page by page. What its ledger knew of its pages is
//! carried over.
//!
//! its QEMU ends, and its memory becomes the ember -> another QEMU is about to restore it: the ember gives up its memory, and leaves
//! the ledger -> the guest is in its new memory -> each page is compared with the tag of its block -> the new ledger
//!
//! The ember cannot stay meanwhile. A guest that is restored gets all of its memory before its disks are told of that, and nobody would
//! keep both within the budget. If the restore fails, the next start is cold.
//!
//! Nothing shows whether the guest is the last one, or was saved before that. The tags decide. The guest waits meanwhile, so the time is
//! limited. Blocks that were not reached are forgotten.

use std::sync::Mutex;
use std::time::Instant;

use hearth_disk::block::{BLOCK_BYTES, RamPage};
use hearth_disk::ledger::Ledger;
use hearth_disk::tag::Tagger;
use hearth_memory::{FileOffset, MemoryError, PAGE_BYTES};

use crate::ember::trim_order;
use crate::incarnation::{Incarnation, lock};

/// Pages between two looks at the time.
const PAGES_PER_LOOK: usize = 64;

/// How far it came, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CarriedOver {
    /// The new ledger has their blocks.
    pub taken: u64,
    /// They hold something else now.
    pub refused: u64,
    /// There was no time for them.
    pub left: u64,
}

/// Records in the restored guest's ledger which blocks its pages still hold, of those that the ledger from before knew. The newest come
/// first, in the time that there is.
pub fn carry_over(
    before: &Mutex<Ledger>,
    restored: &Incarnation,
    tagger: &Tagger,
    until: Instant,
) -> Result<CarriedOver, MemoryError> {
    let mut carried = CarriedOver::default();
    let Some(ledger) = &restored.ledger else { return Ok(carried) };
    let before = lock(before);
    let oldest_first = trim_order(&before);
    let mut found = Vec::new();
    let mut bytes = [0; BLOCK_BYTES];
    for (at, page) in oldest_first.iter().rev().enumerate() {
        if at % PAGES_PER_LOOK == 0 && Instant::now() >= until {
            carried.left = (oldest_first.len() - at) as u64;
            break;
        }
        let Some(entry) = before.entry(RamPage(*page)) else { continue };
        let is_there = u64::from(entry.page.0) < restored.ram.pages();
        if is_there {
            restored.ram.read(FileOffset(u64::from(entry.page.0) * PAGE_BYTES), &mut bytes)?;
        }
        match is_there && tagger.tag(&bytes) == entry.tag {
            true => found.push(*page),
            false => carried.refused += 1,
        }
    }
    carried.taken = found.len() as u64;
    // A ledger takes what it gets later for newer.
    let mut ledger = lock(ledger);
    let entries = found.into_iter().rev().filter_map(|page| before.entry(RamPage(page)));
    entries.for_each(|entry| ledger.record(entry.page, entry.disk, entry.block, entry.tag));
    Ok(carried)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use hearth_disk::block::DiskId;
    use hearth_disk::ledger::Entry;

    use super::*;

    const PAGES: u32 = 1024;

    fn contents(page: u32) -> [u8; BLOCK_BYTES] {
        [(page % 251) as u8 + 1; BLOCK_BYTES]
    }

    /// A guest of this many pages; each holds the block of its number.
    fn guest(folder: &std::path::Path, number: u32, pages: u32) -> (Incarnation, File) {
        let guest = Incarnation::create(folder, number, u64::from(pages) * PAGE_BYTES, true).unwrap();
        let ram = File::options().write(true).open(guest.ram.path()).unwrap();
        (0..pages).for_each(|page| ram.write_all_at(&contents(page), u64::from(page) * PAGE_BYTES).unwrap());
        (guest, ram)
    }

    /// Carries over what was known of a guest with `PAGES` pages to one with `pages`, of which every third holds something else.
    fn carry(pages: u32, time: Duration) -> (CarriedOver, Vec<Entry>) {
        let (folder, tagger) = (tempfile::tempdir_in("/dev/shm").unwrap(), Tagger::new(b"a key like noise"));
        let (saved, _) = guest(folder.path(), 1, PAGES);
        let before = saved.ledger.unwrap();
        for page in 0..PAGES {
            lock(&before).record(RamPage(page), DiskId(3), u64::from(page), tagger.tag(&contents(page)));
        }
        let (restored, ram) = guest(folder.path(), 2, pages);
        for page in (0..pages).step_by(3) {
            ram.write_all_at(&[0xff; 8], u64::from(page) * PAGE_BYTES + 4000).unwrap();
        }
        let carried = carry_over(&before, &restored, &tagger, Instant::now() + time).unwrap();
        let ledger = lock(restored.ledger.as_ref().unwrap());
        let mut entries: Vec<_> = ledger.entries().collect();
        for entry in &entries {
            let page = entry.page.0;
            assert!(!page.is_multiple_of(3) && entry.block == u64::from(page) && entry.disk == DiskId(3), "{entry:?}");
            assert!(entry.tag == tagger.tag(&contents(page)), "{entry:?}");
        }
        entries.sort_by(|one, other| ledger.older_first(one.age, other.age).then(one.page.0.cmp(&other.page.0)));
        assert!(entries.is_sorted_by_key(|entry| entry.page.0), "the order of their ages stays");
        drop(ledger);
        (carried, entries)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn pages_that_hold_their_blocks_are_known_again() {
        let (carried, entries) = carry(PAGES, LONG);
        assert_eq!(carried, CarriedOver { taken: 682, refused: 342, left: 0 });
        assert_eq!(entries.len(), 682);
    }

    #[test]
    fn pages_that_are_not_there_are_refused() {
        let (carried, entries) = carry(PAGES / 2, LONG);
        assert_eq!(carried, CarriedOver { taken: 341, refused: 683, left: 0 });
        assert_eq!(entries.len(), 341);
    }

    #[test]
    fn nothing_is_carried_over_without_time() {
        assert_eq!(carry(PAGES, Duration::ZERO).0, CarriedOver { left: u64::from(PAGES), ..CarriedOver::default() });
    }
}
