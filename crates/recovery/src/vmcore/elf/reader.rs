//! Reader of ELF vmcores, from Hearth and from other tools.

use hearth_memory::PAGE_BYTES;

use super::super::bitmap::Bitmap;
use super::super::bytes::ReadAt;
use super::super::file::{PageCounts, PageError};
use super::trailer::Trailer;
use super::{ElfError, Headers};

/// 4 TiB of guest memory, whose bitmap has 128 MiB.
const PAGES_MAX: u64 = (4 << 40) / PAGE_BYTES;

/// An ELF vmcore that was opened.
pub(in super::super) struct ElfReader {
    pub headers: Headers,
    /// Pages that are in the file, if it is not finished.
    written: Option<Bitmap>,
    file_bytes: u64,
}

impl ElfReader {
    /// Reads the headers and, if there is one, the trailer.
    pub fn open(source: &(impl ReadAt + ?Sized)) -> Result<Self, ElfError> {
        let headers = Headers::read(source)?;
        let file_bytes = source.file_bytes().map_err(ElfError::Unreadable)?;
        let written = trailer_of(&headers, source)?;
        Ok(Self { headers, written, file_bytes })
    }

    /// Whether the file has the trailer of an unfinished dump.
    pub fn is_incomplete(&self) -> bool {
        self.written.is_some()
    }

    /// Fills `page` with the bytes of a page frame.
    pub fn read_page(&self, source: &(impl ReadAt + ?Sized), pfn: u64, page: &mut [u8]) -> Result<(), PageError> {
        let address = pfn * PAGE_BYTES;
        let after = self.headers.loads.partition_point(|load| load.address <= address);
        let load = after.checked_sub(1).map(|index| self.headers.loads[index]);
        let load = load.filter(|load| load.pfns().contains(&pfn)).ok_or(PageError::Excluded)?;
        if self.written.as_ref().is_some_and(|written| !written.contains(pfn)) {
            return Err(PageError::Missing);
        }
        let offset = load.offset + (address - load.address);
        if offset + PAGE_BYTES > self.file_bytes {
            return Err(PageError::Missing);
        }
        Ok(source.read_exact_at(page, offset)?)
    }

    /// Counts the pages of all segments.
    pub fn survey(&self) -> PageCounts {
        let pages: u64 = self.headers.loads.iter().map(|load| load.pfns().end - load.pfns().start).sum();
        let cut_off = |load: &super::Load| {
            let there = self.file_bytes.saturating_sub(load.offset).min(load.bytes);
            (load.bytes - there).div_ceil(PAGE_BYTES)
        };
        let missing = match &self.written {
            Some(written) => pages.saturating_sub(written.count()),
            None => self.headers.loads.iter().map(cut_off).sum(),
        };
        PageCounts { pages, missing, zero: 0, stored_bytes: pages.saturating_sub(missing) * PAGE_BYTES }
    }
}

/// The page frames of all segments.
pub(super) fn pages_of(headers: &Headers) -> Result<Bitmap, ElfError> {
    let end = headers.loads.last().map_or(0, |load| load.pfns().end);
    if end > PAGES_MAX {
        return Err(ElfError::Implausible(end * PAGE_BYTES));
    }
    let ranges: Vec<_> = headers.loads.iter().map(super::Load::pfns).collect();
    Ok(Bitmap::of(end, &ranges))
}

/// Pages that are written according to the trailer; `None` without one.
fn trailer_of(headers: &Headers, source: &(impl ReadAt + ?Sized)) -> Result<Option<Bitmap>, ElfError> {
    let Some(end) = headers.loads.iter().map(|load| load.offset + load.bytes).max() else { return Ok(None) };
    if !Trailer::begins_at(source, end) {
        return Ok(None);
    }
    // Checked before memory is taken: the file must have a trailer for this number of pages.
    let pages = headers.loads.last().map_or(0, |load| load.pfns().end);
    let trailer = Trailer::new(end, pages);
    if !trailer.is_in(source) {
        return Err(ElfError::Implausible(end));
    }
    trailer.read(source).map(Some).map_err(ElfError::Unreadable)
}
