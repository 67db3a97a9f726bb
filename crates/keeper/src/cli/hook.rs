//! `hook`: what libvirt calls when it starts and ends a domain's QEMU (https://libvirt.org/hooks.html).
//!
//! prepare: before QEMU is started: starts the keeper, and has it serve the disks. An error here ends the start, with these words in
//! libvirt's own message. release: after QEMU's end, or after a start that failed: tells the keeper.
//!
//! libvirt calls it for every domain, with the definition on standard input. It must not call libvirt.
//!
//! libvirt looks for hooks when it starts. One that is installed later is not called, and a domain of ours would wait for its disks
//! without end: so `attach` makes sure that it is (`is_live`).

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use hearth_api::{DomainEnded, DomainStarts, ErrorWord};
use hearth_libvirt::definition;
use hearth_libvirt::virsh::{Virsh, VirshError};
use hearth_qemu::bounded::{self, Finished};

use super::claim::NotServed;
use super::machine::{KEEPER_LOG, keeper_command};
use super::{CliError, Exit, claim};
use crate::attachment::Attachment;
use crate::check::life;
use crate::client::Client;
use crate::config::Config;
use crate::folders::{CACHE_MAP, disk_socket};
use crate::runtime_root::RuntimeRoot;

/// The script that calls this program.
pub const PATH: &str = "/etc/libvirt/hooks/qemu.d/hearth";
/// The script as the package installs it. dpkg asks about one that differs.
const SCRIPT: &str = include_str!("../../../../packaging/libvirt-hook");
/// This program in the script.
const PROGRAM: &str = "'/usr/bin/hearth'";
/// A domain that is never to run: the hook refuses its start, and so shows that it is called.
const PROBE: &str = "hearth-hook-probe";
const PROBE_ANSWER: &str = "the hook of Hearth is called";
/// A keeper that starts may wait for the lock of an image.
const START_PATIENCE: Duration = Duration::from_secs(60);
const START_STEP: Duration = Duration::from_millis(10);
/// Lines of a keeper's log in an error.
const LAST_LINES: usize = 3;

#[derive(Debug, Args)]
pub struct HookArguments {
    /// The domain.
    domain: String,
    /// What libvirt is doing.
    operation: String,
    /// What else libvirt says of it.
    _more: Vec<String>,
}

pub fn perform(root: &RuntimeRoot, arguments: &HookArguments) -> Result<Exit, CliError> {
    let HookArguments { domain, operation, .. } = arguments;
    let mut xml = String::new();
    // libvirt waits until all of it is read.
    io::stdin().read_to_string(&mut xml)?;
    match operation.as_str() {
        "prepare" if domain == PROBE => Err(CliError::Hook(PROBE_ANSWER.to_owned())),
        "prepare" => prepare(root, domain, &xml).map_err(|error| CliError::Hook(error.to_string())),
        "release" => {
            if !claim::own_sockets(domain, &xml, root).is_empty() {
                // A keeper that is gone has nothing to close.
                let _ = Client::new(root.api_socket(domain)).send(&DomainEnded {});
            }
            Ok(Exit::Done)
        }
        _ => Ok(Exit::Done),
    }
}

/// Has the domain's disks served.
fn prepare(root: &RuntimeRoot, domain: &str, xml: &str) -> Result<Exit, NotServed> {
    claim::must_be_of(domain, xml, root)?;
    let wanted = claim::own_sockets(domain, xml, root);
    if wanted.is_empty() {
        return Ok(Exit::Done);
    }
    let attachment = Attachment::of(domain);
    let file = attachment.file();
    let again = || match attachment.definition() {
        Ok(None) => claim::images_by_hand(domain),
        _ => format!("run `hearth attach {domain}`, or give its disks back to libvirt: `hearth detach {domain}`"),
    };
    let config = Config::load(&file, root).map_err(|problems| NotServed {
        what: format!("Hearth cannot serve the disks of {domain}: {}", problems[0]),
        remedy: again(),
    })?;
    let disks = config.devices.disks.iter().map(|disk| disk.name.as_str());
    let cache_map = config.guest.refill.as_ref().map(|_| CACHE_MAP);
    let served: Vec<_> = disks.chain(cache_map).map(|disk| disk_socket(&config.folders.runtime, disk)).collect();
    if let Some(other) = wanted.iter().find(|socket| !served.contains(socket)) {
        let what = format!("{domain} has a disk at {}, which is not in {}", other.display(), file.display());
        return Err(NotServed { what, remedy: again() });
    }
    let log = root.machine(domain).join(KEEPER_LOG);
    let failed = |what: String| NotServed {
        what: format!("the keeper of {domain} {what}"),
        remedy: format!("see `journalctl -u hearth@{domain}`, or {}", log.display()),
    };
    let client = Client::new(root.api_socket(domain)).with_patience(START_PATIENCE);
    start_keeper(root, domain, &file, &client).map_err(failed)?;
    let mut answered = client.send(&DomainStarts {});
    if answered.as_ref().is_err_and(|error| error.is_refusal(ErrorWord::MachineEnded)) {
        // The file was changed since it was started.
        await_end(&root.machine(domain));
        start_keeper(root, domain, &file, &client).map_err(failed)?;
        answered = client.send(&DomainStarts {});
    }
    answered.map(|_| Exit::Done).map_err(|error| failed(format!("does not serve its disks: {}", crate::chain(&error))))
}

