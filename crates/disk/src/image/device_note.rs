//! Notes of block devices: how much the kernel has ever written to the disks beneath one.
//!
//! device -> the disk of a partition, the parts of a RAID or a logical volume -> whole disks -> all of them flushed -> their counters
//!
//! A write to any layer reaches a whole disk, and is counted there. A layer's own counters are not enough: a write to the disk passes
//! a partition by, and undoing a snapshot a logical volume. So writes to other parts of the same disks count as well.
//!
//! The counters are this kernel's. A device is noted only if every write to it passes them: its whole disks are at a SATA or NVMe
//! controller of this host, or are loop devices whose file can be noted. Another host may write to a disk on a network, and
//! `zfs rollback` changes a volume without a write to it. Commands past the block layer (SG_IO) are not counted anywhere.
//!
//! What other programs have written may still be in the page cache of a layer. So each is flushed before the counters are read.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::note::ImageNote;

/// Layers of devices on devices that are followed; real ones have three or four.
const LAYERS_MAX: usize = 16;
/// Fields of `stat`: sectors that were written, and sectors that were discarded. A flush counts as a request to write, without sectors.
const WRITTEN: [usize; 2] = [6, 13];

/// The state of a block device at one moment of this boot. Every write changes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNote {
    layers: Vec<Layer>,
    /// Files of loop devices.
    files: Vec<ImageNote>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Layer {
    name: String,
    /// Number, size, a partition's beginning, and the number that no other disk gets until the host boots again.
    identity: Vec<String>,
    /// Of a whole disk.
    written: Option<[u64; 2]>,
}

/// Why a block device cannot be noted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum Unnotable {
    #[error("{name} may be written to without this host's kernel counting it")]
    Uncounted { name: String },
    #[error("the kernel does not count writes to {name} (queue/iostats)")]
    CountsOff { name: String },
    #[error("{name} was being written to")]
    Moving { name: String },
    #[error("{name} cannot be looked at: {why}")]
    Look { name: String, why: io::Error },
}

impl DeviceNote {
    /// Flushes the device and what lies beneath, and notes it.
    pub fn of(path: &Path) -> Result<Self, Unnotable> {
        let name = path.display().to_string();
        let found = fs::metadata(path).map_err(|why| Unnotable::Look { name, why })?;
        Self::beneath(found.rdev(), Path::new("/sys"), &mut flush)
    }

    /// The layer or file that differs from this earlier note of the device.
    pub fn changed(&self, earlier: &Self) -> Option<String> {
        let layers = self.layers.iter().zip(&earlier.layers).find(|(now, before)| now != before);
        let files = || self.files.iter().zip(&earlier.files).find(|(now, before)| now != before);
        let named = layers.map(|(now, _)| now.name.clone());
        let named = named.or_else(|| files().map(|(now, _)| now.path.display().to_string()));
        // Not the same number of them.
        named.or_else(|| (self != earlier).then(|| self.layers[0].name.clone()))
    }

    fn beneath(device: u64, sys: &Path, flush: &mut Flush<'_>) -> Result<Self, Unnotable> {
        let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let failed = |why| Unnotable::Look { name: number.clone(), why };
        let folder = fs::canonicalize(sys.join("dev/block").join(&number)).map_err(failed)?;
        let mut folders = Vec::new();
        collect(&folder, LAYERS_MAX, &mut folders)?;
        let (mut layers, mut files) = (Vec::new(), Vec::new());
        for found in &folders {
            let failed = |why| Unnotable::Look { name: found.name(), why };
            let file = flush(found).map_err(failed)?;
            if let Some(file) = file {
                let note = ImageNote::of(&file).map_err(failed)?;
                let settled = note.filter(|note| note.is_settled(SystemTime::now()));
                files.push(settled.ok_or_else(|| Unnotable::Moving { name: file.display().to_string() })?);
            }
        }
        for found in &folders {
            layers.push(found.layer().map_err(|why| Unnotable::Look { name: found.name(), why })?);
        }
        Ok(Self { layers, files })
    }
}

