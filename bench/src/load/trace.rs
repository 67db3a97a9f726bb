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
    fn outage_shows_as_zeros_in_the_series() {
        let trace = trace(&[9.1, 9.6, 12.5]);
        assert_eq!(trace.series(10.0, -1.0, 3.0, 1.0), [(-0.5, 2.0), (0.5, 0.0), (1.5, 0.0), (2.5, 1.0)]);
    }
}
