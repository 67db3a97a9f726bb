//! The frame of a plot over time: its scales, axes and lines.

use crate::scale::{Scale, axis_top, tick_text};

pub const MARGIN_LEFT: f64 = 44.0;
pub const MARGIN_RIGHT: f64 = 12.0;
pub const MARGIN_TOP: f64 = 26.0;
pub const MARGIN_BOTTOM: f64 = 40.0;

pub struct Frame {
    pub x: Scale,
    pub y: Scale,
    pub width: f64,
    pub height: f64,
}

impl Frame {
    /// A frame with seconds from left to right, and values from zero to a round one above `highest`.
    pub fn new(seconds: (f64, f64), highest: f64, (width, height): (f64, f64)) -> Self {
        Frame {
            x: Scale::new(seconds, (MARGIN_LEFT, width - MARGIN_RIGHT)),
            y: Scale::new((0.0, axis_top(highest)), (height - MARGIN_BOTTOM, MARGIN_TOP)),
            width,
            height,
        }
    }

    pub fn left(&self) -> f64 {
        MARGIN_LEFT
    }

    pub fn right(&self) -> f64 {
        self.width - MARGIN_RIGHT
    }

    pub fn axes(&self, ticks: usize, x_label: &str, y_label: &str) -> String {
        let (left, right) = (self.left(), self.right());
        let bottom = self.height - MARGIN_BOTTOM;
        let mut svg = String::new();
        for value in self.y.ticks(5) {
            let y = self.y.place(value);
            svg += &format!("<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
            let (x, label_y) = (left - 6.0, y + 4.0);
            svg += &format!("<text class=\"tick end\" x=\"{x}\" y=\"{label_y:.1}\">{}</text>", tick_text(value));
        }
        for second in self.x.ticks(ticks) {
            let (x, y) = (self.x.place(second), bottom + 16.0);
            svg += &format!("<text class=\"tick middle\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", tick_text(second));
        }
        svg += &format!(
            "<text class=\"tick middle\" x=\"{:.1}\" y=\"{:.1}\">{x_label}</text>",
            (left + right) / 2.0,
            self.height - 6.0
        );
        svg + &format!("<text class=\"tick\" x=\"{:.1}\" y=\"14\">{y_label}</text>", 4.0)
    }

    pub fn polyline(&self, points: &[(f64, f64)], class: &str) -> String {
        let place = |point: &(f64, f64)| format!("{:.1},{:.1}", self.x.place(point.0), self.y.place(point.1));
        let path: Vec<String> = points.iter().map(place).collect();
        format!("<polyline class=\"line {class}\" points=\"{}\"/>", path.join(" "))
    }
}
