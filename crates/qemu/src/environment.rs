//! Environment: the variables that QEMU and other child programs get. The keeper's own variables may contain
//! credentials.

use std::process::Command;

/// All variables that are passed on: paths of programs, libraries and temporary files, language and time zone.
const PASSED_ON: [&str; 10] = [
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    // For a QEMU that was unpacked and not installed.
    "LD_LIBRARY_PATH",
    "QEMU_MODULE_DIR",
];

/// Clears the environment of `command`, except for the variables in `PASSED_ON`.
pub fn confine(command: &mut Command) -> &mut Command {
    command.env_clear();
    for name in PASSED_ON {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_variables_are_passed_on() {
        // Cargo sets many more variables for its tests.
        assert!(std::env::vars_os().count() > PASSED_ON.len());
        let output = confine(Command::new("env").env("GIVEN_BEFORE", "1")).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let names: Vec<_> = said.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        assert!(names.contains(&"PATH"), "{names:?}");
        assert!(names.iter().all(|name| PASSED_ON.contains(name)), "{names:?}");
    }
}
