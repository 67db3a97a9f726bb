//! The thread of a disk's copy.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_disk::image::FrozenImage;
use hearth_disk::pressure::Pressure;
use hearth_disk::server::Observer;
use hearth_qemu::Endpoint;
use hearth_qemu::agent::{Agent, Patience};
use hearth_recovery::snapshot::{backing_image, share_image};
use rustix::fs::fstatvfs;

use super::super::work::{TELL_EVERY, Work, give_way};
use super::target::Target;
use super::{Tell, failed, failure};
use crate::control::{Answer, Reply};
use crate::event::DiskCopyMessage;

/// How long a guest's agent may take to answer, and to freeze. Its guest's writes wait meanwhile.
const AGENT_PATIENCE: Duration = Duration::from_secs(10);
/// How long the disk's requests in flight may take to end. Its guest waits for it.
const HOLD_PATIENCE: Duration = Duration::from_secs(10);
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
    Freeze {
        channel: Endpoint,
        noted: Receiver<()>,
    },
    FrozenByCaller,
    /// As after a power cut, for this reason.
    Crash {
        why: &'static str,
    },
}

pub struct Task {
    pub disk: String,
    pub image: PathBuf,
    pub format: &'static str,
    pub file: PathBuf,
    pub server: Observer,
    /// Load of the guest's disks.
    pub pressure: Vec<Pressure>,
    pub consistency: Consistency,
    pub stop: Arc<Stop>,
    pub tell: Tell,
}

/// The image of one moment.
enum Moment {
    /// All of it is in the file, but perhaps not on the disk yet.
    Shared,
    Frozen(Arc<FrozenImage>),
}

/// A copy that can begin.
struct Prepared {
    target: Target,
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
            Err(why) => failure(&self.disk, &self.file, why),
        };
        self.tell.say(DiskCopyMessage::Over(Some(over)));
    }

    /// The error is for the operator. The guest feels nothing yet.
    fn prepare(&self) -> Result<Prepared, String> {
        let chain = |error: &dyn std::error::Error| crate::chain(error);
        let backing = backing_image(&self.image, self.format).map_err(|error| chain(&error))?;
        let target = Target::create(&self.file)?;
        if let Some(name) = backing.as_ref().filter(|name| !name.starts_with('/'))
            && self.image.parent() != Some(target.folder())
        {
            return Err(format!(
                "its image names its backing image {name:?} without its folder, and the copy would not find it; copy to the \
                 image's own folder, or name it with qemu-img rebase -u -b /ABSOLUTE/PATH -F FORMAT"
            ));
        }
        let looked = |error: io::Error| format!("cannot look at {}: {error}", self.image.display());
        let mut open = File::open(&self.image).map_err(looked)?;
        let image = open.metadata().map_err(looked)?;
        // The first clone also writes what the host caches of the image, so that the second one takes little time.
        let shares =
            image.is_file() && share_image(&self.disk, &self.image, &target.open).map_err(|error| chain(&error))?;
        if !shares {
            let needed = match image.is_file() {
                true => image.blocks() * 512,
                // A device does not tell what of it is in use.
                false => open.seek(SeekFrom::End(0)).map_err(looked)?,
            };
            let free = fstatvfs(&target.open).map_err(io::Error::from).map_err(|error| chain(&error))?;
            must_fit(needed, free.f_bavail * free.f_frsize, &target)?;
        }
        Ok(Prepared { target, shares, backing })
    }

    /// Returns the length of the file.
    fn copy(&self, Prepared { target, shares, .. }: Prepared) -> Result<u64, String> {
        self.stop.must_go_on()?;
        let frozen = self.freeze();
        self.stop.must_go_on()?;
        let began = Instant::now();
        let moment = self.take_moment(&target, shares)?;
        let (file_systems, not_frozen) = frozen.map_or_else(|why| (None, Some(why)), |count| (count, None));
        self.tell.say(DiskCopyMessage::Taken(EventKind::DiskCopyTaken {
            disk: self.disk.clone(),
            file: self.file.display().to_string(),
            shared: shares,
            held_ms: began.elapsed().as_secs_f64() * 1e3,
            file_systems,
            not_frozen,
        }));
        match moment {
            Moment::Shared => target.open.sync_all().map_err(|error| self.not_written(&error))?,
            Moment::Frozen(image) => self.copy_frozen(&image)?,
        }
        self.stop.must_go_on()?;
        let bytes = target.open.metadata().map_err(|error| self.not_written(&error))?.len();
        target.complete().map_err(|error| self.not_written(&error))?;
        Ok(bytes)
    }

    fn not_written(&self, error: &io::Error) -> String {
        format!("cannot write {}: {error}", self.file.display())
    }

    /// Number of frozen file systems, if it is known; or why none is frozen.
    fn freeze(&self) -> Result<Option<u64>, String> {
        let (channel, noted) = match &self.consistency {
            Consistency::Freeze { channel, noted } => (channel, noted),
            Consistency::FrozenByCaller => return Ok(None),
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

    fn take_moment(&self, target: &Target, shares: bool) -> Result<Moment, String> {
        let failed = |error: &dyn std::error::Error| crate::chain(error);
        let held = self.server.hold(HOLD_PATIENCE).map_err(|error| failed(&error))?;
        if !shares {
            let target = target.open.try_clone().map_err(|error| self.not_written(&error))?;
            return held.freeze(target).map(Moment::Frozen).map_err(|error| failed(&error));
        }
        held.commit().map_err(|error| format!("cannot write the tables of {}: {error}", self.image.display()))?;
        match share_image(&self.disk, &self.image, &target.open).map_err(|error| failed(&error))? {
            true => Ok(Moment::Shared),
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

/// Refuses a copy that needs more space than there is.
fn must_fit(needed: u64, free: u64, target: &Target) -> Result<(), String> {
    if needed <= free {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let folder = target.folder().display();
    Err(format!("no space left in {folder} (needs {} MiB, {} MiB free)", mib(needed), free >> 20))
}