/// Flushes a device. Returns the file of a loop device.
type Flush<'a> = dyn FnMut(&Found) -> io::Result<Option<PathBuf>> + 'a;

/// A device's folder in sysfs.
struct Found {
    folder: PathBuf,
    is_whole: bool,
}

/// Finds the device in this folder and all that lies beneath.
fn collect(folder: &Path, layers: usize, found: &mut Vec<Found>) -> Result<(), Unnotable> {
    let this = |is_whole| Found { folder: folder.to_owned(), is_whole };
    let name = this(true).name();
    let Some(deeper) = layers.checked_sub(1) else { return Err(Unnotable::Uncounted { name }) };
    if let (true, Some(disk)) = (folder.join("partition").exists(), folder.parent()) {
        found.push(this(false));
        return collect(disk, deeper, found);
    }
    let failed = |why| Unnotable::Look { name: name.clone(), why };
    let below = match fs::read_dir(folder.join("slaves")) {
        Ok(entries) => entries.map(|entry| fs::canonicalize(entry?.path())).collect::<io::Result<Vec<_>>>(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    let below = below.map_err(failed)?;
    if !below.is_empty() {
        found.push(this(false));
        return below.iter().try_for_each(|below| collect(below, deeper, found));
    }
    if !is_counted(folder) {
        return Err(Unnotable::Uncounted { name });
    }
    if fs::read_to_string(folder.join("queue/iostats")).map_err(failed)?.trim() != "1" {
        return Err(Unnotable::CountsOff { name });
    }
    found.push(this(true));
    Ok(())
}

/// Whether nobody can write to this whole disk past the kernel's counters, or only to a file that shows it.
fn is_counted(folder: &Path) -> bool {
    let parts: Vec<_> = folder.components().filter_map(|part| part.as_os_str().to_str()).collect();
    let is_sata = |part: &&str| part.strip_prefix("ata").is_some_and(|port| port.parse::<u32>().is_ok());
    let is_virtual = parts.contains(&"virtual");
    folder.join("loop").exists() || !is_virtual && parts.iter().any(|part| *part == "nvme" || is_sata(part))
}

impl Found {
    fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn text(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.folder.join(name)).map(|text| text.trim().to_owned())
    }

    fn layer(&self) -> io::Result<Layer> {
        let mut identity = vec![self.text("dev")?, self.text("size")?];
        // A partition has no number of its own, and a disk no beginning.
        identity.push(if self.folder.join("partition").exists() { self.text("start")? } else { self.text("diskseq")? });
        // Which part of its file a loop device is.
        for name in ["loop/offset", "loop/sizelimit"].into_iter().filter(|_| self.folder.join("loop").exists()) {
            identity.push(self.text(name)?);
        }
        let written = self.is_whole.then(|| written(&self.text("stat")?)).transpose()?;
        Ok(Layer { name: self.name(), identity, written })
    }
}

/// What `stat` says of writes and discards.
fn written(stat: &str) -> io::Result<[u64; 2]> {
    let fields: Vec<u64> = stat.split_ascii_whitespace().filter_map(|field| field.parse().ok()).collect();
    if fields.len() <= WRITTEN[1] {
        return Err(io::Error::other("unknown format of stat"));
    }
    Ok(WRITTEN.map(|field| fields[field]))
}

/// Flushes a device through its node, and finds the file of a loop device.
fn flush(found: &Found) -> io::Result<Option<PathBuf>> {
    let about = found.text("uevent")?;
    let name = about.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let node = Path::new("/dev").join(name.ok_or_else(|| io::Error::other("it has no name"))?);
    let with_node = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", node.display()));
    let device = File::open(&node).map_err(with_node)?;
    let kind = device.metadata()?;
    let number = format!("{}:{}", rustix::fs::major(kind.rdev()), rustix::fs::minor(kind.rdev()));
    if !kind.file_type().is_block_device() || number != found.text("dev")? {
        return Err(io::Error::other(format!("{} is another device", node.display())));
    }
    device.sync_all()?;
    let Ok(file) = found.text("loop/backing_file") else { return Ok(None) };
    let file = PathBuf::from(file);
    let at = fs::metadata(&file)?;
    if (at.dev(), at.ino()) != loop_file(&device)? {
        return Err(io::Error::other(format!("{} is another file than its own", file.display())));
    }
    Ok(Some(file))
}

/// Device and inode of a loop device's file.
fn loop_file(device: &File) -> io::Result<(u64, u64)> {
    // LOOP_GET_STATUS64 of linux/loop.h; its structure begins with these two numbers.
    const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05;
    let mut status = [0_u64; 29];
    // SAFETY: the ioctl writes a structure of 232 bytes to the pointer, which is an array of that size on this stack.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, status.as_mut_ptr()) } {
        0 => Ok((status[0], status[1])),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const SDA: &str = "devices/pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda";
    const NVME: &str = "devices/pci0000:00/0000:00:1d.0/0000:03:00.0/nvme/nvme0/nvme0n1";
    const SDB: &str = "devices/platform/host6/session1/target6:0:0/6:0:0:1/block/sdb";
    const SHARED: &str = "devices/virtual/nvme-subsystem/nvme-subsys1/nvme1n1";
    const VOLUME: &str = "devices/virtual/block/zd0";

    /// A sysfs of its own.
    struct Sys(tempfile::TempDir);

    impl Sys {
        /// Two disks of the host's with a partition each, a logical volume over both, another one over the first, and disks that
        /// others can write to.
        fn new() -> Self {
            let sys = Self(tempfile::tempdir().unwrap());
            sys.add("8:0", SDA, &[("diskseq", "1"), ("queue/iostats", "1")]);
            sys.add("8:1", &format!("{SDA}/sda1"), &[("partition", "1"), ("start", "2048")]);
            sys.add("259:0", NVME, &[("diskseq", "2"), ("queue/iostats", "1")]);
            sys.add("259:1", &format!("{NVME}/nvme0n1p1"), &[("partition", "1"), ("start", "2048")]);
            for (number, minor, below) in [("3", 0, &[SDA, NVME][..]), ("4", 1, &[SDA]), ("5", 2, &[SDA, SDB])] {
                let folder = format!("devices/virtual/block/dm-{minor}");
                sys.add(&format!("253:{minor}"), &folder, &[("diskseq", number)]);
                fs::create_dir_all(sys.at(&folder).join("slaves")).unwrap();
                for below in below {
                    let name = Path::new(below).file_name().unwrap();
                    symlink(sys.at(below), sys.at(&folder).join("slaves").join(name)).unwrap();
                }
            }
            for (number, folder) in [("8:16", SDB), ("259:2", SHARED), ("230:0", VOLUME)] {
                sys.add(number, folder, &[("diskseq", number), ("queue/iostats", "1")]);
            }
            sys
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn add(&self, number: &str, folder: &str, more: &[(&str, &str)]) {
            fs::create_dir_all(self.at(folder).join("queue")).unwrap();
            fs::create_dir_all(self.at("dev/block")).unwrap();
            symlink(self.at(folder), self.at("dev/block").join(number)).unwrap();
            let all = [("dev", number), ("size", "4096"), ("stat", &stat([0; 17]))];
            all.iter().chain(more).for_each(|(name, text)| self.set(folder, name, text));
        }

        fn set(&self, folder: &str, name: &str, text: &str) {
            fs::write(self.at(folder).join(name), format!("{text}\n")).unwrap();
        }

        /// Its note, and the devices that were flushed for it.
        fn note(&self, (major, minor): (u32, u32)) -> Result<(DeviceNote, Vec<String>), String> {
            let mut flushed = Vec::new();
            let note = DeviceNote::beneath(rustix::fs::makedev(major, minor), self.0.path(), &mut |found| {
                flushed.push(found.name());
                Ok(None)
            });
            note.map(|note| (note, flushed)).map_err(|error| error.to_string())
        }
    }

    fn stat(fields: [u64; 17]) -> String {
        fields.iter().map(|field| format!("{field:>8} ")).collect()
    }

    /// What has changed.
    fn changed(sys: &Sys, device: (u32, u32), deed: impl FnOnce(&Sys)) -> Option<String> {
        let before = sys.note(device).unwrap().0;
        assert_eq!(sys.note(device).unwrap().0.changed(&before), None);
        deed(sys);
        sys.note(device).unwrap().0.changed(&before)
    }

    #[test]
    fn writes_beneath_a_device_change_its_note() {
        let write = |folder: &'static str, field: usize| {
            move |sys: &Sys| sys.set(folder, "stat", &stat(std::array::from_fn(|at| u64::from(at == field))))
        };
        for field in WRITTEN {
            let changed = |device, folder| changed(&Sys::new(), device, write(folder, field)).unwrap_or_default();
            assert_eq!(changed((8, 0), SDA), "sda", "{field}");
            assert_eq!(changed((8, 1), SDA), "sda", "past the partition: {field}");
            assert_eq!(changed((253, 0), NVME), "nvme0n1", "past the volume: {field}");
        }
        // Reads, requests, time and flushes.
        for field in [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 14, 15, 16] {
            assert_eq!(changed(&Sys::new(), (253, 0), write(NVME, field)), None, "{field}");
        }
        assert_eq!(changed(&Sys::new(), (253, 1), write(NVME, 6)), None, "it does not lie on this disk");
    }

    #[test]
    fn another_device_is_not_the_same() {
        for (name, text) in [("diskseq", "9"), ("size", "8")] {
            let changed = changed(&Sys::new(), (8, 1), |sys| sys.set(SDA, name, text));
            assert_eq!(changed.as_deref(), Some("sda"), "{name}");
        }
        let moved = changed(&Sys::new(), (8, 1), |sys| sys.set(&format!("{SDA}/sda1"), "start", "4096"));
        assert_eq!(moved.as_deref(), Some("sda1"));
        let another = changed(&Sys::new(), (253, 0), |sys| sys.set("devices/virtual/block/dm-0", "diskseq", "9"));
        assert_eq!(another.as_deref(), Some("dm-0"));
        // A volume that was moved away from a disk.
        let shrunk = changed(&Sys::new(), (253, 0), |sys| {
            fs::remove_file(sys.at("devices/virtual/block/dm-0/slaves/nvme0n1")).unwrap();
        });
        assert!(shrunk.is_some());
    }

    #[test]
    fn every_layer_is_flushed_from_above() {
        let flushed = |device| Sys::new().note(device).unwrap().1;
        assert_eq!(flushed((8, 0)), ["sda"]);
        assert_eq!(flushed((259, 1)), ["nvme0n1p1", "nvme0n1"]);
        let mut of_volume = flushed((253, 0));
        assert_eq!(of_volume.remove(0), "dm-0");
        of_volume.sort_unstable();
        assert_eq!(of_volume, ["nvme0n1", "sda"]);
    }

    #[test]
    fn devices_that_others_can_write_to_are_refused() {
        let sys = Sys::new();
        for (device, name) in [((8, 16), "sdb"), ((259, 2), "nvme1n1"), ((230, 0), "zd0"), ((253, 2), "sdb")] {
            let told = format!("{name} may be written to without this host's kernel counting it");
            assert_eq!(sys.note(device), Err(told));
        }
        sys.set(SDA, "queue/iostats", "0");
        assert_eq!(sys.note((8, 1)), Err("the kernel does not count writes to sda (queue/iostats)".to_owned()));
        sys.set(NVME, "stat", "1 2 3");
        assert_eq!(sys.note((259, 0)), Err("nvme0n1 cannot be looked at: unknown format of stat".to_owned()));
    }
}
