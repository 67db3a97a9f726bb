//! Machine types: which ones a QEMU offers, and whether it supports a machine of some type with some processors.
//!
//! QEMU itself answers both, over QMP on its standard input: in 20 ms for the list, in up to 80 ms for a trial under
//! TCG. So the keeper asks only for a machine without a type, and `hearth check` asks for every machine.

use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::accelerator::{Accelerator, telling_line};
use crate::bounded::{self, Finished};
use crate::launch::SCREEN_CARD;
use crate::{Binary, BinaryError, confinement, environment};

/// Machine type of a machine whose file names none and which an earlier version of Hearth started.
pub const EARLIER_MACHINE_TYPE: &str = "pc-q35-7.2";
/// Prefix of types with a version. Vendors have versions of their own: `pc-q35-rhel9.4.0`.
const VERSIONED: &str = "pc-q35-";
/// Alias of QEMU's default q35 type.
const Q35: &str = "q35";

const LIST: &str = "{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-machines\"}\n{\"execute\":\"quit\"}\n";
const QUIT: &str = "{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\"}\n";
/// Time limit, as for `--version`: a host that swaps is slow.
const PATIENCE: Duration = Duration::from_secs(20);

/// A machine type, as `query-machines` describes it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct MachineType {
    /// Name, such as `pc-q35-7.2`.
    pub name: String,
    #[serde(default)]
    alias: Option<String>,
    /// Whether a later QEMU will drop this type.
    #[serde(default)]
    pub deprecated: bool,
}

/// All machine types of one QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineTypes(Vec<MachineType>);

impl MachineTypes {
    /// The type for a machine without one: the newest q35 with a version that is not deprecated.
    pub(crate) fn newest(&self) -> Option<&str> {
        let lasting = self.0.iter().filter(|one| one.name.starts_with(VERSIONED) && !one.deprecated);
        let newest = lasting.max_by_key(|one| (one.alias.as_deref() == Some(Q35), version(&one.name)));
        newest.map(|one| one.name.as_str())
    }

    /// The q35 type that `machine_type` names or aliases; options after a comma are ignored.
    pub fn q35(&self, machine_type: &str) -> Option<&MachineType> {
        let name = machine_type.split(',').next().unwrap_or_default();
        let named = self.0.iter().find(|one| one.name == name || one.alias.as_deref() == Some(name));
        named.filter(|one| one.name.starts_with(VERSIONED))
    }
}

/// Whether this is the name of a q35 type with a version, which is the same machine in every QEMU that has it. Options may
/// follow after a comma.
pub fn is_versioned(machine_type: &str) -> bool {
    machine_type.starts_with(VERSIONED)
}

fn version(name: &str) -> Vec<u32> {
    let numbers = name.trim_start_matches(VERSIONED).split('.').map(str::parse);
    numbers.collect::<Result<_, _>>().unwrap_or_default()
}

/// The hardware of a trial machine.
#[derive(Clone, Copy, Debug)]
pub struct Hardware<'a> {
    /// Machine type, possibly with options after a comma.
    pub machine_type: &'a str,
    /// QEMU's `-cpu` value. None: the accelerator's default.
    pub cpu_model: Option<&'a str>,
    /// The accelerator to use.
    pub accelerator: Accelerator,
    /// Number of virtual processors.
    pub cpus: u32,
    /// Whether the machine has a graphics card.
    pub screen: bool,
    /// Whether its QEMU is confined, as in `Launch`.
    pub confined: bool,
}

impl Binary {
    /// Asks QEMU for its machine types.
    pub fn machine_types(&self) -> Result<MachineTypes, BinaryError> {
        // TCG may be a module that is not installed, and KVM may be missing: QEMU uses the first that works.
        let finished = self.over_qmp(&["-machine", "none,accel=kvm:tcg"], LIST, false)?;
        let mut lines = finished.stdout.lines().filter_map(|line| serde_json::from_str::<Answer>(line).ok());
        let types = lines.next_back().ok_or_else(|| BinaryError::NoMachineTypes {
            path: self.path().to_owned(),
            how: finished.stderr.lines().next().map_or_else(|| finished.how(), str::to_owned),
        })?;
        Ok(MachineTypes(types.list))
    }

    /// The type for a machine without one. Fails if QEMU has none.
    pub fn newest_machine_type(&self) -> Result<String, BinaryError> {
        let newest = self.machine_types()?.newest().map(str::to_owned);
        newest.ok_or_else(|| BinaryError::NoQ35 { path: self.path().to_owned() })
    }

    /// Makes QEMU build such a machine without a guest. The inner error is QEMU's reason for refusing it.
    pub fn try_hardware(&self, hardware: Hardware<'_>) -> Result<Result<(), String>, BinaryError> {
        let Hardware { machine_type, cpu_model, accelerator, cpus, screen, confined } = hardware;
        let cpu_model = cpu_model.unwrap_or(accelerator.default_cpu_model());
        let cpus = cpus.to_string();
        let options = ["-machine", machine_type, "-accel", accelerator.name(), "-cpu", cpu_model, "-smp", &cpus];
        let card: &[&str] = if screen { &["-device", SCREEN_CARD] } else { &[] };
        let finished = self.over_qmp(&[&options[..], card, &["-m", "16M", "-S"]].concat(), QUIT, confined)?;
        if finished.succeeded() {
            return Ok(Ok(()));
        }
        Ok(Err(telling_line(&finished.stderr).map_or_else(|| finished.how(), str::to_owned)))
    }

