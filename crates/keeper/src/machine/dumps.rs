//! Dumps: a machine's dumps, one at a time: under way, queued, and the last ones that ended.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use hearth_api::{
    ApiError, DumpCompression, DumpExcluded, DumpFormat, DumpRequest, DumpState, DumpStatus, ErrorWord, EventKind,
    MachineState, rfc3339,
};
use hearth_disk::device::Devices;
use hearth_recovery::crash_recovery::{Claim, HARVEST_PATIENCE};
use hearth_recovery::journal::GuestNote;
use hearth_recovery::vmcore::{Compression, DeadRam, DumpLevel, Format};

use super::disks::Disks;
use super::dump::{DumpFolder, Job, Order, Pace, Progress, Settings, SlowdownCheck, Task, piece_bytes};
use super::state::{Input, PauseReason};
use super::warm_reboot::WarmReboot;
use super::{Context, Machine};
use crate::config::Config;
use crate::control::{Answer, Reply};
use crate::event::{Event, HeldFor};
use crate::folders::existing;

/// Number of ended dumps that are still shown.
const OVER_MAX: usize = 8;
/// A guest's disk is disturbed by a dump if its requests take this long, in percent of their usual time.
const SUFFERS_PCT: u64 = 150;

/// The dumps of one machine.
#[derive(Default)]
pub struct Dumps {
    /// The first dump is under way if there is a job.
    queue: VecDeque<Queued>,
    job: Option<Job>,
    over: VecDeque<DumpStatus>,
    /// A dump of a living guest that waits for an answer of its QEMU.
    asked: Option<Asked>,
}

/// A dump of a living guest before it begins.
struct Asked {
    request: Request,
    /// Of the QEMU that was asked.
    generation: u32,
    /// Whoever ordered it.
    answer: Option<Reply>,
}

fn reply(answer: Option<Reply>, result: Result<(), ApiError>) {
    if let Some(answer) = answer {
        // The asker may have hung up.
        let _ = answer.send(result.map(|()| Answer::Accepted));
    }
}

fn not_dumped(why: &str) -> ApiError {
    ApiError::new(ErrorWord::Failed, format!("cannot dump: {why}"))
}

struct Queued {
    incarnation: u32,
    /// None once the dump is under way.
    task: Option<Task>,
    progress: Arc<Progress>,
}

/// A guest that is to be dumped.
pub struct Subject {
    pub incarnation: u32,
    pub memory: DeadRam,
    /// None for a living guest.
    pub claim: Option<Claim>,
    /// As for [`Task`].
    pub registers: Result<Vec<u8>, String>,
}

/// A requested dump. Fields that are None take the configuration's value.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub pause: bool,
    pub level: Option<DumpLevel>,
    pub format: Option<DumpFormat>,
    pub compression: Option<DumpCompression>,
    pub file: Option<PathBuf>,
}

impl Dumps {
    pub fn queue(&mut self, incarnation: u32, (task, progress): (Task, Arc<Progress>)) {
        self.queue.push_back(Queued { incarnation, task: Some(task), progress });
    }

    /// The next dump to start. None if one is under way.
    pub fn next(&mut self) -> Option<(u32, Task, Arc<Progress>)> {
        if self.job.is_some() {
            return None;
        }
        let first = self.queue.front_mut()?;
        first.task.as_ref()?;
        if !first.progress.is_given_up() {
            first.progress.enter(DumpState::Queued, None);
        }
        Some((first.incarnation, first.task.take()?, first.progress.clone()))
    }

    /// The one under way goes on until the process ends; the next keeper goes on with all of them.
    pub fn leave(self) {
        if let Some(job) = self.job {
            job.leave();
        }
    }

    pub fn started(&mut self, job: Job) {
        self.job = Some(job);
    }

    /// No thread could be created for the next dump: it waits until the operator resumes or discards it.
    pub fn not_started(&mut self, task: Task, why: String) {
        if let Some(first) = self.queue.front_mut() {
            first.task = Some(task);
            first.progress.enter(DumpState::Waiting, Some(why));
        }
    }

    /// Removes the dump that has ended from the queue.
    pub fn over(&mut self) {
        self.job = None;
        let Some(first) = self.queue.pop_front() else { return };
        if self.over.len() == OVER_MAX {
            self.over.pop_front();
        }
        self.over.push_back(first.progress.status());
    }

    pub fn is_busy(&self) -> bool {
        !self.queue.is_empty() || self.asked.is_some()
    }

