//! Fast remount: the boot set answers a guest's reads before the ember and the image do.
//!
//! a read: boot set -> ember -> image. No block is in both boot set and ember: a block that the boot set takes leaves
//! the ember, and a dead incarnation's ledger loses the blocks that the boot set holds.
//!
//! Held blocks are valid only while the images are guarded. After a gap in the guard a disk must match its note
//! (`images`); otherwise everything held of it is dropped.

use std::ops::Range;
use std::sync::Arc;

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::BootSet;
use hearth_disk::ledger::Entry;
use hearth_disk::tag::Tag;
use hearth_disk::warm::{AfterServing, RequestObserver, WarmMemory, WarmSource};

use crate::ember::Ember;
use crate::incarnation::{Incarnation, lock};

pub mod saved;

/// All memory that answers reads of a machine's disks.
pub struct WarmSources {
    /// Dead guests' memory.
    pub ember: Arc<Ember>,
    /// `None` if the machine has no `[remount]`.
    pub boot_set: Option<Arc<BootSet>>,
}

impl WarmSources {
    /// This memory, for a disk.
    pub fn for_disk(self: &Arc<Self>) -> WarmMemory {
        let observer = self.boot_set.clone().map(|boot_set| boot_set as Arc<dyn RequestObserver>);
        WarmMemory { source: self.clone(), observer }
    }

    /// Entries of a dead incarnation's ledger whose blocks the boot set holds.
    pub fn in_boot_set(&self, dead: &Incarnation) -> Vec<Entry> {
        let both = self.boot_set.as_ref().zip(dead.ledger.as_ref());
        both.map_or_else(Vec::new, |(boot_set, ledger)| boot_set.common_with(&lock(ledger)))
    }

    /// Removes the boot set's blocks from a dead incarnation that is about to become ember, so that none is kept twice.
    pub fn part(&self, dead: &Incarnation) {
        if let (Some(boot_set), Some(ledger)) = (&self.boot_set, &dead.ledger) {
            boot_set.take_over_from(&mut lock(ledger));
        }
    }
}

impl WarmSources {
    /// Drops everything held of this disk. Returns the number of blocks dropped.
    pub fn forget_disk(&self, disk: DiskId) -> u64 {
        self.boot_set.as_ref().map_or(0, |boot_set| boot_set.forget_disk(disk)) + self.ember.forget_disk(disk)
    }
}

impl WarmSource for WarmSources {
    fn serve(
        &self,
        disk: DiskId,
        block: u64,
        after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        let Some(boot_set) = &self.boot_set else { return self.ember.serve(disk, block, after, copy) };
        if let Some(tag) = boot_set.serve(disk, block, after, copy) {
            return Some(tag);
        }
        if !boot_set.has_room_for(disk, block) {
            return self.ember.serve(disk, block, after, copy).inspect(|_| boot_set.ember_answered(disk, block));
        }
        self.ember.serve(disk, block, AfterServing::Release, &mut |bytes| {
            copy(bytes);
            boot_set.read_from_memory(disk, block, bytes);
        })
    }

    fn may_hold(&self, disk: DiskId, blocks: Range<u64>) -> bool {
        let boot_set = self.boot_set.as_ref();
        boot_set.is_some_and(|set| set.may_hold(disk, blocks.clone())) || self.ember.may_hold(disk, blocks)
    }

    fn forget(&self, disk: DiskId, blocks: Range<u64>) {
        if let Some(boot_set) = &self.boot_set {
            boot_set.forget(disk, blocks.clone());
        }
        self.ember.forget(disk, blocks);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use hearth_disk::block::RamPage;
    use hearth_disk::tag::Tagger;

    use super::*;

    const DISK: DiskId = DiskId(0);
    const RAM_BYTES: u64 = 1 << 20;

    /// Sources whose ember holds blocks 0 to 9 of a dead incarnation.
    fn sources(folder: &Path) -> WarmSources {
        let tagger = Tagger::new(b"a key like noise");
        let ember = Arc::new(Ember::new(folder, tagger.clone()));
        let boot_set = Some(Arc::new(BootSet::open(folder, 1 << 20, tagger.clone()).unwrap()));
        let sources = WarmSources { ember, boot_set };
        let dead = Incarnation::create(folder, 1, RAM_BYTES, true).unwrap();
        let ram = File::options().write(true).open(dead.ram.path()).unwrap();
        for page in 0..10_u8 {
            let bytes = [page + 1; BLOCK_BYTES];
            std::os::unix::fs::FileExt::write_all_at(&ram, &bytes, u64::from(page) * 4096).unwrap();
            lock(dead.ledger.as_ref().unwrap()).record(RamPage(page.into()), DISK, page.into(), tagger.tag(&bytes));
        }
        sources.part(&dead);
        sources.ember.bank(dead).unwrap();
        sources
    }

    fn read(sources: &WarmSources, block: u64) -> Option<u8> {
        let mut first = None;
        sources.serve(DISK, block, AfterServing::Keep, &mut |bytes| first = Some(bytes[0]))?;
        first
    }

    #[test]
    fn no_block_is_held_twice() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let sources = sources(folder.path());
        let boot_set = sources.boot_set.as_ref().unwrap();
        assert_eq!((read(&sources, 0), sources.ember.counts().remaining), (Some(1), 10), "no boot: it stays there");
        boot_set.begin();
        assert_eq!((read(&sources, 1), sources.ember.counts().remaining), (Some(2), 9), "it moves");
        assert_eq!((read(&sources, 1), sources.ember.counts().served), (Some(2), 1));
        let tally = boot_set.plan().disks[&DISK];
        assert_eq!((tally.boot.ember_hits, tally.boot.hits, tally.held), (1, 1, 1));

        let dead = Incarnation::create(folder.path(), 2, RAM_BYTES, true).unwrap();
        let ledger = dead.ledger.clone().unwrap();
        (0..3).for_each(|block| lock(&ledger).record(RamPage(block as u32), DISK, block, Tag(1)));
        sources.part(&dead);
        let left: Vec<u64> = lock(&ledger).entries().map(|entry| entry.block).collect();
        assert_eq!(left, [0, 2]);
    }

    #[test]
    fn forget_disk_drops_only_that_disk_everywhere() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let sources = sources(folder.path());
        let boot_set = sources.boot_set.clone().unwrap();
        boot_set.begin();
        assert_eq!(read(&sources, 3), Some(4));
        assert_eq!(sources.forget_disk(DiskId(1)), 0);
        assert_eq!([3, 4].map(|block| read(&sources, block)), [Some(4), Some(5)]);
        assert_eq!(sources.forget_disk(DISK), 10);
        assert_eq!([0, 3, 4].map(|block| read(&sources, block)), [None; 3]);
        assert!(boot_set.is_empty() && sources.ember.counts().remaining == 0);
        // Blocks of the present image can be held afterwards.
        boot_set.read_from_image(DISK, 3, Some(&[9; BLOCK_BYTES]));
        assert_eq!(read(&sources, 3), Some(9));
    }

    #[test]
    fn forget_drops_blocks_from_every_source() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let sources = sources(folder.path());
        sources.boot_set.as_ref().unwrap().begin();
        assert_eq!(read(&sources, 3), Some(4));
        sources.forget(DISK, 3..5);
        assert_eq!([3, 4, 5].map(|block| read(&sources, block)), [None, None, Some(6)]);
    }
}
