//! Partitions of a disk, from its partition tables. Only for reports to people on how a disk is used.
//!
//! sector 0: a protective entry -> GPT; else four entries, one of which may begin a chain of logical partitions
//!
//! The tables are the guest's, so they are bounded and believed in nothing: what overlaps, or leaves the disk, is left
//! out. The crates that read such tables trust them: gptman makes room for as many entries as a header names (2^32 of
//! 128 bytes), mbrman adds up sector numbers without a look at what comes out. Checksums are not looked at, and neither
//! is the second GPT at the end of a disk: a kernel that needs it says so.

use std::ops::Range;

use plain_text::printable_letter;

/// Bytes in a sector of the tables.
pub const SECTOR_BYTES: usize = 512;
const SECTOR: u64 = SECTOR_BYTES as u64;

/// Linux numbers up to 256 partitions of a disk.
const NUMBER_MAX: u32 = 256;
const GPT_ENTRY_BYTES: usize = 128;
const PROTECTIVE: u8 = 0xee;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];

/// A sector.
pub type Sector = [u8; SECTOR_BYTES];

/// A partition of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Number, as Linux counts: 5 is the first logical partition.
    pub number: u32,
    /// Where it lies, in bytes from the start of the disk.
    pub bytes: Range<u64>,
    /// Its name in a GPT.
    pub name: Option<String>,
}

/// An entry of a DOS table: type, first sector (from where depends), sectors.
#[derive(Clone, Copy)]
struct Entry {
    kind: u8,
    first: u64,
    sectors: u64,
}

impl Entry {
    fn is_extended(&self) -> bool {
        EXTENDED.contains(&self.kind)
    }
}

/// Finds the partitions, sorted by where they lie. `read` returns a sector of the disk, if it can; it is called some hundred
/// times at most.
pub fn find(disk_bytes: u64, read: &mut dyn FnMut(u64) -> Option<Sector>) -> Vec<Partition> {
    let entries = read(0).and_then(|sector| dos_entries(&sector)).unwrap_or_default();
    let mut found = if entries.iter().any(|entry| entry.kind == PROTECTIVE) {
        gpt(read)
    } else {
        let primary = entries.iter().zip(1..).filter(|(entry, _)| !entry.is_extended());
        let mut found: Vec<_> =
            primary.filter_map(|(entry, number)| part(number, entry.first, entry.sectors)).collect();
        if let Some(extended) = entries.iter().find(|entry| entry.is_extended()) {
            logical(extended.first, read, &mut found);
        }
        found
    };
    keep_apart(&mut found, disk_bytes);
    found
}

/// Sorts what was found by its place; what overlaps, or leaves the disk, is left out.
fn keep_apart(found: &mut Vec<Partition>, disk_bytes: u64) {
    found.sort_by_key(|partition| partition.bytes.start);
    let mut free_from = 0;
    found.retain(|partition| {
        let Range { start, end } = partition.bytes;
        let is_apart = start >= free_from && end <= disk_bytes;
        free_from = if is_apart { end } else { free_from };
        is_apart
    });
}

fn part(number: u32, first: u64, sectors: u64) -> Option<Partition> {
    let end = first.checked_add(sectors)?.checked_mul(SECTOR)?;
    (first > 0 && sectors > 0).then(|| Partition { number, bytes: first * SECTOR..end, name: None })
}

fn dos_entries(sector: &Sector) -> Option<Vec<Entry>> {
    let number = |bytes: &[u8]| u64::from(u32::from_le_bytes(bytes.try_into().expect("four bytes are cut out")));
    let entry = |at: &[u8]| Entry { kind: at[4], first: number(&at[8..12]), sectors: number(&at[12..16]) };
    sector.ends_with(&[0x55, 0xaa]).then(|| sector[446..510].chunks_exact(16).map(entry).collect())
}

/// Each link of the chain tells of a partition, from the link on, and of the next link, from the first one on.
fn logical(first: u64, read: &mut dyn FnMut(u64) -> Option<Sector>, found: &mut Vec<Partition>) {
    let (mut at, mut number) = (first, 5);
    for _ in 5..=NUMBER_MAX {
        let Some(entries) = read(at).and_then(|sector| dos_entries(&sector)) else { return };
        if let Some(entry) = entries.iter().find(|entry| !entry.is_extended() && entry.sectors > 0) {
            found.extend(part(number, at + entry.first, entry.sectors));
            number += 1;
        }
        let next = entries.iter().find(|entry| entry.is_extended() && entry.sectors > 0);
        let Some(next) = next.map(|entry| first + entry.first).filter(|&next| next > at) else { return };
        at = next;
    }
}

