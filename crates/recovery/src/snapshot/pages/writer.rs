//! Writer of a file of pages: in one go, or while the guest runs. In that case pages that were written to since replace
//! their copies in place.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::*;
use crate::random;
use crate::snapshot::outgoing::Outgoing;
use crate::snapshot::{SnapshotError, Source, create_file, faults};

const BUFFER_BYTES: usize = 1 << 20;
const ZSTD_LEVEL: i32 = 1;

/// A file of pages that is being written.
pub struct PageWriter {
    file: BufWriter<File>,
    path: PathBuf,
    header: Vec<u8>,
    compression: Compression,
    offset: u64,
    chunks: Vec<Chunk>,
    pages: Vec<u32>,
    /// Pages of the next chunk.
    pending: Vec<u8>,
    /// Age and source of the next chunk.
    age: u32,
    source: u32,
    /// Position of each page of RAM in `pages`, if pages may be put again.
    places: Vec<u32>,
    /// Chunks that have changed since their checksum was taken.
    stale: BTreeSet<u32>,
    /// Set if the file is sent to a store meanwhile.
    outgoing: Option<Arc<Outgoing>>,
}

impl PageWriter {
    /// Begins a file of memory, of a guest with `ram_pages` pages of RAM.
    pub fn create(path: &Path, ram_pages: u64, compression: Compression) -> Result<Self, SnapshotError> {
        Self::begin(path, ram_pages, compression, [0; 32])
    }

    /// Begins a file with a working set of this memory.
    pub(crate) fn create_for(
        path: &Path,
        memory: &PageReader,
        compression: Compression,
    ) -> Result<Self, SnapshotError> {
        let seal = blake3::Hash::from_hex(&memory.sealed().seal).expect("a seal is one");
        Self::begin(path, memory.ram_pages(), compression, *seal.as_bytes())
    }

    fn begin(
        path: &Path,
        ram_pages: u64,
        compression: Compression,
        belongs_to: [u8; 32],
    ) -> Result<Self, SnapshotError> {
        let mut header = vec![0; HEADER_BYTES];
        header[..8].copy_from_slice(HEADER_MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(CHUNK_PAGES as u32).to_le_bytes());
        header[16..24].copy_from_slice(&ram_pages.to_le_bytes());
        header[24..40].copy_from_slice(&random::bytes::<16>());
        header[BELONGS_TO].copy_from_slice(&belongs_to);
        let file = create_file(path).map_err(SnapshotError::io(path, "made"))?;
        let mut writer = Self {
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            path: path.to_owned(),
            header: header.clone(),
            compression,
            offset: 0,
            chunks: Vec::new(),
            pages: Vec::new(),
            pending: Vec::with_capacity(CHUNK_PAGES * PAGE_BYTES),
            age: 0,
            source: SOURCE_TRACE,
            places: Vec::new(),
            stale: BTreeSet::new(),
            outgoing: None,
        };
        writer.write(&header)?;
        Ok(writer)
    }

    /// Begins a file whose pages may be put again. They are not compressed, because a page of another length would not
    /// fit.
    pub(crate) fn create_changeable(path: &Path, ram_pages: u64) -> Result<Self, SnapshotError> {
        let writer = Self::create(path, ram_pages, Compression::None)?;
        Ok(Self { places: vec![NOWHERE; ram_pages as usize], ..writer })
    }

    /// Reports to the sender, if any, what there is to be sent. Such a file need not outlast this host, so it is not
    /// synced.
    pub fn going_out(self, outgoing: Option<Arc<Outgoing>>) -> Self {
        Self { outgoing, ..self }
    }

    /// Adds a page, or replaces it if it was put before. A page that has become zero keeps its slot.
    pub fn put(&mut self, page: u32, bytes: &Page) -> Result<(), SnapshotError> {
        let place = &mut self.places[page as usize];
        if *place == NOWHERE {
            if !is_zero(bytes) {
                *place = self.pages.len() as u32;
            }
            return self.add(page, bytes);
        }
        let (chunk, at) = (*place as usize / CHUNK_PAGES, *place as usize % CHUNK_PAGES * PAGE_BYTES);
        let Some(entry) = self.chunks.get(chunk) else {
            self.pending[at..at + PAGE_BYTES].copy_from_slice(bytes);
            return Ok(());
        };
        let (from, end) = (entry.offset + at as u64, entry.offset + u64::from(entry.stored_bytes));
        if end > self.offset - self.file.buffer().len() as u64 {
            self.file.flush().map_err(SnapshotError::io(&self.path, "written"))?;
        }
        let written = faults::may_write().and_then(|()| self.file.get_ref().write_all_at(bytes, from));
        written.map_err(SnapshotError::io(&self.path, "written"))?;
        if let Some(outgoing) = &self.outgoing {
            outgoing.changed(from);
        }
        self.stale.insert(chunk as u32);
        Ok(())
    }

    fn renew_checksums(&mut self) -> Result<(), SnapshotError> {
        let mut stored = vec![0; CHUNK_PAGES * PAGE_BYTES];
        for chunk in std::mem::take(&mut self.stale) {
            let entry = &mut self.chunks[chunk as usize];
            let stored = &mut stored[..entry.stored_bytes as usize];
            self.file.get_ref().read_exact_at(stored, entry.offset).map_err(SnapshotError::io(&self.path, "read"))?;
            entry.checksum = checksum(stored);
        }
        Ok(())
    }

