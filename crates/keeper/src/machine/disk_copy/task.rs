//! The thread of a disk's copy.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_disk::image::{CHECKPOINTS_MAX, FrozenImage};
use hearth_disk::pressure::Pressure;
use hearth_disk::server::Observer;
use hearth_qemu::Endpoint;
use hearth_qemu::agent::{Agent, Patience};
use hearth_recovery::snapshot::{backing, share_image};
use rustix::fs::fstatvfs;

use super::super::work::{TELL_EVERY, Work, give_way};
use super::apart::apart;
use super::target::Target;
use super::{Tell, failed, failure};
use crate::control::{Answer, Reply};
use crate::event::DiskCopyMessage;

/// How long a guest's agent may take to answer, and to freeze. Its guest's writes wait meanwhile.
const AGENT_PATIENCE: Duration = Duration::from_secs(10);
/// How long the caller may take to have the file systems frozen, or to say that they are not.
const CALLER_PATIENCE: Duration = Duration::from_secs(60);
/// How long the disk's requests in flight may take to end, and how long a clone may take. Its guest waits for it.
const HOLD_PATIENCE: Duration = Duration::from_secs(10);
/// How long the storage of the copy may take to make the file, and to share the image's blocks with it once. Less than the API's
/// clients wait.
const PREPARE_PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take to write what it still holds in memory of a file that shares the image's blocks. The guest does not wait.
const SYNC_PATIENCE: Duration = Duration::from_secs(600);
/// How long it may take to give the file its name. The guest does not wait.
const NAME_PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const MIB: f64 = 1048576.0;

/// Whether a copy is called off, and why.
#[derive(Default)]
pub struct Stop(OnceLock<String>);

impl Stop {
    pub fn cancel(&self, why: &str) {
        // The first reason stays.
        let _ = self.0.set(why.to_owned());
    }

    fn must_go_on(&self) -> Result<(), String> {
        self.0.get().map_or(Ok(()), |why| Err(why.clone()))
    }
}

/// The state of the guest's file systems in the copy.
pub enum Consistency {
    /// The guest's agent is to freeze them. `noted`: the journal says that they may be frozen.
    Freeze { channel: Endpoint, noted: Receiver<()> },
    /// The caller is to have them frozen, and tells when they are, or why they are not.
    ByCaller { told: Receiver<Option<String>> },
    /// As after a power cut, for this reason.
    Crash { why: &'static str },
}

pub struct Task {
    pub disk: String,
    pub image: PathBuf,
    pub format: &'static str,
    pub file: PathBuf,
    /// Begins at the moment.
    pub checkpoint: Option<String>,
    /// The checkpoint since which the copy is to tell what was written.
    pub since: Option<String>,
    pub server: Observer,
    /// Load of the guest's disks.
    pub pressure: Vec<Pressure>,
    pub consistency: Consistency,
    pub stop: Arc<Stop>,
    pub tell: Tell,
}

/// The image of one moment.
struct Taken {
    target: Target,
    image: Moment,
    /// What was written since the checkpoint that was asked for.
    written: Option<Vec<u8>>,
}

enum Moment {
    /// All of it is in the file, but perhaps not on the disk yet.
    Shared,
    Frozen(Arc<FrozenImage>),
}

/// A copy that can begin.
struct Prepared {
    target: Target,
    /// The disk's own, whatever its path leads to.
    image: File,
    /// Whether the file system shares blocks.
    shares: bool,
    backing: Option<String>,
}

impl Task {
    /// Answers when the copy has begun, or cannot.
    pub fn run(self, answer: &Reply) {
        let began = Instant::now();
        let prepared = match self.prepare() {
            Ok(prepared) => prepared,
            Err(why) => {
                // The asker may have hung up.
                let _ = answer.send(Err(failed(format!("cannot copy disk {}: {why}", self.disk))));
                return self.tell.say(DiskCopyMessage::Over(None));
            }
        };
        let _ = answer.send(Ok(Answer::Accepted));
        let backing = prepared.backing.clone();
        let over = match self.copy(prepared) {
            Ok(bytes) => EventKind::DiskCopied {
                disk: self.disk.clone(),
                file: self.file.display().to_string(),
                format: self.format.to_owned(),
                bytes,
                backing,
                duration_ms: began.elapsed().as_secs_f64() * 1e3,
            },
            Err(why) => {
                if let Some(checkpoint) = &self.checkpoint {
                    // Nobody has a copy of that moment.
                    self.server.checkpoints().forget(checkpoint);
                }
                failure(&self.disk, &self.file, why)
            }
        };
        self.tell.say(DiskCopyMessage::Over(Some(over)));
    }

