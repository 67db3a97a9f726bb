//! A machine as it is now: the answer to `status`, and the source of every metric.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::DumpStatus;

/// A machine as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MachineStatus {
    pub name: String,
    pub state: MachineState,
    /// Why the machine is in this state, where that needs saying (failed, paused).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_why: Option<String>,
    /// When the next guest is started: the machine backs off from a crash loop. RFC 3339, UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_start: Option<String>,
    /// Number of the living incarnation, or of the last one.
    pub incarnation: u32,
    /// How the incarnation before this one ended.
    pub cause_of_last_end: Option<EndCause>,
    /// Time since the living incarnation's QEMU began to run the guest.
    pub uptime_s: f64,
    pub keeper: KeeperStatus,
    pub qemu: Option<QemuStatus>,
    pub memory: MemoryStatus,
    pub disks: Vec<DiskStatus>,
    #[serde(default)]
    pub nvram: Vec<NvramStatus>,
    pub nets: Vec<NetStatus>,
    /// Guest pages of which the ledger knows which disk block they hold.
    pub ledger_pages: u64,
    pub ember: EmberStatus,
    /// Dumps under way, and the last ones that are over; oldest first.
    #[serde(default)]
    pub dumps: Vec<DumpStatus>,
    /// The recovery that made the living incarnation; none for the first one.
    pub last_recovery: Option<Recovery>,
    /// The last time that QEMU was, or was to be, replaced under the guest.
    #[serde(default)]
    pub last_rejuvenation: Option<Rejuvenation>,
    /// Whether this keeper found a guest that was parked, and what became of it.
    #[serde(default)]
    pub unparked: Option<Unparked>,
    /// A save that is under way.
    #[serde(default)]
    pub save: Option<SaveStatus>,
    /// The guest's file systems are, or may be, frozen for a save.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<FrozenStatus>,
    /// The snapshot that the living incarnation came from, and how much of its memory is there.
    #[serde(default)]
    pub restore: Option<RestoreStatus>,
    /// Keys of machine.toml that were changed under the living guest and do not count yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<PendingChange>,
}

/// A key of machine.toml whose value the living guest was not started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PendingChange {
    /// As in the file: `memory`, `boot.cmdline`, `disks.root.queues`.
    pub key: String,
    pub until: PendingUntil,
}

/// When a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PendingUntil {
    /// At the guest's next reboot or crash.
    NextGuest,
    /// When the machine has stopped and is started again.
    NextStart,
}

/// A disk that is host memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvramStatus {
    pub name: String,
    #[serde(default)]
    pub device: NvramDevice,
    pub bytes: u64,
    /// `none`, `async` or `sync`.
    pub mirror: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror_file: Option<String>,
    /// What is not in the mirror yet. With `sync` that is what no flush was asked for. None: there is no mirror.
    pub unmirrored_bytes: Option<u64>,
    /// Why the mirror could not be written last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Whether a QEMU is connected, or has it mapped.
    pub connected: bool,
    /// Of a `disk`; what a guest does with `pmem` nobody sees.
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
}

/// How a guest has NVRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NvramDevice {
    #[default]
    Disk,
    /// In its address space.
    Pmem,
}

/// How a guest comes out of a snapshot. Pages are those of its memory that are not zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RestoreStatus {
    pub snapshot: String,
    /// `eager`, `lazy` or `working-set`.
    pub mode: String,
    pub pages: u64,
    /// There before the guest went on, or before this keeper took it over.
    pub pages_prefetched: u64,
    /// Brought because somebody touched them.
    pub pages_lazy: u64,
    /// Brought beside one that was touched, or ahead of the guest.
    pub pages_filled: u64,
    pub pages_missing: u64,
    /// Page faults of the guest that are over.
    #[serde(default)]
    pub faults: u64,
    /// How long half of the guest's page faults took at most, and 99 of 100, in microseconds, from when the keeper heard of them.
    /// None: there was none.
    #[serde(default)]
    pub fault_us_p50: Option<u64>,
    #[serde(default)]
    pub fault_us_p99: Option<u64>,
    /// The same of pages that are stored: those of zeroes take no read.
    #[serde(default)]
    pub fault_us_p50_stored: Option<u64>,
    #[serde(default)]
    pub fault_us_p99_stored: Option<u64>,
    /// All of the guest's page faults together, in microseconds: so long it waited for memory. A fault counts when it is over.
    #[serde(default)]
    pub fault_us_total: u64,
    /// Nothing is missing: the snapshot's memory is not needed any more.
    pub complete: bool,
    /// What cannot be brought now, and why. Whoever touches it waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<String>,
}

