//! Restore of a machine from a snapshot: order, threads, journal. `hearth_recovery::lazy_restore` loads the memory.
//!
//! order (`lazy_restore::Order`, beside machine.toml) -> open and check the snapshot -> disks -> start a QEMU that
//! waits, and prefetch meanwhile -> register its memory, give the disks the gate -> load the devices' state ->
//! (journal: the guest is in that QEMU) -> remove the order -> the guest runs -> serve faults, fill in the rest ->
//! complete. `Step` names the steps after which a drill can kill a keeper.
//!
//! A keeper that is killed before the journal names the guest leaves a QEMU without a guest, and disks that nobody has
//! written to. The next keeper finds the order and starts again. After that point the guest waits for its memory, and
//! the next keeper continues.

mod ahead;
mod failure;
mod fill;
mod order;
mod restoring;
mod trace;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use hearth_api::{ApiError, ErrorWord, EventKind, RestoreStatus};
use hearth_disk::arrival::MissPolicy;
use hearth_disk::gate::Gate;
use hearth_disk::image::Unwritten;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::admission::AdmissionError;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::{QemuIdentity, RestoreNote};
use hearth_recovery::lazy_restore::{LazyRam, Mode, Order, Step, Trouble};
use hearth_recovery::snapshot::Snapshot;
use hearth_recovery::snapshot::state;

use ahead::{Ahead, ahead};
pub use failure::RestoreFailure;
use fill::fill;
pub use order::RestoreOrder;
pub use restoring::Restoring;
use trace::note_first_touches;
pub use trace::{Probe, Trace};

use super::context::Context;
use super::disks::Disks;
use super::generation::{Devices, Generation, Plan};
use super::launch_job::LaunchControl;
use super::start::{self, Activity};
use super::state::Input;
use super::{Machine, MachineError};
use crate::drill::drill;
use crate::event::{Event, RestoreMessage};
use crate::object_store::{open_snapshot, saved_disks};

/// How long to wait for the state to be loaded. It takes 20 ms, but may wait for pages from an object store.
const STATE_PATIENCE: Duration = Duration::from_secs(60);
/// Threads that serve page faults from an object store. Each waits for its own page, at least for a round trip.
const SERVERS_FROM_AFAR: usize = 4;

/// A guest that is being restored.
struct Arriving {
    order: RestoreOrder,
    snapshot: Arc<Snapshot>,
    incarnation: Incarnation,
    began: Instant,
}

/// Sends messages about one generation's restore to the machine's loop.
#[derive(Clone)]
struct RestoreReporter {
    tell: Sender<Event>,
    generation: u32,
}

impl RestoreReporter {
    fn of(context: &Context, generation: u32) -> Self {
        Self { tell: context.outside.tell.clone(), generation }
    }

    fn say(&self, message: RestoreMessage) {
        // Fails only when the loop has ended; then nobody needs the message.
        let _ = self.tell.send(Event::Restore { generation: self.generation, message });
    }

    fn say_end(&self, error: &AdmissionError) {
        if !matches!(error, AdmissionError::Gone { .. }) {
            let message = format!("cannot load the guest's memory any more: {}", crate::chain(error));
            self.say(RestoreMessage::Failed { message });
        }
    }
}

/// The restore of the living incarnation from a snapshot.
#[derive(Default)]
pub struct LazyRestore {
    /// May be set before this keeper has the guest's QEMU.
    restoring: Option<Restoring>,
    /// A restore ended before its guest ran, because the machine was told to stop.
    pub was_cancelled: bool,
}

impl LazyRestore {
    /// The restore order of this keeper, or of an earlier one that died before the guest ran.
    pub fn order(context: &mut Context) -> Result<Option<RestoreOrder>, MachineError> {
        let left = context.journal.restore.take();
        if let Some(order) = context.restore.take() {
            return Ok(Some(order));
        }
        let config = &context.config;
        let Some(noted) = Order::load(&config.file)? else {
            if let Some(RestoreNote { snapshot, begun: false, .. }) = left {
                let snapshot = snapshot.display();
                let message = format!(
                    "an earlier Hearth began to restore {snapshot} under this name without recording its \
                     configuration; the machine boots instead"
                );
                context.record(EventKind::Error { message });
            }
            return Ok(None);
        };
        let disks: Vec<&Path> = config.devices.disks.iter().map(|disk| disk.path.as_path()).collect();
        if let Some(why) = noted.void_for(&config.file, &disks) {
            let order = Order::path(&config.file);
            let message = format!("{} is not valid for this machine, which boots instead: {why}", order.display());
            context.record(EventKind::Error { message });
            return Ok(None);
        }
        let Order { snapshot, seal, mode, .. } = noted;
        Ok(Some(RestoreOrder { snapshot, seal: Some(seal), mode, trace: None }))
    }

