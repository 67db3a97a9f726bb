//! Dump job: writes one guest's memory to a file while the machine goes on.
//!
//! plan (which pages are kept? the others are released) -> write (compressors -> this thread, the only writer; what is
//! written is released) -> finish (the file is complete, old dumps are removed)
//!
//! A step that fails waits for the operator (`hearth dump --resume` or `--discard`) and is then tried again: no memory
//! is given up because a disk is full. The compressors have the lowest priority, because the next guest comes first,
//! unless it waits for memory that they will release. The writer keeps its priority, because it releases memory. Each
//! compressor holds one piece of a chunk, and the writer one more. These pieces count in the budget; a chunk may be
//! larger than the space left in it.

mod dump_folder;
mod pace;
mod priority;
mod progress;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_api::{DumpExcluded, DumpState, DumpStatus, EventKind};
use hearth_memory::PAGE_BYTES;
use hearth_recovery::crash_recovery::{Assessment, Claim, Phase, judge};
use hearth_recovery::vmcore::dump::{Dump, DumpError, Format, Plan, Written, incomplete_path};
use hearth_recovery::vmcore::linux::ClassCounts;
use hearth_recovery::vmcore::notes::Notes;
use hearth_recovery::vmcore::{DeadRam, DumpLevel, Packed, PhysicalMemory, VmcoreFile};

pub use dump_folder::DumpFolder;
pub use pace::{Pace, SlowdownCheck};
use priority::Compressors;
pub use priority::GuestWaits;
pub use progress::{Order, Progress};

use super::work::TELL_EVERY;
use crate::event::DumpMessage;

/// Largest piece that is packed and written at once. Larger pieces write no faster.
const PIECE_BYTES_MAX: u64 = 4 << 20;
/// Smallest piece, whatever the slack is.
const PIECE_BYTES_MIN: u64 = 64 << 10;
/// Part of the slack that all pieces of a dump may take together; the rest is the guest's.
const PART_OF_SLACK: u64 = 2;
/// Time between two checks whether the guest waits for memory.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Size of a piece: as large as possible so that all pieces fit into their part of the slack. It is a power of two, so
/// that huge pages are released whole.
pub fn piece_bytes(slack_bytes: u64, threads: u32) -> u64 {
    let most = slack_bytes / PART_OF_SLACK / pieces_in_hand(threads);
    let power_of_two = most.checked_ilog2().map_or(0, |log| 1_u64 << log);
    power_of_two.clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX)
}

/// Most bytes that a dump has in its buffers.
pub fn buffer_bytes(slack_bytes: u64, threads: u32) -> u64 {
    piece_bytes(slack_bytes, threads) * pieces_in_hand(threads)
}

/// One piece for each compressor and one for the writer.
fn pieces_in_hand(threads: u32) -> u64 {
    u64::from(threads.max(1)) + 1
}

/// Everything one dump needs.
pub struct Task {
    pub machine: String,
    pub memory: DeadRam,
    /// None for a living guest: a dump releases none of its memory.
    pub claim: Option<Claim>,
    /// A dump of one byte by QEMU, which holds the registers; or why there is none.
    pub registers: Result<Vec<u8>, String>,
    pub settings: Settings,
    pub dump_folder: DumpFolder,
    pub pace: Pace,
    pub guest_waits: GuestWaits,
    /// Final name of the file.
    pub file: PathBuf,
    /// Whether an earlier keeper began the dump.
    pub begun: bool,
}

/// What a dump contains, and in which steps it is written.
pub struct Settings {
    pub level: DumpLevel,
    pub format: Format,
    /// Memory is released in steps of this size.
    pub chunk_bytes: u64,
    /// Memory is packed and written in steps of this size.
    pub piece_bytes: u64,
    pub threads: u32,
}

/// The thread could not be created. The dump can be started later.
pub struct NoThread {
    pub task: Box<Task>,
    pub error: io::Error,
}

