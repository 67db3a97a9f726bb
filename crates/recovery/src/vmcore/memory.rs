//! Physical memory: what introspection and dump writers read, whether it is a dead guest's RAM or a dump of it.

use std::ops::Range;

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};

/// Guest memory by guest-physical address.
pub trait PhysicalMemory {
    /// Fills `into` with what stands at `address`, across pages if need be. On failure `into` holds anything.
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable>;

    /// The page frames that are RAM: ascending, apart from each other, none empty. A dump may lack pages of them.
    fn ranges(&self) -> &[Range<u64>];

    /// One past the last page frame.
    fn end_pfn(&self) -> u64 {
        self.ranges().last().map_or(0, |range| range.end)
    }

    /// How many page frames are RAM.
    fn ram_pages(&self) -> u64 {
        self.ranges().iter().map(|range| range.end - range.start).sum()
    }

    fn read_u32(&self, address: GuestPhysicalAddress) -> Result<u32, Unreadable> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes).map(|()| u32::from_le_bytes(bytes))
    }

    fn read_u64(&self, address: GuestPhysicalAddress) -> Result<u64, Unreadable> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes).map(|()| u64::from_le_bytes(bytes))
    }
}

/// These bytes are not there: no RAM, or not in this dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("physical memory at {:#x} is not readable", .address.0)]
pub struct Unreadable {
    pub address: GuestPhysicalAddress,
}

impl Unreadable {
    pub fn at(address: u64) -> Self {
        Self { address: GuestPhysicalAddress(address) }
    }
}

/// Where a page frame begins.
pub fn address_of_pfn(pfn: u64) -> GuestPhysicalAddress {
    GuestPhysicalAddress(pfn * PAGE_BYTES)
}
