//! Programs that tests drive and images that guests boot: their paths, or an error that says how to make them.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A kernel, its initial RAM disk and its command line.
#[derive(Clone, Debug)]
pub struct Boot {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub cmdline: String,
}

/// The console goes to the serial line. The kernel shows its errors, and QEMU handles its panic. `no_timer_check`: the timer has
/// to tick ten times while the kernel counts, and on a host so busy that QEMU gets no processor time the kernel would panic
/// ("IO-APIC + timer doesn't work"). Under KVM Linux skips this check by itself.
const CMDLINE: &str = "console=ttyS0 quiet no_timer_check";

/// The busybox guest skips its kernel's cipher self-tests, which are half of the instructions of a boot.
const BUSYBOX_CMDLINE: &str = "console=ttyS0 quiet no_timer_check cryptomgr.notests";

/// The busybox guest. `with_fio` adds fio, which takes 90 MiB more of the guest's memory.
pub fn busybox(with_fio: bool) -> Result<Boot> {
    let initrd = if with_fio { "initrd-fio" } else { "initrd" };
    boot("busybox", initrd, BUSYBOX_CMDLINE.into())
}

/// The busybox guest with qemu-guest-agent installed but not started.
pub fn busybox_with_agent() -> Result<Boot> {
    boot("busybox", "initrd-agent", BUSYBOX_CMDLINE.into())
}

/// The busybox guest with driver and tool of btrfs.
pub fn busybox_with_btrfs(linux: Linux) -> Result<Boot> {
    boot(&format!("busybox{}", linux.suffix()), "initrd-btrfs", BUSYBOX_CMDLINE.into())
}

/// The busybox guest on Linux 6.12.
pub fn busybox_on_linux_6_12() -> Result<Boot> {
    busybox_on(Linux::Newer)
}

/// The kernels that guests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linux {
    /// 6.1, from Debian 12.
    Stable,
    /// 6.12, from Debian 12's backports.
    Newer,
}

impl Linux {
    /// A file that `make test-vmcore` made for this kernel: `vmlinux` with debug symbols, or `hearth_fault.ko`.
    pub fn vmcore_kernel(self, file: &str) -> PathBuf {
        vmcore(&format!("kernel{}/{file}", self.suffix()))
    }

    fn suffix(self) -> &'static str {
        match self {
            Linux::Stable => "",
            Linux::Newer => "-6.12",
        }
    }
}

/// The busybox guest on the given kernel.
pub fn busybox_on(linux: Linux) -> Result<Boot> {
    boot(&format!("busybox{}", linux.suffix()), "initrd", BUSYBOX_CMDLINE.into())
}

/// A file that `make test-vmcore` made.
pub fn vmcore(file: &str) -> PathBuf {
    root().join("target/vmcore").join(file)
}

/// The disk image of a busybox guest that is itself a host with KVM. `make test-nested` makes it.
pub fn nested_host() -> Result<PathBuf> {
    let path = root().join("target/nested/host.img");
    if path.is_file() { Ok(path) } else { Err(Error::NoNestedHost { path }) }
}

/// The Debian guests. Each has its agent on the serial console and its root on the first disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Debian {
    /// A web server with 512 files of 1 MiB.
    Web,
    /// The same, and PostgreSQL with a table of 300 MiB; `cargo xtask bench restore` makes it.
    Database,
    /// The same with 512 files of 4 MiB and a table of 1 GiB; `cargo xtask bench warm-reboot` makes it.
    Large,
}

impl Debian {
    fn folder(self) -> &'static str {
        match self {
            Debian::Web => "debian",
            Debian::Database => "debian-database",
            Debian::Large => "debian-large",
        }
    }

    /// Memory that can cache all of its files.
    pub fn memory_mib(self) -> u64 {
        if self == Debian::Large { 4096 } else { 1024 }
    }

    pub fn boot(self) -> Result<Boot> {
        boot(self.folder(), "initrd", format!("{CMDLINE} root=/dev/vda rw systemd.show_status=false hearth.agent"))
    }

    /// The root disk. Copy it: tests share it.
    pub fn root(self) -> Result<PathBuf> {
        existing(guest().join(self.folder()).join("root.img"))
    }
}

