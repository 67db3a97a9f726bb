//! The phases of a recovery as bars on one time axis, which show where the time of an outage went.

use super::Run;
use crate::table::{escape, figure};

#[derive(Clone, Debug)]
pub struct Phase {
    pub name: String,
    pub start_ms: f64,
    pub duration_ms: f64,
}

#[derive(Clone, Debug)]
pub struct Timeline {
    pub run: Run,
    /// Time from the old kernel's end until the new guest runs, and until it serves.
    pub recovery_ms: f64,
    pub outage_ms: f64,
    pub phases: Vec<Phase>,
}

/// Draws all timelines on the same axis, so that they can be compared.
pub fn draw(timelines: &[Timeline]) -> String {
    let ends = timelines.iter().flat_map(|timeline| timeline.phases.iter().map(|p| p.start_ms + p.duration_ms));
    let end_ms = ends.fold(1.0, f64::max);
    timelines.iter().map(|timeline| draw_one(timeline, end_ms)).collect()
}

fn draw_one(timeline: &Timeline, end_ms: f64) -> String {
    let row = |phase: &Phase| {
        let (left, width) = (phase.start_ms / end_ms * 100.0, phase.duration_ms / end_ms * 100.0);
        format!(
            "<div class=\"phase\"><span class=\"phase-name\">{}</span>\
             <span class=\"phase-track\"><span class=\"phase-bar {}\" style=\"left:{left:.2}%;width:{width:.2}%\"></span></span>\
             <span class=\"phase-time\">{}</span></div>",
            escape(&phase.name),
            timeline.run.word(),
            milliseconds(phase.duration_ms)
        )
    };
    let rows: String = timeline.phases.iter().map(row).collect();
    format!(
        "<div class=\"timeline\"><h3>{} reboot: {} of {} without service; the rest is the guest's own boot</h3>{rows}</div>",
        capitalised(timeline.run.word()),
        milliseconds(timeline.recovery_ms),
        milliseconds(timeline.outage_ms)
    )
}

fn milliseconds(duration_ms: f64) -> String {
    match duration_ms {
        long if long >= 1000.0 => format!("{} s", figure(long / 1e3)),
        medium if medium >= 10.0 => format!("{medium:.0} ms"),
        short => format!("{short:.1} ms"),
    }
}

fn capitalised(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
