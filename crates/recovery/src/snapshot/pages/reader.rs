//! Reader of a file of pages. It reads the index at once and chunks as they are asked for, from any thread.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_store::Urgency;

use super::source::{Found, Source};
use super::*;
use crate::snapshot::blocks::DiskBlocks;
use crate::snapshot::{SnapshotError, Source as SeenBy};

/// Page numbers have 32 bits, which is enough for 16 TiB of RAM.
const RAM_PAGES_MAX: u64 = NOWHERE as u64;

/// A file of pages whose index is whole and consistent.
#[derive(Debug)]
pub struct PageReader {
    source: Source,
    path: PathBuf,
    ram_pages: u64,
    pub(super) entries: Vec<Chunk>,
    /// Start of each chunk's pages in `pages`, and one past the last.
    firsts: Vec<u32>,
    pages: Vec<u32>,
    places: Places,
    sealed: Sealed,
    belongs_to: Option<String>,
    /// Disks with the chunks that are not in the file.
    disks: Option<Arc<DiskBlocks>>,
}

/// Buffers of one reading thread, and the chunk that is in them.
#[derive(Debug)]
pub struct Reading {
    stored: Vec<u8>,
    raw: Vec<u8>,
    chunk: u32,
    urgency: Urgency,
}

/// Reads a file's header and trailer, and checks their magic numbers and versions.
fn read_ends(source: &Source, path: &Path, bytes: u64) -> Result<(Vec<u8>, [u8; TRAILER_BYTES]), SnapshotError> {
    let damaged = |what: &str| SnapshotError::damaged(path, what);
    let read = |offset, into: &mut [u8]| source.read(path, into, offset, Urgency::Demand);
    if bytes < (HEADER_BYTES + TRAILER_BYTES) as u64 {
        return Err(damaged("it is too short; was it cut off?"));
    }
    let (mut header, mut trailer) = (vec![0; HEADER_BYTES], [0; TRAILER_BYTES]);
    read(0, &mut header)?;
    read(bytes - TRAILER_BYTES as u64, &mut trailer)?;
    if &header[..8] != HEADER_MAGIC {
        return Err(damaged("it does not begin as a file of pages does"));
    }
    if &trailer[..8] != TRAILER_MAGIC {
        return Err(damaged("it does not end as a file of pages does; was it cut off?"));
    }
    for found in [u32_at(&header, 8), u32_at(&trailer, 8)] {
        if !(1..=VERSION).contains(&found) {
            return Err(SnapshotError::Version { path: path.to_owned(), found });
        }
    }
    Ok((header, trailer))
}

/// Facts known of a file of pages before it is opened. A file that contradicts them is refused before it takes memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct PagesExpected {
    /// Length of the file, in bytes.
    pub bytes: Option<u64>,
    /// Number of pages of the guest's RAM.
    pub ram_pages: Option<u64>,
}

