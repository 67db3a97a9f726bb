//! Trust: which keys of a snapshot a restore accepts. The snapshot's maker may be a stranger, but its
//! configuration acts with the rights of the restoring user.
//!
//! Keys of the host (`Trust` in the table of keys), and host images below a snapshot's disks, count only if the
//! operator confirms them: in the saved machine's own file, if it still exists and only the operator can write it; on
//! the command line; or with `--trust-config`.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hearth_recovery::snapshot::{DiskPart, Snapshot, backing_image};

use super::CliError;
use crate::config::{Config, ConfigFile, HostKey};
use crate::runtime_root::RuntimeRoot;

const MACHINE: &str = "machine.toml";
const OTHERS_MAY_WRITE: u32 = 0o002;

/// Source of values that count.
pub enum Trust {
    /// The snapshot's.
    Snapshot,
    /// The operator's, who may still have the saved machine's file.
    Operator(Option<Box<OwnFile>>),
}

/// The operator's own file of the saved machine.
pub struct OwnFile {
    keys: Vec<HostKey>,
    config: Config,
}

impl OwnFile {
    /// None if it does not exist, cannot be read, or others could have written it.
    fn find(snapshot: &Snapshot, root: &RuntimeRoot) -> Option<Self> {
        let path = snapshot.manifest.configuration.as_deref()?;
        let found = std::fs::metadata(path).ok()?;
        let owner_is_trusted = [0, rustix::process::geteuid().as_raw()].contains(&found.uid());
        if !found.is_file() || !owner_is_trusted || found.mode() & OTHERS_MAY_WRITE != 0 {
            return None;
        }
        let (typed, config) = (ConfigFile::load(path).ok()?, Config::load(path, root).ok()?);
        Some(Self { keys: typed.for_snapshot(&config, "").host_keys(), config })
    }

    fn says(&self, key: &HostKey) -> bool {
        self.keys.contains(key)
    }

    /// Whether its disk of this name has this backing image.
    fn has_backing(&self, disk: &str, backing: &str) -> bool {
        let own = self.config.devices.disks.iter().find(|own| own.name == disk);
        own.and_then(|own| backing_image(&own.path, own.format.name()).ok().flatten()).is_some_and(|own| own == backing)
    }
}

impl Trust {
    /// `snapshot_too`: whether the operator trusts the snapshot's maker.
    pub fn of(snapshot: &Snapshot, root: &RuntimeRoot, snapshot_too: bool) -> Self {
        if snapshot_too { Self::Snapshot } else { Self::Operator(OwnFile::find(snapshot, root).map(Box::new)) }
    }

    /// `is_said`: whether the operator has set another value for a key.
    pub fn check(
        &self,
        snapshot: &Snapshot,
        typed: &ConfigFile,
        is_said: impl Fn(&str) -> bool,
    ) -> Result<(), CliError> {
        must_have_the_saved_disks(snapshot, typed)?;
        let Self::Operator(own) = self else { return Ok(()) };
        let is_own = |key: &HostKey| own.as_ref().is_some_and(|own| own.says(key));
        let strange: Vec<_> = typed.host_keys().into_iter().filter(|key| !is_said(&key.key) && !is_own(key)).collect();
        if strange.is_empty() {
            return Ok(());
        }
        let what: Vec<_> = strange.iter().map(|key| format!("{} = {}", key.key, key.value)).collect();
        Err(CliError::Untrusted { file: snapshot.path(MACHINE), what: what.join(", ") })
    }

    /// A disk with a backing image shows that image's content to its guest.
    pub fn check_disk(&self, disk: &DiskPart, image: &Path) -> Result<(), CliError> {
        let Self::Operator(own) = self else { return Ok(()) };
        let backing = backing_image(image, &disk.format)?;
        match backing.filter(|backing| !own.as_ref().is_some_and(|own| own.has_backing(&disk.name, backing))) {
            None => Ok(()),
            Some(backing) => {
                Err(CliError::Untrusted { file: image.to_owned(), what: format!("backing image {backing:?}") })
            }
        }
    }
}

