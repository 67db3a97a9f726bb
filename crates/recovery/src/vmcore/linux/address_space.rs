//! Address space of the kernel: from its virtual addresses to guest-physical ones.
//!
//! init_top_pgt -> 4 or 5 levels -> page of 4 KiB, 2 MiB or 1 GiB
//!
//! The kernel's own image needs no tables: it is contiguous, at an address that VMCOREINFO gives (`phys_base` includes
//! KASLR). Everything else is looked up in the guest's tables, as the processor does it. A wrong table can only make a
//! read fail or find wrong bytes: an address outside of RAM is unreadable, like one that is not mapped.

use std::cell::RefCell;

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};

use super::super::memory::{PhysicalMemory, Unreadable};
use super::super::notes::PageTables;
use super::{NotUnderstood, Vmcoreinfo, required};

const KERNEL_IMAGE: u64 = 0xffff_ffff_8000_0000;
/// Size of the image without KASLR; with it, it is twice as large. Modules follow, which are mapped page by page.
const KERNEL_IMAGE_BYTES: u64 = 512 << 20;

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
const ENTRIES: usize = 512;
const INDEX_BITS: u32 = 9;
const PAGE_BITS: u32 = PAGE_BYTES.trailing_zeros();

/// Whether this address is in the upper half, which is the kernel's with 5 levels and with 4.
pub fn is_kernel_address(address: u64) -> bool {
    address >> 56 == 0xff
}

/// Reads kernel memory by virtual address.
pub struct AddressSpace<'m, M> {
    memory: &'m M,
    root: u64,
    levels: u32,
    phys_base: u64,
    image_bytes: u64,
    frame: u64,
    /// The last-level table used last, with its address: descriptors and sections are read in order.
    table: RefCell<Option<(u64, Box<[u64; ENTRIES]>)>>,
}

/// Physical address of a virtual one, and how many bytes are contiguous from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Physical address.
    pub address: GuestPhysicalAddress,
    /// Number of contiguous bytes.
    pub bytes: u64,
}

impl<'m, M: PhysicalMemory> AddressSpace<'m, M> {
    /// Finds the kernel's page tables by its VMCOREINFO.
    pub fn new(memory: &'m M, vmcoreinfo: &Vmcoreinfo) -> Result<Self, NotUnderstood> {
        let phys_base = required(vmcoreinfo.number("phys_base"), "NUMBER(phys_base)")?.cast_unsigned();
        let tables = vmcoreinfo.symbol("init_top_pgt").or(vmcoreinfo.symbol("init_level4_pgt"));
        let tables = tables.or(vmcoreinfo.symbol("swapper_pg_dir"));
        let root = required(tables, "SYMBOL(init_top_pgt)")?.wrapping_sub(KERNEL_IMAGE).wrapping_add(phys_base);
        let levels = if vmcoreinfo.number("pgtable_l5_enabled") == Some(1) { 5 } else { 4 };
        let encryption = vmcoreinfo.number("sme_mask").unwrap_or(0).cast_unsigned();
        let image_bytes = vmcoreinfo.number("KERNEL_IMAGE_SIZE").map_or(KERNEL_IMAGE_BYTES, i64::cast_unsigned);
        let frame = FRAME & !encryption;
        Ok(Self { memory, root, levels, phys_base, image_bytes, frame, table: RefCell::default() })
    }

    /// Translates a virtual address; `None` if nothing is mapped there, or a table is not readable.
    pub fn translate(&self, address: u64) -> Option<Piece> {
        if let Some(offset) = address.checked_sub(KERNEL_IMAGE).filter(|offset| *offset < self.image_bytes) {
            let physical = GuestPhysicalAddress(offset.wrapping_add(self.phys_base));
            return Some(Piece { address: physical, bytes: self.image_bytes - offset });
        }
        self.walk(PageTables { root: self.root, levels: self.levels }, address)
    }

