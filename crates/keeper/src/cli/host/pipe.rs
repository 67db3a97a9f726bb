//! Registers of a crashed guest that libvirt keeps: a dump into a pipe, of which only the beginning is read.
//!
//! QEMU writes the registers first, then the memory, which the keeper has already. When the pipe is closed, libvirt gives up the
//! dump. QEMU's own command for a dump of one byte cannot be used: libvirt's daemon (9.0) does not survive its answer.
//!
//! The daemon opens the pipe and waits for a reader, and the domain with it. So there is a reader as long as the daemon may open it. A
//! pipe that was missing then would become a file with the whole memory.
//!
//! What comes is QEMU's, which its guest may have taken over. Nothing here looks at it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use hearth_libvirt::virsh::Virsh;
use hearth_recovery::vmcore::notes::TINY_DUMP_BYTES_MAX;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::io::Errno;

/// Its name in the machine's runtime folder.
const FILE: &str = "harvest.pipe";
/// How long libvirt and QEMU may take. They take 0.1 s; a QEMU that hangs must not keep the next guest waiting.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A pipe with a reader. Drop it when libvirt cannot open it any more.
pub struct Pipe {
    path: PathBuf,
    reader: Option<File>,
}

impl Pipe {
    /// Makes it in this folder.
    pub fn make(folder: &Path) -> io::Result<Self> {
        let path = folder.join(FILE);
        match mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
            // One that a killed daemon has left may be open in libvirt.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        let reader = Some(open(&path)?);
        Ok(Self { path, reader })
    }

    /// Has the registers of the domain's guest written into the pipe, and reads them, with some of what follows.
    pub fn harvest(&mut self, virsh: &Virsh, domain: &str) -> Result<Vec<u8>, String> {
        let Some(reader) = self.reader.take() else { return Err("the pipe is closed".to_owned()) };
        let path = &self.path;
        let (read, dumped) = thread::scope(|scope| {
            let dump = scope.spawn(|| virsh.dump_memory(domain, path, PATIENCE));
            let read = read_from(&reader, || dump.is_finished());
            match &read {
                // libvirt has opened it. QEMU's next write ends the dump.
                Ok(bytes) if !bytes.is_empty() => drop(reader),
                _ => self.reader = Some(reader),
            }
            (read, dump.join().expect("it only waits for virsh"))
        });
        match (read, dumped) {
            (Ok(bytes), _) if !bytes.is_empty() => Ok(bytes),
            (Err(error), _) => Err(error.to_string()),
            (Ok(_), Err(error)) => Err(crate::chain(&error)),
            (Ok(_), Ok(())) => Err("QEMU has written nothing".to_owned()),
        }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "cannot remove");
        }
    }
}

/// Lets libvirt go on if it waits for the reader of a pipe that a killed daemon has left in this folder.
pub fn let_go(folder: &Path) {
    let path = folder.join(FILE);
    let is_pipe = fs::symlink_metadata(&path).is_ok_and(|file| file.file_type().is_fifo());
    if is_pipe && let Err(error) = open(&path) {
        tracing::warn!(path = %path.display(), %error, "libvirt may be waiting for a reader");
    }
}

/// Removes a pipe that a killed daemon has left in this folder. The domain must not be crashed: libvirt does not open it then.
pub fn remove_left(folder: &Path) {
    match fs::remove_file(folder.join(FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::debug!(folder = %folder.display(), %error, "cannot remove a pipe");
        }
        _ => {}
    }
}

/// Opens the reading end, without waiting for a writer.
fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Reads as much as registers can take. Ends sooner if there is no more, if nobody will write (`is_over`), or when the time is up.
fn read_from(mut pipe: &File, is_over: impl Fn() -> bool) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    let (mut bytes, mut part) = (Vec::new(), vec![0; 64 << 10]);
    while bytes.len() < TINY_DUMP_BYTES_MAX && Instant::now() < deadline {
        // Asked before the last read, which then finds all that was written.
        let is_over = is_over();
        let most = part.len().min(TINY_DUMP_BYTES_MAX - bytes.len());
        match pipe.read(&mut part[..most]) {
            // Nobody has it open for writing: not yet, or not any more.
            Ok(0) if is_over || !bytes.is_empty() => break,
            Ok(0) => thread::sleep(LOOK_EVERY),
            Ok(count) => bytes.extend(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(LOOK_EVERY),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn writer(pipe: &Pipe) -> File {
        OpenOptions::new().write(true).open(&pipe.path).unwrap()
    }

    #[test]
    fn only_the_beginning_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = Pipe::make(folder.path()).unwrap();
        let mut qemu = writer(&pipe);
        // The reader ends before QEMU does.
        let written = thread::spawn(move || qemu.write_all(&vec![7; 2 * TINY_DUMP_BYTES_MAX]).unwrap_err().kind());
        let bytes = read_from(pipe.reader.as_ref().unwrap(), || false).unwrap();
        assert_eq!(bytes.len(), TINY_DUMP_BYTES_MAX);
        drop(pipe);
        assert_eq!(written.join().unwrap(), io::ErrorKind::BrokenPipe);
        assert!(!folder.path().join(FILE).exists());
    }

    #[test]
    fn short_dump_is_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = Pipe::make(folder.path()).unwrap();
        let mut qemu = writer(&pipe);
        qemu.write_all(b"registers").unwrap();
        drop(qemu);
        assert_eq!(read_from(pipe.reader.as_ref().unwrap(), || true).unwrap(), b"registers");
        assert!(read_from(pipe.reader.as_ref().unwrap(), || true).unwrap().is_empty());
    }

    #[test]
    fn abandoned_pipe_lets_its_writer_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let mut pipe = Pipe::make(folder.path()).unwrap();
        pipe.reader = None;
        let path = pipe.path.clone();
        let libvirt = thread::spawn(move || drop(OpenOptions::new().write(true).open(path).unwrap()));
        while !libvirt.is_finished() {
            let_go(folder.path());
        }
        let_go(&folder.path().join("missing"));
        remove_left(folder.path());
        assert!(!folder.path().join(FILE).exists());
    }
}
