//! Launch: QEMU's command line for a machine.
//!
//! Each device has a fixed PCI address and the machine type has a version, so that each QEMU generation fits its
//! predecessor.

use std::ffi::OsString;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::accelerator::Accelerator;
use crate::binary::SANDBOX;
use crate::preload::Preload;
use crate::sockets::SocketNumbers;
use crate::{Binary, Version};

const WATCHDOG_SLOT: usize = 0x4;
const AGENT_SLOT: usize = 0x5;
const SCREEN_SLOT: usize = 0x6;
/// A card that firmware and every guest can drive, and that every QEMU has. Each QEMU must give it as much memory.
pub(crate) const SCREEN_CARD: &str = "VGA,vgamem_mb=16";
/// Name of the VNC server's socket in its folder.
pub const SCREEN_SOCKET: &str = "vnc";
/// First PCI slot of the disks. There are 16 of them, then the networks; the slots below are for devices that every
/// machine has.
const DISK_SLOT: usize = 0x8;
const NET_SLOT: usize = 0x18;
/// Maximum number of disks and pmem devices together: the number of their slots.
pub const DISKS_MAX: usize = NET_SLOT - DISK_SLOT;
/// Maximum number of networks.
pub const NETS_MAX: usize = 7;
/// Number of the descriptor set that contains the console's transcript.
const TRANSCRIPT_SET: u32 = 1;
/// QEMU 9.2 replaced `reconnect` with `reconnect-ms`.
const RECONNECT_MS_SINCE: Version = Version { major: 9, minor: 2, micro: 0 };

/// QEMU 9.1 replaced `-runas` with `-run-with user=`.
const RUN_WITH_USER_SINCE: Version = Version { major: 9, minor: 1, micro: 0 };

/// Everything that one QEMU is started with.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Name of the machine.
    pub name: String,
    /// RAM file, mapped with share=on.
    pub ram_file: PathBuf,
    /// Size of the RAM in bytes.
    pub ram_bytes: u64,
    /// Number of virtual processors.
    pub cpus: u32,
    /// QEMU's `-cpu` value. None: `Accelerator::default_cpu_model`.
    pub cpu_model: Option<String>,
    /// The accelerator to use.
    pub accelerator: Accelerator,
    /// A machine type with a version, so that any newer QEMU can take over.
    pub machine_type: String,
    /// The source that the guest boots from.
    pub boot: Boot,
    /// Disks, in PCI slot order.
    pub disks: Vec<DiskDevice>,
    /// Persistent memory; its slots follow those of the disks.
    pub pmem: Vec<PmemDevice>,
    /// Networks, in PCI slot order.
    pub nets: Vec<NetDevice>,
    /// Path of the serial console's socket.
    pub serial_socket: PathBuf,
    /// Path of the QMP socket.
    pub qmp_socket: PathBuf,
    /// Path of the guest agent's socket. None: no channel to an agent.
    pub agent_socket: Option<PathBuf>,
    /// Folder for the VNC server's socket (`SCREEN_SOCKET`), which QEMU itself makes with its umask. It is made anew for this QEMU,
    /// which can make further sockets there, and so holds nothing else. None: the guest has no graphics card.
    pub screen_folder: Option<PathBuf>,
    /// The preload library. None: QEMU starts without it.
    pub preload: Option<Preload>,
    /// Keeps the guest stopped until `Qmp::resume` (`-S`).
    pub hold_still: bool,
    /// Waits for a guest from another QEMU and starts none. A guest that was running continues once its state has
    /// arrived, unless `hold_still` is set.
    pub incoming: bool,
    /// Turns QEMU's seccomp sandbox on, if it has one.
    pub sandbox: bool,
    /// Lets QEMU open only the files of this launch (see `confinement`). `extra_args` may name no others then.
    pub confined: bool,
    /// User that QEMU changes to after its start.
    pub run_as: Option<String>,
    /// Reaction to an expired watchdog. None: no watchdog device.
    pub watchdog: Option<WatchdogAction>,
    /// VM generation ID for the guest, a GUID. None: no such device.
    pub vmgenid: Option<String>,
    /// Descriptors that QEMU only keeps open: locks, which end with it.
    pub inherited: Vec<RawFd>,
    /// Maximum size of the files that QEMU writes, in bytes (RLIMIT_FSIZE). None: the host's limit.
    pub file_bytes_max: Option<u64>,
    /// Arguments that are added at the end.
    pub extra_args: Vec<String>,
}

