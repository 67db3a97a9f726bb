//! The summary's figures and the table, from the rows. Figures without a profile in their name are those at `paper`; without a
//! number of volumes, those at the largest one.

use super::{Cell, Side, case, write_cost};
use crate::host::profile::Profile;
use crate::record::Record;
use crate::stats::ratio;
use crate::table::{Columns, Table};

/// Metrics of reads answered from memory, and of that memory.
const OF_MEMORY: [&str; 9] = [
    "hit_pct",
    "hit_inline_pct",
    "hit_us_p50",
    "hit_us_p99",
    "cached_mib",
    "memory_reads",
    "reads_beside_writes",
    "hit_beside_writes_us_p50",
    "hit_beside_writes_us_p99",
];

pub fn summarise(record: &mut Record, cells: &[Cell]) {
    let mut figures: Vec<(String, Option<f64>)> = Vec::new();
    for cell in cells {
        let volumes = cell.volumes;
        for &profile in &cell.profiles {
            let median = |side: Side, metric: &str| record.median(&case(side, volumes, profile), metric);
            let key = |metric: &str| profile.key(&format!("{metric}_{volumes}"));
            for &side in &cell.sides {
                for metric in ["mount_s", "ready_s", "read_mib", "read_ops", "write_ops"] {
                    figures.push((key(&format!("{metric}_{}", side.word())), median(side, metric)));
                }
            }
            let ready = |side: Side| median(side, "ready_s");
            let mounted = |side: Side| median(side, "mount_s");
            for (held, behind) in [(Side::BootSet, ""), (Side::Nvram, "_nvram")] {
                let key = |metric: &str| profile.key(&format!("{metric}_{volumes}{behind}"));
                figures.push((key("ready_speedup"), ratio(ready(Side::Direct), ready(held))));
                figures.push((key("mount_speedup"), ratio(mounted(Side::Direct), mounted(held))));
                figures.push((key("ready_vs_hostcache_warm"), ratio(ready(held), ready(Side::HostCache))));
                let memory =
                    median(held, "cached_mib").map(|held_mib| held_mib + median(held, "nvram_mib").unwrap_or_default());
                figures.push((key("memory_vs_hostcache"), ratio(memory, median(Side::HostCache, "host_cache_mib"))));
                for metric in OF_MEMORY {
                    figures.push((key(metric), median(held, metric)));
                }
            }
            figures.push((key("nvram_mib"), median(Side::Nvram, "nvram_mib")));
        }
    }
    // Figures without a number of volumes.
    let most = cells.iter().map(|cell| cell.volumes).max().unwrap_or_default();
    for metric in ["ready_vs_hostcache_warm", "memory_vs_hostcache", "hit_inline_pct", "hit_us_p50"] {
        let of_most =
            figures.iter().find(|(name, _)| *name == format!("{metric}_{most}")).and_then(|(_, value)| *value);
        figures.push((metric.to_owned(), of_most));
    }
    for (figure, metric) in [("write_cost_pct", "cost_pct"), ("write_keep_us", "keep_us")] {
        figures.push((figure.to_owned(), record.median(write_cost::CASE, metric)));
    }
    record.summarise_all(figures);
}

pub fn table(record: &Record) -> Table {
    const COLUMNS: &Columns<'_> = &[
        ("mount s", "mount_s"),
        ("ready s", "ready_s"),
        ("read MiB", "read_mib"),
        ("reads", "read_ops"),
        ("writes", "write_ops"),
        ("host cache MiB", "host_cache_mib"),
        ("boot set MiB", "cached_mib"),
        ("NVRAM MiB", "nvram_mib"),
        ("hits %", "hit_pct"),
        ("hit us p50", "hit_us_p50"),
    ];
    let mut volumes: Vec<usize> = record.rows.iter().filter_map(|row| volumes_of(&row.case)).collect();
    volumes.sort_unstable();
    volumes.dedup();
    let cells = volumes.into_iter().flat_map(|volumes| Profile::ALL.map(|profile| (volumes, profile)));
    let cases = cells.flat_map(|(volumes, profile)| Side::ALL.map(|side| case(side, volumes, profile)));
    Table::of_cases(record, "side-volumes@profile", COLUMNS, cases.map(|case| (case.clone(), case)))
}

fn volumes_of(case: &str) -> Option<usize> {
    case.split_once('@')?.0.rsplit_once('-')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_compared() {
        let mut record = Record::of(super::super::NAME, []);
        let mut add = |side, metric, value| record.add(&case(side, 400, Profile::Paper), metric, "", value);
        add(Side::BootSet, "ready_s", 10.0);
        add(Side::Direct, "ready_s", 40.0);
        add(Side::HostCache, "ready_s", 8.0);
        add(Side::BootSet, "cached_mib", 5.0);
        add(Side::HostCache, "host_cache_mib", 50.0);
        add(Side::Nvram, "ready_s", 5.0);
        add(Side::Nvram, "cached_mib", 5.0);
        add(Side::Nvram, "nvram_mib", 95.0);
        let cell =
            Cell { volumes: 400, profiles: vec![Profile::Paper], sides: Side::ALL.to_vec(), rounds: 1, traced: &[] };
        summarise(&mut record, &[cell]);
        assert_eq!(record.summary["ready_speedup_400"], 4.0);
        assert_eq!(record.summary["ready_vs_hostcache_warm"], 1.25);
        assert_eq!(record.summary["memory_vs_hostcache"], 0.1);
        assert_eq!(
            (record.summary["ready_speedup_400_nvram"], record.summary["memory_vs_hostcache_400_nvram"]),
            (8.0, 2.0)
        );
        assert!(!record.summary.contains_key("hit_us_p50"), "a figure without a measurement is left out");
        assert!(table(&record).text().contains("hearth-400@paper"));
    }
}
