//! Dumps of a guest's memory: what is asked for, and how far they are.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The format of a dump file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum DumpFormat {
    /// kdump-compressed, as makedumpfile writes it.
    #[default]
    Kdump,
    /// ELF core, uncompressed.
    Elf,
}

impl DumpFormat {
    /// The word used in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kdump => "kdump",
            Self::Elf => "elf",
        }
    }
}

/// Compression of a kdump file's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum DumpCompression {
    /// Fast and small. Needs recent tools.
    #[default]
    Zstd,
    /// Every tool can read it.
    Lzo,
    /// Every tool can read it. The slowest.
    Zlib,
    /// Pages are stored as they are.
    None,
}

impl DumpCompression {
    /// The word used in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zstd => "zstd",
            Self::Lzo => "lzo",
            Self::Zlib => "zlib",
            Self::None => "none",
        }
    }
}

/// Dump the memory of a running or paused guest. Missing fields are as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DumpRequest {
    /// Pause the guest until the dump is written, so that the dump shows a single moment. Otherwise the guest keeps
    /// running, except for about a millisecond while its registers are read.
    pub pause: bool,
    /// Pages to leave out: makedumpfile's level, 0 to 31.
    pub level: Option<u8>,
    /// Format of the file.
    pub format: Option<DumpFormat>,
    /// Compression of a kdump file; ELF files are not compressed.
    pub compression: Option<DumpCompression>,
    /// Absolute path of the file, which must not exist. If missing, Hearth chooses a name in the dump folder.
    pub output: Option<String>,
}

/// Resume a waiting dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DumpResume {}

/// Discard what dumps have not written yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DumpDiscard {}

/// Progress of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DumpState {
    /// It waits for another dump to complete.
    Queued,
    /// The guest kernel's page descriptors are being read to classify its pages.
    Planning,
    /// Memory is being written.
    Writing,
    /// It cannot continue, for example because a disk is full, and waits for `hearth dump NAME --resume` or
    /// `--discard`. Nothing is lost.
    Waiting,
    /// The file is complete.
    Complete,
    /// It ended early. The file is marked incomplete and can be read as far as it goes.
    Incomplete,
}

impl DumpState {
    /// The word used in JSON.
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

    /// Whether the dump has ended.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Complete | Self::Incomplete)
    }
}

/// A dump that is queued, running or over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DumpStatus {
    /// The incarnation whose memory is dumped.
    pub incarnation: u32,
    /// Progress of the dump.
    pub state: DumpState,
    /// Why the dump waits or is incomplete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Whether the guest lived on after the dump began.
    pub live: bool,
    /// Path of the file, as it is called when it is complete.
    pub file: String,
    /// makedumpfile's level; 1 or 0 if the guest's kernel was not understood.
    pub level: u8,
    /// Format of the file.
    pub format: DumpFormat,
    /// Compression of the file's pages.
    pub compression: DumpCompression,
    /// The kernel's panic message, if the guest panicked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub panic: Option<String>,
    /// Limitations of the dump: missing registers, a kernel that was not understood, unclassified pages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// RFC 3339.
    pub started_at: String,
    /// Duration until now, or until its end.
    pub duration_s: f64,
    /// Pages that belong in the dump.
    pub pages: u64,
    /// Pages already in the file.
    pub pages_written: u64,
    /// Pages that the level leaves out, by class.
    pub excluded: DumpExcluded,
    /// Memory held for the dump and not yet released.
    pub held_bytes: u64,
    /// Bytes written to the file.
    pub written_bytes: u64,
    /// Share of the pages that are in the file, in percent.
    pub percent: f64,
    /// MiB of memory dumped per second. Zero pages take no time and do not count.
    pub mib_per_s: f64,
    /// Time left at that rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<f64>,
}

/// Pages that a dump leaves out, by class; `unjudged` pages have no known class and are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DumpExcluded {
    /// Page cache.
    pub cache: u64,
    /// Page cache with private data of its file system.
    pub private_cache: u64,
    /// Memory of processes.
    pub user: u64,
    /// Free pages.
    pub free: u64,
    /// Pages with hardware memory errors.
    pub poisoned: u64,
    /// Pages that the guest has taken offline.
    pub offline: u64,
    /// Pages whose class is not known.
    pub unjudged: u64,
}
