//! Whether this host has room for a further job: idle processors, and memory for the machines of a test.

use std::fs;
use std::time::{Duration, Instant};

/// Share of the processors' time that is idle when a further job starts. A job has a busy emulated processor when it does not
/// wait.
const IDLE_SHARE: f64 = 0.25;

/// Available memory when a further job starts. No test's machines use more.
const AVAILABLE_KIB: u64 = 4 << 20;

/// Processor time of this host since boot, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ticks {
    idle: u64,
    all: u64,
}

/// A look at the processors' time so far.
pub struct Idle {
    ticks: Option<Ticks>,
    at: Instant,
}

impl Idle {
    pub fn since_now() -> Self {
        Self { ticks: ticks(&read("/proc/stat")), at: Instant::now() }
    }

    /// Whether there is room, judged by the time since the last look; `false` if that is shorter than `least`.
    pub fn has_room(&mut self, least: Duration) -> bool {
        if self.at.elapsed() < least {
            return false;
        }
        let before = std::mem::replace(self, Self::since_now());
        let share = before.ticks.zip(self.ticks).and_then(|(before, now)| idle_share(before, now));
        share.is_some_and(|share| share >= IDLE_SHARE)
            && available_kib(&read("/proc/meminfo")).is_some_and(|kib| kib >= AVAILABLE_KIB)
    }
}

fn read(path: &str) -> String {
    // A host without these files has no room that we know of.
    fs::read_to_string(path).unwrap_or_default()
}

/// From the line `cpu  USER NICE SYSTEM IDLE IOWAIT IRQ SOFTIRQ STEAL ...`.
fn ticks(stat: &str) -> Option<Ticks> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let fields: Vec<u64> = fields.take(8).map(|field| field.parse().ok()).collect::<Option<_>>()?;
    Some(Ticks { idle: fields.get(3)? + fields.get(4)?, all: fields.iter().sum() })
}

fn idle_share(before: Ticks, now: Ticks) -> Option<f64> {
    let all = now.all.checked_sub(before.all).filter(|all| *all > 0)?;
    Some(now.idle.saturating_sub(before.idle) as f64 / all as f64)
}

fn available_kib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_share_is_that_between_two_looks() {
        let before = ticks("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1 1\n").unwrap();
        assert_eq!(before, Ticks { idle: 850, all: 1000 });
        let now = ticks("cpu  170 0 50 820 60 0 0 0 9 9\n").unwrap();
        assert_eq!(idle_share(before, now), Some(0.3));
        assert_eq!(idle_share(now, now), None);
        assert_eq!(ticks("cpu  1 2 3\n"), None);
        assert_eq!(ticks(""), None);
    }

    #[test]
    fn available_memory_is_read() {
        assert_eq!(available_kib("MemTotal: 9 kB\nMemAvailable:   22020096 kB\n"), Some(22_020_096));
        assert_eq!(available_kib("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn no_room_is_seen_before_its_time() {
        assert!(!Idle::since_now().has_room(Duration::from_secs(3600)));
    }
}
