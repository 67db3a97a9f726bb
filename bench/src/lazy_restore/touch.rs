//! The cost of a missing page by the guest's own clock: single-page reads of a file in its memory while the file is missing, and
//! again when it is present. The snapshot is in the host's page cache, so this measures a fault's path without a disk.

use std::fs;

use hearth_vmtest::{Drives, Output, TestVm, patience};

use super::hearth::{await_complete, machine, restore_status};
use super::{Bench, RestoreError};
use crate::record::Record;

pub const CASE: &str = "touch";

pub fn measure(bench: &Bench<'_>, record: &mut Record) -> Result<(), RestoreError> {
    let accelerator = record.machine.accelerator.name();
    let mib = bench.shape.touched_mib;
    let builder = TestVm::busybox(CASE).memory_mib(mib * 3).setting("accelerator", accelerator);
    let vm = builder.boot().map_err(machine)?;
    vm.sh(&format!("probe fill /tmp/touched {} 1", mib << 20)).map_err(machine)?;
    let snapshot = bench.rig.folder().join(CASE);
    vm.save_with(&snapshot, &["--stop"]).map_err(machine)?;
    vm.wait_keeper_end().map_err(machine)?;
    for round in 0..bench.shape.touch_rounds {
        let memory = snapshot.join("ram");
        fs::read(&memory).map_err(|source| RestoreError::File { path: memory, source })?;
        let clone = vm.restore(&snapshot, &format!("{CASE}-{round}"), &["--lazy"]).map_err(machine)?;
        clone.wait_running().map_err(machine)?;
        // The first read loads the program itself.
        let reads = |count: u32| clone.run_within(&format!("probe randread /tmp/touched {count}"), patience(5));
        reads(1).map_err(machine)?;
        let missing = reads(bench.shape.touch_reads).map_err(machine)?;
        let faults = restore_status(&clone)?.pages_lazy;
        await_complete(&clone)?;
        let there = reads(bench.shape.touch_reads).map_err(machine)?;
        for (name, output) in [("missing", &missing), ("there", &there)] {
            for percentile in ["p50_us", "p99_us"] {
                record.add(CASE, &format!("{name}_{percentile}"), "us", number(output, percentile)?);
            }
        }
        record.add(CASE, "faults", "", faults as f64);
        clone.stop_at_once().map_err(machine)?;
    }
    fs::remove_dir_all(&snapshot).map_err(|source| RestoreError::File { path: snapshot, source })
}

fn number(output: &Output, figure: &'static str) -> Result<f64, RestoreError> {
    let said = || RestoreError::NoFigure { side: CASE, figure, said: output.text() };
    output.number(figure).ok_or_else(said)
}
