//! Connections over hops: the same tap, and the same connection to passt, pass from one QEMU to the next.

use std::net::SocketAddr;

use hearth_vmtest::echo::{self, Echo};
use hearth_vmtest::net::{Tap, free_port, passt_works};
use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts};
use toml::Value;

use super::failures::{check, impostor};
use super::programs::no_successor;

/// In place of a new QEMU, when it has begun with the guest's state: its manner, in which phases the hop fails then, and why.
const FAILURES: [(&str, &str, &str); 4] = [
    ("drops-disks", "hand", "one of the two QEMUs is not connected"),
    ("dies", "hand|resume", "the new QEMU ended"),
    ("fails-with-all", "resume", "the new QEMU refused the guest's state"),
    ("hangs-with-all", "resume", "the new QEMU hangs"),
];

/// Hops to and fro, those that fail before the guest stands still, while it does and when the new QEMU has all of it, one in whose
/// middle the keeper is killed, and the next keeper's: one connection, which is never idle, outlives them all.
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
    let order = vm.cli_output(&["rejuvenate", vm.name()])?;
    assert_ne!(order.status, 0, "the keeper should have died: {}", order.text());
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
fn a_connection_on_a_tap_goes_over_a_hop() -> Result<()> {
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

/// Its networks are shut already when it is asked for its guest.
#[test]
fn an_old_qemu_that_does_not_give_its_guest_away_keeps_the_connection() -> Result<()> {
    let Some(tap) = Tap::make() else {
        eprintln!("skipped: this user cannot make network interfaces here");
        return Ok(());
    };
    // Of the devices that QEMU hands over in no version.
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
        let why = check(&vm, &qemu, "prepare", "the old QEMU does not give its guest away")?;
        assert!(why.contains("ivshmem"), "{why}");
        talk.goes_on();
    }
    assert_eq!(talk.lost(), [""; 0]);
    Ok(())
}

#[test]
fn a_connection_through_passt_goes_over_a_hop() -> Result<()> {
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
