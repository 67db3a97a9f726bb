//! ELF cores: a core made from a RAM file, and the pages of any core.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

const PAGE_BYTES: u64 = 4096;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

/// QEMU's q35: RAM of this size and more is split, with this much below 4 GiB.
const SPLIT_FROM: u64 = 0xb000_0000;
const LOW_WHEN_SPLIT: u64 = 2 << 30;

/// An opened core, with its segments.
pub struct Core {
    file: File,
    pub notes: Vec<u8>,
    /// Guest-physical address of each segment -> offset and bytes in the file.
    loads: BTreeMap<u64, (u64, u64)>,
}

impl Core {
    pub fn open(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let mut head = [0; 64];
        file.read_exact_at(&mut head, 0).unwrap();
        assert!(head.starts_with(b"\x7fELF"), "{} is not an ELF file", path.display());
        let (table, mut count) = (u64_at(&head, 32), u64::from(u16_at(&head, 56)));
        if count == 0xffff {
            // The count does not fit the field, so the first section header has it.
            let mut section = [0; 64];
            file.read_exact_at(&mut section, u64_at(&head, 40)).unwrap();
            count = u64::from(u32_at(&section, 44));
        }
        let mut core = Self { file, notes: Vec::new(), loads: BTreeMap::new() };
        for index in 0..count {
            let mut header = [0; 56];
            core.file.read_exact_at(&mut header, table + index * 56).unwrap();
            let (offset, address, bytes) = (u64_at(&header, 8), u64_at(&header, 24), u64_at(&header, 32));
            match u32_at(&header, 0) {
                PT_NOTE => {
                    core.notes = vec![0; bytes as usize];
                    core.file.read_exact_at(&mut core.notes, offset).unwrap();
                }
                PT_LOAD if bytes > 0 => drop(core.loads.insert(address, (offset, bytes))),
                _ => {}
            }
        }
        core
    }

    /// Calls `call` with the address and bytes of every page in the file.
    fn each_page(&self, mut call: impl FnMut(u64, &[u8])) {
        let mut page = [0; PAGE_BYTES as usize];
        for (address, (offset, bytes)) in &self.loads {
            for at in (0..*bytes).step_by(PAGE_BYTES as usize) {
                self.file.read_exact_at(&mut page, offset + at).unwrap();
                call(address + at, &page);
            }
        }
    }

    fn page(&self, address: u64) -> Option<[u8; PAGE_BYTES as usize]> {
        let (start, (offset, bytes)) = self.loads.range(..=address).next_back()?;
        if address - start >= *bytes {
            return None;
        }
        let mut page = [0; PAGE_BYTES as usize];
        self.file.read_exact_at(&mut page, offset + (address - start)).unwrap();
        Some(page)
    }

    /// Asserts that every non-zero page of `other` is here with the same bytes. Returns their number.
    pub fn assert_holds(&self, other: &Core) -> u64 {
        let mut pages = 0u64;
        other.each_page(|address, bytes| {
            if bytes.iter().any(|byte| *byte != 0) {
                pages += 1;
                let ours = self.page(address).unwrap_or_else(|| panic!("page {address:#x} is missing"));
                assert!(ours == bytes, "page {address:#x} differs");
            }
        });
        pages
    }

    /// Addresses of at least 1000 pages, if there are as many, spread over all non-zero ones.
    pub fn some_addresses(&self) -> Vec<u64> {
        let mut addresses = Vec::new();
        self.each_page(|address, bytes| {
            if bytes.iter().any(|byte| *byte != 0) {
                addresses.push(address);
            }
        });
        let step = (addresses.len() / 1000).max(1);
        addresses.into_iter().step_by(step).collect()
    }

    pub fn pages(&self, addresses: &[u64]) -> Vec<u8> {
        addresses.iter().flat_map(|address| self.page(*address).unwrap()).collect()
    }
}

/// Writes a core of the whole RAM file, with the notes of another core. Holes stay holes.
pub fn from_ram(ram: &Path, notes_of: &Core, path: &Path) {
    let source = File::open(ram).unwrap();
    let ram_bytes = source.metadata().unwrap().len();
    let low = if ram_bytes >= SPLIT_FROM { LOW_WHEN_SPLIT } else { ram_bytes };
    let ranges = [(0, 0, low), (4 << 30, low, ram_bytes - low)];
    let ranges: Vec<_> = ranges.into_iter().filter(|(_, _, bytes)| *bytes > 0).collect();
    let notes_offset = 64 + 56 * (1 + ranges.len() as u64);
    let data = (notes_offset + notes_of.notes.len() as u64).next_multiple_of(PAGE_BYTES);
    let mut head = vec![0; 64];
    notes_of.file.read_exact_at(&mut head[..16], 0).unwrap();
    let fields: [(usize, &[u8]); 8] = [
        (16, &4u16.to_le_bytes()),
        (18, &62u16.to_le_bytes()),
        (20, &1u32.to_le_bytes()),
        (32, &64u64.to_le_bytes()),
        (40, &0u64.to_le_bytes()),
        (52, &64u16.to_le_bytes()),
        (54, &56u16.to_le_bytes()),
        (56, &(1 + ranges.len() as u16).to_le_bytes()),
    ];
    for (at, bytes) in fields {
        head[at..at + bytes.len()].copy_from_slice(bytes);
    }
    let notes_bytes = notes_of.notes.len() as u64;
    head.extend(program_header(PT_NOTE, notes_offset, 0, notes_bytes));
    for (address, offset, bytes) in &ranges {
        head.extend(program_header(PT_LOAD, data + offset, *address, *bytes));
    }
    head.extend(&notes_of.notes);
    let mut target = File::create(path).unwrap();
    target.write_all(&head).unwrap();
    target.set_len(data + ram_bytes).unwrap();
    copy_sparse(&source, &mut target, data);
}

fn copy_sparse(source: &File, target: &mut File, to: u64) {
    let mut block = vec![0; 1 << 20];
    let mut offset = 0;
    while let Ok(start) = rustix::fs::seek(source, rustix::fs::SeekFrom::Data(offset)) {
        offset = rustix::fs::seek(source, rustix::fs::SeekFrom::Hole(start)).unwrap();
        target.seek(SeekFrom::Start(to + start)).unwrap();
        for at in (start..offset).step_by(block.len()) {
            let bytes = (offset - at).min(block.len() as u64) as usize;
            source.read_exact_at(&mut block[..bytes], at).unwrap();
            target.write_all(&block[..bytes]).unwrap();
        }
    }
}

fn program_header(kind: u32, offset: u64, address: u64, bytes: u64) -> Vec<u8> {
    let flags = if kind == PT_LOAD { 7u32 } else { 0 };
    let mut header = [kind.to_le_bytes(), flags.to_le_bytes()].concat();
    for word in [offset, 0, address, bytes, bytes, 0] {
        header.extend(word.to_le_bytes());
    }
    header
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}
