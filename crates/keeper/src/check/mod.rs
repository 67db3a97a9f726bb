//! Everything that can be said about a machine without starting it.
//!
//! life (does it run already?) -> boot files -> names -> disks -> memory -> NVRAM -> dumps -> QEMU -> network -> sockets -> user
//!
//! Every check goes on after a problem: an operator mends all of them in one go. What a machine that runs holds itself
//! (its ports, its memory, its image locks) is no problem of its configuration and is not looked at then.

use crate::config::Config;
use crate::parked_guest::find_parked;
use crate::problem::{Problem, Severity};
use crate::runtime_root::RuntimeRoot;

mod boot;
mod disks;
mod dumps;
pub mod life;
mod memory;
mod names;
mod network;
mod nvram;
mod qemu;
mod surroundings;
#[cfg(test)]
mod tests;

use life::Life;

/// What the check is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `hearth check`: look only.
    Check,
    /// `hearth check --take-over`: it runs, and another keeper is about to go on with it.
    TakeOver,
    /// `hearth run`: the machine is about to start, or its living QEMU to be taken over.
    Run,
}

/// All problems, in the order in which they would come up.
pub fn check(config: &Config, root: &RuntimeRoot, purpose: Purpose) -> Vec<Problem> {
    let mut problems = Vec::new();
    let life = match purpose {
        Purpose::Check | Purpose::TakeOver => Life::of(config),
        Purpose::Run => Life::settled(config),
    };
    if life == Life::Kept {
        problems.push(running_already(&config.name, purpose));
    }
    let goes_on = purpose == Purpose::TakeOver || purpose == Purpose::Run && life == Life::Orphaned;
    of_next_start(goes_on, &mut problems, |problems| boot::check(&config.boot, problems));
    of_next_start(goes_on, &mut problems, |problems| names::check(config, problems));
    disks::check(config, life, purpose, &mut problems);
    memory::owner(config, &mut problems);
    memory::check(config, root, life, &mut problems);
    nvram::check(config, life, &mut problems);
    dumps::check(config, &mut problems);
    of_next_start(goes_on, &mut problems, |problems| qemu::check(config, purpose, problems));
    network::check(config, life, &mut problems);
    surroundings::check(config, root, &mut problems);
    problems
}

/// Problems that would keep the machine's next guest from starting, of what differs from the last one's configuration. The
/// keeper holds all else that it needs.
pub fn of_next_guest(last: &Config, next: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    boot::check(&next.boot, &mut problems);
    memory::check_growth(last, next, &mut problems);
    problems.retain(Problem::is_error);
    problems
}

/// A guest of this name that lives without a keeper, or is parked: it would go on instead of a new machine's, or be lost.
pub fn guest_in_the_way(config: &Config, root: &RuntimeRoot) -> Option<Problem> {
    let message = match life::orphaned_qemu(&config.runtime_folder) {
        Some(pid) => format!("already has a guest, in a QEMU (pid {pid}) without a keeper"),
        None => format!("already has a guest, parked in {}", find_parked(config, root)?.0.display()),
    };
    Some(Problem::error(&config.name, message, "continue it with `hearth run`, or choose another name (`--as`)"))
}

/// What only the next QEMU is started from. A guest that goes on in the one it has is not kept from its keeper by that: its disks
/// would hang.
fn of_next_start(goes_on: bool, problems: &mut Vec<Problem>, look: impl FnOnce(&mut Vec<Problem>)) {
    let known = problems.len();
    look(problems);
    if goes_on {
        problems[known..].iter_mut().for_each(|problem| problem.severity = Severity::Warning);
    }
}

fn running_already(name: &str, purpose: Purpose) -> Problem {
    match purpose {
        Purpose::Check | Purpose::TakeOver => {
            Problem::warning(name, "is already running", "changes take effect at its next start")
        }
        Purpose::Run => Problem::error(
            name,
            "is already running",
            format!("see `hearth status {name}`; stop it with `hearth stop {name}`"),
        ),
    }
}
