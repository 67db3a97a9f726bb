//! Images: which files a machine's disks are, and what they were when they were last known to be the machine's own.
//!
//! noted (while a guest runs, and when a wait begins) -> a gap, in which nobody guards the images -> compared: what memory
//! holds of a disk is as good as ever, or is forgotten
//!
//! A gap is any time in which an operator may take the machine for one that is down: its keeper is dead, or it waits
//! without a guest, or its crashed guest stands still. Each disk is judged by itself, with all files below its image. A
//! block device cannot be noted, so any gap voids it.
//!
//! The notes are one file in the memory folder. A keeper renews them several times a second and at the beginning of a
//! wait. It notes an image only if a later write would change its times; one that is written to all the time keeps an old
//! note, which no longer fits. So the last writes of a keeper that was killed void what was learned of that disk, too:
//! nobody can tell them from a stranger's. A keeper that was replaced by exec leaves no gap: the process is the same.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use hearth_disk::image::{ImageFile, ImageNote};
use hearth_memory::{Lasting, replace_file};
use hearth_qemu::ProcessId;
use serde::{Deserialize, Serialize};

/// In the memory folder; other files that begin so are on their way to be it.
pub const NOTES_FILE: &str = "image-notes";
/// The less often, the more writes a killed keeper has not noted. A look takes microseconds.
const RENEW_EVERY: Duration = Duration::from_millis(250);
/// For images that nobody of us writes to any more.
const REST_PATIENCE: Duration = Duration::from_secs(1);

/// One disk and the files of its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskNote {
    pub disk: String,
    /// The image, and what it is based on.
    pub files: Vec<ImageFile>,
    /// What the files were at rest. None: one is a block device, or was being written to.
    pub rest: Option<Vec<ImageNote>>,
}

impl DiskNote {
    /// Of files that are open, and may be written to at this moment.
    pub fn of_open(disk: &str, files: Vec<ImageFile>) -> Self {
        Self { disk: disk.to_owned(), files, rest: None }
    }

    /// A file in whose place there is another one now. One that is gone is not among them.
    pub fn exchanged(&self) -> Option<&Path> {
        let other = |file: &&ImageFile| ImageFile::of(&file.path).is_ok_and(|found| found != **file);
        self.files.iter().find(other).map(|file| file.path.as_path())
    }