    /// Translates a virtual address by these tables, which are a CPU's own.
    pub fn walk(&self, tables: PageTables, address: u64) -> Option<Piece> {
        let mut table = tables.root;
        for level in (1..tables.levels).rev() {
            let bits = PAGE_BITS + level * INDEX_BITS;
            let index = (address >> bits) % ENTRIES as u64;
            let entry = self.memory.read_u64(GuestPhysicalAddress(table.checked_add(index * 8)?)).ok()?;
            if entry & PRESENT == 0 {
                return None;
            }
            if entry & LARGE != 0 && level <= 2 {
                return Some(piece(entry & self.frame, address, 1 << bits));
            }
            table = entry & self.frame;
        }
        let index = (address >> PAGE_BITS) as usize % ENTRIES;
        let entry = self.last_level(table, index)?;
        (entry & PRESENT != 0).then(|| piece(entry & self.frame, address, PAGE_BYTES))
    }

    fn last_level(&self, table: u64, index: usize) -> Option<u64> {
        let mut cached = self.table.borrow_mut();
        match &*cached {
            Some((address, entries)) if *address == table => Some(entries[index]),
            _ => {
                let mut bytes = [0; PAGE_BYTES as usize];
                self.memory.read(GuestPhysicalAddress(table), &mut bytes).ok()?;
                let mut entries = Box::new([0; ENTRIES]);
                for (entry, bytes) in entries.iter_mut().zip(bytes.chunks_exact(8)) {
                    *entry = u64::from_le_bytes(bytes.try_into().expect("chunks of eight bytes"));
                }
                let entry = entries[index];
                *cached = Some((table, entries));
                Some(entry)
            }
        }
    }

    /// Fills `into` from a virtual address. After an error the contents of `into` do not count.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let mut whole = Ok(());
        self.read_pieces(address, into, |_, piece| whole = whole.and(Err(piece)));
        whole
    }

    /// Fills what can be read, and the rest with zeroes. Calls `unreadable` with the range in `into` of each piece that
    /// cannot be read.
    pub(crate) fn read_pieces(
        &self,
        address: u64,
        into: &mut [u8],
        mut unreadable: impl FnMut(std::ops::Range<usize>, Unreadable),
    ) {
        let mut done = 0;
        while done < into.len() {
            let Some(at) = address.checked_add(done as u64) else {
                into[done..].fill(0);
                return unreadable(done..into.len(), Unreadable::at(address));
            };
            let left = into.len() - done;
            let to_page_end = (PAGE_BYTES - at % PAGE_BYTES) as usize;
            let (bytes, read) = match self.translate(at) {
                None => (to_page_end.min(left), Err(Unreadable::at(at))),
                Some(piece) => {
                    let bytes = left.min(usize::try_from(piece.bytes).unwrap_or(usize::MAX));
                    match self.memory.read(piece.address, &mut into[done..done + bytes]) {
                        // A large page may be in RAM only in part.
                        Err(_) if bytes > to_page_end => {
                            let bytes = to_page_end;
                            (bytes, self.memory.read(piece.address, &mut into[done..done + bytes]))
                        }
                        read => (bytes, read),
                    }
                }
            };
            if let Err(error) = read {
                into[done..done + bytes].fill(0);
                unreadable(done..done + bytes, error);
            }
            done += bytes;
        }
    }

    /// The 32-bit number at a virtual address.
    pub(crate) fn read_u32(&self, address: u64) -> Result<u32, Unreadable> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes).map(|()| u32::from_le_bytes(bytes))
    }

    /// The 64-bit number at a virtual address.
    pub fn read_u64(&self, address: u64) -> Result<u64, Unreadable> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes).map(|()| u64::from_le_bytes(bytes))
    }
}

