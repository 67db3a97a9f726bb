//! Guests of an emulated host whose kernel was replaced (`make test-nested`): how many continued, and whether with all their
//! memory.
//!
//! This part does not reload a host: `cargo xtask bench` has already done that, which takes minutes, and names the file with the
//! result. A quick run parks a guest and resumes it under the same kernel.

use hearth_vmtest::host_reload::{Figures, KEEP_IN, Reloaded};
use hearth_vmtest::{Disk, Drives, TestVm, known};

use super::RejuvenationError;
use crate::record::Record;

const CASE: &str = "host-reload@nested";
const DRILL: &str = "host-reload@drill";
const DRILL_MIB: u64 = 256;
/// The part of it with known contents.
const KNOWN_MIB: u64 = 64;

pub fn take_up(record: &mut Record) {
    let kept = std::env::var_os(KEEP_IN).and_then(|file| Figures::load(file.as_ref()));
    match kept.filter(|figures| !figures.machines.is_empty()) {
        Some(figures) => add(CASE, &figures, record),
        None => {
            record.left_out.push(format!("{CASE}: no host was reloaded; `make bench NAME=rejuvenate` does it first"))
        }
    }
}

pub fn drill(accelerator: &str, record: &mut Record) -> Result<(), RejuvenationError> {
    let machine =
        drilled(accelerator).map_err(|source| RejuvenationError::Machine { side: "host-reload --drill", source })?;
    add(DRILL, &Figures { machines: vec![machine] }, record);
    Ok(())
}

fn drilled(accelerator: &str) -> hearth_vmtest::Result<Reloaded> {
    let builder = TestVm::busybox("drill").memory_mib(DRILL_MIB).disk(Disk::empty(16));
    let vm = builder.setting("accelerator", accelerator).boot()?;
    known::fill(&vm, KNOWN_MIB)?;
    known::start_counter(&vm)?;
    let (nonce, counted) = (vm.nonce()?, known::count(&vm)?);
    let reload = |verb: &[&str]| {
        let kept_in = vm.folder().join("record.json").display().to_string();
        vm.cli(&[&["host-reload"], verb, &["--record", &kept_in]].concat())
    };
    reload(&["prepare", "--drill"])?;
    vm.wait_keeper_end()?;
    reload(&["resume"])?;
    let status = vm.wait_running()?;
    let machine = Reloaded {
        name: vm.name().to_owned(),
        resumed: vm.nonce()? == nonce && known::counts_beyond(&vm, counted).is_ok(),
        ram_same: known::verify(&vm).is_ok(),
        stood_ms: status.unparked.and_then(|unparked| unparked.stood_ms).map(|stood_ms| stood_ms as u64),
    };
    vm.kill_foreign_keeper()?;
    Ok(machine)
}

fn add(case: &str, figures: &Figures, record: &mut Record) {
    for machine in &figures.machines {
        record.add(case, "resumed", "", f64::from(machine.resumed));
        record.add(case, "ram_same", "", f64::from(machine.ram_same));
        if let Some(stood_ms) = machine.stood_ms {
            record.add(case, "stood_ms", "ms", stood_ms as f64);
        }
    }
    let resumed = record.values(case, "resumed").to_vec();
    let all_same = record.values(case, "ram_same").iter().copied().reduce(f64::min);
    record.summarise("host_reload_resumed", Some(resumed.iter().sum::<f64>() / resumed.len() as f64));
    record.summarise("ram_checksum_ok", all_same);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_guest_lowers_both_figures() {
        let machine =
            |resumed| Reloaded { name: "a".into(), resumed, ram_same: resumed, stood_ms: resumed.then_some(9) };
        let mut record = Record::of("trial", []);
        add(CASE, &Figures { machines: vec![machine(true), machine(false)] }, &mut record);
        assert_eq!((record.summary["host_reload_resumed"], record.summary["ram_checksum_ok"]), (0.5, 0.0));
        assert_eq!(record.values(CASE, "stood_ms"), [9.0]);
    }
}