impl PageReader {
    /// Opens a file on this host.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        Self::of(Source::open(path)?, path, &PagesExpected::default())
    }

    /// `path` names the file in messages.
    pub(in crate::snapshot) fn of(
        source: Source,
        path: &Path,
        expected: &PagesExpected,
    ) -> Result<Self, SnapshotError> {
        let bytes = source.bytes(path)?;
        let damaged = |what: &str| SnapshotError::damaged(path, what);
        if let Some(saved) = expected.bytes.filter(|saved| *saved != bytes) {
            return Err(damaged(&format!("it has {bytes} bytes, and had {saved} when it was saved")));
        }
        let read = |offset, into: &mut [u8]| source.read(path, into, offset, Urgency::Demand);
        let (header, trailer) = read_ends(&source, path, bytes)?;
        let (ram_pages, chunk_count) = (u64_at(&header, 16), u32_at(&trailer, 12));
        let (index_offset, page_count) = (u64_at(&trailer, 16), u64_at(&trailer, 24));
        let index_bytes = (bytes - TRAILER_BYTES as u64).saturating_sub(index_offset);
        let entries_bytes = u64::from(chunk_count) * ENTRY_BYTES as u64;
        if index_offset < HEADER_BYTES as u64
            || ram_pages > RAM_PAGES_MAX
            || page_count > ram_pages
            || u64::from(chunk_count) > page_count
            || index_bytes != entries_bytes + page_count * 4
        {
            return Err(damaged("its counts make no sense"));
        }
        if expected.ram_pages.is_some_and(|expected| expected != ram_pages) {
            return Err(damaged("it is of a machine with another amount of memory"));
        }
        // Read in pieces, each checked before the next one is read: a file with a hole for an index takes no memory.
        let mut hasher = blake3::Hasher::new();
        hasher.update(&header);
        let mut chunks = Chunks::default();
        let mut piece = Vec::new();
        for from in (0..entries_bytes).step_by(INDEX_PIECE_BYTES) {
            piece.resize((entries_bytes - from).min(INDEX_PIECE_BYTES as u64) as usize, 0);
            read(index_offset + from, &mut piece)?;
            hasher.update(&piece);
            for entry in piece.chunks_exact(ENTRY_BYTES) {
                chunks.push(Chunk::decode(entry)).ok_or_else(|| damaged("its chunks make no sense"))?;
            }
        }
        let Chunks { entries, firsts, offset } = chunks;
        if offset != index_offset || firsts.last().is_none_or(|last| u64::from(*last) != page_count) {
            return Err(damaged("its chunks make no sense"));
        }
        let mut numbers = vec![0; page_count as usize * 4];
        read(index_offset + entries_bytes, &mut numbers)?;
        hasher.update(&numbers).update(&trailer[..TRAILER_SEALED_BYTES]);
        let seal = hasher.finalize();
        if seal.as_bytes()[..] != trailer[TRAILER_SEALED_BYTES..] {
            return Err(damaged("the checksum of its index is wrong"));
        }
        let pages: Vec<_> = numbers.chunks_exact(4).map(|number| u32_at(number, 0)).collect();
        drop(numbers);
        let places = Places::of(&firsts, &pages, ram_pages).ok_or_else(|| damaged("its pages make no sense"))?;
        let sealed = Sealed { bytes, pages: page_count, seal: seal.to_hex().to_string() };
        let belongs_to: [u8; 32] = header[BELONGS_TO].try_into().expect("32 bytes");
        let belongs_to = (belongs_to != [0; 32]).then(|| blake3::Hash::from_bytes(belongs_to).to_hex().to_string());
        let (path, disks) = (path.to_owned(), None);
        Ok(Self { source, path, ram_pages, entries, firsts, pages, places, sealed, belongs_to, disks })
    }

    /// Seal of the memory whose working set this is; `None` if it is memory, or if an earlier Hearth wrote it.
    pub(crate) fn belongs_to(&self) -> Option<&str> {
        self.belongs_to.as_deref()
    }

    /// Whether some of its pages are on the snapshot's disks.
    pub(crate) fn needs_disks(&self) -> bool {
        self.entries.iter().any(|chunk| chunk.flags == FLAG_ELSEWHERE)
    }

    /// Reads such pages from these disks.
    pub(crate) fn with_disks(self, disks: Arc<DiskBlocks>) -> Self {
        Self { disks: Some(disks), ..self }
    }

    /// Name of the file in messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length, number of pages and seal, which identify this file.
    pub fn sealed(&self) -> &Sealed {
        &self.sealed
    }

    /// Number of pages of the guest's whole RAM.
    pub fn ram_pages(&self) -> u64 {
        self.ram_pages
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Numbers of all stored pages, in the order of the file.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Numbers of a chunk's pages.
    pub fn pages_of(&self, chunk: u32) -> &[u32] {
        let chunk = chunk as usize;
        &self.pages[self.firsts[chunk] as usize..self.firsts[chunk + 1] as usize]
    }

    /// Age and source of a chunk's pages.
    pub(crate) fn mark_of(&self, chunk: u32) -> (u32, SeenBy) {
        let entry = &self.entries[chunk as usize];
        (entry.age, if entry.source == SOURCE_SCAN { SeenBy::Scan } else { SeenBy::Trace })
    }

    /// The chunk that holds a page; `None` for a page of zeroes.
    pub(crate) fn chunk_of(&self, page: u32) -> Option<u32> {
        self.places.chunk_of(page)
    }

    /// Whether it is in an object store.
    pub fn is_far(&self) -> bool {
        matches!(self.source, Source::Object(_))
    }

    /// Announces that chunks are read in no order: the host should read nothing ahead.
    pub(crate) fn expect_random(&self) {
        self.source.expect_random(&self.path);
    }

    /// Starts reading ahead from this chunk on: `bytes` of a local file, more of an object. Returns the file offset at
    /// which to call it again.
    pub(crate) fn fill_ahead(&self, chunk: u32, bytes: u64) -> u64 {
        self.source.fill_ahead(&self.path, self.offset_of(chunk), bytes)
    }

    /// Starts reading ahead all chunks from this one on. Returns the file offset at which to call it again.
    pub(crate) fn prefetch_ahead(&self, chunk: u32) -> u64 {
        self.source.prefetch_ahead(self.offset_of(chunk))
    }

    /// Offset of a chunk in the file.
    pub fn offset_of(&self, chunk: u32) -> u64 {
        self.entries[chunk as usize].offset
    }

    /// Bytes that are read for a chunk, from the file or from a disk.
    pub(crate) fn read_bytes_of(&self, chunk: u32) -> u64 {
        let entry = &self.entries[chunk as usize];
        if entry.flags == FLAG_ELSEWHERE {
            u64::from(entry.pages) * PAGE_BYTES as u64
        } else {
            entry.stored_bytes.into()
        }
    }

    /// Buffers of a thread that waits for what it reads.
    pub fn reading(&self) -> Reading {
        self.reading_for(Urgency::Demand)
    }

    /// Buffers of a thread that reads with this urgency.
    pub(crate) fn reading_for(&self, urgency: Urgency) -> Reading {
        Reading { stored: Vec::new(), raw: Vec::new(), chunk: NOWHERE, urgency }
    }

    /// Reads a chunk and checks it. Returns the bytes of its pages.
    pub fn read<'a>(&self, number: u32, reading: &'a mut Reading) -> Result<&'a [u8], SnapshotError> {
        if reading.chunk != number {
            reading.chunk = NOWHERE;
            self.fetch(number, reading)?;
            reading.chunk = number;
        }
        Ok(&reading.raw)
    }

    fn fetch(&self, number: u32, reading: &mut Reading) -> Result<(), SnapshotError> {
        let chunk = &self.entries[number as usize];
        self.fetch_stored(number, reading)?;
        if chunk.flags == FLAG_ELSEWHERE {
            return self.fetch_elsewhere(number, reading);
        }
        if chunk.flags & FLAG_ZSTD == 0 {
            std::mem::swap(&mut reading.stored, &mut reading.raw);
            return Ok(());
        }
        let raw_bytes = usize::from(chunk.pages) * PAGE_BYTES;
        reading.raw.resize(raw_bytes, 0);
        match zstd::bulk::decompress_to_buffer(&reading.stored, &mut reading.raw[..]) {
            Ok(bytes) if bytes == raw_bytes => Ok(()),
            _ => Err(self.damaged(number, "they cannot be decompressed")),
        }
    }

    /// Reads and checks the stored bytes of a chunk; from another file, if the snapshot's was replaced by a copy.
    fn fetch_stored(&self, number: u32, reading: &mut Reading) -> Result<(), SnapshotError> {
        let Err(error) = self.try_fetch_stored(number, reading) else { return Ok(()) };
        match self.source.look_again(&self.path, |file| self.is_sealed_as(file)) {
            Found::Ours => self.try_fetch_stored(number, reading),
            Found::Another => {
                let what = "what has its name is not the file that was opened, nor a whole copy of it; put one there";
                Err(self.damaged(number, what))
            }
            Found::Nothing => Err(error),
        }
    }

    /// Whether a file has the length and the seal of the opened one. Its chunks are checked by the known index.
    fn is_sealed_as(&self, file: &File) -> io::Result<bool> {
        let Some(trailer_at) = self.sealed.bytes.checked_sub(TRAILER_BYTES as u64) else { return Ok(false) };
        let mut trailer = [0; TRAILER_BYTES];
        file.read_exact_at(&mut trailer, trailer_at)?;
        let seal: [u8; TRAILER_BYTES - TRAILER_SEALED_BYTES] =
            trailer[TRAILER_SEALED_BYTES..].try_into().expect("what is behind it");
        let is_named = blake3::Hash::from_bytes(seal).to_hex().as_str() == self.sealed.seal;
        Ok(is_named && file.metadata()?.len() == self.sealed.bytes)
    }

    fn try_fetch_stored(&self, number: u32, reading: &mut Reading) -> Result<(), SnapshotError> {
        let chunk = &self.entries[number as usize];
        self.read_stored(number, reading)?;
        // The checksum of a chunk on a disk is that of its pages.
        if chunk.flags == FLAG_ELSEWHERE || checksum(&reading.stored) == chunk.checksum {
            return Ok(());
        }
        // A copy kept on this host may be what is wrong.
        if self.source.forget(chunk.offset, chunk.stored_bytes.into()) {
            self.read_stored(number, reading)?;
        }
        if checksum(&reading.stored) == chunk.checksum {
            return Ok(());
        }
        self.source.forget(chunk.offset, chunk.stored_bytes.into());
        Err(self.damaged(number, "their checksum is wrong"))
    }

    fn read_stored(&self, number: u32, reading: &mut Reading) -> Result<(), SnapshotError> {
        let chunk = &self.entries[number as usize];
        reading.stored.resize(chunk.stored_bytes as usize, 0);
        let read = self.source.read(&self.path, &mut reading.stored, chunk.offset, reading.urgency);
        read.map_err(|error| match error {
            SnapshotError::Store(source) => {
                let (first, last) = self.bounds(number);
                SnapshotError::AwayPages { first, last, source }
            }
            _ => self.damaged(number, "the file cannot be read there"),
        })
    }

    /// Reads a chunk from the disk and blocks that `reading` names.
    fn fetch_elsewhere(&self, number: u32, reading: &mut Reading) -> Result<(), SnapshotError> {
        let Some(disks) = &self.disks else {
            return Err(self.damaged(number, "the disks that hold them are not known"));
        };
        let blocks = Elsewhere::decode(&reading.stored);
        reading.raw.resize(blocks.len() * PAGE_BYTES, 0);
        let mut read = || -> io::Result<bool> {
            disks.read(&blocks, &mut reading.raw)?;
            Ok(checksum(&reading.raw) == self.entries[number as usize].checksum)
        };
        let mut found = read();
        if !matches!(found, Ok(true)) {
            // The disk may have been replaced by another file, as may its backing images.
            blocks.first().into_iter().for_each(|block| disks.look_again(block.disk));
            found = read();
        }
        if matches!(found, Ok(true)) {
            return Ok(());
        }
        let at = |block: Option<&BlockRef>| block.map_or(0, |block| block.block);
        let (first, last) = (at(blocks.first()), at(blocks.last()));
        let how = if found.is_ok() { "are not what they were when it was saved" } else { "cannot be read" };
        let damaged = self.damaged(number, &format!("blocks {first} to {last} of this disk, which hold them, {how}"));
        let disk = blocks.first().and_then(|block| disks.path(block.disk));
        Err(match (damaged, disk) {
            (SnapshotError::DamagedPages { first, last, what, .. }, Some(path)) => {
                SnapshotError::DamagedPages { path: path.to_owned(), first, last, what }
            }
            (damaged, _) => damaged,
        })
    }

    /// Whether the file stores this page uncompressed and with these bytes. Its checksum is not tested.
    pub fn holds(&self, page: u32, bytes: &Page) -> Result<bool, SnapshotError> {
        let Some(number) = self.chunk_of(page) else { return Ok(false) };
        let chunk = &self.entries[number as usize];
        if chunk.flags != 0 {
            return Ok(false);
        }
        let (mut found, offset) = ([0; PAGE_BYTES], chunk.offset + self.place_in(number, page) as u64);
        self.source.read(&self.path, &mut found, offset, Urgency::Demand)?;
        Ok(found == *bytes)
    }

    /// One page, checked with its chunk; `None` if it is zero.
    pub fn page<'a>(&self, page: u32, reading: &'a mut Reading) -> Result<Option<&'a Page>, SnapshotError> {
        let Some(chunk) = self.chunk_of(page) else { return Ok(None) };
        let raw = self.read(chunk, reading)?;
        Ok(Some(self.page_of(chunk, raw, page)))
    }

    /// One page of a chunk that was read. The page must be in that chunk.
    pub fn page_of<'a>(&self, chunk: u32, raw: &'a [u8], page: u32) -> &'a Page {
        raw[self.place_in(chunk, page)..][..PAGE_BYTES].try_into().expect("a page")
    }

    /// Offset of a page in its chunk, in bytes.
    fn place_in(&self, chunk: u32, page: u32) -> usize {
        let at = self.pages_of(chunk).iter().position(|&other| other == page).expect("it is in this chunk");
        at * PAGE_BYTES
    }

    fn damaged(&self, chunk: u32, what: &str) -> SnapshotError {
        let (first, last) = self.bounds(chunk);
        SnapshotError::DamagedPages { path: self.path.clone(), first, last, what: what.to_owned() }
    }

    /// Lowest and highest page of a chunk.
    fn bounds(&self, chunk: u32) -> (u32, u32) {
        let pages = self.pages_of(chunk);
        let [first, last] = [pages.iter().min(), pages.iter().max()].map(|page| page.copied().unwrap_or_default());
        (first, last)
    }
}