/// The source that the guest boots from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum Boot {
    /// A kernel that QEMU loads directly.
    Kernel { kernel: PathBuf, initrd: Option<PathBuf>, cmdline: String },
    /// Firmware in flash memory; SeaBIOS if `code` is None.
    Firmware { code: Option<PathBuf>, vars: Option<PathBuf> },
}

/// QEMU's reaction to an expired watchdog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchdogAction {
    /// Stops the guest; its keeper does the rest.
    Pause,
    /// Injects an NMI, on which a suitably configured guest panics.
    InjectNmi,
    /// Resets the guest.
    Reset,
}

impl WatchdogAction {
    fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::InjectNmi => "inject-nmi",
            Self::Reset => "reset",
        }
    }
}

/// A disk that is served over vhost-user-blk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskDevice {
    /// ID of the device.
    pub id: String,
    /// Socket of the disk's server.
    pub socket: PathBuf,
    /// Number of virtqueues.
    pub queues: u16,
    /// Number of entries of each virtqueue.
    pub queue_size: u16,
}

/// A virtio-pmem device: a file in the guest's address space as persistent memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PmemDevice {
    /// ID of the device.
    pub id: String,
    /// File with the contents, mapped with share=on.
    pub file: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
    /// Alignment of the mapping in bytes.
    pub align_bytes: u64,
}

/// A virtio-net device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetDevice {
    /// MAC address, such as `52:54:00:00:00:01`.
    pub mac: String,
    /// The host's side of the network.
    pub backend: NetBackend,
}

/// The host's side of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum NetBackend {
    /// QEMU's user-mode network. If isolated, only forwarded ports work.
    User { forward: Vec<Forward>, isolated: bool },
    /// passt; `number` is the descriptor of a socket that is connected to it.
    Passt { number: RawFd },
    /// A tap device; `number` is its open descriptor.
    Tap { number: RawFd },
}

impl NetBackend {
    /// The descriptor that QEMU inherits, if any.
    pub fn number(&self) -> Option<RawFd> {
        match self {
            Self::User { .. } => None,
            Self::Passt { number } | Self::Tap { number } => Some(*number),
        }
    }
}

/// A host port that is forwarded to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// `tcp` or `udp`.
    pub protocol: &'static str,
    /// Host address to listen on.
    pub host: IpAddr,
    /// Port on the host.
    pub host_port: u16,
    /// Port in the guest.
    pub guest_port: u16,
}

impl Launch {
    /// The command line without the program's name.
    pub(crate) fn arguments(&self, binary: &Binary, sockets: SocketNumbers) -> Vec<OsString> {
        let mut arguments = Arguments::default();
        for folder in binary.data_folders() {
            arguments.option("-L", folder);
        }
        self.machine(&mut arguments);
        self.boot(&mut arguments);
        control(&mut arguments, sockets);
        fixed_devices(&mut arguments);
        if self.watchdog.is_some() {
            arguments.option("-device", format!("i6300esb,addr={WATCHDOG_SLOT:#x}"));
        }
        if let Some(guid) = &self.vmgenid {
            arguments.option("-device", format!("vmgenid,guid={}", escape(guid)));
        }
        if let Some(number) = sockets.agent {
            agent_arguments(&mut arguments, number);
        }
        if let Some(folder) = &self.screen_folder {
            screen_arguments(&mut arguments, &folder.join(SCREEN_SOCKET));
        }
        for (position, disk) in self.disks.iter().enumerate() {
            disk_arguments(&mut arguments, position, disk, binary.version());
        }
        for (position, pmem) in self.pmem.iter().enumerate() {
            pmem_arguments(&mut arguments, self.disks.len() + position, pmem);
        }
        for (position, net) in self.nets.iter().enumerate() {
            net_arguments(&mut arguments, position, net);
        }
        if self.hold_still {
            arguments.flags(&["-S"]);
        }
        if self.incoming {
            arguments.option("-incoming", "defer");
        }
        self.add_sandbox(&mut arguments, binary);
        arguments.0.extend(self.extra_args.iter().map(OsString::from));
        arguments.0
    }

