//! The configuration that is stored with a snapshot. It means the same wherever it is read, and gives a machine of
//! another name the same devices.

use std::path::{Path, PathBuf};

use hearth_qemu::EARLIER_MACHINE_TYPE;

use super::file::{NetSection, ObjectStoreSection};
use super::{Boot, Config, ConfigFile, Protocol, quantity};
use crate::problem::Problem;

impl ConfigFile {
    /// The configuration that was typed. The error lists everything that is wrong with it.
    pub fn load(path: &Path) -> Result<Self, Vec<Problem>> {
        let unreadable = |error: std::io::Error| {
            vec![Problem::error(path.display().to_string(), error.to_string(), "check that the file still exists")]
        };
        Self::parse(&std::fs::read_to_string(path).map_err(unreadable)?)
    }

    pub fn parse(text: &str) -> Result<Self, Vec<Problem>> {
        let super::shape::Shaped { typed, problems, .. } = super::shape::read(text)?;
        if problems.is_empty() { Ok(typed) } else { Err(problems) }
    }

    pub fn to_text(&self) -> String {
        toml::to_string(self).expect("what was typed in TOML can be written so")
    }

    /// The configuration with absolute paths, and with the values that otherwise depend on the machine's name or on the
    /// host.
    pub fn for_snapshot(mut self, config: &Config, accelerator: &str) -> Self {
        let text = |path: &PathBuf| Some(path.display().to_string());
        self.accelerator = Some(accelerator.to_owned());
        self.machine_type.clone_from(&config.guest.machine_type);
        self.qemu = config.qemu.program.as_ref().and_then(text);
        self.memory_folder = self.memory_folder.and_then(|_| text(&config.folders.memory));
        self.runtime_folder = self.runtime_folder.and_then(|_| text(&config.folders.runtime));
        let boot = self.boot.get_or_insert_default();
        match &config.guest.boot {
            Boot::Kernel { kernel, initrd, .. } => {
                boot.kernel = text(kernel);
                boot.initrd = initrd.as_ref().and_then(text);
            }
            Boot::Firmware { code, vars } => {
                boot.firmware_vars = vars.as_ref().and_then(text);
                // A word instead of a path stands for the restoring host's own firmware, so it stays as typed.
                if boot.firmware.as_ref().is_some_and(|typed| typed.contains('/')) {
                    boot.firmware = code.as_ref().and_then(text);
                }
            }
        }
        // Access to stores depends on the host, and the snapshot may be restored on another one.
        self.object_store = None;
        // A boot set is valid only for the images of the machine that saved it.
        if let Some(remount) = &mut self.remount {
            (remount.persist, remount.persist_file) = (None, None);
        }
        if let Some(crash) = &mut self.crash {
            crash.dump_folder = crash.dump_folder.take().and_then(|_| text(&config.crash.dump_folder));
        }
        for (typed, disk) in self.disks.iter_mut().zip(&config.devices.disks) {
            typed.path = text(&disk.path);
            typed.name = Some(disk.name.clone());
            typed.format = Some(disk.format.name().to_owned());
            typed.serial = Some(disk.serial.clone());
        }
        for (typed, net) in self.nets.iter_mut().zip(&config.devices.nets) {
            typed.mac = Some(net.mac.clone());
        }
        self
    }

    /// The configuration of a machine of this name that was restored with these disks. Folders that two machines cannot
    /// share are replaced by folders next to the old ones.
    pub fn for_restored(mut self, name: &str, disks: &[PathBuf]) -> Self {
        let neighbour = |folder: Option<String>| Some(Path::new(&folder?).with_file_name(name).display().to_string());
        self.name = Some(name.to_owned());
        // Keepers that did not store the machine type always used this one.
        self.machine_type.get_or_insert_with(|| EARLIER_MACHINE_TYPE.to_owned());
        self.memory_folder = neighbour(self.memory_folder);
        self.runtime_folder = neighbour(self.runtime_folder);
        for (typed, path) in self.disks.iter_mut().zip(disks) {
            typed.path = Some(path.display().to_string());
            typed.format = Some("qcow2".to_owned());
        }
        self
    }