/// Bytes of an index that are read at a time: whole entries.
const INDEX_PIECE_BYTES: usize = ENTRY_BYTES << 14;

/// Chunks of an index, as far as they have been read and are as a writer writes them.
struct Chunks {
    entries: Vec<Chunk>,
    /// Start of each chunk's pages, and of the next one's.
    firsts: Vec<u32>,
    /// Offset of the next chunk in the file.
    offset: u64,
}

impl Default for Chunks {
    fn default() -> Self {
        Self { entries: Vec::new(), firsts: vec![0], offset: HEADER_BYTES as u64 }
    }
}

impl Chunks {
    /// Returns `None` for a chunk that no writer writes.
    fn push(&mut self, chunk: Chunk) -> Option<()> {
        let pages = usize::from(chunk.pages);
        let raw_bytes = (pages * PAGE_BYTES) as u32;
        let fits = match chunk.flags {
            0 => chunk.stored_bytes == raw_bytes,
            FLAG_ZSTD => chunk.stored_bytes < raw_bytes,
            FLAG_ELSEWHERE => chunk.stored_bytes as usize == pages * PLACE_BYTES,
            _ => false,
        };
        let is_known = [SOURCE_TRACE, SOURCE_SCAN].contains(&chunk.source);
        if !fits || !is_known || !(1..=CHUNK_PAGES).contains(&pages) || chunk.offset != self.offset {
            return None;
        }
        self.offset += u64::from(chunk.stored_bytes);
        self.firsts.push(self.firsts.last()?.checked_add(pages as u32)?);
        self.entries.push(chunk);
        Some(())
    }
}

/// The chunk of each stored page, sorted by page: 8 bytes each, wherever in RAM the pages are and however large a RAM
/// the file claims.
#[derive(Debug)]
struct Places(Vec<(u32, u32)>);

impl Places {
    /// `None` if a page is outside of this RAM, or occurs twice.
    fn of(firsts: &[u32], pages: &[u32], ram_pages: u64) -> Option<Self> {
        let mut places = Vec::with_capacity(pages.len());
        for (chunk, bounds) in firsts.windows(2).enumerate() {
            places.extend(pages[bounds[0] as usize..bounds[1] as usize].iter().map(|&page| (page, chunk as u32)));
        }
        // Nearly sorted already, in runs, because memory is copied in the order of its addresses.
        places.sort();
        let is_of_ram = places.last().is_none_or(|last| u64::from(last.0) < ram_pages);
        (is_of_ram && places.is_sorted_by(|one, next| one.0 < next.0)).then_some(Self(places))
    }

    fn chunk_of(&self, page: u32) -> Option<u32> {
        let at = self.0.binary_search_by_key(&page, |place| place.0).ok()?;
        Some(self.0[at].1)
    }
}
