//! Generation: one QEMU process, and how the keeper starts it, takes it over and talks to it.
//!
//! plan (the loop) -> start (a launch job): listen for the userfaultfd -> spawn -> take the userfaultfd -> QMP -> watch
//! run (the loop): the guest boots; a successor and the QEMU of a restore wait for a guest that is given to them
//! adopt (a dead keeper's QEMU): find the process -> QMP -> watch

use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use hearth_api::{QemuStatus, UserfaultStatus};
use hearth_disk::server::{DiskServer, Expected, Heard, Peer, PeerControl, ServerError};
use hearth_memory::faults::{HandoverError, HandoverListener, Userfault};
use hearth_qemu::packet_gate::PacketGates;
use hearth_qemu::{
    AcceleratorChoice, Binary, BinaryError, Endpoint, Footprint, Launch, Process, ProcessError, ProcessId, Qmp,
    QmpError, preload,
};
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::{FootprintNote, QemuIdentity};

use super::launch_job::{GivenUp, LaunchControl};
use super::net_endpoints::{EndpointError, NetEndpoints};
use super::{Context, launch};
use crate::config::Config;
use crate::console::Place;
use crate::event::Event;
use crate::folders::{Folders, own_user};

/// QEMU's start takes 50 to 700 ms on a busy host; a minute means it hangs.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// A guest that runs can wait for its next QEMU, but whoever asked for it waits as well.
const SUCCESSOR_PATIENCE: Duration = Duration::from_secs(15);
/// How long to wait for the userfaultfd. QEMU hands it over before its `main` runs.
const USERFAULT_PATIENCE: Duration = Duration::from_secs(10);
/// How long a hop may pause the guest. It takes milliseconds; on a host that swaps it may take a second. A hop that
/// takes longer is given up, and the old QEMU continues.
pub const PAUSE_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for the end of a killed QEMU. It frees its own memory; guest RAM stays.
pub const END_PATIENCE: Duration = Duration::from_secs(10);

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

