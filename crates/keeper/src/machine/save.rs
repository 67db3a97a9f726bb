//! Save: the guest stands still, its devices' state is taken, its disks are cloned, its memory is written; then it goes on.
//!
//! order -> pause -> state -> disks that share blocks are cloned -> (a thread of its own: memory, disks that are copied,
//! manifest) -> the guest goes on | the machine stops
//!
//! Until the manifest is written there is no snapshot: whatever fails, or calls it off, removes the folder and lets the
//! guest go on. A keeper that dies leaves a guest that stands still; the journal says why, and the next keeper lets it go on.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use hearth_api::{ApiError, EndCause, ErrorWord, EventKind, MachineState, SaveRequest, SaveStatus, SaveThen, rfc3339};
use hearth_memory::{PAGE_BYTES, RamFile};
use hearth_recovery::rejuvenation;
use hearth_recovery::snapshot::pages::{Compression, Sealed};
use hearth_recovery::snapshot::save::{SaveError, resident_pages, write_ram};
use hearth_recovery::snapshot::{
    CloneWay, DiskPart, Draft, Manifest, RamPart, SNAPSHOT_VERSION, SnapshotError, can_share, clone_image, state,
};

use super::generation::Generation;
use super::{Machine, Wanted};
use crate::event::Event;

/// Taking the state takes 20 ms; on a host that swaps it may be a second.
const STATE_PATIENCE: Duration = Duration::from_secs(5);
const PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// What a save tells the machine's loop.
#[derive(Clone, Debug)]
pub enum Word {
    Event(EventKind),
    /// Its thread has ended; how, it says itself.
    Over,
}

/// A save that is under way.
pub struct Saving {
    folder: PathBuf,
    then: SaveThen,
    generation: u32,
    paused: Instant,
    progress: Arc<Progress>,
    thread: JoinHandle<Result<Sealed, SaveError>>,
}

struct Progress {
    folder: String,
    began: Instant,
    pages: u64,
    pages_done: AtomicU64,
    called_off: AtomicBool,
    why: Mutex<String>,
}

/// What the thread writes.
struct Task {
    draft: Draft,
    ram: Arc<RamFile>,
    compression: Compression,
    /// Images that could not be cloned at once.
    to_copy: Vec<(String, PathBuf)>,
    /// Complete but for what is still to be written.
    manifest: Manifest,
}

impl Saving {
    pub fn status(&self) -> SaveStatus {
        self.progress.status()
    }
}

impl Progress {
    fn status(&self) -> SaveStatus {
        let done = self.pages_done.load(Relaxed);
        let seconds = self.began.elapsed().as_secs_f64();
        let pages_per_s = if seconds > 0.0 { done as f64 / seconds } else { 0.0 };
        let left = self.pages.saturating_sub(done) as f64;
        SaveStatus {
            folder: self.folder.clone(),
            pages: self.pages,
            pages_done: done,
            percent: if self.pages == 0 { 100.0 } else { done as f64 * 100.0 / self.pages as f64 },
            mib_per_s: pages_per_s * PAGE_BYTES as f64 / f64::from(1 << 20),
            eta_s: (pages_per_s > 0.0).then(|| left / pages_per_s),
        }
    }

    fn go_on(&self) -> Result<(), SaveError> {
        if self.called_off.load(Relaxed) {
            return Err(SaveError::CalledOff { why: self.why.lock().expect("nobody panics with it").clone() });
        }
        Ok(())
    }
}

impl Task {
    fn write(mut self, progress: &Progress, tell: &dyn Fn(Word)) -> Result<Sealed, SaveError> {
        let mut told = Instant::now();
        let path = self.draft.ram_path();
        let sealed = write_ram(&self.ram, &path, self.compression, |pages| {
            progress.pages_done.fetch_add(pages, Relaxed);
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                let SaveStatus { folder, percent, mib_per_s, eta_s, .. } = progress.status();
                tell(Word::Event(EventKind::SaveProgress { folder, percent, mib_per_s, eta_s }));
            }
            progress.go_on()
        })?;
        for (disk, image) in &self.to_copy {
            let target = self.draft.disk_path(disk);
            let cloned =
                clone_image(disk, image, &target, CloneWay::ShareOrCopy, || !progress.called_off.load(Relaxed));
            progress.go_on()?;
            note_disk(&mut self.manifest, disk, cloned?.bytes);
        }
        let Sealed { bytes, pages, seal } = sealed.clone();
        self.manifest.ram = RamPart { bytes, pages, seal };
        progress.go_on()?;
        self.draft.finish(&self.manifest)?;
        Ok(sealed)
    }
}

fn note_disk(manifest: &mut Manifest, name: &str, bytes: u64) {
    if let Some(disk) = manifest.disks.iter_mut().find(|disk| disk.name == name) {
        disk.bytes = bytes;
    }
}

