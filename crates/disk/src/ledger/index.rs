//! From disk block to page: a hash table of page numbers with linear probing. The key of a place is not stored, it is
//! read from the table of entries; that leaves 4 bytes a place. Places are 1.5 times the pages, so at most two thirds
//! are taken and a look-up sees 2 places on average in the worst case. Removal shifts back what probed past the hole:
//! no tombstones, so the table does not decay with use.
//!
//! The guest chooses the keys (it reads the blocks it likes), so the hash is seeded: it cannot aim at one place.

use std::hash::{BuildHasher, RandomState};

use super::table::Table;
use crate::block::{DiskId, RamPage};

/// A place without a page. Page numbers are below it (see `RAM_PAGES_MAX`).
const VACANT: u32 = 0;

pub(super) struct Index {
    /// Page number plus one, so that memory fresh from the kernel is vacant and costs nothing until used.
    places: Vec<u32>,
    taken: usize,
    /// Secret of this process: added to the key, then an odd factor.
    seed: (u64, u64),
}

impl Index {
    pub(super) fn new(ram_pages: u32) -> Self {
        // One place more than pages for the smallest ledgers: probing ends at a vacant place.
        let places = ram_pages as usize + (ram_pages as usize).div_ceil(2) + 1;
        // The standard library's seed from the kernel, without another dependency.
        let random = RandomState::new();
        let seed = (random.hash_one(1), random.hash_one(2) | 1);
        Self { places: vec![VACANT; places], taken: 0, seed }
    }

    pub(super) fn find(&self, table: &Table, disk: DiskId, block: u64) -> Option<RamPage> {
        let mut place = self.home(disk, block);
        loop {
            let page = page_in(self.places[place])?;
            if table.key(page) == Some((disk, block)) {
                return Some(page);
            }
            place = self.after(place);
        }
    }

    /// The page's entry is in the table and not in the index, and no other page has its block.
    pub(super) fn insert(&mut self, table: &Table, page: RamPage) {
        let (disk, block) = table.key(page).expect("only pages with an entry are indexed");
        let mut place = self.home(disk, block);
        while self.places[place] != VACANT {
            place = self.after(place);
        }
        self.places[place] = page.0 + 1;
        self.taken += 1;
    }

    /// The page's entry is still in the table.
    pub(super) fn remove(&mut self, table: &Table, page: RamPage) {
        let (disk, block) = table.key(page).expect("only pages with an entry are indexed");
        let mut hole = self.home(disk, block);
        while self.places[hole] != page.0 + 1 {
            assert!(self.places[hole] != VACANT, "page {} is indexed", page.0);
            hole = self.after(hole);
        }
        let mut place = self.after(hole);
        while let Some(neighbour) = page_in(self.places[place]) {
            let (disk, block) = table.key(neighbour).expect("only pages with an entry are indexed");
            // It may move into the hole if the hole lies on its way from home.
            if self.distance(self.home(disk, block), place) >= self.distance(hole, place) {
                self.places[hole] = self.places[place];
                hole = place;
            }
            place = self.after(place);
        }
        self.places[hole] = VACANT;
        self.taken -= 1;
    }

    pub(super) fn len(&self) -> usize {
        self.taken
    }

    pub(super) fn bytes(&self) -> usize {
        self.places.len() * size_of::<u32>()
    }

    fn home(&self, DiskId(disk): DiskId, block: u64) -> usize {
        // Blocks have 40 bits (a larger one is in no entry; where it lands does not matter). The finaliser is that of
        // SplitMix64: every bit of the key moves the upper bits, which choose the place.
        let mut mixed = (block ^ u64::from(disk) << 40 ^ self.seed.0).wrapping_mul(self.seed.1);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * self.places.len() as u128) >> 64) as usize
    }

    fn after(&self, place: usize) -> usize {
        if place + 1 == self.places.len() { 0 } else { place + 1 }
    }

    /// Steps from one place to another, around the end.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.places.len() - from }
    }
}

fn page_in(place: u32) -> Option<RamPage> {
    place.checked_sub(1).map(RamPage)
}
