//! Generation: one QEMU process, and how the keeper starts it, takes it over and talks to it.
//!
//! launch: listen for the userfaultfd -> spawn -> take the userfaultfd -> QMP -> watch -> run
//! launch as a successor: the same, and it waits for the guest that another QEMU has
//! adopt (a dead keeper's QEMU): find the process -> QMP -> watch

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use hearth_api::{QemuStatus, UserfaultStatus};
use hearth_disk::server::{DiskServer, Expected, Peer, ServerError};
use hearth_memory::faults::{HandoverError, HandoverListener, Userfault};
use hearth_qemu::valve::Valves;
use hearth_qemu::{BinaryError, Endpoint, Footprint, Launch, Process, ProcessError, ProcessId, Qmp, QmpError, preload};
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::{FootprintNote, QemuIdentity};

use super::wires::{WireError, Wires};
use super::{Context, launch};
use crate::console::Place;
use crate::event::Event;
use crate::folders::{Folders, own_user};

/// QEMU's start takes 50 to 700 ms on a busy host; a minute means it hangs.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// A guest that runs can wait for its next QEMU, but its keeper does nothing else meanwhile.
const SUCCESSOR_PATIENCE: Duration = Duration::from_secs(15);
/// How long to wait for the userfaultfd. QEMU hands it over before its `main` runs.
const USERFAULT_PATIENCE: Duration = Duration::from_secs(10);

/// Purpose of a QEMU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Boots a guest, which waits for `run`.
    First,
    /// Takes the guest over from another QEMU.
    Successor,
    /// Loads a saved guest, which waits for `run`.
    Restored,
}

/// Devices that a guest has from its boot on, or does without for as long as it lives: whoever takes it has the same.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    /// The VM generation ID. None: QEMU has no such device.
    pub vmgenid: Option<String>,
    /// Whether there is a channel to a guest agent.
    pub guest_agent: bool,
}

/// What QEMU is told by a thread of its own.
type Word = Box<dyn FnOnce(&Qmp) + Send>;

/// A living QEMU. If this keeper started it, dropping this ends QEMU, unless `settle` was called.
pub struct Generation {
    pub number: u32,
    pub process: Process,
    pub qmp: Arc<Qmp>,
    identity: QemuIdentity,
    /// Kept open, because page faults are handled through it.
    userfault: Result<Userfault, String>,
    /// The host's ends of its networks; or why a successor cannot get them.
    wires: Result<Wires, String>,
    /// To the thread that tells it what nobody waits for; none before the first word.
    words: Option<Sender<Word>>,
}

