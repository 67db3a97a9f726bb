//! `hearth remount-plan`: what the next boot will read, and how much of it memory holds.

use std::cmp::Reverse;

use hearth_api::{MissedRun, PlannedRun, ReadyRequest, RemountDisk, RemountLater, RemountPlan, RemountVolume};

use super::text::{Side, bytes, table};
use super::{CliError, Context, Exit};
use crate::client::Client;

/// Maximum number of runs in the text; `--json` has all.
const RUNS_SHOWN: usize = 20;
const VOLUMES_SHOWN: usize = 20;

/// `list`: list each range that the next boot will read.
pub fn show(context: &mut Context<'_>, name: &str, list: bool) -> Result<Exit, CliError> {
    let plan = context.ask(name, Client::get::<RemountPlan>)?;
    match (context.json, list) {
        (true, _) => context.write_json(&plan)?,
        (false, true) => reads(&plan).iter().try_for_each(|line| context.write_line(line))?,
        (false, false) => context.write_line(&page(&plan))?,
    }
    Ok(Exit::Done)
}

/// In the order of reading.
fn reads(plan: &RemountPlan) -> Vec<String> {
    let row = |PlannedRun { disk, offset, bytes: length, held }: &PlannedRun| {
        let state = if *held { "held" } else { "in the image" };
        vec![disk.clone(), offset.to_string(), bytes(*length), state.to_owned()]
    };
    let heading = ["disk", "at byte", "size", "where"].map(str::to_owned).to_vec();
    let rows: Vec<_> = [heading].into_iter().chain(plan.reads.iter().map(row)).collect();
    let mut lines = table(&[Side::Left, Side::Right, Side::Right, Side::Left], &rows);
    if plan.reads_unlisted_blocks > 0 {
        lines.push(format!("and {} more blocks", plan.reads_unlisted_blocks));
    }
    lines
}

pub fn ready(context: &mut Context<'_>, name: &str) -> Result<Exit, CliError> {
    let accepted = context.ask(name, |client| client.send(&ReadyRequest {}))?;
    if context.json {
        context.write_json(&accepted)?;
    }
    Ok(Exit::Done)
}

pub fn page(plan: &RemountPlan) -> String {
    let percent = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{share:.1} %"));
    let state = if plan.ready { "ready" } else { "still booting, so incomplete" };
    let mut lines = vec![
        format!("{}  {state}; memory {} of {}", plan.name, bytes(plan.resident_bytes), bytes(plan.limit_bytes)),
        format!(
            "  next boot  {} of {} blocks held, {} hits expected",
            plan.held_blocks,
            plan.blocks,
            percent(plan.expected_hit_pct)
        ),
        format!("  last boot  hits {}", percent(plan.hit_pct)),
    ];
    if let (Some(in_line), Some(us)) = (plan.in_line_pct, plan.memory_read_us_p50) {
        let reads = plan.memory_reads;
        lines.push(format!("             {reads} reads from memory, {in_line:.1} % in line, median {us:.1} us"));
        let beside = plan.memory_reads_beside_writes;
        if let Some(us) = plan.memory_read_beside_writes_us_p50 {
            lines.push(format!("             {beside} of them during writes to the same disk, median {us:.1} us"));
        }
    }
    let later = plan.later;
    if later != RemountLater::default() {
        let RemountLater { hits, ember_hits, misses } = later;
        lines.push(format!("  since ready  {hits} hits, {ember_hits} from the ember, {misses} misses"));
    }
    if plan.late_blocks > 0 {
        lines.push(format!("  also held  {} often-read blocks", plan.late_blocks));
    }
    if plan.no_room_blocks > 0 {
        lines.push(format!("  {} blocks not held: `remount.limit` is reached", plan.no_room_blocks));
    }
    if plan.damaged_blocks > 0 {
        lines.push(format!("  {} blocks dropped because they were damaged in memory", plan.damaged_blocks));
    }
    if !plan.disks.is_empty() {
        let heading = ["disk", "blocks", "held", "hits", "from ember", "misses", "hit rate"].map(str::to_owned);
        let rows: Vec<_> =
            [heading.to_vec()].into_iter().chain(plan.disks.iter().map(|disk| row(disk, &percent))).collect();
        let sides = [Side::Left, Side::Right, Side::Right, Side::Right, Side::Right, Side::Right, Side::Right];
        lines.push(String::new());
        lines.extend(table(&sides, &rows).into_iter().map(|line| format!("  {line}")));
    }
    lines.extend(volumes(&plan.volumes, &percent));
    if !plan.missed.is_empty() {
        lines.extend([String::new(), "read from the images".to_owned()]);
        let shown = plan.missed.iter().take(RUNS_SHOWN);
        lines.extend(
            shown.map(|MissedRun { disk, offset, bytes: length }| format!("  {disk}  {} at {offset}", bytes(*length))),
        );
        let more = plan.missed.len().saturating_sub(RUNS_SHOWN);
        if more > 0 {
            lines.push(format!("  and {more} more ranges; `--json` lists them"));
        }
    }
    lines.join("\n")
}

/// Volumes that had misses, if there is more than one.
fn volumes(volumes: &[RemountVolume], percent: &impl Fn(Option<f64>) -> String) -> Vec<String> {
    if volumes.iter().all(|volume| volume.partition.is_none()) {
        return Vec::new();
    }
    let mut missed: Vec<_> = volumes.iter().filter(|volume| volume.misses > 0).collect();
    missed.sort_by_key(|volume| Reverse(volume.misses));
    let without = volumes.len() - missed.len();
    let heading = ["volume", "size", "blocks", "held", "hits", "misses", "hit rate", "since ready: hits", "misses"];
    let heading = heading.map(str::to_owned).to_vec();
    let row = |volume: &&RemountVolume| {
        let numbers = [volume.blocks, volume.held_blocks, volume.hits, volume.misses].map(|number| number.to_string());
        let later = [volume.later.hits + volume.later.ember_hits, volume.later.misses].map(|number| number.to_string());
        [vec![name_of(volume), bytes(volume.bytes)], numbers.to_vec(), vec![percent(volume.hit_pct)], later.to_vec()]
            .concat()
    };
    let rows: Vec<_> = [heading].into_iter().chain(missed.iter().take(VOLUMES_SHOWN).map(row)).collect();
    let mut lines = vec![String::new()];
    if !missed.is_empty() {
        let sides = [[Side::Left].as_slice(), &[Side::Right; 8]].concat();
        lines.extend(table(&sides, &rows).into_iter().map(|line| format!("  {line}")));
    }
    let more = missed.len().saturating_sub(VOLUMES_SHOWN);
    let unlisted = if more > 0 { format!(", {more} more with misses; `--json` lists them") } else { String::new() };
    lines.push(format!("  {without} of {} volumes without misses{unlisted}", volumes.len()));
    lines
}

fn name_of(RemountVolume { disk, partition, label, .. }: &RemountVolume) -> String {
    match (partition, label) {
        (Some(number), Some(label)) => format!("{disk} {number} ({label})"),
        (Some(number), None) => format!("{disk} {number}"),
        (None, _) => format!("{disk}, no volume"),
    }
}

fn row(disk: &RemountDisk, percent: &impl Fn(Option<f64>) -> String) -> Vec<String> {
    let numbers =
        [disk.blocks, disk.held_blocks, disk.hits, disk.ember_hits, disk.misses].map(|number| number.to_string());
    [vec![disk.disk.clone()], numbers.to_vec(), vec![percent(disk.hit_pct)]].concat()
}
