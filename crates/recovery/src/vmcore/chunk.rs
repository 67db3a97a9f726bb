//! Chunks: a dump is written piece by piece, so that memory comes free while it is written.
//!
//! chunk -> `Packer::pack` (any thread: read, zero test, compress) -> `Packed` -> one writer
//!
//! A chunk is a run of page frames in whole 2 MiB blocks. So its memory is released in the largest steps, six times as
//! fast as page by page. Blocks without kept pages cost nothing. Pages that were written before a resume are left
//! alone, because their memory may be gone.

use std::ops::Range;
use std::sync::Arc;

use hearth_memory::PAGE_BYTES;

use super::bitmap::Bitmap;
use super::compress::{Compression, Compressor, PAGE};
use super::memory::{PhysicalMemory, address_of_pfn};

/// Memory is released in steps of this size: a huge page of x86.
const BLOCK_PAGES: u64 = (2 << 20) / PAGE_BYTES;
/// Pages read at once: 256 KiB, which stay in a core's cache until they are compressed.
const READ_PAGES: u64 = 64;
/// Shorter runs of zero pages are written to files where each page has a fixed offset, because a hole would cut the
/// write in two.
const HOLE_PAGES_MIN: usize = 16;

/// A piece of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Whole 2 MiB blocks. Of their pages only those that are kept and not yet written belong to the chunk.
    pub pfns: Range<u64>,
    /// Number of these pages.
    pub pages: u64,
    /// Rank of the first kept page: the number of kept pages before it.
    pub(super) first_rank: u64,
}

/// A chunk's pages as they go to the disk.
pub struct Packed {
    pub(super) chunk: Chunk,
    /// One for each kept page of the chunk's page frames.
    pub(super) pages: Vec<PackedPage>,
    pub(super) blob: Blob,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PackedPage {
    /// Already in the file.
    Before,
    Zero,
    /// Could not be read.
    Lost,
    Data {
        /// Offset in the blob.
        at: u32,
        bytes: u32,
        flags: u32,
    },
}

impl Packed {
    /// The chunk that was packed.
    pub fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// Number of bytes that it adds to the file.
    pub fn bytes(&self) -> u64 {
        self.blob.padded().len() as u64
    }
}

/// Page-aligned bytes, as O_DIRECT requires.
pub(super) struct Blob {
    /// The first bytes only fill up to the start of a page.
    bytes: Vec<u8>,
    start: usize,
}

impl Blob {
    /// Host memory is taken only as the blob is filled.
    fn new(capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(capacity + 2 * PAGE);
        let start = (bytes.as_ptr() as usize).next_multiple_of(PAGE) - bytes.as_ptr() as usize;
        bytes.resize(start, 0);
        Self { bytes, start }
    }

    fn push(&mut self, part: &[u8]) -> u32 {
        let at = self.bytes.len() - self.start;
        debug_assert!(self.bytes.len() + part.len() + PAGE <= self.bytes.capacity(), "a move would lose the alignment");
        self.bytes.extend_from_slice(part);
        u32::try_from(at).expect("chunks are below 4 GiB")
    }

    fn pad(&mut self) {
        let used = self.bytes.len() - self.start;
        self.bytes.resize(self.start + used.next_multiple_of(PAGE), 0);
    }

