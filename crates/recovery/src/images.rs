//! Images: the files of a machine's disks, and notes of what they were while the machine guarded them.
//!
//! note (while a guest runs, and when a wait begins) -> a gap, in which nobody guards the images -> compare: what
//! memory holds of a disk stays valid, or is forgotten
//!
//! A gap is any time in which an operator may think that the machine is down: its keeper is dead, it waits without a
//! guest, or its crashed guest stands still. Each disk is compared by itself, with all files below its image. Of a block
//! device only a wait is noted, in this process (`DeviceNote`). Any other gap voids it.
//!
//! The notes are one file in the memory folder. A keeper renews them several times a second, and when a wait begins. It
//! notes an image only if a later write would change the image's times. An image that is written all the time keeps an
//! old note, which no longer fits. So the last writes of a killed keeper also void what memory holds of that disk,
//! because nobody can tell them from a stranger's. A keeper that was replaced by exec leaves no gap, because the
//! process is the same.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use hearth_disk::image::{DeviceNote, ImageFile, ImageNote, Unnotable};
use hearth_memory::{Durability, replace_file};
use hearth_qemu::ProcessId;
use serde::{Deserialize, Serialize};

/// Name of the notes' file in the memory folder. Other files with this prefix are to be renamed to it.
pub const NOTES_FILE: &str = "image-notes";
/// Interval between two renewals. The longer it is, the more writes of a killed keeper are not noted. A check takes
/// microseconds.
const RENEW_EVERY: Duration = Duration::from_millis(250);
/// Maximum wait for images that this machine no longer writes to.
const REST_PATIENCE: Duration = Duration::from_secs(1);
/// Interval between two looks during that.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// One disk and the files of its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskNote {
    /// Name of the disk.
    pub disk: String,
    /// The image and its backing files.
    pub files: Vec<ImageFile>,
    /// Notes of the files at rest. `None` if one is a block device or was being written to.
    pub rest: Option<Vec<ImageNote>>,
    /// Notes of the block devices at rest, if the image is on nothing else, or why there are none. Only this process uses them.
    #[serde(skip)]
    devices: Option<Result<Vec<DeviceNote>, String>>,
}

impl DiskNote {
    /// A disk with open files, which may be written to at this moment. It has no notes yet.
    pub fn of_open(disk: &str, files: Vec<ImageFile>) -> Self {
        Self { disk: disk.to_owned(), files, rest: None, devices: None }
    }

    /// A file that was replaced by another one. A missing file does not count.
    pub fn exchanged(&self) -> Option<&Path> {
        let other = |file: &&ImageFile| ImageFile::of(&file.path).is_ok_and(|found| found != **file);
        self.files.iter().find(other).map(|file| file.path.as_path())
    }