    fn over_qmp(&self, options: &[&str], input: &str, confined: bool) -> Result<Finished, BinaryError> {
        let not_runnable = |source| BinaryError::NotRunnable { path: self.path().to_owned(), source };
        let mut command = Command::new(self.path());
        for folder in self.data_folders() {
            command.arg("-L").arg(folder);
        }
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-qmp", "stdio"]).args(options);
        if confined {
            confinement::confine(&mut command, self, None).map_err(not_runnable)?;
        }
        bounded::run_with_input(environment::confine(&mut command), input, PATIENCE).map_err(not_runnable)
    }
}

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "return")]
    list: Vec<MachineType>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(list: &[(&str, &str, bool)]) -> MachineTypes {
        let one = |&(name, alias, deprecated): &(&str, &str, bool)| MachineType {
            name: name.to_owned(),
            alias: (!alias.is_empty()).then(|| alias.to_owned()),
            deprecated,
        };
        MachineTypes(list.iter().map(one).collect())
    }

    #[test]
    fn newest_supported_type_is_chosen() {
        let check = |list, expect: Option<&str>| assert_eq!(types(list).newest(), expect, "{list:?}");
        // QEMU 10.2, in no particular order, as QEMU lists them.
        check(
            &[
                ("pc-q35-9.2", "", false),
                ("pc-i440fx-10.2", "pc", false),
                ("pc-q35-10.2", "q35", false),
                ("pc-q35-7.2", "", true),
                ("microvm", "", false),
            ],
            Some("pc-q35-10.2"),
        );
        check(
            &[("pc-q35-10.0", "", false), ("pc-q35-9.2", "", false), ("pc-q35-4.0.1", "", false)],
            Some("pc-q35-10.0"),
        );
        check(&[("pc-q35-rhel9.6.0", "q35", false), ("pc-q35-rhel9.4.0", "", false)], Some("pc-q35-rhel9.6.0"));
        check(&[("pc-q35-7.2", "q35", true), ("pc-q35-7.1", "", false)], Some("pc-q35-7.1"));
        check(&[("pc-q35-7.2", "q35", true), ("pc-i440fx-10.2", "pc", false)], None);
    }

    #[test]
    fn q35_type_is_found_by_name_or_alias() {
        let types = types(&[("pc-q35-7.2", "q35", true), ("pc-i440fx-7.2", "pc", false), ("none", "", false)]);
        for name in ["q35", "pc-q35-7.2", "pc-q35-7.2,smm=off"] {
            assert!(types.q35(name).is_some_and(|one| one.deprecated), "{name}");
        }
        for name in ["pc", "pc-i440fx-7.2", "none", "pc-q35-7", "pc-q35-99.0", ""] {
            assert_eq!(types.q35(name), None, "{name}");
        }
    }

    fn binary() -> Binary {
        Binary::find(None).expect("these tests need QEMU: apt-get install qemu-system-x86")
    }

    #[test]
    fn the_installed_qemu_lists_its_types() {
        let (binary, types) = (binary(), binary().machine_types().unwrap());
        let newest = types.newest().unwrap();
        let ours = format!("{VERSIONED}{}.{}", binary.version().major, binary.version().minor);
        assert_eq!(newest, ours);
        assert_eq!(types.q35(Q35).unwrap().name, ours);
    }

    #[test]
    fn confined_trial_opens_no_file_of_a_user() {
        if !crate::kernel_has_landlock() {
            return eprintln!("skipped: this kernel has no Landlock");
        }
        let folder = tempfile::tempdir().unwrap();
        let firmware = folder.path().join("bios");
        std::fs::write(&firmware, [0xf4; 65536]).unwrap();
        let machine_type = format!("q35,firmware={}", firmware.display());
        let tried = |confined| {
            let (accelerator, cpu_model) = (Accelerator::Tcg, None);
            let hardware =
                Hardware { machine_type: &machine_type, cpu_model, accelerator, cpus: 1, screen: false, confined };
            binary().try_hardware(hardware).unwrap()
        };
        assert_eq!(tried(false), Ok(()));
        assert!(tried(true).is_err());
    }

    #[test]
    fn unsupported_hardware_is_refused_with_qemus_reason() {
        let binary = binary();
        let accelerator = Accelerator::Tcg;
        let good = Hardware { machine_type: Q35, cpu_model: None, accelerator, cpus: 2, screen: true, confined: true };
        let check = |hardware, expect: &str| {
            let why = binary.try_hardware(hardware).unwrap().unwrap_err();
            assert!(why.contains(expect), "{hardware:?}: {why}");
        };
        assert_eq!(binary.try_hardware(good).unwrap(), Ok(()));
        check(Hardware { cpu_model: Some("banana"), ..good }, "unable to find CPU model 'banana'");
        check(Hardware { cpu_model: Some("max,+banana"), ..good }, ".banana' not found");
        check(Hardware { cpu_model: Some("host"), ..good }, "requires KVM");
        check(Hardware { machine_type: "q35,banana=on", ..good }, ".banana' not found");
        check(Hardware { cpus: 100_000, ..good }, "Invalid SMP CPUs 100000");
    }
}
