//! A block device of the host: a loop over an image, where whoever runs the tests may make one.

use std::path::{Path, PathBuf};
use std::process::Command;

pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// None, with a word, without the rights to it.
    pub fn over(image: &Path) -> Option<Self> {
        let made = Command::new("/usr/sbin/losetup").args(["--find", "--show"]).arg(image).output();
        match made {
            Ok(made) if made.status.success() => {
                Some(Self { path: String::from_utf8_lossy(&made.stdout).trim().into() })
            }
            refused => {
                eprintln!("skipped: no loop device can be made here: {refused:?}");
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("/usr/sbin/losetup").arg("--detach").arg(&self.path).status();
    }
}
