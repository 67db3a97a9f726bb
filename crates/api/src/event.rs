//! A machine's events, as `hearth events` and `GET /v1/events` show them.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{EndCause, MachineState, UserfaultStatus};

/// One event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventRecord {
    /// Sequence number. Counts from 1 and continues when the keeper restarts.
    pub sequence: u64,
    /// RFC 3339, UTC, milliseconds.
    pub time: String,
    /// Name of the machine.
    pub machine: String,
    /// The incarnation that was running or starting at that time.
    pub incarnation: u32,
    /// The kind of event, with the fields of that kind.
    #[serde(flatten, deserialize_with = "known_or_not")]
    pub event: EventKind,
}

/// A machine's log continues under any version of Hearth, so a reader must skip events that another version wrote.
fn known_or_not<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EventKind, D::Error> {
    let fields = Map::<String, Value>::deserialize(deserializer)?;
    let what = fields.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok(serde_json::from_value(Value::Object(fields)).unwrap_or(EventKind::Unknown { what }))
}

/// All kinds of events; `kind` names the kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the kinds are described; their fields are named by word and unit")]
pub enum EventKind {
    /// A keeper started.
    Started { pid: u32, version: String },
    /// A new keeper took over the machine's running QEMU.
    KeeperTookOver { qemu_pid: u32, generation: u32 },
    /// The keeper hands over to another program.
    KeeperHandsOver { program: String, version: String },
    /// The other program did not take over; the previous keeper continues.
    KeeperUpgradeFailed { why: String },
    /// The machine entered another state.
    StateChanged { from: MachineState, to: MachineState },
    /// The operator made a request.
    Request { verb: String },
    /// QEMU is ended because the guest did not shut down in time, or because QEMU does not respond.
    PowerCut { why: String },
    /// The next guest cannot be started yet; the keeper tries again at `next_start`.
    StartWaits {
        why: String,
        /// RFC 3339, UTC.
        next_start: String,
    },
    /// A QEMU process started.
    QemuStarted { pid: u32, generation: u32, version: String, accelerator: String, accelerator_why: String },
    /// Whether QEMU handed over its userfaultfd.
    Userfault { generation: u32, userfault: UserfaultStatus },
    /// QEMU has exited; `how` is its exit code or signal in words.
    QemuExited { generation: u32, how: String },
    /// The guest has started to run.
    IncarnationStarted { generation: u32, warm: bool },
    /// An incarnation has ended.
    IncarnationEnded { cause: EndCause },
    /// Blocks in the memory of a guest that was reset were taken out of it before the next kernel overwrites them. `released`: their
    /// pages were given back, because the guest is known to have been reset.
    BlocksRescued { pages: u64, refused: u64, left: u64, released: bool, duration_ms: f64 },
    /// libvirt has saved a guest and restored it, and `pages` of its memory still hold their blocks. `refused` ones hold something else,
    /// and for those that are `left` there was no time.
    BlocksCarriedOver { pages: u64, refused: u64, left: u64, duration_ms: f64 },
    /// The guest's kernel panicked.
    GuestPanicked,
    /// The guest stopped feeding its watchdog; `action` is what QEMU did.
    WatchdogExpired { action: String },
    /// The machine crashed too often and waits before it starts its next guest.
    CrashLoop {
        delay_s: u64,
        /// RFC 3339, UTC.
        next_start: String,
    },
    /// The guest's registers and notes were read for its dump.
    RegistersTaken { bytes: u64, duration_ms: f64 },
    /// A dump has started. `ram_pages` counts all pages, `pages` those in the dump.
    DumpStarted { file: String, level: u8, ram_pages: u64, pages: u64 },
    /// The kernel's panic message.
    CrashReason { message: String },
    /// A limitation of the dump.
    DumpWarning { message: String },
    /// Progress of a dump, from time to time.
    DumpProgress { file: String, percent: f64, mib_per_s: f64, eta_s: Option<f64> },
    /// A dump cannot continue and waits for `hearth dump --resume` or `--discard`.
    DumpWaits { file: String, why: String },
    /// A dump is complete.
    DumpComplete { file: String, pages: u64, bytes: u64, duration_ms: f64 },
    /// A dump ended early; its file can be read as far as it goes.
    DumpIncomplete { file: String, why: String },
    /// A crash is not dumped.
    DumpSkipped { why: String },
    /// The machine's policy requires QEMU to be replaced now.
    RejuvenationDue { why: String },
    /// The guest has moved to another QEMU.
    Rejuvenated {
        generation: u32,
        from_version: String,
        version: String,
        /// How long the guest was paused.
        pause_ms: f64,
    },
    /// A rejuvenation failed. The guest continues on the old QEMU, unless `guest_lost`.
    RejuvenationFailed { phase: String, why: String, guest_lost: bool },
    /// The guest is parked in memory, without QEMU. The keeper ends, and the next one resumes the guest.
    Parked {
        /// Time since its last instruction.
        duration_ms: f64,
        state_bytes: u64,
    },
    /// Parking failed, and the guest continues.
    ParkFailed { phase: String, why: String },
    /// A parked guest was resumed.
    Unparked {
        generation: u32,
        version: String,
        /// How long the guest was paused.
        stood_ms: f64,
        /// The part of that since its keeper started.
        duration_ms: f64,
    },
    /// The parked guest cannot resume; the machine boots instead.
    ParkedLost { why: String },
    /// A save has started. The guest keeps running, unless `held_why` says why it is paused.
    SaveStarted {
        folder: String,
        #[serde(default)]
        held_why: Option<String>,
    },
    /// The scan of the pages that the guest uses is complete; the copy follows.
    SaveScanned { folder: String, pages: u64, rounds: u32, duration_ms: f64 },
    /// The guest's agent has frozen its file systems for the save.
    SaveFrozen {
        folder: String,
        file_systems: u64,
        /// How long the agent took.
        duration_ms: f64,
    },
    /// The guest's file systems were thawed after a save.
    Thawed {
        /// The agent's count of thawed file systems; 0 if they were thawed already.
        file_systems: u64,
        /// How long they were frozen, if this keeper knows.
        frozen_ms: Option<f64>,
    },
    /// Progress of a save, from time to time.
    SaveProgress { folder: String, percent: f64, mib_per_s: f64, eta_s: Option<f64> },
    /// A save is complete, and its folder can be restored.
    Saved {
        folder: String,
        /// Memory pages, without zero pages.
        pages: u64,
        /// Size of the memory file.
        bytes: u64,
        /// How long the guest was paused. If it is then stopped: until everything was saved.
        pause_ms: f64,
        /// Duration from the request until everything was on disk.
        #[serde(default)]
        duration_ms: f64,
        /// Number of passes over pages written during the copy.
        #[serde(default)]
        rounds: u32,
        /// Whether the passes converged: the guest wrote less than could be copied.
        #[serde(default)]
        settled: bool,
        /// Pages copied while the guest was paused.
        #[serde(default)]
        pages_held: u64,
        /// How many of `pages` are stored only on the snapshot's disks.
        #[serde(default)]
        pages_on_disks: u64,
    },
    /// A save failed. There is no folder, and the guest continues.
    SaveFailed { folder: String, why: String },
    /// The moment that a copy of a disk shows is taken, and the guest goes on.
    DiskCopyTaken {
        disk: String,
        file: String,
        /// Whether the copy shares its blocks with the image. If not, it is written from now on.
        shared: bool,
        /// How long the disk's requests waited.
        held_ms: f64,
        /// Number of file systems that the guest's agent had frozen.
        file_systems: Option<u64>,
        /// Why the guest's file systems were not frozen. The copy is then as after a power cut.
        not_frozen: Option<String>,
    },
    /// Progress of a disk's copy, from time to time.
    DiskCopyProgress { disk: String, file: String, percent: f64, mib_per_s: f64, eta_s: Option<f64> },
    /// A disk's copy is complete.
    DiskCopied {
        disk: String,
        file: String,
        /// Format of the copy: the image's.
        format: String,
        /// Length of the file.
        bytes: u64,
        /// The image that the copy lies over, and needs.
        backing: Option<String>,
        /// Duration from the request until everything was on disk.
        duration_ms: f64,
    },
    /// A disk's copy failed. There is no file.
    DiskCopyFailed { disk: String, file: String, why: String },
    /// A restore has started.
    RestoreStarted { snapshot: String, mode: String },
    /// Progress of what is loaded before the guest runs, from time to time.
    RestoreProgress { percent: f64, mib_per_s: f64, eta_s: Option<f64> },
    /// The restored guest runs.
    Restored {
        pages: u64,
        pages_prefetched: u64,
        /// Duration since the keeper began.
        duration_ms: f64,
    },
    /// A part of the memory or of a disk cannot be loaded; accesses to it wait.
    RestoreWaits { why: String },
    /// All memory is loaded.
    RestoreComplete { pages: u64, pages_prefetched: u64, pages_lazy: u64, duration_ms: f64 },
    /// A disk was completely fetched from its object store.
    DiskComplete {
        disk: String,
        bytes: u64,
        /// Duration since the keeper began.
        duration_ms: f64,
    },
    /// The pages that the guest used first were added to the snapshot's working set.
    WorkingSetTraced { pages: u64 },
    /// A phase of a recovery or rejuvenation has ended.
    Phase { phase: String, duration_ms: f64 },
    /// A dead incarnation's memory was kept as ember.
    EmberKept { pages: u64, bytes: u64 },
    /// The ember's unusable memory was released to the host.
    EmberSettled { released_bytes: u64, remaining_pages: u64 },
    /// What the dead guest had in its file cache was read from its memory, for the next guest. `pages` counts those whose
    /// disk blocks are known.
    CacheMapRead { pages: u64, files: u64, bytes: u64, duration_ms: f64 },
    /// What the dead guest had in its file cache is not known.
    CacheMapMissing { why: String },
    /// Ember pages were dropped to stay within the budget.
    EmberTrimmed { pages: u64, bytes: u64 },
    /// Memory that the machine's guests hold, and what they have read from their disks, for `hearth report`. Recorded when a guest
    /// starts, and then at growing intervals.
    MemoryHeld {
        /// The incarnation that `resident_bytes` belongs to.
        living: u32,
        resident_bytes: u64,
        /// Memory of dead incarnations, with the buffer of a dump.
        dead_bytes: u64,
        /// Limit for both together at this moment.
        limit_bytes: u64,
        /// Bytes that guests have read from memory since the keeper started.
        read_warm_bytes: u64,
        /// Bytes that guests have read from the images since the keeper started.
        read_image_bytes: u64,
    },
    /// Nothing is left of the ember.
    EmberEmpty { pages_served: u64, pages_refused: u64 },
    /// The guest has finished its boot. The next boot is expected to read the same blocks.
    Ready {
        why: String,
        /// Blocks that the boot read.
        blocks: u64,
        /// How many of these are held for the next boot.
        held_blocks: u64,
        /// Share of its reads that came from memory.
        hit_pct: Option<f64>,
    },
    /// The boot set's limit was lowered; `left_out` blocks no longer fit.
    BootSetReduced { left_out: u64 },
    /// The saved boot set was loaded.
    BootSetLoaded { blocks: u64 },
    /// The boot set was saved for the machine's next start.
    BootSetSaved { blocks: u64 },
    /// An NVRAM device was opened.
    NvramOpened {
        nvram: String,
        /// Source of its content: `memory`, `mirror`, or `nothing` (all zeroes).
        from: String,
    },
    /// The boot set was dropped.
    BootSetDropped { why: String },
    /// The file system of a disk's image is full, or a quota is reached. The guest's requests wait for space.
    DiskFull {
        disk: String,
        /// Folder that needs space.
        folder: String,
        why: String,
    },
    /// A disk has space again, and its waiting requests are done.
    DiskSpaceAgain { disk: String, waited_ms: f64 },
    /// Blocks of a disk held in memory were dropped, because its image may have changed.
    DiskForgotten { disk: String, why: String, blocks: u64 },
    /// A disk has a new size.
    DiskResized { disk: String, bytes: u64 },
    /// The machine's files use more host memory than the budget allows.
    BudgetWarning { used_bytes: u64, budget_bytes: u64 },
    /// The guest waits for memory, and none has become free for a while. Check whether the dump's disk is full.
    GuestWaits { threads: u64 },
    /// An error; the message describes it.
    Error { message: String },
    /// Events are missing: the reader was too slow, or asked for events that are no longer kept.
    Gap { missed: u64 },
    /// An event written by another version of Hearth, unknown to this one.
    Unknown {
        /// Its kind.
        what: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_flat_object() {
        let record = EventRecord {
            sequence: 7,
            time: "2026-03-01T12:00:00.123Z".into(),
            machine: "web".into(),
            incarnation: 2,
            event: EventKind::IncarnationEnded { cause: EndCause::Panic },
        };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(
            text,
            r#"{"sequence":7,"time":"2026-03-01T12:00:00.123Z","machine":"web","incarnation":2,"kind":"incarnation_ended","cause":"panic"}"#
        );
        assert_eq!(serde_json::from_str::<EventRecord>(&text).unwrap(), record);
    }

    #[test]
    fn unknown_events_are_read_as_unknown() {
        let check = |event: &str, expect: EventKind| {
            let text = format!(
                r#"{{"sequence":7,"time":"2026-03-01T12:00:00.123Z","machine":"web","incarnation":2,"future":[1],{event}}}"#
            );
            let record: EventRecord = serde_json::from_str(&text).unwrap();
            assert_eq!((record.sequence, record.incarnation, &record.event), (7, 2, &expect), "{event}");
            let again = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<EventRecord>(&again).unwrap(), record, "{again}");
        };
        let unknown = |what: &str| EventKind::Unknown { what: what.into() };
        check(r#""kind":"gap","missed":3,"since":{"a":1}"#, EventKind::Gap { missed: 3 });
        check(r#""kind":"guest_panicked""#, EventKind::GuestPanicked);
        check(r#""kind":"guest_teleported","to":"mars""#, unknown("guest_teleported"));
        check(r#""kind":"incarnation_ended","cause":"meteor""#, unknown("incarnation_ended"));
        check(r#""kind":"rejuvenated","generation":2"#, unknown("rejuvenated"));
        check(r#""sort":"other""#, unknown(""));
        assert!(serde_json::from_str::<EventRecord>(r#"{"kind":"guest_panicked"}"#).is_err());
    }
}
