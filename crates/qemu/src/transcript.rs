//! Transcript: what a guest says on its serial console, in memory that QEMU itself writes to. So nothing is lost while no
//! keeper reads.
//!
//! QEMU logs the console to a descriptor that it inherits. Where it writes next is the descriptor's position, which the keeper
//! shares, and sets back. The memory file behind it has a fixed size: at its end QEMU's log stops without a word
//! (`qemu_chr_write_log` in QEMU's chardev/char.c), however much the guest says.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{
    MemfdFlags, OFlags, SealFlags, SeekFrom, fcntl_add_seals, fcntl_get_seals, fcntl_getfl, memfd_create, seek,
};

use crate::process::memory_of;

/// So much can be said before a keeper comes.
const TRANSCRIPT_BYTES: u64 = 256 << 10;
const NAME: &str = "hearth-console";
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

#[derive(Debug)]
pub struct Transcript {
    /// Open for writing only: QEMU wants it so (`monitor_fdset_dup_fd_add` in monitor/fds.c). Its position is QEMU's.
    log: OwnedFd,
    memory: File,
}

impl Transcript {
    /// An empty one, for a QEMU that is going to be started.
    pub fn create() -> io::Result<Self> {
        let memory = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        let log = OpenOptions::new().write(true).open(path_of(memory.as_raw_fd()))?.into();
        Ok(Self { log, memory })
    }

    /// That of a QEMU which another keeper started. Who may trace QEMU may do this.
    pub fn find(qemu_pid: u32) -> io::Result<Self> {
        for log in memory_of(qemu_pid, NAME)? {
            if fcntl_getfl(&log)?.contains(OFlags::WRONLY) {
                let memory = OpenOptions::new().read(true).write(true).open(path_of(log.as_raw_fd()))?;
                return Ok(Self { log, memory });
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// What QEMU is to write to.
    pub fn log(&self) -> BorrowedFd<'_> {
        self.log.as_fd()
    }

    /// Gives it its size for good. QEMU, which makes a log empty when it opens it, must have done so.
    pub fn fix_size(&self) -> io::Result<()> {
        if !fcntl_get_seals(&self.memory)?.contains(FIXED) {
            self.memory.set_len(TRANSCRIPT_BYTES)?;
            fcntl_add_seals(&self.memory, FIXED)?;
        }
        Ok(())
    }

    /// Everything that was said since it began.
    pub fn said(&self) -> io::Result<Vec<u8>> {
        let mut said = vec![0; self.length()? as usize];
        self.memory.read_exact_at(&mut said, 0)?;
        Ok(said)
    }

    pub fn is_half_full(&self) -> io::Result<bool> {
        Ok(self.length()? > TRANSCRIPT_BYTES / 2)
    }

    /// Begins anew with the last that was said. What QEMU writes at this very moment may be among it or not.
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
    fn a_guest_that_never_stops_talking_fills_it_and_no_more() {
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
    fn it_is_found_again_by_who_has_only_the_process() {
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
