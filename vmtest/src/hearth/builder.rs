//! What a machine under test is made of, and the `machine.toml` that says so.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::TestVm;
use super::files::Files;
use crate::artifacts::{self, Boot, CPU_MODEL};
use crate::disk::Disk;
use crate::error::Result;
use crate::guest::Output;
use crate::net::free_port;
use crate::slots;

pub struct TestVmBuilder {
    name: String,
    boot: Result<Boot>,
    settings: Table,
    crash: Table,
    disks: Vec<Result<Disk>>,
    nets: Vec<Table>,
    http_port: Option<u16>,
    /// Of the machine that this one stands beside.
    runtime_root: Option<PathBuf>,
}

impl TestVmBuilder {
    pub(super) fn new(name: &str, boot: Result<Boot>) -> Self {
        let builder = Self {
            name: name.into(),
            boot,
            settings: Table::new(),
            crash: Table::new(),
            disks: Vec::new(),
            nets: Vec::new(),
            http_port: None,
            runtime_root: None,
        };
        // Emulation is what is everywhere; a test of KVM says so itself.
        builder.memory_mib(512).setting("cpu_model", CPU_MODEL).setting("accelerator", "tcg")
    }

    pub(super) fn debian(name: &str) -> Self {
        let mut builder = Self::new(name, artifacts::debian()).memory_mib(1024);
        builder.disks.push(artifacts::debian_root().map(|root| Disk::copy_of(&root)));
        builder
    }

    pub(super) fn debian_database(name: &str) -> Self {
        let mut builder = Self::new(name, artifacts::debian_database()).memory_mib(1024);
        builder.disks.push(artifacts::debian_database_root().map(|root| Disk::copy_of(&root)));
        builder
    }

    pub fn memory_mib(self, mib: u64) -> Self {
        self.setting("memory", format!("{mib}MiB"))
    }

    pub fn cpus(self, cpus: i64) -> Self {
        self.setting("cpus", cpus)
    }

