//! Clones: machines that `hearth rehearse` makes and throws away, and what is left of one whose keeper was killed.
//!
//! ROOT/NAME.clone holds the path of the clone's folder, and is locked while the rehearsal lives.
//!
//! The note is created before anything else of the clone and removed last. An unlocked note therefore marks a dead
//! rehearsal, whose QEMU, memory folder, runtime folder and own folder are removed by the next command.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use hearth_memory::{Durability, replace_file};
use hearth_qemu::kill_stray;
use rustix::fs::{FlockOperation, flock};

use super::{CliError, file_lock};
use crate::config::{Config, FoldersConfig};
use crate::folders::{memory_owner, own_user};
use crate::runtime_root::RuntimeRoot;

const EXTENSION: &str = "clone";
const PATH_BYTES_MAX: u64 = 4096;

/// The note of this process's clone. Dropping it removes the clone.
pub struct CloneNote {
    note: PathBuf,
    folder: PathBuf,
    root: RuntimeRoot,
    _lock: File,
}

impl CloneNote {
    /// Called before anything else of the clone is created.
    pub fn write(name: &str, folder: &Path, root: &RuntimeRoot) -> Result<Self, CliError> {
        let note = root.path().join(format!("{name}.{EXTENSION}"));
        // The note gets its name only when locked and complete, because others take an unlocked note for a dead
        // rehearsal's.
        let noted = fs::create_dir_all(root.path()).and_then(|()| {
            replace_file(&note, Durability::Process, |file| {
                flock(&*file, FlockOperation::NonBlockingLockExclusive)?;
                file.write_all(folder.as_os_str().as_bytes())?;
                file.try_clone()
            })
        });
        let lock = noted.map_err(|source| CliError::File { path: note.clone(), source })?;
        Ok(Self { note, folder: folder.to_owned(), root: root.clone(), _lock: lock })
    }
}

impl Drop for CloneNote {
    fn drop(&mut self) {
        remove(&self.note, &self.folder, &self.root);
    }
}

/// Removes clones of this root whose rehearsals were killed.
pub fn remove_leftovers(root: &RuntimeRoot) {
    let entries = fs::read_dir(root.path()).into_iter().flatten().flatten().map(|entry| entry.path());
    for note in entries.filter(|path| path.extension().is_some_and(|end| end == EXTENSION)) {
        // A locked note belongs to a living rehearsal; a missing one was removed meanwhile.
        if let Ok((folder, _lock)) = dead(&note) {
            tracing::warn!(folder = %folder.display(), "removing what a killed rehearsal left behind");
            remove(&note, &folder, root);
        }
    }
}

fn dead(note: &Path) -> io::Result<(PathBuf, File)> {
    let mut file = File::open(note)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    if !file_lock::is_at(&file, note)? {
        // The note was replaced before it was locked here.
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut folder = Vec::new();
    (&mut file).take(PATH_BYTES_MAX).read_to_end(&mut folder)?;
    Ok((PathBuf::from(OsString::from_vec(folder)), file))
}

fn remove(note: &Path, folder: &Path, root: &RuntimeRoot) {
    let name = note.file_stem().unwrap_or_default();
    // Without a configuration nothing else was created. Only folders with the clone's name belong to it.
    if let Ok(config) = Config::load(&folder.join("machine.toml"), root)
        && folder.is_absolute()
        && name == config.name.as_str()
    {
        let FoldersConfig { runtime, memory } = config.folders;
        for pid in memory_owner::qemus_of(&runtime, &memory) {
            if !kill_stray(pid) {
                tracing::error!(pid, "the QEMU of a rehearsal does not exit");
            }
        }
        own_user::release(&runtime);
        for folder in [memory, runtime].iter().filter(|folder| folder.file_name() == Some(name)) {
            remove_folder(folder);
        }
    }
    if folder.file_name().is_some_and(|of| of.as_bytes().ends_with(name.as_bytes())) {
        remove_folder(folder);
    }
    if let Err(error) = fs::remove_file(note) {
        tracing::warn!(%error, note = %note.display(), "cannot remove");
    }
}

fn remove_folder(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, folder = %folder.display(), "cannot remove");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dead_clones_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let root = RuntimeRoot::new(folder.path().join("run"));
        let make = |name: &str| {
            let own = folder.path().join(format!("hearth-{name}"));
            let memory = folder.path().join("memory").join(name);
            let clone = CloneNote::write(name, &own, &root).unwrap();
            for made in [&own, &memory, &root.machine(name)] {
                fs::create_dir_all(made).unwrap();
            }
            let text = format!(
                "name = \"{name}\"\nmemory = \"64MiB\"\nmemory_folder = \"{}\"\n[boot]\nkernel = \"k\"\n",
                memory.display()
            );
            fs::write(own.join("machine.toml"), text).unwrap();
            (clone, [own, memory, root.machine(name)])
        };
        let (living, its) = make("rehearsal-1");
        let (killed, left) = make("rehearsal-2");
        // A killed process leaves everything except its lock.
        let note = fs::read(&killed.note).unwrap();
        fs::write(root.path().join("rehearsal-2.copy"), note).unwrap();
        fs::rename(root.path().join("rehearsal-2.copy"), &killed.note).unwrap();
        std::mem::forget(killed);
        fs::create_dir_all(folder.path().join("mine")).unwrap();
        let odd = |name: &str, folder: &[u8]| fs::write(root.path().join(name), folder).unwrap();
        odd("odd.clone", folder.path().join("mine").as_os_str().as_bytes());
        // An empty note, or one that names another machine's folder, must not harm that machine.
        odd("empty.clone", b"");
        odd("other.clone", folder.path().join("hearth-rehearsal-1").as_os_str().as_bytes());
        remove_leftovers(&root);
        assert!(left.iter().all(|folder| !folder.exists()) && its.iter().all(|folder| folder.exists()));
        assert!(folder.path().join("mine").exists(), "a note removes only a folder with the clone's name");
        drop(living);
        assert!(its.iter().all(|folder| !folder.exists()));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
