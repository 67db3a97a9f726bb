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
use hearth_api::{DomainEnded, DomainStarts, ErrorWord, StopRequest};
use hearth_libvirt::definition;
use hearth_libvirt::virsh::{Virsh, VirshError};
use hearth_qemu::bounded::{self, Finished};
use hearth_recovery::journal::Journal;

use super::claim::NotServed;
use super::machine::{KEEPER_LOG, keeper_command};
use super::{CliError, Exit, claim};
use crate::attachment::Attachment;
use crate::check::life;
use crate::client::Client;
use crate::config::Config;
use crate::event_log::last_failure;
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
/// The domain starts now, in libvirt's own order: it must not wait for what the unit of a machine waits for at a host's boot, such as
/// a network that a guest is to provide.
const AT_ONCE: &str = "--job-mode=ignore-dependencies";
/// systemctl only has to pass it on.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
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
    let attachment = Attachment::of(domain);
    if wanted.is_empty() {
        if attachment.is_detached() {
            end_detached(root, domain, &attachment);
        }
        return Ok(Exit::Done);
    }
    let file = attachment.file();
    let again = || match attachment.definition() {
        Ok(None) => claim::images_by_hand(domain),
        _ => format!("run `hearth attach {domain}`, or give its disks back to libvirt: `hearth detach {domain}`"),
    };
    let config = Config::load(&file, root).map_err(|problems| NotServed {
        what: format!("Hearth cannot serve the disks of {domain}: {}", problems[0]),
        remedy: match file.exists() {
            true => format!("correct {0}: `hearth check {0}` names all that is wrong", file.display()),
            false => again(),
        },
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
        remedy: format!(
            "`hearth check {}` may name what is wrong, with remedies; see also `journalctl -u hearth@{domain}.service`, or {}",
            file.display(),
            log.display()
        ),
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

/// Removes what is left of a domain that was detached while it ran, and saved then, after its saved guest was dropped.
fn end_detached(root: &RuntimeRoot, domain: &str, attachment: &Attachment) {
    if life::has_keeper(&root.machine(domain)) {
        // It removes the files when it ends. Without an answer it ends all the same once `keep_memory` is over.
        let _ = Client::new(root.api_socket(domain)).with_patience(START_PATIENCE).send(&StopRequest { force: true });
    } else {
        attachment.remove();
    }
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
            start_unit(Path::new("systemctl"), domain, &root.machine(domain), START_PATIENCE)?;
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
fn start_unit(systemctl: &Path, domain: &str, runtime: &Path, patience: Duration) -> Result<(), String> {
    let unit = format!("hearth@{domain}.service");
    match bounded::run(Command::new(systemctl).args(["start", AT_ONCE, &unit]), patience) {
        Ok(finished) if finished.succeeded() => return Ok(()),
        Ok(Finished { status: None, .. }) => {
            // It may have much memory to sum up. Stopped here, it would begin anew with the next start.
            let seconds = patience.as_secs();
            return Err(format!(
                "is not ready after {seconds} s, but goes on: see `systemctl status {unit}`, and start {domain} again"
            ));
        }
        Ok(_) => {}
        Err(error) => return Err(format!("cannot be started with systemctl: {error}")),
    }
    if !needs_keeper(runtime) {
        // systemd would try again without end for a domain that is off. The hook must not wait for it.
        let _ = bounded::run(Command::new(systemctl).args(["stop", "--no-block", &unit]), STOP_PATIENCE);
    }
    match last_failure(runtime) {
        Some(why) => Err(format!("does not start; its last error: {why}")),
        None => Err(format!("does not start: see `systemctl status {unit}`")),
    }
}

/// Whether the domain has a QEMU, or `hearth host` is to start it after a crash: then its keeper must come back by itself.
fn needs_keeper(runtime: &Path) -> bool {
    match Journal::load(&runtime.join("journal.json")) {
        Ok(None) => false,
        Ok(Some(journal)) => journal.ordered.is_some() || life::names_living_qemu(&journal),
        // It may name a QEMU.
        Err(_) => true,
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
    use std::os::unix::fs::PermissionsExt;

    use hearth_recovery::journal::OrderNote;

    use super::*;
    use crate::failure;

    /// Starts the unit by a systemctl that is this script, for a domain with its files in `runtime`. Returns the error, and all words
    /// that systemctl got.
    fn start(script: &str, runtime: &Path, patience_s: u64) -> (Option<String>, String) {
        let folder = tempfile::tempdir().unwrap();
        let (systemctl, words) = (folder.path().join("systemctl"), folder.path().join("words"));
        let script = format!("#!/bin/sh\necho \"$@\" >>{}\n[ \"$1\" = start ] || exit 0\n{script}\n", words.display());
        fs::write(&systemctl, script).unwrap();
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        let done = start_unit(&systemctl, "web", runtime, Duration::from_secs(patience_s));
        (done.err(), fs::read_to_string(words).unwrap())
    }

    const STARTED: &str = "start --job-mode=ignore-dependencies hearth@web.service\n";
    const GIVEN_UP: &str =
        "start --job-mode=ignore-dependencies hearth@web.service\nstop --no-block hearth@web.service\n";

    #[test]
    fn unit_that_does_not_start_is_given_up_with_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let check = |script, patience_s, error: Option<&str>, words: &str| {
            assert_eq!(start(script, folder.path(), patience_s), (error.map(str::to_owned), words.to_owned()));
        };
        check("exit 0", 60, None, STARTED);
        check("exit 1", 60, Some("does not start: see `systemctl status hearth@web.service`"), GIVEN_UP);
        failure::record("web", folder.path(), "/srv/web.img: no such file");
        check("exit 1", 60, Some("does not start; its last error: /srv/web.img: no such file"), GIVEN_UP);
    }

    #[test]
    fn unit_that_is_not_ready_yet_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let (error, words) = start("exec sleep 1000", folder.path(), 1);
        let late =
            "is not ready after 1 s, but goes on: see `systemctl status hearth@web.service`, and start web again";
        assert_eq!((error.as_deref(), words.as_str()), (Some(late), STARTED));
    }

    #[test]
    fn unit_of_a_living_qemu_is_not_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let check = |journal: &Journal, words: &str| {
            journal.save(&folder.path().join("journal.json")).unwrap();
            assert_eq!(start("exit 1", folder.path(), 60).1, words);
        };
        let mut journal = Journal::new("web", 1 << 30);
        check(&journal, GIVEN_UP);
        journal.ordered = Some(OrderNote::Reboot { cold: false });
        check(&journal, STARTED);
        (journal.ordered, journal.qemu) = (None, Some(crate::sample::qemu_identity(std::process::id())));
        check(&journal, GIVEN_UP);
        journal.qemu = Some(crate::sample::this_process());
        check(&journal, STARTED);
        fs::write(folder.path().join("journal.json"), "torn").unwrap();
        assert_eq!(start("exit 1", folder.path(), 60).1, STARTED);
    }

    #[test]
    fn made_hook_calls_only_this_program() {
        let script = script(Path::new("/opt/hearth"));
        assert!(script.contains("exec '/opt/hearth' hook \"$@\"") && !script.contains("/usr/bin/"), "{script}");
    }
}
