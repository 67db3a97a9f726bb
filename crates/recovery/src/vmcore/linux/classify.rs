//! Classification: which pages a dump can do without, by the kernel's own page descriptors.
//!
//! section -> block of descriptors -> verdict on each -> run of pages excluded, or kept
//!
//! It is never all or nothing. Descriptors that cannot be read, or that no kernel could have written, leave their pages
//! in the dump, and these pages are counted. The dump is then larger than it had to be, and says so. Each page within a
//! run (a free block, a huge page) is tested as well: if its own descriptor denies that it belongs there, it stays.

use std::ops::Range;

use super::super::bitmap::Bitmap;
use super::super::level::DumpLevel;
use super::super::memory::PhysicalMemory;
use super::descriptor::{Class, Rules, Verdict};
use super::sections::{Map, Section, sections};
use super::{AddressSpace, NotUnderstood, Vmcoreinfo};

/// Descriptors read at a time: 64 KiB, which stay in the processor's cache.
const BLOCK_PAGES: u64 = 1024;
/// Distance to each side within which a page has a neighbour in its own zone and node.
const NEIGHBOURS: u64 = 2;

/// Pages that a dump of some level keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classification {
    /// Subset of the RAM's page frames. It includes pages of zeroes.
    pub kept: Bitmap,
    /// Number of pages by class.
    pub counts: ClassCounts,
}

/// Page counts by class. Pages in none of these classes are kept because they are the kernel's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// Excluded: page cache.
    pub cache: u64,
    /// Excluded: page cache with private data, such as a journal's.
    pub private_cache: u64,
    /// Excluded: memory of programs.
    pub user: u64,
    /// Excluded: free.
    pub free: u64,
    /// Excluded at any level that needs descriptors: memory with broken hardware.
    pub poisoned: u64,
    /// Excluded at any level that needs descriptors: memory given back to the host.
    pub offline: u64,
    /// Kept because their descriptors cannot be read or make no sense.
    pub unjudged: u64,
    /// Kept because the kernel has no descriptors for them: it does not use this memory (`mem=`, or taken offline).
    pub undescribed: u64,
}

impl ClassCounts {
    /// Number of all excluded pages.
    pub fn excluded(&self) -> u64 {
        self.cache + self.private_cache + self.user + self.free + self.poisoned + self.offline
    }

    fn of(&mut self, class: Class) -> &mut u64 {
        match class {
            Class::Cache => &mut self.cache,
            Class::PrivateCache => &mut self.private_cache,
            Class::User => &mut self.user,
            Class::Free => &mut self.free,
            Class::Poisoned => &mut self.poisoned,
            Class::Offline => &mut self.offline,
        }
    }
}

impl Classification {
    /// All RAM: what a level that needs no descriptors keeps.
    pub fn everything(memory: &impl PhysicalMemory) -> Self {
        Self { kept: Bitmap::of(memory.end_pfn(), memory.ranges()), counts: ClassCounts::default() }
    }
}

/// Decides what a dump of this level keeps.
pub fn classify<M: PhysicalMemory>(
    memory: &M,
    space: &AddressSpace<'_, M>,
    vmcoreinfo: &Vmcoreinfo,
    level: DumpLevel,
) -> Result<Classification, NotUnderstood> {
    let everything = Classification::everything(memory);
    if !level.needs_classification() {
        return Ok(everything);
    }
    let rules = Rules::new(vmcoreinfo, level)?;
    let sections = sections(space, vmcoreinfo, memory.end_pfn())?;
    let block = Block::new(rules.bytes);
    let mut judge = Classifier { space, rules, result: everything, block, run: None };
    for section in sections {
        for ram in memory.ranges() {
            judge.section(&section, intersection(ram, &section.pfns));
        }
    }
    Ok(judge.result)
}

struct Classifier<'a, 'm, M> {
    space: &'a AddressSpace<'m, M>,
    rules: Rules,
    result: Classification,
    block: Block,
    /// The run that is being excluded. It may reach into later blocks.
    run: Option<Run>,
}

/// Pages that the descriptor of the first one excludes.
#[derive(Clone, Copy)]
struct Run {
    class: Class,
    first: u64,
    end: u64,
}

impl<M: PhysicalMemory> Classifier<'_, '_, M> {
    /// Judges those page frames of a section that are RAM.
    fn section(&mut self, section: &Section, ram: Range<u64>) {
        let counts = &mut self.result.counts;
        let map = match section.map {
            Map::OfPfn0(map) => map,
            Map::Absent => return counts.undescribed += ram.end - ram.start,
            Map::Unknown => return counts.unjudged += ram.end - ram.start,
        };
        let mut start = ram.start;
        while start < ram.end {
            let first = start - start % BLOCK_PAGES;
            let end = first + BLOCK_PAGES;
            self.block.fill(self.space, map, first..end.min(section.pfns.end));
            for pfn in start..end.min(ram.end) {
                self.page(pfn, map);
            }
            start = end;
        }
    }

    fn page(&mut self, pfn: u64, map: u64) {
        let Some(page) = self.block.descriptor(pfn) else {
            self.result.counts.unjudged += 1;
            return;
        };
        if let Some(run) = self.run.filter(|run| pfn < run.end) {
            let belongs = match run.class {
                Class::Free => !self.rules.is_used(page),
                _ => self.rules.belongs(page, run.first, map),
            };
            return if belongs { self.exclude(pfn, run.class) } else { self.result.counts.unjudged += 1 };
        }
        if self.rules.is_tail(page) {
            if !self.rules.is_plausible_tail(page, pfn, map) {
                self.result.counts.unjudged += 1;
            }
            return;
        }
        match self.rules.judge(page, self.block.descriptor(pfn + 1), pfn) {
            Verdict::Keep => {}
            Verdict::Implausible => self.result.counts.unjudged += 1,
            Verdict::Exclude(..) if !self.has_neighbour(pfn, page) => self.result.counts.unjudged += 1,
            Verdict::Exclude(class, order) => {
                self.run = Some(Run { class, first: pfn, end: pfn + (1 << order) });
                self.exclude(pfn, class);
            }
        }
    }

    /// Whether a page nearby has the same zone and node. Where descriptors are overwritten, none has.
    fn has_neighbour(&self, pfn: u64, page: &[u8]) -> bool {
        let near = pfn.saturating_sub(NEIGHBOURS)..=pfn + NEIGHBOURS;
        let mut others = near.filter(|near| *near != pfn).filter_map(|near| self.block.descriptor(near));
        others.any(|other| self.rules.place(other) == self.rules.place(page))
    }

    fn exclude(&mut self, pfn: u64, class: Class) {
        self.result.kept.clear(pfn);
        *self.result.counts.of(class) += 1;
    }
}

/// Descriptors of adjacent page frames, as far as they are readable.
struct Block {
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
    fn descriptor(&self, pfn: u64) -> Option<&[u8]> {
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
