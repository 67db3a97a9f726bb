//! Tests of quoted figures: those of `docs/benchmarks.md` equal the ones on their record's pages, and those of the README the ones in
//! the section of `docs/benchmarks.md` that it links.
//!
//! The last column of the overview's tables names the figures: a key of a record's summary, or `side@profile/column` of its rows.

use std::collections::HashMap;
use std::path::Path;

/// The figures on a record's page, by name.
fn figures(page: &str) -> HashMap<String, String> {
    let mut columns: Vec<String> = Vec::new();
    let mut figures = HashMap::new();
    let mut in_table = false;
    for line in page.lines() {
        let cells: Vec<&str> = line.strip_prefix("| ").map_or(Vec::new(), |row| row.split(" | ").collect());
        let cells: Vec<&str> = cells.iter().map(|cell| cell.trim_end_matches('|').trim()).collect();
        match cells.split_first() {
            None => in_table = false,
            Some(_) if !in_table => (in_table, columns) = (true, cells.iter().map(|&cell| cell.to_owned()).collect()),
            // `case | metric | unit | median | ...`
            Some((case, [metric, _, median, ..])) if columns.get(1).is_some_and(|name| name == "metric") => {
                figures.insert(format!("{case}/{metric}"), (*median).to_owned());
            }
            Some((key, [value])) => drop(figures.insert(key.trim_matches('`').to_owned(), (*value).to_owned())),
            Some((side, values)) => {
                let named = columns[1..].iter().zip(values);
                figures.extend(named.map(|(column, value)| (format!("{side}/{column}"), (*value).to_owned())));
            }
        }
    }
    figures
}

/// The figures in a row of the overview, and their names.
fn quoted(row: &str) -> Option<(Vec<&str>, Vec<&str>)> {
    let cells: Vec<&str> = row.strip_prefix("| ")?.split('|').map(str::trim).collect();
    let [_, ours, others, names, ""] = cells[..] else { return None };
    let numbers = [ours, others].into_iter().filter_map(|cell| cell.split(' ').next()).filter(|word| !word.is_empty());
    let names: Vec<&str> = names.split('`').skip(1).step_by(2).collect();
    (!names.is_empty()).then(|| (numbers.collect(), names))
}

#[test]
fn quoted_figures_equal_the_records() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let overview = std::fs::read_to_string(docs.join("benchmarks.md")).unwrap();
    let mut quotes = 0;
    for section in overview.split("\n## ").skip(1) {
        let record = section
            .split_once("[Record](")
            .and_then(|(_, rest)| rest.split_once(')'))
            .expect("each section links its record")
            .0;
        let known = figures(&std::fs::read_to_string(docs.join(record)).unwrap());
        for row in section.lines() {
            let Some((numbers, names)) = quoted(row) else { continue };
            assert_eq!(numbers.len(), names.len(), "one name for each figure: {row}");
            for (number, name) in numbers.iter().zip(names) {
                assert_eq!(known.get(name).map(String::as_str), Some(*number), "{record}: {name}");
                quotes += 1;
            }
        }
    }
    assert!(quotes > 40, "the test no longer reads the tables: {quotes} figures");
}

/// Figures of a row of the README, which are bold, and the section of the overview that the row links.
fn headline(row: &str) -> Option<(Vec<&str>, &str)> {
    let (_, link) = row.strip_prefix("| ")?.split_once("(docs/benchmarks.md#")?;
    Some((row.split("**").skip(1).step_by(2).collect(), link.split_once(')')?.0))
}

#[test]
fn figures_of_the_readme_are_those_of_the_overview() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let overview = std::fs::read_to_string(root.join("docs/benchmarks.md")).unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let mut quotes = 0;
    for (figures, name) in readme.lines().filter_map(headline) {
        let section = overview.split("\n## ").find(|section| section.to_lowercase().starts_with(&format!("{name}\n")));
        let known: Vec<&str> =
            section.expect(name).lines().filter_map(quoted).flat_map(|(numbers, _)| numbers).collect();
        let unknown: Vec<&&str> = figures.iter().filter(|figure| !known.contains(figure)).collect();
        assert!(unknown.is_empty(), "{name}: the overview does not have {unknown:?}");
        quotes += figures.len();
    }
    assert!(quotes > 10, "the test no longer finds the README's figures: {quotes}");
}
