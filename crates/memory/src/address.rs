//! The two ways to name a byte of guest RAM. They differ above 2 or 2.75 GiB, so a mix-up passes every small test: hence
//! two types and one place (`Layout`) that converts.

/// Where the guest sees a byte: what page tables, virtqueues and dumps speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPhysicalAddress(pub u64);

/// Where the byte lies in the RAM file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileOffset(pub u64);
