//! Every file that a keeper replaces, written while each system call in turn fails or is the process's last one.
//!
//! Each case runs in a child process under strace: once to record its calls on files, then once for each of these calls
//! with ENOSPC, with EIO, and with SIGKILL instead of the call. Afterwards a reader must find the old content or the
//! new one, an error must leave no new file, and the same write must succeed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Output, exit};
use std::time::SystemTime;

use hearth_api::EventKind;
use hearth_disk::arrival::{Arrival, CHECKSUM_BYTES, MissPolicy, UNIT_BYTES};
use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::BootSet;
use hearth_disk::image::ImageFile;
use hearth_disk::nvram::{MirrorPolicy, Nvram, NvramOptions};
use hearth_disk::tag::{TAG_KEY_BYTES, Tagger};
use hearth_disk::warm::{AfterServing, RequestObserver, WarmSource};
use hearth_keeper::{EventLog, Record, claim_user, prepare_folders, read_events};
use hearth_recovery::fast_remount::saved;
use hearth_recovery::images::{self, DiskNote, Notes};
use hearth_recovery::journal::{DiskIdentity, Journal};
use hearth_recovery::lazy_restore::{Mode, Order};
use hearth_recovery::rejuvenation::parked::{self, PARKED_VERSION, Parked};
use strace_faults::{Injection, Strace};

/// System calls that write a file or give it its name.
const CALLS: &[&str] = &[
    "openat",
    "write",
    "pwrite64",
    "writev",
    "pwritev",
    "fsync",
    "fdatasync",
    "syncfs",
    "ftruncate",
    "fallocate",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "link",
    "linkat",
    "mkdir",
];
/// Calls that never fail here: even a full or broken disk lets files be removed.
const NEVER_FAIL: &[&str] = &["unlink", "unlinkat"];

const CASE_VARIABLE: &str = "HEARTH_TEST_CASE";
const FOLDER_VARIABLE: &str = "HEARTH_TEST_FOLDER";
const REFUSED: i32 = 3;
/// Units of a disk that is being fetched.
const UNITS: u64 = 3;

struct Case {
    name: &'static str,
    /// Creates the old content.
    before: fn(&Path),
    /// The write under test. Returns false if it was refused.
    write: fn(&Path) -> bool,
    /// Reads the content. Panics if it is neither the old nor the new one.
    content: fn(&Path) -> Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Old,
    New,
}

use Content::{New, Old};

