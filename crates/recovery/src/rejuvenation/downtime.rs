//! Downtime: what a rejuvenation of n machines at a time costs each of them, and what reboots would cost.
//!
//! The model is that of Kourai and Chiba ("A Fast Rejuvenation Technique for Server Consolidation with Virtual Machines",
//! DSN 2007):
//!
//! ```text
//! d_w(n) = reboot_vmm(n) + resume(n)                                               guests live on
//! d_c(n) = reset_hw + reboot_vmm(0) + reboot_os(n) - reboot_os(1) * alpha          guests boot again
//! r(n)   = d_c(n) - d_w(n)                                                         gain
//! ```
//! Here each guest's QEMU is rebooted and not the host. The new one starts beside the old one while the guest runs, so
//! reboot_vmm(n) is no downtime, and no hardware is reset. reboot_os(n) runs from a guest's end to its service, the
//! start of its QEMU included. So d_w(n) = resume(n) and d_c(n) = reboot_os(n) - reboot_os(1) * alpha remain.
//!
//! `alpha` is the fraction of the interval between the guest's own reboots that has passed: a reboot now saves that
//! part of the next one.
//!
//! As in the paper, both terms are straight lines in n, fitted to measurements. But booting guests do not compete for
//! processors until they outnumber them, so up to there reboot_os(n) is level.

/// A straight line: `start` + `slope` * n.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Value at n = 0.
    pub start: f64,
    /// Increase for each further guest.
    pub slope: f64,
}

impl Line {
    /// Fit with the least squared error. Through a single n it is level, because nothing is known of its slope. `None`
    /// without points.
    pub fn through(points: &[(f64, f64)]) -> Option<Self> {
        if points.is_empty() {
            return None;
        }
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        let slope = if spread > 0.0 { together / spread } else { 0.0 };
        Some(Self { start: y - slope * x, slope })
    }

    /// Value at n.
    pub fn at(self, n: f64) -> f64 {
        self.start + self.slope * n
    }
}

/// Level up to `free`, and a straight line from there on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contended {
    /// The line from `free` on.
    pub line: Line,
    /// Number of guests that do not compete: the host's processors.
    pub free: f64,
}

impl Contended {
    /// Fit as by [`Line::through`], with every n below `free` taken as `free`. `None` without points.
    pub fn through(points: &[(f64, f64)], free: f64) -> Option<Self> {
        let competing: Vec<_> = points.iter().map(|&(n, value)| (n.max(free), value)).collect();
        Some(Self { line: Line::through(&competing)?, free })
    }

    /// Value at n.
    pub fn at(self, n: f64) -> f64 {
        self.line.at(n.max(self.free))
    }
}

/// The terms of one host, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// resume(n): time for n guests to hop at once.
    pub resume: Line,
    /// reboot_os(n): time for n guests to reboot at once.
    pub reboot_os: Contended,
    /// Fraction of the reboot interval that has passed: from 0, just rebooted, to 1.
    pub alpha: f64,
}

impl Model {
    /// Downtime of each guest when n hop at a time: d_w(n).
    pub fn warm_ms(&self, n: f64) -> f64 {
        self.resume.at(n)
    }

    /// Downtime of each guest when n reboot at a time: d_c(n).
    pub fn cold_ms(&self, n: f64) -> f64 {
        self.reboot_os.at(n) - self.reboot_os.at(1.0) * self.alpha
    }

    /// Downtime that a hop saves over a reboot, for each guest: r(n).
    pub fn gained_ms(&self, n: f64) -> f64 {
        self.cold_ms(n) - self.warm_ms(n)
    }
}

/// One operation on a machine among others: its begin and end, and the downtime that it cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Begin of the operation.
    pub from_ms: f64,
    /// End of the operation.
    pub to_ms: f64,
    /// Downtime of the guest.
    pub downtime_ms: f64,
}

/// Two numbers for each span: the spans under way at its end, itself included, and its downtime.
pub fn by_company(spans: &[Span]) -> Vec<(f64, f64)> {
    let under_way = |at_ms: f64| spans.iter().filter(|span| span.from_ms <= at_ms && at_ms <= span.to_ms).count();
    spans.iter().map(|span| (under_way(span.to_ms) as f64, span.downtime_ms)).collect()
}

/// Error of a prediction, in percent of the measured value.
pub fn error_pct(predicted: f64, measured: f64) -> f64 {
    ((predicted - measured) / measured).abs() * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(points: &[(f64, f64)], expect: Option<(f64, f64)>) {
        let line = Line::through(points);
        assert_eq!(line.is_some(), expect.is_some(), "{points:?}");
        let (Some(line), Some((start, slope))) = (line, expect) else { return };
        assert!((line.start - start).abs() < 1e-9 && (line.slope - slope).abs() < 1e-9, "{points:?}: {line:?}");
    }

    #[test]
    fn lines_go_through_their_points() {
        check(&[], None);
        check(&[(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)], Some((1.0, 2.0)));
        check(&[(1.0, 0.0), (2.0, 3.0), (3.0, 0.0)], Some((1.0, 0.0)));
        check(&[(1.0, 3.0), (1.0, 5.0)], Some((4.0, 0.0)));
    }

    #[test]
    fn boots_are_level_until_processors_are_contended() {
        let boots = [(1.0, 3000.0), (2.0, 4000.0), (4.0, 7500.0)];
        let contended = Contended::through(&boots, 2.0).unwrap();
        assert_eq!([1.0, 2.0, 4.0, 8.0].map(|n| contended.at(n).round()), [3500.0, 3500.0, 7500.0, 15500.0]);
        let alone = Contended::through(&boots, 1.0).unwrap();
        assert_eq!(alone.line, Line::through(&boots).unwrap());
        assert_eq!(Contended::through(&[], 2.0), None);
    }

    #[test]
    fn due_reboot_costs_less() {
        let resume = Line { start: 2.0, slope: 0.5 };
        let reboot_os = Contended { line: Line { start: 3000.0, slope: 500.0 }, free: 1.0 };
        let just_rebooted = Model { resume, reboot_os, alpha: 0.0 };
        assert_eq!(just_rebooted.warm_ms(8.0), 6.0);
        assert_eq!(just_rebooted.cold_ms(8.0), 7000.0);
        assert_eq!(just_rebooted.gained_ms(8.0), 6994.0);
        let due = Model { alpha: 1.0, ..just_rebooted };
        assert_eq!(due.cold_ms(1.0), 0.0);
        assert_eq!(due.cold_ms(8.0), 3500.0);
    }

    #[test]
    fn company_counts_spans_under_way_at_end() {
        let span = |from_ms, to_ms, downtime_ms| Span { from_ms, to_ms, downtime_ms };
        assert_eq!(by_company(&[]), []);
        let spans = [span(0.0, 100.0, 3.0), span(50.0, 120.0, 4.0), span(110.0, 130.0, 5.0), span(500.0, 600.0, 2.0)];
        assert_eq!(by_company(&spans), [(2.0, 3.0), (2.0, 4.0), (1.0, 5.0), (1.0, 2.0)]);
    }

    #[test]
    fn errors_are_relative_to_measurements() {
        assert_eq!(error_pct(12.0, 10.0), 20.0);
        assert_eq!(error_pct(8.0, 10.0), 20.0);
    }
}
