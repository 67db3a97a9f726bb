//! A loop device of the host over an image, where the user may make one.

use std::path::{Path, PathBuf};
use std::process::Command;

pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// Makes the device. Without permission it prints a message and returns `None`.
    pub fn over(image: &Path) -> Option<Self> {
        let made = Command::new("/usr/sbin/losetup").args(["--find", "--show"]).arg(image).output();
        match made {
            Ok(made) if made.status.success() => {
                Some(Self { path: String::from_utf8_lossy(&made.stdout).trim().into() })
            }
            refused => {
                eprintln!("skipped: cannot make a loop device: {refused:?}");
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
