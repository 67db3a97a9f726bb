//! Reader of kdump files, from Hearth and from other tools. It checks everything that a file says.

use super::super::bitmap::Bitmap;
use super::super::bytes::ReadAt;
use super::super::compress::{Decompressor, PAGE};
use super::super::file::{PageCounts, PageError};
use super::header::Header;
use super::{DESCRIPTOR_BYTES, Descriptor, KdumpError};

/// Ranks of page frames are counted ahead in steps of this size.
const STEP_PAGES: u64 = 4096;
const READ_DESCRIPTORS: u64 = 1 << 16;

/// Maximum number of raw pages that are read in search of the shared page of zeroes.
const ZEROES_TRIES_MAX: u32 = 64;

#[derive(Default)]
struct Zeroes {
    at: Option<u64>,
    tries: u32,
}

/// A kdump file that was opened.
pub(in super::super) struct KdumpReader {
    pub header: Header,
    pub existing: Bitmap,
    pub kept: Bitmap,
    /// Number of kept pages before each step.
    ranks: Vec<u64>,
    /// Length of the whole file, as rearranged if it is flattened.
    file_bytes: u64,
}

impl KdumpReader {
    /// Reads the headers and both bitmaps.
    pub fn open(source: &(impl ReadAt + ?Sized)) -> Result<Self, KdumpError> {
        let header = Header::decode(source)?;
        let existing = header.read_bitmap(source, 1)?;
        let kept = header.read_bitmap(source, 2)?;
        let mut ranks = Vec::new();
        let mut rank = 0;
        for step in (0..header.pages).step_by(STEP_PAGES as usize) {
            ranks.push(rank);
            rank += kept.count_in(step..step + STEP_PAGES);
        }
        Ok(Self { header, existing, kept, ranks, file_bytes: source.file_bytes()? })
    }

    /// Fills `page` with a page's bytes.
    pub fn read_page(
        &self,
        source: &(impl ReadAt + ?Sized),
        pfn: u64,
        decompressor: &mut Decompressor,
        page: &mut [u8],
    ) -> Result<(), PageError> {
        if !self.kept.contains(pfn) {
            return Err(PageError::Excluded);
        }
        let step = pfn / STEP_PAGES * STEP_PAGES;
        let rank = self.ranks[(pfn / STEP_PAGES) as usize] + self.kept.count_in(step..pfn);
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        source.read_exact_at(&mut bytes, self.header.table_at() + rank * DESCRIPTOR_BYTES)?;
        let descriptor = Descriptor::parse(&bytes);
        if !descriptor.is_filled(self.table_end(), self.file_bytes) {
            return Err(PageError::Missing);
        }
        let mut packed = [0; PAGE];
        let packed = &mut packed[..descriptor.bytes as usize];
        source.read_exact_at(packed, descriptor.offset)?;
        Ok(decompressor.decompress(descriptor.flags, packed, page)?)
    }

    /// Counts pages by all descriptors.
    pub fn survey(&self, source: &(impl ReadAt + ?Sized)) -> PageCounts {
        let mut survey = PageCounts { pages: self.kept.count(), ..PageCounts::default() };
        let mut zeroes = Zeroes::default();
        for first in (0..survey.pages).step_by(READ_DESCRIPTORS as usize) {
            let count = READ_DESCRIPTORS.min(survey.pages - first);
            let at = self.header.table_at() + first * DESCRIPTOR_BYTES;
            let Ok(table) = source.read_part(at, count * DESCRIPTOR_BYTES) else {
                survey.missing += count;
                continue;
            };
            for bytes in table.chunks_exact(DESCRIPTOR_BYTES as usize) {
                let descriptor = Descriptor::parse(bytes);
                if !descriptor.is_filled(self.table_end(), self.file_bytes) {
                    survey.missing += 1;
                } else if descriptor.flags == 0 && self.shares_data(source, descriptor.offset, &mut zeroes) {
                    survey.zero += 1;
                } else {
                    survey.stored_bytes += u64::from(descriptor.bytes);
                }
            }
        }
        survey
    }

    /// Whether this is the data of zero pages. They share one raw page, which is the first of the data.
    fn shares_data(&self, source: &(impl ReadAt + ?Sized), offset: u64, zeroes: &mut Zeroes) -> bool {
        if zeroes.at.is_none() && zeroes.tries < ZEROES_TRIES_MAX {
            let mut page = [1; PAGE];
            let read = source.read_exact_at(&mut page, offset);
            zeroes.tries += 1;
            zeroes.at = (read.is_ok() && page == [0; PAGE]).then_some(offset);
        }
        zeroes.at == Some(offset)
    }

    fn table_end(&self) -> u64 {
        self.header.table_at() + self.kept.count() * DESCRIPTOR_BYTES
    }
}