/// Waits until the machine has no keeper.
fn await_end(runtime: &Path) {
    let deadline = Instant::now() + START_PATIENCE;
    while life::has_keeper(runtime) && Instant::now() < deadline {
        std::thread::sleep(START_STEP);
    }
}

/// Starts the domain's keeper, unless it has one, and waits until it takes requests.
fn start_keeper(root: &RuntimeRoot, domain: &str, file: &Path, client: &Client) -> Result<(), String> {
    let mut keeper = match life::has_keeper(&root.machine(domain)) {
        true => None,
        false if is_systemd_in_charge() => {
            start_unit(&mut Command::new("systemctl"), domain, START_PATIENCE)?;
            None
        }
        false => {
            let spawned = keeper_command(root, domain, file).and_then(|mut command| command.spawn());
            Some(spawned.map_err(|error| format!("cannot be started: {error}"))?)
        }
    };
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        match client.status() {
            Ok(_) => return Ok(()),
            Err(_) if keeper.as_mut().is_some_and(|keeper| matches!(keeper.try_wait(), Ok(Some(_)))) => {
                return Err(format!("has ended: {}", last_words(&root.machine(domain).join(KEEPER_LOG))));
            }
            Err(error) if Instant::now() > deadline => return Err(format!("does not answer: {error}")),
            Err(_) => std::thread::sleep(START_STEP),
        }
    }
}

/// The last lines of a keeper's log.
fn last_words(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join(" / ")
}

fn is_systemd_in_charge() -> bool {
    Path::new("/run/systemd/system").exists()
}

/// Runs `systemctl start`, which waits for as long as the unit takes. libvirt waits for its hook without a limit.
fn start_unit(systemctl: &mut Command, domain: &str, patience: Duration) -> Result<(), String> {
    let unit = format!("hearth@{domain}.service");
    match bounded::run(systemctl.args(["start", &unit]), patience) {
        Ok(Finished { status: None, .. }) => {
            Err(format!("is not ready after {} s: see `systemctl status {unit}`", patience.as_secs()))
        }
        Ok(finished) if finished.succeeded() => Ok(()),
        Ok(_) => Err(format!("does not start: see `systemctl status {unit}`")),
        Err(error) => Err(format!("cannot be started with systemctl: {error}")),
    }
}

/// Makes libvirt's hook, unless the package has.
pub fn install() -> io::Result<()> {
    if Path::new(PATH).exists() {
        return Ok(());
    }
    let program = std::env::current_exe()?;
    if let Some(folder) = Path::new(PATH).parent() {
        fs::create_dir_all(folder)?;
    }
    let mut file = OpenOptions::new().create_new(true).write(true).mode(0o755).open(PATH)?;
    file.write_all(script(&program).as_bytes())
}

/// The script that calls `program`.
fn script(program: &Path) -> String {
    SCRIPT.replace(PROGRAM, &format!("'{}'", program.display()))
}

/// Whether libvirt calls the hook: a domain that the hook refuses must not start. `xml`: a definition whose QEMU works.
pub fn is_live(virsh: &Virsh, xml: &str) -> Result<bool, CliError> {
    let probe = definition::empty(xml, PROBE).map_err(|error| CliError::Hook(crate::chain(&error)))?;
    match virsh.create_paused(&probe) {
        Ok(()) => {
            virsh.destroy(PROBE)?;
            Ok(false)
        }
        Err(VirshError::Failed { said, .. }) if said.contains(PROBE_ANSWER) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_that_does_not_get_ready_is_given_up() {
        let start = |script: &str, patience| {
            let mut systemctl = Command::new("sh");
            start_unit(systemctl.args(["-c", script]), "web", Duration::from_secs(patience))
        };
        assert_eq!(
            start("exec sleep 1000", 1).unwrap_err(),
            "is not ready after 1 s: see `systemctl status hearth@web.service`"
        );
        assert!(start("exit 1", 60).unwrap_err().starts_with("does not start"));
        assert!(start("exit 0", 60).is_ok());
    }

    #[test]
    fn made_hook_calls_only_this_program() {
        let script = script(Path::new("/opt/hearth"));
        assert!(script.contains("exec '/opt/hearth' hook \"$@\"") && !script.contains("/usr/bin/"), "{script}");
    }
}
