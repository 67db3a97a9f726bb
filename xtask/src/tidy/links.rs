//! Links in the pages: each must lead to a file of the checkout, and to a heading in it. From the README two links lead to any page.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::all_files;
use crate::paths;

/// What a newcomer reads at once.
const README_LINES_MAX: usize = 80;

/// The link targets in `](...)`, outside code.
fn targets(page: &str) -> Vec<String> {
    let prose: Vec<&str> = prose(page).collect();
    let text = prose.join("\n");
    let after = text.split("](").skip(1);
    after.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.to_owned()).collect()
}

/// The lines outside fenced blocks.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    page.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// The anchors that a forge derives from a page's headings: lower case, no punctuation, dashes for spaces.
fn anchors(page: &str) -> Vec<String> {
    let headings = prose(page).filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    headings
        .map(|heading| {
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
        })
        .collect()
}

/// The reason why a link is broken, if it is.
fn broken(page: &Path, target: &str, pages: &HashMap<PathBuf, String>) -> Option<String> {
    if target.contains("://") {
        return None;
    }
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let path = if file.is_empty() { page.to_owned() } else { page.parent().unwrap().join(file) };
    if !path.exists() {
        return Some(format!("{}: {target}: there is no such file", page.display()));
    }
    let missing = anchor.filter(|anchor| {
        let text = path.canonicalize().ok().and_then(|path| pages.get(&path));
        !text.is_some_and(|text| anchors(text).iter().any(|its| its == anchor))
    });
    missing.map(|_| format!("{}: {target}: there is no such heading", page.display()))
}

/// All pages of the checkout.
fn pages() -> HashMap<PathBuf, String> {
    let files = all_files().into_iter().filter(|file| file.extension().is_some_and(|its| its == "md"));
    files.map(|file| (file.canonicalize().unwrap(), std::fs::read_to_string(&file).unwrap())).collect()
}

fn readme() -> PathBuf {
    paths::root().canonicalize().unwrap().join("README.md")
}

/// Pages that this one links.
fn linked(page: &Path, pages: &HashMap<PathBuf, String>) -> Vec<PathBuf> {
    let files = targets(&pages[page]).into_iter().map(|target| target.split('#').next().unwrap_or_default().to_owned());
    let paths = files.filter_map(|file| page.parent()?.join(file).canonicalize().ok());
    paths.filter(|path| pages.contains_key(path)).collect()
}

#[test]
fn every_page_is_two_clicks_from_the_readme() {
    let pages = pages();
    let mut reached = vec![readme()];
    for _ in 0..2 {
        let next: Vec<PathBuf> = reached.iter().flat_map(|page| linked(page, &pages)).collect();
        reached.extend(next);
    }
    let docs = paths::root().canonicalize().unwrap().join("docs");
    let lost: Vec<&PathBuf> = pages.keys().filter(|page| page.starts_with(&docs) && !reached.contains(page)).collect();
    assert!(lost.is_empty(), "no link leads to these: {lost:#?}");
}

#[test]
fn readme_is_short() {
    let lines = std::fs::read_to_string(readme()).unwrap().lines().count();
    assert!(lines <= README_LINES_MAX, "the README has {lines} lines; move some to a page of docs");
}

#[test]
fn every_link_in_the_pages_works() {
    let pages = pages();
    assert!(pages.contains_key(&readme()));
    let links = pages.iter().flat_map(|(page, text)| targets(text).into_iter().map(move |target| (page, target)));
    let broken: Vec<String> = links.filter_map(|(page, target)| broken(page, &target, &pages)).collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn links_and_headings_match_a_forges() {
    let page = "# How it *works*\n[a](b.md#c) `x`\n```\n# no heading [no](link)\n```\n## GET /v1/status\n";
    assert_eq!(targets(page), ["b.md#c"]);
    assert_eq!(anchors(page), ["how-it-works", "get-v1status"]);
    let pages = HashMap::from([(PathBuf::from("/dev/null").canonicalize().unwrap(), page.to_owned())]);
    let check = |target| broken(Path::new("/dev/page.md"), target, &pages);
    assert_eq!(check("null#how-it-works"), None);
    assert_eq!(check("https://example.org/x"), None);
    assert!(check("null#elsewhere").unwrap().ends_with("no such heading"));
    assert!(check("no-such-file.md").unwrap().ends_with("no such file"));
}