    /// A dump that has not begun does not. False if there is none.
    pub fn forget_asked(&mut self, why: &str) -> bool {
        let Some(asked) = self.asked.take() else { return false };
        reply(asked.answer, Err(not_dumped(why)));
        true
    }

    /// Passes an order to the dump that is under way.
    pub fn tell(&self, order: Order) {
        if let Some(job) = &self.job {
            job.progress.tell(order);
        }
    }

    /// Ends a dump of a living guest. What it reads after this does not get into its file.
    pub fn end_living(&mut self, why: &str) {
        self.forget_asked(why);
        let Some(first) = self.queue.front() else { return };
        if first.progress.status().live {
            first.progress.update(|status| status.why = Some(why.to_owned()));
            first.progress.tell(Order::GiveUp);
        }
    }

    /// Gives up all dumps.
    pub fn give_up_all(&self) {
        self.queue.iter().for_each(|queued| queued.progress.tell(Order::GiveUp));
    }

    /// Gives up all dumps for a reason of the machine's own.
    pub fn give_up_for(&self, why: &str) {
        self.queue.iter().for_each(|queued| queued.progress.update(|status| status.why = Some(why.to_owned())));
        self.give_up_all();
    }

    /// The dump that is under way or comes next.
    pub fn first(&self) -> Option<&Arc<Progress>> {
        self.queue.front().map(|queued| &queued.progress)
    }

    pub fn current(&self) -> Option<DumpStatus> {
        self.first().map(|progress| progress.status())
    }

    pub fn statuses(&self) -> Vec<DumpStatus> {
        self.over.iter().cloned().chain(self.queue.iter().map(|queued| queued.progress.status())).collect()
    }
}

/// The folder of the machine's dumps.
pub(super) fn dump_folder(config: &Config) -> DumpFolder {
    let crash = &config.crash;
    DumpFolder {
        folder: crash.dump_folder.clone(),
        machine: config.name.clone(),
        keep_last: crash.keep_last as usize,
        min_free_bytes: crash.min_free_bytes,
    }
}

impl Dumps {
    /// A dump that is to be queued. What the request leaves open is as configured.
    pub fn task(
        context: &Context,
        warm_reboot: &WarmReboot,
        disks: &Disks,
        request: Request,
        subject: Subject,
    ) -> (Task, Arc<Progress>) {
        let Subject { incarnation, memory, claim, registers } = subject;
        let crash = &context.config.crash;
        let dump_folder = dump_folder(&context.config);
        let configured = DumpLevel::new(crash.level).unwrap_or(DumpLevel::NOT_ZERO);
        let level = request.level.unwrap_or(configured);
        let (format, compression) =
            (request.format.unwrap_or(crash.format), request.compression.unwrap_or(crash.compression));
        let file = request.file.unwrap_or_else(|| dump_folder.name(incarnation, SystemTime::now()));
        let status = DumpStatus {
            incarnation,
            state: DumpState::Queued,
            why: None,
            live: claim.is_none(),
            file: file.display().to_string(),
            level: level.number(),
            format,
            compression: if format == DumpFormat::Elf { DumpCompression::None } else { compression },
            panic: None,
            warnings: Vec::new(),
            started_at: rfc3339(SystemTime::now()),
            duration_s: 0.0,
            pages: 0,
            pages_written: 0,
            excluded: DumpExcluded::default(),
            held_bytes: 0,
            written_bytes: 0,
            percent: 0.0,
            mib_per_s: 0.0,
            eta_s: None,
        };
        let progress = Arc::new(Progress::new(status, claim.clone(), warm_reboot.monitor.dump_buffers()));
        // A dump of a living guest frees no memory.
        let guest_waits = if claim.is_some() { warm_reboot.monitor.guest_waits() } else { Arc::new(|| false) };
        let pace =
            Pace::new(crash.mib_per_second, crash.disk_time, slowdown_check(context, disks), guest_waits.clone());
        let task = Task {
            machine: context.config.name.clone(),
            memory,
            claim,
            registers,
            settings: Settings {
                level,
                format: match format {
                    DumpFormat::Elf => Format::Elf,
                    DumpFormat::Kdump => Format::Kdump(method(compression)),
                },
                chunk_bytes: crash.chunk_bytes,
                piece_bytes: piece_bytes(context.config.memory.slack_bytes, crash.threads),
                threads: crash.threads,
            },
            dump_folder,
            pace,
            guest_waits,
            file,
            begun: false,
        };
        (task, progress)
    }
}

