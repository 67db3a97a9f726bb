//! Machine: the state machine of one VM. One loop takes one closed list of events (`crate::event::Event`).
//!
//! ```text
//!                     start                 found alive after a keeper's death
//!   (nothing) ------------------> Starting ---------------------------------+
//!                                  |                                        |
//!                                  | QEMU runs                              |
//!                                  v                                        |
//!         QEMU runs          +-----------------------------------------+    |
//!     +--------------------> | Running                                 | <--+
//!     |                      |   paused: crash with on_panic = "pause" |
//!     |                      |     or "dump", save, dump               |
//!     |                      |   order: reboot or stop, until QEMU     |
//!     |                      |     has ended                           |
//!     |                      +-----------------------------------------+
//!     |     guest reset, crash,  |              |                   |
//!     |     reboot, QEMU died    |              | stop, power-off   | parked
//!     |                          v              v                   |
//!     +-------------------- Recovering ------> Dumping              |
//!                            |  ^       stop    |                   |
//!                            +--+               | no dump to        |
//!            back-off: crash loop,              | wait for          |
//!            QEMU does not start                v                   |
//!                                            Stopped <--------------+
//!
//!   any of them, on an error that it cannot continue after ------> Failed
//! ```
//!
//! `state` holds these states with their data, and `state::step` has all their transitions: the table of its test lists every state
//! with every input. `actions` carries out what follows from a transition. The API and the events show more words: a Running machine
//! is `running`, `paused` or `stopping`; one in Dumping, or Recovering with the order to stop, is `stopping`.
//!
//! Starting a guest takes long: threads do it step by step (`start`, `launch_job`), and the loop answers meanwhile. A machine that is
//! told to stop while a guest is starting goes to Dumping once that has ended; a guest that exists already runs first. Only the
//! take-over comes before the loop, which then waits for a QEMU that hangs.
//!
//! A machine that crashes again and again, or whose next QEMU does not start, waits in Recovering before its next start
//! (`crash_loop`).
//!
//! A rejuvenation happens within Running: the incarnation stays, the QEMU changes (see `rejuvenation`). A guest that is parked
//! (`park`) goes from Running to Stopped, and with the next keeper from Starting to Running.
//!
//! Every other way out of Running goes through the end of QEMU's process, seen by its pidfd: only then is its memory dead and
//! its disk I/O drained. What QEMU said before (`Shutdown`, `GuestPanicked`, `Watchdog`) only names the cause. Dumps of dead
//! guests (`crash_recovery`, `dump`) go on beside all this; a machine that stops waits for them in Dumping.
//!
//! A machine is made of parts. Each owns its fields, and its methods borrow the `Context` and the parts that they need; only what
//! concerns the machine as a whole is a method of `Machine`.
//!
//! | part | owns |
//! |---|---|
//! | `Context` (`context`) | configuration, folders, QEMU's program, journal, event log: what all parts share |
//! | `WarmReboot` (`warm_reboot`, `fast_remount`) | ember, boot set, tags, budget, memory monitor |
//! | `FastRemount` (`fast_remount`) | until when a boot is noted, the readiness probe |
//! | `GuestMemory` (`gate`) | the gate before the guest's memory |
//! | `LazyRestore` (`lazy_restore`) | the way of the guest's memory out of a snapshot |
//! | `Disks` (`disks`, `images`, `nvram`, `backfill`) | servers, images, NVRAM, backfill |
//! | `State` (`state`, `actions`, `lives`, `start`) | where the machine stands: the guest and its QEMU, the order, the next guest's start or the wait before it |
//! | `LastRecovery` (`timeline`) | how long each phase of the last recovery took |
//! | `Rejuvenations` (`rejuvenation`, `park`, `upgrade`, `age`) | the hop under way, the last hop, the schedule, the guest that is being parked, the successor |
//! | `Saves` (`save`, `frozen`) | the save under way, frozen file systems |
//! | `DiskCopies` (`disk_copy`) | the copy of a disk under way |
//! | `CrashRecovery` (`crash_recovery`, `dumps`, `crash_loop`) | dumps, crashes, harvested registers |

mod access;
mod actions;
mod age;
pub mod attached;
mod backfill;
mod cache_map;
mod context;
mod crash_loop;
mod crash_recovery;
mod disk_copy;
mod disks;
mod dump;
mod dumps;
mod error;
mod fast_remount;
mod frozen;
mod gate;
mod generation;
mod hop_lock;
mod images;
mod in_force;
pub mod inherited_locks;
mod launch;
mod launch_job;
pub mod lazy_restore;
mod leave;
pub mod leftovers;
mod lives;
mod locked_files;
mod memory_monitor;
mod net_endpoints;
mod nvram;
mod orders;
mod park;
mod passt;
mod ready;
mod rejuvenation;
mod save;
mod space;
mod stale_session;
mod standstill;
mod start;
mod state;
mod status;
mod takeover;
mod timeline;
mod upgrade;
mod vmgenid;
mod volumes;
mod warm_reboot;

