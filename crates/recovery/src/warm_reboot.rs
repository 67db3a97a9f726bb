//! Warm reboot: the guest OS starts again; what its dead memory still holds of the disks is served from there.
//!
//! drain -> bank -> attach -> launch (the caller's) -> settle
//!
//! Point of no return: none. Until `bank` the dead incarnation is untouched; after it every block is still on the disk,
//! the ember only saves reading it. A fault in any phase makes the reboot colder, never wrong.
//!
//! The index is not built: the dead incarnation's ledger *is* the index, kept current while it lived. What takes time
//! (releasing what cannot be reused, the order of trimming) is `settle`, beside the guest's boot.

use std::time::{Duration, Instant};

use hearth_disk::server::{DiskServer, ServerError, Tracking};
use hearth_disk::tag::Tagger;
use std::sync::Arc;

use crate::boot_set::WarmSources;
use crate::ember::EmberError;
use crate::incarnation::{Incarnation, discard_files};

/// Steps of a warm reboot, in order; the same words in events, metrics and `hearth explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// I/O of the dead incarnation that is still in flight ends.
    Drain,
    /// Its RAM becomes the ember.
    Bank,
    /// The disks are told to track the next incarnation.
    Attach,
    /// A new QEMU starts.
    Launch,
    /// What cannot be reused goes back to the host.
    Settle,
}

impl Phase {
    pub const ALL: [Self; 5] = [Self::Drain, Self::Bank, Self::Attach, Self::Launch, Self::Settle];

    pub fn name(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Bank => "bank",
            Self::Attach => "attach",
            Self::Launch => "launch",
            Self::Settle => "settle",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum WarmRebootError {
    #[error("disk {disk}: I/O of the dead incarnation does not end; its host storage may hang")]
    Drain { disk: String, source: ServerError },
    #[error("disk {disk}: cannot serve the next incarnation")]
    Attach { disk: String, source: ServerError },
}

/// What the next incarnation starts from.
pub struct Succession<'a> {
    pub disks: &'a [DiskServer],
    pub warm: &'a Arc<WarmSources>,
    pub tagger: &'a Tagger,
    /// How long I/O in flight may take to end.
    pub patience: Duration,
}

impl Succession<'_> {
    /// Waits until nothing of the dead incarnation moves any more: before that its pages cannot be judged.
    pub fn drain(&self) -> Result<(), WarmRebootError> {
        let deadline = Instant::now() + self.patience;
        for disk in self.disks {
            let left = deadline.saturating_duration_since(Instant::now());
            disk.drain(left).map_err(|source| WarmRebootError::Drain { disk: disk.name().to_owned(), source })?;
        }
        Ok(())
    }

    /// Keeps the dead incarnation as ember, without what the boot set holds. Only after `drain`. If it cannot be kept its files go: a cold reboot then.
    pub fn bank(&self, folder: &std::path::Path, dead: Incarnation) -> Result<(), EmberError> {
        let number = dead.number;
        self.warm.part(&dead);
        self.warm.ember.bank(dead).inspect_err(|_| discard_files(folder, number))
    }

    /// Lets the disks track the next incarnation and answer from memory.
    pub fn attach(&self, next: &Incarnation) -> Result<(), WarmRebootError> {
        for disk in self.disks {
            disk.attach(tracking(next, self.tagger, self.warm))
                .map_err(|source| WarmRebootError::Attach { disk: disk.name().to_owned(), source })?;
        }
        Ok(())
    }
}

/// What the disks need to know of an incarnation; none if it is not tracked.
pub fn tracking(incarnation: &Incarnation, tagger: &Tagger, warm: &Arc<WarmSources>) -> Option<Tracking> {
    let ledger = incarnation.ledger.clone()?;
    let (ram_device, ram_inode) = incarnation.ram.identity();
    Some(Tracking { ram_device, ram_inode, tagger: tagger.clone(), ledger, warm: Some(warm.clone()) })
}
