//! Upgrades of the keeper: another program takes over in the same process. The guest notices only a pause of its disks, also if
//! the other program fails.

use std::path::{Path, PathBuf};

use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, event, known, write_program};
use serde_json::Value;

/// The guest, its QEMU and the process of its keeper.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    nonce: String,
    qemu: Option<u32>,
    keeper: u32,
}

fn identity(vm: &TestVm) -> Result<Identity> {
    let status = vm.wait_running()?;
    Ok(Identity { nonce: vm.nonce()?, qemu: status.qemu.map(|qemu| qemu.pid), keeper: status.keeper.pid })
}

/// The program that the keeper's process runs.
fn program_of(vm: &TestVm) -> PathBuf {
    let pid = vm.keeper_pid().expect("it has a keeper");
    std::fs::read_link(format!("/proc/{pid}/exe")).expect("the keeper runs")
}

/// Links Hearth to this path. A link avoids writing a file that is about to be run.
fn install(place: &Path) {
    // Fails the first time, when there is none.
    let _ = std::fs::remove_file(place);
    std::fs::hard_link(artifacts::hearth().expect("it is built"), place).expect("a folder beside it");
}

fn folder_beside_hearth() -> tempfile::TempDir {
    let hearth = artifacts::hearth().expect("it is built");
    tempfile::tempdir_in(hearth.parent().expect("it lies in a folder")).expect("a folder")
}

#[test]
fn guest_under_load_survives_keeper_upgrades() -> Result<()> {
    let folder = folder_beside_hearth();
    let place = folder.path().join("hearth");
    let vm = TestVm::busybox_with_fio("upgraded").disk(Disk::empty(48)).boot()?;
    let before = identity(&vm)?;
    known::start_fio(&vm)?;
    install(&place);
    let named = place.display().to_string();
    vm.cli(&["upgrade-keeper", vm.name(), "--program", &named])?;
    assert_eq!((identity(&vm)?, program_of(&vm)), (before, place.clone()));
    // A package's upgrade replaces the file.
    let before = identity(&vm)?;
    install(&place);
    vm.cli(&["upgrade-keeper", vm.name()])?;
    assert_eq!((identity(&vm)?, program_of(&vm)), (before, place));
    known::fio_ends_well(&vm)?;
    vm.has_no_disk_errors()?;
    // The keeper notices the end of a QEMU that the earlier program started.
    vm.reset()?;
    vm.wait_incarnation(2)?;
    assert_eq!(vm.stop()?.code(), Some(0));
    Ok(())
}

/// Asserts that an upgrade to this program fails with this message; the keeper stays the same, and the guest does not notice.
#[track_caller]
fn check(vm: &TestVm, program: &Path, expect: &str) -> Result<()> {
    let before = identity(vm)?;
    let attempt = vm.cli_output(&["upgrade-keeper", vm.name(), "--program", &program.display().to_string()])?;
    assert!(attempt.status == 1 && attempt.text().contains(expect), "{}", attempt.text());
    assert_eq!(identity(vm)?, before);
    assert_eq!(program_of(vm), artifacts::hearth()?.canonicalize().expect("it is built"));
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1").map(drop)
}

/// A journal by the first version of Hearth.
const FIRST_JOURNAL: &str = include_str!("../../../crates/recovery/testdata/journal-1.json");

/// Removes the keys from `journal` that `first` does not have.
fn make_first(first: &Value, journal: &mut Value) {
    if let (Some(first), Some(journal)) = (first.as_object(), journal.as_object_mut()) {
        journal.retain(|key, _| first.contains_key(key));
        journal.iter_mut().for_each(|(key, value)| make_first(&first[key], value));
    }
}

