//! Everything that can happen to a machine, in one list. The machine's loop takes these one at a time; nothing acts from
//! inside a callback.

use std::sync::mpsc::Sender;

use hearth_api::{ApiError, RejuvenateRequest};
use hearth_qemu::QmpEvent;

use crate::control::{Answer, Command};
use crate::machine::{arrivals, dump, frozen, gate, ready, restore, save, warden};

/// One thing that happened. `generation` tells which QEMU it came from, so that late words of a dead one are ignored.
pub enum Event {
    /// The operator asks (CLI, API).
    Request { command: Command, answer: Sender<Result<Answer, ApiError>> },
    /// QEMU says.
    Qmp { generation: u32, event: QmpEvent },
    /// QEMU's process has ended, for whatever reason.
    /// `how`: exit code or signal, in words.
    QemuEnded { generation: u32, how: String },
    /// The thread that serves a disk has ended without having been asked to.
    DiskEnded { disk: String, why: String },
    /// A dump says.
    Dump { incarnation: u32, word: dump::Word },
    /// The warden says.
    Warden(warden::Word),
    /// The thread of page faults says.
    Gate(gate::GateWord),
    /// Who asks the guest whether it is ready (`remount.ready`) says.
    Ready { incarnation: u32, word: ready::Word },
    /// A disk says.
    Disk { disk: String, notice: hearth_disk::server::Notice },
    /// It is time to look whether the QEMU that was taken over speaks to its disks; `look` counts.
    Listen { generation: u32, look: u32 },
    /// A rejuvenation that was accepted for this incarnation's guest begins.
    Rejuvenate { incarnation: u32, request: RejuvenateRequest },
    /// A guest that was accepted to be parked is parked.
    Park,
    /// A save says, by its number.
    Save { number: u64, word: save::Word },
    /// The thread that has a guest's file systems thawed says. `generation` as above.
    Thaw { generation: u32, word: frozen::Word },
    /// A guest's way out of a snapshot says. `generation` as above.
    Restore { generation: u32, word: restore::Word },
    /// A disk that is on its way out of an object store says.
    Arrival(arrivals::Word),
    /// SIGTERM or SIGINT: stop the machine; the second one means at once.
    Terminate,
}
