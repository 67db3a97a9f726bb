//! A mounted file system for one test, to be filled, or with features that the temporary folder's file system may lack.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{statvfs, syncfs};
use tempfile::TempDir;

use crate::error::{Result, at};
use crate::images;

/// A mounted file system. Dropping it unmounts it and removes its contents.
pub struct Mounted {
    /// The folder of the image and of the mount point.
    _folder: TempDir,
    path: PathBuf,
}

impl Mounted {
    /// Mounts an XFS, whose files can share blocks. Without root and a loop device it prints a message and returns `None`.
    pub fn xfs(mib: u64) -> Result<Option<Self>> {
        let image = |folder: &Path| {
            let image = folder.join("image");
            images::xfs(&image, mib, &[]).map(|()| image)
        };
        Self::mount(&["-o", "loop"], image)
    }

    /// Mounts an ext4, as a disk that is no host memory. Without root and a loop device it prints a message and returns `None`.
    pub fn ext4(mib: u64) -> Result<Option<Self>> {
        let image = |folder: &Path| {
            let image = folder.join("image");
            images::ext4(&image, mib, &[]).map(|()| image)
        };
        Self::mount(&["-o", "loop"], image)
    }

    /// Mounts a tmpfs of this size.
    pub fn tmpfs(mib: u64) -> Result<Option<Self>> {
        Self::mount(&["-t", "tmpfs", "-o", &format!("size={mib}m")], |_| Ok("tmpfs".into()))
    }

    fn mount(options: &[&str], source: impl FnOnce(&Path) -> Result<PathBuf>) -> Result<Option<Self>> {
        let parent = std::env::temp_dir();
        let made = tempfile::Builder::new().prefix("hearth-mounted-").tempdir_in(&parent);
        let folder = at("create a folder in", &parent, made)?;
        let (source, path) = (source(folder.path())?, folder.path().join("files"));
        at("create", &path, std::fs::create_dir(&path))?;
        let mounted = Command::new("mount").args(options).args([&source, &path]).output();
        match at("mount", &path, mounted)? {
            output if output.status.success() => Ok(Some(Self { _folder: folder, path })),
            output => {
                eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim());
                Ok(None)
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has each write to it wait until `thaw`, as on a storage that hangs.
    pub fn freeze(&self) -> Result<()> {
        self.fsfreeze("--freeze")
    }

    pub fn thaw(&self) -> Result<()> {
        self.fsfreeze("--unfreeze")
    }

    fn fsfreeze(&self, what: &str) -> Result<()> {
        let done = Command::new("/usr/sbin/fsfreeze").arg(what).arg(&self.path).output();
        let said = at("freeze", &self.path, done)?;
        let failed = || std::io::Error::other(String::from_utf8_lossy(&said.stderr).into_owned());
        at("freeze", &self.path, if said.status.success() { Ok(()) } else { Err(failed()) })
    }

    /// Bytes in use, after a sync.
    pub fn used_bytes(&self) -> Result<u64> {
        let folder = at("open", &self.path, std::fs::File::open(&self.path))?;
        at("sync", &self.path, syncfs(folder).map_err(Into::into))?;
        let found = at("look at", &self.path, statvfs(&self.path).map_err(Into::into))?;
        Ok((found.f_blocks - found.f_bfree) * found.f_frsize)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process with an open file keeps the file system until it closes the file.
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}
