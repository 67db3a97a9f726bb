//! Messages from the keeper's threads to the machine's loop: one type for each kind of thread.

use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_recovery::crash_recovery::Phase;

/// Message from the memory monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryMessage {
    /// The ember of the last reboot holds only pages that can be served.
    Settled { released_bytes: u64, began: Instant, took: Duration },
    /// What the dead guest had in its page cache was read, or why not.
    CacheMap { read: Result<CacheMapSize, String>, took: Duration },
    /// Bytes of the ember given up since the last such message.
    Trimmed { bytes: u64 },
    /// The ember is used up.
    EmberEmpty,
    /// A sample of the memory files; `living` is the number of the living incarnation.
    Held { living: u32, resident_bytes: u64, dead_bytes: u64, limit_bytes: u64 },
    /// The memory files exceed the budget: the ember is gone, or could not be trimmed in time.
    OverBudget { used_bytes: u64, limit_bytes: u64 },
}

/// Size of a cache map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheMapSize {
    pub pages: u64,
    pub files: u64,
    pub bytes: u64,
}

/// Message from a dump's thread.
#[derive(Clone, Debug)]
pub enum DumpMessage {
    /// For the event log.
    Event(EventKind),
    /// A phase has ended.
    Phase { phase: Phase, began: Instant, took: Duration },
    /// The dump has ended; its status tells whether it is complete.
    Over,
}

/// Message from the thread that grants memory page fault by page fault.
#[derive(Clone, Debug)]
pub enum AdmissionMessage {
    /// The guest stands still, and no memory comes free.
    Stalled { waiting: u64 },
    /// All memory is granted, for good.
    Open,
    /// All memory had to be granted although it may exceed the budget.
    Failed { why: String },
}

/// Message from the readiness probe.
#[derive(Debug, PartialEq, Eq)]
pub enum ReadinessMessage {
    /// The guest is ready.
    Ready { why: &'static str },
    /// The guest cannot be asked. Sent once for each kind of error.
    Unknown { why: String },
}

/// Message from the thread of a save.
#[derive(Clone, Debug)]
pub enum SaveMessage {
    /// For the event log.
    Event(EventKind),
    /// The files of the save are made, or cannot be. It has not begun.
    Prepared,
    /// An access scan is about to begin.
    Scanning,
    /// The access scan has ended.
    Scanned(EventKind),
    /// The guest's agent is about to freeze its file systems.
    Freezing,
    /// The agent has frozen them.
    Frozen(EventKind),
    /// Little is left to copy: the guest must be paused now.
    Settled,
    /// QEMU's thread is about to pause it.
    Stands(Instant),
    /// QEMU's thread has taken what is of that moment, or has not, for this reason.
    Held(Result<(), String>),
    /// All of the paused guest is copied: it may go on.
    Taken,
    /// The thread has ended; its result tells how.
    Over,
}

/// Message from the thread of a disk's copy.
#[derive(Clone, Debug)]
pub enum DiskCopyMessage {
    /// The guest's agent is about to freeze its file systems.
    Freezing,
    /// The agent has frozen them.
    Frozen { file_systems: u64 },
    /// The moment is taken: the guest goes on.
    Taken(EventKind),
    /// For the event log.
    Progress(EventKind),
    /// The thread has ended. None: the copy has not begun.
    Over(Option<EventKind>),
}

/// Message from the thread of a park. It has ended.
#[derive(Clone, Debug)]
pub enum ParkMessage {
    /// The guest is in its files, and its QEMU is being killed.
    Parked { duration: Duration, state_bytes: u64 },
    /// The guest goes on. `stuck`: it cannot, and its QEMU is being killed.
    NotParked { phase: &'static str, why: String, stuck: Option<String> },
}

/// Message from the thread that thaws the guest's file systems.
#[derive(Clone, Debug)]
pub enum ThawMessage {
    /// The agent has thawed them.
    Thawed { file_systems: u64 },
    /// The agent has not; the thread tries again.
    Failed { why: String },
    /// The thread has ended without success.
    GaveUp,
}

/// Message from the threads that bring a restored guest's memory.
#[derive(Clone, Debug)]
pub enum RestoreMessage {
    /// A page cannot be read now; the guest may wait for it.
    Waits { why: String },
    /// The trace of first touches is written.
    Traced { pages: u64 },
    /// The rehearsal is over: the clone is not needed any more.
    Rehearsed,
    /// No page is missing.
    Complete,
    /// The memory cannot be brought any more.
    Failed { message: String },
}

/// Message from the backfill of a disk that is still in its object store.
#[derive(Clone, Debug)]
pub enum BackfillMessage {
    /// A block cannot be fetched now; the guest may wait for it.
    Waits { why: String },
    /// No block of the disk is missing.
    Complete { disk: String, bytes: u64, duration_ms: f64 },
}

/// What a guest stood still for.
#[derive(Clone, Copy, Debug)]
pub enum HeldFor {
    Save,
    Dump,
}

impl HeldFor {
    pub fn name(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Dump => "dump",
        }
    }
}
