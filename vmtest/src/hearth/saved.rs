//! Saves of booted guests. A test whose subject is not the boot restores one: that takes 0.4 s of processor time, a boot takes
//! 2.4 s.
//!
//! lock (shared) -> stamp matches -> done; else lock (exclusive) -> check again -> boot and save -> write the stamp
//!
//! The first test that needs a guest makes its save, and others that need it wait at the lock file. A test keeps the shared lock
//! as long as its machine lives, because the machine's disks are overlays over the save's. The kernel releases the lock of a
//! killed test.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::error::{Result, at};

const STAMP: &str = "stamp";
const SNAPSHOT: &str = "snapshot";

/// A guest's save, which stays as it is until this is dropped.
pub struct SavedGuest {
    folder: PathBuf,
    _lock: File,
}

impl SavedGuest {
    /// Finds the save of the guest that `description` describes in `parent`. It is made with `save`, which gets the path of the
    /// snapshot to write, if it is missing or was made with other `programs`.
    pub fn ensure(
        parent: &Path,
        description: &str,
        programs: &[PathBuf],
        save: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        let folder = parent.join(format!("{:016x}", hash_of(description)));
        let stamp = stamp_of(programs)?;
        at("create", &folder, fs::create_dir_all(&folder))?;
        let path = folder.join("lock");
        let lock = at("open", &path, File::create(&path))?;
        let hold = |how| at("lock", &path, flock(&lock, how).map_err(io::Error::from));
        let is_fresh = || fs::read_to_string(folder.join(STAMP)).is_ok_and(|made| made == stamp);
        hold(FlockOperation::LockShared)?;
        if !is_fresh() {
            hold(FlockOperation::LockExclusive)?;
            if !is_fresh() {
                remake(&folder, &stamp, save)?;
            }
            // Another test may take the lock in between. It finds a fresh save and leaves it as it is.
            hold(FlockOperation::LockShared)?;
        }
        Ok(Self { folder, _lock: lock })
    }

    pub fn snapshot(&self) -> PathBuf {
        self.folder.join(SNAPSHOT)
    }
}

/// The stamp is written last, so the save of an interrupted run is never used.
fn remake(folder: &Path, stamp: &str, save: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (snapshot, stamp_file) = (folder.join(SNAPSHOT), folder.join(STAMP));
    for (path, removed) in [(&stamp_file, fs::remove_file(&stamp_file)), (&snapshot, fs::remove_dir_all(&snapshot))] {
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return at("remove", path, Err(error)),
            _ => {}
        }
    }
    save(&snapshot)?;
    at("write", &stamp_file, fs::write(&stamp_file, stamp))
}

/// Path, size and time of each program.
fn stamp_of(programs: &[PathBuf]) -> Result<String> {
    let mut stamp = String::new();
    for path in programs {
        let file = at("look at", path, fs::metadata(path))?;
        stamp += &format!("{} {} {}.{:09}\n", path.display(), file.len(), file.mtime(), file.mtime_nsec());
    }
    Ok(stamp)
}

fn hash_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn save_is_made_once_for_the_same_inputs() {
        let home = tempfile::tempdir().unwrap();
        let program = home.path().join("program");
        fs::write(&program, "one").unwrap();
        let ensure = |description: &str, expect_made: bool| {
            let mut made = false;
            let save = |snapshot: &Path| {
                made = true;
                at("create", snapshot, fs::create_dir(snapshot))
            };
            let saved = SavedGuest::ensure(home.path(), description, std::slice::from_ref(&program), save).unwrap();
            assert!(saved.snapshot().is_dir());
            assert_eq!(made, expect_made, "{description}");
            saved
        };
        let one = ensure("small", true);
        let other = ensure("small", false);
        assert_eq!(one.snapshot(), other.snapshot());
        assert_ne!(ensure("large", true).snapshot(), one.snapshot());
        drop((one, other));
        fs::write(&program, "another").unwrap();
        ensure("small", true);
        ensure("small", false);
    }

    #[test]
    fn failed_save_is_made_again() {
        let home = tempfile::tempdir().unwrap();
        let fails = |snapshot: &Path| at("create", snapshot, fs::create_dir(snapshot.join("no/folder")));
        assert!(SavedGuest::ensure(home.path(), "guest", &[], fails).is_err());
        let works = |snapshot: &Path| at("create", snapshot, fs::create_dir(snapshot));
        SavedGuest::ensure(home.path(), "guest", &[], works).unwrap();
    }

    #[test]
    fn parallel_tests_make_one_save() {
        let home = tempfile::tempdir().unwrap();
        let made = std::sync::atomic::AtomicUsize::new(0);
        let save = |snapshot: &Path| {
            made.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            at("create", snapshot, fs::create_dir(snapshot))
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| SavedGuest::ensure(home.path(), "guest", &[], save).unwrap());
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}
