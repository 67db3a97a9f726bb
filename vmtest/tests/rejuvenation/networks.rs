//! Connections over hops: a tap, or the connection to passt, passes from one QEMU to the next.

use std::net::SocketAddr;

use hearth_vmtest::echo::{self, Echo};
use hearth_vmtest::net::{Tap, free_port, passt_works};
use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts};
use toml::Value;

use super::failures::{check, impostor};
use super::programs::no_successor;

/// Behaviours of a failing new QEMU, the phases in which the hop may fail (`a|b`), and the reason.
const FAILURES: [(&str, &str, &str); 4] = [
    // If it is slow to drop them, the old QEMU has sent all before, and the new one seems to hang.
    ("drops-disks", "hand|resume", "QEMU"),
    ("dies", "hand|resume", "the new QEMU ended"),
    ("fails-with-all", "resume", "the new QEMU refused the guest's state"),
    ("hangs-with-all", "resume", "the new QEMU hangs"),
];

/// Asserts that one busy connection survives everything: hops between versions, hops that fail before the pause, during it and
/// after the new QEMU has all state, a keeper killed in the middle of a hop, and a hop by the next keeper.
fn keeps_its_connection(vm: &TestVm, address: SocketAddr) -> Result<()> {
    echo::serve(vm)?;
    let nonce = vm.nonce()?;
    let talk = Echo::begin(address);
    let folder = tempfile::tempdir().expect("a folder");
    let (old, new) = (artifacts::installed_qemu()?, artifacts::qemu_10()?);
    for qemu in [&new, &old, &old] {
        let hop = vm.rejuvenate_to(qemu)?;
        assert_eq!(hop.status, 0, "{}", hop.text());
        talk.goes_on();
    }
    check(vm, &no_successor(folder.path()), "launch", "no successor")?;
    talk.goes_on();
    for (manner, phases, why) in FAILURES {
        check(vm, &impostor(folder.path(), manner), phases, why)?;
        talk.goes_on();
    }
    vm.restart_keeper_with(&[("HEARTH_DRILL_DIE_AFTER", "hand")])?;
    vm.wait_running()?;
    let hop = vm.cli_output(&["rejuvenate", vm.name()])?;
    assert_ne!(hop.status, 0, "the keeper should have died: {}", hop.text());
    vm.wait_keeper_end()?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    talk.goes_on();
    vm.rejuvenate()?;
    talk.goes_on();
    assert_eq!(talk.lost(), [""; 0]);
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    Ok(())
}

#[test]
fn tap_connection_survives_hops() -> Result<()> {
    let Some(tap) = Tap::make() else {
        eprintln!("skipped: this user cannot make network interfaces here");
        return Ok(());
    };
    let vm = TestVm::busybox("tap")
        .for_both_qemus()
        .disk(Disk::empty(16))
        .net([("kind", "tap".into()), ("ifname", tap.name().into())])
        .boot()?;
    vm.sh(&tap.guest_set_up())?;
    keeps_its_connection(&vm, SocketAddr::from((tap.guest_address(), echo::PORT)))
}

/// The old QEMU refuses to give its guest away when its networks are already closed.
#[test]
fn connection_survives_refusal_by_the_old_qemu() -> Result<()> {
    let Some(tap) = Tap::make() else {
        eprintln!("skipped: this user cannot make network interfaces here");
        return Ok(());
    };
    // A device that no QEMU can migrate.
    let device = [
        "-object",
        "memory-backend-ram,id=shared,size=1M,share=on",
        "-device",
        "ivshmem-plain,memdev=shared,master=off",
    ];
    let vm = TestVm::busybox("keeps")
        .for_both_qemus()
        .disk(Disk::empty(16))
        .setting("extra_qemu_args", device.map(Value::from).to_vec());
    let vm = vm.net([("kind", "tap".into()), ("ifname", tap.name().into())]).boot()?;
    vm.sh(&tap.guest_set_up())?;
    echo::serve(&vm)?;
    let talk = Echo::begin(SocketAddr::from((tap.guest_address(), echo::PORT)));
    for qemu in [artifacts::installed_qemu()?, artifacts::qemu_10()?] {
        let why = check(&vm, &qemu, "prepare", "the old QEMU does not hand over its guest")?;
        assert!(why.contains("ivshmem"), "{why}");
        talk.goes_on();
    }
    assert_eq!(talk.lost(), [""; 0]);
    Ok(())
}

#[test]
fn passt_connection_survives_hops() -> Result<()> {
    if !passt_works() {
        eprintln!("skipped: passt does not run here");
        return Ok(());
    }
    let port = free_port();
    let forward = Value::Array(vec![format!("127.0.0.1:{port}:{}", echo::PORT).into()]);
    let vm = TestVm::busybox("passt")
        .for_both_qemus()
        .disk(Disk::empty(16))
        .net([("kind", "passt".into()), ("forward", forward)])
        .boot()?;
    vm.sh("net-up")?;
    keeps_its_connection(&vm, SocketAddr::from(([127, 0, 0, 1], port)))
}
