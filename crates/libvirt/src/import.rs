//! Import: the XML of a domain as a machine of Hearth's own, and a list of what such a machine does not have.
//!
//! Nothing is left out in silence, except devices that every machine has in its own way (controllers, the console, random numbers)
//! and what only libvirt reads (metadata, labels). A domain that would not be the same guest any more is refused.

use std::path::PathBuf;

use roxmltree::{Document, Node};

use crate::definition::{DefinitionError, Disk, Domain, Refusal, attribute_of, bus, child, target, text_of};
use crate::known::{Unknown, unknown};

const AGENT_CHANNEL: &str = "org.qemu.guest_agent.0";

/// A machine that runs a domain's guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The domain's name.
    pub name: String,
    /// Size of the guest's memory.
    pub memory_bytes: u64,
    /// Number of processors.
    pub cpus: u32,
    /// QEMU's `-cpu` value.
    pub cpu_model: String,
    /// `kvm` or `tcg`.
    pub accelerator: &'static str,
    /// A versioned q35 machine type, if the domain has one.
    pub machine_type: Option<String>,
    /// The domain's QEMU.
    pub emulator: Option<PathBuf>,
    /// What the guest boots from.
    pub boot: Boot,
    /// Its disks, the one that it boots from first.
    pub disks: Vec<Disk>,
    /// Its networks.
    pub nets: Vec<Net>,
    /// Whether it has a channel to a guest agent.
    pub guest_agent: bool,
    /// Action of its watchdog, as in machine.toml.
    pub watchdog: Option<&'static str>,
    /// Whether its guest has a screen.
    pub screen: bool,
    /// What is not carried over, in the order of the definition.
    pub left: Vec<Left>,
}

/// What a guest boots from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum Boot {
    /// A kernel that QEMU loads.
    Kernel { kernel: PathBuf, initrd: Option<PathBuf>, cmdline: String },
    /// QEMU's own BIOS.
    Bios,
    /// Firmware and the file with its variables.
    Uefi { code: PathBuf, vars: PathBuf },
}

/// A network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Net {
    /// `user`, `passt` or `tap`.
    pub kind: &'static str,
    /// Its MAC address.
    pub mac: Option<String>,
    /// The tap interface.
    pub ifname: Option<String>,
    /// Forwarded ports, as in machine.toml.
    pub forward: Vec<String>,
}

/// A part of a domain that is not carried over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The part.
    pub what: String,
    /// Why, and what to do about it.
    pub why: String,
}

/// Settings of a domain that a machine has too, or that are looked at below.
const KNOWN: &[&str] = &[
    "@type",
    "@id",
    "name",
    "memory@unit",
    "currentMemory@unit",
    "vcpu@placement=static",
    "vcpu@current",
    "os@firmware",
    "os/type@arch",
    "os/type@machine",
    "os/boot@dev",
    "os/kernel",
    "os/initrd",
    "os/cmdline",
    "os/firmware/*",
    "os/loader@readonly",
    "os/loader@secure",
    "os/loader@type",
    "os/loader@format",
    "os/nvram@template",
    "os/nvram@templateFormat",
    "os/nvram@type",
    "os/nvram@format",
    "os/nvram/source@file",
    "os/nvram/source@index",
    "cpu@mode",
    "cpu@match",
    "cpu@check",
    "cpu@migratable=on",
    "cpu/model@fallback",
    "cpu/vendor",
    "cpu/topology/*",
    "cpu/feature@policy",
    "cpu/feature@name",
    "cpu/numa/*",
    "clock@offset",
    "clock/timer/*",
    "on_poweroff",
    "on_reboot",
    "on_crash",
    "memoryBacking/hugepages/*",
    "memoryBacking/locked",
    // How a machine has them by itself.
    "features/acpi",
    "features/apic",
    "features/pae",
    "features/vmcoreinfo@state",
    "memoryBacking/source@type",
    "memoryBacking/access@mode",
    "memoryBacking/allocation@mode=ondemand",
    // Only libvirt reads them.
    "title",
    "description",
    "metadata/*",
    "seclabel/*",
    "devices/*",
];

/// Devices that a machine has too, or that are looked at below.
const KNOWN_DEVICES: &[&str] = &[
    "emulator",
    "disk/*",
    "interface/*",
    "channel/*",
    "watchdog/*",
    "memballoon/*",
    "memory/*",
    "graphics/*",
    "video/*",
    // Every machine has these two, on PS/2; libvirt names that bus if no other is asked for.
    "input@type=mouse",
    "input@type=keyboard",
    "input@bus=ps2",
    "input/alias/*",
    "input/address/*",
    "controller@type",
    "controller@index",
    "controller@model",
    "controller@ports",
    "controller/master/*",
    "controller/model/*",
    "controller/target/*",
    "controller/alias/*",
    "controller/address/*",
    "serial@type=pty",
    "serial/source/*",
    "serial/target@type=isa-serial",
    "serial/target@port",
    "serial/target/model/*",
    "serial/alias/*",
    "serial/address/*",
    "console@type",
    "console@tty",
    "console/source/*",
    "console/target/*",
    "console/alias/*",
    "rng@model=virtio",
    "rng/backend@model=random",
    "rng/backend@model=builtin",
    "rng/alias/*",
    "rng/address/*",
    "panic/*",
];

/// Settings of a disk that count, beside those that Hearth carries over.
const KNOWN_OF_DISK: &[&str] = &["target@dev", "target@bus", "boot@order", "alias/*", "address/*"];

/// Settings of a network that a machine has too, or that are looked at below.
const KNOWN_OF_NET: &[&str] = &[
    "@type",
    "mac@address",
    "target@dev",
    "target@managed",
    "backend@type",
    "model@type",
    "boot@order",
    "portForward@proto",
    "portForward@address",
    "portForward/range/*",
    "alias/*",
    "address/*",
];