    /// The gate that disks must use before they touch the guest's memory, while some is missing.
    pub fn gate(&self) -> Option<Gate> {
        self.restoring.as_ref().and_then(Restoring::gate)
    }

    /// Whether all of the guest's memory was loaded from its snapshot.
    pub fn is_complete(&self) -> bool {
        self.restoring.as_ref().is_none_or(Restoring::is_complete)
    }

    /// Refuses while memory is missing. Whatever reads a guest's memory, or moves it to another QEMU, needs all of it.
    pub fn must_be_complete(&self, what: &str) -> Result<(), ApiError> {
        if self.is_complete() {
            return Ok(());
        }
        let message = format!("cannot {what}: the guest's memory is still being loaded from its snapshot");
        Err(ApiError::new(ErrorWord::WrongState, message).hint("`hearth status` shows how much is missing"))
    }

    pub fn status(&self) -> Option<RestoreStatus> {
        self.restoring.as_ref().map(Restoring::status)
    }

    /// Names a missing page as the cause of a failure. QEMU itself waits for pages while it loads or starts a guest,
    /// and does not answer then.
    fn with_damage(&self, failure: RestoreFailure) -> RestoreFailure {
        match self.unreadable() {
            what if what.is_empty() => failure,
            what if matches!(failure, RestoreFailure::Damaged { .. }) => RestoreFailure::Damaged { what, source: None },
            what => RestoreFailure::Damaged { what, source: Some(Box::new(failure)) },
        }
    }

    /// Why pages cannot be loaded now. Empty if they can.
    fn unreadable(&self) -> String {
        self.status().map(|status| status.waits.join("; ")).unwrap_or_default()
    }

    fn register(
        &mut self,
        context: &Context,
        disks: &Disks,
        arriving: &Arriving,
        generation: &Generation,
        is_over: Arc<AtomicBool>,
    ) -> Result<(), RestoreFailure> {
        let Arriving { order, snapshot, incarnation, began } = arriving;
        let lazy = match order.mode {
            Mode::Eager => None,
            Mode::Lazy | Mode::WorkingSet => {
                let userfault =
                    generation.userfault().map_err(|why| RestoreFailure::Userfault { why: why.to_owned() })?;
                let teller = RestoreReporter::of(context, generation.number);
                let end = generation.process.killer();
                let tell = move |Trouble { why, is_damage }| {
                    if is_damage && !is_over.swap(true, Relaxed) {
                        end();
                    }
                    teller.say(RestoreMessage::Waits { why });
                };
                let (tracing, prefetched) = (order.trace.is_some(), ahead(snapshot, order.mode));
                let (of, ram) = (snapshot.clone(), &incarnation.ram);
                Some(LazyRam::register(of, ram, userfault, prefetched, tracing, tell)?)
            }
        };
        let pages = snapshot.ram.pages().len() as u64;
        let restoring = Restoring::new(&order.snapshot, order.mode, *began, pages, lazy);
        self.serve_faults(context, restoring, generation.number)?;
        // A disk without the gate would read zeroes where memory is missing, and leave them there.
        disks.try_set_gate(self.gate())?;
        Ok(())
    }

    fn serve_faults(
        &mut self,
        context: &Context,
        mut restoring: Restoring,
        generation: u32,
    ) -> Result<(), RestoreFailure> {
        for _ in 0..if restoring.is_far() { SERVERS_FROM_AFAR } else { 1 } {
            let teller = RestoreReporter::of(context, generation);
            restoring.start(format!("faults-{}", context.config.name), move |lazy| {
                if let Err(error) = lazy.serve() {
                    teller.say_end(&error);
                }
            })?;
        }
        self.restoring = Some(restoring);
        Ok(())
    }

    /// Begins to fill in the rest of the memory, once the guest runs.
    fn fill_behind(
        &mut self,
        context: &mut Context,
        disks: &Disks,
        generation: u32,
        trace: Option<Trace>,
    ) -> Result<(), RestoreFailure> {
        let (teller, name) = (RestoreReporter::of(context, generation), format!("fill-{}", context.config.name));
        let Some(restoring) = &mut self.restoring else { return Ok(()) };
        if restoring.is_complete() {
            self.complete(context, disks);
            return Ok(());
        }
        restoring.start(name, move |lazy| {
            if let Some(trace) = trace {
                note_first_touches(lazy, &trace, &teller);
                if trace.then_stop {
                    return teller.say(RestoreMessage::Rehearsed);
                }
            }
            fill(lazy, &teller);
        })
    }