/// The guest's `probe`, which also runs on the host.
pub fn probe() -> Result<PathBuf> {
    existing(guest().join("probe/probe"))
}

/// The folder for the saves of booted guests.
pub(crate) fn saved_guests() -> PathBuf {
    root().join("target/saved-guests")
}

/// The binary under test.
pub fn hearth() -> Result<PathBuf> {
    let path = match std::env::var_os("HEARTH_BIN") {
        Some(path) => PathBuf::from(path),
        None => beside_this_binary("hearth"),
    };
    if path.is_file() { Ok(path) } else { Err(Error::NoHearth { path }) }
}

/// QEMU's program: `HEARTH_QEMU` if set, the unpacked newer one with `QEMU=10`, otherwise the installed one.
pub fn qemu() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("HEARTH_QEMU") {
        return Ok(path.into());
    }
    let installed = PathBuf::from("qemu-system-x86_64");
    if std::env::var("QEMU").as_deref() != Ok("10") {
        return Ok(installed);
    }
    let path = root().join("target/qemu10/usr/bin/qemu-system-x86_64");
    match path.is_file() {
        true => Ok(path),
        false if is_10_or_later(&installed) => Ok(installed),
        false => Err(Error::NoQemu10 { path }),
    }
}

/// The newer QEMU that `cargo xtask qemu10` unpacks, or the installed one if it is as new.
pub fn qemu_10() -> Result<PathBuf> {
    let path = root().join("target/qemu10/usr/bin/qemu-system-x86_64");
    let installed = installed_qemu()?;
    match path.is_file() {
        true => Ok(path),
        false if is_10_or_later(&installed) => Ok(installed),
        false => Err(Error::NoQemu10 { path }),
    }
}

/// The absolute path of the installed QEMU.
pub fn installed_qemu() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|folder| folder.join("qemu-system-x86_64")).find(|path| path.is_file());
    found.ok_or(Error::NoArtifact { path: "qemu-system-x86_64".into() })
}

/// The CPU model of all guests. Emulated `rep movsb` copies page-cache reads 3.6 times slower than real processors do, and
/// QEMU 7.2's emulation of cmpxchg16b crashes Linux 6.12.
pub const CPU_MODEL: &str = "max,-erms,-fsrm,-cx16";

fn boot(folder: &str, initrd: &str, cmdline: String) -> Result<Boot> {
    let folder = guest().join(folder);
    Ok(Boot { kernel: existing(folder.join("vmlinuz"))?, initrd: existing(folder.join(initrd))?, cmdline })
}

fn is_10_or_later(qemu: &Path) -> bool {
    let said = std::process::Command::new(qemu).arg("--version").output().map(|output| output.stdout);
    let said = said.unwrap_or_default();
    let version = String::from_utf8_lossy(&said).split_whitespace().nth(3).map(str::to_owned);
    version.and_then(|version| version.split('.').next()?.parse().ok()).is_some_and(|major: u32| major >= 10)
}

fn existing(path: PathBuf) -> Result<PathBuf> {
    if path.is_file() { Ok(path) } else { Err(Error::NoArtifact { path }) }
}

/// Finds a binary of the workspace, in `PROFILE/`; test binaries are in `PROFILE/deps/`.
fn beside_this_binary(name: &str) -> PathBuf {
    let this = std::env::current_exe().unwrap_or_default();
    let profile = this.ancestors().skip(1).find(|folder| folder.file_name().is_some_and(|name| name != "deps"));
    profile.unwrap_or(Path::new(".")).join(name)
}

fn guest() -> PathBuf {
    root().join("target/guest")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("vmtest is a folder of the checkout")
}
