//! From a machine's name to its keeper.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hearth_api::ErrorWord;

use super::{CliError, Context, parked, service, words};
use crate::attachment::Attachment;
use crate::check::life;
use crate::client::{Client, ClientError};
use crate::config::is_name;
use crate::home::Home;
use crate::host_reload::Record;
use crate::runtime_root::RuntimeRoot;

/// Log of a keeper that another command started, in the machine's runtime folder.
pub const KEEPER_LOG: &str = "keeper.log";
/// Time for a keeper to show that it is there.
const PRESENCE_PATIENCE: Duration = Duration::from_secs(2);
/// The old keeper has a few seconds to end, the new one a few to start.
const REPLACEMENT_PATIENCE: Duration = Duration::from_secs(20);
const REPLACEMENT_STEP: Duration = Duration::from_millis(20);

impl Context<'_> {
    pub fn client(&self, name: &str) -> Client {
        Client::new(self.root.api_socket(name))
    }

    /// Asks a machine's keeper, and the next one if it is being replaced. If none runs, the error names the machines that do.
    pub fn ask<T>(&self, name: &str, question: impl Fn(&Client) -> Result<T, ClientError>) -> Result<T, CliError> {
        let (client, deadline) = (self.client(name), Instant::now() + REPLACEMENT_PATIENCE);
        let mut is_replaced = false;
        loop {
            let error = match question(&client) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let refused = error.is_refusal(ErrorWord::KeeperReplaced);
            is_replaced |= refused;
            // Between the two keepers there is none.
            let comes_yet = is_replaced && (refused || matches!(error, ClientError::NotRunning { .. }));
            if !comes_yet || Instant::now() > deadline {
                return Err(self.explained(name, error));
            }
            std::thread::sleep(REPLACEMENT_STEP);
        }
    }

    pub fn explained(&self, name: &str, error: ClientError) -> CliError {
        match error {
            ClientError::NotRunning { .. } => self.not_running(name),
            // Its keeper takes a moment to end.
            error if error.is_refusal(ErrorWord::MachineEnded) => {
                self.parked(name).unwrap_or_else(|| self.not_running(name))
            }
            other => other.into(),
        }
    }

    pub fn not_running(&self, name: &str) -> CliError {
        if let Some(qemu_pid) = life::orphaned_qemu(&self.root.machine(name)) {
            return CliError::Orphaned { name: name.to_owned(), qemu_pid };
        }
        // A keeper that does not answer yet may be about to resume its guest.
        let parked = if life::has_keeper(&self.root.machine(name)) { None } else { self.parked(name) };
        if parked.is_none() && Attachment::of(name).definition().is_ok_and(|definition| definition.is_some()) {
            return CliError::Off { name: name.to_owned() };
        }
        parked.unwrap_or_else(|| {
            let home =
                Some(&self.root).filter(|root| **root == RuntimeRoot::for_this_user()).and_then(|_| home_of(name));
            let hint = home.map_or_else(
                || {
                    let others: Vec<_> = running(&self.root).into_iter().filter(|other| other != name).collect();
                    words::others(&others, self.root.path())
                },
                |home| format!("start it with `{}`", start_command(&home, service::is_there())),
            );
            CliError::NotRunning { name: name.to_owned(), hint }
        })
    }

    fn parked(&self, name: &str) -> Option<CliError> {
        let guest = parked::find(&self.root, Record::of_this_host().as_ref(), name)?;
        Some(CliError::Parked { name: name.to_owned(), guest: Box::new(guest) })
    }
}

/// The home of a machine that has a configuration there.
fn home_of(name: &str) -> Option<Home> {
    let home = (is_name(name) && Home::is_known()).then(|| Home::of(name))?;
    home.file().exists().then_some(home)
}

/// What starts a machine that `hearth new` made. `in_background`: systemd can run it.
pub fn start_command(home: &Home, in_background: bool) -> String {
    match in_background {
        true => format!("hearth start {}", home.name()),
        false => format!("hearth run {}", home.file().display()),
    }
}

/// A command that runs a machine's keeper. It outlives this one, and has a log of its own.
pub fn keeper_command(root: &RuntimeRoot, name: &str, file: &Path) -> io::Result<Command> {
    let folder = root.machine(name);
    std::fs::create_dir_all(&folder)?;
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(folder.join(KEEPER_LOG))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--runtime-root").arg(root.path()).arg("run").arg(file);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // Ctrl-C must not reach the keeper.
    command.process_group(0);
    Ok(command)
}

/// Names of the machines whose keepers answer.
fn running(root: &RuntimeRoot) -> Vec<String> {
    let mut names = root.names();
    names.retain(|name| Client::new(root.api_socket(name)).with_patience(PRESENCE_PATIENCE).status().is_ok());
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_command_fits_the_host() {
        let home = Home::in_folder("web", Path::new("/srv"));
        assert_eq!(start_command(&home, true), "hearth start web");
        assert_eq!(start_command(&home, false), "hearth run /srv/etc/web.toml");
    }
}
