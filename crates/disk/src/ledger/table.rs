//! The ledger's file: 16 bytes for each page of guest RAM, mapped into memory.
//!
//! ```text
//! head, one page of 4096 bytes (little endian)
//!   0  magic "HEARTHLG"   8  version u32   12  ram pages u32   16  FNV-1a of bytes 0..16, u64
//!  24  age u64: the only part that changes, not in the checksum; any value is valid
//! entry of page p, at 4096 + 16 p
//!   word 0   63..56 disk   55..40 age   39..0 block + 1     all zero: no entry
//!   word 1   tag
//! ```
//!
//! Changing an entry: word 0 = 0, word 1 = tag, word 0 = new, each seen in this order. A process killed in between
//! leaves no entry, never a false one. The file lies beside the guest's RAM file, in memory: it need not survive the
//! host, so nothing is flushed.
//!
//! Reading a hole of a file in tmpfs fills it. Scans therefore skip parts (of 256 entries, one page of the file) that
//! never had an entry. A part has its memory before the first one (see `populate`): in a full file system there is none.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{SeekFrom, seek};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{Age, Entry, LedgerError};
use crate::block::{DiskId, RamPage};
use crate::populate;
use crate::tag::Tag;

/// Pages of 4 KiB that a ledger can cover: 16 TiB of RAM. The index keeps the number after the last for itself.
pub(super) const RAM_PAGES_MAX: u32 = u32::MAX - 1;
/// The last block that fits into an entry: 4 PiB.
pub(super) const BLOCK_MAX: u64 = BLOCK_MASK - 1;

const MAGIC: [u8; 8] = *b"HEARTHLG";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 4096;
const BLOCK_MASK: u64 = (1 << 40) - 1;
/// Entries in one page of the file.
const PART: u32 = (PART_BYTES / size_of::<Line>()) as u32;
const PART_BYTES: usize = 4096;

#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: u32,
    ram_pages: u32,
    checksum: u64,
    age: AtomicU64,
}

/// One entry as it lies in the file.
#[repr(C)]
struct Line {
    place: AtomicU64,
    tag: AtomicU64,
}

const _: () = assert!(size_of::<Head>() == 32 && offset_of!(Head, age) == 24);
const _: () = assert!(size_of::<Line>() == 16);
const _: () = assert!(cfg!(target_endian = "little"), "the file is little endian");

pub(super) struct Table {
    file: File,
    base: NonNull<u8>,
    bytes: usize,
    ram_pages: u32,
    /// One bit a part: may it hold entries?
    touched: Vec<u64>,
}