    /// The error is for the operator. The guest feels nothing yet.
    fn prepare(&self) -> Result<Prepared, String> {
        let chain = |error: &dyn std::error::Error| crate::chain(error);
        let looked = |error: io::Error| format!("cannot look at {}: {error}", self.image.display());
        self.must_have_checkpoints()?;
        let mut image = self.server.open_image().map_err(|error| chain(&error))?;
        let backing = backing(&image, self.format).map_err(looked)?;
        let is_file = image.metadata().map_err(looked)?.is_file();
        let bytes = image.seek(SeekFrom::End(0)).map_err(looked)?;
        let needed = match is_file {
            true => image.metadata().map_err(looked)?.blocks() * 512,
            // A device does not tell what of it is in use.
            false => bytes,
        };
        let (file, path, disk) = (self.file.clone(), self.image.clone(), self.disk.clone());
        let (from, names) = (image.try_clone().map_err(looked)?, backing.clone());
        let has_bitmap = self.since.is_some();
        let make = move || {
            let target = Target::create(&file, has_bitmap)?;
            if let Some(name) = names.filter(|name| !name.starts_with('/'))
                && path.parent() != Some(target.folder())
            {
                return Err(format!(
                    "its image names its backing image {name:?} without its folder, and the copy would not find it; copy to \
                     the image's own folder, or name it with qemu-img rebase -u -b /ABSOLUTE/PATH -F FORMAT"
                ));
            }
            // The first clone also writes what the host caches of the image, so that the second one takes little time.
            let shared = if is_file { share_image(&disk, &path, &from, target.open()) } else { Ok(false) };
            let shares = shared.map_err(|error| crate::chain(&error))?;
            if !shares {
                let made = |error| format!("cannot make {}: {error}", file.display());
                target.open().set_len(bytes).map_err(made)?;
                let free = fstatvfs(target.open()).map_err(io::Error::from).map_err(made)?;
                must_fit(needed, free.f_bavail * free.f_frsize, &target)?;
            }
            Ok((target, shares))
        };
        let (target, shares) = apart(PREPARE_PATIENCE, &|| self.stop.must_go_on(), make)??;
        Ok(Prepared { target, image, shares, backing })
    }

    fn must_have_checkpoints(&self) -> Result<(), String> {
        let names = self.server.checkpoints().names();
        if let Some(since) = self.since.as_ref().filter(|since| !names.contains(since)) {
            return Err(no_checkpoint(since, &names));
        }
        match self.checkpoint.as_ref().filter(|checkpoint| names.contains(checkpoint)) {
            // A backup may be built on it.
            Some(taken) => Err(format!("it has a checkpoint {taken} already; choose another name")),
            None => Ok(()),
        }
    }

    /// What was written until now. The disk is held.
    fn pass_checkpoints(&self) -> Result<Option<Vec<u8>>, String> {
        let checkpoints = self.server.checkpoints();
        let since = |since| checkpoints.written_since(since).ok_or_else(|| no_checkpoint(since, &checkpoints.names()));
        let written = self.since.as_deref().map(since).transpose()?;
        if let Some(checkpoint) = &self.checkpoint {
            checkpoints.begin(checkpoint, self.since.as_deref(), self.server.bytes());
        }
        Ok(written)
    }

    /// Returns the length of the file.
    fn copy(&self, Prepared { target, image, shares, .. }: Prepared) -> Result<u64, String> {
        self.stop.must_go_on()?;
        let frozen = self.freeze();
        self.stop.must_go_on()?;
        let began = Instant::now();
        let Taken { target, image: moment, written } = self.take_moment(target, image, shares)?;
        let (file_systems, not_frozen) = frozen.map_or_else(|why| (None, Some(why)), |count| (count, None));
        self.tell.say(DiskCopyMessage::Taken(EventKind::DiskCopyTaken {
            disk: self.disk.clone(),
            file: self.file.display().to_string(),
            shared: shares,
            held_ms: began.elapsed().as_secs_f64() * 1e3,
            file_systems,
            not_frozen,
        }));
        if let Moment::Frozen(image) = moment {
            self.copy_frozen(&image)?;
        }
        let sync = move || target.open().sync_all().and_then(|()| Ok((target.open().metadata()?.len(), target)));
        let synced = apart(SYNC_PATIENCE, &|| self.stop.must_go_on(), sync)?;
        let (bytes, target) = synced.map_err(|error| self.not_written(&error))?;
        self.stop.must_go_on()?;
        let (since, format) = (self.since.clone(), self.format);
        let name = move || match since.zip(written) {
            Some((since, written)) => target.complete_with_bitmap(format, (&since, &written)),
            None => target.complete(),
        };
        // From here on it cannot be called off: the file may have its name already.
        let named =
            apart(NAME_PATIENCE, &|| Ok(()), name).map_err(|why| format!("{why}; the file may still get its name"))?;
        named.map(|()| bytes).map_err(|error| self.not_written(&error))
    }

