//! Pace: how fast a dump may write, so that the next guest gets its disk.
//!
//! limit (a hard rate) -> is the dump on a disk of the guest's at all? -> does the guest's disk suffer now? -> wait
//!
//! Waiting is bounded by policy: memory comes free only as the dump goes on, so a guest that never lets go of its disk
//! must not stop the dump for good. A guest that waits for memory gets the disk by waiting less: its own requests wait for
//! that memory too. The limit holds in any case.

use std::time::{Duration, Instant};

use hearth_disk::limit::{Limits, RateLimiter};

use super::priority::GuestWaits;
use super::progress::Progress;
use crate::config::DiskTime;

/// Time between two looks at the guest's disks.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Tells whether the guest waits for a disk that the dump writes to, at this moment.
pub type Suffers = Box<dyn Fn() -> bool + Send>;

/// Says when the next piece may be written.
pub struct Pace {
    limiter: RateLimiter,
    /// The longest a piece is held back.
    patience: Duration,
    suffers: Suffers,
    guest_waits: GuestWaits,
}

impl Pace {
    pub fn new(mib_per_second: Option<u64>, policy: DiskTime, suffers: Suffers, guest_waits: GuestWaits) -> Self {
        let limits = Limits { bytes_per_second: mib_per_second.map(|rate| rate << 20), operations_per_second: None };
        let patience = match policy {
            DiskTime::RecoveryFirst => Duration::from_secs(1),
            DiskTime::Balanced => Duration::from_millis(50),
            DiskTime::DumpFirst => Duration::ZERO,
        };
        Self { limiter: RateLimiter::new(limits, Instant::now()), patience, suffers, guest_waits }
    }

    /// Waits until so many bytes may be written, or until the dump is given up.
    pub fn wait(&mut self, bytes: u64, progress: &Progress) {
        while let Err(wait) = self.limiter.admit(Instant::now(), bytes) {
            if progress.is_given_up() {
                return;
            }
            progress.pause(wait);
        }
        let deadline = Instant::now() + self.patience;
        while Instant::now() < deadline && (self.suffers)() && !(self.guest_waits)() && !progress.is_given_up() {
            progress.pause(LOOK_EVERY);
        }
    }
}