/// The bytes from an address to the end of its page of this size.
fn piece(frame: u64, address: u64, page_bytes: u64) -> Piece {
    let within = address % page_bytes;
    let start = frame & !(page_bytes - 1);
    Piece { address: GuestPhysicalAddress(start + within), bytes: page_bytes - within }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{Kind, NAMES, NOTE, Ram, Synthetic, TOP_TABLE, VMEMMAP};
    use super::*;

    const TABLE: u64 = 0x63;
    const HIGH: u64 = 0xff11_0000_0000_0000;

    /// Five levels of tables that follow each other, down to an entry at `level`.
    fn five_levels(address: u64, level: u32, entry: u64) -> (Ram, Vmcoreinfo) {
        let mut linux = Synthetic::new(Kind::Linux6_1);
        let index = |level: u32| (address >> (PAGE_BITS + INDEX_BITS * level)) % ENTRIES as u64 * 8;
        let table = |level: u32| 0x8_0000 + u64::from(4 - level) * PAGE_BYTES;
        for above in level + 1..5 {
            linux.ram.write_u64(table(above) + index(above), table(above - 1) | TABLE);
        }
        linux.ram.write_u64(table(level) + index(level), entry);
        let text = String::from_utf8(linux.vmcoreinfo.text().to_vec()).unwrap();
        let text = text.replace(&format!("{:x}", KERNEL_IMAGE + TOP_TABLE), &format!("{:x}", KERNEL_IMAGE + table(4)));
        let text = text + "NUMBER(pgtable_l5_enabled)=1\n";
        (linux.ram, Vmcoreinfo::parse(text.as_bytes()).unwrap())
    }

    #[track_caller]
    fn check(level: u32, entry: u64, expect: Option<(u64, u64)>) {
        let address = HIGH + 0x1234_5678;
        let (ram, told) = five_levels(address, level, entry);
        let piece = AddressSpace::new(&ram, &told).unwrap().translate(address);
        assert_eq!(piece.map(|piece| (piece.address.0, piece.bytes)), expect);
    }

    #[test]
    fn all_page_sizes_are_found_through_five_levels() {
        check(0, 0x7000 | TABLE, Some((0x7678, 0x988)));
        check(1, 0x60_0000 | TABLE | LARGE, Some((0x74_5678, 0xb_a988)));
        check(2, 0x4000_0000 | TABLE | LARGE, Some((0x5234_5678, 0x2dcb_a988)));
        // Bits that are not part of the address: protection keys, no-execute.
        check(0, 0x8ff0_0000_0000_7000 | TABLE, Some((0x7678, 0x988)));
    }

    #[test]
    fn unmapped_addresses_are_not_found() {
        for level in 0..5 {
            check(level, 0x7000, None);
        }
        // A table outside of RAM, and a page that would be larger than any.
        check(3, 0xf_f000_0000_0000 | TABLE, None);
        check(4, TABLE | LARGE, None);
    }

    #[test]
    fn kernel_image_is_found_by_its_base_alone() {
        let linux = Synthetic::new(Kind::Linux6_1);
        let text = String::from_utf8(linux.vmcoreinfo.text().to_vec()).unwrap();
        let told = Vmcoreinfo::parse(text.replace("phys_base)=0", "phys_base)=-4096").as_bytes()).unwrap();
        let space = AddressSpace::new(&linux.ram, &told).unwrap();
        assert_eq!(space.translate(KERNEL_IMAGE + NAMES + PAGE_BYTES).unwrap().address.0, NAMES);
        assert_eq!(space.translate(KERNEL_IMAGE + KERNEL_IMAGE_BYTES), None);
    }

    #[test]
    fn readable_pieces_are_read_others_are_named() {
        let linux = Synthetic::new(Kind::Linux6_1);
        let ram_end = linux.ram.bytes.len() as u64;
        let space = AddressSpace::new(&linux.ram, &linux.vmcoreinfo).unwrap();
        // The large page with the descriptors is in RAM, the one after it is not.
        let mut bytes = vec![7; 3 * PAGE_BYTES as usize];
        let mut lost = Vec::new();
        space.read_pieces(VMEMMAP + (2 << 20) - PAGE_BYTES, &mut bytes, |range, error| lost.push((range, error)));
        let page = PAGE_BYTES as usize;
        let at = |offset| Unreadable::at(VMEMMAP + (2 << 20) + offset);
        assert_eq!(lost, [(page..2 * page, at(0)), (2 * page..3 * page, at(PAGE_BYTES))]);
        assert!(bytes[page..].iter().all(|byte| *byte == 0));
        assert!(space.read(VMEMMAP + (2 << 20) - 4, &mut [0; 8]).is_err());
        assert!(space.read(u64::MAX - 3, &mut [0; 8]).is_err());
        assert!(space.read(KERNEL_IMAGE + ram_end - 4, &mut [0; 8]).is_err());
        assert!(space.read(KERNEL_IMAGE + NOTE, &mut [0; 8]).is_ok());
    }
}
