//! The summary's figures and the table, from the rows. Figures without a profile in their name are those at `cloud`.

use super::{WINDOW_REQUESTS, case, hearth, places, plain, store, touch};
use crate::host::profile::Profile;
use crate::load::trace::{Sample, Trace};
use crate::record::Record;
use crate::responsiveness;
use crate::stats::{self, ratio};
use crate::table::{Table, figure_or_dash};

/// Ratio to the steady state below which a service counts as usable.
const USABLE: f64 = 1.1;

/// Metrics of each side at each place.
const METRICS: [&str; 11] = [
    "running_ms",
    "first_answer_ms",
    "usable_s",
    "complete_s",
    "disks_complete_s",
    "faults",
    "fault_us_p50",
    "fault_us_p99",
    "fault_wait_ms",
    "bytes_read_mib",
    "steady_ms",
];

/// A restored service, as its client saw it.
#[derive(Debug, PartialEq)]
pub struct Service {
    /// Mean latency of the last requests, when all memory had arrived.
    pub steady_ms: f64,
    /// Time from which requests are answered as in the steady state.
    pub usable_s: f64,
}

impl Service {
    pub fn of(trace: &Trace, steady_requests: usize) -> Self {
        let samples = &trace.samples;
        let steady_ms = mean_ms(&samples[samples.len().saturating_sub(steady_requests)..]);
        let usable = samples.windows(WINDOW_REQUESTS).find(|window| mean_ms(window) <= steady_ms * USABLE);
        Service { steady_ms, usable_s: usable.map_or(f64::NAN, |window| window[0].begun_s) }
    }
}

fn mean_ms(samples: &[Sample]) -> f64 {
    let total_s: f64 = samples.iter().map(|sample| sample.ended_s - sample.begun_s).sum();
    total_s * 1e3 / samples.len() as f64
}

fn sides() -> impl Iterator<Item = &'static str> {
    hearth::SIDES.into_iter().map(|side| side.name).chain(plain::Format::ALL.map(plain::Format::side))
}

pub fn summarise(record: &mut Record, profiles: &[Profile]) {
    let median = |case: &str, metric: &str| stats::median(record.values(case, metric));
    let mut figures: Vec<(String, Option<f64>)> = Vec::new();
    for place in profiles.iter().map(|profile| profile.name()).chain([store::STORE]) {
        let key = |metric: String| match place {
            _ if place == Profile::Cloud.name() => metric,
            _ => format!("{metric}_{place}"),
        };
        let usable = |side: &str| median(&case(side, place), "usable_s");
        let [stream, mapped] = plain::Format::ALL.map(plain::Format::side);
        for (name, side) in [("eager", "eager"), ("lazy", "lazy"), ("qemu", stream), ("qemu_mapped_ram", mapped)] {
            figures.push((key(format!("usable_ws_over_{name}")), ratio(usable("trace"), usable(side))));
        }
        for metric in ["fault_us_p50", "fault_us_p99"] {
            figures.push((key(metric.to_owned()), median(&case("trace", place), metric)));
        }
        for side in sides() {
            for metric in METRICS {
                let name = format!("{metric}_{}", side.replace('-', "_"));
                figures.push((key(name), median(&case(side, place), metric)));
            }
        }
    }
    let traces = |metric: &str| median("traces", metric);
    let scan = |metric: &str| median("scan", metric);
    let percent = |lazy: Option<f64>, set: Option<f64>| Some(ratio(lazy, set)? * 100.0);
    let saves = |metric: &str| median("save", metric);
    let touch = |metric: &str| median(touch::CASE, metric);
    let restored = |side: &str, metric: &str| median(&case(side, Profile::Cloud.name()), metric);
    let none = |pages: &f64| *pages == 0.0;
    let (waited_for, ahead) = (restored("eager", "faults"), restored("lazy", "pages_prefetched"));
    for (metric, value) in [
        ("pages_prefetched_eager", saves("stored_pages")),
        // A guest that waits for nothing has everything prefetched that it uses.
        ("accesses_skipped_eager", waited_for.filter(none).and(traces("second_pages"))),
        ("pages_lazy_eager", waited_for),
        ("pages_prefetched_lazy", ahead),
        // A guest with nothing prefetched waits for everything that it uses.
        ("accesses_skipped_lazy", ahead.filter(none)),
        ("pages_lazy_lazy", traces("second_pages")),
        ("pages_prefetched_trace", traces("first_pages")),
        ("accesses_skipped_trace", traces("skipped_pages")),
        ("pages_lazy_trace", traces("lazy_pages")),
        ("pages_lazy_trace_pct", percent(traces("lazy_pages"), traces("first_pages"))),
        ("pages_prefetched_scan", scan("pages")),
        ("accesses_skipped_scan", scan("skipped_pages")),
        ("pages_lazy_scan", scan("lazy_pages")),
        ("pages_lazy_scan_pct", percent(scan("lazy_pages"), scan("pages"))),
        ("scan_slowdown_pct", scan("slowdown_pct")),
        ("guest_read_us_p50_missing", touch("missing_p50_us")),
        ("guest_read_us_p99_missing", touch("missing_p99_us")),
        ("guest_read_us_p50_there", touch("there_p50_us")),
        ("guest_read_us_p99_there", touch("there_p99_us")),
        ("save_s", saves("save_s")),
        ("save_pause_ms", saves("pause_ms")),
        ("save_live_s", saves("live_s")),
        ("save_written_mib_s", saves("written_mib_s")),
        ("snapshot_mib", saves("snapshot_mib")),
        ("snapshot_mib_dedup", saves("snapshot_mib_dedup")),
    ] {
        figures.push((metric.to_owned(), value));
    }
    record.summarise_all(figures);
    responsiveness::summarise(record);
}

