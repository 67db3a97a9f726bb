//! The lock of a machine's file: one `set` or `rm` at a time reads, checks and replaces or removes it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::CliError;

/// How long another command may hold the lock. A check starts QEMU, and takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Locks the file until the returned one is dropped.
pub fn take(path: &Path) -> Result<File, CliError> {
    take_within(path, PATIENCE).map_err(|source| CliError::File { path: path.to_owned(), source })
}

fn take_within(path: &Path, patience: Duration) -> io::Result<File> {
    let deadline = Instant::now() + patience;
    loop {
        let file = File::open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_at(&file, path)? => return Ok(file),
            // It was replaced meanwhile.
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(LOOK_EVERY),
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "another `hearth set` or `hearth rm` is busy with it",
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether this is the file at the path, and not one that was replaced before it was locked.
pub fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (held, there) = (file.metadata()?, fs::metadata(path)?);
    Ok((held.dev(), held.ino()) == (there.dev(), there.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_command_at_a_time_has_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("web.toml");
        let take = || take_within(&path, Duration::from_secs(60));
        assert_eq!(take().unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, "0").unwrap();
        let held = take_within(&path, Duration::ZERO).unwrap();
        assert_eq!(take_within(&path, Duration::ZERO).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(held);
        let replaced = File::open(&path).unwrap();
        fs::write(path.with_extension("new"), "0").unwrap();
        fs::rename(path.with_extension("new"), &path).unwrap();
        assert!(!is_at(&replaced, &path).unwrap() && is_at(&File::open(&path).unwrap(), &path).unwrap());
        // Each replaces the file with what follows from what it has read, as `set` does.
        let count = || {
            for _ in 0..20 {
                let _held = take().unwrap();
                let number: u32 = fs::read_to_string(&path).unwrap().parse().unwrap();
                fs::write(path.with_extension("new"), (number + 1).to_string()).unwrap();
                fs::rename(path.with_extension("new"), &path).unwrap();
            }
        };
        thread::scope(|scope| drop([scope.spawn(count), scope.spawn(count), scope.spawn(count)]));
        assert_eq!(fs::read_to_string(&path).unwrap(), "60");
    }
}