/// File systems that the guest's agent was told to freeze, and is told to thaw once the guest goes on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FrozenStatus {
    /// None: the agent has not said so yet, or another keeper heard it.
    pub file_systems: Option<u64>,
    pub for_ms: Option<f64>,
    /// Why they were not thawed last time; it is tried again for some minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// How far a save is. Pages that the guest writes to meanwhile are copied again, and counted again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SaveStatus {
    pub folder: String,
    pub pages: u64,
    pub pages_done: u64,
    /// Of images that cannot share their blocks; what they take on the disk.
    #[serde(default)]
    pub disk_bytes: u64,
    #[serde(default)]
    pub disk_bytes_done: u64,
    /// Of a snapshot that goes to an object store, as far as is known. Parts of memory that change are sent again, and counted again.
    #[serde(default)]
    pub upload_bytes: u64,
    #[serde(default)]
    pub upload_bytes_done: u64,
    pub percent: f64,
    pub mib_per_s: f64,
    /// None: not known yet.
    pub eta_s: Option<f64>,
    /// While it is looked which pages the guest uses; nothing is copied before that is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan: Option<ScanStatus>,
}

/// How far a scan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScanStatus {
    pub rounds: u32,
    pub rounds_done: u32,
}

/// What the machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// The first incarnation is being made.
    Starting,
    Running,
    /// The guest crashed and `on_panic` is `pause` or `dump`, or it was paused from outside.
    Paused,
    /// An incarnation has ended and the next one is being made, or waited for (`next_start`).
    Recovering,
    /// The guest was asked to power off, or is being ended.
    Stopping,
    Stopped,
    /// The machine cannot go on without help; the events say why.
    Failed,
}

impl MachineState {
    pub const ALL: [Self; 7] =
        [Self::Starting, Self::Running, Self::Paused, Self::Recovering, Self::Stopping, Self::Stopped, Self::Failed];

    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Recovering => "recovering",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

/// How an incarnation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// The guest reset itself: a reboot from inside.
    GuestReset,
    /// The guest powered itself off.
    GuestShutdown,
    /// The guest's kernel panicked and said so.
    Panic,
    /// The guest no longer fed its watchdog.
    Watchdog,
    /// The QEMU process ended without the guest's doing.
    QemuDied,
    OperatorReboot,
    OperatorStop,
}

impl EndCause {
    /// For sentences: "incarnation 2 ended: ...".
    pub fn words(self) -> &'static str {
        match self {
            Self::GuestReset => "guest reset itself",
            Self::GuestShutdown => "guest powered off",
            Self::Panic => "guest panicked",
            Self::Watchdog => "guest stopped feeding its watchdog",
            Self::QemuDied => "QEMU died",
            Self::OperatorReboot => "reboot was ordered",
            Self::OperatorStop => "stop was ordered",
        }
    }
}

/// The process that looks after the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct KeeperStatus {
    pub pid: u32,
    pub version: String,
    pub uptime_s: f64,
}

/// The living QEMU process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct QemuStatus {
    pub pid: u32,
    pub version: String,
    /// Counts the QEMU processes of this machine.
    pub generation: u32,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Why this accelerator.
    pub accelerator_why: String,
    pub userfault: UserfaultStatus,
}

/// Whether QEMU gave the keeper a userfaultfd for its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum UserfaultStatus {
    /// The keeper holds it, and QEMU holds a copy.
    HandedOver,
    /// The machine runs all the same.
    Absent { why: String },
}

/// Host memory that the machine's files hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryStatus {
    /// RAM as the guest sees it.
    pub ram_bytes: u64,
    /// RAM file and ledger of the living incarnation.
    pub resident_bytes: u64,
    /// Files of dead incarnations.
    pub ember_bytes: u64,
    /// Of these, memory that a dump has not written yet.
    #[serde(default)]
    pub held_bytes: u64,
    /// Buffers of dumps that are being written.
    #[serde(default)]
    pub dump_buffer_bytes: u64,
    /// Blocks that are held for the next boot.
    #[serde(default)]
    pub boot_set_bytes: u64,
    /// NVRAM devices: all of it, from the start on.
    #[serde(default)]
    pub nvram_bytes: u64,
    /// What all of them together may hold.
    pub budget_bytes: u64,
    /// What they may hold on top of that while a dump holds dead memory.
    #[serde(default)]
    pub headroom_bytes: u64,
    /// The most that all of them together held since the keeper started.
    pub peak_bytes: u64,
    /// None: this QEMU takes memory as it likes.
    pub admission: Option<AdmissionStatus>,
}

/// How memory is granted to the living incarnation, unit by unit, while it is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AdmissionStatus {
    /// False: all of it was granted in the end.
    pub on: bool,
    /// RAM that the guest may take without asking.
    pub granted_bytes: u64,
    /// Times that QEMU touched a unit for the first time.
    pub faults: u64,
    /// Threads of QEMU that wait for memory now.
    pub waiting: u64,
    /// Time that they waited, all together.
    pub guest_wait_ms: u64,
}