/// Devices that a machine does not have: their elements, and why.
const DEVICES: [(&[&str], &str); 6] = [
    (
        &["input", "input@type", "input@bus", "input@model", "input/driver", "input/source"],
        "a machine has a PS/2 keyboard and mouse, and no other",
    ),
    (&["sound", "audio"], "a machine has no sound"),
    (&["hostdev"], "Hearth passes no device of the host through to a guest"),
    (&["redirdev", "redirfilter", "smartcard", "hub"], "a machine has no USB"),
    (&["filesystem"], "Hearth shares no folders of the host with a guest"),
    (&["tpm"], "a machine has no TPM; what the guest has sealed with it stays sealed"),
];

/// Settings of the whole domain that a machine does not have.
const SETTINGS: [(&[&str], &str); 9] = [
    (
        &["vcpu@cpuset", "cputune", "memtune", "blkiotune", "numatune", "resource"],
        "Hearth sets no limits of the host for QEMU; the service that runs the machine can (systemd: CPUQuota=, AllowedCPUs=)",
    ),
    (&["iothreads", "iothreadids", "defaultiothread"], "each disk has a thread of its own"),
    (&["maxMemory"], "no memory can be plugged in"),
    (&["uuid"], "a machine has none; a guest that needs it gets it with extra_qemu_args = [\"-uuid\", \"...\"]"),
    (&["genid"], "a machine has a generation ID of its own"),
    (&["sysinfo", "os/smbios"], "a machine has no SMBIOS strings"),
    (&["pm"], "QEMU's defaults are used"),
    (&["features/hyperv"], "the guest gets none of these; `cpu_model` can name them, such as hv_relaxed and hv_vapic"),
    (&["commandline"], "Hearth's command line differs from libvirt's; what is still wanted goes into extra_qemu_args"),
];

/// The domain as a machine.
/// `check`: why the image of a disk is not what the definition says of it.
pub fn import(xml: &str, check: impl Fn(&Disk) -> Result<(), String>) -> Result<Imported, DefinitionError> {
    let document = Document::parse(xml)?;
    let domain = Domain::of(&document)?;
    let mut left = Lefts::default();
    let mut refusals = refusals(&domain);
    let boot = boot(&domain, &mut left).map_err(|refusal| refusals.push(refusal));
    let memory_bytes = domain.memory_bytes();
    if memory_bytes.is_none() {
        refuse(&mut refusals, "its memory has no size that is understood", "");
    }
    let (Ok(boot), Some(memory_bytes), true) = (boot, memory_bytes, refusals.is_empty()) else {
        return Err(DefinitionError::Refused(refusals));
    };
    settings(&domain, &mut left);
    let (cpu_model, accelerator) = (cpu_model(&domain, &mut left), accelerator(&domain));
    let machine_type = machine_type(&domain, &mut left);
    let disks = disks(&domain, &mut left, check);
    let nets = elements(domain.devices, "interface").filter_map(|element| net(element, &mut left)).collect();
    let (guest_agent, watchdog) = (has_agent(&domain, &mut left), watchdog(&domain, &mut left));
    let screen = has_screen(&domain, &mut left);
    devices(&domain, &mut left);
    let vcpus = domain.child("vcpu");
    let current = vcpus.and_then(|vcpus| vcpus.attribute("current")).and_then(|count| count.parse().ok());
    Ok(Imported {
        name: domain.name().to_owned(),
        memory_bytes,
        cpus: current.unwrap_or(u32::from(domain.vcpus())),
        cpu_model,
        accelerator,
        machine_type,
        emulator: text_of(domain.devices, "emulator").map(PathBuf::from),
        boot,
        disks,
        nets,
        guest_agent,
        watchdog,
        screen,
        left: left.0,
    })
}

#[derive(Default)]
struct Lefts(Vec<Left>);

impl Lefts {
    fn add(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.0.push(Left { what: what.into(), why: why.into() });
    }
}

fn refuse(refusals: &mut Vec<Refusal>, what: &str, hint: &str) {
    refusals.push(Refusal { what: what.to_owned(), hint: hint.to_owned() });
}

/// Why no machine can run this domain's guest.
fn refusals(domain: &Domain<'_, '_>) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    if !matches!(domain.root.attribute("type"), Some("kvm" | "qemu")) {
        refuse(&mut refusals, "it is not a QEMU domain", "");
    }
    let os = domain.child("os");
    if os.and_then(|os| attribute_of(os, "type", "arch")).is_some_and(|arch| arch != "x86_64") {
        refuse(&mut refusals, "its processor is not an x86_64 one", "");
    }
    if os.and_then(|os| text_of(os, "type")).is_some_and(|kind| kind != "hvm") {
        refuse(&mut refusals, "it has no virtual hardware of its own", "");
    }
    if domain.child("launchSecurity").is_some() {
        refuse(&mut refusals, "its memory is encrypted (launchSecurity)", "");
    }
    refusals
}

fn elements<'a, 'i>(parent: Node<'a, 'i>, name: &'static str) -> impl Iterator<Item = Node<'a, 'i>> {
    parent.children().filter(move |child| child.tag_name().name() == name)
}

/// The error is a refusal.
fn boot(domain: &Domain<'_, '_>, left: &mut Lefts) -> Result<Boot, Refusal> {
    let Some(os) = domain.child("os") else { return Ok(Boot::Bios) };
    let loader = child(os, "loader");
    let is_flash = loader.is_some_and(|loader| loader.attribute("type") == Some("pflash"));
    let is_uefi = is_flash || os.attribute("firmware") == Some("efi");
    if let Some(kernel) = text_of(os, "kernel") {
        if is_uefi {
            left.add("firmware", "a kernel that QEMU loads is started by QEMU's BIOS");
        }
        let initrd = text_of(os, "initrd").map(PathBuf::from);
        let cmdline = text_of(os, "cmdline").unwrap_or_default().to_owned();
        return Ok(Boot::Kernel { kernel: kernel.into(), initrd, cmdline });
    }
    for other in elements(os, "boot").filter_map(|boot| boot.attribute("dev")).filter(|device| *device != "hd") {
        left.add(format!("boot from {other}"), "a machine boots from its disks");
    }
    if !is_uefi {
        if loader.is_some() {
            left.add("firmware", "a machine uses QEMU's own BIOS");
        }
        return Ok(Boot::Bios);
    }
    uefi(os, loader, left)
}

