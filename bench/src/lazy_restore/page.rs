//! The report: the fraction of time that a guest waits for memory, over time, for each side, as in the paper's poster.

use super::waits::Waits;
use super::{COUNTED_REQUESTS, Shape, places, store, summary};
use crate::host::profile::Profile;
use crate::record::Record;
use crate::report::share_plot::{self, ShareLine};
use crate::report::{self, Page, figures};

/// Length of the plot, as a multiple of the longest restore.
const MORE: f64 = 1.1;

/// One restore of a side.
pub struct Life {
    pub side: &'static str,
    /// A profile of the disk, or the store.
    pub place: &'static str,
    pub waits: Waits,
}

pub fn html(record: &Record, shape: Shape, lives: &[Life]) -> String {
    let mut page = Page::new(
        "A guest comes out of its snapshot",
        "A web server and a database, most of their memory in use, are restored and asked at once. Until a guest runs all \
         of its time goes into restoring memory; from then on what it waits for pages that it touches.",
    );
    page.quick(record.quick);
    // A place may lack a side, which must not change the others' colours.
    let mut sides: Vec<&str> = Vec::new();
    for life in lives {
        if !sides.contains(&life.side) {
            sides.push(life.side);
        }
    }
    for place in places() {
        let lives: Vec<&Life> = lives.iter().filter(|life| life.place == place).collect();
        let busy = |life: &&Life| {
            life.waits.points.iter().filter(|point| point.1 >= 1.0).map(|point| point.0).fold(0.0, f64::max)
        };
        let end_s = lives.iter().map(busy).fold(0.0, f64::max) * MORE;
        let lines: Vec<ShareLine> = lives.iter().map(|life| line(life, &sides, end_s)).collect();
        let picture = share_plot::draw(&lines, "Fraction of time spent restoring memory", "seconds from the order");
        if !picture.is_empty() {
            let from = if place == store::STORE { "out of an object store" } else { "out of a folder, profile" };
            let place = if place == store::STORE { "" } else { place };
            page.section(
                format!("Time spent restoring memory, {from} {place}").trim_end(),
                "The share of each moment in which the guest waited for its memory. Better: at zero sooner.",
                &picture,
            );
        }
    }
    page.section("Sides", "", &summary::table(record).html());
    page.section("Figures", "", &figures(record));
    page.section("How it was measured", "", &notes(record, shape));
    page.html(&format!("Hearth {}, {}", env!("CARGO_PKG_VERSION"), record.date))
}

fn line(life: &Life, sides: &[&str], end_s: f64) -> ShareLine {
    let mut points = life.waits.clone().to(end_s).points;
    points.retain(|point| point.0 <= end_s);
    let colour = sides.iter().position(|side| *side == life.side).unwrap_or_default();
    ShareLine { name: life.side.to_owned(), colour, points }
}

fn notes(record: &Record, shape: Shape) -> String {
    let database = match shape.rows {
        0 => "no database".to_owned(),
        rows => format!("{rows} rows of a table in the database's buffers (every other request is a query)"),
    };
    report::notes(record, &[
        format!(
            "A guest of {} MiB: {} MiB of files in its cache, {database}, {} MiB of one process. The figures of pages and faults \
             are those of {COUNTED_REQUESTS} requests.",
            shape.memory_mib,
            shape.web_files_mib(),
            shape.anonymous_mib
        ),
        format!(
            "The object store is an S3 server on loopback; its wire carries {}, and each request is {} ms under way.",
            Profile::Cloud.rate().map_or_else(String::new, |rate| format!("{} MiB/s", rate.mib_per_second)),
            shape.store_request.as_millis()
        ),
        "The first run of each side. A fault is counted by the keeper, from when it hears of it until the page is there, \
         and when it is over; sampled four times a second."
            .to_owned(),
    ])
}