fn gpt(read: &mut dyn FnMut(u64) -> Option<Sector>) -> Vec<Partition> {
    let Some(head) = read(1).filter(|head| head.starts_with(b"EFI PART")) else { return Vec::new() };
    let long = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let short = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let (entries_at, entries, entry_bytes) = (long(&head, 72), short(80).min(NUMBER_MAX), short(84));
    // As Linux demands.
    if entry_bytes as usize != GPT_ENTRY_BYTES {
        return Vec::new();
    }
    let mut found = Vec::new();
    let sectors = entries.div_ceil((SECTOR_BYTES / GPT_ENTRY_BYTES) as u32);
    for (sector, first_number) in (0..sectors).zip((1..).step_by(SECTOR_BYTES / GPT_ENTRY_BYTES)) {
        let Some(bytes) = entries_at.checked_add(sector.into()).and_then(&mut *read) else { break };
        for (entry, number) in bytes.chunks_exact(GPT_ENTRY_BYTES).zip(first_number..=entries) {
            let (first, last) = (long(entry, 32), long(entry, 40));
            if entry[..16] != [0; 16] && last >= first {
                let partition = (last - first).checked_add(1).and_then(|sectors| part(number, first, sectors));
                found.extend(partition.map(|partition| Partition { name: name(&entry[56..]), ..partition }));
            }
        }
    }
    found
}

