//! Pages: a file of memory pages, of a guest's whole memory or of its working set, in any order.
//!
//! ```text
//! header    4096 bytes  |  0 magic "HRTHPAGE" |  8 u32 version = 2 | 12 u32 pages a chunk, at most | 16 u64 pages of RAM
//!                       | 24 16 random bytes | 40 32 bytes: seal of its memory for a working set, 0 for memory
//! chunks                | up to 16 pages each, one after the other: whole pages, so aligned, or zstd
//!           16 a page   | or their locations: 0 u64 block | 8 u32 disk, its position in the manifest | 12 u32 0; these chunks come last
//! index     40 a chunk  |  0 u64 offset |  8 u32 bytes stored | 12 u16 pages | 14 u16 1: zstd, 2: on a disk | 16 checksum | 32 u32 age | 36 u32 source
//!            4 a page   | u32 number of the page in RAM, in the order of the chunks
//! trailer   64 bytes    |  0 magic "HRTHPEND" |  8 u32 version | 12 u32 chunks | 16 u64 offset of the index
//!                       | 24 u64 pages | 32 BLAKE3 of header, index and the trailer up to here
//! ```
//! All numbers are little-endian. Age and source (0: traces, 1: a scan) are those of the chunk's pages in a working
//! set, and 0 otherwise. Pages of zeroes are left out, except those that became zero during the save. A checksum is the
//! first 16 bytes of the BLAKE3 of the stored bytes, or of the pages if these are on a disk. The random bytes make each
//! seal (the trailer's BLAKE3) unique: a sleeping guest may be saved twice with the same memory, and a machine that is
//! loaded from one file must not take another for it. The index comes last. So a file is written in one go, and a file
//! that was cut off has no trailer.
//!
//! Version 1 had no pages on disks. Earlier versions of Hearth stored 0 as a working set's seal.
//!
//! One page fault reads one chunk. Larger chunks would bring more pages than the guest asked for, and compress better.

mod reader;
mod source;
mod writer;

pub use reader::{PageReader, PagesExpected, Reading};
pub(super) use source::Source as PageSource;
pub use writer::PageWriter;

use super::blocks::BlockRef;

/// One page of memory.
pub type Page = [u8; PAGE_BYTES];

const PAGE_BYTES: usize = hearth_memory::PAGE_BYTES as usize;
pub(super) const CHUNK_PAGES: usize = 16;
const VERSION: u32 = 2;
const HEADER_MAGIC: &[u8; 8] = b"HRTHPAGE";
const TRAILER_MAGIC: &[u8; 8] = b"HRTHPEND";
const HEADER_BYTES: usize = 4096;
const ENTRY_BYTES: usize = 40;
const TRAILER_BYTES: usize = 64;
const TRAILER_SEALED_BYTES: usize = 32;
/// Where the header has the seal of a working set's memory.
const BELONGS_TO: std::ops::Range<usize> = 40..72;
const CHECKSUM_BYTES: usize = 16;
const FLAG_ZSTD: u16 = 1;
const FLAG_ELSEWHERE: u16 = 2;
const PLACE_BYTES: usize = 16;
const SOURCE_TRACE: u32 = 0;
const SOURCE_SCAN: u32 = 1;
/// No chunk and no page has this number.
const NOWHERE: u32 = u32::MAX;

/// How chunks are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Chunks are stored as they are.
    None,
    /// Zstd at level 1. A chunk that does not become smaller is stored as it is.
    Zstd,
}

/// Identity of a finished file: its length, its number of pages and its seal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// Number of pages in it.
    pub pages: u64,
    /// BLAKE3 checksum of its index, in hexadecimal.
    pub seal: String,
}

/// Pages of a chunk that are stored as their locations on a disk.
#[derive(Debug, Default)]
pub struct Elsewhere {
    pages: Vec<u32>,
    blocks: Vec<BlockRef>,
    hasher: blake3::Hasher,
}

impl Elsewhere {
    pub(super) fn add(&mut self, page: u32, at: BlockRef, bytes: &[u8]) {
        self.pages.push(page);
        self.blocks.push(at);
        self.hasher.update(bytes);
    }

    pub(super) fn blocks(&self) -> &[BlockRef] {
        &self.blocks
    }

    /// Numbers of these pages in RAM.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// `None` without pages.
    pub(super) fn sealed(self) -> Option<Self> {
        (!self.pages.is_empty()).then_some(self)
    }

    fn encode(&self) -> Vec<u8> {
        let mut stored = Vec::with_capacity(self.blocks.len() * PLACE_BYTES);
        for BlockRef { disk, block } in &self.blocks {
            stored.extend(block.to_le_bytes());
            stored.extend(disk.to_le_bytes());
            stored.extend([0; 4]);
        }
        stored
    }

    fn decode(stored: &[u8]) -> Vec<BlockRef> {
        let places = stored.chunks_exact(PLACE_BYTES);
        places.map(|place| BlockRef { block: u64_at(place, 0), disk: u32_at(place, 8) }).collect()
    }
}

#[derive(Clone, Debug)]
struct Chunk {
    offset: u64,
    stored_bytes: u32,
    pages: u16,
    flags: u16,
    checksum: [u8; CHECKSUM_BYTES],
    age: u32,
    source: u32,
}

impl Chunk {
    fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[..8].copy_from_slice(&self.offset.to_le_bytes());
        entry[8..12].copy_from_slice(&self.stored_bytes.to_le_bytes());
        entry[12..14].copy_from_slice(&self.pages.to_le_bytes());
        entry[14..16].copy_from_slice(&self.flags.to_le_bytes());
        entry[16..32].copy_from_slice(&self.checksum);
        entry[32..36].copy_from_slice(&self.age.to_le_bytes());
        entry[36..40].copy_from_slice(&self.source.to_le_bytes());
        entry
    }

    fn decode(entry: &[u8]) -> Self {
        Self {
            offset: u64_at(entry, 0),
            stored_bytes: u32_at(entry, 8),
            pages: u16::from_le_bytes([entry[12], entry[13]]),
            flags: u16::from_le_bytes([entry[14], entry[15]]),
            checksum: entry[16..32].try_into().expect("16 bytes"),
            age: u32_at(entry, 32),
            source: u32_at(entry, 36),
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn checksum(stored: &[u8]) -> [u8; CHECKSUM_BYTES] {
    shortened(blake3::hash(stored))
}

fn shortened(hash: blake3::Hash) -> [u8; CHECKSUM_BYTES] {
    hash.as_bytes()[..CHECKSUM_BYTES].try_into().expect("a hash is longer")
}

#[cfg(test)]
pub(super) mod tests;
