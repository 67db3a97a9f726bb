//! `hearth age`: how old a machine's QEMU is, and whether it should be replaced.

use hearth_api::{Age, Growth};

use super::text::{Side, bytes, table, uptime};
use super::{CliError, Context, Exit};
use crate::client::Client;

pub fn show(context: &mut Context<'_>, name: &str) -> Result<Exit, CliError> {
    let age = context.ask(name, Client::get::<Age>)?;
    if context.json {
        context.write_json(&age)?;
    } else {
        context.write_line(&page(&age))?;
    }
    Ok(Exit::Done)
}

pub fn page(age: &Age) -> String {
    let qemu = &age.qemu;
    let mut lines = vec![format!(
        "{}  QEMU {}, pid {}, generation {}, up {}",
        age.name,
        qemu.version,
        qemu.pid,
        qemu.generation,
        uptime(qemu.uptime_s)
    )];
    let installed = qemu.installed_version.as_deref().unwrap_or("unknown");
    let gone = if qemu.program_is_gone { "the running program was replaced or removed" } else { "" };
    let rows = [
        vec!["installed".to_owned(), installed.to_owned(), gone.to_owned()],
        growth_row("own memory", qemu.own_bytes, bytes),
        growth_row("descriptors", qemu.descriptors, |number| number.to_string()),
    ];
    lines.extend(table(&[Side::Left, Side::Right, Side::Left], &rows).into_iter().map(|line| format!("  {line}")));
    lines.push(String::new());
    if age.reasons.is_empty() {
        lines.push("no reason to rejuvenate".to_owned());
    } else {
        lines.push(format!("reasons to rejuvenate (`hearth rejuvenate {}`)", age.name));
        lines.extend(age.reasons.iter().map(|reason| format!("  {reason}")));
    }
    if let Some(hindrance) = &age.hindrance {
        lines.extend(["obstacles".to_owned(), format!("  {hindrance}")]);
    }
    lines.join("\n")
}

fn growth_row(name: &str, growth: Growth, text: impl Fn(u64) -> String) -> Vec<String> {
    let now = growth.now.map_or_else(|| "unknown".to_owned(), &text);
    let since = growth.at_start.map(|at_start| format!("{} at its start", text(at_start)));
    vec![name.to_owned(), now, since.unwrap_or_default()]
}
