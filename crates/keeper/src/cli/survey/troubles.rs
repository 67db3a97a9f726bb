//! What is wrong with a machine: one list, from which its colour, its line and the number of machines that need somebody follow.

use std::time::Duration;

use hearth_api::{DiskStatus, DumpState, DumpStatus, MachineState, MachineStatus};
use serde::Serialize;

use super::Machine;
use crate::cli::text::uptime;

/// A disk is silent while its guest boots, and until the keeper has made a QEMU use it again.
const SILENCE_S: f64 = 30.0;
const ORPHANED: &str = "the guest runs without a keeper: its disk requests wait, and nobody guards its images";
const FORBIDDEN: &str = "it belongs to another user: what it does is known only to that user and to root";

/// What a colour says. The later one prevails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tone {
    /// It is off.
    Off,
    /// The guest runs.
    Good,
    /// It is on its way to another state, or somebody should look at it.
    Busy,
    /// Somebody must act.
    Bad,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    pub tone: Tone,
    /// What it is. It may contain addresses of object stores.
    pub text: String,
}

impl Trouble {
    fn bad(text: impl Into<String>) -> Self {
        Self { tone: Tone::Bad, text: text.into() }
    }
}

/// All of a machine's troubles, the worst ones first.
pub fn troubles(machine: &Machine) -> Vec<Trouble> {
    let listed = &machine.listed;
    let mut troubles = Vec::new();
    troubles.extend(machine.silent_for.map(silence));
    match &listed.status {
        Some(status) => {
            let failure = listed.failure.iter();
            troubles.extend(failure.map(|why| Trouble::bad(format!("the last keeper failed: {why}"))));
            troubles.extend(in_status(status));
        }
        None if listed.orphaned => troubles.push(Trouble::bad(ORPHANED)),
        None if listed.parked.is_some() => {}
        None if listed.forbidden => troubles.push(Trouble { tone: Tone::Busy, text: FORBIDDEN.to_owned() }),
        None => troubles.extend(listed.failure.iter().map(Trouble::bad)),
    }
    troubles.sort_by_key(|trouble| std::cmp::Reverse(trouble.tone));
    troubles
}

fn silence(silent: Duration) -> Trouble {
    Trouble::bad(format!("the keeper has not answered for {}", uptime(silent.as_secs_f64())))
}

fn in_status(status: &MachineStatus) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    troubles.extend(of_state(status).map(Trouble::bad));
    troubles.extend(status.disks.iter().flat_map(|disk| {
        let of_disk = of_disk(status, disk).into_iter();
        of_disk.map(|Trouble { tone, text }| Trouble { tone, text: format!("disk {}: {text}", disk.name) })
    }));
    let restore = status.restore.iter().flat_map(|restore| &restore.waits);
    troubles.extend(restore.map(|why| Trouble::bad(format!("a part of the snapshot cannot be loaded: {why}"))));
    let waiting = status.dumps.iter().filter(|dump| dump.state == DumpState::Waiting);
    troubles.extend(waiting.map(|dump| Trouble::bad(waiting_dump(dump))));
    let mirrors = status.nvram.iter().filter_map(|nvram| Some((&nvram.name, nvram.problem.as_ref()?)));
    troubles.extend(mirrors.map(|(name, why)| Trouble::bad(format!("the mirror of nvram {name} fails: {why}"))));
    let frozen = status.frozen.iter().filter_map(|frozen| frozen.problem.as_ref());
    troubles.extend(frozen.map(|why| Trouble::bad(format!("the guest's file systems stay frozen: {why}"))));
    troubles
}

/// Why its state is one in which somebody must act. None: it is not.
fn of_state(status: &MachineStatus) -> Option<String> {
    let why = |otherwise: &str| Some(status.state_why.clone().unwrap_or_else(|| otherwise.to_owned()));
    match (status.state, &status.next_start) {
        (MachineState::Failed, _) => why("an error has ended it"),
        (MachineState::Paused, _) if !goes_on_by_itself(status) => why("the guest is paused"),
        (MachineState::Recovering, Some(at)) => why(&format!("the next guest starts at {at}")),
        _ => None,
    }
}

