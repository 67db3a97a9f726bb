//! First look at a file: is it TOML, are its keys known, are their values of the right type and range?
//!
//! Bad entries are reported with their line and left out, so that the rest can be looked at as well.

use std::collections::HashSet;

use serde::Deserialize;
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::ConfigFile;
use super::fields::{Field, Kind, Section};
use super::file::FIELDS;
use crate::problem::Problem;

/// How the parser begins what it says of anything that is no value, as of none at all.
const UNQUOTED: &str = "string values must be quoted";

/// A file without its bad entries.
pub struct Shaped {
    pub typed: ConfigFile,
    pub problems: Vec<Problem>,
    /// Keys that are missing only because what was given for them was bad: `memory`, `disks[0].path`.
    pub blamed: HashSet<String>,
}

/// The error holds the one problem of a text that is not TOML at all.
pub fn read(text: &str) -> Result<Shaped, Vec<Problem>> {
    let parsed = DeTable::parse(text).map_err(|error| vec![not_toml(text, &error)])?;
    let mut look = Look { text, problems: Vec::new(), blamed: HashSet::new() };
    let table = look.section(parsed.get_ref(), Section::Machine, "");
    let typed = ConfigFile::deserialize(Value::Table(table)).unwrap_or_else(|error| {
        look.problems.push(Problem::error("the file", error.message().to_owned(), "see docs/config.md"));
        ConfigFile::default()
    });
    Ok(Shaped { typed, problems: look.problems, blamed: look.blamed })
}

fn not_toml(text: &str, error: &toml::de::Error) -> Problem {
    // A value missing at the end of a line is reported for that line, and not for the next one.
    let start = error.span().map_or(0, |span| span.start.min(text.trim_end().len()));
    let number = line_of(text, start);
    let line = text.lines().nth(number - 1).unwrap_or_default();
    let (key, value) = line.split_once('=').map_or((line.trim(), None), |(key, value)| (key.trim(), Some(value)));
    let value = value.map(|value| value.split('#').next().unwrap_or_default().trim());
    let field = FIELDS.iter().find(|field| field.key == key);
    let example = field.map(|field| format!("for example {} = {}", field.key, field.example));
    let (message, hint) = match (error.message(), value) {
        (message, _) if message.starts_with("duplicate key") => {
            let heading = line.trim().strip_prefix('[').and_then(|line| line.strip_suffix(']'));
            let repeats = Section::ALL.into_iter().find(|one| one.repeats() && one.table() == heading);
            let hint = repeats.map(|section| format!("write {} each time", section.heading()));
            (message.to_owned(), hint.unwrap_or_else(|| "remove one of them".to_owned()))
        }
        (message, Some("")) if message.starts_with(UNQUOTED) => {
            (format!("{key} has no value"), example.unwrap_or_else(|| "write a value, or remove the line".to_owned()))
        }
        (message, Some(value)) if message.starts_with(UNQUOTED) => (
            format!("{value} is not a TOML value"),
            example.unwrap_or_else(|| "write strings in \"quotes\"".to_owned()),
        ),
        (message, _) => (
            message.replace('\n', ", "),
            example.unwrap_or_else(|| "see docs/config.md for a complete file".to_owned()),
        ),
    };
    Problem::error(format!("line {number}"), message, hint)
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

struct Look<'a> {
    text: &'a str,
    problems: Vec<Problem>,
    blamed: HashSet<String>,
}

impl Look<'_> {
    /// The good entries of one table. `prefix` is what stands before its keys in messages: `disks[0].`
    fn section(&mut self, table: &DeTable<'_>, section: Section, prefix: &str) -> Table {
        let mut good = Table::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let subject = format!("{prefix}{name} (line {})", line_of(self.text, key.span().start));
            let entry = match subsection(section, name) {
                Some(subsection) => self.subsection(value, subsection, name, &subject),
                None => self.entry(value, section, name, prefix, &subject),
            };
            if let Some(entry) = entry {
                good.insert(name.to_owned(), entry);
            }
        }
        good
    }

    fn subsection(
        &mut self,
        value: &Spanned<DeValue<'_>>,
        section: Section,
        name: &str,
        subject: &str,
    ) -> Option<Value> {
        match value.get_ref() {
            DeValue::Table(table) if !section.repeats() => {
                Some(Value::Table(self.section(table, section, &prefix_of(section, name))))
            }
            DeValue::Array(items) if section.repeats() => {
                let tables = items.iter().enumerate().map(|(index, item)| match item.get_ref() {
                    DeValue::Table(table) => {
                        Some(Value::Table(self.section(table, section, &format!("{name}[{index}]."))))
                    }
                    _ => None,
                });
                match tables.collect::<Option<Vec<_>>>() {
                    Some(tables) => Some(Value::Array(tables)),
                    None => self.wrong_heading(section, name, subject),
                }
            }
            _ => self.wrong_heading(section, name, subject),
        }
    }

    fn wrong_heading(&mut self, section: Section, name: &str, subject: &str) -> Option<Value> {
        let hint = format!("write {} on its own line, with its keys below it", section.heading());
        self.problems.push(Problem::error(subject, "is not a section", hint));
        self.blamed.insert(name.to_owned());
        None
    }

    fn entry(
        &mut self,
        value: &Spanned<DeValue<'_>>,
        section: Section,
        name: &str,
        prefix: &str,
        subject: &str,
    ) -> Option<Value> {
        let Some(field) = Field::of_section(section).find(|field| field.key == name) else {
            let nearest = nearest_key(section, name);
            if let Some(nearest) = nearest {
                self.blamed.insert(format!("{prefix}{nearest}"));
            }
            self.problems.push(Problem::error(subject, "no such key", unknown_key_hint(section, name, nearest)));
            return None;
        };
        match fitting(value.get_ref(), field.kind) {
            Ok(value) => Some(value),
            Err(message) => {
                self.problems.push(Problem::error(subject, message, format!("for example {name} = {}", field.example)));
                self.blamed.insert(format!("{prefix}{name}"));
                None
            }
        }
    }
}

