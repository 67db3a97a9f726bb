//! The builder of a machine under test, and of its `machine.toml`.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::TestVm;
use super::files::Files;
use super::saved::SavedGuest;
use crate::artifacts::{self, Boot, CPU_MODEL, Debian};
use crate::disk::Disk;
use crate::error::Result;
use crate::guest::Output;
use crate::net::free_port;
use crate::slots;

/// Keys that neither QEMU nor the guest knows of, so that a restored machine may have other values than the saved one. The keys of
/// `[crash]` are of this kind too.
const HOST_KEYS: [&str; 1] = ["on_panic"];

pub struct TestVmBuilder {
    name: String,
    boot: Result<Boot>,
    settings: Table,
    crash: Table,
    disks: Vec<Result<Disk>>,
    nets: Vec<Table>,
    http_port: Option<u16>,
    /// The runtime root of the machine that this one is beside.
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
        // Emulation works everywhere; a test of KVM asks for it.
        builder.memory_mib(512).setting("cpu_model", CPU_MODEL).setting("accelerator", "tcg")
    }

    pub(super) fn debian(name: &str, which: Debian) -> Self {
        let mut builder = Self::new(name, which.boot()).memory_mib(which.memory_mib());
        builder.disks.push(which.root().map(|root| Disk::copy_of(&root)));
        builder
    }

    pub fn memory_mib(self, mib: u64) -> Self {
        self.setting("memory", format!("{mib}MiB"))
    }

    pub fn cpus(self, cpus: i64) -> Self {
        self.setting("cpus", cpus)
    }

    /// Adds a disk. The guest numbers them in order: vda, vdb, ...
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(Ok(disk));
        self
    }

    /// Sets a key of `[[disks]]` on the Debian guest's own disk, the first one.
    pub fn root_setting(mut self, key: &str, value: impl Into<Value>) -> Self {
        if let Some(root) = self.disks.first_mut() {
            let made = std::mem::replace(root, Ok(Disk::empty(0)));
            *root = made.map(|disk| disk.setting(key, value));
        }
        self
    }

    /// Replaces the Debian guest's own disk, the first one, with another copy of its root.
    pub fn root(mut self, disk: Disk) -> Self {
        match self.disks.first_mut() {
            Some(root) => *root = Ok(disk),
            None => self.disks.push(Ok(disk)),
        }
        self
    }

    /// Turns the ember off, so that every incarnation starts cold.
    pub fn without_ember(self) -> Self {
        self.setting("ember", "off")
    }

    /// Adds a network device that forwards the host's port [`TestVm::http_port`] to the guest's port 80.
    pub fn http(mut self) -> Self {
        let port = free_port();
        self.http_port = Some(port);
        let forward = Value::Array(vec![format!("127.0.0.1:{port}:80").into()]);
        self.net([("kind", Value::from("user")), ("forward", forward)])
    }

    /// The host's port that [`Self::http`] chose.
    pub fn http_port(&self) -> Option<u16> {
        self.http_port
    }

    /// Puts the machine into the runtime root of another machine, so that one command reaches both. The other must outlive it. It
    /// takes no slot of its own: a test that waits for a second slot could wait for ever.
    pub fn beside(mut self, other: &TestVm) -> Self {
        self.runtime_root = Some(other.files.runtime_root());
        self
    }

    /// Adds a `[[nets]]` entry.
    pub fn net<'a>(mut self, entry: impl IntoIterator<Item = (&'a str, Value)>) -> Self {
        self.nets.push(entry.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
        self
    }

    /// Adds words at the end of the kernel's command line.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.boot = self.boot.map(|boot| Boot { cmdline: format!("{} {words}", boot.cmdline), ..boot });
        self
    }

    /// A script that the busybox guest runs before it is ready, as an init system would. It is on a disk behind those added so
    /// far.
    pub fn boot_script(self, script: &str) -> Self {
        let letter = char::from(b'a' + self.disks.len() as u8);
        self.disk(Disk::script(script)).cmdline(&format!("boot_script=vd{letter}"))
    }

    /// Dumps crashes into the machine's own folder ([`TestVm::dump_folder`]) and recovers from them. The default is to recover
    /// only.
    pub fn dumps(self) -> Self {
        self.setting("on_panic", "dump+recover")
    }

    /// Sets a key of `[crash]`.
    pub fn crash_setting(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.crash.insert(key.into(), value.into());
        self
    }

    /// Sets any other top-level key of `machine.toml`.
    pub fn setting(mut self, key: &str, value: impl Into<Value>) -> Self {
        assert_ne!(key, "crash", "use `crash_setting`: `prepare` overwrites this key");
        self.settings.insert(key.into(), value.into());
        self
    }

    /// Sets a machine type that both QEMUs of the tests have.
    pub fn for_both_qemus(self) -> Self {
        self.setting("machine_type", "pc-q35-7.2")
    }

    /// Starts the keeper and waits until the first incarnation's guest is ready.
    pub fn boot(self) -> Result<TestVm> {
        let vm = self.start()?;
        vm.wait_incarnation(1)?;
        Ok(vm)
    }

    /// Like [`Self::boot`], but the guest was booted before. The first test that needs such a guest boots and saves it. Each test
    /// restores its own copy lazily, and this returns when all memory has arrived. Use it in tests whose subject is neither the
    /// boot nor a fresh machine. It differs from a machine that was booted:
    ///
    /// - Its first events are those of a restore.
    /// - `machine.toml` and the disks are in `machine/`, and the disks are qcow2 images over those of the save.
    /// - All guests from one save have the same nonce until they reboot.
    pub fn running(mut self) -> Result<TestVm> {
        assert!(self.nets.is_empty(), "a save cannot have the ports of its machine's network");
        let in_place = self.disks.iter().flatten().any(Disk::is_in_place);
        assert!(!in_place, "the disks of a save are copies");
        let (name, runtime_root) = (std::mem::replace(&mut self.name, "saved".into()), self.runtime_root.take());
        let files = Files::make_restored(&name, runtime_root)?;
        let mut settings = vec![("memory_folder".to_owned(), text(files.memory_folder()))];
        settings.extend(HOST_KEYS.into_iter().filter_map(|key| Some((key.to_owned(), self.settings.remove(key)?))));
        let crash = crash_section(&files, std::mem::take(&mut self.crash));
        settings.extend(crash.into_iter().map(|(key, value)| (format!("crash.{key}"), value)));
        let settings: Vec<_> = settings.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
        let (description, programs) = (self.description(), self.programs()?);
        let saved = SavedGuest::ensure(&artifacts::saved_guests(), &description, &programs, |snapshot| {
            // Without a slot: a test that has one may wait for this save.
            let (name, files) = (self.name.clone(), self.prepare()?);
            let vm = TestVm::launch(&name, files, None, None)?;
            vm.wait_incarnation(1)?;
            vm.save_and_stop(snapshot).map(drop)
        })?;
        let slot = files.has_own_root().then(slots::take);
        TestVm::from_save(&name, files, slot, saved, &settings)
    }

    /// Everything that the guest depends on, except for the programs.
    fn description(&self) -> String {
        format!("{:?}\n{}\n{:?}", self.boot, self.settings, self.disks)
    }

    /// The files of the programs that make the guest.
    fn programs(&self) -> Result<Vec<PathBuf>> {
        let qemu = match self.settings.get("qemu").and_then(Value::as_str) {
            Some(path) => path.into(),
            None => artifacts::qemu()?,
        };
        let qemu = if qemu.is_absolute() { qemu } else { artifacts::installed_qemu()? };
        let boot = self.boot.iter().flat_map(|boot| [boot.kernel.clone(), boot.initrd.clone()]);
        Ok([artifacts::hearth()?, qemu].into_iter().chain(boot).collect())
    }

    /// Starts the keeper without waiting.
    pub fn start(self) -> Result<TestVm> {
        let slot = self.runtime_root.is_none().then(slots::take);
        let (name, http_port) = (self.name.clone(), self.http_port);
        let files = self.prepare()?;
        TestVm::launch(&name, files, http_port, slot)
    }

    /// Runs `hearth check` on the configuration without starting a machine.
    pub fn check(self) -> Result<Output> {
        let files = self.prepare()?;
        files.cli(&["check", &files.config().display().to_string()])
    }

    /// Runs `hearth run` for a machine that Hearth should refuse, and waits until the keeper ends.
    pub fn run_to_the_end(self) -> Result<Output> {
        let files = self.prepare()?;
        let output = files.cli(&["run", &files.config().display().to_string()]);
        files.end_processes();
        output
    }

    /// Makes the images and `machine.toml`.
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
        config.insert("crash".into(), crash_section(&files, self.crash).into());
        // A test of firmware has already set what to boot from.
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

fn crash_section(files: &Files, settings: Table) -> Table {
    let mut section = Table::new();
    section.insert("dump_folder".into(), text(&files.dump_folder()));
    section.insert("min_free".into(), "1MiB".into());
    section.extend(settings);
    section
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
    fn configuration_holds_the_requested_settings() {
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
