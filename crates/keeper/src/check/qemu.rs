//! Checks that QEMU exists, is new enough, has the accelerator, and supports the machine's type and processors.

use hearth_qemu::{Binary, BinaryError, Hardware, Wanted, accelerator, is_versioned};

use super::Purpose;
use crate::config::{Config, GuestConfig};
use crate::problem::Problem;

pub fn check(config: &Config, purpose: Purpose, problems: &mut Vec<Problem>) -> Option<Binary> {
    let found = Binary::find(config.qemu.program.as_deref()).and_then(|binary| {
        problems.extend(kvm(&config.guest, &binary));
        if let Some(machine_type) = config.guest.machine_type.as_deref().filter(|one| !is_versioned(one)) {
            let message =
                format!("{machine_type} is not a versioned q35: each QEMU would give the guest devices of its own");
            let hint = format!("set machine_type = \"{}\"", binary.newest_machine_type()?);
            problems.push(Problem::error("machine_type", message, hint));
        } else if purpose != Purpose::Run {
            // A start does not wait for these checks, because QEMU itself reports what it does not support.
            hardware(config, &binary, problems)?;
        }
        Ok(binary)
    });
    // This crate's errors include a hint. QEMU may be on a mount that comes later, or be replaced by a newer one.
    found.inspect_err(|error| problems.push(Problem::missing("qemu", crate::chain(error), ""))).ok()
}

/// Whether QEMU supports the machine's type and processors.
pub fn hardware(config: &Config, binary: &Binary, problems: &mut Vec<Problem>) -> Result<(), BinaryError> {
    let guest = &config.guest;
    let (types, newest) = (binary.machine_types()?, binary.newest_machine_type()?);
    let machine_type = guest.machine_type.as_deref().unwrap_or(&newest);
    let qemu = format!("QEMU {} ({})", binary.version(), binary.path().display());
    let Some(known) = types.q35(machine_type) else {
        let message = format!("{qemu} has no q35 machine type {machine_type}");
        problems.push(Problem::error("machine_type", message, format!("set machine_type = \"{newest}\"")));
        return Ok(());
    };
    if guest.screen && !binary.has_vnc()? {
        let hint = "set `qemu` to one that has, or remove display";
        problems.push(Problem::error("display", format!("{qemu} has no VNC server"), hint));
        return Ok(());
    }
    if known.deprecated {
        let message = format!("{machine_type} is deprecated in {qemu}; a later QEMU will not start the machine");
        let hint = format!("set machine_type = \"{newest}\": the next guest gets slightly newer devices");
        problems.push(Problem::warning("machine_type", message, hint));
    }
    // Another check reports why KVM does not work.
    let chosen = accelerator::choose(binary, guest.accelerator, guest.cpu_model.as_deref());
    let Ok(chosen) = chosen else { return Ok(()) };
    let cpu_model = guest.cpu_model.as_deref();
    let (accelerator, confined) = (chosen.accelerator, config.qemu.is_confined());
    let hardware = Hardware { machine_type, cpu_model, accelerator, cpus: guest.cpus, screen: guest.screen, confined };
    if let Err(why) = binary.try_hardware(hardware)? {
        let cpu_model = cpu_model.unwrap_or(chosen.accelerator.default_cpu_model());
        let message = format!(
            "{qemu} does not start {machine_type} with {} x {cpu_model} under {}: {why}",
            guest.cpus,
            chosen.accelerator.name()
        );
        let hint = match confined && binary.try_hardware(Hardware { confined: false, ..hardware })?.is_ok() {
            true => "Hearth's rules for QEMU are the reason: set sandbox = false, and report it",
            false => "change the key that QEMU names: machine_type, cpus or cpu_model",
        };
        problems.push(Problem::error("qemu", message, hint));
    }
    Ok(())
}

