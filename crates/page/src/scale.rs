//! A linear scale from values to positions on the page, with round ticks.

#[derive(Clone, Copy, Debug)]
pub struct Scale {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Scale {
    /// Maps the values `from..to` to the positions `start..end`.
    pub fn new((from, to): (f64, f64), (start, end): (f64, f64)) -> Self {
        let to = if to > from { to } else { from + 1.0 };
        Scale { from, to, start, end }
    }

    pub fn place(self, value: f64) -> f64 {
        let share = (value.clamp(self.from, self.to) - self.from) / (self.to - self.from);
        self.start + share * (self.end - self.start)
    }

    /// Round values inside the range, about `about` of them.
    pub fn ticks(self, about: usize) -> Vec<f64> {
        let step = round_step((self.to - self.from) / about.max(1) as f64);
        let first = (self.from / step).ceil() as i64;
        let last = (self.to / step + 1e-9).floor() as i64;
        (first..=last).map(|tick| tick as f64 * step).collect()
    }
}

/// 1, 2 or 5 times a power of ten, not below `least`.
pub fn round_step(least: f64) -> f64 {
    if least <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= least * 0.999);
    factor.unwrap_or(10.0) * power
}

/// The top of an axis that holds `highest` with some margin.
pub fn axis_top(highest: f64) -> f64 {
    let step = round_step(highest * 1.05 / 5.0);
    (highest * 1.05 / step).ceil() * step
}

/// A tick's text, with a decimal only if needed.
pub fn tick_text(value: f64) -> String {
    if value.fract().abs() < 1e-9 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_map_to_positions() {
        let scale = Scale::new((-10.0, 10.0), (100.0, 200.0));
        for (value, place) in [(-10.0, 100.0), (0.0, 150.0), (10.0, 200.0), (99.0, 200.0)] {
            assert_eq!(scale.place(value), place);
        }
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(Scale::new((-30.0, 45.0), (0.0, 1.0)).ticks(6), [-20.0, 0.0, 20.0, 40.0]);
        assert_eq!(Scale::new((0.0, 1.0), (0.0, 1.0)).ticks(5).len(), 6);
    }

    #[test]
    fn an_axis_ends_above_its_highest_value() {
        for (highest, top) in [(93.0, 100.0), (7.0, 8.0), (1900.0, 2000.0), (0.0, 0.0)] {
            assert_eq!(axis_top(highest), top);
        }
    }

    #[test]
    fn empty_range_is_widened() {
        assert_eq!(Scale::new((5.0, 5.0), (0.0, 10.0)).place(5.0), 0.0);
    }
}
