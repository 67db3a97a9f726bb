//! Layout: how QEMU maps the one RAM file to guest-physical addresses.
//!
//! ```text
//! file    |0 ............ low_bytes|low_bytes ... board_bytes|    device    |    device ... ram_bytes|
//! guest   |0 ............ low_bytes|  hole (PCI)  |4 GiB ... |     |  device  |  hole  |  device     |
//! ```
//! The split of q35 follows QEMU's hw/i386/pc_q35.c; other machine types split elsewhere (`of_files`). Memory devices (`pc-dimm`) are
//! above the board's memory, each where QEMU or libvirt has put it. For AMD guests of about 1000 GiB and more, QEMU moves the upper
//! part to 1 TiB (HyperTransport hole); nothing here describes such machines.

use std::ops::Range;

use crate::{FileOffset, GuestPhysicalAddress};

const FOUR_GIB: u64 = 1 << 32;
/// Guest-physical addresses that may be no RAM, from 4 GiB to the end of the last device. A dump has a bit for each page below that end,
/// here 32 MiB. QEMU leaves at most 1 GiB before each of 256 devices, unless the definition says where they are.
const HOLES_BYTES_MAX: u64 = 1 << 40;
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

/// A file of a guest's RAM, and what is known of its place in guest memory. Firmware may hide parts of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedFile {
    /// Size of the file.
    pub bytes: u64,
    /// Its parts in guest memory, with offsets in this file.
    pub places: Vec<Place>,
}

/// Converts between guest-physical addresses and offsets in the RAM file, for one RAM size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    low_bytes: u64,
    board_bytes: u64,
    /// By address. Their bytes follow the board's in the file, in this order and without gaps.
    devices: Vec<Place>,
}

impl Layout {
    /// Layout of QEMU's q35 machine with `ram_bytes` of RAM.
    pub fn q35(ram_bytes: u64) -> Self {
        let low_bytes = if ram_bytes >= Q35_LOW_LIMIT { Q35_LOW_WHEN_SPLIT } else { ram_bytes };
        Self::split_at(low_bytes, ram_bytes)
    }

    /// Layout of `ram_bytes` of RAM whose first `low_bytes` lie below 4 GiB.
    pub fn split_at(low_bytes: u64, ram_bytes: u64) -> Self {
        Self { low_bytes: low_bytes.min(ram_bytes), board_bytes: ram_bytes, devices: Vec::new() }
    }

    /// This layout with a memory device whose bytes follow in the file. `None` if it is not above all other memory, or far above.
    pub fn with_device(mut self, guest: GuestPhysicalAddress, bytes: u64) -> Option<Self> {
        let device = Place { guest, file: FileOffset(self.ram_bytes()), bytes };
        let above = self.ranges().last().map_or(FOUR_GIB, |range| range.end.0).max(FOUR_GIB);
        let end_max = FOUR_GIB.checked_add(device.file.0.checked_add(bytes)?)?.checked_add(HOLES_BYTES_MAX)?;
        let fits = bytes > 0 && guest.0 >= above && guest.0.checked_add(bytes)? <= end_max;
        self.devices.push(device);
        fits.then_some(self)
    }

    /// Bytes of RAM below 4 GiB.
    pub fn low_bytes(&self) -> u64 {
        self.low_bytes
    }

    /// Guest-physical addresses of the memory devices. Each is the whole of one file, the last of the RAM's.
    pub fn devices(&self) -> impl Iterator<Item = GuestPhysicalAddress> {
        self.devices.iter().map(|device| device.guest)
    }

    fn ram_bytes(&self) -> u64 {
        self.devices.last().map_or(self.board_bytes, |device| device.file.0 + device.bytes)
    }

    /// Layout of these files one after the other: the board's memory, then memory devices. `None` if they are laid out in another way.
    pub fn of_files(files: &[PlacedFile]) -> Option<Self> {
        if files.iter().any(|file| file.places.is_empty()) {
            return None;
        }
        // Devices that follow the board's memory without a gap are as if they were of the board.
        (1..=files.len()).rev().find_map(|board| {
            let (board, devices) = files.split_at(board);
            let (mut places, mut bytes) = (Vec::new(), 0_u64);
            for file in board {
                places
                    .extend(file.places.iter().map(|place| Place { file: FileOffset(bytes + place.file.0), ..*place }));
                bytes = bytes.checked_add(file.bytes)?;
            }
            devices.iter().try_fold(Self::of_board(bytes, &places)?, |layout, device| match device.places[..] {
                [Place { guest, file: FileOffset(0), bytes }] if bytes == device.bytes => {
                    layout.with_device(guest, bytes)
                }
                _ => None,
            })
        })
    }