    /// Variables to add to QEMU's environment.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        self.preload.iter().flat_map(Preload::environment).collect()
    }

    fn machine(&self, arguments: &mut Arguments) {
        let machine_type = &self.machine_type;
        arguments.flags(&["-nodefaults", "-no-user-config"]);
        arguments.option("-name", format!("guest={},debug-threads=on", escape(&self.name)));
        arguments.option("-display", "none");
        arguments.option("-vga", "none");
        arguments.option("-accel", self.accelerator.name());
        arguments.option("-cpu", self.cpu_model.as_deref().unwrap_or(self.accelerator.default_cpu_model()));
        arguments.option("-smp", self.cpus.to_string());
        let pmem_bytes: u64 = self.pmem.iter().map(|pmem| pmem.bytes).sum();
        let room = if pmem_bytes > 0 { format!(",maxmem={}B", self.ram_bytes + pmem_bytes) } else { String::new() };
        arguments.option("-m", format!("{}B{room}", self.ram_bytes));
        let ram_file = ram_file_option(&self.ram_file);
        arguments.option("-object", format!("memory-backend-file,id=ram,size={},{ram_file},share=on", self.ram_bytes));
        // A description of the state (vmdesc), for tools that read one, would be written while the guest stands still.
        // With `graphics=off` SeaBIOS, and a boot loader that speaks through it, use the serial console, and a screen as well.
        let is_bios = matches!(self.boot, Boot::Firmware { code: None, .. });
        let speaks = if is_bios { ",graphics=off" } else { "" };
        arguments.option("-machine", format!("{machine_type},memory-backend=ram,suppress-vmdesc=on{speaks}"));
        // A guest's reset ends this QEMU (SHUTDOWN, reason guest-reset): the next incarnation gets a new one. A panic
        // stops the guest. For QEMU a triple fault is a reset, and QMP does not distinguish the two.
        let watchdog = self.watchdog.unwrap_or(WatchdogAction::Reset).name();
        arguments.option("-action", format!("reboot=shutdown,shutdown=poweroff,panic=pause,watchdog={watchdog}"));
    }

    fn boot(&self, arguments: &mut Arguments) {
        match &self.boot {
            Boot::Kernel { kernel, initrd, cmdline } => {
                arguments.option("-kernel", kernel);
                if let Some(initrd) = initrd {
                    arguments.option("-initrd", initrd);
                }
                arguments.option("-append", cmdline);
            }
            Boot::Firmware { code, vars } => {
                for (unit, (file, read_only)) in [(code, "on"), (vars, "off")].into_iter().enumerate() {
                    let Some(file) = file else { continue };
                    let file = escape_path(file);
                    arguments
                        .option("-drive", format!("if=pflash,unit={unit},format=raw,readonly={read_only},file={file}"));
                }
            }
        }
    }

    fn add_sandbox(&self, arguments: &mut Arguments, binary: &Binary) {
        if let Some(user) = &self.run_as {
            if binary.version() >= RUN_WITH_USER_SINCE {
                arguments.option("-run-with", format!("user={}", escape(user)));
            } else {
                arguments.option("-runas", user);
            }
        }
        if self.sandbox && binary.has_sandbox() {
            // The filter is active before QEMU changes its user, and would kill it for that. The exception is harmless:
            // with the filter comes no_new_privs, so a user without privileges cannot gain any.
            let elevate = if self.run_as.is_some() { "elevateprivileges=allow" } else { "elevateprivileges=deny" };
            arguments.option("-sandbox", SANDBOX.replace("elevateprivileges=deny", elevate));
        }
    }
}

