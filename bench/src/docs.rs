//! The tables of `docs/benchmarks/NAME.md`, one page for each bench, generated from the records, so that no figure is copied by
//! hand.
//!
//! A table is between `<!-- bench:NAME -->` and `<!-- end -->`. A bench without a record keeps its old table.

use std::path::{Path, PathBuf};

use crate::harness::{BENCHES, Bench};
use crate::record::{Record, RecordError};
use crate::table::{Table, figure};

pub const PAGES: &str = "docs/benchmarks";
const END: &str = "<!-- end -->";

#[derive(Debug, thiserror::Error)]
pub enum DocsError {
    #[error("cannot read or write {path}")]
    Page { path: PathBuf, source: std::io::Error },
    #[error("{path} has no line {marker} with {END} after it")]
    NoPlace { path: PathBuf, marker: String },
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Puts the tables of all records in `folder` into their pages.
pub fn rewrite(folder: &Path, pages: &Path) -> Result<(), DocsError> {
    for bench in BENCHES {
        let name = bench.name;
        if !Record::path(folder, name).exists() {
            eprintln!("{name}: no record in {}; its table is unchanged", folder.display());
            continue;
        }
        let record = Record::read(folder, name)?;
        let page = pages.join(format!("{name}.md"));
        let failed = |source| DocsError::Page { path: page.clone(), source };
        let text = std::fs::read_to_string(&page).map_err(failed)?;
        let marker = format!("<!-- bench:{name} -->");
        let no_place = || DocsError::NoPlace { path: page.clone(), marker: marker.clone() };
        let text = replaced(&text, &marker, &section(&bench, &record)).ok_or_else(no_place)?;
        std::fs::write(&page, text).map_err(failed)?;
    }
    Ok(())
}

/// The text with the section between the marker and the next end replaced.
fn replaced(text: &str, marker: &str, section: &str) -> Option<String> {
    let begin = text.find(marker)? + marker.len();
    let end = begin + text[begin..].find(END)?;
    Some(format!("{}\n{section}{}", &text[..begin], &text[end..]))
}

fn section(bench: &Bench, record: &Record) -> String {
    let quick = if record.quick { " **Quick run: a look, not a result.**" } else { "" };
    let head = format!(
        "{}.{quick} {}. {}, guest CPU model `{}`. Load average at the start: {:.1}. Disk profiles by: {}.\n\n",
        record.date,
        record.machine.describe(),
        record.qemu,
        record.cpu_model,
        record.machine.load_average,
        record.profile_by
    );
    let rows = (bench.table)(record).markdown();
    let second = bench.second_table.map(|(heading, table)| format!("\n{heading}:\n\n{}", table(record).markdown()));
    let second = second.unwrap_or_default();
    let left_out: String = record.left_out.iter().map(|why| format!("\nLeft out: {why}\n")).collect();
    format!("{head}{}\n{rows}{second}{left_out}", summary(record).markdown())
}

fn summary(record: &Record) -> Table {
    let mut table = Table::new(["figure", "value"]);
    for (metric, value) in &record.summary {
        table.row([format!("`{metric}`"), figure(*value)]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let mut record = Record::of("disk", []);
        record.add("hearth@asis", "seq_miss", "MiB/s", 700.0);
        record.summarise("seq_miss_vs_qemu_ratio", Some(0.97));
        record
    }

    #[test]
    fn only_text_between_the_markers_changes() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("disk.md");
        record().write(folder.path()).unwrap();
        std::fs::write(&page, "# head\n<!-- bench:disk -->\nold figures\n<!-- end -->\ntail\n").unwrap();
        rewrite(folder.path(), folder.path()).unwrap();
        let text = std::fs::read_to_string(&page).unwrap();
        assert!(text.starts_with("# head\n<!-- bench:disk -->\n") && text.ends_with("<!-- end -->\ntail\n"), "{text}");
        assert!(text.contains("| `seq_miss_vs_qemu_ratio` | 0.97 |") && !text.contains("old figures"), "{text}");
        rewrite(folder.path(), folder.path()).unwrap();
        assert_eq!(std::fs::read_to_string(&page).unwrap(), text);
    }

    #[test]
    fn page_without_marker_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("disk.md");
        record().write(folder.path()).unwrap();
        std::fs::write(&page, "nothing").unwrap();
        let text = rewrite(folder.path(), folder.path()).unwrap_err().to_string();
        assert!(text.ends_with("has no line <!-- bench:disk --> with <!-- end --> after it"), "{text}");
    }
}