/// Only KVM can be unavailable. It is tried with a guest, because being able to open /dev/kvm proves little.
fn kvm(guest: &GuestConfig, binary: &Binary) -> Option<Problem> {
    let wanted = guest.accelerator;
    if wanted != Wanted::Kvm {
        return None;
    }
    let error = accelerator::choose(binary, wanted, guest.cpu_model.as_deref()).err()?;
    Some(Problem::for_now("accelerator", crate::chain(&error), ""))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::*;
    use crate::runtime_root::RuntimeRoot;

    /// Creates a program with this text. A child process writes it: if this process had it open, a child of another
    /// test could inherit the descriptor, and running it would fail ("Text file busy").
    fn program(folder: &Path, text: &str) -> PathBuf {
        let path = folder.join("qemu");
        let write = ["-c", "printf %s \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", text];
        assert!(Command::new("sh").args(write).arg(&path).status().unwrap().success());
        path
    }

    /// The list of a QEMU that has deprecated one machine type.
    const LIST: &str = r#"{"return": {}}
{"return": [{"name": "pc-q35-7.2", "deprecated": true}, {"name": "pc-q35-10.2", "alias": "q35", "deprecated": false}]}"#;

    /// A program that answers `--version` like this, lists its machine types, and handles other arguments with `more`.
    fn answering(folder: &Path, version: &str, more: &str) -> PathBuf {
        let list = format!(
            "case \"$*\" in *--version*) echo '{version}';; *'-machine none,accel=kvm:tcg') echo '{LIST}';; *) {more};; esac"
        );
        program(folder, &format!("#!/bin/sh\n{list}\n"))
    }

    /// Problems reported for a program that answers `--version` like this.
    fn problems(answer: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let program = answering(folder.path(), answer, "exit 0");
        let found = with_program(&program, "accelerator = \"auto\"");
        found.iter().map(|problem| problem.replace(program.to_str().unwrap(), "PROGRAM")).collect()
    }

    fn with_program(program: &Path, more: &str) -> Vec<String> {
        let text = format!(
            "name = \"web\"\nmemory = \"64MiB\"\nqemu = \"{}\"\n{more}\n[boot]\nkernel = \"k\"\n",
            program.display()
        );
        let config = Config::parse(&text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap();
        let mut problems = Vec::new();
        check(&config, Purpose::Check, &mut problems);
        problems.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn unusable_qemu_program_is_named() {
        assert_eq!(problems("QEMU emulator version 7.2.0"), [] as [&str; 0]);
        assert_eq!(
            problems("QEMU emulator version 6.2.0 (Debian 1:6.2)"),
            ["error: qemu: PROGRAM: QEMU 6.2.0 is too old; Hearth needs 7.2.0 or later",]
        );
        assert_eq!(problems("bochs 2.7"), ["error: qemu: PROGRAM: is not QEMU: its --version prints \"bochs 2.7\""]);
        let missing = with_program(Path::new("/nowhere/qemu"), "");
        assert_eq!(
            missing,
            ["error: qemu: /nowhere/qemu: there is no such program; set `qemu` to a qemu-system-x86_64",]
        );
    }

    /// The program claims to be QEMU but runs no guest, so KVM does not work with it on any host.
    #[test]
    fn broken_kvm_is_reported_only_when_requested() {
        let folder = tempfile::tempdir().unwrap();
        let more = "case \"$*\" in *kvm*) echo 'no KVM today' >&2; exit 1; esac";
        let program = answering(folder.path(), "QEMU emulator version 7.2.0", more);
        assert_eq!(with_program(&program, "accelerator = \"tcg\""), [] as [&str; 0]);
        assert_eq!(with_program(&program, "accelerator = \"auto\""), [] as [&str; 0]);
        let refused = with_program(&program, "accelerator = \"kvm\"");
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0].starts_with("error: accelerator: KVM does not work here: "), "{refused:?}");
        assert!(refused[0].ends_with("; use accelerator = \"auto\" or \"tcg\""), "{refused:?}");
    }

    #[test]
    fn deprecated_machine_type_is_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let program = answering(folder.path(), "QEMU emulator version 10.2.0", "exit 0");
        let check = |machine_type: &str, expect: &[&str]| {
            let found = with_program(&program, &format!("accelerator = \"tcg\"\nmachine_type = \"{machine_type}\""));
            let found: Vec<_> = found.iter().map(|told| told.replace(program.to_str().unwrap(), "PROGRAM")).collect();
            assert_eq!(found, expect);
        };
        check("pc-q35-10.2", &[]);
        for unversioned in ["q35", "pc", "q35,dump-guest-core=off"] {
            let refused = format!(
                "error: machine_type: {unversioned} is not a versioned q35: each QEMU would give the guest devices of its own; \
                 set machine_type = \"pc-q35-10.2\""
            );
            check(unversioned, &[&refused]);
        }
        let deprecated = "warning: machine_type: pc-q35-7.2 is deprecated in QEMU 10.2.0 (PROGRAM); a later QEMU will not start the machine; set machine_type = \"pc-q35-10.2\": the next guest gets slightly newer devices";
        check("pc-q35-7.2", &[deprecated]);
        let unknown = "error: machine_type: QEMU 10.2.0 (PROGRAM) has no q35 machine type pc-q35-99; set machine_type = \
                       \"pc-q35-10.2\"";
        check("pc-q35-99", &[unknown]);
    }

    #[test]
    fn screen_needs_a_qemu_with_vnc() {
        let folder = tempfile::tempdir().unwrap();
        let version = "QEMU emulator version 10.2.0'; case \"$1\" in -vnc) exit 1;; esac; echo '";
        let program = answering(folder.path(), version, "exit 0");
        assert_eq!(with_program(&program, "accelerator = \"tcg\""), [""; 0]);
        let found = with_program(&program, "accelerator = \"tcg\"\ndisplay = \"vnc\"");
        let expect = format!(
            "error: display: QEMU 10.2.0 ({}) has no VNC server; set `qemu` to one that has, or remove display",
            program.display()
        );
        assert_eq!(found, [expect]);
        let qemu = Binary::find(None).expect("these tests need QEMU: apt-get install qemu-system-x86");
        assert_eq!(with_program(qemu.path(), "accelerator = \"tcg\"\ndisplay = \"vnc\""), [""; 0]);
    }

    #[test]
    fn own_rules_are_named_where_they_are_the_reason() {
        if !hearth_qemu::kernel_has_landlock() {
            return eprintln!("skipped: this kernel has no Landlock");
        }
        let folder = tempfile::tempdir().unwrap();
        let firmware = folder.path().join("bios");
        std::fs::write(&firmware, [0xf4; 65536]).unwrap();
        let qemu = Binary::find(None).expect("these tests need QEMU: apt-get install qemu-system-x86");
        let found = |more: &str| {
            let newest = qemu.newest_machine_type().unwrap();
            let machine_type = format!("machine_type = \"{newest},firmware={}\"", firmware.display());
            with_program(qemu.path(), &format!("accelerator = \"tcg\"\n{machine_type}\n{more}"))
        };
        assert_eq!(found("sandbox = false"), [] as [&str; 0]);
        let confined = found("");
        assert!(confined.len() == 1 && confined[0].contains("set sandbox = false"), "{confined:?}");
    }

    #[test]
    fn unsupported_machine_type_or_cpu_is_reported() {
        let qemu = Binary::find(None).expect("these tests need QEMU: apt-get install qemu-system-x86");
        let check = |more: &str, expect: &str| {
            let found = with_program(qemu.path(), &format!("accelerator = \"tcg\"\n{more}"));
            assert!(found.len() == 1 && found[0].contains(expect), "{more}: {found:?}");
        };
        assert_eq!(with_program(qemu.path(), "accelerator = \"tcg\"\ncpu_model = \"max,-avx2\""), [] as [&str; 0]);
        check("cpu_model = \"banana\"", "unable to find CPU model 'banana'");
        check("cpu_model = \"max,+banana\"", ".banana' not found");
        check("cpu_model = \"host\"", "requires KVM");
        let newest = qemu.newest_machine_type().unwrap();
        check(&format!("machine_type = \"{newest},banana=on\""), ".banana' not found");
        check("machine_type = \"pc-i440fx-7.2\"", "pc-i440fx-7.2 is not a versioned q35");
        check("machine_type = \"pc-q35-99\"", "has no q35 machine type pc-q35-99");
    }
}
