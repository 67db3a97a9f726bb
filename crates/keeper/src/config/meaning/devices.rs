//! The guest's boot files, disks and networks.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use hearth_qemu::launch::{DISKS_MAX, NETS_MAX};

use super::Resolver;
use crate::config::file::{BootSection, DiskSection, NetSection};
use crate::config::quantity::{derived_mac, forward, mac};
use crate::config::{Boot, DiskConfig, DiskFormat, Forward, NetBackend, NetConfig};
use crate::home::Home;

/// Size of virtio-blk's serial field.
const SERIAL_BYTES_MAX: usize = 20;
/// Paths of UEFI firmware in distributions, 4 MiB images first.
const UEFI_CODE: [&str; 4] = [
    "/usr/share/OVMF/OVMF_CODE_4M.fd",
    "/usr/share/OVMF/OVMF_CODE.fd",
    "/usr/share/edk2/x64/OVMF_CODE.4m.fd",
    "/usr/share/edk2/ovmf/OVMF_CODE.fd",
];

/// The distribution's UEFI firmware, whether it is installed or not.
fn uefi_code() -> &'static Path {
    let found = UEFI_CODE.into_iter().map(Path::new).find(|path| path.exists());
    found.unwrap_or(Path::new(UEFI_CODE[0]))
}

/// Its variables as a new machine has them.
pub fn uefi_template() -> PathBuf {
    uefi_code().display().to_string().replace("_CODE", "_VARS").into()
}

impl Resolver<'_> {
    pub(super) fn boot(&mut self, typed: BootSection, has_disks: bool, machine: &str) -> Option<Boot> {
        match (typed.kernel, typed.firmware) {
            (Some(_), Some(_)) => {
                self.problem("boot", "has both a kernel and firmware", "remove one of them");
                None
            }
            (Some(kernel), None) => {
                if typed.firmware_vars.is_some() {
                    self.problem("boot.firmware_vars", "works only with firmware, not with a kernel", "remove it");
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
                        self.problem(format!("boot.{key}"), "works only with boot.kernel", "add boot.kernel");
                    }
                }
                self.firmware(firmware, typed.firmware_vars, has_disks, machine)
            }
        }
    }

    fn firmware(
        &mut self,
        firmware: Option<String>,
        vars: Option<String>,
        has_disks: bool,
        machine: &str,
    ) -> Option<Boot> {
        let blamed = ["boot.kernel", "disks"].iter().any(|key| self.blamed.contains(*key));
        if !has_disks && !blamed {
            let hint = "add a [boot] section with a kernel, or a [[disks]] section to boot from";
            self.problem("boot", "has nothing to boot from", hint);
        }
        let code = match firmware.as_deref() {
            None | Some("bios") => None,
            Some("uefi") => Some(uefi_code().to_owned()),
            Some(path) => Some(self.path(path)),
        };
        if code.is_none() && vars.is_some() {
            self.problem("boot.firmware_vars", "works only with UEFI firmware", "set firmware = \"uefi\"");
        }
        let subject = "boot.firmware_vars";
        if firmware.as_deref() == Some("uefi") && vars.is_none() && !self.blamed.contains(subject) {
            let own = Home::of(machine).variables();
            let hint = format!(
                "copy the firmware's variables for this machine: `install -D -m 600 {} {own}`, and set firmware_vars = \"{own}\"",
                uefi_template().display(),
                own = own.display()
            );
            self.problem(subject, "is missing", hint);
        }
        Some(Boot::Firmware { code, vars: vars.map(|path| self.path(&path)) })
    }

    pub(super) fn disks(&mut self, typed: Vec<DiskSection>) -> Vec<DiskConfig> {
        let disks: Vec<_> = typed.into_iter().enumerate().filter_map(|(index, disk)| self.disk(index, disk)).collect();
        let mut names = HashSet::new();
        for disk in &disks {
            if !names.insert(&disk.name) {
                self.problem("disks", format!("two disks are named {}", disk.name), "give each a name of its own");
            }
        }
        disks
    }

    /// Checks the limits of a machine's bus.
    pub(super) fn must_fit(&mut self, disks: usize, nvram: usize, nets: usize) {
        if disks + nvram > DISKS_MAX {
            let why = format!("{disks} disks and {nvram} NVRAM devices exceed the limit of {DISKS_MAX}");
            self.problem("disks", why, "use fewer, larger ones with partitions");
        }
        if nets > NETS_MAX {
            self.problem("nets", format!("{nets} networks exceed the limit of {NETS_MAX}"), "remove some");
        }
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
            is_format_named: typed.format.is_some(),
            read_only: typed.read_only.unwrap_or(false),
            serial,
            queues: typed.queues.unwrap_or(1),
            mib_per_second: typed.mib_per_second,
            iops: typed.iops,
            direct: typed.direct.unwrap_or(true),
        })
    }

    pub(super) fn serial(&mut self, subject: &str, typed: Option<String>, name: &str) -> String {
        // A name may be longer than a serial number.
        let serial = typed.unwrap_or_else(|| name.chars().take(SERIAL_BYTES_MAX).collect());
        let printable = serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if serial.len() > SERIAL_BYTES_MAX || !printable {
            let hint = format!("use at most {SERIAL_BYTES_MAX} printable ASCII characters");
            self.problem(subject, format!("\"{serial}\" is not a valid serial number"), hint);
        }
        serial
    }

    pub(super) fn nets(&mut self, typed: Vec<NetSection>, machine: &str) -> Vec<NetConfig> {
        let nets: Vec<_> =
            typed.into_iter().enumerate().filter_map(|(index, net)| self.net(index, net, machine)).collect();
        let mut macs = HashSet::new();
        let mut ports = HashSet::new();
        for net in &nets {
            if !macs.insert(&net.mac) {
                self.problem(
                    "nets",
                    format!("two networks have the address {}", net.mac),
                    "give each a mac of its own",
                );
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
            self.problem(
                subject("forward"),
                "does not work with kind = \"tap\"",
                "remove it: the host's own network decides",
            );
        }
        if !is_tap && typed.ifname.is_some() {
            self.problem(subject("ifname"), "works only with kind = \"tap\"", "remove it, or set kind = \"tap\"");
        }
        if matches!(typed.kind.as_deref(), Some("tap" | "passt")) && typed.isolated.is_some() {
            self.problem(subject("isolated"), "works only with kind = \"user\"", "remove it, or set kind = \"user\"");
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
