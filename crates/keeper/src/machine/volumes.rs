//! Volumes: hits and misses of a boot by partition, and by logical volume of LVM.
//!
//! The tables of partitions, and LVM's metadata, are taken from the boot set: a guest reads them at every boot, so they are held, as
//! they are on the disk and whatever the image's format. Where they are not held there are no volumes to be told of.

use std::collections::HashMap;
use std::ops::Range;

use hearth_api::{RemountLater, RemountVolume};
use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::{BootSet, PhaseTally, Share};
use hearth_disk::lvm;
use hearth_disk::partitions::{self, SECTOR_BYTES, Sector};

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECTORS_PER_BLOCK: u64 = (BLOCK_BYTES / SECTOR_BYTES) as u64;

/// How a disk is divided.
#[derive(Default)]
struct Layout {
    /// As far as they are named: without a place, and without what was read of them.
    volumes: Vec<RemountVolume>,
    /// Bytes of the disk, sorted and apart from each other, and whose they are.
    parts: Vec<(Range<u64>, usize)>,
}

impl Layout {
    /// `read` gives a sector of the disk, or none.
    fn find(disk: &str, disk_bytes: u64, read: &mut dyn FnMut(u64) -> Option<Sector>) -> Self {
        let mut layout = Self::default();
        let partitions = partitions::find(disk_bytes, read);
        if partitions.is_empty() {
            layout.add_logical(disk, 0..disk_bytes, None, read);
        }
        for partition in partitions {
            let number = Some(partition.number);
            layout.volumes.push(RemountVolume {
                disk: disk.to_owned(),
                partition: number,
                label: partition.name,
                ..RemountVolume::default()
            });
            layout.add_logical(disk, partition.bytes, number, read);
        }
        layout
    }

    /// Logical volumes on a partition, and what lies beside them on it; or those on a whole disk.
    fn add_logical(
        &mut self,
        disk: &str,
        place: Range<u64>,
        partition: Option<u32>,
        read: &mut dyn FnMut(u64) -> Option<Sector>,
    ) {
        let own = partition.map(|_| self.volumes.len() - 1);
        let mut known: HashMap<String, usize> = HashMap::new();
        let mut from = place.start;
        for segment in lvm::find(&place, read) {
            self.add_part(from..segment.bytes.start, own);
            from = segment.bytes.end;
            let volume = *known.entry(segment.volume).or_insert_with_key(|name| {
                let (disk, logical_volume) = (disk.to_owned(), Some(name.clone()));
                self.volumes.push(RemountVolume { disk, partition, logical_volume, ..RemountVolume::default() });
                self.volumes.len() - 1
            });
            self.add_part(segment.bytes, Some(volume));
        }
        self.add_part(from..place.end, own);
    }

    fn add_part(&mut self, bytes: Range<u64>, volume: Option<usize>) {
        self.parts.extend(volume.filter(|_| !bytes.is_empty()).map(|volume| (bytes, volume)));
    }

    /// A block belongs to the part that its first byte lies in.
    fn blocks(&self) -> Vec<Range<u64>> {
        self.parts.iter().map(|(bytes, _)| bytes.start.div_ceil(BLOCK)..bytes.end.div_ceil(BLOCK)).collect()
    }
}

/// What is read from now on is counted by volume, too.
pub fn divide(boot_set: &BootSet, id: DiskId, disk_bytes: u64) {
    boot_set.divide(id, &Layout::find("", disk_bytes, &mut |sector| read(boot_set, id, sector)).blocks());
}

/// The volumes of one disk, and what of it lies beside them.
pub fn of_disk(boot_set: &BootSet, id: DiskId, disk: &str, disk_bytes: u64) -> Vec<RemountVolume> {
    let layout = Layout::find(disk, disk_bytes, &mut |sector| read(boot_set, id, sector));
    let parts = boot_set.shares(id, &layout.blocks());
    let mut shares = vec![Share::default(); layout.volumes.len()];
    let mut volumes = layout.volumes;
    for ((bytes, volume), share) in layout.parts.into_iter().zip(&parts) {
        let told = &mut volumes[volume];
        told.offset = if told.bytes == 0 { bytes.start } else { told.offset };
        told.bytes += bytes.end - bytes.start;
        shares[volume] += *share;
    }
    volumes.push(RemountVolume { disk: disk.to_owned(), bytes: disk_bytes, ..RemountVolume::default() });
    shares.extend(parts.last());
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

/// None of nothing.
pub fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// A physical volume of 64 MiB.
    const STORE: &[u8] = include_bytes!("../../../disk/tests/lvm/store-a.img");

    /// Of a disk with this physical volume behind so many MiB, and a table of one partition in front if that is not none.
    #[track_caller]
    fn check(front_mib: u64, expect: &[(Option<u32>, Option<&str>, u64)], parts: &[(u64, usize)]) {
        let front = front_mib * MIB / SECTOR_BYTES as u64;
        let mut table = [0; SECTOR_BYTES];
        if front > 0 {
            table[446 + 4] = 0x8e;
            table[446 + 8..446 + 12].copy_from_slice(&(front as u32).to_le_bytes());
            table[446 + 12..446 + 16].copy_from_slice(&(64 * 2048_u32).to_le_bytes());
            table[510..].copy_from_slice(&[0x55, 0xaa]);
        }
        let mut read = |sector: u64| match sector.checked_sub(front) {
            Some(sector) => STORE.chunks_exact(SECTOR_BYTES).nth(sector as usize)?.try_into().ok(),
            None => Some(table),
        };
        let layout = Layout::find("data", (front_mib + 64) * MIB, &mut read);
        let told = layout.volumes.iter().map(|volume| {
            let bytes = layout.parts.iter().filter(|(_, own)| std::ptr::eq(&layout.volumes[*own], volume));
            let mib = bytes.map(|(bytes, _)| bytes.end - bytes.start).sum::<u64>() / MIB;
            (volume.partition, volume.logical_volume.as_deref(), mib)
        });
        assert_eq!(told.collect::<Vec<_>>(), expect);
        assert_eq!(layout.parts.iter().map(|(bytes, own)| (bytes.start / MIB, *own)).collect::<Vec<_>>(), parts);
    }

    #[test]
    fn logical_volumes_are_told_and_what_is_beside_them_on_a_partition() {
        let volumes = |partition| {
            [("store/mail", 10), ("store/stripes", 2), ("store/db-log", 3), ("store/web", 48)]
                .map(|(name, mib)| (partition, Some(name), mib))
        };
        check(0, &volumes(None), &[(1, 0), (11, 1), (13, 2), (16, 3)]);
        let in_partition = [&[(Some(1), None, 1)], volumes(Some(1)).as_slice()].concat();
        check(2, &in_partition, &[(2, 0), (3, 1), (13, 2), (15, 3), (18, 4)]);
    }
}
