//! Headers of an ELF64 core of an x86-64 machine: written as makedumpfile requires them, read as any tool writes them.

use std::io;
use std::ops::Range;

use hearth_memory::PAGE_BYTES;

use super::super::bitmap::Bitmap;
use super::super::bytes::{ReadAt, put, u16_at, u32_at, u64_at};

const HEADER_BYTES: u64 = 64;
const PROGRAM_HEADER_BYTES: u64 = 56;
const SECTION_HEADER_BYTES: u64 = 64;
/// ELF, 64 bits, little endian, version 1.
const IDENTITY: &[u8] = b"\x7fELF\x02\x01\x01";
const ET_CORE: u16 = 4;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const READ_WRITE_EXECUTE: u32 = 7;
/// This many program headers or more do not fit the header's field; section header 0 then has their number.
const PN_XNUM: u64 = 0xffff;
/// Maximum number of program headers, 224 MiB of them: a 16 TiB guest of which every second 2 MiB are kept.
const PROGRAM_HEADERS_MAX: u64 = 4 << 20;

/// Contents of a file, according to its headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    /// Sorted by address, without overlap.
    pub loads: Vec<Load>,
    /// Ranges of the file that are notes.
    pub notes: Vec<Range<u64>>,
}

/// Memory that is in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Guest-physical address.
    pub address: u64,
    /// Length, in bytes.
    pub bytes: u64,
    /// Offset in the file.
    pub offset: u64,
}

/// Why an ELF file cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum ElfError {
    #[error("the file is not an ELF core of an x86-64 machine")]
    NotACore,
    #[error("the headers cannot be read")]
    Unreadable(#[source] io::Error),
    #[error("{0} program headers are more than {PROGRAM_HEADERS_MAX}")]
    TooMany(u64),
    #[error("a program header of {0} bytes is not one of ELF64")]
    Entry(u16),
    #[error("the program header for address {0:#x} contradicts itself or another")]
    Implausible(u64),
}

impl Load {
    /// First address after it.
    pub fn end(&self) -> u64 {
        self.address + self.bytes
    }

    /// Page frames that lie wholly in it.
    pub fn pfns(&self) -> Range<u64> {
        let start = self.address.div_ceil(PAGE_BYTES);
        start..(self.end() / PAGE_BYTES).max(start)
    }
}

impl Headers {
    /// Reads and checks the headers of a file.
    pub fn read(source: &(impl ReadAt + ?Sized)) -> Result<Self, ElfError> {
        let mut header = [0; HEADER_BYTES as usize];
        source.read_exact_at(&mut header, 0).map_err(|_| ElfError::NotACore)?;
        let is_core = u16_at(&header, 16) == ET_CORE && u16_at(&header, 18) == EM_X86_64;
        if !header.starts_with(IDENTITY) || !is_core {
            return Err(ElfError::NotACore);
        }
        let count = program_headers(source, &header)?;
        let entry = u16_at(&header, 54);
        if u64::from(entry) != PROGRAM_HEADER_BYTES {
            return Err(ElfError::Entry(entry));
        }
        let table = source.read_part(u64_at(&header, 32), count * PROGRAM_HEADER_BYTES);
        let table = table.map_err(ElfError::Unreadable)?;
        let mut headers = Self::default();
        for entry in table.chunks_exact(PROGRAM_HEADER_BYTES as usize) {
            headers.take(entry)?;
        }
        headers.loads.sort_by_key(|load| load.address);
        match headers.loads.windows(2).find(|pair| pair[0].end() > pair[1].address) {
            Some(pair) => Err(ElfError::Implausible(pair[1].address)),
            None => Ok(headers),
        }
    }

    fn take(&mut self, entry: &[u8]) -> Result<(), ElfError> {
        let (kind, offset, address, bytes) = (u32_at(entry, 0), u64_at(entry, 8), u64_at(entry, 24), u64_at(entry, 32));
        if address.checked_add(bytes).is_none() || offset.checked_add(bytes).is_none() {
            return Err(ElfError::Implausible(address));
        }
        match kind {
            PT_NOTE => self.notes.push(offset..offset + bytes),
            // Memory that a program header names beyond its bytes in the file was not kept.
            PT_LOAD if bytes > 0 => self.loads.push(Load { address, bytes, offset }),
            _ => {}
        }
        Ok(())
    }
}

