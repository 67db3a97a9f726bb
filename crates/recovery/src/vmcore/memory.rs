//! Physical memory: what introspection and dump writers read, whether it is a dead guest's RAM or a dump of it.

use std::ops::Range;

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};

/// Guest memory by guest-physical address.
pub trait PhysicalMemory {
    /// Fills `into` with the bytes at `address`, across pages if need be. After an error the contents of `into` do not
    /// count.
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable>;

    /// Page frames that are RAM: in ascending order, without overlap, none empty. A dump may lack some of these pages.
    fn ranges(&self) -> &[Range<u64>];

    /// Whether reading was given up. Then a loop over all memory may end, and what it has found does not count.
    fn is_given_up(&self) -> bool {
        false
    }

    /// One past the last page frame.
    fn end_pfn(&self) -> u64 {
        self.ranges().last().map_or(0, |range| range.end)
    }

    /// Number of page frames that are RAM.
    fn ram_pages(&self) -> u64 {
        self.ranges().iter().map(|range| range.end - range.start).sum()
    }

    /// The 32-bit number at an address.
    fn read_u32(&self, address: GuestPhysicalAddress) -> Result<u32, Unreadable> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes).map(|()| u32::from_le_bytes(bytes))
    }

    /// The 64-bit number at an address.
    fn read_u64(&self, address: GuestPhysicalAddress) -> Result<u64, Unreadable> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes).map(|()| u64::from_le_bytes(bytes))
    }
}

/// These bytes cannot be read: they are not RAM, or not in this dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("physical memory at {:#x} is not readable", .address.0)]
pub struct Unreadable {
    /// The address that cannot be read.
    pub address: GuestPhysicalAddress,
}

impl Unreadable {
    /// The error for this guest-physical address.
    pub fn at(address: u64) -> Self {
        Self { address: GuestPhysicalAddress(address) }
    }
}

/// Address of the first byte of a page frame.
pub fn address_of_pfn(pfn: u64) -> GuestPhysicalAddress {
    GuestPhysicalAddress(pfn * PAGE_BYTES)
}
