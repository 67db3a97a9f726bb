//! Several machines at the same time: the pause of each when n of them hop together, and when n of them reboot together.
//!
//! Both are terms of a model (`hearth_recovery::rejuvenation::downtime`), which is fitted to all n but the largest; its
//! prediction for that one is compared with the measurement. All machines run from the beginning, and each round has every n, so
//! the host's other load affects all of them.

use std::time::Instant;

use hearth_recovery::rejuvenation::downtime::{Contended, Line, Model, error_pct};
use hearth_vmtest::{Disk, Result, TestVm};
use serde_json::Value;

use super::RejuvenationError;
use crate::record::Record;

const MEMORY_MIB: u64 = 256;
const HOP: &str = "hop-together";
const REBOOT: &str = "reboot-together";

pub fn run(accelerator: &str, quick: bool, record: &mut Record) -> std::result::Result<(), RejuvenationError> {
    let failed = |source| RejuvenationError::Machine { side: HOP, source };
    let (counts, rounds): (&[usize], u64) = if quick { (&[1, 2], 1) } else { (&[1, 2, 4, 8], 4) };
    let mut machines: Vec<TestVm> = Vec::new();
    for number in 0..counts[counts.len() - 1] {
        let builder = TestVm::busybox(&format!("many-{number}")).memory_mib(MEMORY_MIB);
        let builder = builder.disk(Disk::empty(16)).setting("accelerator", accelerator);
        let builder = match machines.first() {
            Some(first) => builder.beside(first),
            None => builder,
        };
        machines.push(builder.boot().map_err(failed)?);
    }
    for _ in 0..rounds {
        for &count in counts {
            for pause in hop_together(&machines[0], count).map_err(failed)? {
                record.add(&case(HOP, count), "pause_ms", "ms", pause);
            }
            for down in reboot_together(&machines[..count]).map_err(failed)? {
                record.add(&case(REBOOT, count), "pause_ms", "ms", down);
            }
        }
    }
    // The others use the first one's folder, so it is dropped last.
    while machines.pop().is_some() {}
    summarise(record, counts);
    Ok(())
}

fn case(side: &str, count: usize) -> String {
    format!("{side}@n={count}")
}

/// Hops all machines in the first one's runtime root, `count` at a time.
fn hop_together(first: &TestVm, count: usize) -> Result<Vec<f64>> {
    let output = first.cli(&["rejuvenate", "--all", "--parallel", &count.to_string(), "--json"])?;
    let decided = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(decided.filter_map(|decided| decided["pause_ms"].as_f64()).collect())
}

/// Measures the time from the request to a guest that takes commands.
fn reboot_together(machines: &[TestVm]) -> Result<Vec<f64>> {
    let reboot = |vm: &TestVm| {
        let living = u64::from(vm.status()?.incarnation);
        let began = Instant::now();
        vm.cli(&["reboot", vm.name(), "--cold", "--force"])?;
        vm.wait_incarnation(living + 1)?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    };
    std::thread::scope(|scope| {
        let reboots: Vec<_> = machines.iter().map(|vm| scope.spawn(move || reboot(vm))).collect();
        reboots.into_iter().map(|reboot| reboot.join().expect("a reboot does not panic")).collect()
    })
}

fn summarise(record: &mut Record, counts: &[usize]) {
    let (&largest, smaller) = counts.split_last().expect("there is at least one count");
    let median = |record: &Record, side: &str, count: usize| record.median(&case(side, count), "pause_ms");
    for &count in counts {
        let (warm, cold) = (median(record, HOP, count), median(record, REBOOT, count));
        let highest = record.values(&case(HOP, count), "pause_ms").iter().copied().reduce(f64::max);
        record.summarise(&format!("all_pause_ms_max_{count}"), highest);
        record.summarise(&format!("d_w_ms_{count}"), warm);
        record.summarise(&format!("d_c_ms_{count}"), cold);
        record.summarise(&format!("r_ms_{count}"), cold.zip(warm).map(|(cold, warm)| cold - warm));
    }
    let points = |side: &str| -> Vec<(f64, f64)> {
        smaller.iter().filter_map(|&count| Some((count as f64, median(record, side, count)?))).collect()
    };
    let processors = std::thread::available_parallelism().map_or(1.0, |processors| processors.get() as f64);
    let terms = Line::through(&points(HOP)).zip(Contended::through(&points(REBOOT), processors));
    let Some((resume, reboot_os)) = terms else { return };
    let (Some(warm), Some(cold)) = (median(record, HOP, largest), median(record, REBOOT, largest)) else { return };
    let (model, n) = (Model { resume, reboot_os, alpha: 0.0 }, largest as f64);
    let figures = [
        ("d_w_ms_predicted", model.warm_ms(n)),
        ("d_c_ms_predicted", model.cold_ms(n)),
        ("model_error_pct", error_pct(model.gained_ms(n), cold - warm)),
        ("model_error_d_w_pct", error_pct(model.warm_ms(n), warm)),
    ];
    for (metric, value) in figures {
        record.summarise(metric, Some(value));
    }
}