/// Tells whether the guest's requests are slowed down on a disk that the dump also writes to.
fn slowdown_check(context: &Context, disks: &Disks) -> SlowdownCheck {
    let dump = Devices::of(existing(&context.config.crash.dump_folder)).unwrap_or(Devices::Unknown);
    let shares = |path: &PathBuf| Devices::of(path).unwrap_or(Devices::Unknown).may_share(&dump);
    let shared: Vec<_> = context.config.devices.disks.iter().map(|config| shares(&config.path)).collect();
    let pressures = disks.pressures.clone();
    Box::new(move || {
        let now = Instant::now();
        let pressures = pressures.lock().expect("holders only assign and read");
        let shared = pressures.iter().zip(&shared).filter(|(_, shares)| **shares);
        let mut readings = shared.map(|(disk, _)| disk.read(now));
        readings.any(|disk| disk.in_flight > 0 || disk.slowdown_pct > SUFFERS_PCT)
    })
}

impl Machine {
    /// Dumps a guest that runs, or is paused. QEMU's thread asks for what only QEMU can tell; `ready_to_dump` goes on.
    pub(super) fn dump_living(&mut self, mut request: Request, answer: Option<Reply>) -> Result<(), ApiError> {
        if self.crash_recovery.dumps.asked.is_some() {
            let message = "cannot dump: another dump is just beginning";
            return Err(ApiError::new(ErrorWord::WrongState, message).hint("`hearth status` shows its progress"));
        }
        if let Some(status) = self.crash_recovery.dumps.current() {
            let message = format!("cannot dump: another dump is {}: {}", status.state.name(), status.file);
            let hint = match status.state {
                DumpState::Waiting => "continue it with `hearth dump --resume`, or give it up with `--discard`",
                _ => "wait until it is complete",
            };
            return Err(ApiError::new(ErrorWord::WrongState, message).hint(hint));
        }
        if self.saves.current.is_some() {
            let message = "cannot dump: the guest is being saved";
            return Err(ApiError::new(ErrorWord::WrongState, message)
                .hint("wait until it has ended, or cancel it with `hearth save --cancel`"));
        }
        self.lazy_restore.must_be_complete("dump")?;
        self.must_run("dump")?;
        let runs = self.state.shown() == MachineState::Running;
        let number = self.must_live("dump")?.incarnation.number;
        let holds = request.pause && runs;
        if holds {
            let file = request
                .file
                .get_or_insert_with(|| dump_folder(&self.context.config).name(number, SystemTime::now()))
                .clone();
            self.pause_for_dump(file)?;
        }
        let tell = self.context.outside.tell.clone();
        let Some(life) = self.state.guest_mut() else { return Ok(()) };
        let generation = life.generation.number;
        let told = life.generation.tell(move |qmp| {
            let held = if holds { qmp.pause().map_err(|error| crate::chain(&error)) } else { Ok(()) };
            let registers = match &held {
                Ok(()) => qmp.registers(HARVEST_PATIENCE).map_err(|error| crate::chain(&error)),
                Err(why) => Err(why.clone()),
            };
            // Fails only when the loop is gone.
            let _ = tell.send(Event::ReadyToDump { generation, held, registers });
        });
        self.crash_recovery.dumps.asked = Some(Asked { request, generation, answer });
        if let Err(error) = told {
            self.ready_to_dump(generation, Err(format!("cannot start a thread: {error}")), Err(String::new()));
        }
        Ok(())
    }

    /// From now on the guest counts as paused, until `resume_after_dump`.
    fn pause_for_dump(&mut self, file: PathBuf) -> Result<(), ApiError> {
        if self.state.has_order() {
            let message = "cannot pause the guest for a dump: the machine is stopping or rebooting";
            return Err(ApiError::new(ErrorWord::WrongState, message).hint("dump without --pause"));
        }
        self.disks.must_have_space(&self.context, "dump")?;
        self.disks.must_be_in_use("dump")?;
        // Save the journal before the pause: a new keeper must know why the guest is paused.
        self.context.journal.guest = GuestNote::PausedForDump { file };
        if let Err(error) = self.context.must_save_journal() {
            self.context.journal.guest = GuestNote::Runs;
            return Err(not_dumped(&crate::chain(&error)));
        }
        self.apply_infallible(Input::Paused { reason: PauseReason::Dump });
        Ok(())
    }

