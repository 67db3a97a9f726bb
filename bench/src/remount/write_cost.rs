//! What keeping the boot set current costs writes: fio's random writes to blocks that are all held, beside the same writes
//! in a machine that holds none. Both machines run, and write in turn.

use std::collections::BTreeMap;

use hearth_vmtest::{Disk, Drives, TestVm, patience};

use super::{MIB, NAME, RemountError};
use crate::record::Record;
use crate::sides::Rig;
use crate::stats::{self, degradation_pct};

/// What is written to, and held.
const REGION_MIB: u64 = 32;
const SIDES: [&str; 2] = ["held", "not-held"];
pub const CASE: &str = "write-cost";

pub fn measure(rig: &Rig, quick: bool, record: &mut Record) -> Result<(), RemountError> {
    let vms = [start(rig, "held", true)?, start(rig, "not-held", false)?];
    // The first round warms up and is not counted; then each side goes first as often as the other.
    let rounds = if quick { 2 } else { 8 };
    for round in 0..=rounds {
        for turn in 0..2 {
            let side = (round + turn) % 2;
            let rate = random_writes(&vms[side], SIDES[side], quick)?;
            if round > 0 {
                record.add(CASE, SIDES[side], "1/s", rate);
            }
        }
    }
    let rates = SIDES.map(|side| stats::median(record.values(CASE, side)));
    if let [Some(held), Some(not_held)] = rates {
        eprintln!("{NAME}: random writes: {held:.0} a second to blocks that are held, {not_held:.0} to others");
        record.add(CASE, "cost_pct", "%", degradation_pct(not_held, held));
    }
    Ok(())
}

fn start(rig: &Rig, side: &'static str, holds: bool) -> Result<TestVm, RemountError> {
    let failed = |source| RemountError::Machine { side, source };
    let image = rig.folder().join(format!("{side}.img"));
    std::fs::write(&image, vec![1; (REGION_MIB as f64 * MIB) as usize])
        .map_err(|source| RemountError::File { path: image.clone(), source })?;
    let builder = TestVm::busybox_with_fio(side).setting("accelerator", rig.accelerator().name());
    let builder = builder.memory_mib(384).disk(Disk::in_place(&image));
    let limit = format!("{}MiB", 2 * REGION_MIB);
    let remount = BTreeMap::from([("limit", limit)]);
    let vm = if holds { builder.setting("remount", remount) } else { builder }.boot().map_err(failed)?;
    vm.sh("cat /dev/vda >/dev/null").map_err(failed)?;
    if holds {
        vm.cli(&["ready", vm.name()]).map_err(failed)?;
    }
    Ok(vm)
}

/// Writes a second.
fn random_writes(vm: &TestVm, side: &'static str, quick: bool) -> Result<f64, RemountError> {
    let seconds = if quick { 1 } else { 4 };
    let fio = format!(
        "fio --name=write --filename=/dev/vda --rw=randwrite --bs=4k --size={REGION_MIB}m --ioengine=libaio --iodepth=8 \
         --direct=1 --time_based --runtime={seconds} --minimal | cut -d';' -f49"
    );
    let said = vm.sh_within(&fio, patience(60)).map_err(|source| RemountError::Machine { side, source })?;
    said.trim().parse().map_err(|_| RemountError::NoFigure { side, figure: "writes a second", said })
}
