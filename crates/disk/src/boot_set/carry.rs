//! Carrying over: with another limit, what an earlier keeper held is taken over as far as it fits.
//!
//! what boots have read, the first read first -> what is held for its heat -> the rest is left out
//!
//! The old files have no names any more when the new ones are made: a keeper that is killed in between leaves a boot set that
//! holds less. Page by page the old one gives up what the new one takes.

use super::Key;
use super::pages::ZEROES;
use super::state::{Kind, Member, Place, State};
use crate::block::BLOCK_BYTES;
use crate::tag::{Tag, Tagger};

impl State {
    /// Takes over the blocks of `old` into this empty state. Returns how many are left out.
    pub(super) fn carry_over(&mut self, mut old: Self, tagger: &Tagger) -> u64 {
        self.damaged = old.damaged;
        self.take_for_read();
        let rank = |member: &Member| (member.kind != Kind::Boot, member.order);
        let mut ranked: Vec<_> = old.members.iter().map(|(key, member)| (rank(member), *key)).collect();
        ranked.sort_unstable_by_key(|(rank, _)| *rank);
        let blocks = ranked.len();
        for ((is_late, _), key) in ranked {
            let Some((bytes, tag)) = old.take_out(key, tagger) else { continue };
            let is_taken =
                if is_late { self.admit_late(key, Some(&bytes)) } else { self.admit(key, Some(&bytes)).is_some() };
            if is_taken {
                self.hold(key, &bytes, tag);
            }
        }
        let held = self.members.values().filter(|member| matches!(member.place, Place::Held { .. }));
        (blocks - held.count()) as u64
    }

    /// Takes out a copy and gives its memory back.
    fn take_out(&mut self, key: Key, tagger: &Tagger) -> Option<([u8; BLOCK_BYTES], Tag)> {
        let Place::Held { slot } = self.members.get(&key)?.place else { return None };
        let mut bytes = ZEROES;
        let tag = self.read(slot, tagger, &mut bytes);
        self.remove(key);
        self.give_back_free(1);
        Some((bytes, tag?))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::BootSet;
    use super::*;
    use crate::block::DiskId;
    use crate::warm::{AfterServing, RequestObserver, WarmSource};

    const DISK: DiskId = DiskId(0);
    /// Room for 13 and for 42 blocks.
    const SMALL: u64 = 68 << 10;
    const LARGE: u64 = 200 << 10;

    fn open(folder: &Path, limit_bytes: u64) -> BootSet {
        BootSet::open(folder, limit_bytes, Tagger::new(b"a key like noise")).unwrap()
    }

    /// A boot set with blocks that boots read, others that are hot, and one of zeroes.
    fn filled(folder: &Path, limit_bytes: u64, read: u64, hot: u64) -> BootSet {
        let set = open(folder, limit_bytes);
        for _ in 0..2 {
            set.begin();
            set.read_from_image(DISK, 0, Some(&ZEROES));
            (1..=read).for_each(|block| set.read_from_image(DISK, block, Some(&[block as u8; BLOCK_BYTES])));
            set.ready();
            for block in 100..100 + hot {
                set.read_from_image(DISK, block, Some(&[block as u8; BLOCK_BYTES]));
            }
        }
        set
    }

    fn held(set: &BootSet) -> Vec<u64> {
        let is_right = |block: u64| {
            let serve = &mut |bytes: &[u8; BLOCK_BYTES]| assert_eq!(*bytes, [block as u8; BLOCK_BYTES]);
            set.serve(DISK, block, AfterServing::Keep, serve).is_some()
        };
        (0..200).filter(|&block| is_right(block)).collect()
    }

    #[test]
    fn a_larger_limit_takes_all_of_it() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let all = held(&filled(folder.path(), SMALL, 8, 3));
        let set = open(folder.path(), LARGE);
        assert_eq!((set.left_out(), &held(&set)), (0, &all));
        assert_eq!(all, Vec::from_iter((0..=8).chain(100..103)));
        let tally = set.plan().disks[&DISK];
        assert_eq!((tally.blocks, tally.held, tally.late, tally.no_room), (9, 9, 3, 0));
        drop(set);
        assert_eq!(held(&open(folder.path(), LARGE)), all, "and is a boot set like another");
    }

    #[test]
    fn a_smaller_limit_keeps_what_boots_read_first() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        drop(filled(folder.path(), LARGE, 10, 8));
        let set = open(folder.path(), SMALL);
        assert_eq!(held(&set), Vec::from_iter((0..=10).chain(100..103)));
        assert_eq!((set.left_out(), set.plan().disks[&DISK].no_room), (5, 0));
        assert!(set.resident_bytes() <= SMALL, "{}", set.resident_bytes());
        drop(set);

        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        drop(filled(folder.path(), LARGE, 30, 5));
        let set = open(folder.path(), SMALL);
        assert_eq!(held(&set), Vec::from_iter(0..=13));
        assert_eq!(
            (set.left_out(), set.plan().disks[&DISK].no_room),
            (22, 17),
            "the plan says what the next boot will miss"
        );
        assert!(set.resident_bytes() <= SMALL, "{}", set.resident_bytes());
    }
}
