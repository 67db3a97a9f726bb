//! The record of a bench: every measured value, and the summary's figures.
//!
//! `target/bench/<name>.json`: a row keeps all values of one metric on one side at one disk profile, so that a median can be
//! checked;
//! `summary` holds the figures that `docs/benchmarks/*.md` show. The file is written as a whole and renamed.
//!
//! `target/bench/<name>.partial.json`: the values so far, from the first one until the record is written. An interrupted bench
//! leaves its
//! values there, and the last complete record unchanged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::host::facts::HostFacts;
use crate::stats;

/// Peaks of a machine's memory in percent of its budget, measured from outside and by the keeper. The higher one counts.
pub const BUDGET_PEAKS: [&str; 2] = ["budget_peak_pct", "keeper_peak_pct"];

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("cannot read {path}: run `make bench NAME={bench}` first")]
    Read { path: PathBuf, bench: String, source: std::io::Error },
    #[error("{path} is not a bench record")]
    Parse { path: PathBuf, source: serde_json::Error },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Side and profile: `hearth-warm@paper`.
    pub case: String,
    pub metric: String,
    pub unit: String,
    pub values: Vec<f64>,
    pub median: f64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    pub bench: String,
    pub date: String,
    /// A quick run has the same rows from fewer and shorter measurements: enough for a check, but not to quote.
    pub quick: bool,
    pub machine: HostFacts,
    pub qemu: String,
    /// The guest's CPU model, on which page-cache figures under TCG depend (up to 3.6 times).
    pub cpu_model: String,
    /// How the disk profile was enforced: by a cgroup on the device, or by each side's own limits.
    pub profile_by: String,
    pub rows: Vec<Row>,
    pub summary: BTreeMap<String, f64>,
    /// Sides that could not be measured, with the reason.
    pub left_out: Vec<String>,
    /// Folder of the partial record.
    #[serde(skip)]
    kept_in: Option<PathBuf>,
}

impl Record {
    pub fn new(bench: &str, quick: bool, machine: HostFacts, qemu: String, cpu_model: &str) -> Self {
        Record {
            bench: bench.to_owned(),
            date: crate::host::facts::now_rfc3339(),
            quick,
            machine,
            qemu,
            cpu_model: cpu_model.to_owned(),
            profile_by: "none".to_owned(),
            rows: Vec::new(),
            summary: BTreeMap::new(),
            left_out: Vec::new(),
            kept_in: None,
        }
    }

    /// Keeps each value in the partial record as soon as it is added.
    pub fn keep_in(self, folder: &Path) -> Self {
        Record { kept_in: Some(folder.to_owned()), ..self }
    }

    /// Adds a value to the row of this case and metric, or to a new row.
    pub fn add(&mut self, case: &str, metric: &str, unit: &str, value: f64) {
        let row = match self.rows.iter().position(|row| row.case == case && row.metric == metric) {
            Some(position) => &mut self.rows[position],
            None => {
                self.rows.push(Row {
                    case: case.to_owned(),
                    metric: metric.to_owned(),
                    unit: unit.to_owned(),
                    values: Vec::new(),
                    median: 0.0,
                });
                self.rows.last_mut().expect("a row was just pushed")
            }
        };
        row.values.push(value);
        row.median = stats::median(&row.values).expect("a value was just pushed");
        self.keep();
    }

    fn keep(&self) {
        let Some(folder) = &self.kept_in else { return };
        if let Err(error) = self.write_to(&self.partial_path(folder)) {
            eprintln!("{}: cannot keep values before the end: {}", self.bench, crate::chain(&error));
        }
    }

