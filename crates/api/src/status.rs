//! The state of a machine: the answer to `status`, and the source of every metric.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::DumpStatus;

/// The state of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MachineStatus {
    /// Name of the machine.
    pub name: String,
    /// State of the machine.
    pub state: MachineState,
    /// Why the machine is in this state, for example failed or paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_why: Option<String>,
    /// When the next guest starts, if the machine waits before that. RFC 3339, UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_start: Option<String>,
    /// Whether it waits because it crashes again and again. If not, the next guest could not be started.
    #[serde(default)]
    pub crash_loop: bool,
    /// Number of the current or last incarnation.
    pub incarnation: u32,
    /// How the previous incarnation ended.
    pub cause_of_last_end: Option<EndCause>,
    /// Time since the current incarnation started to run.
    pub uptime_s: f64,
    /// The machine's keeper process.
    pub keeper: KeeperStatus,
    /// The current QEMU process, if there is one.
    pub qemu: Option<QemuStatus>,
    /// Host memory used by the machine.
    pub memory: MemoryStatus,
    /// The machine's disks, in the order of the configuration.
    pub disks: Vec<DiskStatus>,
    /// The machine's NVRAM and persistent memory.
    #[serde(default)]
    pub nvram: Vec<NvramStatus>,
    /// The machine's network devices.
    pub nets: Vec<NetStatus>,
    /// Guest pages whose disk block the ledger knows.
    pub ledger_pages: u64,
    /// Memory of dead guests that is still kept.
    pub ember: EmberStatus,
    /// Running and recent dumps, oldest first.
    #[serde(default)]
    pub dumps: Vec<DumpStatus>,
    /// The recovery that started the current incarnation; none for the first one.
    pub last_recovery: Option<Recovery>,
    /// Start of the park that is under way. RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parking_since: Option<String>,
    /// Start of the rejuvenation whose new QEMU is starting. RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejuvenating_since: Option<String>,
    /// The last rejuvenation, successful or not.
    #[serde(default)]
    pub last_rejuvenation: Option<Rejuvenation>,
    /// The parked guest that this keeper found, if any, and what became of it.
    #[serde(default)]
    pub unparked: Option<Unparked>,
    /// The running save.
    #[serde(default)]
    pub save: Option<SaveStatus>,
    /// Present if the guest's file systems are, or may be, frozen for a save.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<FrozenStatus>,
    /// The snapshot that the current incarnation was restored from, and how much memory is loaded.
    #[serde(default)]
    pub restore: Option<RestoreStatus>,
    /// Present with `refill = "on"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refill: Option<RefillStatus>,
    /// Keys changed in machine.toml that are not in effect yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<PendingChange>,
}

/// A changed key of machine.toml that is not in effect yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PendingChange {
    /// The key, such as `memory`, `boot.cmdline` or `disks.root.queues`.
    pub key: String,
    /// When the change takes effect.
    pub until: PendingUntil,
}

/// When a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PendingUntil {
    /// At the guest's next reboot or crash.
    NextGuest,
    /// When the machine is stopped and started again.
    NextStart,
}

/// The cache map that the guest's `hearth-refill` reads. What it then brings back are ordinary reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefillStatus {
    /// Size of the map. 0: there is none, or it is being made.
    pub map_bytes: u64,
    /// Bytes of the map's disk that guests have read since the keeper started to serve it.
    pub read_bytes: u64,
    /// The part of `read_bytes` that the current incarnation has read. None: it is older than the keeper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation_read_bytes: Option<u64>,
}

/// A disk backed by host memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NvramStatus {
    /// Name of the device.
    pub name: String,
    /// How it is attached.
    #[serde(default)]
    pub device: NvramDevice,
    /// Size as the guest sees it.
    pub bytes: u64,
    /// `none`, `async` or `sync`.
    pub mirror: String,
    /// Path of the mirror's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror_file: Option<String>,
    /// Bytes not yet in the mirror; with `sync`, bytes not yet flushed. None: there is no mirror.
    pub unmirrored_bytes: Option<u64>,
    /// Why the mirror cannot be written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Whether a QEMU is connected or has it mapped.
    pub connected: bool,
    /// Read requests to a `disk`. Accesses to `pmem` are not counted.
    pub reads: u64,
    /// Write requests to a `disk`.
    pub writes: u64,
    /// Flush requests to a `disk`.
    pub flushes: u64,
}

