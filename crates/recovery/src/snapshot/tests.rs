//! Tests that a snapshot is read as it was saved, or refused by the name of the part that was changed.

use std::time::{Duration, UNIX_EPOCH};

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

    /// A snapshot of a guest that was seen to use these pages.
    fn scanned(used: &[u32]) -> Self {
        Self::of_moment(0, used)
    }

    /// Snapshots of one machine at several moments: each file has the same length in all of them, and other contents.
    pub fn of_moment(moment: u8, used: &[u32]) -> Self {
        let stand = Self { home: tempfile::tempdir().unwrap() };
        let mut draft = Draft::create(&stand.folder()).unwrap();
        let (manifest, _) = Self::write(&mut draft, moment, used).unwrap();
        draft.finish(&manifest).unwrap();
        stand
    }

    /// Writes everything except the manifest, as a save with `--compress` does.
    fn write(draft: &mut Draft, moment: u8, used: &[u32]) -> Result<(Manifest, Sealed), SnapshotError> {
        let mut plain = PageWriter::create_changeable(&draft.plain_ram_path(), RAM_PAGES)?;
        (10..30).try_for_each(|page| plain.put(page, &[page as u8 + moment; 4096]))?;
        plain.put(12, &[12 + moment; 4096])?;
        plain.finish()?;
        let mut writer = PageWriter::create(&draft.ram_path(), RAM_PAGES, Compression::Zstd)?;
        (10..30).try_for_each(|page| writer.add(page, &[page as u8 + moment; 4096]))?;
        let sealed = writer.finish()?;
        draft.remove_plain_ram()?;
        let Sealed { bytes, pages, seal } = sealed.clone();
        let mut disk = draft.make_disk("root")?;
        faults::may_write()
            .and_then(|()| disk.write_all(&[1 + moment; 1024]))
            .map_err(SnapshotError::io(&draft.folder().join("disk-root"), "written"))?;
        // Two files written within one tick of the kernel's clock would have the same time.
        let time = UNIX_EPOCH + Duration::new(1_800_000_000 + u64::from(moment), 123_456_789);
        disk.set_modified(time).unwrap();
        let manifest = Manifest {
            version: SNAPSHOT_VERSION,
            machine: "web".into(),
            saved_at: "2026-03-01T12:00:00.000Z".into(),
            hearth_version: "0.1.0".into(),
            qemu_version: "7.2.22".into(),
            accelerator: "tcg".into(),
            configuration: Some("/machines/web.toml".into()),
            ram_bytes: RAM_PAGES * 4096,
            vmgenid: true,
            guest_agent: true,
            write_through: vec!["root".to_owned()],
            frozen: true,
            machine_file: draft.write_machine(&format!("name = \"web\"\n# {moment}\n"))?,
            state: draft.write_state(&[3 + moment; 5000])?,
            ram: RamPart { bytes, pages, seal },
            disks: vec![DiskPart {
                name: "root".into(),
                format: "raw".into(),
                bytes: 1024,
                modified: Some(draft.disk_modified("root")?),
                stored: None,
            }],
        };
        if !used.is_empty() {
            draft.write_working_set(used, &[])?;
        }
        Ok((manifest, sealed))
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
fn saved_snapshot_opens() {
    let stand = Stand::new();
    assert_eq!(names(&stand.folder()), ["disk-root", "machine.toml", "manifest", "ram", "state"]);
    let snapshot = Snapshot::open(&stand.folder()).unwrap();
    assert_eq!((snapshot.machine.as_str(), snapshot.state.len()), ("name = \"web\"\n# 0\n", 5000));
    assert_eq!(snapshot.ram.pages().len(), 20);
    assert!(snapshot.working_set.unwrap().is_none());
    let refusal = Draft::create(&stand.folder()).unwrap_err().to_string();
    assert!(refusal.ends_with("snapshot: exists already; choose another folder"), "{refusal}");
}

#[test]
fn abandoned_draft_leaves_nothing() {
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
fn missing_cut_or_altered_part_is_named() {
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
                // The middle of the memory is in a chunk, which is checked when it is read.
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
    assert!(one.refusal().contains("ram: is damaged"), "{}", one.refusal());
}

#[test]
fn newer_version_is_named() {
    let stand = Stand::new();
    let path = stand.folder().join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    let body = text[..text.rfind("blake3 ").unwrap()].replace("\"version\": 2", "\"version\": 9");
    fs::write(&path, format!("{body}blake3 {}\n", blake3::hash(body.as_bytes()).to_hex())).unwrap();
    assert!(stand.refusal().contains("version 9, but this Hearth knows only 1 to 2"), "{}", stand.refusal());
}

#[test]
fn working_set_orders_pages_over_several_traces() {
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
fn traces_replace_pages_seen_by_a_scan() {
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
fn version_1_snapshot_is_read_and_traced() {
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
    let refusal = snapshot.working_set.as_ref().unwrap_err().to_string();
    assert!(refusal.contains("working-set: was written by an earlier Hearth"), "{refusal}");
    assert_eq!(snapshot.add_trace(&[29]).unwrap(), 5);
    let snapshot = Snapshot::open(&folder).unwrap();
    let set = snapshot.working_set.as_ref().unwrap().as_ref().unwrap();
    let expect = [(29, 0, Source::Trace), (11, 1, Source::Trace), (10, 1, Source::Trace)];
    assert_eq!(aged(set), [&expect[..], &[(25, 2, Source::Scan), (28, 2, Source::Scan)]].concat());
}

/// Puts a file in the place of another one, with its times as `cp -a` does, or as a new file.
fn put(from: &Path, to: &Path, with_times: bool) {
    fs::copy(from, to).unwrap();
    if with_times {
        let times = fs::FileTimes::new().set_modified(fs::metadata(from).unwrap().modified().unwrap());
        File::options().write(true).open(to).unwrap().set_times(times).unwrap();
    }
}

#[test]
fn file_of_another_moment_is_refused_by_name() {
    let (one, other) = (Stand::of_moment(1, &[25, 12]), Stand::of_moment(2, &[25, 12]));
    let files = names(&one.folder());
    assert_eq!(files, names(&other.folder()));
    for name in &files {
        let [path, theirs] = [&one, &other].map(|stand| stand.folder().join(name));
        let ours = one.folder().with_file_name("ours");
        put(&path, &ours, true);
        assert_eq!(fs::metadata(&path).unwrap().len(), fs::metadata(&theirs).unwrap().len(), "{name}");
        for with_times in [false, true] {
            put(&theirs, &path, with_times);
            let refusal = match Snapshot::open(&one.folder()) {
                Err(refusal) => refusal.to_string(),
                // The guest is restored without the working set, and an event says so.
                Ok(snapshot) => {
                    assert_eq!(name, WORKING_SET, "with its times: {with_times}");
                    snapshot.working_set.unwrap_err().to_string()
                }
            };
            // With another manifest, the first file that is read is the wrong one.
            let named = if name == MANIFEST { MACHINE } else { name };
            assert!(refusal.contains(named), "{name}: {refusal}");
        }
        put(&ours, &path, true);
        assert!(Snapshot::open(&one.folder()).unwrap().working_set.unwrap().is_some(), "{name} is back");
    }
}

#[test]
fn disk_copied_without_time_says_what_to_do() {
    let stand = Stand::of_moment(1, &[]);
    let path = stand.folder().join("disk-root");
    let copy = stand.folder().join("copy");
    let saved = Modified::of(&fs::metadata(&path).unwrap());
    put(&path, &copy, false);
    fs::rename(&copy, &path).unwrap();
    let refusal = stand.refusal();
    assert!(refusal.contains(&format!("run `touch -d {saved} {}`", path.display())), "{refusal}");
    let touched = std::process::Command::new("touch").args(["-d", &saved.to_string()]).arg(&path).status().unwrap();
    assert!(touched.success());
    Snapshot::open(&stand.folder()).unwrap();
    // Some archives lose the fraction of a second.
    let whole = saved.to_string().split('.').next().unwrap().to_owned();
    assert!(std::process::Command::new("touch").args(["-d", &whole]).arg(&path).status().unwrap().success());
    Snapshot::open(&stand.folder()).unwrap();
}

#[test]
fn link_in_place_of_a_disk_is_refused() {
    let stand = Stand::new();
    let path = stand.folder().join("disk-root");
    let away = stand.folder().with_file_name("secret");
    fs::rename(&path, &away).unwrap();
    std::os::unix::fs::symlink(&away, &path).unwrap();
    assert!(stand.refusal().contains("disk-root: is not a regular file"), "{}", stand.refusal());
}

#[test]
fn manifests_with_odd_disks_are_refused() {
    let check = |edit: fn(&mut Manifest), expect: &str| {
        let stand = Stand::new();
        let mut manifest = Snapshot::open(&stand.folder()).unwrap().manifest;
        edit(&mut manifest);
        fs::write(stand.folder().join(MANIFEST), manifest.to_text()).unwrap();
        assert!(stand.refusal().contains(expect), "{}", stand.refusal());
    };
    check(|manifest| manifest.disks[0].name = "../x".into(), "a disk cannot be called");
    check(|manifest| manifest.disks.push(manifest.disks[0].clone()), "two disks are called \"root\"");
    check(|manifest| manifest.disks[0].format = "vmdk".into(), "unknown format, \"vmdk\"");
}

#[test]
fn trace_of_a_replaced_snapshot_is_dropped() {
    let (one, other) = (Stand::of_moment(1, &[]), Stand::of_moment(2, &[25]));
    let snapshot = Snapshot::open(&one.folder()).unwrap();
    fs::rename(one.folder(), one.folder().with_file_name("away")).unwrap();
    fs::create_dir(one.folder()).unwrap();
    for name in names(&other.folder()) {
        put(&other.folder().join(&name), &one.folder().join(&name), true);
    }
    let files = names(&one.folder());
    let refusal = snapshot.add_trace(&[11]).unwrap_err().to_string();
    assert!(refusal.contains("was replaced by another snapshot meanwhile"), "{refusal}");
    assert_eq!(names(&one.folder()), files, "nothing is left");
    let set = Snapshot::open(&one.folder()).unwrap().working_set.unwrap().unwrap();
    assert_eq!(aged(&set), [(25, 0, Source::Scan)]);
}

#[test]
fn failed_write_leaves_no_snapshot() {
    let save = |folder: &Path, killed: bool| -> Result<(), SnapshotError> {
        let mut draft = Draft::create(folder)?;
        match Stand::write(&mut draft, 1, &[25, 12]) {
            Ok((manifest, _)) => draft.finish(&manifest),
            Err(error) => {
                if killed {
                    std::mem::forget(draft);
                }
                Err(error)
            }
        }
    };
    for (errno, killed) in [(enospc(), false), (eio(), false), (enospc(), true)] {
        let mut failures = 0;
        for write in 0.. {
            let home = tempfile::tempdir().unwrap();
            let folder = home.path().join("snapshot");
            match faults::tests::failing_from(write, errno, || save(&folder, killed)) {
                Ok(()) => {
                    Snapshot::open(&folder).unwrap().working_set.unwrap().unwrap();
                    break;
                }
                Err(error) => {
                    failures += 1;
                    assert!(Snapshot::open(&folder).is_err(), "write {write}: {error}");
                    assert!(killed || !folder.exists(), "write {write} leaves something: {error}");
                }
            }
        }
        assert!(failures > 20, "only {failures} writes were tried");
    }
}

#[test]
fn failed_write_leaves_the_working_set() {
    let stand = Stand::of_moment(1, &[25]);
    let set = || aged(&Snapshot::open(&stand.folder()).unwrap().working_set.unwrap().unwrap());
    let before = set();
    for write in 0.. {
        let snapshot = Snapshot::open(&stand.folder()).unwrap();
        match faults::tests::failing_from(write, enospc(), || snapshot.add_trace(&[11])) {
            Ok(_) => break,
            Err(_) => assert_eq!(set(), before, "write {write}"),
        }
    }
    assert_ne!(set(), before);
}

fn enospc() -> i32 {
    rustix::io::Errno::NOSPC.raw_os_error()
}

fn eio() -> i32 {
    rustix::io::Errno::IO.raw_os_error()
}
