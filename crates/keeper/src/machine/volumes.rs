//! Volumes: hits and misses of a boot by partition.
//!
//! The tables of partitions are taken from the boot set: a guest reads them at every boot, so they are held, as they are on
//! the disk and whatever the image's format. Where they are not held there are no partitions to be told of.

use std::ops::Range;

use hearth_api::{RemountLater, RemountVolume};
use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::{BootSet, PhaseTally, Share};
use hearth_disk::partitions::{self, Partition, SECTOR_BYTES};

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECTORS_PER_BLOCK: u64 = (BLOCK_BYTES / SECTOR_BYTES) as u64;

/// What is read from now on is counted by volume, too.
pub fn divide(boot_set: &BootSet, id: DiskId, disk_bytes: u64) {
    boot_set.divide(id, &blocks(&find(boot_set, id, disk_bytes)));
}

/// The volumes of one disk. A block belongs to the partition that its first byte lies in.
pub fn of_disk(boot_set: &BootSet, id: DiskId, disk: &str, disk_bytes: u64) -> Vec<RemountVolume> {
    let partitions = find(boot_set, id, disk_bytes);
    let beside = Partition { number: 0, bytes: 0..disk_bytes, name: None };
    let shares = boot_set.shares(id, &blocks(&partitions));
    let volumes = partitions.iter().chain([&beside]).zip(shares);
    volumes.map(|(partition, share)| volume(disk, partition, share)).collect()
}

fn find(boot_set: &BootSet, id: DiskId, disk_bytes: u64) -> Vec<Partition> {
    partitions::find(disk_bytes, &mut |sector| read(boot_set, id, sector))
}

fn blocks(partitions: &[Partition]) -> Vec<Range<u64>> {
    partitions.iter().map(|part| part.bytes.start.div_ceil(BLOCK)..part.bytes.end.div_ceil(BLOCK)).collect()
}

fn read(boot_set: &BootSet, disk: DiskId, sector: u64) -> Option<[u8; SECTOR_BYTES]> {
    let block = boot_set.copy_of(disk, sector / SECTORS_PER_BLOCK)?;
    let start = (sector % SECTORS_PER_BLOCK) as usize * SECTOR_BYTES;
    block[start..start + SECTOR_BYTES].try_into().ok()
}

fn volume(disk: &str, Partition { number, bytes, name }: &Partition, share: Share) -> RemountVolume {
    RemountVolume {
        disk: disk.to_owned(),
        partition: (*number > 0).then_some(*number),
        label: name.clone(),
        offset: bytes.start,
        bytes: bytes.end - bytes.start,
        blocks: share.blocks,
        held_blocks: share.held,
        hits: share.hits,
        misses: share.misses,
        hit_pct: percent(share.hits, share.hits + share.misses),
        later: later(&share.later),
    }
}

pub fn later(tally: &PhaseTally) -> RemountLater {
    let PhaseTally { hits, ember_hits, misses } = *tally;
    RemountLater { hits, ember_hits, misses }
}

/// None of nothing.
pub fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}
