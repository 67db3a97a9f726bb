//! A file system of its own for what is measured: an ext4 as `mkfs.ext4` makes it, on a loop device.
//!
//! What a flush costs depends on the host's file system, and the one that is there may be none that hosts have: an ext4 without a
//! journal, as in many containers, writes an image's inode with each `fdatasync` after a write.
//!
//! It is mounted where only this thread and what it starts see it: it is gone with them, however they end.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::scratch::Scratch;

/// What is not used takes no space.
const BYTES: u64 = 16 << 30;

#[derive(Debug, thiserror::Error)]
pub enum FileSystemError {
    #[error("{path}: cannot hold a file system")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("no name space for mounts of its own")]
    Unshare(#[source] io::Error),
    #[error("{program} cannot be started")]
    Start { program: &'static str, source: io::Error },
    #[error("{program}: {said}")]
    Failed { program: &'static str, said: String },
}

/// Dropped, it is gone with all that it holds.
pub struct FileSystem {
    scratch: Scratch,
}

impl FileSystem {
    /// Its bytes are in a file in `folder`. It takes root and loop devices. Only this thread, and those that it starts, find it.
    pub fn make(folder: &Path) -> Result<Self, FileSystemError> {
        let prepare = |source| FileSystemError::Prepare { path: folder.to_owned(), source };
        let made = FileSystem { scratch: Scratch::new(folder, "file-system").map_err(prepare)? };
        let file = made.scratch.path().join("bytes");
        fs::File::create(&file).and_then(|file| file.set_len(BYTES)).map_err(prepare)?;
        fs::create_dir(made.path()).map_err(prepare)?;
        // SAFETY: file descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(|error| FileSystemError::Unshare(error.into()))?;
        run("mount", &["--make-rprivate", "/"])?;
        // The host's cache holds what is measured once at most.
        let device = run("losetup", &["--find", "--show", "--direct-io=on", &file.display().to_string()])?;
        let mounted = run("mkfs.ext4", &["-q", &device])
            .and_then(|_| run("mount", &[&device, &made.path().display().to_string()]));
        // The device goes when it is mounted no more.
        run("losetup", &["--detach", &device])?;
        mounted.map(|_| made)
    }

    pub fn path(&self) -> PathBuf {
        self.scratch.path().join("mounted")
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // What still uses it is on its way out. Of one that was never mounted this says so.
        let _ = run("umount", &["--lazy", &self.path().display().to_string()]);
    }
}

/// Returns its only line.
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
    fn a_folder_that_is_none_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = FileSystem::make(file.path()).err().unwrap().to_string();
        assert_eq!(error, format!("{}: cannot hold a file system", file.path().display()));
    }

    #[test]
    fn what_a_program_says_of_its_failure_is_told() {
        let error = run("umount", &["/none"]).unwrap_err().to_string();
        assert!(error.starts_with("umount: ") && error.contains("/none"), "{error}");
    }
}