/// A dump that is under way; dropping it gives it up.
pub struct Job {
    pub progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl Job {
    pub fn start(
        task: Task,
        progress: Arc<Progress>,
        tell: impl Fn(DumpMessage) + Send + 'static,
    ) -> Result<Self, NoThread> {
        Self::start_in(std::thread::Builder::new(), task, progress, tell)
    }

    fn start_in(
        builder: std::thread::Builder,
        task: Task,
        progress: Arc<Progress>,
        tell: impl Fn(DumpMessage) + Send + 'static,
    ) -> Result<Self, NoThread> {
        let seen = progress.clone();
        // If the thread cannot be created, its closure is lost, and the task must not be. So the task is sent to it
        // afterwards.
        let (give, take) = channel();
        let thread = builder.name(format!("dump-{}", task.machine)).spawn(move || {
            thread_filter::deny_unneeded();
            if let Ok(task) = take.recv() {
                Work { task, progress: &seen, tell: &tell }.run();
            }
        });
        match thread {
            Ok(thread) => {
                // The thread waits for this message.
                let _ = give.send(task);
                Ok(Self { progress, thread: Some(thread) })
            }
            Err(error) => Err(NoThread { task: Box::new(task), error }),
        }
    }

    /// It goes on until the process ends.
    pub fn leave(mut self) {
        self.thread = None;
    }

    /// Ends a dump that was given up before a thread could be had for it.
    pub fn end_without_thread(task: Task, progress: &Progress, tell: &dyn Fn(DumpMessage)) {
        Work { task, progress, tell }.end(Err(GivenUp));
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.progress.tell(Order::GiveUp);
        if thread.join().is_err() {
            tracing::error!("a dump's thread panicked");
        }
    }
}

/// The dump was given up.
struct GivenUp;

/// Why a step failed. It can be tried again.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    DumpFolder(#[from] dump_folder::DumpFolderError),
    #[error(transparent)]
    Dump(#[from] DumpError),
    #[error("cannot start a compression thread")]
    Thread(#[source] io::Error),
}

struct Work<'a> {
    task: Task,
    progress: &'a Progress,
    tell: &'a dyn Fn(DumpMessage),
}

impl Work<'_> {
    fn run(mut self) {
        let done = self.dump();
        self.end(done);
    }

    fn end(self, done: Result<(), GivenUp>) {
        if let Some(claim) = &self.task.claim
            && let Err(error) = claim.end()
        {
            tracing::warn!(%error, "cannot release the dump's memory");
        }
        if let Err(GivenUp) = done {
            let why = self.progress.status().why.unwrap_or_else(|| "it was discarded".to_owned());
            self.progress.enter(DumpState::Incomplete, Some(why.clone()));
            let file = incomplete_path(&self.task.file).display().to_string();
            self.event(EventKind::DumpIncomplete { file, why });
        }
        // The loop waits for this thread after the last message, so the dead guest's memory is unmapped before it.
        drop(self.task);
        (self.tell)(DumpMessage::Over);
    }

    fn dump(&mut self) -> Result<(), GivenUp> {
        if self.progress.is_given_up() {
            return Err(GivenUp);
        }
        if let Some(file) = self.completed_before() {
            let pages = file.survey().pages;
            self.progress.update(|status| status.pages = pages);
            self.complete(pages, file.file_bytes());
            return Ok(());
        }
        let mut dump = match self.resume()? {
            Some(dump) => dump,
            None => self.begin()?,
        };
        self.progress.enter(DumpState::Writing, None);
        self.timed(Phase::Write, |work| work.write(&mut dump))?;
        self.timed(Phase::Finish, |work| work.finish(dump))
    }

    /// The complete file, if an earlier keeper died after the last step and before its report.
    fn completed_before(&self) -> Option<VmcoreFile> {
        let is_named = self.task.begun && !incomplete_path(&self.task.file).exists();
        is_named.then(|| VmcoreFile::open(&self.task.file).ok()).flatten().filter(VmcoreFile::is_complete)
    }

    /// Continues a dump that an earlier keeper began. None if there is nothing to continue; then nothing was released
    /// either.
    fn resume(&mut self) -> Result<Option<Dump>, GivenUp> {
        let incomplete = incomplete_path(&self.task.file);
        if !incomplete.exists() {
            return Ok(None);
        }
        let file = self.task.file.clone();
        let resumed = self.retry(|_| match Dump::resume(&file) {
            // The keeper died before it had written the header: the file has no pages.
            Err(DumpError::NotOurs { .. }) => Ok(None),
            resumed => Ok(Some(resumed?)),
        })?;
        let Some(dump) = resumed else {
            // The file is in the way of the new one. If it cannot be removed, creating the new one fails with the
            // reason.
            let _ = std::fs::remove_file(&incomplete);
            return Ok(None);
        };
        // On file systems without creation times, the time counts from this keeper's start.
        let created = std::fs::metadata(&incomplete).and_then(|file| file.created());
        if let Some(ago) = created.ok().and_then(|created| created.elapsed().ok()) {
            self.progress.began_before(ago);
        }
        let (pages, written) = (dump.kept().count(), dump.written().count());
        self.progress.update(|status| (status.pages, status.pages_written) = (pages, written));
        self.keep_only(dump.kept());
        for run in dump.written().runs() {
            self.release(run);
        }
        Ok(Some(dump))
    }

