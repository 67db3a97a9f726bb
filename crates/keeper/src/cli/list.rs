//! `hearth ls`: all machines, running or not.

use super::survey::{self, Listed};
use super::text::{Side, bytes, table, uptime};
use super::{CliError, Context, Exit};

pub fn list(context: &mut Context<'_>) -> Result<Exit, CliError> {
    let machines = survey::look_at_all(&context.root);
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

fn row(listed: &Listed) -> Vec<String> {
    if let Some(parked) = &listed.parked {
        return parked.row(&listed.name);
    }
    let Some(status) = &listed.status else {
        return vec![listed.name.clone(), listed.state().to_owned()];
    };
    vec![
        listed.name.clone(),
        listed.state().to_owned(),
        status.incarnation.to_string(),
        uptime(status.uptime_s),
        bytes(status.memory.ram_bytes),
        bytes(status.memory.resident_bytes + status.memory.ember_bytes),
        status.qemu.as_ref().map(|qemu| qemu.accelerator.clone()).unwrap_or_default(),
    ]
}