    fn of_board(bytes: u64, places: &[Place]) -> Option<Self> {
        let split = places.iter().filter(|place| place.guest.0 >= FOUR_GIB).min_by_key(|place| place.guest.0);
        let low_bytes = match split {
            Some(high) => high.file.0.checked_sub(high.guest.0 - FOUR_GIB)?,
            None => bytes,
        };
        let is_known = low_bytes <= FOUR_GIB && low_bytes <= bytes && !places.is_empty();
        let layout = is_known.then(|| Self::split_at(low_bytes, bytes))?;
        let fits = |place: &Place| {
            let last = GuestPhysicalAddress(place.guest.0.checked_add(place.bytes.checked_sub(1)?)?);
            let ends = [layout.offset_of(place.guest)?.0, layout.offset_of(last)?.0];
            (ends == [place.file.0, place.file.0 + place.bytes - 1]).then_some(())
        };
        places.iter().all(|place| fits(place).is_some()).then_some(layout)
    }

    /// The parts of guest memory that are RAM, in ascending order and never empty.
    fn places(&self) -> impl Iterator<Item = Place> {
        let place = |guest, file, bytes| Place { guest: GuestPhysicalAddress(guest), file: FileOffset(file), bytes };
        let low = place(0, 0, self.low_bytes);
        let high = place(FOUR_GIB, self.low_bytes, self.board_bytes - self.low_bytes);
        [low, high].into_iter().filter(|place| place.bytes > 0).chain(self.devices.iter().copied())
    }

    /// The guest-physical ranges that are RAM, in ascending order and never empty.
    pub fn ranges(&self) -> Vec<Range<GuestPhysicalAddress>> {
        self.places().map(|place| place.guest..GuestPhysicalAddress(place.guest.0 + place.bytes)).collect()
    }

    /// Offset in the RAM file. None for holes, devices and addresses past the end of RAM.
    pub fn offset_of(&self, address: GuestPhysicalAddress) -> Option<FileOffset> {
        self.places().find_map(|place| {
            let inside = address.0.checked_sub(place.guest.0).filter(|inside| *inside < place.bytes)?;
            Some(FileOffset(place.file.0 + inside))
        })
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

    fn place(guest: u64, file: u64, bytes: u64) -> Place {
        Place { guest: GuestPhysicalAddress(guest), file: FileOffset(file), bytes }
    }

    fn told(files: &[(u64, &[Place])]) -> Option<Layout> {
        let file = |&(bytes, places): &(u64, &[Place])| PlacedFile { bytes, places: places.to_vec() };
        Layout::of_files(&files.iter().map(file).collect::<Vec<_>>())
    }

    #[test]
    fn layout_follows_from_what_qemu_tells() {
        assert_eq!(told(&[(512 * MIB, &[place(0, 0, 512 * MIB)])]), Some(Layout::q35(512 * MIB)));
        let q35 = [place(0, 0, 2 * GIB), place(4 * GIB, 2 * GIB, 3 * GIB)];
        assert_eq!(told(&[(5 * GIB, &q35)]), Some(Layout::q35(5 * GIB)));
        // OVMF hides a part of the first MiB, and tells only of the rest.
        let ovmf = [place(0, 0, 0xc_0000), place(MIB, MIB, 511 * MIB)];
        assert_eq!(told(&[(512 * MIB, &ovmf)]), Some(Layout::q35(512 * MIB)));
        // The older machine type is split at 3 GiB.
        let pc = told(&[(5 * GIB, &[place(0, 0, 3 * GIB), place(4 * GIB, 3 * GIB, 2 * GIB)])]).unwrap();
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
            assert_eq!(told(&[(512 * MIB, places)]), None, "{places:?}");
        }
    }

