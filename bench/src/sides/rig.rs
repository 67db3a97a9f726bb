//! The rig: the images, the disk limits for all sides, and the counter of what is read from the disk.

use std::path::{Path, PathBuf};

use super::domain::{DomainMachine, DomainOptions};
use super::hearth::{HearthMachine, HearthOptions};
use super::plain::{PlainMachine, PlainOptions};
use super::{Guest, Machine, Stack};
use crate::host::facts::Accelerator;
use crate::host::profile::{DiskRate, Profile};
use crate::host::scratch::Scratch;
use crate::host::throttle::{Throttle, ThrottleError};
use hearth_vmtest::artifacts::Debian;
use hearth_vmtest::{images, page_cache};

#[derive(Debug, thiserror::Error)]
pub enum RigError {
    #[error("cannot prepare {path}")]
    Prepare { path: PathBuf, source: std::io::Error },
    #[error("guest image")]
    Image(#[source] hearth_vmtest::Error),
    #[error("machine {stack}")]
    Start { stack: &'static str, source: hearth_vmtest::Error },
    #[error("disk profile")]
    Throttle(#[from] ThrottleError),
    #[error("machine {stack} has no counter of its disk reads")]
    NoMeter { stack: &'static str },
    #[error("there is no cache map; {} must run before, at the same profile", Stack::HearthRefill.name())]
    NoMap,
    #[error("{stack}: profile {profile} needs a control group on the disk: {why}")]
    NotLimited { stack: &'static str, profile: &'static str, why: String },
}

/// How a profile is enforced.
enum LimitedBy {
    Group(Throttle),
    /// By each side's own limits, since no group could be made.
    Sides {
        why: String,
    },
}

pub struct Rig {
    images: Scratch,
    ram: Scratch,
    limited_by: LimitedBy,
    accelerator: Accelerator,
}

impl Rig {
    /// Prepares the rig. Images go into `folder`, which must be on the disk that is measured.
    pub fn prepare(folder: &Path, accelerator: Accelerator) -> Result<Self, RigError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| RigError::Prepare { path, source }
        };
        let images = Scratch::new(folder, "images").map_err(at(folder))?;
        let shm = Path::new("/dev/shm");
        let ram = Scratch::new(shm, "ram").map_err(at(shm))?;
        let limited_by = match Throttle::new(images.path()) {
            Ok(throttle) => LimitedBy::Group(throttle),
            Err(error) => LimitedBy::Sides { why: error.to_string() },
        };
        Ok(Rig { images, ram, limited_by, accelerator })
    }

    pub fn profile_by(&self) -> String {
        match &self.limited_by {
            LimitedBy::Group(throttle) => throttle.describe(),
            LimitedBy::Sides { why } => format!("each side's own limits, because: {why}"),
        }
    }

    /// Starts a machine on a new image that is not in the host's page cache. A control group's limit is set later by `limit`; own
    /// limits hold from the start.
    pub fn start(&self, guest: Guest, stack: Stack, profile: Profile) -> Result<Box<dyn Machine>, RigError> {
        let image = self.fresh_image(guest, stack)?;
        if stack.is_domain() {
            return self.start_domain(&image, guest, stack, profile.rate());
        }
        match &self.limited_by {
            LimitedBy::Group(throttle) => {
                throttle.limit(Profile::Asis)?;
                throttle.within(|| self.start_on(&image, guest, stack, None))?
            }
            LimitedBy::Sides { why } if stack == Stack::PmemDax && profile != Profile::Asis => {
                Err(RigError::NotLimited { stack: stack.name(), profile: profile.name(), why: why.clone() })
            }
            LimitedBy::Sides { .. } => self.start_on(&image, guest, stack, profile.rate()),
        }
    }

    /// libvirt moves its QEMU into a control group of its own, so a domain has limits of its own in any case.
    fn start_domain(
        &self,
        image: &Path,
        guest: Guest,
        stack: Stack,
        rate: Option<DiskRate>,
    ) -> Result<Box<dyn Machine>, RigError> {
        self.images
            .let_others_in()
            .map_err(|source| RigError::Prepare { path: self.images.path().to_owned(), source })?;
        let options = DomainOptions { guest, image, rate, is_attached: stack == Stack::AttachedDomain };
        let failed = |source| RigError::Start { stack: stack.name(), source };
        Ok(Box::new(DomainMachine::start(&options).map_err(failed)?))
    }

    fn start_on(
        &self,
        image: &Path,
        guest: Guest,
        stack: Stack,
        rate: Option<DiskRate>,
    ) -> Result<Box<dyn Machine>, RigError> {
        let failed = |source| RigError::Start { stack: stack.name(), source };
        let accelerator = self.accelerator.name();
        if stack.is_hearth() {
            let refill = stack == Stack::HearthRefill;
            let options = HearthOptions { guest, image, accelerator, rate, warm: true, refill };
            return Ok(Box::new(HearthMachine::start(&options).map_err(failed)?));
        }
        let map = (stack == Stack::ColdPrefetch).then(|| self.map());
        if map.as_ref().is_some_and(|map| !map.exists()) {
            return Err(RigError::NoMap);
        }
        let options = PlainOptions { guest, stack, image, accelerator, rate, map };
        Ok(Box::new(PlainMachine::start(&options).map_err(failed)?))
    }

    /// The folder of the images, on the limited disk.
    pub fn folder(&self) -> &Path {
        self.images.path()
    }

    /// Starts processes of a bench. With a control group `limit` slows them; otherwise `start` gets a rate for limits of their
    /// own.
    pub fn launch<T>(&self, profile: Profile, start: impl FnOnce(Option<DiskRate>) -> T) -> Result<T, RigError> {
        match &self.limited_by {
            LimitedBy::Group(throttle) => Ok(throttle.within(|| start(None))?),
            LimitedBy::Sides { .. } => Ok(start(profile.rate())),
        }
    }

    /// Fails if nothing slows the disk for programs that have no limits of their own.
    pub fn must_limit_all(&self, profile: Profile, stack: &'static str) -> Result<(), RigError> {
        match &self.limited_by {
            LimitedBy::Sides { why } if profile != Profile::Asis => {
                Err(RigError::NotLimited { stack, profile: profile.name(), why: why.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Sets the disk's limits to the profile.
    pub fn limit(&self, profile: Profile) -> Result<(), RigError> {
        match &self.limited_by {
            LimitedBy::Group(throttle) => Ok(throttle.limit(profile)?),
            LimitedBy::Sides { .. } => Ok(()),
        }
    }

    /// Bytes read from the disk so far, by the same counter for all sides if there is a control group.
    pub fn read_bytes(&self, stack: Stack, machine: &dyn Machine) -> Result<u64, RigError> {
        let by_group = if stack.is_domain() { None } else { self.group_read_bytes()? };
        by_group.or_else(|| machine.own_read_bytes()).ok_or(RigError::NoMeter { stack: stack.name() })
    }

    /// Bytes read from the disk so far; `None` without a control group.
    pub fn group_read_bytes(&self) -> Result<Option<u64>, RigError> {
        match &self.limited_by {
            LimitedBy::Group(throttle) => Ok(Some(throttle.read_bytes()?)),
            LimitedBy::Sides { .. } => Ok(None),
        }
    }

    /// Reads and writes on the disk so far; `None` without a control group.
    pub fn group_operations(&self) -> Result<Option<(u64, u64)>, RigError> {
        match &self.limited_by {
            LimitedBy::Group(throttle) => Ok(Some(throttle.operations()?)),
            LimitedBy::Sides { .. } => Ok(None),
        }
    }

    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// Host memory beyond the guest's own that caches the stack's image.
    pub fn host_cache_bytes(&self, stack: Stack) -> Result<u64, RigError> {
        let image = self.image(stack);
        page_cache::resident_bytes(&image).map_err(|source| RigError::Prepare { path: image, source })
    }

    fn image(&self, stack: Stack) -> PathBuf {
        let folder = if stack == Stack::Ram { self.ram.path() } else { self.images.path() };
        folder.join(format!("{}.img", stack.name()))
    }

    fn map(&self) -> PathBuf {
        self.images.path().join("cache-map")
    }

    /// Keeps the cache map of a machine under Hearth for `Stack::ColdPrefetch`.
    pub fn keep_map(&self, memory_folder: &Path) -> Result<(), RigError> {
        let kept = std::fs::copy(memory_folder.join("cache-map"), self.map());
        kept.map(drop).map_err(|source| RigError::Prepare { path: self.map(), source })
    }

    fn fresh_image(&self, guest: Guest, stack: Stack) -> Result<PathBuf, RigError> {
        let image = self.image(stack);
        let made = guest.image(self.images.path()).and_then(|from| images::copy(&from, &image));
        made.map_err(RigError::Image)?;
        if stack != Stack::Ram {
            page_cache::evict(&image).map_err(|source| RigError::Prepare { path: image.clone(), source })?;
        }
        Ok(image)
    }
}

/// Makes a new copy of the root image.
pub fn copy_root(image: &Path) -> Result<(), RigError> {
    Debian::Web.root().and_then(|root| images::copy(&root, image)).map_err(RigError::Image)
}
