//! Resume: starts a keeper for every prepared machine and waits until all run.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use hearth_api::{EventKind, EventRecord, MachineState, MachineStatus, milliseconds_of};

use super::super::machine::keeper_command;
use super::super::text::milliseconds;
use super::super::{CliError, Context, Exit};
use crate::check::life;
use crate::client::Client;
use crate::event_log::read_file;
use crate::fleet_lock::FleetLock;
use crate::host_reload::{MachineNote, Outcome, PLACE_VARIABLE, Record};
use crate::runtime_root::RuntimeRoot;

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A new keeper takes its lock at once; on a busy host with many of them it took more than ten seconds.
const LOCK_WITHIN: Duration = Duration::from_secs(60);
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);
/// After a boot the network works before name resolution does.
const FLEET_PATIENCE: Duration = Duration::from_secs(60);

pub fn resume(context: &mut Context<'_>, path: &Path, patience: Duration) -> Result<Exit, CliError> {
    let mut record = Record::load(path)?;
    let down = bring_back(context, &mut record, path, patience)?;
    Ok(if down > 0 { Exit::Failed } else { Exit::Done })
}

/// The number of machines that do not run. The fleet lock is released when all do. Errors of output or record keep no
/// machine from resuming.
pub fn bring_back(
    context: &mut Context<'_>,
    record: &mut Record,
    path: &Path,
    patience: Duration,
) -> Result<usize, CliError> {
    let root = RuntimeRoot::new(&record.runtime_root);
    let deadline = Instant::now() + patience;
    let open: Vec<usize> =
        (0..record.machines.len()).filter(|&index| record.machines[index].outcome.is_open()).collect();
    // All keepers are started first, so that they start in parallel.
    let started: Vec<Result<Option<Child>, String>> =
        open.iter().map(|&index| start(&root, path, &record.machines[index])).collect();
    let mut told = Ok(());
    for (&index, started) in open.iter().zip(started) {
        let machine = &mut record.machines[index];
        match started.and_then(|keeper| await_running(&root, &machine.name, keeper, deadline)) {
            Ok(status) => {
                let records = read_file(&root.machine(&machine.name)).unwrap_or_default();
                found(machine, &status, outcome_since(&record.prepared_at, &records));
            }
            Err(why) => machine.decide(Outcome::Down, Some(why)),
        }
        let machine = machine.clone();
        told = told.and(record.save(path).map_err(CliError::from));
        let said = if context.json { context.write_json(&machine) } else { context.write_line(&sentence(&machine)) };
        told = told.and(said);
    }
    let down = record.machines.iter().filter(|machine| machine.outcome.is_open()).count();
    if down == 0
        && let Some(fleet) = &record.fleet
    {
        give_back(fleet)?;
        record.fleet = None;
        record.save(path)?;
    }
    told.map(|()| down)
}

/// Releases this host's slot of the fleet lock.
pub fn give_back(fleet: &FleetLock) -> Result<(), CliError> {
    Ok(fleet.release(FLEET_PATIENCE)?)
}

/// Outcome for a guest: how long it was paused, or why it was lost.
type GuestOutcome = Result<Option<f64>, String>;

/// The fate that the machine's events show since it was prepared. A keeper that was replaced since no longer reports
/// it.
fn outcome_since(prepared_at: &str, records: &[EventRecord]) -> Option<GuestOutcome> {
    let prepared_ms = milliseconds_of(prepared_at)?;
    let since = records.iter().rev().take_while(|record| milliseconds_of(&record.time) >= Some(prepared_ms));
    since.map(|record| &record.event).find_map(|event| match event {
        EventKind::Unparked { stood_ms, .. } => Some(Ok(Some(*stood_ms))),
        EventKind::ParkedLost { why } => Some(Err(why.clone())),
        _ => None,
    })
}

fn found(machine: &mut MachineNote, status: &MachineStatus, told: Option<GuestOutcome>) {
    let said = status.unparked.as_ref().map(|unparked| unparked.lost.clone().map_or(Ok(unparked.stood_ms), Err));
    match said.or(told) {
        Some(Ok(stood_ms)) => {
            machine.decide(Outcome::Resumed, None);
            machine.stood_ms = stood_ms.map(|ms| ms as u64);
        }
        Some(Err(why)) => machine.decide(Outcome::Booted, Some(why)),
        // Its keeper died before it was parked, and the next one found the guest in its QEMU.
        None if machine.outcome == Outcome::Begun => machine.outcome = Outcome::NotParked,
        None => machine.decide(Outcome::Booted, Some("its keeper found no parked guest".to_owned())),
    }
}

