//! Pace: limits how fast a dump writes, so that the next guest can use its disk.
//!
//! limit (a hard rate) -> is the dump on one of the guest's disks? -> is that disk disturbed now? -> wait
//!
//! The wait is bounded by policy. A dump releases memory as it goes on, so a guest that uses its disk all the time must
//! not stop the dump for good. If the guest waits for memory, the dump waits less: the guest's own requests need that
//! memory too. The hard limit always counts.

use std::time::{Duration, Instant};

use hearth_disk::limit::{Limits, RateLimiter};

use super::priority::GuestWaits;
use super::progress::Progress;
use crate::config::DiskTime;

/// Time between two checks of the guest's disks.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Tells whether the guest is slowed down now on a disk that the dump writes to.
pub type SlowdownCheck = Box<dyn Fn() -> bool + Send>;

/// Decides when the next piece may be written.
pub struct Pace {
    limiter: RateLimiter,
    /// The longest time that a piece is delayed for the guest.
    patience: Duration,
    slowdown_check: SlowdownCheck,
    guest_waits: GuestWaits,
}

impl Pace {
    pub fn new(
        mib_per_second: Option<u64>,
        policy: DiskTime,
        slowdown_check: SlowdownCheck,
        guest_waits: GuestWaits,
    ) -> Self {
        let limits = Limits { bytes_per_second: mib_per_second.map(|rate| rate << 20), operations_per_second: None };
        let patience = match policy {
            DiskTime::RecoveryFirst => Duration::from_secs(1),
            DiskTime::Balanced => Duration::from_millis(50),
            DiskTime::DumpFirst => Duration::ZERO,
        };
        Self { limiter: RateLimiter::new(limits, Instant::now()), patience, slowdown_check, guest_waits }
    }

    /// Waits until this many bytes may be written, or the dump is given up.
    pub fn wait(&mut self, bytes: u64, progress: &Progress) {
        while let Err(wait) = self.limiter.admit(Instant::now(), bytes) {
            if progress.is_given_up() {
                return;
            }
            progress.pause(wait);
        }
        let deadline = Instant::now() + self.patience;
        while Instant::now() < deadline && (self.slowdown_check)() && !(self.guest_waits)() && !progress.is_given_up() {
            progress.pause(LOOK_EVERY);
        }
    }
}