    /// A file that no longer exists.
    pub fn missing(&self) -> Option<&Path> {
        let gone =
            |file: &&ImageFile| ImageFile::of(&file.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        self.files.iter().find(gone).map(|file| file.path.as_path())
    }

    /// Why the disk may have changed since it was noted; `None` if it has not.
    pub fn doubt(&self) -> Option<String> {
        if let Some(other) = self.exchanged() {
            return Some(format!("{} is another file than before", other.display()));
        }
        self.changed()
    }

    /// Same as `doubt`, but valid even after a reboot of the host, which may number its devices differently.
    pub fn changed(&self) -> Option<String> {
        if let Some(device) = self.files.iter().find(|file| file.is_device) {
            return self.changed_on(&device.path);
        }
        let Some(rest) = &self.rest else {
            let image = self.files.first().map(|file| file.path.display().to_string()).unwrap_or_default();
            return Some(format!("{image} was being written to when it was last noted what it is"));
        };
        rest.iter().find_map(|noted| match ImageNote::of(&noted.path) {
            Ok(Some(found)) if noted.is_still(&found) => None,
            Ok(_) => Some(format!("{} was changed while nobody guarded it", noted.path.display())),
            Err(error) => Some(format!("{} cannot be looked at: {error}", noted.path.display())),
        })
    }

    /// As `changed`, for a disk with this block device.
    fn changed_on(&self, device: &Path) -> Option<String> {
        let path = device.display();
        match &self.devices {
            None => Some(format!("{path} is a block device, on which writes leave no trace")),
            Some(Err(why)) => Some(format!("{path} is a block device, on which writes leave no trace: {why}")),
            Some(Ok(noted)) => match self.look_at_devices() {
                Ok(found) => {
                    let changed = found.iter().zip(noted).find_map(|(now, before)| now.changed(before));
                    changed.map(|what| format!("{path}: {what} was written to or replaced while nobody guarded it"))
                }
                Err(error) => Some(format!("{path} was not compared: {error}")),
            },
        }
    }

    fn look_at_devices(&self) -> Result<Vec<DeviceNote>, Unnotable> {
        self.paths().map(DeviceNote::of).collect()
    }

    /// Notes the block devices, if the image is on nothing else. Waits, for a limited time, until they can be noted.
    fn note_devices(&mut self) {
        if !self.files.iter().all(|file| file.is_device) {
            return;
        }
        let deadline = Instant::now() + REST_PATIENCE;
        let noted = loop {
            match self.look_at_devices() {
                Err(Unnotable::Moving { .. }) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
                found => break found,
            }
        };
        self.devices = Some(noted.map_err(|error| error.to_string()));
    }

    fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// Whether both describe the same disk, by the paths of its files.
    pub(crate) fn is_of_disk(&self, other: &Self) -> bool {
        self.paths().eq(other.paths())
    }

    /// Notes of all files. `None` if a file cannot be noted or was replaced.
    fn look(&self) -> io::Result<Option<Vec<ImageNote>>> {
        self.files.iter().map(ImageFile::note).collect()
    }

    /// This disk with its present notes, if a later write would change them.
    fn settled(&self) -> io::Result<Option<Self>> {
        let Some(rest) = self.look()? else { return Ok(None) };
        let now = SystemTime::now();
        let is_settled = rest.iter().all(|note| note.is_settled(now));
        Ok(is_settled.then(|| Self { rest: Some(rest), ..self.clone() }))
    }
}

/// These disks with their present notes, whether or not they are at rest.
pub fn look(disks: &[DiskNote]) -> Vec<DiskNote> {
    let found = |disk: &DiskNote| DiskNote { rest: disk.look().ok().flatten(), ..disk.clone() };
    disks.iter().map(found).collect()
}

/// These disks with notes at rest, when this machine no longer writes to them. Waits, for a limited time, until a later
/// write would be seen. A disk that somebody still writes to gets no note.
pub fn at_rest(disks: &[DiskNote]) -> Vec<DiskNote> {
    let deadline = Instant::now() + REST_PATIENCE;
    let mut found: Vec<_> = disks.iter().map(|disk| DiskNote { rest: None, ..disk.clone() }).collect();
    loop {
        let mut is_moving = false;
        for disk in found.iter_mut().filter(|disk| disk.rest.is_none()) {
            match disk.settled() {
                Ok(Some(settled)) => *disk = settled,
                // A block device never settles, nor does a missing file.
                Ok(None) => is_moving |= disk.look().is_ok_and(|found| found.is_some()),
                Err(_) => {}
            }
        }
        if !is_moving || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Notes that a keeper leaves for the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    keeper_pid: u32,
    keeper_start_ticks: u64,
    /// One note for each disk, in the order of the configuration.
    pub disks: Vec<DiskNote>,
}

impl Notes {
    /// Loads the notes; `None` if there are none that can be read.
    pub fn load(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(NOTES_FILE)).ok()?).ok()
    }

    fn new(disks: &[DiskNote]) -> io::Result<Self> {
        let ProcessId { pid, start_ticks } = ProcessId::of_this_process()?;
        Ok(Self { keeper_pid: pid, keeper_start_ticks: start_ticks, disks: disks.to_vec() })
    }

