//! Written lately: blocks that small writes have put on the disk, kept because the next boot may read them first.
//!
//! What a boot after a crash reads and no boot has read before was written since: the journal that is replayed, and
//! bitmaps, tables and folders that the last replay, or the life after it, has put in their places. Nobody can tell them
//! from data, so they are guests here: they take what the boots leave of the limit, half of it at most, and the one that was
//! written longest ago goes first, whoever wants its place. A boot that comes to its end without having read one has shown
//! that it is not needed, unless it was written during that boot or after.
//!
//! Logs of XFS are written sector by sector, one after the other: the first bytes of a block wait until the rest has followed.

use std::collections::BTreeMap;

use super::state::{Kind, Member, Place, Reads, State};
use super::{BLOCK, Key};
use crate::block::BLOCK_BYTES;
use crate::tag::Tag;

/// Longer writes are of data. Those of a journal are as long as what one commit holds of metadata.
pub(super) const BYTES_MAX: u64 = 16 * BLOCK;

/// Who was written when.
#[derive(Default)]
pub(super) struct Written {
    turns: BTreeMap<u64, Key>,
    next: u64,
}

impl Written {
    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub(super) fn enter(&mut self, key: Key) -> u64 {
        self.next += 1;
        self.turns.insert(self.next, key);
        self.next
    }

    pub(super) fn leave(&mut self, turn: u64) {
        self.turns.remove(&turn);
    }

    pub(super) fn clear(&mut self) {
        self.turns.clear();
    }
}

impl State {
    /// A block that is no member was written, or its first bytes were, by a small write.
    pub(super) fn keep_written(&mut self, key: Key, bytes: &[u8; BLOCK_BYTES], tag: Tag, known: usize) {
        let is_full = self.written.turns.len() >= self.pages_max / 2 || !self.has_room(Some(bytes));
        if is_full && !self.evict_written() {
            return;
        }
        let kind = Kind::Written { turn: self.written.enter(key) };
        let reads = Reads::default();
        self.members.insert(key, Member { boot: self.boot, order: self.order, kind, reads, place: Place::Missing });
        self.keep(key, bytes, tag, known);
    }

    /// One that is kept was written again.
    pub(super) fn renew_written(&mut self, key: Key) {
        let Some(member) = self.members.get_mut(&key) else { return };
        if let Kind::Written { turn } = &mut member.kind {
            self.written.leave(*turn);
            *turn = self.written.enter(key);
            member.boot = self.boot;
        }
    }

    /// True: there is room for another block.
    pub(super) fn evict_written(&mut self) -> bool {
        let Some(key) = self.written.turns.first_key_value().map(|(_, key)| *key) else { return false };
        self.remove(key);
        true
    }

    /// A boot has come to its end, and did without what was written before it.
    pub(super) fn drop_written_before_boot(&mut self) {
        let is_old = |key: &&Key| self.members.get(key).is_some_and(|member| member.boot < self.boot);
        let old: Vec<Key> = self.written.turns.values().filter(is_old).copied().collect();
        old.into_iter().for_each(|key| self.remove(key));
    }
}

#[cfg(test)]
mod tests {
    use super::super::BootSet;
    use super::*;
    use crate::block::DiskId;
    use crate::tag::Tagger;
    use crate::warm::{AfterServing, RequestObserver, WarmSource};

    const DISK: DiskId = DiskId(0);

    /// Room for thirteen blocks, and so for six of those that were written.
    fn set() -> (tempfile::TempDir, BootSet) {
        let folder = tempfile::tempdir().unwrap();
        let set = BootSet::open(folder.path(), 68 << 10, Tagger::new(b"a key like noise")).unwrap();
        (folder, set)
    }

    fn boot(set: &BootSet, blocks: impl IntoIterator<Item = u64>) {
        set.begin();
        for block in blocks {
            if !is_held(set, block) {
                set.read_from_image(DISK, block, Some(&[block as u8; BLOCK_BYTES]));
            }
        }
        set.ready();
    }

