//! Machine: the state machine of one VM. One loop takes one closed list of events (`crate::event::Event`).
//!
//! ```text
//!                     start                 found alive after a keeper's death
//!   (nothing) ------------------> Starting ----------------------------------+
//!               QEMU does not start |  | QEMU runs                           |
//!      Failed <---------------------+  v                                     v
//!        +-----------------------> Running <------------------------------ Running
//!        |                        |   |   \ crash, on_panic = "pause" or "dump"
//!        | QEMU runs    guest     |   |    +-----------> Paused --+
//!        |              reset,    |   | stop                      | reboot, stop
//!        |              crash,    v   v                           |
//!     Recovering <------- reboot, |  Stopping <-------------------+
//!       | ^               QEMU    |   | QEMU has ended
//!       | | QEMU does     died    |   v
//!       +-+ not start             |  Stopped
//!                                 +--> Recovering
//! ```
//!
//! A machine that crashes again and again, or whose next QEMU does not start, waits in Recovering before its next start
//! (`crash_loop`).
//!
//! A rejuvenation happens within Running: the incarnation stays, the QEMU changes (see `rejuvenate`). A guest that is parked
//! (`park`) goes from Running to Stopped, and with the next keeper from Starting to Running.
//!
//! Every way out of Running goes through the end of QEMU's process, seen by its pidfd: only then is its memory dead and
//! its disk I/O drained. What QEMU said before (`Shutdown`, `GuestPanicked`, `Watchdog`) only names the cause. Dumps of dead
//! guests (`crash`, `dump`) go on beside all this; a machine that stops waits for them in Stopping.

mod access;
pub mod age;
pub mod arrivals;
mod crash;
mod crash_loop;
pub mod dump;
mod dumps;
mod error;
pub mod frozen;
pub mod gate;
mod generation;
pub mod images;
mod in_force;
mod launch;
mod leftovers;
mod lives;
mod nvram;
mod orders;
mod park;
mod passt;
mod pins;
pub mod ready;
mod rejuvenate;
mod remount;
pub mod restore;
pub mod save;
mod space;
mod stale_session;
mod status;
mod takeover;
mod timeline;
mod turn;
mod upgrade;
mod vmgenid;
mod volumes;
pub mod warden;
mod wires;
mod work;

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_api::{EndCause, EventKind, MachineState, PendingChange, Rejuvenation, Unparked};
use hearth_disk::nvram::Nvram;
use hearth_disk::nvram::pmem::Pmem;
use hearth_disk::server::DiskServer;
use hearth_disk::tag::Tagger;
use hearth_memory::PAGE_BYTES;
use hearth_qemu::{AcceleratorChoice, Binary, BinaryError, QmpEvent};
use hearth_recovery::boot_set::WarmSources;
use hearth_recovery::budget::Budget;
use hearth_recovery::ember::Ember;
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::Journal;
use hearth_recovery::warm_reboot::Phase;

use crate::config::{Config, ConfigFile};
use crate::console::Hub;
use crate::control::Occupation;
use crate::event::{Event, MemoryMessage};
use crate::event_log::EventLog;
use crate::folders::Folders;
use crate::runtime_root::RuntimeRoot;
use crate::upgrade::Successor;
use crate::watchdog::Watchdog;

use crash::Harvest;
use crash_loop::{BackOff, Crashes};
use dumps::Dumps;
pub use error::MachineError;
use frozen::Frozen;
use generation::Generation;
pub use in_force::Next;
pub use rejuvenate::GUEST_DIED_WITH_QEMU;
pub use takeover::could_take_over;
use timeline::Timeline;

/// How long a guest may take to shut down when asked nicely, before its power is cut.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(60);
/// How long disk I/O in flight may take to end after QEMU did. Storage that hangs longer needs a person.
const DRAIN_PATIENCE: Duration = Duration::from_secs(60);