    /// All memory has been loaded.
    fn complete(&mut self, context: &mut Context, disks: &Disks) {
        let Some(restoring) = &mut self.restoring else { return };
        restoring.complete();
        let duration_ms = restoring.elapsed().as_secs_f64() * 1e3;
        let RestoreStatus { pages, pages_prefetched, pages_lazy, .. } = restoring.status();
        disks.set_gate(None);
        context.journal.restore = None;
        context.save_journal();
        context.record(EventKind::RestoreComplete { pages, pages_prefetched, pages_lazy, duration_ms });
    }

    /// Continues the restore of a dead keeper. Call it before anything else touches the guest's memory. If the snapshot
    /// cannot be read, the guest waits for a keeper that can read it.
    pub fn resume(
        &mut self,
        context: &Context,
        disks: &Disks,
        incarnation: &Incarnation,
        identity: &QemuIdentity,
    ) -> Result<Result<Userfault, String>, MachineError> {
        let Some(note) = context.journal.restore.clone() else {
            return Ok(Err("there is no snapshot".to_owned()));
        };
        let name = context.config.name.clone();
        let failed = |source: RestoreFailure| MachineError::Restore { name: name.clone(), source: Box::new(source) };
        let no_userfault = |why: String| RestoreFailure::Userfault { why };
        let userfault = match (note.mode, identity.userfault_fd) {
            (Mode::Eager, None) => return Ok(Err("a previous keeper had none".to_owned())),
            (_, None) => return Err(failed(no_userfault("a previous keeper had none".to_owned()))),
            (_, Some(fd)) => Userfault::fetch(identity.pid, fd, identity.helper_fd),
        };
        let userfault = userfault.map_err(|error| failed(no_userfault(crate::chain(&error))))?;
        let snapshot = opening(context, disks, &note.snapshot, note.seal.as_deref())().map_err(&failed)?;
        let (teller, pages) = (RestoreReporter::of(context, identity.generation), snapshot.ram.pages().len() as u64);
        let tell = move |Trouble { why, .. }| teller.say(RestoreMessage::Waits { why });
        let lazy = LazyRam::resume(Arc::new(snapshot), &incarnation.ram, &userfault, tell);
        let lazy = lazy.map_err(|error| failed(error.into()))?;
        let restoring = Restoring::new(&note.snapshot, note.mode, Instant::now(), pages, lazy);
        self.serve_faults(context, restoring, identity.generation).map_err(failed)?;
        Ok(Ok(userfault))
    }

    /// Ends the restore of a QEMU that is gone.
    pub fn end(&mut self, context: &mut Context, disks: &Disks) {
        if self.restoring.take().is_some() {
            disks.set_gate(None);
            context.journal.restore = None;
        }
    }

    /// Leaves the guest's memory to the next keeper.
    pub fn leave(self) {
        if let Some(restoring) = self.restoring {
            restoring.leave();
        }
    }
}

impl Machine {
    /// Removes the restore order. A guest of this machine will write to its disks, so no snapshot can be restored onto
    /// them any more.
    pub(super) fn forget_order(&self) -> Result<(), MachineError> {
        Ok(Order::remove(&self.context.config.file)?)
    }

    pub(super) fn restore(&mut self, order: RestoreOrder) -> Result<(), MachineError> {
        let began = Instant::now();
        // The guest does not run yet, so nobody would see what it waits for.
        self.disks.backfill.set_miss_policy(MissPolicy::Urge);
        let open = opening(&self.context, &self.disks, &order.snapshot, order.seal.as_deref());
        let step = start::Step::opens_snapshot(&format!("opening the snapshot {}", order.snapshot.display()));
        let then = move |machine: &mut Self, snapshot: Result<_, _>| {
            let snapshot = Arc::new(snapshot.map_err(|error| machine.not_restored(error))?);
            machine.launch_restored(order, snapshot, began)
        };
        self.begin_step(step, move |_| open(), then)
    }

    pub(super) fn not_restored(&self, source: RestoreFailure) -> MachineError {
        MachineError::Restore { name: self.context.config.name.clone(), source: Box::new(source) }
    }