/// How NVRAM is attached to a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NvramDevice {
    /// A disk.
    #[default]
    Disk,
    /// In the guest's address space.
    Pmem,
}

/// Progress of a restore. Zero pages are not counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RestoreStatus {
    /// Folder or address of the snapshot.
    pub snapshot: String,
    /// `eager`, `lazy` or `working-set`.
    pub mode: String,
    /// Pages in the snapshot.
    pub pages: u64,
    /// Pages loaded before the guest ran, or before this keeper took it over.
    pub pages_prefetched: u64,
    /// Pages loaded on a page fault.
    pub pages_lazy: u64,
    /// Pages loaded beside a faulting one, or in the background.
    pub pages_filled: u64,
    /// Pages not loaded yet.
    pub pages_missing: u64,
    /// Guest page faults served.
    #[serde(default)]
    pub faults: u64,
    /// Median time of guest page faults, in µs since the keeper received them. None: there was no fault.
    #[serde(default)]
    pub fault_us_p50: Option<u64>,
    /// 99th percentile, in µs.
    #[serde(default)]
    pub fault_us_p99: Option<u64>,
    /// Median for stored pages, in µs; zero pages need no read.
    #[serde(default)]
    pub fault_us_p50_stored: Option<u64>,
    /// 99th percentile for stored pages, in µs.
    #[serde(default)]
    pub fault_us_p99_stored: Option<u64>,
    /// Total time of the guest's served page faults, in µs.
    #[serde(default)]
    pub fault_us_total: u64,
    /// Whether all memory is loaded, so that the snapshot's memory is no longer needed.
    pub complete: bool,
    /// Parts that cannot be loaded now, and why. Accesses to them wait.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<String>,
}

/// File systems that the guest's agent was told to freeze, and will be told to thaw.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FrozenStatus {
    /// Number of frozen file systems. None: the agent has not answered yet, or it answered an earlier keeper.
    pub file_systems: Option<u64>,
    /// How long they have been frozen. None: the agent has not answered yet.
    pub for_ms: Option<f64>,
    /// Why the last attempt to thaw them failed; the keeper tries again for some minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Progress of a save. Pages that the guest writes meanwhile are copied and counted again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SaveStatus {
    /// Folder or address of the snapshot.
    pub folder: String,
    /// Pages to copy, as far as known.
    pub pages: u64,
    /// Pages copied so far.
    pub pages_done: u64,
    /// Allocated bytes of images that must be copied because they cannot share blocks.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Bytes of images copied so far.
    #[serde(default)]
    pub disk_bytes_done: u64,
    /// Bytes to upload to an object store, as far as known. Parts of memory that change are sent and counted again.
    #[serde(default)]
    pub upload_bytes: u64,
    /// Bytes uploaded so far.
    #[serde(default)]
    pub upload_bytes_done: u64,
    /// Progress, in percent.
    pub percent: f64,
    /// MiB copied per second.
    pub mib_per_s: f64,
    /// Time left; none if not known yet.
    pub eta_s: Option<f64>,
    /// Present during the scan of the pages that the guest uses; the copy follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan: Option<ScanStatus>,
}

/// Progress of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScanStatus {
    /// Number of rounds to scan.
    pub rounds: u32,
    /// Number of rounds scanned so far.
    pub rounds_done: u32,
}

/// State of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// The first incarnation is starting.
    Starting,
    /// The guest runs.
    Running,
    /// The guest crashed and `on_panic` is `pause` or `dump`, or it was paused from outside.
    Paused,
    /// An incarnation has ended, and the next one is starting or waits for `next_start`.
    Recovering,
    /// The guest was asked to power off, or is being ended.
    Stopping,
    /// The machine has stopped.
    Stopped,
    /// The machine cannot continue without help; the events say why.
    Failed,
}

impl MachineState {
    /// All states.
    pub const ALL: [Self; 7] =
        [Self::Starting, Self::Running, Self::Paused, Self::Recovering, Self::Stopping, Self::Stopped, Self::Failed];

    /// The word used in JSON.
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
    /// The guest's kernel panicked and reported it.
    Panic,
    /// The guest stopped feeding its watchdog.
    Watchdog,
    /// The QEMU process ended, but not because of the guest.
    QemuDied,
    /// libvirt's QEMU ended; libvirt knows why.
    QemuEnded,
    /// The operator asked for a reboot.
    OperatorReboot,
    /// The operator asked for a stop.
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
            Self::QemuEnded => "QEMU ended",
            Self::OperatorReboot => "reboot was ordered",
            Self::OperatorStop => "stop was ordered",
        }
    }
}

