//! What speaks for a rejuvenation, and those that the keeper does by itself.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts};
use serde_json::Value;
use toml::Table;

use super::programs::no_successor;

fn number(age: &Value, what: &str, when: &str) -> u64 {
    age["qemu"][what][when].as_u64().unwrap_or_else(|| panic!("no {what} {when} in {age}"))
}

/// `link/bin/qemu-system-x86_64` is this QEMU from now on, with its firmware.
fn install(link: &Path, qemu: &Path) {
    let usr = qemu.parent().and_then(Path::parent).expect("QEMU lies in a bin folder");
    // Fails only the first time.
    let _ = std::fs::remove_file(link);
    symlink(usr, link).expect("our own folder");
}

#[test]
fn a_newer_installed_qemu_speaks_for_a_hop_until_it_is_done() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let link = folder.path().join("usr");
    install(&link, &artifacts::installed_qemu()?);
    let program = link.join("bin/qemu-system-x86_64");
    let vm = TestVm::busybox("age").disk(Disk::empty(16)).setting("qemu", program.display().to_string()).boot()?;
    let nonce = vm.nonce()?;
    let age = vm.age()?;
    let old = age["qemu"]["version"].clone();
    assert_eq!((&age["qemu"]["installed_version"], &age["reasons"]), (&old, &Value::Array(Vec::new())), "{age}");
    assert!(age["hindrance"].is_null(), "{age}");
    // A guest that booted under emulation has filled QEMU's cache of translated code.
    assert!(number(&age, "own_bytes", "now") > number(&age, "own_bytes", "at_start"), "{age}");
    assert!(number(&age, "own_bytes", "now") < 512 << 20, "the guest's RAM is not QEMU's own: {age}");
    assert!(number(&age, "descriptors", "now") >= 10, "{age}");

    install(&link, &artifacts::qemu_10()?);
    let age = vm.age()?;
    let new = age["qemu"]["installed_version"].clone();
    assert_ne!(old, new);
    let reason = age["reasons"][0].as_str().unwrap_or_default();
    assert!(reason.starts_with("QEMU 10.") && reason.contains("is installed"), "{age}");
    let page = vm.cli(&["age", "age"])?;
    assert!(page.contains(reason), "{page}");

    // Its start is remembered by the machine, not by its keeper.
    let at_start = number(&age, "own_bytes", "at_start");
    vm.restart_keeper()?;
    vm.wait_running()?;
    assert_eq!(number(&vm.age()?, "own_bytes", "at_start"), at_start);

    vm.rejuvenate()?;
    let age = vm.age()?;
    assert_eq!((&age["qemu"]["version"], &age["qemu"]["generation"]), (&new, &Value::from(2)), "{age}");
    assert_eq!(age["reasons"], Value::Array(Vec::new()), "{age}");
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    Ok(())
}

fn every_second() -> Table {
    Table::from_iter([("every".to_owned(), "1s".into())])
}

#[test]
fn a_keeper_replaces_an_old_qemu_by_itself() -> Result<()> {
    let vm = TestVm::busybox("policy").disk(Disk::empty(16)).setting("rejuvenate", every_second()).start()?;
    vm.wait_boots(1)?;
    vm.wait_event("a hop that nobody asked for", |event| event["kind"] == "rejuvenated")?;
    let due = vm.wait_event("why", |event| event["kind"] == "rejuvenation_due")?;
    assert!(due["why"].as_str().is_some_and(|why| why.ends_with("rejuvenate.every is 1 s")), "{due}");
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    assert!(vm.events().iter().all(|event| event["kind"] != "request"), "{:?}", vm.events());
    assert_eq!(vm.status()?["incarnation"], 1);
    Ok(())
}

/// A window of an hour or two, that begins so many hours from now by the host's local time.
fn window(hours_from_now: i32, hours: i32) -> String {
    let hour = Command::new("date").arg("+%H:%M").output().expect("it tells the time").stdout;
    let (hour, minute) = std::str::from_utf8(&hour).ok().and_then(|time| time.trim().split_once(':')).expect("HH:MM");
    let from = hour.parse::<i32>().expect("an hour") + hours_from_now;
    format!("{:02}:{minute}-{:02}:{minute}", from.rem_euclid(24), (from + hours).rem_euclid(24))
}

/// Three machines whose QEMUs grow alike. The last one that is started looks last: when it has acted the others have looked.
#[test]
fn growth_brings_a_hop_where_the_policy_says_so_and_when() -> Result<()> {
    let policy = |grown_mib: i64, window: String| {
        Table::from_iter([("rss_growth_mib".to_owned(), grown_mib.into()), ("window".to_owned(), window.into())])
    };
    let machine = |name: &str, policy: Table| {
        TestVm::busybox(name).memory_mib(256).disk(Disk::empty(16)).setting("rejuvenate", policy)
    };
    let closed = machine("closed", policy(1, window(2, 1))).boot()?;
    let patient = machine("patient", policy(1_000_000, window(-1, 2))).beside(&closed).boot()?;
    let open = machine("open", policy(1, window(-1, 2))).beside(&closed).start()?;
    let due = open.wait_event("why", |event| event["kind"] == "rejuvenation_due")?;
    assert!(due["why"].as_str().is_some_and(|why| why.ends_with("rejuvenate.rss_growth_mib is 1")), "{due}");
    open.wait_event("a hop that nobody asked for", |event| event["kind"] == "rejuvenated")?;
    for vm in [&closed, &patient] {
        assert!(
            vm.events().iter().all(|event| event["kind"] != "rejuvenation_due"),
            "{}: {:?}",
            vm.name(),
            vm.events()
        );
    }
    // Of these one had reason to, and it was not the time.
    let reasons = |vm: &TestVm| vm.age().map(|age| age["reasons"].to_string());
    assert!(reasons(&closed)?.contains("rejuvenate.rss_growth_mib is 1"), "{}", reasons(&closed)?);
    assert_eq!(reasons(&patient)?, "[]");
    Ok(())
}

#[test]
fn a_keeper_whose_own_attempt_fails_says_so_and_leaves_the_guest() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let qemu = no_successor(folder.path()).display().to_string();
    let vm = TestVm::busybox("refused").disk(Disk::empty(16)).setting("qemu", qemu);
    let vm = vm.setting("rejuvenate", every_second()).start()?;
    vm.wait_boots(1)?;
    let failed = vm.wait_event("a failure", |event| event["kind"] == "rejuvenation_failed")?;
    assert!(failed["why"].as_str().is_some_and(|why| why.contains("no successor")), "{failed}");
    assert_eq!(failed["guest_lost"], false);
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    let status = vm.status()?;
    assert_eq!((&status["incarnation"], &status["state"]), (&Value::from(1), &Value::from("running")), "{status}");
    Ok(())
}
