//! Transcript: output of the guest's serial console, in memory that QEMU itself writes to. So nothing is lost while no
//! keeper reads.
//!
//! QEMU logs the console to a descriptor that it inherits. The descriptor's position is where QEMU writes next; the
//! keeper shares the position and resets it. The memory file has a fixed size: at its end, QEMU's log stops silently
//! (`qemu_chr_write_log` in QEMU's chardev/char.c), however much the guest prints.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{
    MemfdFlags, OFlags, SealFlags, SeekFrom, fcntl_add_seals, fcntl_get_seals, fcntl_getfl, memfd_create, seek,
};

use crate::process::memory_of;

/// Size of the transcript in bytes: the output that fits while there is no keeper.
const TRANSCRIPT_BYTES: u64 = 256 << 10;
const NAME: &str = "hearth-console";
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The transcript of one QEMU.
#[derive(Debug)]
pub struct Transcript {
    /// Open for writing only, as QEMU requires (`monitor_fdset_dup_fd_add` in monitor/fds.c). It shares its position
    /// with QEMU.
    log: OwnedFd,
    memory: File,
}

impl Transcript {
    /// Makes an empty transcript for a QEMU that is about to start.
    pub fn create() -> io::Result<Self> {
        let memory = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        let log = OpenOptions::new().write(true).open(path_of(memory.as_raw_fd()))?.into();
        Ok(Self { log, memory })
    }

    /// Finds the transcript of a QEMU that another keeper started. Needs the right to trace QEMU.
    pub fn find(qemu_pid: u32) -> io::Result<Self> {
        for log in memory_of(qemu_pid, NAME)? {
            if fcntl_getfl(&log)?.contains(OFlags::WRONLY) {
                let memory = OpenOptions::new().read(true).write(true).open(path_of(log.as_raw_fd()))?;
                return Ok(Self { log, memory });
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// The descriptor that QEMU writes to.
    pub fn log(&self) -> BorrowedFd<'_> {
        self.log.as_fd()
    }

    /// Fixes the size permanently. Call this after QEMU has opened the log, because QEMU truncates it then.
    pub fn fix_size(&self) -> io::Result<()> {
        if !fcntl_get_seals(&self.memory)?.contains(FIXED) {
            self.memory.set_len(TRANSCRIPT_BYTES)?;
            fcntl_add_seals(&self.memory, FIXED)?;
        }
        Ok(())
    }

    /// All output since the transcript began.
    pub fn said(&self) -> io::Result<Vec<u8>> {
        let mut said = vec![0; self.length()? as usize];
        self.memory.read_exact_at(&mut said, 0)?;
        Ok(said)
    }

    /// Whether more than half of the space is used.
    pub fn is_half_full(&self) -> io::Result<bool> {
        Ok(self.length()? > TRANSCRIPT_BYTES / 2)
    }

    /// Restarts the transcript with its last output. Bytes that QEMU writes at the same moment may be lost.
    pub fn begin_with(&self, last_said: &[u8]) -> io::Result<()> {
        seek(&self.log, SeekFrom::Start(0))?;
        rustix::io::write(&self.log, last_said)?;
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(seek(&self.log, SeekFrom::Current(0))?.min(TRANSCRIPT_BYTES))
    }
}

fn path_of(number: RawFd) -> String {
    format!("/proc/self/fd/{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn talkative_guest_cannot_grow_the_transcript() {
        let transcript = Transcript::create().unwrap();
        transcript.fix_size().unwrap();
        let words = [b'x'; 1000];
        while rustix::io::write(transcript.log(), &words).is_ok() {}
        assert!(transcript.is_half_full().unwrap());
        let said = transcript.said().unwrap().len() as u64;
        assert!(TRANSCRIPT_BYTES - said < 1000, "{said}");
        assert_eq!(transcript.memory.metadata().unwrap().len(), TRANSCRIPT_BYTES);
        transcript.begin_with(b"the end").unwrap();
        rustix::io::write(transcript.log(), b", and more").unwrap();
        assert_eq!(transcript.said().unwrap(), b"the end, and more");
        transcript.fix_size().unwrap();
        assert_eq!(transcript.said().unwrap(), b"the end, and more");
    }

    #[test]
    fn transcript_is_found_by_process() {
        let transcript = Transcript::create().unwrap();
        let log = transcript.log().try_clone_to_owned().unwrap();
        let mut other = std::process::Command::new("sleep").arg("600").stdout(log).spawn().unwrap();
        rustix::io::write(transcript.log(), b"login: ").unwrap();
        let found = Transcript::find(other.id()).and_then(|found| {
            found.begin_with(b"root")?;
            found.said()
        });
        other.kill().and_then(|()| other.wait()).unwrap();
        assert_eq!((found.unwrap(), transcript.said().unwrap()), (b"root".to_vec(), b"root".to_vec()));
        assert!(Transcript::find(u32::MAX).is_err());
    }
}
