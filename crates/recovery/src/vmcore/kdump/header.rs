//! Headers of a kdump file, encoded for writing, and decoded and checked for reading (makedumpfile's `diskdump_mod.h`).

use std::io;
use std::ops::Range;

use hearth_memory::PAGE_BYTES;

use super::super::bitmap::Bitmap;
use super::super::bytes::{ReadAt, put, u32_at, u64_at};
use super::super::linux::Utsname;
use super::super::notes::{NOTES_BYTES_MAX, Notes};
use super::{BLOCK_BYTES, DESCRIPTOR_BYTES};

const SIGNATURE: &[u8; 8] = b"KDUMP   ";
const VERSION: u32 = 6;
/// The sub-header has the VMCOREINFO since version 3, the notes since 4, and page frames of 64 bits since 6.
const VERSION_MIN: u32 = 4;
const UTSNAME_FIELD_BYTES: usize = 65;
const STATUS_AT: usize = 424;
const SUB_HEADER_BYTES: u64 = 104;
/// 4 TiB of guest memory, which takes two bitmaps of 128 MiB.
const PAGES_MAX: u64 = (4 << 40) / PAGE_BYTES;

/// Flag in the header's status: not all pages are in the file.
pub(super) const INCOMPLETE: u32 = 0x8;

/// Contents of the two headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Header {
    pub utsname: Utsname,
    /// When the file was begun, in seconds since 1970; makedumpfile leaves 0.
    pub unix_seconds: i64,
    pub status: u32,
    /// One past the last page frame.
    pub pages: u64,
    pub cpus: u32,
    pub phys_base: i64,
    pub level: u32,
    sub_blocks: u64,
    bitmap_blocks: u64,
    pub notes: Range<u64>,
    pub vmcoreinfo: Range<u64>,
}

