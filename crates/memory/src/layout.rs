//! Layout: how QEMU maps the one RAM file to guest-physical addresses.
//!
//! ```text
//! file    |0 ............ low_bytes|low_bytes ............ ram_bytes|
//! guest   |0 ............ low_bytes|  hole (PCI)  |4 GiB ......... |
//! ```
//! The split of q35 follows QEMU's hw/i386/pc_q35.c; other machine types split elsewhere (`of_places`). For AMD guests of about 1000
//! GiB and more, QEMU moves the upper part to 1 TiB (HyperTransport hole); nothing here describes such machines.

use std::ops::Range;

use crate::{FileOffset, GuestPhysicalAddress};

const FOUR_GIB: u64 = 1 << 32;
/// pc_q35.c: start of the MMCONFIG window. RAM of this size or more is split at 2 GiB instead.
const Q35_LOW_LIMIT: u64 = 0xb000_0000;
const Q35_LOW_WHEN_SPLIT: u64 = 0x8000_0000;

/// A part of the RAM file that is guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Guest-physical address of its first byte.
    pub guest: GuestPhysicalAddress,
    /// Offset of that byte in the file.
    pub file: FileOffset,
    /// Number of bytes.
    pub bytes: u64,
}

/// Converts between guest-physical addresses and offsets in the RAM file, for one RAM size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    low_bytes: u64,
    ram_bytes: u64,
}

impl Layout {
    /// Layout of QEMU's q35 machine with `ram_bytes` of RAM.
    pub fn q35(ram_bytes: u64) -> Self {
        let low_bytes = if ram_bytes >= Q35_LOW_LIMIT { Q35_LOW_WHEN_SPLIT } else { ram_bytes };
        Self { low_bytes, ram_bytes }
    }

    /// Layout of `ram_bytes` of RAM whose first `low_bytes` lie below 4 GiB.
    pub fn split_at(low_bytes: u64, ram_bytes: u64) -> Self {
        Self { low_bytes: low_bytes.min(ram_bytes), ram_bytes }
    }

    /// Bytes of RAM below 4 GiB.
    pub fn low_bytes(self) -> u64 {
        self.low_bytes
    }

    /// Layout of `ram_bytes` of RAM of which these parts are known; firmware may hide some. `None` if they are laid out in another way.
    pub fn of_places(ram_bytes: u64, places: &[Place]) -> Option<Self> {
        let split = places.iter().filter(|place| place.guest.0 >= FOUR_GIB).min_by_key(|place| place.guest.0);
        let low_bytes = match split {
            Some(high) => high.file.0.checked_sub(high.guest.0 - FOUR_GIB)?,
            None => ram_bytes,
        };
        let layout = Self { low_bytes, ram_bytes };
        let fits = |place: &Place| {
            let last = GuestPhysicalAddress(place.guest.0.checked_add(place.bytes.checked_sub(1)?)?);
            let ends = [layout.offset_of(place.guest)?.0, layout.offset_of(last)?.0];
            (ends == [place.file.0, place.file.0 + place.bytes - 1]).then_some(())
        };
        let is_known = low_bytes <= FOUR_GIB && low_bytes <= ram_bytes && !places.is_empty();
        (is_known && places.iter().all(|place| fits(place).is_some())).then_some(layout)
    }

    /// The guest-physical ranges that are RAM, in ascending order and never empty.
    pub fn ranges(&self) -> Vec<Range<GuestPhysicalAddress>> {
        let low = GuestPhysicalAddress(0)..GuestPhysicalAddress(self.low_bytes);
        let high = GuestPhysicalAddress(FOUR_GIB)..GuestPhysicalAddress(FOUR_GIB + self.ram_bytes - self.low_bytes);
        [low, high].into_iter().filter(|range| range.start < range.end).collect()
    }

