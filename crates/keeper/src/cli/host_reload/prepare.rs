//! Prepare: every machine is parked, or none.

use std::collections::VecDeque;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, SystemTime};

use hearth_api::{EventKind, ParkRequest, rfc3339};
use hearth_recovery::rejuvenation::parked;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::super::order::wait_for_keepers_end;
use super::super::rejuvenation::Queue;
use super::super::text::milliseconds;
use super::super::{CliError, Context, Exit};
use super::check::Findings;
use super::{FleetArguments, PrepareArguments, resume};
use crate::check::life;
use crate::client::{Client, ClientError};
use crate::fleet_lock::FleetLock;
use crate::host_reload::{MachineNote, Outcome, Record, RecordError};
use crate::runtime_root::RuntimeRoot;

/// Time for machines to resume after a failed prepare, before the operator has to check.
const BACK_WITHIN: Duration = Duration::from_secs(120);
const MACHINE_ID: &str = "/etc/machine-id";

/// A worker's result.
struct Decided {
    name: String,
    /// How long parking took, or why it failed.
    parked: Result<f64, String>,
}

pub fn prepare(context: &mut Context<'_>, arguments: &PrepareArguments) -> Result<Exit, CliError> {
    let path = &arguments.record.record;
    must_be_free(path)?;
    let seen = must_be_fit(context, arguments)?;
    let fleet = lock_fleet(context, &arguments.fleet)?;
    let begun = begin(context, arguments, fleet.as_ref(), seen);
    let (mut record, unfit, cancelled) = match (begun, &fleet) {
        (Ok(begun), _) => begun,
        (Err(error), Some(fleet)) => return resume::give_back(fleet).and(Err(error)),
        (Err(error), None) => return Err(error),
    };
    let parked = park_all(context, &mut record, arguments, &cancelled)
        .and_then(|failed| conclude(context, &record, arguments, unfit + failed, &cancelled));
    let failed = match parked {
        Ok(failed) => failed,
        Err(error) => return take_back(context, record, path, &error),
    };
    if arguments.kexec {
        kexec()?;
    }
    Ok(if failed > 0 { Exit::Failed } else { Exit::Done })
}

fn must_be_fit(context: &Context<'_>, arguments: &PrepareArguments) -> Result<Findings, CliError> {
    let findings = Findings::of(&context.root, arguments);
    if !findings.host_can() || !findings.can() && !arguments.keep_going {
        return Err(CliError::HostReload(format!("cannot prepare, and nothing was stopped: {}", findings.problems())));
    }
    Ok(findings)
}

/// Everything before the first guest is paused. Returns the record, the number of machines that are not tried, and the
/// flag that cancels it all.
fn begin(
    context: &mut Context<'_>,
    arguments: &PrepareArguments,
    fleet: Option<&FleetLock>,
    seen: Findings,
) -> Result<(Record, usize, Arc<AtomicBool>), CliError> {
    // The lock may have been granted hours later.
    let findings = if fleet.is_some() { must_be_fit(context, arguments)? } else { seen };
    let unfit = report_unfit(context, &findings)?;
    let cancelled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, cancelled.clone()).map_err(CliError::Signals)?;
    }
    let record = Record::new(rfc3339(SystemTime::now()), context.root.path(), fleet.cloned(), findings.machines());
    record.save(&arguments.record.record)?;
    Ok((record, unfit, cancelled))
}

/// The number of machines not parked, if the host may reload. The operator must have seen that it may, or nobody starts
/// the next kernel.
fn conclude(
    context: &mut Context<'_>,
    record: &Record,
    arguments: &PrepareArguments,
    failed: usize,
    cancelled: &AtomicBool,
) -> Result<usize, CliError> {
    if cancelled.load(Ordering::Relaxed) {
        return Err(CliError::HostReload("it was cancelled".to_owned()));
    }
    if failed > 0 && !arguments.keep_going {
        return Err(CliError::HostReload(why_not_parked(record)));
    }
    let parked = record.machines.iter().filter(|machine| machine.outcome == Outcome::Parked).count();
    say(context, &format!("{parked} parked, {failed} not parked; `hearth host-reload resume` resumes them"))?;
    if !arguments.kexec && !arguments.drill {
        say(context, "now start the next kernel: `systemctl kexec`")?;
    }
    Ok(failed)
}