/// All that the start of a QEMU needs, so that another thread can do it. The disks let nobody in until it is known who comes.
pub struct Plan {
    config: Config,
    folders: Folders,
    accelerator: AcceleratorChoice,
    /// The program that was found; none if it is to be found again.
    binary: Option<Binary>,
    /// Locks of the images.
    inherited: Vec<RawFd>,
    peers: Vec<PeerControl>,
    /// Without its ledger, which is the next guest's when this one has ended.
    incarnation: Incarnation,
    number: u32,
    devices: Devices,
    role: Role,
    /// The QEMU that has the guest, and the endpoints that this one shares with it. None if it gets its own.
    beside: Option<(Peer, NetEndpoints)>,
    tell: Sender<Event>,
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

/// A living QEMU. If this keeper started it, dropping this ends QEMU, unless `keep_running` was called.
pub struct Generation {
    pub number: u32,
    pub process: Process,
    pub qmp: Arc<Qmp>,
    identity: QemuIdentity,
    /// Kept open, because page faults are handled through it.
    userfault: Result<Userfault, String>,
    /// The host's ends of its networks; or why a successor cannot get them.
    endpoints: Result<NetEndpoints, String>,
    /// To the thread that tells it what nobody waits for; none before the first word.
    words: Option<Sender<Word>>,
}

#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(transparent)]
    GivenUp(#[from] GivenUp),
    #[error("cannot start the thread that starts QEMU")]
    Thread(#[source] std::io::Error),
    #[error("cannot claim a user for QEMU (`qemu_user`)")]
    User(#[source] std::io::Error),
    #[error("cannot install the preload library")]
    Preload(#[source] std::io::Error),
    #[error(transparent)]
    Handover(#[from] HandoverError),
    #[error(transparent)]
    Network(#[from] EndpointError),
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("QEMU does not respond{stopped}; its last message: {}", .last_words.as_deref().unwrap_or("(none)"))]
    Silent { last_words: Option<String>, stopped: &'static str, source: QmpError },
    #[error(transparent)]
    Disk(#[from] ServerError),
    #[error("QEMU cannot run its guest")]
    Run(#[source] QmpError),
    #[error("cannot start the thread that watches QEMU")]
    Watch(#[source] std::io::Error),
}

impl Plan {
    /// To start QEMU with this incarnation's RAM. The guest does nothing until `run`: before QMP is connected a reset or a panic
    /// would be seen only as QEMU's end, or not at all.
    pub fn first(
        context: &Context,
        disks: &[DiskServer],
        incarnation: &Incarnation,
        number: u32,
        devices: Devices,
    ) -> Result<Self, LaunchError> {
        Self::of(context, disks, incarnation, number, devices, Role::First, None)
    }

    /// To start a QEMU that waits for a guest that was saved, with these devices. Its memory is not touched before that.
    pub fn restored(
        context: &Context,
        disks: &[DiskServer],
        incarnation: &Incarnation,
        number: u32,
        devices: Devices,
    ) -> Result<Self, LaunchError> {
        Self::of(context, disks, incarnation, number, devices, Role::Restored, None)
    }

    /// To start a QEMU that waits for this incarnation's guest, beside the one that has it.
    pub fn successor(
        context: &Context,
        disks: &[DiskServer],
        incarnation: &Incarnation,
        number: u32,
        old: &Generation,
        endpoints: &NetEndpoints,
    ) -> Result<Self, LaunchError> {
        let endpoints = endpoints.share(&context.folders, number)?;
        Self::of(context, disks, incarnation, number, old.devices(), Role::Successor, Some((old.peer(), endpoints)))
    }

    fn of(
        context: &Context,
        disks: &[DiskServer],
        incarnation: &Incarnation,
        number: u32,
        devices: Devices,
        role: Role,
        beside: Option<(Peer, NetEndpoints)>,
    ) -> Result<Self, LaunchError> {
        let living: Vec<Peer> = beside.iter().map(|(living, _)| *living).collect();
        let plan = Self {
            config: context.config.clone(),
            folders: context.folders.clone(),
            accelerator: context.qemu.accelerator.clone(),
            binary: context.qemu.binary.clone(),
            inherited: context.qemu.locks.numbers(),
            peers: disks.iter().map(DiskServer::peer_control).collect(),
            incarnation: Incarnation { ledger: None, ..incarnation.clone() },
            number,
            devices,
            role,
            beside,
            tell: context.outside.tell.clone(),
        };
        // What connects from here on waits until it is known which process that is.
        plan.expect_on_disks(&Expected::and_another(living))?.iter().try_for_each(Heard::wait)?;
        Ok(plan)
    }

    fn expect_on_disks(&self, expected: &Expected) -> Result<Vec<Heard>, ServerError> {
        self.peers.iter().map(|peer| peer.expect(expected.clone())).collect()
    }

    /// Starts it from the program that is configured, unless the job was given up.
    pub fn start(mut self, control: &LaunchControl) -> Result<Generation, LaunchError> {
        let binary = self.binary.take().map_or_else(|| Binary::find(self.config.qemu.program.as_deref()), Ok)?;
        self.start_from(&binary, control)
    }

    /// Starts it from this program, unless the job was given up.
    pub fn start_from(mut self, binary: &Binary, control: &LaunchControl) -> Result<Generation, LaunchError> {
        let mut begun = None;
        let process = control.spawn(|| {
            let (living, shared) = self.beside.take().unzip();
            let endpoints = shared.map_or_else(|| NetEndpoints::open(&self.config, &self.folders, self.number), Ok)?;
            let listener = HandoverListener::bind(&self.folders.userfault_socket(self.number))?;
            let launch = self.launch(&endpoints)?;
            let process = Process::spawn(binary, &launch, &self.folders.qemu_log(self.number))?;
            let peers: Vec<Peer> = living.into_iter().chain([peer(process.id())]).collect();
            let heard = self.expect_on_disks(&Expected::these(peers))?;
            begun = Some((endpoints, listener, heard));
            Ok::<_, LaunchError>(process)
        })?;
        let (endpoints, listener, heard) = begun.expect("a process was started with them");
        heard.iter().try_for_each(Heard::wait)?;
        let userfault = listener.accept(process.id().pid, USERFAULT_PATIENCE).map_err(|error| crate::chain(&error));
        let id = process.id();
        let identity = QemuIdentity {
            pid: id.pid,
            start_ticks: id.start_ticks,
            generation: self.number,
            version: binary.version().to_string(),
            accelerator: self.accelerator.accelerator.name().to_owned(),
            accelerator_why: self.accelerator.why,
            userfault_fd: userfault.as_ref().ok().map(|userfault| userfault.fd_in_qemu),
            helper_fd: userfault.as_ref().ok().and_then(|userfault| Some(userfault.helper.as_ref()?.fd_in_qemu)),
            stale: false,
            at_start: None,
            vmgenid: self.devices.vmgenid,
            guest_agent: self.devices.guest_agent,
        };
        let patience = if self.role == Role::Successor { SUCCESSOR_PATIENCE } else { START_PATIENCE };
        let mut generation =
            Generation::connect(&self.folders, &self.tell, process, identity, userfault, Ok(endpoints), patience)?;
        generation.identity.at_start = generation.footprint();
        Ok(generation)
    }

    fn launch(&self, endpoints: &NetEndpoints) -> Result<Launch, LaunchError> {
        let (config, folders, successor) = (&self.config, &self.folders, self.role == Role::Successor);
        let library = preload::install(&folders.runtime).map_err(LaunchError::Preload)?;
        let base = launch::Base { config, folders, accelerator: self.accelerator.accelerator };
        Ok(Launch {
            hold_still: !successor,
            incoming: successor || self.role == Role::Restored,
            agent_socket: self.devices.guest_agent.then(|| folders.agent_socket(self.number)),
            vmgenid: self.devices.vmgenid.clone(),
            inherited: self.inherited.clone(),
            run_as: own_user::run_as(config.qemu.user.as_deref(), &folders.runtime).map_err(LaunchError::User)?,
            ..launch::launch(base, &self.incarnation, self.number, &library, endpoints, successor)
        })
    }
}

impl Generation {
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
        let endpoints = NetEndpoints::find(&context.config, &context.folders, identity.generation, identity.pid);
        Self::connect(&context.folders, &context.outside.tell, process, identity, userfault, endpoints, START_PATIENCE)
    }

    fn connect(
        folders: &Folders,
        tell: &Sender<Event>,
        process: Process,
        identity: QemuIdentity,
        userfault: Result<Userfault, String>,
        endpoints: Result<NetEndpoints, String>,
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
                let stopped = stopped_note(identity.pid);
                process.kill();
                // Collects the ended process. If no thread can be created, the keeper's end does.
                let _ = process.watch(|_| {});
                return Err(LaunchError::Silent { last_words: process.last_words(), stopped, source });
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
        Ok(Self { number, process, qmp: Arc::new(qmp), identity, userfault, endpoints, words: None })
    }

    /// QEMU outlives this keeper from now on.
    pub fn keep_running(&mut self) {
        self.process.let_live();
    }

    /// Leaves it to the next keeper, with its networks. It is the machine's already.
    pub fn leave(self) {
        if let Ok(endpoints) = self.endpoints {
            endpoints.leave();
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
    pub fn endpoints(&self) -> Result<&NetEndpoints, &str> {
        match &self.endpoints {
            Ok(endpoints) if endpoints.gates().is_none_or(PacketGates::are_worked) => Ok(endpoints),
            Ok(_) => Err("this QEMU did not load the preload library"),
            Err(why) => Err(why),
        }
    }

    pub fn gates(&self) -> Option<&PacketGates> {
        self.endpoints.as_ref().ok()?.gates()
    }

    /// Takes the passt processes of the QEMU that was replaced.
    pub fn inherit(&mut self, old: &mut Self) {
        if let (Ok(endpoints), Ok(old)) = (&mut self.endpoints, &mut old.endpoints) {
            endpoints.inherit(old);
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
    pub fn set_stale(&mut self) {
        self.identity.stale = true;
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

fn peer(id: ProcessId) -> Peer {
    Peer { pid: id.pid, start_ticks: id.start_ticks }
}

/// Says whether the process is stopped, which would explain why it does not answer.
fn stopped_note(pid: u32) -> &'static str {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    match state.and_then(|state| state.trim_start().chars().next()) {
        Some('T' | 't') => ": it is stopped by SIGSTOP or a debugger",
        _ => "",
    }
}
