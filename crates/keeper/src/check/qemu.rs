//! QEMU: there, new enough, and with the accelerator that was asked for.

use hearth_qemu::{Binary, Wanted, accelerator};

use crate::config::Config;
use crate::problem::Problem;

pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    match Binary::find(config.qemu.as_deref()) {
        Ok(binary) => problems.extend(kvm(config, &binary)),
        // The errors of this crate say themselves what to do.
        Err(error) => problems.push(Problem::error("qemu", crate::chain(&error), "")),
    }
}

/// Only KVM can be asked for in vain. Whether it works is tried: that /dev/kvm can be opened says little.
fn kvm(config: &Config, binary: &Binary) -> Option<Problem> {
    let wanted = Wanted::from(config.accelerator);
    if wanted != Wanted::Kvm {
        return None;
    }
    let error = accelerator::choose(binary, wanted, config.cpu_model.as_deref()).err()?;
    Some(Problem::error("accelerator", crate::chain(&error), ""))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::*;
    use crate::runtime_root::RuntimeRoot;

    /// A program with this text. A child writes it: had this process had it open for writing, a child of another test could
    /// still hold it open, and it could not be run ("Text file busy").
    fn program(folder: &Path, text: &str) -> PathBuf {
        let path = folder.join("qemu");
        let write = ["-c", "printf %s \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", text];
        assert!(Command::new("sh").args(write).arg(&path).status().unwrap().success());
        path
    }

    /// What is said of a program that answers `--version` like this.
    fn problems(answer: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let program = program(folder.path(), &format!("#!/bin/sh\necho '{answer}'\n"));
        let found = with_program(&program, "auto");
        found.iter().map(|problem| problem.replace(program.to_str().unwrap(), "PROGRAM")).collect()
    }

    fn with_program(program: &Path, accelerator: &str) -> Vec<String> {
        let text = format!(
            "name = \"web\"\nmemory = \"64MiB\"\nqemu = \"{}\"\naccelerator = \"{accelerator}\"\n[boot]\nkernel = \"k\"\n",
            program.display()
        );
        let config = Config::parse(&text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap();
        let mut problems = Vec::new();
        check(&config, &mut problems);
        problems.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_program_that_is_missing_a_stranger_or_too_old_is_named() {
        assert_eq!(problems("QEMU emulator version 7.2.0"), [] as [&str; 0]);
        assert_eq!(
            problems("QEMU emulator version 6.2.0 (Debian 1:6.2)"),
            ["error: qemu: PROGRAM: QEMU 6.2.0 is too old; Hearth needs 7.2.0 or later",]
        );
        assert_eq!(problems("bochs 2.7"), ["error: qemu: PROGRAM: does not say that it is QEMU, but \"bochs 2.7\""]);
        let missing = with_program(Path::new("/nowhere/qemu"), "auto");
        assert_eq!(
            missing,
            ["error: qemu: /nowhere/qemu: there is no such program; set `qemu` to a qemu-system-x86_64",]
        );
    }

    /// The program says that it is QEMU and runs no guest: KVM does not work with it, whatever the host has.
    #[test]
    fn kvm_that_does_not_work_is_a_problem_only_where_it_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let script = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version 7.2.0' && exit\necho 'no KVM today' >&2\nexit 1\n";
        let program = program(folder.path(), script);
        assert_eq!(with_program(&program, "tcg"), [] as [&str; 0]);
        assert_eq!(with_program(&program, "auto"), [] as [&str; 0]);
        let refused = with_program(&program, "kvm");
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0].starts_with("error: accelerator: KVM does not work here: "), "{refused:?}");
        assert!(refused[0].ends_with("; use accelerator = \"auto\" or \"tcg\""), "{refused:?}");
    }
}