    fn launch_restored(
        &mut self,
        order: RestoreOrder,
        snapshot: Arc<Snapshot>,
        began: Instant,
    ) -> Result<(), MachineError> {
        let (saved, configured) = (snapshot.manifest.ram_bytes, self.context.config.guest.memory_bytes);
        if saved != configured {
            let snapshot = order.snapshot;
            return Err(self.not_restored(RestoreFailure::Memory { snapshot, saved, configured }));
        }
        if let Err(error) = &snapshot.working_set {
            let message = format!("cannot use the working set: {}", crate::chain(error));
            self.context.record(EventKind::Error { message });
        }
        let (path, mode) = (order.snapshot.display().to_string(), order.mode.name().to_owned());
        self.context.record(EventKind::RestoreStarted { snapshot: path, mode });
        drill(Step::Note.name());
        let incarnation = self.next_incarnation()?;
        let manifest = &snapshot.manifest;
        self.context.journal.write_through.clone_from(&manifest.write_through);
        self.open_disks(&incarnation, Unwritten::Drop)?;
        let vmgenid = self.context.vmgenid_of_restore(manifest.vmgenid);
        let devices = Devices { vmgenid, guest_agent: manifest.guest_agent };
        let number = self.next_generation(&incarnation)?;
        let plan = Plan::restored(&self.context, &self.disks.servers, &incarnation, number, devices);
        let plan = plan.map_err(|error| self.not_restored(error.into()))?;
        let doing = Activity::new(format!("loading memory from {}", order.snapshot.display()));
        let ahead = Ahead {
            snapshot: snapshot.clone(),
            mode: order.mode,
            ram: incarnation.ram.clone(),
            machine: self.context.config.name.clone(),
            file: self.context.config.file.clone(),
            log: self.context.outside.event_log.clone(),
            doing: doing.clone(),
        };
        let arriving = Arriving { order, snapshot, incarnation, began };
        let work = move |control: &LaunchControl| ahead.launch_and_prefetch(plan, control);
        self.begin_step(start::Step::restores(doing), work, move |machine, launched| {
            let generation = launched.map_err(|failure| machine.not_restored(failure))?;
            machine.record_qemu(generation.status());
            drill(Step::Launch.name());
            machine.let_in(arriving, generation)
        })
    }

    /// The guest is in its QEMU, and is paused.
    fn begin_restored(&mut self, arriving: Arriving, generation: Generation) -> Result<(), MachineError> {
        drill(Step::LetIn.name());
        let (order, snapshot) = (&arriving.order, &arriving.snapshot);
        let (from, seal) = (order.snapshot.clone(), Some(snapshot.seal().to_owned()));
        self.context.journal.restore = Some(RestoreNote { snapshot: from, seal, mode: order.mode, begun: true });
        if snapshot.manifest.frozen {
            self.saves.note_frozen(&mut self.context);
        }
        self.context.journal.qemu = Some(generation.identity());
        self.context.must_save_journal()?;
        let noted = Order::load(&self.context.config.file)?;
        // Remove the order after writing the journal. A keeper that is killed in between leaves a paused guest, and the
        // next keeper removes the order.
        self.forget_order()?;
        drill(Step::Begin.name());
        self.disks.admit(&self.context, generation.identity().pid);
        self.disks.backfill.set_miss_policy(MissPolicy::Wait);
        let step = start::Step::has_guest("its guest begins to run");
        self.begin_step_with(step, generation, Generation::run, move |machine, generation, runs| match runs {
            Ok(()) => machine.restored(arriving, generation),
            Err(error) => {
                let failure = machine.lazy_restore.with_damage(error.into());
                drop(generation);
                machine.take_back_begin(noted);
                Err(machine.not_restored(failure))
            }
        })
    }

    fn restored(&mut self, arriving: Arriving, generation: Generation) -> Result<(), MachineError> {
        drill(Step::Run.name());
        let Arriving { order, incarnation, began, .. } = arriving;
        let number = generation.number;
        let life = self.take_guest(incarnation, generation, None);
        self.apply_infallible(Input::Runs { guest: life });
        self.context.record(EventKind::IncarnationStarted { generation: number, warm: false });
        self.thaw();
        if let Some(status) = self.lazy_restore.status() {
            let (pages, pages_prefetched) = (status.pages, status.pages_prefetched);
            let duration_ms = began.elapsed().as_secs_f64() * 1e3;
            self.context.record(EventKind::Restored { pages, pages_prefetched, duration_ms });
        }
        let filled = self.lazy_restore.fill_behind(&mut self.context, &self.disks, number, order.trace);
        filled.map_err(|failure| self.not_restored(failure))
    }

