//! Trailer of an ELF file that is being written: it lists the pages that are in the file.

use std::io;

use hearth_memory::PAGE_BYTES;

use super::super::bitmap::Bitmap;
use super::super::bytes::{ReadAt, put};

const MAGIC: &[u8; 16] = b"HEARTH-UNWRITTEN";
const VERSION: u64 = 1;

/// Where the trailer and its bitmap are: behind the last page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trailer {
    at: u64,
    pages: u64,
}

impl Trailer {
    /// A trailer at offset `at`, for page frames below `pages`.
    pub fn new(at: u64, pages: u64) -> Self {
        Self { at, pages }
    }

    /// Length of the trailer and its bitmap.
    pub fn bytes(&self) -> u64 {
        PAGE_BYTES + self.pages.div_ceil(8)
    }

    /// The trailer without its bitmap.
    pub fn encode(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 16, &VERSION.to_le_bytes());
        put(&mut bytes, 24, &self.pages.to_le_bytes());
        bytes
    }

    /// Whether the file has this trailer.
    pub fn is_in(&self, source: &(impl ReadAt + ?Sized)) -> bool {
        let mut bytes = [0; 32];
        source.read_exact_at(&mut bytes, self.at).is_ok() && bytes == self.encode()
    }

    /// Pages that are written.
    pub fn read(&self, source: &(impl ReadAt + ?Sized)) -> io::Result<Bitmap> {
        let bytes = source.read_part(self.at + PAGE_BYTES, self.pages.div_ceil(8))?;
        Ok(Bitmap::from_kdump(&bytes, self.pages))
    }

    /// Offset of the byte with the bit of this page frame, which is a multiple of 8.
    pub fn byte_at(&self, pfn: u64) -> u64 {
        debug_assert!(pfn.is_multiple_of(8));
        self.at + PAGE_BYTES + pfn / 8
    }

    /// Whether the file has any trailer there, of this version or another.
    pub fn begins_at(source: &(impl ReadAt + ?Sized), at: u64) -> bool {
        let mut magic = [0; MAGIC.len()];
        source.read_exact_at(&mut magic, at).is_ok() && magic == *MAGIC
    }
}
