//! Pace: limits how fast the rest of a guest's memory is read in the background, so that a touched page does not wait
//! for it.
//!
//! learn: speed up while reads are quick -> a read takes far longer than they do: it may have met the disk's limit ->
//! step back, and after a moment speed up again, less boldly -> a second long read: that is the limit -> step back, and
//! speed up very slowly until the next one
//!
//! The first long read may have another cause, because the working set is read at full speed just before. When it was
//! taken for the limit at once, 2 GiB took 33 s instead of 17.
//!
//! A rented disk limits its rate by a bucket: in each slice of about a tenth of a second it delivers what that slice is
//! worth as fast as it can. Then it delivers nothing until the slice is over. A reader that empties the bucket makes all
//! readers wait for its next filling, however little they ask for. Pages that a guest touched waited 106 ms at a limit
//! of 125 MiB/s, behind a fill that never had more than 256 KiB in flight. So the rate counts, and something must be
//! left in the bucket.
//!
//! The caller passes the time, counted from any origin.

use std::time::Duration;

/// First rate, in bytes a second.
const FIRST: f64 = (64 << 20) as f64;
/// Lowest rate, in bytes a second.
const LOWEST: f64 = (8 << 20) as f64;
/// Factor of the rate after each `STEP`: before any long read, after the first, and after more.
const FASTER: [f64; 3] = [1.5, 1.05, 1.002];
/// Time after a long read in which the rate does not rise: after the first one, and after others.
const HOLD: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
const STEP: Duration = Duration::from_millis(100);
/// Factor of the rate after a long read.
const STEP_BACK: f64 = 0.85;
/// Minimum time between two steps back. One emptied bucket is one long read, or two where two readers waited for it.
const STEP_BACK_EVERY: Duration = Duration::from_millis(250);
/// A read that takes longer than this, and `LONG_TIMES` longer than the quickest, has met a limit. A thread that waits
/// for a processor waits less.
const LONG: Duration = Duration::from_millis(30);
const LONG_TIMES: u32 = 8;
/// Time for which a guest with a working set gets the rate `GENTLE`. It answers as before within a second or two, and
/// needs its processors for that; the rest of its memory can wait. With one second, a new client's first request took
/// 150 to 210 ms instead of 90. The guest had two processors on two of the host's, and a disk of 125 MiB/s. At a lower
/// rate the guest touches more missing pages, and answers as before no sooner.
const GENTLE_FOR: Duration = Duration::from_secs(3);
const GENTLE: f64 = (32 << 20) as f64;
/// Fraction of the rate beside a guest that has just waited for a page.
const BESIDE: f64 = 0.5;
/// Delay that may be made up for: as much as a sleep may be too long.
const CREDIT: Duration = Duration::from_millis(2);
/// Shortest sleep: a shorter one takes longer than asked.
const SLEEP_MIN: Duration = Duration::from_millis(1);

/// Rate of the background fill, learned from the duration of its reads.
#[derive(Clone, Debug)]
pub struct Pace {
    /// Bytes a second.
    rate: f64,
    /// Number of reads so long that they may have met a limit.
    long_reads: usize,
    gentle_until: Duration,
    /// When the next bytes are due.
    due: Duration,
    /// When the rate was last reviewed, and whether it has held up a read since.
    looked: Duration,
    was_limit: bool,
    stepped_back: Option<Duration>,
    quickest: Duration,
}

impl Pace {
    /// Begins at the first rate; gently, if there is a working set.
    #[must_use]
    pub fn begin(now: Duration, has_working_set: bool) -> Self {
        Self {
            rate: FIRST,
            long_reads: 0,
            gentle_until: if has_working_set { now + GENTLE_FOR } else { now },
            due: now,
            looked: now,
            was_limit: false,
            stepped_back: None,
            quickest: Duration::MAX,
        }
    }

    /// How long to wait before `bytes` are read. `is_calm` says that nobody waits for a page, or has a moment ago.
    pub fn wait(&mut self, now: Duration, bytes: u64, is_calm: bool) -> Duration {
        self.go_forward(now);
        let is_gentle = now < self.gentle_until;
        let full = if is_gentle { GENTLE } else { self.rate };
        let rate = if is_calm { full } else { full * BESIDE };
        let due = self.due.max(now.saturating_sub(CREDIT));
        self.due = due + Duration::from_secs_f64(bytes as f64 / rate);
        let wait = due.saturating_sub(now);
        if wait < SLEEP_MIN {
            return Duration::ZERO;
        }
        self.was_limit |= is_calm && !is_gentle;
        wait
    }

    /// Records a read that took `took` and ended at `now`.
    pub fn took(&mut self, now: Duration, took: Duration) {
        self.quickest = self.quickest.min(took);
        let is_long = took > LONG && took > self.quickest * LONG_TIMES;
        let is_another = self.stepped_back.is_none_or(|before| now.saturating_sub(before) >= STEP_BACK_EVERY);
        if is_long && is_another {
            self.rate = (self.rate * STEP_BACK).max(LOWEST);
            self.long_reads += 1;
            self.stepped_back = Some(now);
        }
    }

