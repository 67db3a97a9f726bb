//! Park: the guest stays in memory while QEMU and keeper end, and perhaps the host's kernel; the next keeper lets it go on.
//! The phases, and what is noted, are in `hearth_recovery::rejuvenation::parked`.
//!
//! Up to the note any failure lets the guest go on where it stood. After it the guest's way forward is the next keeper, which
//! boots the machine if what it finds is not what was noted. What can be put right is no reason to give the guest up, another
//! configuration, an image that is not there, a QEMU that cannot be started: the keeper ends then, and all stays as it is.
//!
//! Memory that lost its power has no note. That there was one the journal says, or, if that ended with the host, the record of
//! its reload.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use hearth_api::{ApiError, ErrorWord, EventKind, Unparked};
use hearth_disk::image::Unwritten;
use hearth_memory::{MemoryError, RamFile};
use hearth_qemu::{Accelerator, QmpError, accelerator};
use hearth_recovery::incarnation::{Incarnation, IncarnationError, discard_files};
use hearth_recovery::journal::{GuestNote, Journal, JournalError};
use hearth_recovery::rejuvenation::parked::{
    self, ChunkSums, NvramNote, PARKED_VERSION, ParkPhase, Parked, ParkedError, ResumePhase,
};
use hearth_recovery::rejuvenation::{self, ClockDebt, Ticker};
use hearth_recovery::snapshot::state::{self, StateError};

use super::disks::{FlushError, firmware_vars};
use super::generation::{Devices, Generation, LaunchError};
use super::launch;
use super::rejuvenate::{END_PATIENCE, must_have_all_state};
use super::state::Input;
use super::{Context, Life, Machine, MachineError};
use crate::config::{Config, NvramConfig};
use crate::drill::drill;
use crate::host_reload::Record;
use crate::notify::{Notice, notify};

const WHAT: &str = "park";
/// Taking the state takes 20 ms, giving it as long; on a host that swaps it may be a second.
const STATE_PATIENCE: Duration = Duration::from_secs(10);

