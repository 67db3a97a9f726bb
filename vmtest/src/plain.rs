//! A machine under QEMU alone, without Hearth: the baseline of benches, and the check that guest images and the console protocol
//! work without Hearth.

use std::ffi::OsString;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;

use tempfile::TempDir;

use crate::artifacts::{self, Boot, CPU_MODEL, Debian, Linux};
use crate::console::Line;
use crate::error::{Error, Result, at};
use crate::guest::{Drives, Guest};
use crate::processes;
use crate::qmp::Qmp;
use crate::slots::{self, Slot};

/// The builder of a plain machine; [`PlainVmBuilder::boot`] starts it.
pub struct PlainVmBuilder {
    name: String,
    boot: Result<Boot>,
    memory_mib: u64,
    cpus: u32,
    machine: String,
    cpu_model: String,
    accelerator: String,
    qemu: Option<PathBuf>,
    arguments: Vec<OsString>,
}

impl PlainVmBuilder {
    fn new(name: &str, boot: Result<Boot>) -> Self {
        Self {
            name: name.into(),
            boot,
            memory_mib: 512,
            cpus: 1,
            machine: "q35".into(),
            cpu_model: CPU_MODEL.into(),
            accelerator: "tcg".into(),
            qemu: None,
            arguments: Vec::new(),
        }
    }

    pub fn memory_mib(mut self, mib: u64) -> Self {
        self.memory_mib = mib;
        self
    }

    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// QEMU's `-machine`, with its properties.
    pub fn machine(mut self, machine: &str) -> Self {
        self.machine = machine.into();
        self
    }

    pub fn cpu_model(mut self, model: &str) -> Self {
        self.cpu_model = model.into();
        self
    }

    /// QEMU's `-accel`; emulation by default.
    pub fn accelerator(mut self, accelerator: &str) -> Self {
        self.accelerator = accelerator.into();
        self
    }

    pub fn qemu(mut self, program: &Path) -> Self {
        self.qemu = Some(program.into());
        self
    }

    /// Adds words at the end of the kernel's command line.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.boot = self.boot.map(|boot| Boot { cmdline: format!("{} {words}", boot.cmdline), ..boot });
        self
    }

    /// Adds any QEMU arguments.
    pub fn args<I: IntoIterator<Item: Into<OsString>>>(mut self, arguments: I) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Adds a raw image as a virtio disk, with further properties of `-drive`: `cache.direct=on,aio=io_uring`.
    pub fn drive(self, image: &Path, properties: &str) -> Self {
        let id = format!("drive{}", self.arguments.len());
        let comma = if properties.is_empty() { "" } else { "," };
        let drive = format!("file={},if=none,id={id},format=raw{comma}{properties}", image.display());
        self.args(["-drive", &drive, "-device", &format!("virtio-blk-pci,drive={id}")])
    }

    /// Starts QEMU and waits until the guest is ready.
    pub fn boot(self) -> Result<PlainVm> {
        let vm = self.start()?;
        vm.wait_boots(1)?;
        Ok(vm)
    }

    /// Starts QEMU without waiting.
    pub fn start(self) -> Result<PlainVm> {
        let slot = slots::take();
        let folder = tempfile::Builder::new().prefix("hearth-plain-").tempdir();
        let folder = at("create a folder in", &std::env::temp_dir(), folder)?;
        let socket =
            |name: &str| at("listen on", &folder.path().join(name), UnixListener::bind(folder.path().join(name)));
        let guest = Guest::open(&self.name, Line::Listen(socket("serial.sock")?))?;
        let qmp = at("listen on", folder.path(), Qmp::listen(&self.name, socket("qmp.sock")?))?;
        let log = folder.path().join("qemu.log");
        let output = at("create", &log, std::fs::File::create(&log))?;
        let mut command = self.command(folder.path())?;
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output).spawn();
        let child = Mutex::new(child.map_err(|source| Error::Start { program, source })?);
        Ok(PlainVm { child, guest, qmp, folder, _slot: slot })
    }

    fn command(self, folder: &Path) -> Result<Command> {
        let boot = self.boot?;
        let qemu = self.qemu.map_or_else(artifacts::qemu, Ok)?;
        let mut command = Command::new(&qemu);
        for folder in data_folders(&qemu) {
            command.arg("-L").arg(folder);
        }
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        command.args(["-accel", &self.accelerator, "-cpu", &self.cpu_model, "-machine", &self.machine]);
        command.args(["-m", &format!("{}M", self.memory_mib), "-smp", &self.cpus.to_string()]);
        command.arg("-kernel").arg(boot.kernel).arg("-initrd").arg(boot.initrd).args(["-append", &boot.cmdline]);
        command.args(["-chardev", &format!("socket,id=serial,path={}/serial.sock", folder.display())]);
        command.args(["-serial", "chardev:serial"]);
        command.args(["-chardev", &format!("socket,id=qmp,path={}/qmp.sock", folder.display())]);
        command.args(["-mon", "chardev=qmp,mode=control"]);
        // A random source for a quick boot, and a device that reports panics.
        command.args(["-device", "virtio-rng-pci", "-device", "pvpanic-pci"]);
        command.args(self.arguments);
        Ok(command)
    }
}