mod work;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use hearth_api::{EndCause, EventKind};
use hearth_disk::arrival::MissPolicy;
use hearth_disk::server::DiskServer;
use hearth_qemu::QmpEvent;
use hearth_recovery::incarnation::Incarnation;

use crate::event::Event;
use crate::upgrade::Successor;

use backfill::handle_backfill;
pub use context::{ConfigurationFile, Context, Next, Outside, QemuChoice, load_journal};
use crash_recovery::CrashRecovery;
use disk_copy::DiskCopies;
pub use disk_copy::image_over;
use disks::Disks;
pub use error::MachineError;
use fast_remount::FastRemount;
use gate::GuestMemory;
use generation::Generation;
pub use launch::{LOCK_PATIENCE, image_options};
use lazy_restore::{LazyRestore, RestoreFailure};
use locked_files::LockedFiles;
use park::Parking;
pub use rejuvenation::GUEST_DIED_WITH_QEMU;
use rejuvenation::Rejuvenations;
use save::Saves;
use start::Start;
use state::{Input, State};
pub use takeover::could_take_over;
use timeline::LastRecovery;
use warm_reboot::WarmReboot;

/// How long a guest may take to shut down on request, before its QEMU is killed.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(60);
/// How often it is asked meanwhile.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// How long disk I/O in flight may take after QEMU's end. Storage that hangs longer needs the operator.
const DRAIN_PATIENCE: Duration = Duration::from_secs(60);

/// How the event loop of a machine ends.
pub enum End {
    Stopped,
    /// The guest runs on, and another program takes the machine over.
    HandsOver {
        machine: Box<Machine>,
        successor: Successor,
    },
}

/// One VM under its keeper.
///
/// The order of the fields is the order in which they are dropped: threads that work for the guest's memory end before the disks,
/// whose reads may wait for them.
pub struct Machine {
    context: Context,
    warm_reboot: WarmReboot,
    fast_remount: FastRemount,
    locked_files: LockedFiles,
    memory: GuestMemory,
    lazy_restore: LazyRestore,
    disks: Disks,
    state: State<Life, Start>,
    recovery: LastRecovery,
    rejuvenation: Rejuvenations,
    saves: Saves,
    copies: DiskCopies,
    crash_recovery: CrashRecovery,
}

/// An incarnation and the QEMU that runs it.
struct Life {
    incarnation: Incarnation,
    generation: Generation,
    began: Instant,
    /// How often QEMU was told to let it go on, and has not answered yet.
    going_on: u32,
}

impl Machine {
    /// Takes over the QEMU that a dead keeper left running; if there is none, `run` starts a guest.
    pub fn begin(context: Context) -> Result<Self, MachineError> {
        let (warm_reboot, disks) = begin_keeping(&context)?;
        let mut machine = Self {
            context,
            warm_reboot,
            fast_remount: FastRemount::default(),
            locked_files: LockedFiles::default(),
            memory: GuestMemory::default(),
            lazy_restore: LazyRestore::default(),
            disks,
            state: State::default(),
            recovery: LastRecovery::default(),
            rejuvenation: Rejuvenations::default(),
            saves: Saves::default(),
            copies: DiskCopies::default(),
            crash_recovery: CrashRecovery::default(),
        };
        machine.disks.find_backfill(&machine.context, MissPolicy::Wait)?;
        let taken_over = match machine.take_over() {
            Err(error) if !machine.disks.backfill.is_complete() || !machine.lazy_restore.is_complete() => {
                // The guest lives on without a keeper: a read that waits must not fail, and must not be waited for.
                machine.leave_to_next_keeper(DiskServer::abandon);
                return Err(error);
            }
            taken_over => taken_over?,
        };
        machine.remove_leftovers();
        if taken_over {
            machine.warm_reboot.divide_disks(&machine.context, &machine.disks);
        } else {
            machine.disks.forget_greeting(&mut machine.context);
            machine.disks.images.begin_start();
            machine.warm_reboot.begin_without_memory();
        }
        Ok(machine)
    }

