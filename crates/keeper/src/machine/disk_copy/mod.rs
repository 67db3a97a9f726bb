//! Disk copy: a disk of a running guest as it is at one moment, in a file of its own.
//!
//! ```text
//! thread   file -> share blocks, once, to see whether that works -> agent freezes | disk is held -> moment | the rest -> synced, named
//! loop                                                     (journal)             |             thaw         |
//! ```
//! The agent of a libvirt domain's guest is asked by whoever wants the copy, when the file is there.
//!
//! A held disk finishes what it has begun and takes no more requests. The moment is a clone of the image (reflink); where blocks cannot
//! be shared the image is frozen, and its disk copies a block before it changes it (`hearth_disk::image::FrozenImage`). So the guest
//! waits for what is in flight and for the clone, not for the copy.
//!
//! The guest decides nothing here: its agent and its requests have a time limit each. An agent that does not answer costs the copy its
//! consistency, and the copy says so.
//!
//! The storage of the copy may hang. What is done there is done by threads of their own, and only they wait for it (`apart`).
//!
//! What was written between two moments is noted by the disk (`hearth_disk::image::Checkpoints`). A copy gets it as the bitmap of a
//! qcow2 image over it, which `qemu-nbd` serves.
//!
//! The file has another name until it is complete. A copy goes on over a reboot of the guest. It ends with the keeper, and when the
//! image is closed.

mod apart;
mod target;
mod task;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_api::{ApiError, CopyDiskRequest, CopyDiskTake, ErrorWord, EventKind};

use super::disks::Disks;
use super::{Context, Machine};
use crate::config::DiskFormat;
use crate::control::Reply;
use crate::event::{DiskCopyMessage, Event};
pub use target::image_over;
pub use task::Consistency;
use task::{Stop, Task};

/// How long a copy that is called off may take to remove its file. One that hangs in its storage is left behind.
const CALL_OFF_PATIENCE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Copies of the machine's disks, one at a time.
#[derive(Default)]
pub struct DiskCopies {
    begun: u64,
    current: Option<Copying>,
}

struct Copying {
    number: u64,
    file: PathBuf,
    stop: Arc<Stop>,
    /// Tells the thread that the journal says that file systems may be frozen.
    noted: Sender<()>,
    /// Tells the thread that its caller has had the file systems frozen, or why not.
    by_caller: Sender<Option<String>>,
    moment_is_taken: bool,
    thread: JoinHandle<()>,
}

/// Sends messages about one copy to the loop.
#[derive(Clone)]
struct Tell {
    tell: Sender<Event>,
    number: u64,
}

impl Tell {
    fn say(&self, message: DiskCopyMessage) {
        // Fails only when the loop has ended; then nobody needs the message.
        let _ = self.tell.send(Event::DiskCopy { number: self.number, message });
    }
}

impl DiskCopies {
    /// Has a thread make the copy. It answers when the file is there.
    pub fn begin(
        &mut self,
        context: &Context,
        disks: &Disks,
        request: CopyDiskRequest,
        consistency: impl FnOnce(Receiver<()>) -> Consistency,
        answer: &Reply,
    ) -> Result<(), ApiError> {
        if !request.file.is_absolute() {
            return Err(ApiError::new(ErrorWord::BadRequest, "the file of the copy must be an absolute path"));
        }
        self.must_be_none("copy a disk")?;
        let config = &context.config.devices.disks;
        if let Some(taken) = config.iter().find(|disk| is_same_path(&disk.path, &request.file)) {
            let message = format!("{} is the path of the image of disk {}", request.file.display(), taken.name);
            return Err(ApiError::new(ErrorWord::BadRequest, message).hint("choose another file for the copy"));
        }
        if let Some(name) = request.checkpoint.iter().chain(&request.since).find(|name| !is_checkpoint_name(name)) {
            let message = format!("{name:?} is no name of a checkpoint");
            return Err(ApiError::new(ErrorWord::BadRequest, message)
                .hint("use 1 to 64 letters, digits and the characters - _ and ."));
        }
        let server = disks.configured(context, &request.disk)?.observer();
        let Some(disk) = config.iter().find(|disk| disk.name == request.disk) else { return Ok(()) };
        self.begun += 1;
        let (noted, heard) = channel();
        let (by_caller, told) = channel();
        let tell = Tell { tell: context.outside.tell.clone(), number: self.begun };
        let stop = Arc::new(Stop::default());
        let task = Task {
            disk: disk.name.clone(),
            image: disk.path.clone(),
            format: if disk.format == DiskFormat::Qcow2 { "qcow2" } else { "raw" },
            file: request.file.clone(),
            checkpoint: request.checkpoint,
            since: request.since,
            server,
            pressure: disks.servers.iter().map(hearth_disk::server::DiskServer::pressure).collect(),
            consistency: if request.caller_freezes { Consistency::ByCaller { told } } else { consistency(heard) },
            stop: stop.clone(),
            tell,
        };
        let answer = answer.clone();
        let thread = std::thread::Builder::new().name(format!("copy-{}", disk.name)).spawn(move || task.run(&answer));
        let thread = thread.map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        self.current = Some(Copying {
            number: self.begun,
            file: request.file,
            stop,
            noted,
            by_caller,
            moment_is_taken: false,
            thread,
        });
        Ok(())
    }

