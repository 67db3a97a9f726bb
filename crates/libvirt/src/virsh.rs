//! virsh: libvirt's command line, the way in that every host with libvirt has, whatever its version.
//!
//! Each call is one process. What virsh says when it fails is the error.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

const STANDARD_INPUT: &str = "/dev/stdin";

/// The connection that virsh uses.
#[derive(Clone, Debug)]
pub struct Virsh {
    uri: String,
}

/// Why virsh did not do what it was told.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum VirshError {
    #[error("virsh is not installed (Debian: apt install libvirt-clients)")]
    Missing,
    #[error("cannot run virsh")]
    Run(#[source] io::Error),
    #[error("virsh {what}: {said}")]
    Failed { what: String, said: String },
}

impl Virsh {
    /// The host's own libvirt.
    pub fn system() -> Self {
        Self { uri: "qemu:///system".to_owned() }
    }

    /// The definition with which the domain starts next, with its secrets.
    pub fn definition(&self, domain: &str) -> Result<String, VirshError> {
        self.run(&["dumpxml", "--inactive", "--security-info", domain])
    }

    /// Defines a domain by this definition.
    pub fn define(&self, xml: &str) -> Result<(), VirshError> {
        self.run_with(&["define", STANDARD_INPUT], xml).map(drop)
    }

    /// Starts a domain by this definition that ends without a trace. Its processors stand still.
    pub fn create_paused(&self, xml: &str) -> Result<(), VirshError> {
        self.run_with(&["create", "--paused", STANDARD_INPUT], xml).map(drop)
    }

    /// Ends the domain's QEMU.
    pub fn destroy(&self, domain: &str) -> Result<(), VirshError> {
        self.run(&["destroy", domain]).map(drop)
    }

    /// Calls `tell` with the name of each domain whose guest is reset, as libvirt reports it. Returns when virsh ends, which it does
    /// with libvirt's daemon.
    pub fn follow_resets(&self, mut tell: impl FnMut(&str)) -> Result<(), VirshError> {
        let mut command = self.command(&["event", "--event", "reboot", "--loop"]);
        let mut virsh = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let lines = virsh.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines);
        lines.map_while(Result::ok).for_each(|line| {
            if let Some(domain) = domain_reset(&line) {
                tell(domain);
            }
        });
        virsh.wait().map(drop).map_err(VirshError::Run)
    }

    /// What the domain is doing: `running`, `shut off`.
    pub fn state(&self, domain: &str) -> Result<String, VirshError> {
        self.run(&["domstate", domain]).map(|state| state.trim().to_owned())
    }

    /// Whether its memory was saved by `virsh managedsave`: its next start goes on from there, with the disks as they were then.
    pub fn has_saved_memory(&self, domain: &str) -> Result<bool, VirshError> {
        self.run(&["dominfo", domain]).map(|info| says_saved(&info))
    }

    fn run(&self, arguments: &[&str]) -> Result<String, VirshError> {
        self.run_with(arguments, "")
    }

    fn run_with(&self, arguments: &[&str], input: &str) -> Result<String, VirshError> {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut virsh = command.spawn().map_err(failed)?;
        if let Some(mut stdin) = virsh.stdin.take() {
            // One that ends without reading it says why.
            let _ = stdin.write_all(input.as_bytes());
        }
        judged(arguments, virsh.wait_with_output().map_err(VirshError::Run)?)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("virsh");
        // Its messages are read by people and, where it matters, compared: in one language.
        command.args(["--connect", &self.uri]).args(arguments).env("LC_ALL", "C");
        command
    }
}

/// What virsh printed, or why it failed.
fn judged(arguments: &[&str], Output { status, stdout, stderr }: Output) -> Result<String, VirshError> {
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&stderr);
    let said = said.lines().map(|line| line.trim_start_matches("error: ")).filter(|line| !line.is_empty());
    Err(VirshError::Failed { what: arguments.join(" "), said: said.collect::<Vec<_>>().join("; ") })
}

fn failed(error: io::Error) -> VirshError {
    match error.kind() {
        io::ErrorKind::NotFound => VirshError::Missing,
        _ => VirshError::Run(error),
    }
}

/// What `virsh dominfo` says of saved memory.
fn says_saved(info: &str) -> bool {
    info.lines()
        .filter_map(|line| line.split_once(':'))
        .any(|(key, value)| key == "Managed save" && value.trim() == "yes")
}

/// The domain of an event that virsh prints: `event 'reboot' for domain 'web'`.
fn domain_reset(line: &str) -> Option<&str> {
    let (_, domain) = line.split_once("event 'reboot' for domain '")?;
    domain.rsplit_once('\'').map(|(domain, _)| domain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_memory_is_found_in_what_virsh_prints() {
        assert!(says_saved("Id:             -\nName:           web\nManaged save:   yes\n"));
        assert!(!says_saved("Name:           yes\nManaged save:   no\n") && !says_saved(""));
    }

    #[test]
    fn reset_domain_is_found_in_what_virsh_prints() {
        assert_eq!(domain_reset("event 'reboot' for domain 'web'"), Some("web"));
        assert_eq!(domain_reset("2026-01-01 00:00:00.000+0000: event 'reboot' for domain 'it's'"), Some("it's"));
        for other in ["", "event 'lifecycle' for domain 'web': Started Booted", "event 'reboot' for domain 'web"] {
            assert_eq!(domain_reset(other), None, "{other}");
        }
    }
}
