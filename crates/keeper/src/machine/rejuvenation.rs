//! Rejuvenation of a machine: phases, journal, and which QEMU is ended when. `hearth_recovery` describes the phases.
//!
//! launch (a job) -> admit -> (journal: a hop) -> prepare -> hand -> (journal: committed) -> resume -> retire
//!
//! The job also prepares both QEMUs. While the new QEMU is starting the loop goes on. An order of the operator and a crash or the
//! end of the guest come first: the hop is given up (`give_up_hop`). What else would disturb it is refused (`must_not_hop`).
//!
//! From `admit` to `resume` the loop stands still, but for the guest: what either QEMU says is handled afterwards, and of the one
//! that lost only its end still counts. Then the loop goes on again, until the old QEMU has been retired.
//!
//! A keeper that dies leaves two QEMUs; the journal says whose the guest is, unless it died with the last bytes of the state, and
//! the next keeper ends the other one (`find_qemu_of_guest`) before it does anything else.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use hearth_api::{
    ApiError, EndCause, ErrorWord, EventKind, MachineState, PhaseTime, QemuStatus, RejuvenateRequest, Rejuvenation,
    Unparked, rfc3339,
};
use hearth_disk::server::{Peer, inflight_name};
use hearth_qemu::{Accelerator, Binary, BinaryError, Qmp, QmpError, Version, memory_of};
use hearth_recovery::journal::{HopNote, Journal, JournalError, QemuIdentity, Staged};
use hearth_recovery::rejuvenation::{self, Handed, Hop, Phase, RejuvenationError, Standstill, Target, Ticker};

use super::age::Schedule;
use super::disks::{Disks, is_silent};
use super::generation::{END_PATIENCE, Generation, LaunchError, PAUSE_PATIENCE, Plan};
use super::hop_lock::HopLock;
use super::launch;
use super::launch_job::{LaunchControl, LaunchJob};
use super::nvram::must_have_all_state;
use super::park::Parking;
use super::state::Input;
use super::{Context, Life, Machine, MachineError};
use crate::config::{Config, NetBackend, NetConfig};
use crate::drill::drill;
use crate::event::Event;
use crate::event_log::EventLog;
use crate::folders::Folders;
use crate::runtime_root::RuntimeRoot;
use crate::upgrade::Successor;

/// How long to wait for the guest to read its console input. A guest that does not read would delay every rejuvenation.
/// The new QEMU gets the rest.
const TYPED_PATIENCE: Duration = Duration::from_millis(500);
/// The guest's first steps in a new QEMU take longest, especially under emulation, and clients wait for its answers.
/// Work that can wait and takes a processor (the end of the old QEMU, locking the new one's files) is delayed this
/// long.
const FIRST_STEPS: Duration = Duration::from_millis(200);
/// Shown when QEMU died before it could be replaced.
pub const GUEST_DIED_WITH_QEMU: &str = "QEMU has died, so its guest cannot continue in another one; it reboots warm";

/// Rejuvenations of the machine: of its QEMU, and of its keeper.
#[derive(Default)]
pub struct Rejuvenations {
    /// The hop that is under way, while the loop goes on.
    pub hop: Option<HopUnderWay>,
    /// The last hop.
    pub last: Option<Rejuvenation>,
    /// Result of the resume of a parked guest, if this keeper found one.
    pub unparked: Option<Unparked>,
    pub schedule: Schedule,
    /// The program that replaces this keeper, and the incarnation that it takes over.
    pub successor: Option<(Successor, u32)>,
    /// The guest is being parked.
    pub parking: Option<Parking>,
    /// Thread of a park that was given up while it waited for a disk.
    pub stuck_park: Option<JoinHandle<()>>,
}

/// A hop while the loop goes on.
pub struct HopUnderWay {
    progress: Progress,
    stage: Stage,
}

/// What a hop waits for.
enum Stage {
    /// The new QEMU is starting. The longer the ticker watches the better.
    Launch { job: LaunchJob<Started>, ticker: Option<Ticker> },
    /// The guest, which runs in the new QEMU, makes its first steps there.
    FirstSteps { began: Instant, old: Box<Generation>, new: Box<Replaced> },
    /// The old QEMU ends, and with it its hold on the ports that lead into the guest.
    OldEnds { began: Instant, old: Box<Generation>, new: Box<Replaced> },
    /// The new QEMU opens these ports.
    Forwards { began: Instant, new: Box<Replaced> },
}

