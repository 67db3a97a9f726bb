//! The guest's clock: a hop stops it, and this module sets it forward by as long as it stood still.
//!
//! QEMU keeps the guest's time in a section of its own in the device state, with the same layout since 2009:
//!
//! ```text
//! 0x04 | section id u32 | 5 "timer" | instance u32 = 0 | version u32 = 2 | ticks i64 | unused i64 | nanoseconds i64
//!      | subsections | 0x7e | section id u32
//! ```
//! All numbers are big-endian. KVM itself keeps the time of a guest's `kvm-clock`, and QEMU sets it from another
//! section when a guest runs:
//!
//! ```text
//! 0x04 | section id u32 | 8 "kvmclock" | instance u32 = 0 | version u32 = 1 | nanoseconds u64
//!      | 0x05 | 26 "kvmclock/clock_is_reliable" | version u32 = 1 | 1 | 0x7e | section id u32
//! ```
//! Timers of the guest that fell due meanwhile are late, as on any machine that had no processor for a while. Its
//! clocks are right, and nothing in the guest has to know.
//!
//! Under emulation `ticks` is the guest's TSC. Under KVM each processor's TSC is elsewhere in the state and is left
//! alone: a guest whose clock is the TSC itself stays behind until NTP corrects it. In a hop under KVM nothing is set,
//! because QEMU itself counts part of the pause. It does not for a guest that was parked, which was paused first.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

const HEAD: &[u8] = b"\x05timer\0\0\0\0\0\0\0\x02";
const KVM_HEAD: &[u8] = b"\x08kvmclock\0\0\0\0\0\0\0\x01";
const KVM_CLOCK_BYTES: usize = 8;
const KVM_RELIABLE: &[u8] = b"\x05\x1akvmclock/clock_is_reliable\0\0\0\x01\x01";
pub(super) const SECTION_FULL: u8 = 0x04;
pub(super) const SECTION_FOOTER: u8 = 0x7e;
/// Ticks, unused, nanoseconds.
const BODY_BYTES: usize = 24;
/// Size of the section, with its ids at both ends.
pub const SECTION_BYTES: usize = 5 + HEAD.len() + BODY_BYTES + 5;
/// Minimum time to watch a ticker: a shorter one is too coarse. The error is then 1 us in 10 ms.
const WATCHED_MIN: Duration = Duration::from_millis(10);

/// Measures the host's TSC against its clock.
#[derive(Clone, Copy, Debug)]
pub struct Ticker {
    ticks: u64,
    began: Instant,
}

impl Ticker {
    /// Starts to measure.
    #[must_use]
    pub fn watch() -> Self {
        Self { ticks: host_ticks(), began: Instant::now() }
    }

    /// Ticks in `duration`; `None` if it has not been watched long enough.
    fn in_duration(self, duration: Duration) -> Option<i64> {
        let watched = self.began.elapsed();
        let ticks = host_ticks().wrapping_sub(self.ticks);
        (watched >= WATCHED_MIN).then(|| (ticks as f64 * duration.as_secs_f64() / watched.as_secs_f64()) as i64)
    }
}

#[cfg(target_arch = "x86_64")]
fn host_ticks() -> u64 {
    // SAFETY: RDTSC reads a counter, and every x86-64 has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Nanoseconds by which a guest's clock is behind, or ahead if negative. A hop decides how far to set the clock forward
/// before the new QEMU has it. The next hop corrects the error of that estimate, so that many hops add up to no more
/// than one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClockDebt(i64);

impl ClockDebt {
    /// Debt of a guest that stood still for `pause` and whose clock was set forward by `set_forward`.
    pub fn of(pause: Duration, set_forward: Duration) -> Self {
        Self::default().after(pause, set_forward)
    }

    /// How far to set the clock forward when the guest has lost `lost` on top of this debt. A clock is never set back.
    pub(super) fn with(self, lost: Duration) -> Duration {
        Duration::from_nanos((nanoseconds(lost) + self.0).max(0).unsigned_abs())
    }

    /// The debt after the guest stood still for `pause` and nobody could set its clock.
    #[must_use]
    pub fn after_standing(self, pause: Duration) -> Self {
        self.after(pause, Duration::ZERO)
    }

    /// The debt after the clock stood still for `pause` and was set forward by `set_forward`.
    pub(super) fn after(self, pause: Duration, set_forward: Duration) -> Self {
        Self(self.0 + nanoseconds(pause) - nanoseconds(set_forward))
    }
}

fn nanoseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX / 4)
}

