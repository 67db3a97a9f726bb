//! What the page cache of a guest that panicked held, by its kernel's own structures.

use std::collections::BTreeSet;
use std::path::Path;

use hearth_recovery::vmcore::linux::Linux;
use hearth_recovery::vmcore::linux::page_cache::{CachedFile, FileKind, PageCache};
use hearth_vmtest::artifacts::Linux as Kernel;
use hearth_vmtest::images::{self, File};
use hearth_vmtest::{Drives, PlainVm, Result};

use super::dead::Dead;

const PAGE_BYTES: usize = 4096;

/// A file system: how its image is made, and where its superblock has the UUID.
struct Kind {
    name: &'static str,
    make: fn(&Path, u64, &[File]) -> Result<()>,
    uuid_at: usize,
}

const EXT4: Kind = Kind { name: "ext4", make: images::ext4, uuid_at: 0x468 };
const XFS: Kind = Kind { name: "xfs", make: images::xfs, uuid_at: 32 };

fn pages_of(cache: &PageCache, wanted: impl Fn(&CachedFile) -> bool) -> BTreeSet<u64> {
    let files = cache.files.iter().map(wanted).collect::<Vec<_>>();
    let runs = cache.runs.iter().filter(|run| files[run.file as usize]);
    let mut pages = BTreeSet::new();
    for index in runs.flat_map(|run| run.index..run.index + u64::from(run.pages)) {
        assert!(pages.insert(index), "page {index} is cached once");
    }
    pages
}

fn check(kernel: Kernel, kind: &Kind) -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let image = home.path().join("data.img");
    // Lengths in bytes; the last page of the first one is not full.
    let files = [("large", 9_000_001), ("small", 20_000), ("unread", 3_000_000)];
    let files = files.map(|(path, bytes)| File { path: path.into(), contents: vec![7; bytes] });
    (kind.make)(&image, 64, &files)?;
    let mut inodes = Vec::new();
    let dead = Dead::of(PlainVm::busybox_on("cached", kernel).drive(&image, ""), 512, |vm| {
        vm.sh(&format!(
            "mkdir /data && mount -t {} /dev/vda /data && cat /data/large /data/small >/dev/null",
            kind.name
        ))?;
        let list = vm.sh("ls -i /data/large /data/small /data/unread")?;
        inodes = list.lines().map(|line| line.split_whitespace().next().unwrap().parse::<u64>().unwrap()).collect();
        Ok(())
    })?;
    let uuid = &std::fs::read(&image).unwrap()[kind.uuid_at..kind.uuid_at + 16];
    let cache = Linux::find(&dead.ram, &dead.notes).unwrap().page_cache().unwrap();
    assert_eq!(cache.unknown_pages, 0);
    let system = cache.file_systems.iter().position(|system| system.kind == kind.name).unwrap();
    assert_eq!(cache.file_systems[system].uuid, *uuid);
    for ((file, inode), is_read) in files.iter().zip(&inodes).zip([true, true, false]) {
        let is_it = |found: &CachedFile| {
            found.file_system == system as u32 && matches!(found.what, FileKind::File { inode: of, .. } if of == *inode)
        };
        let pages = if is_read { file.contents.len().div_ceil(PAGE_BYTES) as u64 } else { 0 };
        assert_eq!(pages_of(&cache, is_it), (0..pages).collect(), "{}", file.path);
    }
    if kind.name == "ext4" {
        let device = cache.file_systems[system].device;
        let metadata = pages_of(&cache, |file| file.what == FileKind::Device(device));
        assert!(metadata.contains(&0) && metadata.len() > 3, "superblock, inodes, folders: {metadata:?}");
    }
    Ok(())
}

#[test]
fn linux_6_1_tells_the_cached_pages_of_ext4() -> Result<()> {
    check(Kernel::Stable, &EXT4)
}

#[test]
fn linux_6_12_tells_the_cached_pages_of_ext4() -> Result<()> {
    check(Kernel::Newer, &EXT4)
}

#[test]
fn linux_6_1_tells_the_cached_pages_of_xfs() -> Result<()> {
    check(Kernel::Stable, &XFS)
}

#[test]
fn linux_6_12_tells_the_cached_pages_of_xfs() -> Result<()> {
    check(Kernel::Newer, &XFS)
}