    /// Whether this process wrote the notes, so that there was no gap.
    pub fn are_of_this_process(&self) -> bool {
        let noted = ProcessId { pid: self.keeper_pid, start_ticks: self.keeper_start_ticks };
        ProcessId::of_this_process().is_ok_and(|this| this == noted)
    }

    /// A file that was replaced by another one, with the name of its disk.
    pub fn exchanged(&self) -> Option<(&str, &Path)> {
        self.disks.iter().find_map(|disk| Some((disk.disk.as_str(), disk.exchanged()?)))
    }

    /// Why memory may not match this open disk, which is at `position` in the configuration; `None` if it matches.
    pub fn doubt(&self, position: usize, open: &DiskNote) -> Option<String> {
        match self.disks.get(position) {
            Some(noted) if noted.disk == open.disk && noted.is_of_disk(open) => noted.doubt(),
            _ => Some("the machine had other disks".to_owned()),
        }
    }

    fn write(&self, folder: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        replace_file(&folder.join(NOTES_FILE), Durability::Process, |file| file.write_all(&text))
    }
}

/// Notes the images at rest, and writes the notes. Returns them, with those of block devices, which are not written.
pub fn write_at_rest(folder: &Path, disks: &[DiskNote]) -> io::Result<Vec<DiskNote>> {
    let mut found = at_rest(disks);
    Notes::new(&found)?.write(folder)?;
    found.iter_mut().for_each(DiskNote::note_devices);
    Ok(found)
}

/// Keeps the notes of images that are in use.
pub struct Watch {
    folder: PathBuf,
    notes: Notes,
    is_written: bool,
    looked: Option<Instant>,
}

impl Watch {
    /// Starts with no disk noted; `renew` writes the first notes.
    pub fn new(folder: &Path, disks: &[DiskNote]) -> io::Result<Self> {
        Ok(Self { folder: folder.to_owned(), notes: Notes::new(disks)?, is_written: false, looked: None })
    }