pub(super) fn subsection(section: Section, key: &str) -> Option<Section> {
    match (section, key) {
        (Section::Machine, "boot") => Some(Section::Boot),
        (Section::Machine, "crash") => Some(Section::Crash),
        (Section::Machine, "watchdog") => Some(Section::Watchdog),
        (Section::Machine, "rejuvenate") => Some(Section::Rejuvenate),
        (Section::Machine, "remount") => Some(Section::Remount),
        (Section::Machine, "object_store") => Some(Section::ObjectStore),
        (Section::Remount, "ready") => Some(Section::Ready),
        (Section::Machine, "nvram") => Some(Section::Nvram),
        (Section::Machine, "disks") => Some(Section::Disk),
        (Section::Machine, "nets") => Some(Section::Net),
        _ => None,
    }
}

/// The prefix of a section's keys in messages.
pub(super) fn prefix_of(section: Section, name: &str) -> String {
    match section {
        Section::Ready => "remount.ready.".to_owned(),
        _ => format!("{name}."),
    }
}

/// The value, if it is of this kind; else what is wrong with it.
fn fitting(value: &DeValue<'_>, kind: Kind) -> Result<Value, String> {
    match (kind, value) {
        (Kind::Text | Kind::Path | Kind::Size | Kind::SizeOrPercent | Kind::Time, DeValue::String(text))
            if !text.is_empty() =>
        {
            Ok(Value::String(text.to_string()))
        }
        (Kind::Text, DeValue::String(_)) => Ok(Value::String(String::new())),
        (Kind::Boolean, DeValue::Boolean(truth)) => Ok(Value::Boolean(*truth)),
        (Kind::Integer { min, max }, DeValue::Integer(digits)) => {
            match i64::from_str_radix(digits.as_str(), digits.radix()) {
                Ok(number) if (min..=max).contains(&number) => Ok(Value::Integer(number)),
                _ => Err(format!("{} is not between {min} and {max}", digits.as_str())),
            }
        }
        (Kind::Choice(words), DeValue::String(text)) if words.contains(&text.as_ref()) => {
            Ok(Value::String(text.to_string()))
        }
        (Kind::Choice(words), DeValue::String(text)) => {
            Err(format!("\"{text}\" is not one of \"{}\"", words.join("\", \"")))
        }
        (Kind::TextList, DeValue::Array(items)) => {
            let texts = items.iter().map(|item| match item.get_ref() {
                DeValue::String(text) => Ok(Value::String(text.to_string())),
                _ => Err("is not a list of strings".to_owned()),
            });
            texts.collect::<Result<Vec<_>, _>>().map(Value::Array)
        }
        (Kind::Path | Kind::Size | Kind::SizeOrPercent | Kind::Time, DeValue::String(_)) => Err("is empty".to_owned()),
        _ => Err(format!("is not {}", wanted(kind))),
    }
}

fn wanted(kind: Kind) -> &'static str {
    match kind {
        Kind::Text | Kind::Choice(_) => "a string in quotes",
        Kind::Path => "a path in quotes",
        Kind::Size => "a size in quotes",
        Kind::SizeOrPercent => "a size or percentage in quotes",
        Kind::Time => "a time in quotes",
        Kind::Integer { .. } => "an integer",
        Kind::Boolean => "true or false",
        Kind::TextList => "a list of strings",
    }
}