fn sentence(machine: &MachineNote) -> String {
    let name = &machine.name;
    match (machine.outcome, &machine.why) {
        (Outcome::Resumed, _) => {
            format!("{name}: resumed, paused for {}", milliseconds(machine.stood_ms.unwrap_or_default() as f64))
        }
        (Outcome::Booted, Some(why)) => format!("{name}: booted, because its guest could not resume: {why}"),
        (outcome, Some(why)) => format!("{name}: {}: {why}", outcome.words()),
        (outcome, None) => format!("{name}: {}", outcome.words()),
    }
}

/// Starts a keeper, unless the machine has one. Without a unit it is a child of this command.
fn start(root: &RuntimeRoot, record: &Path, machine: &MachineNote) -> Result<Option<Child>, String> {
    if life::has_keeper(&root.machine(&machine.name)) {
        return Ok(None);
    }
    match &machine.unit {
        Some(unit) => start_unit(unit).map(|()| None),
        None => spawn(root, record, machine).map(Some).map_err(|error| format!("cannot start a keeper: {error}")),
    }
}

fn start_unit(unit: &str) -> Result<(), String> {
    match Command::new("systemctl").args(["start", "--no-block", unit]).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`systemctl start {unit}` failed ({status})")),
        Err(error) => Err(format!("`systemctl start {unit}` cannot be run: {error}")),
    }
}

fn spawn(root: &RuntimeRoot, record: &Path, machine: &MachineNote) -> std::io::Result<Child> {
    keeper_command(root, &machine.name, &machine.file)?.env(PLACE_VARIABLE, record).spawn()
}

fn await_running(
    root: &RuntimeRoot,
    name: &str,
    mut keeper: Option<Child>,
    deadline: Instant,
) -> Result<MachineStatus, String> {
    let folder = root.machine(name);
    let client = Client::new(root.api_socket(name)).with_patience(ANSWER_PATIENCE);
    let lock_deadline = deadline.min(Instant::now() + LOCK_WITHIN);
    let mut had_keeper = false;
    loop {
        let has_ended = keeper.as_mut().is_some_and(|keeper| matches!(keeper.try_wait(), Ok(Some(_))));
        let own = keeper.as_ref().filter(|_| !has_ended).map(Child::id);
        let has_keeper = life::has_keeper(&folder);
        had_keeper |= has_keeper;
        let may_come = own.is_some() || !had_keeper && !has_ended && Instant::now() < lock_deadline;
        match client.status() {
            // Another keeper was faster. Until this one gives up, it would start the machine again if that one stopped it.
            Ok(status) if own.is_some_and(|pid| pid != status.keeper.pid) => {}
            Ok(status) if matches!(status.state, MachineState::Running | MachineState::Paused) => return Ok(status),
            Ok(status) if status.state == MachineState::Failed => {
                return Err(format!("it has failed; `hearth events {name}` shows why"));
            }
            // This keeper, or another one, is starting.
            _ if has_keeper || may_come => {}
            _ => return Err("its keeper ended or did not start; its log shows why".to_owned()),
        }
        if Instant::now() > deadline {
            return Err("it is not running yet".to_owned());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_tell_a_replaced_keepers_outcome() {
        let record = |second: u32, event| EventRecord {
            sequence: 1,
            time: format!("2026-03-01T12:00:{second:02}.500Z"),
            machine: "web".into(),
            incarnation: 1,
            event,
        };
        let unparked =
            |stood_ms| EventKind::Unparked { generation: 2, version: "7.2.0".into(), stood_ms, duration_ms: 1.0 };
        let other = || EventKind::KeeperTookOver { qemu_pid: 1, generation: 2 };
        let earlier = record(1, unparked(100.0));
        let check = |later: Vec<EventRecord>, expect: Option<GuestOutcome>| {
            let records: Vec<_> = std::iter::once(earlier.clone()).chain(later).collect();
            assert_eq!(outcome_since("2026-03-01T12:00:05.000Z", &records), expect);
        };
        check(vec![], None);
        check(vec![record(6, unparked(7.0)), record(7, other())], Some(Ok(Some(7.0))));
        check(vec![record(6, EventKind::ParkedLost { why: "gone".into() })], Some(Err("gone".into())));
    }
}
