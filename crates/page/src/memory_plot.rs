//! Memory over time: of the dead incarnation, of the living one, and of both, which must stay below a limit.

use crate::escape;
use crate::frame::{Frame, MARGIN_BOTTOM, MARGIN_TOP};

/// Memory at one moment, in MiB.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Seconds from the end of the dead incarnation.
    pub second: f64,
    pub dead: f64,
    pub living: f64,
}

#[derive(Clone, Debug)]
pub struct MemoryPlot {
    pub points: Vec<Held>,
    /// What both together may hold.
    pub limit_mib: f64,
    pub x_label: &'static str,
    /// Moments, in seconds, and what happened then.
    pub marks: Vec<(f64, &'static str)>,
}

/// Distance between the labels of two marks, so that those of close moments do not overlap.
const MARK_LINE: f64 = 16.0;

/// Draws the plot for a desktop's and for a phone's width, with its legend.
pub fn draw(plot: &MemoryPlot) -> String {
    if plot.points.is_empty() {
        return String::new();
    }
    let key = |class: &str, text: &str| format!("<span class=\"key {class}\">{text}</span>");
    let legend = format!(
        "<p class=\"legend\">{}{}{}</p>",
        key("cold", "dead incarnation"),
        key("warm", "living incarnation"),
        key("sum", "together")
    );
    format!("{legend}<figure>{}{}</figure>", picture(plot, 860.0, 320.0, "wide"), picture(plot, 380.0, 280.0, "narrow"))
}

fn picture(plot: &MemoryPlot, width: f64, height: f64, class: &str) -> String {
    let to = plot.points.last().map_or(1.0, |held| held.second);
    let highest = plot.points.iter().map(|held| held.dead + held.living).fold(plot.limit_mib, f64::max);
    let frame = Frame::new((0.0, to), highest, (width, height));
    let mut svg = format!(
        "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"Memory of the dead and of the living incarnation over time\">"
    );
    svg += &frame.axes(if width < 500.0 { 5 } else { 8 }, plot.x_label, "MiB");
    svg += &limit(&frame, plot.limit_mib);
    for (number, (second, text)) in plot.marks.iter().enumerate() {
        svg += &mark(&frame, *second, text, 6.0 + MARK_LINE * number as f64);
    }
    type Of = fn(&Held) -> f64;
    let lines: [(&str, Of); 3] =
        [("sum", |held| held.dead + held.living), ("cold", |held| held.dead), ("warm", |held| held.living)];
    for (class, value) in lines {
        let points: Vec<(f64, f64)> = plot.points.iter().map(|held| (held.second, value(held))).collect();
        svg += &frame.polyline(&points, class);
    }
    svg + "</svg>"
}

/// A line at the limit.
fn limit(frame: &Frame, limit_mib: f64) -> String {
    let y = frame.y.place(limit_mib);
    format!("<line class=\"crash\" x1=\"{}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>", frame.left(), frame.right())
}

/// A mark at a moment. `above` is its label's distance from the axis.
fn mark(frame: &Frame, second: f64, text: &str, above: f64) -> String {
    let (x, bottom) = (frame.x.place(second), frame.height - MARGIN_BOTTOM);
    // A label at the right edge would be cut off.
    let (class, x_text) = if x > frame.width * 0.8 { ("mark end", x - 4.0) } else { ("mark", x + 4.0) };
    format!(
        "<line class=\"crash\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{MARGIN_TOP}\" y2=\"{bottom}\"/>\
         <text class=\"{class}\" x=\"{x_text:.1}\" y=\"{:.1}\">{}</text>",
        bottom - above,
        escape(text)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_has_both_lines_their_sum_and_limit() {
        let plot = MemoryPlot {
            points: [(0.0, 3000.0, 0.0), (5.0, 1500.0, 1000.0), (9.0, 0.0, 2000.0)]
                .map(|(second, dead, living)| Held { second, dead, living })
                .to_vec(),
            limit_mib: 4096.0,
            x_label: "seconds from the panic",
            marks: vec![(5.0, "serves again"), (9.0, "dump complete")],
        };
        let html = draw(&plot);
        for part in ["line sum", "line cold", "line warm", "serves again", "dump complete", "MiB"] {
            assert!(html.contains(part), "{part}");
        }
        assert_eq!(draw(&MemoryPlot { points: Vec::new(), ..plot }), "");
    }
}
