//! Requests per second over time, all reboots overlaid with the crash at zero.

use hearth_page::{Frame, MARGIN_BOTTOM, MARGIN_TOP, tick_text};

use super::{Run, Series};
use crate::table::figure;

/// Draws the plot for a desktop's and for a phone's width: scaled text would be unreadable on a phone.
pub fn draw(series: &[Series]) -> String {
    if series.is_empty() {
        return String::new();
    }
    format!("{}{}", picture(series, 860.0, 340.0, "wide"), picture(series, 380.0, 300.0, "narrow"))
}

fn picture(series: &[Series], width: f64, height: f64, class: &str) -> String {
    let times = || series.iter().flat_map(|one| one.points.iter().map(|point| point.0));
    let rates = series.iter().flat_map(|one| one.points.iter().map(|point| point.1));
    let (from, to) = (times().fold(f64::INFINITY, f64::min), times().fold(f64::NEG_INFINITY, f64::max));
    let frame = Frame::new((from, to), rates.fold(0.0, f64::max), (width, height));
    let mut svg = format!(
        "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"Requests per second over time, for each way to reboot, with the crash at zero\">"
    );
    svg += &outages(series, &frame);
    svg += &frame.axes(if width < 500.0 { 5 } else { 8 }, "seconds from the crash", "requests/s");
    svg += &crash_mark(&frame);
    // The best is drawn last, over the others.
    for run in Run::ALL.into_iter().rev() {
        svg += &series.iter().filter(|one| one.run == run).map(|one| line(one, &frame)).collect::<String>();
    }
    svg + "</svg>"
}

/// The time without service: a band for each run from the crash to its first answer.
fn outages(series: &[Series], frame: &Frame) -> String {
    let band = |one: &Series| {
        let (x, end) = (frame.x.place(0.0), frame.x.place(one.back_s));
        let height = frame.height - MARGIN_BOTTOM - MARGIN_TOP;
        format!(
            "<rect class=\"outage {}\" x=\"{x:.1}\" y=\"{MARGIN_TOP}\" width=\"{:.1}\" height=\"{height:.1}\">\
             <title>{}: no service for {} s</title></rect>",
            one.run.word(),
            (end - x).max(0.0),
            one.run.word(),
            figure(one.back_s)
        )
    };
    series.iter().map(band).collect()
}

fn crash_mark(frame: &Frame) -> String {
    let (x, bottom) = (frame.x.place(0.0), frame.height - MARGIN_BOTTOM);
    format!(
        "<line class=\"crash\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{MARGIN_TOP}\" y2=\"{bottom}\"/>\
         <text class=\"mark end\" x=\"{:.1}\" y=\"14\">kernel panic</text>",
        x + 40.0
    )
}

fn line(series: &Series, frame: &Frame) -> String {
    let run = series.run.word();
    let mut svg = frame.polyline(&series.points, run);
    for point in &series.points {
        svg += &format!(
            "<circle class=\"dot {run}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"6\"><title>{run}, {} s: {} requests/s</title></circle>",
            frame.x.place(point.0),
            frame.y.place(point.1),
            tick_text(point.0),
            figure(point.1)
        );
    }
    svg
}
