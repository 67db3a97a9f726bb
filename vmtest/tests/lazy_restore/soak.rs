//! Many restores from one snapshot, under a verifying disk load: `make soak NAME=restores`.

use std::path::Path;

use hearth_api::MachineStatus;
use hearth_vmtest::known::{counts_beyond, fio_is_content, start_endless_fio};
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, patience};

use super::{count, fill, start_counter, verify};

const KNOWN_MIB: u64 = 96;
/// Restore modes. The last prefetches what the one before it traced.
const WAYS: [&[&str]; 4] = [&["--eager"], &["--lazy"], &["--trace", "2"], &["--working-set"]];

/// Uses each mode in turn, and lists each failed round.
#[test]
#[ignore = "takes minutes: ROUNDS=100, unless said otherwise"]
fn a_hundred_restores_succeed() -> Result<()> {
    let rounds: usize = std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(100);
    let vm = TestVm::busybox_with_fio("soak").memory_mib(384).disk(Disk::empty(48)).boot()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, KNOWN_MIB)?;
    start_counter(&vm)?;
    start_endless_fio(&vm)?;
    vm.wait_status("a running load", |status| written(status) > 1 << 20)?;
    vm.save(&snapshot)?;
    vm.stop_at_once()?;
    let (mut complete_ms, mut failures) = (Vec::new(), Vec::new());
    for number in 0..rounds {
        let (name, way) = (format!("round{number}"), WAYS[number % WAYS.len()]);
        match round(&vm, &snapshot, &name, way, &nonce) {
            Ok(ms) => {
                eprintln!("{name} of {rounds}, {way:?}: complete after {ms:.0} ms");
                complete_ms.push(ms);
            }
            Err(what) => {
                let line = format!("{name}, {way:?}: {what}");
                eprintln!("{line}");
                failures.push(line);
            }
        }
    }
    complete_ms.sort_by(f64::total_cmp);
    let at = |part: usize| complete_ms.get((complete_ms.len().max(1) - 1) * part / 100).copied().unwrap_or(f64::NAN);
    eprintln!(
        "{rounds} restores, {} failed; ms until complete: median {:.0}, p99 {:.0}, max {:.0}",
        failures.len(),
        at(50),
        at(99),
        at(100)
    );
    assert!(failures.is_empty(), "{failures:#?}");
    Ok(())
}

/// Returns the milliseconds until all memory had arrived, or the failure.
fn round(vm: &TestVm, snapshot: &Path, name: &str, way: &[&str], nonce: &str) -> std::result::Result<f64, String> {
    let failed = |error: hearth_vmtest::Error| error.to_string();
    let clone = vm.restore(snapshot, name, way).map_err(failed)?;
    let status = clone.wait_running().map_err(failed)?;
    if clone.nonce().map_err(failed)? != nonce {
        return Err("not the guest that was saved".to_owned());
    }
    let counted = count(&clone).map_err(failed)?;
    counts_beyond(&clone, counted).map_err(failed)?;
    verify(&clone).map_err(failed)?;
    let continues = |now: &MachineStatus| written(now) > written(&status);
    clone.wait_status("a load that continues", continues).map_err(failed)?;
    let complete = event!(RestoreComplete { duration_ms, .. } => duration_ms);
    let duration_ms = clone.wait_event_within("all memory is there", patience(60), complete).map_err(failed)?;
    // Verify again: no page comes from the snapshot any more.
    verify(&clone).map_err(failed)?;
    if !fio_is_content(&clone).map_err(failed)? {
        return Err(clone.sh("cat /tmp/fio.log").map_err(failed)?);
    }
    let status = clone.status().map_err(failed)?;
    let disk = &status.disks[0];
    let missing = status.restore.as_ref().is_none_or(|restore| restore.pages_missing != 0);
    if disk.io_errors != 0 || disk.bad_requests != 0 || missing {
        return Err(format!("{status:?}"));
    }
    clone.stop_at_once().map_err(failed)?;
    Ok(duration_ms)
}

fn written(status: &MachineStatus) -> u64 {
    status.disks[0].written_bytes
}
