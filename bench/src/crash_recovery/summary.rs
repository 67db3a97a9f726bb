//! The summary's figures and the table, from the rows.

use super::{CHUNK_MIB, Shape};
use crate::host::profile::Profile;
use crate::record::{BUDGET_PEAKS, Record};
use crate::responsiveness;
use crate::stats::ratio;
use crate::table::{Columns, Table};

const SELECTIVE: &str = "hearth-level-31-chunk-128";
const WHOLE: &str = "hearth-level-1-chunk-128";

/// Adds the figures of every profile that was run; those over all profiles have no suffix.
pub fn summarise(record: &mut Record, profiles: &[Profile]) {
    assert!(SELECTIVE.ends_with(&CHUNK_MIB.to_string()), "the names of the sides follow the chunk size");
    for &profile in profiles {
        summarise_profile(record, profile);
    }
    let peak = record.highest(&BUDGET_PEAKS);
    record.summarise("budget_peak_pct", peak);
    responsiveness::summarise(record);
}

fn summarise_profile(record: &mut Record, profile: Profile) {
    let case = |side: &str| format!("{side}@{}", profile.name());
    let of = |record: &Record, side: &str, metric: &str| record.median(&case(side), metric);
    let downtime = |record: &Record, side: &str| of(record, side, "downtime_s");
    let hearth = downtime(record, SELECTIVE);
    for (key, side) in [
        ("downtime_s", SELECTIVE),
        ("downtime_s_hearth", SELECTIVE),
        ("downtime_s_hearth_level_1", WHOLE),
        ("downtime_s_qemu_dump", "qemu-dump"),
        ("downtime_s_qemu_makedumpfile", "qemu-makedumpfile"),
        ("downtime_s_plain_reboot", "plain-reboot"),
    ] {
        record.summarise(&profile.key(key), downtime(record, side));
    }
    let filtered = of(record, "qemu-makedumpfile", "dump_s");
    for (key, value) in [
        ("speedup_vs_sequential", ratio(downtime(record, "qemu-dump"), hearth)),
        ("downtime_over_plain_reboot", ratio(hearth, downtime(record, "plain-reboot"))),
        ("dump_s", of(record, SELECTIVE, "dump_s")),
        ("dump_mib", of(record, SELECTIVE, "dump_mib")),
        ("dump_speedup_vs_qemu_makedumpfile", ratio(filtered, of(record, SELECTIVE, "dump_s"))),
        ("dump_disk_utilisation", of(record, WHOLE, "disk_utilisation")),
        ("combined_downtime_over_concurrent_only", ratio(hearth, downtime(record, WHOLE))),
        ("guest_wait_ms", of(record, WHOLE, "guest_wait_ms")),
        ("guest_wait_ms_level_31", of(record, SELECTIVE, "guest_wait_ms")),
    ] {
        record.summarise(&profile.key(key), value);
    }
    let shape = Shape::of(false);
    for chunk in shape.chunks_mib {
        let side = format!("hearth-level-1-chunk-{chunk}");
        for metric in ["downtime_s", "cpu_pct"] {
            record.summarise(&profile.key(&format!("chunk_mib_{chunk}_{metric}")), of(record, &side, metric));
        }
    }
    for policy in shape.policies {
        for metric in ["downtime_s", "dump_s"] {
            let key = profile.key(&format!("policy_{}_{metric}", policy.replace('-', "_")));
            record.summarise(&key, of(record, &format!("hearth-{policy}"), metric));
        }
    }
}

/// One table: sides in rows, profiles as blocks of rows.
pub fn table(record: &Record) -> Table {
    const COLUMNS: &Columns<'_> = &[
        ("downtime s", "downtime_s"),
        ("dump s", "dump_s"),
        ("dump MiB", "dump_mib"),
        ("disk used", "disk_utilisation"),
        ("keeper CPU %", "cpu_pct"),
        ("guest waited ms", "guest_wait_ms"),
        ("memory peak %", "budget_peak_pct"),
    ];
    let cases = record.cases().into_iter().map(|case| (case.to_owned(), case.to_owned()));
    Table::of_cases(record, "side@profile", COLUMNS, cases)
}

