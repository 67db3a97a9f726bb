//! The machine as a domain of libvirt: as libvirt runs it, or attached to Hearth.

use std::path::Path;
use std::time::Duration;

use hearth_api::{EventKind, MachineStatus};
use hearth_vmtest::libvirt::{Domain, DomainDisk, LibvirtVm};
use hearth_vmtest::{Drives, Output, Result};

use super::{Guest, Machine, Ports, Way};
use crate::host::profile::DiskRate;
use crate::load::http::Client;

const NAME: &str = "bench";
/// A guest that still serves answers within this time.
const ANSWER: Duration = Duration::from_millis(250);

pub struct DomainOptions<'a> {
    pub guest: Guest,
    pub image: &'a Path,
    /// `<iotune>` of libvirt, which `hearth attach` turns into limits of Hearth's own.
    pub rate: Option<DiskRate>,
    pub is_attached: bool,
}

pub struct DomainMachine {
    vm: LibvirtVm,
    ports: Ports,
    is_attached: bool,
}

impl DomainMachine {
    /// Defines and starts the domain. Needs root.
    pub fn start(options: &DomainOptions<'_>) -> Result<Self> {
        let DomainOptions { guest, image, rate, is_attached } = *options;
        let ports = Ports::free();
        let mut boot = guest.boot()?;
        boot.cmdline += " panic=-1";
        let limits = rate.map(|rate| (rate.mib_per_second, rate.iops));
        let vm = LibvirtVm::define_domain(Domain {
            name: NAME,
            boot: Some(boot),
            memory_mib: guest.memory_mib(),
            cpus: guest.cpus(),
            on_crash: "restart",
            disks: &[DomainDisk { target: "vda", image, format: "raw", limits }],
            forwards: &ports.forwards(),
            has_agent: false,
        })?;
        let vm = vm.expect("this bench runs as root");
        if is_attached {
            // The other side has no dump either.
            vm.attach_with("on_panic = \"recover\"", "")?;
            vm.start_host()?;
        }
        vm.virsh("start", &[])?;
        Ok(Self { vm, ports, is_attached })
    }

    /// Waits until the guest does not answer.
    fn wait_silent(&self) -> Result<()> {
        let mut client = Client::new(self.ports.web());
        self.vm.wait_until("the service has ended", || Ok(client.get("/", ANSWER, &|| false).is_err()))
    }
}

impl Machine for DomainMachine {
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
        match way {
            Way::Reboot => drop(self.vm.virsh("reboot", &[])?),
            Way::Warm | Way::Cold | Way::Killed => self.vm.panic()?,
        }
        self.wait_silent()
    }

    fn own_read_bytes(&self) -> Option<u64> {
        if let Some(status) = self.status().ok()? {
            return Some(status.disks.iter().map(|disk| disk.read_image_bytes).sum());
        }
        let counters = self.vm.must(&["cat", &format!("/proc/{}/io", self.vm.qemu_pid().ok()?)], "").ok()?;
        counters.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
    }

    fn status(&self) -> Result<Option<MachineStatus>> {
        self.is_attached.then(|| self.vm.status()).transpose()
    }

    fn reset_pauses(&self) -> Result<Vec<(f64, u64)>> {
        if !self.is_attached {
            return Ok(Vec::new());
        }
        let pause = |event: &EventKind| match event {
            EventKind::BlocksRescued { pages, duration_ms, .. } => Some((*duration_ms, *pages)),
            _ => None,
        };
        Ok(self.vm.events()?.iter().filter_map(|record| pause(&record.event)).collect())
    }
}
