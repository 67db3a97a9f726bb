//! What a machine's next boot will read, and how much of it is held: the answer to `remount-plan`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The guest has done what it boots for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReadyRequest {}

/// What the next boot will read if it is like the last one, how much of it is held in memory, and how the last boot went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RemountPlan {
    pub name: String,
    /// False: the boot is not over, and what it reads is still being noted.
    pub ready: bool,
    /// What the boot set may hold.
    pub limit_bytes: u64,
    /// Host memory that it holds now.
    pub resident_bytes: u64,
    /// Blocks of 4 KiB that the last boot read: what the next one is expected to read.
    pub blocks: u64,
    /// Of these, held.
    pub held_blocks: u64,
    /// Reads of blocks that could not be held because of the limit.
    pub no_room_blocks: u64,
    /// Of what the next boot is expected to read; none if nothing is known.
    pub expected_hit_pct: Option<f64>,
    /// Of what the last boot read.
    pub hit_pct: Option<f64>,
    /// Blocks that are held although no boot reads them: read from the images again and again, after ready.
    pub late_blocks: u64,
    /// Blocks that are held because they were written lately: the next boot may read them, and none has before.
    #[serde(default)]
    pub written_blocks: u64,
    /// Since the machine was ready.
    pub later: RemountLater,
    /// Reads of the last boot that were answered from memory alone, whatever their length.
    pub memory_reads: u64,
    /// Of these, answered in line: before the disk's thread turned to anything else.
    pub in_line_pct: Option<f64>,
    /// Of the reads from memory, answered while writes of the same disk were on their way to its image.
    #[serde(default)]
    pub memory_reads_beside_writes: u64,
    /// How long such a read took, from when it was taken to its answer.
    pub memory_read_us_p50: Option<f64>,
    pub memory_read_us_p99: Option<f64>,
    /// The same of those that were answered while writes were on their way: waiting for these would show here.
    #[serde(default)]
    pub memory_read_beside_writes_us_p50: Option<f64>,
    #[serde(default)]
    pub memory_read_beside_writes_us_p99: Option<f64>,
    pub disks: Vec<RemountDisk>,
    /// Partitions, or whole disks where the boot set holds no tables of them.
    #[serde(default)]
    pub volumes: Vec<RemountVolume>,
    /// What the next boot is expected to read, in that order: what the last one has read. At most 8192 runs.
    #[serde(default)]
    pub reads: Vec<PlannedRun>,
    /// Blocks of it that are not listed.
    #[serde(default)]
    pub reads_unlisted_blocks: u64,
    /// What the last boot read from the images, in that order.
    pub missed: Vec<MissedRun>,
    /// Blocks that it read from the images and that are not listed.
    pub missed_unlisted_blocks: u64,
    /// Copies that were dropped because they were damaged, since the keeper started.
    pub damaged_blocks: u64,
}

/// One disk's part. Hits and misses are of the last boot, `later` of what came after it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RemountDisk {
    pub disk: String,
    pub blocks: u64,
    pub held_blocks: u64,
    /// Answered by the boot set.
    pub hits: u64,
    /// Answered by the ember.
    pub ember_hits: u64,
    /// Answered by the image.
    pub misses: u64,
    pub hit_pct: Option<f64>,
    pub late_blocks: u64,
    #[serde(default)]
    pub written_blocks: u64,
    pub later: RemountLater,
}

/// The part of one partition in the last boot and the next one, or that of a disk without any.
/// Blocks that could not be held because of the limit are not told apart by volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RemountVolume {
    pub disk: String,
    /// As Linux counts them. None: the whole disk, or what of it lies beside its partitions.
    pub partition: Option<u32>,
    /// Its name, where the table of partitions has names (GPT).
    #[serde(default)]
    pub label: Option<String>,
    /// Where it begins on the disk, in bytes.
    pub offset: u64,
    pub bytes: u64,
    pub blocks: u64,
    pub held_blocks: u64,
    /// Blocks that memory answered, boot set or ember.
    pub hits: u64,
    /// Blocks that the image answered.
    pub misses: u64,
    pub hit_pct: Option<f64>,
    /// Nothing, if the partitions are others than when the machine was ready.
    #[serde(default)]
    pub later: RemountLater,
}

/// Reads of blocks since the machine was ready, by who answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RemountLater {
    /// The boot set.
    pub hits: u64,
    pub ember_hits: u64,
    /// The image.
    pub misses: u64,
}

/// Neighbouring blocks that the last boot read one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedRun {
    pub disk: String,
    /// On the disk, in bytes.
    pub offset: u64,
    pub bytes: u64,
    /// False: the image will be asked for them.
    pub held: bool,
}

/// Neighbouring blocks that were read one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MissedRun {
    pub disk: String,
    /// On the disk, in bytes.
    pub offset: u64,
    pub bytes: u64,
}
