//! `hearth ls`: all machines, running or not.

use std::collections::BTreeSet;
use std::time::Duration;

use hearth_api::{ErrorWord, MachineStatus};
use serde::Serialize;

use crate::check::life;
use crate::host_reload::Record;

use super::parked::{self, ParkedGuest};
use super::text::{Side, bytes, table, uptime};
use super::{CliError, Context, Exit};

/// One machine that hangs must not keep the others from being listed.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Listed {
    name: String,
    /// None: no keeper answers.
    status: Option<MachineStatus>,
    /// Why there is no status.
    why: Option<String>,
    /// The guest runs without a keeper; `hearth run` takes it over.
    orphaned: bool,
    /// The guest is parked in memory, without QEMU and keeper.
    parked: Option<ParkedGuest>,
}

pub fn list(context: &mut Context<'_>) -> Result<Exit, CliError> {
    let record = Record::of_this_host();
    // A runtime folder ends with the host's kernel; a parked guest does not.
    let parked = record.iter().flat_map(|record| record.names_parked_in(context.root.path()));
    let names: BTreeSet<String> = context.root.names().into_iter().chain(parked).collect();
    let machines: Vec<Listed> = names.into_iter().map(|name| look(context, record.as_ref(), name)).collect();
    if context.json {
        context.write_json(&machines)?;
        return Ok(Exit::Done);
    }
    if machines.is_empty() {
        let line = format!("no machine in {}; start one with `hearth run FILE`", context.root.path().display());
        context.write_line(&line)?;
        return Ok(Exit::Done);
    }
    let head = ["NAME", "STATE", "INCARNATION", "UP", "RAM", "HELD", "ACCELERATOR"].map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(machines.iter().map(row)).collect();
    let sides = [Side::Left, Side::Left, Side::Right, Side::Left, Side::Right, Side::Right, Side::Left];
    for line in table(&sides, &rows) {
        context.write_line(&line)?;
    }
    Ok(Exit::Done)
}

fn look(context: &Context<'_>, record: Option<&Record>, name: String) -> Listed {
    match context.client(&name).with_patience(PATIENCE).status() {
        Ok(status) => Listed { name, status: Some(status), why: None, orphaned: false, parked: None },
        Err(error) => {
            let folder = context.root.machine(&name);
            let orphaned = life::orphaned_qemu(&folder).is_some();
            // A keeper that does not answer yet may be about to resume it.
            let waits = error.is_refusal(ErrorWord::MachineEnded) || !orphaned && !life::has_keeper(&folder);
            let parked = if waits { parked::find(&context.root, record, &name) } else { None };
            Listed { name, status: None, why: Some(error.to_string()), orphaned, parked }
        }
    }
}

fn row(listed: &Listed) -> Vec<String> {
    if let Some(parked) = &listed.parked {
        return parked.row(&listed.name);
    }
    let Some(status) = &listed.status else {
        let state = if listed.orphaned { "keeper died" } else { "not running" };
        return vec![listed.name.clone(), state.to_owned()];
    };
    vec![
        listed.name.clone(),
        status.state.name().to_owned(),
        status.incarnation.to_string(),
        uptime(status.uptime_s),
        bytes(status.memory.ram_bytes),
        bytes(status.memory.resident_bytes + status.memory.ember_bytes),
        status.qemu.as_ref().map(|qemu| qemu.accelerator.clone()).unwrap_or_default(),
    ]
}
