//! Environment: the variables that QEMU and other helpers get. The keeper's own may hold credentials of object stores.

use std::process::Command;

/// All that is passed on: where programs, libraries and temporary files are, and how people read and count time.
const PASSED_ON: [&str; 10] = [
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    // Of a QEMU that was unpacked rather than installed.
    "LD_LIBRARY_PATH",
    "QEMU_MODULE_DIR",
];

/// The program that `command` starts gets none of this process's variables but those that are harmless.
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
        // Cargo sets many more for its tests.
        assert!(std::env::vars_os().count() > PASSED_ON.len());
        let output = confine(Command::new("env").env("GIVEN_BEFORE", "1")).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let names: Vec<_> = said.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        assert!(names.contains(&"PATH"), "{names:?}");
        assert!(names.iter().all(|name| PASSED_ON.contains(name)), "{names:?}");
    }
}
