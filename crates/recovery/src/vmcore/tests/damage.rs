//! Tests that files which are cut off or damaged are refused, or lack pages.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::vmcore::file::PageCounts;

/// One small file of each kind, to be damaged in copies.
fn samples() -> Vec<Vec<u8>> {
    let folder = folder();
    let write = |name: String, format, finish| {
        let path: PathBuf = folder.path().join(name);
        let kept = Bitmap::of(80, &[10..20, 35..40, 60..66]);
        let plan = Plan { ranges: vec![0..30, 32..80], kept, ..plan() };
        let mut dump = Dump::create(&path, plan.clone(), format).unwrap();
        write_all(&mut dump, &mut Ram::new(&plan.ranges)).unwrap();
        match finish {
            true => fs::read(dump.finish().unwrap().path).unwrap(),
            false => fs::read(dump.incomplete_path()).unwrap(),
        }
    };
    let kinds = FORMATS.into_iter().flat_map(|format| [(format, true), (format, false)]).enumerate();
    kinds.map(|(number, (format, finish))| write(number.to_string(), format, finish)).collect()
}

/// Reads everything that can be read, and resumes the file if that is possible.
fn exercise(path: &Path) -> Option<PageCounts> {
    if let Ok(mut dump) = Dump::resume(path) {
        let ram = Zeroes::new(100);
        for chunk in dump.chunks(CHUNK_BYTES).iter().take(3) {
            let packed = dump.packer().pack(chunk, &ram);
            let _ = dump.write(&packed);
        }
    }
    let file = VmcoreFile::open(&incomplete_path(path)).ok()?;
    let mut page = [0; PAGE];
    for pfn in (0..100).chain([u64::MAX >> 12, u64::MAX >> 13]) {
        let _ = file.read_page(pfn, &mut page);
        let _ = file.read(GuestPhysicalAddress(pfn * PAGE_BYTES + 5), &mut [0; 5000]);
    }
    assert!(file.notes().registers().count() <= file.notes().cpus());
    Some(file.survey())
}

#[test]
fn cut_files_are_refused_or_lack_pages() {
    let folder = folder();
    let path = folder.path().join("vmcore");
    for sample in samples() {
        for end in (0..sample.len()).step_by(997) {
            fs::write(incomplete_path(&path), &sample[..end]).unwrap();
            if let Some(survey) = exercise(&path) {
                assert!(survey.missing <= survey.pages);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn damaged_files_do_no_harm(damage in prop::collection::vec((0_usize..3000, any::<u8>()), 1..12), far in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)) {
        let folder = folder();
        let path = folder.path().join("vmcore");
        for mut sample in SAMPLES.with(Clone::clone) {
            let signature = sample[..20].to_vec();
            // Mostly the headers, in which every byte has a meaning.
            for (at, byte) in &damage {
                let second = if at % 3 == 0 { 4096.min(sample.len() - 464) } else { 0 };
                sample[at % 464 + second] = *byte;
            }
            // A file with a damaged signature is refused at once, so keep it in most cases.
            if damage.len() % 8 != 0 {
                sample[..20].copy_from_slice(&signature);
            }
            for (at, byte) in &far {
                let at = at.index(sample.len());
                sample[at] = *byte;
            }
            fs::write(incomplete_path(&path), &sample).unwrap();
            exercise(&path);
        }
    }
}

thread_local! {
    static SAMPLES: Vec<Vec<u8>> = samples();
}
