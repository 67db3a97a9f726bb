//! Log: QEMU's standard output and error.
//!
//! They go to a memory file of fixed size, so that a QEMU cannot fill the host's file systems. When QEMU has ended, the
//! keeper copies the log to a file in the machine's folder for the operator.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

const NAME: &str = "hearth-qemu-log";
/// Size of the log. QEMU writes a few lines at most; debug output requested in `extra_qemu_args` is cut off here.
const LOG_BYTES: u64 = 256 << 10;

/// The log of one QEMU.
#[derive(Debug)]
pub struct Log {
    /// None if an earlier keeper let this QEMU write to the file directly.
    memory: Option<File>,
    path: PathBuf,
}

impl Log {
    /// Makes an empty log, and the descriptor that QEMU writes to. `keep` saves the log at `path`.
    pub fn create(path: &Path) -> io::Result<(Self, OwnedFd)> {
        let memory = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        memory.set_len(LOG_BYTES)?;
        fcntl_add_seals(&memory, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        // A second open file, so that reading does not move the position at which QEMU writes.
        let output = OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?;
        Ok((Self { memory: Some(memory), path: path.to_owned() }, output.into()))
    }

    /// That of a QEMU which writes none for us.
    pub fn none() -> Self {
        Self { memory: None, path: "/dev/null".into() }
    }

    /// Finds the log of a QEMU that another keeper started.
    pub fn find(qemu_pid: u32, path: &Path) -> Self {
        let output = format!("/proc/{qemu_pid}/fd/2");
        let is_log = fs::read_link(&output)
            .is_ok_and(|target| target.to_str().is_some_and(|target| target.starts_with(&format!("/memfd:{NAME}"))));
        let memory = is_log.then(|| File::open(output).ok()).flatten();
        Self { memory, path: path.to_owned() }
    }

    /// Everything written so far.
    pub fn text(&self) -> String {
        let bytes = match &self.memory {
            Some(memory) => {
                let mut bytes = vec![0; LOG_BYTES as usize];
                // An unreadable log counts as empty.
                let read = memory.read_at(&mut bytes, 0).unwrap_or(0);
                bytes.truncate(read);
                let written = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
                bytes.truncate(written);
                bytes
            }
            None => fs::read(&self.path).unwrap_or_default(),
        };
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Saves the log in its file, unless it is empty. Call this when QEMU has ended.
    pub fn keep(&self) {
        let text = self.text();
        if self.memory.is_none() || text.is_empty() {
            return;
        }
        let file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&self.path);
        if let Err(error) = file.and_then(|mut file| file.write_all(text.as_bytes())) {
            tracing::warn!(path = %self.path.display(), %error, "QEMU's last words cannot be kept");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn log_has_fixed_size_and_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu-1.log");
        let (log, output) = Log::create(&path).unwrap();
        assert_eq!(log.text(), "");
        log.keep();
        assert!(!path.exists());
        let noise = "echo started; head -c 1000000 /dev/zero | tr '\\0' x";
        // At the end of the file, a write fails as on a full disk.
        Command::new("sh").args(["-c", noise]).stdout(output).status().unwrap();
        assert!(log.text().starts_with("started\nxxx"));
        assert!(log.text().len() as u64 <= LOG_BYTES);
        assert_eq!(log.memory.as_ref().unwrap().metadata().unwrap().len(), LOG_BYTES);
        log.keep();
        assert_eq!(fs::read_to_string(&path).unwrap(), log.text());
    }

    #[test]
    fn next_keeper_finds_log_by_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu-1.log");
        let (log, output) = Log::create(&path).unwrap();
        let mut child =
            Command::new("sh").args(["-c", "echo words >&2; exec sleep 600"]).stderr(output).spawn().unwrap();
        while log.text().is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(Log::find(child.id(), &path).text(), "words\n");
        child.kill().and_then(|()| child.wait()).unwrap();
        fs::write(&path, "of an older keeper's QEMU").unwrap();
        assert_eq!(Log::find(std::process::id(), &path).text(), "of an older keeper's QEMU");
    }
}
