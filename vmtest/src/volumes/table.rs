//! Images of many logical partitions with the same contents, behind a DOS partition table.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Result, at};

const SECTOR: u64 = 512;
/// The extended partition begins after the first MiB.
const EXTENDED: u64 = (1 << 20) / SECTOR;
const LINUX: u8 = 0x83;
const CHAINED: u8 = 0x05;
/// The contents are copied in pieces of this size.
const PIECE_BYTES: usize = 64 << 10;

/// Which blocks of an image are allocated on the host's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// Only those that are not zero.
    Needed,
    /// All of them, so that every read reaches the disk.
    All,
}

/// Distance between partitions.
pub(super) struct Layout {
    /// Sectors before each partition; its table is in the first.
    gap_sectors: u64,
}

impl Layout {
    /// The gap that partitioning tools leave.
    pub(super) const OF_VOLUMES: Self = Self { gap_sectors: (1 << 20) / SECTOR };
    /// A small gap, for devices that are host memory.
    pub(super) const CLOSE: Self = Self { gap_sectors: 4096 / SECTOR };

    /// Writes an image with `count` partitions that hold `template`, whose length must be whole sectors.
    pub(super) fn write(&self, image: &Path, count: usize, template: &[u8], blocks: Blocks) -> Result<()> {
        let file = at("create", image, File::create(image))?;
        let (gap, long) = (self.gap_sectors, template.len() as u64 / SECTOR);
        let step = gap + long;
        let sectors = EXTENDED + count as u64 * step;
        at("size", image, file.set_len(sectors * SECTOR))?;
        let put = |sector: u64, bytes: &[u8]| at("write to", image, file.write_all_at(bytes, sector * SECTOR));
        let is_wanted = |piece: &[u8]| blocks == Blocks::All || piece.iter().any(|&byte| byte != 0);
        let pieces: Vec<_> = template.chunks(PIECE_BYTES).zip(0..).filter(|(piece, _)| is_wanted(piece)).collect();
        put(0, &table([(CHAINED, EXTENDED, sectors - EXTENDED), (0, 0, 0)]))?;
        for volume in 0..count as u64 {
            let start = EXTENDED + volume * step;
            let is_last = volume + 1 == count as u64;
            // The second entry points to the next table, counted from the start of the extended partition.
            let next = if is_last { (0, 0, 0) } else { (CHAINED, (volume + 1) * step, step) };
            put(start, &table([(LINUX, gap, long), next]))?;
            for (piece, number) in &pieces {
                put(start + gap + number * (PIECE_BYTES as u64 / SECTOR), piece)?;
            }
        }
        Ok(())
    }
}

/// A DOS partition table with two entries: type, first sector, sectors.
fn table(entries: [(u8, u64, u64); 2]) -> [u8; SECTOR as usize] {
    let mut table = [0; SECTOR as usize];
    for (position, (kind, first, sectors)) in entries.into_iter().enumerate() {
        let entry = &mut table[446 + position * 16..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&(first as u32).to_le_bytes());
        entry[12..].copy_from_slice(&(sectors as u32).to_le_bytes());
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    table
}