    /// Raises the rate, but only if it held up a read: otherwise it says nothing about the disk.
    fn go_forward(&mut self, now: Duration) {
        if now.saturating_sub(self.looked) < STEP {
            return;
        }
        let hold = if self.long_reads < 2 { HOLD[0] } else { HOLD[1] };
        let holds = self.stepped_back.is_some_and(|before| now.saturating_sub(before) < hold);
        if self.was_limit && !holds {
            self.rate *= FASTER[self.long_reads.min(FASTER.len() - 1)];
        }
        (self.looked, self.was_limit) = (now, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 64 << 10;
    const MIB: f64 = 1048576.0;

    /// Delivers `slice_bytes` in each slice of time, quickly, and then nothing until the next one.
    struct Disk {
        slice_bytes: u64,
        left: u64,
        slice: u32,
        bytes_per_s: f64,
    }

    const SLICE: Duration = Duration::from_millis(100);

    impl Disk {
        fn limited_to(mib_per_s: u64) -> Self {
            let slice_bytes = (mib_per_s << 20) / 10;
            Self { slice_bytes, left: slice_bytes, slice: 0, bytes_per_s: 1500.0 * MIB }
        }

        fn unlimited() -> Self {
            Self { slice_bytes: u64::MAX, left: u64::MAX, ..Self::limited_to(0) }
        }

        /// End of a read that begins at `now`.
        fn read(&mut self, now: Duration, bytes: u64) -> Duration {
            let slice = (now.as_nanos() / SLICE.as_nanos()) as u32;
            if slice > self.slice {
                (self.slice, self.left) = (slice, self.slice_bytes);
            }
            let begins = match self.left.checked_sub(bytes) {
                Some(left) => {
                    self.left = left;
                    now
                }
                None => {
                    (self.slice, self.left) = (self.slice + 1, self.slice_bytes - bytes);
                    now.max(SLICE * self.slice)
                }
            };
            begins + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s)
        }
    }

    /// Fills memory while a guest touches a page now and then. Returns the end of the fill, and when and how long the
    /// guest waited each time.
    fn fill(disk: &mut Disk, mib: u64, touch_every: Duration) -> (Duration, Vec<(Duration, Duration)>) {
        fill_at(disk, Pace::begin(Duration::ZERO, false), mib, touch_every)
    }

    fn fill_at(
        disk: &mut Disk,
        mut pace: Pace,
        mib: u64,
        touch_every: Duration,
    ) -> (Duration, Vec<(Duration, Duration)>) {
        let mut now = Duration::ZERO;
        let (mut touches, mut next_touch) = (Vec::new(), touch_every);
        for _ in 0..(mib << 20) / CHUNK {
            let is_calm = touches.last().is_none_or(|&(at, waited): &(Duration, Duration)| now > at + waited + SLICE);
            now += pace.wait(now, CHUNK, is_calm);
            if now >= next_touch {
                let ended = disk.read(now, CHUNK);
                touches.push((now, ended - now));
                (now, next_touch) = (ended, ended + touch_every);
            }
            let ended = disk.read(now, CHUNK);
            pace.took(ended, ended - now);
            now = ended;
        }
        (now, touches)
    }

    #[test]
    fn fill_leaves_disk_bandwidth_for_touched_pages() {
        for limit in [60, 125, 250] {
            let (ended, touches) = fill(&mut Disk::limited_to(limit), 16 * limit, Duration::from_millis(173));
            // It learns in the first seconds. Later a probe that goes too far causes a long read now and then.
            let later = touches.iter().filter(|(at, _)| *at > Duration::from_secs(3)).map(|(_, waited)| *waited);
            let (long, short): (Vec<_>, Vec<_>) = later.partition(|waited| *waited > Duration::from_millis(5));
            assert!(long.len() * 50 <= short.len(), "{limit}: {} of {} touches waited", long.len(), touches.len());
            assert!(ended < Duration::from_secs(32), "{limit}: of a disk that takes 16 s: {ended:?}");
        }
    }

    #[test]
    fn fill_uses_most_of_a_limited_disk() {
        for limit in [60, 125, 250] {
            let (ended, _) = fill(&mut Disk::limited_to(limit), 16 * limit, Duration::MAX / 2);
            assert!(ended < Duration::from_secs_f64(16.0 / 0.75), "{limit}: of 16 s: {ended:?}");
        }
    }

    #[test]
    fn fill_soon_reads_an_unlimited_disk_fast() {
        let (ended, _) = fill(&mut Disk::unlimited(), 4096, Duration::MAX / 2);
        assert!(ended < Duration::from_secs_f64(4096.0 / 1500.0 + 1.5), "{ended:?}");
    }

    #[test]
    fn wait_for_a_processor_is_no_limit() {
        let mut pace = Pace::begin(Duration::ZERO, false);
        pace.took(Duration::from_millis(1), Duration::from_micros(100));
        pace.took(Duration::from_millis(20), Duration::from_millis(19));
        assert_eq!(pace.long_reads, 0);
        pace.took(Duration::from_millis(80), Duration::from_millis(60));
        assert_eq!(pace.long_reads, 1);
    }

    #[test]
    fn fill_is_gentle_beside_a_working_set() {
        let mut disk = Disk::unlimited();
        let quiet = fill_at(&mut disk, Pace::begin(Duration::ZERO, true), 95, Duration::MAX / 2).0;
        assert!(quiet > GENTLE_FOR * 9 / 10 && quiet < GENTLE_FOR, "{quiet:?}");
        let ended = fill_at(&mut disk, Pace::begin(Duration::ZERO, true), 4096, Duration::MAX / 2).0;
        assert!(ended < GENTLE_FOR + Duration::from_secs_f64(4096.0 / 1500.0 + 1.5), "{ended:?}");
    }

    #[test]
    fn bucket_emptied_by_others_is_no_limit() {
        let mut disk = Disk { left: 0, ..Disk::limited_to(125) };
        let mut pace = Pace::begin(Duration::ZERO, false);
        pace.took(Duration::ZERO, Duration::from_micros(50));
        let (ended, _) = fill_at(&mut disk, pace, 1900, Duration::MAX / 2);
        assert!(ended < Duration::from_secs(20), "of 15 s: {ended:?}");
    }
}
