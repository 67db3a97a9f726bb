//! All tests in one `cargo test`, and their sum as the last line: `N passed, N failed`.
//!
//! The sum is what the test binaries themselves report. A binary that dies has no report: cargo's own failure then
//! counts as one failed test, so that the line never looks better than the exit code.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::shell::ShellError;
use crate::{cargo, paths};

/// Names a file, for the test that writes it and the bench that reads it.
pub const HOST_RELOAD_FIGURES: &str = "HEARTH_HOST_RELOAD_FIGURES";

#[derive(Debug, Default, PartialEq)]
pub struct Summary {
    pub passed: u64,
    pub failed: u64,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

impl Summary {
    /// Of two runs.
    pub fn and(&self, other: Self) -> Self {
        Self { passed: self.passed + other.passed, failed: self.failed + other.failed }
    }

    /// `test result: ok. 5 passed; 0 failed; 0 ignored; ...`
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let count_of = |word: &str| {
            let part = result.split([';', '.']).map(str::trim).find(|part| part.ends_with(word))?;
            part.split(' ').next()?.parse::<u64>().ok()
        };
        self.passed += count_of(" passed").unwrap_or(0);
        self.failed += count_of(" failed").unwrap_or(0);
    }
}

/// The binary that VM tests drive, which cargo builds for one of its own tests. Asked for otherwise it would be built with other
/// features of what all crates share, and that compiled once more.
fn build_hearth() -> Result<(), ShellError> {
    crate::shell::run(cargo().args(["test", "--quiet", "--workspace", "--no-run", "--test", "program"]))
}

/// Runs every test of the workspace.
pub fn run(filter: &[String]) -> Result<Summary, ShellError> {
    build_hearth()?;
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-fail-fast"]).args(filter);
    command.env("HEARTH_BIN", paths::cargo_target().join("debug/hearth"));
    count(command)
}

/// Runs the ignored tests of one test binary of `vmtest`, so many at once.
pub fn run_ignored(binary: &str, filter: &[String], at_once: usize) -> Result<Summary, ShellError> {
    build_hearth()?;
    count(ignored(binary, filter, at_once, &paths::cargo_target().join("debug/hearth")))
}

/// `hearth`: the binary that they drive.
fn ignored(binary: &str, filter: &[String], at_once: usize, hearth: &Path) -> Command {
    let mut command = cargo();
    let at_once = format!("--test-threads={at_once}");
    command.args(["test", "--workspace", "--test", binary, "--", "--ignored", &at_once]).args(filter);
    command.env("HEARTH_BIN", hearth);
    command
}

/// The host reload of `make test-nested` with the release binary; its figures are in `figures` afterwards, if it came that far.
pub fn reload_host(figures: &Path) -> Result<Summary, ShellError> {
    let filter = ["outside::guests_go_on_under_another_host_kernel".to_owned()];
    let mut command = ignored("nested", &filter, 1, &paths::cargo_target().join("release/hearth"));
    command.env(HOST_RELOAD_FIGURES, figures);
    count(command)
}

fn count(mut command: Command) -> Result<Summary, ShellError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start_error = |source| ShellError::Start { program: program.clone(), source };
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(start_error)?;
    let mut summary = Summary::default();
    let output = BufReader::new(child.stdout.take().expect("stdout was piped"));
    // Split by bytes: a test may print what is not UTF-8.
    for line in output.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        summary.add(&line);
    }
    let status = child.wait().map_err(start_error)?;
    if !status.success() && summary.failed == 0 {
        println!("cargo test ended with {status} although no test reported a failure: a test binary died");
        summary.failed = 1;
    }
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(script: &str, passed: u64, failed: u64) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        assert_eq!(count(command).unwrap(), Summary { passed, failed });
    }

    #[test]
    fn results_of_all_binaries_are_added() {
        let script =
            "echo 'test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.1s'
             echo 'noise 7 passed; 7 failed'
             echo 'test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out'; exit 101";
        check(script, 17, 3);
    }

    #[test]
    fn a_binary_that_dies_counts_as_a_failure() {
        check("echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; exit 101", 2, 1);
    }
}