/// The machine's keeper process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct KeeperStatus {
    /// Process id.
    pub pid: u32,
    /// Version of Hearth.
    pub version: String,
    /// Time since the keeper started.
    pub uptime_s: f64,
    /// The longest time in which its main loop handled one event, and took no other request.
    #[serde(default)]
    pub loop_stall_ms_max: f64,
}

/// The current QEMU process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct QemuStatus {
    /// Process id.
    pub pid: u32,
    /// QEMU's version.
    pub version: String,
    /// Number of this QEMU process, counted over the machine's life.
    pub generation: u32,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Why this accelerator is used.
    pub accelerator_why: String,
    /// Whether the keeper can handle QEMU's page faults.
    pub userfault: UserfaultStatus,
}

/// Whether QEMU gave the keeper a userfaultfd for its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum UserfaultStatus {
    /// Both the keeper and QEMU hold it.
    HandedOver,
    /// QEMU gave none; the machine runs without it.
    #[allow(missing_docs, reason = "the variant says what `why` explains")]
    Absent { why: String },
}

/// Host memory used by the machine's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryStatus {
    /// RAM as the guest sees it.
    pub ram_bytes: u64,
    /// RAM file and ledger of the current incarnation.
    pub resident_bytes: u64,
    /// Files of dead incarnations.
    pub ember_bytes: u64,
    /// The part of `ember_bytes` that dumps have not written yet.
    #[serde(default)]
    pub held_bytes: u64,
    /// Buffers of running dumps.
    #[serde(default)]
    pub dump_buffer_bytes: u64,
    /// Boot set.
    #[serde(default)]
    pub boot_set_bytes: u64,
    /// NVRAM devices.
    #[serde(default)]
    pub nvram_bytes: u64,
    /// Limit for all of these together.
    pub budget_bytes: u64,
    /// Extra memory allowed while a dump holds dead memory.
    #[serde(default)]
    pub headroom_bytes: u64,
    /// Peak of all of these together since the keeper started.
    pub peak_bytes: u64,
    /// None: this QEMU's memory is not limited by page faults.
    pub admission: Option<AdmissionStatus>,
}

/// How memory is granted to the current incarnation, unit by unit, while memory is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AdmissionStatus {
    /// Whether admission is on. If not, all memory has been granted.
    pub on: bool,
    /// RAM granted so far.
    pub granted_bytes: u64,
    /// Number of units that QEMU has touched.
    pub faults: u64,
    /// QEMU threads waiting for memory now.
    pub waiting: u64,
    /// Total time that QEMU's threads have waited.
    pub guest_wait_ms: u64,
}

/// A disk. Counters start with the keeper.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskStatus {
    /// Name of the disk.
    pub name: String,
    /// Path of the image.
    pub path: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// How the image is accessed, and why.
    pub engine: String,
    /// Whether the guest can only read it.
    pub read_only: bool,
    /// Size as the guest sees it.
    pub bytes: u64,
    /// Whether a QEMU is connected.
    pub connected: bool,
    /// Whether the connected QEMU has sent nothing, so that its guest may wait for this disk. A QEMU before 9.1 may not notice a
    /// keeper that follows a dead one.
    #[serde(default)]
    pub silent: bool,
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Flushes that needed no operation on the image, because nothing had changed or another flush covered them.
    #[serde(default)]
    pub flushes_spared: u64,
    /// Discard and write-zeroes requests.
    pub discards: u64,
    /// Bytes read by the guest that came from memory.
    pub read_warm_bytes: u64,
    /// Bytes read by the guest that came from the image.
    pub read_image_bytes: u64,
    /// Bytes written by the guest.
    pub written_bytes: u64,
    /// Operations on the image that have ended; a request may need none, or several.
    #[serde(default)]
    pub image_operations: u64,
    /// The sum of their times, in µs.
    #[serde(default)]
    pub image_us: u64,
    /// Requests that failed with an I/O error of the image.
    pub io_errors: u64,
    /// Requests waiting for space in the image's file system.
    #[serde(default)]
    pub waiting_for_space: u64,
    /// Malformed guest requests.
    pub bad_requests: u64,
    /// Time that requests waited for the disk's rate limits.
    pub throttled_ms: u64,
    /// Progress of fetching the disk from an object store. None: all of it is local.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival: Option<ArrivalStatus>,
}