const CASES: &[Case] = &[
    Case {
        name: "journal",
        before: |folder| journal(1).save(&folder.join("journal.json")).unwrap(),
        write: |folder| journal(2).save(&folder.join("journal.json")).is_ok(),
        content: journal_content,
    },
    Case {
        name: "first journal",
        before: |_| (),
        write: |folder| journal(2).save(&folder.join("journal.json")).is_ok(),
        content: journal_content,
    },
    Case {
        name: "staged journal",
        before: |folder| journal(1).save(&folder.join("journal.json")).unwrap(),
        write: |folder| journal(2).stage(&folder.join("journal.json")).is_ok_and(|staged| staged.enact().is_ok()),
        content: journal_content,
    },
    Case {
        name: "saved boot set",
        before: |folder| save_boot_set(folder, 1).unwrap(),
        write: |folder| save_boot_set(folder, 2).is_ok(),
        content: boot_set_content,
    },
    Case {
        name: "order to restore",
        before: |_| (),
        write: |folder| {
            Order::new(&folder.join("machine.toml"), Path::new("/snapshot"), "seal", Mode::Lazy, &[])
                .and_then(|order| order.write())
                .is_ok()
        },
        content: |folder| match Order::load(&folder.join("machine.toml")).unwrap() {
            Some(order) => {
                assert_eq!(order.seal, "seal");
                New
            }
            None => Old,
        },
    },
    Case {
        name: "notes of images",
        before: |folder| drop(images::write_at_rest(folder, &disk_notes(folder, 1)).unwrap()),
        write: |folder| images::write_at_rest(folder, &disk_notes(folder, 2)).is_ok(),
        content: |folder| match Notes::load(folder).unwrap().disks[0].disk.as_str() {
            "disk-1" => Old,
            "disk-2" => New,
            other => panic!("{other}"),
        },
    },
    Case {
        name: "record of a host reload",
        before: |folder| record("old").save(&folder.join("record/record.json")).unwrap(),
        write: |folder| record("new").save(&folder.join("record/record.json")).is_ok(),
        content: |folder| match Record::load(&folder.join("record/record.json")).unwrap().prepared_at.as_str() {
            "old" => Old,
            "new" => New,
            other => panic!("{other}"),
        },
    },
    Case {
        name: "event log",
        before: |folder| assert_eq!(EventLog::open("web", folder).unwrap().record(event("old")), 1),
        // A log that cannot be written does not stop its keeper: the records are written later.
        write: |folder| {
            let Ok(log) = EventLog::open("web", folder) else { return false };
            log.record(event("first"));
            log.record(event("new"));
            read_events(folder).is_ok_and(|records| records.last().is_some_and(|last| last.event == event("new")))
        },
        content: event_log_content,
    },
    Case {
        name: "NVRAM",
        before: |folder| fs::write(folder.join("mirror"), [7; 8192]).unwrap(),
        write: |folder| Nvram::open(&nvram(folder)).is_ok(),
        content: |folder| {
            assert_eq!(fs::read(folder.join("mirror")).unwrap(), [7; 8192]);
            match fs::read(nvram(folder).memory_file()) {
                Ok(bytes) => {
                    assert_eq!(bytes, [7; 8192]);
                    New
                }
                Err(_) => Old,
            }
        },
    },
    Case {
        name: "new mirror of NVRAM",
        before: |_| (),
        write: |folder| Nvram::open(&nvram(folder)).is_ok(),
        content: |folder| {
            let [memory, mirror] = [nvram(folder).memory_file(), folder.join("mirror")].map(fs::read);
            match (memory, mirror) {
                (Ok(memory), Ok(mirror)) => {
                    assert!(memory == [0; 8192] && mirror == memory);
                    New
                }
                // A mirror without content counts as new.
                (Err(_), Ok(mirror)) => {
                    assert!(mirror.iter().all(|byte| *byte == 0));
                    Old
                }
                (memory, mirror) => {
                    assert!(memory.is_err() && mirror.is_err());
                    Old
                }
            }
        },
    },
    Case {
        name: "disk on its way",
        before: make_arriving,
        write: |folder| land(folder).is_ok(),
        content: arriving_content,
    },
    Case {
        name: "owner and tag key of a memory folder",
        before: |_| (),
        write: |folder| prepare_folders("web", &folder.join("run"), &folder.join("memory")).is_ok(),
        content: |folder| match fs::read(folder.join("memory/tag.key")) {
            Ok(key) => {
                assert_eq!(key.len(), TAG_KEY_BYTES);
                let owner = fs::read_to_string(folder.join("memory/owner")).unwrap();
                assert_eq!(Path::new(&owner), fs::canonicalize(folder.join("run")).unwrap());
                New
            }
            Err(_) => Old,
        },
    },
    Case {
        name: "note of a parked guest",
        before: |_| (),
        write: |folder| park(folder).is_ok(),
        content: |folder| if is_parked(folder) { New } else { Old },
    },
    Case {
        name: "used note of a parked guest",
        before: |folder| park(folder).unwrap(),
        // A note that was used up before an error is not there any more.
        write: |folder| !parked::is_there(folder) || Parked::consume(folder).is_ok(),
        content: |folder| if is_parked(folder) { Old } else { New },
    },
    Case {
        name: "claim of a user",
        before: |folder| {
            fs::create_dir(folder.join("claims")).unwrap();
            fs::create_dir(folder.join("run")).unwrap();
        },
        write: |folder| claim_user(&folder.join("claims"), &folder.join("run")).is_ok(),
        content: |folder| {
            let is_claim = |path: &&PathBuf| path.file_name().unwrap().as_encoded_bytes()[0].is_ascii_digit();
            match names(&folder.join("claims")).iter().find(is_claim) {
                Some(claim) => {
                    let owner = fs::read_to_string(claim).unwrap();
                    assert_eq!(Path::new(&owner), fs::canonicalize(folder.join("run")).unwrap());
                    New
                }
                None => Old,
            }
        },
    },
];

