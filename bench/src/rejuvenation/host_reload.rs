//! Guests of an emulated host that got another kernel (`make test-nested`): how many went on, and whether with all their memory.
//!
//! No host is reloaded here: `cargo xtask bench` has had that done, and names the file with what came of it.

use hearth_vmtest::host_reload::{Figures, KEEP_IN};

use crate::record::Record;

const CASE: &str = "host-reload@nested";

pub fn take_up(record: &mut Record) {
    let kept = std::env::var_os(KEEP_IN).and_then(|file| Figures::load(file.as_ref()));
    match kept.filter(|figures| !figures.machines.is_empty()) {
        Some(figures) => add(&figures, record),
        None => {
            record.left_out.push(format!("{CASE}: no host was reloaded; `make bench NAME=rejuvenate` does it first"))
        }
    }
}

fn add(figures: &Figures, record: &mut Record) {
    for machine in &figures.machines {
        record.add(CASE, "resumed", "", f64::from(machine.resumed));
        record.add(CASE, "ram_same", "", f64::from(machine.ram_same));
        if let Some(stood_ms) = machine.stood_ms {
            record.add(CASE, "stood_ms", "ms", stood_ms as f64);
        }
    }
    let resumed = record.values(CASE, "resumed").to_vec();
    let all_same = record.values(CASE, "ram_same").iter().copied().reduce(f64::min);
    record.summarise("host_reload_resumed", Some(resumed.iter().sum::<f64>() / resumed.len() as f64));
    record.summarise("ram_checksum_ok", all_same);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::facts::{Accelerator, HostFacts};
    use hearth_vmtest::host_reload::Reloaded;

    #[test]
    fn a_guest_that_was_lost_is_seen_in_both_figures() {
        let machine =
            |resumed| Reloaded { name: "a".into(), resumed, ram_same: resumed, stood_ms: resumed.then_some(9) };
        let mut record = Record::new("trial", true, HostFacts::gather(Accelerator::Tcg), "QEMU".into(), "max");
        add(&Figures { machines: vec![machine(true), machine(false)] }, &mut record);
        assert_eq!((record.summary["host_reload_resumed"], record.summary["ram_checksum_ok"]), (0.5, 0.0));
        assert_eq!(record.values(CASE, "stood_ms"), [9.0]);
    }
}
