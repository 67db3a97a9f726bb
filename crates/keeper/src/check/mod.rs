//! Everything that can be checked about a machine without starting it.
//!
//! life (does it run already?) -> boot files -> names -> disks -> memory -> NVRAM -> dumps -> QEMU -> network -> sockets -> user
//!
//! Every check continues after a problem, so that an operator can fix all of them at once. Ports, memory and image
//! locks that the running machine itself holds are not checked.

use hearth_qemu::Binary;
use hearth_recovery::lazy_restore::Mode;

use crate::config::{Config, Owner};
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

/// Purpose of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `hearth check`: only report.
    Check,
    /// `hearth check --take-over`: the machine runs, and another keeper is about to take it over.
    TakeOver,
    /// `hearth run`: the machine is about to start, or its running QEMU to be taken over.
    Run,
}

/// All problems, in the order in which they would come up.
pub fn check(config: &Config, root: &RuntimeRoot, purpose: Purpose) -> Vec<Problem> {
    check_and_find_qemu(config, root, purpose).0
}

/// All problems, and the QEMU that was found, so that a start need not ask it for its version again.
pub fn check_and_find_qemu(config: &Config, root: &RuntimeRoot, purpose: Purpose) -> (Vec<Problem>, Option<Binary>) {
    let (mut problems, mut found) = (Vec::new(), None);
    if config.owner == Owner::Libvirt {
        return (of_domain(config, root, purpose), None);
    }
    let life = match purpose {
        Purpose::Check | Purpose::TakeOver => Life::of(config),
        Purpose::Run => Life::settled(config),
    };
    if life == Life::Kept {
        problems.push(running_already(&config.name, purpose));
    }
    let goes_on = purpose == Purpose::TakeOver || purpose == Purpose::Run && life == Life::Orphaned;
    of_next_start(goes_on, &mut problems, |problems| boot::check(&config.guest.boot, problems));
    of_next_start(goes_on, &mut problems, |problems| names::check(config, problems));
    disks::check(config, life, purpose, &mut problems);
    memory::owner(config, &mut problems);
    memory::check(config, root, life, &mut problems);
    nvram::check(config, life, &mut problems);
    dumps::check(config, &mut problems);
    of_next_start(goes_on, &mut problems, |problems| found = qemu::check(config, purpose, problems));
    network::check(config, life, &mut problems);
    surroundings::check(config, root, &mut problems);
    (problems, found)
}

/// Problems of a domain of libvirt. libvirt looks after everything but the disks and the machine's own folders.
fn of_domain(config: &Config, root: &RuntimeRoot, purpose: Purpose) -> Vec<Problem> {
    let mut problems = Vec::new();
    let life = if purpose == Purpose::Run { Life::settled(config) } else { Life::of(config) };
    if life == Life::Kept {
        problems.push(running_already(&config.name, purpose));
    }
    disks::check(config, life, purpose, &mut problems);
    memory::owner(config, &mut problems);
    dumps::check(config, &mut problems);
    surroundings::check_paths(config, root, &mut problems);
    problems
}

/// Problems that would keep the next guest from starting, among the keys that have changed. The keeper already holds
/// everything else.
pub fn of_next_guest(last: &Config, next: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    boot::check(&next.guest.boot, &mut problems);
    memory::check_growth(last, next, &mut problems);
    problems.retain(Problem::is_error);
    problems
}

/// Why a snapshot cannot be restored into this machine's memory folder in this mode.
pub fn no_restore(config: &Config, mode: Mode) -> Option<Problem> {
    memory::no_restore(config, mode)
}

/// A guest of this name that is parked, or runs without a keeper: the caller knows that no other keeper has the machine. It
/// would continue in place of a new machine's guest, or be lost.
pub fn guest_in_the_way(config: &Config, root: &RuntimeRoot) -> Option<Problem> {
    let message = match life::living_qemu(&config.folders.runtime) {
        Some(qemu) => format!("already has a guest, in a QEMU (pid {}) without a keeper", qemu.pid),
        None => format!("already has a guest, parked in {}", find_parked(config, root)?.0.display()),
    };
    Some(Problem::for_now(&config.name, message, "continue it with `hearth run`, or choose another name (`--as`)"))
}

/// Problems of what only the next QEMU needs. They must not keep a running guest from its keeper, because its disks
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
        Purpose::Run => Problem::for_now(
            name,
            "is already running",
            format!("see `hearth status {name}`; stop it with `hearth stop {name}`"),
        ),
    }
}
