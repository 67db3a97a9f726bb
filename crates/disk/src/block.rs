//! Basic types of the disk server: a disk, a block, a page of guest RAM.

use serde::{Deserialize, Serialize};

/// Bytes in a block: the unit of tags and of the ledger, and the size of a guest page.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes in a virtio sector, whatever the logical block size (virtio 1.2, 5.2.4).
pub const SECTOR_BYTES: u64 = 512;

/// A disk of a machine, by its position in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DiskId(pub u8);

/// A 4 KiB block of a virtual disk, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block(pub u64);

/// A 4 KiB page of an incarnation's RAM file, counted from the file's start (not a guest PFN: see `hearth_memory::Layout`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RamPage(pub u32);
