//! `hearth explain`: where the last recovery spent its time.

use hearth_api::{DumpStatus, Explanation, PhaseTime, Recovery};

use super::text::{Side, bytes, milliseconds, table};
use super::{CliError, Context, Exit};
use crate::client::Client;

/// Columns of the timeline.
const WIDTH: usize = 48;

pub fn show(context: &mut Context<'_>, name: &str) -> Result<Exit, CliError> {
    let explanation = context.ask(name, Client::get::<Explanation>)?;
    if context.json {
        context.write_json(&explanation)?;
    } else {
        context.write_line(&page(&explanation))?;
    }
    Ok(Exit::Done)
}

pub fn page(explanation: &Explanation) -> String {
    let Some(recovery) = &explanation.recovery else {
        return format!(
            "{}: incarnation {} is the first, so there was no recovery",
            explanation.name, explanation.incarnation
        );
    };
    let mut lines = summary(&explanation.name, recovery);
    lines.push(String::new());
    lines.extend(timeline(recovery));
    lines.join("\n")
}

fn summary(name: &str, recovery: &Recovery) -> Vec<String> {
    let warmth = if recovery.warm { "warm" } else { "cold" };
    let mut lines = vec![format!(
        "{name}: incarnation {} runs {} after the one before it ended ({}, {}); {warmth}",
        recovery.incarnation,
        milliseconds(recovery.duration_ms),
        recovery.cause.words(),
        recovery.started_at,
    )];
    lines.extend(recovery.panic.as_ref().map(|panic| format!("crash message: {panic}")));
    lines.extend(recovery.dump.as_ref().map(dump_line));
    if let Some(why) = &recovery.why_cold {
        lines.push(format!("cold because {why}"));
    }
    if recovery.warm {
        let (kept, released) = (bytes(recovery.kept_bytes), bytes(recovery.released_bytes));
        lines.push(format!("{kept} of disk blocks kept in {} pages, {released} released", recovery.pages_kept));
    }
    lines
}

fn dump_line(dump: &DumpStatus) -> String {
    let why = dump.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    let (written, seconds) = (bytes(dump.written_bytes), milliseconds(dump.duration_s * 1e3));
    format!("dump {}{why}: {:.0} %, {written} in {seconds}, {}", dump.state.name(), dump.percent, dump.file)
}

fn timeline(recovery: &Recovery) -> Vec<String> {
    let end = recovery.phases.iter().map(|phase| phase.started_ms + phase.duration_ms).fold(0.0, f64::max);
    let mut phases: Vec<&PhaseTime> = recovery.phases.iter().collect();
    phases.sort_by(|one, other| one.started_ms.total_cmp(&other.started_ms));
    let head = ["phase", "start", "took", ""].map(str::to_owned).to_vec();
    let rows = phases.into_iter().map(|phase| {
        vec![
            phase.phase.clone(),
            milliseconds(phase.started_ms),
            milliseconds(phase.duration_ms),
            format!("|{}|", bar(phase, end)),
        ]
    });
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    table(&[Side::Left, Side::Right, Side::Right, Side::Left], &rows)
}

/// A bar for the phase on the time axis, at least one column wide.
fn bar(phase: &PhaseTime, end_ms: f64) -> String {
    let column = |ms: f64| if end_ms > 0.0 { (ms / end_ms * WIDTH as f64).round() as usize } else { 0 };
    let from = column(phase.started_ms).min(WIDTH - 1);
    let to = column(phase.started_ms + phase.duration_ms).clamp(from + 1, WIDTH);
    format!("{}{}{}", " ".repeat(from), "█".repeat(to - from), " ".repeat(WIDTH - to))
}