fn uefi(os: Node<'_, '_>, loader: Option<Node<'_, '_>>, left: &mut Lefts) -> Result<Boot, Refusal> {
    let variables = child(os, "nvram");
    let in_source = variables.and_then(|variables| attribute_of(variables, "source", "file"));
    let plain = text_of(os, "nvram").filter(|path| !path.is_empty());
    let (Some(code), Some(vars)) = (text_of(os, "loader"), in_source.or(plain)) else {
        return Err(Refusal {
            what: "its definition does not name its UEFI firmware and the file with its variables".to_owned(),
            hint: "start it once under libvirt, which then notes both".to_owned(),
        });
    };
    if [loader, variables].into_iter().flatten().any(|file| file.attribute("format") == Some("qcow2")) {
        return Err(Refusal {
            what: "its UEFI firmware or the file with its variables is a qcow2 image".to_owned(),
            hint: "convert it to raw with qemu-img, and name that file in the domain".to_owned(),
        });
    }
    if loader.is_some_and(|loader| loader.attribute("secure") == Some("yes")) {
        left.add("secure boot", "the firmware's variables are not protected from the guest's kernel");
    }
    Ok(Boot::Uefi { code: code.into(), vars: vars.into() })
}

fn accelerator(domain: &Domain<'_, '_>) -> &'static str {
    if domain.root.attribute("type") == Some("kvm") { "kvm" } else { "tcg" }
}

/// QEMU's `-cpu` value.
fn cpu_model(domain: &Domain<'_, '_>, left: &mut Lefts) -> String {
    let default = || "qemu64".to_owned();
    let Some(cpu) = domain.child("cpu") else { return default() };
    for element in cpu.children().filter(Node::is_element) {
        match element.tag_name().name() {
            "topology" => left.add("processor topology", "each processor is a socket or core, as QEMU chooses"),
            "numa" if elements(element, "cell").count() > 1 => {
                left.add("memory nodes", "a machine's memory is one node; the guest sees all of its memory there");
            }
            _ => {}
        }
    }
    let mut model = match cpu.attribute("mode") {
        Some("host-passthrough") => "host".to_owned(),
        Some("host-model") => {
            left.add("processor model host-model", "the guest gets all that the host's processor has (host)");
            "host".to_owned()
        }
        Some("maximum") => "max".to_owned(),
        _ => text_of(cpu, "model").map_or_else(default, str::to_owned),
    };
    for feature in elements(cpu, "feature") {
        let sign = match feature.attribute("policy") {
            Some("disable" | "forbid") => '-',
            Some("optional") => {
                let name = feature.attribute("name").unwrap_or_default();
                left.add(format!("processor feature {name}"), "it is optional, and `cpu_model` does not name it");
                continue;
            }
            _ => '+',
        };
        if let Some(name) = feature.attribute("name") {
            model.extend([",", &sign.to_string(), name]);
        }
    }
    model
}

/// A type with which the guest finds the same chipset.
fn machine_type(domain: &Domain<'_, '_>, left: &mut Lefts) -> Option<String> {
    let os = domain.child("os")?;
    let kind = attribute_of(os, "type", "machine")?;
    let version = kind.strip_prefix("pc-q35-");
    if version.is_some_and(|version| version.starts_with(|letter: char| letter.is_ascii_digit())) {
        return Some(kind.to_owned());
    }
    if kind != "q35" {
        left.add(
            format!("machine type {kind}"),
            "a machine is a q35: the guest finds another chipset, and its devices elsewhere",
        );
    }
    None
}

/// Those with a boot order come first, as firmware tries them.
fn disks(domain: &Domain<'_, '_>, left: &mut Lefts, check: impl Fn(&Disk) -> Result<(), String>) -> Vec<Disk> {
    let order = |element: Node<'_, '_>| {
        let order = attribute_of(element, "boot", "order").and_then(|order| order.parse().ok());
        order.unwrap_or(u32::MAX)
    };
    let found: Vec<_> = domain.disks().collect();
    let mut sorted = found.clone();
    sorted.sort_by_key(|element| order(*element));
    if let Some(first) = sorted.first().filter(|first| found.first() != Some(first)) {
        left.add("order of the disks", format!("{} comes first, because the guest boots from it", target(*first)));
    }
    let mut disks = Vec::new();
    for element in sorted {
        // The model of virtio matters to a guest that knows only an old one.
        let virtio: &[&str] = if bus(element) == "virtio" { &["@model=virtio"] } else { &[] };
        let disk = Disk::on_any_bus(element, 1, &[KNOWN_OF_DISK, virtio]);
        match disk.and_then(|(disk, lost)| check(&disk).map(|()| (disk, lost))) {
            Ok((disk, lost)) => {
                for (what, why) in lost {
                    left.add(format!("{}: {what}", disk.name), why);
                }
                if bus(element) != "virtio" {
                    let why =
                        format!("is virtio instead of {}: the guest finds the disk under another name", bus(element));
                    left.add(format!("bus of {}", disk.name), why);
                }
                disks.push(disk);
            }
            Err(why) => left.add(target(element), why),
        }
    }
    let others =
        elements(domain.devices, "disk").filter(|disk| matches!(disk.attribute("device"), Some("cdrom" | "floppy")));
    for other in others {
        let kind = other.attribute("device").unwrap_or_default();
        left.add(format!("{kind} {}", target(other)), "a machine has no drives for media");
    }
    disks
}

