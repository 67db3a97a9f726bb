//! Save: memory is copied while the guest runs. Then the guest is paused for a moment; the snapshot shows that moment.
//!
//! ```text
//! thread   folder and files are made (the request is answered then)
//! thread   (what the guest uses ->) all of memory -> what was written meanwhile -> ... -> little | the last of it ............ | images, manifest
//! QEMU's thread                                                   pause -> devices -> images frozen -> go on | stop
//! upload   (memory, as it is copied .......................................)          (images, what of memory changed, manifest)
//! ```
//! Everything belongs to the same moment. Requests in flight are answered before QEMU reports that its guest is paused.
//! From then on nobody writes to memory or images until memory is copied and each image is cloned or frozen. A frozen
//! image's disk copies a block before it changes it (`hearth_disk::image::FrozenImage`).
//!
//! There is no snapshot until the manifest is written. A save that fails or is cancelled removes the folder, and the
//! guest goes on as before. A keeper that dies may leave a paused guest; the journal says why, and the next keeper
//! continues it.

mod ending;
mod freeze;
mod hold;
mod progress;
mod refusals;
mod task;
mod upload;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_api::{ApiError, ErrorWord, EventKind, SaveRequest, SaveStatus, SaveThen, ScanRequest};
use hearth_disk::server::{DiskServer, ServerError};
use hearth_disk::write_log::WriteLog;
use hearth_memory::{PAGE_BYTES, RamFile};
use hearth_qemu::Accelerator;
use hearth_recovery::journal::GuestNote;
use hearth_recovery::snapshot::save::{SaveError, Writers, resident_pages};
use hearth_recovery::snapshot::scan::{AccessScan, ScanPlan};
use hearth_recovery::snapshot::upload::Expected;
use hearth_recovery::snapshot::{Draft, SnapshotError, can_share};

use super::disks::Disks;
use super::frozen::Frozen;
use super::state::{Input, PauseReason};
use super::{Life, Machine};
use crate::config::{Config, DiskConfig};
use crate::control::{Answer, Reply};
use crate::event::{Event, SaveMessage};
use crate::object_store::{self, Staging, is_address};
use hold::{Hold, SaveCommands};
use progress::Progress;
use task::{AccessTracking, SaveCommand, ScannedQemu, Task, Written, end_fresh_translation};
use upload::Upload;

/// How long to wait for QEMU's state. It takes 20 ms; on a host that swaps it may take a second.
const STATE_PATIENCE: Duration = Duration::from_secs(5);

/// Sends messages about one save to the loop.
#[derive(Clone)]
pub struct Tell {
    tell: Sender<Event>,
    number: u64,
}

impl Tell {
    fn say(&self, message: SaveMessage) {
        // Fails only when the loop has ended; then nobody needs the message.
        let _ = self.tell.send(Event::Save { number: self.number, message });
    }
}

/// Saves of the machine's guests.
#[derive(Default)]
pub struct Saves {
    /// A save whose files are being made.
    preparing: Option<Preparing>,
    /// The save that is under way. It may be cancelled already.
    pub current: Option<Saving>,
    /// State of the guest's file systems, as long as the journal says that they may be frozen.
    pub frozen: Option<Frozen>,
    /// Number of saves that have begun.
    pub begun: u64,
}

/// A save whose files are being made, and which has not begun.
struct Preparing {
    number: u64,
    generation: u32,
    request: SaveRequest,
    answer: Reply,
    result: Receiver<Result<Prepared, ApiError>>,
}

/// The files of a save.
struct Prepared {
    draft: Draft,
    targets: Vec<Target>,
    upload: Option<Upload>,
    /// Pages of memory to copy.
    pages: u64,
    /// Bytes of images to copy.
    to_copy: u64,
}

/// A save that is under way.
pub struct Saving {
    /// Number of this save. Messages of an earlier, cancelled save may still arrive.
    number: u64,
    folder: PathBuf,
    then: SaveThen,
    generation: u32,
    targets: Vec<Target>,
    held: Held,
    progress: Arc<Progress>,
    commands: SaveCommands,
    thread: JoinHandle<Result<Written, SaveError>>,
}

/// Whether the guest is paused for the save.
enum Held {
    NotYet,
    Since(Instant),
    /// QEMU is told to let it go on.
    GoingOn(Instant),
    Was(Duration),
}

/// A disk of the guest and its file in the snapshot.
struct Target {
    disk: String,
    image: PathBuf,
    format: &'static str,
    file: File,
    shares: bool,
}

