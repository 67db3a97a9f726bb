//! Arguments for QEMU and the disk servers, made from a machine's configuration.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_disk::block::DiskId;
use hearth_disk::image::{Format, ImageOptions};
use hearth_disk::limit::Limits;
use hearth_disk::nvram::pmem::ALIGN_BYTES;
use hearth_disk::server::{DiskOptions, Expected};
use hearth_qemu::launch as qemu;
use hearth_qemu::preload::Preload;
use hearth_qemu::{Accelerator, EARLIER_MACHINE_TYPE, Launch};
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::DiskIdentity;

use super::cache_map;
use super::net_endpoints::NetEndpoints;
use crate::config::{
    Boot, Config, DevicesConfig, DiskConfig, DiskFormat, Forward, GuestConfig, NetBackend, NetConfig, NvramConfig,
    PmemConfig, Protocol, WatchdogAction,
};
use crate::folders::Folders;

/// Entries of a disk's virtqueues: 256 outstanding requests of one page each; QEMU's own default is 128.
const QUEUE_SIZE: u16 = 256;
/// Limit for small files. Registers and notes for a dump are smaller, and so is everything else that QEMU writes.
const SMALL_FILE_BYTES: u64 = 64 << 20;
const NVRAM_QUEUES: u16 = 1;
pub const CACHE_MAP_QUEUES: u16 = 1;
/// How long to wait for an image's lock. A keeper that was just killed may have writes under way, and holds the lock
/// until they end.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(30);

/// What all QEMUs of one guest have in common.
#[derive(Clone, Copy)]
pub struct Base<'a> {
    pub config: &'a Config,
    pub folders: &'a Folders,
    pub accelerator: Accelerator,
}

/// What QEMU generation `generation` is started with. `successor`: it is going to take over from another one.
pub fn launch(
    Base { config, folders, accelerator }: Base<'_>,
    incarnation: &Incarnation,
    generation: u32,
    preload: &Path,
    endpoints: &NetEndpoints,
    successor: bool,
) -> Launch {
    let disks = config.devices.disks.iter().map(|disk| disk_device(folders, &disk.name, disk.queues));
    let nvram = config.devices.nvram.iter().map(|device| disk_device(folders, &device.name, NVRAM_QUEUES));
    let cache_map = config.guest.refill.as_ref().map(|_| disk_device(folders, cache_map::NAME, CACHE_MAP_QUEUES));
    let nets = config.devices.nets.iter().enumerate().map(|(position, net)| {
        let mut backend = net_backend(net, endpoints.number(position));
        if let (true, qemu::NetBackend::User { forward, .. }) = (successor, &mut backend) {
            // The ports belong to the old QEMU as long as it lives.
            forward.clear();
        }
        qemu::NetDevice { mac: net.mac.clone(), backend }
    });
    Launch {
        name: config.name.clone(),
        ram_file: incarnation.ram.path().to_owned(),
        ram_bytes: config.guest.memory_bytes,
        cpus: config.guest.cpus,
        cpu_model: config.guest.cpu_model.clone(),
        accelerator,
        machine_type: machine_type(&config.guest).to_owned(),
        boot: config.guest.boot.clone(),
        disks: disks.chain(nvram).chain(cache_map).collect(),
        pmem: config.devices.pmem.iter().map(|device| pmem_device(folders, device)).collect(),
        nets: nets.collect(),
        serial_socket: folders.serial_socket(generation),
        qmp_socket: folders.qmp_socket(generation),
        agent_socket: None,
        screen_folder: config.guest.screen.then(|| folders.screen(generation)),
        preload: Some(Preload {
            library: preload.to_owned(),
            socket: folders.userfault_socket(generation),
            gates: endpoints.gates().map(|_| folders.gates(generation)),
            keeps_heap: successor,
        }),
        hold_still: false,
        incoming: successor,
        sandbox: config.qemu.sandbox,
        confined: config.qemu.is_confined(),
        run_as: None,
        watchdog: config.guest.watchdog.map(watchdog_action),
        vmgenid: None,
        inherited: Vec::new(),
        file_bytes_max: config.qemu.extra_args.is_empty().then(|| file_bytes_max(config)),
        extra_args: config.qemu.extra_args.clone(),
    }
}

/// Machine type. It was set when the keeper started, unless an earlier keeper left the guest.
pub fn machine_type(guest: &GuestConfig) -> &str {
    guest.machine_type.as_deref().unwrap_or(EARLIER_MACHINE_TYPE)
}

