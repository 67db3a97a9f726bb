//! Bodies of requests, and the short answers to them.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Reboot the machine: a new incarnation from the ember, unless cold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RebootRequest {
    /// Keep nothing of the old memory.
    pub cold: bool,
    /// End QEMU at once instead of asking the guest to shut down first.
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
    pub method: CrashMethod,
}

/// How a guest is made to panic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    /// Another QEMU than the configured one, by its absolute path; it stays the machine's until the keeper ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu: Option<PathBuf>,
}

/// Let another program go on as the machine's keeper.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpgradeRequest {
    /// Absolute path of the program; without it the one that is now where the keeper's was started from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
}

/// End the machine's QEMU and keeper, and leave its guest in memory for the next ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParkRequest {
    /// Only say whether it could be done now.
    pub check: bool,
}

/// Save the machine to a folder, from which others can go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveRequest {
    /// Absolute path of the folder, or an address as `s3://BUCKET/PREFIX`; there must be nothing.
    pub folder: PathBuf,
    #[serde(default)]
    pub then: SaveThen,
    /// Compress memory with zstd.
    #[serde(default)]
    pub compress: bool,
    /// Store pages that the disks hold too as where they are there.
    #[serde(default)]
    pub dedup_disk: bool,
    /// See beforehand which pages the guest uses; they become the snapshot's working set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan: Option<ScanRequest>,
    /// Have the guest's agent freeze its file systems for that moment, so that they are whole on the disks. Needs
    /// `guest_agent = true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze: Option<FreezeRequest>,
}

/// How file systems are frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FreezeRequest {
    /// So long the agent may take for that, from 1000 to 600000. If it takes longer the machine is not saved.
    pub patience_ms: u64,
}

impl FreezeRequest {
    pub const PATIENCE_MS: std::ops::RangeInclusive<u64> = 1000..=600_000;

    pub fn is_sane(&self) -> bool {
        Self::PATIENCE_MS.contains(&self.patience_ms)
    }
}

/// How long is looked which pages a guest uses, and how often. What is used in many rounds comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScanRequest {
    /// Of one round, from 50 to 600000.
    pub period_ms: u64,
    /// From 1 to 1000.
    pub rounds: u32,
}

impl ScanRequest {
    pub const PERIOD_MS: std::ops::RangeInclusive<u64> = 50..=600_000;
    pub const ROUNDS: std::ops::RangeInclusive<u32> = 1..=1000;

    pub fn is_sane(&self) -> bool {
        Self::PERIOD_MS.contains(&self.period_ms) && Self::ROUNDS.contains(&self.rounds)
    }
}

/// What becomes of a machine that was saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SaveThen {
    /// The guest goes on. Its images must be on a file system that shares blocks.
    #[default]
    Continue,
    /// The machine is stopped; images are copied where blocks cannot be shared.
    Stop,
}

/// Call a save off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SaveCancel {}

/// Tell the guest that a disk's image was resized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ResizeRequest {}

/// The request was taken; the event stream says what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accepted {
    /// Sequence of the last event before the request: ask for events since this one.
    pub since: u64,
}

/// Size of a disk as the guest sees it from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskSize {
    pub disk: String,
    pub bytes: u64,
}
