//! Folders for images while a bench runs. They are removed with it, or by the next bench if it was interrupted.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const PREFIX: &str = "hearth-bench-";

/// A folder that is removed with its owner. Its name has the owner's process ID.
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes `folder` and a folder in it, and removes those of benches that no longer run.
    pub fn new(folder: &Path, purpose: &str) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        clear_leftovers(folder)?;
        let path = folder.join(format!("{PREFIX}{}-{purpose}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Scratch { path })
    }

    /// Lets other users read what is in it: libvirt's QEMU runs as one of its own.
    pub fn let_others_in(&self) -> io::Result<()> {
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o755))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that cannot be removed now is removed by the next bench.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn clear_leftovers(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(owner);
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_removed_with_its_owner_and_leftovers() {
        let folder = tempfile::tempdir().unwrap();
        // Process IDs are below 2^22 (PID_MAX_LIMIT).
        let dead = folder.path().join(format!("{PREFIX}4194305-images"));
        let strangers = folder.path().join("records");
        for path in [&dead, &strangers] {
            fs::create_dir(path).unwrap();
        }
        let first = Scratch::new(folder.path(), "one").unwrap();
        let second = Scratch::new(folder.path(), "two").unwrap();
        assert!(first.path().exists() && second.path().exists() && strangers.exists() && !dead.exists());
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
    }
}
