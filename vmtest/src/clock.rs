//! Comparison of a guest's clock with the host's.

use std::ops::RangeInclusive;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::guest::Drives;

/// Both clocks, in seconds: the guest's, read between two readings of the host's. The guest's counts from its boot, to 10 ms; the
/// host's counts from 1970.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    host_before: f64,
    guest: f64,
    host_after: f64,
}

impl Reading {
    pub fn take(vm: &impl Drives) -> Result<Self> {
        let host_before = now();
        let said = vm.sh("cat /proc/uptime")?;
        let guest = said.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN);
        Ok(Self { host_before, guest, host_after: now() })
    }

    /// The number of seconds, at least and at most, by which the guest's clock has fallen behind the host's since `earlier`.
    pub fn behind_s(&self, earlier: &Self) -> RangeInclusive<f64> {
        let guest = self.guest - earlier.guest;
        self.host_before - earlier.host_after - guest..=self.host_after - earlier.host_before - guest
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_time_is_not_counted_as_lag() {
        let earlier = Reading { host_before: 100.0, guest: 7.0, host_after: 100.5 };
        let later = Reading { host_before: 110.0, guest: 15.0, host_after: 110.25 };
        assert_eq!(later.behind_s(&earlier), 1.5..=2.25);
    }
}
