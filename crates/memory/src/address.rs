//! Two address types for one byte of guest RAM. Guest address and file offset are equal below 2 or 2.75 GiB and differ
//! above, so small tests do not notice a mix-up. Hence two types, and one place (`Layout`) that converts.

/// Guest-physical address in bytes: the address in page tables, virtqueues and dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPhysicalAddress(pub u64);

/// Byte offset in the RAM file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileOffset(pub u64);
