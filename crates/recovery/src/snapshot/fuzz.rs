//! Fuzz tests of files that anybody who can write to a snapshot may have altered: manifests, files of pages, indexes of
//! stored disks. Some bytes are changed, and the checksums are computed anew, so that the code behind them is reached.
//!
//! Each file is opened, or refused by its name, and the sizes that it claims take no memory. `PROPTEST_CASES=100000`
//! runs for longer.

use std::fs;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::manifest::StoredDisk;
use super::pages::{self, Compression, PageReader, PageWriter};
use super::tests::Stand;
use super::{DiskPart, Part, Snapshot, seal, stored_disk};

/// Number of index entries, of 24 bytes each.
const INDEX_ENTRIES: u64 = 9;

#[derive(Clone, Debug)]
struct Edit {
    at: Index,
    value: Vec<u8>,
}

/// Changes to any bytes, to boundary numbers, and to text that is another number or token in JSON.
fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let borders = [0, 1, 15, 16, 17, u64::from(u32::MAX), 1 << 40, u64::MAX - 4095, u64::MAX];
    let binary = select(borders.map(|border| border.to_le_bytes().to_vec()).to_vec());
    let short = (binary.clone(), 1..5usize).prop_map(|(bytes, length)| bytes[..length].to_vec());
    let text = select(
        ["0", "-1", "1e99", "18446744073709551615", "null", "\"", "{", "]", ",", "/../"].map(Vec::from).to_vec(),
    );
    let value = prop_oneof![vec(any::<u8>(), 1..4), binary, short, text];
    vec((any::<Index>(), value).prop_map(|(at, value)| Edit { at, value }), 1..6)
}

fn edited(mut bytes: Vec<u8>, edits: &[Edit]) -> Vec<u8> {
    for Edit { at, value } in edits {
        let at = at.index(bytes.len());
        let end = (at + value.len()).min(bytes.len());
        bytes[at..end].copy_from_slice(&value[..end - at]);
    }
    bytes
}

pub(super) fn kib_resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Other tests take far less memory meanwhile than the sizes that are made up.
fn must_take_little(before: u64) -> Result<(), TestCaseError> {
    let now = kib_resident();
    prop_assert!(now < before + (2 << 20), "{before} KiB, and then {now}");
    Ok(())
}

fn must_name(refusal: &dyn std::error::Error, path: &Path) -> Result<(), TestCaseError> {
    let said = refusal.to_string();
    prop_assert!(said.starts_with(&path.display().to_string()), "{said}");
    Ok(())
}

fn read_all(reader: &PageReader) {
    let mut reading = reader.reading();
    for chunk in 0..reader.chunks() {
        let _ = reader.read(chunk, &mut reading).map(<[u8]>::len);
    }
}

proptest! {
    #[test]
    fn fuzz_manifests(edits in edits(), resealed in prop::bool::weighted(0.9)) {
        let (stand, before) = (Stand::new(), kib_resident());
        let path = stand.folder().join("manifest");
        let text = fs::read_to_string(&path).unwrap();
        let body = if resealed { seal::open(&text).unwrap() } else { text.as_str() };
        let body = edited(body.as_bytes().to_vec(), &edits);
        match String::from_utf8(body) {
            Ok(body) if resealed => fs::write(&path, seal::close(body)).unwrap(),
            Ok(body) => fs::write(&path, body).unwrap(),
            Err(error) => fs::write(&path, error.into_bytes()).unwrap(),
        }
        match Snapshot::open(&stand.folder()) {
            Ok(snapshot) => read_all(&snapshot.ram),
            // The refusal names the manifest, or the part that does not match it.
            Err(refusal) => must_name(&refusal, &stand.folder())?,
        }
        must_take_little(before)?;
    }

    #[test]
    fn fuzz_files_of_pages(edits in edits(), head in any::<bool>(), zstd in any::<bool>()) {
        let (folder, before) = (tempfile::tempdir().unwrap(), kib_resident());
        let path = folder.path().join("ram");
        let compression = if zstd { Compression::Zstd } else { Compression::None };
        let mut writer = PageWriter::create(&path, 200, compression).unwrap();
        (0..40).for_each(|page| writer.add(page * 3, &[page as u8 + 1; 4096]).unwrap());
        writer.finish().unwrap();
        let mut bytes = fs::read(&path).unwrap();
        // The numbers are in the first bytes, or in index and trailer.
        let range = if head { 0..32 } else { pages::tests::index_of(&bytes)..bytes.len() };
        let changed = edited(bytes[range.clone()].to_vec(), &edits);
        bytes[range].copy_from_slice(&changed);
        pages::tests::resealed(&mut bytes);
        fs::write(&path, &bytes).unwrap();
        match PageReader::open(&path) {
            Ok(reader) => read_all(&reader),
            Err(refusal) => must_name(&refusal, &path)?,
        }
        must_take_little(before)?;
    }

    #[test]
    fn fuzz_indexes_of_stored_disks(edits in edits(), bytes in select(vec![0, 1, 9 << 20, (20 << 20) + 5, u64::MAX]), cut in 0..30usize) {
        let index = (0..INDEX_ENTRIES).flat_map(|block| [&(block * 2).to_le_bytes()[..], &[block as u8; 16]].concat());
        let mut index = edited(index.collect(), &edits);
        index.truncate(index.len() - if cut > 24 { cut } else { 0 });
        let part = StoredDisk { bytes: INDEX_ENTRIES << 20, index: Part { bytes: 0, blake3: String::new() } };
        let disk = DiskPart { name: "root".into(), format: "raw".into(), bytes, modified: None, stored: None };
        // An index that is accepted is in order, within the disk, and as long as stated.
        if let Some(blocks) = stored_disk::parse(&index, &disk, &part) {
            prop_assert!(blocks.len() * 24 == index.len() && blocks.is_sorted_by(|one, next| one.0 < next.0));
            prop_assert!(blocks.iter().all(|(block, _)| *block < bytes.div_ceil(1 << 20)));
        }
    }
}
