//! Memory copy: guest memory that is copied while the guest runs, as a save and a migration do.
//!
//! all pages are copied -> pass: pages marked meanwhile are copied again -> ... -> the last pass leaves none
//!
//! A page that differs from its copy must be marked. The guest's own writes are known; the device's writes must be in
//! its log.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::guest::{PAGES, Pages, RAM_BYTES};
use crate::storage::BLOCK;

pub struct MemoryCopy {
    bytes: Vec<u8>,
    marked: Pages,
}

fn read(ram: &File) -> Vec<u8> {
    let mut bytes = vec![0; RAM_BYTES as usize];
    ram.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

impl MemoryCopy {
    /// From now on every written page must be marked.
    pub fn begin(ram: &File) -> Self {
        Self { bytes: read(ram), marked: 0 }
    }

    pub fn mark(&mut self, pages: Pages) {
        self.marked |= pages;
    }

    /// A page that was written but is not marked, if there is one.
    pub fn forgotten(&self, ram: &File) -> Option<u64> {
        let now = read(ram);
        let pages = self.bytes.chunks_exact(BLOCK as usize).zip(now.chunks_exact(BLOCK as usize));
        let mut differ = (0..PAGES).zip(pages).filter(|(_, (copy, now))| copy != now);
        differ.find(|(page, _)| self.marked >> page & 1 == 0).map(|(page, _)| page)
    }

    /// Copies the marked pages again.
    pub fn pass(&mut self, ram: &File) {
        for page in (0..PAGES).filter(|page| self.marked >> page & 1 == 1) {
            let offset = page * BLOCK;
            ram.read_exact_at(&mut self.bytes[offset as usize..(offset + BLOCK) as usize], offset).unwrap();
        }
        self.marked = 0;
    }
}