    pub fn median(&self, case: &str, metric: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.case == case && row.metric == metric).map(|row| row.median)
    }

    /// All values of this case and metric.
    pub fn values(&self, case: &str, metric: &str) -> &[f64] {
        let row = self.rows.iter().find(|row| row.case == case && row.metric == metric);
        row.map_or(&[], |row| &row.values)
    }

    /// The cases that have values, in the order in which they were measured.
    pub fn cases(&self) -> Vec<&str> {
        let mut cases: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !cases.contains(&row.case.as_str()) {
                cases.push(&row.case);
            }
        }
        cases
    }

    /// The highest value of these metrics over all cases.
    pub fn highest(&self, metrics: &[&str]) -> Option<f64> {
        let rows = self.rows.iter().filter(|row| metrics.contains(&row.metric.as_str()));
        rows.flat_map(|row| row.values.iter().copied()).reduce(f64::max)
    }

    /// The sum of all values of a metric over all cases.
    pub fn total(&self, metric: &str) -> Option<f64> {
        self.of_all_cases(metric).into_iter().reduce(|sum, value| sum + value)
    }

    /// All values of a metric over all cases.
    pub fn of_all_cases(&self, metric: &str) -> Vec<f64> {
        self.rows.iter().filter(|row| row.metric == metric).flat_map(|row| row.values.iter().copied()).collect()
    }

    /// Adds a figure to the summary. A figure that was not measured is left out, rather than added as zero.
    pub fn summarise(&mut self, metric: &str, value: Option<f64>) {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            self.summary.insert(metric.to_owned(), round(value));
        }
    }

    /// The same for each of `figures`.
    pub fn summarise_all<N: AsRef<str>>(&mut self, figures: impl IntoIterator<Item = (N, Option<f64>)>) {
        for (metric, value) in figures {
            self.summarise(metric.as_ref(), value);
        }
    }

    /// A record for a test.
    #[cfg(test)]
    pub fn of<'a>(bench: &str, rows: impl IntoIterator<Item = (&'a str, &'a str, f64)>) -> Self {
        let machine = HostFacts::gather(crate::host::facts::Accelerator::Tcg);
        let mut record = Record::new(bench, true, machine, "QEMU".into(), "max");
        for (case, metric, value) in rows {
            record.add(case, metric, "", value);
        }
        record
    }

    pub fn path(folder: &Path, bench: &str) -> PathBuf {
        folder.join(format!("{bench}.json"))
    }

    pub fn write(&self, folder: &Path) -> Result<PathBuf, RecordError> {
        let path = Self::path(folder, &self.bench);
        self.write_to(&path)?;
        // There is no partial record if nothing was added. One that cannot be removed is older than the record.
        let _ = fs::remove_file(self.partial_path(folder));
        Ok(path)
    }

    fn partial_path(&self, folder: &Path) -> PathBuf {
        Self::path(folder, &format!("{}.partial", self.bench))
    }

    fn write_to(&self, path: &Path) -> Result<(), RecordError> {
        let failed = |source| RecordError::Write { path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let fresh = path.with_extension("json.new");
        let text = serde_json::to_string_pretty(self).expect("a record holds only numbers, texts and lists");
        fs::write(&fresh, text + "\n").map_err(failed)?;
        fs::rename(&fresh, path).map_err(failed)
    }

    pub fn read(folder: &Path, bench: &str) -> Result<Self, RecordError> {
        let path = Self::path(folder, bench);
        let text = fs::read_to_string(&path).map_err(|source| RecordError::Read {
            path: path.clone(),
            bench: bench.to_owned(),
            source,
        })?;
        serde_json::from_str(&text).map_err(|source| RecordError::Parse { path, source })
    }
}

/// Rounds to four significant digits: more would claim a precision that no shared machine has.
fn round(value: f64) -> f64 {
    if value == 0.0 {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record::of("trial", [])
    }

    #[test]
    fn row_keeps_its_values_and_median() {
        let mut record = record();
        for value in [3.0, 1.0, 2.0] {
            record.add("side@asis", "boot_s", "s", value);
        }
        assert_eq!(record.rows.len(), 1);
        assert_eq!(record.rows[0].values, [3.0, 1.0, 2.0]);
        assert_eq!(record.median("side@asis", "boot_s"), Some(2.0));
    }

    #[test]
    fn unmeasured_figures_are_not_in_the_summary() {
        let mut record = record();
        record.summarise("missing", record.median("side@asis", "boot_s"));
        record.summarise("endless", Some(f64::INFINITY));
        assert!(record.summary.is_empty());
    }

    #[test]
    fn peaks_and_sums_span_all_cases() {
        let mut record = record();
        record.add("a", "peak", "%", 101.0);
        record.add("b", "peak", "%", 102.5);
        assert_eq!(record.highest(&["peak"]), Some(102.5));
        record.add("b", "other peak", "%", 103.0);
        assert_eq!(record.highest(&["peak", "other peak"]), Some(103.0));
        assert_eq!(record.total("peak"), Some(203.5));
        assert_eq!(record.total("other"), None);
    }

    #[test]
    fn record_survives_write_and_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = record();
        record.add("a", "peak", "%", 101.0);
        record.summarise("peak", Some(101.23456));
        record.write(folder.path()).unwrap();
        let back = Record::read(folder.path(), "trial").unwrap();
        assert_eq!(back.summary["peak"], 101.2);
        assert_eq!(back.rows[0].values, [101.0]);
    }

    #[test]
    fn interrupted_bench_keeps_values_and_last_record() {
        let folder = tempfile::tempdir().unwrap();
        let mut whole = record();
        whole.add("a", "peak", "%", 101.0);
        whole.write(folder.path()).unwrap();
        let mut interrupted = record().keep_in(folder.path());
        interrupted.add("a", "peak", "%", 102.0);
        drop(interrupted);
        assert_eq!(Record::read(folder.path(), "trial").unwrap().values("a", "peak"), [101.0]);
        assert_eq!(Record::read(folder.path(), "trial.partial").unwrap().values("a", "peak"), [102.0]);
        let mut next = record().keep_in(folder.path());
        next.add("a", "peak", "%", 103.0);
        next.write(folder.path()).unwrap();
        assert_eq!(Record::read(folder.path(), "trial").unwrap().values("a", "peak"), [103.0]);
        assert!(!Record::path(folder.path(), "trial.partial").exists());
    }

    #[test]
    fn missing_record_names_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let text = Record::read(folder.path(), "disk").unwrap_err().to_string();
        assert!(text.ends_with("disk.json: run `make bench NAME=disk` first"), "{text}");
    }

    #[test]
    fn rounding_keeps_four_digits() {
        for (value, rounded) in [(0.0, 0.0), (123456.0, 123500.0), (0.0123456, 0.01235), (-7.77777, -7.778)] {
            assert_eq!(round(value), rounded);
        }
    }
}