#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("cannot claim a user for QEMU (`qemu_user`)")]
    User(#[source] std::io::Error),
    #[error("cannot install the preload library")]
    Preload(#[source] std::io::Error),
    #[error(transparent)]
    Handover(#[from] HandoverError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("QEMU does not respond; its last message: {}", .last_words.as_deref().unwrap_or("(none)"))]
    Silent { last_words: Option<String>, source: QmpError },
    #[error(transparent)]
    Disk(#[from] ServerError),
    #[error("QEMU cannot run its guest")]
    Run(#[source] QmpError),
    #[error("cannot start the thread that watches QEMU")]
    Watch(#[source] std::io::Error),
}

impl Generation {
    /// Starts QEMU with this incarnation's RAM. The guest does nothing until `run`: before QMP is connected a reset or a panic
    /// would be seen only as QEMU's end, or not at all.
    pub fn launch(
        context: &Context,
        disks: &[DiskServer],
        incarnation: &Incarnation,
        number: u32,
        devices: Devices,
    ) -> Result<Self, LaunchError> {
        let wires = Wires::lay(&context.config, &context.folders, number)?;
        Door { disks, living: None }
            .let_in(|door| Self::start(context, door, incarnation, number, wires, devices, Role::First))
    }

    /// Starts a QEMU that waits for this incarnation's guest, beside the one that has it.
    pub fn launch_successor(
        context: &Context,
        disks: &[DiskServer],
        incarnation: &Incarnation,
        number: u32,
        old: &Self,
        wires: &Wires,
    ) -> Result<Self, LaunchError> {
        let wires = wires.share(&context.folders, number)?;
        let (living, devices) = (Some(old.peer()), old.devices());
        Door { disks, living }
            .let_in(|door| Self::start(context, door, incarnation, number, wires, devices, Role::Successor))
    }

    /// Starts a QEMU that waits for a guest that was saved, with these devices. Its memory is not touched before that.
    pub fn launch_restored(
        context: &Context,
        disks: &[DiskServer],
        incarnation: &Incarnation,
        number: u32,
        devices: Devices,
    ) -> Result<Self, LaunchError> {
        let wires = Wires::lay(&context.config, &context.folders, number)?;
        Door { disks, living: None }
            .let_in(|door| Self::start(context, door, incarnation, number, wires, devices, Role::Restored))
    }

    fn start(
        context: &Context,
        door: &Door<'_>,
        incarnation: &Incarnation,
        number: u32,
        wires: Wires,
        devices: Devices,
        role: Role,
    ) -> Result<Self, LaunchError> {
        let folders = &context.folders;
        let library = preload::install(&folders.runtime).map_err(LaunchError::Preload)?;
        let listener = HandoverListener::bind(&folders.userfault_socket(number))?;
        let successor = role == Role::Successor;
        let launch = Launch {
            hold_still: !successor,
            incoming: successor || role == Role::Restored,
            agent_socket: devices.guest_agent.then(|| folders.agent_socket(number)),
            vmgenid: devices.vmgenid.clone(),
            inherited: context.qemu.locks.numbers(),
            run_as: own_user::run_as(context.config.qemu_user.as_deref(), &folders.runtime)
                .map_err(LaunchError::User)?,
            ..launch::launch(context.into(), incarnation, number, &library, &wires, successor)
        };
        let binary = context.binary()?;
        let process = Process::spawn(&binary, &launch, &folders.qemu_log(number))?;
        door.expect(peer(process.id()))?;
        let userfault = listener.accept(process.id().pid, USERFAULT_PATIENCE).map_err(|error| crate::chain(&error));
        let id = process.id();
        let identity = QemuIdentity {
            pid: id.pid,
            start_ticks: id.start_ticks,
            generation: number,
            version: binary.version().to_string(),
            accelerator: context.qemu.accelerator.accelerator.name().to_owned(),
            accelerator_why: context.qemu.accelerator.why.clone(),
            userfault_fd: userfault.as_ref().ok().map(|userfault| userfault.fd_in_qemu),
            helper_fd: userfault.as_ref().ok().and_then(|userfault| Some(userfault.helper.as_ref()?.fd_in_qemu)),
            deaf: false,
            at_start: None,
            vmgenid: devices.vmgenid,
            guest_agent: devices.guest_agent,
        };
        let patience = if successor { SUCCESSOR_PATIENCE } else { START_PATIENCE };
        let mut generation =
            Self::hold(folders, &context.outside.tell, process, identity, userfault, Ok(wires), patience)?;
        generation.identity.at_start = generation.footprint();
        Ok(generation)
    }

    /// The process of a QEMU that a dead keeper left; none if it has ended.
    pub fn find(folders: &Folders, identity: &QemuIdentity) -> Option<Process> {
        let id = ProcessId { pid: identity.pid, start_ticks: identity.start_ticks };
        Process::adopt(id, &folders.qemu_log(identity.generation)).ok()
    }

    /// Takes over a QEMU that another keeper started.
    pub fn adopt(
        context: &Context,
        process: Process,
        identity: QemuIdentity,
        userfault: Result<Userfault, String>,
    ) -> Result<Self, LaunchError> {
        let wires = Wires::find(&context.config, &context.folders, identity.generation, identity.pid);
        Self::hold(&context.folders, &context.outside.tell, process, identity, userfault, wires, START_PATIENCE)
    }

    fn hold(
        folders: &Folders,
        tell: &Sender<Event>,
        process: Process,
        identity: QemuIdentity,
        userfault: Result<Userfault, String>,
        wires: Result<Wires, String>,
        patience: Duration,
    ) -> Result<Self, LaunchError> {
        let number = identity.generation;
        let told = tell.clone();
        let qmp = Qmp::connect(&folders.qmp_socket(number), patience, &process, move |event| {
            // Events that the loop does not need must not fill its queue.
            if event.is_of_the_guest() {
                // Fails only when the machine's loop has ended.
                let _ = told.send(Event::Qmp { generation: number, event });
            }
        });
        let qmp = match qmp {
            Ok(qmp) => qmp,
            Err(source) => {
                process.kill();
                // Collects the ended process. If no thread can be created, the keeper's end does.
                let _ = process.watch(|_| {});
                return Err(LaunchError::Silent { last_words: process.last_words(), source });
            }
        };
        // A QEMU that answers has opened its log.
        if let Some(Err(error)) = process.transcript().map(|transcript| transcript.fix_size()) {
            tracing::warn!(%error, "cannot limit the size of the console's transcript");
        }
        let told = tell.clone();
        process
            .watch(move |how| {
                // As above.
                let _ = told.send(Event::QemuEnded { generation: number, how });
            })
            .map_err(LaunchError::Watch)?;
        Ok(Self { number, process, qmp: Arc::new(qmp), identity, userfault, wires, words: None })
    }

    /// QEMU outlives this keeper from now on.
    pub fn settle(&mut self) {
        self.process.let_live();
    }

    /// Leaves it to the next keeper, with its networks. It is the machine's already.
    pub fn leave(self) {
        if let Ok(wires) = self.wires {
            wires.leave();
        }
    }

    /// Identity of the process, for its disks.
    pub fn peer(&self) -> Peer {
        peer(self.process.id())
    }

    /// Has a thread tell QEMU something, after all that it was given before. Nobody waits: QEMU may hang.
    pub fn tell(&mut self, word: impl FnOnce(&Qmp) + Send + 'static) -> io::Result<()> {
        let words = match &mut self.words {
            Some(words) => words,
            none => {
                let (words, heard) = channel::<Word>();
                let qmp = self.qmp.clone();
                let tell = move || heard.iter().for_each(|word| word(&qmp));
                std::thread::Builder::new().name(format!("tell-{}", self.identity.pid)).spawn(tell)?;
                none.insert(words)
            }
        };
        // The thread ends only when this sender does.
        let _ = words.send(Box::new(word));
        Ok(())
    }

    /// Lets the paused guest run.
    pub fn run(&self) -> Result<(), LaunchError> {
        self.qmp.resume().map_err(LaunchError::Run)
    }

    pub fn userfault(&self) -> Result<&Userfault, &str> {
        self.userfault.as_ref().map_err(String::as_str)
    }

    /// The host's ends of its networks, for a successor; or why a successor cannot get them.
    pub fn wires(&self) -> Result<&Wires, &str> {
        match &self.wires {
            Ok(wires) if wires.valves().is_none_or(Valves::are_worked) => Ok(wires),
            Ok(_) => Err("this QEMU did not load the preload library"),
            Err(why) => Err(why),
        }
    }

    pub fn valves(&self) -> Option<&Valves> {
        self.wires.as_ref().ok()?.valves()
    }

    /// Takes the passt processes of the QEMU that was replaced.
    pub fn inherit(&mut self, old: &mut Self) {
        if let (Ok(wires), Ok(old)) = (&mut self.wires, &mut old.wires) {
            wires.inherit(old);
        }
    }

    pub fn identity(&self) -> QemuIdentity {
        self.identity.clone()
    }

    fn devices(&self) -> Devices {
        Devices { vmgenid: self.identity.vmgenid.clone(), guest_agent: self.identity.guest_agent }
    }

    /// Sockets and transcript of the guest's console.
    pub fn console(&self, folders: &Folders) -> Place {
        let qemu = Endpoint { socket: folders.serial_socket(self.number), qemu: Some(self.process.id()) };
        Place { qemu, transcript: self.process.transcript().cloned() }
    }

    /// The socket of the guest's agent.
    pub fn agent(&self, folders: &Folders) -> Endpoint {
        Endpoint { socket: folders.agent_socket(self.number), qemu: Some(self.process.id()) }
    }

    /// Notes that a keeper that takes this QEMU over must wake its disks.
    pub fn set_deaf(&mut self) {
        self.identity.deaf = true;
    }

    /// Memory and descriptors of the process. None if they cannot be read.
    pub fn footprint(&self) -> Option<FootprintNote> {
        match self.process.footprint() {
            Ok(Footprint { own_bytes, descriptors }) => Some(FootprintNote { own_bytes, descriptors }),
            Err(error) => {
                tracing::debug!(pid = self.identity.pid, %error, "cannot read QEMU's memory and descriptor counts");
                None
            }
        }
    }

    pub fn userfault_status(&self) -> UserfaultStatus {
        match &self.userfault {
            Ok(_) => UserfaultStatus::HandedOver,
            Err(why) => UserfaultStatus::Absent { why: why.clone() },
        }
    }

    pub fn status(&self) -> QemuStatus {
        QemuStatus {
            pid: self.identity.pid,
            version: self.identity.version.clone(),
            generation: self.number,
            accelerator: self.identity.accelerator.clone(),
            accelerator_why: self.identity.accelerator_why.clone(),
            userfault: self.userfault_status(),
        }
    }
}

/// The disks' sockets while a QEMU is started: what connects meanwhile waits until it is known which process that is.
struct Door<'a> {
    disks: &'a [DiskServer],
    /// The QEMU that has the guest, beside which another one is started.
    living: Option<Peer>,
}

impl Door<'_> {
    fn let_in(&self, start: impl FnOnce(&Self) -> Result<Generation, LaunchError>) -> Result<Generation, LaunchError> {
        self.tell(&Expected::and_another(self.living.into_iter().collect::<Vec<_>>()))?;
        start(self).inspect_err(|_| {
            // One that did not come to be is nobody's peer; its pid may be given to another process.
            for disk in self.disks {
                disk.tell_expected(Expected::these(self.living.into_iter().collect::<Vec<_>>()));
            }
        })
    }

    fn expect(&self, new: Peer) -> Result<(), ServerError> {
        self.tell(&Expected::these(self.living.into_iter().chain([new]).collect::<Vec<_>>()))
    }

    fn tell(&self, expected: &Expected) -> Result<(), ServerError> {
        self.disks.iter().try_for_each(|disk| disk.expect(expected.clone()))
    }
}

fn peer(id: ProcessId) -> Peer {
    Peer { pid: id.pid, start_ticks: id.start_ticks }
}
