//! Volumes: one disk image with many small ext4 file systems, each in a partition of its own.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{Result, at};
use crate::guest::Drives;
use crate::images;

const SECTOR: u64 = 512;
const SECTORS_PER_MIB: u64 = (1 << 20) / SECTOR;
/// Enough for ext4 to make a journal.
const VOLUME_MIB: u64 = 10;
/// A logical partition and the MiB before it, which begins with its table.
const STEP_SECTORS: u64 = (VOLUME_MIB + 1) * SECTORS_PER_MIB;
/// The extended partition begins after the first MiB.
const EXTENDED: u64 = SECTORS_PER_MIB;
const LINUX: u8 = 0x83;
const CHAINED: u8 = 0x05;

/// An image with so many volumes, gone when this is.
pub struct Volumes {
    image: PathBuf,
    count: usize,
    _folder: tempfile::TempDir,
}

impl Volumes {
    pub fn make(count: usize) -> Result<Self> {
        let folder = at("make a folder in", &std::env::temp_dir(), tempfile::tempdir())?;
        let image = folder.path().join("volumes.img");
        let file = at("create", &image, File::create(&image))?;
        let sectors = EXTENDED + count as u64 * STEP_SECTORS;
        at("size", &image, file.set_len(sectors * SECTOR))?;
        let put = |sector: u64, entries| at("write to", &image, file.write_all_at(&table(entries), sector * SECTOR));
        put(0, [(CHAINED, EXTENDED, sectors - EXTENDED), (0, 0, 0)])?;
        for volume in 0..count as u64 {
            let start = EXTENDED + volume * STEP_SECTORS;
            let is_last = volume + 1 == count as u64;
            // The second entry leads to the next table, counted from the start of the extended partition.
            let next = if is_last { (0, 0, 0) } else { (CHAINED, (volume + 1) * STEP_SECTORS, STEP_SECTORS) };
            put(start, [(LINUX, SECTORS_PER_MIB, VOLUME_MIB * SECTORS_PER_MIB), next])?;
            images::ext4_at(&image, (start + SECTORS_PER_MIB) * SECTOR, VOLUME_MIB)?;
        }
        Ok(Self { image, count, _folder: folder })
    }

    pub fn image(&self) -> &Path {
        &self.image
    }

    pub fn mount(&self, vm: &impl Drives) -> Result<()> {
        // Logical partitions are numbered from 5.
        let last = self.count + 4;
        let mount = "mkdir -p /v/$i && mount -t ext4 /dev/vda$i /v/$i";
        vm.sh(&format!("for i in $(seq 5 {last}); do {mount} || exit; done")).map(drop)
    }

    /// A line in a file of each volume, and back when it is on the disk.
    pub fn append(&self, vm: &impl Drives, line: &str) -> Result<()> {
        let last = self.count + 4;
        let append = format!("echo {line} $i >>/v/$i/lines && sync /v/$i/lines");
        vm.sh(&format!("for i in $(seq 5 {last}); do {append} || exit; done")).map(drop)
    }

    /// What `append` has put into all volumes, as one text.
    pub fn read(&self, vm: &impl Drives) -> Result<String> {
        vm.sh("for i in $(ls /v | sort -n); do cat /v/$i/lines || exit; done")
    }

    /// What `read` gives after these lines.
    pub fn expected(&self, lines: &[&str]) -> String {
        (5..self.count + 5).flat_map(|volume| lines.iter().map(move |line| format!("{line} {volume}\n"))).collect()
    }

    pub fn unmount_and_check(&self, vm: &impl Drives) -> Result<()> {
        let last = self.count + 4;
        let check = "umount /v/$i && e2fsck -f -n /dev/vda$i >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }";
        vm.sh(&format!("for i in $(seq 5 {last}); do {check}; done")).map(drop)
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
