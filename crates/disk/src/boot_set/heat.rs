//! Heat: blocks that are read again and again after ready are held too, as far as boots leave room.
//!
//! File systems read much of their metadata late: a folder when it is first asked for, a bitmap at the first write. A small
//! read that the image answered in two different boots is taken for that, whoever made it.

use std::collections::HashMap;

use super::state::{Kind, Member, Place, Reads, State};
use super::{BLOCK, Key};
use crate::block::BLOCK_BYTES;
use crate::tag::Tagger;

/// Longer reads are of data, or read-ahead.
pub(super) const BYTES_MAX: u64 = 4 * BLOCK;
/// Number of boots for which a block that nobody reads is remembered.
const BOOTS: u32 = 2;

/// Blocks that were read late, and in which boot.
#[derive(Default)]
pub(super) struct Heat {
    seen: HashMap<Key, u32>,
}

impl Heat {
    pub(super) fn capacity(&self) -> usize {
        self.seen.capacity()
    }

    /// Whether it was read in an earlier boot as well. At most `most` blocks are remembered, because the guest decides what it
    /// reads.
    fn is_hot(&mut self, key: Key, boot: u32, most: usize) -> bool {
        if self.seen.len() >= most && !self.seen.contains_key(&key) {
            return false;
        }
        self.seen.insert(key, boot).is_some_and(|before| before < boot)
    }
}

impl State {
    /// A small read after ready that the image answered.
    pub(super) fn read_late(&mut self, key: Key, bytes: Option<&[u8; BLOCK_BYTES]>, tagger: &Tagger) {
        if !self.members.contains_key(&key) {
            let is_hot = self.heat.is_hot(key, self.boot, self.slots as usize);
            if !is_hot || !self.admit_late(key, bytes) {
                return;
            }
            self.heat.seen.remove(&key);
        }
        if let Some(bytes) = bytes {
            self.hold(key, bytes, tagger.tag(bytes));
        }
    }

    /// Makes a block a member for its heat, if there is room.
    pub(super) fn admit_late(&mut self, key: Key, bytes: Option<&[u8; BLOCK_BYTES]>) -> bool {
        let has_room = self.has_room(bytes);
        if has_room {
            let (kind, reads) = (Kind::Late, Reads::default());
            let member = Member { boot: self.boot, order: self.order, kind, reads, place: Place::Missing };
            self.members.insert(key, member);
        }
        has_room
    }

    /// A boot begins: what has cooled down is forgotten.
    pub(super) fn cool_down(&mut self) {
        let oldest = self.boot.saturating_sub(BOOTS);
        self.heat.seen.retain(|_, boot| *boot >= oldest);
        self.remove_all(|member| member.kind == Kind::Late && member.boot < oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::super::BootSet;
    use super::*;
    use crate::block::DiskId;
    use crate::warm::{AfterServing, RequestObserver, WarmSource};

    const DISK: DiskId = DiskId(0);

    fn set(limit_bytes: u64) -> (tempfile::TempDir, BootSet) {
        let folder = tempfile::tempdir().unwrap();
        let set = BootSet::open(folder.path(), limit_bytes, Tagger::new(b"a key like noise")).unwrap();
        (folder, set)
    }

    /// A boot that reads these blocks, and these when it is over.
    fn boot(set: &BootSet, early: &[u64], late: &[u64]) {
        set.begin();
        read(set, early);
        set.ready();
        read(set, late);
    }

    /// As a disk does: what is not held comes from the image.
    fn read(set: &BootSet, blocks: &[u64]) {
        for &block in blocks {
            if !is_held(set, block) {
                set.read_from_image(DISK, block, Some(&[block as u8; BLOCK_BYTES]));
            }
        }
    }

    fn is_held(set: &BootSet, block: u64) -> bool {
        set.serve(DISK, block, AfterServing::Keep, &mut |bytes| assert_eq!(bytes[0], block as u8)).is_some()
    }

    #[test]
    fn blocks_read_late_by_two_boots_are_held() {
        let (_folder, set) = set(1 << 20);
        assert!(!set.wants(BYTES_MAX + 1) && set.wants(BYTES_MAX));
        boot(&set, &[1], &[5, 5, 6]);
        assert!(!is_held(&set, 5), "twice in one boot is once");
        boot(&set, &[1], &[5, 7]);
        assert_eq!([5, 6, 7].map(|block| is_held(&set, block)), [true, false, false]);
        let tally = set.plan().disks[&DISK];
        assert_eq!((tally.blocks, tally.held, tally.late), (1, 1, 1), "the next boot is not expected to read it");
        boot(&set, &[1, 5], &[]);
        let tally = set.plan().disks[&DISK];
        assert_eq!((tally.blocks, tally.late, tally.boot.hits), (2, 0, 2), "until one does");
    }

    #[test]
    fn unread_blocks_cool_down() {
        let (_folder, set) = set(1 << 20);
        boot(&set, &[1], &[5]);
        boot(&set, &[1], &[5]);
        (0..3).for_each(|_| boot(&set, &[1], &[]));
        assert_eq!(set.plan().disks[&DISK].late, 0);
        assert!(!is_held(&set, 5));
    }

    #[test]
    fn a_boot_comes_before_heat() {
        // Room for thirteen blocks.
        let (_folder, set) = set(68 << 10);
        let early: Vec<u64> = (100..112).collect();
        boot(&set, &early, &[5, 6]);
        boot(&set, &early, &[5, 6]);
        assert_eq!([5, 6].map(|block| is_held(&set, block)), [true, false], "there is room for one");
        let early: Vec<u64> = (100..113).collect();
        boot(&set, &early, &[]);
        assert!(early.iter().all(|&block| is_held(&set, block)) && !is_held(&set, 5));
    }
}
