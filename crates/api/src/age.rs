//! How old a machine's QEMU is: the answer to `age`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How old a machine's QEMU is, and what speaks for another one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Age {
    pub name: String,
    pub qemu: QemuAge,
    /// What speaks for a rejuvenation, a sentence each; empty: nothing does.
    pub reasons: Vec<String>,
    /// Why there can be none now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hindrance: Option<String>,
}

/// What a QEMU has become since its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QemuAge {
    pub pid: u32,
    pub generation: u32,
    /// Of the process; the guest may be older.
    pub uptime_s: f64,
    pub version: String,
    /// Of the QEMU that a rejuvenation would start; none if it does not say.
    pub installed_version: Option<String>,
    /// The file that it was started from was replaced or removed.
    pub program_is_gone: bool,
    /// Memory of its own: without the guest's RAM.
    pub own_bytes: Growth,
    /// Open file descriptors.
    pub descriptors: Growth,
}

/// A number that may grow over time. None where it cannot be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Growth {
    /// When QEMU first answered.
    pub at_start: Option<u64>,
    pub now: Option<u64>,
}

impl Growth {
    /// By how much it has grown; 0 if it has become less.
    pub fn grown(self) -> Option<u64> {
        Some(self.now?.saturating_sub(self.at_start?))
    }
}
