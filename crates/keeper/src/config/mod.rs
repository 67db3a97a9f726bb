//! A machine's configuration.
//!
//! machine.toml -> shape (keys and types, against the table of fields) -> `ConfigFile` (what was typed)
//! -> meaning -> `Config` (what it means, defaults filled in)
//!
//! Every step goes on after a problem, so that an operator reads all of them at once. Nothing here looks at the
//! surroundings (files, ports, QEMU): that is `check`.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use hearth_api::{DumpCompression, DumpFormat, EmberMode};
use serde::Serialize;

use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

#[cfg(test)]
pub mod every_key;
mod fields;
mod file;
mod living;
mod meaning;
mod origin;
mod page;
mod quantity;
mod shape;
mod snapshot;

pub use fields::{Effect, FIELDS, Field, Kind, Section};
pub use file::{ConfigFile, ObjectStoreSection};
pub use living::{Configured, InForce};
pub use origin::{HostKey, Setting};
pub use page::page;
pub use quantity::{SECONDS_MAX, seconds, size_bytes};

/// The value of `qemu_user` for a user of the machine's own.
pub const AUTO_USER: &str = "auto";

/// A machine as its owner wants it: complete, consistent, paths absolute.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    pub name: String,
    /// The file this came from.
    pub file: PathBuf,
    pub memory_bytes: u64,
    pub cpus: u32,
    /// None: what suits the accelerator.
    pub cpu_model: Option<String>,
    pub accelerator: AcceleratorWish,
    /// None: the one with which the machine last ran, or the newest of the QEMU that starts its first guest.
    pub machine_type: Option<String>,
    /// None: the first one on PATH.
    pub qemu: Option<PathBuf>,
    /// None: the keeper's own user.
    pub qemu_user: Option<String>,
    pub runtime_folder: PathBuf,
    pub memory_folder: PathBuf,
    pub ember: EmberMode,
    pub on_panic: OnPanic,
    pub crash: CrashConfig,
    /// None: the guest has no watchdog.
    pub watchdog: Option<WatchdogAction>,
    /// None: only when it is asked for.
    pub rejuvenate: Option<RejuvenateConfig>,
    /// None: nothing is held over a reboot but the ember.
    pub remount: Option<RemountConfig>,
    pub object_store: ObjectStoreConfig,
    pub budget_slack_bytes: u64,
    pub admission: AdmissionMode,
    pub sandbox: bool,
    /// The guest has a channel to an agent of its own.
    pub guest_agent: bool,
    pub boot: Boot,
    pub disks: Vec<DiskConfig>,
    pub nvram: Vec<NvramConfig>,
    pub pmem: Vec<PmemConfig>,
    pub nets: Vec<NetConfig>,
    pub extra_qemu_args: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AcceleratorWish {
    /// KVM if it works, else TCG.
    Auto,
    Kvm,
    Tcg,
}

impl From<AcceleratorWish> for hearth_qemu::Wanted {
    fn from(wish: AcceleratorWish) -> Self {
        match wish {
            AcceleratorWish::Auto => Self::Auto,
            AcceleratorWish::Kvm => Self::Kvm,
            AcceleratorWish::Tcg => Self::Tcg,
        }
    }
}

/// How snapshots in object stores are reached, and what of them is kept on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ObjectStoreConfig {
    /// None: the keeper's environment.
    pub credentials: Option<PathBuf>,
    pub folder: PathBuf,
    pub cache_bytes: u64,
}

/// When the guest gets its memory by page faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionMode {
    /// While a dump holds dead memory.
    Dump,
    /// Whenever dead memory lies beside its own.
    Always,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnPanic {
    DumpAndRecover,
    Dump,
    Recover,
    Pause,
}

/// What becomes of a guest that crashed, and of its memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CrashConfig {
    pub dump_folder: PathBuf,
    /// As makedumpfile counts it.
    pub level: u8,
    pub format: DumpFormat,
    pub compression: DumpCompression,
    pub keep_last: u32,
    pub min_free_bytes: u64,
    pub chunk_bytes: u64,
    pub threads: u32,
    /// Beyond the budget, while a dump is written.
    pub headroom_bytes: u64,
    pub disk_time: DiskTime,
    pub mib_per_second: Option<u64>,
    pub loop_count: u32,
    pub loop_window_s: u64,
    pub loop_delay_s: u64,
    pub loop_delay_max_s: u64,
}

/// Who waits when dump and guest need the same disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskTime {
    RecoveryFirst,
    Balanced,
    DumpFirst,
}

/// What happens when the guest stops feeding its watchdog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WatchdogAction {
    Crash,
    Nmi,
    Reset,
}

/// When QEMU is replaced without being asked for. At least one of the first two is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RejuvenateConfig {
    pub every_s: Option<u64>,
    pub rss_growth_mib: Option<u64>,
    /// None: at any time.
    pub window: Option<DailyWindow>,
}

/// What of the disks is held for the next boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemountConfig {
    pub limit_bytes: u64,
    /// After the reset, if nobody has said so before.
    pub ready_after_s: u64,
    /// None: nobody asks the guest.
    pub ready_sign: Option<ReadySign>,
    /// Where it is kept while the machine is stopped. None: nowhere.
    pub persist_file: Option<PathBuf>,
    /// While it boots, what it writes is made fewer operations.
    pub join_writes: bool,
}

