//! VM generation ID: a number by which a guest sees that it is not the one it was, and draws new randomness.
//!
//! boot: the machine's own, drawn once and kept in the journal | another QEMU for the same guest: the same | restore: a new one |
//! a guest that was started without the device: none, for as long as it lives
//!
//! QEMU writes the number into the guest's memory when it takes a guest, and tells it (ACPI); a guest that finds the number it
//! had does nothing.

use hearth_recovery::random;

use super::Context;
use crate::config::Config;

/// What QEMU calls the device.
const DEVICE: &str = "vmgenid";

/// A number that no machine had.
pub fn fresh() -> String {
    text(random::bytes())
}

/// A random one (version 4, RFC 9562).
fn text(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let part =
        |range: std::ops::Range<usize>| -> String { bytes[range].iter().map(|byte| format!("{byte:02x}")).collect() };
    [part(0..4), part(4..6), part(6..8), part(8..10), part(10..16)].join("-")
}

/// QEMU takes one such device: the operator's comes first.
fn has_its_own(config: &Config) -> bool {
    config.extra_qemu_args.iter().any(|word| word.contains(DEVICE))
}

impl Context {
    /// For a guest that boots.
    pub fn vmgenid_of_boot(&mut self) -> Option<String> {
        if has_its_own(&self.config) {
            return None;
        }
        Some(self.journal.vmgenid.get_or_insert_with(fresh).clone())
    }

    /// For a guest that comes out of a snapshot, with or without the device.
    pub fn vmgenid_of_restore(&mut self, has_device: bool) -> Option<String> {
        self.journal.vmgenid = has_device.then(fresh);
        self.journal.vmgenid.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_as_qemu_wants_it_and_is_never_the_same() {
        assert_eq!(text([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(text(std::array::from_fn(|at| at as u8)), "00010203-0405-4607-8809-0a0b0c0d0e0f");
        assert_ne!(fresh(), fresh());
    }
}