    /// The configuration of a machine whose snapshot is in an object store.
    pub fn with_object_store(mut self, section: Option<ObjectStoreSection>) -> Self {
        self.object_store = section;
        self
    }

    /// A snapshot never decides the access to stores.
    pub fn without_object_store(self) -> Self {
        self.with_object_store(None)
    }

    /// Uses this QEMU instead of the saved machine's, if there is one.
    pub fn with_qemu(mut self, qemu: Option<PathBuf>) -> Self {
        self.qemu = qemu.map(|path| path.display().to_string()).or(self.qemu);
        self
    }

    /// The host port that leads to the guest port of `remount.ready.port`, through these forwards of the first network
    /// instead of the current ones.
    pub fn ready_port_through(&self, forward: &[String]) -> Option<u16> {
        let port = self.remount.as_ref()?.ready.as_ref()?.port?;
        let present = self.nets.first()?.forward.as_ref()?;
        let tcp = |texts: &[String]| {
            let forwards: Vec<_> = texts.iter().filter_map(|text| quantity::forward(text)).collect();
            forwards.into_iter().filter(|forward| forward.protocol == Protocol::Tcp)
        };
        let guest_port = tcp(present).find(|forward| forward.host_port == port)?.guest_port;
        tcp(forward).find(|forward| forward.guest_port == guest_port).map(|forward| forward.host_port)
    }

