//! The statistics that the benches quote: medians and percentiles.

/// The middle value; the mean of the two middle ones for an even count.
pub fn median(values: &[f64]) -> Option<f64> {
    let sorted = sorted(values);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        count if count % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The percentile by nearest rank.
pub fn percentile(values: &[f64], percent: f64) -> Option<f64> {
    let sorted = sorted(values);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// One figure over another, if both were measured.
pub fn ratio(over: Option<f64>, under: Option<f64>) -> Option<f64> {
    Some(over? / under?)
}

/// Decrease from `before` to `after`, in percent of `before`; negative if it grew.
pub fn degradation_pct(before: f64, after: f64) -> f64 {
    (before - after) / before * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        for (values, expect) in
            [(&[][..], None), (&[4.0][..], Some(4.0)), (&[9.0, 1.0, 5.0][..], Some(5.0)), (&[1.0, 2.0][..], Some(1.5))]
        {
            assert_eq!(median(values), expect);
        }
    }

    #[test]
    fn percentiles_are_measured_values() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        for (percent, expect) in [(0.0, 1.0), (50.0, 50.0), (99.0, 99.0), (100.0, 100.0)] {
            assert_eq!(percentile(&values, percent), Some(expect));
        }
        assert_eq!(percentile(&[], 50.0), None);
    }

    #[test]
    fn degradation_is_relative_to_before() {
        assert_eq!(degradation_pct(200.0, 150.0), 25.0);
        assert_eq!(degradation_pct(100.0, 110.0), -10.0);
    }
}