impl Saves {
    /// Refuses while a save is under way.
    pub(super) fn must_be_none(&self, what: &str) -> Result<(), ApiError> {
        if self.current.is_none() && self.preparing.is_none() {
            return Ok(());
        }
        let message = format!("cannot {what}: the guest is being saved");
        Err(ApiError::new(ErrorWord::WrongState, message)
            .hint("wait until it has ended, or cancel it with `hearth save --cancel`"))
    }
}

impl Saving {
    pub fn status(&self) -> SaveStatus {
        self.progress.status()
    }

    fn is_cancelled(&self) -> bool {
        self.commands.are_closed()
    }
}

/// Makes the files of a save. Their storage may be slow, or hang.
fn prepare(config: &Config, ram: &RamFile, folder: &Path) -> Result<Prepared, ApiError> {
    let mut upload = upload_to(config, folder)?;
    let folder = upload.as_ref().map_or_else(|| folder.to_owned(), Upload::folder);
    let mut draft = Draft::create(&folder).map_err(failed)?;
    let targets = save_targets(config, &mut draft).map_err(failed)?;
    let pages = resident_pages(ram).map_err(failed)?;
    let to_copy = targets.iter().filter(|target| !target.shares).map(|target| allocated_bytes(&target.image)).sum();
    if let Some(upload) = &mut upload {
        let disks = targets.iter().map(|target| (target.disk.clone(), allocated_bytes(&target.image))).collect();
        upload.expected = Expected { ram_bytes: pages * PAGE_BYTES, disks };
    }
    Ok(Prepared { draft, targets, upload, pages, to_copy })
}

fn failed(error: impl std::error::Error) -> ApiError {
    ApiError::new(ErrorWord::Failed, crate::chain(&error))
}

fn no_thread(error: std::io::Error) -> ApiError {
    ApiError::new(ErrorWord::Failed, format!("cannot start the save thread: {error}"))
}

/// The object store for the snapshot, if `folder` is an address.
fn upload_to(config: &Config, folder: &Path) -> Result<Option<Upload>, ApiError> {
    if !is_address(folder) {
        return Ok(None);
    }
    let (machine, config) = (config.name.clone(), &config.object_store);
    let store = object_store::store(folder, config).and_then(|store| store.must_be_writable().map(|()| store));
    let store = store.map_err(|error| ApiError::new(ErrorWord::BadRequest, crate::chain(&error)))?;
    let staging = Staging::make(config, &machine).map_err(|error| {
        let why = format!("cannot stage a save for the object store in {}: {error}", config.folder.display());
        ApiError::new(ErrorWord::Failed, why).hint("choose another folder with `folder` in [object_store]")
    })?;
    Ok(Some(Upload { staging, store, machine, expected: Expected::default() }))
}

fn save_targets(config: &Config, draft: &mut Draft) -> Result<Vec<Target>, SnapshotError> {
    let target = |disk: &DiskConfig| {
        let shares = can_share(&disk.name, &disk.path, disk.format.name(), draft.folder())?;
        let file = draft.make_disk(&disk.name)?;
        let (name, image) = (disk.name.clone(), disk.path.clone());
        Ok(Target { disk: name, image, format: disk.format.name(), file, shares })
    };
    config.devices.disks.iter().map(target).collect()
}

impl Disks {
    /// Starts to log the disks' writes. Call it before the writes of anyone else are watched: a write that ends before
    /// the log exists is in memory before memory is read.
    pub(super) fn log_disks(&self, life: &Life) -> Result<Arc<WriteLog>, ServerError> {
        let ram = &life.incarnation.ram;
        let log = Arc::new(WriteLog::new(ram.identity(), ram.pages()));
        self.log_disk_writes(Some(&log)).inspect_err(|_| self.stop_logging_writes())?;
        Ok(log)
    }

    /// Watches all writes to the guest's memory. The error says why the guest must be paused instead.
    pub(super) fn watch_writers(&self, life: &Life, log: Arc<WriteLog>) -> Result<Writers, String> {
        let watch =
            |userfault| Writers::watch(userfault, &life.incarnation.ram, log).map_err(|error| crate::chain(&error));
        let watched = life.generation.userfault().map_err(str::to_owned).and_then(watch);
        watched.inspect_err(|_| self.stop_logging_writes())
    }

    pub(super) fn begin_scan(
        &self,
        life: &Life,
        plan: ScanRequest,
        log: Arc<WriteLog>,
    ) -> Result<AccessTracking, ApiError> {
        let begin =
            |userfault| AccessScan::begin(userfault, &life.incarnation.ram, log).map_err(|error| crate::chain(&error));
        let begun = life.generation.userfault().map_err(str::to_owned).and_then(begin);
        let plan = ScanPlan { period: Duration::from_millis(plan.period_ms), rounds: plan.rounds };
        let emulates = emulates(life);
        begun
            .map(|scan| AccessTracking::Uses(scan, plan, ScannedQemu { qmp: life.generation.qmp.clone(), emulates }))
            .map_err(|why| {
                self.stop_logging_writes();
                let hint = "save without --scan; `hearth rehearse` can record a working set later";
                ApiError::new(ErrorWord::WrongState, format!("cannot scan which pages the guest uses: {why}"))
                    .hint(hint)
            })
    }