/// Why a guest is not parked.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    State(#[from] StateError),
    #[error("QEMU cannot pause the guest")]
    Hold(#[source] QmpError),
    #[error("a disk lost its connection to QEMU meanwhile")]
    Disk,
    #[error(transparent)]
    Flush(#[from] FlushError),
    #[error(transparent)]
    Parked(#[from] ParkedError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// Why a parked guest does not go on.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Parked(#[from] ParkedError),
    #[error(transparent)]
    Incarnation(#[from] IncarnationError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("QEMU's last message: {}", .last_words.as_deref().unwrap_or("(none)"))]
    State { last_words: Option<String>, source: StateError },
    #[error(transparent)]
    Run(#[from] LaunchError),
}

/// Why a resume ends without a running guest.
enum Obstacle {
    /// The machine boots.
    Lost(Lost),
    /// The keeper ends, and the guest stays parked.
    Keeper(MachineError),
}

impl From<Lost> for Obstacle {
    fn from(lost: Lost) -> Self {
        match lost {
            // The operator can put these right, or the host's start is about to.
            Lost::Parked(error @ (ParkedError::OtherMachine { .. } | ParkedError::Look(_))) => {
                Self::Keeper(error.into())
            }
            lost => Self::Lost(lost),
        }
    }
}

/// How far it is.
struct Progress(ParkPhase);

impl Progress {
    fn run<T, E>(&mut self, phase: ParkPhase, work: impl FnOnce() -> Result<T, E>) -> Result<T, Failure>
    where
        Failure: From<E>,
    {
        self.0 = phase;
        let result = work()?;
        drill(phase.name());
        Ok(result)
    }
}

fn image_paths(config: &Config) -> Vec<PathBuf> {
    config.disks.iter().map(|disk| &disk.path).chain(firmware_vars(config)).cloned().collect()
}

/// Notes each NVRAM device as it is now, while nobody writes to it.
fn note_nvram(context: &Context) -> Result<Vec<NvramNote>, MemoryError> {
    let note = |device: &NvramConfig| {
        let file = device.options(&context.folders.memory).memory_file();
        let sum = ChunkSums::of_all(&RamFile::open(&file)?)?.seal();
        Ok(NvramNote { file, sum })
    };
    context.config.nvram.iter().map(note).collect()
}

impl Machine {
    /// Whether the guest can be parked. Its disks are flushed, so that little is left to flush while it stands still.
    pub(super) fn may_park(&self) -> Result<(), ApiError> {
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
        // Also so that there is little left to flush while the guest stands still.
        self.disks.flush(&self.context).map_err(|error| ApiError::new(ErrorWord::Failed, crate::chain(&error)))
    }

    /// Parks the guest.
    pub(super) fn park(&mut self) -> Result<(), MachineError> {
        self.cancel_save("the guest was told to park");
        let began = Instant::now();
        let mut progress = Progress(ParkPhase::Hold);
        if let Err(refusal) = self.may_park() {
            self.not_parked(&progress, refusal.to_string());
            return Ok(());
        }
        let noted = self.with_guest(|machine, life| {
            machine.note_guest(life, &mut progress).inspect_err(|_| machine.go_on_unparked(life))
        });
        match noted {
            Some(Ok(state_bytes)) => {
                let duration_ms = began.elapsed().as_secs_f64() * 1e3;
                self.happens(Input::Parked { event: EventKind::Parked { duration_ms, state_bytes } })
            }
            Some(Err(failure)) => {
                self.not_parked(&progress, crate::chain(&failure));
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn not_parked(&self, progress: &Progress, why: String) {
        self.context.record(EventKind::ParkFailed { phase: progress.0.name().to_owned(), why });
    }

    /// All that can fail. The guest stands still afterwards, or may.
    fn note_guest(&mut self, life: &Life, progress: &mut Progress) -> Result<u64, Failure> {
        let (qmp, folder) = (&life.generation.qmp, self.context.folders.memory.clone());
        let connections = self.disks.connections();
        self.context.journal.guest = GuestNote::Parking { folder: folder.clone() };
        self.context.must_save_journal()?;
        let stopped_at = progress.run(ParkPhase::Hold, || {
            state::prepare(qmp, STATE_PATIENCE)?;
            qmp.pause().map_err(Failure::Hold)?;
            Ok::<_, Failure>(SystemTime::now())
        })?;
        let state = progress.run(ParkPhase::State, || {
            let state = state::take(qmp, STATE_PATIENCE)?;
            // Requests in flight are answered before a guest stands still, unless a connection was lost.
            if connections.is_none() || connections != self.disks.connections() {
                return Err(Failure::Disk);
            }
            Ok(parked::write_state(&folder, &state)?)
        })?;
        let (ram_sum, nvram) = progress.run(ParkPhase::Sum, || {
            Ok::<_, Failure>((ChunkSums::of_all(&life.incarnation.ram)?.seal(), note_nvram(&self.context)?))
        })?;
        let images = progress.run(ParkPhase::Settle, || {
            self.disks.flush(&self.context)?;
            let files: Vec<PathBuf> =
                self.disks.images.paths().chain(firmware_vars(&self.context.config)).cloned().collect();
            Ok::<_, Failure>(parked::note_images(&files)?)
        })?;
        let (config, identity, state_bytes) = (&self.context.config, life.generation.identity(), state.bytes);
        let note = Parked {
            version: PARKED_VERSION,
            machine: config.name.clone(),
            stopped_at,
            boot_id: accelerator::host_boot(),
            qemu_version: identity.version,
            accelerator: identity.accelerator,
            hardware: launch::hardware(&self.context.config, self.context.qemu.accelerator.accelerator),
            incarnation: life.incarnation.number,
            generation: self.context.journal.generation,
            ram_bytes: config.memory_bytes,
            ram_sum,
            nvram,
            state,
            vmgenid: identity.vmgenid,
            guest_agent: identity.guest_agent,
            started_with: Some(self.context.started_with()),
            write_through: self.disks.write_through(),
            frozen: self.context.journal.frozen,
            disks: launch::disk_identities(config),
            images,
        };
        progress.run(ParkPhase::Note, || note.commit(&folder))?;
        Ok(state_bytes)
    }

    /// The guest goes on, in the QEMU it has.
    fn go_on_unparked(&mut self, life: &Life) {
        parked::discard(&self.context.folders.memory);
        match rejuvenation::roll_back(&life.generation.qmp, STATE_PATIENCE) {
            // One that ended is seen elsewhere.
            Ok(()) | Err(QmpError::Ended) => {}
            Err(error) => {
                let message = format!("the guest was not parked and cannot continue; ending its QEMU: {error}");
                self.context.record(EventKind::Error { message });
                life.generation.process.kill();
            }
        }
        self.context.journal.guest = GuestNote::Runs;
        self.context.save_journal();
    }

    /// It is parked: what is left of it here goes, but for its files.
    pub(super) fn leave(&mut self, life: Life, event: EventKind) -> Result<(), MachineError> {
        let Life { generation, .. } = life;
        generation.process.kill();
        if !generation.process.ends_within(END_PATIENCE) {
            tracing::error!(
                pid = generation.identity().pid,
                "QEMU does not exit after SIGKILL; it can no longer run the guest"
            );
        }
        self.context.folders.discard_generation(generation.number);
        drop(generation);
        self.fast_remount.boot_cut_off();
        self.memory.drop_gate(&self.warm_reboot, &self.disks);
        self.warm_reboot.monitor.watch(None);
        // For what was learned of them, which the next keeper may find as well.
        self.disks.note_idle(&self.context, &self.warm_reboot);
        self.disks.close(&self.context);
        // Dead guests' memory is only as good as a keeper's guard over the images.
        self.warm_reboot.ember.extinguish();
        self.context.journal = Journal {
            incarnation: self.context.journal.incarnation,
            generation: self.context.journal.generation,
            guest: GuestNote::Parked { folder: self.context.folders.memory.clone() },
            ..self.context.journal.without_guest(self.context.config.memory_bytes)
        };
        self.context.must_save_journal()?;
        drill(ParkPhase::Leave.name());
        self.context.record(event);
        Ok(())
    }

    /// The memory that must not be taken for a dead guest's.
    pub(super) fn parked_incarnation(&self) -> Option<u32> {
        parked::find(&self.context.folders.memory).ok().flatten().map(|parked| parked.incarnation)
    }

    /// No QEMU was found alive.
    pub(super) fn resume_or_boot(&mut self) -> Result<(), MachineError> {
        let folder = self.context.folders.memory.clone();
        let found = match parked::find(&folder) {
            Ok(Some(parked)) => Ok(parked),
            Ok(None) => match self.missed() {
                None => return self.start_afresh(),
                Some(missed) => Err(missed),
            },
            Err(error) => Err(error),
        };
        let (obstacle, host_reloaded, incarnation) = match found {
            Err(error) => (Lost::from(error).into(), Record::of_this_host().is_some_and(|it| it.host_reloaded()), None),
            Ok(parked) => {
                let host_reloaded = parked.boot_id != accelerator::host_boot();
                match self.resume_parked(&parked, host_reloaded) {
                    Ok(()) => return Ok(()),
                    Err(obstacle) => (obstacle, host_reloaded, Some(parked.incarnation)),
                }
            }
        };
        let lost = match obstacle {
            Obstacle::Keeper(error) => return Err(error),
            Obstacle::Lost(lost) => lost,
        };
        let why = crate::chain(&lost);
        tracing::error!(why, "the parked guest cannot resume; the machine boots instead");
        self.context.record(EventKind::ParkedLost { why: why.clone() });
        self.context.journal.guest = GuestNote::Runs;
        self.context.journal.qemu = None;
        self.rejuvenation.unparked = Some(Unparked { lost: Some(why), stood_ms: None, host_reloaded });
        self.disks.close(&self.context);
        parked::discard(&folder);
        if let Some(number) = incarnation {
            discard_files(&folder, number);
        }
        self.start_afresh()
    }

    /// A guest that should be parked here, and is not.
    fn missed(&self) -> Option<ParkedError> {
        // A guest that was only about to be parked died with its QEMU.
        let GuestNote::Parked { folder } = &self.context.journal.guest else { return None };
        Some(parked::why_not_in(folder, &self.context.folders.memory))
    }

    fn resume_parked(&mut self, parked: &Parked, host_reloaded: bool) -> Result<(), Obstacle> {
        let (began, folder) = (Instant::now(), self.context.folders.memory.clone());
        // The longer it is watched the better.
        let ticker = (self.context.qemu.accelerator.accelerator == Accelerator::Tcg).then(Ticker::watch);
        self.context.journal.incarnation = parked.incarnation;
        self.context.journal.generation = self.context.journal.generation.max(parked.generation);
        self.context.outside.event_log.set_incarnation(parked.incarnation);
        let mib = parked.ram_bytes >> 20;
        notify(&Notice::Status(format!("checks the {mib} MiB of its parked guest")));
        let (incarnation, state) = self.verify(parked)?;
        drill(ResumePhase::Verify.name());
        let (generation, set_forward) = self.wake(&incarnation, parked, state, ticker)?;
        drill(ResumePhase::Wake.name());
        let (number, version) = (generation.number, generation.identity().version);
        let went_on = self.let_go_on(&generation);
        if let Err(obstacle) = went_on {
            generation.process.kill();
            generation.process.ends_within(END_PATIENCE);
            return Err(obstacle);
        }
        let stood = parked.stands_for();
        self.context.journal.guest = GuestNote::Runs;
        match set_forward {
            Some(by) => self.context.journal.clock_debt = ClockDebt::of(stood, by),
            None => {
                tracing::warn!("cannot find the guest's clock in its state; the clock is behind until NTP corrects it")
            }
        }
        let life = self.hold(incarnation, generation, None);
        self.must_happen(Input::Runs { guest: life });
        self.thaw();
        drill(ResumePhase::GoOn.name());
        parked::discard(&folder);
        let (stood_ms, duration_ms) = (stood.as_secs_f64() * 1e3, began.elapsed().as_secs_f64() * 1e3);
        self.rejuvenation.unparked = Some(Unparked { lost: None, stood_ms: Some(stood_ms), host_reloaded });
        self.context.record(EventKind::Unparked { generation: number, version, stood_ms, duration_ms });
        Ok(())
    }

    /// Is all as it was noted?
    fn verify(&self, parked: &Parked) -> Result<(Incarnation, Vec<u8>), Lost> {
        let (config, folder) = (&self.context.config, &self.context.folders.memory);
        let disks = launch::disk_identities(config);
        parked.must_be_of(
            &config.name,
            config.memory_bytes,
            &disks,
            &launch::hardware(&self.context.config, self.context.qemu.accelerator.accelerator),
        )?;
        parked.must_find_images(&image_paths(&self.context.config))?;
        let state = parked.state(folder)?;
        let incarnation = Incarnation::open(folder, parked.incarnation)?;
        parked.must_have_size(&incarnation.ram)?;
        parked.must_match(&incarnation.ram, &ChunkSums::of_all(&incarnation.ram)?)?;
        parked.must_find_nvram(&note_nvram(&self.context)?)?;
        Ok((incarnation, state))
    }

    /// A QEMU that has the guest, which stands still; and by how much its clock was set forward.
    fn wake(
        &mut self,
        incarnation: &Incarnation,
        parked: &Parked,
        mut state: Vec<u8>,
        ticker: Option<Ticker>,
    ) -> Result<(Generation, Option<Duration>), Obstacle> {
        self.context.journal.vmgenid.clone_from(&parked.vmgenid);
        self.context.journal.write_through.clone_from(&parked.write_through);
        if parked.frozen {
            self.saves.note_frozen(&mut self.context);
        }
        self.open_disks(incarnation, Unwritten::Keep).map_err(Obstacle::Keeper)?;
        let number = self.next_generation(incarnation).map_err(Obstacle::Keeper)?;
        let devices = Devices { vmgenid: parked.vmgenid.clone(), guest_agent: parked.guest_agent };
        let generation = Generation::launch_restored(&self.context, &self.disks.servers, incarnation, number, devices);
        let generation = generation.map_err(|error| Obstacle::Keeper(error.into()))?;
        self.record_qemu(&generation);
        // As late as possible: QEMU is there to take the state.
        let set_forward = parked.set_clock(&mut state, ticker);
        match state::give(&generation.qmp, &state, STATE_PATIENCE) {
            Ok(()) => Ok((generation, set_forward)),
            Err(source) => {
                // One that refuses the state ends, and says why first.
                generation.process.ends_within(Duration::from_secs(1));
                generation.process.kill();
                generation.process.ends_within(END_PATIENCE);
                Err(Lost::State { last_words: generation.process.last_words(), source }.into())
            }
        }
    }

    /// The point of no return is passed in here.
    fn let_go_on(&mut self, generation: &Generation) -> Result<(), Obstacle> {
        // For a keeper that comes from here on the guest is this QEMU's, and stands still.
        self.context.journal.qemu = Some(generation.identity());
        self.context.journal.guest = GuestNote::Paused;
        self.context.must_save_journal().map_err(|error| Obstacle::Keeper(error.into()))?;
        Parked::consume(&self.context.folders.memory).map_err(|error| Obstacle::Keeper(error.into()))?;
        drill(ResumePhase::Consume.name());
        self.disks.admit(&self.context, generation.identity().pid);
        Ok(generation.run().map_err(Lost::from)?)
    }
}
