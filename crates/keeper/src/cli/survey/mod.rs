//! What the machines of this host do now, with or without keepers.
//!
//! names -> each machine is looked at in a thread of its own (`look`) -> `ls`, or the collector of page, metrics and `top`

mod addresses;
mod collector;
#[cfg(test)]
pub mod fake;
mod rates;
mod troubles;
mod view;

use std::collections::BTreeSet;
use std::time::Duration;

use hearth_api::{ErrorWord, MachineState, MachineStatus};
use serde::Serialize;

pub use collector::{Collector, Machine, Survey};
pub use troubles::Tone;
pub use view::{Disk, MachineView, Memory, View};

use super::parked::{self, ParkedGuest};
use crate::attachment::Attachment;
use crate::check::life;
use crate::client::Client;
use crate::event_log::last_failure;
use crate::host_reload::Record;
use crate::runtime_root::RuntimeRoot;

/// One machine that hangs must not keep the others from being seen.
const PATIENCE: Duration = Duration::from_secs(2);

/// One machine, as it was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Listed {
    pub name: String,
    /// None: no keeper answers.
    pub status: Option<MachineStatus>,
    /// Why there is no status.
    pub why: Option<String>,
    /// The guest runs without a keeper; `hearth run` takes it over.
    pub orphaned: bool,
    /// The guest is parked in memory, without QEMU and keeper.
    pub parked: Option<ParkedGuest>,
    /// The error that ended the last keeper, until a guest runs again.
    pub failure: Option<String>,
    /// A keeper lives, but does not answer.
    pub silent: bool,
    /// It belongs to another user: nothing else is known.
    pub forbidden: bool,
}

/// State of a machine whose keeper hangs.
const NO_ANSWER: &str = "no answer";

impl Listed {
    /// Its state, in the words of all lists.
    pub fn state(&self) -> &'static str {
        match self {
            Self { status: Some(status), .. } => status.state.name(),
            Self { parked: Some(_), .. } => "parked",
            Self { orphaned: true, .. } => "keeper died",
            Self { silent: true, .. } => NO_ANSWER,
            Self { forbidden: true, .. } => "no permission",
            Self { failure: Some(_), .. } => "failed",
            _ => "not running",
        }
    }
}

impl Machine {
    /// Its state, in the words of all lists. A keeper that does not answer may have had another one last.
    fn state(&self) -> &'static str {
        if self.silent_for.is_some() { NO_ANSWER } else { self.listed.state() }
    }
}

/// Names of the machines that have or had a keeper since the host's start, or whose guests are parked.
pub fn names(root: &RuntimeRoot, record: Option<&Record>) -> BTreeSet<String> {
    // A runtime folder ends with the host's kernel; a parked guest does not.
    let parked = record.iter().flat_map(|record| record.names_parked_in(root.path()));
    root.names().into_iter().chain(parked).collect()
}

/// Names of the attached domains, if this is the runtime root that libvirt's hook uses.
fn attached(root: &RuntimeRoot) -> BTreeSet<String> {
    let is_hosts = *root == RuntimeRoot::new("/run/hearth");
    if is_hosts { Attachment::names().into_iter().collect() } else { BTreeSet::new() }
}

/// Looks at all machines at once.
pub fn look_at_all(root: &RuntimeRoot) -> Vec<Listed> {
    let record = Record::of_this_host();
    let names = names(root, record.as_ref());
    std::thread::scope(|scope| {
        let record = record.as_ref();
        let looks: Vec<_> = names.into_iter().map(|name| scope.spawn(move || look(root, record, name))).collect();
        looks.into_iter().map(|look| look.join().expect("a look does not panic")).collect()
    })
}

/// Asks a machine's keeper for its status, and looks at its files if there is no answer.
pub fn look(root: &RuntimeRoot, record: Option<&Record>, name: String) -> Listed {
    match Client::new(root.api_socket(&name)).with_patience(PATIENCE).status() {
        Ok(status) => {
            let starts = status.state == MachineState::Starting;
            let failure = if starts { last_failure(&root.machine(&name)) } else { None };
            Listed { name, status: Some(status), failure, ..Listed::default() }
        }
        Err(error) => {
            let folder = root.machine(&name);
            let orphaned = life::orphaned_qemu(&folder).is_some();
            let silent = !orphaned && life::has_keeper(&folder);
            // A keeper that does not answer yet may be about to resume it.
            let waits = error.is_refusal(ErrorWord::MachineEnded) || !orphaned && !silent;
            let parked = if waits { parked::find(root, record, &name) } else { None };
            let is_gone = !orphaned && !silent && parked.is_none();
            let failure = if is_gone { last_failure(&folder) } else { None };
            let forbidden = life::is_anothers(&folder);
            Listed { name, status: None, why: Some(error.to_string()), orphaned, parked, failure, silent, forbidden }
        }
    }
}