    fn not_written(&self, error: &io::Error) -> String {
        format!("cannot write {}: {error}", self.file.display())
    }

    /// Number of frozen file systems, if it is known; or why none is frozen.
    fn freeze(&self) -> Result<Option<u64>, String> {
        let (channel, noted) = match &self.consistency {
            Consistency::Freeze { channel, noted } => (channel, noted),
            Consistency::ByCaller { told } => return self.wait_for_caller(told),
            Consistency::Crash { why } => return Err((*why).to_owned()),
        };
        let stop = || self.stop.must_go_on().is_err();
        let patience = Patience { time: AGENT_PATIENCE, stop: &stop };
        let mut agent = Agent::reach(channel, &patience).map_err(|error| crate::chain(&error))?;
        self.tell.say(DiskCopyMessage::Freezing);
        noted.recv().map_err(|_| "the keeper ended")?;
        let file_systems = agent.freeze(&patience).map_err(|error| crate::chain(&error))?;
        self.tell.say(DiskCopyMessage::Frozen { file_systems });
        Ok(Some(file_systems))
    }

    /// As `freeze`, by the caller.
    fn wait_for_caller(&self, told: &Receiver<Option<String>>) -> Result<Option<u64>, String> {
        let began = Instant::now();
        while self.stop.must_go_on().is_ok() {
            match told.recv_timeout(LOOK_EVERY) {
                Ok(not_frozen) => return not_frozen.map_or(Ok(None), Err),
                Err(RecvTimeoutError::Timeout) if began.elapsed() < CALLER_PATIENCE => {}
                // It may have frozen them and be gone: whatever it does now is not for this copy.
                Err(_) => self.stop.cancel("its caller has not said whether the guest's file systems are frozen"),
            }
        }
        Err("the copy was called off".to_owned())
    }

    fn take_moment(&self, target: Target, image: File, shares: bool) -> Result<Taken, String> {
        let failed = |error: &dyn std::error::Error| crate::chain(error);
        let held = self.server.hold(HOLD_PATIENCE).map_err(|error| failed(&error))?;
        if !shares {
            let open = target.open().try_clone().map_err(|error| self.not_written(&error))?;
            let frozen = held.freeze(open).map_err(|error| failed(&error))?;
            return Ok(Taken { target, image: Moment::Frozen(frozen), written: self.pass_checkpoints()? });
        }
        held.commit().map_err(|error| format!("cannot write the tables of {}: {error}", self.image.display()))?;
        let (disk, path) = (self.disk.clone(), self.image.clone());
        let clone = move || (share_image(&disk, &path, &image, target.open()), target);
        // A clone that ends later is not of this moment, and nobody gets it.
        let (shared, target) = apart(HOLD_PATIENCE, &|| self.stop.must_go_on(), clone)?;
        match shared.map_err(|error| failed(&error))? {
            true => Ok(Taken { target, image: Moment::Shared, written: self.pass_checkpoints()? }),
            false => Err("its file system does not share blocks any more".to_owned()),
        }
    }

    fn copy_frozen(&self, image: &FrozenImage) -> Result<(), String> {
        let (began, mut told) = (Instant::now(), Instant::now());
        let all = image.bytes();
        let copied = image.copy(|_| {
            give_way(&self.pressure);
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                let work = Work::of(all - image.bytes_left(), all, Some((began.elapsed(), 0)));
                self.tell.say(DiskCopyMessage::Progress(EventKind::DiskCopyProgress {
                    disk: self.disk.clone(),
                    file: self.file.display().to_string(),
                    percent: work.percent(),
                    mib_per_s: work.per_s.unwrap_or(0.0) / MIB,
                    eta_s: work.left_s(),
                }));
            }
            self.stop.must_go_on().is_ok()
        });
        self.stop.must_go_on()?;
        copied.map_err(|error| format!("cannot copy {} to {}: {error}", self.image.display(), self.file.display()))
    }
}

fn no_checkpoint(name: &str, names: &[String]) -> String {
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    format!(
        "it is not known what was written since the checkpoint {name} (there are: {names}): a checkpoint ends with the keeper, \
         when the image is closed or resized, when its copy fails, and when {CHECKPOINTS_MAX} newer ones have begun; make a \
         full backup"
    )
}

/// Refuses a copy that needs more space than there is.
fn must_fit(needed: u64, free: u64, target: &Target) -> Result<(), String> {
    if needed <= free {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let folder = target.folder().display();
    Err(format!("no space left in {folder} (needs {} MiB, {} MiB free)", mib(needed), free >> 20))
}
