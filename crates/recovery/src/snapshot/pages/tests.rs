//! Tests of files of pages: everything comes back, and nothing else does.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::snapshot::SnapshotError;
use crate::snapshot::fuzz::kib_resident;

const RAM_PAGES: u64 = 200;

fn page_of(seed: u32) -> Page {
    // The halves differ in how well they compress.
    let mut word = u64::from(seed) << 32 | 1;
    let mut page = [seed as u8; PAGE_BYTES];
    for bytes in page[PAGE_BYTES / 2..].chunks_exact_mut(8) {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    page
}

struct Stand {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn written(numbers: &[u32], compression: Compression) -> (Stand, Sealed) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ram");
    let mut writer = PageWriter::create(&path, RAM_PAGES, compression).unwrap();
    for &number in numbers {
        writer.add(number, &page_of(number)).unwrap();
    }
    (Stand { _folder: folder, path }, writer.finish().unwrap())
}

fn read_all(reader: &PageReader) -> Result<(), SnapshotError> {
    let mut reading = reader.reading();
    for chunk in 0..reader.chunks() {
        let pages = reader.pages_of(chunk).to_vec();
        let raw = reader.read(chunk, &mut reading)?;
        for (bytes, page) in raw.chunks_exact(PAGE_BYTES).zip(&pages) {
            assert!(bytes == page_of(*page), "page {page} is another");
        }
    }
    Ok(())
}

#[test]
fn no_two_files_have_the_same_seal() {
    let [first, second] = [(); 2].map(|()| written(&[1, 2, 3], Compression::None).1);
    assert_eq!((first.bytes, first.pages), (second.bytes, second.pages));
    assert_ne!(first.seal, second.seal);
}

#[test]
fn pages_come_back_in_order_without_zeroes() {
    let folder = tempfile::tempdir().unwrap();
    for compression in [Compression::None, Compression::Zstd] {
        let path = folder.path().join("ram");
        let mut writer = PageWriter::create(&path, RAM_PAGES, compression).unwrap();
        let order: Vec<u32> = (0..37).map(|n| n * 77 % 199).collect();
        for &page in &order {
            writer.add(page, &page_of(page)).unwrap();
            writer.add(199, &[0; PAGE_BYTES]).unwrap();
        }
        let sealed = writer.finish().unwrap();
        assert_eq!((sealed.pages, sealed.bytes), (37, fs::metadata(&path).unwrap().len()));
        let reader = PageReader::open(&path).unwrap();
        assert_eq!((reader.pages(), reader.sealed(), reader.chunks()), (&order[..], &sealed, 3));
        read_all(&reader).unwrap();
        let mut reading = reader.reading();
        assert!(reader.page(77, &mut reading).unwrap().unwrap() == &page_of(77));
        assert!(reader.page(199, &mut reading).unwrap().is_none(), "zeroes");
        assert_eq!(reader.chunk_of(5000), None);
        let raw_bytes = 37 * PAGE_BYTES as u64;
        assert_eq!(sealed.bytes > raw_bytes, compression == Compression::None, "{sealed:?}");
    }
}

#[test]
fn later_put_replaces_the_earlier_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ram");
    let mut writer = PageWriter::create_changeable(&path, RAM_PAGES).unwrap();
    let seed = |page| if page % 3 == 0 { 1000 } else { page };
    (0..40).for_each(|page| writer.put(page, &page_of(seed(page))).unwrap());
    writer.put(150, &[0; PAGE_BYTES]).unwrap();
    // In chunks that are in the file, in the buffer, and not full yet.
    (0..40).step_by(3).for_each(|page| writer.put(page, &page_of(page)).unwrap());
    (0..40).step_by(3).for_each(|page| writer.put(page, &page_of(page)).unwrap());
    writer.put(7, &[0; PAGE_BYTES]).unwrap();
    writer.put(199, &page_of(199)).unwrap();
    writer.put(198, &[0; PAGE_BYTES]).unwrap();
    let sealed = writer.finish().unwrap();
    assert_eq!((sealed.pages, sealed.bytes), (41, fs::metadata(&path).unwrap().len()));
    let reader = PageReader::open(&path).unwrap();
    assert_eq!(reader.sealed(), &sealed);
    let mut reading = reader.reading();
    for page in (0..40).chain([199]) {
        let expect = if page == 7 { [0; PAGE_BYTES] } else { page_of(page) };
        assert!(reader.page(page, &mut reading).unwrap().unwrap() == &expect, "page {page}");
    }
    assert!(reader.page(198, &mut reading).unwrap().is_none());
}

#[test]
fn file_without_pages_is_valid() {
    let (stand, sealed) = written(&[], Compression::None);
    let reader = PageReader::open(&stand.path).unwrap();
    assert_eq!((reader.chunks(), sealed.bytes), (0, (HEADER_BYTES + TRAILER_BYTES) as u64));
}