#[test]
fn keeper_takes_over_from_the_first_version() -> Result<()> {
    let vm = TestVm::busybox("first").disk(Disk::empty(16)).running()?;
    let before = identity(&vm)?;
    vm.kill_keeper()?;
    let path = vm.runtime_root().join("first/journal.json");
    let written = std::fs::read_to_string(&path).expect("the journal");
    let first = serde_json::from_str(FIRST_JOURNAL).expect("JSON");
    let mut journal: Value = serde_json::from_str(&written).expect("JSON");
    make_first(&first, &mut journal);
    assert!(journal.get("saving").is_none() && journal["qemu"].get("vmgenid").is_none(), "{journal}");
    std::fs::write(&path, journal.to_string()).expect("it is written");
    vm.restart_keeper()?;
    let after = identity(&vm)?;
    assert_eq!((after.nonce, after.qemu), (before.nonce, before.qemu));
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    vm.reboot()?;
    vm.wait_incarnation(2)?;
    vm.rejuvenate()
}

/// Adds an unknown key to each table of `journal`.
fn make_later(journal: &mut Value) {
    match journal {
        Value::Object(fields) => {
            fields.values_mut().for_each(make_later);
            fields.insert("future".into(), "unknown".into());
        }
        Value::Array(items) => items.iter_mut().for_each(make_later),
        _ => {}
    }
}

/// This happens when an upgrade is reverted.
#[test]
fn keeper_takes_over_from_a_later_version() -> Result<()> {
    let vm = TestVm::busybox("later").disk(Disk::empty(16)).running()?;
    let before = identity(&vm)?;
    vm.kill_keeper()?;
    let [journal, events] = ["journal.json", "events.jsonl"].map(|name| vm.runtime_root().join("later").join(name));
    let written = std::fs::read_to_string(&journal).expect("the journal");
    let mut later: Value = serde_json::from_str(&written).expect("JSON");
    make_later(&mut later);
    std::fs::write(&journal, later.to_string()).expect("it is written");
    let log = std::fs::read_to_string(&events).expect("the events");
    let mut unknown: Value = serde_json::from_str(log.lines().last().expect("one at least")).expect("JSON");
    let sequence = unknown["sequence"].as_u64().expect("a number") + 1;
    (unknown["sequence"], unknown["kind"]) = (sequence.into(), "guest_teleported".into());
    std::fs::write(&events, format!("{log}{unknown}\n")).expect("it is written");
    vm.restart_keeper()?;
    let after = identity(&vm)?;
    assert_eq!((&after.nonce, &after.qemu), (&before.nonce, &before.qemu));
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    let events_text = vm.cli(&["events", vm.name()])?;
    assert!(events_text.contains("guest_teleported: event from another version of Hearth"), "{events_text}");
    let started = vm.wait_event("the keeper's start", event!(|event| Started if event.sequence > sequence))?;
    assert_eq!(started.sequence, sequence + 1, "the log continues after the unknown event");

    // A journal of another version is refused, since its keys may mean something else; the guest lives on meanwhile.
    vm.kill_keeper()?;
    later["version"] = 2.into();
    std::fs::write(&journal, later.to_string()).expect("it is written");
    vm.restart_keeper()?;
    assert_eq!(vm.wait_keeper_end()?.code(), Some(1));
    let log = vm.keeper_log();
    assert!(log.contains("version 2, but this keeper knows only 1; use the keeper that wrote it"), "{log}");
    std::fs::write(&journal, written).expect("it is written");
    vm.restart_keeper()?;
    let after = identity(&vm)?;
    assert_eq!((after.nonce, after.qemu), (before.nonce, before.qemu));

    // The clock error that a hop left is kept for the next hop, also under another keeper.
    vm.rejuvenate()?;
    let clock_debt = || {
        let written = std::fs::read(&journal).expect("the journal");
        serde_json::from_slice::<Value>(&written).expect("JSON")["clock_debt"].as_i64()
    };
    let owed = clock_debt();
    assert!(owed.is_some_and(|owed| owed != 0), "{owed:?}");
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    identity(&vm)?;
    assert_eq!(clock_debt(), owed);
    Ok(())
}

