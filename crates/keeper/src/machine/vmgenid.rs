//! VM generation ID: a number that tells a guest that it was copied or restored, so that it draws new randomness.
//!
//! boot: the machine's own number, drawn once and kept in the journal | another QEMU for the same guest: the same
//! number | restore: a new number | a guest that was started without the device: none, for as long as it lives
//!
//! QEMU writes the number into the guest's memory when it starts, and notifies the guest (ACPI). A guest that finds the
//! same number does nothing.

use hearth_recovery::random;

use super::Context;
use crate::config::Config;

/// QEMU's name of the device.
const DEVICE: &str = "vmgenid";

/// Draws a new number.
pub fn fresh() -> String {
    text(random::bytes())
}

/// Formats the bytes as a random UUID (version 4, RFC 9562).
fn text(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let part =
        |range: std::ops::Range<usize>| -> String { bytes[range].iter().map(|byte| format!("{byte:02x}")).collect() };
    [part(0..4), part(4..6), part(6..8), part(8..10), part(10..16)].join("-")
}

/// Whether the operator's arguments already contain the device. QEMU accepts only one.
fn has_its_own(config: &Config) -> bool {
    config.qemu.extra_args.iter().any(|word| word.contains(DEVICE))
}

impl Context {
    /// The number for a guest that boots.
    pub fn vmgenid_of_boot(&mut self) -> Option<String> {
        if has_its_own(&self.config) {
            return None;
        }
        Some(self.journal.vmgenid.get_or_insert_with(fresh).clone())
    }

    /// The number for a guest restored from a snapshot, with or without the device.
    pub fn vmgenid_of_restore(&mut self, has_device: bool) -> Option<String> {
        self.journal.vmgenid = has_device.then(fresh);
        self.journal.vmgenid.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vmgenid_is_a_fresh_uuid() {
        assert_eq!(text([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(text(std::array::from_fn(|at| at as u8)), "00010203-0405-4607-8809-0a0b0c0d0e0f");
        assert_ne!(fresh(), fresh());
    }
}
