//! Logical volumes of LVM on a physical one, as its metadata name them: for people who read how a disk is used, and for nothing
//! else.
//!
//! label, in one of the first four sectors -> header: who this is, and where metadata are -> their text, in a ring -> in it this
//! physical volume -> the segments of logical volumes that lie on it
//!
//! Like tables of partitions they are the guest's: bounded, and believed in nothing. What overlaps, or leaves the physical volume,
//! is left out. Checksums are not looked at. Of what has no place of its own (thin volumes, snapshots) that is told which
//! has one for it. The formats are those of LVM2's `format_text` (`layout.h`, `import_vsn1.c`). The crates that read them trust
//! them: lvm2 and lamlvm call themselves as deep as a text nests, which ends a process, and lamlvm makes room for as much as a head
//! names.

mod text;

use std::ops::Range;

use text::{Item, Section, parse};

use crate::partitions::{SECTOR_BYTES, Sector, keep_apart, printable};

const SECTOR: u64 = SECTOR_BYTES as u64;
const LABEL_SECTORS: u64 = 4;
const LABEL: &[u8] = b"LABELONE";
const LABEL_KIND: &[u8] = b"LVM2 001";
const METADATA: &[u8] = b" LVM2 x[5A%r0N*>";
const ID_BYTES: usize = 32;
/// Areas that a header names, of both kinds.
const AREAS_MAX: usize = 16;
/// LVM's own default for all of the ring.
const TEXT_BYTES_MAX: u64 = 1 << 20;
const SEGMENTS_MAX: usize = 16 << 10;

/// A part of a logical volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Volume group and logical volume: `store/mail`.
    pub volume: String,
    /// Bytes of the disk.
    pub bytes: Range<u64>,
}

/// The segments on these bytes of a disk, by place; none if they are no physical volume. `read` gives a sector of the disk, or
/// none; it is asked for what holds a MiB of text at most.
pub fn find(place: &Range<u64>, read: &mut dyn FnMut(u64) -> Option<Sector>) -> Vec<Segment> {
    let mut found = segments(place, read).unwrap_or_default();
    keep_apart(&mut found, place, |segment| &segment.bytes);
    found
}

fn segments(place: &Range<u64>, read: &mut dyn FnMut(u64) -> Option<Sector>) -> Option<Vec<Segment>> {
    let mut read = |at: u64| read(place.start.checked_add(at)? / SECTOR);
    let (id, metadata) = (0..LABEL_SECTORS).find_map(|sector| header(&read(sector * SECTOR)?, sector))?;
    let root = parse(&text(metadata, &mut read)?)?;
    let (group, group_name) = root.sections().find_map(|(name, group)| {
        group.section("physical_volumes")?;
        Some((group, name))
    })?;
    let extent_bytes = group.number("extent_size")?.checked_mul(SECTOR).filter(|&bytes| bytes > 0)?;
    let is_own =
        |volume: &Section| volume.text("id").is_some_and(|own| own.bytes().filter(|&byte| byte != b'-').eq(id));
    let (own_name, own) = group.section("physical_volumes")?.sections().find(|(_, volume)| is_own(volume))?;
    let start = place.start.checked_add(own.number("pe_start")?.checked_mul(SECTOR)?)?;
    let mut found = Vec::new();
    for (name, volume) in group.section("logical_volumes")?.sections() {
        let volume_name = format!("{}/{}", printable(group_name.chars()), printable(name.chars()));
        for (_, segment) in volume.sections() {
            let (Some(extents), Some(stripes)) = (segment.number("extent_count"), segment.list("stripes")) else {
                continue;
            };
            let each = extents / (stripes.len() as u64 / 2).max(1);
            for stripe in stripes.as_chunks::<2>().0 {
                let [Item::Text(on), Item::Number(first)] = stripe else { continue };
                let bytes = || {
                    let begin = start.checked_add(first.checked_mul(extent_bytes)?)?;
                    Some(begin..begin.checked_add(each.checked_mul(extent_bytes)?)?)
                };
                let bytes = bytes().filter(|bytes| on == own_name && !bytes.is_empty());
                found.extend(bytes.map(|bytes| Segment { volume: volume_name.clone(), bytes }));
                if found.len() == SEGMENTS_MAX {
                    return Some(found);
                }
            }
        }
    }
    Some(found)
}

/// Who this is, and where its first metadata are: bytes of the physical volume.
///
/// label: magic `[u8; 8]`, sector u64, checksum u32, offset of the header u32, kind `[u8; 8]`
/// header: id `[u8; 32]`, bytes u64, areas of data (offset u64, bytes u64) up to a zero one, areas of metadata likewise
fn header(sector: &Sector, number: u64) -> Option<([u8; ID_BYTES], Range<u64>)> {
    if !sector.starts_with(LABEL) || sector[24..32] != *LABEL_KIND || long(sector, 8)? != number {
        return None;
    }
    let header = sector.get(short(sector, 20)? as usize..)?;
    let id = *header.first_chunk()?;
    let mut areas = header.get(ID_BYTES + 8..)?.chunks_exact(16).take(AREAS_MAX).map_while(|area| {
        let (offset, bytes) = (long(area, 0)?, long(area, 8)?);
        Some((offset, bytes))
    });
    areas.find(|&(offset, _)| offset == 0)?;
    let (offset, bytes) = areas.next().filter(|&(offset, _)| offset > 0)?;
    Some((id, offset..offset.checked_add(bytes)?))
}

