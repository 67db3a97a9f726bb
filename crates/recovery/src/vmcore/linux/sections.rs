//! Sections: where the descriptors of each stretch of page frames are (SPARSEMEM, the only memory model of x86-64).
//!
//! mem_section -> root -> section -> `section_mem_map` -> descriptors of 128 MiB
//!
//! Each link is read on its own: a damaged one costs its section, not the dump.

use std::ops::Range;

use hearth_memory::PAGE_BYTES;

use super::super::memory::PhysicalMemory;
use super::address_space::is_kernel_address;
use super::{AddressSpace, NotUnderstood, Vmcoreinfo, required};

/// The descriptors' address has more flags in it with every other release; they never reach a page's size.
const FLAGS: u64 = PAGE_BYTES - 1;
const MARKED_PRESENT: u64 = 1;
const HAS_MEM_MAP: u64 = 2;
/// A section holds from 16 MiB to 64 GiB.
const SECTION_SIZE_BITS: Range<i64> = 24..37;
const SECTION_BYTES: Range<u64> = 16..PAGE_BYTES + 1;

/// A stretch of page frames and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub pfns: Range<u64>,
    /// The virtual address at which the descriptor of page frame 0 would be; None if this section has no descriptors or
    /// they cannot be found.
    pub map_of_pfn_0: Option<u64>,
}

/// All sections up to a page frame.
pub fn sections<M: PhysicalMemory>(
    space: &AddressSpace<'_, M>,
    vmcoreinfo: &Vmcoreinfo,
    end_pfn: u64,
) -> Result<Vec<Section>, NotUnderstood> {
    let table = Table::new(space, vmcoreinfo)?;
    let told = required(vmcoreinfo.symbol("mem_section"), "SYMBOL(mem_section)")?;
    let found = table.sections(told, end_pfn);
    if found.iter().any(|section| section.map_of_pfn_0.is_some()) {
        return Ok(found);
    }
    // Linux 4.14 tells not where the table is but where that is told.
    let pointed = space.read_u64(told).map_err(|_| NotUnderstood::NoSections)?;
    let found = table.sections(pointed, end_pfn);
    let any = found.iter().any(|section| section.map_of_pfn_0.is_some());
    any.then_some(found).ok_or(NotUnderstood::NoSections)
}

struct Table<'a, 'm, M> {
    space: &'a AddressSpace<'m, M>,
    section_bytes: u64,
    map_offset: u64,
    section_pages: u64,
}

impl<'a, 'm, M: PhysicalMemory> Table<'a, 'm, M> {
    fn new(space: &'a AddressSpace<'m, M>, vmcoreinfo: &Vmcoreinfo) -> Result<Self, NotUnderstood> {
        let size_bits = required(vmcoreinfo.number("SECTION_SIZE_BITS"), "NUMBER(SECTION_SIZE_BITS)")?;
        let section_bytes = required(vmcoreinfo.size("mem_section"), "SIZE(mem_section)")?;
        let map_offset =
            required(vmcoreinfo.offset("mem_section.section_mem_map"), "OFFSET(mem_section.section_mem_map)")?;
        if !SECTION_SIZE_BITS.contains(&size_bits) {
            return Err(NotUnderstood::Implausible { name: "NUMBER(SECTION_SIZE_BITS)", value: size_bits.into() });
        }
        if !SECTION_BYTES.contains(&section_bytes) {
            return Err(NotUnderstood::Implausible { name: "SIZE(mem_section)", value: section_bytes.into() });
        }
        if map_offset > section_bytes - 8 {
            let name = "OFFSET(mem_section.section_mem_map)";
            return Err(NotUnderstood::Implausible { name, value: map_offset.into() });
        }
        Ok(Self { space, section_bytes, map_offset, section_pages: (1 << size_bits) / PAGE_BYTES })
    }

    fn sections(&self, roots: u64, end_pfn: u64) -> Vec<Section> {
        let numbers = 0..end_pfn.div_ceil(self.section_pages);
        numbers
            .map(|number| {
                let start = number * self.section_pages;
                Section {
                    pfns: start..(start + self.section_pages).min(end_pfn),
                    map_of_pfn_0: self.map_of_pfn_0(roots, number),
                }
            })
            .collect()
    }

    fn map_of_pfn_0(&self, roots: u64, number: u64) -> Option<u64> {
        let sections_per_root = PAGE_BYTES / self.section_bytes;
        let root = self.space.read_u64(roots.checked_add(number / sections_per_root * 8)?).ok()?;
        if !is_kernel_address(root) {
            return None;
        }
        let section = root.checked_add(number % sections_per_root * self.section_bytes)?;
        let map = self.space.read_u64(section.checked_add(self.map_offset)?).ok()?;
        let there = map & MARKED_PRESENT != 0 && map & HAS_MEM_MAP != 0;
        // The kernel has already subtracted the page frames before the section, so this may be no kernel address.
        there.then_some(map & !FLAGS)
    }
}