#[test]
fn damaged_chunk_is_named_and_spoils_no_other() {
    for compression in [Compression::None, Compression::Zstd] {
        let (stand, _) = written(&(20..60).collect::<Vec<_>>(), compression);
        let mut bytes = fs::read(&stand.path).unwrap();
        let second = PageReader::open(&stand.path).unwrap().entries[1].offset as usize;
        bytes[second + 5] ^= 1;
        fs::write(&stand.path, &bytes).unwrap();
        let reader = PageReader::open(&stand.path).unwrap();
        let mut reading = reader.reading();
        assert!(reader.read(0, &mut reading).is_ok() && reader.read(2, &mut reading).is_ok());
        let refusal = reader.read(1, &mut reading).unwrap_err().to_string();
        assert!(refusal.contains("pages 36 to 51 of the guest's memory are damaged: their checksum"), "{refusal}");
        assert!(reader.read(1, &mut reading).is_err(), "and it stays damaged");
    }
}

#[test]
fn file_cut_off_anywhere_is_refused() {
    let (stand, sealed) = written(&(0..40).collect::<Vec<_>>(), Compression::Zstd);
    let bytes = fs::read(&stand.path).unwrap();
    for length in (0..sealed.bytes).step_by(41).chain([sealed.bytes - 1]) {
        fs::write(&stand.path, &bytes[..length as usize]).unwrap();
        let refusal = PageReader::open(&stand.path).unwrap_err().to_string();
        assert!(refusal.contains("was it cut off?"), "{length}: {refusal}");
    }
}

#[test]
fn file_cut_off_after_opening_is_named() {
    let (stand, _) = written(&(0..40).collect::<Vec<_>>(), Compression::None);
    let reader = PageReader::open(&stand.path).unwrap();
    fs::File::options().write(true).open(&stand.path).unwrap().set_len(HEADER_BYTES as u64 + 70_000).unwrap();
    let mut reading = reader.reading();
    assert!(reader.read(0, &mut reading).is_ok());
    let refusal = reader.read(1, &mut reading).unwrap_err().to_string();
    assert!(refusal.contains("pages 16 to 31"), "{refusal}");
}

#[test]
fn other_version_is_named() {
    let (stand, _) = written(&[1], Compression::None);
    let mut bytes = fs::read(&stand.path).unwrap();
    bytes[8] = 3;
    fs::write(&stand.path, &bytes).unwrap();
    let refusal = PageReader::open(&stand.path).unwrap_err().to_string();
    assert!(refusal.contains("version 3, but this Hearth knows only 1 to 2"), "{refusal}");
}

/// Offset of the index in a whole file.
pub fn index_of(bytes: &[u8]) -> usize {
    u64_at(bytes, bytes.len() - TRAILER_BYTES + 16) as usize
}

/// Renews the seal, as a forger would.
pub fn resealed(bytes: &mut [u8]) {
    let trailer_at = bytes.len() - TRAILER_BYTES;
    let (body, trailer) = bytes.split_at_mut(trailer_at);
    let index_at = (u64_at(trailer, 16) as usize).clamp(HEADER_BYTES, trailer_at);
    let trailer: &mut [u8; TRAILER_BYTES] = trailer.try_into().unwrap();
    let seal = writer::seal(&body[..HEADER_BYTES], &body[index_at..], trailer);
    trailer[TRAILER_SEALED_BYTES..].copy_from_slice(seal.as_bytes());
}

#[test]
fn a_forged_index_is_refused() {
    let (stand, _) = written(&(0..20).collect::<Vec<_>>(), Compression::None);
    let whole = fs::read(&stand.path).unwrap();
    let index = index_of(&whole);
    let check = |at: usize, value: u8, expect: &str| {
        let mut bytes = whole.clone();
        bytes[at] = value;
        resealed(&mut bytes);
        fs::write(&stand.path, &bytes).unwrap();
        let refusal = PageReader::open(&stand.path).unwrap_err().to_string();
        assert!(refusal.contains(expect), "{at}: {refusal}");
    };
    check(index + 1, 0xff, "its chunks make no sense");
    check(index + 12, 17, "its chunks make no sense");
    check(index + 14, 2, "its chunks make no sense");
    check(index + 36, 2, "its chunks make no sense");
    check(index + 2 * ENTRY_BYTES, 1, "its pages make no sense");
    check(index + 2 * ENTRY_BYTES + 2, 1, "its pages make no sense");
    check(16, 10, "its counts make no sense");
    check(whole.len() - TRAILER_BYTES + 12, 3, "its counts make no sense");
}

#[test]
fn huge_claimed_ram_takes_no_memory() {
    let resident_pages = || -> u64 {
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    };
    let (stand, _) = written(&[1], Compression::None);
    let mut bytes = fs::read(&stand.path).unwrap();
    // Page frames of 4 TiB.
    bytes[16..24].copy_from_slice(&(1u64 << 30).to_le_bytes());
    resealed(&mut bytes);
    fs::write(&stand.path, &bytes).unwrap();
    let before = resident_pages();
    let reader = PageReader::open(&stand.path).unwrap();
    assert_eq!((reader.ram_pages(), reader.chunk_of(1), reader.chunk_of(9)), (1 << 30, Some(0), None));
    // Other tests take far less memory meanwhile than 4 bytes a page would be.
    assert!(resident_pages() < before + (1 << 18));
}

