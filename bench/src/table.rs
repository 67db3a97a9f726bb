//! A table as aligned text for the terminal, Markdown for the docs, and HTML for reports.

use crate::record::Record;
use crate::stats;

/// Columns of a table of cases: heading, and metric of which it shows the median.
pub type Columns<'a> = [(&'a str, &'a str)];

pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Table { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// A table with a row for each of `lines`: its name, then the medians of its case. A case that has none of these metrics is
    /// left out.
    pub fn of_cases(
        record: &Record,
        what: &str,
        columns: &Columns<'_>,
        lines: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let mut table = Table::new(std::iter::once(what).chain(columns.iter().map(|column| column.0)));
        for (name, case) in lines {
            let medians: Vec<_> =
                columns.iter().map(|(_, metric)| stats::median(record.values(&case, metric))).collect();
            if medians.iter().any(Option::is_some) {
                table.row(std::iter::once(name).chain(medians.into_iter().map(figure_or_dash)));
            }
        }
        table
    }

    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        debug_assert!(cells.len() <= self.head.len(), "more cells than headings: {cells:?}");
        cells.resize(self.head.len(), String::new());
        self.rows.push(cells);
    }

    /// The table as text: the first column to the left, the others (figures) to the right.
    pub fn text(&self) -> String {
        let widths = self.widths();
        let line = |cells: &[String]| {
            let mut line = String::new();
            for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                line += &if column == 0 { format!("{cell}{gap}") } else { format!("  {gap}{cell}") };
            }
            line.trim_end().to_owned() + "\n"
        };
        let rule = "-".repeat(widths.iter().sum::<usize>() + 2 * (widths.len() - 1)) + "\n";
        line(&self.head) + &rule + &self.rows.iter().map(|row| line(row)).collect::<String>()
    }

    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule: Vec<String> =
            (0..self.head.len()).map(|column| if column == 0 { "---" } else { "---:" }.to_owned()).collect();
        line(&self.head) + &line(&rule) + &self.rows.iter().map(|row| line(row)).collect::<String>()
    }

    /// The table for a report; empty if it has no rows.
    pub fn html(&self) -> String {
        hearth_page::table(&self.head, &self.rows)
    }

    fn widths(&self) -> Vec<usize> {
        let column_width = |column: usize| {
            let cells = std::iter::once(&self.head).chain(&self.rows);
            cells.map(|cells| cells[column].chars().count()).max().unwrap_or(0)
        };
        (0..self.head.len()).map(column_width).collect()
    }
}

/// A figure as text: no decimals from 100 up, one from 10 up, two below.
pub fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// The figure, or a dash if it was not measured.
pub fn figure_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), figure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(["side", "MiB/s"]);
        table.row(["warm", "700"]);
        table.row(["cold, from disk", "9.25"]);
        table
    }

    #[test]
    fn text_aligns_figures_to_the_right() {
        let expect = "side             MiB/s\n----------------------\nwarm               700\ncold, from disk   9.25\n";
        assert_eq!(table().text(), expect);
    }

    #[test]
    fn markdown_is_a_table() {
        assert_eq!(
            table().markdown(),
            "| side | MiB/s |\n| --- | ---: |\n| warm | 700 |\n| cold, from disk | 9.25 |\n"
        );
    }

    #[test]
    fn larger_figures_have_fewer_decimals() {
        for (value, text) in [(1234.5, "1234"), (99.95, "100.0"), (12.34, "12.3"), (0.126, "0.13"), (-45.67, "-45.7")] {
            assert_eq!(figure(value), text);
        }
        assert_eq!(figure_or_dash(None), "–");
    }
}
