//! Writer of a kdump file: from its headers on, or from where an earlier keeper was killed.

use std::io;

use super::super::bitmap::Bitmap;
use super::super::chunk::{Packed, PackedPage};
use super::super::compress::{Compression, PAGE};
use super::super::dump::{FormatWriter, Plan, Resumed};
use super::super::storage::Storage;
use super::header::{Header, INCOMPLETE};
use super::{BLOCK_BYTES, DESCRIPTOR_BYTES, Descriptor, KdumpError};

/// Descriptors read at a time when a dump is resumed.
const READ_DESCRIPTORS: u64 = 1 << 16;

pub(in super::super) struct KdumpWriter {
    header: Header,
    /// Offset of the page that all zero pages share.
    zeroes_at: u64,
    /// Offset of the next data: behind everything that any descriptor may name.
    end: u64,
}

impl KdumpWriter {
    /// Writes everything except pages. The header comes last: a file without it never had a page.
    pub fn begin(plan: &Plan, compression: Compression, storage: &mut dyn Storage) -> io::Result<Self> {
        let notes = plan.notes.to_bytes();
        let status = compression.flag() | INCOMPLETE;
        let level = plan.level.number().into();
        let pages = plan.kept.pages();
        let header = Header::new(plan.utsname.clone(), &plan.notes, notes.len() as u64, pages, level, status);
        let zeroes_at = header.data_at(plan.kept.count());
        let end = zeroes_at + BLOCK_BYTES;
        storage.reserve(0, end)?;
        storage.write_table(&[header.encode_sub(), notes].concat(), BLOCK_BYTES)?;
        storage.write_table(&Bitmap::of(pages, &plan.ranges).to_kdump(), header.bitmap_at(1))?;
        storage.write_table(&plan.kept.to_kdump(), header.bitmap_at(2))?;
        storage.write_table(&[0; PAGE], zeroes_at)?;
        storage.write_table(&header.encode(), 0)?;
        storage.sync()?;
        Ok(Self { header, zeroes_at, end })
    }

    /// Continues an unfinished file. A page counts as written if its descriptor names data within the file, because
    /// data is written before its descriptor.
    pub fn resume(storage: &dyn Storage) -> Result<(Self, Resumed), KdumpError> {
        let header = Header::decode(storage)?;
        let kept = header.read_bitmap(storage, 2)?;
        let zeroes_at = header.data_at(kept.count());
        let file_bytes = storage.file_bytes()?;
        if file_bytes < zeroes_at + BLOCK_BYTES {
            return Err(KdumpError::OutOfFile { what: "descriptors" });
        }
        let mut written = Bitmap::new(kept.pages());
        let mut pfns = kept.iter();
        let mut left = kept.count();
        let mut at = header.table_at();
        while left > 0 {
            let table = storage.read_part(at, left.min(READ_DESCRIPTORS) * DESCRIPTOR_BYTES)?;
            for (bytes, pfn) in table.chunks_exact(DESCRIPTOR_BYTES as usize).zip(&mut pfns) {
                if Descriptor::parse(bytes).is_filled(zeroes_at, file_bytes) {
                    written.set(pfn);
                }
            }
            left -= left.min(READ_DESCRIPTORS);
            at += table.len() as u64;
        }
        drop(pfns);
        let compression = Compression::of_flags(header.status).ok_or(KdumpError::NotKdump)?;
        let complete = !header.is_incomplete();
        let end = file_bytes.next_multiple_of(BLOCK_BYTES);
        let resumed = Resumed { kept, written, compression: Some(compression), complete };
        Ok((Self { header, zeroes_at, end }, resumed))
    }

    fn descriptor(&self, page: PackedPage, data_at: u64) -> Option<Descriptor> {
        match page {
            PackedPage::Before => None,
            PackedPage::Lost => Some(Descriptor::default()),
            PackedPage::Zero => Some(Descriptor { offset: self.zeroes_at, bytes: PAGE as u32, flags: 0 }),
            PackedPage::Data { at, bytes, flags } => Some(Descriptor { offset: data_at + u64::from(at), bytes, flags }),
        }
    }
}

impl FormatWriter for KdumpWriter {
    fn write(&mut self, storage: &mut dyn Storage, packed: &Packed) -> io::Result<()> {
        let data_at = self.end;
        storage.write_data(packed.blob.padded(), data_at)?;
        // Advanced even if the descriptors fail now, because some of them may have been written.
        self.end += packed.bytes();
        let mut rank = packed.chunk.first_rank;
        for run in packed.pages.chunk_by(|one, other| (*one == PackedPage::Before) == (*other == PackedPage::Before)) {
            let descriptors = run.iter().filter_map(|page| self.descriptor(*page, data_at));
            let table: Vec<u8> = descriptors.flat_map(Descriptor::encode).collect();
            if !table.is_empty() {
                storage.write_table(&table, self.header.table_at() + rank * DESCRIPTOR_BYTES)?;
            }
            rank += run.len() as u64;
        }
        Ok(())
    }

    fn seal(&mut self, storage: &mut dyn Storage, complete: bool) -> io::Result<()> {
        storage.sync()?;
        if complete {
            self.header.status &= !INCOMPLETE;
            storage.write_table(&self.header.encode(), 0)?;
            storage.sync()?;
        }
        Ok(())
    }
}
