//! How old a machine's QEMU is: the answer to `age`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Age of a machine's QEMU, and whether it should be replaced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Age {
    /// Name of the machine.
    pub name: String,
    /// Age of the QEMU process.
    pub qemu: QemuAge,
    /// Reasons to rejuvenate, one sentence each; empty if there is none.
    pub reasons: Vec<String>,
    /// Why a rejuvenation is not possible now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hindrance: Option<String>,
}

/// How a QEMU process has changed since its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QemuAge {
    /// Process id.
    pub pid: u32,
    /// Number of this QEMU process, counted over the machine's life.
    pub generation: u32,
    /// Uptime of the QEMU process; the guest may be older.
    pub uptime_s: f64,
    /// QEMU's version.
    pub version: String,
    /// Version of the QEMU that a rejuvenation would start; none if unknown.
    pub installed_version: Option<String>,
    /// Whether the running program's file was replaced or removed.
    pub program_is_gone: bool,
    /// QEMU's own memory, without the guest's RAM.
    pub own_bytes: Growth,
    /// Open file descriptors.
    pub descriptors: Growth,
}

/// A number that may grow over time; none where it cannot be measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Growth {
    /// Value when QEMU first responded.
    pub at_start: Option<u64>,
    /// Value now.
    pub now: Option<u64>,
}

impl Growth {
    /// Growth since the start; 0 if the value has shrunk.
    pub fn grown(self) -> Option<u64> {
        Some(self.now?.saturating_sub(self.at_start?))
    }
}
