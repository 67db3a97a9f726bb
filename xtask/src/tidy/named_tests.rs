//! Tests that the threat model names, in square brackets after each claim: each must exist.

use std::collections::HashSet;

use super::files;
use crate::paths;

/// Names in brackets, like `[`one`, `another`]`. Links and code blocks have other brackets.
fn named(page: &str) -> Vec<&str> {
    let brackets = page.split('[').skip(1).filter_map(|rest| rest.split_once(']')).map(|(inside, _)| inside);
    let lists = brackets.filter(|inside| inside.starts_with('`') && inside.ends_with('`'));
    lists.flat_map(|list| list.split('`').skip(1).step_by(2)).collect()
}

/// Names of the functions with the attribute `#[test]`.
fn tests(source: &str) -> Vec<&str> {
    let mut is_test = false;
    let mut names = Vec::new();
    for line in source.lines().map(str::trim_start) {
        if line == "#[test]" {
            is_test = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            let name = rest.split(['(', '<']).next().unwrap_or(rest);
            names.extend(is_test.then_some(name));
            is_test = false;
        }
    }
    names
}

#[test]
fn tests_that_the_threat_model_names_exist() {
    let page = std::fs::read_to_string(paths::root().join("docs/threat-model.md")).unwrap();
    let sources: Vec<String> = files("rs").iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let known: HashSet<&str> = sources.iter().flat_map(|source| tests(source)).collect();
    let named = named(&page);
    assert!(named.len() > 80, "the test no longer finds the page's brackets: {named:?}");
    let missing: Vec<&&str> = named.iter().filter(|name| !known.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/threat-model.md names tests that do not exist: {missing:?}");
}

#[test]
fn names_are_in_brackets_and_tests_have_attributes() {
    assert_eq!(named("a [`one`,\n`two`], a [link](x.md), `[[disks]]`, [`three`]"), ["one", "two", "three"]);
    assert_eq!(tests("#[test]\n#[ignore = \"long\"]\n    fn one() {\n}\nfn two() {}\n"), ["one"]);
}
