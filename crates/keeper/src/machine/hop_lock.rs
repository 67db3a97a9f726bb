//! Hop lock: of the machines of one host that hop at the same time, one stands still at a time, and only while none of them starts
//! a QEMU.
//!
//! One lock file in the runtime root: shared by those who start a QEMU to hop to, exclusive for whose guest stands still. With
//! more of them than processors each would otherwise stand still for as long as the others take the processors from it.
//!
//! A machine that does not get the lock in time hops without it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::runtime_root::{HOPS_LOCK, RuntimeRoot};

/// Eight starts at once on two processors take two seconds; a QEMU that hangs in its start holds up nobody for longer.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Held until it is dropped, or its keeper dies.
pub struct HopLock(#[expect(dead_code, reason = "it is open, and so locked")] Option<File>);

impl HopLock {
    /// Others may start as well; nobody stands still.
    pub fn to_start(root: &RuntimeRoot) -> Self {
        Self(take(root.path(), FlockOperation::NonBlockingLockShared, PATIENCE))
    }

    pub fn to_stand_still(root: &RuntimeRoot) -> Self {
        Self(take(root.path(), FlockOperation::NonBlockingLockExclusive, PATIENCE))
    }
}

fn take(root: &Path, operation: FlockOperation, patience: Duration) -> Option<File> {
    let path = root.join(HOPS_LOCK);
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file =
        file.inspect_err(|error| tracing::debug!(path = %path.display(), %error, "cannot use the hop lock")).ok()?;
    let deadline = Instant::now() + patience;
    loop {
        match flock(&file, operation) {
            Ok(()) => return Some(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stands_still_while_none_starts() {
        use FlockOperation::{NonBlockingLockExclusive as STILL, NonBlockingLockShared as START};
        let folder = tempfile::tempdir().unwrap();
        let at_once = |operation| take(folder.path(), operation, Duration::ZERO);
        let starts = [at_once(START), at_once(START)];
        assert!(starts.iter().all(Option::is_some), "several start");
        assert!(at_once(STILL).is_none(), "while somebody starts");
        drop(starts);
        let still = at_once(STILL);
        assert!(still.is_some());
        assert!(at_once(STILL).is_none() && at_once(START).is_none(), "while somebody stands still");
        drop(still);
        assert!(at_once(START).is_some());
        assert!(take(Path::new("/nowhere"), STILL, Duration::ZERO).is_none(), "and nobody waits");
    }
}
