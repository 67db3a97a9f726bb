//! The ways to run the same machine that the benches compare.
//!
//! All have the same kernel, CPU model, memory, network and image. They differ in the server of the disk, and in what is kept
//! after a crash.

mod domain;
mod guest;
mod hearth;
mod plain;
mod ports;
mod rig;

use std::path::Path;
use std::time::Duration;

use hearth_api::MachineStatus;
use hearth_vmtest::{Output, Result};

pub use domain::{DomainMachine, DomainOptions};
pub use guest::{FILES, Guest};
pub use hearth::{BOOT_SET_LIMIT, HearthMachine, HearthOptions, limited, ready, with_boot_set};
pub use ports::Ports;
pub use rig::{Rig, RigError, copy_root};

/// The software that runs the machine and serves its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    Hearth,
    /// Hearth, and the next guest brings its file cache back (`refill`).
    HearthRefill,
    /// QEMU alone, and the guest brings back the same pages as with `HearthRefill`, from the disk.
    ColdPrefetch,
    /// QEMU alone, `cache=none,aio=io_uring`, as is usual in production.
    QemuDirect,
    /// QEMU alone, `cache=writeback`: the host's page cache survives the guest, and costs memory beyond the guest's.
    QemuHostCache,
    /// QEMU alone, virtio-pmem with DAX: the guest reads the host's page cache and keeps none of its own.
    PmemDax,
    /// QEMU alone with the whole image in RAM: the limit for anything that serves a disk.
    Ram,
    /// A domain of libvirt, `cache=none,io=io_uring`.
    Domain,
    /// The same domain, attached to Hearth.
    AttachedDomain,
}

/// How a machine crashes, and what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A panic; the stack keeps what it can.
    Warm,
    /// A cold reboot, which keeps nothing; only for Hearth.
    Cold,
    /// QEMU is killed; the stack keeps what it can.
    Killed,
    /// `virsh reboot`: the guest shuts down in order, and its QEMU is reset; only for domains.
    Reboot,
}

impl Stack {
    /// All but domains. `ColdPrefetch` needs the cache map of `HearthRefill`, so it comes later.
    pub const ALL: [Stack; 7] = [
        Stack::Hearth,
        Stack::HearthRefill,
        Stack::ColdPrefetch,
        Stack::QemuDirect,
        Stack::QemuHostCache,
        Stack::PmemDax,
        Stack::Ram,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Stack::Hearth => "hearth",
            Stack::HearthRefill => "hearth-refill",
            Stack::ColdPrefetch => "cold-prefetch",
            Stack::QemuDirect => "qemu-direct",
            Stack::QemuHostCache => "qemu-host-cache",
            Stack::PmemDax => "pmem-dax",
            Stack::Ram => "ram",
            Stack::Domain => "libvirt",
            Stack::AttachedDomain => "attached",
        }
    }

    /// Whether a keeper runs the machine.
    pub fn is_hearth(self) -> bool {
        matches!(self, Stack::Hearth | Stack::HearthRefill)
    }

    /// Whether it is a domain of libvirt.
    pub fn is_domain(self) -> bool {
        matches!(self, Stack::Domain | Stack::AttachedDomain)
    }

    pub fn ways(self) -> &'static [Way] {
        match self {
            Stack::Hearth => &[Way::Warm, Way::Cold],
            Stack::Domain | Stack::AttachedDomain => &[Way::Reboot, Way::Warm],
            _ => &[Way::Warm],
        }
    }

    /// The side as rows name it: `hearth-warm`, `qemu-direct`.
    pub fn side(self, way: Way) -> String {
        match (self, way) {
            (Stack::Hearth, Way::Warm) => "hearth-warm".to_owned(),
            (Stack::Hearth, Way::Cold) => "hearth-cold".to_owned(),
            (Stack::Hearth, Way::Killed) => "hearth-killed".to_owned(),
            (Stack::Domain | Stack::AttachedDomain, Way::Reboot) => format!("{}-reboot", self.name()),
            (Stack::Domain | Stack::AttachedDomain, _) => format!("{}-panic", self.name()),
            _ => self.name().to_owned(),
        }
    }
}

/// A running machine of one of the stacks.
pub trait Machine {
    /// Runs a command in the guest.
    fn run_within(&self, command: &str, limit: Duration) -> Result<Output>;

    /// Waits until the agent takes commands in boot `count` of the guest.
    fn wait_agent(&self, count: usize) -> Result<()>;

    /// Ports of the guest's services on the host.
    fn ports(&self) -> Ports;

    /// Reports that the guest serves, which ends its boot.
    fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Crashes the guest, and returns once the old kernel is gone.
    fn crash(&self, way: Way) -> Result<()>;

    /// Bytes that the machine's processes have read from the disk, for hosts without a control group.
    fn own_read_bytes(&self) -> Option<u64>;

    /// Folder of the machine's memory under Hearth.
    fn memory_folder(&self) -> Option<&Path> {
        None
    }

    /// Pages and bytes of the youngest cache map, and the milliseconds that it took, under Hearth.
    fn cache_map(&self) -> Option<(u64, u64, f64)> {
        None
    }

    /// Milliseconds for which each reset of an attached domain was held, with the number of pages that were moved meanwhile.
    fn reset_pauses(&self) -> Result<Vec<(f64, u64)>> {
        Ok(Vec::new())
    }

    /// Hearth's status of the machine.
    fn status(&self) -> Result<Option<MachineStatus>> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_has_its_own_name() {
        let sides = Stack::ALL.iter().flat_map(|stack| stack.ways().iter().map(|way| stack.side(*way)));
        let mut sides: Vec<String> = sides.collect();
        assert_eq!(
            sides,
            [
                "hearth-warm",
                "hearth-cold",
                "hearth-refill",
                "cold-prefetch",
                "qemu-direct",
                "qemu-host-cache",
                "pmem-dax",
                "ram"
            ]
        );
        sides.dedup();
        assert_eq!(sides.len(), 8);
    }
}
