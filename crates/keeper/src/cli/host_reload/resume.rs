//! Resume: a keeper for every machine that was prepared, until all run.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hearth_api::{MachineState, MachineStatus};

use super::super::text::milliseconds;
use super::super::{CliError, Context, Exit};
use crate::check::life;
use crate::client::Client;
use crate::host_reload::{MachineNote, Outcome, PLACE_VARIABLE, Record};
use crate::runtime_root::RuntimeRoot;

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A keeper that is started takes its lock at once; on a busy host, where many start, it took more than ten seconds.
const LOCK_WITHIN: Duration = Duration::from_secs(60);
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

pub fn resume(context: &mut Context<'_>, path: &Path, patience: Duration) -> Result<Exit, CliError> {
    let mut record = Record::load(path)?;
    let down = bring_back(context, &mut record, path, patience)?;
    Ok(if down > 0 { Exit::Failed } else { Exit::Done })
}

/// How many do not run. The fleet's lock is given back when all do.
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
    // All first: they start side by side.
    let started: Vec<Result<Option<Child>, String>> =
        open.iter().map(|&index| start(&root, path, &record.machines[index])).collect();
    for (&index, started) in open.iter().zip(started) {
        let machine = &mut record.machines[index];
        match started.and_then(|keeper| await_running(&root, &machine.name, keeper, deadline)) {
            Ok(status) => found(machine, &status),
            Err(why) => machine.decide(Outcome::Down, Some(why)),
        }
        let machine = machine.clone();
        record.save(path)?;
        if context.json { context.write_json(&machine)? } else { context.write_line(&sentence(&machine))? }
    }
    let down = record.machines.iter().filter(|machine| machine.outcome.is_open()).count();
    if down == 0
        && let Some(fleet) = &record.fleet
    {
        fleet.release()?;
        record.fleet = None;
        record.save(path)?;
    }
    Ok(down)
}

fn found(machine: &mut MachineNote, status: &MachineStatus) {
    match &status.unparked {
        Some(unparked) if unparked.lost.is_none() => {
            machine.decide(Outcome::Resumed, None);
            machine.stood_ms = unparked.stood_ms.map(|ms| ms as u64);
        }
        Some(unparked) => machine.decide(Outcome::Booted, unparked.lost.clone()),
        // Its keeper died on the way, and the next one found the guest in its QEMU.
        None if machine.outcome == Outcome::Begun => machine.outcome = Outcome::NotParked,
        None => machine.decide(Outcome::Booted, Some("its keeper found no parked guest".to_owned())),
    }
}

fn sentence(machine: &MachineNote) -> String {
    let name = &machine.name;
    match (machine.outcome, &machine.why) {
        (Outcome::Resumed, _) => {
            format!("{name}: goes on, stood still for {}", milliseconds(machine.stood_ms.unwrap_or_default() as f64))
        }
        (Outcome::Booted, Some(why)) => format!("{name}: booted, its guest could not go on: {why}"),
        (outcome, Some(why)) => format!("{name}: {}: {why}", outcome.words()),
        (outcome, None) => format!("{name}: {}", outcome.words()),
    }
}

/// Fine if it has a keeper. One of no unit is this command's child.
fn start(root: &RuntimeRoot, record: &Path, machine: &MachineNote) -> Result<Option<Child>, String> {
    if life::has_keeper(&root.machine(&machine.name)) {
        return Ok(None);
    }
    match &machine.unit {
        Some(unit) => start_unit(unit).map(|()| None),
        None => spawn(root, record, machine).map(Some).map_err(|error| format!("no keeper can be started: {error}")),
    }
}

fn start_unit(unit: &str) -> Result<(), String> {
    match Command::new("systemctl").args(["start", "--no-block", unit]).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`systemctl start {unit}` failed ({status})")),
        Err(error) => Err(format!("`systemctl start {unit}` cannot be run: {error}")),
    }
}

/// It outlives this command. What it says is in `keeper.log` of its runtime folder.
fn spawn(root: &RuntimeRoot, record: &Path, machine: &MachineNote) -> std::io::Result<Child> {
    let folder = root.machine(&machine.name);
    std::fs::create_dir_all(&folder)?;
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(folder.join("keeper.log"))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--runtime-root").arg(root.path()).arg("run").arg(&machine.file);
    command.env(PLACE_VARIABLE, record);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // Ctrl-C is for this command.
    command.process_group(0).spawn()
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
        let has_keeper = life::has_keeper(&folder);
        had_keeper |= has_keeper;
        let may_come = !had_keeper && !has_ended && Instant::now() < lock_deadline;
        match client.status() {
            Ok(status) if matches!(status.state, MachineState::Running | MachineState::Paused) => return Ok(status),
            Ok(status) if status.state == MachineState::Failed => {
                return Err(format!("it has failed; `hearth events {name}` tells why"));
            }
            // It starts, or another one does.
            _ if has_keeper || may_come => {}
            _ => return Err("its keeper ended, or did not start; its log says why".to_owned()),
        }
        if Instant::now() > deadline {
            return Err("it does not run yet".to_owned());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