/// Sets the clock in a guest's state forward. Returns false and changes nothing without a ticker, or if the section is
/// not where it should be. There is no ticker where ticks are kept elsewhere.
pub fn advance(state: &mut [u8], by: Duration, ticker: Option<Ticker>) -> bool {
    let Some(ticks) = ticker.and_then(|ticker| ticker.in_duration(by)) else { return false };
    let Some(at) = find(state) else { return false };
    let nanoseconds = i64::try_from(by.as_nanos()).unwrap_or(0);
    add(state, at, ticks);
    add(state, at + 16, nanoseconds);
    true
}

/// Same as `advance`, for a guest under KVM that was paused before its state was taken.
pub fn advance_kvm(state: &mut [u8], by: Duration) -> bool {
    let (Some(kvm), Some(timers)) = (find_kvm(state), find(state)) else { return false };
    let nanoseconds = i64::try_from(by.as_nanos()).unwrap_or(0);
    add(state, kvm, nanoseconds);
    add(state, timers + 16, nanoseconds);
    true
}

fn add(state: &mut [u8], at: usize, forward: i64) {
    let bytes = &mut state[at..at + 8];
    let value = i64::from_be_bytes((&*bytes).try_into().expect("eight bytes"));
    bytes.copy_from_slice(&value.wrapping_add(forward).to_be_bytes());
}

fn find(state: &[u8]) -> Option<usize> {
    find_section(state, HEAD, BODY_BYTES)
}

/// Finds KVM's clock only if KVM vouches for it: QEMU ignores the clock of an older KVM.
fn find_kvm(state: &[u8]) -> Option<usize> {
    let body = find_section(state, KVM_HEAD, KVM_CLOCK_BYTES + KVM_RELIABLE.len())?;
    (state[body + KVM_CLOCK_BYTES..].starts_with(KVM_RELIABLE)).then_some(body)
}

