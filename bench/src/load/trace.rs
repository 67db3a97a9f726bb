//! A load generator's trace: every request with its time, for rates, outages and plots.

/// One request. Times are in seconds since the load began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub begun_s: f64,
    pub ended_s: f64,
    pub bytes: u64,
}

/// Requests that were answered with 200, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    pub samples: Vec<Sample>,
}

impl Trace {
    /// Completed requests per second in this span.
    pub fn requests_per_second(&self, from_s: f64, to_s: f64) -> f64 {
        self.completed(from_s, to_s).count() as f64 / (to_s - from_s)
    }

    pub fn latencies_ms(&self, from_s: f64, to_s: f64) -> Vec<f64> {
        self.completed(from_s, to_s).map(|sample| (sample.ended_s - sample.begun_s) * 1e3).collect()
    }

    /// The time within this span from which on requests are served at 95 % of this rate for good: until the span's end, from that
    /// moment and from each later one. The last third is too short to judge by itself. `None` if that is not reached.
    pub fn full_speed_s(&self, from_s: f64, to_s: f64, rate: f64) -> Option<f64> {
        let steps = ((to_s - from_s) * 2.0 / 3.0 / FULL_SPEED_STEP_S).floor() as usize;
        let at_s = |step: usize| from_s + step as f64 * FULL_SPEED_STEP_S;
        let is_full = |step: &usize| self.requests_per_second(at_s(*step), to_s) >= 0.95 * rate;
        let full = (0..=steps).rev().take_while(is_full).last()?;
        Some(at_s(full))
    }

    fn completed(&self, from_s: f64, to_s: f64) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| (from_s..to_s).contains(&sample.ended_s))
    }

    /// Requests per second in steps of `step_s`, as (middle of the step, rate), with `zero_s` as the new time zero.
    pub fn series(&self, zero_s: f64, from_s: f64, to_s: f64, step_s: f64) -> Vec<(f64, f64)> {
        let steps = ((to_s - from_s) / step_s).floor() as usize;
        let point = |step: usize| {
            let begin = from_s + step as f64 * step_s;
            let rate = self.requests_per_second(zero_s + begin, zero_s + begin + step_s);
            (begin + step_s / 2.0, rate)
        };
        (0..steps).map(point).collect()
    }
}

/// Steps of `full_speed_s`, in seconds.
const FULL_SPEED_STEP_S: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(ends: &[f64]) -> Trace {
        Trace { samples: ends.iter().map(|end| Sample { begun_s: end - 0.1, ended_s: *end, bytes: 1 }).collect() }
    }

    #[test]
    fn requests_count_when_they_end() {
        let trace = trace(&[0.5, 1.0, 1.5, 2.0]);
        assert_eq!(trace.requests_per_second(1.0, 2.0), 2.0);
        assert_eq!(trace.requests_per_second(2.0, 4.0), 0.5);
        assert_eq!(trace.latencies_ms(0.0, 0.6).len(), 1);
    }

    #[test]
    fn full_speed_is_reached_once_and_for_good() {
        // 10 a second until 5 s, none until 8 s, 5 a second until 10 s, then 10 again.
        let steps = |from: u32, to: u32, a_second: u32| {
            (from * a_second..to * a_second).map(move |number| (f64::from(number) + 0.5) / f64::from(a_second))
        };
        let ends: Vec<f64> = steps(0, 5, 10).chain(steps(8, 10, 5)).chain(steps(10, 30, 10)).collect();
        let trace = trace(&ends);
        let full_s = trace.full_speed_s(8.0, 30.0, 10.0).unwrap();
        assert!((8.0..10.1).contains(&full_s), "{full_s}");
        assert_eq!(trace.full_speed_s(10.0, 30.0, 10.0), Some(10.0));
        assert_eq!(trace.full_speed_s(8.0, 30.0, 20.0), None);
    }

    #[test]
    fn outage_shows_as_zeros_in_the_series() {
        let trace = trace(&[9.1, 9.6, 12.5]);
        assert_eq!(trace.series(10.0, -1.0, 3.0, 1.0), [(-0.5, 2.0), (0.5, 0.0), (1.5, 0.0), (2.5, 1.0)]);
    }
}
