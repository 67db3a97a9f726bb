//! Status: what was prepared, and what became of it.

use std::path::Path;

use hearth_recovery::rejuvenation::parked;
use serde::Serialize;

use super::super::text::{Side, milliseconds, table};
use super::super::{CliError, Context, Exit};
use crate::check::life;
use crate::host_reload::{MachineNote, Outcome, Record};
use crate::runtime_root::RuntimeRoot;

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    note: &'a MachineNote,
    /// How long it has been paused so far, if it still is.
    stands_ms: Option<u64>,
    runs: bool,
}

pub fn show(context: &mut Context<'_>, path: &Path) -> Result<Exit, CliError> {
    let record = Record::load(path)?;
    let root = RuntimeRoot::new(&record.runtime_root);
    let shown: Vec<_> = record.machines.iter().map(|note| look(&root, note)).collect();
    if context.json {
        shown.iter().try_for_each(|shown| context.write_json(shown))?;
        return Ok(Exit::Done);
    }
    let host = if record.host_reloaded() {
        "the host has changed its kernel since"
    } else {
        "the host still has the same kernel"
    };
    context.write_line(&format!("prepared {}; {host}", record.prepared_at))?;
    if let Some(fleet) = &record.fleet {
        context.write_line(&format!("{} holds a slot of group {} at {}", fleet.id, fleet.group, fleet.shown()))?;
    }
    let head = ["NAME", "OUTCOME", "RUNS", "PAUSE", "WHY"].map(str::to_owned).to_vec();
    let rows: Vec<_> = std::iter::once(head).chain(shown.iter().map(row)).collect();
    let sides = [Side::Left, Side::Left, Side::Left, Side::Right, Side::Left];
    table(&sides, &rows).iter().try_for_each(|line| context.write_line(line))?;
    Ok(Exit::Done)
}

fn look<'a>(root: &RuntimeRoot, note: &'a MachineNote) -> Shown<'a> {
    let stands = || Some(parked::find(&note.memory_folder).ok()??.stands_for().as_millis() as u64);
    let stands_ms = if note.outcome == Outcome::Parked { stands() } else { None };
    Shown { note, stands_ms, runs: life::has_keeper(&root.machine(&note.name)) }
}

fn row(shown: &Shown<'_>) -> Vec<String> {
    let stood = shown.note.stood_ms.or(shown.stands_ms).map(|ms| milliseconds(ms as f64)).unwrap_or_default();
    let runs = if shown.runs { "yes" } else { "no" }.to_owned();
    let why = shown.note.why.clone().unwrap_or_default();
    vec![shown.note.name.clone(), shown.note.outcome.words().to_owned(), runs, stood, why]
}