    /// A file that is not there any more.
    pub fn missing(&self) -> Option<&Path> {
        let gone =
            |file: &&ImageFile| ImageFile::of(&file.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        self.files.iter().find(gone).map(|file| file.path.as_path())
    }

    /// Why the disk may hold other bytes than when it was noted; none if it holds the same.
    pub fn doubt(&self) -> Option<String> {
        if let Some(other) = self.exchanged() {
            return Some(format!("{} is another file than before", other.display()));
        }
        self.changed()
    }

    /// The same, also after the host has booted and counts its devices anew.
    pub fn changed(&self) -> Option<String> {
        if let Some(device) = self.files.iter().find(|file| file.is_device) {
            let path = device.path.display();
            return Some(format!("{path} is a block device, of which nobody can tell whether it was written to"));
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

    fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// Whether both are of the same disk, by the paths of its files.
    pub fn is_of_disk(&self, other: &Self) -> bool {
        self.paths().eq(other.paths())
    }

    /// The notes of all files. None: it has none, or not of these files.
    fn look(&self) -> io::Result<Option<Vec<ImageNote>>> {
        self.files.iter().map(ImageFile::note).collect()
    }

    /// This disk as it is now, if a later write to it would be seen.
    fn settled(&self) -> io::Result<Option<Self>> {
        let Some(rest) = self.look()? else { return Ok(None) };
        let now = SystemTime::now();
        let is_settled = rest.iter().all(|note| note.is_settled(now));
        Ok(is_settled.then(|| Self { rest: Some(rest), ..self.clone() }))
    }
}

/// What these disks are now, whether or not they are at rest.
pub fn look(disks: &[DiskNote]) -> Vec<DiskNote> {
    let found = |disk: &DiskNote| DiskNote { rest: disk.look().ok().flatten(), ..disk.clone() };
    disks.iter().map(found).collect()
}

/// What these disks are now that nobody of us writes to them; waits until a later write would be seen. One that somebody
/// goes on writing to has no note.
pub fn at_rest(disks: &[DiskNote]) -> Vec<DiskNote> {
    let deadline = Instant::now() + REST_PATIENCE;
    let mut found: Vec<_> = disks.iter().map(|disk| DiskNote { rest: None, ..disk.clone() }).collect();
    loop {
        let mut is_moving = false;
        for disk in found.iter_mut().filter(|disk| disk.rest.is_none()) {
            match disk.settled() {
                Ok(Some(settled)) => *disk = settled,
                // A block device never is, nor a file that is gone.
                Ok(None) => is_moving |= disk.look().is_ok_and(|found| found.is_some()),
                Err(_) => {}
            }
        }
        if !is_moving || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What a keeper leaves for the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    keeper_pid: u32,
    keeper_start_ticks: u64,
    /// In the order of the configuration.
    pub disks: Vec<DiskNote>,
}

impl Notes {
    /// None: there are none that can be read.
    pub fn load(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(NOTES_FILE)).ok()?).ok()
    }

    fn new(disks: &[DiskNote]) -> io::Result<Self> {
        let ProcessId { pid, start_ticks } = ProcessId::of_this_process()?;
        Ok(Self { keeper_pid: pid, keeper_start_ticks: start_ticks, disks: disks.to_vec() })
    }

    /// The keeper that wrote them has become this one, without a gap.
    pub fn are_of_this_process(&self) -> bool {
        let noted = ProcessId { pid: self.keeper_pid, start_ticks: self.keeper_start_ticks };
        ProcessId::of_this_process().is_ok_and(|this| this == noted)
    }

    /// A file in whose place there is another one now, with the name of its disk.
    pub fn exchanged(&self) -> Option<(&str, &Path)> {
        self.disks.iter().find_map(|disk| Some((disk.disk.as_str(), disk.exchanged()?)))
    }

    /// Why memory may hold other bytes than this disk, which is at this place in the configuration and open.
    pub fn doubt(&self, position: usize, open: &DiskNote) -> Option<String> {
        match self.disks.get(position) {
            Some(noted) if noted.disk == open.disk && noted.is_of_disk(open) => noted.doubt(),
            _ => Some("the machine had other disks".to_owned()),
        }
    }

    fn write(&self, folder: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        replace_file(&folder.join(NOTES_FILE), Lasting::Process, |file| file.write_all(&text))
    }
}

/// Writes down what the images are at rest, and says it.
pub fn write_at_rest(folder: &Path, disks: &[DiskNote]) -> io::Result<Vec<DiskNote>> {
    let found = at_rest(disks);
    Notes::new(&found)?.write(folder)?;
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
    pub fn new(folder: &Path, disks: &[DiskNote]) -> io::Result<Self> {
        Ok(Self { folder: folder.to_owned(), notes: Notes::new(disks)?, is_written: false, looked: None })
    }

    /// Renews the notes, if it is time and an image has changed. Only while what is held of the images is kept current.
    pub fn renew(&mut self) -> io::Result<()> {
        if self.looked.is_some_and(|looked| looked.elapsed() < RENEW_EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        for disk in &mut self.notes.disks {
            // What cannot be looked at keeps its note, which then fits or does not.
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

        /// As a keeper that lives notes them.
        fn watched(&self) -> Notes {
            let mut watch = Watch::new(self.folder.path(), &self.disks).unwrap();
            at_rest(&self.disks);
            watch.renew().unwrap();
            Notes::load(self.folder.path()).unwrap()
        }

        /// Which disks are doubted, with their reasons.
        fn doubts(&self, notes: &Notes) -> Vec<Option<String>> {
            let doubt = |(position, open): (usize, &DiskNote)| notes.doubt(position, open);
            let short = |why: String| why.replace(&format!("{}/", self.folder.path().display()), "");
            self.disks.iter().enumerate().map(|at| doubt(at).map(short)).collect()
        }
    }

    /// What a stranger does to one file, and how that is told.
    type Deed = (fn(&Path), &'static str);

    const DEEDS: [Deed; 6] = [
        (|path| File::options().write(true).open(path).unwrap().write_all_at(&[2], 100).unwrap(), "CHANGED"),
        (|path| File::options().write(true).open(path).unwrap().set_len(8192).unwrap(), "CHANGED"),
        (
            |path| {
                let found = fs::metadata(path).unwrap();
                fs::write(path, [2; 4096]).unwrap();
                // ctime tells.
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
    fn whatever_is_done_to_a_file_voids_its_disk_alone() {
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
    fn a_file_that_is_being_written_to_has_no_note() {
        let machine = Machine::new();
        let mut watch = Watch::new(machine.folder.path(), &machine.disks).unwrap();
        at_rest(&machine.disks);
        fs::write(machine.path("data"), [3; 4096]).unwrap();
        watch.renew().unwrap();
        let notes = Notes::load(machine.folder.path()).unwrap();
        let expect = "data was being written to when it was last noted what it is";
        assert_eq!(machine.doubts(&notes), [None, Some(expect.to_owned())]);
        assert!(notes.are_of_this_process());
        // It comes to rest, and is noted then.
        at_rest(&machine.disks);
        watch.looked = None;
        watch.renew().unwrap();
        assert_eq!(machine.doubts(&Notes::load(machine.folder.path()).unwrap()), [None, None]);
    }

    #[test]
    fn another_file_in_place_of_the_open_one_is_not_noted() {
        let machine = Machine::new();
        fs::rename(machine.path("base"), machine.path("data")).unwrap();
        let found = at_rest(&machine.disks);
        assert_eq!(found.iter().map(|disk| disk.rest.is_some()).collect::<Vec<_>>(), [false, false]);
        assert_eq!(machine.disks[1].exchanged(), Some(machine.path("data").as_path()));
        assert_eq!(machine.disks[0].missing(), Some(machine.path("base").as_path()));
    }

    #[test]
    fn a_machine_with_other_disks_is_told() {
        let machine = Machine::new();
        let notes = machine.watched();
        let swapped: Vec<_> = machine.disks.iter().rev().cloned().collect();
        let doubts = swapped.iter().enumerate().map(|(position, open)| notes.doubt(position, open));
        assert!(doubts.into_iter().all(|doubt| doubt.as_deref() == Some("the machine had other disks")));
        let based_otherwise = DiskNote { files: machine.disks[0].files[..1].to_vec(), ..machine.disks[0].clone() };
        assert_eq!(notes.doubt(0, &based_otherwise).as_deref(), Some("the machine had other disks"));
    }

    #[test]
    fn notes_that_are_damaged_are_none() {
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
