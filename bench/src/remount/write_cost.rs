//! The cost of keeping the boot set current for writes: fio's random writes to blocks that are all held, beside the same writes
//! in a machine that holds none. Both machines run and write in turn. Two identical machines differ by more than this cost, so
//! there are several pairs, and the figure is the median over all turns of all pairs.
//!
//! A more certain figure is measured without a guest: the time that a boot set takes for a written block.

use std::collections::BTreeMap;
use std::time::Instant;

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::BootSet;
use hearth_disk::tag::Tagger;
use hearth_disk::warm::{RequestObserver, WarmSource};
use hearth_vmtest::{Disk, Drives, TestVm, patience};

use super::{MIB, NAME, RemountError};
use crate::record::Record;
use crate::sides::Rig;
use crate::stats::{self, degradation_pct};

/// Size of the region that is written and held.
const REGION_MIB: u64 = 32;
const SIDES: [&str; 2] = ["held", "not-held"];
pub const CASE: &str = "write-cost";

pub fn measure(rig: &Rig, quick: bool, record: &mut Record) -> Result<(), RemountError> {
    keep_current(record)?;
    let (pairs, rounds, seconds) = if quick { (1, 1, 1) } else { (6, 6, 2) };
    for pair in 0..pairs {
        let vms = [start(rig, "held", true)?, start(rig, "not-held", false)?];
        let mut costs = Vec::new();
        // The first round warms up and does not count. After it, each side goes first equally often.
        for round in 0..=rounds {
            let mut rates = [0.0; 2];
            for turn in 0..2 {
                let side = (pair + round + turn) % 2;
                rates[side] = random_writes(&vms[side], SIDES[side], seconds)?;
            }
            if round > 0 {
                SIDES.iter().zip(rates).for_each(|(side, rate)| record.add(CASE, side, "1/s", rate));
                costs.push(degradation_pct(rates[1], rates[0]));
            }
        }
        let cost = stats::median(&costs).unwrap_or(f64::NAN);
        eprintln!("{NAME}: random writes: pair {} of {pairs}: held blocks cost {cost:.1} %", pair + 1);
        record.add(CASE, "pair_cost_pct", "%", cost);
        costs.into_iter().for_each(|cost| record.add(CASE, "cost_pct", "%", cost));
    }
    Ok(())
}

/// Measures the boot set alone. Blocks come in the order of random writes, so that no processor's cache has them.
fn keep_current(record: &mut Record) -> Result<(), RemountError> {
    const BLOCKS: u64 = REGION_MIB * (1 << 20) / BLOCK_BYTES as u64;
    const DISK: DiskId = DiskId(0);
    let folder =
        tempfile::tempdir_in("/dev/shm").map_err(|source| RemountError::File { path: "/dev/shm".into(), source })?;
    let set = BootSet::open(folder.path(), (2 * REGION_MIB) << 20, Tagger::new(b"of no machine..."))?;
    set.begin();
    (0..BLOCKS).for_each(|block| set.read_from_image(DISK, block, Some(&[1; BLOCK_BYTES])));
    set.ready();
    let bytes = [2; BLOCK_BYTES];
    for _ in 0..5 {
        let began = Instant::now();
        for turn in 0..BLOCKS {
            // The odd factor visits each block once.
            let block = turn.wrapping_mul(0x9e37_79b9) % BLOCKS;
            set.forget(DISK, block..block + 1);
            set.written(DISK, block, 0, &bytes);
        }
        record.add(CASE, "keep_us", "us", began.elapsed().as_secs_f64() * 1e6 / BLOCKS as f64);
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

/// Runs random writes, and returns their number per second.
fn random_writes(vm: &TestVm, side: &'static str, seconds: u32) -> Result<f64, RemountError> {
    let fio = format!(
        "fio --name=write --filename=/dev/vda --rw=randwrite --bs=4k --size={REGION_MIB}m --ioengine=libaio --iodepth=8 \
         --direct=1 --time_based --runtime={seconds} --minimal | cut -d';' -f49"
    );
    let said = vm.sh_within(&fio, patience(60)).map_err(|source| RemountError::Machine { side, source })?;
    said.trim().parse().map_err(|_| RemountError::NoFigure { side, figure: "writes a second", said })
}