    fn begin(&mut self) -> Result<Dump, GivenUp> {
        self.progress.enter(DumpState::Planning, None);
        let plan = self.timed(Phase::Plan, |work| work.plan());
        self.keep_only(&plan.kept);
        let (level, pages) = (plan.level.number(), plan.kept.count());
        self.progress.update(|status| (status.level, status.pages) = (level, pages));
        let (file, ram_pages) = (self.task.file.display().to_string(), self.task.memory.ram_pages());
        self.event(EventKind::DumpStarted { file, level, ram_pages, pages });
        self.retry(|work| {
            work.task.dump_folder.prepare()?;
            work.task.dump_folder.must_hold(0)?;
            Ok(Dump::create(&work.task.file, plan.clone(), work.task.settings.format)?)
        })
    }

    fn plan(&mut self) -> Plan {
        let mut notes = self.notes();
        let judgement = judge(&self.task.memory, &notes.to_bytes(), self.task.settings.level);
        if let Some(text) = &judgement.vmcoreinfo
            && !notes.set_vmcoreinfo(text)
        {
            self.warn("the kernel's VMCOREINFO is too long for the dump file".to_owned());
        }
        self.report(&judgement);
        Plan {
            ranges: self.task.memory.ranges().to_vec(),
            kept: judgement.pages.kept,
            level: judgement.level,
            notes,
            utsname: judgement.utsname.unwrap_or_default(),
        }
    }

    fn notes(&self) -> Notes {
        let why = match &self.task.registers {
            Ok(tiny_dump) => match Notes::of_tiny_dump(tiny_dump) {
                Ok(notes) => return notes,
                Err(error) => crate::chain(&error),
            },
            Err(why) => why.clone(),
        };
        self.warn(format!("no registers: {why}"));
        Notes::default()
    }

    fn report(&self, judgement: &Assessment) {
        judgement.warnings.iter().for_each(|warning| self.warn(warning.clone()));
        self.progress.update(|status| {
            status.panic = judgement.panic.clone();
            status.excluded = excluded(judgement.pages.counts);
        });
        if let Some(message) = judgement.panic.clone() {
            self.event(EventKind::CrashReason { message });
        }
    }

    fn write(&mut self, dump: &mut Dump) -> Result<(), GivenUp> {
        let pieces = dump.chunks(self.task.settings.piece_bytes.min(self.task.settings.chunk_bytes));
        let next = AtomicUsize::new(0);
        let mut told = Instant::now();
        let (memory, progress) = (self.task.memory.clone(), self.progress);
        let compressors = Compressors::default();
        std::thread::scope(|scope| {
            // The channel has no buffer: a compressor that is ahead waits with its piece.
            let (packed, to_write) = sync_channel(0);
            for number in 0..self.task.settings.threads.max(1) {
                let (packed, mut packer) = (packed.clone(), dump.packer());
                let (pieces, next, memory, compressors) = (&pieces, &next, &memory, &compressors);
                let pack_all = move || {
                    let _member = compressors.join();
                    while let Some(piece) = pieces.get(next.fetch_add(1, Relaxed)) {
                        let most = piece.pages * PAGE_BYTES;
                        progress.buffers_grow(most);
                        let done = packer.pack(piece, memory);
                        let bytes = done.bytes().min(most);
                        progress.buffers_shrink(most - bytes);
                        if progress.is_given_up() || packed.send(done).is_err() {
                            progress.buffers_shrink(bytes);
                            return;
                        }
                    }
                };
                let name = format!("dump-{}-{number}", self.task.machine);
                let started = std::thread::Builder::new().name(name).spawn_scoped(scope, pack_all);
                if let (Err(error), 0) = (started, number) {
                    // One compressor is needed; with fewer than configured the dump only takes longer.
                    self.retry(|_| Err::<(), _>(Fault::Thread(io::Error::new(error.kind(), error.to_string()))))?;
                }
            }
            drop(packed);
            let mut chunk = Vec::new();
            let mut chunk_bytes = 0;
            while let Some(packed) = self.next_packed(&to_write, &compressors) {
                let bytes = packed.bytes();
                self.task.pace.wait(bytes, progress);
                let written = self.retry(|work| {
                    work.task.dump_folder.must_hold(bytes)?;
                    Ok(dump.write(&packed)?)
                });
                progress.buffers_shrink(bytes.min(packed.chunk().pages * PAGE_BYTES));
                let written = written?;
                self.written(&written);
                chunk.push(packed.chunk().pfns.clone());
                chunk_bytes += packed.chunk().pages * PAGE_BYTES;
                if chunk_bytes >= self.task.settings.chunk_bytes {
                    chunk.drain(..).for_each(|pfns| self.release(pfns));
                    chunk_bytes = 0;
                }
                if told.elapsed() >= TELL_EVERY {
                    told = Instant::now();
                    self.tell_progress();
                }
            }
            chunk.into_iter().for_each(|pfns| self.release(pfns));
            if progress.is_given_up() { Err(GivenUp) } else { Ok(()) }
        })
    }

