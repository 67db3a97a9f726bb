//! Vmcore file: a vmcore from any tool as physical memory: kdump or ELF, finished or not.
//!
//! The file is not trusted. Its contents are checked against its size before they are used. A page that cannot be read is
//! reported as unreadable, and nothing worse happens.
//!
//! Flattened dumps (makedumpfile -F, QEMU's kdump formats over a pipe) are named and refused: makedumpfile -R makes a plain file
//! of them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};

use super::bitmap::Bitmap;
use super::bytes::ReadAt;
use super::compress::{Compression, Damaged, Decompressor, PAGE};
use super::elf::{ElfError, ElfReader};
use super::kdump::{KdumpError, KdumpReader};
use super::linux::Utsname;
use super::memory::{PhysicalMemory, Unreadable};
use super::notes::{NOTES_BYTES_MAX, Notes, NotesError};

/// Number of pages kept decompressed, because introspection reads page tables and descriptors word by word.
const CACHED_PAGES: usize = 512;
const FLATTENED: &[u8; 16] = b"makedumpfile\0\0\0\0";

/// A vmcore that was opened for reading.
pub struct VmcoreFile {
    source: File,
    content: Content,
    ranges: Vec<Range<u64>>,
    notes: Notes,
    file_bytes: u64,
    cache: Mutex<Cache>,
}

enum Content {
    Kdump(Box<KdumpReader>),
    Elf(ElfReader),
}

struct Cache {
    decompressor: Decompressor,
    /// The page that is in each slot. Each page has one slot that it can be in.
    pfns: Vec<Option<u64>>,
    bytes: Vec<u8>,
}

/// Why a page cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum PageError {
    #[error("the page is not in the dump")]
    Excluded,
    #[error("the page is missing: the dump is incomplete")]
    Missing,
    #[error(transparent)]
    Damaged(#[from] Damaged),
    #[error("the dump cannot be read")]
    Io(#[from] io::Error),
}

/// Page counts of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages that the dump was made to keep.
    pub pages: u64,
    /// Kept pages that are not in the file.
    pub missing: u64,
    /// Kept pages that are zero and have no data of their own; not known for ELF files.
    pub zero: u64,
    /// Bytes of all pages' data.
    pub stored_bytes: u64,
}

/// Why a vmcore cannot be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum FileError {
    #[error("{path}: cannot be opened")]
    Open { path: PathBuf, source: io::Error },
    #[error("{path}: is neither a kdump file nor an ELF core")]
    Unknown { path: PathBuf },
    #[error("{path}: is not a readable kdump file")]
    Kdump { path: PathBuf, source: KdumpError },
    #[error("{path}: is not a readable ELF core")]
    Elf { path: PathBuf, source: ElfError },
    #[error("{path}: is a flattened dump; make a plain file of it with `makedumpfile -R PLAIN <{path}`")]
    Flattened { path: PathBuf },
    #[error("{path}: its notes cannot be read")]
    Notes { path: PathBuf, source: NotesError },
}

impl VmcoreFile {
    /// Opens a vmcore, and checks its headers and notes.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let open = |source| FileError::Open { path: path.to_owned(), source };
        let source = File::open(path).map_err(open)?;
        let file_bytes = source.file_bytes().map_err(open)?;
        if is_flattened(&source) {
            return Err(FileError::Flattened { path: path.to_owned() });
        }
        let content = Content::open(&source, path)?;
        let notes = content.notes(&source).map_err(|source| FileError::Notes { path: path.to_owned(), source })?;
        let cache = Mutex::new(Cache {
            decompressor: Decompressor::default(),
            pfns: vec![None; CACHED_PAGES],
            bytes: vec![0; CACHED_PAGES * PAGE],
        });
        Ok(Self { ranges: content.ranges(), source, content, notes, file_bytes, cache })
    }

    /// "kdump" or "elf".
    pub fn format(&self) -> &'static str {
        match self.content {
            Content::Kdump(_) => "kdump",
            Content::Elf(_) => "elf",
        }
    }

    /// Whether its maker finished it. `survey` tells whether it was cut off since.
    pub fn is_complete(&self) -> bool {
        match &self.content {
            Content::Kdump(kdump) => !kdump.header.is_incomplete(),
            Content::Elf(elf) => !elf.is_incomplete(),
        }
    }

    /// Dump level, as makedumpfile's number; `None` for ELF files, which do not contain it.
    pub fn level(&self) -> Option<u32> {
        self.kdump().map(|kdump| kdump.header.level)
    }

    /// Its method of compression; `None` for ELF files, and for a method that is not known here.
    pub fn compression(&self) -> Option<Compression> {
        self.kdump().and_then(|kdump| Compression::of_flags(kdump.header.status))
    }

    /// The kernel's name in the file's header, which may have been filled without knowledge; `None` for ELF files.
    pub fn utsname(&self) -> Option<&Utsname> {
        self.kdump().map(|kdump| &kdump.header.utsname)
    }

    /// When the dump was begun, in seconds since 1970, if its maker recorded it.
    pub fn unix_seconds(&self) -> Option<i64> {
        self.kdump().map(|kdump| kdump.header.unix_seconds).filter(|seconds| *seconds != 0)
    }

    /// The ELF notes of the file.
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    /// Length of the file, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Counts the pages of the file.
    pub fn survey(&self) -> PageCounts {
        match &self.content {
            Content::Kdump(kdump) => kdump.survey(&self.source),
            Content::Elf(elf) => elf.survey(),
        }
    }

    /// The pages that the dump was made to keep; `None` for ELF files, which have nothing but segments.
    pub fn kept(&self) -> Option<&Bitmap> {
        self.kdump().map(|kdump| &kdump.kept)
    }

    /// Fills `page` with the bytes of a page frame, without the cache.
    pub fn read_page(&self, pfn: u64, page: &mut [u8; PAGE]) -> Result<(), PageError> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        self.content.read_page(&self.source, pfn, &mut cache.decompressor, page)
    }

    fn kdump(&self) -> Option<&KdumpReader> {
        match &self.content {
            Content::Kdump(kdump) => Some(kdump),
            Content::Elf(_) => None,
        }
    }
}