    /// Refuses while a copy is being made.
    pub fn must_be_none(&self, what: &str) -> Result<(), ApiError> {
        if self.current.is_none() {
            return Ok(());
        }
        let message = format!("cannot {what}: a disk is being copied");
        Err(ApiError::new(ErrorWord::WrongState, message)
            .hint("wait until the copy has ended; `hearth events` shows it"))
    }

    /// Refuses while the guest may be frozen for a copy.
    pub fn must_have_moment(&self, what: &str) -> Result<(), ApiError> {
        match &self.current {
            Some(current) if !current.moment_is_taken => self.must_be_none(what),
            _ => Ok(()),
        }
    }

    /// Calls off a copy whose moment is not taken: its guest is about to stop.
    pub fn make_way(&self, why: &str) {
        if let Some(current) = self.current.as_ref().filter(|current| !current.moment_is_taken) {
            current.stop.cancel(why);
        }
    }

    pub fn cancel(&self, file: &Path) -> Result<(), ApiError> {
        self.to(file)?.stop.cancel("cancelled by the operator");
        Ok(())
    }

    /// Goes on with a copy whose caller freezes the file systems.
    pub fn take(&self, request: CopyDiskTake) -> Result<(), ApiError> {
        // A thread that does not wait for it has ended, or asks an agent itself.
        let _ = self.to(&request.file)?.by_caller.send(request.not_frozen);
        Ok(())
    }

    fn to(&self, file: &Path) -> Result<&Copying, ApiError> {
        self.current.as_ref().filter(|current| current.file == file).ok_or_else(|| {
            let message = format!("no copy of a disk to {} is being made", file.display());
            ApiError::new(ErrorWord::WrongState, message)
        })
    }

    fn current(&mut self, number: u64) -> Option<&mut Copying> {
        self.current.as_mut().filter(|current| current.number == number)
    }

    /// Records what a thread tells.
    pub fn handle(&mut self, context: &Context, number: u64, message: DiskCopyMessage) {
        let Some(current) = self.current(number) else { return };
        match message {
            DiskCopyMessage::Freezing => {
                // One that has ended does not wait.
                let _ = current.noted.send(());
            }
            DiskCopyMessage::Frozen { .. } => {}
            DiskCopyMessage::Taken(event) => {
                current.moment_is_taken = true;
                context.record(event);
            }
            DiskCopyMessage::Progress(event) => context.record(event),
            DiskCopyMessage::Over(event) => {
                self.current = None;
                if let Some(event) = event {
                    context.record(event);
                }
            }
        }
    }
}

impl Drop for DiskCopies {
    fn drop(&mut self) {
        let Some(Copying { stop, noted, thread, .. }) = self.current.take() else { return };
        stop.cancel("the keeper ended");
        drop(noted);
        let deadline = Instant::now() + CALL_OFF_PATIENCE;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Whether both name the same entry of the same folder, which need not exist.
fn is_same_path(one: &Path, other: &Path) -> bool {
    let folder = |path: &Path| path.parent().and_then(|folder| folder.canonicalize().ok());
    one == other || one.file_name() == other.file_name() && folder(one).is_some_and(|one| folder(other) == Some(one))
}

/// It is part of the name of a metadata context of NBD.
fn is_checkpoint_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(is_allowed)
}

fn failed(message: String) -> ApiError {
    ApiError::new(ErrorWord::Failed, message)
}

impl Machine {
    /// Has a thread make the copy, which answers.
    pub(super) fn begin_disk_copy(&mut self, request: CopyDiskRequest, answer: &Reply) -> Result<(), ApiError> {
        let what = "copy a disk";
        self.must_live(what)?;
        self.rejuvenation.must_not_hop(what)?;
        self.must_run(what)?;
        self.saves.must_be_none(what)?;
        self.lazy_restore.must_be_complete(what)?;
        self.disks.must_be_complete(what)?;
        self.disks.must_have_space(&self.context, what)?;
        let Some(life) = self.state.guest() else { return Ok(()) };
        let agent = match life.generation.identity().guest_agent {
            true if self.saves.is_being_thawed() => Err("its file systems are just being thawed"),
            true => Ok(life.generation.agent(&self.context.folders)),
            false => Err("it has no guest agent"),
        };
        let consistency = |noted| match agent {
            Ok(channel) => Consistency::Freeze { channel, noted },
            Err(why) => Consistency::Crash { why },
        };
        self.copies.begin(&self.context, &self.disks, request, consistency, answer)
    }

    pub(super) fn cancel_disk_copy(&mut self, file: &Path) -> Result<(), ApiError> {
        self.copies.cancel(file)
    }

    pub(super) fn take_disk_copy(&mut self, request: CopyDiskTake) -> Result<(), ApiError> {
        self.copies.take(request)
    }

    pub(super) fn handle_disk_copy(&mut self, number: u64, message: DiskCopyMessage) {
        if self.copies.current(number).is_none() {
            return;
        }
        if let DiskCopyMessage::Freezing = message {
            self.saves.note_frozen(&mut self.context);
            self.context.save_journal();
        }
        if let (DiskCopyMessage::Frozen { file_systems }, Some(frozen)) = (&message, &mut self.saves.frozen) {
            frozen.began(*file_systems);
        }
        let thaws = matches!(message, DiskCopyMessage::Taken(_) | DiskCopyMessage::Over(_));
        self.copies.handle(&self.context, number, message);
        if thaws {
            self.thaw();
        }
    }
}

/// The event of a copy that has failed.
fn failure(disk: &str, file: &Path, why: String) -> EventKind {
    EventKind::DiskCopyFailed { disk: disk.to_owned(), file: file.display().to_string(), why }
}