/// Control sockets and the transcript, which QEMU inherits (see `sockets`).
fn control(arguments: &mut Arguments, sockets: SocketNumbers) {
    arguments.option("-chardev", listen("qmp", sockets.qmp));
    arguments.option("-mon", "chardev=qmp,mode=control");
    arguments.option("-add-fd", format!("fd={},set={TRANSCRIPT_SET},opaque=console", sockets.transcript));
    let log = format!(",logfile=/dev/fdset/{TRANSCRIPT_SET}");
    arguments.option("-chardev", listen("serial", sockets.serial) + &log);
    arguments.option("-serial", "chardev:serial");
}

fn listen(id: &str, number: RawFd) -> String {
    format!("socket,id={id},fd={number},server=on,wait=off")
}

/// The guest finds the port by its name. The devices have no ids, because a disk may have any id.
fn agent_arguments(arguments: &mut Arguments, number: RawFd) {
    arguments.option("-chardev", listen("agent", number));
    arguments.option("-device", format!("virtio-serial-pci,max_ports=2,addr={AGENT_SLOT:#x}"));
    arguments
        .option("-device", "virtserialport,bus=virtio-serial-bus.0,nr=1,chardev=agent,name=org.qemu.guest_agent.0");
}

/// Keyboard and mouse are q35's own.
fn screen_arguments(arguments: &mut Arguments, socket: &Path) {
    arguments.option("-device", format!("{SCREEN_CARD},addr={SCREEN_SLOT:#x}"));
    arguments.option("-vnc", format!("unix:{}", escape_path(socket)));
}

/// Devices that every machine has.
fn fixed_devices(arguments: &mut Arguments) {
    arguments.option("-device", "pvpanic-pci,addr=2");
    arguments.option("-device", "virtio-rng-pci,addr=3");
    arguments.option("-device", "vmcoreinfo");
}

/// The part of the command line that identifies the QEMU of a RAM file.
pub(crate) fn ram_file_option(path: &Path) -> String {
    format!("mem-path={}", escape_path(path))
}

/// Name of the character device through which QEMU talks to this disk's server.
pub(crate) fn disk_chardev(id: &str) -> String {
    format!("chardev-{id}")
}

fn disk_arguments(arguments: &mut Arguments, position: usize, disk: &DiskDevice, version: Version) {
    let reconnect = if version >= RECONNECT_MS_SINCE { "reconnect-ms=200" } else { "reconnect=1" };
    let (id, socket) = (&disk.id, escape_path(&disk.socket));
    arguments.option("-chardev", format!("socket,id={},path={socket},{reconnect}", disk_chardev(id)));
    let slot = DISK_SLOT + position;
    let (queues, size) = (disk.queues, disk.queue_size);
    arguments.option(
        "-device",
        format!(
            "vhost-user-blk-pci,id={id},chardev={},num-queues={queues},queue-size={size},addr={slot:#x},bootindex={}",
            disk_chardev(id),
            position + 1
        ),
    );
}

/// `position` counts the disks as well.
fn pmem_arguments(arguments: &mut Arguments, position: usize, pmem: &PmemDevice) {
    let PmemDevice { id, file, bytes, align_bytes } = pmem;
    let file = escape_path(file);
    arguments.option(
        "-object",
        format!("memory-backend-file,id=pmem-{id},size={bytes},mem-path={file},share=on,align={align_bytes}"),
    );
    let slot = DISK_SLOT + position;
    arguments.option("-device", format!("virtio-pmem-pci,memdev=pmem-{id},addr={slot:#x}"));
}

