//! The answer to `remount-plan`: the blocks that a machine's next boot will read, and how many of them are in memory.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Mark the guest's boot as finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReadyRequest {}

/// The blocks that the next boot will read if it is like the last one, how many of them memory holds, and how the last boot went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RemountPlan {
    /// Name of the machine.
    pub name: String,
    /// Whether the boot is over. If false, its reads are still being recorded.
    pub ready: bool,
    /// Maximum size of the boot set.
    pub limit_bytes: u64,
    /// Host memory that the boot set uses now.
    pub resident_bytes: u64,
    /// 4 KiB blocks that the last boot read; the next one is expected to read the same.
    pub blocks: u64,
    /// How many of these blocks memory holds.
    pub held_blocks: u64,
    /// Reads of blocks that did not fit into the limit.
    pub no_room_blocks: u64,
    /// Expected hit rate of the next boot; none if unknown.
    pub expected_hit_pct: Option<f64>,
    /// Hit rate of the last boot.
    pub hit_pct: Option<f64>,
    /// Held blocks that no boot reads, but that are read repeatedly after ready.
    pub late_blocks: u64,
    /// Reads since the machine was ready.
    pub later: RemountLater,
    /// Reads of the last boot that were served entirely from memory.
    pub memory_reads: u64,
    /// Share of these that were served in line, before the disk's thread did anything else.
    pub in_line_pct: Option<f64>,
    /// How many reads from memory were served during writes to the same disk.
    #[serde(default)]
    pub memory_reads_beside_writes: u64,
    /// Median duration of a read from memory, from its arrival to its answer, in µs.
    pub memory_read_us_p50: Option<f64>,
    /// 99th percentile of that, in µs.
    pub memory_read_us_p99: Option<f64>,
    /// Median duration of a read from memory during writes to the same disk, in µs.
    #[serde(default)]
    pub memory_read_beside_writes_us_p50: Option<f64>,
    /// 99th percentile of that, in µs.
    #[serde(default)]
    pub memory_read_beside_writes_us_p99: Option<f64>,
    /// The plan by disk.
    pub disks: Vec<RemountDisk>,
    /// Partitions, or whole disks where the boot set holds no partition table.
    #[serde(default)]
    pub volumes: Vec<RemountVolume>,
    /// Runs that the next boot is expected to read, in order; at most 8192.
    #[serde(default)]
    pub reads: Vec<PlannedRun>,
    /// Blocks of these runs that are not listed.
    #[serde(default)]
    pub reads_unlisted_blocks: u64,
    /// Runs that the last boot read from the images, in order.
    pub missed: Vec<MissedRun>,
    /// Blocks read from the images that are not listed.
    pub missed_unlisted_blocks: u64,
    /// Blocks dropped because they were damaged in memory, since the keeper started.
    pub damaged_blocks: u64,
}

/// The plan for one disk. Hits and misses count the last boot; `later` counts what followed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RemountDisk {
    /// Name of the disk.
    pub disk: String,
    /// Blocks of this disk that the last boot read.
    pub blocks: u64,
    /// Blocks that the last boot read and memory holds.
    pub held_blocks: u64,
    /// Blocks served from the boot set.
    pub hits: u64,
    /// Blocks served from the ember.
    pub ember_hits: u64,
    /// Blocks read from the image.
    pub misses: u64,
    /// Hit rate of the last boot, in percent.
    pub hit_pct: Option<f64>,
    /// Held blocks that no boot reads, but that are read repeatedly after ready.
    pub late_blocks: u64,
    /// Reads since the machine was ready.
    pub later: RemountLater,
}

/// The plan for one partition, or for a disk without partitions. Blocks that did not fit into the limit are not counted
/// by volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RemountVolume {
    /// Name of the disk.
    pub disk: String,
    /// Partition number, as Linux counts. None: the whole disk, or its space outside partitions.
    pub partition: Option<u32>,
    /// Partition name, if the partition table has names (GPT).
    #[serde(default)]
    pub label: Option<String>,
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Size, in bytes.
    pub bytes: u64,
    /// Blocks that the last boot read here.
    pub blocks: u64,
    /// Blocks that the last boot read and memory holds.
    pub held_blocks: u64,
    /// Blocks served from the boot set or the ember.
    pub hits: u64,
    /// Blocks read from the image.
    pub misses: u64,
    /// Hit rate of the last boot, in percent.
    pub hit_pct: Option<f64>,
    /// Reads since the machine was ready; all zero if the partitions have changed since.
    #[serde(default)]
    pub later: RemountLater,
}

/// Block reads since the machine was ready, by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RemountLater {
    /// Reads served from the boot set.
    pub hits: u64,
    /// Reads served from the ember.
    pub ember_hits: u64,
    /// Reads served from the image.
    pub misses: u64,
}

/// Adjacent blocks that the last boot read in sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedRun {
    /// Name of the disk.
    pub disk: String,
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub bytes: u64,
    /// Whether memory holds them. If not, they are read from the image.
    pub held: bool,
}

/// Adjacent blocks that were read from the image in sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MissedRun {
    /// Name of the disk.
    pub disk: String,
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub bytes: u64,
}
