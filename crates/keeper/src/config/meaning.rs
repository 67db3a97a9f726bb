//! Second look at a file: what it means. Defaults are filled in, texts become values, fields are held against each other.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use hearth_api::{DumpCompression, DumpFormat, EmberMode};

use super::file::{
    BootSection, CrashSection, DiskSection, NetSection, NvramSection, RejuvenateSection, RemountSection,
    WatchdogSection,
};
use super::quantity::{daily_window, derived_mac, forward, mac, seconds, size_bytes, slack_bytes};
use super::{
    AcceleratorWish, AdmissionMode, Boot, Config, ConfigFile, CrashConfig, DiskConfig, DiskFormat, DiskTime, Forward,
    MirrorPolicy, NetBackend, NetConfig, NvramConfig, NvramMirror, OnPanic, Protocol, RejuvenateConfig, RemountConfig,
    WatchdogAction,
};
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

const MEMORY_BYTES_MIN: u64 = 32 << 20;
const MEMORY_BYTES_MAX: u64 = 16 << 40;
/// Huge pages are this large: a RAM of whole ones is never rounded.
const MEMORY_BYTES_STEP: u64 = 2 << 20;
/// virtio-blk's field for it.
const SERIAL_BYTES_MAX: usize = 20;
const NAME_BYTES_MAX: usize = 32;
const NVRAM_BYTES_STEP: u64 = 4096;
const DEFAULT_SLACK: &str = "3%";
const DEFAULT_DUMP_LEVEL: u8 = 31;
const DEFAULT_KEEP_LAST: u32 = 5;
const DEFAULT_MIN_FREE: &str = "1GiB";
const DEFAULT_HEADROOM: &str = "0%";
/// Memory comes free in steps of this: as soon as it is written.
const DEFAULT_CHUNK: &str = "4MiB";
/// Whole huge pages are released.
const CHUNK_BYTES_MIN: u64 = 2 << 20;
const CHUNK_BYTES_MAX: u64 = 4 << 30;
/// More threads only wait for the disk.
const DUMP_THREADS_MAX: usize = 4;
const DEFAULT_REMOUNT_LIMIT: &str = "5%";
const REMOUNT_BYTES_MIN: u64 = 64 << 10;
const DEFAULT_READY_AFTER: &str = "2m";
const DEFAULT_LOOP_COUNT: u32 = 5;
const DEFAULT_LOOP_WINDOW_S: u64 = 60;
const DEFAULT_LOOP_DELAY_S: u64 = 10;
const DEFAULT_LOOP_DELAY_MAX_S: u64 = 300;
/// For root; with the user's number for others: a folder made by one user is closed to the next.
const DEFAULT_MEMORY_FOLDER: &str = "/dev/shm/hearth";
/// Where distributions put UEFI firmware, 4 MiB form first.
const UEFI_CODE: [&str; 4] = [
    "/usr/share/OVMF/OVMF_CODE_4M.fd",
    "/usr/share/OVMF/OVMF_CODE.fd",
    "/usr/share/edk2/x64/OVMF_CODE.4m.fd",
    "/usr/share/edk2/ovmf/OVMF_CODE.fd",
];

/// None only together with problems that leave nothing to go on with.
pub(super) fn default_memory_folder(machine: &str) -> PathBuf {
    let user = rustix::process::geteuid();
    let of_user = if user.is_root() { String::new() } else { format!("-{}", user.as_raw()) };
    Path::new(&format!("{DEFAULT_MEMORY_FOLDER}{of_user}")).join(machine)
}

pub(super) fn default_dump_folder(machine: &str) -> PathBuf {
    state_folder(machine).join("dumps")
}

