//! kdump-compressed vmcores, version 6: makedumpfile's format, in which each page is compressed by itself.
//!
//! ```text
//! block 0      disk_dump_header: "KDUMP   ", utsname, status, sizes
//! block 1..    kdump_sub_header, then the notes
//! ..           1st bitmap: page frames that exist; 2nd bitmap: page frames that are in the file
//! ..           a descriptor of 24 bytes for each bit of the 2nd bitmap: location of its data
//! data         one page of zeroes for all zero pages, then data in any order, each chunk's at the start of a page
//! ```
//!
//! The bitmaps are known before the first page is read, so each descriptor has its offset from the start. It is zero
//! until its page's data is in the file, and no other bookkeeping is needed. A zero descriptor is a missing page: for a
//! resume, and for crash when it reads a file whose header says INCOMPLETE.

mod header;
mod reader;
mod writer;

pub use header::KdumpError;
pub(super) use reader::KdumpReader;
pub(super) use writer::KdumpWriter;

use super::bytes::{put, u32_at, u64_at};
use super::compress::PAGE;

/// Unit of the header's sizes.
const BLOCK_BYTES: u64 = PAGE as u64;
const DESCRIPTOR_BYTES: u64 = 24;

/// Location of a page's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Descriptor {
    offset: u64,
    bytes: u32,
    flags: u32,
}

impl Descriptor {
    fn parse(bytes: &[u8]) -> Self {
        Self { offset: u64_at(bytes, 0), bytes: u32_at(bytes, 8), flags: u32_at(bytes, 12) }
    }

    fn encode(self) -> [u8; DESCRIPTOR_BYTES as usize] {
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        put(&mut bytes, 0, &self.offset.to_le_bytes());
        put(&mut bytes, 8, &self.bytes.to_le_bytes());
        put(&mut bytes, 12, &self.flags.to_le_bytes());
        bytes
    }

    /// Whether it names data that can exist. A torn one, whose length was not written, does not.
    fn is_filled(self, data_from: u64, file_bytes: u64) -> bool {
        let ends_in_file = self.offset.checked_add(self.bytes.into()).is_some_and(|end| end <= file_bytes);
        let whole_if_raw = self.flags != 0 || self.bytes == PAGE as u32;
        self.offset >= data_from && ends_in_file && whole_if_raw && (1..=PAGE as u32).contains(&self.bytes)
    }
}