    /// The bytes in whole pages.
    pub fn padded(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// The chunks of all pages that are kept and not written, in ascending order.
pub(super) fn chunks(kept: &Bitmap, written: &Bitmap, chunk_bytes: u64) -> Vec<Chunk> {
    let pages_max = (chunk_bytes / PAGE_BYTES).max(BLOCK_PAGES);
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut rank = 0;
    let mut block = 0;
    while let Some(next) = kept.next(block, true) {
        block = next / BLOCK_PAGES * BLOCK_PAGES;
        let pfns = block..(block + BLOCK_PAGES).min(kept.pages());
        let in_block = kept.count_in(pfns.clone());
        let pages = in_block - written.count_in(pfns.clone());
        match chunks.last_mut() {
            _ if pages == 0 => {}
            Some(last) if last.pages + pages <= pages_max => {
                last.pfns.end = pfns.end;
                last.pages += pages;
            }
            _ => chunks.push(Chunk { pfns, pages, first_rank: rank }),
        }
        rank += in_block;
        block += BLOCK_PAGES;
    }
    chunks
}

/// Packs chunks. Each packing thread needs its own.
pub struct Packer {
    kept: Arc<Bitmap>,
    written: Arc<Bitmap>,
    flags: u32,
    /// Each page has a fixed offset in the file: its data is not compressed, and only long runs of zeroes are left out.
    in_place: bool,
    compressor: Compressor,
    pages: Vec<u8>,
}

impl Packer {
    /// `compression` is `None` for files where each page has a fixed offset.
    pub(super) fn new(kept: Arc<Bitmap>, written: Arc<Bitmap>, compression: Option<Compression>) -> Self {
        let method = compression.unwrap_or(Compression::None);
        Self {
            kept,
            written,
            flags: method.flag(),
            in_place: compression.is_none(),
            compressor: Compressor::new(method),
            pages: vec![0; READ_PAGES as usize * PAGE],
        }
    }

    /// Reads and compresses a chunk. It changes nothing else, so the same chunk may be packed again.
    pub fn pack(&mut self, chunk: &Chunk, memory: &(impl PhysicalMemory + ?Sized)) -> Packed {
        let kept = self.kept.clone();
        let blob = Blob::new(chunk.pages as usize * PAGE);
        let mut packed = Packed { chunk: chunk.clone(), pages: Vec::new(), blob };
        let mut pfns = kept.iter_in(chunk.pfns.clone()).peekable();
        while let Some(first) = pfns.next() {
            if self.written.contains(first) {
                packed.pages.push(PackedPage::Before);
                continue;
            }
            let mut end = first + 1;
            while end - first < READ_PAGES && pfns.next_if(|next| *next == end && !self.written.contains(end)).is_some()
            {
                end += 1;
            }
            self.pack_run(first..end, memory, &mut packed);
        }
        packed.blob.pad();
        packed
    }

    fn pack_run(&mut self, pfns: Range<u64>, memory: &(impl PhysicalMemory + ?Sized), packed: &mut Packed) {
        let mut pages = std::mem::take(&mut self.pages);
        let count = (pfns.end - pfns.start) as usize;
        let run = &mut pages[..count * PAGE];
        if memory.read(address_of_pfn(pfns.start), run).is_ok() {
            self.pack_pages(run, packed);
        } else {
            for (pfn, page) in pfns.zip(run.chunks_exact_mut(PAGE)) {
                match memory.read(address_of_pfn(pfn), page) {
                    Ok(()) => self.pack_pages(page, packed),
                    Err(_) => packed.pages.push(PackedPage::Lost),
                }
            }
        }
        self.pages = pages;
    }

    fn pack_pages(&mut self, mut pages: &[u8], packed: &mut Packed) {
        while !pages.is_empty() {
            let zeroes = pages.chunks_exact(PAGE).take_while(|page| is_zero(page)).count();
            if zeroes > 0 && (!self.in_place || zeroes >= HOLE_PAGES_MIN) {
                packed.pages.extend(std::iter::repeat_n(PackedPage::Zero, zeroes));
                pages = &pages[zeroes * PAGE..];
                continue;
            }
            let (now, later) = pages.split_at(zeroes.max(1) * PAGE);
            now.chunks_exact(PAGE).for_each(|page| self.pack_page(page, packed));
            pages = later;
        }
    }

    fn pack_page(&mut self, page: &[u8], packed: &mut Packed) {
        let (bytes, flags) = self.compressor.compress(page).map_or((page, 0), |bytes| (bytes, self.flags));
        let at = packed.blob.push(bytes);
        packed.pages.push(PackedPage::Data { at, bytes: bytes.len() as u32, flags });
    }
}

fn is_zero(page: &[u8]) -> bool {
    // In pieces of 64 bytes: the compiler vectorises this, and most pages fail at once.
    page.chunks_exact(64).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}
