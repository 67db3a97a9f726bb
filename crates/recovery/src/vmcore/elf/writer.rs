//! Writer of an ELF vmcore: from its headers on, or from where an earlier keeper was killed.

use std::io;
use std::ops::Range;

use hearth_memory::PAGE_BYTES;

use super::super::bitmap::Bitmap;
use super::super::chunk::{Packed, PackedPage};
use super::super::dump::{FormatWriter, Plan, Resumed};
use super::super::storage::Storage;
use super::ElfError;
use super::headers::{Headers, Places, TABLES_AT, file_header, tables};
use super::reader::pages_of;
use super::trailer::Trailer;

pub(in super::super) struct ElfWriter {
    data_at: u64,
    end: u64,
    trailer: Trailer,
    /// Contents of the trailer's bitmap.
    written: Bitmap,
    kept: Bitmap,
}

impl ElfWriter {
    /// Writes everything except pages. The file's header comes last: a file without it never had a page.
    pub fn begin(plan: &Plan, storage: &mut dyn Storage) -> io::Result<Self> {
        let kept = plan.kept.clone();
        let notes = plan.notes.to_bytes();
        let places = Places::of(&kept, notes.len() as u64);
        let trailer = Trailer::new(places.end, kept.pages());
        storage.reserve(0, places.data)?;
        storage.set_bytes(places.end)?;
        storage.reserve(places.end, trailer.bytes())?;
        storage.set_bytes(places.end + trailer.bytes())?;
        storage.write_table(&trailer.encode(), places.end)?;
        storage.write_table(&tables(&kept, &notes, &places), TABLES_AT)?;
        storage.write_table(&file_header(&places), 0)?;
        storage.sync()?;
        Ok(Self { data_at: places.data, end: places.end, trailer, written: Bitmap::new(kept.pages()), kept })
    }

    /// Continues an unfinished file.
    pub fn resume(storage: &dyn Storage) -> Result<(Self, Resumed), ElfError> {
        let headers = Headers::read(storage)?;
        let kept = pages_of(&headers)?;
        let data_at = headers.loads.first().map_or(0, |load| load.offset);
        let end = data_at + kept.count() * PAGE_BYTES;
        // In the files that we write, each page's rank gives its offset.
        let mut expected = data_at;
        for load in &headers.loads {
            if load.offset != expected || !load.address.is_multiple_of(PAGE_BYTES) {
                return Err(ElfError::Implausible(load.address));
            }
            expected += load.bytes;
        }
        let trailer = Trailer::new(end, kept.pages());
        let incomplete = trailer.is_in(storage);
        let told = if incomplete { trailer.read(storage).map_err(ElfError::Unreadable)? } else { kept.clone() };
        let mut written = Bitmap::new(kept.pages());
        kept.iter().filter(|pfn| told.contains(*pfn)).for_each(|pfn| written.set(pfn));
        let resumed =
            Resumed { kept: kept.clone(), written: written.clone(), compression: None, complete: !incomplete };
        Ok((Self { data_at, end, trailer, written, kept }, resumed))
    }

    /// Writes runs of pages that have data and are adjacent in file and blob.
    fn write_pages(&self, storage: &mut dyn Storage, packed: &Packed) -> io::Result<()> {
        let place = |index: usize| self.data_at + (packed.chunk.first_rank + index as u64) * PAGE_BYTES;
        let mut run: Option<(u64, Range<usize>)> = None;
        for (index, page) in packed.pages.iter().enumerate() {
            let PackedPage::Data { at, bytes, .. } = *page else { continue };
            let part = at as usize..(at + bytes) as usize;
            match &mut run {
                Some((at, run)) if *at + run.len() as u64 == place(index) => run.end = part.end,
                _ => {
                    if let Some((at, run)) = run.replace((place(index), part)) {
                        storage.write_data(&packed.blob.padded()[run], at)?;
                    }
                }
            }
        }
        match run {
            Some((at, run)) => storage.write_data(&packed.blob.padded()[run], at),
            None => Ok(()),
        }
    }
}

impl FormatWriter for ElfWriter {
    fn write(&mut self, storage: &mut dyn Storage, packed: &Packed) -> io::Result<()> {
        self.write_pages(storage, packed)?;
        let pfns = packed.chunk.pfns.clone();
        for (pfn, page) in self.kept.iter_in(pfns.clone()).zip(&packed.pages) {
            if *page != PackedPage::Lost {
                self.written.set(pfn);
            }
        }
        // A chunk's first page frame begins a byte: chunks are whole blocks of 512 pages.
        let mut bits = vec![0_u8; (pfns.end - pfns.start).div_ceil(8) as usize];
        for pfn in self.written.iter_in(pfns.clone()) {
            let at = pfn - pfns.start;
            bits[(at / 8) as usize] |= 1 << (at % 8);
        }
        storage.write_table(&bits, self.trailer.byte_at(pfns.start))
    }

    fn seal(&mut self, storage: &mut dyn Storage, complete: bool) -> io::Result<()> {
        storage.sync()?;
        if complete {
            storage.set_bytes(self.end)?;
            storage.sync()?;
        }
        Ok(())
    }
}