fn net_arguments(arguments: &mut Arguments, position: usize, net: &NetDevice) {
    let id = net_id(position);
    let backend = match &net.backend {
        NetBackend::User { forward, isolated } => {
            let forwards: String = forward.iter().map(|forward| format!(",hostfwd={}", forward.hostfwd())).collect();
            let restrict = if *isolated { ",restrict=on" } else { "" };
            format!("user,id={id}{restrict}{forwards}")
        }
        NetBackend::Passt { number } => format!("stream,id={id},server=off,addr.type=fd,addr.str={number}"),
        NetBackend::Tap { number } => format!("tap,id={id},fd={number},vhost=off"),
    };
    arguments.option("-netdev", backend);
    let slot = NET_SLOT + position;
    // No boot ROM: it would have to match between QEMU versions, and network boot would cost seconds.
    arguments.option("-device", format!("virtio-net-pci,netdev={id},mac={},addr={slot:#x},romfile=", net.mac));
}

/// ID of a network in QEMU.
pub fn net_id(position: usize) -> String {
    format!("net{position}")
}

impl Forward {
    /// Value of QEMU's `hostfwd` option and `hostfwd_add` command.
    pub fn hostfwd(self) -> String {
        let host = match self.host {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        format!("{}:{host}:{}-:{}", self.protocol, self.host_port, self.guest_port)
    }
}

/// Doubles commas: in QEMU's options, a single comma ends a value.
fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

fn escape_path(path: &Path) -> String {
    escape(&path.display().to_string())
}

#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn flags(&mut self, flags: &[&str]) {
        self.0.extend(flags.iter().map(OsString::from));
    }

    fn option(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.push(name.into());
        self.0.push(value.into());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::VERSION_MIN;

    const SOCKETS: SocketNumbers = SocketNumbers { qmp: 7, serial: 8, transcript: 10, agent: None };

    pub(crate) fn launch() -> Launch {
        Launch {
            name: "web".into(),
            ram_file: "/ram/web,1/ram-1".into(),
            ram_bytes: 512 << 20,
            cpus: 2,
            cpu_model: None,
            accelerator: Accelerator::Tcg,
            machine_type: "pc-q35-7.2".to_owned(),
            boot: Boot::Kernel { kernel: "/k".into(), initrd: None, cmdline: "console=ttyS0 a,b".into() },
            disks: Vec::new(),
            pmem: Vec::new(),
            nets: Vec::new(),
            serial_socket: "/run/serial".into(),
            qmp_socket: "/run/qmp".into(),
            agent_socket: None,
            screen_folder: None,
            preload: None,
            incoming: false,
            sandbox: true,
            confined: false,
            run_as: None,
            watchdog: None,
            vmgenid: None,
            hold_still: false,
            inherited: Vec::new(),
            file_bytes_max: None,
            extra_args: vec!["-S".into()],
        }
    }

    fn line(launch: &Launch, version: (u32, u32)) -> String {
        let binary = Binary::stand_in(Version { major: version.0, minor: version.1, micro: 0 }, true);
        let arguments = launch.arguments(&binary, SOCKETS);
        let words: Vec<_> = arguments.iter().map(|argument| argument.to_str().unwrap()).collect();
        words.join(" ")
    }

    #[track_caller]
    fn check(launch: &Launch, version: (u32, u32), expect: &str) {
        let line = line(launch, version);
        assert!(line.contains(expect), "{line}");
    }

    #[test]
    fn basic_command_line_is_exact() {
        let expect = "-nodefaults -no-user-config -name guest=web,debug-threads=on -display none -vga none -accel tcg \
            -cpu max,-erms,-fsrm,-cx16 -smp 2 -m 536870912B \
            -object memory-backend-file,id=ram,size=536870912,mem-path=/ram/web,,1/ram-1,share=on \
            -machine pc-q35-7.2,memory-backend=ram,suppress-vmdesc=on \
            -action reboot=shutdown,shutdown=poweroff,panic=pause,watchdog=reset \
            -kernel /k -append console=ttyS0 a,b \
            -chardev socket,id=qmp,fd=7,server=on,wait=off -mon chardev=qmp,mode=control \
            -add-fd fd=10,set=1,opaque=console \
            -chardev socket,id=serial,fd=8,server=on,wait=off,logfile=/dev/fdset/1 -serial chardev:serial \
            -device pvpanic-pci,addr=2 -device virtio-rng-pci,addr=3 -device vmcoreinfo \
            -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny -S";
        assert_eq!(line(&launch(), (7, 2)), expect);
    }

    #[test]
    fn a_watchdog_is_a_device_and_an_action() {
        let launch = Launch { watchdog: Some(WatchdogAction::Pause), ..launch() };
        check(&launch, (7, 2), "panic=pause,watchdog=pause ");
        check(&launch, (7, 2), "-device i6300esb,addr=0x4 ");
    }

    #[test]
    fn pmem_follows_disks_and_adds_to_maxmem() {
        let pmem = |id: &str| PmemDevice { id: id.into(), file: "/m,1".into(), bytes: 4 << 20, align_bytes: 2 << 20 };
        let disk = DiskDevice { id: "root".into(), socket: "/s".into(), queues: 1, queue_size: 8 };
        let launch = Launch { disks: vec![disk], pmem: vec![pmem("a"), pmem("b")], ..launch() };
        check(&launch, (7, 2), "-m 536870912B,maxmem=545259520B -object memory-backend-file,id=ram,");
        let first = "-object memory-backend-file,id=pmem-a,size=4194304,mem-path=/m,,1,share=on,align=2097152 \
            -device virtio-pmem-pci,memdev=pmem-a,addr=0x9 -object memory-backend-file,id=pmem-b,";
        check(&launch, (7, 2), first);
        check(&launch, (7, 2), "-device virtio-pmem-pci,memdev=pmem-b,addr=0xa ");
    }

    #[test]
    fn a_generation_id_is_a_device() {
        let launch = Launch { vmgenid: Some("a-guid".into()), ..launch() };
        check(&launch, (7, 2), "-device vmcoreinfo -device vmgenid,guid=a-guid ");
    }

    #[test]
    fn agent_channel_is_a_device_and_a_socket() {
        let binary = Binary::stand_in(VERSION_MIN, true);
        let arguments = launch().arguments(&binary, SocketNumbers { agent: Some(9), ..SOCKETS });
        let words: Vec<_> = arguments.iter().map(|argument| argument.to_str().unwrap()).collect();
        let expect = "-chardev socket,id=agent,fd=9,server=on,wait=off \
            -device virtio-serial-pci,max_ports=2,addr=0x5 \
            -device virtserialport,bus=virtio-serial-bus.0,nr=1,chardev=agent,name=org.qemu.guest_agent.0 ";
        assert!(words.join(" ").contains(expect), "{words:?}");
    }

    #[test]
    fn screen_is_a_card_and_a_unix_socket() {
        let launch = Launch { screen_folder: Some("/run/a,b/screen-3".into()), ..launch() };
        for version in [(7, 2), (10, 0)] {
            check(&launch, version, "-vga none ");
            check(&launch, version, "-device VGA,vgamem_mb=16,addr=0x6 -vnc unix:/run/a,,b/screen-3/vnc ");
        }
    }

    #[test]
    fn every_qemu_gives_the_guest_the_same_machine() {
        let mut launch = launch();
        launch.disks = vec![DiskDevice { id: "root".into(), socket: "/d".into(), queues: 2, queue_size: 256 }];
        let device = "vhost-user-blk-pci,id=root,chardev=chardev-root,num-queues=2,queue-size=256,addr=0x8,bootindex=1";
        check(&launch, (7, 2), device);
        check(&launch, (10, 0), device);
        check(&launch, (10, 0), "-machine pc-q35-7.2,");
    }

    #[test]
    fn disk_reconnects_when_its_server_returns() {
        let mut launch = launch();
        launch.disks = vec![DiskDevice { id: "root".into(), socket: "/d,e".into(), queues: 1, queue_size: 128 }];
        check(&launch, (9, 1), "socket,id=chardev-root,path=/d,,e,reconnect=1 ");
        check(&launch, (9, 2), "socket,id=chardev-root,path=/d,,e,reconnect-ms=200 ");
    }

    #[test]
    fn networks_have_three_kinds_of_backends() {
        let forward = Forward { protocol: "tcp", host: "127.0.0.1".parse().unwrap(), host_port: 8080, guest_port: 80 };
        let other = Forward { protocol: "udp", host: "::1".parse().unwrap(), host_port: 53, guest_port: 53 };
        let backends = [
            NetBackend::User { forward: vec![forward, other], isolated: true },
            NetBackend::Passt { number: 11 },
            NetBackend::Tap { number: 12 },
        ];
        let mut launch = launch();
        launch.nets = backends.map(|backend| NetDevice { mac: "52:54:00:00:00:01".into(), backend }).to_vec();
        check(&launch, (7, 2), "user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:8080-:80,hostfwd=udp:[::1]:53-:53 ");
        check(&launch, (7, 2), "stream,id=net1,server=off,addr.type=fd,addr.str=11 ");
        check(&launch, (7, 2), "tap,id=net2,fd=12,vhost=off ");
        check(&launch, (7, 2), "virtio-net-pci,netdev=net2,mac=52:54:00:00:00:01,addr=0x1a,romfile= ");
    }

    #[test]
    fn firmware_is_flash_in_order() {
        let mut launch = launch();
        launch.boot = Boot::Firmware { code: Some("/code".into()), vars: Some("/vars".into()) };
        check(&launch, (7, 2), "-drive if=pflash,unit=0,format=raw,readonly=on,file=/code ");
        check(&launch, (7, 2), "-drive if=pflash,unit=1,format=raw,readonly=off,file=/vars ");
        launch.boot = Boot::Firmware { code: None, vars: None };
        assert!(!line(&launch, (7, 2)).contains("-drive"));
        check(&launch, (7, 2), "suppress-vmdesc=on,graphics=off ");
    }

    #[test]
    fn sandbox_allows_user_change_for_run_as() {
        let launch = Launch { run_as: Some("hearth".into()), ..launch() };
        check(&launch, (9, 0), "-runas hearth -sandbox on,obsolete=deny,elevateprivileges=allow,spawn=deny");
        check(&launch, (9, 1), "-run-with user=hearth -sandbox on,obsolete=deny,elevateprivileges=allow,spawn=deny");
    }

    #[test]
    fn a_qemu_without_seccomp_gets_no_sandbox() {
        let binary = Binary::stand_in(VERSION_MIN, false);
        let arguments = launch().arguments(&binary, SOCKETS);
        assert!(!arguments.iter().any(|argument| argument == "-sandbox"));
    }

    #[test]
    fn explicit_choices_replace_defaults() {
        let launch = Launch {
            cpu_model: Some("EPYC".into()),
            machine_type: "pc-q35-10.0".into(),
            accelerator: Accelerator::Kvm,
            sandbox: false,
            ..launch()
        };
        check(&launch, (10, 0), "-accel kvm -cpu EPYC ");
        check(&launch, (10, 0), "-machine pc-q35-10.0,");
        assert!(!line(&launch, (10, 0)).contains("-sandbox"));
        check(&Launch { cpu_model: None, ..launch }, (10, 0), "-accel kvm -cpu host ");
    }

    #[test]
    fn preload_library_is_set_in_environment() {
        let preload = Preload {
            library: "/run/preload.so".into(),
            socket: "/run/userfault.sock".into(),
            gates: Some("/run/gates".into()),
            keeps_heap: true,
        };
        let launch = Launch { preload: Some(preload), ..launch() };
        let expect = [
            ("LD_PRELOAD", "/run/preload.so"),
            ("HEARTH_USERFAULT_SOCKET", "/run/userfault.sock"),
            ("HEARTH_VALVES", "/run/gates"),
            ("HEARTH_KEEP_HEAP_S", "30"),
        ];
        assert_eq!(launch.environment(), expect.map(|(name, value)| (name, value.into())));
    }
}
