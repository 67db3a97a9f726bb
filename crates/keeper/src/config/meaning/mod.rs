//! Second step of reading a file: fills in defaults, parses texts and checks keys against each other.

mod devices;
mod kept;
mod object_store;
mod policy;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hearth_api::EmberMode;
use toml::Value;

pub use devices::uefi_template;

use super::file::WatchdogSection;
use super::quantity::{seconds, size_bytes, slack_bytes};
use super::{
    AdmissionMode, Config, ConfigFile, DevicesConfig, FoldersConfig, GuestConfig, MemoryConfig, OnPanic, Owner,
    QemuConfig, Wanted, WatchdogAction,
};
use crate::folders::CACHE_MAP;
use crate::home::state_folder;
use crate::problem::Problem;
use crate::runtime_root::{HOPS_LOCK, RuntimeRoot};

pub(super) use object_store::{DEFAULT_CACHE_BYTES, default_object_folder};

const MEMORY_BYTES_MIN: u64 = 32 << 20;
const MEMORY_BYTES_MAX: u64 = 16 << 40;
/// The size of a huge page, so that RAM is never rounded.
const MEMORY_BYTES_STEP: u64 = 2 << 20;
const NAME_BYTES_MAX: usize = 32;
const DEFAULT_SLACK: &str = "3%";
const DEFAULT_KEEP_MEMORY: &str = "10m";
/// What the file of a domain of libvirt may have.
const OF_DOMAIN: [&str; 13] = [
    "name",
    "owner",
    "memory",
    "keep_memory",
    "ember",
    "refill",
    "on_panic",
    "budget_slack",
    "memory_folder",
    "crash",
    "disks",
    "object_store",
    "remount",
];
/// More threads only wait for the disk.
const DUMP_THREADS_MAX: usize = 4;
/// For root; other users get their user id appended, because one user's folder is closed to another.
const DEFAULT_MEMORY_FOLDER: &str = "/dev/shm/hearth";

pub(super) fn default_memory_folder(machine: &str) -> PathBuf {
    let user = rustix::process::geteuid();
    let of_user = if user.is_root() { String::new() } else { format!("-{}", user.as_raw()) };
    Path::new(&format!("{DEFAULT_MEMORY_FOLDER}{of_user}")).join(machine)
}

/// A folder for this machine alone: the given one if it has the machine's name, else a subfolder of that name, because
/// the given one may be shared (/dev/shm).
fn own_folder(typed: PathBuf, machine: &str) -> PathBuf {
    let is_own = typed.file_name().is_some_and(|name| name == machine) || is_of_earlier_keeper(&typed);
    if is_own { typed } else { typed.join(machine) }
}

/// Earlier keepers used any folder unchanged. A guest that one of them started there continues there.
fn is_of_earlier_keeper(folder: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    let is_private = |path: &Path| fs::symlink_metadata(path).is_ok_and(|it| it.uid() == us && it.mode() & 0o077 == 0);
    is_private(folder) && is_private(&folder.join("tag.key"))
}

pub(super) fn default_dump_folder(machine: &str) -> PathBuf {
    state_folder(machine).join("dumps")
}

pub(super) fn default_dump_threads() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| count.get().min(DUMP_THREADS_MAX) as u32)
}

fn watchdog_action(typed: WatchdogSection) -> WatchdogAction {
    match typed.action.as_deref() {
        Some("nmi") => WatchdogAction::Nmi,
        Some("reset") => WatchdogAction::Reset,
        _ => WatchdogAction::Crash,
    }
}

fn accelerator(typed: Option<&str>) -> Wanted {
    match typed {
        Some("kvm") => Wanted::Kvm,
        Some("tcg") => Wanted::Tcg,
        _ => Wanted::Auto,
    }
}

fn admission(typed: Option<&str>) -> AdmissionMode {
    match typed {
        Some("always") => AdmissionMode::Always,
        _ => AdmissionMode::Dump,
    }
}

fn on_panic(typed: Option<&str>) -> OnPanic {
    match typed {
        Some("dump") => OnPanic::Dump,
        Some("recover") => OnPanic::Recover,
        Some("pause") => OnPanic::Pause,
        _ => OnPanic::DumpAndRecover,
    }
}