#[test]
fn unusable_keeper_program_leaves_machine_unchanged() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let hearth = artifacts::hearth()?.display().to_string();
    let program = |name: &str, script: &str| {
        let path = folder.path().join(name);
        write_program(&path, &format!("#!/bin/sh\n{script}\n"));
        path
    };
    let vm = TestVm::busybox("kept").disk(Disk::empty(16)).running()?;
    check(&vm, Path::new("/nowhere/hearth"), "program /nowhere/hearth does not exist")?;
    check(&vm, &program("other", "echo fine"), "is not hearth: it answers \"fine\"")?;
    check(&vm, &program("older", "echo journal: version 1, I know 0 >&2; exit 1"), "journal: version 1, I know 0")?;
    assert_eq!(vm.events().iter().find_map(event!(KeeperHandsOver)), None, "no hand-over began");
    // Both of these claim to be usable.
    let vanishes = format!("rm $0; exec {hearth} \"$@\"");
    check(&vm, &program("vanishes", &vanishes), "cannot start ")?;
    let confused = format!("case \"$*\" in *--take-over) exec {hearth} \"$@\";; esac; exec {hearth} run /nowhere.toml");
    check(&vm, &program("confused", &confused), "/nowhere.toml")?;
    assert_eq!(vm.stop()?.code(), Some(0));
    Ok(())
}

/// A guest's program and kernel may be removed while it runs, with a package or an unmounted file system.
#[test]
fn keeper_takes_over_without_program_and_kernel() -> Result<()> {
    let vm = TestVm::busybox("bereft").disk(Disk::empty(16)).running()?;
    let before = identity(&vm)?;
    let file = vm.config_file();
    let text = std::fs::read_to_string(file).expect("its configuration");
    let mut bereft: toml::Table = text.parse().expect("it is TOML");
    bereft.insert("qemu".into(), "/nowhere/qemu".into());
    let boot = bereft["boot"].as_table_mut().expect("it boots a kernel");
    boot.insert("kernel".into(), "/nowhere/vmlinuz".into());
    std::fs::write(file, bereft.to_string()).expect("it is written");
    vm.restart_keeper()?;
    let after = identity(&vm)?;
    assert_eq!((&after.nonce, &after.qemu), (&before.nonce, &before.qemu));
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    // The keeper can be upgraded, but QEMU cannot be replaced.
    vm.cli(&["upgrade-keeper", vm.name()])?;
    assert_eq!(identity(&vm)?, after);
    let hop = vm.cli_output(&["rejuvenate", vm.name()])?;
    assert!(hop.status == 1 && hop.text().contains("/nowhere/qemu: there is no such program"), "{}", hop.text());
    std::fs::write(file, text).expect("it is written");
    vm.restart_keeper()?;
    assert_eq!(identity(&vm)?.nonce, before.nonce);
    vm.rejuvenate()
}

#[test]
fn guest_that_dies_during_upgrade_reboots_warm() -> Result<()> {
    let vm = TestVm::busybox("between").disk(Disk::empty(16)).running()?;
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("hearth");
    let hearth = artifacts::hearth()?;
    let qemu = vm.qemu_pid()?.as_raw_nonzero();
    // The script waits until the keeper has noticed: a successor that took over sooner would find a dead QEMU, and start cold.
    let kill = format!("kill -KILL {qemu}; while kill -0 {qemu} 2>/dev/null; do sleep 0.01; done");
    write_program(&program, &format!("#!/bin/sh\n{kill}\nexec {} \"$@\"\n", hearth.display()));
    let upgrade = vm.cli_output(&["upgrade-keeper", vm.name(), "--program", &program.display().to_string()])?;
    assert_eq!(upgrade.status, 1, "{}", upgrade.text());
    vm.wait_incarnation(2)?;
    let warm = event!(|event| IncarnationStarted { warm, .. } if event.incarnation == 2 => warm);
    assert!(vm.wait_event("the next start", warm)?);
    Ok(())
}
