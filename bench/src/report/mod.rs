//! The report: one self-contained HTML page, readable from a file, on a phone, in dark and in light.
//!
//! The plots follow the paper that first measured warm reboots, so that a reader can compare them: throughput over time with all
//! reboots overlaid (its Figure 4).

mod page;
pub mod read_times;
pub mod share_plot;
mod throughput;

pub use hearth_page::memory_plot::{self, Held, MemoryPlot};
pub use hearth_page::timeline::{Phase, Timeline};
pub use hearth_page::{Page, Run};

use std::iter;
use std::path::Path;

use hearth_page::paragraphs;

use crate::record::Record;
use crate::table::{Table, figure};

/// The figures of a record's summary.
pub fn figures(record: &Record) -> String {
    let mut figures = Table::new(["figure", "value"]);
    for (metric, value) in &record.summary {
        figures.row([metric.clone(), figure(*value)]);
    }
    figures.html()
}

/// The machine and method of a record, as paragraphs.
pub fn notes(record: &Record, how: &[String]) -> String {
    let on = format!("{}; {}. Disk profiles by: {}.", record.machine.describe(), record.qemu, record.profile_by);
    paragraphs(iter::once(&on).chain(how))
}

/// A value for each way to reboot, in the order of the page.
pub type ByRun<T> = Vec<(Run, T)>;

/// Requests per second over time, with the crash at zero.
#[derive(Clone, Debug)]
pub struct Series {
    pub run: Run,
    pub points: Vec<(f64, f64)>,
    /// Time of the first answer after the crash.
    pub back_s: f64,
}

/// A figure at the head of the page.
#[derive(Clone, Debug)]
pub struct Tile {
    pub label: String,
    pub values: ByRun<String>,
    pub note: String,
}

/// A line of the main table: before, and after each way to reboot.
#[derive(Clone, Debug)]
pub struct Line {
    pub measure: String,
    pub before: String,
    pub values: ByRun<String>,
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    pub title: String,
    pub lead: String,
    /// One sentence on what the figures show.
    pub verdict: String,
    pub tiles: Vec<Tile>,
    pub series: Vec<Series>,
    pub lines: Vec<Line>,
    pub timelines: Vec<Timeline>,
    /// Notes on the method, one paragraph each.
    pub notes: Vec<String>,
    pub footer: String,
}

impl Report {
    pub fn html(&self) -> String {
        page::render(self)
    }

    /// Writes the page completely or not at all.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        write_whole(path, &self.html())
    }
}

/// Replaces a page completely or not at all.
pub fn write_whole(path: &Path, html: &str) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let fresh = path.with_extension("html.new");
    std::fs::write(&fresh, html)?;
    std::fs::rename(&fresh, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            title: "A <machine> & its cache".into(),
            lead: "lead".into(),
            series: vec![
                Series { run: Run::Warm, points: vec![(-0.5, 80.0), (0.5, 0.0), (1.5, 79.0)], back_s: 1.0 },
                Series { run: Run::Cold, points: vec![(-0.5, 80.0), (0.5, 0.0), (1.5, 20.0)], back_s: 1.2 },
            ],
            lines: vec![Line {
                measure: "boot".into(),
                before: "–".into(),
                values: vec![(Run::Warm, "7.5 s".into()), (Run::Cold, "9.1 s".into())],
            }],
            timelines: vec![Timeline {
                title: "Warm reboot: 90 ms of 7.60 s without service".into(),
                run: Run::Warm,
                phases: vec![Phase { name: "start_qemu".into(), start_ms: 3.0, duration_ms: 80.0 }],
            }],
            ..Report::default()
        }
    }

    #[test]
    fn page_is_complete_and_self_contained() {
        let html = report().html();
        assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</html>"));
        for outside in ["http://", "https://", "src=", "<link", "@import", "url("] {
            assert!(!html.contains(outside), "{outside}");
        }
        assert!(html.contains("A &lt;machine&gt; &amp; its cache"));
        assert!(html.contains("prefers-color-scheme"));
    }

    #[test]
    fn every_part_that_has_data_is_drawn() {
        let html = report().html();
        for part in ["start_qemu", "90 ms of 7.60 s", "9.1 s", "crash"] {
            assert!(html.contains(part), "{part}");
        }
        let empty = Report::default().html();
        assert!(!empty.contains("<svg"), "no data, no picture");
    }

    #[test]
    fn every_tag_that_opens_closes() {
        let html = report().html();
        for tag in ["svg", "g", "section", "table", "tr", "td", "figure", "main", "text", "div"] {
            let opened = html.matches(&format!("<{tag} ")).count() + html.matches(&format!("<{tag}>")).count();
            assert_eq!(opened, html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn report_replaces_the_previous_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demo/report.html");
        Report::default().write(&path).unwrap();
        report().write(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), report().html());
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