/// The text that is valid now: it may begin again behind the head of its ring.
///
/// head: checksum u32, magic `[u8; 16]`, version u32, start u64, bytes u64, then offset u64 and bytes u64 of the text
fn text(ring: Range<u64>, read: &mut dyn FnMut(u64) -> Option<Sector>) -> Option<Vec<u8>> {
    let head = read(ring.start)?;
    let (offset, bytes) = (long(&head, 40)?, long(&head, 48)?);
    let is_sound = head[4..20] == *METADATA && offset >= SECTOR && bytes <= TEXT_BYTES_MAX;
    if !is_sound || [ring.start, ring.end, offset].iter().any(|at| !at.is_multiple_of(SECTOR)) {
        return None;
    }
    let mut text = Vec::new();
    let mut at = ring.start.checked_add(offset)?;
    while (text.len() as u64) < bytes {
        if at >= ring.end {
            at = ring.start + SECTOR;
        }
        text.extend_from_slice(&read(at)?);
        at += SECTOR;
    }
    text.truncate(bytes as usize);
    Some(text)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn short(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    /// What `vgcreate -s 1M` and `lvcreate` of LVM 2.03.16 wrote: the valid labels, heads and texts of two physical volumes of 64 and
    /// 32 MiB.
    const STORE: [&[u8]; 2] =
        [include_bytes!("../../tests/lvm/store-a.img"), include_bytes!("../../tests/lvm/store-b.img")];

    fn sector_of(image: &[u8], at: u64) -> Option<Sector> {
        let bytes = image.get((at * SECTOR) as usize..)?.get(..SECTOR_BYTES)?;
        bytes.try_into().ok()
    }

    fn told(found: &[Segment]) -> Vec<(&str, u64, u64)> {
        found.iter().map(|Segment { volume, bytes }| (&**volume, bytes.start / MIB, bytes.end / MIB)).collect()
    }

    /// Of an image that begins so many sectors into the disk.
    #[track_caller]
    fn check(image: &[u8], first_sector: u64, mib: u64, expect: &[(&str, u64, u64)]) {
        let place = first_sector * SECTOR..first_sector * SECTOR + mib * MIB;
        let found = find(&place, &mut |at| sector_of(image, at.checked_sub(first_sector)?));
        assert_eq!(told(&found), expect);
    }

    #[test]
    fn what_lvm_wrote_is_read() {
        let first = [("store/mail", 1, 11), ("store/stripes", 11, 13), ("store/db-log", 13, 16), ("store/web", 16, 64)];
        check(STORE[0], 0, 64, &first);
        check(STORE[1], 0, 32, &[("store/stripes", 1, 3), ("store/web", 3, 13)]);
        let in_a_partition = first.map(|(name, start, end)| (name, start + 2, end + 2));
        check(STORE[0], 4096, 64, &in_a_partition);
    }

    #[test]
    fn what_leaves_its_place_or_is_not_held_is_left_out() {
        check(STORE[0], 0, 15, &[("store/mail", 1, 11), ("store/stripes", 11, 13)]);
        check(&STORE[0][..STORE[0].len() - 4096], 0, 64, &[]);
        check(&[], 0, 64, &[]);
        check(&[0; 1 << 14], 0, 64, &[]);
    }

    #[test]
    fn a_text_that_begins_again_in_its_ring_is_read() {
        const AREA: usize = 4096;
        let mut image = STORE[0].to_vec();
        let [offset, bytes] = [40, 48].map(|at| long(&image, AREA + at).unwrap() as usize);
        let text = image[AREA + offset..AREA + offset + bytes].to_vec();
        // Two sectors at the end of the ring, the rest behind its head.
        let ring_bytes = offset + 2 * SECTOR_BYTES;
        image[AREA + offset..].fill(0);
        image.resize(AREA + ring_bytes, 0);
        image[AREA + offset..].copy_from_slice(&text[..2 * SECTOR_BYTES]);
        let rest = &text[2 * SECTOR_BYTES..];
        image[AREA + SECTOR_BYTES..][..rest.len()].copy_from_slice(rest);
        let areas = SECTOR_BYTES + 32 + ID_BYTES + 8 + 32;
        assert_eq!(long(&image, areas), Some(AREA as u64), "the first area of metadata");
        image[areas + 8..][..8].copy_from_slice(&(ring_bytes as u64).to_le_bytes());
        check(&image, 0, 15, &[("store/mail", 1, 11), ("store/stripes", 11, 13)]);
    }

    #[test]
    fn names_control_no_terminal() {
        let mut image = STORE[0].to_vec();
        let at = image.windows(4).position(|bytes| bytes == b"mail").unwrap();
        image[at + 1..at + 3].copy_from_slice("\u{9b}".as_bytes());
        check(&image, 0, 12, &[("store/ml", 1, 11)]);
    }

    proptest! {
        /// Whatever a guest writes over it: what is found lies apart, on the physical volume.
        #[test]
        fn no_metadata_are_believed(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40)) {
            let mut image = STORE[0].to_vec();
            let text = 4096 + 16896..4096 + 16896 + 2198;
            for (index, byte) in changes {
                image[text.start + index.index(text.len())] = byte;
            }
            let found = find(&(0..64 * MIB), &mut |at| sector_of(&image, at));
            prop_assert!(found.windows(2).all(|pair| pair[0].bytes.end <= pair[1].bytes.start));
            prop_assert!(found.iter().all(|segment| !segment.bytes.is_empty() && segment.bytes.end <= 64 * MIB));
        }
    }
}