    #[test]
    fn cells_are_one_memory_and_devices_are_beside_it() {
        // Two cells, the second on both sides of the hole.
        let first: (u64, &[Place]) = (GIB, &[place(0, 0, GIB)]);
        let second: (u64, &[Place]) = (2 * GIB, &[place(GIB, 0, GIB), place(4 * GIB, GIB, GIB)]);
        assert_eq!(told(&[first, second]), Some(Layout::q35(3 * GIB)));
        // QEMU puts devices at whole GiB above the board's memory: after 2.5 GiB there is a gap.
        let board: (u64, &[Place]) = (2560 * MIB, &[place(0, 0, 2 * GIB), place(4 * GIB, 2 * GIB, 512 * MIB)]);
        let device = |guest: u64| [place(guest, 0, 256 * MIB)];
        let [one, other] = [device(5 * GIB), device(6 * GIB)];
        let layout = told(&[board, (256 * MIB, &one), (256 * MIB, &other)]).unwrap();
        assert_eq!(layout.devices().collect::<Vec<_>>(), [one[0].guest, other[0].guest]);
        for (address, offset) in [
            (4 * GIB + 512 * MIB - 1, Some(2560 * MIB - 1)),
            (4 * GIB + 512 * MIB, None),
            (5 * GIB - 1, None),
            (5 * GIB, Some(2560 * MIB)),
            (5 * GIB + 256 * MIB - 1, Some(2816 * MIB - 1)),
            (5 * GIB + 256 * MIB, None),
            (6 * GIB + 1, Some(2816 * MIB + 1)),
            (6 * GIB + 256 * MIB, None),
        ] {
            assert_eq!(layout.offset_of(GuestPhysicalAddress(address)), offset.map(FileOffset), "{address:#x}");
        }
        let ranges: Vec<_> = layout.ranges().iter().map(|range| (range.start.0, range.end.0)).collect();
        let above = [(5 * GIB, 5 * GIB + 256 * MIB), (6 * GIB, 6 * GIB + 256 * MIB)];
        assert_eq!(ranges, [[(0, 2 * GIB), (4 * GIB, 4 * GIB + 512 * MIB)], above].concat());
        // The same from a journal.
        let board_only = Layout::split_at(layout.low_bytes(), 2560 * MIB);
        let again = layout.devices().try_fold(board_only, |layout, guest| layout.with_device(guest, 256 * MIB));
        assert_eq!(again, Some(layout));
        // Without a gap it is one piece.
        let next = device(4 * GIB + 512 * MIB);
        assert_eq!(told(&[board, (256 * MIB, &next)]), Some(Layout::q35(2816 * MIB)));
        let overlapping = device(4 * GIB + 256 * MIB);
        for refused in [
            &[place(5 * GIB, 0, 128 * MIB)][..],
            &[place(5 * GIB, MIB, 255 * MIB)],
            &[place(5 * GIB, 0, 128 * MIB), place(6 * GIB, 128 * MIB, 128 * MIB)],
            &[place(3 * GIB, 0, 256 * MIB)],
            &[place(u64::MAX - MIB, 0, 256 * MIB)],
            // A dump would be larger than any host.
            &[place(1 << 60, 0, 256 * MIB)],
            &[place(2 << 40, 0, 256 * MIB)],
            &overlapping,
            &[],
        ] {
            assert_eq!(told(&[board, (256 * MIB, refused)]), None, "{refused:?}");
        }
        assert!(told(&[board, (256 * MIB, &[place(1 << 40, 0, 256 * MIB)])]).is_some());
        assert_eq!(told(&[board, (256 * MIB, &other), (256 * MIB, &one)]), None, "not by address");
        assert_eq!(told(&[]), None);
    }

    #[test]
    fn ranges_list_all_ram() {
        let bytes =
            |ram_bytes| Layout::q35(ram_bytes).ranges().iter().map(|r| (r.start.0, r.end.0)).collect::<Vec<_>>();
        assert_eq!(bytes(512 * MIB), [(0, 512 * MIB)]);
        assert_eq!(bytes(6 * GIB), [(0, 2 * GIB), (4 * GIB, 8 * GIB)]);
    }
}