/// Chunk sizes compared, as in the paper's Table 3.
pub fn chunk_table(record: &Record) -> Table {
    const COLUMNS: &Columns<'_> = &[
        ("downtime s", "downtime_s"),
        ("dump s", "dump_s"),
        ("keeper CPU %", "cpu_pct"),
        ("guest waited ms", "guest_wait_ms"),
    ];
    let line = |chunk: &u64| (format!("{chunk} MiB"), at_paper(&format!("hearth-level-1-chunk-{chunk}")));
    Table::of_cases(record, "chunk", COLUMNS, Shape::of(false).chunks_mib.iter().map(line))
}

/// Disk policies compared while a boot needs the disk, as in the paper's Table 6.
pub fn policy_table(record: &Record) -> Table {
    const COLUMNS: &Columns<'_> = &[("downtime s", "downtime_s"), ("dump s", "dump_s")];
    let line = |policy: &&str| ((*policy).to_owned(), at_paper(&format!("hearth-{policy}")));
    Table::of_cases(record, "disk_time", COLUMNS, Shape::of(false).policies.iter().map(line))
}

/// The case of a side at the profile of the comparisons.
fn at_paper(side: &str) -> String {
    format!("{side}@{}", Profile::Paper.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let rows = [
            ("plain-reboot@paper", "downtime_s", 10.0),
            ("qemu-dump@paper", "downtime_s", 70.0),
            ("qemu-makedumpfile@paper", "dump_s", 80.0),
            ("hearth-level-31-chunk-128@paper", "downtime_s", 8.0),
            ("hearth-level-31-chunk-128@paper", "dump_s", 2.0),
            ("hearth-level-1-chunk-128@paper", "downtime_s", 9.0),
            ("hearth-level-1-chunk-128@paper", "disk_utilisation", 0.95),
            ("hearth-level-1-chunk-128@paper", "budget_peak_pct", 101.0),
            ("hearth-level-1-chunk-128@paper", "keeper_peak_pct", 102.0),
            ("hearth-level-1-chunk-10@paper", "cpu_pct", 40.0),
            ("hearth-dump-first@paper", "downtime_s", 20.0),
            ("hearth-level-31-chunk-128@cloud", "dump_s", 1.0),
        ];
        Record::of("crash", rows)
    }

    #[test]
    fn figures_follow_from_the_rows() {
        let mut record = record();
        summarise(&mut record, &[Profile::Paper, Profile::Cloud]);
        for (key, value) in [
            ("downtime_s", 8.0),
            ("speedup_vs_sequential", 8.75),
            ("downtime_over_plain_reboot", 0.8),
            ("dump_speedup_vs_qemu_makedumpfile", 40.0),
            ("dump_disk_utilisation", 0.95),
            ("combined_downtime_over_concurrent_only", 0.8889),
            ("chunk_mib_10_cpu_pct", 40.0),
            ("policy_dump_first_downtime_s", 20.0),
            ("budget_peak_pct", 102.0),
            ("dump_s_cloud", 1.0),
        ] {
            assert_eq!(record.summary[key], value, "{key}");
        }
    }

    #[test]
    fn nothing_is_claimed_that_was_not_measured() {
        let mut record = record();
        summarise(&mut record, &[Profile::Paper, Profile::Cloud]);
        for key in ["guest_wait_ms", "speedup_vs_sequential_cloud", "policy_recovery_first_downtime_s"] {
            assert!(!record.summary.contains_key(key), "{key}");
        }
    }

    #[test]
    fn tables_have_a_row_for_each_case() {
        let record = record();
        assert_eq!(table(&record).text().lines().count(), 2 + 8);
        let chunks = chunk_table(&record).text();
        assert_eq!(chunks.lines().count(), 2 + 2, "only measured chunk sizes have a row: {chunks}");
        assert!(chunks.contains("128 MiB        9.00"), "{chunks}");
        let policies = policy_table(&record).text();
        assert!(policies.lines().count() == 2 + 1 && policies.contains("dump-first        20.0"), "{policies}");
    }
}