    /// Handles events until the machine has stopped, or another keeper takes it over. `tell_running`: what follows once it has a
    /// guest.
    pub fn run(mut self, events: &Receiver<Event>, tell_running: impl FnOnce()) -> Result<End, MachineError> {
        let mut tell_running = Some(tell_running);
        self.context.outside.watchdog.main().begin();
        let begun = if self.state.is_first_start() { self.begin_start() } else { Ok(()) };
        self.context.outside.watchdog.main().end();
        if let Err(error) = begun {
            self.end_with(&error);
            return Err(error);
        }
        while !matches!(self.state, State::Stopped) {
            if self.state.guest().is_some()
                && let Some(tell_running) = tell_running.take()
            {
                self.go_on_with_dumps();
                tell_running();
            }
            let event = match self.deadline() {
                // Events that came while the successor was asked are handled first: the guest may have ended.
                _ if self.rejuvenation.successor.is_some() => match events.try_recv() {
                    Ok(event) => Ok(event),
                    Err(_) => match self.ready_successor() {
                        Some(successor) => return Ok(End::HandsOver { machine: Box::new(self), successor }),
                        None => continue,
                    },
                },
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
            };
            self.context.outside.watchdog.main().begin();
            let handled = match event {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => self.time_is_up(),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the machine itself holds a sender"),
            };
            if let Err(error) = handled {
                self.end_with(&error);
                return Err(error);
            }
            // Disks read and write the guest's memory, which may still be missing.
            self.context.outside.watchdog.allow_disk_waits(!self.lazy_restore.is_complete());
            self.context.outside.watchdog.main().end();
        }
        if self.lazy_restore.was_cancelled && self.context.outside.terminated.load(Relaxed) {
            let file = self.context.config.file.clone();
            return Err(self.not_restored(RestoreFailure::CalledOff { file }));
        }
        Ok(End::Stopped)
    }