/// State of a parked guest's devices.
const DEVICES: &[u8] = b"state of devices";

/// Whether there is a note of a parked guest, which then is whole.
fn is_parked(folder: &Path) -> bool {
    let note = parked::find(folder).unwrap();
    note.is_some_and(|note| {
        assert_eq!(note.state(folder).unwrap(), DEVICES);
        true
    })
}

fn park(folder: &Path) -> Result<(), parked::ParkedError> {
    let note = Parked {
        version: PARKED_VERSION,
        machine: "web".into(),
        stopped_at: SystemTime::UNIX_EPOCH,
        boot_id: "boot".into(),
        qemu_version: "7.2.9".into(),
        accelerator: "tcg".into(),
        incarnation: 1,
        generation: 1,
        hardware: Vec::new(),
        ram_bytes: 64 << 20,
        ram_sum: "00".into(),
        nvram: Vec::new(),
        state: parked::write_state(folder, DEVICES)?,
        vmgenid: None,
        guest_agent: false,
        started_with: None,
        write_through: Vec::new(),
        frozen: false,
        disks: vec![DiskIdentity { name: "root".into(), path: "/a".into(), format: "raw".into(), read_only: false }],
        images: Vec::new(),
    };
    note.commit(folder)
}

fn unit(number: u64) -> Vec<u8> {
    vec![number as u8 + 1; UNIT_BYTES as usize]
}

fn make_arriving(folder: &Path) {
    let sum = |bytes: &[u8]| blake3::hash(bytes).as_bytes()[..CHECKSUM_BYTES].try_into().unwrap();
    let units: Vec<_> = (0..UNITS).map(|number| (number, sum(&unit(number)))).collect();
    Arrival::make(&folder.join("disk"), UNITS * UNIT_BYTES, "s3://bucket/disk", &units).unwrap();
}

fn land(folder: &Path) -> std::io::Result<()> {
    let Some(arrival) = Arrival::open(&folder.join("disk"))? else { return Ok(()) };
    arrival.set_miss_policy(MissPolicy::Wait);
    while let Some((order, _)) = arrival.next(|| Some(())) {
        let bytes = unit(order.unit);
        assert!(arrival.land(order, &bytes)?);
    }
    Ok(())
}

fn arriving_content(folder: &Path) -> Content {
    let bytes = fs::read(folder.join("disk")).unwrap();
    let arrival = Arrival::open(&folder.join("disk")).unwrap();
    let missing_bytes = arrival.as_ref().map_or(0, |arrival| arrival.counts().missing_bytes);
    let whole =
        (0..UNITS).filter(|number| bytes.chunks(UNIT_BYTES as usize).nth(*number as usize) == Some(&unit(*number)));
    assert!(whole.count() as u64 >= UNITS - missing_bytes / UNIT_BYTES, "noted, and not there");
    if arrival.is_none() { New } else { Old }
}

fn journal(generation: u32) -> Journal {
    Journal { generation, ..Journal::new("web", 1) }
}

fn journal_content(folder: &Path) -> Content {
    match Journal::load(&folder.join("journal.json")).unwrap() {
        None => Old,
        Some(journal) if journal.generation == 1 => Old,
        Some(journal) => {
            assert_eq!(journal.generation, 2);
            New
        }
    }
}

fn disk_notes(folder: &Path, version: u32) -> Vec<DiskNote> {
    let image = folder.join("disk.raw");
    if !image.exists() {
        fs::write(&image, [1; 4096]).unwrap();
    }
    vec![DiskNote::of_open(&format!("disk-{version}"), vec![ImageFile::of(&image).unwrap()])]
}