fn net(element: Node<'_, '_>, left: &mut Lefts) -> Option<Net> {
    let mac = attribute_of(element, "mac", "address").map(str::to_owned);
    let name = format!("network {}", mac.as_deref().unwrap_or("without an address"));
    let kind = element.attribute("type").unwrap_or("unknown");
    let passt = attribute_of(element, "backend", "type") == Some("passt");
    let tap =
        attribute_of(element, "target", "dev").filter(|_| attribute_of(element, "target", "managed") == Some("no"));
    let net = match (kind, tap) {
        ("user", _) => Net {
            kind: if passt { "passt" } else { "user" },
            forward: forwards(element, &name, left),
            ..Net::default()
        },
        ("ethernet", Some(ifname)) => Net { kind: "tap", ifname: Some(ifname.to_owned()), ..Net::default() },
        _ => {
            let source = child(element, "source");
            let source =
                source.and_then(|source| source.attributes().next()).map(|source| format!(" {}", source.value()));
            let why = format!(
                "it is of the kind {kind}{}; make a tap interface, add it to that network, and name it in [[nets]] with \
                 this address",
                source.unwrap_or_default()
            );
            left.add(name, why);
            return None;
        }
    };
    if let Some(model) = attribute_of(element, "model", "type").filter(|model| *model != "virtio") {
        left.add(format!("{name}: {model}"), "the guest finds a virtio network device instead");
    }
    if child(element, "boot").is_some() {
        left.add(format!("{name}: boot"), "a machine boots from its disks");
    }
    for other in unknown(element, &[KNOWN_OF_NET]) {
        left.add(format!("{name}: {}", other.shown()), "it has no effect");
    }
    Some(Net { mac, ..net })
}

/// Forwards as in machine.toml.
fn forwards(element: Node<'_, '_>, name: &str, left: &mut Lefts) -> Vec<String> {
    let mut forwards = Vec::new();
    for forward in elements(element, "portForward") {
        let host = match forward.attribute("address") {
            None => "0.0.0.0".to_owned(),
            Some(v6) if v6.contains(':') => format!("[{v6}]"),
            Some(v4) => v4.to_owned(),
        };
        let protocol = if forward.attribute("proto") == Some("udp") { "/udp" } else { "" };
        for range in elements(forward, "range") {
            let start = range.attribute("start").unwrap_or_default();
            if range.attribute("end").is_some_and(|end| end != start) || range.attribute("exclude") == Some("yes") {
                left.add(format!("{name}: ports from {start}"), "write each port of the range into `forward`");
                continue;
            }
            forwards.push(format!("{host}:{start}:{}{protocol}", range.attribute("to").unwrap_or(start)));
        }
    }
    forwards
}

/// Whether there is a channel to the guest's agent.
fn has_agent(domain: &Domain<'_, '_>, left: &mut Lefts) -> bool {
    let mut has_agent = false;
    for channel in elements(domain.devices, "channel") {
        match attribute_of(channel, "target", "name") {
            Some(AGENT_CHANNEL) => has_agent = true,
            other => left
                .add(format!("channel {}", other.unwrap_or("without a name")), "a machine has only the guest agent's"),
        }
    }
    has_agent
}

/// The action of the watchdog, as in machine.toml.
fn watchdog(domain: &Domain<'_, '_>, left: &mut Lefts) -> Option<&'static str> {
    let mut found = None;
    for watchdog in elements(domain.devices, "watchdog") {
        let (model, action) =
            (watchdog.attribute("model").unwrap_or("unknown"), watchdog.attribute("action").unwrap_or("reset"));
        match (model, action) {
            ("i6300esb", "reset") => found = Some("reset"),
            ("i6300esb", "inject-nmi") => found = Some("nmi"),
            _ => left
                .add(format!("watchdog {model}, {action}"), "a machine has an i6300esb; [watchdog] says what it does"),
        }
    }
    found
}

/// Whether the guest has a screen, or a graphics card that it may show one on.
fn has_screen(domain: &Domain<'_, '_>, left: &mut Lefts) -> bool {
    let is_card = |video: Node<'_, '_>| attribute_of(video, "model", "type") != Some("none");
    let graphics = elements(domain.devices, "graphics").count() > 0;
    let video = elements(domain.devices, "video").any(is_card);
    if graphics || video {
        let names: Vec<_> = [("graphics", graphics), ("video", video)]
            .into_iter()
            .filter_map(|(name, is)| is.then_some(name))
            .collect();
        let why = "the guest gets a VGA card instead, and a screen that `hearth view` shows (display = \"vnc\")";
        left.add(names.join(", "), why);
    }
    graphics || video
}

fn devices(domain: &Domain<'_, '_>, left: &mut Lefts) {
    list(unknown(domain.devices, &[KNOWN_DEVICES]), &DEVICES, "a machine has no such device", left);
    if elements(domain.devices, "memballoon").any(|balloon| balloon.attribute("model") != Some("none")) {
        left.add("memballoon", "a machine has no balloon: the guest keeps the memory that it was given");
    }
    let stores = |memory: Node<'_, '_>| matches!(memory.attribute("model"), Some("nvdimm" | "virtio-pmem"));
    if elements(domain.devices, "memory").any(stores) {
        left.add("persistent memory", "a machine has none; what the guest has stored there stays in its file");
    }
    if elements(domain.devices, "memory").any(|memory| !stores(memory)) {
        left.add("memory devices", "they become a part of the machine's memory, which is one piece");
    }
    let is_virtio = |console: Node<'_, '_>| attribute_of(console, "target", "type") == Some("virtio");
    if elements(domain.devices, "serial").count() > 1 || elements(domain.devices, "console").any(is_virtio) {
        left.add("further consoles", "a machine has one serial console, ttyS0");
    }
}