impl Machine {
    pub(super) fn begin_save(&mut self, request: SaveRequest) -> Result<(), ApiError> {
        self.must_be_savable(&request)?;
        let failed = |error: &dyn std::error::Error| ApiError::new(ErrorWord::Failed, crate::chain(error));
        let draft = Draft::create(&request.folder).map_err(|error| failed(&error))?;
        self.must_share_blocks(&request).map_err(|error| failed(&error))?;
        let Some(life) = self.life.take() else { return Ok(()) };
        self.journal.saving = true;
        self.save_journal();
        let paused = Instant::now();
        let task = self.hold_and_take(&life.generation, life.incarnation.ram.clone(), draft, &request);
        let begun = task.and_then(|task| self.start_saving(task, &life.generation, &request, paused));
        match begun {
            Ok(saving) => {
                self.life = Some(life);
                self.saving = Some(saving);
                self.record(EventKind::SaveStarted { folder: request.folder.display().to_string() });
                self.enter(MachineState::Paused);
                self.state_why = Some("it is being saved; `hearth save --cancel` calls that off".to_owned());
                Ok(())
            }
            Err(why) => {
                self.life = Some(life);
                self.go_on_from_save();
                Err(ApiError::new(ErrorWord::Failed, format!("{} cannot be saved: {why}", self.parts.config.name)))
            }
        }
    }

    fn must_be_savable(&self, request: &SaveRequest) -> Result<(), ApiError> {
        self.must_live("save")?;
        let refuse = |why: &str, hint: &str| Err(ApiError::new(ErrorWord::WrongState, why).hint(hint));
        if !request.folder.is_absolute() {
            return Err(ApiError::new(ErrorWord::BadRequest, "the folder must be named with an absolute path"));
        }
        if self.saving.is_some() {
            return refuse("cannot save: a save is under way", "`hearth status` tells how far it is");
        }
        if self.state != MachineState::Running || self.wanted != Wanted::Run {
            let why = format!("cannot save: the machine is {}, or on its way down", self.state.name());
            return refuse(&why, "a save is for a guest that runs");
        }
        if self.gate.as_ref().is_some_and(|gate| gate.is_shut()) {
            let why = "cannot save: the guest still gets its memory bit by bit";
            return refuse(why, "`hearth status` tells when that is over");
        }
        self.must_be_complete("save")?;
        if self.dumps.current().is_some_and(|dump| dump.live) {
            return refuse("cannot save: the guest is being dumped", "wait for the dump, or give it up");
        }
        Ok(())
    }

    /// Before the guest is held still. With `stop` nobody waits for it, and images may be copied.
    fn must_share_blocks(&self, request: &SaveRequest) -> Result<(), SnapshotError> {
        if request.then == SaveThen::Stop {
            return Ok(());
        }
        let disks = &self.parts.config.disks;
        disks.iter().try_for_each(|disk| can_share(&disk.name, &disk.path, &request.folder))
    }

    /// The error is for the operator; the guest stands still, or does not, and `go_on_from_save` mends either.
    fn hold_and_take(
        &self,
        generation: &Generation,
        ram: Arc<RamFile>,
        mut draft: Draft,
        request: &SaveRequest,
    ) -> Result<Task, String> {
        let failed = |error: &dyn std::error::Error| crate::chain(error);
        let connections = self.disk_connections();
        generation.qmp.pause().map_err(|error| failed(&error))?;
        let state = state::take(&generation.qmp, STATE_PATIENCE).map_err(|error| failed(&error))?;
        // What was in flight is answered before a guest stands still, unless a connection was lost.
        if connections.is_none() || connections != self.disk_connections() {
            return Err("a disk's connection to QEMU was lost meanwhile; try again".to_owned());
        }
        let config = &self.parts.config;
        let identity = generation.identity();
        let machine = self.parts.typed.clone().for_snapshot(config, &identity.accelerator).to_text();
        let mut manifest = Manifest {
            version: SNAPSHOT_VERSION,
            machine: config.name.clone(),
            saved_at: rfc3339(SystemTime::now()),
            hearth_version: env!("CARGO_PKG_VERSION").to_owned(),
            qemu_version: identity.version,
            accelerator: identity.accelerator,
            ram_bytes: config.memory_bytes,
            machine_file: draft.write_machine(&machine).map_err(|error| failed(&error))?,
            state: draft.write_state(&state).map_err(|error| failed(&error))?,
            ram: RamPart { bytes: 0, pages: 0, seal: String::new() },
            disks: Vec::new(),
        };
        let mut to_copy = Vec::new();
        for disk in &config.disks {
            manifest.disks.push(DiskPart { name: disk.name.clone(), format: disk.format.name().to_owned(), bytes: 0 });
            if request.then == SaveThen::Stop {
                to_copy.push((disk.name.clone(), disk.path.clone()));
                continue;
            }
            let target = draft.disk_path(&disk.name);
            let cloned = clone_image(&disk.name, &disk.path, &target, CloneWay::ShareOnly, || true);
            note_disk(&mut manifest, &disk.name, cloned.map_err(|error| failed(&error))?.bytes);
        }
        let compression = if request.compress { Compression::Zstd } else { Compression::None };
        Ok(Task { draft, ram, compression, to_copy, manifest })
    }

