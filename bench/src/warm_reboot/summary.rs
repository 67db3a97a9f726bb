//! The summary's figures and the table, from the rows.

use crate::host::profile::Profile;
use crate::record::{BUDGET_PEAKS, Record};
use crate::sides::Stack;
use crate::stats::{self, degradation_pct, ratio};
use crate::table::{Columns, Table};

/// Adds the figures of every profile that was run; those over all profiles have no suffix.
pub fn summarise(record: &mut Record, profiles: &[Profile]) {
    for &profile in profiles {
        summarise_profile(record, profile);
    }
    let peak = record.highest(&BUDGET_PEAKS);
    record.summarise("budget_peak_pct", peak);
    record.summarise("bad_blocks_served", record.total("bad_blocks_served"));
    record.summarise("faults_injected", record.total("faults_injected"));
}

fn summarise_profile(record: &mut Record, profile: Profile) {
    let before = of(record, profile, "hearth-warm", "read_before_mib_s");
    record.summarise(&profile.key("read_before_mib_s"), before);
    for way in ["warm", "cold", "refill"] {
        let side = format!("hearth-{way}");
        let first = of(record, profile, &side, "read_first_mib_s");
        record.summarise(&profile.key(&format!("read_first_{way}_mib_s")), first);
        record.summarise(&profile.key(&format!("read_degradation_{way}_pct")), degraded(before, first));
        for (metric, row) in [
            (format!("web_degradation_{way}_pct"), "web_degradation_pct"),
            (format!("pg_degradation_{way}_pct"), "pg_degradation_pct"),
            (format!("random_read_{way}_us"), "random_read_us"),
            (format!("random_read_before_{way}_us"), "random_read_before_us"),
            (format!("disk_read_after_{way}_mib"), "disk_read_after_mib"),
            (format!("disk_read_for_boot_{way}_mib"), "disk_read_for_boot_mib"),
            (format!("boot_{way}_s"), "boot_s"),
        ] {
            record.summarise(&profile.key(&metric), of(record, profile, &side, row));
        }
    }
    let (warm, ram) = (of(record, profile, "hearth-warm", "boot_s"), ram_boot_s(record));
    record.summarise(&profile.key("boot_ram_s"), ram);
    record.summarise(&profile.key("boot_warm_over_ram"), ratio(warm, ram));
    refill(record, profile);
    let refill = of(record, profile, "hearth-refill", "boot_s");
    record.summarise(&profile.key("boot_refill_over_warm"), ratio(refill, warm));
    for stack in [Stack::ColdPrefetch, Stack::QemuDirect, Stack::QemuHostCache, Stack::PmemDax, Stack::Ram] {
        let key = format!("web_degradation_{}_pct", stack.name().replace('-', "_"));
        record.summarise(&profile.key(&key), of(record, profile, stack.name(), "web_degradation_pct"));
    }
}

/// Median of a metric on a side at a profile.
fn of(record: &Record, profile: Profile, side: &str, metric: &str) -> Option<f64> {
    record.median(&format!("{side}@{}", profile.name()), metric)
}

/// Percentage lost, if both were measured.
fn degraded(before: Option<f64>, after: Option<f64>) -> Option<f64> {
    before.zip(after).map(|(before, after)| degradation_pct(before, after))
}

/// Figures of the machine whose guest brings its file cache back; `hot` has read every file before it is measured.
fn refill(record: &mut Record, profile: Profile) {
    let [refill, prefetch] = ["hearth-refill", "cold-prefetch"];
    for (metric, row) in [
        ("refilled_pct", "refilled_pct"),
        ("cached_at_first_answer_pct", "cached_before_read_pct"),
        ("refill_s", "refill_s"),
        ("refill_us_per_page", "refill_us_per_page"),
        ("map_s", "map_s"),
        ("map_bytes_per_mib", "map_bytes_per_mib"),
    ] {
        record.summarise(&profile.key(metric), of(record, profile, refill, row));
    }
    for (side, name) in
        [("hearth-warm", "warm"), ("hearth-cold", "cold"), (refill, "refill"), (prefetch, "cold_prefetch")]
    {
        record.summarise(&profile.key(&format!("full_speed_s_{name}")), of(record, profile, side, "full_speed_s"));
    }
    let hot = "hearth-warm";
    for (metric, before, after) in [
        ("read_degradation_hot_pct", "read_before_mib_s", "read_second_mib_s"),
        ("web_degradation_hot_pct", "web_before_rps", "web_hot_rps"),
        ("pg_degradation_hot_pct", "pg_before_tps", "pg_hot_tps"),
    ] {
        let value = degraded(of(record, profile, hot, before), of(record, profile, hot, after));
        record.summarise(&profile.key(metric), value);
    }
    let before = of(record, profile, prefetch, "read_before_mib_s");
    let value = degraded(before, of(record, profile, prefetch, "read_first_mib_s"));
    record.summarise(&profile.key("read_degradation_cold_prefetch_pct"), value);
    let faster =
        ratio(of(record, profile, refill, "read_first_mib_s"), of(record, profile, prefetch, "read_first_mib_s"));
    record.summarise(&profile.key("read_speedup_refill_over_cold_prefetch"), faster);
}