/// A boot set whose memory is in another folder: the tests look only at the saved file.
fn boot_set(fill: Option<u8>) -> BootSet {
    let memory = tempfile::tempdir().unwrap();
    let set = BootSet::open(memory.path(), 1 << 20, Tagger::new(b"a key like noise")).unwrap();
    set.begin();
    if let Some(fill) = fill {
        set.read_from_image(DiskId(0), 3, Some(&[fill; BLOCK_BYTES]));
        set.ready();
    }
    set
}

fn save_boot_set(folder: &Path, fill: u8) -> Result<(), saved::SavedError> {
    let disks = images::at_rest(&disk_notes(folder, 1));
    saved::save(&folder.join("boot-set"), &boot_set(Some(fill)), &disks).map(drop)
}

fn boot_set_content(folder: &Path) -> Content {
    // Loading the saved boot set removes it.
    let copy = folder.with_extension("copy");
    fs::copy(folder.join("boot-set"), &copy).unwrap();
    let set = boot_set(None);
    let loaded = saved::load(&copy, &set, &disk_notes(folder, 1)).unwrap().unwrap();
    assert_eq!((loaded.blocks, loaded.void.len()), (1, 0));
    let mut first = 0;
    set.serve(DiskId(0), 3, AfterServing::Keep, &mut |bytes| first = bytes[0]).unwrap();
    if first == 1 { Old } else { New }
}

fn record(prepared_at: &str) -> Record {
    Record::new(prepared_at.to_owned(), Path::new("/run/hearth"), None, Vec::new())
}

fn event(message: &str) -> EventKind {
    EventKind::Error { message: message.to_owned() }
}

fn event_log_content(folder: &Path) -> Content {
    let messages: Vec<_> = read_events(folder).unwrap().into_iter().map(|record| record.event).collect();
    assert_eq!(messages[0], event("old"));
    if messages.last() == Some(&event("new")) { New } else { Old }
}

fn nvram(folder: &Path) -> NvramOptions {
    let mirror = Some((folder.join("mirror"), MirrorPolicy::Sync));
    NvramOptions { name: "log".into(), folder: folder.to_owned(), bytes: 8192, mirror, owner: None }
}

fn names(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { names(&path) } else { [path].into() }).collect()
}

/// Runs the write of a case in a child process.
fn child(case: &Case, folder: &Path, strace: &Strace<'_>, injection: Option<&Injection<'_>>) -> Output {
    let environment = [(CASE_VARIABLE, OsStr::new(case.name)), (FOLDER_VARIABLE, folder.as_os_str())];
    strace.run_test("the_child_writes", &environment, injection)
}

#[test]
#[ignore = "part of the other test: it runs in a process of its own"]
fn the_child_writes() {
    let Ok(name) = std::env::var(CASE_VARIABLE) else { return };
    let case = CASES.iter().find(|case| case.name == name).unwrap();
    let folder = PathBuf::from(std::env::var_os(FOLDER_VARIABLE).unwrap());
    exit(if (case.write)(&folder) { 0 } else { REFUSED });
}

/// A folder with only the old content.
fn fresh(case: &Case, home: &Path) -> PathBuf {
    let folder = home.join("folder");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder).unwrap();
    (case.before)(&folder);
    assert_eq!((case.content)(&folder), Old, "{}", case.name);
    folder
}

