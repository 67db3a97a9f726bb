//! Several machines with one command, among them one whose QEMU has no usable successor and one with a device that ties it to its
//! QEMU.

use hearth_vmtest::{Disk, Drives, Output, Result, TestVm, TestVmBuilder};
use serde_json::Value;

use super::hops::last_pause_ms;
use super::programs::no_successor;

fn builder(name: &str) -> TestVmBuilder {
    TestVm::busybox(name).memory_mib(256).disk(Disk::empty(16))
}

/// `name outcome` of each machine, sorted by name, and the plan's verdict.
fn outcomes(output: &Output) -> (Vec<String>, Option<Value>) {
    let text = output.text();
    let mut lines: Vec<_> =
        text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON")).collect();
    let verdict = lines.pop_if(|line| line.get("verdict").is_some()).map(|mut line| line["verdict"].take());
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut outcomes: Vec<_> =
        lines.iter().map(|decided| format!("{} {}", word(&decided["name"]), word(&decided["outcome"]))).collect();
    outcomes.sort();
    (outcomes, verdict)
}

fn figure(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or_else(|| panic!("no {name} in {of}"))
}

#[test]
fn failure_stops_the_rest_without_keep_going() -> Result<()> {
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
    assert!(text.contains("1/3  first: started"), "{text}");
    let rows: Vec<_> = text.lines().skip_while(|line| !line.starts_with("NAME ")).collect();
    assert!(rows[1].starts_with("first ") && rows[1].contains("rejuvenated"), "{text}");
    assert!(rows[2].starts_with("second ") && rows[2].contains("failed") && rows[2].contains("no successor"), "{text}");
    assert!(rows[3].starts_with("third ") && rows[3].contains("not tried"), "{text}");
    assert_eq!(rows[4], "1 rejuvenated, 1 failed, 1 not tried");
    let after = machines.map(|vm| vm.qemu_pid().expect("it has a QEMU"));
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1..], before[1..]);

    let plan: Value = serde_json::from_str(&first.cli(&["rejuvenate", "--plan", "--json"])?).expect("JSON");
    let run = first.cli_output(&["rejuvenate", "--all", "--parallel", "3", "--keep-going", "--json"])?;
    assert_eq!(run.status, 1, "{}", run.text());
    let (decided, verdict) = outcomes(&run);
    assert_eq!(decided, ["first rejuvenated", "second failed", "third rejuvenated"]);
    // Compare the plan's prediction for three at a time with the measurement.
    let verdict = verdict.expect("one hop was known");
    let predicted =
        plan["predictions"].as_array().and_then(|rows| rows.iter().find(|row| row["n"] == 3)).expect("a row");
    assert_eq!((&verdict["at_a_time"], &verdict["predicted_ms"]), (&3.into(), &predicted["d_w_ms"]), "{verdict}");
    let pauses = [&first, &third].map(|vm| last_pause_ms(vm).expect("it runs"));
    let measured = (pauses[0] + pauses[1]) / 2.0;
    assert!((figure(&verdict, "measured_ms") - measured).abs() < 1e-6, "{verdict}: {pauses:?}");
    let off = (figure(&verdict, "predicted_ms") / measured - 1.0).abs() * 100.0;
    assert!((figure(&verdict, "error_pct") - off).abs() < 1e-6, "{verdict}: {off}");
    assert_ne!(third.qemu_pid()?, after[2]);
    for (vm, nonce) in machines.into_iter().zip(nonces) {
        assert_eq!(vm.nonce()?, nonce, "{}: it is the same guest", vm.name());
        vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    }
    Ok(())
}

/// A skipped machine is not a failure and does not delay those after it.
#[test]
fn machine_tied_to_its_qemu_is_skipped() -> Result<()> {
    let nvram = [("device", "pmem"), ("name", "log"), ("size", "4MiB")];
    let nvram = toml::Table::from_iter(nvram.map(|(key, value)| (key.to_owned(), value.into())));
    let first = TestVm::busybox("bound").memory_mib(256).setting("nvram", vec![nvram]).start()?;
    let second = builder("free").beside(&first).start()?;
    first.wait_incarnation(1)?;
    second.wait_incarnation(1)?;
    let before = [&first, &second].map(|vm| vm.qemu_pid().expect("it has a QEMU"));
    let text = first.cli(&["rejuvenate", "--all"])?;
    assert!(text.contains("bound: skipped, cannot rejuvenate: another QEMU cannot take over nvram log"), "{text}");
    assert!(text.contains("\n1 rejuvenated, 0 failed, 0 not tried, 1 skipped"), "{text}");
    let run = first.cli_output(&["rejuvenate", "--all", "--json"])?;
    assert_eq!((run.status, outcomes(&run).0), (0, vec!["bound skipped".to_owned(), "free rejuvenated".to_owned()]));
    assert_eq!(first.qemu_pid()?, before[0]);
    assert_ne!(second.qemu_pid()?, before[1]);
    Ok(())
}