    /// Renews the notes, if that is due and an image has changed. Call it only while memory is updated with every write
    /// to the images.
    pub fn renew(&mut self) -> io::Result<()> {
        if self.looked.is_some_and(|looked| looked.elapsed() < RENEW_EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        for disk in &mut self.notes.disks {
            // An image that cannot be read keeps its note, which then fits or does not.
            if let Ok(Some(settled)) = disk.settled()
                && settled != *disk
            {
                *disk = settled;
                self.is_written = false;
            }
        }
        if !self.is_written {
            self.notes.write(&self.folder)?;
            self.is_written = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Two disks: `root` over a base, and `data`.
    struct Machine {
        folder: tempfile::TempDir,
        disks: Vec<DiskNote>,
    }

    impl Machine {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            for name in ["top", "base", "data"] {
                fs::write(folder.path().join(name), [1; 4096]).unwrap();
            }
            let note = |disk: &str, files: &[&str]| {
                let files = files.iter().map(|name| ImageFile::of(&folder.path().join(name)).unwrap());
                DiskNote::of_open(disk, files.collect())
            };
            let disks = vec![note("root", &["top", "base"]), note("data", &["data"])];
            Self { folder, disks }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// Notes as a running keeper takes them.
        fn watched(&self) -> Notes {
            let mut watch = Watch::new(self.folder.path(), &self.disks).unwrap();
            at_rest(&self.disks);
            watch.renew().unwrap();
            Notes::load(self.folder.path()).unwrap()
        }

        /// The reason to doubt each disk, if any.
        fn doubts(&self, notes: &Notes) -> Vec<Option<String>> {
            let doubt = |(position, open): (usize, &DiskNote)| notes.doubt(position, open);
            let short = |why: String| why.replace(&format!("{}/", self.folder.path().display()), "");
            self.disks.iter().enumerate().map(|at| doubt(at).map(short)).collect()
        }
    }

    /// A change to one file, and the reason it causes.
    type Deed = (fn(&Path), &'static str);

    const DEEDS: [Deed; 6] = [
        (|path| File::options().write(true).open(path).unwrap().write_all_at(&[2], 100).unwrap(), "CHANGED"),
        (|path| File::options().write(true).open(path).unwrap().set_len(8192).unwrap(), "CHANGED"),
        (
            |path| {
                let found = fs::metadata(path).unwrap();
                fs::write(path, [2; 4096]).unwrap();
                // ctime shows the change.
                File::options().write(true).open(path).unwrap().set_modified(found.modified().unwrap()).unwrap();
            },
            "CHANGED",
        ),
        (
            |path| {
                let other = path.with_extension("other");
                fs::write(&other, [1; 4096]).unwrap();
                fs::rename(&other, path).unwrap();
            },
            "NAME is another file than before",
        ),
        (
            |path| {
                fs::remove_file(path).unwrap();
                fs::write(path, [1; 4096]).unwrap();
            },
            "NAME is another file than before",
        ),
        (|path| fs::remove_file(path).unwrap(), "NAME cannot be looked at: No such file or directory (os error 2)"),
    ];

    #[test]
    fn changed_file_voids_its_disk_alone() {
        for (deed, told) in DEEDS {
            for (name, disk) in [("top", 0), ("base", 0), ("data", 1)] {
                let machine = Machine::new();
                let notes = machine.watched();
                assert_eq!(machine.doubts(&notes), [None, None]);
                deed(&machine.path(name));
                let told = told.replace("CHANGED", "NAME was changed while nobody guarded it").replace("NAME", name);
                let mut expect = [None, None];
                expect[disk] = Some(told);
                assert_eq!(machine.doubts(&notes), expect, "{name}");
            }
        }
    }

    #[test]
    fn file_being_written_has_no_note() {
        let machine = Machine::new();
        let mut watch = Watch::new(machine.folder.path(), &machine.disks).unwrap();
        at_rest(&machine.disks);
        fs::write(machine.path("data"), [3; 4096]).unwrap();
        watch.renew().unwrap();
        let notes = Notes::load(machine.folder.path()).unwrap();
        let expect = "data was being written to when it was last noted what it is";
        assert_eq!(machine.doubts(&notes), [None, Some(expect.to_owned())]);
        assert!(notes.are_of_this_process());
        // It is noted once it is at rest.
        at_rest(&machine.disks);
        watch.looked = None;
        watch.renew().unwrap();
        assert_eq!(machine.doubts(&Notes::load(machine.folder.path()).unwrap()), [None, None]);
    }

    #[test]
    fn replaced_or_missing_files_are_not_noted() {
        let machine = Machine::new();
        fs::rename(machine.path("base"), machine.path("data")).unwrap();
        let found = at_rest(&machine.disks);
        assert_eq!(found.iter().map(|disk| disk.rest.is_some()).collect::<Vec<_>>(), [false, false]);
        assert_eq!(machine.disks[1].exchanged(), Some(machine.path("data").as_path()));
        assert_eq!(machine.disks[0].missing(), Some(machine.path("base").as_path()));
    }

    #[test]
    fn other_disks_void_the_notes() {
        let machine = Machine::new();
        let notes = machine.watched();
        let swapped: Vec<_> = machine.disks.iter().rev().cloned().collect();
        let doubts = swapped.iter().enumerate().map(|(position, open)| notes.doubt(position, open));
        assert!(doubts.into_iter().all(|doubt| doubt.as_deref() == Some("the machine had other disks")));
        let based_otherwise = DiskNote { files: machine.disks[0].files[..1].to_vec(), ..machine.disks[0].clone() };
        assert_eq!(notes.doubt(0, &based_otherwise).as_deref(), Some("the machine had other disks"));
    }

    #[test]
    fn damaged_notes_are_ignored() {
        let machine = Machine::new();
        assert_eq!(Notes::load(machine.folder.path()), None);
        let notes = machine.watched();
        let path = machine.path(NOTES_FILE);
        let text = fs::read(&path).unwrap();
        fs::write(&path, &text[..text.len() - 2]).unwrap();
        assert_eq!(Notes::load(machine.folder.path()), None);
        let other = Notes { keeper_start_ticks: notes.keeper_start_ticks + 1, ..notes };
        assert!(!other.are_of_this_process());
    }
}
