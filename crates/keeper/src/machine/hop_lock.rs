//! Hop lock: when several machines of one host hop at the same time, only one guest is paused at a time, and only while
//! no other machine starts a QEMU.
//!
//! It is one lock file in the runtime root: shared for those that start a QEMU, exclusive for the machine whose guest
//! is paused. Without it, with more hops than processors, each guest would stay paused while the other hops use the
//! processors.
//!
//! A machine that does not get the lock in time hops without it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::launch_job::LaunchControl;
use crate::runtime_root::{HOPS_LOCK, RuntimeRoot};

/// How long to wait for the lock. Eight starts at once on two processors take two seconds; a QEMU that hangs in its
/// start delays nobody for longer.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Held until it is dropped, or the keeper dies.
pub struct HopLock(#[expect(dead_code, reason = "it is open, and so locked")] Option<File>);

impl HopLock {
    /// Others may start as well; nobody stands still. Nobody waits for it on behalf of a start that was given up.
    pub fn to_start(root: &RuntimeRoot, control: &LaunchControl) -> Self {
        let is_wanted = || !control.is_given_up();
        Self(take(root.path(), FlockOperation::NonBlockingLockShared, PATIENCE, is_wanted))
    }

    pub fn to_stand_still(root: &RuntimeRoot, control: &LaunchControl) -> Self {
        let is_wanted = || !control.is_given_up();
        Self(take(root.path(), FlockOperation::NonBlockingLockExclusive, PATIENCE, is_wanted))
    }
}

fn take(root: &Path, operation: FlockOperation, patience: Duration, is_wanted: impl Fn() -> bool) -> Option<File> {
    let path = root.join(HOPS_LOCK);
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file =
        file.inspect_err(|error| tracing::debug!(path = %path.display(), %error, "cannot use the hop lock")).ok()?;
    let deadline = Instant::now() + patience;
    loop {
        match flock(&file, operation) {
            Ok(()) => return Some(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline && is_wanted() => std::thread::sleep(LOOK_EVERY),
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_guest_pauses_while_no_qemu_starts() {
        use FlockOperation::{NonBlockingLockExclusive as STILL, NonBlockingLockShared as START};
        let folder = tempfile::tempdir().unwrap();
        let at_once = |operation| take(folder.path(), operation, Duration::ZERO, || true);
        let starts = [at_once(START), at_once(START)];
        assert!(starts.iter().all(Option::is_some), "several start");
        assert!(at_once(STILL).is_none(), "while somebody starts");
        drop(starts);
        let still = at_once(STILL);
        assert!(still.is_some());
        assert!(at_once(STILL).is_none() && at_once(START).is_none(), "while somebody stands still");
        drop(still);
        assert!(at_once(START).is_some());
        assert!(take(Path::new("/nowhere"), STILL, Duration::ZERO, || true).is_none(), "and nobody waits");
    }
}
