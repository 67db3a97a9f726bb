//! Walk: all page descriptors of a kernel, in the order of their page frames.
//!
//! section -> block of descriptors -> each descriptor
//!
//! Descriptors that cannot be read are counted and passed over.

use std::ops::Range;

use super::super::bitmap::Bitmap;
use super::super::memory::PhysicalMemory;
use super::sections::{Map, Section, sections};
use super::{AddressSpace, NotUnderstood, Vmcoreinfo};

/// Descriptors read at a time: 64 KiB, which stay in the processor's cache.
const BLOCK_PAGES: u64 = 1024;

/// Takes the descriptors of a walk.
pub trait Visitor {
    /// The kernel has no descriptors for this many pages of RAM, because it does not use them.
    fn undescribed(&mut self, pages: u64);
    /// The descriptors of this many pages cannot be read.
    fn unreadable(&mut self, pages: u64);
    /// A page of RAM and its descriptor. `map` is where the descriptor of page frame 0 would be; `block` has the descriptors nearby.
    fn page(&mut self, pfn: u64, page: &[u8], map: u64, block: &Block);
}

/// Visits the descriptors of all RAM.
pub fn walk<M: PhysicalMemory>(
    memory: &M,
    space: &AddressSpace<'_, M>,
    vmcoreinfo: &Vmcoreinfo,
    descriptor_bytes: usize,
    visitor: &mut impl Visitor,
) -> Result<(), NotUnderstood> {
    let mut block = Block::new(descriptor_bytes);
    for section in sections(space, vmcoreinfo, memory.end_pfn())? {
        if memory.is_given_up() {
            break;
        }
        for ram in memory.ranges() {
            walk_section(space, &section, intersection(ram, &section.pfns), &mut block, visitor);
        }
    }
    Ok(())
}

/// Visits those page frames of a section that are RAM.
fn walk_section<M: PhysicalMemory>(
    space: &AddressSpace<'_, M>,
    section: &Section,
    ram: Range<u64>,
    block: &mut Block,
    visitor: &mut impl Visitor,
) {
    let map = match section.map {
        Map::OfPfn0(map) => map,
        Map::Absent => return visitor.undescribed(ram.end - ram.start),
        Map::Unknown => return visitor.unreadable(ram.end - ram.start),
    };
    let mut start = ram.start;
    while start < ram.end {
        let first = start - start % BLOCK_PAGES;
        let end = first + BLOCK_PAGES;
        block.fill(space, map, first..end.min(section.pfns.end));
        for pfn in start..end.min(ram.end) {
            match block.descriptor(pfn) {
                Some(page) => visitor.page(pfn, page, map, block),
                None => visitor.unreadable(1),
            }
        }
        start = end;
    }
}

/// Descriptors of adjacent page frames, as far as they are readable.
pub struct Block {
    descriptor_bytes: usize,
    pfns: Range<u64>,
    bytes: Vec<u8>,
    /// Numbers, in the block, of descriptors that are not readable.
    unreadable: Bitmap,
}

impl Block {
    fn new(descriptor_bytes: usize) -> Self {
        let bytes = vec![0; descriptor_bytes * BLOCK_PAGES as usize];
        Self { descriptor_bytes, pfns: 0..0, bytes, unreadable: Bitmap::new(BLOCK_PAGES) }
    }

    fn fill<M: PhysicalMemory>(&mut self, space: &AddressSpace<'_, M>, map: u64, pfns: Range<u64>) {
        let address = map.wrapping_add(pfns.start * self.descriptor_bytes as u64);
        let bytes = (pfns.end - pfns.start) as usize * self.descriptor_bytes;
        let Self { descriptor_bytes, unreadable, .. } = self;
        unreadable.clear_range(0..BLOCK_PAGES);
        space.read_pieces(address, &mut self.bytes[..bytes], |range, _| {
            let (first, end) = (range.start / *descriptor_bytes, range.end.div_ceil(*descriptor_bytes));
            unreadable.set_range(first as u64..end as u64);
        });
        self.pfns = pfns;
    }

    /// `None` outside of the block, and for descriptors that could not be read.
    pub fn descriptor(&self, pfn: u64) -> Option<&[u8]> {
        let number = pfn.checked_sub(self.pfns.start).filter(|_| pfn < self.pfns.end)?;
        if self.unreadable.contains(number) {
            return None;
        }
        let start = number as usize * self.descriptor_bytes;
        Some(&self.bytes[start..start + self.descriptor_bytes])
    }
}

fn intersection(one: &Range<u64>, other: &Range<u64>) -> Range<u64> {
    let (start, end) = (one.start.max(other.start), one.end.min(other.end));
    start..end.max(start)
}
