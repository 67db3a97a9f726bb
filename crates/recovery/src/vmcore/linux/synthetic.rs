//! Synthetic: a small made-up Linux for tests: 16 MiB of RAM with tables, descriptors, names and log where a kernel has
//! them.

use std::ops::Range;

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};

use super::super::memory::{PhysicalMemory, Unreadable};
use super::Vmcoreinfo;

pub const PAGES: u64 = 4096;
pub const DESCRIPTOR_BYTES: u64 = 64;
pub const KERNEL_IMAGE: u64 = 0xffff_ffff_8000_0000;
pub const VMEMMAP: u64 = 0xffff_ea00_0000_0000;

/// Offsets in RAM. Virtual addresses of the kernel's image are these plus `KERNEL_IMAGE`.
pub const TOP_TABLE: u64 = 0x10_0000;
const TABLE_3: u64 = 0x10_1000;
pub const TABLE_2: u64 = 0x10_2000;
pub const ROOTS: u64 = 0x10_3000;
pub const SECTIONS: u64 = 0x10_4000;
pub const NOTE: u64 = 0x10_5000;
pub const NAMES: u64 = 0x10_6000;
const RING_POINTER: u64 = 0x10_7000;
pub const RING: u64 = 0x10_7100;
const RECORDS: u64 = 0x10_8000;
const INFOS: u64 = 0x10_9000;
pub const TEXTS: u64 = 0x10_a000;
const IMAGE_TABLE_3: u64 = 0x10_c000;
const IMAGE_TABLE_2: u64 = 0x10_d000;
pub const DESCRIPTORS: u64 = 0x20_0000;

/// Small, so that both rings wrap.
pub const RECORD_BITS: u32 = 3;
pub const TEXT_BITS: u32 = 8;

pub const RELEASE: &str = "6.1.0-made-up";

/// RAM from address 0 on; all other addresses are unreadable.
#[derive(Clone)]
pub struct Ram {
    pub bytes: Vec<u8>,
    ranges: [Range<u64>; 1],
}

impl Ram {
    pub fn new(pages: u64) -> Self {
        Self { bytes: vec![0; (pages * PAGE_BYTES) as usize], ranges: std::array::from_fn(|_| 0..pages) }
    }

    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        self.bytes[address as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    pub fn write_u64(&mut self, address: u64, number: u64) {
        self.write(address, &number.to_le_bytes());
    }
}

impl PhysicalMemory for Ram {
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable> {
        let start = usize::try_from(address.0).unwrap_or(usize::MAX);
        let end = start.checked_add(into.len());
        let there = end.and_then(|end| self.bytes.get(start..end)).ok_or(Unreadable { address })?;
        into.copy_from_slice(there);
        Ok(())
    }

    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

/// The fields of a descriptor that matter here.
#[derive(Clone, Copy)]
pub struct Page {
    pub flags: u64,
    pub compound_head: u64,
    pub mapping: u64,
    pub private: u64,
    pub mapcount: u32,
    pub users: u32,
}

/// A page that the kernel uses for itself.
pub const KERNELS: Page = Page { flags: 0, compound_head: 0, mapping: 0, private: 0, mapcount: u32::MAX, users: 1 };

/// Generation of a kernel's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Linux6_1,
    Linux6_12,
}

impl Kind {
    pub const ALL: [Self; 2] = [Self::Linux6_1, Self::Linux6_12];

    pub fn buddy(self) -> u32 {
        if self == Self::Linux6_1 { 0xffff_ff7f } else { 0xf000_0000 }
    }

    pub fn offline(self) -> u32 {
        if self == Self::Linux6_1 { 0xffff_feff } else { 0xf100_0000 }
    }

