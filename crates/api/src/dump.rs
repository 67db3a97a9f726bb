//! Dumps of a guest's memory: what is asked for, and how far they are.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The format of a dump file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DumpFormat {
    /// kdump-compressed, as makedumpfile writes it.
    #[default]
    Kdump,
    /// ELF core, uncompressed.
    Elf,
}

impl DumpFormat {
    pub fn name(self) -> &'static str {
        match self {
            Self::Kdump => "kdump",
            Self::Elf => "elf",
        }
    }
}

/// How the pages of a kdump file are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DumpCompression {
    #[default]
    Zstd,
    Lzo,
    Zlib,
    None,
}

impl DumpCompression {
    pub fn name(self) -> &'static str {
        match self {
            Self::Zstd => "zstd",
            Self::Lzo => "lzo",
            Self::Zlib => "zlib",
            Self::None => "none",
        }
    }
}

/// Dump the memory of a guest that runs or is paused. What is not given is as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DumpRequest {
    /// Hold the guest still until the dump is written, so that the dump shows one moment. Otherwise it runs on, but for
    /// about a millisecond in which its registers are taken.
    pub pause: bool,
    /// 0 to 31, as makedumpfile counts.
    pub level: Option<u8>,
    pub format: Option<DumpFormat>,
    /// Of kdump files; ELF files are not compressed.
    pub compression: Option<DumpCompression>,
    /// Absolute path of the file; it must not exist. Otherwise it gets a name in the dump folder.
    pub output: Option<String>,
}

/// Go on with a dump that waits, or give up what it has not written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DumpOrder {}

/// How far a dump is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DumpState {
    /// Another dump is written first.
    Queued,
    /// The guest's kernel is asked what its pages are.
    Planning,
    Writing,
    /// It cannot go on (a full disk, say) and waits for `hearth dump NAME --resume` or `--discard`; nothing is lost.
    Waiting,
    Complete,
    /// Given up before its end; the file says so itself and can be read as far as it goes.
    Incomplete,
}

impl DumpState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Planning => "planning",
            Self::Writing => "writing",
            Self::Waiting => "waiting",
            Self::Complete => "complete",
            Self::Incomplete => "incomplete",
        }
    }

    /// Whether anything is still going to happen to it.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Complete | Self::Incomplete)
    }
}

/// A dump, from its beginning on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DumpStatus {
    /// The incarnation whose memory it is.
    pub incarnation: u32,
    pub state: DumpState,
    /// Why it waits or is incomplete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Of a guest that lived on.
    pub live: bool,
    pub file: String,
    /// As makedumpfile counts; 1 or 0 where the guest's kernel was not understood.
    pub level: u8,
    pub format: DumpFormat,
    pub compression: DumpCompression,
    /// The guest's own last words, if it panicked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub panic: Option<String>,
    /// What a reader of the dump must know: no registers, kernel not understood, pages that could not be judged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// RFC 3339.
    pub started_at: String,
    /// Until now, or until its end.
    pub duration_s: f64,
    /// Pages that belong in the dump.
    pub pages: u64,
    pub pages_written: u64,
    /// Pages of RAM that the level leaves out, by class.
    pub excluded: DumpExcluded,
    /// Memory that is not yet released because the dump needs it.
    pub held_bytes: u64,
    /// Written to the file.
    pub written_bytes: u64,
    pub percent: f64,
    /// MiB of memory dumped a second. Pages of zeroes take no time and do not count.
    pub mib_per_s: f64,
    /// Until the end, at that rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<f64>,
}

/// Pages that a dump leaves out, by class, and those that no class could be found for, which it keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DumpExcluded {
    pub cache: u64,
    pub private_cache: u64,
    pub user: u64,
    pub free: u64,
    pub poisoned: u64,
    pub offline: u64,
    pub unjudged: u64,
}
