//! Volumes: disk images with many small ext4 file systems, each in a partition of its own.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::disk::Disk;
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
/// Linux counts 256 partitions of a disk, and logical ones from 5.
const DISK_VOLUMES_MAX: usize = 240;
/// A file system is copied in pieces of this.
const PIECE_BYTES: usize = 64 << 10;
/// So many volumes at a time are mounted or written to: an init system does not wait for one before the next either.
const WORKERS: usize = 4;

/// Volumes that are all alike, on as many disks as they need: the first ones of a machine.
pub struct Volumes {
    images: Vec<PathBuf>,
    /// `a5`, `b5`: the letter of the disk and the number of the partition.
    names: Vec<String>,
    _folder: tempfile::TempDir,
}

impl Volumes {
    /// Sparse images, for as long as this is.
    pub fn make(count: usize) -> Result<Self> {
        Self::make_in(&std::env::temp_dir(), count, &[], Blocks::Needed)
    }

    /// The same below a folder of choice, with files in each volume.
    pub fn make_in(folder: &Path, count: usize, files: &[images::File], blocks: Blocks) -> Result<Self> {
        let folder = at("make a folder in", folder, tempfile::tempdir_in(folder))?;
        let template = folder.path().join("volume.img");
        images::ext4_for_good(&template, VOLUME_MIB, files)?;
        let template = at("read", &template, std::fs::read(&template))?;
        let disks = count.div_ceil(DISK_VOLUMES_MAX).max(1);
        let of_each = count.div_ceil(disks);
        let (mut images, mut names) = (Vec::new(), Vec::new());
        for (position, letter) in ('a'..='z').take(disks).enumerate() {
            let here = of_each.min(count - position * of_each);
            let image = folder.path().join(format!("volumes-{letter}.img"));
            write_disk(&image, here, &template, blocks)?;
            images.push(image);
            names.extend((5..here + 5).map(|partition| format!("{letter}{partition}")));
        }
        Ok(Self { images, names, _folder: folder })
    }

    pub fn images(&self) -> &[PathBuf] {
        &self.images
    }

    /// Copies of the images, as a machine's first disks.
    pub fn copies(&self) -> Vec<Disk> {
        self.images.iter().map(|image| Disk::copy_of(image)).collect()
    }

    /// All of them, some at a time.
    pub fn mount(&self, vm: &impl Drives) -> Result<()> {
        self.run_for_each(vm, "mkdir -p /v/$v && mount -t ext4 /dev/vd$v /v/$v")
    }

    /// A line in a file of each volume, and back when it is on the disk.
    pub fn append(&self, vm: &impl Drives, line: &str) -> Result<()> {
        self.run_for_each(vm, &format!("echo {line} $v >>/v/$v/lines && sync /v/$v/lines"))
    }

    /// A new file in each volume, and back when it is on the disk.
    pub fn touch(&self, vm: &impl Drives, name: &str) -> Result<()> {
        self.run_for_each(vm, &format!("echo $v >/v/$v/{name} && sync /v/$v/{name}"))
    }

    /// What `append` has put into all volumes, as one text.
    pub fn read(&self, vm: &impl Drives) -> Result<String> {
        vm.sh("cat /v/*/lines")
    }

    /// What `read` gives after these lines.
    pub fn expected(&self, lines: &[&str]) -> String {
        let mut names: Vec<&String> = self.names.iter().collect();
        names.sort();
        names.iter().flat_map(|volume| lines.iter().map(move |line| format!("{line} {volume}\n"))).collect()
    }

    pub fn unmount_and_check(&self, vm: &impl Drives) -> Result<()> {
        let check = "umount /v/$v && e2fsck -f -n /dev/vd$v >/tmp/fsck-$v 2>&1 || { cat /tmp/fsck-$v; false; }";
        self.run_for_each(vm, check)
    }

    /// The command, with `$v` for the volume; some volumes at a time.
    fn run_for_each(&self, vm: &impl Drives, command: &str) -> Result<()> {
        let share = self.names.len().div_ceil(WORKERS).max(1);
        let runs: String =
            self.names.chunks(share).map(|names| format!("({}) & p=\"$p $!\"; ", loops(names, command))).collect();
        vm.sh_within(&format!("{runs} for p in $p; do wait $p || exit; done"), crate::patience(60)).map(drop)
    }
}

/// Shell loops over volumes that follow each other.
fn loops(names: &[String], command: &str) -> String {
    let runs = names.chunk_by(|one, next| one[..1] == next[..1]);
    let of_disk = |run: &[String]| {
        let (letter, first, last) = (&run[0][..1], &run[0][1..], &run[run.len() - 1][1..]);
        format!("for n in $(seq {first} {last}); do v={letter}$n; {command} || exit; done; ")
    };
    runs.map(of_disk).collect()
}

/// What of an image lies on the disk that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// What is not zero.
    Needed,
    /// All: whatever is read is read from the disk.
    All,
}

fn write_disk(image: &Path, count: usize, template: &[u8], blocks: Blocks) -> Result<()> {
    let file = at("create", image, File::create(image))?;
    let sectors = EXTENDED + count as u64 * STEP_SECTORS;
    at("size", image, file.set_len(sectors * SECTOR))?;
    let put = |sector: u64, bytes: &[u8]| at("write to", image, file.write_all_at(bytes, sector * SECTOR));
    put(0, &table([(CHAINED, EXTENDED, sectors - EXTENDED), (0, 0, 0)]))?;
    for volume in 0..count as u64 {
        let start = EXTENDED + volume * STEP_SECTORS;
        let is_last = volume + 1 == count as u64;
        // The second entry leads to the next table, counted from the start of the extended partition.
        let next = if is_last { (0, 0, 0) } else { (CHAINED, (volume + 1) * STEP_SECTORS, STEP_SECTORS) };
        put(start, &table([(LINUX, SECTORS_PER_MIB, VOLUME_MIB * SECTORS_PER_MIB), next]))?;
        let pieces = template.chunks(PIECE_BYTES).zip(0..);
        for (piece, number) in pieces.filter(|(piece, _)| blocks == Blocks::All || piece.iter().any(|&byte| byte != 0))
        {
            put(start + SECTORS_PER_MIB + number * (PIECE_BYTES as u64 / SECTOR), piece)?;
        }
    }
    Ok(())
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
