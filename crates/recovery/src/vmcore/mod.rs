//! Vmcore: a dead guest's memory as a dump that the usual tools read.
//!
//! RAM (`memory`, `dead_ram`) -> class of each page, by its kernel's data (`linux`) -> pages to keep (`bitmap`) -> file
//!
//! A dump consists of the registers and notes that QEMU gives in a millisecond, two bitmaps over page frames (which
//! exist, which are kept), and the kept pages. Everything is read from outside, from memory that the guest wrote and
//! may have damaged. So each table, list, order and count is checked or bounded. Where one makes no sense, the pages
//! that it would have excluded are kept.

pub mod bitmap;
mod bytes;
pub mod chunk;
pub mod compress;
pub mod dead_ram;
pub mod dump;
mod elf;
pub mod file;
mod kdump;
pub mod level;
pub mod linux;
mod lzo;
pub mod memory;
pub mod notes;
mod storage;
#[cfg(test)]
mod tests;

pub use bitmap::Bitmap;
pub use chunk::{Chunk, Packed, Packer};
pub use compress::Compression;
pub use dead_ram::DeadRam;
pub use dump::{Dump, DumpError, Finished, Format, Plan, Written};
pub use file::{FileError, VmcoreFile};
pub use level::DumpLevel;
pub use memory::{PhysicalMemory, Unreadable};
pub use notes::Notes;
