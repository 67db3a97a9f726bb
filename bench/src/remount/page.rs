//! The report: the latency of every read during a boot, as in the paper's Figure 9, and the figures.

use super::trace::Trace;
use super::{MEMORY_MIB, summary};
use crate::record::Record;
use crate::report::read_times::{self, Extent};
use crate::report::{self, Page, figures};
use crate::sides::BOOT_SET_LIMIT;
use crate::table::figure_or_dash;

const EXPLANATION: &str =
    "Each dot is a read of the guest's: when, and how long it took. Better: lower, and over sooner.";

pub fn html(record: &Record, traces: &[Trace]) -> String {
    let mut page = Page::new(
        "Hundreds of volumes come back",
        "A storage appliance crashes with all its volumes mounted and their journals dirty. It is ready again when every \
         volume is mounted and has been looked through.",
    );
    page.quick(record.quick);
    let most = |of: fn(&Trace) -> f64| traces.iter().map(of).fold(0.0, f64::max);
    let scale =
        Extent { until: most(|trace| trace.ready_s), highest: most(|trace| trace.us(100.0).unwrap_or(0.0)) / 1e3 };
    for trace in traces {
        let reads: Vec<(f64, f64)> = trace.reads.iter().map(|read| (read.second, read.us / 1e3)).collect();
        let title = format!(
            "{}: {} reads from the reset until it is ready, half of them within {} ms, the slowest {} ms",
            trace.side,
            reads.len(),
            figure_or_dash(trace.us(50.0).map(|us| us / 1e3)),
            figure_or_dash(trace.us(100.0).map(|us| us / 1e3))
        );
        page.section(&title, EXPLANATION, &read_times::draw(&reads, &scale));
    }
    page.section("Sides", "", &summary::table(record).html());
    page.section("Figures", "", &figures(record));
    page.section("How it was measured", "", &notes(record));
    page.html(&format!("Hearth {}, {}", env!("CARGO_PKG_VERSION"), record.date))
}

fn notes(record: &Record) -> String {
    report::notes(
        record,
        &[format!(
            "A guest of {MEMORY_MIB} MiB, mounting four volumes at a time; a boot set of at most {BOOT_SET_LIMIT}. The times of the reads \
             are those of the guest's own block layer, at paper, in a machine of its own; all pictures have one scale."
        )],
    )
}
