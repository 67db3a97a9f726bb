//! Long work beside a guest: how much is done, how fast it goes, how often that is reported, and that the guest comes first.

use std::time::{Duration, Instant};

use hearth_disk::pressure::Pressure;

/// Time between two progress reports.
pub const TELL_EVERY: Duration = Duration::from_secs(2);

/// How long a copy of an image waits while the guest uses its disks: at most this long before each piece of 256 KiB.
const GIVE_WAY_MAX: Duration = Duration::from_millis(5);
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// Lets the guest use its disks first.
pub fn give_way(disks: &[Pressure]) {
    let deadline = Instant::now() + GIVE_WAY_MAX;
    while Instant::now() < deadline && disks.iter().any(|disk| disk.read(Instant::now()).in_flight > 0) {
        std::thread::sleep(LOOK_EVERY);
    }
}

pub struct Work {
    pub done: u64,
    pub all: u64,
    pub per_s: Option<f64>,
}

impl Work {
    /// `since`: how long ago `done` had the given value; the rate is measured from there.
    pub fn of(done: u64, all: u64, since: Option<(Duration, u64)>) -> Self {
        let done = done.min(all);
        let rate = |(took, done_then): (Duration, u64)| {
            let (more, seconds) = (done.saturating_sub(done_then), took.as_secs_f64());
            (more > 0 && seconds > 0.0).then(|| more as f64 / seconds)
        };
        Self { done, all, per_s: since.and_then(rate) }
    }

    pub fn percent(&self) -> f64 {
        if self.all == 0 { 0.0 } else { self.done as f64 * 100.0 / self.all as f64 }
    }

    /// Seconds until the work is done, at the rate so far.
    pub fn left_s(&self) -> Option<f64> {
        let left = self.all - self.done;
        if left == 0 { Some(0.0) } else { self.per_s.map(|per_s| left as f64 / per_s) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_follows_the_rate_so_far() {
        let work = Work::of(1024, 4096, Some((Duration::from_secs(2), 0)));
        assert_eq!((work.percent(), work.per_s, work.left_s()), (25.0, Some(512.0), Some(6.0)));
        assert_eq!(Work::of(0, 4096, Some((Duration::from_secs(2), 0))).left_s(), None, "nothing has come");
    }
}