fn why_not_parked(record: &Record) -> String {
    let left = record.machines.iter().filter(|machine| machine.outcome == Outcome::NotParked);
    let why = left.map(|machine| format!("{}: {}", machine.name, machine.why.as_deref().unwrap_or_default()));
    why.collect::<Vec<_>>().join("; ")
}

/// A new record would overwrite the old one, and with it all trace of its parked machines.
fn must_be_free(path: &Path) -> Result<(), CliError> {
    match Record::load(path) {
        Ok(record) if record.machines.iter().any(|machine| machine.outcome.is_open()) => {
            let what = format!(
                "{} lists machines that are still prepared; run `hearth host-reload resume` first, or remove the file",
                path.display()
            );
            Err(CliError::HostReload(what))
        }
        Ok(_) | Err(RecordError::None { .. } | RecordError::Malformed { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn lock_fleet(context: &mut Context<'_>, arguments: &FleetArguments) -> Result<Option<FleetLock>, CliError> {
    let Some(url) = arguments.fleet_lock.clone() else { return Ok(None) };
    let id = match &arguments.fleet_id {
        Some(id) => id.clone(),
        None => std::fs::read_to_string(MACHINE_ID)
            .map_err(|source| CliError::File { path: MACHINE_ID.into(), source })?
            .trim()
            .to_owned(),
    };
    let lock = FleetLock { url, group: arguments.fleet_group.clone(), id };
    say(context, &format!("asking {} whether {} may reload", lock.shown(), lock.id))?;
    lock.acquire(arguments.fleet_wait)?;
    Ok(Some(lock))
}

/// The number of machines that are not tried.
fn report_unfit(context: &mut Context<'_>, findings: &Findings) -> Result<usize, CliError> {
    let mut unfit = 0;
    for verdict in findings.verdicts.iter().filter(|verdict| !verdict.can()) {
        let Some(name) = &verdict.machine else { continue };
        if context.json {
            context.write_json(verdict)?;
        } else {
            context.write_line(&format!("{name}: not parked: {}", verdict.problems.join("; ")))?;
        }
        unfit += 1;
    }
    Ok(unfit)
}

/// The number of machines that could not be parked.
fn park_all(
    context: &mut Context<'_>,
    record: &mut Record,
    arguments: &PrepareArguments,
    cancelled: &AtomicBool,
) -> Result<usize, CliError> {
    let path = &arguments.record.record;
    let begun = record.machines.iter().filter(|machine| machine.outcome == Outcome::Begun);
    let names: VecDeque<String> = begun.map(|machine| machine.name.clone()).collect();
    let at_a_time = usize::from(arguments.parallel).min(names.len());
    let (machines, root) = (record.machines.clone(), context.root.clone());
    let queue = Queue::new(names, Duration::ZERO);
    let mut failed = 0;
    let told = std::thread::scope(|scope| {
        let (say, words) = channel();
        for _ in 0..at_a_time {
            let (queue, root, machines, say) = (&queue, &root, &machines, say.clone());
            scope.spawn(move || work(queue, root, machines, (arguments.keep_going, cancelled), &say));
        }
        drop(say);
        let told = words.into_iter().try_for_each(|decided| {
            failed += usize::from(decided.parked.is_err());
            take(context, record, path, decided)
        });
        // Results can no longer be recorded, so no further machine is parked.
        if told.is_err() {
            queue.stop();
        }
        told
    });
    for name in queue.left() {
        if let Some(machine) = record.machine(&name) {
            machine.decide(
                Outcome::NotParked,
                Some("another machine failed earlier, or the command was cancelled".to_owned()),
            );
        }
    }
    told.map(|()| failed)
}

fn work(
    queue: &Queue,
    root: &RuntimeRoot,
    machines: &[MachineNote],
    (keep_going, cancelled): (bool, &AtomicBool),
    say: &Sender<Decided>,
) {
    while let Some(name) = queue.next() {
        let Some(machine) = machines.iter().find(|machine| machine.name == name) else { continue };
        let parked = park(root, machine);
        if parked.is_err() && !keep_going || cancelled.load(Ordering::Relaxed) {
            queue.stop();
        }
        // A receiver that is gone has stopped the queue.
        let _ = say.send(Decided { name, parked });
    }
}

fn take(context: &mut Context<'_>, record: &mut Record, path: &Path, decided: Decided) -> Result<(), CliError> {
    let Decided { name, parked } = decided;
    let Some(machine) = record.machine(&name) else { return Ok(()) };
    let line = match parked {
        Ok(took_ms) => {
            machine.decide(Outcome::Parked, None);
            format!("{name}: parked in {}", milliseconds(took_ms))
        }
        Err(why) => {
            machine.decide(Outcome::NotParked, Some(why.clone()));
            format!("{name}: not parked: {why}")
        }
    };
    let machine = machine.clone();
    record.save(path)?;
    if context.json { context.write_json(&machine) } else { context.write_line(&line) }
}

/// The time it took, in milliseconds, once its keeper has ended; or why it failed.
fn park(root: &RuntimeRoot, machine: &MachineNote) -> Result<f64, String> {
    let client = Client::new(root.api_socket(&machine.name));
    let decided = decide(&client).map_err(|error| crate::chain(&error))?;
    match decided {
        Some(EventKind::Parked { duration_ms, .. }) => {
            wait_for_keepers_end(&root.machine(&machine.name));
            Ok(duration_ms)
        }
        Some(EventKind::ParkFailed { phase, why }) => Err(format!("{phase}: {why}")),
        Some(EventKind::IncarnationEnded { cause }) => Err(format!("its guest ended: {}", cause.words())),
        _ => ended_on_its_way(root, machine),
    }
}

/// The keeper has died. If QEMU is gone and a parked guest is recorded, it is parked; otherwise it is still paused in
/// QEMU.
fn ended_on_its_way(root: &RuntimeRoot, machine: &MachineNote) -> Result<f64, String> {
    let folder = root.machine(&machine.name);
    wait_for_keepers_end(&folder);
    let lives = life::has_keeper(&folder) || life::orphaned_qemu(&folder).is_some();
    match parked::find(&machine.memory_folder) {
        Ok(Some(parked)) if !lives => Ok(parked.stands_for().as_secs_f64() * 1e3),
        _ => Err("its keeper ended".to_owned()),
    }
}

/// The event that decides the outcome; none if the keeper ended without one.
fn decide(client: &Client) -> Result<Option<EventKind>, ClientError> {
    let accepted = client.send(&ParkRequest { check: false })?;
    let decides = |event: &EventKind| {
        matches!(event, EventKind::Parked { .. } | EventKind::ParkFailed { .. } | EventKind::IncarnationEnded { .. })
    };
    // If the stream breaks or cannot be opened, the keeper has ended.
    let Ok(stream) = client.follow(accepted.since) else { return Ok(None) };
    Ok(stream.map_while(Result::ok).map(|record| record.event).find(decides))
}

/// Resumes all machines after a failure: one could not be parked, output or record cannot be written, or it was
/// cancelled.
fn take_back(context: &mut Context<'_>, mut record: Record, path: &Path, why: &CliError) -> Result<Exit, CliError> {
    let why = crate::chain(why);
    // The output may be closed.
    let _ = say(context, "resuming the parked machines");
    // This includes a machine whose keeper died meanwhile.
    let has_keeper = |machine: &MachineNote| life::has_keeper(&context.root.machine(&machine.name));
    for machine in record.machines.iter_mut().filter(|machine| machine.outcome == Outcome::NotParked) {
        if !has_keeper(machine) {
            machine.outcome = Outcome::Begun;
        }
    }
    let back = resume::bring_back(context, &mut record, path, BACK_WITHIN);
    if let Err(CliError::FleetLock(error)) = back {
        tracing::error!(
            why = crate::chain(&error),
            "the fleet lock is still held; `hearth host-reload resume` releases it"
        );
    }
    let down: Vec<_> = record.machines.iter().filter(|machine| machine.outcome.is_open()).collect();
    let down: String = down.iter().map(|machine| format!("; {} is not running", machine.name)).collect();
    Err(CliError::HostReload(format!("host reload failed, the host keeps its kernel: {why}{down}")))
}

fn kexec() -> Result<(), CliError> {
    let failed = |what: String| {
        CliError::HostReload(format!(
            "`systemctl kexec` {what}; resume the guests under this kernel with `hearth host-reload resume`"
        ))
    };
    match Command::new("systemctl").arg("kexec").status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(failed(format!("failed ({status})"))),
        Err(error) => Err(failed(format!("cannot be run: {error}"))),
    }
}

/// With `--json` no sentences are printed.
fn say(context: &mut Context<'_>, line: &str) -> Result<(), CliError> {
    if context.json { Ok(()) } else { context.write_line(line) }
}