/// Folders with the firmware of a QEMU that was unpacked rather than installed.
fn data_folders(qemu: &Path) -> Vec<PathBuf> {
    let Some(usr) = qemu.parent().and_then(Path::parent) else { return Vec::new() };
    let folders = ["share/seabios", "share/qemu", "lib/ipxe/qemu"].map(|folder| usr.join(folder));
    folders.into_iter().filter(|folder| folder.is_dir()).collect()
}

/// A running plain machine; ended when dropped.
pub struct PlainVm {
    child: Mutex<Child>,
    guest: Guest,
    qmp: Qmp,
    folder: TempDir,
    _slot: Slot,
}

impl PlainVm {
    pub fn busybox(name: &str) -> PlainVmBuilder {
        PlainVmBuilder::new(name, artifacts::busybox(false))
    }

    pub fn busybox_on(name: &str, linux: Linux) -> PlainVmBuilder {
        PlainVmBuilder::new(name, artifacts::busybox_on(linux))
    }

    pub fn busybox_with_fio(name: &str) -> PlainVmBuilder {
        PlainVmBuilder::new(name, artifacts::busybox(true))
    }

    /// Needs a copy of [`Debian::root`] as its first [`PlainVmBuilder::drive`].
    pub fn debian(name: &str, which: Debian) -> PlainVmBuilder {
        PlainVmBuilder::new(name, which.boot())
    }

    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    pub fn pid(&self) -> u32 {
        self.child().id()
    }

    /// The machine's own folder, removed when the machine is dropped.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Waits until QEMU exits, after a power-off or, with `-no-reboot`, a reboot.
    pub fn wait_end(&self) -> Result<ExitStatus> {
        // QEMU exits soon after this event, so the wait below is short.
        self.qmp.wait_event("SHUTDOWN", crate::wait::patience(20))?;
        at("wait for", self.folder.path(), self.child().wait())
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn qemu_log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("qemu.log")).unwrap_or_default()
    }
}

impl Drives for PlainVm {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn check_alive(&self, waited: &str) -> Result<()> {
        let Some(status) = at("look after", self.folder.path(), self.child().try_wait())? else { return Ok(()) };
        let (what, console) = ("QEMU".into(), format!("{}\n{}", self.guest.console_tail(), self.qemu_log()));
        Err(self.guest.fail(Error::Ended { what, how: status.to_string(), waited: waited.into(), console }))
    }
}

impl Drop for PlainVm {
    fn drop(&mut self) {
        if std::thread::panicking() || self.guest.has_failed() {
            eprintln!("--- console\n{}\n--- QEMU\n{}", self.guest.console_tail(), self.qemu_log());
        }
        let child = self.child.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Fails only if it is dead already.
        let _ = child.kill();
        let _ = child.wait();
        processes::end_all(self.folder.path());
    }
}
