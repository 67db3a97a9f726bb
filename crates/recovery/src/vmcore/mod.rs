//! Vmcore: a dead guest's memory as a dump that the usual tools read.
//!
//! RAM (`memory`, `dead_ram`) -> what its kernel says of each page (`linux`) -> pages worth keeping (`bitmap`) -> file
//!
//! A dump is made of the registers and notes that QEMU gives in a millisecond, of two bitmaps over page frames (which
//! exist, which are kept), and of the kept pages. Everything is read from outside, out of memory that the guest wrote and
//! may have damaged: each table, list, order and count is checked or bounded, and where one makes no sense the pages it
//! would have judged are kept.

pub mod bitmap;
mod bytes;
pub mod chunk;
pub mod compress;
pub mod dead_ram;
pub mod dump;
mod elf;
pub mod file;
mod flat;
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
