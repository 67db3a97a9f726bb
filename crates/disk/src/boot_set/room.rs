//! Room: which member has a slot, whose page takes memory, and which gives way when there is none left.
//!
//! A slot is a page of the file and an entry in the ledger. There are twice as many as pages that may take memory, for
//! blocks of zeroes take none. A block that ceases to be zeroes takes a page like any other: during a boot, of what older boots
//! have read; else it is given up itself.

use super::Key;
use super::pages::ZEROES;
use super::state::{Kind, Place, State};
use crate::block::{BLOCK_BYTES, RamPage};

/// Slots without a member.
#[derive(Default)]
pub(super) struct Free {
    pub(super) empty: Vec<u32>,
    /// Their pages take memory, until the next boot has come to its end or another block takes them.
    pub(super) filled: Vec<u32>,
}

impl State {
    /// Whether there is room for a block that is not held, with these bytes.
    pub(super) fn has_room(&self, bytes: Option<&[u8; BLOCK_BYTES]>) -> bool {
        let is_zero = bytes.is_some_and(|bytes| *bytes == ZEROES);
        self.members.len() < self.slots as usize && (is_zero || self.has_page())
    }

    /// Whether there is a page for one more block that takes memory.
    fn has_page(&self) -> bool {
        self.pages.filled_pages() < self.pages_max + self.free.filled.len()
    }

    /// A slot for the bytes of a member, its own if that will do; the ledger does not name it any more.
    pub(super) fn slot_for(&mut self, key: Key, is_zero: bool) -> Option<u32> {
        let own = match self.members.get(&key)?.place {
            Place::Held { slot } | Place::Void { slot, .. } => Some(slot),
            Place::Missing => None,
        };
        if let Some(slot) = own {
            self.ledger.forget_page(RamPage(slot));
            if is_zero || self.pages.is_filled(slot) {
                return Some(slot);
            }
        }
        while !is_zero && !self.has_page() {
            // The one that is evicted may be this one.
            if !self.evict() || !self.members.contains_key(&key) {
                self.give_up(key);
                return None;
            }
        }
        let Free { empty, filled } = &mut self.free;
        let (first, second) = if is_zero { (empty, filled) } else { (filled, empty) };
        // An own one that is empty is as good as another, unless one that takes memory must be used.
        if let Some(slot) = own.filter(|_| first.is_empty()) {
            return Some(slot);
        }
        let slot = first.pop().or_else(|| second.pop())?;
        if let Some(own) = own {
            self.release(own);
        }
        Some(slot)
    }

    pub(super) fn release(&mut self, slot: u32) {
        let Free { empty, filled } = &mut self.free;
        if self.pages.is_filled(slot) { filled.push(slot) } else { empty.push(slot) }
    }

    /// There is no page for it.
    fn give_up(&mut self, key: Key) {
        if self.members.get(&key).is_some_and(|member| member.kind == Kind::Boot) {
            self.tally.of(key.0).no_room += 1;
        }
        self.remove(key);
    }