    /// Adds a page that was not added before. A page of zeroes is left out.
    pub fn add(&mut self, page: u32, bytes: &Page) -> Result<(), SnapshotError> {
        if is_zero(bytes) { Ok(()) } else { self.add_any(page, bytes) }
    }

    /// Adds a page that was not added before, even one of zeroes.
    pub(crate) fn add_any(&mut self, page: u32, bytes: &Page) -> Result<(), SnapshotError> {
        self.pages.push(page);
        self.pending.extend_from_slice(bytes);
        if self.pending.len() == CHUNK_PAGES * PAGE_BYTES { self.end_chunk() } else { Ok(()) }
    }

    /// Adds pages that were not added before, as their locations.
    pub(crate) fn add_elsewhere(&mut self, chunk: &Elsewhere) -> Result<(), SnapshotError> {
        self.end_chunk()?;
        let stored = chunk.encode();
        self.pages.extend(&chunk.pages);
        self.chunks.push(Chunk {
            offset: self.offset,
            stored_bytes: stored.len() as u32,
            pages: chunk.pages.len() as u16,
            flags: FLAG_ELSEWHERE,
            checksum: shortened(chunk.hasher.finalize()),
            age: self.age,
            source: self.source,
        });
        self.write(&stored)
    }

    /// Sets the age and source of the pages that are added from now on.
    pub(crate) fn set_mark(&mut self, age: u32, source: Source) -> Result<(), SnapshotError> {
        let source = match source {
            Source::Trace => SOURCE_TRACE,
            Source::Scan => SOURCE_SCAN,
        };
        if (age, source) != (self.age, self.source) {
            self.end_chunk()?;
            (self.age, self.source) = (age, source);
        }
        Ok(())
    }

    /// Number of pages added so far.
    pub fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    fn end_chunk(&mut self) -> Result<(), SnapshotError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let raw = std::mem::take(&mut self.pending);
        let packed = match self.compression {
            Compression::None => None,
            // It fails only without memory; then the chunk is stored as it is.
            Compression::Zstd => zstd::bulk::compress(&raw, ZSTD_LEVEL).ok().filter(|packed| packed.len() < raw.len()),
        };
        let flags = if packed.is_some() { FLAG_ZSTD } else { 0 };
        let stored = packed.as_deref().unwrap_or(&raw);
        self.chunks.push(Chunk {
            offset: self.offset,
            stored_bytes: stored.len() as u32,
            pages: (raw.len() / PAGE_BYTES) as u16,
            flags,
            checksum: checksum(stored),
            age: self.age,
            source: self.source,
        });
        self.write(stored)?;
        self.pending = raw;
        self.pending.clear();
        Ok(())
    }

    /// Writes the index and syncs the file, unless it goes to a store.
    pub fn finish(mut self) -> Result<Sealed, SnapshotError> {
        self.end_chunk()?;
        self.renew_checksums()?;
        let index_offset = self.offset;
        let mut index: Vec<u8> = self.chunks.iter().flat_map(Chunk::encode).collect();
        index.extend(self.pages.iter().flat_map(|page| page.to_le_bytes()));
        let mut trailer = [0; TRAILER_BYTES];
        trailer[..8].copy_from_slice(TRAILER_MAGIC);
        trailer[8..12].copy_from_slice(&VERSION.to_le_bytes());
        trailer[12..16].copy_from_slice(&(self.chunks.len() as u32).to_le_bytes());
        trailer[16..24].copy_from_slice(&index_offset.to_le_bytes());
        trailer[24..32].copy_from_slice(&self.pages().to_le_bytes());
        let seal = seal(&self.header, &index, &trailer);
        trailer[TRAILER_SEALED_BYTES..].copy_from_slice(seal.as_bytes());
        self.write(&index)?;
        self.write(&trailer)?;
        let written = self.file.into_inner().map_err(std::io::IntoInnerError::into_error);
        let settled = written.and_then(|file| {
            faults::may_write()?;
            if self.outgoing.is_some() { Ok(()) } else { file.sync_all() }
        });
        settled.map_err(SnapshotError::io(&self.path, "written"))?;
        if let Some(outgoing) = &self.outgoing {
            outgoing.finish(self.offset);
        }
        Ok(Sealed { bytes: self.offset, pages: self.pages.len() as u64, seal: seal.to_hex().to_string() })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let written = faults::may_write().and_then(|()| self.file.write_all(bytes));
        written.map_err(SnapshotError::io(&self.path, "written"))?;
        self.offset += bytes.len() as u64;
        if let Some(outgoing) = &self.outgoing {
            outgoing.wrote(self.offset - self.file.buffer().len() as u64);
        }
        Ok(())
    }
}

pub(super) fn seal(header: &[u8], index: &[u8], trailer: &[u8; TRAILER_BYTES]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(header).update(index).update(&trailer[..TRAILER_SEALED_BYTES]);
    hasher.finalize()
}

fn is_zero(page: &Page) -> bool {
    page.chunks_exact(8).all(|word| word == [0; 8])
}
