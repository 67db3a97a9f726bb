//! Volumes: disk images with many small file systems, each in a partition of its own.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::disk::Disk;
use crate::error::{Result, at};
use crate::guest::Drives;
use crate::images;

mod table;

pub use table::Blocks;
use table::Layout;

/// Size at which ext4 makes a journal.
const VOLUME_MIB: u64 = 10;
/// Linux allows 256 partitions on a disk, and logical ones begin at number 5.
const DISK_VOLUMES_MAX: usize = 240;
/// Default number of volumes that are mounted or written to in parallel, as an init system does.
const AT_ONCE: NonZeroUsize = NonZeroUsize::new(4).unwrap();

/// Identical volumes on as many disks as they need, which are the first disks of a machine.
pub struct Volumes {
    images: Vec<PathBuf>,
    /// The disk's letter and the partition's number: `a5`, `b5`.
    names: Vec<String>,
    journals: Option<Journals>,
    at_once: NonZeroUsize,
    _folder: tempfile::TempDir,
}

/// External journals: one device for each disk of volumes, on which a journal has the partition number of its volume.
struct Journals {
    images: Vec<PathBuf>,
    /// The letter of the first device.
    first: char,
}

impl Volumes {
    /// The number of disks that `count` volumes need.
    pub fn disks(count: usize) -> usize {
        count.div_ceil(DISK_VOLUMES_MAX).max(1)
    }

    /// Makes sparse images, which are removed when this is dropped.
    pub fn make(count: usize) -> Result<Self> {
        Self::make_in(&std::env::temp_dir(), count, &[], Blocks::Needed)
    }

    /// Makes the images in a folder, with files in each volume.
    pub fn make_in(folder: &Path, count: usize, files: &[images::File], blocks: Blocks) -> Result<Self> {
        Self::from_template(folder, count, blocks, None, |template, _| {
            images::ext4_for_good(template, VOLUME_MIB, files)
        })
    }

    /// Makes XFS volumes of the smallest size. The guest mounts them itself, with `nouuid`: all have the same UUID.
    pub fn make_xfs(count: usize) -> Result<Self> {
        Self::from_template(&std::env::temp_dir(), count, Blocks::Needed, None, |template, _| {
            images::xfs(template, 0, &[])
        })
    }

    /// Makes volumes with all journals on other devices (`journals`). The guest's name of the first is `/dev/vd{first}`.
    pub fn make_with_journals_apart(
        folder: &Path,
        count: usize,
        files: &[images::File],
        blocks: Blocks,
        first: char,
    ) -> Result<Self> {
        Self::from_template(folder, count, blocks, Some(first), |template, journal| {
            images::ext4_with_journal_apart(template, journal, VOLUME_MIB, files)
        })
    }

    /// Makes images from a template. `make` writes one volume and, with external journals, one journal.
    fn from_template(
        folder: &Path,
        count: usize,
        blocks: Blocks,
        journals_from: Option<char>,
        make: impl FnOnce(&Path, &Path) -> Result<()>,
    ) -> Result<Self> {
        let folder = at("make a folder in", folder, tempfile::tempdir_in(folder))?;
        let of_one = ["volume", "journal"].map(|name| folder.path().join(format!("{name}.img")));
        make(&of_one[0], &of_one[1])?;
        let read = |path: &PathBuf| at("read", path, std::fs::read(path));
        let template = read(&of_one[0])?;
        let journal = journals_from.map(|_| read(&of_one[1])).transpose()?;
        let disks = Self::disks(count);
        let of_each = count.div_ceil(disks);
        let (mut images, mut names, mut journal_images) = (Vec::new(), Vec::new(), Vec::new());
        for (position, letter) in ('a'..='z').take(disks).enumerate() {
            let here = of_each.min(count - position * of_each);
            let image = folder.path().join(format!("volumes-{letter}.img"));
            Layout::OF_VOLUMES.write(&image, here, &template, blocks)?;
            images.push(image);
            if let Some(journal) = &journal {
                let image = folder.path().join(format!("journals-{letter}.img"));
                Layout::CLOSE.write(&image, here, journal, blocks)?;
                journal_images.push(image);
            }
            names.extend((5..here + 5).map(|partition| format!("{letter}{partition}")));
        }
        let journals = journals_from.map(|first| Journals { images: journal_images, first });
        Ok(Self { images, names, journals, at_once: AT_ONCE, _folder: folder })
    }

    /// Sets the number of volumes that are used in parallel.
    pub fn at_once(self, at_once: NonZeroUsize) -> Self {
        Self { at_once, ..self }
    }

    pub fn images(&self) -> &[PathBuf] {
        &self.images
    }

    /// Initial contents of the devices for the journals; empty if the volumes have internal ones.
    pub fn journals(&self) -> &[PathBuf] {
        self.journals.as_ref().map_or(&[], |journals| &journals.images)
    }

