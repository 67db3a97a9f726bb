//! Everything that can happen to a machine, in one list. The machine's loop takes these one at a time; nothing acts from
//! inside a callback.
//!
//! This room depends on nothing in `machine`: the threads that send messages and the loop that takes them both depend on it.

mod message;

use std::time::Instant;

use hearth_api::ApiError;
use hearth_qemu::QmpEvent;

use crate::control::{Command, Reply};
use crate::upgrade::Successor;
pub use message::{
    AdmissionMessage, BackfillMessage, CacheMapSize, DiskCopyMessage, DumpMessage, HeldFor, MemoryMessage, ParkMessage,
    ReadinessMessage, RestoreMessage, SaveMessage, ThawMessage,
};

/// One thing that happened. `generation` is the QEMU generation that it comes from: the loop ignores late messages of a QEMU
/// that has ended.
pub enum Event {
    /// A request of the operator (CLI, API).
    Request { command: Command, answer: Reply },
    /// QEMU reported an event over QMP.
    Qmp { generation: u32, event: QmpEvent },
    /// The job that was to start this QEMU has ended.
    Launched { generation: u32 },
    /// QEMU has opened the ports that lead into its guest, or has said why not.
    ForwardsOpen { generation: u32 },
    /// QEMU's process has ended. `how`: its exit code or signal, in words.
    QemuEnded { generation: u32, how: String },
    /// The thread that serves a disk has ended by itself.
    DiskEnded { disk: String, why: String },
    /// Message from the dump of this incarnation.
    Dump { incarnation: u32, message: DumpMessage },
    /// Message from the memory monitor.
    Memory(MemoryMessage),
    /// A disk asks what is to be tracked, and libvirt's QEMU waits for the answer.
    DiskAsks(hearth_disk::server::Question),
    /// Message from the thread that grants memory page fault by page fault.
    Admission(AdmissionMessage),
    /// Message from the readiness probe (`remount.ready`).
    Readiness { incarnation: u32, message: ReadinessMessage },
    /// Message from a disk server.
    Disk { disk: String, notice: hearth_disk::server::Notice },
    /// QEMU has paused its guest for a dump (`held`), or need not, and given its registers.
    ReadyToDump { generation: u32, held: Result<(), String>, registers: Result<Vec<u8>, String> },
    /// QEMU has given the registers of its crashed guest, or has not, for this reason. It may end now.
    Harvested { generation: u32, began: Instant, registers: Result<Vec<u8>, String> },
    /// A guest that stood still for a save or a dump has gone on. `why`: it has not, for this reason.
    WentOn { generation: u32, held_for: HeldFor, at: Instant, why: Option<String> },
    /// Message from the save with this number.
    Save { number: u64, message: SaveMessage },
    /// Message from the copy of a disk with this number.
    DiskCopy { number: u64, message: DiskCopyMessage },
    /// The disks are flushed, or not, for a park or a check whether the guest can be parked, which is answered here.
    Flushed { generation: u32, check: bool, flushed: Result<(), ApiError>, answer: Reply },
    /// The program that is to replace this keeper, or why it cannot. `incarnation` lived when it was asked. The request is answered
    /// by the loop.
    Successor { incarnation: u32, successor: Result<Box<Successor>, ApiError>, answer: Reply },
    /// Message from the thread of a park.
    Park { generation: u32, message: ParkMessage },
    /// Message from the thread that thaws the guest's file systems.
    Thaw { generation: u32, message: ThawMessage },
    /// Message from the restore of the guest's memory.
    Restore { generation: u32, message: RestoreMessage },
    /// Message from the backfill of a disk that is still in its object store.
    Backfill(BackfillMessage),
    /// SIGTERM or SIGINT: stop the machine; the second one stops it at once.
    Terminate,
}