/// Why a kdump file cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum KdumpError {
    #[error("the file is not a kdump file, or its header was never written")]
    NotKdump,
    #[error("kdump version {0} is not supported; versions {VERSION_MIN} to {VERSION} are")]
    Version(u32),
    #[error("the block size is {0} bytes, which x86-64 does not have")]
    Block(u32),
    #[error("{pages} page frames are too many: the maximum is {PAGES_MAX}, and the number of bits in a bitmap")]
    Pages { pages: u64 },
    #[error("the file is one of a split set; makedumpfile --reassemble joins the set")]
    Split,
    #[error("the header's {what} does not fit the file")]
    OutOfFile { what: &'static str },
    #[error("the file cannot be read")]
    Unreadable(#[from] io::Error),
}

impl Header {
    /// Headers of a file that is to be written.
    pub fn new(utsname: Utsname, notes: &Notes, notes_bytes: u64, pages: u64, level: u32, status: u32) -> Self {
        let bitmap_blocks = 2 * pages.div_ceil(8).div_ceil(BLOCK_BYTES);
        let notes_at = BLOCK_BYTES + SUB_HEADER_BYTES;
        let range = notes.vmcoreinfo_range().unwrap_or(0..0);
        let offset = if range.is_empty() { 0 } else { notes_at };
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            utsname,
            unix_seconds: since_epoch.map_or(0, |time| time.as_secs().cast_signed()),
            status,
            pages,
            cpus: u32::try_from(notes.cpus()).expect("each CPU's note is longer than a byte, and notes are bounded"),
            phys_base: notes.phys_base().unwrap_or(0),
            level,
            sub_blocks: (SUB_HEADER_BYTES + notes_bytes).div_ceil(BLOCK_BYTES),
            bitmap_blocks,
            notes: notes_at..notes_at + notes_bytes,
            vmcoreinfo: offset + range.start as u64..offset + range.end as u64,
        }
    }

    /// Block 0, without which the file is no dump.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES as usize];
        put(&mut block, 0, SIGNATURE);
        put(&mut block, 8, &VERSION.to_le_bytes());
        for (field, at) in utsname_fields(&self.utsname).into_iter().zip((12..).step_by(UTSNAME_FIELD_BYTES)) {
            // libkdumpfile, and with it drgn, does not recognise the machine of a file with an empty field.
            let text = if field.is_empty() { "(none)" } else { field };
            put(&mut block, at, &text.as_bytes()[..text.len().min(UTSNAME_FIELD_BYTES - 1)]);
        }
        put(&mut block, 408, &self.unix_seconds.to_le_bytes());
        let obsolete_pages = u32::try_from(self.pages).unwrap_or(u32::MAX);
        let words =
            [self.status, BLOCK_BYTES as u32, self.sub_blocks as u32, self.bitmap_blocks as u32, obsolete_pages];
        for (word, at) in words.into_iter().zip((STATUS_AT..).step_by(4)) {
            put(&mut block, at, &word.to_le_bytes());
        }
        put(&mut block, 460, &self.cpus.to_le_bytes());
        block
    }

    /// Block 1, up to the notes.
    pub fn encode_sub(&self) -> Vec<u8> {
        let mut block = vec![0; SUB_HEADER_BYTES as usize];
        put(&mut block, 0, &self.phys_base.to_le_bytes());
        put(&mut block, 8, &self.level.to_le_bytes());
        for (range, at) in [(&self.vmcoreinfo, 32), (&self.notes, 48)] {
            put(&mut block, at, &range.start.to_le_bytes());
            put(&mut block, at + 8, &(range.end - range.start).to_le_bytes());
        }
        put(&mut block, 96, &self.pages.to_le_bytes());
        block
    }

    /// Reads both headers, and checks them against the file.
    pub fn decode(source: &(impl ReadAt + ?Sized)) -> Result<Self, KdumpError> {
        let mut block = vec![0; BLOCK_BYTES as usize];
        source.read_exact_at(&mut block, 0).map_err(|_| KdumpError::NotKdump)?;
        if !block.starts_with(SIGNATURE) {
            return Err(KdumpError::NotKdump);
        }
        let version = u32_at(&block, 8);
        if !(VERSION_MIN..=VERSION).contains(&version) {
            return Err(KdumpError::Version(version));
        }
        if u64::from(u32_at(&block, 428)) != BLOCK_BYTES {
            return Err(KdumpError::Block(u32_at(&block, 428)));
        }
        let mut sub = [0; SUB_HEADER_BYTES as usize];
        source.read_exact_at(&mut sub, BLOCK_BYTES)?;
        let range = |at: usize, what| {
            let (start, bytes) = (u64_at(&sub, at), u64_at(&sub, at + 8));
            let fits = bytes <= NOTES_BYTES_MAX as u64;
            let end = start.checked_add(bytes).filter(|end| fits && source.file_bytes().is_ok_and(|all| *end <= all));
            end.map(|end| start..end).ok_or(KdumpError::OutOfFile { what })
        };
        let header = Self {
            utsname: utsname(&block),
            unix_seconds: u64_at(&block, 408).cast_signed(),
            status: u32_at(&block, STATUS_AT),
            pages: if version >= 6 { u64_at(&sub, 96) } else { u32_at(&block, 440).into() },
            cpus: u32_at(&block, 460),
            phys_base: u64_at(&sub, 0).cast_signed(),
            level: u32_at(&sub, 8),
            sub_blocks: u32_at(&block, 432).into(),
            bitmap_blocks: u32_at(&block, 436).into(),
            notes: range(48, "notes")?,
            vmcoreinfo: range(32, "VMCOREINFO")?,
        };
        if u32_at(&sub, 12) != 0 {
            return Err(KdumpError::Split);
        }
        let bits = header.bitmap_blocks / 2 * BLOCK_BYTES * 8;
        if header.pages > bits || header.pages > PAGES_MAX {
            return Err(KdumpError::Pages { pages: header.pages });
        }
        Ok(header)
    }

    /// Offset of a bitmap: 1 is for page frames that exist, 2 for those in the file.
    pub fn bitmap_at(&self, number: u64) -> u64 {
        (1 + self.sub_blocks + (number - 1) * (self.bitmap_blocks / 2)) * BLOCK_BYTES
    }

    /// Reads the bitmap of this number.
    pub fn read_bitmap(&self, source: &(impl ReadAt + ?Sized), number: u64) -> Result<Bitmap, KdumpError> {
        let bytes = source.read_part(self.bitmap_at(number), self.pages.div_ceil(8));
        let bytes = bytes.map_err(|_| KdumpError::OutOfFile { what: "bitmaps" })?;
        Ok(Bitmap::from_kdump(&bytes, self.pages))
    }

    /// Offset of the descriptors.
    pub fn table_at(&self) -> u64 {
        (1 + self.sub_blocks + self.bitmap_blocks) * BLOCK_BYTES
    }

    /// Offset of the data, in the files that we write.
    pub fn data_at(&self, kept: u64) -> u64 {
        (self.table_at() + kept * DESCRIPTOR_BYTES).next_multiple_of(BLOCK_BYTES)
    }

    /// Whether the header marks the file as incomplete.
    pub fn is_incomplete(&self) -> bool {
        self.status & INCOMPLETE != 0
    }
}

fn utsname_fields(name: &Utsname) -> [&str; 6] {
    [&name.sysname, &name.nodename, &name.release, &name.version, &name.machine, &name.domainname]
}

fn utsname(block: &[u8]) -> Utsname {
    let mut fields = block[12..].chunks(UTSNAME_FIELD_BYTES).map(|field| {
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
        String::from_utf8_lossy(&field[..end]).into_owned()
    });
    let mut next = || fields.next().expect("a block has room for more than six fields");
    Utsname { sysname: next(), nodename: next(), release: next(), version: next(), machine: next(), domainname: next() }
}