/// Resolves a file; none only together with problems.
pub fn resolve(
    typed: ConfigFile,
    file: &Path,
    root: &RuntimeRoot,
    blamed: &HashSet<String>,
    problems: &mut Vec<Problem>,
) -> Option<Config> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let mut resolver = Resolver { folder, blamed, problems };
    let owner = if typed.owner.as_deref() == Some("libvirt") { Owner::Libvirt } else { Owner::Hearth };
    if owner == Owner::Libvirt {
        resolver.must_leave_to_libvirt(&typed);
    }
    let keep_memory_s = resolver.keep_memory(typed.keep_memory, owner);
    let name = resolver.machine_name(typed.name);
    let memory_bytes = resolver.memory_bytes(typed.memory);
    let slack = typed.budget_slack.unwrap_or_else(|| DEFAULT_SLACK.to_owned());
    let budget_slack_bytes = resolver.slack_bytes(&slack, memory_bytes);
    let crash = resolver.crash(typed.crash.unwrap_or_default(), name.as_deref().unwrap_or_default(), memory_bytes);
    let rejuvenate = typed.rejuvenate.map(|typed| resolver.rejuvenate(typed));
    let ember = if typed.ember.as_deref() == Some("off") { EmberMode::Off } else { EmberMode::On };
    let refill = typed.refill.as_deref() == Some("on");
    if refill && ember == EmberMode::Off {
        resolver.problem("refill", "does not work with `ember = \"off\"`", "remove one of them");
    }
    let machine = name.clone().unwrap_or_default();
    let boot = resolver.boot(typed.boot.unwrap_or_default(), !typed.disks.is_empty(), &machine);
    let disks = resolver.disks(typed.disks);
    let (nvram, pmem) = resolver.nvram(typed.nvram, &disks);
    if rejuvenate.is_some() && !pmem.is_empty() {
        let message = "does not work with persistent memory, which another QEMU cannot take over";
        resolver.problem("rejuvenate", message, "remove it, or set device = \"disk\"");
    }
    let nets = resolver.nets(typed.nets, &machine);
    resolver.must_fit(disks.len() + usize::from(refill), nvram.len() + pmem.len(), nets.len());
    let object_store = resolver.object_store(typed.object_store.unwrap_or_default());
    let guest_agent = typed.guest_agent.unwrap_or(false);
    let ready_sign = typed.remount.as_ref().and_then(|typed| typed.ready.clone());
    let ready_sign = ready_sign.and_then(|typed| resolver.ready_sign(typed, guest_agent, &nets));
    let remount = typed.remount.map(|typed| resolver.remount(typed, memory_bytes, ember, &machine, ready_sign));
    let folders = FoldersConfig {
        runtime: resolver.path_or(typed.runtime_folder, || root.machine(&machine)),
        memory: match typed.memory_folder {
            Some(text) => own_folder(resolver.path(&text), &machine),
            None => default_memory_folder(&machine),
        },
    };
    let qemu = QemuConfig {
        program: typed.qemu.map(|path| resolver.path(&path)),
        user: typed.qemu_user,
        sandbox: typed.sandbox.unwrap_or(true),
        extra_args: typed.extra_qemu_args.unwrap_or_default(),
    };
    let guest = GuestConfig {
        memory_bytes: memory_bytes?,
        cpus: typed.cpus.unwrap_or(1),
        cpu_model: typed.cpu_model,
        accelerator: accelerator(typed.accelerator.as_deref()),
        machine_type: typed.machine_type,
        boot: boot?,
        watchdog: typed.watchdog.map(watchdog_action),
        agent: guest_agent,
        screen: typed.display.as_deref() == Some("vnc"),
        refill: refill.then(|| state_folder(&machine).join(CACHE_MAP)),
    };
    Some(Config {
        name: name?,
        file: file.to_owned(),
        owner,
        guest,
        devices: DevicesConfig { disks, nvram, pmem, nets },
        qemu,
        folders,
        memory: MemoryConfig {
            ember,
            slack_bytes: budget_slack_bytes?,
            admission: admission(typed.admission.as_deref()),
            keep_memory_s,
        },
        on_panic: on_panic(typed.on_panic.as_deref()),
        crash: crash?,
        rejuvenate,
        remount: remount.flatten(),
        object_store: object_store?,
    })
}

/// Whether this can be the name of a machine or disk.
pub fn is_name(name: &str) -> bool {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let begins_well = name.starts_with(|letter: char| letter.is_ascii_alphanumeric());
    begins_well && name.len() <= NAME_BYTES_MAX && name.chars().all(plain)
}

/// How a name must be.
pub fn name_hint() -> String {
    format!("use 1 to {NAME_BYTES_MAX} letters, digits, \"-\", \"_\" or \".\", beginning with a letter or digit")
}