/// What a machine is made from; all of it checked.
pub struct Parts {
    /// Describes the living guest, whatever the file says by now.
    pub config: Config,
    /// What `config` was made from: it goes along with a snapshot.
    pub typed: ConfigFile,
    pub next: Next,
    /// Keys of the file that do not count yet.
    pub pending: Vec<PendingChange>,
    /// `config`, for the API.
    pub shown_config: Arc<Mutex<serde_json::Value>>,
    /// A snapshot to begin with, instead of a boot.
    pub restore: Option<restore::RestoreOrder>,
    /// The first guest is the only one.
    pub rehearses: bool,
    pub folders: Folders,
    /// None: it was not there when this keeper began, above a QEMU that lives.
    pub binary: Option<Binary>,
    pub accelerator: AcceleratorChoice,
    pub event_log: EventLog,
    pub watchdog: Watchdog,
    pub console: Hub,
    pub tell: Sender<Event>,
    /// Each QEMU inherits them.
    pub locks: images::InheritedLocks,
    /// A signal has said so, and is among the events: for what takes long before these are looked at.
    pub terminated: Arc<AtomicBool>,
    /// For what keeps the loop from answering for long.
    pub occupation: Occupation,
    /// Where the machine is entered by its name.
    pub root: RuntimeRoot,
}

impl Parts {
    /// The program that the next QEMU is started from.
    fn binary(&self) -> Result<Binary, BinaryError> {
        self.binary.clone().map_or_else(|| Binary::find(self.config.qemu.as_deref()), Ok)
    }

    /// What the API shows is what counts now.
    fn show_config(&self) {
        let shown = serde_json::to_value(&self.config).expect("a configuration is plain data");
        *self.shown_config.lock().expect("holders only copy and assign") = shown;
    }
}

/// How the event loop of a machine ends.
pub enum End {
    Stopped,
    /// The guest runs on; another program is to go on with it.
    HandsOver {
        machine: Box<Machine>,
        successor: Successor,
    },
}

/// One VM under its keeper.
pub struct Machine {
    parts: Parts,
    journal: Journal,
    tagger: Tagger,
    ember: Arc<Ember>,
    /// The ember, and the boot set if there is one.
    warm: Arc<WarmSources>,
    /// When the guest is taken to be ready if nobody has said so.
    ready_at: Option<Instant>,
    images: images::Images,
    /// Asks the guest whether it is.
    ready_watch: Option<ready::ReadyWatch>,
    budget: Budget,
    warden: warden::Warden,
    pins: pins::Pins,
    /// Before the memory of the living QEMU, while that is granted unit by unit.
    gate: Option<gate::MemoryGate>,
    /// Dropped before the disks, whose reads may wait for it.
    arrivals: arrivals::Arrivals,
    /// Of the configuration's disks, and behind them of its NVRAM.
    disks: Vec<DiskServer>,
    nvram: Vec<Nvram>,
    /// Open as long as a QEMU may have them.
    pmem: Vec<Pmem>,
    /// The keeper before this one may have died while its QEMU greeted the disks. It must not be stopped and continued then.
    greeting_cut_off: bool,
    state: MachineState,
    state_why: Option<String>,
    life: Option<Life>,
    wanted: Wanted,
    /// The living guest was asked to shut down, and its power is cut if it does not.
    asked_to_shut_down: bool,
    last_end: Option<EndCause>,
    timeline: Option<Timeline>,
    last_rejuvenation: Option<Rejuvenation>,
    /// What became of a guest that this keeper found parked.
    unparked: Option<Unparked>,
    schedule: age::Schedule,
    crashes: Crashes,
    /// There is no guest, and the next one is waited for.
    back_off: Option<BackOff>,
    /// Since when the next guest could not be started.
    waits_since: Option<Instant>,
    /// The way of the living incarnation out of a snapshot.
    restoring: Option<restore::Restoring>,
    /// A save that is under way.
    saving: Option<save::Saving>,
    /// Of the guest's file systems, as long as `journal.frozen` says that they may be.
    frozen: Option<Frozen>,
    /// Saves that were begun.
    saves: u64,
    started: Instant,
    dumps: Dumps,
    /// What a dead keeper left to be dumped.
    unfinished_dumps: Vec<(Incarnation, Arc<Hold>)>,
    /// Of the guest that is about to end.
    harvest: Option<Harvest>,
    /// The guest has stopped; what is left of the machine are its dumps.
    stops_after_dumps: bool,
    /// Goes on instead of this keeper, above the guest of this incarnation.
    successor: Option<(Successor, u32)>,
}