    /// The next piece to write. None after the last one.
    fn next_packed(&self, to_write: &Receiver<Packed>, compressors: &Compressors) -> Option<Packed> {
        loop {
            compressors.hurry((self.task.guest_waits)());
            match to_write.recv_timeout(LOOK_EVERY) {
                Ok(packed) => return Some(packed),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn written(&self, written: &Written) {
        self.progress.wrote(written);
        if written.lost > 0 {
            self.warn(format!("{} pages of memory cannot be read and are missing from the dump", written.lost));
        }
    }

    fn finish(&mut self, dump: Dump) -> Result<(), GivenUp> {
        let file = self.task.file.clone();
        let mut dump = Some(dump);
        let finished = self.retry(|_| {
            let dump = dump.take().map_or_else(|| Dump::resume(&file), Ok)?;
            Ok(dump.finish()?)
        })?;
        self.complete(self.progress.status().pages_written, finished.file_bytes);
        Ok(())
    }

    fn complete(&mut self, pages: u64, bytes: u64) {
        // Prune before the dump is reported as complete.
        match self.task.dump_folder.prune() {
            Ok(old) => old.iter().for_each(|old| tracing::info!(file = %old.display(), "removed an old dump")),
            Err(error) => self.warn(format!("cannot remove old dumps: {error}")),
        }
        self.progress.update(|status| status.pages_written = pages);
        self.progress.enter(DumpState::Complete, None);
        let (file, duration_ms) = (self.task.file.display().to_string(), self.progress.status().duration_s * 1e3);
        self.event(EventKind::DumpComplete { file, pages, bytes, duration_ms });
    }

    /// Tries until it succeeds or the dump is given up. After each failure it waits for the operator's order.
    fn retry<T>(&mut self, mut attempt: impl FnMut(&mut Self) -> Result<T, Fault>) -> Result<T, GivenUp> {
        loop {
            if self.progress.is_given_up() {
                return Err(GivenUp);
            }
            let error = match attempt(self) {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let (before, why) = (self.progress.status().state, crate::chain(&error));
            self.progress.enter(DumpState::Waiting, Some(why.clone()));
            let file = incomplete_path(&self.task.file).display().to_string();
            self.event(EventKind::DumpWaits { file, why });
            match self.progress.wait_order() {
                Order::GiveUp => return Err(GivenUp),
                Order::Resume => self.progress.enter(before, None),
            }
        }
    }

    fn keep_only(&self, kept: &hearth_recovery::vmcore::Bitmap) {
        let Some(claim) = &self.task.claim else { return };
        if let Err(error) = claim.narrow(kept) {
            tracing::warn!(%error, "cannot release memory that the dump leaves out");
        }
    }

    /// Releases pages that were written, or could not be read: nobody will ever read those.
    fn release(&self, pfns: std::ops::Range<u64>) {
        let Some(claim) = &self.task.claim else { return };
        if let Err(error) = claim.written(pfns) {
            tracing::warn!(%error, "cannot release memory that was dumped");
        }
    }

    fn timed<T>(&mut self, phase: Phase, work: impl FnOnce(&mut Self) -> T) -> T {
        let began = Instant::now();
        let result = work(self);
        (self.tell)(DumpMessage::Phase { phase, began, took: began.elapsed() });
        result
    }

    fn warn(&self, message: String) {
        self.progress.update(|status| status.warnings.push(message.clone()));
        self.event(EventKind::DumpWarning { message });
    }

    fn tell_progress(&self) {
        let DumpStatus { file, percent, mib_per_s, eta_s, .. } = self.progress.status();
        self.event(EventKind::DumpProgress { file, percent, mib_per_s, eta_s });
    }

    fn event(&self, event: EventKind) {
        (self.tell)(DumpMessage::Event(event));
    }
}

fn excluded(counts: ClassCounts) -> DumpExcluded {
    DumpExcluded {
        cache: counts.cache,
        private_cache: counts.private_cache,
        user: counts.user,
        free: counts.free,
        poisoned: counts.poisoned,
        offline: counts.offline,
        unjudged: counts.unjudged + counts.undescribed,
    }
}