    /// Offset in the RAM file. None for holes, devices and addresses past the end of RAM.
    pub fn offset_of(&self, address: GuestPhysicalAddress) -> Option<FileOffset> {
        if address.0 < self.low_bytes {
            return Some(FileOffset(address.0));
        }
        let above = address.0.checked_sub(FOUR_GIB)?;
        (above < self.ram_bytes - self.low_bytes).then_some(FileOffset(self.low_bytes + above))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[track_caller]
    fn check(ram_bytes: u64, address: u64, expect: Option<u64>) {
        let offset = Layout::q35(ram_bytes).offset_of(GuestPhysicalAddress(address));
        assert_eq!(offset, expect.map(FileOffset));
    }

    #[test]
    fn small_ram_is_contiguous() {
        check(512 * MIB, 0, Some(0));
        check(512 * MIB, 512 * MIB - 1, Some(512 * MIB - 1));
        check(512 * MIB, 512 * MIB, None);
        check(512 * MIB, 4 * GIB, None);
        check(512 * MIB, u64::MAX, None);
    }

    #[test]
    fn largest_contiguous_ram_ends_below_mmconfig() {
        check(0xb000_0000 - 4096, 0xb000_0000 - 4097, Some(0xb000_0000 - 4097));
        check(0xb000_0000 - 4096, 4 * GIB, None);
    }

    #[test]
    fn ram_of_2816_mib_splits_at_2_gib() {
        check(0xb000_0000, 2 * GIB - 1, Some(2 * GIB - 1));
        check(0xb000_0000, 2 * GIB, None);
        check(0xb000_0000, 4 * GIB - 1, None);
        check(0xb000_0000, 4 * GIB, Some(2 * GIB));
        check(0xb000_0000, 4 * GIB + 768 * MIB - 1, Some(2816 * MIB - 1));
        check(0xb000_0000, 4 * GIB + 768 * MIB, None);
    }

    #[test]
    fn layout_follows_from_what_qemu_tells() {
        let place = |guest, file, bytes| Place { guest: GuestPhysicalAddress(guest), file: FileOffset(file), bytes };
        let told = |ram_bytes, places: &[Place]| Layout::of_places(ram_bytes, places);
        assert_eq!(told(512 * MIB, &[place(0, 0, 512 * MIB)]), Some(Layout::q35(512 * MIB)));
        let q35 = [place(0, 0, 2 * GIB), place(4 * GIB, 2 * GIB, 3 * GIB)];
        assert_eq!(told(5 * GIB, &q35), Some(Layout::q35(5 * GIB)));
        // OVMF hides a part of the first MiB, and tells only of the rest.
        let ovmf = [place(0, 0, 0xc_0000), place(MIB, MIB, 511 * MIB)];
        assert_eq!(told(512 * MIB, &ovmf), Some(Layout::q35(512 * MIB)));
        // The older machine type is split at 3 GiB.
        let pc = told(5 * GIB, &[place(0, 0, 3 * GIB), place(4 * GIB, 3 * GIB, 2 * GIB)]).unwrap();
        assert_eq!(pc.offset_of(GuestPhysicalAddress(5 * GIB)), Some(FileOffset(4 * GIB)));
        for places in [
            &[][..],
            &[place(0, MIB, MIB)],
            &[place(4 * GIB, 0, 600 * MIB)],
            &[place(4 * GIB + MIB, 0, MIB)],
            &[place(0, 0, 0)],
            &[place(u64::MAX, 0, MIB)],
            &[place(1 << 40, GIB, MIB)],
        ] {
            assert_eq!(told(512 * MIB, places), None, "{places:?}");
        }
    }

    #[test]
    fn ranges_list_all_ram() {
        let bytes =
            |ram_bytes| Layout::q35(ram_bytes).ranges().iter().map(|r| (r.start.0, r.end.0)).collect::<Vec<_>>();
        assert_eq!(bytes(512 * MIB), [(0, 512 * MIB)]);
        assert_eq!(bytes(6 * GIB), [(0, 2 * GIB), (4 * GIB, 8 * GIB)]);
    }
}