/// Limit of the files that QEMU writes: memory, or the firmware's variables. Files that `extra_qemu_args` name may be
/// larger.
fn file_bytes_max(config: &Config) -> u64 {
    let pmem = config.devices.pmem.iter().map(|device| device.bytes);
    let vars = match &config.guest.boot {
        Boot::Firmware { vars: Some(vars), .. } => vars.metadata().map_or(0, |vars| vars.len()),
        _ => 0,
    };
    pmem.chain([config.guest.memory_bytes, vars, SMALL_FILE_BYTES]).max().expect("it has elements")
}

/// Watchdog action: the keeper handles a crash, so QEMU only pauses the guest.
fn watchdog_action(action: WatchdogAction) -> qemu::WatchdogAction {
    match action {
        WatchdogAction::Crash => qemu::WatchdogAction::Pause,
        WatchdogAction::Nmi => qemu::WatchdogAction::InjectNmi,
        WatchdogAction::Reset => qemu::WatchdogAction::Reset,
    }
}

fn disk_device(folders: &Folders, name: &str, queues: u16) -> qemu::DiskDevice {
    qemu::DiskDevice { id: name.to_owned(), socket: folders.disk_socket(name), queues, queue_size: QUEUE_SIZE }
}

fn pmem_device(folders: &Folders, device: &PmemConfig) -> qemu::PmemDevice {
    qemu::PmemDevice {
        id: device.name.clone(),
        file: device.options(&folders.memory).pmem_file(),
        bytes: device.bytes,
        align_bytes: ALIGN_BYTES,
    }
}

fn net_backend(net: &NetConfig, number: Option<RawFd>) -> qemu::NetBackend {
    let number = || number.expect("an endpoint was opened for each network that has another end");
    match &net.backend {
        NetBackend::User { forward, isolated } => {
            let forward = forward.iter().map(|forward| forward.into()).collect();
            qemu::NetBackend::User { forward, isolated: *isolated }
        }
        NetBackend::Passt { .. } => qemu::NetBackend::Passt { number: number() },
        NetBackend::Tap { .. } => qemu::NetBackend::Tap { number: number() },
    }
}

/// Ports that QEMU itself forwards into the guest: device and forwards.
pub fn user_forwards(nets: &[NetConfig]) -> Vec<(String, String)> {
    let forwards = nets.iter().enumerate().flat_map(|(position, net)| match &net.backend {
        NetBackend::User { forward, .. } => {
            forward.iter().map(|forward| (position, qemu::Forward::from(forward))).collect()
        }
        NetBackend::Passt { .. } | NetBackend::Tap { .. } => Vec::new(),
    });
    forwards.map(|(position, forward)| (qemu::net_id(position), forward.hostfwd())).collect()
}

impl From<&Forward> for qemu::Forward {
    fn from(forward: &Forward) -> Self {
        let protocol = match forward.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        let Forward { host, host_port, guest_port, .. } = *forward;
        Self { protocol, host, host_port, guest_port }
    }
}

pub fn image_options(disk: &DiskConfig) -> ImageOptions {
    let format = match disk.format {
        DiskFormat::Raw => Format::Raw,
        DiskFormat::Qcow2 => Format::Qcow2,
    };
    ImageOptions {
        path: disk.path.clone(),
        format,
        read_only: disk.read_only,
        direct: disk.direct,
        lock_patience: LOCK_PATIENCE,
        owner: None,
    }
}

/// What the guest has seen of its machine, except memory and disk images.
pub fn hardware(config: &Config, accelerator: Accelerator) -> Vec<String> {
    let or_default = |value: &Option<String>| value.clone().unwrap_or_else(|| "default".to_owned());
    let mut words = vec![
        format!("accelerator {}", accelerator.name()),
        format!("{} cpus", config.guest.cpus),
        format!("cpu_model {}", or_default(&config.guest.cpu_model)),
        format!("machine_type {}", machine_type(&config.guest)),
    ];
    words.extend(config.devices.disks.iter().map(|disk| format!("disk {} with {} queues", disk.name, disk.queues)));
    words.extend(config.devices.nets.iter().map(|net| format!("net {} {}", net.backend.kind(), net.mac)));
    words.extend(config.guest.watchdog.map(|_| "watchdog".to_owned()));
    words.extend(config.guest.screen.then(|| "screen".to_owned()));
    words.extend(config.guest.refill.as_ref().map(|_| "cache map".to_owned()));
    words.extend(config.qemu.extra_args.iter().map(|word| format!("extra_qemu_args {word}")));
    words
}

