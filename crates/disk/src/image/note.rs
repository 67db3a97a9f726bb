//! Notes of image files: which file it is, and its state at one moment.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// A file system's clock advances in steps of up to 10 ms: what is written within one step after a note would have the
/// time of the note. A file that was written this recently is noted later.
const UNSETTLED: Duration = Duration::from_millis(100);

/// A file or block device of an image. Another one in its place is not equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Its path.
    pub path: PathBuf,
    /// Whether it is a block device.
    pub is_device: bool,
    device: u64,
    inode: u64,
    /// Birth time, if the file system has it: another file may get the same inode number.
    made: Option<SystemTime>,
}

impl ImageFile {
    /// The file that the path leads to now.
    pub fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::new(path, &fs::metadata(path)?))
    }

    /// The open file, wherever its path leads by now.
    pub fn of_open(path: &Path, file: &File) -> io::Result<Self> {
        Ok(Self::new(path, &file.metadata()?))
    }

    fn new(path: &Path, found: &Metadata) -> Self {
        let path = path.to_owned();
        // The node of a device may be made anew, and the device is the same.
        match found.file_type().is_block_device() {
            true => Self { path, is_device: true, device: found.rdev(), inode: 0, made: None },
            false => {
                Self { path, is_device: false, device: found.dev(), inode: found.ino(), made: found.created().ok() }
            }
        }
    }

    /// Its note. `None` if its path leads elsewhere by now, or if it is a block device, which has no time of the last write.
    pub fn note(&self) -> io::Result<Option<ImageNote>> {
        let found = fs::metadata(&self.path)?;
        let is_this = !self.is_device && Self::new(&self.path, &found) == *self;
        Ok(is_this.then(|| ImageNote::new(&self.path, &found)))
    }
}

/// The state of a file at one moment. Every write changes at least one of its fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageNote {
    /// Its path.
    pub path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    /// Birth time, if the file system has it: another file may get the same inode number.
    made: Option<SystemTime>,
}

impl ImageNote {
    /// The note of a file. `None` for a block device, which has no time of the last write.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        let found = fs::metadata(path)?;
        Ok(found.is_file().then(|| Self::new(path, &found)))
    }

    fn new(path: &Path, found: &Metadata) -> Self {
        Self {
            path: path.to_owned(),
            device: found.dev(),
            inode: found.ino(),
            bytes: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
            made: found.created().ok(),
        }
    }

    /// Whether the file is the same, unchanged. The host may number its devices differently after it has booted.
    pub fn is_still(&self, now: &Self) -> bool {
        Self { device: now.device, ..self.clone() } == *now
    }

    /// Whether a write after the note would have changed the file's times.
    pub fn is_settled(&self, noted_at: SystemTime) -> bool {
        let since = noted_at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let [modified, changed] = [self.modified, self.changed]
            .map(|(seconds, nanoseconds)| Duration::new(seconds.max(0) as u64, nanoseconds.max(0) as u32));
        since.saturating_sub(modified.max(changed)) > UNSETTLED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_write_is_not_settled() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let note = ImageNote::of(image.path()).unwrap().unwrap();
        let written = SystemTime::UNIX_EPOCH + Duration::new(note.changed.0 as u64, note.changed.1 as u32);
        assert!(!note.is_settled(written) && !note.is_settled(written + UNSETTLED));
        assert!(note.is_settled(written + UNSETTLED * 2));
        assert!(!note.is_settled(written - UNSETTLED), "the clock was set back");
    }

    #[test]
    fn all_but_device_numbers_is_compared() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let note = ImageNote::of(image.path()).unwrap().unwrap();
        assert!(note.is_still(&ImageNote { device: 99, ..note.clone() }));
        let others = [
            ImageNote { path: "/other".into(), ..note.clone() },
            ImageNote { inode: note.inode + 1, ..note.clone() },
            ImageNote { bytes: 1, ..note.clone() },
            ImageNote { modified: (1, 0), ..note.clone() },
            ImageNote { changed: (1, 0), ..note.clone() },
            ImageNote { made: Some(SystemTime::UNIX_EPOCH), ..note.clone() },
        ];
        others.iter().for_each(|other| assert!(!note.is_still(other), "{other:?}"));
    }

    #[test]
    fn replaced_file_is_recognised() {
        let folder = tempfile::tempdir().unwrap();
        let [image, other] = ["image", "other"].map(|name| folder.path().join(name));
        [&image, &other].into_iter().for_each(|path| fs::write(path, "same").unwrap());
        let open = File::open(&image).unwrap();
        let file = ImageFile::of_open(&image, &open).unwrap();
        assert_eq!(ImageFile::of(&image).unwrap(), file);
        assert!(file.note().unwrap().is_some());
        fs::rename(&other, &image).unwrap();
        assert_ne!(ImageFile::of(&image).unwrap(), file);
        assert_eq!(ImageFile::of_open(&image, &open).unwrap(), file, "this one is still open");
        assert_eq!(file.note().unwrap(), None, "the path says nothing of it any more");
    }
}