/// Whether a paused guest stands still for something that is under way.
fn goes_on_by_itself(status: &MachineStatus) -> bool {
    let is_written = |dump: &DumpStatus| matches!(dump.state, DumpState::Planning | DumpState::Writing);
    let is_dumped = status.dumps.iter().any(|dump| dump.live && is_written(dump));
    status.save.is_some() || status.parking_since.is_some() || is_dumped
}

fn waiting_dump(dump: &DumpStatus) -> String {
    let why = dump.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    format!("the dump of incarnation {} waits{why}", dump.incarnation)
}

/// What is wrong with a disk, the worst first.
pub fn of_disk(status: &MachineStatus, disk: &DiskStatus) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    if disk.waiting_for_space > 0 {
        troubles.push(Trouble::bad(format!("{} requests wait for space", disk.waiting_for_space)));
    }
    let arrival = disk.arrival.iter().flat_map(|arrival| &arrival.waits);
    troubles.extend(arrival.map(|why| Trouble::bad(format!("a part cannot be fetched, and reads of it wait: {why}"))));
    if disk.silent && status.uptime_s.min(status.keeper.uptime_s) > SILENCE_S {
        troubles.push(Trouble { tone: Tone::Busy, text: "QEMU does not use it".to_owned() });
    }
    if disk.io_errors > 0 {
        troubles.push(Trouble { tone: Tone::Busy, text: format!("{} I/O errors", disk.io_errors) });
    }
    troubles
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cli::survey::Listed;
    use crate::sample;

    fn machine(change: impl FnOnce(&mut MachineStatus)) -> Machine {
        let mut status = sample::healthy();
        change(&mut status);
        let listed = Listed { name: "web".to_owned(), status: Some(status), ..Listed::default() };
        let (events, snapshots) = (Vec::new(), Vec::new());
        Machine { listed, silent_for: None, attached: false, rates: BTreeMap::new(), events, snapshots }
    }

    fn check(change: impl FnOnce(&mut MachineStatus), expect: &[(Tone, &str)]) {
        let found = troubles(&machine(change));
        let found: Vec<_> = found.iter().map(|trouble| (trouble.tone, trouble.text.as_str())).collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn what_makes_a_running_guest_wait_is_trouble() {
        use Tone::{Bad, Busy};
        check(|_| {}, &[]);
        check(|status| status.disks[0].waiting_for_space = 3, &[(Bad, "disk root: 3 requests wait for space")]);
        check(|status| status.disks[0].silent = true, &[(Busy, "disk root: QEMU does not use it")]);
        check(|status| (status.disks[0].silent, status.uptime_s) = (true, 2.0), &[]);
        check(
            |status| status.disks[0].arrival.as_mut().unwrap().waits.push("s3: refused".into()),
            &[(Bad, "disk root: a part cannot be fetched, and reads of it wait: s3: refused")],
        );
        check(
            |status| {
                status.disks[0].io_errors = 2;
                status.restore = sample::status().restore;
            },
            &[
                (
                    Bad,
                    "a part of the snapshot cannot be loaded: /srv/snapshots/web-1/ram: pages 7 to 22 of the guest's memory \
                     are damaged",
                ),
                (Busy, "disk root: 2 I/O errors"),
            ],
        );
        check(
            |status| (status.dumps[0].state, status.dumps[0].why) = (DumpState::Waiting, Some("no space".into())),
            &[(Bad, "the dump of incarnation 1 waits: no space")],
        );
        check(
            |status| status.nvram[0].problem = Some("no space".into()),
            &[(Bad, "the mirror of nvram journal fails: no space")],
        );
    }

    #[test]
    fn state_is_trouble_if_somebody_must_act() {
        use MachineState::{Paused, Recovering, Stopped};
        check(|status| status.state = Paused, &[(Tone::Bad, "the guest is paused")]);
        check(|status| (status.state, status.parking_since) = (Paused, Some("now".into())), &[]);
        check(
            |status| {
                status.state = Paused;
                (status.dumps[0].live, status.dumps[0].state) = (true, DumpState::Writing);
            },
            &[],
        );
        check(
            |status| (status.state, status.next_start) = (Recovering, Some("12:00".into())),
            &[(Tone::Bad, "the next guest starts at 12:00")],
        );
        check(|status| (status.state, status.state_why) = (Stopped, Some("the domain is off".into())), &[]);
    }
}