/// Start of a section's body: the only place that looks like the section, with the same id at both ends.
fn find_section(state: &[u8], head: &[u8], body_bytes: usize) -> Option<usize> {
    let mut found = None;
    for at in state
        .windows(head.len())
        .enumerate()
        .filter(|(_, window)| window[0] == head[0] && *window == head)
        .map(|(at, _)| at)
    {
        let body = at + head.len();
        let before = at.checked_sub(5).and_then(|start| state.get(start..at));
        let after = state.get(body + body_bytes..body + body_bytes + 5);
        if let (Some([SECTION_FULL, id @ ..]), Some([SECTION_FOOTER, footer @ ..])) = (before, after)
            && id == footer
            && found.replace(body).is_some()
        {
            return None;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(id: u8, ticks: i64, nanoseconds: i64) -> Vec<u8> {
        let body = [ticks.to_be_bytes(), [0; 8], nanoseconds.to_be_bytes()].concat();
        [&[SECTION_FULL, 0, 0, 0, id][..], HEAD, &body, &[SECTION_FOOTER, 0, 0, 0, id]].concat()
    }

    fn ticker() -> Ticker {
        let ticker = Ticker::watch();
        std::thread::sleep(WATCHED_MIN);
        ticker
    }

    #[test]
    fn both_counts_go_forward_and_nothing_else_changes() {
        let mut state = [b"before\x05timer".to_vec(), section(7, -5_000_000_000, 40), b"after".to_vec()].concat();
        let before = state.clone();
        assert!(advance(&mut state, Duration::from_millis(3), Some(ticker())));
        let at = find(&state).unwrap();
        let field = |state: &[u8], at: usize| i64::from_be_bytes(state[at..at + 8].try_into().unwrap());
        assert_eq!(field(&state, at + 16), 3_000_040);
        let ticks = field(&state, at) - field(&before, at);
        // At 0.5 to 10 GHz.
        assert!((1_500_000..30_000_000).contains(&ticks), "{ticks}");
        state[at..at + BODY_BYTES].copy_from_slice(&before[at..at + BODY_BYTES]);
        assert!(state == before);
    }

    #[test]
    fn unknown_state_is_left_alone() {
        let check = |state: Vec<u8>| {
            let mut changed = state.clone();
            assert!(!advance(&mut changed, Duration::from_millis(3), Some(ticker())));
            assert_eq!(changed, state);
        };
        check(Vec::new());
        check(HEAD.to_vec());
        check([section(1, 2, 3), section(2, 3, 4)].concat());
        let mut other_end = section(1, 2, 3);
        *other_end.last_mut().unwrap() = 9;
        check(other_end);
        let mut whole = section(1, 2, 3);
        assert!(!advance(&mut whole, Duration::from_millis(3), None), "ticks are kept elsewhere");
        assert_eq!(whole, section(1, 2, 3));
    }

    fn kvm_section(nanoseconds: i64, reliable: u8) -> Vec<u8> {
        let mut body = [&nanoseconds.to_be_bytes()[..], KVM_RELIABLE].concat();
        *body.last_mut().unwrap() = reliable;
        [&[SECTION_FULL, 0, 0, 0, 9][..], KVM_HEAD, &body, &[SECTION_FOOTER, 0, 0, 0, 9]].concat()
    }

    #[test]
    fn kvm_clocks_go_forward_without_ticks() {
        let mut state = [section(7, 5, 40), kvm_section(1000, 1)].concat();
        assert!(advance_kvm(&mut state, Duration::from_millis(3)));
        assert_eq!(state, [section(7, 5, 3_000_040), kvm_section(3_001_000, 1)].concat());
        for other in [section(7, 5, 40), kvm_section(1000, 1), [section(7, 5, 40), kvm_section(1000, 0)].concat()] {
            let mut state = other.clone();
            assert!(!advance_kvm(&mut state, Duration::from_millis(3)));
            assert_eq!(state, other);
        }
    }

    #[test]
    fn next_hop_corrects_a_wrong_estimate() {
        let ms = Duration::from_millis;
        let mut debt = ClockDebt::default();
        let mut behind = 0;
        for (expected, real) in [(3, 5), (3, 2), (4, 40), (3, 1), (2, 2)] {
            let by = debt.with(ms(expected));
            debt = debt.after(ms(real), by);
            behind += nanoseconds(ms(real)) - nanoseconds(by);
            assert_eq!(debt, ClockDebt(behind), "all that is missing is owed");
        }
        assert_eq!(debt, ClockDebt::default(), "the last one was judged right");
    }

    #[test]
    fn next_hop_corrects_for_a_failed_one() {
        let ms = Duration::from_millis;
        let debt = ClockDebt::default().after_standing(ms(5000)).after_standing(ms(20));
        assert_eq!(debt.with(ms(3)), ms(5023));
        assert_eq!(debt.after(ms(3), ms(5023)), ClockDebt::default());
    }

    #[test]
    fn no_clock_is_set_back() {
        let debt = ClockDebt::default().after(Duration::from_millis(1), Duration::from_millis(9));
        assert_eq!(debt.with(Duration::from_millis(3)), Duration::ZERO);
        assert_eq!(debt.after(Duration::from_millis(3), Duration::ZERO), ClockDebt(-5_000_000));
    }
}
