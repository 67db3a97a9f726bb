//! The machine under QEMU alone. A panic resets the guest in place (`panic=-1`), which is QEMU's quickest way back.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_vmtest::{Drives, Output, PlainVm, Result, patience};

use super::{Guest, Machine, Ports, Stack, Way};
use crate::host::profile::DiskRate;

/// QEMU's event when it has reset the machine.
const RESET: &str = "RESET";

pub struct PlainMachine {
    vm: PlainVm,
    ports: Ports,
}

pub struct PlainOptions<'a> {
    pub guest: Guest,
    pub stack: Stack,
    pub image: &'a Path,
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
    /// QEMU's own throttling, for hosts without a control group.
    pub rate: Option<DiskRate>,
    /// Contents of the disk on which `hearth-refill` finds a cache map.
    pub map: Option<PathBuf>,
}

impl PlainMachine {
    pub fn start(options: &PlainOptions<'_>) -> Result<Self> {
        let PlainOptions { guest, stack, image, rate, .. } = *options;
        let ports = Ports::free();
        let builder = guest.plain().accelerator(options.accelerator).cmdline("panic=-1");
        // Without these, QEMU would power off at pvpanic's report.
        let builder = builder.args(["-action", "panic=none"]);
        let builder = ports.under_qemu(builder);
        let builder = match stack {
            Stack::PmemDax => {
                builder.cmdline("root=/dev/pmem0 rootflags=dax=always").args(pmem_arguments(guest, image)?)
            }
            _ => builder.drive(image, &drive_properties(stack, rate)),
        };
        let builder = match &options.map {
            Some(map) => builder.args(map_arguments(map)),
            None => builder,
        };
        Ok(PlainMachine { vm: builder.start()?, ports })
    }
}

fn drive_properties(stack: Stack, rate: Option<DiskRate>) -> String {
    let cache = match stack {
        Stack::QemuDirect | Stack::ColdPrefetch => "cache=none,aio=io_uring",
        _ => "cache=writeback",
    };
    let throttling = rate.map_or_else(String::new, DiskRate::qemu_throttling);
    format!("{cache}{throttling}")
}

/// Arguments for a disk with a cache map, behind all others.
fn map_arguments(map: &Path) -> [String; 4] {
    let drive = format!("file={},if=none,id=map,format=raw,read-only=on", map.display());
    let device = "virtio-blk-pci,drive=map,serial=hearth-cache-map";
    ["-drive", &drive, "-device", device].map(str::to_owned)
}

/// Arguments for the image as persistent memory, for which the guest needs an address range above its RAM.
fn pmem_arguments(guest: Guest, image: &Path) -> Result<Vec<String>> {
    let bytes = std::fs::metadata(image).map(|metadata| metadata.len()).map_err(|source| {
        hearth_vmtest::Error::File { what: "cannot find the size of", path: image.to_owned(), source }
    })?;
    let memory = format!("memory-backend-file,id=pmem,share=on,mem-path={},size={bytes}", image.display());
    let room = format!("{}M,slots=1,maxmem={}M", guest.memory_mib(), guest.memory_mib() + (bytes >> 20) + 1024);
    let device = "virtio-pmem-pci,memdev=pmem,id=nv";
    Ok(["-m", &room, "-object", &memory, "-device", device].map(str::to_owned).to_vec())
}

impl Machine for PlainMachine {
    fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        self.vm.run_within(command, limit)
    }

    fn wait_agent(&self, count: usize) -> Result<()> {
        self.vm.wait_boots(count).map(drop)
    }

    fn ports(&self) -> Ports {
        self.ports
    }

    fn crash(&self, _: Way) -> Result<()> {
        let resets = self.vm.qmp().events().iter().filter(|name| *name == RESET).count();
        self.vm.panic()?;
        // Until then the kernel that panics may still serve, on its other processor.
        self.vm.qmp().wait_nth_event(RESET, resets + 1, patience(10)).map(drop)
    }

    fn own_read_bytes(&self) -> Option<u64> {
        let counters = std::fs::read_to_string(format!("/proc/{}/io", self.vm.pid())).ok()?;
        counters.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::profile::Profile;

    #[test]
    fn stacks_have_own_cache_mode_and_equal_limits() {
        let rate = Profile::Paper.rate();
        let direct = drive_properties(Stack::QemuDirect, rate);
        assert!(direct.starts_with("cache=none,aio=io_uring,throttling.bps-read=73400320,"), "{direct}");
        assert!(direct.ends_with("throttling.iops-write=200"), "{direct}");
        assert_eq!(drive_properties(Stack::QemuHostCache, None), "cache=writeback");
        assert_eq!(drive_properties(Stack::Ram, None), "cache=writeback");
    }

    #[test]
    fn missing_image_is_named() {
        let text = pmem_arguments(Guest::Debian, Path::new("/no/image")).unwrap_err().to_string();
        assert_eq!(text, "cannot find the size of /no/image");
    }
}