    fn text(self) -> String {
        let descriptors = match self {
            Self::Linux6_1 => {
                "OFFSET(page.compound_dtor)=16\nOFFSET(page.compound_order)=17\nNUMBER(PG_slab)=9\n\
                 NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-129\nNUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-257\n\
                 NUMBER(HUGETLB_PAGE_DTOR)=2\n"
            }
            Self::Linux6_12 => {
                "NUMBER(PAGE_SLAB_MAPCOUNT_VALUE)=-184549376\nNUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-268435456\n\
                 NUMBER(PAGE_HUGETLB_MAPCOUNT_VALUE)=-201326592\nNUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-251658240\n\
                 NUMBER(PG_hwpoison)=20\n"
            }
        };
        let symbol = |name: &str, address: u64| format!("SYMBOL({name})={:x}\n", KERNEL_IMAGE + address);
        let places = [
            symbol("init_uts_ns", NAMES),
            symbol("init_top_pgt", TOP_TABLE),
            symbol("mem_section", ROOTS),
            symbol("prb", RING_POINTER),
        ]
        .concat();
        format!(
            "OSRELEASE={RELEASE}\nPAGESIZE=4096\n{places}NUMBER(phys_base)=0\nOFFSET(uts_namespace.name)=0\n\
             SIZE(mem_section)=16\nOFFSET(mem_section.section_mem_map)=0\nNUMBER(SECTION_SIZE_BITS)=24\n\
             SIZE(page)=64\nOFFSET(page.flags)=0\nOFFSET(page.compound_head)=8\nOFFSET(page.mapping)=24\n\
             OFFSET(page.private)=40\nOFFSET(page._mapcount)=48\nOFFSET(page._refcount)=52\nLENGTH(zone.free_area)=11\n\
             NUMBER(PG_lru)=4\nNUMBER(PG_private)=13\nNUMBER(PG_swapcache)=10\nNUMBER(PG_swapbacked)=19\n\
             NUMBER(PG_head_mask)=65536\n{descriptors}OFFSET(printk_ringbuffer.desc_ring)=0\n\
             OFFSET(printk_ringbuffer.text_data_ring)=48\nOFFSET(prb_desc_ring.count_bits)=0\n\
             OFFSET(prb_desc_ring.descs)=8\nOFFSET(prb_desc_ring.infos)=16\nOFFSET(prb_desc_ring.head_id)=24\n\
             OFFSET(prb_desc_ring.tail_id)=32\nSIZE(prb_desc)=24\nOFFSET(prb_desc.state_var)=0\n\
             OFFSET(prb_desc.text_blk_lpos)=8\nOFFSET(prb_data_blk_lpos.begin)=0\nOFFSET(prb_data_blk_lpos.next)=8\n\
             SIZE(printk_info)=88\nOFFSET(printk_info.ts_nsec)=8\nOFFSET(printk_info.text_len)=16\n\
             OFFSET(prb_data_ring.size_bits)=0\nOFFSET(prb_data_ring.data)=8\n"
        )
    }
}

/// A made-up Linux that uses all pages itself and has an empty log.
pub struct Synthetic {
    pub ram: Ram,
    pub kind: Kind,
    pub vmcoreinfo: Vmcoreinfo,
}

impl Synthetic {
    pub fn new(kind: Kind) -> Self {
        let text = kind.text();
        let vmcoreinfo = Vmcoreinfo::parse(text.as_bytes()).unwrap();
        let mut linux = Self { ram: Ram::new(PAGES), kind, vmcoreinfo };
        linux.ram.write(NOTE, &note(text.as_bytes()));
        linux.put_tables();
        linux.put_names();
        linux.put_ring();
        for pfn in 0..PAGES {
            linux.put(pfn, KERNELS);
        }
        linux
    }

    fn put_tables(&mut self) {
        const TABLE: u64 = 0x63;
        const LARGE: u64 = 0xe3;
        let index = |level: u32| VMEMMAP >> (12 + 9 * level) & 511;
        self.ram.write_u64(TOP_TABLE + index(3) * 8, TABLE_3 | TABLE);
        self.ram.write_u64(TABLE_3 + index(2) * 8, TABLE_2 | TABLE);
        self.ram.write_u64(TABLE_2 + index(1) * 8, DESCRIPTORS | LARGE);
        self.ram.write_u64(TOP_TABLE + 511 * 8, IMAGE_TABLE_3 | TABLE);
        self.ram.write_u64(IMAGE_TABLE_3 + 510 * 8, IMAGE_TABLE_2 | TABLE);
        self.ram.write_u64(IMAGE_TABLE_2, LARGE);
        self.ram.write_u64(ROOTS, KERNEL_IMAGE + SECTIONS);
        // Present, with a map, and online.
        self.ram.write_u64(SECTIONS, VMEMMAP | 7);
    }

    fn put_names(&mut self) {
        for (field, name) in ["Linux", "guest", RELEASE, "#1 SMP", "x86_64", "(none)"].iter().enumerate() {
            self.ram.write(NAMES + 65 * field as u64, name.as_bytes());
        }
    }

