//! Park: the guest stays in memory while QEMU and keeper end, and perhaps the host's kernel. The next keeper continues
//! it. `hearth_recovery::rejuvenation::parked` describes the phases and the note.
//!
//! ```text
//! flush-<machine>   disks flushed |
//! loop      request               | (journal: parking)                                     | QEMU has ended -> (journal: parked)
//! park-<machine>                    hold -> state -> sum -> settle images -> note -> kill QEMU |
//! ```
//! The loop goes on meanwhile. What QEMU says of its guest waits until the park has ended, and an order to reboot or stop, too,
//! calls it off: the guest goes on, and then ends as it was told to. Once the note is about to be written it is too late for that.
//! Whatever else would use the guest is refused.
//!
//! Before the note is written, any failure continues the guest on its QEMU. After that, only the next keeper can
//! continue it. It boots the machine instead if memory, disks or NVRAM do not match the note. If the obstacle can be
//! removed (another configuration, a missing image, a QEMU that cannot be started), the guest is not given up: the
//! keeper ends, and everything stays as it is.
//!
//! If the host lost its power, memory and note are gone. The journal says that there was a note; if the journal is gone
//! too, the record of the host reload does.

mod task;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use hearth_api::{ApiError, ErrorWord, EventKind, Unparked, rfc3339};
use hearth_disk::image::Unwritten;
use hearth_memory::MemoryError;
use hearth_qemu::{Accelerator, accelerator};
use hearth_recovery::incarnation::{Incarnation, IncarnationError, discard_files};
use hearth_recovery::journal::{GuestNote, Journal};
use hearth_recovery::rejuvenation::parked::{
    self, ChunkSums, PARKED_VERSION, ParkPhase, Parked, ParkedError, ResumePhase,
};
use hearth_recovery::rejuvenation::{ClockDebt, Ticker};
use hearth_recovery::snapshot::state::{self, StateError};

use super::disks::firmware_vars;
use super::generation::{Devices, END_PATIENCE, Generation, LaunchError, Plan};
use super::launch;
use super::launch_job::LaunchControl;
use super::lives::record_qemu;
use super::nvram::must_have_all_state;
use super::start::Step;
use super::state::Input;
use super::{Context, Life, Machine, MachineError};
use crate::config::{Config, NvramConfig};
use crate::control::{Answer, Reply};
use crate::drill::drill;
use crate::event::{Event, ParkMessage};
use crate::event_log::EventLog;
use crate::host_reload::Record;
use crate::notify::{Notice, notify};
use task::{Decision, Found, Task, note_nvram};

const WHAT: &str = "park";
/// How long to wait for QEMU's state. Taking it takes 20 ms, and so does loading it; on a host that swaps it may take a
/// second.
const STATE_PATIENCE: Duration = Duration::from_secs(10);

/// After its QEMU has ended a thread that waits for a disk is not waited for any longer.
const THREAD_PATIENCE: Duration = Duration::from_secs(2);

/// A guest that is being parked.
pub struct Parking {
    /// RFC 3339.
    pub since: String,
    /// Its QEMU.
    generation: u32,
    decision: Arc<Decision>,
    thread: JoinHandle<()>,
    /// Why it was called off.
    cancelled: Option<String>,
    /// What its QEMU has said meanwhile.
    held: Vec<Event>,
    /// It is parked, and its QEMU about to end.
    parked: Option<EventKind>,
    /// When what it waits for is not waited for any longer.
    until: Option<Instant>,
}

impl Parking {
    pub fn deadline(&self) -> Option<Instant> {
        self.until
    }

    /// Whether the guest is going on; false if it is too late for that.
    fn cancel(&mut self, why: &str) -> bool {
        let in_time = self.decision.cancel();
        if in_time {
            self.cancelled.get_or_insert_with(|| why.to_owned());
        }
        in_time
    }

    fn has_qemu_ended(&self) -> bool {
        self.held.iter().any(|event| matches!(event, Event::QemuEnded { .. }))
    }
}