/// The QEMU that has replaced another one.
struct Replaced {
    identity: QemuIdentity,
    status: QemuStatus,
}

/// What the job of a hop comes back with.
struct Started {
    /// Version of the program, if it told one.
    version: Option<String>,
    began: Instant,
    took: Duration,
    new: Result<New, Failure>,
}

/// A QEMU that waits for the guest of another one.
struct New {
    binary: Binary,
    generation: Generation,
    /// Where it waits for the guest's state.
    target: Target,
    /// Lets the guest stand still.
    lock: HopLock,
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    GivenUp(String),
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error(
        "QEMU {version} ({program}) has no machine type {machine_type}, which the guest has; choose a QEMU that has it \
         (PROGRAM -machine help)"
    )]
    MachineType { version: Version, program: PathBuf, machine_type: String },
    #[error("the guest's networks: {0}")]
    Networks(String),
    #[error("cannot start the new QEMU")]
    Launch(#[from] LaunchError),
    #[error("the new QEMU failed; its last message: {last_words}")]
    Hop { last_words: String, source: RejuvenationError },
    #[error("cannot take over unanswered requests to disk {disk}: {why}")]
    Unanswered { disk: String, why: String },
    #[error(transparent)]
    Hand(#[from] RejuvenationError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the guest may have run on the new QEMU, and was lost with it")]
    Resume(#[source] RejuvenationError),
}

impl Failure {
    /// `last_words`: what the new QEMU said last, if anything.
    fn of_hop(source: RejuvenationError, last_words: Option<String>) -> Self {
        match last_words {
            Some(last_words) => Self::Hop { last_words, source },
            None => Self::Hand(source),
        }
    }
}

/// Report of a hop, written while it runs.
struct Progress {
    began: Instant,
    phase: Phase,
    report: Rejuvenation,
}

/// Refuses a QEMU without the machine type. QEMU's own message does not name the missing type.
fn must_have_machine_type(config: &Config, binary: &Binary) -> Result<(), Failure> {
    let machine_type = launch::machine_type(&config.guest);
    // A QEMU that cannot list its types is tried anyway.
    match binary.machine_types() {
        Ok(types) if types.q35(machine_type).is_none() => {
            let (program, machine_type) = (binary.path().to_owned(), machine_type.to_owned());
            Err(Failure::MachineType { version: binary.version(), program, machine_type })
        }
        _ => Ok(()),
    }
}

impl Rejuvenations {
    /// Refuses while another QEMU is starting, which is to have the guest as it is.
    pub fn must_not_hop(&self, what: &str) -> Result<(), ApiError> {
        if self.hop.is_none() {
            return Ok(());
        }
        let message = format!("cannot {what}: the guest is being moved to another QEMU");
        Err(ApiError::new(ErrorWord::WrongState, message).hint("wait until the rejuvenation has ended"))
    }

    /// When something of the hop is due.
    pub fn hop_deadline(&self) -> Option<Instant> {
        match &self.hop.as_ref()?.stage {
            Stage::Launch { .. } | Stage::Forwards { .. } => None,
            Stage::FirstSteps { began, .. } => Some(*began + FIRST_STEPS),
            Stage::OldEnds { began, .. } => Some(*began + END_PATIENCE),
        }
    }

    /// Whether the thread of a park that was given up still waits for a disk.
    pub fn is_park_stuck(&self) -> bool {
        self.stuck_park.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// When the hop that is under way began.
    pub fn hops_since(&self) -> Option<String> {
        self.hop.as_ref().map(|hop| hop.progress.report.started_at.clone())
    }
}

impl Started {
    /// Starts QEMU from this program, or the one on the path, to take the guest over from `old`.
    fn start(
        plan: Plan,
        old: &Qmp,
        config: &Config,
        program: Option<&Path>,
        root: &RuntimeRoot,
        control: &LaunchControl,
    ) -> Self {
        let began = Instant::now();
        let mut version = None;
        let launched = Binary::find(program).map_err(Failure::from).and_then(|binary| {
            version = Some(binary.version().to_string());
            must_have_machine_type(config, &binary)?;
            let starts = HopLock::to_start(root, control);
            let generation = plan.start_from(&binary, control)?;
            // Whether a QEMU answers must not hold up the hops of other machines.
            drop(starts);
            // Here, because the machine's loop does the rest.
            let target = rejuvenation::prepare_both(old, &generation.qmp, PAUSE_PATIENCE)
                .map_err(|source| Failure::of_hop(source, generation.process.last_words()))?;
            Ok((binary, generation, target))
        });
        let took = began.elapsed();
        let new = launched.map(|(binary, generation, target)| {
            let lock = HopLock::to_stand_still(root, control);
            New { binary, generation, target, lock }
        });
        Self { version, began, took, new }
    }
}

fn has_forwards(nets: &[NetConfig]) -> bool {
    nets.iter().any(|net| matches!(&net.backend, NetBackend::User { forward, .. } if !forward.is_empty()))
}

/// Opens the forwarded ports. A successor is started without them, because the old QEMU still has them.
fn open_forwards(config: &Config, log: &EventLog, qmp: &Qmp) {
    for (net, forward) in launch::user_forwards(&config.devices.nets) {
        if let Err(error) = qmp.add_forward(&net, &forward) {
            let message = format!("{net}: {forward} no longer reaches the guest: {error}");
            log.record(EventKind::Error { message });
        }
    }
}

/// Whether this QEMU has run the guest, or may have. The keeper may have died before it sent the last bytes; then this
/// ends that QEMU.
fn has_begun(folders: &Folders, successor: &QemuIdentity) -> bool {
    let Some(process) = Generation::find(folders, successor) else { return true };
    let socket = folders.qmp_socket(successor.generation);
    let end = || {
        process.kill();
        process.ends_within(END_PATIENCE);
    };
    Qmp::connect(&socket, PAUSE_PATIENCE, &process, |_| {})
        .and_then(|new| rejuvenation::has_begun(&new, end))
        .unwrap_or(true)
}

impl Context {
    fn note_hop(&mut self, hop: impl Into<Option<HopNote>>) {
        self.journal.hop = hop.into();
        if let Err(error) = self.must_save_journal() {
            tracing::error!(%error, "journal cannot be written: a new keeper would look for a QEMU that has ended");
        }
    }
}

impl Disks {
    /// Lets the new QEMU connect to the disks. If the old QEMU does not use a disk, requests to that disk are only in
    /// its inflight region, which this keeper does not have; so the region is copied from QEMU's memory.
    fn allow_successor(&self, old_pid: u32) -> Result<(), Failure> {
        for disk in &self.servers {
            let result = if is_silent(disk) {
                let unanswered = |why: String| Failure::Unanswered { disk: disk.name().to_owned(), why };
                let mut found = memory_of(old_pid, &inflight_name(disk.name()))
                    .map_err(|error| unanswered(format!("its memory cannot be read: {error}")))?;
                match (found.pop(), found.is_empty()) {
                    (Some(left), true) => disk.set_handover_from_silent(left),
                    _ => return Err(unanswered("QEMU has no record of them, or several".to_owned())),
                }
            } else {
                disk.set_handover(true)
            };
            result.map_err(RejuvenationError::Server)?;
        }
        Ok(())
    }

    /// The disks are for the QEMU that has the guest again, and for no other.
    fn close_to_others(&self, living: &QemuIdentity) {
        self.expect_only(Peer { pid: living.pid, start_ticks: living.start_ticks });
        self.end_handover();
    }

    /// A QEMU that waits for its turn at a disk is cut off.
    fn end_handover(&self) {
        if let Err(error) = rejuvenation::set_handover(&self.servers, false) {
            tracing::error!(%error, "lost a disk");
        }
    }

    fn hop<'a>(&'a self, old: &'a Generation, new: &'a Generation) -> Hop<'a> {
        Hop {
            old: &old.qmp,
            new: &new.qmp,
            disks: &self.servers,
            gates: old.gates().zip(new.gates()),
            has_generation_id: old.identity().vmgenid.is_some(),
            patience: PAUSE_PATIENCE,
        }
    }
}

impl Machine {
    /// Refuses if a rejuvenation cannot begin now.
    pub(super) fn may_rejuvenate(&self) -> Result<(), ApiError> {
        self.may_replace_qemu()?;
        self.disks.must_be_in_use("rejuvenate")
    }

    /// Refuses if another QEMU cannot take the guest over. The current QEMU need not use its disks.
    pub(super) fn may_replace_qemu(&self) -> Result<(), ApiError> {
        if self.state.shown() == MachineState::Recovering && self.crash_recovery.last_end == Some(EndCause::QemuDied) {
            let message = format!("cannot rejuvenate: {GUEST_DIED_WITH_QEMU}");
            return Err(ApiError::new(ErrorWord::WrongState, message).hint("`hearth status` shows what it waits for"));
        }
        self.must_live("rejuvenate")?;
        if !self.state.is_undisturbed() || self.state.is_ending() {
            let state = self.state.shown().name();
            let message = format!("cannot rejuvenate: the machine is {state}, or is stopping or rebooting");
            return Err(ApiError::new(ErrorWord::WrongState, message).hint("only a running guest can be rejuvenated"));
        }
        if let Some(why) = self.state.guest().and_then(|life| life.generation.endpoints().err()) {
            let message = format!("cannot rejuvenate: another QEMU cannot take over the guest's networks: {why}");
            return Err(ApiError::new(ErrorWord::WrongState, message).hint("reboot the guest; after that it can"));
        }
        must_have_all_state(&self.context.config, "rejuvenate")?;
        self.nothing_must_be_on_its_way("rejuvenate")
    }

    /// Refuses while a part of the guest's memory or disks is still being loaded, or QEMU must not be paused and
    /// continued.
    pub(super) fn must_be_at_rest(&self, what: &str) -> Result<(), ApiError> {
        self.disks.must_be_in_use(what)?;
        self.nothing_must_be_on_its_way(what)
    }

    fn nothing_must_be_on_its_way(&self, what: &str) -> Result<(), ApiError> {
        self.rejuvenation.must_not_hop(what)?;
        self.must_run(what)?;
        if !self.memory.is_granted() {
            let message =
                format!("cannot {what}: the guest's memory is still being granted step by step through its QEMU");
            return Err(ApiError::new(ErrorWord::WrongState, message).hint("`hearth status` shows when that has ended"));
        }
        self.lazy_restore.must_be_complete(what)?;
        self.disks.must_be_complete(what)?;
        self.disks.must_have_space(&self.context, what)?;
        self.copies.must_have_moment(what)?;
        self.saves.must_be_none(what)
    }

    /// Begins a hop: `launched` goes on with it. `may_replace_qemu` allows it.
    pub(super) fn rejuvenate(&mut self, request: &RejuvenateRequest) {
        self.with_guest(|machine, life| {
            let ticker = (machine.context.qemu.accelerator.accelerator == Accelerator::Tcg).then(Ticker::watch);
            let mut progress = Progress::begin(&life.generation);
            match machine.launch_successor(life, request) {
                Ok(job) => {
                    let stage = Stage::Launch { job, ticker };
                    machine.rejuvenation.hop = Some(HopUnderWay { progress, stage });
                }
                Err(failure) => {
                    progress.ended(Phase::Launch, progress.began, progress.began.elapsed());
                    machine.not_launched(life, machine.context.journal.generation);
                    machine.not_replaced(life, progress, &failure);
                }
            }
        });
    }

    fn launch_successor(&mut self, life: &Life, request: &RejuvenateRequest) -> Result<LaunchJob<Started>, Failure> {
        self.disks.allow_successor(life.generation.identity().pid)?;
        self.context.journal.generation += 1;
        let (number, disks) = (self.context.journal.generation, &self.disks.servers);
        let endpoints = life.generation.endpoints().map_err(|why| Failure::Networks(why.to_owned()))?;
        let plan = Plan::successor(&self.context, disks, &life.incarnation, number, &life.generation, endpoints)?;
        let (config, root) = (self.context.config.clone(), self.context.root.clone());
        let program = request.qemu.clone().or_else(|| config.qemu.program.clone());
        let old = Arc::clone(&life.generation.qmp);
        let start =
            move |control: &LaunchControl| Started::start(plan, &old, &config, program.as_deref(), &root, control);
        let job = LaunchJob::begin(&self.context.config.name, number, self.context.outside.tell.clone(), start);
        Ok(job.map_err(LaunchError::Thread)?)
    }

    /// The job that was to start a QEMU has ended.
    pub(super) fn launched(&mut self, generation: u32) -> Result<(), MachineError> {
        let launches =
            |hop: &HopUnderWay| matches!(&hop.stage, Stage::Launch { job, .. } if job.number() == generation);
        if self.rejuvenation.hop.as_ref().is_some_and(launches) {
            self.replace_qemu();
        } else if self.state.launch().is_some_and(|next| next.generation() == generation) {
            return self.apply(Input::Launched);
        } else if !self.is_current(generation) {
            self.context.qemu.given_up.retain(|run| run.number() != generation);
            self.context.folders.discard_generation(generation);
        }
        Ok(())
    }

    /// The new QEMU waits for the guest, unless it could not be started.
    fn replace_qemu(&mut self) {
        let Some(HopUnderWay { mut progress, stage: Stage::Launch { job, ticker } }) = self.rejuvenation.hop.take()
        else {
            return;
        };
        let number = job.number();
        let Started { version, began, took, new } = job.end();
        progress.report.version = version;
        progress.ended(Phase::Launch, began, took);
        drill(Phase::Launch.name());
        let may_go_on = self.may_replace_qemu().map_err(|refusal| Failure::GivenUp(refusal.to_string()));
        self.with_guest(|machine, life| {
            let replaced = match may_go_on.and(new) {
                Ok(new) => machine.move_guest(life, new, ticker, &mut progress),
                Err(failure) => {
                    machine.not_launched(life, number);
                    Err(failure)
                }
            };
            match replaced {
                Ok(old) => machine.begin_retirement(old, &life.generation, progress),
                Err(failure) => machine.not_replaced(life, progress, &failure),
            }
        });
        // Through the channel that it has now.
        self.thaw();
        self.watch_ready();
    }

    /// The guest stays in the QEMU that it has.
    fn not_launched(&self, life: &Life, number: u32) {
        self.disks.close_to_others(&life.generation.identity());
        if number != life.generation.number {
            self.context.folders.discard_generation(number);
        }
    }

    /// Something else comes first: a QEMU that is starting ends, and one that was replaced ends at once. Fine if there is no hop.
    pub(super) fn give_up_hop(&mut self, why: &str) {
        let Some(HopUnderWay { mut progress, stage }) = self.rejuvenation.hop.take() else { return };
        let job = match stage {
            Stage::Launch { job, .. } => job,
            Stage::FirstSteps { began, old, new } => {
                self.retire(&old, &new);
                return self.replaced(progress, began, *new);
            }
            // The guest, to which its ports lead, is about to end.
            Stage::OldEnds { began, new, .. } | Stage::Forwards { began, new } => {
                return self.replaced(progress, began, *new);
            }
        };
        self.context.qemu.given_up.push(job.give_up());
        progress.ended(Phase::Launch, progress.began, progress.began.elapsed());
        match self.state.guest() {
            Some(life) => self.disks.close_to_others(&life.generation.identity()),
            None => self.disks.end_handover(),
        }
        let guest_lost = self.state.guest().is_none_or(|life| life.generation.process.has_ended());
        self.failed(progress, &Failure::GivenUp(why.to_owned()), guest_lost);
    }

    fn not_replaced(&mut self, life: &Life, progress: Progress, failure: &Failure) {
        let guest_lost = matches!(failure, Failure::Resume(_)) || life.generation.process.has_ended();
        self.failed(progress, failure, guest_lost);
    }

    fn failed(&mut self, mut progress: Progress, failure: &Failure, guest_lost: bool) {
        self.record_phases(&progress);
        let (phase, why) = (progress.phase.name().to_owned(), crate::chain(failure));
        progress.report.failure = Some(format!("{phase}: {why}"));
        self.context.record(EventKind::RejuvenationFailed { phase, why, guest_lost });
        self.rejuvenation.last = Some(progress.report);
    }

    /// The hop has ended.
    fn replaced(&mut self, mut progress: Progress, retired_since: Instant, new: Replaced) {
        progress.ended(Phase::Retire, retired_since, retired_since.elapsed());
        drill(Phase::Retire.name());
        self.record_phases(&progress);
        let (generation, version) = (new.status.generation, new.status.version.clone());
        self.record_qemu(new.status);
        self.context.record(EventKind::Rejuvenated {
            generation,
            from_version: progress.report.from_version.clone(),
            version,
            pause_ms: progress.report.pause_ms.unwrap_or_default(),
        });
        self.rejuvenation.last = Some(progress.report);
    }

    fn record_phases(&self, progress: &Progress) {
        for phase in &progress.report.phases {
            self.context.record(EventKind::Phase { phase: phase.phase.clone(), duration_ms: phase.duration_ms });
        }
    }

    /// Moves the guest to the new QEMU. Returns the QEMU that had it.
    fn move_guest(
        &mut self,
        life: &mut Life,
        New { binary, generation: new, target, lock }: New,
        ticker: Option<Ticker>,
        progress: &mut Progress,
    ) -> Result<Generation, Failure> {
        let standstill = Standstill::watch(&life.generation.qmp, &self.disks.servers);
        let resumed = match self.hand_over(&life.generation, &new, (target, ticker), progress) {
            Ok((mut handed, committed)) => self
                .resume(&life.generation, &new, (&mut handed, committed), progress)
                .map(|pause| handed.debt_after(pause)),
            Err(failure) => Err(self.go_back(&life.generation, &new, failure)),
        };
        match resumed {
            Ok(debt) => self.context.journal.clock_debt = debt,
            Err(failure) => {
                let stood = standstill.over(&self.disks.servers);
                // A lost guest has no clock to correct, and a new keeper would look for its old QEMU.
                if !matches!(failure, Failure::Resume(_)) {
                    self.context.journal.clock_debt = self.context.journal.clock_debt.after_standing(stood);
                    self.context.save_journal();
                }
                progress.report.pause_ms = (!stood.is_zero()).then_some(stood.as_secs_f64() * 1e3);
                return Err(failure);
            }
        }
        drop(lock);
        self.context.qemu.binary = Some(binary);
        let mut old = std::mem::replace(&mut life.generation, new);
        life.generation.keep_running();
        life.generation.inherit(&mut old);
        Ok(old)
    }

    /// All phases before the point of no return.
    fn hand_over(
        &mut self,
        old: &Generation,
        new: &Generation,
        (target, ticker): (Target, Option<Ticker>),
        progress: &mut Progress,
    ) -> Result<(Handed, Staged), Failure> {
        self.disks.admit(&self.context, new.identity().pid);
        self.context.outside.console.expect(new.console(&self.context.folders), TYPED_PATIENCE);
        self.disks.end_greeting(&mut self.context);
        self.context.journal.hop = Some(HopNote { successor: new.identity(), committed: false });
        self.context.journal.write_through = self.disks.write_through();
        self.context.journal.save(&self.context.folders.journal())?;
        let committed = self.stage_commit(new)?;
        let hop = self.disks.hop(old, new);
        let admitted = progress.run(Phase::Admit, |_| hop.admit())?;
        let prepared = progress.run(Phase::Prepare, |_| hop.prepare(target))?;
        let handed =
            progress.run(Phase::Hand, |_| hop.hand(&admitted, prepared, ticker, self.context.journal.clock_debt))?;
        progress.report.state_bytes = Some(handed.state_bytes);
        let write_through = self.disks.write_through();
        if self.context.journal.write_through == write_through {
            return Ok((handed, committed));
        }
        // The guest has switched a write cache meanwhile.
        drop(committed);
        self.context.journal.write_through = write_through;
        Ok((handed, self.stage_commit(new)?))
    }

    /// Writes the journal that will count from the point of no return on.
    fn stage_commit(&self, new: &Generation) -> Result<Staged, JournalError> {
        let committed = Some(HopNote { successor: new.identity(), committed: true });
        Journal { hop: committed, ..self.context.journal.clone() }.stage(&self.context.folders.journal())
    }

    /// Ends the new QEMU and continues the guest on the old one.
    fn go_back(&mut self, old: &Generation, new: &Generation, failure: Failure) -> Failure {
        // A QEMU that fails prints the reason and ends; one that hangs prints nothing.
        let ended = matches!(failure, Failure::Hand(RejuvenationError::NewEnded | RejuvenationError::NewFailed))
            && new.process.ends_within(Duration::from_secs(1));
        new.process.kill();
        if !new.process.ends_within(END_PATIENCE) {
            tracing::error!(
                pid = new.identity().pid,
                "the new QEMU does not exit after SIGKILL; it can no longer run the guest"
            );
        }
        let last_words = ended.then(|| new.process.last_words()).flatten();
        self.disks.close_to_others(&old.identity());
        self.context.outside.console.end_switch(false);
        // From now on a new keeper must continue the guest on the old QEMU.
        self.context.note_hop(HopNote { successor: new.identity(), committed: false });
        // Open the gates before the guest continues: continuing wakes the networks.
        if let Some(gates) = old.gates() {
            gates.open_up();
        }
        if let Err(error) = rejuvenation::roll_back(&old.qmp, PAUSE_PATIENCE) {
            // In that case QEMU has closed the connection and is about to end.
            if !matches!(error, QmpError::Ended) {
                let message = format!("the old QEMU cannot continue its guest; ending it: {error}");
                self.context.record(EventKind::Error { message });
                old.process.kill();
            }
            // Wait for the end: the process decides whether the guest is lost.
            if !old.process.ends_within(END_PATIENCE) {
                tracing::error!(pid = old.identity().pid, "the old QEMU does not exit");
            }
        }
        // The old QEMU may have ended.
        let _ = old.qmp.close_kept();
        self.context.note_hop(None);
        match (failure, last_words) {
            (Failure::Hand(source), last_words) => Failure::of_hop(source, last_words),
            (failure, _) => failure,
        }
    }

    /// Passes the point of no return. Returns how long the guest was paused. If the new QEMU fails here and the guest
    /// may have run, the guest is lost: both QEMUs are ended, and a warm reboot follows.
    fn resume(
        &mut self,
        old: &Generation,
        new: &Generation,
        (handed, committed): (&mut Handed, Staged),
        progress: &mut Progress,
    ) -> Result<Duration, Failure> {
        self.context.journal.hop = Some(HopNote { successor: new.identity(), committed: true });
        if let Err(error) = committed.enact() {
            progress.phase = Phase::Resume;
            return Err(self.go_back(old, new, error.into()));
        }
        drill("commit");
        let hop = self.disks.hop(old, new);
        match progress.run(Phase::Resume, |_| hop.resume(handed)) {
            Ok(pause) => {
                // The guest need not wait for this: its output is read after the old QEMU's last output.
                self.context.outside.console.end_switch(true);
                self.context.show_screen_of(new.number);
                progress.report.pause_ms = Some(pause.as_secs_f64() * 1e3);
                Ok(pause)
            }
            Err(error) => {
                new.process.kill();
                new.process.ends_within(END_PATIENCE);
                if !handed.has_run() {
                    return Err(self.go_back(old, new, error.into()));
                }
                self.context.outside.console.end_switch(true);
                old.process.kill();
                self.disks.close_to_others(&old.identity());
                // The next guest's keeper must look for neither.
                self.context.journal.hop = None;
                Err(Failure::Resume(error))
            }
        }
    }

    /// The guest is the new one's, whatever happens from here on. A journal that cannot be written says that as well, by the hop
    /// in it.
    fn begin_retirement(&mut self, old: Generation, new: &Generation, progress: Progress) {
        let new = Box::new(Replaced { identity: new.identity(), status: new.status() });
        let (began, old) = (Instant::now(), Box::new(old));
        let stage = if has_forwards(&self.context.config.devices.nets) {
            // The old one still has the ports that lead into the guest: who comes anew waits for its end.
            self.retire(&old, &new);
            Stage::OldEnds { began, old, new }
        } else {
            Stage::FirstSteps { began, old, new }
        };
        self.rejuvenation.hop = Some(HopUnderWay { progress, stage });
    }

    fn retire(&mut self, old: &Generation, new: &Replaced) {
        old.process.kill();
        self.disks.close_to_others(&new.identity);
        self.context.journal.qemu = Some(new.identity.clone());
        self.disks.forget_greeting(&mut self.context);
        self.context.note_hop(None);
        self.pin(new.identity.pid);
    }

    /// The guest has had the time that it was given, or the old QEMU has ended or is not going to.
    pub(super) fn continue_retirement(&mut self) {
        let Some(HopUnderWay { progress, stage }) = self.rejuvenation.hop.take() else { return };
        match stage {
            Stage::Launch { .. } => self.rejuvenation.hop = Some(HopUnderWay { progress, stage }),
            Stage::FirstSteps { began, old, new } => {
                self.retire(&old, &new);
                self.replaced(progress, began, *new);
            }
            Stage::OldEnds { began, new, .. } => {
                self.rejuvenation.hop = Some(HopUnderWay { progress, stage: Stage::Forwards { began, new } });
                self.have_forwards_opened();
            }
            Stage::Forwards { began, new } => self.replaced(progress, began, *new),
        }
    }

    fn have_forwards_opened(&mut self) {
        let (config, log) = (self.context.config.clone(), self.context.outside.event_log.clone());
        let tell = self.context.outside.tell.clone();
        let Some(life) = self.state.guest_mut() else { return };
        let generation = life.generation.number;
        let told = life.generation.tell(move |qmp| {
            open_forwards(&config, &log, qmp);
            // Fails only when the loop is gone.
            let _ = tell.send(Event::ForwardsOpen { generation });
        });
        if let Err(error) = told {
            let message = format!("ports no longer reach the guest: cannot start a thread: {error}");
            self.context.record(EventKind::Error { message });
            self.forwards_opened();
        }
    }

    /// QEMU has opened the ports that lead into its guest, or could not.
    pub(super) fn forwards_opened(&mut self) {
        if self.rejuvenation.hop.as_ref().is_some_and(|hop| matches!(hop.stage, Stage::Forwards { .. })) {
            self.continue_retirement();
        }
    }

    /// The QEMU that a rejuvenation replaced, or that was to replace it, has ended.
    pub(super) fn retired(&mut self, generation: u32) {
        self.context.folders.discard_generation(generation);
        let ends = |hop: &HopUnderWay| matches!(&hop.stage, Stage::OldEnds { old, .. } if old.number == generation);
        if self.rejuvenation.hop.as_ref().is_some_and(ends) {
            self.continue_retirement();
        }
    }

    /// The QEMU that has the guest according to a dead keeper's journal, and whether a hop was cut off. If there is
    /// another QEMU, it counts as a stray and is ended first.
    pub(super) fn find_qemu_of_guest(&mut self) -> (Option<QemuIdentity>, bool) {
        match self.context.journal.hop.take() {
            None => (self.context.journal.qemu.take(), false),
            Some(HopNote { successor, committed: true }) if has_begun(&self.context.folders, &successor) => {
                (Some(successor), true)
            }
            Some(HopNote { successor, .. }) => {
                self.context.note_hop(HopNote { successor, committed: false });
                self.context.journal.hop = None;
                (self.context.journal.qemu.take(), true)
            }
        }
    }

    /// Continues the guest after a hop that was cut off.
    pub(super) fn finish_hop(&self, generation: &mut Generation) {
        generation.set_stale();
        self.disks.wake(&self.context, generation);
        open_forwards(&self.context.config, &self.context.outside.event_log, &generation.qmp);
    }
}

impl Progress {
    fn begin(old: &Generation) -> Self {
        let report = Rejuvenation {
            started_at: rfc3339(SystemTime::now()),
            from_version: old.identity().version,
            version: None,
            failure: None,
            pause_ms: None,
            state_bytes: None,
            phases: Vec::new(),
        };
        Self { began: Instant::now(), phase: Phase::Launch, report }
    }

    fn run<T, E>(&mut self, phase: Phase, work: impl FnOnce(&mut Rejuvenation) -> Result<T, E>) -> Result<T, E> {
        self.phase = phase;
        let began = Instant::now();
        let result = work(&mut self.report);
        self.ended(phase, began, began.elapsed());
        drill(phase.name());
        result
    }

    fn ended(&mut self, phase: Phase, began: Instant, took: Duration) {
        let started_ms = began.duration_since(self.began).as_secs_f64() * 1e3;
        let duration_ms = took.as_secs_f64() * 1e3;
        self.report.phases.push(PhaseTime { phase: phase.name().to_owned(), started_ms, duration_ms });
    }
}