fn settings(domain: &Domain<'_, '_>, left: &mut Lefts) {
    list(unknown(domain.root, &[KNOWN]), &SETTINGS, "a machine has no such setting; QEMU's default is used", left);
    let memory = ["memory", "currentMemory"].map(|name| text_of(domain.root, name));
    if memory[1].is_some() && memory[0] != memory[1] {
        left.add("currentMemory", "the guest gets all of its memory at its start");
    }
    let backing = domain.child("memoryBacking");
    for (name, why) in [
        ("hugepages", "a machine's memory is a file on a tmpfs, which may use huge pages (huge=)"),
        ("locked", "a machine's memory is not locked, so that dead memory can be freed"),
    ] {
        if backing.is_some_and(|backing| child(backing, name).is_some()) {
            left.add(name, why);
        }
    }
    for (name, usual, why) in [
        ("on_poweroff", &["destroy"][..], "a machine stops at a power-off, and reboots at a reboot"),
        ("on_reboot", &["restart"], "a machine stops at a power-off, and reboots at a reboot"),
        // The first one is what virt-install writes into each domain.
        ("on_crash", &["destroy", "restart", "coredump-restart"], "`on_panic` says what follows a crash"),
    ] {
        if let Some(other) = text_of(domain.root, name).filter(|action| !usual.contains(action)) {
            left.add(format!("{name} {other}"), why);
        }
    }
    let Some(clock) = domain.child("clock") else { return };
    if clock.attribute("offset").is_some_and(|offset| offset != "utc") {
        left.add("clock", "the guest's clock shows UTC; set the guest to that");
    }
    let timers: Vec<_> = elements(clock, "timer").filter_map(|timer| timer.attribute("name")).collect();
    if !timers.is_empty() {
        left.add(format!("clock timers {}", timers.join(", ")), "QEMU's defaults are used");
    }
}