/// One disk. Counts are since the keeper started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskStatus {
    pub name: String,
    pub path: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// How the image is read and written, and why so.
    pub engine: String,
    pub read_only: bool,
    /// Size as the guest sees it.
    pub bytes: u64,
    /// Whether a QEMU is connected.
    pub connected: bool,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    /// Of the flushes, those that were no operation on the image: nothing had changed since the last one, or they went with
    /// another one.
    #[serde(default)]
    pub flushes_spared: u64,
    pub discards: u64,
    /// Gaps between writes of a machine that boots: what memory held of them was written too, so that both are one operation.
    #[serde(default)]
    pub gaps_filled: u64,
    #[serde(default)]
    pub gap_bytes: u64,
    /// Bytes read by the guest that were answered from memory.
    pub read_warm_bytes: u64,
    /// Bytes read by the guest that came from the image.
    pub read_image_bytes: u64,
    pub written_bytes: u64,
    /// Requests that the image failed.
    pub io_errors: u64,
    /// Requests that wait until the image's file system has space.
    #[serde(default)]
    pub waiting_for_space: u64,
    /// Requests of the guest that no driver should make.
    pub bad_requests: u64,
    /// Time that requests waited for the disk's rate limits.
    pub throttled_ms: u64,
    /// What is below it is still on its way out of an object store. None: all is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival: Option<ArrivalStatus>,
}

/// How much of a disk has come out of an object store, without what is zeroes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArrivalStatus {
    pub source: String,
    pub bytes: u64,
    pub missing_bytes: u64,
    /// What cannot be brought now, and why. Whoever reads it waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<String>,
}

/// One network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetStatus {
    /// `user`, `passt` or `tap`.
    pub kind: String,
    pub mac: String,
    /// Ports of the host that lead into the guest.
    #[serde(default)]
    pub forward: Vec<String>,
}

/// What is left of dead incarnations and what it was good for.
/// kept = served + refused + remaining.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EmberStatus {
    pub mode: EmberMode,
    /// Pages that held a disk block when the last incarnation ended, with those left of earlier ones.
    pub pages_kept: u64,
    pub kept_bytes: u64,
    /// Pages that moved to the living incarnation.
    pub pages_served: u64,
    pub served_bytes: u64,
    /// Reads answered from a part of a page, which stays.
    pub pages_served_in_part: u64,
    /// Pages that were not used, by reason.
    pub refused: Refused,
    pub pages_remaining: u64,
    pub remaining_bytes: u64,
}

/// Whether dead memory is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EmberMode {
    On,
    Off,
}

/// Pages of the ember that were not used, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Refused {
    /// The bytes were not what the disk holds: dirty, reused or corrupted.
    pub tag_mismatch: u64,
    /// The guest wrote or discarded the block before it read it.
    pub overwritten: u64,
    /// Given up for the budget, oldest first.
    pub trimmed: u64,
}

impl Refused {
    pub fn total(self) -> u64 {
        self.tag_mismatch + self.overwritten + self.trimmed
    }
}

/// How a living incarnation came from a dead one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Recovery {
    /// The incarnation that was made.
    pub incarnation: u32,
    /// Why the one before it ended.
    pub cause: EndCause,
    /// Whether it started from the ember.
    pub warm: bool,
    /// Why not, if not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_cold: Option<String>,
    /// When the old incarnation ended (RFC 3339).
    pub started_at: String,
    /// From the old incarnation's end until the new guest runs.
    pub duration_ms: f64,
    /// In the order in which they ended; they may overlap, and some go on beside the new guest.
    pub phases: Vec<PhaseTime>,
    /// Disk blocks in memory at the end of the old incarnation.
    pub pages_kept: u64,
    pub kept_bytes: u64,
    /// Memory given back to the host because nothing in it could be used.
    pub released_bytes: u64,
    /// The guest's own last words, if it panicked and its memory was read for a dump.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub panic: Option<String>,
    /// The dump of the dead incarnation: written beside the new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<DumpStatus>,
}

/// How a guest came from one QEMU to another, or did not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Rejuvenation {
    /// RFC 3339.
    pub started_at: String,
    pub from_version: String,
    /// None if the new QEMU could not be asked.
    pub version: Option<String>,
    /// Why not, if it failed. The guest then goes on with the QEMU it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// How long the guest stood still.
    pub pause_ms: Option<f64>,
    /// What went from one QEMU to the other.
    pub state_bytes: Option<u64>,
    /// In order; the one that failed is the last.
    pub phases: Vec<PhaseTime>,
}

/// What became of a guest that was parked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Unparked {
    /// Why it could not go on, and the machine booted instead. None: it went on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// From its last instruction before to its first one after. None: it did not go on.
    pub stood_ms: Option<f64>,
    /// Whether the host's kernel is another one than before.
    pub host_reloaded: bool,
}

/// One phase of a recovery.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseTime {
    pub phase: String,
    /// Since the old incarnation's end.
    pub started_ms: f64,
    pub duration_ms: f64,
}

/// The answer to `explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    pub name: String,
    pub incarnation: u32,
    /// None if the first incarnation still lives.
    pub recovery: Option<Recovery>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_written_as_they_are_named() {
        for state in MachineState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }
}
