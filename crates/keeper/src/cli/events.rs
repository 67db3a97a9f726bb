//! `hearth events`: what happened, from the keeper or, after its end, from the file it left.

use hearth_api::{EventKind, EventRecord};
use plain_text::printable;

use super::{CliError, Context, Exit, describe};
use crate::client::ClientError;
use crate::event_log::read_file;

pub fn show(context: &mut Context<'_>, name: &str, since: u64, follow: bool) -> Result<Exit, CliError> {
    if follow {
        match context.client(name).follow(since) {
            Ok(stream) => {
                for record in stream {
                    let record = record.map_err(|error| context.explained(name, error))?;
                    write(context, &record)?;
                }
                return Ok(Exit::Done);
            }
            Err(ClientError::NotRunning { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        // Prints the events that exist, then reports that the keeper has ended.
        write_all(context, &left_behind(context, name, since)?)?;
        return Err(context.not_running(name));
    }
    write_all(context, &known(context, name, since)?)?;
    Ok(Exit::Done)
}

/// Events after `since`, from the keeper or, after its end, from the file it left.
pub fn known(context: &Context<'_>, name: &str, since: u64) -> Result<Vec<EventRecord>, CliError> {
    match context.client(name).events(since) {
        Err(ClientError::NotRunning { .. }) => left_behind(context, name, since),
        other => other.map_err(|error| context.explained(name, error)),
    }
}

/// Events of a machine without a keeper. An unknown machine has none.
fn left_behind(context: &Context<'_>, name: &str, since: u64) -> Result<Vec<EventRecord>, CliError> {
    let folder = context.root.machine(name);
    let mut records = read_file(&folder).map_err(|source| CliError::File { path: folder, source })?;
    if records.is_empty() {
        return Err(context.not_running(name));
    }
    records.retain(|record| record.sequence > since);
    Ok(records)
}

fn write_all(context: &mut Context<'_>, records: &[EventRecord]) -> Result<(), CliError> {
    records.iter().try_for_each(|record| write(context, record))
}

/// Memory samples appear only in JSON: in text there would be more of them than of other events.
fn write(context: &mut Context<'_>, record: &EventRecord) -> Result<(), CliError> {
    if !context.json && matches!(record.event, EventKind::MemoryHeld { .. }) {
        return Ok(());
    }
    if context.json { context.write_json(record) } else { context.write_line(&line(record)) }
}

pub fn line(record: &EventRecord) -> String {
    let what = printable(&describe(&record.event));
    format!("{}  {:>4}  [{}]  {what}", record.time, record.sequence, record.incarnation)
}