/// What the journal notes of the disks.
pub fn disk_identities(devices: &DevicesConfig) -> Vec<DiskIdentity> {
    let identity = |disk: &DiskConfig| DiskIdentity {
        name: disk.name.clone(),
        path: disk.path.clone(),
        format: disk.format.name().to_owned(),
        read_only: disk.read_only,
    };
    let of_nvram = |device: &NvramConfig| DiskIdentity {
        name: device.name.clone(),
        path: device.mirror.as_ref().map_or_else(PathBuf::new, |mirror| mirror.file.clone()),
        format: format!("nvram of {} bytes", device.bytes),
        read_only: false,
    };
    let of_pmem = |device: &PmemConfig| DiskIdentity {
        name: device.name.clone(),
        path: device.mirror_file.clone().unwrap_or_default(),
        format: format!("pmem of {} bytes", device.bytes),
        read_only: false,
    };
    let nvram = devices.nvram.iter().map(of_nvram).chain(devices.pmem.iter().map(of_pmem));
    devices.disks.iter().map(identity).chain(nvram).collect()
}

pub fn nvram_options(id: DiskId, device: &NvramConfig, socket: PathBuf) -> DiskOptions {
    DiskOptions {
        serial: device.serial.clone(),
        queues: NVRAM_QUEUES,
        queue_size: QUEUE_SIZE,
        tracked: false,
        expected: nobody_yet(),
        ..DiskOptions::new(id, &device.name, socket)
    }
}

/// `position` is the disk's index in the configuration; the ledger uses it as the disk's number.
pub fn disk_options(position: usize, disk: &DiskConfig, socket: PathBuf) -> DiskOptions {
    let id = DiskId(u8::try_from(position).expect("a machine has fewer disks than PCI slots"));
    DiskOptions {
        serial: disk.serial.clone(),
        queues: disk.queues,
        queue_size: QUEUE_SIZE,
        read_only: disk.read_only,
        limits: Limits {
            bytes_per_second: disk.mib_per_second.map(|rate| rate << 20),
            operations_per_second: disk.iops,
        },
        expected: nobody_yet(),
        ..DiskOptions::new(id, &disk.name, socket)
    }
}

/// No process may connect yet: which QEMU may is known when it is started or found.
pub fn nobody_yet() -> Expected {
    Expected::and_another([])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Effect;
    use crate::config::every_key::{Changed, changes};

    /// Everything that a living guest has seen of its machine; its next QEMU must show the same.
    fn seen(config: &Config, folders: &Folders, incarnation: &Incarnation) -> String {
        let base = Base { config, folders, accelerator: Accelerator::Tcg };
        let endpoints = NetEndpoints::open(config, folders, 1).unwrap();
        let launch = launch(base, incarnation, 1, Path::new("/preload.so"), &endpoints, true);
        let disks = config.devices.disks.iter().enumerate().map(|(position, disk)| {
            let DiskOptions { serial, queues, queue_size, read_only, .. } =
                disk_options(position, disk, folders.disk_socket(&disk.name));
            (serial, queues, queue_size, read_only)
        });
        let disks: Vec<_> = disks.collect();
        let (identities, hardware) = (disk_identities(&config.devices), hardware(config, Accelerator::Tcg));
        format!("{launch:?} {disks:?} {identities:?} {hardware:?}")
    }

    #[test]
    fn qemu_is_confined_unless_it_may_need_more() {
        let confined = |more: &str| {
            let text = format!("name = \"web\"\nmemory = \"64MiB\"\n{more}\n[boot]\nkernel = \"k\"\n");
            let root = crate::runtime_root::RuntimeRoot::new("/run/hearth");
            Config::parse(&text, Path::new("/machines/web.toml"), &root).unwrap().qemu.is_confined()
        };
        assert!(confined(""));
        assert!(!confined("sandbox = false"));
        assert!(!confined(r#"extra_qemu_args = ["-device", "usb-tablet"]"#));
    }

    /// Keys that a keeper takes from the file under a living guest.
    #[test]
    fn keeper_keys_are_invisible_to_the_guest() {
        let folder = tempfile::tempdir().unwrap();
        let (runtime, memory) = (folder.path().join("run"), folder.path().join("memory"));
        let folders = Folders::prepare("web", &runtime, &memory).unwrap();
        let incarnation = Incarnation::create(&memory, 1, 64 << 20, false).unwrap();
        let is_users = |config: &Config| config.devices.nets.iter().all(|net| net.backend.kind() == "user");
        let mut keys = 0;
        for Changed { field, before, after } in changes() {
            if field.effect == Effect::AtTakeOver && is_users(&before.config) {
                let seen = |config| seen(config, &folders, &incarnation);
                assert_eq!(seen(&before.config), seen(&after.config), "{} {}", field.section.heading(), field.key);
                keys += 1;
            }
        }
        assert!(keys > 30, "{keys}");
    }
}