/// Median boot time with the image in RAM, over all profiles, since none of them slows it.
fn ram_boot_s(record: &Record) -> Option<f64> {
    let cases = Profile::ALL.map(|profile| format!("{}@{}", Stack::Ram.name(), profile.name()));
    let boots: Vec<f64> = cases.iter().flat_map(|case| record.values(case, "boot_s")).copied().collect();
    stats::median(&boots)
}

/// One table for all profiles: sides in rows, profiles as blocks of rows.
pub fn table(record: &Record) -> Table {
    const COLUMNS: &Columns<'_> = &[
        ("read before MiB/s", "read_before_mib_s"),
        ("first after", "read_first_mib_s"),
        ("second", "read_second_mib_s"),
        ("web 1/s", "web_before_rps"),
        ("web after", "web_after_rps"),
        ("full speed s", "full_speed_s"),
        ("loss %", "web_degradation_pct"),
        ("rows 1/s", "pg_before_tps"),
        ("rows after", "pg_after_tps"),
        ("boot s", "boot_s"),
        ("boot reads MiB", "disk_read_for_boot_mib"),
        ("files read MiB", "disk_read_after_mib"),
        ("extra host memory MiB", "host_page_cache_mib"),
    ];
    let sides = || Stack::ALL.iter().flat_map(|stack| stack.ways().iter().map(|way| stack.side(*way)));
    let cases = Profile::ALL.iter().flat_map(|profile| sides().map(move |side| format!("{side}@{}", profile.name())));
    Table::of_cases(record, "side@profile", COLUMNS, cases.map(|case| (case.clone(), case)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let rows = [
            ("hearth-warm@paper", "read_before_mib_s", 2000.0),
            ("hearth-warm@paper", "read_first_mib_s", 500.0),
            ("hearth-warm@paper", "boot_s", 7.7),
            ("hearth-cold@paper", "boot_s", 9.0),
            ("ram@paper", "boot_s", 7.0),
            ("hearth-warm@paper", "budget_peak_pct", 101.5),
            ("hearth-warm@cloud", "budget_peak_pct", 100.5),
            ("hearth-warm@cloud", "keeper_peak_pct", 101.7),
            ("hearth-warm@cloud", "boot_s", 7.5),
        ];
        Record::of("warm-reboot", rows)
    }

    #[test]
    fn figures_follow_from_the_rows() {
        let mut record = record();
        summarise(&mut record, &[Profile::Cloud, Profile::Paper]);
        for (key, value) in [
            ("read_degradation_warm_pct", 75.0),
            ("boot_cold_s", 9.0),
            ("boot_warm_over_ram", 1.1),
            ("boot_warm_s_cloud", 7.5),
            ("budget_peak_pct", 101.7),
        ] {
            assert_eq!(record.summary[key], value, "{key}");
        }
    }

    #[test]
    fn nothing_is_claimed_that_was_not_measured() {
        let mut record = record();
        summarise(&mut record, &[Profile::Asis, Profile::Paper]);
        for key in ["bad_blocks_served", "web_degradation_warm_pct", "boot_warm_s_asis", "read_first_cold_mib_s"] {
            assert!(!record.summary.contains_key(key), "{key}");
        }
    }

    #[test]
    fn table_has_a_row_for_each_measured_case() {
        let text = table(&record()).text();
        assert_eq!(text.lines().count(), 2 + 4, "{text}");
    }
}
