//! A snapshot is found as it was saved, or refused by the name of the part that is not as it was.

use super::pages::{Compression, PageWriter};
use super::*;

const RAM_PAGES: u64 = 64;

pub(super) struct Stand {
    home: tempfile::TempDir,
}

impl Stand {
    pub fn folder(&self) -> PathBuf {
        self.home.path().join("snapshot")
    }

    /// A snapshot with 20 pages and a disk.
    pub fn new() -> Self {
        Self::scanned(&[])
    }

    /// The same of a guest that was seen to use these pages.
    fn scanned(used: &[u32]) -> Self {
        let stand = Self { home: tempfile::tempdir().unwrap() };
        let mut draft = Draft::create(&stand.folder()).unwrap();
        let mut writer = PageWriter::create(&draft.ram_path(), RAM_PAGES, Compression::Zstd).unwrap();
        for page in 10..30 {
            writer.add(page, &[page as u8; 4096]).unwrap();
        }
        let Sealed { bytes, pages, seal } = writer.finish().unwrap();
        draft.make_disk("root").unwrap().write_all(&[1; 1024]).unwrap();
        let manifest = Manifest {
            version: SNAPSHOT_VERSION,
            machine: "web".into(),
            saved_at: "2026-03-01T12:00:00.000Z".into(),
            hearth_version: "0.1.0".into(),
            qemu_version: "7.2.22".into(),
            accelerator: "tcg".into(),
            ram_bytes: RAM_PAGES * 4096,
            vmgenid: true,
            guest_agent: true,
            frozen: true,
            machine_file: draft.write_machine("name = \"web\"\n").unwrap(),
            state: draft.write_state(&[3; 5000]).unwrap(),
            ram: RamPart { bytes, pages, seal },
            disks: vec![DiskPart { name: "root".into(), format: "raw".into(), bytes: 1024, stored: None }],
        };
        if !used.is_empty() {
            draft.write_working_set(used, &[]).unwrap();
        }
        draft.finish(&manifest).unwrap();
        stand
    }

