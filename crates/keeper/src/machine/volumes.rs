//! Volumes: hits and misses of a boot, by partition.
//!
//! The partition tables are read from the boot set: a guest reads them at every boot, so they are in it, whatever the
//! image's format. If they are not, no volumes are reported.

use std::ops::Range;

use hearth_api::{RemountLater, RemountVolume};
use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::{BootSet, PhaseTally, Share};
use hearth_disk::partitions::{self, Partition, SECTOR_BYTES, Sector};

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECTORS_PER_BLOCK: u64 = (BLOCK_BYTES / SECTOR_BYTES) as u64;

/// How a disk is divided into partitions. The counters of what was read are zero.
fn layout(disk: &str, disk_bytes: u64, read: &mut dyn FnMut(u64) -> Option<Sector>) -> Vec<RemountVolume> {
    let volume = |Partition { number, bytes, name }| RemountVolume {
        disk: disk.to_owned(),
        partition: Some(number),
        label: name,
        offset: bytes.start,
        bytes: bytes.end - bytes.start,
        ..RemountVolume::default()
    };
    partitions::find(disk_bytes, read).into_iter().map(volume).collect()
}

/// Block range of each partition. A block belongs to the partition that contains its first byte.
fn blocks(volumes: &[RemountVolume]) -> Vec<Range<u64>> {
    let block = |volume: &RemountVolume| volume.offset.div_ceil(BLOCK)..(volume.offset + volume.bytes).div_ceil(BLOCK);
    volumes.iter().map(block).collect()
}

/// From now on, reads are also counted by volume.
pub fn divide(boot_set: &BootSet, id: DiskId, disk_bytes: u64) {
    let volumes = layout("", disk_bytes, &mut |sector| read(boot_set, id, sector));
    boot_set.divide(id, &blocks(&volumes));
}

/// The volumes of one disk, and the space outside them.
pub fn of_disk(boot_set: &BootSet, id: DiskId, disk: &str, disk_bytes: u64) -> Vec<RemountVolume> {
    let mut volumes = layout(disk, disk_bytes, &mut |sector| read(boot_set, id, sector));
    let shares = boot_set.shares(id, &blocks(&volumes));
    volumes.push(RemountVolume { disk: disk.to_owned(), bytes: disk_bytes, ..RemountVolume::default() });
    volumes.into_iter().zip(shares).map(|(volume, share)| with_share(volume, share)).collect()
}

fn read(boot_set: &BootSet, disk: DiskId, sector: u64) -> Option<Sector> {
    let block = boot_set.copy_of(disk, sector / SECTORS_PER_BLOCK)?;
    let start = (sector % SECTORS_PER_BLOCK) as usize * SECTOR_BYTES;
    block[start..start + SECTOR_BYTES].try_into().ok()
}

fn with_share(volume: RemountVolume, share: Share) -> RemountVolume {
    RemountVolume {
        blocks: share.blocks,
        held_blocks: share.held,
        hits: share.hits,
        misses: share.misses,
        hit_pct: percent(share.hits, share.hits + share.misses),
        later: later(&share.later),
        ..volume
    }
}

pub fn later(tally: &PhaseTally) -> RemountLater {
    let PhaseTally { hits, ember_hits, misses } = *tally;
    RemountLater { hits, ember_hits, misses }
}

/// None if `whole` is 0.
pub fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}
