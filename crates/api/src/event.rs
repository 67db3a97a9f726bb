//! What happened to a machine, as operators and programs read it: `hearth events`, `GET /v1/events`.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{EndCause, MachineState, UserfaultStatus};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventRecord {
    /// Counts from 1 and goes on over restarts of the keeper.
    pub sequence: u64,
    /// RFC 3339, UTC, milliseconds.
    pub time: String,
    pub machine: String,
    /// The incarnation that lived, or was being made, at that moment.
    pub incarnation: u32,
    #[serde(flatten, deserialize_with = "known_or_not")]
    pub event: EventKind,
}

/// The log of a machine goes on under whichever version keeps it: what another one wrote must not end the reading.
fn known_or_not<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EventKind, D::Error> {
    let fields = Map::<String, Value>::deserialize(deserializer)?;
    let what = fields.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok(serde_json::from_value(Value::Object(fields)).unwrap_or(EventKind::Unknown { what }))
}

/// All kinds of events. `kind` tells them apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EventKind {
    /// A keeper started.
    Started {
        pid: u32,
        version: String,
    },
    /// A keeper found the machine's QEMU alive and goes on with it.
    KeeperTookOver {
        qemu_pid: u32,
        generation: u32,
    },
    /// Another program is to go on as the keeper.
    KeeperHandsOver {
        program: String,
        version: String,
    },
    /// It did not: this one, which was the keeper before, goes on.
    KeeperUpgradeFailed {
        why: String,
    },
    StateChanged {
        from: MachineState,
        to: MachineState,
    },
    /// The operator asked for something.
    Request {
        verb: String,
    },
    /// The guest did not shut down when it was asked to, or its QEMU does not answer: it is ended.
    PowerCut {
        why: String,
    },
    /// The next guest cannot be started yet, and is tried again.
    StartWaits {
        why: String,
        /// RFC 3339, UTC.
        next_start: String,
    },
    QemuStarted {
        pid: u32,
        generation: u32,
        version: String,
        accelerator: String,
        accelerator_why: String,
    },
    /// Whether QEMU handed over its userfaultfd.
    Userfault {
        generation: u32,
        userfault: UserfaultStatus,
    },
    /// `how` is the exit code or signal in words.
    QemuExited {
        generation: u32,
        how: String,
    },
    /// The guest runs.
    IncarnationStarted {
        generation: u32,
        warm: bool,
    },
    IncarnationEnded {
        cause: EndCause,
    },
    GuestPanicked,
    /// The guest no longer fed its watchdog; `action` is what QEMU did.
    WatchdogExpired {
        action: String,
    },
    /// The machine has crashed too often: it waits before it starts its next guest.
    CrashLoop {
        delay_s: u64,
        /// RFC 3339, UTC.
        next_start: String,
    },
    /// Registers and notes of a guest were taken for its dump.
    RegistersTaken {
        bytes: u64,
        duration_ms: f64,
    },
    /// A dump is on its way. Pages in all and those that belong in it.
    DumpStarted {
        file: String,
        level: u8,
        ram_pages: u64,
        pages: u64,
    },
    /// The guest's own last words.
    CrashReason {
        message: String,
    },
    /// Something that a reader of the dump must know.
    DumpWarning {
        message: String,
    },
    /// How far a dump is, now and then.
    DumpProgress {
        file: String,
        percent: f64,
        mib_per_s: f64,
        eta_s: Option<f64>,
    },
    /// A dump cannot go on and waits for `hearth dump --resume` or `--discard`.
    DumpWaits {
        file: String,
        why: String,
    },
    DumpComplete {
        file: String,
        pages: u64,
        bytes: u64,
        duration_ms: f64,
    },
    /// A dump ended before its end; the file can be read as far as it goes.
    DumpIncomplete {
        file: String,
        why: String,
    },
    /// A crash is not dumped.
    DumpSkipped {
        why: String,
    },
    /// By the machine's own policy QEMU is to be replaced now.
    RejuvenationDue {
        why: String,
    },
    /// The guest goes on with another QEMU.
    Rejuvenated {
        generation: u32,
        from_version: String,
        version: String,
        /// How long the guest stood still.
        pause_ms: f64,
    },
    /// It did not get another QEMU. Unless `guest_lost` it goes on with the one it has.
    RejuvenationFailed {
        phase: String,
        why: String,
        guest_lost: bool,
    },
    /// The guest stands still in memory, without QEMU: the keeper ends, and the next one goes on with it.
    Parked {
        /// From its last instruction.
        duration_ms: f64,
        state_bytes: u64,
    },
    /// It was not parked, and goes on.
    ParkFailed {
        phase: String,
        why: String,
    },
    /// A guest that was parked goes on.
    Unparked {
        generation: u32,
        version: String,
        /// How long it stood still.
        stood_ms: f64,
        /// Of that, since its keeper started.
        duration_ms: f64,
    },
    /// What was parked cannot go on; the machine boots instead.
    ParkedLost {
        why: String,
    },
    /// The guest is being saved while it runs; unless `held_why` says why it stands still for that.
    SaveStarted {
        folder: String,
        #[serde(default)]
        held_why: Option<String>,
    },
    /// Which pages the guest uses was seen over so many rounds; now it is copied.
    SaveScanned {
        folder: String,
        pages: u64,
        rounds: u32,
        duration_ms: f64,
    },
    /// The guest's agent has frozen its file systems, for the moment that is saved.
    SaveFrozen {
        folder: String,
        file_systems: u64,
        /// That it took the agent.
        duration_ms: f64,
    },
    /// File systems that were frozen for a save go on.
    Thawed {
        /// As the guest's agent counts them: none, if they went on already.
        file_systems: u64,
        /// How long they stood still, as far as this keeper has seen.
        frozen_ms: Option<f64>,
    },
    /// How far a save is, now and then.
    SaveProgress {
        folder: String,
        percent: f64,
        mib_per_s: f64,
        eta_s: Option<f64>,
    },
    /// The folder can be restored.
    Saved {
        folder: String,
        /// Of memory, without those of zeroes.
        pages: u64,
        /// Of the file of memory.
        bytes: u64,
        /// How long the guest stood still; if it is stopped, until all was saved.
        pause_ms: f64,
        /// From the order until all was on the disk.
        #[serde(default)]
        duration_ms: f64,
        /// Passes over what was written while it was copied.
        #[serde(default)]
        rounds: u32,
        /// They came to an end: the guest wrote less than could be copied.
        #[serde(default)]
        settled: bool,
        /// Copied while the guest stood still.
        #[serde(default)]
        pages_held: u64,
        /// Of `pages`, stored as blocks of the snapshot's disks.
        #[serde(default)]
        pages_on_disks: u64,
    },
    /// There is no such folder, and the guest goes on.
    SaveFailed {
        folder: String,
        why: String,
    },
    /// A guest comes out of a snapshot.
    RestoreStarted {
        snapshot: String,
        mode: String,
    },
    /// How far it is with what is brought before the guest runs, now and then, if that takes long.
    RestoreProgress {
        percent: f64,
        mib_per_s: f64,
        eta_s: Option<f64>,
    },
    /// It runs.
    Restored {
        pages: u64,
        pages_prefetched: u64,
        /// Since the keeper began with it.
        duration_ms: f64,
    },
    /// A part of the memory or of a disk cannot be brought; whoever touches it waits until it can.
    RestoreWaits {
        why: String,
    },
    /// All memory is there.
    RestoreComplete {
        pages: u64,
        pages_prefetched: u64,
        pages_lazy: u64,
        duration_ms: f64,
    },
    /// All of a disk has come out of its object store.
    DiskComplete {
        disk: String,
        bytes: u64,
        /// Since the keeper began with it.
        duration_ms: f64,
    },
    /// Which pages the guest used first was noted in the snapshot, beside what earlier traces had seen.
    WorkingSetTraced {
        pages: u64,
    },
    /// A phase of a recovery or of a rejuvenation is over.
    Phase {
        phase: String,
        duration_ms: f64,
    },
    /// A dead incarnation's memory was kept.
    EmberKept {
        pages: u64,
        bytes: u64,
    },
    /// What could not be used of it went back to the host.
    EmberSettled {
        released_bytes: u64,
        remaining_pages: u64,
    },
    /// Pages were given up for the budget.
    EmberTrimmed {
        pages: u64,
        bytes: u64,
    },
    /// Nothing is left of the ember.
    EmberEmpty {
        pages_served: u64,
        pages_refused: u64,
    },
    /// The guest has done what it boots for; what it read until then is what the next boot will read.
    Ready {
        why: String,
        /// Blocks that it read.
        blocks: u64,
        /// Of these, held for the next boot.
        held_blocks: u64,
        /// Of its reads, answered from memory.
        hit_pct: Option<f64>,
    },
    /// The limit of what is held for the next boot was lowered: so many blocks have no room any more.
    BootSetReduced {
        left_out: u64,
    },
    /// What was held when the machine was stopped is held again.
    BootSetLoaded {
        blocks: u64,
    },
    /// What is held is kept while the machine is stopped.
    BootSetSaved {
        blocks: u64,
    },
    /// A disk that is host memory is there.
    NvramOpened {
        nvram: String,
        /// `memory`, `mirror`, or `nothing`: then it is all zeroes.
        from: String,
    },
    /// Nothing is held for the next boot any more.
    BootSetDropped {
        why: String,
    },
    /// The file system of a disk's image is full, or a quota is used up: the guest's requests wait for space.
    DiskFull {
        disk: String,
        /// Where space is needed.
        folder: String,
        why: String,
    },
    /// A disk has space again, and what waited for it is done.
    DiskSpaceAgain {
        disk: String,
        waited_ms: f64,
    },
    /// What memory held of a disk is not served any more: nobody guarded its image for a while.
    DiskForgotten {
        disk: String,
        why: String,
        blocks: u64,
    },
    DiskResized {
        disk: String,
        bytes: u64,
    },
    /// The machine's files hold more host memory than they may.
    BudgetWarning {
        used_bytes: u64,
        budget_bytes: u64,
    },
    /// The guest stands still: it waits for memory, and none has come free for a while. Is the dump's disk full?
    GuestWaits {
        threads: u64,
    },
    /// Something went wrong; the message names it.
    Error {
        message: String,
    },
    /// The reader was too slow, or asked for events that are no longer kept.
    Gap {
        missed: u64,
    },
    /// What another version of Hearth has written and this one does not understand.
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
    fn what_another_version_wrote_is_read_as_far_as_it_is_known() {
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
