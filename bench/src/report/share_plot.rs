//! The share of time spent on one thing, over time, with a line for each side.

use hearth_page::{Frame, escape};

/// The line of one side.
#[derive(Clone, Debug)]
pub struct ShareLine {
    pub name: String,
    /// Number of its colour: a side has the same one in all plots of a page.
    pub colour: usize,
    /// Points of seconds and percent, in order of time.
    pub points: Vec<(f64, f64)>,
}

/// Number of distinguishable colours.
const COLOURS: usize = 6;
/// Top value of the axis, which is rounded up to 100.
const PERCENT_TOP: f64 = 95.0;

/// Draws the plot for a desktop's and for a phone's width, with its legend.
pub fn draw(lines: &[ShareLine], label: &str, x_label: &str) -> String {
    if lines.iter().all(|line| line.points.is_empty()) {
        return String::new();
    }
    let key =
        |line: &ShareLine| format!("<span class=\"key share{}\">{}</span>", line.colour % COLOURS, escape(&line.name));
    let legend: String = lines.iter().map(key).collect();
    let picture = |size, class| picture(lines, label, x_label, size, class);
    format!(
        "<p class=\"legend\">{legend}</p><figure>{}{}</figure>",
        picture((860.0, 320.0), "wide"),
        picture((380.0, 280.0), "narrow")
    )
}

fn picture(lines: &[ShareLine], label: &str, x_label: &str, (width, height): (f64, f64), class: &str) -> String {
    let label = escape(label);
    let ends = lines.iter().filter_map(|line| line.points.last());
    let frame = Frame::new((0.0, ends.map(|point| point.0).fold(0.0, f64::max)), PERCENT_TOP, (width, height));
    let mut svg =
        format!("<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label}\">");
    svg += &frame.axes(if width < 500.0 { 5 } else { 8 }, x_label, "percent");
    for line in lines {
        svg += &frame.polyline(&line.points, &format!("share{}", line.colour % COLOURS));
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_has_a_line_and_name() {
        let line = |colour, name: &str, points: &[(f64, f64)]| ShareLine {
            name: name.into(),
            colour,
            points: points.to_vec(),
        };
        let lines = [line(0, "lazy <1>", &[(0.0, 100.0), (2.0, 40.0)]), line(1, "trace", &[(0.0, 100.0), (0.5, 0.0)])];
        let html = draw(&lines, "waiting", "seconds");
        for part in ["line share0", "line share1", "key share1", "lazy &lt;1&gt;", ">100<", "percent"] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert_eq!(draw(&[line(0, "none", &[])], "waiting", "seconds"), "");
    }
}