struct Resolver<'a> {
    folder: &'a Path,
    blamed: &'a HashSet<String>,
    problems: &'a mut Vec<Problem>,
}

impl Resolver<'_> {
    fn problem(&mut self, subject: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) {
        self.problems.push(Problem::error(subject, message, hint));
    }

    /// A required key. If its value was already reported as wrong, it is not also reported as missing.
    fn required<T>(&mut self, value: Option<T>, subject: &str, example: &str) -> Option<T> {
        if value.is_none() && !self.blamed.contains(subject) {
            self.problem(subject, "is missing", format!("for example {example}"));
        }
        value
    }

    fn path(&self, text: &str) -> PathBuf {
        self.folder.join(text)
    }

    fn path_or(&self, text: Option<String>, default: impl FnOnce() -> PathBuf) -> PathBuf {
        text.map_or_else(default, |text| self.path(&text))
    }

    fn machine_name(&mut self, name: Option<String>) -> Option<String> {
        let name = self.required(name, "name", "name = \"web\"")?;
        if name == HOPS_LOCK {
            self.problem("name", format!("{name} is reserved for a file of Hearth"), "choose another name");
            return None;
        }
        self.checked_name("name", name)
    }

    /// Names become file names and labels.
    fn checked_name(&mut self, subject: &str, name: String) -> Option<String> {
        let good = is_name(&name);
        if !good {
            self.problem(subject, format!("\"{name}\" is not a valid name"), name_hint());
        }
        good.then_some(name)
    }

    fn memory_bytes(&mut self, text: Option<String>) -> Option<u64> {
        let text = self.required(text, "memory", "memory = \"2GiB\"")?;
        let bytes = match size_bytes(&text) {
            Ok(bytes) => bytes,
            Err(hint) => {
                self.problem("memory", format!("\"{text}\" is not a size"), hint);
                return None;
            }
        };
        if !(MEMORY_BYTES_MIN..=MEMORY_BYTES_MAX).contains(&bytes) {
            self.problem("memory", format!("{text} is out of range"), "give the guest 32MiB to 16TiB");
            return None;
        }
        if bytes % MEMORY_BYTES_STEP != 0 {
            self.problem("memory", format!("{text} is not a multiple of 2 MiB"), "round it");
            return None;
        }
        Some(bytes)
    }

    fn slack_bytes(&mut self, text: &str, memory_bytes: Option<u64>) -> Option<u64> {
        // Whether the text is good does not depend on the RAM.
        match slack_bytes(text, memory_bytes.unwrap_or(MEMORY_BYTES_MIN)) {
            Ok(bytes) => Some(bytes),
            Err(hint) => {
                self.problem("budget_slack", format!("\"{text}\" is not a size or percentage"), hint);
                None
            }
        }
    }

    fn must_leave_to_libvirt(&mut self, typed: &ConfigFile) {
        let table = typed.table();
        let is_given = |value: &Value| value.as_array().is_none_or(|items| !items.is_empty());
        for (key, _) in table.iter().filter(|(key, value)| is_given(value) && !OF_DOMAIN.contains(&key.as_str())) {
            let hint = "remove it; `virsh edit` changes the domain";
            self.problem(key, "does not work with `owner = \"libvirt\"`", hint);
        }
        if typed.on_panic.as_deref() == Some("dump") {
            let hint = "use \"pause\", and dump the guest with `virsh dump --memory-only`; or use \"dump+recover\"";
            self.problem("on_panic", "\"dump\" does not work with `owner = \"libvirt\"`", hint);
        }
    }

    fn keep_memory(&mut self, typed: Option<String>, owner: Owner) -> Option<u64> {
        if owner == Owner::Hearth {
            if typed.is_some() {
                self.problem("keep_memory", "works only with `owner = \"libvirt\"`", "remove it");
            }
            return None;
        }
        let text = typed.as_deref().unwrap_or(DEFAULT_KEEP_MEMORY);
        let kept = seconds(text);
        if kept.is_none() {
            let hint = "write a number with s, m, h or d: \"10m\", \"1h\"";
            self.problem("keep_memory", format!("\"{text}\" is not a time"), hint);
        }
        kept
    }

    fn size(&mut self, subject: &str, text: &str) -> Option<u64> {
        size_bytes(text).map_err(|hint| self.problem(subject, format!("\"{text}\" is not a size"), hint)).ok()
    }
}