    fn put_ring(&mut self) {
        let image = |address: u64| KERNEL_IMAGE + address;
        self.ram.write_u64(RING_POINTER, image(RING));
        self.ram.write(RING, &RECORD_BITS.to_le_bytes());
        self.ram.write_u64(RING + 8, image(RECORDS));
        self.ram.write_u64(RING + 16, image(INFOS));
        self.ram.write(RING + 48, &TEXT_BITS.to_le_bytes());
        self.ram.write_u64(RING + 56, image(TEXTS));
    }

    /// Sets the first and the last id of the ring.
    pub fn put_ids(&mut self, tail: u64, head: u64) {
        self.ram.write_u64(RING + 24, head);
        self.ram.write_u64(RING + 32, tail);
    }

    /// Writes a record whose text begins at this position of the ring or, if it would cross the end, at its start.
    pub fn put_record(&mut self, id: u64, state: u64, begin: u64, next: u64, text: &str) {
        let place = id % (1 << RECORD_BITS);
        self.ram.write_u64(RECORDS + place * 24, id | state << 62);
        self.ram.write_u64(RECORDS + place * 24 + 8, begin);
        self.ram.write_u64(RECORDS + place * 24 + 16, next);
        self.ram.write_u64(INFOS + place * 88 + 8, id * 1_000_000_000);
        self.ram.write(INFOS + place * 88 + 16, &(text.len() as u16).to_le_bytes());
        if begin & 1 == 0 {
            let size = 1 << TEXT_BITS;
            let start = if begin % size + (next - begin) <= size { begin % size } else { 0 };
            self.ram.write_u64(TEXTS + start, id);
            self.ram.write(TEXTS + start + 8, text.as_bytes());
        }
    }

    pub fn put(&mut self, pfn: u64, page: Page) {
        let descriptor = DESCRIPTORS + pfn * DESCRIPTOR_BYTES;
        self.ram.write_u64(descriptor, page.flags);
        self.ram.write_u64(descriptor + 8, page.compound_head);
        self.ram.write_u64(descriptor + 24, page.mapping);
        self.ram.write_u64(descriptor + 40, page.private);
        self.ram.write(descriptor + 48, &page.mapcount.to_le_bytes());
        self.ram.write(descriptor + 52, &page.users.to_le_bytes());
    }

    /// Makes a free block of 2^order pages.
    pub fn put_free(&mut self, first: u64, order: u64) {
        let free = Page { users: 0, ..KERNELS };
        for pfn in first..first + (1 << order) {
            self.put(pfn, free);
        }
        self.put(first, Page { private: order, mapcount: self.kind.buddy(), ..free });
    }

    /// Makes a compound page of 2^order pages that begins with this one.
    pub fn put_compound(&mut self, first: u64, order: u8, page: Page, hugetlb: bool) {
        let tail = Page { compound_head: VMEMMAP + first * DESCRIPTOR_BYTES + 1, users: 0, ..KERNELS };
        for pfn in first + 1..first + (1 << order) {
            self.put(pfn, tail);
        }
        let second = DESCRIPTORS + (first + 1) * DESCRIPTOR_BYTES;
        let mut page = Page { flags: page.flags | 1 << 16, ..page };
        match self.kind {
            Kind::Linux6_1 => self.ram.write(second + 16, &[if hugetlb { 2 } else { 1 }, order]),
            Kind::Linux6_12 => {
                self.ram.write_u64(second, 0xab00 | u64::from(order));
                if hugetlb {
                    page.mapcount = 0xf400_0000;
                }
            }
        }
        self.put(first, page);
    }
}

/// QEMU's note of a CPU that uses these page tables of four levels.
pub fn cpu_note(root: u64) -> Vec<u8> {
    let control = [0x8005_0033, 0, 0, root, 0x6f0].map(u64::to_le_bytes).concat();
    let mut note = [5_u32, 440, 0].map(u32::to_le_bytes).concat();
    note.extend(b"QEMU\0\0\0\0");
    note.extend([0; 392]);
    note.extend(control);
    note.extend([0; 8]);
    note
}

/// A VMCOREINFO text as an ELF note.
pub fn note(text: &[u8]) -> Vec<u8> {
    let mut note = [11_u32, text.len() as u32, 0].map(u32::to_le_bytes).concat();
    note.extend(b"VMCOREINFO\0\0");
    note.extend(text);
    note.resize(note.len().next_multiple_of(4), 0);
    note
}
