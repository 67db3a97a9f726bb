//! Descriptor chains: from the head that a guest made available to a flat list of descriptors.
//!
//! Pure: memory is reached through a function, so that hostile tables are tested (and fuzzed) without a guest. The
//! guest may change the table while it is walked; each descriptor is read once and every step is bounded by `limit`.

pub const DESCRIPTOR_BYTES: usize = 16;
const NEXT: u16 = 1;
const WRITABLE: u16 = 2;
const INDIRECT: u16 = 4;

/// A piece of guest memory that belongs to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub address: u64,
    pub bytes: u32,
    /// For the device; else for reading.
    pub writable: bool,
}

/// Why a chain cannot be followed to its end. Such a chain has no known status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    #[error("a descriptor index is beyond the table")]
    Index,
    #[error("a descriptor table is outside of guest memory")]
    Unmapped,
    #[error("a chain is longer than the queue (or runs in circles)")]
    TooLong,
    #[error("an indirect table has a wrong length, is nested, or was not agreed on")]
    Indirect,
}

/// Where descriptors of a queue are.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    pub address: u64,
    pub entries: u16,
    pub indirect_allowed: bool,
    /// Descriptors in one chain, at most.
    pub limit: usize,
}

/// Reads guest memory; false if it is not there.
pub trait ReadGuest: Fn(u64, &mut [u8]) -> bool {}
impl<F: Fn(u64, &mut [u8]) -> bool> ReadGuest for F {}

struct Raw {
    address: u64,
    bytes: u32,
    flags: u16,
    next: u16,
}

/// Appends the chain that starts at `head` to `out`.
pub fn walk(table: Table, head: u16, read: &impl ReadGuest, out: &mut Vec<Descriptor>) -> Result<(), ChainFault> {
    let mut index = head;
    for _ in 0..table.entries {
        let raw = load(table.address, index, table.entries, read)?;
        if raw.flags & INDIRECT != 0 {
            if !table.indirect_allowed || raw.flags & NEXT != 0 {
                return Err(ChainFault::Indirect);
            }
            return walk_indirect(&raw, table.limit, read, out);
        }
        push(&raw, table.limit, out)?;
        if raw.flags & NEXT == 0 {
            return Ok(());
        }
        index = raw.next;
    }
    Err(ChainFault::TooLong)
}

fn walk_indirect(
    outer: &Raw,
    limit: usize,
    read: &impl ReadGuest,
    out: &mut Vec<Descriptor>,
) -> Result<(), ChainFault> {
    let bytes = outer.bytes as usize;
    let entries = u16::try_from(bytes / DESCRIPTOR_BYTES).map_err(|_| ChainFault::Indirect)?;
    if entries == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
        return Err(ChainFault::Indirect);
    }
    let mut index = 0;
    loop {
        let raw = load(outer.address, index, entries, read)?;
        if raw.flags & INDIRECT != 0 {
            return Err(ChainFault::Indirect);
        }
        push(&raw, limit, out)?;
        if raw.flags & NEXT == 0 {
            return Ok(());
        }
        index = raw.next;
    }
}

fn push(raw: &Raw, limit: usize, out: &mut Vec<Descriptor>) -> Result<(), ChainFault> {
    if out.len() >= limit {
        return Err(ChainFault::TooLong);
    }
    out.push(Descriptor { address: raw.address, bytes: raw.bytes, writable: raw.flags & WRITABLE != 0 });
    Ok(())
}

fn load(table: u64, index: u16, entries: u16, read: &impl ReadGuest) -> Result<Raw, ChainFault> {
    if index >= entries {
        return Err(ChainFault::Index);
    }
    let mut bytes = [0; DESCRIPTOR_BYTES];
    let address = table.checked_add(u64::from(index) * DESCRIPTOR_BYTES as u64).ok_or(ChainFault::Unmapped)?;
    if !read(address, &mut bytes) {
        return Err(ChainFault::Unmapped);
    }
    let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = bytes;
    Ok(Raw {
        address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
        bytes: u32::from_le_bytes([l0, l1, l2, l3]),
        flags: u16::from_le_bytes([f0, f1]),
        next: u16::from_le_bytes([n0, n1]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of (address, bytes, flags, next) at address 0x1000, an indirect one at 0x2000.
    fn memory(direct: &[(u64, u32, u16, u16)], indirect: &[(u64, u32, u16, u16)]) -> impl ReadGuest {
        let mut bytes = vec![0u8; 0x3000];
        for (base, table) in [(0x1000, direct), (0x2000, indirect)] {
            for (at, (address, length, flags, next)) in table.iter().enumerate() {
                let entry = &mut bytes[base + at * DESCRIPTOR_BYTES..][..DESCRIPTOR_BYTES];
                entry[..8].copy_from_slice(&address.to_le_bytes());
                entry[8..12].copy_from_slice(&length.to_le_bytes());
                entry[12..14].copy_from_slice(&flags.to_le_bytes());
                entry[14..].copy_from_slice(&next.to_le_bytes());
            }
        }
        move |address: u64, out: &mut [u8]| {
            let at = usize::try_from(address).unwrap_or(usize::MAX);
            bytes.get(at..at.saturating_add(out.len())).map(|found| out.copy_from_slice(found)).is_some()
        }
    }

    fn check(
        direct: &[(u64, u32, u16, u16)],
        indirect: &[(u64, u32, u16, u16)],
        expected: Result<&[(u64, u32, bool)], ChainFault>,
    ) {
        let table = Table { address: 0x1000, entries: 8, indirect_allowed: true, limit: 4 };
        let mut out = Vec::new();
        let result = walk(table, 0, &memory(direct, indirect), &mut out);
        let found: Vec<_> = out.iter().map(|d| (d.address, d.bytes, d.writable)).collect();
        assert_eq!(result.map(|()| found.as_slice()), expected);
    }

    #[test]
    fn chains_are_followed() {
        check(&[(5, 1, NEXT, 2), (0, 0, 0, 0), (6, 2, WRITABLE, 0)], &[], Ok(&[(5, 1, false), (6, 2, true)]));
        check(
            &[(0x2000, 32, INDIRECT, 0)],
            &[(5, 1, NEXT, 1), (6, 2, WRITABLE, 0)],
            Ok(&[(5, 1, false), (6, 2, true)]),
        );
    }

    #[test]
    fn circles_end() {
        check(&[(5, 1, NEXT, 0)], &[], Err(ChainFault::TooLong));
        check(&[(0x2000, 32, INDIRECT, 0)], &[(5, 1, NEXT, 1), (5, 1, NEXT, 0)], Err(ChainFault::TooLong));
    }

    #[test]
    fn tables_that_lie_are_refused() {
        check(&[(5, 1, NEXT, 8)], &[], Err(ChainFault::Index));
        check(&[(0x2000, 16, INDIRECT, 0)], &[(5, 1, NEXT, 1)], Err(ChainFault::Index));
        check(&[(0x2000, 0, INDIRECT, 0)], &[], Err(ChainFault::Indirect));
        check(&[(0x2000, 17, INDIRECT, 0)], &[], Err(ChainFault::Indirect));
        check(&[(0x2000, !15, INDIRECT, 0)], &[], Err(ChainFault::Indirect));
        check(&[(0x2000, 16, INDIRECT | NEXT, 0)], &[], Err(ChainFault::Indirect));
        check(&[(0x2000, 16, INDIRECT, 0)], &[(0x2000, 16, INDIRECT, 0)], Err(ChainFault::Indirect));
        check(&[(u64::MAX - 3, 16, INDIRECT, 0)], &[], Err(ChainFault::Unmapped));
    }
}