/// UTF-16, up to a zero.
fn name(bytes: &[u8]) -> Option<String> {
    let units = bytes.chunks_exact(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]])).take_while(|&unit| unit != 0);
    let letters = char::decode_utf16(units).map(|letter| letter.unwrap_or(char::REPLACEMENT_CHARACTER));
    Some(letters.map(printable_letter).collect()).filter(|name: &String| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::allocation::{FOREIGN_BYTES_MAX, with_ceiling};

    use super::*;

    const DISK_BYTES: u64 = 64 << 20;
    const MIB: u64 = 1 << 20;

    fn sector(entries: &[(u8, u32, u32)]) -> Sector {
        let mut sector = [0; SECTOR_BYTES];
        for (entry, (kind, first, sectors)) in sector[446..510].chunks_exact_mut(16).zip(entries) {
            entry[4] = *kind;
            entry[8..12].copy_from_slice(&first.to_le_bytes());
            entry[12..].copy_from_slice(&sectors.to_le_bytes());
        }
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        sector
    }

    /// Of a disk with these sectors: number, first MiB, MiB.
    fn check(sectors: &[(u64, Sector)], expect: &[(u32, u64, u64)]) {
        let mut read = |at: u64| sectors.iter().find(|(sector, _)| *sector == at).map(|(_, bytes)| *bytes);
        let found = find(DISK_BYTES, &mut read);
        let told = |part: &Partition| (part.number, part.bytes.start / MIB, (part.bytes.end - part.bytes.start) / MIB);
        assert_eq!(found.iter().map(told).collect::<Vec<_>>(), expect);
    }

    #[test]
    fn partitions_are_numbered_as_in_linux() {
        let table = sector(&[(0x83, 2048, 4096), (0, 0, 0), (0x0f, 8192, 40960), (0x83, 51200, 2048)]);
        let first = sector(&[(0x83, 2048, 2048), (0x05, 6144, 8192)]);
        let second = sector(&[(0x83, 2048, 4096)]);
        check(&[(0, table), (8192, first), (8192 + 6144, second)], &[(1, 1, 2), (5, 5, 1), (6, 8, 2), (4, 25, 1)]);
        check(&[(0, table)], &[(1, 1, 2), (4, 25, 1)]);
        check(&[], &[]);
        check(&[(0, [0; SECTOR_BYTES])], &[]);
    }

    #[test]
    fn tables_that_make_no_sense_are_left_out() {
        let endless = sector(&[(0x05, 8192, 4096)]);
        let link = sector(&[(0x83, 2048, 2048), (0x05, 0, 4096)]);
        check(&[(0, endless), (8192, link)], &[(5, 5, 1)]);
        check(
            &[(0, sector(&[(0x83, 2048, 4096), (0x83, 4096, 4096), (0x83, 1 << 30, 1), (0x83, 6144, 0)]))],
            &[(1, 1, 2)],
        );
        let mut head = [0; SECTOR_BYTES];
        head[..8].copy_from_slice(b"EFI PART");
        head[72..80].copy_from_slice(&u64::MAX.to_le_bytes());
        head[80..84].copy_from_slice(&u32::MAX.to_le_bytes());
        head[84..88].copy_from_slice(&128_u32.to_le_bytes());
        check(&[(0, sector(&[(PROTECTIVE, 1, u32::MAX)])), (1, head)], &[]);
    }

    #[test]
    fn gpt_is_read_only_with_a_protective_entry() {
        let mut head = [0; SECTOR_BYTES];
        head[..8].copy_from_slice(b"EFI PART");
        head[72..80].copy_from_slice(&2_u64.to_le_bytes());
        head[80..84].copy_from_slice(&128_u32.to_le_bytes());
        head[84..88].copy_from_slice(&128_u32.to_le_bytes());
        let entry = |first: u64, last: u64| {
            let mut entry = [0; GPT_ENTRY_BYTES];
            entry[..16].fill(7);
            entry[32..40].copy_from_slice(&first.to_le_bytes());
            entry[40..48].copy_from_slice(&last.to_le_bytes());
            entry[56] = b'v';
            entry
        };
        let none = [0; GPT_ENTRY_BYTES];
        let [mut first, mut third] = [[0; SECTOR_BYTES]; 2];
        first.copy_from_slice(&[entry(10240, 26623), entry(2048, 10239), none, entry(9, 8)].concat());
        third.copy_from_slice(&[entry(40960, 45055), none, none, none].concat());
        let table = sector(&[(PROTECTIVE, 1, 131071)]);
        let tables = |head| [(0, table), (1, head), (2, first), (3, [0; SECTOR_BYTES]), (4, third)];
        check(&tables(head), &[(2, 1, 4), (1, 5, 8), (9, 20, 2)]);
        let mut read = |at: u64| tables(head).into_iter().find(|(sector, _)| *sector == at).map(|(_, bytes)| bytes);
        assert!(find(DISK_BYTES, &mut read).iter().all(|part| part.name.as_deref() == Some("v")));
        head[80..84].copy_from_slice(&2_u32.to_le_bytes());
        check(&tables(head), &[(2, 1, 4), (1, 5, 8)]);
        head[84..88].copy_from_slice(&256_u32.to_le_bytes());
        check(&tables(head), &[]);
    }

    #[test]
    fn partition_names_cannot_control_a_terminal() {
        let check = |name: &[u16], expect: Option<&str>| {
            let mut bytes = [0; 72];
            for (place, unit) in bytes.chunks_exact_mut(2).zip(name) {
                place.copy_from_slice(&unit.to_le_bytes());
            }
            assert_eq!(super::name(&bytes).as_deref(), expect, "{name:?}");
        };
        check(&"data é".encode_utf16().collect::<Vec<_>>(), Some("data é"));
        check(&[0x1b, b'['.into(), 0xd800, 0x9b], Some(" [\u{fffd} "));
        check(&[], None);
        check(&[b'x'.into(); 36], Some(&"x".repeat(36)));
    }

    proptest! {
        /// With any bytes from a guest, few sectors are requested, and the volumes found do not overlap.
        #[test]
        fn no_table_is_believed(
            words in prop::collection::vec(prop_oneof![any::<u32>(), 0..20_u32, Just(u32::MAX)], 16..64),
            kinds in prop::collection::vec(prop::sample::select(vec![0, 0x83, 0x05, 0x0f, PROTECTIVE]), 8..16),
        ) {
            let mut asked = 0;
            let mut read = |at: u64| {
                asked += 1;
                let word = |position: u64| words[((at.wrapping_mul(7)).wrapping_add(position) % words.len() as u64) as usize];
                let kind = |position: u64| kinds[((at.wrapping_add(position)) % kinds.len() as u64) as usize];
                let mut bytes = sector(&[0, 1, 2, 3].map(|entry| (kind(entry), word(entry * 2), word(entry * 2 + 1))));
                if at == 1 {
                    bytes[..8].copy_from_slice(b"EFI PART");
                    bytes[72..76].copy_from_slice(&word(9).to_le_bytes());
                    bytes[80..84].copy_from_slice(&word(10).to_le_bytes());
                    bytes[84..88].copy_from_slice(&128_u32.to_le_bytes());
                }
                Some(bytes)
            };
            let found = with_ceiling(FOREIGN_BYTES_MAX, || find(DISK_BYTES, &mut read));
            prop_assert!(asked <= 300, "{asked} sectors");
            let apart = found.windows(2).all(|pair| pair[0].bytes.end <= pair[1].bytes.start);
            let inside = found.iter().all(|part| !part.bytes.is_empty() && part.bytes.end <= DISK_BYTES);
            prop_assert!(apart && inside, "{found:?}");
        }
    }
}