    pub(super) fn log_disk_writes(&self, log: Option<&Arc<WriteLog>>) -> Result<(), ServerError> {
        for disk in &self.servers {
            match disk.set_write_log(log.cloned()) {
                // A server that has ended writes nothing.
                Ok(()) | Err(ServerError::Gone { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Stops logging the disks' writes. A server that cannot be told continues to log, which does no harm.
    pub(super) fn stop_logging_writes(&self) {
        if let Err(error) = self.log_disk_writes(None) {
            tracing::warn!(error = crate::chain(&error), "cannot stop logging the disks' writes");
        }
    }
}

impl Machine {
    /// Has a thread make the save's files; `save_prepared` goes on, and answers.
    pub(super) fn begin_save(&mut self, request: SaveRequest, answer: &Reply) -> Result<(), ApiError> {
        self.must_be_savable(&request)?;
        let Some(life) = self.state.guest() else { return Ok(()) };
        self.saves.begun += 1;
        let (number, generation) = (self.saves.begun, life.generation.number);
        let tell = Tell { tell: self.context.outside.tell.clone(), number };
        let (config, ram, folder) = (self.context.config.clone(), life.incarnation.ram.clone(), request.folder.clone());
        let (done, result) = mpsc::channel();
        let work = move || {
            // If the machine has stopped meanwhile nobody takes the files, and they are removed here.
            let _ = done.send(prepare(&config, &ram, &folder));
            tell.say(SaveMessage::Prepared);
        };
        std::thread::Builder::new()
            .name(format!("save-{}", self.context.config.name))
            .spawn(work)
            .map_err(no_thread)?;
        self.saves.preparing = Some(Preparing { number, generation, request, answer: answer.clone(), result });
        Ok(())
    }

    /// The save's files are made, or cannot be.
    fn save_prepared(&mut self, number: u64) {
        let Some(preparing) = self.saves.preparing.take_if(|preparing| preparing.number == number) else { return };
        let Preparing { generation, request, answer, result, .. } = preparing;
        let prepared = result.recv().expect("its thread sends this first, and a panic of it ends the keeper");
        let begun = prepared.and_then(|prepared| {
            self.must_be_savable(&request)?;
            if !self.is_current(generation) {
                return Err(self.wrong_state("save"));
            }
            self.begin_prepared(number, request, prepared)
        });
        // The asker may have hung up.
        let _ = answer.send(begun.map(|()| Answer::Accepted));
    }

    fn begin_prepared(&mut self, number: u64, request: SaveRequest, prepared: Prepared) -> Result<(), ApiError> {
        let Some(life) = self.state.guest() else { return Ok(()) };
        let Prepared { draft, targets, upload, pages, to_copy } = prepared;
        let log = self.disks.log_disks(life).map_err(failed)?;
        let (sight, held_why) = match (request.scan, log) {
            (Some(plan), log) => (self.disks.begin_scan(life, plan, log)?, None),
            (None, log) => match self.disks.watch_writers(life, log) {
                Ok(writers) => (AccessTracking::Writes(writers), None),
                Err(why) => (AccessTracking::Nothing, Some(why)),
            },
        };
        let folder = request.folder.display().to_string();
        let to_upload = upload.as_ref().map_or(0, |upload| upload.expected.bytes());
        let progress = Arc::new(Progress::begin(folder.clone(), pages, to_copy, to_upload));
        let tell = Tell { tell: self.context.outside.tell.clone(), number };
        let (commands, heard) = mpsc::channel();
        let task = Task {
            draft,
            ram: life.incarnation.ram.clone(),
            sight,
            compress: request.compress,
            freezer: self.freezer(request.freeze),
            dedup: life.incarnation.ledger.clone().filter(|_| request.dedup_disk),
            commands: heard,
            progress: progress.clone(),
            tell: tell.clone(),
            disks: self.disks.servers.iter().map(DiskServer::pressure).collect(),
            upload,
        };
        let generation = life.generation.number;
        let work = move || {
            let written = task.run();
            tell.say(SaveMessage::Over);
            written
        };
        let thread = std::thread::Builder::new().name(format!("save-{}", self.context.config.name)).spawn(work);
        let thread = thread.map_err(|error| {
            self.disks.stop_logging_writes();
            no_thread(error)
        })?;
        let (then, held) = (request.then, Held::NotYet);
        let folder_path = request.folder;
        self.saves.current = Some(Saving {
            number,
            folder: folder_path,
            then,
            generation,
            targets,
            held,
            progress,
            commands: SaveCommands::new(commands),
            thread,
        });
        self.context.record(EventKind::SaveStarted { folder, held_why });
        Ok(())
    }

    pub(super) fn handle_save(&mut self, number: u64, message: SaveMessage) {
        if let SaveMessage::Prepared = message {
            return self.save_prepared(number);
        }
        if self.saves.current.as_ref().is_none_or(|saving| saving.number != number) {
            return;
        }
        let is_cancelled = self.saves.current.as_ref().is_some_and(Saving::is_cancelled);
        match message {
            SaveMessage::Over => self.conclude_save(),
            SaveMessage::Event(event) => self.context.record(event),
            _ if is_cancelled => {}
            SaveMessage::Scanning => self.note_scanning(),
            SaveMessage::Scanned(event) => {
                self.note_scan_over();
                self.context.record(event);
            }
            SaveMessage::Freezing => self.note_freezing(),
            SaveMessage::Frozen(event) => self.frozen(event),
            SaveMessage::Settled => self.pause_for_save(),
            SaveMessage::Stands(at) => {
                if let Some(Saving { held: Held::Since(since), .. }) = &mut self.saves.current {
                    *since = at;
                }
            }
            SaveMessage::Prepared | SaveMessage::Held(Ok(())) => {}
            SaveMessage::Held(Err(why)) => self.cancel_save(&why),
            SaveMessage::Taken => {
                self.disks.stop_logging_writes();
                if self.saves.current.as_ref().is_some_and(|saving| saving.then == SaveThen::Continue) {
                    self.resume_after_save();
                }
            }
        }
    }

    /// Notes that QEMU is about to translate its code again: if this keeper dies, the next one ends that.
    fn note_scanning(&mut self) {
        if !self.may_go_on_saving() {
            return;
        }
        if self.state.guest().is_some_and(emulates) {
            self.context.journal.guest = GuestNote::Scanned;
            self.context.save_journal();
        }
        if let Some(saving) = &self.saves.current {
            saving.commands.give(SaveCommand::Noted);
        }
    }

    /// Ends the scan of a dead keeper, if there was one.
    pub(super) fn end_scan_cut_off(&mut self) {
        if self.context.journal.guest == GuestNote::Scanned
            && let Some(life) = self.state.guest()
        {
            end_fresh_translation(&life.generation.qmp);
        }
        self.note_scan_over();
    }

    /// QEMU translates as usual, or has ended.
    fn note_scan_over(&mut self) {
        if self.context.journal.guest == GuestNote::Scanned {
            self.context.journal.guest = GuestNote::Runs;
            self.context.save_journal();
        }
    }

    /// Whether the save can go on. If not, it is cancelled.
    fn may_go_on_saving(&mut self) -> bool {
        let Some(saving) = &self.saves.current else { return false };
        let may = self.state.is_undisturbed() && self.is_current(saving.generation);
        if !may {
            self.cancel_save("the guest was stopping or rebooting");
        }
        may
    }

    /// QEMU's thread holds the guest still, and takes what is to be of that moment.
    fn pause_for_save(&mut self) {
        if !self.may_go_on_saving() {
            return;
        }
        // A disk may have become full since the save was begun.
        if let Err(refusal) = self.disks.must_have_space(&self.context, "save") {
            return self.cancel_save(&refusal.message);
        }
        self.context.journal.guest = GuestNote::Paused;
        self.context.save_journal();
        let tell = self.context.outside.tell.clone();
        let (Some(life), Some(saving)) = (self.state.guest_mut(), &mut self.saves.current) else { return };
        saving.held = Held::Since(Instant::now());
        let tell = Tell { tell, number: saving.number };
        let hold = Hold::begin(&self.context, &self.disks, &life.generation, saving);
        let told = life.generation.tell(move |qmp| {
            let held = hold.capture_paused_state(qmp, &tell);
            tell.say(SaveMessage::Held(held));
        });
        self.apply_infallible(Input::Paused { reason: PauseReason::Save });
        if let Err(error) = told {
            self.cancel_save(&format!("cannot start a thread: {error}"));
        }
    }
}

fn emulates(life: &Life) -> bool {
    life.generation.identity().accelerator == Accelerator::Tcg.name()
}

/// Bytes that an image occupies on its disk: holes are not copied.
fn allocated_bytes(image: &Path) -> u64 {
    std::fs::metadata(image).map_or(0, |file| std::os::unix::fs::MetadataExt::blocks(&file) * 512)
}
