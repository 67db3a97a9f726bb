//! Budget: the host memory that a machine may use: its RAM size plus a small fixed slack, and a headroom while a dump
//! holds dead memory.
//!
//! While an ember exists, the dead RAM and the new RAM share the budget. As the new RAM grows, the ember is trimmed
//! ahead of it. How far ahead depends on how fast the guest has just grown.

use std::time::Duration;

/// Bytes kept free on top of the slack, while an ember exists and the guest has not grown fully.
const HEADROOM_BYTES_MIN: u64 = 16 << 20;
/// The ember makes room for this much time of growth: a guest may double its pace, and a check may come late.
const AHEAD: Duration = Duration::from_millis(16);
/// Minimum to keep free, in multiples of the growth just seen: one late check may follow another. A factor of eight,
/// whatever time had passed, cost a quarter of the ember on a host with five busy processes.
const GROWTH_AHEAD_MIN: u64 = 2;

/// The slack divided by this is never planned with: it covers growth between two checks. Without it a guest of 512 MiB
/// that filled its memory came within 0.5 MiB of the limit.
const RESERVE_OF_SLACK: u64 = 4;

/// Limits for a machine's memory files, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Size of the guest's RAM.
    pub ram_bytes: u64,
    /// Allowed on top of the RAM.
    pub slack_bytes: u64,
    /// Allowed on top of both while a dump holds dead memory.
    pub headroom_bytes: u64,
    /// Maximum size of a dump's buffers. It is reserved while a dump holds dead memory, because memory granted to the
    /// guest cannot be taken back when the dump needs it.
    pub dump_buffer_bytes: u64,
}

/// Bytes that the memory files hold at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// RAM file and ledger of the living incarnation.
    pub live_bytes: u64,
    /// RAM files and ledgers of the dead ones.
    pub ember_bytes: u64,
    /// Buffers of dumps.
    pub buffer_bytes: u64,
    /// Whether a dump holds dead memory.
    pub is_held: bool,
}

/// How the living incarnation grows.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// Bytes since the last check.
    pub bytes: u64,
    /// Time of the last check, from now.
    pub since: Duration,
    /// Whether the ember makes room for a leap. Not while nobody lives: a dead guest that had filled its memory would lose blocks before
    /// the rest of its memory is released.
    pub may_leap: bool,
}

impl Usage {
    /// Sum of all parts, in bytes.
    pub fn total_bytes(self) -> u64 {
        self.live_bytes + self.ember_bytes + self.buffer_bytes
    }
}

impl Budget {
    /// Limit that applies now, in bytes. `is_held` means that a dump holds dead memory.
    pub fn limit_bytes(self, is_held: bool) -> u64 {
        self.ram_bytes + self.slack_bytes + if is_held { self.headroom_bytes } else { 0 }
    }

    /// Bytes that count for dumps whose buffers now hold `in_hand_bytes`.
    pub fn buffer_bytes(self, in_hand_bytes: u64, is_held: bool) -> u64 {
        if is_held { in_hand_bytes.max(self.dump_buffer_bytes) } else { in_hand_bytes }
    }

    /// Bytes to trim from the ember now.
    pub fn to_trim(self, usage: Usage, growth: Growth) -> u64 {
        let usage = Usage { buffer_bytes: self.buffer_bytes(usage.buffer_bytes, usage.is_held), ..usage };
        let reserve = self.slack_bytes / RESERVE_OF_SLACK;
        // A fully grown incarnation needs no room ahead. Its ledger comes on top of its RAM: at most 0.6 %, which the
        // reserve covers.
        let still_to_come = (self.ram_bytes + reserve).saturating_sub(usage.live_bytes);
        let minimum = if growth.may_leap { HEADROOM_BYTES_MIN + self.slack_bytes } else { 0 };
        let headroom = minimum.max(growth_ahead_bytes(growth.bytes, growth.since)).min(still_to_come);
        let excess = (usage.total_bytes() + headroom).saturating_sub(self.limit_bytes(usage.is_held) - reserve);
        excess.min(usage.ember_bytes)
    }
}

/// Bytes that a guest may grow until the next check, if it grew by `growth_bytes` in the time `since`.
fn growth_ahead_bytes(growth_bytes: u64, since: Duration) -> u64 {
    let in_time = u128::from(growth_bytes) * AHEAD.as_micros() / since.as_micros().max(1);
    growth_bytes.saturating_mul(GROWTH_AHEAD_MIN).max(u64::try_from(in_time).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BUDGET: Budget =
        Budget { ram_bytes: 1024 * MIB, slack_bytes: 32 * MIB, headroom_bytes: 40 * MIB, dump_buffer_bytes: 8 * MIB };

    /// While a dump holds dead memory, the ember keeps more: the headroom less the dump's buffers.
    fn check(live_mib: u64, ember_mib: u64, growth_mib: u64, trim_mib: u64) {
        let usage = Usage { live_bytes: live_mib * MIB, ember_bytes: ember_mib * MIB, ..Usage::default() };
        let growth = Growth { bytes: growth_mib * MIB, since: Duration::from_millis(2), may_leap: true };
        let trim = |usage| BUDGET.to_trim(usage, growth) / MIB;
        assert_eq!(trim(usage), trim_mib, "{usage:?}");
        let held = Usage { is_held: true, ..usage };
        assert_eq!(trim(held), trim_mib.saturating_sub(32), "{held:?}");
        let in_hand = Usage { buffer_bytes: 5 * MIB, ..held };
        assert_eq!(trim(in_hand), trim(held), "what was set aside is used");
    }

    #[test]
    fn an_ember_that_fits_is_left_alone() {
        check(100, 800, 0, 0);
    }

    #[test]
    fn the_ember_makes_room_before_it_is_needed() {
        check(300, 740, 0, 40);
    }

    #[test]
    fn fast_guest_gets_more_room_ahead() {
        check(300, 700, 50, 352);
    }

    #[test]
    fn no_room_is_made_for_a_leap_that_cannot_come() {
        let trim = |ember_mib: u64, growth_mib: u64| {
            let usage = Usage { ember_bytes: ember_mib * MIB, ..Usage::default() };
            let growth = Growth { bytes: growth_mib * MIB, since: Duration::from_millis(2), may_leap: false };
            BUDGET.to_trim(usage, growth) / MIB
        };
        assert_eq!(trim(1024, 0), 0);
        assert_eq!(trim(1060, 0), 12, "the limit holds");
        assert_eq!(trim(1024, 5), 16, "so does what is seen");
    }

    #[test]
    fn late_check_does_not_exaggerate_growth() {
        assert_eq!(growth_ahead_bytes(50 * MIB, Duration::from_millis(2)), 400 * MIB);
        assert_eq!(growth_ahead_bytes(50 * MIB, Duration::from_millis(200)), 100 * MIB);
        assert_eq!(growth_ahead_bytes(1, Duration::ZERO), 16_000);
    }

    #[test]
    fn full_grown_guest_leaves_slack_to_the_ember() {
        check(1000, 16, 0, 0);
        check(1000, 80, 0, 64);
        check(1024, 40, 100, 24);
        check(1030, 16, 0, 0);
        check(500, 0, 500, 0);
    }
}
