//! The shelf: pattern files on a machine's data disk, and the cost of reading them.
//!
//! All blocks of all files differ, so any wrong block is noticed, whether stale, misplaced or damaged.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

use hearth_api::{DiskStatus, EmberStatus, Refused};
use hearth_vmtest::images::File;
use hearth_vmtest::{Disk, Drives, Result, TestVm};

pub const PAGE_BYTES: u64 = 4096;
const FILE_BYTES: usize = 1 << 20;
pub const PAGES_PER_FILE: u64 = FILE_BYTES as u64 / PAGE_BYTES;

/// Seed of the files' contents when the machine is made.
pub const ORIGINAL: u64 = 1;
/// Seed of the contents that tests write later.
pub const CHANGED: u64 = 2;

/// A number of files of 1 MiB each.
#[derive(Clone, Copy)]
pub struct Shelf {
    pub files: usize,
}

/// Enough to stand out from a boot's reads, but small enough to be read in a second under emulation.
pub const SHELF: Shelf = Shelf { files: 32 };

impl Shelf {
    pub fn bytes(self) -> u64 {
        (self.files * FILE_BYTES) as u64
    }

    pub fn pages(self) -> u64 {
        self.bytes() / PAGE_BYTES
    }

    /// The disk as ext4, with space for what tests write. Smaller file systems would have a journal of only 4 MiB.
    pub fn ext4(self) -> Disk {
        Disk::ext4(self.files as u64 + 128).with_files(self.contents())
    }

    pub fn ext4_of_small_blocks(self) -> Disk {
        Disk::ext4_of_small_blocks(self.files as u64 + 128).with_files(self.contents())
    }

    pub fn xfs(self) -> Disk {
        Disk::xfs(0).with_files(self.contents())
    }

    pub fn btrfs(self) -> Disk {
        Disk::btrfs(0).with_files(self.contents())
    }

    fn contents(self) -> impl Iterator<Item = File> {
        (0..self.files).map(|number| File::pattern(&name(number), FILE_BYTES, ORIGINAL))
    }

    /// Mounts the disk if necessary, reads every file and compares it with its expected contents.
    pub fn verify(self, vm: &TestVm) -> Result<()> {
        self.verify_changed(vm, 0)
    }

    /// Like [`Self::verify`], after the first `changed` files were replaced.
    pub fn verify_changed(self, vm: &TestVm, changed: usize) -> Result<()> {
        mount(vm, "rw")?;
        verify(vm, 0..changed, CHANGED)?;
        verify(vm, changed..self.files, ORIGINAL)
    }

    /// Verifies all files, and returns the reads since `before`.
    pub fn verify_counted(self, vm: &TestVm, before: Reads) -> Result<Reads> {
        self.verify(vm)?;
        Ok(Reads::of(vm)?.since(before))
    }
}

fn name(number: usize) -> String {
    format!("f{number:03}")
}

/// Names of files, for a shell.
pub fn names(files: Range<usize>) -> String {
    files.map(name).collect::<Vec<_>>().join(" ")
}

/// Mounts the first disk at /mnt, unless it is mounted.
pub fn mount(vm: &TestVm, options: &str) -> Result<()> {
    vm.sh(&format!("grep -q ' /mnt ' /proc/mounts || mount -o noatime,{options} /dev/vda /mnt")).map(drop)
}

/// Writes new contents to files and to the disk.
pub fn change(vm: &TestVm, files: Range<usize>) -> Result<()> {
    vm.sh(&format!("cd /mnt && for f in {}; do probe fill $f {FILE_BYTES} {CHANGED} || exit; done", names(files)))
        .map(drop)
}

/// Reads files, which must all exist, and compares them with the contents of this seed.
pub fn verify(vm: &TestVm, files: Range<usize>, seed: u64) -> Result<()> {
    let names = names(files);
    vm.sh(&format!("cd /mnt && for f in {names}; do probe verify $f {seed} || {{ echo in $f; exit 1; }}; done"))
        .map(drop)
}

/// Starts a process in the guest that takes nearly all available memory and keeps it.
pub fn hog(vm: &TestVm) -> Result<()> {
    // The probe prints its first line once it has all of the memory.
    let mib = "$(awk '/^MemAvailable/ { print int($2 / 1024) - 16 }' /proc/meminfo)";
    vm.sh(&format!("mkfifo /run/hog && {{ probe hog {mib} >/run/hog & }} && read line </run/hog && echo $line"))
        .map(drop)
}

/// Asserts that the guest's whole disk, unmounted, equals the host's image.
#[track_caller]
pub fn assert_disk_reads_as_its_image(vm: &TestVm) -> Result<()> {
    let seen = vm.sh("umount /mnt && md5sum </dev/vda")?;
    assert_eq!(seen, sum_of(&vm.folder().join("disk0.img")), "the guest's disk and its image differ");
    Ok(())
}

fn sum_of(image: &Path) -> String {
    let image = std::fs::File::open(image).expect("the image is where the harness put it");
    let output = Command::new("md5sum").stdin(image).output().expect("md5sum is part of every system");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Bytes that the guest has read from all its disks, by source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reads {
    pub warm_bytes: u64,
    pub image_bytes: u64,
}

impl Reads {
    pub fn of(vm: &TestVm) -> Result<Self> {
        let disks = vm.status()?.disks;
        let sum = |bytes: fn(&DiskStatus) -> u64| disks.iter().map(bytes).sum();
        Ok(Self { warm_bytes: sum(|disk| disk.read_warm_bytes), image_bytes: sum(|disk| disk.read_image_bytes) })
    }

    pub fn since(self, before: Self) -> Self {
        Self { warm_bytes: self.warm_bytes - before.warm_bytes, image_bytes: self.image_bytes - before.image_bytes }
    }
}

/// Counts of the ember's pages.
#[derive(Clone, Copy, Debug)]
pub struct Ember {
    pub kept: u64,
    pub served: u64,
    pub tag_mismatch: u64,
    pub overwritten: u64,
    pub trimmed: u64,
}

impl Ember {
    pub fn of(vm: &TestVm) -> Result<Self> {
        let EmberStatus { pages_kept: kept, pages_served: served, refused, .. } = vm.status()?.ember;
        let Refused { tag_mismatch, overwritten, trimmed } = refused;
        Ok(Self { kept, served, tag_mismatch, overwritten, trimmed })
    }
}
