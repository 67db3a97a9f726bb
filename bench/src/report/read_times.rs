//! The latency of each read over the time of a boot, as dots, with the same scale for all plots on a page.

use hearth_page::Frame;

/// The scale of all plots on a page.
pub struct Extent {
    /// Seconds.
    pub until: f64,
    /// Milliseconds.
    pub highest: f64,
}

/// Draws reads (seconds and milliseconds, in order of time) for a desktop's and for a phone's width.
pub fn draw(reads: &[(f64, f64)], extent: &Extent) -> String {
    if reads.is_empty() {
        return String::new();
    }
    format!(
        "<figure>{}{}</figure>",
        picture(reads, extent, 860.0, 300.0, "wide"),
        picture(reads, extent, 380.0, 260.0, "narrow")
    )
}

fn picture(reads: &[(f64, f64)], extent: &Extent, width: f64, height: f64, class: &str) -> String {
    let frame = Frame::new((0.0, extent.until), extent.highest, (width, height));
    let mut svg = format!(
        "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"Time of every read over a boot\">"
    );
    svg += &frame.axes(if width < 500.0 { 5 } else { 8 }, "seconds from the reset", "ms");
    // A single path of points: thousands of elements would make the page heavy.
    let point = |read: &(f64, f64)| format!("M{:.1} {:.1}h0", frame.x.place(read.0), frame.y.place(read.1));
    let mut points: Vec<String> = reads.iter().map(point).collect();
    points.dedup();
    svg + &format!("<path class=\"reads\" d=\"{}\"/></svg>", points.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_read_is_drawn() {
        let extent = Extent { until: 3.0, highest: 5.0 };
        let html = draw(&[(0.5, 0.1), (1.0, 5.0), (2.0, 0.2)], &extent);
        assert_eq!(html.matches("h0").count(), 2 * 3, "{html}");
        assert!(html.contains("seconds from the reset"));
        assert_eq!(draw(&[], &extent), "");
    }
}
