//! Hundreds of hops and of keeper upgrades in a row, under a verifying disk load: `make soak NAME=hops`, `NAME=upgrades`.

use std::time::{Duration, Instant};

use hearth_vmtest::known::{end_endless_fio, start_endless_fio};
use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, patience};

/// Limits far beyond any hop that was seen on a quiet host.
const SLOW_PAUSE_MS: f64 = 100.0;
const SLOW_HOP: Duration = Duration::from_secs(10);

fn rounds(variable: &str) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

/// Hops between both versions. Each failed or slow hop is listed with its phases.
#[test]
#[ignore = "takes minutes: HOPS=200, unless said otherwise"]
fn hundreds_of_hops_succeed() -> Result<()> {
    let hops = rounds("HOPS");
    let vm = TestVm::busybox_with_fio("soak").for_both_qemus().cpus(2).disk(Disk::empty(64)).boot()?;
    let nonce = vm.nonce()?;
    start_endless_fio(&vm)?;
    let programs = [artifacts::qemu_10()?, artifacts::installed_qemu()?];
    let (mut pauses, mut failures) = (Vec::new(), Vec::new());
    let mut written = 0;
    for number in 1..=hops {
        let began = Instant::now();
        let hop = vm.rejuvenate_to(&programs[number % 2])?;
        let took = began.elapsed();
        let last = vm.status()?.last_rejuvenation;
        let mut say = |what: &str| {
            let line = format!("hop {number}: {what}, in {took:?}: {last:?}");
            eprintln!("{line}");
            failures.push(line);
        };
        if hop.status != 0 {
            say(&format!("failed: {}", hop.text()));
            continue;
        }
        let pause = last.as_ref().and_then(|last| last.pause_ms).unwrap_or(f64::NAN);
        pauses.push(pause);
        if pause.is_nan() || pause > SLOW_PAUSE_MS || took > SLOW_HOP {
            say("slow");
        }
        if vm.nonce()? != nonce {
            say("not the same guest");
        }
        // The load must continue: a request lost in a hop would hang it.
        let so_far = wait_written(&vm, written)?;
        if so_far <= written {
            say("the load hangs");
        }
        written = so_far;
    }
    end_endless_fio(&vm)?;
    vm.has_no_disk_errors()?;
    let complaints: Vec<_> = vm.guest().kernel_log().into_iter().filter(|line| line.contains("error")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    pauses.sort_by(f64::total_cmp);
    let at = |part: f64| pauses.get(((pauses.len() - 1) as f64 * part) as usize).copied().unwrap_or(f64::NAN);
    eprintln!(
        "{hops} hops, {} failed or slow; pause ms: median {:.2}, p99 {:.2}, max {:.2}",
        failures.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    assert!(failures.is_empty(), "{failures:#?}");
    Ok(())
}

/// QEMU reconnects a second after it lost a keeper. Upgrades in between close the connection at any point of its first messages.
#[test]
#[ignore = "takes minutes: UPGRADES=200, unless said otherwise"]
fn hundreds_of_upgrades_succeed_at_any_moment() -> Result<()> {
    const APART_MS: [u64; 2] = [700, 1500];
    let upgrades = rounds("UPGRADES");
    let vm = TestVm::busybox_with_fio("upgrades").disk(Disk::empty(64)).boot()?;
    let nonce = vm.nonce()?;
    start_endless_fio(&vm)?;
    let mut took_over = Instant::now();
    for number in 1..=upgrades {
        let apart = APART_MS[0] + number as u64 * 7919 % (APART_MS[1] - APART_MS[0]);
        std::thread::sleep(Duration::from_millis(apart).saturating_sub(took_over.elapsed()));
        vm.cli(&["upgrade-keeper", vm.name()])?;
        took_over = Instant::now();
        if number % 10 == 0 {
            eprintln!("upgrade {number} of {upgrades}");
            assert_eq!(vm.nonce()?, nonce, "upgrade {number}");
            assert!(wait_written(&vm, 0)? > 0, "upgrade {number}: the load hangs");
        }
    }
    end_endless_fio(&vm)?;
    vm.has_no_disk_errors()?;
    Ok(())
}

/// Bytes that the guest has written, once they exceed `before` or the time limit ends.
fn wait_written(vm: &TestVm, before: u64) -> Result<u64> {
    let deadline = Instant::now() + patience(2);
    loop {
        let written = vm.status()?.disks[0].written_bytes;
        if written > before || Instant::now() > deadline {
            return Ok(written);
        }
    }
}