/// Progress of fetching a disk from an object store, without zeroes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArrivalStatus {
    /// Address of the disk in the object store.
    pub source: String,
    /// Bytes to fetch, with those already fetched.
    pub bytes: u64,
    /// Bytes not fetched yet.
    pub missing_bytes: u64,
    /// Parts that cannot be fetched now, and why. Reads of them wait.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<String>,
}

/// One network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetStatus {
    /// `user`, `passt` or `tap`.
    pub kind: String,
    /// MAC address that the guest sees.
    pub mac: String,
    /// Host ports forwarded into the guest.
    #[serde(default)]
    pub forward: Vec<String>,
}

/// The ember and how it was used: kept = served + refused + remaining.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EmberStatus {
    /// Whether dead memory is kept.
    pub mode: EmberMode,
    /// Pages that held a disk block when the last incarnation ended, plus those left of earlier ones.
    pub pages_kept: u64,
    /// Size of the kept pages.
    pub kept_bytes: u64,
    /// Pages moved to the current incarnation.
    pub pages_served: u64,
    /// Size of the served pages.
    pub served_bytes: u64,
    /// Reads served from a part of a page, which stays.
    pub pages_served_in_part: u64,
    /// Pages not used, by reason.
    pub refused: Refused,
    /// Pages that can still be used.
    pub pages_remaining: u64,
    /// Size of the pages that can still be used.
    pub remaining_bytes: u64,
}

/// Whether dead memory is kept as ember.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EmberMode {
    /// It is kept.
    On,
    /// It is released.
    Off,
}

/// Pages of the ember that were not used, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Refused {
    /// The page's content differed from the disk: dirty, reused or corrupted.
    pub tag_mismatch: u64,
    /// The guest wrote or discarded the block before it read it.
    pub overwritten: u64,
    /// Dropped to stay within the budget, oldest first.
    pub trimmed: u64,
}

impl Refused {
    /// Sum of all reasons.
    pub fn total(self) -> u64 {
        self.tag_mismatch + self.overwritten + self.trimmed
    }
}

/// A recovery: how a new incarnation followed a dead one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Recovery {
    /// The new incarnation.
    pub incarnation: u32,
    /// How the previous incarnation ended.
    pub cause: EndCause,
    /// Whether it started from the ember.
    pub warm: bool,
    /// Why the recovery was cold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_cold: Option<String>,
    /// When the previous incarnation ended (RFC 3339).
    pub started_at: String,
    /// Time from the previous incarnation's end until the new guest runs.
    pub duration_ms: f64,
    /// In the order in which they ended. They may overlap, and some continue while the new guest runs.
    pub phases: Vec<PhaseTime>,
    /// Disk blocks in memory when the previous incarnation ended.
    pub pages_kept: u64,
    /// Size of the kept blocks.
    pub kept_bytes: u64,
    /// Memory released to the host because it was not usable.
    pub released_bytes: u64,
    /// The kernel's panic message, if the guest panicked and was dumped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub panic: Option<String>,
    /// The dump of the dead incarnation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<DumpStatus>,
}

/// A rejuvenation, successful or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Rejuvenation {
    /// RFC 3339.
    pub started_at: String,
    /// Version of the old QEMU.
    pub from_version: String,
    /// Version of the new QEMU; none if unknown.
    pub version: Option<String>,
    /// Why it failed. The guest then continues on the old QEMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// How long the guest was paused.
    pub pause_ms: Option<f64>,
    /// Size of the device state that was transferred.
    pub state_bytes: Option<u64>,
    /// In order; if it failed, the last phase is the one that failed.
    pub phases: Vec<PhaseTime>,
}

/// Outcome of a parked guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Unparked {
    /// Why the guest could not resume, so that the machine booted. None: it resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// How long the guest was paused. None: it did not resume.
    pub stood_ms: Option<f64>,
    /// Whether the host has changed its kernel.
    pub host_reloaded: bool,
}

/// One phase of a recovery or rejuvenation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseTime {
    /// Name of the phase.
    pub phase: String,
    /// Start, relative to the previous incarnation's end.
    pub started_ms: f64,
    /// How long the phase took.
    pub duration_ms: f64,
}

/// The answer to `explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// Name of the machine.
    pub name: String,
    /// Number of the current or last incarnation.
    pub incarnation: u32,
    /// None while the first incarnation lives.
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