fn program_headers(source: &(impl ReadAt + ?Sized), header: &[u8]) -> Result<u64, ElfError> {
    let mut count = u64::from(u16_at(header, 56));
    if count == PN_XNUM {
        let mut section = [0; SECTION_HEADER_BYTES as usize];
        source.read_exact_at(&mut section, u64_at(header, 40)).map_err(ElfError::Unreadable)?;
        count = u32_at(&section, 44).into();
    }
    if count > PROGRAM_HEADERS_MAX {
        return Err(ElfError::TooMany(count));
    }
    Ok(count)
}

/// Number of runs in a file that is to be written, and the offsets of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Places {
    pub runs: u64,
    pub notes: u64,
    pub data: u64,
    pub end: u64,
}

impl Places {
    /// Offsets in a file with these pages and `notes_bytes` bytes of notes.
    pub fn of(kept: &Bitmap, notes_bytes: u64) -> Self {
        let runs = kept.runs().count() as u64;
        let headers = HEADER_BYTES + (1 + runs) * PROGRAM_HEADER_BYTES;
        let notes = headers + if has_section(runs) { SECTION_HEADER_BYTES } else { 0 };
        let data = (notes + notes_bytes).next_multiple_of(PAGE_BYTES);
        Self { runs, notes, data, end: data + kept.count() * PAGE_BYTES }
    }
}

fn has_section(runs: u64) -> bool {
    runs + 1 >= PN_XNUM
}

/// The first bytes of a file: without them nothing else in it means anything.
pub(super) fn file_header(places: &Places) -> Vec<u8> {
    let mut header = vec![0; HEADER_BYTES as usize];
    let count = places.runs + 1;
    put(&mut header, 0, IDENTITY);
    put(&mut header, 16, &ET_CORE.to_le_bytes());
    put(&mut header, 18, &EM_X86_64.to_le_bytes());
    put(&mut header, 20, &1_u32.to_le_bytes());
    put(&mut header, 32, &HEADER_BYTES.to_le_bytes());
    put(&mut header, 52, &(HEADER_BYTES as u16).to_le_bytes());
    put(&mut header, 54, &(PROGRAM_HEADER_BYTES as u16).to_le_bytes());
    put(&mut header, 56, &(count.min(PN_XNUM) as u16).to_le_bytes());
    if has_section(places.runs) {
        put(&mut header, 40, &(HEADER_BYTES + count * PROGRAM_HEADER_BYTES).to_le_bytes());
        put(&mut header, 58, &(SECTION_HEADER_BYTES as u16).to_le_bytes());
        put(&mut header, 60, &1_u16.to_le_bytes());
    }
    header
}

/// Everything between the file's header and the data.
pub(super) fn tables(kept: &Bitmap, notes: &[u8], places: &Places) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((places.data - HEADER_BYTES) as usize);
    put_program_header(&mut bytes, PT_NOTE, 0, Load { address: 0, bytes: notes.len() as u64, offset: places.notes });
    let mut offset = places.data;
    for run in kept.runs() {
        let load = Load { address: run.start * PAGE_BYTES, bytes: (run.end - run.start) * PAGE_BYTES, offset };
        put_program_header(&mut bytes, PT_LOAD, READ_WRITE_EXECUTE, load);
        offset += load.bytes;
    }
    if has_section(places.runs) {
        let mut section = [0; SECTION_HEADER_BYTES as usize];
        put(&mut section, 44, &((places.runs + 1) as u32).to_le_bytes());
        bytes.extend(section);
    }
    bytes.extend(notes);
    bytes
}

/// Offset of `tables`.
pub(super) const TABLES_AT: u64 = HEADER_BYTES;

fn put_program_header(bytes: &mut Vec<u8>, kind: u32, flags: u32, load: Load) {
    bytes.extend(kind.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    // No alignment: with one, and with data at the start of a page, crash takes the file for a netdump and never asks
    // for KASLR.
    for word in [load.offset, 0, load.address, load.bytes, load.bytes, 0] {
        bytes.extend(word.to_le_bytes());
    }
}