/// What shows that a guest has done what it boots for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadySign {
    /// It answers at this forward.
    Port(Forward),
    /// This unit of its systemd is active.
    Unit(String),
}

/// A disk that is host memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NvramConfig {
    pub name: String,
    pub bytes: u64,
    pub serial: String,
    pub mirror: Option<NvramMirror>,
}

/// NVRAM in the guest's address space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PmemConfig {
    pub name: String,
    pub bytes: u64,
    /// The file itself is on a disk, and is flushed with the guest's flushes.
    pub mirror_file: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NvramMirror {
    pub file: PathBuf,
    pub policy: MirrorPolicy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MirrorPolicy {
    Async,
    Sync,
}

impl MirrorPolicy {
    /// As the configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Async => "async",
            Self::Sync => "sync",
        }
    }
}

/// A part of each day; over midnight if it ends before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DailyWindow {
    pub from_minute: u32,
    pub to_minute: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Boot {
    Kernel {
        kernel: PathBuf,
        initrd: Option<PathBuf>,
        cmdline: String,
    },
    /// `code` none: QEMU's own BIOS.
    Firmware {
        code: Option<PathBuf>,
        vars: Option<PathBuf>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskConfig {
    pub name: String,
    pub path: PathBuf,
    pub format: DiskFormat,
    pub read_only: bool,
    /// What the guest sees as serial number; at most 20 bytes.
    pub serial: String,
    pub queues: u16,
    pub mib_per_second: Option<u64>,
    pub iops: Option<u64>,
    /// Around the host's page cache.
    pub direct: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskFormat {
    Raw,
    Qcow2,
}

impl DiskFormat {
    /// As the configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NetConfig {
    pub backend: NetBackend,
    /// `52:54:00:..`
    pub mac: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum NetBackend {
    /// QEMU's built-in user network.
    User { forward: Vec<Forward>, isolated: bool },
    /// A passt process beside QEMU.
    Passt { forward: Vec<Forward> },
    /// An existing tap interface of the host.
    Tap { ifname: String },
}

impl NetBackend {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::User { .. } => "user",
            Self::Passt { .. } => "passt",
            Self::Tap { .. } => "tap",
        }
    }

    pub fn forward(&self) -> &[Forward] {
        match self {
            Self::User { forward, .. } | Self::Passt { forward } => forward,
            Self::Tap { .. } => &[],
        }
    }
}

/// A port of the host that leads into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Forward {
    pub protocol: Protocol,
    pub host: IpAddr,
    pub host_port: u16,
    pub guest_port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Config {
    /// Reads a machine's file. The error lists everything that is wrong with it.
    pub fn load(path: &Path, root: &RuntimeRoot) -> Result<Self, Vec<Problem>> {
        let unreadable = |error: std::io::Error| {
            let hint = "give the machine's configuration file, for example web.toml";
            vec![Problem::error(path.display().to_string(), error.to_string(), hint)]
        };
        let text = fs::read_to_string(path).map_err(unreadable)?;
        let file = std::path::absolute(path).map_err(unreadable)?;
        Self::parse(&text, &file, root)
    }

    /// The most that the machine's memory files may ever hold.
    pub fn most_memory_bytes(&self) -> u64 {
        let headroom_bytes = if self.on_panic == OnPanic::DumpAndRecover { self.crash.headroom_bytes } else { 0 };
        self.memory_bytes + self.budget_slack_bytes + headroom_bytes + self.remount_bytes() + self.nvram_bytes()
    }

    /// Of these, for NVRAM: all of it from the start on.
    pub fn nvram_bytes(&self) -> u64 {
        self.nvram_in_memory().map(|(_, bytes)| bytes).sum()
    }

    /// NVRAM that is a file in host memory, by name, and its bytes. The host's page cache of one that is a file elsewhere can be
    /// had back by the host, and is not counted.
    pub fn nvram_in_memory(&self) -> impl Iterator<Item = (&str, u64)> {
        let pmem = self.pmem.iter().filter(|device| device.mirror_file.is_none());
        let pmem = pmem.map(|device| (device.name.as_str(), device.bytes));
        self.nvram.iter().map(|device| (device.name.as_str(), device.bytes)).chain(pmem)
    }

    /// Of these, for the boot set.
    pub fn remount_bytes(&self) -> u64 {
        self.remount.as_ref().map_or(0, |remount| remount.limit_bytes)
    }

    /// Of a machine whose file says nothing of it.
    pub fn default_object_store() -> ObjectStoreConfig {
        ObjectStoreConfig {
            credentials: None,
            folder: meaning::default_object_folder(),
            cache_bytes: meaning::DEFAULT_CACHE_BYTES,
        }
    }

    /// `file` is where the text came from: relative paths start in its folder.
    pub fn parse(text: &str, file: &Path, root: &RuntimeRoot) -> Result<Self, Vec<Problem>> {
        let shape::Shaped { typed, mut problems, blamed } = shape::read(text)?;
        let config = meaning::resolve(typed, file, root, &blamed, &mut problems);
        match config {
            Some(config) if problems.is_empty() => Ok(config),
            _ => Err(problems),
        }
    }
}

#[cfg(test)]
mod tests;
