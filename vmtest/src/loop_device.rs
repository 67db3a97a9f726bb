//! A loop device of the host over an image, where the user may make one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

pub struct LoopDevice {
    path: PathBuf,
    has_partition: bool,
}

/// Runs a program, which must succeed. Returns its output.
fn run(program: &str, words: &[&str], last: &Path) -> Result<String> {
    let output = Command::new(program).args(words).arg(last).output();
    let output = output.map_err(|source| Error::Start { program: program.into(), source })?;
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    match output.status.success() {
        true => Ok(stdout),
        false => Err(Error::Command { command: program.to_owned(), status: output.status, said: stderr }),
    }
}

impl LoopDevice {
    /// Makes the device. Without permission it prints a message and returns `None`.
    pub fn over(image: &Path) -> Option<Self> {
        let made = Command::new("/usr/sbin/losetup").args(["--find", "--show"]).arg(image).output();
        match made {
            Ok(made) if made.status.success() => {
                Some(Self { path: String::from_utf8_lossy(&made.stdout).trim().into(), has_partition: false })
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

    /// Makes its only partition, which reaches from this sector to the end.
    pub fn add_partition(&mut self, from: u64) -> Result<PathBuf> {
        let sectors = run("/usr/sbin/blockdev", &["--getsz"], &self.path)?;
        let sectors: u64 = sectors.trim().parse().expect("blockdev tells a number");
        let [from, sectors] = [from, sectors - from].map(|number| number.to_string());
        let loop_device = self.path.display().to_string();
        run("addpart", &[&loop_device, "1", &from], Path::new(&sectors))?;
        let partition = PathBuf::from(format!("{loop_device}p1"));
        self.has_partition = true;
        Ok(partition)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The kernel closes the files of a dead process's io_uring later.
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.has_partition && run("delpart", &[&self.path.display().to_string()], Path::new("1")).is_err() {
            if Instant::now() > deadline {
                eprintln!("left behind: the partition of {}", self.path.display());
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = Command::new("/usr/sbin/losetup").arg("--detach").arg(&self.path).status();
    }
}