/// Of root; of others below their own state.
fn state_folder(machine: &str) -> PathBuf {
    let state = if rustix::process::geteuid().is_root() {
        PathBuf::from("/var/lib")
    } else {
        let of_user = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let home = || std::env::home_dir().unwrap_or_else(|| "/var/tmp".into()).join(".local/state");
        of_user.unwrap_or_else(home)
    };
    state.join("hearth").join(machine)
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

pub fn resolve(
    typed: ConfigFile,
    file: &Path,
    root: &RuntimeRoot,
    blamed: &HashSet<String>,
    problems: &mut Vec<Problem>,
) -> Option<Config> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let mut resolver = Resolver { folder, blamed, problems };
    let name = resolver.machine_name(typed.name);
    let memory_bytes = resolver.memory_bytes(typed.memory);
    let slack = typed.budget_slack.unwrap_or_else(|| DEFAULT_SLACK.to_owned());
    let budget_slack_bytes = resolver.slack_bytes(&slack, memory_bytes);
    let crash = resolver.crash(typed.crash.unwrap_or_default(), name.as_deref().unwrap_or_default(), memory_bytes);
    let rejuvenate = typed.rejuvenate.map(|typed| resolver.rejuvenate(typed));
    let ember = if typed.ember.as_deref() == Some("off") { EmberMode::Off } else { EmberMode::On };
    let boot = resolver.boot(typed.boot.unwrap_or_default(), !typed.disks.is_empty());
    let disks = resolver.disks(typed.disks);
    let machine = name.clone().unwrap_or_default();
    let nvram = resolver.nvram(typed.nvram, &disks);
    let nets = resolver.nets(typed.nets, &machine);
    let remount = typed.remount.map(|typed| resolver.remount(typed, memory_bytes, ember, &machine, &nets));
    Some(Config {
        runtime_folder: resolver.path_or(typed.runtime_folder, || root.machine(&machine)),
        memory_folder: resolver.path_or(typed.memory_folder, || default_memory_folder(&machine)),
        name: name?,
        file: file.to_owned(),
        memory_bytes: memory_bytes?,
        cpus: typed.cpus.unwrap_or(1),
        cpu_model: typed.cpu_model,
        accelerator: match typed.accelerator.as_deref() {
            Some("kvm") => AcceleratorWish::Kvm,
            Some("tcg") => AcceleratorWish::Tcg,
            _ => AcceleratorWish::Auto,
        },
        machine_type: typed.machine_type,
        qemu: typed.qemu.map(|path| resolver.path(&path)),
        qemu_user: typed.qemu_user,
        ember,
        on_panic: match typed.on_panic.as_deref() {
            Some("dump") => OnPanic::Dump,
            Some("recover") => OnPanic::Recover,
            Some("pause") => OnPanic::Pause,
            _ => OnPanic::DumpAndRecover,
        },
        crash: crash?,
        watchdog: typed.watchdog.map(watchdog_action),
        rejuvenate,
        remount: remount.flatten(),
        budget_slack_bytes: budget_slack_bytes?,
        admission: match typed.admission.as_deref() {
            Some("always") => AdmissionMode::Always,
            _ => AdmissionMode::Dump,
        },
        sandbox: typed.sandbox.unwrap_or(true),
        boot: boot?,
        disks,
        nvram,
        nets,
        extra_qemu_args: typed.extra_qemu_args.unwrap_or_default(),
    })
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

    /// A field that must be given. Says nothing if something bad was given for it: that was said already.
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
        self.checked_name("name", name)
    }

    /// Names become file names and labels.
    fn checked_name(&mut self, subject: &str, name: String) -> Option<String> {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        let good = name.starts_with(|letter: char| letter.is_ascii_alphanumeric())
            && name.len() <= NAME_BYTES_MAX
            && name.chars().all(plain);
        if !good {
            let hint = format!(
                "use 1 to {NAME_BYTES_MAX} letters, digits, \"-\", \"_\" or \".\", beginning with a letter or digit"
            );
            self.problem(subject, format!("\"{name}\" is not a name"), hint);
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

    fn crash(&mut self, typed: CrashSection, machine: &str, memory_bytes: Option<u64>) -> Option<CrashConfig> {
        let min_free_bytes = self.size("crash.min_free", typed.min_free.as_deref().unwrap_or(DEFAULT_MIN_FREE))?;
        let chunk = typed.chunk.as_deref().unwrap_or(DEFAULT_CHUNK);
        let chunk_bytes = self.size("crash.chunk", chunk)?;
        if !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            self.problem("crash.chunk", format!("{chunk} is out of range"), "choose 2MiB to 4GiB");
            return None;
        }
        let headroom = typed.headroom.unwrap_or_else(|| DEFAULT_HEADROOM.to_owned());
        let headroom_bytes = match slack_bytes(&headroom, memory_bytes.unwrap_or(MEMORY_BYTES_MIN)) {
            Ok(bytes) => bytes,
            Err(hint) => {
                self.problem("crash.headroom", format!("\"{headroom}\" is not a size or percentage"), hint);
                return None;
            }
        };
        Some(CrashConfig {
            dump_folder: self.path_or(typed.dump_folder, || default_dump_folder(machine)),
            level: typed.level.unwrap_or(DEFAULT_DUMP_LEVEL),
            format: if typed.format.as_deref() == Some("elf") { DumpFormat::Elf } else { DumpFormat::Kdump },
            compression: match typed.compression.as_deref() {
                Some("lzo") => DumpCompression::Lzo,
                Some("zlib") => DumpCompression::Zlib,
                Some("none") => DumpCompression::None,
                _ => DumpCompression::Zstd,
            },
            keep_last: typed.keep_last.unwrap_or(DEFAULT_KEEP_LAST),
            min_free_bytes,
            chunk_bytes,
            threads: typed.threads.unwrap_or_else(default_dump_threads),
            headroom_bytes,
            disk_time: match typed.disk_time.as_deref() {
                Some("balanced") => DiskTime::Balanced,
                Some("dump-first") => DiskTime::DumpFirst,
                _ => DiskTime::RecoveryFirst,
            },
            mib_per_second: typed.mib_per_second,
            loop_count: typed.loop_count.unwrap_or(DEFAULT_LOOP_COUNT),
            loop_window_s: typed.loop_window_s.unwrap_or(DEFAULT_LOOP_WINDOW_S),
            loop_delay_s: typed.loop_delay_s.unwrap_or(DEFAULT_LOOP_DELAY_S),
            loop_delay_max_s: typed.loop_delay_max_s.unwrap_or(DEFAULT_LOOP_DELAY_MAX_S),
        })
    }

    fn rejuvenate(&mut self, typed: RejuvenateSection) -> RejuvenateConfig {
        let blamed = self.blamed;
        let given = |key: &str| blamed.contains(&format!("rejuvenate.{key}"));
        let is_ever_due =
            typed.every.is_some() || typed.rss_growth_mib.is_some() || given("every") || given("rss_growth_mib");
        if !is_ever_due {
            self.problem("rejuvenate", "does not say when", "set every, for example \"30d\", or rss_growth_mib");
        }
        let every_s = typed.every.and_then(|text| {
            let time = seconds(&text).filter(|&seconds| seconds > 0);
            if time.is_none() {
                let hint = "write a number with s, m, h or d: \"12h\", \"30d\"";
                self.problem("rejuvenate.every", format!("\"{text}\" is not a time"), hint);
            }
            time
        });
        let window = typed.window.and_then(|text| {
            let window = daily_window(&text);
            if window.is_none() {
                let hint = "write from and to, for example \"02:00-05:00\"";
                self.problem("rejuvenate.window", format!("\"{text}\" is not a part of a day"), hint);
            }
            window
        });
        RejuvenateConfig { every_s, rss_growth_mib: typed.rss_growth_mib, window }
    }

    fn remount(
        &mut self,
        typed: RemountSection,
        memory_bytes: Option<u64>,
        ember: EmberMode,
        machine: &str,
        nets: &[NetConfig],
    ) -> Option<RemountConfig> {
        if ember == EmberMode::Off {
            self.problem("remount", "needs what `ember = \"off\"` turns off", "remove one of them");
        }
        let limit = typed.limit.as_deref().unwrap_or(DEFAULT_REMOUNT_LIMIT);
        let limit_bytes = match slack_bytes(limit, memory_bytes.unwrap_or(MEMORY_BYTES_MIN)) {
            Ok(bytes) if bytes >= REMOUNT_BYTES_MIN => Some(bytes),
            Ok(_) => {
                self.problem("remount.limit", format!("{limit} is too little"), "give it 64KiB or more");
                None
            }
            Err(hint) => {
                self.problem("remount.limit", format!("\"{limit}\" is not a size or percentage"), hint);
                None
            }
        };
        let ready_after = typed.ready_after.as_deref().unwrap_or(DEFAULT_READY_AFTER);
        let ready_after_s = seconds(ready_after).filter(|&seconds| seconds > 0);
        if ready_after_s.is_none() {
            let hint = "write a number with s, m, h or d: \"30s\", \"5m\"";
            self.problem("remount.ready_after", format!("\"{ready_after}\" is not a time"), hint);
        }
        let ready_port = typed.ready.and_then(|typed| {
            let port = self.required(typed.port, "remount.ready.port", "ready = { port = 8080 }")?;
            let forwards = || nets.iter().flat_map(|net| net.backend.forward().iter().copied());
            let found = forwards().find(|forward| forward.protocol == Protocol::Tcp && forward.host_port == port);
            if found.is_none() {
                let hint = "forward it to the guest's port: forward = [\"127.0.0.1:8080:80\"] below [[nets]]";
                self.problem("remount.ready.port", format!("{port} leads nowhere"), hint);
            }
            found
        });
        let persist = typed.persist.unwrap_or(false);
        if !persist && typed.persist_file.is_some() {
            self.problem("remount.persist_file", "is of no use without persist = true", "remove it, or set that");
        }
        let persist_file = persist.then(|| self.path_or(typed.persist_file, || state_folder(machine).join("boot-set")));
        Some(RemountConfig { limit_bytes: limit_bytes?, ready_after_s: ready_after_s?, ready_port, persist_file })
    }

    fn nvram(&mut self, typed: Vec<NvramSection>, disks: &[DiskConfig]) -> Vec<NvramConfig> {
        let nvram: Vec<_> =
            typed.into_iter().enumerate().filter_map(|(index, typed)| self.nvram_device(index, typed)).collect();
        let mut names: HashSet<&String> = disks.iter().map(|disk| &disk.name).collect();
        let mut files = HashSet::new();
        for device in &nvram {
            if !names.insert(&device.name) {
                self.problem("nvram", format!("two devices are named {}", device.name), "give each a name of its own");
            }
            if let Some(mirror) = device.mirror.as_ref().filter(|mirror| !files.insert(mirror.file.clone())) {
                let file = mirror.file.display();
                self.problem("nvram", format!("two devices mirror to {file}"), "give each a mirror of its own");
            }
        }
        nvram
    }

    fn nvram_device(&mut self, index: usize, typed: NvramSection) -> Option<NvramConfig> {
        let subject = |key: &str| format!("nvram[{index}].{key}");
        let size = self.required(typed.size, &subject("size"), "size = \"64MiB\"");
        let bytes = size.and_then(|text| {
            let bytes = self.size(&subject("size"), &text)?;
            let fits = bytes > 0 && bytes.is_multiple_of(NVRAM_BYTES_STEP);
            if !fits {
                self.problem(subject("size"), format!("{text} is not a multiple of 4 KiB"), "round it");
            }
            fits.then_some(bytes)
        });
        let name = typed.name.unwrap_or_else(|| format!("nvram{index}"));
        let name = self.checked_name(&subject("name"), name)?;
        let serial = self.serial(&subject("serial"), typed.serial, &name);
        let policy = match typed.mirror.as_deref() {
            Some("async") => Some(MirrorPolicy::Async),
            Some("sync") => Some(MirrorPolicy::Sync),
            _ => None,
        };
        let mirror = match policy {
            Some(policy) => {
                let file =
                    self.required(typed.mirror_file, &subject("mirror_file"), "mirror_file = \"/srv/journal\"")?;
                Some(NvramMirror { file: self.path(&file), policy })
            }
            None => {
                if typed.mirror_file.is_some() {
                    let hint = "set mirror = \"async\" or \"sync\", or remove it";
                    self.problem(subject("mirror_file"), "is of no use without a mirror", hint);
                }
                None
            }
        };
        Some(NvramConfig { name, bytes: bytes?, serial, mirror })
    }

    fn size(&mut self, subject: &str, text: &str) -> Option<u64> {
        size_bytes(text).map_err(|hint| self.problem(subject, format!("\"{text}\" is not a size"), hint)).ok()
    }

    fn boot(&mut self, typed: BootSection, has_disks: bool) -> Option<Boot> {
        match (typed.kernel, typed.firmware) {
            (Some(_), Some(_)) => {
                self.problem("boot", "has both a kernel and firmware", "remove one of them");
                None
            }
            (Some(kernel), None) => {
                if typed.firmware_vars.is_some() {
                    self.problem("boot.firmware_vars", "is of no use with a kernel", "remove it");
                }
                Some(Boot::Kernel {
                    kernel: self.path(&kernel),
                    initrd: typed.initrd.map(|path| self.path(&path)),
                    cmdline: typed.cmdline.unwrap_or_default(),
                })
            }
            (None, firmware) => {
                for (key, given) in [("initrd", typed.initrd.is_some()), ("cmdline", typed.cmdline.is_some())] {
                    if given && !self.blamed.contains("boot.kernel") {
                        self.problem(format!("boot.{key}"), "is of no use without a kernel", "add boot.kernel");
                    }
                }
                self.firmware(firmware, typed.firmware_vars, has_disks)
            }
        }
    }

    fn firmware(&mut self, firmware: Option<String>, vars: Option<String>, has_disks: bool) -> Option<Boot> {
        if !has_disks && !self.blamed.contains("boot.kernel") {
            let hint = "add a [boot] section with a kernel, or a [[disks]] section to boot from";
            self.problem("boot", "there is nothing to boot from", hint);
        }
        let code = match firmware.as_deref() {
            None | Some("bios") => None,
            Some("uefi") => {
                let found = UEFI_CODE.into_iter().map(Path::new).find(|path| path.exists());
                Some(found.unwrap_or(Path::new(UEFI_CODE[0])).to_owned())
            }
            Some(path) => Some(self.path(path)),
        };
        if code.is_none() && vars.is_some() {
            self.problem("boot.firmware_vars", "is of no use without UEFI firmware", "set firmware = \"uefi\"");
        }
        if firmware.as_deref() == Some("uefi") {
            let example = "copy /usr/share/OVMF/OVMF_VARS_4M.fd and set firmware_vars to the copy";
            self.required(vars.as_ref(), "boot.firmware_vars", example);
        }
        Some(Boot::Firmware { code, vars: vars.map(|path| self.path(&path)) })
    }

    fn disks(&mut self, typed: Vec<DiskSection>) -> Vec<DiskConfig> {
        let disks: Vec<_> = typed.into_iter().enumerate().filter_map(|(index, disk)| self.disk(index, disk)).collect();
        let mut names = HashSet::new();
        for disk in &disks {
            if !names.insert(&disk.name) {
                self.problem("disks", format!("two are named {}", disk.name), "give each a name of its own");
            }
        }
        disks
    }

    fn disk(&mut self, index: usize, typed: DiskSection) -> Option<DiskConfig> {
        let subject = |key: &str| format!("disks[{index}].{key}");
        let path = self.required(typed.path, &subject("path"), "path = \"root.img\"");
        let name = typed.name.unwrap_or_else(|| format!("disk{index}"));
        let name = self.checked_name(&subject("name"), name)?;
        let serial = self.serial(&subject("serial"), typed.serial, &name);
        Some(DiskConfig {
            name,
            path: self.path(&path?),
            format: if typed.format.as_deref() == Some("qcow2") { DiskFormat::Qcow2 } else { DiskFormat::Raw },
            read_only: typed.read_only.unwrap_or(false),
            serial,
            queues: typed.queues.unwrap_or(1),
            mib_per_second: typed.mib_per_second,
            iops: typed.iops,
            direct: typed.direct.unwrap_or(true),
        })
    }

    fn serial(&mut self, subject: &str, typed: Option<String>, name: &str) -> String {
        // A name may be longer than a serial number.
        let serial = typed.unwrap_or_else(|| name.chars().take(SERIAL_BYTES_MAX).collect());
        let printable = serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if serial.len() > SERIAL_BYTES_MAX || !printable {
            let hint = format!("use at most {SERIAL_BYTES_MAX} printable ASCII characters");
            self.problem(subject, format!("\"{serial}\" does not fit"), hint);
        }
        serial
    }

    fn nets(&mut self, typed: Vec<NetSection>, machine: &str) -> Vec<NetConfig> {
        let nets: Vec<_> =
            typed.into_iter().enumerate().filter_map(|(index, net)| self.net(index, net, machine)).collect();
        let mut macs = HashSet::new();
        let mut ports = HashSet::new();
        for net in &nets {
            if !macs.insert(&net.mac) {
                self.problem("nets", format!("two have the address {}", net.mac), "give each a mac of its own");
            }
            for forward in net.backend.forward() {
                if !ports.insert((forward.protocol as u8, forward.host, forward.host_port)) {
                    self.problem("nets", format!("two forwards use host port {forward}"), "choose another port");
                }
            }
        }
        nets
    }

    fn net(&mut self, index: usize, typed: NetSection, machine: &str) -> Option<NetConfig> {
        let subject = |key: &str| format!("nets[{index}].{key}");
        let mac = match typed.mac {
            None => Some(derived_mac(machine, index)),
            Some(text) => {
                let address = mac(&text);
                if address.is_none() {
                    let hint = "for example \"52:54:00:12:34:56\"; the first pair must be even";
                    self.problem(subject("mac"), format!("\"{text}\" is not a hardware address"), hint);
                }
                address
            }
        };
        let is_tap = typed.kind.as_deref() == Some("tap");
        if is_tap && typed.forward.is_some() {
            self.problem(subject("forward"), "is of no use with a tap", "remove it: the host's own network decides");
        }
        if !is_tap && typed.ifname.is_some() {
            self.problem(subject("ifname"), "is of no use without a tap", "remove it, or set kind = \"tap\"");
        }
        if matches!(typed.kind.as_deref(), Some("tap" | "passt")) && typed.isolated.is_some() {
            self.problem(subject("isolated"), "is of no use there", "remove it, or set kind = \"user\"");
        }
        let backend = match typed.kind.as_deref() {
            Some("tap") => {
                NetBackend::Tap { ifname: self.required(typed.ifname, &subject("ifname"), "ifname = \"tap0\"")? }
            }
            Some("passt") => NetBackend::Passt { forward: self.forwards(&subject("forward"), typed.forward) },
            _ => {
                let forward = self.forwards(&subject("forward"), typed.forward);
                NetBackend::User { forward, isolated: typed.isolated.unwrap_or(false) }
            }
        };
        Some(NetConfig { backend, mac: mac? })
    }

    fn forwards(&mut self, subject: &str, texts: Option<Vec<String>>) -> Vec<Forward> {
        let mut forwards = Vec::new();
        for text in texts.unwrap_or_default() {
            match forward(&text) {
                Some(forward) => forwards.push(forward),
                None => {
                    let hint = "write HOSTIP:PORT:GUESTPORT, for example \"127.0.0.1:8080:80\", with /udp for UDP";
                    self.problem(subject, format!("\"{text}\" is not a forward"), hint);
                }
            }
        }
        forwards
    }
}
