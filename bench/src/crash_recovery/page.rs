//! The report: memory over time for every kind of recovery, as in the paper's Figures 5 to 8, the comparisons of its Tables 3 and
//! 6, and the figures.

use super::hearth::Life;
use super::{Shape, summary};
use crate::record::Record;
use crate::report::{self, MemoryPlot, Page, figures, memory_plot};
use crate::table::figure;

const EXPLANATION: &str = "What the files of both incarnations occupy. Better: the dead one (blue) gone sooner, and both together \
                           below the dashed line, which is the machine's RAM.";

pub fn html(record: &Record, shape: Shape, lives: &[Life]) -> String {
    let mut page = Page::new(
        "A kernel panic, dumped beside the next boot",
        "The dead guest's memory is written to the disk, and given back piece by piece, while the next incarnation boots \
         on what is free. Each plot is one crash; zero is the panic.",
    );
    page.quick(record.quick);
    page.section("Sides", "", &summary::table(record).html());
    for life in lives {
        page.section(&title(life), EXPLANATION, &memory_plot::draw(&plot(life, shape)));
    }
    page.section("How much is released at once", "", &summary::chunk_table(record).html());
    page.section("Who gets the disk while a boot needs it", "", &summary::policy_table(record).html());
    page.section("Figures", "", &figures(record));
    page.section("How it was measured", "", &notes(record, shape));
    page.html(&format!("Hearth {}, {}", env!("CARGO_PKG_VERSION"), record.date))
}

fn title(life: &Life) -> String {
    let policy = life.case.policy.map_or_else(String::new, |policy| format!(", {policy}, a boot that needs the disk"));
    format!(
        "{}: level {}, chunks of {} MiB{policy}: back after {} s, dumped after {} s",
        life.profile.name(),
        life.case.level,
        life.case.chunk_mib,
        figure(life.back_s),
        figure(life.dumped_s)
    )
}

fn plot(life: &Life, shape: Shape) -> MemoryPlot {
    MemoryPlot {
        points: life.memory.clone(),
        limit_mib: shape.memory_mib as f64,
        x_label: "seconds from the panic",
        marks: vec![(life.back_s, "serves again"), (life.dumped_s, "dump complete")],
    }
}

fn notes(record: &Record, shape: Shape) -> String {
    report::notes(
        record,
        &[
            format!(
                "A guest of {} MiB with {} MiB of file cache and {} MiB of anonymous memory in use, none of it compressible.",
                shape.memory_mib,
                shape.web_files + shape.data_mib,
                shape.anonymous_mib
            ),
            "Memory is what the files of each incarnation really occupy, sampled from outside.".to_owned(),
        ],
    )
}
