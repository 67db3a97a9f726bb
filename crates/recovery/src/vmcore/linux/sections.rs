//! Sections: where the descriptors of each range of page frames are (SPARSEMEM, the only memory model of x86-64).
//!
//! mem_section -> root -> section -> `section_mem_map` -> descriptors of 128 MiB
//!
//! Each link is read by itself: a damaged one costs its section, not the dump.

use std::ops::Range;

use hearth_memory::PAGE_BYTES;

use super::super::memory::PhysicalMemory;
use super::address_space::is_kernel_address;
use super::{AddressSpace, NotUnderstood, Vmcoreinfo, required};

/// Flags in the low bits of the descriptors' address. Newer kernels have more of them, but they stay below a page's
/// size.
const FLAGS: u64 = PAGE_BYTES - 1;
const MARKED_PRESENT: u64 = 1;
const HAS_MEM_MAP: u64 = 2;
/// A section covers from 16 MiB to 64 GiB.
const SECTION_SIZE_BITS: Range<i64> = 24..37;
const SECTION_BYTES: Range<u64> = 16..PAGE_BYTES + 1;

/// A range of page frames, and where its descriptors are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub pfns: Range<u64>,
    pub map: Map,
}

/// Where the descriptors of a section are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// Virtual address at which the descriptor of page frame 0 would be.
    OfPfn0(u64),
    /// The kernel has none, because it does not use this memory (`mem=`, or taken offline).
    Absent,
    /// The table cannot be read, or makes no sense.
    Unknown,
}

impl Map {
    fn is_known(self) -> bool {
        matches!(self, Self::OfPfn0(_))
    }
}

/// All sections below `end_pfn`.
pub fn sections<M: PhysicalMemory>(
    space: &AddressSpace<'_, M>,
    vmcoreinfo: &Vmcoreinfo,
    end_pfn: u64,
) -> Result<Vec<Section>, NotUnderstood> {
    let table = Table::new(space, vmcoreinfo)?;
    let told = required(vmcoreinfo.symbol("mem_section"), "SYMBOL(mem_section)")?;
    let found = table.sections(told, end_pfn);
    if found.iter().any(|section| section.map.is_known()) {
        return Ok(found);
    }
    // Linux 4.14 gives the address of a pointer to the table.
    let pointed = space.read_u64(told).map_err(|_| NotUnderstood::NoSections)?;
    let found = table.sections(pointed, end_pfn);
    let any = found.iter().any(|section| section.map.is_known());
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
                    map: self.map(roots, number).unwrap_or(Map::Unknown),
                }
            })
            .collect()
    }

    /// `None` if the table cannot be read there, or makes no sense.
    fn map(&self, roots: u64, number: u64) -> Option<Map> {
        let sections_per_root = PAGE_BYTES / self.section_bytes;
        let root = self.space.read_u64(roots.checked_add(number / sections_per_root * 8)?).ok()?;
        if root == 0 {
            return Some(Map::Absent);
        }
        if !is_kernel_address(root) {
            return None;
        }
        let section = root.checked_add(number % sections_per_root * self.section_bytes)?;
        let map = self.space.read_u64(section.checked_add(self.map_offset)?).ok()?;
        if map == 0 {
            return Some(Map::Absent);
        }
        let there = map & MARKED_PRESENT != 0 && map & HAS_MEM_MAP != 0;
        // The kernel has already subtracted the page frames before the section, so this may not be a kernel address.
        there.then_some(Map::OfPfn0(map & !FLAGS))
    }
}