/// An incarnation and the QEMU that runs it.
struct Life {
    incarnation: Incarnation,
    generation: Generation,
    began: Instant,
    /// Named by QEMU before it ends; if it ends without a word it died.
    cause: Option<EndCause>,
}

/// What the operator asked for and has not got yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Run,
    Reboot { cold: bool, power_off_at: Instant },
    Stop { power_off_at: Instant },
}

/// The host memory that a machine may use.
fn budget(config: &Config) -> Budget {
    let slack_bytes = config.budget_slack_bytes;
    Budget {
        ram_bytes: config.memory_bytes,
        slack_bytes,
        headroom_bytes: config.crash.headroom_bytes,
        dump_buffer_bytes: dump::buffer_bytes(slack_bytes, config.crash.threads),
    }
}

impl Machine {
    /// Starts the machine, or takes over the QEMU that a dead keeper left running.
    pub fn start(parts: Parts) -> Result<Self, MachineError> {
        let journal = park::journal(&parts)?;
        let tagger = parts.folders.tagger()?;
        let ember = Arc::new(Ember::new(&parts.folders.memory, tagger.clone()));
        let boot_set = remount::open(&parts, &tagger)?;
        let images = images::Images::after_gap(&parts.folders.memory);
        let join_writes = parts.config.remount.as_ref().is_some_and(|remount| remount.join_writes);
        let warm = Arc::new(WarmSources { ember: ember.clone(), boot_set: boot_set.clone(), join_writes });
        let budget = budget(&parts.config);
        let tell = parts.tell.clone();
        let warden = warden::Warden::start(&parts.config.name, budget, ember.clone(), boot_set, move |message| {
            // Fails only when the loop is gone, and then nobody wants to know.
            let _ = tell.send(Event::Memory(message));
        })
        .map_err(MachineError::Warden)?;
        let mut machine = Self {
            parts,
            journal,
            tagger,
            ember,
            warm,
            images,
            ready_at: None,
            ready_watch: None,
            budget,
            warden,
            pins: pins::Pins::default(),
            gate: None,
            arrivals: arrivals::Arrivals::default(),
            disks: Vec::new(),
            nvram: Vec::new(),
            pmem: Vec::new(),
            greeting_cut_off: false,
            state: MachineState::Starting,
            state_why: None,
            life: None,
            wanted: Wanted::Run,
            asked_to_shut_down: false,
            last_end: None,
            timeline: None,
            last_rejuvenation: None,
            unparked: None,
            schedule: age::Schedule::new(),
            crashes: Crashes::default(),
            back_off: None,
            waits_since: None,
            restoring: None,
            saving: None,
            frozen: None,
            saves: 0,
            started: Instant::now(),
            dumps: Dumps::default(),
            unfinished_dumps: Vec::new(),
            harvest: None,
            stops_after_dumps: false,
            successor: None,
        };
        machine.record(EventKind::Started { pid: std::process::id(), version: env!("CARGO_PKG_VERSION").to_owned() });
        machine.tell_what_is_left_out();
        machine.expect_disks()?;
        let taken_over = match machine.take_over() {
            Err(error) if !machine.arrivals.is_complete() || machine.must_be_complete("end").is_err() => {
                // The guest lives on without a keeper: a read that waits must neither fail nor be waited for.
                std::mem::forget(machine);
                return Err(error);
            }
            taken_over => taken_over?,
        };
        machine.remove_leftovers();
        if taken_over {
            machine.divide_disks();
        } else {
            machine.forget_greeting();
            machine.images.begin_start();
            match machine.order_to_restore().inspect_err(|error| machine.fail(error))? {
                Some(order) => machine.restore(&order).inspect_err(|error| machine.fail(error))?,
                None => machine
                    .forget_order()
                    .and_then(|()| machine.resume_or_boot())
                    .inspect_err(|error| machine.fail_to_start(error))?,
            }
        }
        machine.go_on_with_dumps();
        Ok(machine)
    }