    /// How often QEMU has connected to each disk; none if to one of them it is not.
    fn disk_connections(&self) -> Option<Vec<u64>> {
        let look = |disk: &hearth_disk::server::DiskServer| {
            let counters = disk.counters();
            counters.connected.then_some(counters.connections)
        };
        self.disks.iter().map(look).collect()
    }

    fn start_saving(
        &self,
        task: Task,
        generation: &Generation,
        request: &SaveRequest,
        paused: Instant,
    ) -> Result<Saving, String> {
        let pages = resident_pages(&task.ram).map_err(|error| crate::chain(&error))?;
        let progress = Arc::new(Progress {
            folder: request.folder.display().to_string(),
            began: Instant::now(),
            pages,
            pages_done: AtomicU64::new(0),
            called_off: AtomicBool::new(false),
            why: Mutex::default(),
        });
        let (seen, tell) = (progress.clone(), self.parts.tell.clone());
        let tell = move |word| {
            // Fails only when the loop is gone, and then nobody wants to know.
            let _ = tell.send(Event::Save(word));
        };
        let write = move || {
            let written = task.write(&seen, &tell);
            tell(Word::Over);
            written
        };
        let thread = std::thread::Builder::new().name(format!("save-{}", self.parts.config.name)).spawn(write);
        let thread = thread.map_err(|error| format!("no thread to save with: {error}"))?;
        let (folder, then) = (request.folder.clone(), request.then);
        Ok(Saving { folder, then, generation: generation.number, paused, progress, thread })
    }

    pub(super) fn save_says(&mut self, word: Word) {
        match word {
            Word::Event(event) => self.record(event),
            Word::Over => self.conclude_save(),
        }
    }

    pub(super) fn call_save_off(&mut self) -> Result<(), ApiError> {
        if self.saving.is_none() {
            return Err(ApiError::new(ErrorWord::WrongState, "there is no save to call off"));
        }
        self.cancel_save("the operator asked for that");
        Ok(())
    }

    /// Waits for its thread, which looks after each MiB. Fine if there is none.
    pub(super) fn cancel_save(&mut self, why: &str) {
        if let Some(saving) = &self.saving {
            *saving.progress.why.lock().expect("nobody panics with it") = why.to_owned();
            saving.progress.called_off.store(true, Relaxed);
            self.conclude_save();
        }
    }

    fn conclude_save(&mut self) {
        let Some(saving) = self.saving.take() else { return };
        let written = saving.thread.join().map_err(|_| "its thread panicked".to_owned());
        let pause_ms = saving.paused.elapsed().as_secs_f64() * 1e3;
        let folder = saving.folder.display().to_string();
        let lives = self.is_current(saving.generation);
        let stops = saving.then == SaveThen::Stop && lives;
        match written.and_then(|written| written.map_err(|error| crate::chain(&error))) {
            Ok(Sealed { pages, bytes, .. }) => {
                self.record(EventKind::Saved { folder, pages, bytes, pause_ms });
                if stops {
                    self.journal.saving = false;
                    self.wanted = Wanted::Stop { power_off_at: Instant::now() + super::DRAIN_PATIENCE };
                    self.enter(MachineState::Stopping);
                    return self.end_qemu(EndCause::OperatorStop);
                }
            }
            Err(why) => self.record(EventKind::SaveFailed { folder, why }),
        }
        if lives {
            self.go_on_from_save();
        }
    }

    /// The guest goes on, if it stands still.
    fn go_on_from_save(&mut self) {
        let Some(life) = &self.life else { return };
        if let Err(error) = rejuvenation::roll_back(&life.generation.qmp, STATE_PATIENCE) {
            let message = format!("the guest was paused to be saved and does not go on: {error}");
            self.record(EventKind::Error { message });
        } else if self.state == MachineState::Paused {
            self.enter(MachineState::Running);
        }
        self.journal.saving = false;
        self.save_journal();
    }

    /// A keeper that died had it stand still: for a save, which is of no use now, or at the end of a restore.
    pub(super) fn go_on_where_it_stood(&mut self, generation: &mut Generation) {
        generation.set_deaf();
        self.wake_disks(generation);
    }
}