    /// Ends the machine with its keeper, unless the guest only needs a new keeper.
    fn end_with(mut self, error: &MachineError) {
        if let MachineError::DiskEnded { .. } = error {
            self.context.record(EventKind::Error { message: crate::chain(error) });
            // The next keeper takes over, as if this one had been killed.
            self.leave_to_next_keeper(DiskServer::abandon);
        } else if self.state.is_first_start() && !matches!(error, MachineError::Restore { .. }) {
            self.fail_to_start(error);
        } else {
            self.fail(error);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.state.deadline(),
            self.rejuvenation.schedule.next_look(&self.context.config),
            self.fast_remount.ready_at,
            self.disks.next_check.as_ref().map(|check| check.at),
            self.rejuvenation.parking.as_ref().and_then(Parking::deadline),
            self.rejuvenation.hop_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn time_is_up(&mut self) -> Result<(), MachineError> {
        let now = Instant::now();
        if self.fast_remount.ready_at.is_some_and(|ready_at| ready_at <= now) {
            self.fast_remount.ready(&self.context, &self.warm_reboot, &self.disks, "`remount.ready_after` has passed");
            return Ok(());
        }
        if let Some(check) = self.disks.next_check.take_if(|check| check.at <= now) {
            self.check_disks_in_use(&check);
            return Ok(());
        }
        if self.rejuvenation.parking.as_ref().and_then(Parking::deadline).is_some_and(|until| until <= now) {
            return self.end_park();
        }
        if self.rejuvenation.hop_deadline().is_some_and(|deadline| deadline <= now) {
            self.continue_retirement();
            return Ok(());
        }
        match self.state.deadline() {
            Some(deadline) if deadline <= now => return self.apply(Input::TimeUp { now }),
            _ => self.look_at_age(),
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), MachineError> {
        let event = self.hold_back(event).and_then(|event| self.defer_start_event(event));
        let Some(event) = event else { return Ok(()) };
        match event {
            Event::Request { command, answer } => self.requested(command, &answer),
            Event::Terminate => {
                if let Err(refusal) = self.terminate() {
                    tracing::warn!(reason = refusal.message, "cannot stop");
                }
            }
            Event::Qmp { generation, event } if self.is_current(generation) => return self.handle_qemu(event),
            Event::QemuEnded { generation, how } if self.is_current(generation) => {
                return self.apply(Input::Ended { how, rehearses: self.context.rehearses });
            }
            Event::QemuEnded { generation, .. } => self.retired(generation),
            Event::Launched { generation } => return self.launched(generation),
            Event::ForwardsOpen { generation } if self.is_current(generation) => self.forwards_opened(),
            Event::Disk { disk, notice } => Disks::handle_disk(&self.context, disk, notice),
            Event::Readiness { incarnation, message } if incarnation == self.context.journal.incarnation => {
                self.fast_remount.handle_readiness(&self.context, &self.warm_reboot, &self.disks, message);
            }
            Event::Restore { generation, message } if self.is_current(generation) => self.handle_restore(message),
            Event::Backfill(message) => handle_backfill(&self.context, message),
            Event::Flushed { generation, check, flushed, answer } => {
                self.flushed(generation, check, flushed, &answer);
            }
            Event::Successor { incarnation, successor, answer } => {
                self.handle_successor(incarnation, successor, &answer);
            }
            Event::Harvested { generation, began, registers } if self.is_current(generation) => {
                return self.harvested(began, registers);
            }
            Event::Park { generation, message } => return self.handle_park(generation, message),
            Event::ReadyToDump { generation, held, registers } => self.ready_to_dump(generation, held, registers),
            Event::WentOn { generation, held_for, at, why } if self.is_current(generation) => {
                self.note_resumed(held_for, at, why);
            }
            Event::Save { number, message } => self.handle_save(number, message),
            Event::DiskCopy { number, message } => self.handle_disk_copy(number, message),
            Event::Thaw { generation, message } if self.is_current(generation) => {
                self.saves.handle_thaw(&mut self.context, message);
            }
            Event::DiskEnded { disk, why } => return Err(MachineError::DiskEnded { disk, why }),
            Event::Dump { incarnation, message } => return self.handle_dump(incarnation, message),
            Event::Memory(message) => self.warm_reboot.handle_memory(&self.context, &self.disks, &mut self.recovery, message),
            Event::Admission(message) => self.memory.handle_admission(&self.context, &self.disks, message),
            // Messages about a QEMU or guest that has ended.
            Event::Qmp { .. }
            | Event::ForwardsOpen { .. }
            | Event::Readiness { .. }
            | Event::Restore { .. }
            | Event::Harvested { .. }
            | Event::WentOn { .. }
            | Event::Thaw { .. }
            // A QEMU of libvirt's: see `attached`.
            | Event::DiskAsks(_) => {}
        }
        Ok(())
    }

    fn handle_qemu(&mut self, event: QmpEvent) -> Result<(), MachineError> {
        match event {
            QmpEvent::Shutdown { guest, reason } => {
                let cause = match (guest, &*reason) {
                    (true, "guest-shutdown") => EndCause::GuestShutdown,
                    (true, _) => EndCause::GuestReset,
                    (false, _) => EndCause::QemuDied,
                };
                self.apply(Input::ShutsDown { cause })
            }
            QmpEvent::GuestPanicked => self.guest_panicked(),
            QmpEvent::Watchdog { action } => self.watchdog_expired(action),
            QmpEvent::Misbehaves(why) => self.handle_protocol_violation(&why),
            _ => Ok(()),
        }
    }

    /// Ends a QEMU that breaks QMP: it takes no commands any more, and its guest may control it.
    fn handle_protocol_violation(&mut self, why: &str) -> Result<(), MachineError> {
        self.context.record(EventKind::Error { message: format!("ending QEMU: {why}") });
        self.apply(Input::Misbehaves)
    }

    fn guest_panicked(&mut self) -> Result<(), MachineError> {
        self.context.record(EventKind::GuestPanicked);
        self.guest_crashed(EndCause::Panic)
    }

    fn watchdog_expired(&mut self, action: String) -> Result<(), MachineError> {
        let (held_still, resets) = (action == "pause", action == "reset");
        self.context.record(EventKind::WatchdogExpired { action });
        if held_still {
            self.guest_crashed(EndCause::Watchdog)
        } else if resets {
            self.apply(Input::WatchdogResets)
        } else {
            Ok(())
        }
    }

    /// QEMU has paused the guest for good.
    fn guest_crashed(&mut self, cause: EndCause) -> Result<(), MachineError> {
        self.cancel_save("the guest crashed");
        self.copies.make_way("the guest crashed");
        self.give_up_hop("the guest crashed");
        self.apply(Input::Crashes { cause, on_panic: self.context.config.on_panic })
    }

    fn is_current(&self, generation: u32) -> bool {
        self.state.guest().is_some_and(|life| life.generation.number == generation)
    }
}

/// Where every keeper begins: what is kept of dead guests, and the disks as an earlier keeper may have left them.
fn begin_keeping(context: &Context) -> Result<(WarmReboot, Disks), MachineError> {
    let warm_reboot = WarmReboot::start(context)?;
    let disks = Disks::after_gap(&context.folders.memory);
    context.record(EventKind::Started { pid: std::process::id(), version: env!("CARGO_PKG_VERSION").to_owned() });
    warm_reboot.report_left_out(context);
    Ok((warm_reboot, disks))
}
