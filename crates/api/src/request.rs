//! Bodies of requests, and the short answers to them.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Reboot the machine; the new incarnation uses the ember, unless `cold`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RebootRequest {
    /// Do not reuse the old memory.
    pub cold: bool,
    /// End QEMU at once instead of asking the guest to shut down.
    pub force: bool,
}

/// Stop the machine and its keeper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StopRequest {
    /// End QEMU at once instead of asking the guest to power off.
    pub force: bool,
}

/// Make the guest's kernel panic, for drills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CrashRequest {
    /// How to make it panic.
    pub method: CrashMethod,
}

/// How to make a guest panic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum CrashMethod {
    /// Non-maskable interrupt. A Linux guest panics on it if `kernel.unknown_nmi_panic` is 1.
    #[default]
    Nmi,
    /// The key combination Alt-SysRq-C. Needs a keyboard driver in the guest and `kernel.sysrq` to allow it.
    Sysrq,
}

/// Replace the machine's QEMU under its running guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RejuvenateRequest {
    /// Absolute path of the QEMU to switch to instead of the configured one. It stays in use until the keeper ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu: Option<PathBuf>,
}

/// Replace the machine's keeper with another program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpgradeRequest {
    /// Absolute path of the program. By default, the path that the keeper was started from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
}

/// End the machine's QEMU and keeper, and leave its guest in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParkRequest {
    /// Only check whether the guest could be parked now.
    pub check: bool,
}

/// Save the machine to a folder, for later restores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveRequest {
    /// Absolute path of the folder, or an address such as `s3://BUCKET/PREFIX`. It must not exist yet.
    pub folder: PathBuf,
    /// Action to take after the save.
    #[serde(default)]
    pub then: SaveThen,
    /// Compress memory with zstd.
    #[serde(default)]
    pub compress: bool,
    /// For pages that are also on the disks, store only their location.
    #[serde(default)]
    pub dedup_disk: bool,
    /// Scan which pages the guest uses before the save. They become the snapshot's working set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan: Option<ScanRequest>,
    /// Freeze the guest's file systems for the moment of the save, so that they are consistent on the disks. Needs
    /// `guest_agent = true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze: Option<FreezeRequest>,
}

/// How to freeze file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FreezeRequest {
    /// Time that the guest's agent may take, 1000 to 600000. If it takes longer, the save fails.
    pub patience_ms: u64,
}

impl FreezeRequest {
    /// Range of `patience_ms`.
    pub const PATIENCE_MS: std::ops::RangeInclusive<u64> = 1000..=600_000;

    /// Whether `patience_ms` is in range.
    pub fn is_sane(&self) -> bool {
        Self::PATIENCE_MS.contains(&self.patience_ms)
    }
}

/// How long and how often to scan which pages a guest uses. Pages used in many rounds come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScanRequest {
    /// Duration of one round, 50 to 600000.
    pub period_ms: u64,
    /// Number of rounds, 1 to 1000.
    pub rounds: u32,
}

impl ScanRequest {
    /// Range of `period_ms`.
    pub const PERIOD_MS: std::ops::RangeInclusive<u64> = 50..=600_000;
    /// Range of `rounds`.
    pub const ROUNDS: std::ops::RangeInclusive<u32> = 1..=1000;

    /// Whether period and rounds are in range.
    pub fn is_sane(&self) -> bool {
        Self::PERIOD_MS.contains(&self.period_ms) && Self::ROUNDS.contains(&self.rounds)
    }
}

/// Action to take on the machine after a save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SaveThen {
    /// The guest continues.
    #[default]
    Continue,
    /// The machine stops after the save.
    Stop,
}

/// Cancel a save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SaveCancel {}

/// Copy a disk as it is at one moment to a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyDiskRequest {
    /// Name of the disk.
    pub disk: String,
    /// Absolute path of the copy. It must not exist yet.
    pub file: PathBuf,
    /// The caller has the guest's file systems frozen once this request is accepted, sends `POST /v1/copy-disk/take`, and has them thawed
    /// when the moment is taken or the copy has failed. If not, the keeper does so where the guest has an agent (`guest_agent = true`).
    #[serde(default)]
    pub caller_freezes: bool,
    /// Begin a checkpoint of this name at the moment that the copy shows. It ends with the keeper, and when the image is closed or
    /// resized.
    #[serde(default)]
    pub checkpoint: Option<String>,
    /// Also make `FILE.since`, a qcow2 image over the copy. It has a bitmap of this name: the blocks of 64 KiB that were written between
    /// the checkpoint of this name and the moment that the copy shows.
    #[serde(default)]
    pub since: Option<String>,
}

/// Take the moment of a copy whose caller freezes the file systems (`caller_freezes`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyDiskTake {
    /// Its file, as it was requested.
    pub file: PathBuf,
    /// Why the file systems are not frozen. None: they are.
    #[serde(default)]
    pub not_frozen: Option<String>,
}

/// Cancel the running copy of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyDiskCancel {
    /// Its file, as it was requested.
    pub file: PathBuf,
}

/// libvirt is about to start the domain's QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DomainStarts {}

/// libvirt's QEMU has reset the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DomainReset {}

/// The guest has crashed, and libvirt keeps its QEMU as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DomainCrashed {}

/// A crashed guest's registers were read, or cannot be, and libvirt is about to end its QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DomainHarvested {
    /// Why there are no registers. Without it they are in the runtime folder, in the file `registers-N` of incarnation N.
    pub why: Option<String>,
}

/// libvirt has ended the domain's QEMU, or could not start it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DomainEnded {}

/// Tell the guest that a disk's image was resized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ResizeRequest {}

/// The request was accepted; events report its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accepted {
    /// Sequence number of the last event before the request: ask for events since this one.
    pub since: u64,
}

/// New size of a disk, as the guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskSize {
    /// Name of the disk.
    pub disk: String,
    /// Its new size.
    pub bytes: u64,
}
