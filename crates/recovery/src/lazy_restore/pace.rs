//! Pace: how fast the rest of a guest's memory is read behind its back, so that a page that it touches does not wait for it.
//!
//! learn: faster and faster, while reads are quick -> a read takes far longer than they do: it may have met the disk's limit ->
//! a step back, and after a moment forward again, less boldly -> a second such read: that is the limit -> a step back, and from
//! there on very slowly forward, until the next
//!
//! The first may have been another's doing: the working set is read at full speed just before. At the pace that is right behind
//! a limit, taken for one at once, 2 GiB took 33 s instead of 17.
//!
//! A rented disk is a bucket: within a tenth of a second or so it gives what that time is worth as fast as it can, and then
//! nothing until that time is over. Whoever empties the bucket has everybody wait for its next filling, however little he has
//! asked for himself: pages that a guest touched waited 106 ms at a limit of 125 MiB/s, behind a fill that never had more than 256 KiB
//! under way. So what counts is the rate, and something must be left in the bucket.
//!
//! Time is handed in, from any beginning.

use std::time::Duration;

/// Bytes a second to begin with.
const FIRST: f64 = (64 << 20) as f64;
const LOWEST: f64 = (8 << 20) as f64;
/// How much faster after each `STEP`: before any long read, after the first, and after more.
const FASTER: [f64; 3] = [1.5, 1.05, 1.002];
/// After a long read, the first and others, it does not go forward for so long.
const HOLD: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
const STEP: Duration = Duration::from_millis(100);
/// After a long read.
const STEP_BACK: f64 = 0.85;
/// One emptied bucket is one long read, or two where two readers waited for it.
const STEP_BACK_EVERY: Duration = Duration::from_millis(250);
/// A read that takes longer, and so many times longer than the quickest, has met a limit. A thread that had to wait for a processor
/// has waited less.
const LONG: Duration = Duration::from_millis(30);
const LONG_TIMES: u32 = 8;
/// A guest that has its working set answers again as before within a second or two, and needs its processors for that: the rest of
/// its memory can wait so long. After one second of it a new client's first request took 150 to 210 ms instead of 90 (two guest
/// processors on two of the host's, a disk of 125 MiB/s). At a lower rate it touches more that is still
/// missing, and answers as before no sooner.
const GENTLE_FOR: Duration = Duration::from_secs(3);
const GENTLE: f64 = (32 << 20) as f64;
/// Beside a guest that has just waited for a page: so much of the rate.
const BESIDE: f64 = 0.5;
/// What it is late may be made good, as far as a sleep may be too long.
const CREDIT: Duration = Duration::from_millis(2);
/// Shorter sleeps take longer than they are.
const SLEEP_MIN: Duration = Duration::from_millis(1);

#[derive(Clone, Debug)]
pub struct Pace {
    /// Bytes a second.
    rate: f64,
    /// Reads that were so long that they may have met a limit.
    long_reads: usize,
    gentle_until: Duration,
    /// The next bytes are due then.
    due: Duration,
    /// The rate was last looked at then, and has held somebody up since.
    looked: Duration,
    was_limit: bool,
    stepped_back: Option<Duration>,
    quickest: Duration,
}

impl Pace {
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

    /// How long to wait before so many bytes are read. `is_calm`: nobody waits for a page, or has a moment ago.
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

    /// A read took so long, up to now.
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

    /// Faster only where the rate was what held it up: else it would say nothing of the disk.
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

    /// Gives so many bytes in each slice of time, quickly, and then none until the next one.
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

        /// When a read that begins now has ended.
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

    /// Fills, and has a guest touch a page now and then. When the fill has ended, and how long the guest waited each time.
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
    fn something_is_left_in_the_bucket_for_who_touches_a_page() {
        for limit in [60, 125, 250] {
            let (ended, touches) = fill(&mut Disk::limited_to(limit), 16 * limit, Duration::from_millis(173));
            // The first seconds it learns; a probe that goes too far is a long read now and then.
            let later = touches.iter().filter(|(at, _)| *at > Duration::from_secs(3)).map(|(_, waited)| *waited);
            let (long, short): (Vec<_>, Vec<_>) = later.partition(|waited| *waited > Duration::from_millis(5));
            assert!(long.len() * 50 <= short.len(), "{limit}: {} of {} touches waited", long.len(), touches.len());
            assert!(ended < Duration::from_secs(32), "{limit}: of a disk that takes 16 s: {ended:?}");
        }
    }

    #[test]
    fn a_limited_disk_is_made_use_of_where_nobody_touches_anything() {
        for limit in [60, 125, 250] {
            let (ended, _) = fill(&mut Disk::limited_to(limit), 16 * limit, Duration::MAX / 2);
            assert!(ended < Duration::from_secs_f64(16.0 / 0.75), "{limit}: of 16 s: {ended:?}");
        }
    }

    #[test]
    fn a_disk_without_a_limit_is_read_as_fast_as_it_can_after_a_moment() {
        let (ended, _) = fill(&mut Disk::unlimited(), 4096, Duration::MAX / 2);
        assert!(ended < Duration::from_secs_f64(4096.0 / 1500.0 + 1.5), "{ended:?}");
    }

    #[test]
    fn a_read_that_is_long_for_want_of_a_processor_is_none_that_met_a_limit() {
        let mut pace = Pace::begin(Duration::ZERO, false);
        pace.took(Duration::from_millis(1), Duration::from_micros(100));
        pace.took(Duration::from_millis(20), Duration::from_millis(19));
        assert_eq!(pace.long_reads, 0);
        pace.took(Duration::from_millis(80), Duration::from_millis(60));
        assert_eq!(pace.long_reads, 1);
    }

    #[test]
    fn a_guest_that_has_its_working_set_is_left_in_peace_for_a_while() {
        let mut disk = Disk::unlimited();
        let quiet = fill_at(&mut disk, Pace::begin(Duration::ZERO, true), 95, Duration::MAX / 2).0;
        assert!(quiet > GENTLE_FOR * 9 / 10 && quiet < GENTLE_FOR, "{quiet:?}");
        let ended = fill_at(&mut disk, Pace::begin(Duration::ZERO, true), 4096, Duration::MAX / 2).0;
        assert!(ended < GENTLE_FOR + Duration::from_secs_f64(4096.0 / 1500.0 + 1.5), "{ended:?}");
    }

    #[test]
    fn a_bucket_that_another_has_emptied_is_not_taken_for_the_limit() {
        let mut disk = Disk { left: 0, ..Disk::limited_to(125) };
        let mut pace = Pace::begin(Duration::ZERO, false);
        pace.took(Duration::ZERO, Duration::from_micros(50));
        let (ended, _) = fill_at(&mut disk, pace, 1900, Duration::MAX / 2);
        assert!(ended < Duration::from_secs(20), "of 15 s: {ended:?}");
    }
}
