//! The workspace's test binaries, as cargo builds them, and their tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::jobs::Job;
use crate::shell::{self, ShellError};
use crate::{cargo, paths};

/// The package whose integration tests start machines.
const DRIVES_MACHINES: &str = "vmtest";

pub struct Binary {
    pub name: String,
    path: PathBuf,
    /// Its package's folder, where its tests run.
    folder: PathBuf,
    /// Whether its tests start machines.
    drives_machines: bool,
}

/// A message of `cargo --message-format=json`.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the test binaries that `targets` selects, or all, with the programs that they run.
pub fn build(targets: &[&str]) -> Result<Vec<Binary>, ShellError> {
    let mut command = cargo();
    // Without the workspace's other packages, cargo would choose other features of shared crates and compile them again.
    command.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]).args(targets);
    let messages = shell::output(command.stderr(Stdio::inherit()))?;
    Ok(messages.lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Binary> {
    let message: Message = serde_json::from_str(line).ok()?;
    message.profile.filter(|profile| profile.test)?;
    let (target, folder) = (message.target?, message.manifest_path?.parent()?.to_owned());
    let drives_machines = folder.ends_with(DRIVES_MACHINES) && target.kind == ["test"];
    Some(Binary { name: target.name, path: message.executable?, folder, drives_machines })
}

impl Binary {
    /// A job for each test that starts machines. All other tests of a binary, which take milliseconds, are one job.
    pub fn jobs(&self, filter: &[String]) -> Result<Vec<Job>, ShellError> {
        if !self.drives_machines {
            return Ok(vec![self.job(None, filter)]);
        }
        let ignored = self.list(&["--ignored"], filter)?;
        let tests = self.list(&[], filter)?.into_iter().filter(|test| !ignored.contains(test));
        Ok(tests.map(|test| self.job(Some(test), &["--exact".to_owned()])).collect())
    }

    /// A job for each ignored test.
    pub fn ignored_jobs(&self, filter: &[String]) -> Result<Vec<Job>, ShellError> {
        let only = ["--exact", "--ignored"].map(str::to_owned);
        Ok(self.list(&["--ignored"], filter)?.into_iter().map(|test| self.job(Some(test), &only)).collect())
    }

    fn job(&self, test: Option<String>, arguments: &[String]) -> Job {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder).args(&test).args(arguments).arg("--test-threads=1");
        command.env("HEARTH_BIN", hearth());
        Job { name: self.name.clone(), test, command }
    }

    /// Names of tests.
    fn list(&self, which: &[&str], filter: &[String]) -> Result<Vec<String>, ShellError> {
        let mut command = Command::new(&self.path);
        let listed = shell::output(command.args(["--list", "--format", "terse"]).args(which).args(filter))?;
        Ok(listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

/// The binary that VM tests drive, which cargo builds for a test of its own package.
pub fn hearth() -> PathBuf {
    paths::cargo_target().join(Path::new("debug/hearth"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_integration_tests_of_vmtest_drive_machines() {
        let check = |folder: &str, kind: &str, expect: bool| {
            let line = format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/{folder}/Cargo.toml","executable":"/t/x-1",
                   "target":{{"name":"x","kind":["{kind}"]}},"profile":{{"test":true}}}}"#
            );
            let binary = parse(&line).expect("it is a test binary");
            assert_eq!((binary.drives_machines, binary.name.as_str()), (expect, "x"), "{line}");
            assert_eq!(binary.folder, Path::new("/w").join(folder));
        };
        check("vmtest", "test", true);
        check("vmtest", "lib", false);
        check("crates/disk", "test", false);
        let program = r#"{"manifest_path":"/w/a/Cargo.toml","executable":"/t/x","target":{"name":"x","kind":["bin"]},"profile":{"test":false}}"#;
        for other in [program, r#"{"reason":"build-finished","success":true}"#, "warning: no JSON"] {
            assert!(parse(other).is_none(), "{other}");
        }
    }
}
