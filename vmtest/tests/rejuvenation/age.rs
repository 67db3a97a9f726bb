//! Reasons for a rejuvenation, and rejuvenations that the keeper starts by its policy.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use hearth_api::{Growth, MachineState};
use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, event};
use toml::Table;

use super::programs::no_successor;

/// Makes `link/bin/qemu-system-x86_64` lead to this QEMU and its firmware.
fn install(link: &Path, qemu: &Path) {
    let usr = qemu.parent().and_then(Path::parent).expect("QEMU lies in a bin folder");
    // Fails the first time, when there is no link.
    let _ = std::fs::remove_file(link);
    symlink(usr, link).expect("our own folder");
}

#[test]
fn newer_installed_qemu_is_a_reason_to_hop() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let link = folder.path().join("usr");
    install(&link, &artifacts::installed_qemu()?);
    let program = link.join("bin/qemu-system-x86_64");
    let vm = TestVm::busybox("age").disk(Disk::empty(16)).setting("qemu", program.display().to_string()).boot()?;
    let nonce = vm.nonce()?;
    let age = vm.age()?;
    let old = Some(age.qemu.version.clone());
    assert_eq!((&age.qemu.installed_version, &age.reasons[..]), (&old, &[][..]), "{age:?}");
    assert!(age.hindrance.is_none(), "{age:?}");
    let Growth { at_start: Some(at_start), now: Some(now) } = age.qemu.own_bytes else { panic!("{age:?}") };
    // The boot has filled the emulator's cache of translated code.
    assert!(now > at_start, "{age:?}");
    assert!(now < 512 << 20, "the guest's RAM must not count as QEMU's own: {age:?}");
    assert!(age.qemu.descriptors.now >= Some(10), "{age:?}");

    install(&link, &artifacts::qemu_10()?);
    let age = vm.age()?;
    let (new, reason) = (age.qemu.installed_version, &age.reasons[0]);
    assert_ne!(old, new);
    assert!(reason.starts_with("QEMU 10.") && reason.contains("is installed"), "{reason}");
    let page = vm.cli(&["age", "age"])?;
    assert!(page.contains(reason), "{page}");

    // The machine remembers QEMU's size at its start, also under the next keeper.
    vm.restart_keeper()?;
    vm.wait_running()?;
    assert_eq!(vm.age()?.qemu.own_bytes.at_start, Some(at_start));

    vm.rejuvenate()?;
    let age = vm.age()?;
    assert_eq!((Some(age.qemu.version), age.qemu.generation, age.reasons), (new, 2, Vec::new()));
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    Ok(())
}

fn hop_every_second() -> Table {
    Table::from_iter([("every".to_owned(), "1s".into())])
}

#[test]
fn keeper_replaces_an_old_qemu_by_itself() -> Result<()> {
    let vm = TestVm::busybox("policy").disk(Disk::empty(16)).setting("rejuvenate", hop_every_second()).start()?;
    vm.wait_boots(1)?;
    vm.wait_event("a hop by policy", event!(Rejuvenated))?;
    let why = vm.wait_event("the hop's reason", event!(RejuvenationDue { why } => why))?;
    assert!(why.ends_with("rejuvenate.every is 1 s"), "{why}");
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    assert_eq!(vm.events().iter().find_map(event!(Request)), None);
    assert_eq!(vm.status()?.incarnation, 1);
    Ok(())
}

/// A time window that begins `hours_from_now`, in the host's local time.
fn window(hours_from_now: i32, hours: i32) -> String {
    let hour = Command::new("date").arg("+%H:%M").output().expect("every host has date(1)").stdout;
    let (hour, minute) = std::str::from_utf8(&hour).ok().and_then(|time| time.trim().split_once(':')).expect("HH:MM");
    let from = hour.parse::<i32>().expect("an hour") + hours_from_now;
    format!("{:02}:{minute}-{:02}:{minute}", from.rem_euclid(24), (from + hours).rem_euclid(24))
}

/// Three machines whose QEMUs grow alike. The last one started checks last: when it has acted, the others have checked.
#[test]
fn growth_causes_hop_within_policy_and_window() -> Result<()> {
    let policy = |grown_mib: i64, window: String| {
        Table::from_iter([("rss_growth_mib".to_owned(), grown_mib.into()), ("window".to_owned(), window.into())])
    };
    let machine = |name: &str, policy: Table| {
        TestVm::busybox(name).memory_mib(256).disk(Disk::empty(16)).setting("rejuvenate", policy)
    };
    let closed = machine("closed", policy(1, window(2, 1))).boot()?;
    let patient = machine("patient", policy(1_000_000, window(-1, 2))).beside(&closed).boot()?;
    let open = machine("open", policy(1, window(-1, 2))).beside(&closed).start()?;
    let why = open.wait_event("the hop's reason", event!(RejuvenationDue { why } => why))?;
    assert!(why.ends_with("rejuvenate.rss_growth_mib is 1"), "{why}");
    open.wait_event("a hop by policy", event!(Rejuvenated))?;
    for vm in [&closed, &patient] {
        assert_eq!(vm.events().iter().find_map(event!(RejuvenationDue)), None);
    }
    // One of these had a reason, but its window was closed.
    let reasons = closed.age()?.reasons.concat();
    assert!(reasons.contains("rejuvenate.rss_growth_mib is 1"), "{reasons}");
    assert_eq!(patient.age()?.reasons, [""; 0]);
    Ok(())
}

#[test]
fn failed_hop_by_policy_is_reported() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let qemu = no_successor(folder.path()).display().to_string();
    let vm = TestVm::busybox("refused").disk(Disk::empty(16)).setting("qemu", qemu);
    let vm = vm.setting("rejuvenate", hop_every_second()).start()?;
    vm.wait_boots(1)?;
    let (why, guest_lost) =
        vm.wait_event("a failure", event!(RejuvenationFailed { why, guest_lost, .. } => (why, guest_lost)))?;
    assert!(why.contains("no successor") && !guest_lost, "{why}");
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    let status = vm.status()?;
    assert_eq!((status.incarnation, status.state), (1, MachineState::Running), "{status:?}");
    Ok(())
}
