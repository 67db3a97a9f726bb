//! ELF vmcores: notes, then each run of kept pages as one PT_LOAD with its guest-physical address.
//!
//! ```text
//! 0      Ehdr | 64 program headers (PT_NOTE, PT_LOAD..) | one section header if they are 65535 or more | notes
//! data   every kept page, 4096 bytes, in order of page frames: its rank gives its offset
//! end    while incomplete: one page of `Trailer`, then a bitmap of the page frames that are written
//! ```
//!
//! The program headers are at offset 64 because makedumpfile looks for them nowhere else. Long runs of zero pages stay
//! holes of the file. A bitmap at the file's end, and not a file beside it, shows what is written. So there is one file
//! to name, to resume and to remove, and no tool looks behind the last segment. `finish` cuts the bitmap off.

mod headers;
mod reader;
mod trailer;
mod writer;

pub use headers::{ElfError, Headers, Load};
pub(super) use reader::ElfReader;
pub(super) use writer::ElfWriter;
