//! The phases of a recovery as bars on one time axis, which show where the time went.

use crate::{Run, escape, milliseconds};

#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    pub name: String,
    pub start_ms: f64,
    pub duration_ms: f64,
}

#[derive(Clone, Debug)]
pub struct Timeline {
    pub title: String,
    /// Gives the colour.
    pub run: Run,
    pub phases: Vec<Phase>,
}

/// Width of a bar's drawing, in its own units.
const WIDTH: f64 = 1000.0;
/// A shorter bar would not be seen.
const BAR_MIN: f64 = 4.0;

/// Draws all timelines on the same axis, so that they can be compared.
pub fn draw(timelines: &[Timeline]) -> String {
    let end_ms = end_ms(timelines.iter().flat_map(|timeline| &timeline.phases));
    let one = |timeline: &Timeline| {
        let bars = bars(timeline.run, &timeline.phases, end_ms);
        format!("<div class=\"timeline\"><h3>{}</h3>{bars}</div>", escape(&timeline.title))
    };
    timelines.iter().map(one).collect()
}

/// Draws the phases of one recovery, on an axis of its own.
pub fn draw_bars(run: Run, phases: &[Phase]) -> String {
    if phases.is_empty() {
        return String::new();
    }
    format!("<div class=\"timeline\">{}</div>", bars(run, phases, end_ms(phases)))
}

fn end_ms<'a>(phases: impl IntoIterator<Item = &'a Phase>) -> f64 {
    phases.into_iter().map(|phase| phase.start_ms + phase.duration_ms).fold(1.0, f64::max)
}

fn bars(run: Run, phases: &[Phase], end_ms: f64) -> String {
    let row = |phase: &Phase| {
        let place = |ms: f64| (ms / end_ms * WIDTH).clamp(0.0, WIDTH);
        let width = place(phase.duration_ms).max(BAR_MIN);
        let left = place(phase.start_ms).min(WIDTH - width);
        let took = milliseconds(phase.duration_ms);
        format!(
            "<div class=\"phase\"><span class=\"phase-name\">{}</span>\
             <svg class=\"phase-track\" viewBox=\"0 0 {WIDTH} 14\" preserveAspectRatio=\"none\" role=\"img\" \
             aria-label=\"from {} on, for {took}\"><rect class=\"phase-bar {}\" x=\"{left:.1}\" width=\"{width:.1}\" \
             height=\"14\"/></svg><span class=\"phase-time\">{took}</span></div>",
            escape(&phase.name),
            milliseconds(phase.start_ms),
            run.word(),
        )
    };
    phases.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timelines_share_an_axis_and_short_phases_are_seen() {
        let phase = |name: &str, start_ms, duration_ms| Phase { name: name.into(), start_ms, duration_ms };
        let timeline = |run, phases| Timeline { title: run_title(run), run, phases };
        let html = draw(&[
            timeline(Run::Warm, vec![phase("launch <b>", 500.0, 500.0), phase("bank", 0.0, 0.01)]),
            timeline(Run::Cold, vec![phase("launch", 0.0, 1000.0)]),
        ]);
        for part in [
            "launch &lt;b&gt;",
            "phase-bar warm\" x=\"500.0\" width=\"500.0\"",
            "x=\"0.0\" width=\"4.0\"",
            "phase-bar cold\" x=\"0.0\" width=\"1000.0\"",
            "1.00 s",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
    }

    fn run_title(run: Run) -> String {
        format!("{} reboot", run.word())
    }
}
