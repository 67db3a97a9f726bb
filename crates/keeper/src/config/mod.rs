//! A machine's configuration.
//!
//! machine.toml -> shape (keys and types, against the table of fields) -> `ConfigFile` (what was typed)
//! -> meaning -> `Config` (what it means, defaults filled in)
//!
//! Every step continues after a problem, so that an operator sees all of them at once. Nothing here examines the host
//! (files, ports, QEMU): `check` does.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use hearth_api::{DumpCompression, DumpFormat, EmberMode};
pub use hearth_disk::nvram::MirrorPolicy;
use serde::Serialize;

use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

mod edit;
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

pub use edit::edit;
pub use fields::{Effect, Field, Section};
#[cfg(test)]
pub use file::FIELDS;
pub use file::{BootSection, ConfigFile, DiskSection, NetSection, ObjectStoreSection, WatchdogSection};
pub use hearth_qemu::Wanted;
pub use hearth_qemu::launch::Boot;
pub use living::{Configured, InForce};
pub use meaning::{is_name, name_hint, uefi_template};
pub use origin::{HostKey, Setting};
pub use page::{EXAMPLE, OPENING, page};
pub use quantity::{SECONDS_MAX, seconds, size_bytes};

/// The value of `qemu_user` for a separate user of the machine.
pub const AUTO_USER: &str = "auto";

/// A machine's resolved configuration: complete, consistent, with absolute paths. It is shown with the keys of the file's
/// top level beside each other, so most groups are flattened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    pub name: String,
    /// The file this came from.
    pub file: PathBuf,
    pub owner: Owner,
    #[serde(flatten)]
    pub guest: GuestConfig,
    #[serde(flatten)]
    pub devices: DevicesConfig,
    #[serde(flatten)]
    pub qemu: QemuConfig,
    #[serde(flatten)]
    pub folders: FoldersConfig,
    #[serde(flatten)]
    pub memory: MemoryConfig,
    pub on_panic: OnPanic,
    pub crash: CrashConfig,
    /// None: only on request.
    pub rejuvenate: Option<RejuvenateConfig>,
    /// None: only the ember outlives a reboot.
    pub remount: Option<RemountConfig>,
    pub object_store: ObjectStoreConfig,
}

/// Who starts and ends QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// Its keeper.
    Hearth,
    /// libvirt: the machine is a domain.
    Libvirt,
}

/// What the guest sees, apart from its disks and networks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GuestConfig {
    pub memory_bytes: u64,
    pub cpus: u32,
    /// None: what suits the accelerator.
    pub cpu_model: Option<String>,
    pub accelerator: Wanted,
    /// None: the type that the machine last ran with, or the newest one of its first QEMU.
    pub machine_type: Option<String>,
    pub boot: Boot,
    /// None: the guest has no watchdog.
    pub watchdog: Option<WatchdogAction>,
    /// Whether the guest has a channel to its agent.
    #[serde(rename = "guest_agent")]
    pub agent: bool,
    /// Whether the guest has a graphics card, and QEMU a VNC server.
    #[serde(rename = "display", serialize_with = "vnc_or_none")]
    pub screen: bool,
    /// The file that keeps the cache map while the machine is stopped, if the guest has a disk with that map.
    #[serde(serialize_with = "on_or_off")]
    pub refill: Option<PathBuf>,
}

/// As spelled in the configuration.
fn vnc_or_none<S: serde::Serializer>(screen: &bool, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(if *screen { "vnc" } else { "none" })
}

/// As spelled in the configuration.
fn on_or_off<S: serde::Serializer>(refill: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(if refill.is_some() { "on" } else { "off" })
}

/// The guest's disks, NVRAM and networks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DevicesConfig {
    pub disks: Vec<DiskConfig>,
    pub nvram: Vec<NvramConfig>,
    pub pmem: Vec<PmemConfig>,
    pub nets: Vec<NetConfig>,
}

/// How QEMU is run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QemuConfig {
    /// None: the first one on PATH.
    #[serde(rename = "qemu")]
    pub program: Option<PathBuf>,
    /// None: the keeper's own user.
    #[serde(rename = "qemu_user")]
    pub user: Option<String>,
    pub sandbox: bool,
    #[serde(rename = "extra_qemu_args")]
    pub extra_args: Vec<String>,
}

impl QemuConfig {
    /// Whether QEMU opens only its machine's files. Files that `extra_qemu_args` name are unknown.
    pub fn is_confined(&self) -> bool {
        self.sandbox && self.extra_args.is_empty()
    }
}

/// The machine's own folders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoldersConfig {
    #[serde(rename = "runtime_folder")]
    pub runtime: PathBuf,
    #[serde(rename = "memory_folder")]
    pub memory: PathBuf,
}

/// Use of host memory beyond the guest's RAM, and what dead guests leave in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryConfig {
    pub ember: EmberMode,
    #[serde(rename = "budget_slack_bytes")]
    pub slack_bytes: u64,
    pub admission: AdmissionMode,
    /// How long the last guest's memory is kept while its domain is off. None: libvirt does not own the machine.
    pub keep_memory_s: Option<u64>,
}