/// A disk that is not in the snapshot would be an image of this host.
fn must_have_the_saved_disks(snapshot: &Snapshot, typed: &ConfigFile) -> Result<(), CliError> {
    let name = |(position, name): (usize, Option<String>)| name.unwrap_or_else(|| format!("disk{position}"));
    let configured: Vec<_> = typed.disks.iter().map(|disk| disk.name.clone()).enumerate().map(name).collect();
    let saved: Vec<_> = snapshot.manifest.disks.iter().map(|disk| disk.name.clone()).collect();
    if configured == saved {
        return Ok(());
    }
    let list = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(CliError::OtherDisks { file: snapshot.path(MACHINE), configured: list(&configured), saved: list(&saved) })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use hearth_disk::image::create_overlay;
    use hearth_recovery::snapshot::pages::{Compression, PageWriter};
    use hearth_recovery::snapshot::{Draft, Manifest, RamPart, SNAPSHOT_VERSION};

    use super::*;
    use crate::config::{FIELDS, Section};

    const SMALL: &str = "name = \"web\"\nmemory = \"1GiB\"\n";

    struct Stand(tempfile::TempDir);

    impl Stand {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn root(&self) -> RuntimeRoot {
            RuntimeRoot::new(self.path("run"))
        }

        /// A snapshot with this machine.toml and these disks, of the configuration file `web.toml`.
        fn snapshot(&self, machine: &str, disks: &[&str]) -> Snapshot {
            let folder = self.path("snapshot");
            let _ = fs::remove_dir_all(&folder);
            let mut draft = Draft::create(&folder).unwrap();
            let mut writer = PageWriter::create(&draft.ram_path(), 64, Compression::None).unwrap();
            writer.add(1, &[1; 4096]).unwrap();
            let sealed = writer.finish().unwrap();
            let disk = |name: &&str| {
                draft.make_disk(name).unwrap().set_len(1 << 20).unwrap();
                let format = "raw".to_owned();
                DiskPart { name: (*name).to_owned(), format, bytes: 1 << 20, modified: None, stored: None }
            };
            let disks = disks.iter().map(disk).collect();
            let manifest = Manifest {
                version: SNAPSHOT_VERSION,
                machine: "web".into(),
                saved_at: String::new(),
                hearth_version: String::new(),
                qemu_version: String::new(),
                accelerator: "tcg".into(),
                configuration: Some(self.path("web.toml")),
                ram_bytes: 64 * 4096,
                vmgenid: false,
                guest_agent: false,
                write_through: Vec::new(),
                frozen: false,
                machine_file: draft.write_machine(machine).unwrap(),
                state: draft.write_state(b"state").unwrap(),
                ram: RamPart { bytes: sealed.bytes, pages: sealed.pages, seal: sealed.seal },
                disks,
            };
            draft.finish(&manifest).unwrap();
            Snapshot::open(&folder).unwrap()
        }

        fn check(&self, snapshot: &Snapshot, all: bool, said: &str) -> Result<(), String> {
            let typed = ConfigFile::parse(&snapshot.machine).unwrap();
            let trust = Trust::of(snapshot, &self.root(), all);
            trust.check(snapshot, &typed, |key| key == said).map_err(|error| error.to_string())
        }
    }

    #[test]
    fn host_keys_are_refused_by_name() {
        let stand = Stand::new();
        let mut refused = 0;
        for field in FIELDS {
            let line = format!("{} = {}\n", field.key, field.example);
            let (machine, key, disks): (_, _, &[&str]) = match field.section {
                Section::Machine if ["name", "memory"].contains(&field.key) => continue,
                Section::Machine => (format!("{line}{SMALL}"), field.key.to_owned(), &[]),
                Section::Ready => {
                    (format!("{SMALL}[remount.ready]\n{line}"), format!("remount.ready.{}", field.key), &[])
                }
                section => {
                    let heading = section.heading();
                    let name = heading.trim_matches(['[', ']']);
                    let position = if section.repeats() { "[0]" } else { "" };
                    let disks: &[&str] = match (section, field.key) {
                        (Section::Disk, "name") => &["root"],
                        (Section::Disk, _) => &["disk0"],
                        _ => &[],
                    };
                    (format!("{SMALL}{heading}\n{line}"), format!("{name}{position}.{}", field.key), disks)
                }
            };
            let snapshot = stand.snapshot(&machine, disks);
            let typed = ConfigFile::parse(&machine).unwrap();
            let is_host = !typed.host_keys().is_empty();
            match stand.check(&snapshot, false, "") {
                Ok(()) => assert!(!is_host, "{key}"),
                Err(refusal) => {
                    refused += 1;
                    assert!(is_host && refusal.contains(&format!("{key} = ")), "{key}: {refusal}");
                    stand.check(&snapshot, false, &key).unwrap();
                }
            }
            stand.check(&snapshot, true, "").unwrap();
        }
        assert!(refused >= 16, "{refused}");
    }

    #[test]
    fn operators_own_file_confirms_keys() {
        let stand = Stand::new();
        let own = format!("{SMALL}[boot]\nkernel = \"vmlinuz\"\n");
        fs::write(stand.path("web.toml"), &own).unwrap();
        let kernel = stand.path("vmlinuz");
        let machine = |kernel: &Path| format!("{SMALL}[boot]\nkernel = \"{}\"\n", kernel.display());
        stand.check(&stand.snapshot(&machine(&kernel), &[]), false, "").unwrap();
        let refusal = stand.check(&stand.snapshot(&machine(Path::new("/etc/shadow")), &[]), false, "").unwrap_err();
        assert!(refusal.contains("boot.kernel = \"/etc/shadow\""), "{refusal}");
        // A world-writable file confirms nothing.
        fs::set_permissions(stand.path("web.toml"), fs::Permissions::from_mode(0o666)).unwrap();
        assert!(stand.check(&stand.snapshot(&machine(&kernel), &[]), false, "").is_err());
    }

    #[test]
    fn snapshot_with_other_disks_is_refused() {
        let stand = Stand::new();
        let disk = |name: &str| format!("[[disks]]\nname = \"{name}\"\npath = \"/srv/{name}.img\"\n");
        for (machine, saved, good) in [
            (vec!["root"], vec!["root"], true),
            (vec!["root"], vec![], false),
            (vec!["root", "victim"], vec!["root"], false),
            (vec!["root"], vec!["root", "data"], false),
            (vec!["root", "data"], vec!["data", "root"], false),
        ] {
            let text = format!("{SMALL}{}", machine.iter().map(|name| disk(name)).collect::<String>());
            // Refused whether the snapshot is trusted or not.
            let checked = stand.check(&stand.snapshot(&text, &saved), true, "");
            assert_eq!(checked.is_ok(), good, "{machine:?} {saved:?}");
            assert!(checked.err().is_none_or(|refusal| refusal.contains("names other disks than the snapshot holds")));
        }
    }

    #[test]
    fn host_backing_image_is_refused() {
        let stand = Stand::new();
        let [base, other, own, saved] = ["base", "other", "own", "saved"].map(|name| stand.path(name));
        [&base, &other].into_iter().for_each(|image| fs::write(image, vec![0; 1 << 20]).unwrap());
        create_overlay(&own, &base, "raw").unwrap();
        let file = format!("{SMALL}[[disks]]\nname = \"root\"\npath = \"{}\"\nformat = \"qcow2\"\n", own.display());
        fs::write(stand.path("web.toml"), file).unwrap();
        let snapshot = stand.snapshot(SMALL, &[]);
        let format = "qcow2".to_owned();
        let disk = DiskPart { name: "root".into(), format, bytes: 0, modified: None, stored: None };
        let check = |all| {
            let trust = Trust::of(&snapshot, &stand.root(), all);
            trust.check_disk(&disk, &saved).map_err(|error| error.to_string())
        };
        create_overlay(&saved, &base, "raw").unwrap();
        check(false).unwrap();
        fs::remove_file(&saved).unwrap();
        create_overlay(&saved, &other, "raw").unwrap();
        let refusal = check(false).unwrap_err();
        assert!(
            refusal.contains("saved sets keys that only this host's operator") && refusal.contains("/other"),
            "{refusal}"
        );
        check(true).unwrap();
    }
}
