//! Several machines with one command, one of which has a QEMU that nothing can follow.

use hearth_vmtest::{Disk, Drives, Output, Result, TestVm, TestVmBuilder};
use serde_json::Value;

use super::programs::no_successor;

fn builder(name: &str) -> TestVmBuilder {
    TestVm::busybox(name).memory_mib(256).disk(Disk::empty(16))
}

/// `name outcome` of each, by name.
fn outcomes(output: &Output) -> Vec<String> {
    let text = output.text();
    let decided = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut outcomes: Vec<_> =
        decided.map(|decided| format!("{} {}", word(&decided["name"]), word(&decided["outcome"]))).collect();
    outcomes.sort();
    outcomes
}

#[test]
fn a_failure_stops_the_rest_unless_they_are_to_go_on() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let qemu = no_successor(folder.path()).display().to_string();
    let first = builder("first").start()?;
    let second = builder("second").beside(&first).setting("qemu", qemu).start()?;
    let third = builder("third").beside(&first).start()?;
    let machines = [&first, &second, &third];
    for vm in machines {
        vm.wait_incarnation(1)?;
    }
    let nonces = machines.map(|vm| vm.nonce().expect("the guest answers"));
    let before = machines.map(|vm| vm.qemu_pid().expect("it has a QEMU"));

    let run = first.cli_output(&["rejuvenate", "--all"])?;
    let text = run.text();
    assert_eq!(run.status, 1, "{text}");
    assert!(text.contains("1/3  first: begins"), "{text}");
    let rows: Vec<_> = text.lines().skip_while(|line| !line.starts_with("NAME ")).collect();
    assert!(rows[1].starts_with("first ") && rows[1].contains("rejuvenated"), "{text}");
    assert!(rows[2].starts_with("second ") && rows[2].contains("failed") && rows[2].contains("no successor"), "{text}");
    assert!(rows[3].starts_with("third ") && rows[3].contains("not tried"), "{text}");
    assert_eq!(rows[4], "1 rejuvenated, 1 failed, 1 not tried");
    let after = machines.map(|vm| vm.qemu_pid().expect("it has a QEMU"));
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1..], before[1..]);

    let run = first.cli_output(&["rejuvenate", "--all", "--parallel", "3", "--keep-going", "--json"])?;
    assert_eq!(run.status, 1, "{}", run.text());
    assert_eq!(outcomes(&run), ["first rejuvenated", "second failed", "third rejuvenated"]);
    assert_ne!(third.qemu_pid()?, after[2]);
    for (vm, nonce) in machines.into_iter().zip(nonces) {
        assert_eq!(vm.nonce()?, nonce, "{}: it is the same guest", vm.name());
        vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    }
    Ok(())
}