// SAFETY: the mapping belongs to the table alone and is reached through atomics only.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    pub(super) fn create(path: &Path, ram_pages: u32) -> Result<Self, LedgerError> {
        if ram_pages == 0 || ram_pages > RAM_PAGES_MAX {
            return Err(LedgerError::RamSize { path: path.into(), ram_pages });
        }
        let make = || -> io::Result<Self> {
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
            file.set_len(file_bytes(ram_pages))?;
            let table = Self::map(file, ram_pages)?;
            table.take(0..HEAD_BYTES)?;
            let head = head_bytes(ram_pages);
            // SAFETY: the mapping starts with a head, whose page has memory now, and nobody else knows of it yet.
            unsafe { table.base.copy_from_nonoverlapping(NonNull::from(&head).cast(), head.len()) };
            Ok(table)
        };
        make().map_err(|source| LedgerError::Access { path: path.into(), action: "create", source })
    }

    pub(super) fn open(path: &Path) -> Result<Self, LedgerError> {
        let access = |action| move |source| LedgerError::Access { path: path.into(), action, source };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(access("open"))?;
        let found = file.metadata().map_err(access("look at"))?.len();
        let mut head = [0; offset_of!(Head, age)];
        if found < HEAD_BYTES as u64 {
            return Err(LedgerError::NotALedger { path: path.into() });
        }
        file.read_exact_at(&mut head, 0).map_err(access("read"))?;
        let ram_pages = check_head(&head, path)?;
        let expected = file_bytes(ram_pages);
        if found != expected {
            return Err(LedgerError::WrongLength { path: path.into(), found, expected });
        }
        let mut table = Self::map(file, ram_pages).map_err(access("map"))?;
        table.find_touched().map_err(access("read"))?;
        Ok(table)
    }

    fn map(file: File, ram_pages: u32) -> io::Result<Self> {
        let bytes = file_bytes(ram_pages) as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists. The file keeps its
        // length: it lies in the machine's own folder, where nobody else writes.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0)? };
        let base = NonNull::new(base.cast()).expect("mmap never returns page zero");
        // SAFETY: this is the mapping.
        unsafe { populate::in_small_pages(base, bytes) };
        let touched = vec![0; (ram_pages.div_ceil(PART) as usize).div_ceil(64)];
        Ok(Self { file, base, bytes, ram_pages, touched })
    }

    /// All the memory that it will ever need.
    pub(super) fn take_all(&self) -> io::Result<()> {
        self.take(0..self.bytes)
    }

    /// Both ends are those of pages, or the end of the file.
    fn take(&self, range: Range<usize>) -> io::Result<()> {
        // SAFETY: the callers' ranges begin with a page and lie in the mapping, which reaches to the end of its last page.
        unsafe { populate::take(&self.file, self.base, range) }
    }

    /// Marks the parts that the file has data for.
    fn find_touched(&mut self) -> io::Result<()> {
        let mut from = HEAD_BYTES as u64;
        loop {
            from = match seek(&self.file, SeekFrom::Data(from)) {
                Ok(start) => start,
                // Only holes up to the end.
                Err(rustix::io::Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let end = seek(&self.file, SeekFrom::Hole(from))?;
            let part_of = |offset: u64| (offset - HEAD_BYTES as u64) / 4096;
            for part in part_of(from)..=part_of(end - 1) {
                self.touched[part as usize / 64] |= 1 << (part % 64);
            }
            from = end;
        }
    }

    pub(super) fn ram_pages(&self) -> u32 {
        self.ram_pages
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes + size_of_val(self.touched.as_slice())
    }

    pub(super) fn age(&self) -> Age {
        Age(self.head().age.load(Ordering::Relaxed) as u16)
    }

    pub(super) fn set_age(&self, age: Age) {
        self.head().age.store(age.0.into(), Ordering::Relaxed);
    }

    pub(super) fn entry(&self, page: RamPage) -> Option<Entry> {
        let line = self.line(page);
        let (disk, age, block) = unpack(line.place.load(Ordering::Acquire))?;
        Some(Entry { page, disk, block, tag: Tag(line.tag.load(Ordering::Relaxed)), age })
    }

    /// Which block the page holds.
    pub(super) fn key(&self, page: RamPage) -> Option<(DiskId, u64)> {
        unpack(self.line(page).place.load(Ordering::Acquire)).map(|(disk, _, block)| (disk, block))
    }

    /// An error: there is no memory for it.
    pub(super) fn set(&mut self, entry: Entry) -> io::Result<()> {
        if !self.is_touched(entry.page) {
            let part = entry.page.0 / PART;
            let start = HEAD_BYTES + part as usize * PART_BYTES;
            self.take(start..start + PART_BYTES)?;
            self.touched[part as usize / 64] |= 1 << (part % 64);
        }
        let line = self.line(entry.page);
        // Each store is a release, so none is seen before the one above it: the tag never belongs to another block.
        line.place.store(0, Ordering::Release);
        line.tag.store(entry.tag.0, Ordering::Release);
        line.place.store(pack(entry.disk, entry.age, entry.block), Ordering::Release);
        Ok(())
    }

    pub(super) fn clear(&mut self, page: RamPage) {
        self.line(page).place.store(0, Ordering::Release);
    }

    /// True if there was something that is no entry.
    pub(super) fn clear_if_malformed(&mut self, page: RamPage) -> bool {
        let place = self.line(page).place.load(Ordering::Acquire);
        let malformed = place != 0 && unpack(place).is_none();
        if malformed {
            self.clear(page);
        }
        malformed
    }

    pub(super) fn parts(&self) -> u32 {
        self.ram_pages.div_ceil(PART)
    }

    /// The pages of a part; none if it never had an entry.
    pub(super) fn pages_of(&self, part: u32) -> Range<u32> {
        let start = part * PART;
        if self.is_touched(RamPage(start)) { start..start.saturating_add(PART).min(self.ram_pages) } else { 0..0 }
    }

    pub(super) fn is_touched(&self, page: RamPage) -> bool {
        let part = page.0 / PART;
        self.touched[part as usize / 64] >> (part % 64) & 1 == 1
    }

    /// How many pages a scan looks at.
    pub(super) fn touched_pages(&self) -> u64 {
        self.touched.iter().map(|word| u64::from(word.count_ones()) * u64::from(PART)).sum()
    }

    fn head(&self) -> &Head {
        // SAFETY: the mapping starts with a head: page-aligned, 4096 bytes at least, any bytes are a valid `Head`.
        unsafe { self.base.cast().as_ref() }
    }

    fn line(&self, page: RamPage) -> &Line {
        assert!(page.0 < self.ram_pages, "page {} is not of these {}", page.0, self.ram_pages);
        // SAFETY: the page is below `ram_pages` (above), so its line lies in the mapping (`file_bytes`), aligned to 16.
        unsafe { self.base.add(HEAD_BYTES).cast::<Line>().add(page.0 as usize).as_ref() }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no reference into it outlives us.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn file_bytes(ram_pages: u32) -> u64 {
    HEAD_BYTES as u64 + u64::from(ram_pages) * size_of::<Line>() as u64
}

fn pack(DiskId(disk): DiskId, Age(age): Age, block: u64) -> u64 {
    assert!(block <= BLOCK_MAX, "block {block} fits into an entry");
    u64::from(disk) << 56 | u64::from(age) << 40 | (block + 1)
}

fn unpack(place: u64) -> Option<(DiskId, Age, u64)> {
    let block = (place & BLOCK_MASK).checked_sub(1)?;
    Some((DiskId((place >> 56) as u8), Age((place >> 40) as u16), block))
}

fn head_bytes(ram_pages: u32) -> [u8; offset_of!(Head, age)] {
    let mut head = [0; offset_of!(Head, age)];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&ram_pages.to_le_bytes());
    let checksum = fnv1a(&head[..16]);
    head[16..].copy_from_slice(&checksum.to_le_bytes());
    head
}

fn check_head(head: &[u8; offset_of!(Head, age)], path: &Path) -> Result<u32, LedgerError> {
    let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (version, ram_pages) = (number(8), number(12));
    if head[..8] != MAGIC {
        return Err(LedgerError::NotALedger { path: path.into() });
    }
    if version != VERSION {
        return Err(LedgerError::Version { path: path.into(), found: version, expected: VERSION });
    }
    if *head != head_bytes(ram_pages) || ram_pages == 0 || ram_pages > RAM_PAGES_MAX {
        return Err(LedgerError::DamagedHead { path: path.into() });
    }
    Ok(ram_pages)
}

/// Finds accidents, not attacks: the folder is the keeper's own.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