    /// QEMU has paused the guest, if that was wanted, and given its registers; or has not.
    pub(super) fn ready_to_dump(
        &mut self,
        generation: u32,
        held: Result<(), String>,
        registers: Result<Vec<u8>, String>,
    ) {
        // It may have been ended meanwhile.
        let Some(asked) = self.crash_recovery.dumps.asked.take_if(|asked| asked.generation == generation) else {
            return;
        };
        if let Err(why) = held {
            self.resume_after_dump();
            if asked.answer.is_none() {
                self.context.record(EventKind::DumpSkipped { why: why.clone() });
            }
            return reply(asked.answer, Err(not_dumped(&why)));
        }
        let Some(life) = self.state.guest() else { return };
        let (number, memory) = (life.incarnation.number, DeadRam::new(life.incarnation.ram.clone()));
        let Asked { request, answer, .. } = asked;
        let subject = Subject { incarnation: number, memory, claim: None, registers };
        let task = Dumps::task(&self.context, &self.warm_reboot, &self.disks, request, subject);
        self.crash_recovery.dumps.queue(number, task);
        self.crash_recovery.start_next_dump(&self.context);
        reply(answer, Ok(()));
    }

    /// The guest goes on, if it stands still for a dump.
    pub(super) fn resume_after_dump(&mut self) {
        if self.is_paused_for_dump() {
            self.resume_guest(HeldFor::Dump);
        }
    }

    fn is_paused_for_dump(&self) -> bool {
        matches!(self.context.journal.guest, GuestNote::PausedForDump { .. })
    }

    /// Ends the dump for which the guest is paused, because the guest is needed for something else. Does nothing if
    /// there is none.
    pub(super) fn end_held_dump(&mut self, why: &str) {
        if self.is_paused_for_dump() {
            self.crash_recovery.end_living_dump(&self.context, why);
            self.resume_after_dump();
        }
    }

    pub(super) fn dump_ordered(&mut self, request: DumpRequest, answer: &Reply) -> Result<(), ApiError> {
        let wrong = |message: String| ApiError::new(ErrorWord::BadRequest, message);
        let level = match request.level {
            None => None,
            Some(level) => Some(
                DumpLevel::new(level)
                    .ok_or_else(|| wrong(format!("dump level {level} is out of range: use 0 to 31")))?,
            ),
        };
        let file = request.output.map(PathBuf::from);
        if let Some(file) = file.as_ref().filter(|file| !file.is_absolute()) {
            return Err(wrong(format!("{}: the path must be absolute", file.display())));
        }
        let DumpRequest { pause, format, compression, .. } = request;
        must_compress(format.unwrap_or(self.context.config.crash.format), compression)?;
        self.rejuvenation.must_not_hop("dump")?;
        self.dump_living(Request { pause, level, format, compression, file }, Some(answer.clone()))
    }

    pub(super) fn resume_dump(&mut self) -> Result<(), ApiError> {
        self.crash_recovery.resume_dump(&self.context)
    }

    pub(super) fn discard_dumps(&mut self) -> Result<(), ApiError> {
        if self.crash_recovery.dumps.forget_asked("it was discarded") {
            self.resume_after_dump();
            return Ok(());
        }
        self.crash_recovery.discard_dumps(&self.context)
    }
}

/// Refuses a compression that this format does not support.
fn must_compress(format: DumpFormat, asked: Option<DumpCompression>) -> Result<(), ApiError> {
    match asked {
        Some(asked) if format == DumpFormat::Elf && asked != DumpCompression::None => {
            let message = format!("compression {} does not work with the ELF format", asked.name());
            Err(ApiError::new(ErrorWord::BadRequest, message).hint("use the format kdump, or no compression"))
        }
        _ => Ok(()),
    }
}

fn method(compression: DumpCompression) -> Compression {
    match compression {
        DumpCompression::Zstd => Compression::Zstd,
        DumpCompression::Lzo => Compression::Lzo,
        DumpCompression::Zlib => Compression::Zlib,
        DumpCompression::None => Compression::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elf_refuses_compression_by_name() {
        use DumpCompression::{Lzo, None as Uncompressed, Zstd};
        for asked in [None, Some(Uncompressed)] {
            assert_eq!(must_compress(DumpFormat::Elf, asked), Ok(()));
        }
        for asked in [None, Some(Uncompressed), Some(Zstd)] {
            assert_eq!(must_compress(DumpFormat::Kdump, asked), Ok(()));
        }
        let refused = must_compress(DumpFormat::Elf, Some(Lzo)).unwrap_err();
        assert_eq!(refused.message, "compression lzo does not work with the ELF format");
    }
}
