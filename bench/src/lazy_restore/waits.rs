//! The fraction of time that a guest waits for memory: all of it until it runs, and then the time of its page faults.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hearth_api::MachineStatus;
use hearth_vmtest::TestVm;

use crate::load::Load;

/// Pause between two reads of the keeper's counter, each of which costs some milliseconds of a processor.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// One restore's line for the plot: seconds from the request to restore, and the percentage of time spent waiting there.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    pub points: Vec<(f64, f64)>,
}

impl Waits {
    /// The line of a guest that has all its memory when it runs.
    pub fn until(running_s: f64) -> Self {
        Waits { points: vec![(0.0, 100.0), (running_s, 100.0), (running_s, 0.0)] }
    }

    /// The line of a guest that waits for faults. `looks` has times, and the microseconds that all faults had taken by then.
    pub fn of(running_s: f64, looks: &[(f64, u64)]) -> Self {
        let mut waits = Self::until(running_s);
        let mut before = (running_s, 0);
        for &(at_s, total_us) in looks.iter().filter(|look| look.0 > running_s) {
            // A fault counts when it ends, and may have begun in an earlier interval.
            let percent = (total_us - before.1) as f64 / ((at_s - before.0) * 1e6) * 100.0;
            waits.points.extend([(before.0, percent.min(100.0)), (at_s, percent.min(100.0))]);
            before = (at_s, total_us);
        }
        waits
    }

    /// Extends the line to at least this time.
    pub fn to(mut self, end_s: f64) -> Self {
        if self.points.last().is_some_and(|last| last.0 < end_s) {
            self.points.push((end_s, self.points.last().map_or(0.0, |last| last.1)));
        }
        self
    }
}

/// Reads a restore's counter until `over` is set.
pub fn look(clone: &TestVm, load: &Load, over: &AtomicBool) -> Vec<(f64, u64)> {
    let mut looks = Vec::new();
    loop {
        // One more read after the end, for the last faults.
        let last = over.load(Relaxed);
        // At first the keeper does not answer yet.
        let said = clone.cli_output(&["status", clone.name(), "--json"]).map(|output| output.text());
        let status = said.ok().and_then(|said| serde_json::from_str::<MachineStatus>(&said).ok());
        if let Some(restore) = status.and_then(|status| status.restore) {
            looks.push((load.now_s(), restore.fault_us_total));
        }
        if last {
            return looks;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_total_until_running_then_faults() {
        let waits = Waits::of(1.0, &[(0.5, 0), (2.0, 250_000), (4.0, 250_000)]);
        let expect = [(0.0, 100.0), (1.0, 100.0), (1.0, 0.0), (1.0, 25.0), (2.0, 25.0), (2.0, 0.0), (4.0, 0.0)];
        assert_eq!(waits.points, expect);
        assert_eq!(Waits::of(1.0, &[(2.0, 9_000_000)]).points.last(), Some(&(2.0, 100.0)));
        assert_eq!(Waits::until(3.0).to(5.0).points.last(), Some(&(5.0, 0.0)));
    }
}
