//! A separate file system for what is measured: a default ext4 from `mkfs.ext4`, on a loop device.
//!
//! The cost of a flush depends on the host's file system, which may be one that production hosts do not have: an ext4 without a
//! journal, as in many containers, writes an image's inode with each `fdatasync` after a write.
//!
//! Only this thread and the processes that it starts see the mount, so it disappears with them, however they end.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::scratch::Scratch;

/// Size of the file system. Unused blocks take no space.
const BYTES: u64 = 16 << 30;

#[derive(Debug, thiserror::Error)]
pub enum FileSystemError {
    #[error("cannot make a file system in {path}")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("cannot make a mount name space")]
    Unshare(#[source] io::Error),
    #[error("{program} cannot be started")]
    Start { program: &'static str, source: io::Error },
    #[error("{program}: {said}")]
    Failed { program: &'static str, said: String },
}

/// A mounted file system. Dropping it unmounts it and removes its contents.
pub struct FileSystem {
    scratch: Scratch,
}

impl FileSystem {
    /// Makes it in a file in `folder`, which needs root and loop devices. Only this thread, and those that it starts, see it.
    pub fn make(folder: &Path) -> Result<Self, FileSystemError> {
        let prepare = |source| FileSystemError::Prepare { path: folder.to_owned(), source };
        let made = FileSystem { scratch: Scratch::new(folder, "file-system").map_err(prepare)? };
        let file = made.scratch.path().join("bytes");
        fs::File::create(&file).and_then(|file| file.set_len(BYTES)).map_err(prepare)?;
        fs::create_dir(made.path()).map_err(prepare)?;
        // SAFETY: file descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(|error| FileSystemError::Unshare(error.into()))?;
        run("mount", &["--make-rprivate", "/"])?;
        // Direct I/O keeps the host from caching the data twice.
        let device = run("losetup", &["--find", "--show", "--direct-io=on", &file.display().to_string()])?;
        let mounted = run("mkfs.ext4", &["-q", &device])
            .and_then(|_| run("mount", &[&device, &made.path().display().to_string()]));
        // The device is removed once it is unmounted.
        run("losetup", &["--detach", &device])?;
        mounted.map(|_| made)
    }

    pub fn path(&self) -> PathBuf {
        self.scratch.path().join("mounted")
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // Its last users are just ending. This fails if the file system was never mounted.
        let _ = run("umount", &["--lazy", &self.path().display().to_string()]);
    }
}

/// Runs a program, and returns its output, which is one line.
fn run(program: &'static str, arguments: &[&str]) -> Result<String, FileSystemError> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|source| FileSystemError::Start { program, source })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(FileSystemError::Failed { program, said: text(&output.stderr) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_that_is_not_a_folder_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = FileSystem::make(file.path()).err().unwrap().to_string();
        assert_eq!(error, format!("cannot make a file system in {}", file.path().display()));
    }

    #[test]
    fn failed_programs_message_is_reported() {
        let error = run("umount", &["/none"]).unwrap_err().to_string();
        assert!(error.starts_with("umount: ") && error.contains("/none"), "{error}");
    }
}