    /// Gives back the memory of up to `most` unused pages. True if there are more.
    pub(super) fn give_back_free(&mut self, most: usize) -> bool {
        let rest = self.free.filled.len().saturating_sub(most);
        let mut given = 0;
        for slot in self.free.filled.split_off(rest) {
            // A slot that is not given back now is used again, or given back after the next boot.
            given += usize::from(self.pages.give_back(slot).is_ok());
            self.release(slot);
        }
        given > 0 && !self.free.filled.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::BootSet;
    use super::*;
    use crate::block::DiskId;
    use crate::engine::tests::Noise;
    use crate::tag::Tagger;
    use crate::warm::{AfterServing, RequestObserver, WarmSource};

    const DISK: DiskId = DiskId(0);
    const LIMIT: u64 = 68 << 10;
    /// Room for so many that take memory.
    const PAGES: u64 = 13;

    fn set() -> (tempfile::TempDir, BootSet) {
        // Only in memory does a file take just the pages that were written.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let set = BootSet::open(folder.path(), LIMIT, Tagger::new(b"a key like noise")).unwrap();
        set.begin();
        (folder, set)
    }

    fn read(set: &BootSet, blocks: impl IntoIterator<Item = u64>, fill: u8) {
        blocks.into_iter().for_each(|block| set.read_from_image(DISK, block, Some(&[fill; BLOCK_BYTES])));
    }

    fn write(set: &BootSet, block: u64, fill: u8) {
        set.forget(DISK, block..block + 1);
        set.written(DISK, block, 0, &[fill; BLOCK_BYTES]);
    }

    fn held(set: &BootSet, block: u64) -> Option<u8> {
        let mut first = None;
        set.serve(DISK, block, AfterServing::Keep, &mut |bytes| first = Some(bytes[0]))?;
        first
    }

    #[track_caller]
    fn check(set: &BootSet, held_blocks: u64, no_room: u64) {
        let tally = set.plan().disks[&DISK];
        assert_eq!((tally.held, tally.no_room), (held_blocks, no_room));
        assert!(set.resident_bytes() <= LIMIT, "{} bytes are held", set.resident_bytes());
    }

    #[test]
    fn zeroes_take_no_page_of_others() {
        let (folder, set) = set();
        read(&set, 0..PAGES, 7);
        read(&set, 100..100 + PAGES, 0);
        check(&set, 2 * PAGES, 0);
        read(&set, [50], 7);
        read(&set, [150], 0);
        check(&set, 2 * PAGES, 2);
        set.ready();
        drop(set);
        let set = BootSet::open(folder.path(), LIMIT, Tagger::new(b"a key like noise")).unwrap();
        check(&set, 2 * PAGES, 0);
        assert_eq!((held(&set, 3), held(&set, 103)), (Some(7), Some(0)));
    }

    #[test]
    fn overwritten_zeroes_take_a_free_page_or_go() {
        let (_folder, set) = set();
        read(&set, 0..PAGES - 1, 7);
        read(&set, [100, 101], 0);
        set.ready();
        write(&set, 50, 5);
        write(&set, 100, 9);
        assert_eq!([50, 100, 101].map(|block| held(&set, block)), [None, Some(9), Some(0)]);
        write(&set, 101, 9);
        assert_eq!(held(&set, 101), None, "there is no page left");
        check(&set, PAGES, 1);
        write(&set, 3, 0);
        assert_eq!(held(&set, 3), Some(0));
        assert!(set.resident_bytes() <= LIMIT);
    }

    #[test]
    fn overwritten_zeroes_take_older_boots_page() {
        let (_folder, set) = set();
        read(&set, 0..PAGES, 7);
        set.ready();
        set.begin();
        read(&set, [100], 0);
        set.ready();
        set.begin();
        write(&set, 100, 9);
        assert_eq!(held(&set, 100), Some(9));
        assert_eq!((0..PAGES).filter(|&block| held(&set, block).is_none()).count(), 1);
        assert!(set.resident_bytes() <= LIMIT);
    }

    #[test]
    fn held_blocks_are_right_and_within_the_limit() {
        let (_folder, set) = set();
        let mut noise = Noise(13);
        let mut disk: HashMap<u64, u8> = HashMap::new();
        for step in 0..20_000 {
            let (block, fill) = (noise.below(48) as u64, noise.below(3) as u8);
            match noise.below(64) {
                0 => set.begin(),
                1 => drop(set.ready()),
                2 => set.forget(DISK, block..block + 1),
                3..24 => {
                    write(&set, block, fill);
                    disk.insert(block, fill);
                }
                _ => {
                    let is = *disk.get(&block).unwrap_or(&0);
                    match held(&set, block) {
                        Some(found) => assert_eq!(found, is, "step {step}"),
                        None => read(&set, [block], is),
                    }
                }
            }
            assert!(set.resident_bytes() <= LIMIT, "step {step}: {} bytes are held", set.resident_bytes());
        }
        (0..48).for_each(|block| write(&set, block, 0));
        set.begin();
        set.ready();
        assert!(set.resident_bytes() <= 4 * 4096, "only ledger and lists are left: {}", set.resident_bytes());
    }
}
