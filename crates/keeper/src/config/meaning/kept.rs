//! Boot set and NVRAM, which outlive an incarnation as the ember does.

use std::collections::HashSet;

use hearth_api::EmberMode;
use hearth_disk::nvram::pmem::ALIGN_BYTES;

use super::{MEMORY_BYTES_MIN, Resolver, state_folder};
use crate::config::file::{NvramSection, ReadySection, RemountSection};
use crate::config::quantity::{seconds, slack_bytes};
use crate::config::{
    DiskConfig, MirrorPolicy, NetConfig, NvramConfig, NvramMirror, PmemConfig, Protocol, ReadySign, RemountConfig,
};

const DEFAULT_REMOUNT_LIMIT: &str = "5%";
const REMOUNT_BYTES_MIN: u64 = 64 << 10;
const DEFAULT_READY_AFTER: &str = "2m";
/// systemd's limit.
const UNIT_BYTES_MAX: usize = 255;
const NVRAM_BYTES_STEP: u64 = 4096;

impl Resolver<'_> {
    pub(super) fn remount(
        &mut self,
        typed: RemountSection,
        memory_bytes: Option<u64>,
        ember: EmberMode,
        machine: &str,
        ready_sign: Option<ReadySign>,
    ) -> Option<RemountConfig> {
        if ember == EmberMode::Off {
            self.problem("remount", "does not work with `ember = \"off\"`", "remove one of them");
        }
        let limit = typed.limit.as_deref().unwrap_or(DEFAULT_REMOUNT_LIMIT);
        let limit_bytes = match slack_bytes(limit, memory_bytes.unwrap_or(MEMORY_BYTES_MIN)) {
            Ok(bytes) if bytes >= REMOUNT_BYTES_MIN => Some(bytes),
            Ok(_) => {
                self.problem("remount.limit", format!("{limit} is too small"), "give it 64KiB or more");
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
        let persist = typed.persist.unwrap_or(false);
        if !persist && typed.persist_file.is_some() {
            self.problem("remount.persist_file", "works only with persist = true", "remove it, or set persist = true");
        }
        let persist_file = persist.then(|| self.path_or(typed.persist_file, || state_folder(machine).join("boot-set")));
        Some(RemountConfig { limit_bytes: limit_bytes?, ready_after_s: ready_after_s?, ready_sign, persist_file })
    }

    pub(super) fn ready_sign(
        &mut self,
        typed: ReadySection,
        guest_agent: bool,
        nets: &[NetConfig],
    ) -> Option<ReadySign> {
        match (typed.port, typed.unit) {
            (Some(_), Some(_)) => {
                self.problem("remount.ready", "has both a port and a unit", "remove one of them");
                None
            }
            (None, Some(unit)) => self.ready_unit(unit, guest_agent),
            // The unit's error was already reported.
            (None, None) if self.blamed.contains("remount.ready.unit") => None,
            (port, None) => self.ready_port(port, nets),
        }
    }

    fn ready_port(&mut self, port: Option<u16>, nets: &[NetConfig]) -> Option<ReadySign> {
        let example = "ready = { port = 8080 }, or ready = { unit = \"web.service\" }";
        let port = self.required(port, "remount.ready.port", example)?;
        let mut forwards = nets.iter().flat_map(|net| net.backend.forward().iter().copied());
        let found = forwards.find(|forward| forward.protocol == Protocol::Tcp && forward.host_port == port);
        if found.is_none() {
            let hint = "forward it to a guest port: forward = [\"127.0.0.1:8080:80\"] below [[nets]]";
            self.problem("remount.ready.port", format!("port {port} is not forwarded into the guest"), hint);
        }
        found.map(ReadySign::Port)
    }

    fn ready_unit(&mut self, unit: String, guest_agent: bool) -> Option<ReadySign> {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || ":-_.\\@".contains(letter);
        if unit.is_empty() || unit.len() > UNIT_BYTES_MAX || unit.starts_with('-') || !unit.chars().all(plain) {
            let hint = "write it as systemctl does, for example \"web.service\"";
            self.problem("remount.ready.unit", format!("\"{unit}\" is not a systemd unit name"), hint);
            return None;
        }
        if !guest_agent {
            let hint = "add guest_agent = true at the top of the file; qemu-guest-agent must run in the guest";
            self.problem("remount.ready.unit", "needs a channel to the guest agent", hint);
            return None;
        }
        Some(ReadySign::Unit(unit))
    }

    /// NVRAM devices, as disks and as persistent memory.
    pub(super) fn nvram(
        &mut self,
        typed: Vec<NvramSection>,
        disks: &[DiskConfig],
    ) -> (Vec<NvramConfig>, Vec<PmemConfig>) {
        let (mut nvram, mut pmem) = (Vec::new(), Vec::new());
        for (index, typed) in typed.into_iter().enumerate() {
            if typed.device.as_deref() == Some("pmem") {
                pmem.extend(self.pmem_device(index, typed));
            } else {
                nvram.extend(self.nvram_device(index, typed));
            }
        }
        let of_nvram = nvram.iter().map(|device| (&device.name, device.mirror.as_ref().map(|mirror| &mirror.file)));
        let devices = of_nvram.chain(pmem.iter().map(|device| (&device.name, device.mirror_file.as_ref())));
        let mut names: HashSet<&String> = disks.iter().map(|disk| &disk.name).collect();
        let mut files = HashSet::new();
        for (name, mirror) in devices {
            if !names.insert(name) {
                self.problem("nvram", format!("two devices are named {name}"), "give each a name of its own");
            }
            if let Some(mirror) = mirror.filter(|mirror| !files.insert(mirror.to_path_buf())) {
                let file = mirror.display();
                self.problem("nvram", format!("two devices mirror to {file}"), "give each a mirror of its own");
            }
        }
        (nvram, pmem)
    }

    fn pmem_device(&mut self, index: usize, typed: NvramSection) -> Option<PmemConfig> {
        let subject = |key: &str| format!("nvram[{index}].{key}");
        if typed.serial.is_some() {
            self.problem(subject("serial"), "does not work with device = \"pmem\"", "remove it");
        }
        if typed.mirror.as_deref() == Some("async") {
            let hint = "use \"sync\", or device = \"disk\"";
            self.problem(subject("mirror"), "cannot be \"async\" with device = \"pmem\"", hint);
            return None;
        }
        let NvramConfig { name, bytes, mirror, .. } =
            self.nvram_device(index, NvramSection { serial: None, ..typed })?;
        if !bytes.is_multiple_of(ALIGN_BYTES) {
            self.problem(subject("size"), "is not a multiple of 2 MiB, as pmem requires", "round it");
        }
        Some(PmemConfig { name, bytes, mirror_file: mirror.map(|mirror| mirror.file) })
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
                    self.problem(subject("mirror_file"), "works only with a mirror", hint);
                }
                None
            }
        };
        Some(NvramConfig { name, bytes: bytes?, serial, mirror })
    }
}
