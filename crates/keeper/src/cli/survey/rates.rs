//! Rates of a disk, from two readings of its counters.

use std::time::{Duration, Instant};

use hearth_api::{DiskStatus, MachineStatus};
use serde::Serialize;

/// Older readings would give an average of long ago.
const OLD: Duration = Duration::from_secs(10);
/// Younger ones would give an average of too few requests.
const YOUNG: Duration = Duration::from_millis(500);

/// A disk's rates between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    pub reads_per_s: f64,
    pub writes_per_s: f64,
    pub read_bytes_per_s: f64,
    pub written_bytes_per_s: f64,
    /// Share of the bytes read that came from memory, in percent. None: nothing was read.
    pub warm_pct: Option<f64>,
    /// Mean time of the image's operations, in ms. None: there was none.
    pub image_ms: Option<f64>,
}

/// A machine's status and when it was read.
#[derive(Clone, Debug)]
pub struct Reading {
    pub at: Instant,
    pub status: MachineStatus,
}

impl Reading {
    /// Whether rates from here to `later` mean something: the counters are of one keeper.
    pub fn leads_to(&self, later: &Self) -> bool {
        let apart = later.at.saturating_duration_since(self.at);
        self.status.keeper.pid == later.status.keeper.pid && (YOUNG..=OLD).contains(&apart)
    }

    /// Rates of a disk from here to `later`, if both have it.
    pub fn rates(&self, later: &Self, disk: &str) -> Option<Rates> {
        let find = |reading: &Self| reading.status.disks.iter().find(|found| found.name == disk).cloned();
        let (before, after) = (find(self)?, find(later)?);
        // A disk that was opened again counts from 0.
        let is_same = after.reads >= before.reads && after.writes >= before.writes;
        is_same.then(|| between(&before, &after, later.at.saturating_duration_since(self.at).as_secs_f64()))
    }
}

fn between(before: &DiskStatus, after: &DiskStatus, seconds: f64) -> Rates {
    let change = |of: fn(&DiskStatus) -> u64| of(after).saturating_sub(of(before)) as f64;
    let (warm, image) = (change(|disk| disk.read_warm_bytes), change(|disk| disk.read_image_bytes));
    let operations = change(|disk| disk.image_operations);
    Rates {
        reads_per_s: change(|disk| disk.reads) / seconds,
        writes_per_s: change(|disk| disk.writes) / seconds,
        read_bytes_per_s: (warm + image) / seconds,
        written_bytes_per_s: change(|disk| disk.written_bytes) / seconds,
        warm_pct: (warm + image > 0.0).then(|| 100.0 * warm / (warm + image)),
        image_ms: (operations > 0.0).then(|| change(|disk| disk.image_us) / operations / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn check(change: impl Fn(&mut MachineStatus), after: Duration, expect: Option<Rates>) {
        let before = Reading { at: Instant::now(), status: sample::status() };
        let mut later = Reading { at: before.at + after, status: sample::status() };
        change(&mut later.status);
        let rates = before.leads_to(&later).then(|| before.rates(&later, "root")).flatten();
        assert_eq!(rates, expect);
    }

    #[test]
    fn rates_are_differences_of_counters() {
        let busy = |status: &mut MachineStatus| {
            let disk = &mut status.disks[0];
            disk.reads += 200;
            disk.read_warm_bytes += 3000;
            disk.read_image_bytes += 1000;
            disk.image_operations += 10;
            disk.image_us += 25_000;
        };
        let expect = Rates {
            reads_per_s: 100.0,
            read_bytes_per_s: 2000.0,
            warm_pct: Some(75.0),
            image_ms: Some(2.5),
            ..Rates::default()
        };
        check(busy, Duration::from_secs(2), Some(expect));
        check(|_| {}, Duration::from_secs(2), Some(Rates::default()));
    }

    #[test]
    fn another_keeper_or_an_old_reading_has_no_rates() {
        check(|status| status.keeper.pid += 1, Duration::from_secs(2), None);
        check(|_| {}, OLD + YOUNG, None);
        check(|status| status.disks[0].reads = 0, Duration::from_secs(2), None);
        check(|status| status.disks.clear(), Duration::from_secs(2), None);
    }
}
