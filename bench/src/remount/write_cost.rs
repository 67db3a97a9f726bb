//! What keeping the boot set current costs writes: fio's random writes to blocks that are all held, beside the same writes to
//! blocks of the same disk that are not. One machine, in turn: two of them differ by more than what is measured.

use std::collections::BTreeMap;

use hearth_vmtest::{Disk, Drives, TestVm, patience};

use super::{MIB, NAME, RemountError};
use crate::record::Record;
use crate::sides::Rig;
use crate::stats::{self, degradation_pct};

/// What is written to, of each kind.
const REGION_MIB: u64 = 32;
/// In the order in which they lie on the disk.
const KINDS: [&str; 2] = ["held", "not-held"];
pub const CASE: &str = "write-cost";

pub fn measure(rig: &Rig, quick: bool, record: &mut Record) -> Result<(), RemountError> {
    let vm = start(rig)?;
    // The first round warms up and is not counted; then each kind goes first as often as the other.
    let rounds = if quick { 4 } else { 20 };
    for round in 0..=rounds {
        let mut rates = [0.0; 2];
        for turn in 0..2 {
            let kind = (round + turn) % 2;
            rates[kind] = random_writes(&vm, kind, quick)?;
        }
        if round > 0 {
            let [held, not_held] = rates;
            record.add(CASE, KINDS[0], "1/s", held);
            record.add(CASE, KINDS[1], "1/s", not_held);
            record.add(CASE, "cost_pct", "%", degradation_pct(not_held, held));
        }
    }
    let [held, not_held] = KINDS.map(|kind| stats::median(record.values(CASE, kind)).unwrap_or(f64::NAN));
    eprintln!("{NAME}: random writes: {held:.0} a second to blocks that are held, {not_held:.0} to others");
    Ok(())
}

/// Of its disk the first half is held.
fn start(rig: &Rig) -> Result<TestVm, RemountError> {
    let failed = |source| RemountError::Machine { side: CASE, source };
    let image = rig.folder().join(format!("{CASE}.img"));
    std::fs::write(&image, vec![1; (2.0 * REGION_MIB as f64 * MIB) as usize])
        .map_err(|source| RemountError::File { path: image.clone(), source })?;
    let builder = TestVm::busybox_with_fio(CASE).setting("accelerator", rig.accelerator().name());
    let remount = BTreeMap::from([("limit", format!("{}MiB", 2 * REGION_MIB))]);
    let builder = builder.memory_mib(384).disk(Disk::in_place(&image)).setting("remount", remount);
    let vm = builder.boot().map_err(failed)?;
    vm.sh(&format!("dd if=/dev/vda of=/dev/null bs=1M count={REGION_MIB} iflag=direct")).map_err(failed)?;
    vm.cli(&["ready", vm.name()]).map_err(failed)?;
    Ok(vm)
}

/// Writes a second.
fn random_writes(vm: &TestVm, kind: usize, quick: bool) -> Result<f64, RemountError> {
    let (seconds, offset_mib) = (if quick { 1 } else { 2 }, kind as u64 * REGION_MIB);
    let fio = format!(
        "fio --name=write --filename=/dev/vda --rw=randwrite --bs=4k --offset={offset_mib}m --size={REGION_MIB}m \
         --ioengine=libaio --iodepth=8 --direct=1 --time_based --runtime={seconds} --minimal | cut -d';' -f49"
    );
    let said = vm.sh_within(&fio, patience(60)).map_err(|source| RemountError::Machine { side: CASE, source })?;
    said.trim().parse().map_err(|_| RemountError::NoFigure { side: CASE, figure: "writes a second", said })
}