    /// Replaces the networks by isolated ones with only these forwards from the host. A clone gets no readiness probe:
    /// its forwards are not those that `remount.ready` names.
    pub fn isolated(mut self, forward: &[String]) -> Self {
        if let Some(remount) = &mut self.remount {
            remount.ready = None;
        }
        for (position, net) in self.nets.iter_mut().enumerate() {
            let forward = (position == 0 && !forward.is_empty()).then(|| forward.to_vec());
            let (kind, mac) = (Some("user".to_owned()), net.mac.take());
            *net = NetSection { kind, mac, forward, isolated: Some(true), ifname: None };
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::NetBackend;
    use crate::runtime_root::RuntimeRoot;

    const TEXT: &str = r#"
        name = "web"
        memory = "1GiB"
        memory_folder = "/ram/web"
        [boot]
        kernel = "vmlinuz"
        [crash]
        dump_folder = "dumps"
        [[disks]]
        path = "root.img"
        mib_per_second = 50
        [[nets]]
        kind = "user"
    "#;

    fn meaning(text: &str, file: &str) -> Config {
        Config::parse(text, Path::new(file), &RuntimeRoot::new("/run/hearth")).unwrap()
    }

    #[test]
    fn a_rehearsed_machine_reaches_nobody() {
        let typed = ConfigFile::parse(TEXT).unwrap().isolated(&["127.0.0.1:8080:80".to_owned()]);
        let isolated = meaning(&typed.to_text(), "/machines/web.toml");
        let NetBackend::User { forward, isolated } = &isolated.devices.nets[0].backend else {
            panic!("{:?}", isolated.devices)
        };
        assert!(*isolated && forward.len() == 1);
    }

    #[test]
    fn rehearsed_machine_needs_no_ready_port() {
        let text = TEXT.replace("kind = \"user\"", "kind = \"user\"\nforward = [\"127.0.0.1:8080:80\"]");
        let text = format!("{text}[remount]\nready = {{ port = 8080 }}\n");
        let typed = ConfigFile::parse(&text).unwrap().isolated(&["127.0.0.1:8081:80".to_owned()]);
        let isolated = meaning(&typed.to_text(), "/machines/web.toml");
        assert!(isolated.remount.is_some());
    }

    #[test]
    fn ready_port_follows_new_forwards() {
        let forward = "kind = \"user\"\nforward = [\"127.0.0.1:8443:443\", \"127.0.0.1:8080:80\"]";
        let check = |ready: &str, new: &[&str], expect: Option<u16>| {
            let text = format!("{}[remount]\n{ready}\n", TEXT.replace("kind = \"user\"", forward));
            let new: Vec<_> = new.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(ConfigFile::parse(&text).unwrap().ready_port_through(&new), expect, "{ready} {new:?}");
        };
        let port = "ready = { port = 8080 }";
        check(port, &["127.0.0.1:9443:443", "127.0.0.1:9080:80"], Some(9080));
        check(port, &["127.0.0.1:8080:80"], Some(8080));
        check(port, &["127.0.0.1:9443:443", "127.0.0.1:9080:80/udp"], None);
        check("ready = { port = 1 }", &["127.0.0.1:9080:80"], None);
        check("ready = { unit = \"web.service\" }", &["127.0.0.1:9080:80"], None);
        check("", &["127.0.0.1:9080:80"], None);
    }

    #[test]
    fn restore_keeps_or_overrides_the_saved_qemu() {
        let check = |asked: Option<&str>, expect: &str| {
            let typed = ConfigFile::parse(&format!("qemu = \"/saved/qemu\"\n{TEXT}")).unwrap();
            let restored = meaning(&typed.with_qemu(asked.map(PathBuf::from)).to_text(), "/clones/two/machine.toml");
            assert_eq!(restored.qemu.program.as_deref(), Some(Path::new(expect)));
        };
        check(None, "/saved/qemu");
        check(Some("/opt/qemu"), "/opt/qemu");
    }

    #[test]
    fn restore_keeps_the_saved_devices() {
        let saved = meaning(TEXT, "/machines/web.toml");
        let along = ConfigFile::parse(TEXT).unwrap().for_snapshot(&saved, "tcg").to_text();
        let disks = [PathBuf::from("/clones/two/disk-root.qcow2")];
        let restored = ConfigFile::parse(&along).unwrap().for_restored("two", &disks).to_text();
        let restored = meaning(&restored, "/clones/two/machine.toml");
        assert_eq!((&restored.devices.nets, &restored.guest.boot), (&saved.devices.nets, &saved.guest.boot));
        assert_eq!(
            (restored.devices.disks[0].serial.as_str(), &restored.devices.disks[0].path),
            (saved.devices.disks[0].serial.as_str(), &disks[0])
        );
        assert_eq!((restored.devices.disks[0].mib_per_second, restored.guest.memory_bytes), (Some(50), 1 << 30));
        assert_eq!(restored.crash.dump_folder, Path::new("/machines/dumps"));
        assert_eq!((restored.name.as_str(), restored.folders.memory.as_path()), ("two", Path::new("/ram/two")));
        assert_eq!(restored.guest.machine_type.as_deref(), Some("pc-q35-7.2"), "what earlier keepers started it with");
    }

    #[test]
    fn snapshot_keeps_no_object_store() {
        let text = format!("{TEXT}[object_store]\ncredentials = \"/etc/hearth/s3.env\"\n");
        let saved = meaning(&text, "/machines/web.toml");
        let along = ConfigFile::parse(&text).unwrap().for_snapshot(&saved, "tcg").to_text();
        assert!(!along.contains("object_store") && !along.contains("s3.env"), "{along}");
    }

    #[test]
    fn snapshot_keeps_the_machine_type() {
        let mut saved = meaning(TEXT, "/machines/web.toml");
        saved.guest.machine_type = Some("pc-q35-10.2".to_owned());
        let along = ConfigFile::parse(TEXT).unwrap().for_snapshot(&saved, "tcg");
        let restored = meaning(&along.for_restored("two", &[]).to_text(), "/clones/two/machine.toml");
        assert_eq!(restored.guest.machine_type, saved.guest.machine_type);
    }
}