    /// As a disk does.
    fn write(set: &BootSet, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            write_of(set, block, BLOCK);
        }
    }

    fn write_of(set: &BootSet, block: u64, request_bytes: u64) {
        set.forget(DISK, block..block + 1);
        set.written(DISK, block, 0, &[block as u8; BLOCK_BYTES], request_bytes);
    }

    fn is_held(set: &BootSet, block: u64) -> bool {
        set.serve(DISK, block, AfterServing::Keep, &mut |bytes| assert_eq!(bytes[0], block as u8)).is_some()
    }

    fn held(set: &BootSet, blocks: impl IntoIterator<Item = u64>) -> Vec<u64> {
        blocks.into_iter().filter(|&block| is_held(set, block)).collect()
    }

    #[test]
    fn the_next_boot_finds_what_was_written_lately() {
        let (_folder, set) = set();
        boot(&set, [1]);
        write_of(&set, 20, BYTES_MAX);
        write_of(&set, 21, BYTES_MAX + BLOCK);
        set.written(DISK, 22, 512, &[22; 512], 512);
        assert_eq!(held(&set, 20..23), [20], "of a long write, or of a block's middle, nothing is kept");
        let tally = set.plan().disks[&DISK];
        assert_eq!((tally.blocks, tally.held, tally.written), (1, 1, 1), "no boot is known to read it");
        boot(&set, [1, 20]);
        let tally = set.plan().disks[&DISK];
        assert_eq!((tally.boot.hits, tally.boot.misses, tally.blocks, tally.written), (2, 0, 2, 0), "until one does");
    }

    #[test]
    fn what_was_written_longest_ago_goes_first() {
        let (_folder, set) = set();
        boot(&set, [1]);
        write(&set, [20, 21, 22, 23, 24, 25, 20, 26, 27]);
        assert_eq!(held(&set, 20..28), [20, 23, 24, 25, 26, 27]);
    }

    #[test]
    fn what_boots_read_comes_first() {
        let (_folder, set) = set();
        boot(&set, 100..110);
        write(&set, 20..26);
        assert_eq!(
            held(&set, (20..26).chain(100..110)),
            Vec::from_iter((23..26).chain(100..110)),
            "there is room for three"
        );
        boot(&set, 100..113);
        assert_eq!(held(&set, (20..26).chain(100..113)), Vec::from_iter(100..113));
        write(&set, [20]);
        assert!(!is_held(&set, 20));
    }

    #[test]
    fn what_a_whole_boot_did_without_is_given_up() {
        let (_folder, set) = set();
        boot(&set, [1]);
        write(&set, [20]);
        set.begin();
        write(&set, [21]);
        assert_eq!(held(&set, [1]), [1]);
        set.begin();
        assert_eq!(set.plan().disks[&DISK].written, 2, "that boot did not come to its end");
        set.ready();
        assert_eq!(set.plan().disks[&DISK].written, 0);
        set.begin();
        write(&set, [22]);
        set.ready();
        assert_eq!(set.plan().disks[&DISK].written, 1, "the boot itself has written it");
    }

    #[test]
    fn a_log_that_is_written_sector_by_sector_is_held_block_by_block() {
        let (_folder, set) = set();
        boot(&set, [1]);
        let write = |at: u64, fill: u8, bytes: usize| {
            set.forget(DISK, at / BLOCK..(at + bytes as u64).div_ceil(BLOCK));
            set.written(DISK, at / BLOCK, (at % BLOCK) as usize, &vec![fill; bytes], bytes as u64);
        };
        let at = 20 * BLOCK;
        write(at, 20, 1536);
        write(at + 1536, 20, 512);
        assert!(!is_held(&set, 20), "the rest is not known");
        write(at + 1024, 20, 1536);
        write(at + 2560, 20, 1536);
        assert_eq!(held(&set, [20]), [20]);
        write(at + BLOCK, 21, 512);
        write(at + BLOCK + 1024, 21, 3072);
        assert!(!is_held(&set, 21), "there is a gap");
        write(at + BLOCK, 21, 4096);
        assert_eq!(held(&set, [21]), [21]);
    }

    #[test]
    fn in_doubt_nothing_is_left_of_it() {
        let (_folder, set) = set();
        boot(&set, [1]);
        write(&set, [20, 21]);
        set.forget(DISK, 20..21);
        assert!(!is_held(&set, 20), "a change is on its way");
        set.forget(DISK, 20..21);
        set.forget(DISK, 21..22);
        set.written(DISK, 21, 8, &[9; 8], 8);
        let mut bytes = [0; BLOCK_BYTES];
        set.serve(DISK, 21, AfterServing::Keep, &mut |found| bytes = *found);
        assert_eq!((bytes[7], bytes[8], bytes[16]), (21, 9, 21), "laid over the old copy");
        assert_eq!(set.plan().disks[&DISK].written, 1);
    }

    #[test]
    fn a_keeper_that_takes_over_knows_what_no_boot_has_read() {
        let (folder, set) = set();
        boot(&set, [1, 2]);
        write(&set, [20, 2]);
        drop(set);
        let set = BootSet::open(folder.path(), 68 << 10, Tagger::new(b"a key like noise")).unwrap();
        let tally = set.plan().disks[&DISK];
        assert_eq!((tally.blocks, tally.held, tally.written), (2, 2, 1));
        set.begin();
        assert_eq!(held(&set, [1, 2, 20]), [1, 2, 20]);
        set.ready();
        drop(set);
        let set = BootSet::open(folder.path(), 68 << 10, Tagger::new(b"a key like noise")).unwrap();
        assert_eq!(set.plan().disks[&DISK].blocks, 3, "and what has become a member");
    }
}
