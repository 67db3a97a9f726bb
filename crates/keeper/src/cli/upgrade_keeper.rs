//! `hearth upgrade-keeper`: sends the request, then follows events across both keepers until it is decided.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use hearth_api::{EventKind, UpgradeRequest};

use super::{CliError, Context, Exit, WaitArgument, absolute, events};
use crate::client::ClientError;

/// Time without a keeper: the old one has a few seconds to end, the new one a few to start.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[derive(Debug, Args)]
pub struct UpgradeKeeperArguments {
    /// Name of the machine.
    #[arg(add = super::complete::machines())]
    name: String,
    /// Program to switch to (default: the keeper's own path).
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    #[command(flatten)]
    wait: WaitArgument,
}

pub fn perform(context: &mut Context<'_>, arguments: UpgradeKeeperArguments) -> Result<Exit, CliError> {
    let UpgradeKeeperArguments { name, program, wait } = arguments;
    let request = UpgradeRequest { program: program.map(absolute) };
    let accepted = context.ask(&name, |client| client.send(&request))?;
    if !wait.no_wait {
        return follow(context, &name, accepted.since);
    }
    if context.json {
        context.write_json(&accepted)?;
    } else {
        context.write_line(&format!("{name}: accepted; `hearth events {name} --follow` shows progress"))?;
    }
    Ok(Exit::Done)
}

/// The old keeper's stream ends with it; its successor's continues the sequence numbers.
fn follow(context: &mut Context<'_>, name: &str, mut since: u64) -> Result<Exit, CliError> {
    let mut deadline = Instant::now() + PATIENCE;
    loop {
        match context.client(name).follow(since) {
            Ok(stream) => {
                for record in stream.map_while(Result::ok) {
                    since = record.sequence;
                    if context.json {
                        context.write_json(&record)?;
                    } else {
                        context.write_line(&events::line(&record))?;
                    }
                    if let Some(decided) = decided(&record.event) {
                        return decided.map(|()| Exit::Done).map_err(|what| machine_error(name, what));
                    }
                    deadline = Instant::now() + PATIENCE;
                }
            }
            Err(ClientError::NotRunning { .. } | ClientError::Silent { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        if Instant::now() > deadline {
            return Err(machine_error(name, "no keeper came back; take the machine over with `hearth run`"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn decided(event: &EventKind) -> Option<Result<(), &'static str>> {
    match event {
        EventKind::KeeperTookOver { .. } => Some(Ok(())),
        EventKind::KeeperUpgradeFailed { .. } => Some(Err("the upgrade failed and the old keeper continues")),
        EventKind::IncarnationStarted { .. } => {
            Some(Err("the guest ended during the upgrade, and a new one was started"))
        }
        _ => None,
    }
}

fn machine_error(name: &str, what: &str) -> CliError {
    CliError::Machine { name: name.to_owned(), what: what.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upgrade_follows_program_and_age() {
        let hands_over = EventKind::KeeperHandsOver { program: "/usr/bin/hearth".into(), version: "0.2.0".into() };
        assert_eq!(decided(&hands_over), None);
        assert_eq!(decided(&EventKind::Started { pid: 1, version: "0.2.0".into() }), None);
        assert_eq!(decided(&EventKind::KeeperTookOver { qemu_pid: 2, generation: 1 }), Some(Ok(())));
        assert!(decided(&EventKind::KeeperUpgradeFailed { why: "it is old".into() }).is_some_and(|end| end.is_err()));
        let started = EventKind::IncarnationStarted { generation: 2, warm: false };
        assert!(decided(&started).is_some_and(|end| end.is_err()));
    }
}
