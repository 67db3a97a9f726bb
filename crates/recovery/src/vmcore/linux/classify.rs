//! Classification: which pages a dump can do without, by the kernel's own page descriptors.
//!
//! section -> block of descriptors -> verdict on each -> run of pages excluded, or kept
//!
//! It is never all or nothing. Descriptors that cannot be read, or that no kernel could have written, leave their pages
//! in the dump, and these pages are counted. The dump is then larger than it had to be, and says so. Each page within a
//! run (a free block, a huge page) is tested as well: if its own descriptor denies that it belongs there, it stays.

use super::super::bitmap::Bitmap;
use super::super::level::DumpLevel;
use super::super::memory::PhysicalMemory;
use super::descriptor::{Class, Rules, Verdict};
use super::walk::{Block, Visitor, walk};
use super::{AddressSpace, NotUnderstood, Vmcoreinfo};

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
    let descriptor_bytes = rules.bytes;
    let mut classifier = Classifier { rules, result: everything, run: None };
    walk(memory, space, vmcoreinfo, descriptor_bytes, &mut classifier)?;
    Ok(classifier.result)
}

struct Classifier {
    rules: Rules,
    result: Classification,
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

impl Visitor for Classifier {
    fn undescribed(&mut self, pages: u64) {
        self.result.counts.undescribed += pages;
    }

    fn unreadable(&mut self, pages: u64) {
        self.result.counts.unjudged += pages;
    }

    fn page(&mut self, pfn: u64, page: &[u8], map: u64, block: &Block) {
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
        match self.rules.judge(page, block.descriptor(pfn + 1), pfn) {
            Verdict::Keep => {}
            Verdict::Implausible => self.result.counts.unjudged += 1,
            Verdict::Exclude(..) if !self.has_neighbour(pfn, page, block) => self.result.counts.unjudged += 1,
            Verdict::Exclude(class, order) => {
                self.run = Some(Run { class, first: pfn, end: pfn + (1 << order) });
                self.exclude(pfn, class);
            }
        }
    }
}

impl Classifier {
    /// Whether a page nearby has the same zone and node. Where descriptors are overwritten, none has.
    fn has_neighbour(&self, pfn: u64, page: &[u8], block: &Block) -> bool {
        let near = pfn.saturating_sub(NEIGHBOURS)..=pfn + NEIGHBOURS;
        let mut others = near.filter(|near| *near != pfn).filter_map(|near| block.descriptor(near));
        others.any(|other| self.rules.place(other) == self.rules.place(page))
    }

    fn exclude(&mut self, pfn: u64, class: Class) {
        self.result.kept.clear(pfn);
        *self.result.counts.of(class) += 1;
    }
}