fn each_call_may_be_the_last(case: &Case) -> usize {
    let home = tempfile::tempdir().unwrap();
    let log = home.path().join("log");
    let folder = fresh(case, home.path());
    let everywhere = Strace { calls: CALLS, paths: &BTreeSet::new(), log: &log };
    let whole = child(case, &folder, &everywhere, None);
    assert!(whole.status.success(), "{}: {whole:?}", case.name);
    assert_eq!((case.content)(&folder), New, "{}", case.name);
    let at_rest = names(&folder);
    let paths = everywhere.paths_below(&folder);
    let strace = Strace { paths: &paths, ..everywhere };
    let folder = fresh(case, home.path());
    child(case, &folder, &strace, None);
    let mut tried = 0;
    for (call, count) in &strace.calls_made() {
        for number in 1..=*count {
            for what in ["error=ENOSPC", "error=EIO", "signal=KILL"] {
                if what != "signal=KILL" && NEVER_FAIL.contains(&call.as_str()) {
                    continue;
                }
                let folder = fresh(case, home.path());
                let before = names(&folder);
                let ended = child(case, &folder, &strace, Some(&Injection { call, number, what }));
                let at = format!("{}: {call} {number} {what}: {ended:?}", case.name);
                let content = (case.content)(&folder);
                match ended.status.code() {
                    Some(0) => assert_eq!(content, New, "{at}"),
                    Some(REFUSED) => {
                        let more: Vec<_> = names(&folder).difference(&before).cloned().collect();
                        assert!(more.iter().all(|path| at_rest.contains(path)), "{at}: left {more:?}");
                    }
                    _ => assert_eq!(ended.status.signal(), Some(9), "{at}"),
                }
                assert!((case.write)(&folder), "{at}: not even afterwards");
                assert_eq!((case.content)(&folder), New, "{at}: afterwards");
                assert_eq!(names(&folder), at_rest, "{at}: afterwards");
                tried += 1;
            }
        }
    }
    tried
}

#[test]
fn files_survive_any_failed_or_last_system_call() {
    let begun = SystemTime::now();
    for case in CASES {
        let tried = each_call_may_be_the_last(case);
        assert!(tried >= 5, "{}: {tried}", case.name);
        eprintln!("{}: {tried} ways to fail, {:?}", case.name, begun.elapsed().unwrap());
    }
}

/// A power cut may keep either of two new names. A disk without its note would count as complete.
#[test]
fn note_is_durable_before_its_disk() {
    let home = tempfile::tempdir().unwrap();
    let (log, folder) = (home.path().join("log"), home.path().join("folder"));
    fs::create_dir(&folder).unwrap();
    let strace = Strace { calls: CALLS, paths: &BTreeSet::new(), log: &log };
    let environment = [(FOLDER_VARIABLE, folder.as_os_str())];
    assert!(strace.run_test("the_child_makes_a_disk", &environment, None).status.success());
    let steps = [
        ("openat(".to_owned(), format!("\"{}\", O_WRONLY|O_CREAT", folder.join("disk.arrival").display())),
        ("fsync(".to_owned(), "/disk.arrival>".to_owned()),
        ("fsync(".to_owned(), format!("<{}>", folder.display())),
        ("openat(".to_owned(), format!("\"{}\", O_WRONLY|O_CREAT", folder.join("disk").display())),
    ];
    let lines = strace.lines();
    let found =
        steps.iter().map(|(call, of)| lines.iter().position(|line| line.starts_with(call) && line.contains(of)));
    let found: Vec<_> = found.collect();
    assert!(found.iter().all(Option::is_some) && found.is_sorted(), "{found:?} in {lines:#?}");
}

#[test]
#[ignore = "part of another test: it runs in a process of its own"]
fn the_child_makes_a_disk() {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        make_arriving(Path::new(&folder));
    }
}

/// A power cut loses what was not synced. So a block must not be noted as present before it is synced.
#[test]
fn fetched_blocks_are_durable_before_their_note() {
    let case = CASES.iter().find(|case| case.name == "disk on its way").unwrap();
    let home = tempfile::tempdir().unwrap();
    let log = home.path().join("log");
    let folder = fresh(case, home.path());
    let strace = Strace { calls: CALLS, paths: &BTreeSet::new(), log: &log };
    assert!(child(case, &folder, &strace, None).status.success());
    let (mut unsynced, mut written, mut noted) = (0, 0, 0);
    for line in strace.lines() {
        let is_call = |call: &str, of: &str| line.starts_with(&format!("{call}(")) && line.contains(of);
        if is_call("pwrite64", "/disk>") {
            (unsynced, written) = (unsynced + 1, written + 1);
        } else if is_call("fdatasync", "/disk>") {
            unsynced = 0;
        } else if is_call("pwrite64", "/disk.arrival>") || is_call("unlink", "/disk.arrival") {
            assert_eq!(unsynced, 0, "{line}");
            noted += 1;
        }
    }
    assert!(written >= UNITS && noted > 0, "{written} written, {noted} noted");
}
