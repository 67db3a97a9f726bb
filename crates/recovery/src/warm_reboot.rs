//! Warm reboot: the guest OS starts again, and blocks of the disks that its dead memory still holds are served from
//! there.
//!
//! drain -> bank -> attach -> launch (the caller's) -> settle
//!
//! There is no point of no return. Until `bank` the dead incarnation is untouched. After it every block is still on the
//! disk; the ember only saves reading it. A failure in any phase makes the reboot colder, never wrong.
//!
//! No index is built: the dead incarnation's ledger is the index, and was kept current during its life. The
//! slow work, releasing unusable pages and deciding the order of trimming, is done in `settle`, beside the guest's boot.

pub mod cache_map;
pub mod in_place;
pub mod restored;

use std::time::{Duration, Instant};

use hearth_disk::server::{DiskServer, RamPart, ServerError, Tracking};
use hearth_disk::tag::Tagger;
use std::sync::Arc;

use crate::ember::EmberError;
use crate::fast_remount::WarmSources;
use crate::incarnation::{Incarnation, discard_files};

/// Steps of a warm reboot, in order; the same words in events, metrics and `hearth explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Move its blocks out of memory that the next incarnation gets, while the guest stands still (`in_place`).
    Rescue,
    /// Wait for the I/O of the dead incarnation that is still in flight.
    Drain,
    /// Make its RAM the ember.
    Bank,
    /// Make the disks track the next incarnation.
    Attach,
    /// Start a new QEMU.
    Launch,
    /// Return to the host what cannot be reused.
    Settle,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 6] = [Self::Rescue, Self::Drain, Self::Bank, Self::Attach, Self::Launch, Self::Settle];

    /// Name of the phase in events, metrics and `hearth explain`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rescue => "rescue",
            Self::Drain => "drain",
            Self::Bank => "bank",
            Self::Attach => "attach",
            Self::Launch => "launch",
            Self::Settle => "settle",
        }
    }
}

/// Why a warm reboot failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum WarmRebootError {
    #[error("disk {disk}: I/O of the dead incarnation does not end; its host storage may hang")]
    Drain { disk: String, source: ServerError },
    #[error("disk {disk}: cannot serve the next incarnation")]
    Attach { disk: String, source: ServerError },
}

/// The means to start the next incarnation.
pub struct RebootContext<'a> {
    /// The guest's disks.
    pub disks: &'a [DiskServer],
    /// The memory that answers their reads.
    pub warm: &'a Arc<WarmSources>,
    /// Makes the tags of their blocks.
    pub tagger: &'a Tagger,
    /// Maximum time for the I/O in flight to end.
    pub patience: Duration,
}

impl RebootContext<'_> {
    /// Waits until the I/O of the dead incarnation has ended: before that its pages can still change.
    pub fn drain(&self) -> Result<(), WarmRebootError> {
        let deadline = Instant::now() + self.patience;
        for disk in self.disks {
            let left = deadline.saturating_duration_since(Instant::now());
            disk.drain(left).map_err(|source| WarmRebootError::Drain { disk: disk.name().to_owned(), source })?;
        }
        Ok(())
    }

    /// Keeps the dead incarnation as ember, without the blocks that the boot set holds. Call `drain` before. If the
    /// incarnation cannot be kept, its files are removed, and the reboot is a cold one.
    pub fn bank(&self, folder: &std::path::Path, dead: Incarnation) -> Result<(), EmberError> {
        let number = dead.number;
        self.warm.part(&dead);
        self.warm.ember.bank(dead).inspect_err(|_| discard_files(folder, number))
    }

    /// Makes the disks track the next incarnation and answer from memory.
    pub fn attach(&self, next: &Incarnation) -> Result<(), WarmRebootError> {
        for disk in self.disks {
            disk.attach(tracking(next, self.tagger, self.warm))
                .map_err(|source| WarmRebootError::Attach { disk: disk.name().to_owned(), source })?;
        }
        Ok(())
    }
}

/// Tracking of an incarnation by the disks; `None` if it is not tracked.
pub fn tracking(incarnation: &Incarnation, tagger: &Tagger, warm: &Arc<WarmSources>) -> Option<Tracking> {
    let ledger = incarnation.ledger.clone()?;
    let part = |((device, inode), pages)| RamPart { device, inode, pages };
    let ram = incarnation.ram.identities().map(part).collect();
    Some(Tracking { ram, tagger: tagger.clone(), ledger, warm: Some(warm.for_disk()) })
}