impl PhysicalMemory for VmcoreFile {
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let mut address = address.0;
        let mut rest = into;
        while !rest.is_empty() {
            let within = (address % PAGE_BYTES) as usize;
            let (now, later) = rest.split_at_mut(rest.len().min(PAGE - within));
            let pfn = address / PAGE_BYTES;
            let page = cache.page(pfn, &self.content, &self.source).map_err(|_| Unreadable::at(address))?;
            now.copy_from_slice(&page[within..within + now.len()]);
            address = address.wrapping_add(now.len() as u64);
            rest = later;
        }
        Ok(())
    }

    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

impl Cache {
    fn page(&mut self, pfn: u64, content: &Content, source: &File) -> Result<&[u8], PageError> {
        let slot = (pfn % CACHED_PAGES as u64) as usize;
        let page = &mut self.bytes[slot * PAGE..][..PAGE];
        if self.pfns[slot] != Some(pfn) {
            self.pfns[slot] = None;
            content.read_page(source, pfn, &mut self.decompressor, page)?;
            self.pfns[slot] = Some(pfn);
        }
        Ok(page)
    }
}

impl Content {
    fn open(source: &File, path: &Path) -> Result<Self, FileError> {
        let mut magic = [0; 4];
        // A file shorter than that is no dump either.
        let _ = source.read_exact_at(&mut magic, 0);
        match &magic {
            b"KDUM" => match KdumpReader::open(source) {
                Ok(kdump) => Ok(Self::Kdump(Box::new(kdump))),
                Err(source) => Err(FileError::Kdump { path: path.to_owned(), source }),
            },
            b"\x7fELF" => match ElfReader::open(source) {
                Ok(elf) => Ok(Self::Elf(elf)),
                Err(source) => Err(FileError::Elf { path: path.to_owned(), source }),
            },
            _ => Err(FileError::Unknown { path: path.to_owned() }),
        }
    }

    fn notes(&self, source: &File) -> Result<Notes, NotesError> {
        let range = match self {
            Self::Kdump(kdump) => kdump.header.notes.clone(),
            Self::Elf(elf) => elf.headers.notes.first().cloned().unwrap_or(0..0),
        };
        let bytes = range.end - range.start;
        if bytes > NOTES_BYTES_MAX as u64 {
            return Err(NotesError::TooLong(usize::try_from(bytes).unwrap_or(usize::MAX)));
        }
        let blob = source.read_part(range.start, bytes).map_err(|_| NotesError::CutOff(0))?;
        Notes::parse(&blob)
    }

    /// Page frames of RAM, as far as the file shows them.
    fn ranges(&self) -> Vec<Range<u64>> {
        match self {
            Self::Kdump(kdump) => kdump.existing.runs().collect(),
            Self::Elf(elf) => {
                let mut ranges: Vec<Range<u64>> = Vec::new();
                for pfns in elf.headers.loads.iter().map(super::elf::Load::pfns).filter(|pfns| !pfns.is_empty()) {
                    match ranges.last_mut() {
                        Some(last) if last.end == pfns.start => last.end = pfns.end,
                        _ => ranges.push(pfns),
                    }
                }
                ranges
            }
        }
    }

    fn read_page(
        &self,
        source: &File,
        pfn: u64,
        decompressor: &mut Decompressor,
        page: &mut [u8],
    ) -> Result<(), PageError> {
        match self {
            Self::Kdump(kdump) => kdump.read_page(source, pfn, decompressor, page),
            Self::Elf(elf) => elf.read_page(source, pfn, page),
        }
    }
}

/// Whether the file begins as a flattened dump does.
fn is_flattened(file: &File) -> bool {
    let mut signature = [0; FLATTENED.len()];
    ReadAt::read_exact_at(file, &mut signature, 0).is_ok() && signature == *FLATTENED
}