    /// The key `nvram` of machine.toml: devices for the journals, with the images as their mirrors.
    pub fn nvram(&self, policy: &str) -> Result<Value> {
        let device = |(image, number): (&PathBuf, usize)| {
            let bytes = at("find the size of", image, std::fs::metadata(image))?.len();
            let keys = [
                ("name", format!("journals-{number}")),
                ("size", format!("{}KiB", bytes >> 10)),
                ("mirror", policy.to_owned()),
                ("mirror_file", image.display().to_string()),
            ];
            Ok(Value::from(Table::from_iter(keys.map(|(key, value)| (key.to_owned(), Value::from(value))))))
        };
        self.journals().iter().zip(0..).map(device).collect::<Result<Vec<Value>>>().map(Value::from)
    }

    /// Copies of the images, to be a machine's first disks.
    pub fn copies(&self) -> Vec<Disk> {
        self.images.iter().map(|image| Disk::copy_of(image)).collect()
    }

    /// Mounts all volumes, some in parallel.
    pub fn mount(&self, vm: &impl Drives) -> Result<()> {
        vm.sh_within(&self.mount_script(), crate::patience(60)).map(drop)
    }

    /// Script that the guest runs for `mount`.
    pub fn mount_script(&self) -> String {
        let journal = if self.journals.is_some() { "-o journal_path=/dev/vd$j " } else { "" };
        self.for_each(&format!("mkdir -p /v/$v && mount -t ext4 {journal}/dev/vd$v /v/$v"))
    }

    /// Appends a line to a file of each volume, and syncs it.
    pub fn append(&self, vm: &impl Drives, line: &str) -> Result<()> {
        self.run_for_each(vm, &format!("echo {line} $v >>/v/$v/lines && sync /v/$v/lines"))
    }

    /// Makes a new file in each volume, and syncs it.
    pub fn touch(&self, vm: &impl Drives, name: &str) -> Result<()> {
        self.run_for_each(vm, &format!("echo $v >/v/$v/{name} && sync /v/$v/{name}"))
    }

    /// The lines that `append` has written to all volumes, as one text.
    pub fn read(&self, vm: &impl Drives) -> Result<String> {
        vm.sh("cat /v/*/lines")
    }

    /// The text that `read` returns after these lines were appended.
    pub fn expected(&self, lines: &[&str]) -> String {
        let mut names: Vec<&String> = self.names.iter().collect();
        names.sort();
        names.iter().flat_map(|volume| lines.iter().map(move |line| format!("{line} {volume}\n"))).collect()
    }

    pub fn unmount_and_check(&self, vm: &impl Drives) -> Result<()> {
        let journal = if self.journals.is_some() { "-j /dev/vd$j " } else { "" };
        let check = format!("e2fsck -f -n {journal}/dev/vd$v >/tmp/fsck-$v 2>&1 || {{ cat /tmp/fsck-$v; false; }}");
        self.run_for_each(vm, &format!("umount /v/$v && {check}"))
    }

    fn run_for_each(&self, vm: &impl Drives, command: &str) -> Result<()> {
        vm.sh_within(&self.for_each(command), crate::patience(60)).map(drop)
    }

    /// A script that runs `command` for each volume, some in parallel. `$v` is the volume; `$j` is its external journal, if any.
    fn for_each(&self, command: &str) -> String {
        let share = self.names.len().div_ceil(self.at_once.get()).max(1);
        let first = self.journals.as_ref().map(|journals| journals.first);
        let runs: String = self
            .names
            .chunks(share)
            .map(|names| format!("({}) & p=\"$p $!\"; ", loops(names, first, command)))
            .collect();
        format!("{runs} for p in $p; do wait $p || exit; done")
    }
}

/// Shell loops over consecutive volumes. `journals_from` is the letter of the first device with journals.
fn loops(names: &[String], journals_from: Option<char>, command: &str) -> String {
    let runs = names.chunk_by(|one, next| one[..1] == next[..1]);
    let of_disk = |run: &[String]| {
        let (letter, first, last) = (&run[0][..1], &run[0][1..], &run[run.len() - 1][1..]);
        let position = letter.as_bytes()[0] - b'a';
        let journal = journals_from.map(|from| format!("j={}$n; ", char::from(from as u8 + position)));
        let journal = journal.unwrap_or_default();
        format!("for n in $(seq {first} {last}); do v={letter}$n; {journal}{command} || exit; done; ")
    };
    runs.map(of_disk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_volume_gets_its_own_journal() {
        let names = ["a5", "a6", "b5"].map(str::to_owned);
        let apart = "for n in $(seq 5 6); do v=a$n; j=d$n; c || exit; done; for n in $(seq 5 5); do v=b$n; j=e$n; c || exit; done; ";
        assert_eq!(loops(&names, Some('d'), "c"), apart);
        assert_eq!(loops(&names[..1], None, "c"), "for n in $(seq 5 5); do v=a$n; c || exit; done; ");
    }
}