    /// Adds a disk: the guest sees them in order as vda, vdb, ...
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(Ok(disk));
        self
    }

    /// Gives the Debian guest's own disk, the first one, a setting of `[[disks]]`.
    pub fn root_setting(mut self, key: &str, value: impl Into<Value>) -> Self {
        if let Some(root) = self.disks.first_mut() {
            let made = std::mem::replace(root, Ok(Disk::empty(0)));
            *root = made.map(|disk| disk.setting(key, value));
        }
        self
    }

    /// Gives the Debian guest another disk as its own, the first one: a copy of the root that stays where it is.
    pub fn root(mut self, disk: Disk) -> Self {
        match self.disks.first_mut() {
            Some(root) => *root = Ok(disk),
            None => self.disks.push(Ok(disk)),
        }
        self
    }

    /// No ember: every incarnation starts cold.
    pub fn without_ember(self) -> Self {
        self.setting("ember", "off")
    }

    /// A network device whose host port [`TestVm::http_port`] leads to the guest's port 80.
    pub fn http(mut self) -> Self {
        let port = free_port();
        self.http_port = Some(port);
        let forward = Value::Array(vec![format!("127.0.0.1:{port}:80").into()]);
        self.net([("kind", Value::from("user")), ("forward", forward)])
    }

    /// The host's port of [`Self::http`].
    pub fn http_port(&self) -> Option<u16> {
        self.http_port
    }

    /// In the same runtime root as another machine, so that one command reaches both. It must not outlive that one, and
    /// takes no slot of its own: a test that waited for a second slot could wait for ever.
    pub fn beside(mut self, other: &TestVm) -> Self {
        self.runtime_root = Some(other.files.runtime_root());
        self
    }

    /// One `[[nets]]` entry.
    pub fn net<'a>(mut self, entry: impl IntoIterator<Item = (&'a str, Value)>) -> Self {
        self.nets.push(entry.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
        self
    }

    /// Words for the kernel's command line, after those that are always there.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.boot = self.boot.map(|boot| Boot { cmdline: format!("{} {words}", boot.cmdline), ..boot });
        self
    }

    /// What the busybox guest runs before it is ready, as an init system does. It lies on a disk behind those that were added.
    pub fn boot_script(self, script: &str) -> Self {
        let letter = char::from(b'a' + self.disks.len() as u8);
        self.disk(Disk::script(script)).cmdline(&format!("boot_script=vd{letter}"))
    }

    /// Crashes are dumped into the machine's own folder ([`TestVm::dump_folder`]) beside the recovery. Without this they
    /// are not dumped, but only recovered from.
    pub fn dumps(self) -> Self {
        self.setting("on_panic", "dump+recover")
    }

    /// A key of `[crash]`.
    pub fn crash_setting(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.crash.insert(key.into(), value.into());
        self
    }

    /// Any other key at the top of `machine.toml`.
    pub fn setting(mut self, key: &str, value: impl Into<Value>) -> Self {
        assert_ne!(key, "crash", "`crash_setting` is for that: this one would be overwritten without a word");
        self.settings.insert(key.into(), value.into());
        self
    }

    /// A machine type that both of the tests' QEMUs have, whichever of them starts the machine.
    pub fn for_both_qemus(self) -> Self {
        self.setting("machine_type", "pc-q35-7.2")
    }

    /// Starts the keeper and waits until the first incarnation's guest is ready.
    pub fn boot(self) -> Result<TestVm> {
        let vm = self.start()?;
        vm.wait_incarnation(1)?;
        Ok(vm)
    }

    /// Starts the keeper without waiting.
    pub fn start(self) -> Result<TestVm> {
        let slot = self.runtime_root.is_none().then(slots::take);
        let (name, http_port) = (self.name.clone(), self.http_port);
        let files = self.prepare()?;
        TestVm::launch(&name, files, http_port, slot)
    }

    /// `hearth check` of the configuration, without starting anything.
    pub fn check(self) -> Result<Output> {
        let files = self.prepare()?;
        files.cli(&["check", &files.config().display().to_string()])
    }

    /// `hearth run` of a machine that is expected to be refused: waits for the keeper's end.
    pub fn run_to_the_end(self) -> Result<Output> {
        let files = self.prepare()?;
        let output = files.cli(&["run", &files.config().display().to_string()]);
        files.end_processes();
        output
    }

    /// Makes images and `machine.toml`.
    fn prepare(self) -> Result<Files> {
        let files = Files::make(&self.name, self.runtime_root)?;
        let mut config = Table::new();
        config.insert("name".into(), self.name.clone().into());
        config.insert("memory_folder".into(), text(files.memory_folder()));
        let qemu = artifacts::qemu()?;
        if qemu.is_absolute() {
            config.insert("qemu".into(), text(&qemu));
        }
        config.insert("on_panic".into(), "recover".into());
        config.extend(self.settings);
        let mut crash = Table::new();
        crash.insert("dump_folder".into(), text(&files.dump_folder()));
        crash.insert("min_free".into(), "1MiB".into());
        crash.extend(self.crash);
        config.insert("crash".into(), crash.into());
        // A test of firmware has said itself what to boot from.
        if !config.contains_key("boot") {
            config.insert("boot".into(), boot_section(self.boot?).into());
        }
        let mut disks = Vec::new();
        for (index, disk) in self.disks.into_iter().enumerate() {
            let disk = disk?;
            let image = disk.make(files.folder(), index)?;
            disks.push(Value::from(disk.entry(&image)));
        }
        config.insert("disks".into(), disks.into());
        config.insert("nets".into(), self.nets.into_iter().map(Value::from).collect::<Vec<_>>().into());
        files.write_config(&config)?;
        Ok(files)
    }
}

fn boot_section(boot: Boot) -> Table {
    [("kernel", text(&boot.kernel)), ("initrd", text(&boot.initrd)), ("cmdline", boot.cmdline.into())]
        .map(|(key, value)| (key.to_owned(), value))
        .into_iter()
        .collect()
}

fn text(path: &Path) -> Value {
    path.display().to_string().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_says_what_was_asked_for() {
        let builder = TestVm::busybox("t").disk(Disk::empty(1).limited(70, 200).setting("serial", "s"));
        let files = builder.setting("on_panic", "pause").http().prepare().unwrap();
        let config: Table = std::fs::read_to_string(files.config()).unwrap().parse().unwrap();
        assert_eq!(config["on_panic"].as_str(), Some("pause"));
        assert_eq!(config["memory"].as_str(), Some("512MiB"));
        let disk = &config["disks"][0];
        assert_eq!((disk["iops"].as_integer(), disk["serial"].as_str()), (Some(200), Some("s")));
        assert!(Path::new(disk["path"].as_str().unwrap()).is_file());
        assert!(config["nets"][0]["forward"][0].as_str().unwrap().ends_with(":80"));
    }
}
