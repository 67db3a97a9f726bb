//! Forbidden words: committed files have no paths or names of the machine that they were written on.

use super::all_files;
use crate::paths;

/// Forbidden words, each in two parts, so that this file does not contain them.
const FORBIDDEN: [(&str, &str); 5] =
    [("/wo", "rk/"), ("/ro", "ot/"), ("/ho", "me/"), ("/tmp/", "t-"), ("crates", "-io-mirror")];

/// Characters before a word that make it part of a longer path: `/v1/disks/root/resize` is a route, not a home folder.
const PATH_CHARACTERS_BEFORE: fn(char) -> bool = |c| c.is_ascii_alphanumeric() || c == '_' || c == '}' || c == '.';

/// Line numbers on which a text has this word at the start of a path.
fn lines_with(text: &str, word: &str) -> Vec<usize> {
    let alone = |line: &str| {
        line.match_indices(word).any(|(at, _)| !line[..at].chars().next_back().is_some_and(PATH_CHARACTERS_BEFORE))
    };
    text.lines().enumerate().filter(|(_, line)| alone(line)).map(|(number, _)| number + 1).collect()
}

#[test]
fn files_do_not_name_their_machine() {
    let mut found = Vec::new();
    for file in all_files() {
        // Images and other binary files have no words.
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        for (head, tail) in FORBIDDEN {
            let word = format!("{head}{tail}");
            let name = file.strip_prefix(paths::root()).unwrap().display().to_string();
            found.extend(lines_with(&text, &word).into_iter().map(|line| format!("{name}:{line}: {word}")));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn word_counts_only_at_a_paths_start() {
    assert_eq!(lines_with("a\nsee /x/y\n", "/x/"), [2]);
    assert!(lines_with("/v1/x/y $HOME/x/y ./x/z", "/x/").is_empty());
}