/// Adds what is not known, with the reason of its group: one entry for each group, and one for each setting without a group.
fn list(found: Vec<Unknown>, groups: &[(&[&str], &str)], otherwise: &str, left: &mut Lefts) {
    let (mut grouped, mut single): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
    for unknown in found {
        match groups.iter().position(|(paths, _)| paths.contains(&unknown.path.as_str())) {
            Some(group) => grouped.push((group, unknown.shown())),
            None => single.push(unknown.shown()),
        }
    }
    for (group, (_, why)) in groups.iter().enumerate() {
        let mut names: Vec<_> = grouped.iter().filter(|(of, _)| *of == group).map(|(_, name)| name.as_str()).collect();
        names.dedup();
        if !names.is_empty() {
            left.add(names.join(", "), *why);
        }
    }
    single.dedup();
    single.into_iter().for_each(|name| left.add(name, otherwise));
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::definition::{Backing, Format};
    use crate::fixture::{DOMAIN, with, with_cpu, with_device, with_setting};

    fn imported(xml: &str) -> Imported {
        import(xml, |_| Ok(())).unwrap()
    }

    fn names(imported: &Imported) -> Vec<&str> {
        imported.left.iter().map(|left| left.what.as_str()).collect()
    }

    #[track_caller]
    fn left(xml: &str, what: &str, why: &str) {
        let imported = imported(xml);
        let found = imported.left.iter().find(|left| left.what == what);
        assert!(found.is_some_and(|left| left.why.contains(why)), "{what}: {:#?}", imported.left);
    }

    #[test]
    fn typical_domain_becomes_a_machine() {
        let imported = imported(DOMAIN);
        assert_eq!(
            names(&imported),
            [
                "uuid",
                "clock timers rtc",
                "cdrom sda",
                "network 52:54:00:12:34:56",
                "channel com.redhat.spice.0",
                "watchdog itco, reset",
                "graphics, video",
                "input type='tablet', input bus='usb'",
                "memballoon"
            ]
        );
        let disk = Disk {
            name: "vda".to_owned(),
            path: "/var/lib/libvirt/images/web.qcow2".into(),
            format: Format::Qcow2,
            read_only: false,
            direct: true,
            serial: "root".to_owned(),
            queues: 1,
            mib_per_second: None,
            iops: None,
            backing: Backing::default(),
        };
        let expect = Imported {
            name: "web".to_owned(),
            memory_bytes: 2 << 30,
            cpus: 2,
            cpu_model: "host".to_owned(),
            accelerator: "kvm",
            machine_type: Some("pc-q35-7.2".to_owned()),
            emulator: Some("/usr/bin/qemu-system-x86_64".into()),
            boot: Boot::Bios,
            disks: vec![disk],
            nets: vec![],
            guest_agent: true,
            watchdog: None,
            screen: true,
            left: imported.left.clone(),
        };
        assert_eq!(imported, expect);
    }

    #[test]
    fn networks_that_hearth_knows_are_carried_over() {
        let net = |element: &str| imported(&with_device(element)).nets;
        let tap = "<interface type='ethernet'><mac address='52:54:00:00:00:01'/><target dev='tap7' managed='no'/></interface>";
        let mac = || Some("52:54:00:00:00:01".to_owned());
        assert_eq!(net(tap), [Net { kind: "tap", mac: mac(), ifname: Some("tap7".to_owned()), forward: vec![] }]);
        let user = "<interface type='user'><mac address='52:54:00:00:00:01'/></interface>";
        assert_eq!(net(user), [Net { kind: "user", mac: mac(), ..Net::default() }]);
        let passt = "<interface type='user'><backend type='passt'/><model type='e1000e'/>\
             <portForward proto='tcp' address='::1'><range start='2022' to='22'/><range start='3000' end='3010'/></portForward>\
             <portForward proto='udp'><range start='53'/></portForward></interface>";
        let forward = vec!["[::1]:2022:22".to_owned(), "0.0.0.0:53:53/udp".to_owned()];
        assert_eq!(net(passt), [Net { kind: "passt", mac: None, ifname: None, forward }]);
        let name = "network without an address";
        left(&with_device(passt), &format!("{name}: ports from 3000"), "each port");
        left(&with_device(passt), &format!("{name}: e1000e"), "virtio");
        left(
            &with_device(&user.replace("</", "<filterref filter='clean'/></")),
            "network 52:54:00:00:00:01: filterref",
            "no effect",
        );
        left(DOMAIN, "network 52:54:00:12:34:56", "network default; make a tap interface");
        // libvirt makes this one when the domain starts.
        let managed = "<interface type='ethernet'><target dev='tap7'/></interface>";
        left(&with_device(managed), name, "kind ethernet");
    }

    #[test]
    fn boot_is_kernel_firmware_or_bios() {
        let os = |inner: &str| DOMAIN.replace("<boot dev='hd'/>", inner);
        let boot = |inner: &str| imported(&os(inner)).boot;
        let kernel = boot("<kernel>/k</kernel><initrd>/i</initrd><cmdline>console=ttyS0</cmdline>");
        let cmdline = "console=ttyS0".to_owned();
        assert_eq!(kernel, Boot::Kernel { kernel: "/k".into(), initrd: Some("/i".into()), cmdline });
        let loader = "<loader readonly='yes' secure='yes' type='pflash'>/code.fd</loader>";
        let uefi = Boot::Uefi { code: "/code.fd".into(), vars: "/vars.fd".into() };
        assert_eq!(boot(&format!("{loader}<nvram template='/t'>/vars.fd</nvram>")), uefi);
        assert_eq!(boot(&format!("{loader}<nvram type='file'><source file='/vars.fd'/></nvram>")), uefi);
        left(&os(&format!("{loader}<nvram>/vars.fd</nvram>")), "secure boot", "not protected");
        left(&os("<boot dev='network'/><boot dev='hd'/>"), "boot from network", "its disks");
        let refused = |inner: &str| import(&os(inner), |_| Ok(())).unwrap_err().to_string();
        assert!(refused(loader).contains("does not name its UEFI firmware"));
        let qcow2 = loader.replace("type=", "format='qcow2' type=");
        assert!(refused(&format!("{qcow2}<nvram>/vars.fd</nvram>")).contains("qcow2"));
        let chosen = DOMAIN.replace("<os>", "<os firmware='efi'>");
        assert!(import(&chosen, |_| Ok(())).unwrap_err().to_string().contains("does not name"));
    }

    #[test]
    fn processors_are_named_as_qemu_does() {
        let model = |element: &str| imported(&with_cpu(element)).cpu_model;
        let features = "<feature policy='disable' name='erms'/><feature policy='require' name='pcid'/>\
                        <feature policy='optional' name='vmx'/>";
        assert_eq!(model(&format!("<cpu mode='maximum'>{features}</cpu>")), "max,-erms,+pcid");
        let custom =
            format!("<cpu mode='custom' match='exact'><model fallback='forbid'>Skylake-Server</model>{features}</cpu>");
        assert_eq!(model(&custom), "Skylake-Server,-erms,+pcid");
        assert_eq!(model(""), "qemu64");
        assert_eq!(model("<cpu mode='host-model'/>"), "host");
        left(&with_cpu("<cpu mode='host-model'/>"), "processor model host-model", "host");
        left(&with_cpu("<cpu><topology sockets='1' cores='2'/></cpu>"), "processor topology", "as QEMU chooses");
        left(&with_cpu("<cpu><numa><cell/><cell/></numa></cpu>"), "memory nodes", "one node");
        assert_eq!(imported(&DOMAIN.replace("'static'>2", "'static' current='3'>8")).cpus, 3);
        assert_eq!(imported(&DOMAIN.replace("type='kvm'", "type='qemu'")).accelerator, "tcg");
    }

    #[test]
    fn disk_that_boots_comes_first_and_each_is_told() {
        let second = "<disk type='block' device='disk'><driver type='raw' cache='none' iothread='1'/><source dev='/dev/vg/data'/>\
             <target dev='sdb' bus='scsi'/><boot order='1'/></disk>";
        let disks = imported(&with_device(second)).disks;
        let found: Vec<_> = disks.iter().map(|disk| (disk.name.as_str(), disk.path.as_path())).collect();
        let vda = Path::new("/var/lib/libvirt/images/web.qcow2");
        assert_eq!(found, [("sdb", Path::new("/dev/vg/data")), ("vda", vda)]);
        left(&with_device(second), "order of the disks", "sdb comes first");
        left(&with_device(second), "bus of sdb", "virtio instead of scsi");
        left(&with_device(second), "sdb: driver iothread='1'", "has no effect");
        let network = "<disk type='network' device='disk'><target dev='vdb' bus='virtio'/></disk>";
        left(&with_device(network), "vdb", "network disk");
        let i440 = DOMAIN.replace("pc-q35-7.2", "pc-i440fx-7.2");
        left(&i440, "machine type pc-i440fx-7.2", "q35");
        assert_eq!(imported(&i440).machine_type, None);
    }

    #[test]
    fn guest_with_graphics_gets_a_screen() {
        let check = |elements: &str, expect: Option<&str>| {
            let imported = imported(&PLAIN.replace("<devices>", &format!("<devices>{elements}")));
            assert_eq!((imported.screen, names(&imported).first().copied()), (expect.is_some(), expect), "{elements}");
        };
        check("", None);
        check("<video><model type='none'/></video>", None);
        check("<video><model type='qxl' ram='65536'/></video>", Some("video"));
        check("<graphics type='vnc' port='-1'/><video><model type='virtio'/></video>", Some("graphics, video"));
    }

    #[test]
    fn what_a_machine_does_not_have_is_listed() {
        for (element, what, why) in [
            ("<hostdev mode='subsystem' type='pci'/>", "hostdev", "no device of the host"),
            ("<tpm model='tpm-crb'/>", "tpm", "no TPM"),
            ("<filesystem type='mount'/>", "filesystem", "no folders"),
            ("<redirdev bus='usb' type='spicevmc'/>", "redirdev", "USB"),
            ("<serial type='pty'/>", "further consoles", "ttyS0"),
            ("<memory model='dimm'/>", "memory devices", "one piece"),
            ("<memory model='nvdimm'/>", "persistent memory", "stays in its file"),
            ("<watchdog model='i6300esb' action='poweroff'/>", "watchdog i6300esb, poweroff", "[watchdog]"),
        ] {
            left(&with_device(element), what, why);
        }
        for (element, what, why) in [
            ("<memoryBacking><hugepages/></memoryBacking>", "hugepages", "tmpfs"),
            ("<cputune><shares>7</shares></cputune>", "cputune", "systemd"),
            (
                "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'/>",
                "commandline",
                "extra_qemu_args",
            ),
        ] {
            left(&with_setting(element), what, why);
        }
        left(&DOMAIN.replace("<apic/>", "<hyperv/>"), "features/hyperv", "cpu_model");
        left(&DOMAIN.replace("offset='utc'", "offset='localtime'"), "clock", "UTC");
        left(&DOMAIN.replace("<on_reboot>restart", "<on_reboot>destroy"), "on_reboot destroy", "reboots");
        left(&DOMAIN.replacen("2097152", "4194304", 1), "currentMemory", "all of its memory");
        let watchdog = "<watchdog model='i6300esb' action='inject-nmi'/>";
        assert_eq!(imported(&with_device(watchdog)).watchdog, Some("nmi"));
    }

    /// Settings of a domain, as libvirt's schema has them: <https://libvirt.org/formatdomain.html>. Those of a disk are in
    /// `definition`.
    const TABLE: [(Fate, &str); 3] = [
        (
            Fate::Carried,
            "@id=1 title description metadata/app seclabel@type=none seclabel/label memory@unit=KiB \
             memoryBacking/source@type=memfd memoryBacking/access@mode=shared memoryBacking/allocation@mode=ondemand \
             vcpu@placement=static vcpu@current=2 os@firmware=bios os/type@arch=x86_64 os/type@machine=q35 os/boot@dev=hd \
             os/kernel os/firmware/feature@name=secure-boot os/nvram@template features/acpi features/apic features/pae \
             features/vmcoreinfo@state=on cpu@mode=host-passthrough cpu@match=exact cpu@check=partial cpu@migratable=on \
             cpu/model@fallback=allow cpu/vendor cpu/feature@name=vmx cpu/numa/cell@cpus=0 clock@offset=utc \
             on_poweroff=destroy on_reboot=restart on_crash=destroy on_crash=restart on_crash=coredump-restart \
             devices/emulator devices/controller@index=1 devices/controller@model=a devices/controller@ports=4 \
             devices/controller/master@startport devices/controller/model@name=a devices/controller/target@chassis \
             devices/controller/alias@name=a devices/controller/address@type=pci devices/serial/source@path=/dev/pts/1 \
             devices/serial/target/model@name=isa-serial devices/serial/alias@name=a devices/serial/address@type=isa \
             devices/console@tty=/dev/pts/1 devices/console/alias@name=a devices/rng/alias@name=a \
             devices/rng@model=virtio devices/rng/address@type=pci devices/rng/backend@model=builtin devices/panic@model=isa \
             devices/watchdog@model=i6300esb devices/memballoon@model=none devices/channel/target@name=org.qemu.guest_agent.0 \
             devices/interface/mac@address=52:54:00:00:00:01 devices/interface/model@type=virtio \
             devices/interface/backend@type=passt devices/interface/portForward@proto=tcp \
             devices/interface/portForward@address=::1 devices/interface/portForward/range@start=7 \
             devices/interface/alias@name=a devices/interface/address@type=pci devices/disk@model=virtio \
             devices/disk/boot@order=1 devices/disk/alias@name=a devices/disk/address@type=pci devices/disk/readonly \
             devices/input@type=mouse devices/input@type=keyboard devices/input@bus=ps2 devices/input/alias@name=a",
        ),
        (
            Fate::Told,
            "uuid genid memory@dumpCore=off currentMemory@unit=KiB maxMemory@slots=4 memoryBacking/hugepages/page \
             memoryBacking/nosharepages memoryBacking/locked memoryBacking/allocation@mode=immediate \
             memoryBacking/allocation@threads memoryBacking/discard vcpu@cpuset=0-3 vcpu@placement=auto vcpus/vcpu@id=0 \
             iothreads iothreadids/iothread@id=1 defaultiothread@thread_pool_max blkiotune/weight memtune/hard_limit \
             cputune/shares cputune/vcpupin@vcpu=0 numatune/memory@mode=strict resource/partition sysinfo/bios/entry \
             bootloader bootloader_args os/root os/dtb os/shim os/loader os/loader@stateless=yes os/boot@dev=network os/bootmenu@enable=yes \
             os/smbios@mode=sysinfo os/bios@useserial=yes os/acpi/table os/init os/varstore features/hap \
             features/apic@eoi=on features/hyperv/relaxed@state=on features/kvm/hidden@state=on features/xen \
             features/pvspinlock features/capabilities features/pmu@state=off features/vmport@state=off features/gic \
             features/smm@state=on features/ioapic@driver=qemu features/msrs@unknown=ignore features/tcg/tb-cache \
             features/hpt features/htm features/nested-hv features/ccf-assist features/cfpc features/sbbc \
             features/ibs features/async-teardown features/ras features/ps2@state=off features/aia cpu@mode=host-model cpu@migratable=off \
             cpu@deprecated_features=off cpu/model@vendor_id=a cpu/topology@sockets=2 cpu/cache@mode=passthrough \
             cpu/maxphysaddr@bits=42 cpu/feature@policy=optional clock@offset=localtime clock@adjustment=reset \
             clock@timezone=a clock@basis=utc clock@start=1 clock/timer@name=hpet on_poweroff=restart on_reboot=destroy \
             on_crash=preserve on_crash=coredump-destroy on_lockfailure=poweroff pm/suspend-to-mem@enabled=no \
             perf/event@name=cmt idmap/uid@start=0 keywrap/cipher commandline/arg capabilities/add deprecation@behavior=crash \
             override/device namespace/sharenet datacenterpath setting-of-tomorrow features/setting-of-tomorrow \
             devices/lease devices/filesystem@type=mount devices/input@type=tablet devices/input@bus=usb \
             devices/input@model=virtio devices/input/source@dev=/dev/input/event1 devices/sound@model=ich9 devices/audio@id=1 \
             devices/hostdev@mode=subsystem devices/graphics@type=vnc devices/video devices/parallel@type=pty \
             devices/smartcard@mode=host devices/hub@type=usb devices/redirdev@bus=usb devices/redirfilter/usbdev \
             devices/tpm@model=tpm-crb devices/shmem@name=a devices/memory@model=dimm devices/watchdog@action=poweroff \
             devices/memballoon@autodeflate=on devices/nvram/address devices/iommu@model=intel devices/vsock@model=virtio \
             devices/crypto@model=virtio devices/pstore@backend=acpi-erst devices/device-of-tomorrow \
             devices/controller/driver@iothread=1 devices/controller/pcihole64 devices/controller@vectors devices/controller/acpi@index=1 \
             devices/serial@type=tcp devices/serial/log@file=/x devices/serial/protocol@type=telnet \
             devices/serial/target@type=pci-serial devices/console/log@file=/x devices/console/target@type=virtio \
             devices/rng@model=virtio-transitional devices/rng/rate@bytes=1 devices/rng/backend@model=egd devices/rng/driver@iommu=on \
             devices/channel/target@name=a devices/memballoon@model=virtio devices/interface@managed=yes \
             devices/interface@trustGuestRxFilters=yes devices/interface/mac@type=static devices/interface/mac@check=no \
             devices/interface/source@dev=eth0 devices/interface/model@type=e1000 devices/interface/boot@order=1 \
             devices/interface/virtualport devices/interface/link@state=down devices/interface/mtu@size=9000 \
             devices/interface/coalesce/rx devices/interface/guest@dev devices/interface/ip@address \
             devices/interface/route@address devices/interface/portForward@dev=eth0 devices/interface/script@path=/x \
             devices/interface/downscript@path=/x devices/interface/backenddomain@name=a devices/interface/backend@tap=/x \
             devices/interface/backend@vhost=/x devices/interface/backend@logFile=/x devices/interface/backend@hostname=a \
             devices/interface/driver@queues devices/interface/acpi@index=1 devices/interface/filterref@filter=a \
             devices/interface/tune/sndbuf devices/interface/rom@bar=off devices/interface/bandwidth/inbound \
             devices/interface/vlan/tag devices/interface/port@isolated=yes devices/interface/teaming@type=persistent \
             devices/disk@device=cdrom devices/disk@device=lun devices/disk/shareable devices/disk/driver@io=native \
             devices/disk/target@bus=scsi devices/disk/target@tray=open devices/disk@model=virtio-transitional \
             devices/disk/wwn devices/disk/acpi@index=1",
        ),
        (
            Fate::Refused,
            "@type=xen os/type@arch=aarch64 os@firmware=efi os/loader@type=pflash memory@unit=bushels launchSecurity@type=sev",
        ),
    ];

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        Carried,
        Told,
        Refused,
    }

    const PLAIN: &str = "<domain type='kvm'><name>web</name><memory>2097152</memory><vcpu>2</vcpu>\
        <os><type arch='x86_64' machine='q35'>hvm</type></os><devices>\
        <disk type='file'><driver discard='unmap'/><source file='/x'/><target dev='vda' bus='virtio'/></disk>\
        <interface type='user'><model type='virtio'/></interface></devices></domain>";

    fn fate(xml: &str) -> Fate {
        match import(xml, |_| Ok(())) {
            Ok(imported) if imported.left.is_empty() => Fate::Carried,
            Ok(_) => Fate::Told,
            Err(DefinitionError::Refused(_)) => Fate::Refused,
            Err(other) => panic!("{xml}: {other}"),
        }
    }

    #[test]
    fn no_setting_of_a_domain_is_lost_in_silence() {
        for (expect, paths) in TABLE {
            for path in paths.split_whitespace() {
                let xml = match path.split_once('=') {
                    Some((name, text)) if !path.contains('@') => {
                        with(PLAIN, name).replace(&format!("<{name}>7<"), &format!("<{name}>{text}<"))
                    }
                    _ => with(PLAIN, path),
                };
                assert_eq!(fate(&xml), expect, "{path}");
            }
        }
    }

    #[test]
    fn domain_that_no_machine_can_run_is_refused() {
        for (xml, why) in [
            (DOMAIN.replace("type='kvm'", "type='xen'"), "not a QEMU domain"),
            (DOMAIN.replace("x86_64' machine", "aarch64' machine"), "x86_64"),
            (with_setting("<launchSecurity type='sev'/>"), "encrypted"),
            (DOMAIN.replace("<memory unit='KiB'>", "<memory unit='bushels'>"), "no size"),
            ("<domain".to_owned(), "cannot be read"),
        ] {
            let refused = import(&xml, |_| Ok(())).unwrap_err().to_string();
            assert!(refused.contains(why), "{why}: {refused}");
        }
    }
}
