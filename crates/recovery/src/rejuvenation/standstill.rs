//! Standstill: how long a guest stood still on a QEMU that kept it because a hop failed.
//!
//! Nobody can set that guest's clock: QEMU takes the time from a state that it loads, and has no command for it. So the
//! next hop makes up for it (see `clock`).

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use hearth_disk::server::DiskServer;
use hearth_qemu::{Qmp, QmpEvent, TimedEvent};

/// Watches a guest's QEMU from before a hop.
pub struct Standstill {
    heard: Receiver<TimedEvent>,
    before: Vec<u64>,
}

impl Standstill {
    /// Starts to watch.
    pub fn watch(old: &Qmp, disks: &[DiskServer]) -> Self {
        let (speaks, heard) = channel();
        old.listen(move |said| speaks.send(said).is_ok());
        Self { heard, before: stops_of(disks) }
    }

    /// How long the guest stood still; zero if it never stopped, or does not run again.
    pub fn over(&self, disks: &[DiskServer]) -> Duration {
        stood(self.heard.try_iter(), first_stop(&self.before, &stops_of(disks)))
    }
}

/// When each disk's queues were last stopped, in microseconds since 1970.
pub fn stops_of(disks: &[DiskServer]) -> Vec<u64> {
    disks.iter().map(|disk| disk.counters().stop_asked_us).collect()
}

/// When a guest stopped, as its disks know it; `None` if it did not stop or has no disks. QEMU itself reports it only
/// when all of them have drained.
pub fn first_stop(before: &[u64], now: &[u64]) -> Option<Duration> {
    let stopped = before.iter().zip(now).filter(|(before, now)| before != now);
    stopped.map(|(_, now)| Duration::from_micros(*now)).min()
}

fn stood(heard: impl IntoIterator<Item = TimedEvent>, first_stop: Option<Duration>) -> Duration {
    let (mut stood, mut stopped_at, mut first_stop) = (Duration::ZERO, None, first_stop);
    for TimedEvent { event, at } in heard {
        match event {
            QmpEvent::Stopped => stopped_at = first_stop.take().into_iter().chain([at]).min(),
            QmpEvent::Resumed => stood += stopped_at.take().map_or(Duration::ZERO, |since| at.saturating_sub(since)),
            _ => {}
        }
    }
    stood
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(heard: &[(QmpEvent, u64)], first_stop: Option<u64>, expect: u64) {
        let said = heard.iter().map(|(event, at)| TimedEvent { event: event.clone(), at: Duration::from_millis(*at) });
        let first_stop = first_stop.map(Duration::from_millis);
        assert_eq!(stood(said, first_stop), Duration::from_millis(expect), "{heard:?}");
    }

    #[test]
    fn standstill_begins_when_the_disks_stop() {
        use QmpEvent::{HungUp, Resumed, Stopped};
        check(&[], None, 0);
        check(&[(Stopped, 100), (Resumed, 5100)], None, 5000);
        check(&[(Stopped, 100), (Resumed, 5100)], Some(90), 5010);
        check(&[(Stopped, 100), (Resumed, 200), (Stopped, 300), (Resumed, 500)], Some(90), 310);
        check(&[(Stopped, 100), (HungUp, 200)], Some(90), 0);
        check(&[(Resumed, 200)], None, 0);
    }

    #[test]
    fn the_first_disk_that_stopped_counts() {
        let check = |before: &[u64], now: &[u64], expect: Option<u64>| {
            assert_eq!(first_stop(before, now), expect.map(Duration::from_micros), "{before:?} {now:?}");
        };
        check(&[], &[], None);
        check(&[3, 0], &[3, 0], None);
        check(&[3, 0, 5], &[3, 9, 8], Some(8));
    }
}
