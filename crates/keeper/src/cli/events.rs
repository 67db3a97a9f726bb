//! `hearth events`: what happened, from the keeper or, if it has ended or hangs, from its file.

use std::time::Duration;

use hearth_api::{EventKind, EventRecord};
use plain_text::printable;

use super::{CliError, Context, Exit, describe};
use crate::client::ClientError;
use crate::event_log::read_file;

/// How long a keeper may take to answer with its events. It answers without its machine's loop, and its file has them all.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

pub fn show(context: &mut Context<'_>, name: &str, since: u64, follow: bool) -> Result<Exit, CliError> {
    if follow {
        let error = match context.client(name).with_patience(PATIENCE).follow(since) {
            Ok(stream) => {
                for record in stream {
                    let record = record.map_err(|error| context.explained(name, error))?;
                    write(context, &record)?;
                }
                return Ok(Exit::Done);
            }
            Err(error @ (ClientError::NotRunning { .. } | ClientError::Silent { .. })) => error,
            Err(error) => return Err(error.into()),
        };
        // Prints the events that exist, then reports that nothing can be followed.
        write_all(context, &in_file(context, name, since)?.unwrap_or_default())?;
        return Err(context.explained(name, error));
    }
    write_all(context, &known(context, name, since)?)?;
    Ok(Exit::Done)
}

/// Events after `since`, from the keeper or, if it has ended or hangs, from its file.
pub fn known(context: &Context<'_>, name: &str, since: u64) -> Result<Vec<EventRecord>, CliError> {
    match context.client(name).with_patience(PATIENCE).events(since) {
        Err(error @ (ClientError::NotRunning { .. } | ClientError::Silent { .. })) => {
            let Some(records) = in_file(context, name, since)? else { return Err(context.explained(name, error)) };
            if let ClientError::Silent { .. } = error {
                eprintln!("hearth: {}; its events come from its file", crate::chain(&error));
            }
            Ok(records)
        }
        other => other.map_err(|error| context.explained(name, error)),
    }
}

/// Events of a machine whose keeper does not answer. None: there are none, as of an unknown machine.
fn in_file(context: &Context<'_>, name: &str, since: u64) -> Result<Option<Vec<EventRecord>>, CliError> {
    let folder = context.root.machine(name);
    let mut records = read_file(&folder).map_err(|source| CliError::File { path: folder, source })?;
    let is_known = !records.is_empty();
    records.retain(|record| record.sequence > since);
    Ok(is_known.then_some(records))
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