    /// Takes the start of the guest back, because it did not run and its QEMU has ended. If it has not changed its
    /// disks, the restore order is written again.
    fn take_back_begin(&mut self, order: Option<Order>) {
        (self.context.journal.qemu, self.context.journal.restore) = (None, None);
        let counters = self.disks.servers.iter().map(|disk| disk.counters());
        let wrote = counters.map(|counters| counters.writes + counters.discards).sum::<u64>() > 0;
        let again = order.filter(|_| !wrote).map_or(Ok(()), |order| order.write());
        if let Err(error) = again {
            let error = crate::chain(&error);
            tracing::warn!(
                error,
                "cannot write the restore order: the next keeper will boot the machine instead of restoring it"
            );
        }
        self.context.save_journal();
    }

    /// Loads the guest into a QEMU that waits for it. The guest is paused afterwards.
    fn let_in(&mut self, arriving: Arriving, generation: Generation) -> Result<(), MachineError> {
        // The guest does not run yet, so only QEMU itself touches memory. At a damaged page QEMU would hang, and QMP
        // with it. So QEMU is ended.
        let is_over = Arc::new(AtomicBool::new(false));
        let registered =
            self.lazy_restore.register(&self.context, &self.disks, &arriving, &generation, is_over.clone());
        registered.map_err(|failure| self.not_restored(self.lazy_restore.with_damage(failure)))?;
        let snapshot = arriving.snapshot.clone();
        let give = move |generation: &Generation| {
            let given = state::give(&generation.qmp, &snapshot.state, STATE_PATIENCE);
            let met_damage = is_over.swap(true, Relaxed);
            given.map_err(|source| {
                if met_damage {
                    return RestoreFailure::Damaged { what: String::new(), source: None };
                }
                // A QEMU that refuses the state prints the reason and ends.
                generation.process.ends_within(Duration::from_secs(1));
                RestoreFailure::State { last_words: generation.process.last_words(), source }
            })
        };
        let step = start::Step::restores(Activity::new("loading the state of the guest's devices"));
        self.begin_step_with(step, generation, give, move |machine, generation, given| {
            given.map_err(|failure| machine.not_restored(machine.lazy_restore.with_damage(failure)))?;
            machine.begin_restored(arriving, generation)
        })
    }

    pub(super) fn handle_restore(&mut self, message: RestoreMessage) {
        match message {
            RestoreMessage::Waits { why } => self.context.record(EventKind::RestoreWaits { why }),
            RestoreMessage::Traced { pages } => self.context.record(EventKind::WorkingSetTraced { pages }),
            RestoreMessage::Rehearsed => {
                // Fails only if the machine is stopping already.
                let _ = self.stop(true);
            }
            RestoreMessage::Complete => self.lazy_restore.complete(&mut self.context, &self.disks),
            RestoreMessage::Failed { message } => self.context.record(EventKind::Error { message }),
        }
    }

    /// Continues to fill in the rest of the memory, once this keeper has the guest.
    pub(super) fn go_on_filling(&mut self) -> Result<(), MachineError> {
        let Some(life) = self.state.guest() else { return Ok(()) };
        let (number, name) = (life.generation.number, self.context.config.name.clone());
        self.lazy_restore
            .fill_behind(&mut self.context, &self.disks, number, None)
            .map_err(|source| MachineError::Restore { name, source: Box::new(source) })
    }
}

/// Opens the snapshot, from any thread. If it is in an object store, its disks are in the machine's folder, or will be.
fn opening(
    context: &Context,
    disks: &Disks,
    path: &Path,
    seal: Option<&str>,
) -> impl FnOnce() -> Result<Snapshot, RestoreFailure> + Send + use<> {
    let config = &context.config;
    let saved = config.file.parent().map(saved_disks).filter(|folder| folder.exists());
    let saved = saved.map(|folder| (folder, disks.backfill.images()));
    let (store, scheduler) = (config.object_store.clone(), disks.backfill.scheduler().clone());
    let (path, seal) = (path.to_owned(), seal.map(str::to_owned));
    move || {
        let saved = saved.as_ref().map(|(folder, images)| (folder.as_path(), images.clone()));
        let snapshot = open_snapshot(&path, &store, &scheduler, saved)?;
        match seal.is_none_or(|seal| seal == snapshot.seal()) {
            true => Ok(snapshot),
            false => Err(RestoreFailure::AnotherSnapshot { snapshot: path }),
        }
    }
}