/// Why a parked guest cannot continue.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Parked(#[from] ParkedError),
    #[error(transparent)]
    Incarnation(#[from] IncarnationError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("QEMU did not take the guest's state back; its last message: {}", .last_words.as_deref().unwrap_or("(none)"))]
    State { last_words: Option<String>, source: StateError },
    #[error(transparent)]
    Run(#[from] LaunchError),
}

/// A parked guest that is being resumed.
struct Resume {
    parked: Arc<Parked>,
    began: Instant,
    ticker: Option<Ticker>,
    host_reloaded: bool,
}

/// Why a resume ends without a running guest.
enum ResumeFailure {
    /// The machine boots.
    Lost(Lost),
    /// The keeper ends, and the guest stays parked.
    Keeper(MachineError),
}

impl From<Lost> for ResumeFailure {
    fn from(lost: Lost) -> Self {
        match lost {
            // The operator can solve these, or the host's start will.
            Lost::Parked(error @ (ParkedError::OtherMachine { .. } | ParkedError::Look(_))) => {
                Self::Keeper(error.into())
            }
            lost => Self::Lost(lost),
        }
    }
}

fn image_paths(config: &Config) -> Vec<PathBuf> {
    config.devices.disks.iter().map(|disk| &disk.path).chain(firmware_vars(config)).cloned().collect()
}

fn nvram_files(context: &Context) -> Vec<PathBuf> {
    let file = |device: &NvramConfig| device.options(&context.folders.memory).memory_file();
    context.config.devices.nvram.iter().map(file).collect()
}

/// Makes the note of this guest.
fn note_of(context: &Context, life: &Life) -> impl Fn(Found) -> Parked + Send + use<> {
    let (config, identity) = (context.config.clone(), life.generation.identity());
    let hardware = launch::hardware(&config, context.qemu.accelerator.accelerator);
    let (incarnation, generation) = (life.incarnation.number, context.journal.generation);
    let (started_with, frozen) = (context.started_with(), context.journal.frozen);
    move |found| Parked {
        version: PARKED_VERSION,
        machine: config.name.clone(),
        stopped_at: found.stopped_at,
        boot_id: accelerator::host_boot(),
        qemu_version: identity.version.clone(),
        accelerator: identity.accelerator.clone(),
        hardware: hardware.clone(),
        incarnation,
        generation,
        ram_bytes: config.guest.memory_bytes,
        ram_sum: found.ram_sum,
        nvram: found.nvram,
        state: found.state,
        vmgenid: identity.vmgenid.clone(),
        guest_agent: identity.guest_agent,
        started_with: Some(started_with.clone()),
        write_through: found.write_through,
        frozen,
        disks: launch::disk_identities(&config.devices),
        images: found.images,
    }
}

impl Machine {
    /// Whether the guest can be parked.
    fn may_park(&self) -> Result<(), ApiError> {
        let life = self.must_live(WHAT)?;
        let refuse = |why: String, hint: &str| Err(ApiError::new(ErrorWord::WrongState, why).hint(hint));
        if !self.state.is_undisturbed() {
            let state = self.state.shown().name();
            let why = format!("cannot {WHAT}: the machine is {state}, or is stopping or rebooting");
            return refuse(why, "only a running guest can be parked");
        }
        must_have_all_state(&self.context.config, WHAT)?;
        self.must_be_at_rest(WHAT)?;
        if self.crash_recovery.dumps.is_busy() {
            return refuse(format!("cannot {WHAT}: a dump is running"), "`hearth status` shows its progress");
        }
        if let Some(other) = self.disks.images.exchanged() {
            let why = format!("cannot {WHAT}: {} was replaced while the guest has the old file open", other.display());
            return refuse(why, "put the old file back, or reboot the guest to use the new one");
        }
        let ram = life.incarnation.ram.path();
        if !ram.exists() {
            return refuse(
                format!("cannot {WHAT}: {} is missing", ram.display()),
                "reboot the guest, which creates a new one",
            );
        }
        if self.rejuvenation.is_park_stuck() {
            return refuse(
                format!("cannot {WHAT}: the thread of an earlier park still waits for a disk"),
                "check the storage of the machine's images",
            );
        }
        Ok(())
    }

    /// Flushes the disks, so that little is left to flush while the guest stands still; `flushed` goes on. `check`: and no more.
    pub(super) fn flush_to_park(&mut self, check: bool, answer: &Reply) -> Result<(), ApiError> {
        self.may_park()?;
        let Some(life) = self.state.guest() else { return Ok(()) };
        let (generation, disks) = (life.generation.number, self.disks.to_flush(&self.context));
        let (tell, answer) = (self.context.outside.tell.clone(), answer.clone());
        let flush = move || {
            let flushed = disks.flush().map_err(|error| ApiError::new(ErrorWord::Failed, crate::chain(&error)));
            // Fails only when the loop is gone, and then nobody waits for the answer.
            let _ = tell.send(Event::Flushed { generation, check, flushed, answer });
        };
        let started = Builder::new().name(format!("flush-{}", self.context.config.name)).spawn(flush);
        started.map(drop).map_err(|error| {
            ApiError::new(
                ErrorWord::Failed,
                format!("cannot {WHAT}: cannot start the thread that flushes disks: {error}"),
            )
        })
    }

    /// Answers the request, and parks the guest if that was wanted.
    pub(super) fn flushed(&mut self, generation: u32, check: bool, flushed: Result<(), ApiError>, answer: &Reply) {
        let may = flushed.and_then(|()| {
            // Another one is there by now.
            if self.is_current(generation) { self.may_park() } else { Err(self.wrong_state(WHAT)) }
        });
        let goes_on = may.is_ok() && !check;
        // The asker may have hung up.
        let _ = answer.send(may.map(|()| Answer::Accepted));
        if goes_on {
            self.park();
        }
    }

    /// Begins to park the guest.
    fn park(&mut self) {
        self.context.journal.guest = GuestNote::Parking { folder: self.context.folders.memory.clone() };
        let (saved, decision) = (self.context.must_save_journal(), Arc::new(Decision::default()));
        let Some(life) = self.state.guest() else { return };
        let generation = life.generation.number;
        let started = match saved {
            Ok(()) => {
                self.start_to_park(life, decision.clone()).map_err(|error| format!("cannot start a thread: {error}"))
            }
            Err(error) => Err(crate::chain(&error)),
        };
        match started {
            Ok(thread) => {
                self.rejuvenation.parking = Some(Parking {
                    since: rfc3339(SystemTime::now()),
                    generation,
                    decision,
                    thread,
                    cancelled: None,
                    held: Vec::new(),
                    parked: None,
                    until: None,
                });
            }
            Err(why) => self.not_parked(ParkPhase::Hold.name(), why),
        }
    }

    fn start_to_park(&self, life: &Life, decision: Arc<Decision>) -> io::Result<JoinHandle<()>> {
        let context = &self.context;
        let images = self.disks.images.paths().chain(firmware_vars(&context.config)).cloned().collect();
        let task = Task {
            folder: context.folders.memory.clone(),
            qmp: life.generation.qmp.clone(),
            kill: Box::new(life.generation.process.killer()),
            ram: life.incarnation.ram.clone(),
            nvram: nvram_files(context),
            disks: self.disks.to_flush(context),
            images,
            note: Box::new(note_of(context, life)),
            decision,
        };
        let (tell, generation) = (context.outside.tell.clone(), life.generation.number);
        let work = move || {
            let message = task.run();
            // Fails only when the loop is gone; the next keeper finds what there is.
            let _ = tell.send(Event::Park { generation, message });
        };
        Builder::new().name(format!("park-{}", context.config.name)).spawn(work)
    }

    fn not_parked(&mut self, phase: &str, why: String) {
        self.context.journal.guest = GuestNote::Runs;
        self.context.save_journal();
        self.context.record(EventKind::ParkFailed { phase: phase.to_owned(), why });
    }

    /// What QEMU says of a guest that is being parked is kept until that has ended, and calls it off. Gives back anything else.
    pub(super) fn hold_back(&mut self, event: Event) -> Option<Event> {
        let Some(parking) = &mut self.rejuvenation.parking else { return Some(event) };
        match &event {
            Event::Qmp { generation, .. } if *generation == parking.generation => {
                parking.cancel("the guest has crashed or ended, or its watchdog has expired");
            }
            Event::QemuEnded { generation, .. } if *generation == parking.generation => {
                if parking.cancel("QEMU has ended") {
                    parking.until = Some(Instant::now() + THREAD_PATIENCE);
                } else if parking.parked.is_some() {
                    parking.until = Some(Instant::now());
                }
            }
            _ => return Some(event),
        }
        parking.held.push(event);
        None
    }

    /// The thread of the park has ended.
    pub(super) fn handle_park(&mut self, generation: u32, message: ParkMessage) -> Result<(), MachineError> {
        let Some(mut parking) = self.rejuvenation.parking.take_if(|parking| parking.generation == generation) else {
            return Ok(());
        };
        match message {
            ParkMessage::Parked { duration, state_bytes } => {
                parking.parked = Some(EventKind::Parked { duration_ms: duration.as_secs_f64() * 1e3, state_bytes });
                let patience = if parking.has_qemu_ended() { Duration::ZERO } else { END_PATIENCE };
                parking.until = Some(Instant::now() + patience);
                self.rejuvenation.parking = Some(parking);
                Ok(())
            }
            ParkMessage::NotParked { phase, why, stuck } => {
                if let Some(error) = stuck {
                    let message = format!("the guest was not parked and cannot continue; ending its QEMU: {error}");
                    self.context.record(EventKind::Error { message });
                }
                self.not_parked(phase, parking.cancelled.unwrap_or(why));
                self.handle_held(parking.held)
            }
        }
    }

    /// The end of a QEMU, or of a thread, was waited for long enough, or has come.
    pub(super) fn end_park(&mut self) -> Result<(), MachineError> {
        let Some(parking) = self.rejuvenation.parking.take() else { return Ok(()) };
        if let Some(event) = parking.parked {
            return self.apply(Input::Parked { event });
        }
        self.rejuvenation.stuck_park = Some(parking.thread);
        // Flushing the disks is the one step whose time is not limited.
        self.not_parked(
            ParkPhase::Settle.name(),
            parking.cancelled.unwrap_or_else(|| "its thread waits for a disk".to_owned()),
        );
        self.handle_held(parking.held)
    }

    /// The guest is not parked: what its QEMU has said meanwhile counts, and what it was told to do.
    fn handle_held(&mut self, held: Vec<Event>) -> Result<(), MachineError> {
        if self.state.is_asked_to_shut_down() {
            self.press_power_button();
        }
        held.into_iter().try_for_each(|event| self.handle(event))
    }

    /// For an order that ends the guest, which goes on first. Fine if none is being parked.
    pub(super) fn cancel_park(&mut self, verb: &str, why: &str) -> Result<(), ApiError> {
        let in_time = self.rejuvenation.parking.as_mut().is_none_or(|parking| parking.cancel(why));
        if in_time { Ok(()) } else { Err(self.being_parked(verb)) }
    }

    /// Refuses while the guest is being parked.
    pub(super) fn must_not_be_parked(&self, what: &str) -> Result<(), ApiError> {
        if self.rejuvenation.parking.is_some() { Err(self.being_parked(what)) } else { Ok(()) }
    }

    fn being_parked(&self, what: &str) -> ApiError {
        let message = format!("cannot {what}: the guest is being parked");
        ApiError::new(ErrorWord::WrongState, message).hint("`hearth events --follow` shows when that has ended")
    }

    /// Ends QEMU and everything that served the guest. Only the parked guest's files stay.
    pub(super) fn leave(&mut self, life: Life, event: EventKind) -> Result<(), MachineError> {
        let Life { generation, .. } = life;
        if !generation.process.has_ended() {
            tracing::error!(
                pid = generation.identity().pid,
                "QEMU does not exit after SIGKILL; it can no longer run the guest"
            );
        }
        self.context.folders.discard_generation(generation.number);
        drop(generation);
        self.fast_remount.boot_cut_off();
        self.end_memory();
        self.warm_reboot.monitor.watch(None);
        // The next keeper may find blocks of the images in memory, so note what the images are.
        self.disks.note_idle(&self.context, &self.warm_reboot);
        self.disks.close(&self.context);
        // Dead guests' memory is valid only while a keeper guards the images.
        self.warm_reboot.ember.extinguish();
        self.context.journal = Journal {
            incarnation: self.context.journal.incarnation,
            generation: self.context.journal.generation,
            guest: GuestNote::Parked { folder: self.context.folders.memory.clone() },
            ..self.context.journal.without_guest(self.context.config.guest.memory_bytes)
        };
        self.context.must_save_journal()?;
        drill(ParkPhase::Leave.name());
        self.context.record(event);
        Ok(())
    }

    /// Incarnation of a parked guest, whose memory must not be dropped as a dead guest's.
    pub(super) fn parked_incarnation(&self) -> Option<u32> {
        parked::find(&self.context.folders.memory).ok().flatten().map(|parked| parked.incarnation)
    }

    /// Begins to resume a parked guest, or to boot the machine. Call it when no living QEMU was found.
    pub(super) fn resume_or_boot(&mut self) -> Result<(), MachineError> {
        let found = match parked::find(&self.context.folders.memory) {
            Ok(Some(parked)) => Ok(parked),
            Ok(None) => match self.missed() {
                None => return self.start_afresh(),
                Some(missed) => Err(missed),
            },
            Err(error) => Err(error),
        };
        match found {
            Ok(parked) => self.resume_parked(parked),
            Err(error) => {
                let host_reloaded = Record::of_this_host().is_some_and(|record| record.host_reloaded());
                self.boot_instead(Lost::from(error).into(), host_reloaded, None)
            }
        }
    }

    /// The parked guest cannot continue. The machine boots, unless the guest may stay parked.
    fn boot_instead(
        &mut self,
        obstacle: ResumeFailure,
        host_reloaded: bool,
        incarnation: Option<u32>,
    ) -> Result<(), MachineError> {
        let lost = match obstacle {
            ResumeFailure::Keeper(error) => return Err(error),
            ResumeFailure::Lost(lost) => lost,
        };
        let (why, folder) = (crate::chain(&lost), self.context.folders.memory.clone());
        tracing::error!(why, "the parked guest cannot resume; the machine boots instead");
        self.context.record(EventKind::ParkedLost { why: why.clone() });
        self.context.journal.guest = GuestNote::Runs;
        self.context.journal.qemu = None;
        self.rejuvenation.unparked = Some(Unparked { lost: Some(why), stood_ms: None, host_reloaded });
        // From now on, any change of the images may be another program's.
        self.warm_reboot.monitor.note_images(None);
        self.disks.close(&self.context);
        parked::discard(&folder);
        if let Some(number) = incarnation {
            discard_files(&folder, number);
        }
        self.start_afresh()
    }

    /// Why there is no parked guest here although the journal says so. None if the journal does not.
    fn missed(&self) -> Option<ParkedError> {
        // A guest whose parking had only begun died with its QEMU.
        let GuestNote::Parked { folder } = &self.context.journal.guest else { return None };
        Some(parked::why_not_in(folder, &self.context.folders.memory))
    }

    fn resume_parked(&mut self, parked: Parked) -> Result<(), MachineError> {
        let resume = Resume {
            began: Instant::now(),
            // The longer the clock is watched, the better.
            ticker: (self.context.qemu.accelerator.accelerator == Accelerator::Tcg).then(Ticker::watch),
            host_reloaded: parked.boot_id != accelerator::host_boot(),
            parked: Arc::new(parked),
        };
        let parked = &resume.parked;
        self.context.journal.incarnation = parked.incarnation;
        self.context.journal.generation = self.context.journal.generation.max(parked.generation);
        self.context.outside.event_log.set_incarnation(parked.incarnation);
        let doing = format!("checking the {} MiB of its parked guest", parked.ram_bytes >> 20);
        notify(&Notice::Status(doing.clone()));
        let check = self.check(parked.clone());
        self.begin_step(
            Step::has_guest(&doing),
            move |_| check(),
            move |machine, checked| match checked {
                Ok((incarnation, state)) => {
                    drill(ResumePhase::Verify.name());
                    machine.wake(resume, incarnation, state)
                }
                Err(lost) => machine.not_resumed(&resume, lost.into()),
            },
        )
    }

    fn not_resumed(&mut self, resume: &Resume, obstacle: ResumeFailure) -> Result<(), MachineError> {
        self.boot_instead(obstacle, resume.host_reloaded, Some(resume.parked.incarnation))
    }

    /// Compares memory, NVRAM, images and configuration with the note, from any thread.
    fn check(&self, parked: Arc<Parked>) -> impl FnOnce() -> Result<(Incarnation, Vec<u8>), Lost> + Send + use<> {
        let (config, folder) = (self.context.config.clone(), self.context.folders.memory.clone());
        let hardware = launch::hardware(&config, self.context.qemu.accelerator.accelerator);
        let nvram = nvram_files(&self.context);
        move || {
            let disks = launch::disk_identities(&config.devices);
            parked.must_be_of(&config.name, config.guest.memory_bytes, &disks, &hardware)?;
            parked.must_find_images(&image_paths(&config))?;
            let state = parked.state(&folder)?;
            let incarnation = Incarnation::open(&folder, parked.incarnation)?;
            parked.must_have_size(&incarnation.ram)?;
            parked.must_match(&incarnation.ram, &ChunkSums::of_all(&incarnation.ram)?)?;
            parked.must_find_nvram(&note_nvram(&nvram)?)?;
            Ok((incarnation, state))
        }
    }

    /// Loads the guest into a new QEMU, where it is paused.
    fn wake(&mut self, resume: Resume, incarnation: Incarnation, state: Vec<u8>) -> Result<(), MachineError> {
        let parked = &resume.parked;
        self.context.journal.vmgenid.clone_from(&parked.vmgenid);
        self.context.journal.write_through.clone_from(&parked.write_through);
        if parked.frozen {
            self.saves.note_frozen(&mut self.context);
        }
        self.open_disks(&incarnation, Unwritten::Keep)?;
        let number = self.next_generation(&incarnation)?;
        let devices = Devices { vmgenid: parked.vmgenid.clone(), guest_agent: parked.guest_agent };
        let plan = Plan::restored(&self.context, &self.disks.servers, &incarnation, number, devices)?;
        let (parked, ticker, log) = (parked.clone(), resume.ticker, self.context.outside.event_log.clone());
        let load = move |control: &LaunchControl| load(&parked, plan, control, state, ticker, &log);
        let step = Step::has_guest("loading its parked guest into a QEMU");
        self.begin_step(step, load, move |machine, loaded| match loaded {
            Ok((generation, set_forward)) => {
                drill(ResumePhase::Wake.name());
                machine.continue_guest(resume, incarnation, generation, set_forward)
            }
            Err(obstacle) => machine.not_resumed(&resume, obstacle),
        })
    }

    /// Continues the guest. This passes the point of no return. `set_forward`: how far its clock was set forward.
    fn continue_guest(
        &mut self,
        resume: Resume,
        incarnation: Incarnation,
        generation: Generation,
        set_forward: Option<Duration>,
    ) -> Result<(), MachineError> {
        // From here on a new keeper finds the guest in this QEMU, paused.
        self.context.journal.qemu = Some(generation.identity());
        self.context.journal.guest = GuestNote::Paused;
        let noted = self.context.must_save_journal().map_err(MachineError::from);
        noted.and_then(|()| Ok(Parked::consume(&self.context.folders.memory)?)).inspect_err(|_| end(&generation))?;
        drill(ResumePhase::Consume.name());
        self.disks.admit(&self.context, generation.identity().pid);
        let run = |generation: &Generation| generation.run().inspect_err(|_| end(generation));
        let step = Step::has_guest("its parked guest goes on");
        self.begin_step_with(step, generation, run, move |machine, generation, runs| match runs {
            Ok(()) => {
                machine.resumed(&resume, incarnation, generation, set_forward);
                Ok(())
            }
            Err(error) => {
                drop(generation);
                machine.not_resumed(&resume, Lost::from(error).into())
            }
        })
    }

    fn resumed(
        &mut self,
        resume: &Resume,
        incarnation: Incarnation,
        generation: Generation,
        set_forward: Option<Duration>,
    ) {
        let Resume { began, parked, host_reloaded, .. } = resume;
        let (number, version) = (generation.number, generation.identity().version);
        let stood = parked.stands_for();
        self.context.journal.guest = GuestNote::Runs;
        match set_forward {
            Some(by) => self.context.journal.clock_debt = ClockDebt::of(stood, by),
            None => {
                tracing::warn!("cannot find the guest's clock in its state; the clock is behind until NTP corrects it")
            }
        }
        let life = self.take_guest(incarnation, generation, None);
        self.apply_infallible(Input::Runs { guest: life });
        self.thaw();
        drill(ResumePhase::GoOn.name());
        parked::discard(&self.context.folders.memory);
        let (stood_ms, duration_ms) = (stood.as_secs_f64() * 1e3, began.elapsed().as_secs_f64() * 1e3);
        let host_reloaded = *host_reloaded;
        self.rejuvenation.unparked = Some(Unparked { lost: None, stood_ms: Some(stood_ms), host_reloaded });
        self.context.record(EventKind::Unparked { generation: number, version, stood_ms, duration_ms });
    }
}

/// Starts a QEMU and loads the guest's devices into it. Also returns how far the guest's clock was set forward.
fn load(
    parked: &Parked,
    plan: Plan,
    control: &LaunchControl,
    mut state: Vec<u8>,
    ticker: Option<Ticker>,
    log: &EventLog,
) -> Result<(Generation, Option<Duration>), ResumeFailure> {
    let generation = plan.start(control).map_err(|error| ResumeFailure::Keeper(error.into()))?;
    record_qemu(log, generation.status());
    // As late as possible: QEMU is there to take the state.
    let set_forward = parked.set_clock(&mut state, ticker);
    match state::give(&generation.qmp, &state, STATE_PATIENCE) {
        Ok(()) => Ok((generation, set_forward)),
        Err(source) => {
            // A QEMU that refuses the state prints the reason and ends.
            generation.process.ends_within(Duration::from_secs(1));
            end(&generation);
            Err(Lost::State { last_words: generation.process.last_words(), source }.into())
        }
    }
}

fn end(generation: &Generation) {
    generation.process.kill();
    generation.process.ends_within(END_PATIENCE);
}