    /// Handles events until the machine has stopped, or is another keeper's.
    pub fn run(mut self, events: &Receiver<Event>) -> Result<End, MachineError> {
        while self.state != MachineState::Stopped {
            let event = match self.deadline() {
                // What was said while the successor was asked comes first: the guest may have ended.
                _ if self.successor.is_some() => match events.try_recv() {
                    Ok(event) => Ok(event),
                    Err(_) => match self.ready_successor() {
                        Some(successor) => return Ok(End::HandsOver { machine: Box::new(self), successor }),
                        None => continue,
                    },
                },
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
            };
            self.parts.watchdog.main().begin();
            let handled = match event {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => self.time_is_up(),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the machine itself holds a sender"),
            };
            if let Err(error) = handled {
                self.end_with(&error);
                return Err(error);
            }
            // They read and write the guest's memory, which may still be missing.
            self.parts.watchdog.excuse_disks(self.must_be_complete("watch").is_err());
            self.parts.watchdog.main().end();
        }
        Ok(End::Stopped)
    }

    /// The keeper ends, and the machine with it; unless a keeper that starts anew is all that its guest needs.
    fn end_with(mut self, error: &MachineError) {
        if let MachineError::DiskEnded { .. } = error {
            self.record(EventKind::Error { message: crate::chain(error) });
            // As if this keeper had been killed: the next one takes over.
            std::mem::forget(self);
        } else {
            self.fail(error);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        [self.power_off_at(), self.backs_off_until(), self.next_look(), self.ready_at].into_iter().flatten().min()
    }

    fn time_is_up(&mut self) -> Result<(), MachineError> {
        let now = Instant::now();
        if let Some(back_off) = self.back_off.take_if(|back_off| back_off.is_over(now)) {
            return self.end_back_off(&back_off);
        }
        if self.ready_at.is_some_and(|ready_at| ready_at <= now) {
            self.ready("`remount.ready_after` has passed");
            return Ok(());
        }
        match self.power_off_at() {
            Some(power_off_at) if power_off_at <= now => self.power_off(),
            _ => self.look_at_age(),
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), MachineError> {
        match event {
            Event::Request { command, answer } => self.requested(command, &answer),
            Event::Terminate => {
                let force = matches!(self.wanted, Wanted::Stop { .. });
                if let Err(refusal) = self.stop(force) {
                    tracing::warn!(reason = refusal.message, "cannot stop");
                }
                Ok(())
            }
            Event::Qmp { generation, event } if self.is_current(generation) => self.qemu_says(event),
            Event::QemuEnded { generation, how } if self.is_current(generation) => self.qemu_ended(how),
            Event::QemuEnded { generation, .. } => {
                self.retired(generation);
                Ok(())
            }
            Event::Qmp { .. } => Ok(()),
            Event::Disk { disk, notice } => {
                self.disk_says(disk, notice);
                Ok(())
            }
            Event::CheckDisksInUse { generation, attempt } if self.is_current(generation) => {
                self.must_have_spoken(attempt);
                Ok(())
            }
            Event::CheckDisksInUse { .. } => Ok(()),
            Event::Readiness { incarnation, message } if incarnation == self.journal.incarnation => {
                self.readiness_says(message);
                Ok(())
            }
            Event::Readiness { .. } => Ok(()),
            Event::Restore { generation, message } if self.is_current(generation) => {
                self.restore_says(message);
                Ok(())
            }
            Event::Restore { .. } => Ok(()),
            Event::Backfill(message) => {
                self.backfill_says(message);
                Ok(())
            }
            Event::Save { number, message } => {
                self.save_says(number, message);
                Ok(())
            }
            Event::Thaw { generation, message } if self.is_current(generation) => {
                self.thaw_says(message);
                Ok(())
            }
            Event::Thaw { .. } => Ok(()),
            Event::DiskEnded { disk, why } => Err(MachineError::DiskEnded { disk, why }),
            Event::Dump { incarnation, message } => self.dump_says(incarnation, message),
            Event::Memory(message) => {
                self.memory_says(message);
                Ok(())
            }
            Event::Admission(message) => {
                self.admission_says(message);
                Ok(())
            }
        }
    }

    fn qemu_says(&mut self, event: QmpEvent) -> Result<(), MachineError> {
        match event {
            QmpEvent::Shutdown { guest, reason } => self.shutdown_cause(guest, &reason),
            QmpEvent::GuestPanicked => self.guest_panicked(),
            QmpEvent::Watchdog { action } => self.watchdog_expired(action),
            QmpEvent::Misbehaves(why) => self.qemu_misbehaves(&why),
            _ => {}
        }
        Ok(())
    }

    /// A QEMU that breaks QMP cannot be told anything any more, and may be a guest's by now.
    fn qemu_misbehaves(&mut self, why: &str) {
        self.record(EventKind::Error { message: format!("ending QEMU: {why}") });
        self.end_qemu(EndCause::QemuDied);
    }

    fn shutdown_cause(&mut self, guest: bool, reason: &str) {
        let cause = match (self.wanted, guest, reason) {
            (Wanted::Stop { .. }, ..) => EndCause::OperatorStop,
            (Wanted::Reboot { .. }, ..) => EndCause::OperatorReboot,
            (Wanted::Run, true, "guest-shutdown") => EndCause::GuestShutdown,
            (Wanted::Run, true, _) => EndCause::GuestReset,
            (Wanted::Run, false, _) => EndCause::QemuDied,
        };
        if let Some(life) = &mut self.life {
            life.cause.get_or_insert(cause);
        }
    }

    fn guest_panicked(&mut self) {
        self.record(EventKind::GuestPanicked);
        self.guest_crashed(EndCause::Panic);
    }

    fn watchdog_expired(&mut self, action: String) {
        let (held_still, resets) = (action == "pause", action == "reset");
        self.record(EventKind::WatchdogExpired { action });
        if held_still {
            self.guest_crashed(EndCause::Watchdog);
        } else if let (true, Some(life)) = (resets, &mut self.life) {
            life.cause = Some(EndCause::Watchdog);
        }
    }

    fn memory_says(&mut self, message: MemoryMessage) {
        match message {
            MemoryMessage::Settled { released_bytes, began, took } => {
                if let Some(timeline) = &mut self.timeline {
                    timeline.released(released_bytes);
                }
                self.phase_ended(Phase::Settle.name(), began, took);
                self.record(EventKind::EmberSettled { released_bytes, remaining_pages: self.ember.counts().remaining });
            }
            MemoryMessage::Trimmed { bytes } => {
                self.record(EventKind::EmberTrimmed { pages: bytes / PAGE_BYTES, bytes });
            }
            MemoryMessage::EmberEmpty => {
                let counts = self.ember.counts();
                let pages_refused = counts.tag_mismatch + counts.overwritten + counts.trimmed;
                self.record(EventKind::EmberEmpty { pages_served: counts.served, pages_refused });
            }
            MemoryMessage::OverBudget { used_bytes, limit_bytes } => {
                self.record(EventKind::BudgetWarning { used_bytes, budget_bytes: limit_bytes });
            }
        }
    }

    fn is_current(&self, generation: u32) -> bool {
        self.life.as_ref().is_some_and(|life| life.generation.number == generation)
    }

    fn enter(&mut self, state: MachineState) {
        if self.state != state {
            self.record(EventKind::StateChanged { from: self.state, to: state });
            self.state = state;
            self.state_why = None;
        }
    }

    fn record_ember(&mut self) {
        let counts = self.ember.counts();
        let bytes = counts.kept * PAGE_BYTES;
        if let Some(timeline) = &mut self.timeline {
            timeline.kept(counts.kept, bytes);
        }
        self.record(EventKind::EmberKept { pages: counts.kept, bytes });
    }

    fn record(&self, kind: EventKind) {
        self.parts.event_log.record(kind);
    }
}