    fn refusal(&self) -> String {
        Snapshot::open(&self.folder()).unwrap_err().to_string()
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_was_saved_is_found() {
    let stand = Stand::new();
    assert_eq!(names(&stand.folder()), ["disk-root", "machine.toml", "manifest", "ram", "state"]);
    let snapshot = Snapshot::open(&stand.folder()).unwrap();
    assert_eq!((snapshot.machine.as_str(), snapshot.state.len()), ("name = \"web\"\n", 5000));
    assert_eq!(snapshot.ram.pages().len(), 20);
    assert!(snapshot.working_set.unwrap().is_none());
    let refusal = Draft::create(&stand.folder()).unwrap_err().to_string();
    assert!(refusal.ends_with("snapshot: exists already; choose another folder"), "{refusal}");
}

#[test]
fn a_draft_that_is_given_up_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let mut draft = Draft::create(&home.path().join("snapshot")).unwrap();
    draft.write_state(&[1]).unwrap();
    PageWriter::create(&draft.ram_path(), RAM_PAGES, Compression::None).unwrap();
    draft.make_disk("root").unwrap();
    draft.plain_ram_path();
    assert!(draft.write_working_set(&[1], &[]).is_err(), "its memory is not finished");
    drop(draft);
    assert_eq!(names(home.path()), Vec::<String>::new());
}

#[test]
fn each_part_that_is_missing_cut_off_or_altered_is_named() {
    for name in ["machine.toml", "state", "ram", "manifest", "disk-root"] {
        let stand = Stand::new();
        let path = stand.folder().join(name);
        let whole = fs::read(&path).unwrap();
        let named = |refusal: &str| assert!(refusal.contains(name), "{name}: {refusal}");
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        named(&stand.refusal());
        if name != "disk-root" {
            for at in [0, whole.len() / 2, whole.len() - 2] {
                let mut altered = whole.clone();
                altered[at] ^= 4;
                fs::write(&path, &altered).unwrap();
                let opened = Snapshot::open(&stand.folder());
                // The middle of the memory is a chunk's, and seen when that is read.
                let read =
                    opened.and_then(|snapshot| snapshot.ram.read(0, &mut snapshot.ram.reading()).map(<[u8]>::len));
                if at != whole.len() / 2 || name != "ram" {
                    named(&read.unwrap_err().to_string());
                }
            }
        }
        fs::remove_file(&path).unwrap();
        if name == "manifest" {
            assert!(stand.refusal().contains("has no manifest"), "{}", stand.refusal());
        } else {
            named(&stand.refusal());
        }
    }
}

#[test]
fn parts_of_two_snapshots_do_not_go_together() {
    let (one, other) = (Stand::new(), Stand::new());
    let mut writer = PageWriter::create(&other.folder().join("ram"), RAM_PAGES, Compression::Zstd).unwrap();
    writer.add(5, &[5; 4096]).unwrap();
    writer.finish().unwrap();
    fs::copy(other.folder().join("ram"), one.folder().join("ram")).unwrap();
    assert!(one.refusal().ends_with("it is not the one that the manifest names"), "{}", one.refusal());
}

#[test]
fn a_version_from_the_future_is_told() {
    let stand = Stand::new();
    let path = stand.folder().join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    let body = text[..text.rfind("blake3 ").unwrap()].replace("\"version\": 2", "\"version\": 9");
    fs::write(&path, format!("{body}blake3 {}\n", blake3::hash(body.as_bytes()).to_hex())).unwrap();
    assert!(stand.refusal().contains("version 9, this Hearth knows 1 to 2"), "{}", stand.refusal());
}

#[test]
fn a_working_set_is_kept_in_order_of_use_over_several_traces() {
    let stand = Stand::new();
    let snapshot = Snapshot::open(&stand.folder()).unwrap();
    assert_eq!(snapshot.add_trace(&[29, 11, 63, 12]).unwrap(), 3, "zeroes need no note");
    assert_eq!(snapshot.add_trace(&[20, 11]).unwrap(), 4);
    let set = Snapshot::open(&stand.folder()).unwrap().working_set.unwrap().unwrap();
    let traced = [(20, 0), (11, 0), (29, 1), (12, 1)].map(|(page, age)| (page, age, Source::Trace));
    assert_eq!(aged(&set), traced);
    assert_eq!(set.page(11, &mut set.reading()).unwrap(), Some(&[11; 4096]));
    assert_eq!(set.page(12, &mut set.reading()).unwrap(), Some(&[12; 4096]));
    assert_eq!(names(&stand.folder()).len(), 6);
    fs::write(stand.folder().join(WORKING_SET), "torn").unwrap();
    let refusal = Snapshot::open(&stand.folder()).unwrap().working_set.unwrap_err().to_string();
    assert!(refusal.contains("working-set: is damaged"), "{refusal}");
    assert_eq!(snapshot.add_trace(&[25]).unwrap(), 1, "begun anew");
}

pub(super) fn aged(set: &PageReader) -> Vec<(u32, u32, Source)> {
    aged_pages(set).map(|aged| (aged.page, aged.age, aged.source)).collect()
}

#[test]
fn what_a_scan_saw_comes_with_the_snapshot_and_gives_way_to_what_traces_see() {
    let stand = Stand::scanned(&[25, 10, 63, 28]);
    assert_eq!(names(&stand.folder()), ["disk-root", "machine.toml", "manifest", "ram", "state", "working-set"]);
    let set = || Snapshot::open(&stand.folder()).unwrap().working_set.unwrap().unwrap();
    assert_eq!(
        aged(&set()),
        [(25, 0, Source::Scan), (10, 0, Source::Scan), (28, 0, Source::Scan)],
        "zeroes need no note"
    );
    assert_eq!(set().page(28, &mut set().reading()).unwrap(), Some(&[28; 4096]));
    let snapshot = Snapshot::open(&stand.folder()).unwrap();
    assert_eq!(snapshot.add_trace(&[10, 11]).unwrap(), 4);
    let expect = [(10, 0, Source::Trace), (11, 0, Source::Trace), (25, 1, Source::Scan), (28, 1, Source::Scan)];
    assert_eq!(aged(&set()), expect);
    for _ in 1..AGE_END {
        snapshot.add_trace(&[11]).unwrap();
    }
    assert_eq!(aged(&set()), [(11, 0, Source::Trace), (10, AGE_END - 1, Source::Trace)], "and leaves when none does");
}

#[test]
fn a_snapshot_of_version_1_is_read_as_it_was_written_and_can_be_traced() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("snapshot");
    fs::create_dir(&folder).unwrap();
    let written = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/snapshot-1");
    for name in names(&written) {
        fs::copy(written.join(&name), folder.join(&name)).unwrap();
    }
    let snapshot = Snapshot::open(&folder).unwrap();
    assert_eq!((snapshot.manifest.version, snapshot.machine.as_str()), (1, "name = \"web\"\n"));
    let manifest = &snapshot.manifest;
    assert!(!manifest.vmgenid && !manifest.guest_agent, "its QEMU would refuse the devices");
    assert!(!manifest.frozen);
    let mut reading = snapshot.ram.reading();
    for page in 10..30 {
        assert_eq!(snapshot.ram.page(page, &mut reading).unwrap(), Some(&[page as u8; 4096]));
    }
    let set = snapshot.working_set.as_ref().unwrap().as_ref().unwrap();
    let expect = [(11, 0, Source::Trace), (10, 0, Source::Trace), (25, 1, Source::Scan), (28, 1, Source::Scan)];
    assert_eq!(aged(set), expect);
    assert_eq!(snapshot.add_trace(&[29]).unwrap(), 5);
}
