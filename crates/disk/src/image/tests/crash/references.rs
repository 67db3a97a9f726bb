//! Checks that hold for a qcow2 image at any time: every cluster that a table names is counted.

use std::collections::HashMap;

use super::super::*;
use crate::image::tape::SECTOR;

/// `qemu-img check` may report lost clusters, and nothing else.
pub(in crate::image::tests) fn check_with_qemu(place: &str, path: &Path) {
    // Without a lock, which another test's child may have for a moment, between its fork and its exec.
    let output = Command::new("qemu-img").args(["check", "-q", "-U", "-f", "qcow2", as_str(path)]).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{place}: {output:?}");
}

/// Every cluster that a table names has a reference count of at least its references, and is whole. As `qemu-img check`, but
/// fast. Returns how many references are counted and not there.
pub(super) fn check_references(place: &str, file: &[u8]) -> u64 {
    let u64_at = |at: usize| file.get(at..at + 8).map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().unwrap()));
    let u32_at = |at: usize| u32::from_be_bytes(file[at..at + 4].try_into().unwrap());
    let (version, cluster_bits) = (u32_at(4), u32_at(20));
    let cluster = 1_usize << cluster_bits;
    let order = if version == 2 { 4 } else { u32_at(96) };
    let offset_of = |entry: u64| (entry & 0x00ff_ffff_ffff_fe00) as usize;
    let mut references: HashMap<usize, u64> = HashMap::new();
    let mut name = |offset: usize, bytes: usize| {
        assert!(bytes == 0 || offset.is_multiple_of(cluster), "{place}: {offset:#x} is not aligned");
        for at in (offset..offset + bytes).step_by(cluster) {
            *references.entry(at >> cluster_bits).or_default() += 1;
        }
    };
    let (l1_entries, l1, refcounts) = (u32_at(36) as usize, u64_at(40) as usize, u64_at(48) as usize);
    let refcount_clusters = u32_at(56) as usize;
    name(0, cluster);
    name(l1, l1_entries * 8);
    name(refcounts, refcount_clusters * cluster);
    let blocks: Vec<usize> =
        (0..refcount_clusters * cluster / 8).map(|at| offset_of(u64_at(refcounts + 8 * at))).collect();
    blocks.iter().filter(|block| **block > 0).for_each(|block| name(*block, cluster));
    let mut compressed = Vec::new();
    for entry in (0..l1_entries).map(|at| offset_of(u64_at(l1 + 8 * at))).filter(|entry| *entry > 0) {
        assert!(entry < file.len(), "{place}: an L2 table lies behind the end");
        name(entry, cluster);
        for entry in (0..cluster / 8).map(|at| u64_at(entry + 8 * at)) {
            if entry >> 62 & 1 == 1 {
                let shift = 62 - (cluster_bits - 8);
                let start = (entry & ((1 << shift) - 1)) as usize;
                let sectors = (entry >> shift & ((1 << (cluster_bits - 8)) - 1)) as usize + 1;
                compressed.push(start & !(cluster - 1)..(start & !511) + sectors * SECTOR);
            } else if offset_of(entry) > 0 {
                name(offset_of(entry), cluster);
            }
        }
    }
    compressed.into_iter().for_each(|range| name(range.start, range.len()));
    let per_block = (cluster * 8) >> order;
    let count_of = |index: usize| {
        let block = blocks.get(index / per_block).copied().unwrap_or(0);
        let bit = (index % per_block) << order;
        match (block, order) {
            (0, _) => 0,
            (_, 0..3) => {
                u64::from(file.get(block + bit / 8).copied().unwrap_or(0)) >> (bit % 8) & ((1 << (1 << order)) - 1)
            }
            (_, 3) => u64::from(file.get(block + bit / 8).copied().unwrap_or(0)),
            (_, 4) => u64_at(block + bit / 8) >> 48,
            (_, 6) => u64_at(block + bit / 8),
            _ => unimplemented!("no test has those of 32 bits"),
        }
    };
    let lost = (0..(file.len() * 2) >> cluster_bits).map(|index| {
        let (needed, count) = (references.get(&index).copied().unwrap_or(0), count_of(index));
        assert!(needed <= count, "{place}: cluster {index} is named {needed} times, and counted {count} times");
        count - needed
    });
    lost.sum()
}