proptest! {
    /// An altered byte is refused at opening, or noticed when its chunk is read at the latest. Nothing panics.
    #[test]
    fn no_altered_byte_goes_unseen(at in 0.0..1.0f64, flip in 1..=255u8, zstd: bool) {
        let compression = if zstd { Compression::Zstd } else { Compression::None };
        let (stand, sealed) = written(&(0..20).collect::<Vec<_>>(), compression);
        let mut bytes = fs::read(&stand.path).unwrap();
        bytes[(at * sealed.bytes as f64) as usize] ^= flip;
        fs::write(&stand.path, &bytes).unwrap();
        let seen = PageReader::open(&stand.path).and_then(|reader| read_all(&reader));
        prop_assert!(seen.is_err());
    }

    /// A forged index does not panic either, whatever it holds.
    #[test]
    fn no_forged_byte_panics(at in 0.0..1.0f64, value: u8) {
        let (stand, _) = written(&(0..20).collect::<Vec<_>>(), Compression::Zstd);
        let mut bytes = fs::read(&stand.path).unwrap();
        let from = index_of(&bytes);
        let at = from + (at * (bytes.len() - TRAILER_SEALED_BYTES - from) as f64) as usize;
        bytes[at] = value;
        resealed(&mut bytes);
        fs::write(&stand.path, &bytes).unwrap();
        let _ = PageReader::open(&stand.path).map(|reader| {
            let mut reading = reader.reading();
            (0..reader.chunks()).for_each(|chunk| drop(reader.read(chunk, &mut reading).map(<[u8]>::len)));
        });
    }
}

/// Page numbers far apart, each in a chunk of its own, are the most that a small file can claim.
#[test]
fn small_file_with_scattered_pages_takes_little_memory() {
    const CHUNKS: u32 = 100_000;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ram");
    let ram_pages = u64::from(CHUNKS) * 4096;
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[..8].copy_from_slice(HEADER_MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&16_u32.to_le_bytes());
    bytes[16..24].copy_from_slice(&ram_pages.to_le_bytes());
    bytes.resize(HEADER_BYTES + CHUNKS as usize, 0);
    for chunk in 0..CHUNKS {
        let offset = (HEADER_BYTES as u32 + chunk).into();
        let (checksum, flags) = ([0; CHECKSUM_BYTES], FLAG_ZSTD);
        bytes.extend(Chunk { offset, stored_bytes: 1, pages: 1, flags, checksum, age: 0, source: 0 }.encode());
    }
    (0..CHUNKS).for_each(|chunk| bytes.extend((chunk * 4096).to_le_bytes()));
    let mut trailer = [0; TRAILER_BYTES];
    trailer[..8].copy_from_slice(TRAILER_MAGIC);
    trailer[8..12].copy_from_slice(&VERSION.to_le_bytes());
    trailer[12..16].copy_from_slice(&CHUNKS.to_le_bytes());
    trailer[16..24].copy_from_slice(&((HEADER_BYTES as u32 + CHUNKS) as u64).to_le_bytes());
    trailer[24..32].copy_from_slice(&u64::from(CHUNKS).to_le_bytes());
    bytes.extend(trailer);
    resealed(&mut bytes);
    fs::write(&path, &bytes).unwrap();
    let before = kib_resident();
    let reader = PageReader::open(&path).unwrap();
    assert_eq!(reader.chunk_of(4096 * 77), Some(77));
    let grown = kib_resident().saturating_sub(before);
    // It took 1.6 GiB once. Other tests take some memory meanwhile.
    assert!(grown < 300 << 10, "{grown} KiB for a file of {} KiB", bytes.len() >> 10);
}

#[test]
fn index_that_is_a_hole_takes_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ram");
    let file = fs::File::create(&path).unwrap();
    let (chunks, pages) = (100_000_000_u64, 1_600_000_000_u64);
    let mut header = vec![0; HEADER_BYTES];
    header[..8].copy_from_slice(HEADER_MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&pages.to_le_bytes());
    let mut trailer = [0; TRAILER_BYTES];
    trailer[..8].copy_from_slice(TRAILER_MAGIC);
    trailer[8..12].copy_from_slice(&VERSION.to_le_bytes());
    trailer[12..16].copy_from_slice(&(chunks as u32).to_le_bytes());
    trailer[16..24].copy_from_slice(&(HEADER_BYTES as u64).to_le_bytes());
    trailer[24..32].copy_from_slice(&pages.to_le_bytes());
    use std::os::unix::fs::FileExt;
    file.write_all_at(&header, 0).unwrap();
    let index_bytes = chunks * ENTRY_BYTES as u64 + pages * 4;
    file.write_all_at(&trailer, HEADER_BYTES as u64 + index_bytes).unwrap();
    let before = kib_resident();
    let refusal = PageReader::open(&path).unwrap_err().to_string();
    assert!(refusal.ends_with("its chunks make no sense"), "{refusal}");
    let grown = kib_resident().saturating_sub(before);
    assert!(grown < 300 << 10, "{grown} KiB");
}
