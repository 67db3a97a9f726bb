//! The machine under Hearth.

use std::path::Path;
use std::time::Duration;

use hearth_api::MachineStatus;
use hearth_vmtest::{Disk, Drives, Output, Result, TestVm, TestVmBuilder, event};
use toml::Table;

use super::{Guest, Machine, Ports, Way};
use crate::host::profile::DiskRate;

pub struct HearthOptions<'a> {
    pub guest: Guest,
    pub image: &'a Path,
    /// As in `machine.toml`: `auto`, `kvm`, `tcg`.
    pub accelerator: &'a str,
    /// Hearth's own limit, for hosts without a control group.
    pub rate: Option<DiskRate>,
    /// Whether memory survives a guest: the ember, and the boot set (`[remount]`).
    pub warm: bool,
    /// Whether the next guest brings its file cache back.
    pub refill: bool,
}

/// Limit of every boot set; the mounts of 400 volumes read less than two thirds of it.
pub const BOOT_SET_LIMIT: &str = "128MiB";

/// Adds a boot set. The boot ends when the bench calls `ready`.
pub fn with_boot_set(builder: TestVmBuilder) -> TestVmBuilder {
    let remount = [("limit", BOOT_SET_LIMIT), ("ready_after", "1d")].map(|(key, value)| (key.to_owned(), value.into()));
    builder.setting("remount", remount.into_iter().collect::<Table>())
}

/// Applies Hearth's own limit to a disk, on hosts without a control group.
pub fn limited(disk: Disk, rate: Option<DiskRate>) -> Disk {
    match rate {
        Some(rate) => disk.limited(rate.mib_per_second as i64, rate.iops as i64),
        None => disk,
    }
}

pub fn ready(vm: &TestVm) -> Result<()> {
    vm.cli(&["ready", vm.name()]).map(drop)
}

pub struct HearthMachine {
    vm: TestVm,
    ports: Ports,
    has_boot_set: bool,
}

impl HearthMachine {
    pub fn start(options: &HearthOptions<'_>) -> Result<Self> {
        let ports = Ports::free();
        let builder = options.guest.machine(limited(Disk::in_place(options.image), options.rate));
        let builder = ports.under_hearth(builder);
        let builder = if options.warm { with_boot_set(builder) } else { builder.without_ember() };
        let builder = if options.refill { builder.setting("refill", "on") } else { builder };
        let vm = builder.setting("accelerator", options.accelerator).start()?;
        Ok(HearthMachine { vm, ports, has_boot_set: options.warm })
    }

    pub fn machine_status(&self) -> Result<MachineStatus> {
        self.vm.status()
    }
}

impl Machine for HearthMachine {
    fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        self.vm.run_within(command, limit)
    }

    fn wait_agent(&self, count: usize) -> Result<()> {
        self.vm.wait_boots(count).map(drop)
    }

    fn ports(&self) -> Ports {
        self.ports
    }

    fn crash(&self, way: Way) -> Result<()> {
        let incarnation = self.machine_status()?.incarnation;
        match way {
            Way::Warm | Way::Reboot => self.vm.panic()?,
            Way::Killed => self.vm.kill_qemu()?,
            Way::Cold => drop(self.vm.cli(&["reboot", self.vm.name(), "--cold", "--force"])?),
        }
        let ended = event!(|event| IncarnationEnded if event.incarnation == incarnation);
        self.vm.wait_event(&format!("end of incarnation {incarnation}"), ended).map(drop)
    }

    fn ready(&self) -> Result<()> {
        if self.has_boot_set { ready(&self.vm) } else { Ok(()) }
    }

    fn own_read_bytes(&self) -> Option<u64> {
        Some(self.machine_status().ok()?.disks.iter().map(|disk| disk.read_image_bytes).sum())
    }

    fn memory_folder(&self) -> Option<&Path> {
        Some(self.vm.memory_folder())
    }

    fn cache_map(&self) -> Option<(u64, u64, f64)> {
        let read = event!(CacheMapRead { pages, bytes, duration_ms, .. } => (pages, bytes, duration_ms));
        self.vm.events().iter().filter_map(read).next_back()
    }

    fn status(&self) -> Result<Option<MachineStatus>> {
        self.machine_status().map(Some)
    }
}