/// Access to object stores, and their cache on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ObjectStoreConfig {
    /// None: the keeper's environment.
    pub credentials: Option<PathBuf>,
    pub folder: PathBuf,
    pub cache_bytes: u64,
}

/// When page faults limit the guest's memory growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionMode {
    /// While a dump holds dead memory.
    Dump,
    /// While there is any dead memory.
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

/// Crash handling and dumps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CrashConfig {
    pub dump_folder: PathBuf,
    /// makedumpfile's level.
    pub level: u8,
    pub format: DumpFormat,
    pub compression: DumpCompression,
    pub keep_last: u32,
    pub min_free_bytes: u64,
    pub chunk_bytes: u64,
    pub threads: u32,
    /// Memory allowed beyond the budget while a dump is written.
    pub headroom_bytes: u64,
    pub disk_time: DiskTime,
    pub mib_per_second: Option<u64>,
    #[serde(flatten)]
    pub crash_loop: CrashLoopConfig,
}

/// When crashes count as a crash loop, and how long the machine then waits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CrashLoopConfig {
    pub loop_count: u32,
    pub loop_window_s: u64,
    pub loop_delay_s: u64,
    pub loop_delay_max_s: u64,
}

/// Priority when dump and guest use the same disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskTime {
    RecoveryFirst,
    Balanced,
    DumpFirst,
}

/// Action when the guest stops feeding its watchdog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WatchdogAction {
    Crash,
    Nmi,
    Reset,
}

/// When QEMU is replaced automatically. At least one of the first two is set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RejuvenateConfig {
    pub every_s: Option<u64>,
    pub rss_growth_mib: Option<u64>,
    /// None: at any time.
    pub window: Option<DailyWindow>,
}

/// Settings of the boot set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemountConfig {
    pub limit_bytes: u64,
    /// Time after reset when the machine counts as ready at the latest.
    pub ready_after_s: u64,
    /// None: there is no readiness probe.
    pub ready_sign: Option<ReadySign>,
    /// File that keeps the boot set while the machine is stopped. None: it is dropped.
    pub persist_file: Option<PathBuf>,
}

/// Readiness probe: what shows that a boot has finished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadySign {
    /// The guest answers at this forwarded port.
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
    /// The file is on a disk, and guest flushes flush it.
    pub mirror_file: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NvramMirror {
    pub file: PathBuf,
    pub policy: MirrorPolicy,
}

/// A daily time range, which spans midnight if it ends before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DailyWindow {
    pub from_minute: u32,
    pub to_minute: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskConfig {
    pub name: String,
    pub path: PathBuf,
    pub format: DiskFormat,
    /// Whether the file names the format, rather than leaving it to be raw.
    #[serde(skip)]
    pub is_format_named: bool,
    pub read_only: bool,
    /// Serial number shown to the guest; at most 20 bytes.
    pub serial: String,
    pub queues: u16,
    pub mib_per_second: Option<u64>,
    pub iops: Option<u64>,
    /// Whether to bypass the host's page cache.
    pub direct: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskFormat {
    Raw,
    Qcow2,
}

impl DiskFormat {
    /// As spelled in the configuration.
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

/// A host port forwarded into the guest.
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

impl Forward {
    /// `127.0.0.1:8080 -> port 80 of the guest`.
    pub fn words(&self) -> String {
        let protocol = if self.protocol == Protocol::Udp { "UDP " } else { "" };
        format!("{protocol}{} -> port {} of the guest", SocketAddr::new(self.host, self.host_port), self.guest_port)
    }
}

impl DevicesConfig {
    /// Host memory of the NVRAM devices, which is allocated at start.
    pub fn nvram_bytes(&self) -> u64 {
        self.nvram_in_memory().map(|(_, bytes)| bytes).sum()
    }

    /// Names and sizes of NVRAM devices whose file is in host memory. Others use page cache, which the host can
    /// reclaim, and are not counted.
    pub fn nvram_in_memory(&self) -> impl Iterator<Item = (&str, u64)> {
        let pmem = self.pmem.iter().filter(|device| device.mirror_file.is_none());
        let pmem = pmem.map(|device| (device.name.as_str(), device.bytes));
        self.nvram.iter().map(|device| (device.name.as_str(), device.bytes)).chain(pmem)
    }
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

    /// Maximum size of the machine's memory files.
    pub fn most_memory_bytes(&self) -> u64 {
        let headroom_bytes = if self.on_panic == OnPanic::DumpAndRecover { self.crash.headroom_bytes } else { 0 };
        let guest_bytes = self.guest.memory_bytes + self.devices.nvram_bytes();
        guest_bytes + self.memory.slack_bytes + headroom_bytes + self.remount_bytes()
    }

    /// The part of that for the boot set.
    pub fn remount_bytes(&self) -> u64 {
        self.remount.as_ref().map_or(0, |remount| remount.limit_bytes)
    }

    /// The default object store settings.
    pub fn default_object_store() -> ObjectStoreConfig {
        ObjectStoreConfig {
            credentials: None,
            folder: meaning::default_object_folder(),
            cache_bytes: meaning::DEFAULT_CACHE_BYTES,
        }
    }

    /// Parses a file's text. Relative paths start in the folder of `file`.
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