pub fn table(record: &Record) -> Table {
    let mut table = Table::new([
        "side@place",
        "running ms",
        "first answer ms",
        "usable s",
        "complete s",
        "disks complete s",
        "faults in 100 requests",
        "fault us p50",
        "fault us p99",
        "all faults ms",
        "read MiB",
        "steady ms",
        "pages prefetched",
        "runs",
    ]);
    for place in places() {
        for side in sides() {
            let case = case(side, place);
            let runs = record.values(&case, "first_answer_ms").len();
            if runs == 0 {
                continue;
            }
            let figure = |metric: &str| figure_or_dash(stats::median(record.values(&case, metric)));
            let figures = METRICS.into_iter().chain(["pages_prefetched"]).map(figure);
            table.row([case.clone()].into_iter().chain(figures).chain([runs.to_string()]));
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_follow_from_measured_values_only() {
        let mut record = Record::of("restore", []);
        record.add("traces", "second_pages", "", 1675.0);
        record.add("lazy@cloud", "pages_prefetched", "", 0.0);
        summarise(&mut record, &[Profile::Cloud]);
        let skipped = |record: &Record, side: &str| record.summary.get(&format!("accesses_skipped_{side}")).copied();
        assert_eq!((skipped(&record, "lazy"), skipped(&record, "eager")), (Some(0.0), None));
        record.add("eager@cloud", "faults", "", 0.0);
        summarise(&mut record, &[Profile::Cloud]);
        assert_eq!(skipped(&record, "eager"), Some(1675.0));
    }

    fn trace(latencies_ms: impl IntoIterator<Item = f64>) -> Trace {
        let mut now_s = 1.0;
        let mut sample = |ms: f64| {
            let begun_s = now_s;
            now_s += ms / 1e3;
            Sample { begun_s, ended_s: now_s, bytes: 1 }
        };
        Trace { samples: latencies_ms.into_iter().map(&mut sample).collect() }
    }

    #[test]
    fn service_is_usable_from_its_steady_speed_on() {
        let slow_first = trace([100.0; 10].into_iter().chain([10.0; 200]));
        let service = Service::of(&slow_first, 80);
        assert!((service.steady_ms - 10.0).abs() < 1e-6, "{service:?}");
        // One slow request in twenty is too many.
        assert!((service.usable_s - 2.0).abs() < 1e-6, "{service:?}");
        assert!((Service::of(&trace([10.0; 200]), 80).usable_s - 1.0).abs() < 1e-6);
    }

    #[test]
    fn stalling_service_is_not_usable() {
        let stalling = (0..100).map(|number| if number % 15 == 0 { 100.0 } else { 10.0 });
        let service = Service::of(&trace(stalling.chain([10.0; 100])), 80);
        assert!(service.usable_s > 2.0, "{service:?}");
    }
}