fn unknown_key_hint(section: Section, name: &str, nearest: Option<&str>) -> String {
    if let Some(nearest) = nearest {
        return format!("did you mean {nearest}?");
    }
    // A key below the wrong heading: TOML has no way back to the top of the file.
    let elsewhere = Section::ALL
        .into_iter()
        .find(|other| *other != section && Field::of_section(*other).any(|field| field.key == name));
    match elsewhere {
        Some(Section::Machine) => "it belongs at the top of the file, before any [heading]".to_owned(),
        Some(other) => format!("it belongs below {}", other.heading()),
        None => "see docs/config.md for all keys".to_owned(),
    }
}

/// The known key that a typing error would most likely have come from. Only plausible ones: at most a third of the
/// letters may differ.
fn nearest_key(section: Section, name: &str) -> Option<&'static str> {
    let subsections: &[&str] = match section {
        Section::Machine => {
            &["boot", "crash", "watchdog", "rejuvenate", "remount", "object_store", "disks", "nvram", "nets"]
        }
        Section::Remount => &["ready"],
        _ => &[],
    };
    Field::of_section(section)
        .map(|field| field.key)
        .chain(subsections.iter().copied())
        .map(|key| (edit_distance(key, name), key))
        .filter(|(distance, key)| *distance * 3 <= key.len().max(3))
        .min()
        .map(|(_, key)| key)
}

/// Insertions, deletions, replacements and swaps of neighbours that lead from one word to the other.
fn edit_distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut rows = vec![vec![0; other.len() + 1]; one.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=other.len()).collect();
    for i in 1..=one.len() {
        for j in 1..=other.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (one, other, expect) in [
            ("memory", "memory", 0),
            ("memory", "memroy", 1),
            ("cpus", "cpu", 1),
            ("", "abc", 3),
            ("ember", "amber", 1),
        ] {
            assert_eq!(edit_distance(one, other), expect, "{one} {other}");
        }
    }

    #[test]
    fn toml_errors_come_with_hints() {
        let check = |text: &str, expect: &str| {
            let problems = read(text).err().expect("it is no TOML");
            assert_eq!(problems[0].to_string(), format!("error: {expect}"), "{text:?}");
        };
        let end = "see docs/config.md for a complete file";
        for text in ["cpus =", "cpus = # none", "cpus =\nname = \"web\"", "cpus =   "] {
            check(text, "line 1: cpus has no value; for example cpus = 2");
        }
        check("frobs =", "line 1: frobs has no value; write a value, or remove the line");
        check("name = web", "line 1: web is not a TOML value; for example name = \"web\"");
        check("sandbox = yes", "line 1: yes is not a TOML value; for example sandbox = true");
        check("memory = 1GiB # small", "line 1: 1GiB is not a TOML value; for example memory = \"2GiB\"");
        check("cpus = 2 3", "line 1: 2 3 is not a TOML value; for example cpus = 2");
        check("frobs = yes", "line 1: yes is not a TOML value; write strings in \"quotes\"");
        check("cpus = 2\ncpus = 3", "line 2: duplicate key; remove one of them");
        check("[disks]\n[disks]", "line 2: duplicate key; write [[disks]] each time");
        check("cpus", "line 1: key with no value, expected `=`; for example cpus = 2");
        check("[boot", &format!("line 1: unclosed table, expected `]`; {end}"));
    }

    /// Each kind of value in the place of each other.
    #[test]
    fn wrong_type_is_reported_with_an_example() {
        let values = ["\"\"", "\"x\"", "7", "true", "[]", "[1]", "{}", "1.5"];
        for field in FIELDS {
            let prefix = if field.section == Section::Machine { "" } else { field.section.heading() };
            let told = |value: &str| {
                let shaped = read(&format!("{prefix}\n{} = {value}\n", field.key));
                shaped.unwrap_or_else(|problems| panic!("{problems:?}")).problems
            };
            assert_eq!(told(field.example), [], "{prefix} {}", field.key);
            for value in values {
                for problem in told(value) {
                    let line = format!("for example {} = {}", field.key, field.example);
                    assert_eq!(problem.hint, line, "{prefix} {} = {value}", field.key);
                    let blames_quotes = problem.message.contains("in quotes") && value.starts_with('"');
                    assert!(!blames_quotes, "{prefix} {} = {value}: {}", field.key, problem.message);
                }
            }
        }
    }

    #[test]
    fn only_plausible_keys_are_suggested() {
        assert_eq!(nearest_key(Section::Machine, "memroy"), Some("memory"));
        assert_eq!(nearest_key(Section::Machine, "disk"), Some("disks"));
        assert_eq!(nearest_key(Section::Disk, "readonly"), Some("read_only"));
        assert_eq!(nearest_key(Section::Machine, "banana"), None);
        assert_eq!(nearest_key(Section::Machine, "x"), None);
    }
}
