//! Messages that `docs/troubleshooting.md` quotes: each must be one that Hearth prints.
//!
//! They are the code in the first column of its tables, but for commands. `...` stands for a value that is put in.

use super::collect;
use crate::paths;

const VALUE: &str = "...";

/// Code in the first column of a page's tables.
fn quoted(page: &str) -> Vec<&str> {
    let cells = page.lines().filter_map(|line| Some(line.strip_prefix("| ")?.split_once(" | ")?.0));
    let code = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    code.filter(|code| !is_command(code)).collect()
}

fn is_command(code: &str) -> bool {
    ["hearth ", "virsh "].iter().any(|program| code.starts_with(program)) && !code.contains(VALUE)
}

/// A source's text with strings that go on in the next line joined, and `...` for each value.
fn printed(source: &str) -> String {
    let mut text = String::new();
    let mut goes_on = false;
    for line in source.lines() {
        let line = if goes_on { line.trim_start() } else { line };
        let begun = line.strip_suffix('\\');
        goes_on = begun.is_some();
        text.push_str(begun.unwrap_or(line));
        text.push_str(if goes_on { "" } else { "\n" });
    }
    let mut pieces = text.split('{');
    let mut shown = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        match piece.split_once('}') {
            Some((value, rest)) if !value.contains(['\n', ' ']) => shown.push_str(&format!("{VALUE}{rest}")),
            _ => shown.push_str(&format!("{{{piece}")),
        }
    }
    shown
}

/// Whether one of the sources prints this message.
fn is_printed(message: &str, sources: &[String]) -> bool {
    let words = message.trim_start_matches(VALUE).trim_end_matches(VALUE).trim();
    sources.iter().any(|source| source.contains(words))
}

#[test]
fn quoted_messages_are_those_of_the_code() {
    let page = std::fs::read_to_string(paths::root().join("docs/troubleshooting.md")).unwrap();
    let mut code = Vec::new();
    ["rs", "js"].into_iter().for_each(|extension| collect(&paths::root().join("crates"), extension, &mut code));
    code.retain(|file| !file.ends_with("tests.rs"));
    let sources: Vec<String> = code.iter().map(|file| printed(&std::fs::read_to_string(file).unwrap())).collect();
    let messages = quoted(&page);
    assert!(messages.len() > 50, "the test no longer finds the page's messages: {messages:?}");
    let unknown: Vec<&&str> = messages.iter().filter(|message| !is_printed(message, &sources)).collect();
    assert!(unknown.is_empty(), "docs/troubleshooting.md quotes what Hearth does not print: {unknown:#?}");
}

#[test]
fn messages_are_found_over_lines_and_values() {
    let page = "| `cannot ...: no` | `cause` |\n| `hearth ls` shows `failed` | x |\ntext `code`\n";
    assert_eq!(quoted(page), ["cannot ...: no", "failed"]);
    let source = printed("\"cannot {what}: \\\n    no\"\nmatch x {\n    y => {}\n}\n\"{failed}\"");
    assert!(source.contains("cannot ...: no\"\nmatch x {\n"), "{source}");
    let sources = [source];
    assert!(is_printed("cannot ...: no ...", &sources) && is_printed("... x", &sources));
    assert!(!is_printed("cannot start: no", &sources) && !is_printed("failed", &sources));
}
