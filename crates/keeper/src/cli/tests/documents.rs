//! The commands of the pages and of the README: this program must understand each of them.

use std::path::{Path, PathBuf};

use clap::Parser;
use clap::error::ErrorKind;

use super::Cli;

/// The README, and the pages in `docs`.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let files = docs.chain([root.join("README.md")]).filter(|file| file.extension().is_some_and(|its| its == "md"));
    files.map(|file| (file.clone(), std::fs::read_to_string(file).unwrap())).collect()
}

/// Commands of a page: lines of its blocks, and what is quoted in its text.
fn commands(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut prose = String::new();
    let mut fenced = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced || line.starts_with("    ") {
            let line = line.trim().trim_start_matches("$ ");
            found.extend(line.split("&&").map(|one| one.trim().to_owned()));
        } else {
            prose.push_str(line.trim());
            prose.push(' ');
        }
    }
    found
        .extend(prose.split('`').skip(1).step_by(2).flat_map(|code| code.split("&&")).map(|one| one.trim().to_owned()));
    found.retain(|command| command.starts_with("hearth "));
    found
}

/// The words of a command, without the comment, pipe or redirection that ends it. `None`: it shows only a form, with parts in
/// brackets or left out.
fn words(command: &str) -> Option<Vec<String>> {
    let command = command.split("  #").next().unwrap_or_default();
    let is_form = ["[-", "...", " [", "|", "\u{2026}"].iter().any(|mark| command.contains(mark));
    let ends = [" | ", " >", ";"].iter().filter_map(|end| command.find(end));
    let command = &command[..ends.min().unwrap_or(command.len())];
    let mut quoted = false;
    let words = command.split(|letter: char| {
        quoted ^= letter == '\'';
        letter == ' ' && !quoted
    });
    (!is_form).then(|| words.filter(|word| !word.is_empty()).map(|word| word.replace('\'', "")).collect())
}

/// Whether the program refuses a command for what it says, rather than for what a text leaves out or only names: `hearth save --stop`,
/// `hearth set NAME KEY=VALUE`.
fn is_wrong(error: &clap::Error, command: &str) -> bool {
    let has_placeholder =
        command.split([' ', '=', ',', '<', '>']).any(|word| word.len() > 2 && word.chars().all(char::is_uppercase));
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::MissingRequiredArgument => false,
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => !has_placeholder,
        _ => true,
    }
}

/// `virsh shutdown` returns before the domain is off, and what is pasted after it comes too early.
#[test]
fn pasted_shutdowns_are_waited_for() {
    for (page, text) in pages() {
        let lines: Vec<_> = text.lines().collect();
        let needs_it_off =
            |line: &str| ["virsh start ", "hearth import "].iter().any(|command| line.starts_with(command));
        let early = lines.windows(2).find(|pair| pair[0].starts_with("virsh shutdown ") && needs_it_off(pair[1]));
        assert_eq!(early, None, "{}", page.display());
    }
}

#[test]
fn every_command_of_the_pages_is_understood() {
    let mut tried = 0;
    let mut wrong = Vec::new();
    for (page, text) in pages() {
        for command in commands(&text) {
            let Some(words) = words(&command) else { continue };
            tried += 1;
            let error = Cli::try_parse_from(&words).err().filter(|error| is_wrong(error, &command));
            wrong.extend(error.map(|error| format!("{}: `{command}`: {error}", page.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(tried > 200, "the test no longer finds the commands: {tried}");
}

#[test]
fn commands_are_found_in_blocks_and_text() {
    let page = "Run `hearth ls`, or `hearth\nstatus web && hearth age web`.\n```\n$ hearth stop web  # at once\nNAME\n```\n    hearth top\n";
    assert_eq!(
        commands(page),
        ["hearth stop web  # at once", "hearth top", "hearth ls", "hearth status web", "hearth age web"]
    );
    assert_eq!(words("hearth stop web  # at once").unwrap(), ["hearth", "stop", "web"]);
    assert_eq!(words("hearth set web 'a=[\"b c\"]'").unwrap(), ["hearth", "set", "web", "a=[\"b c\"]"]);
    assert!(words("hearth reboot NAME [--cold]").is_none() && words("hearth stop ...").is_none());
    let refused = |command: &str| {
        let error = Cli::try_parse_from(words(command).unwrap()).unwrap_err();
        is_wrong(&error, command)
    };
    assert!(
        refused("hearth frobnicate web") && refused("hearth stop web --softly") && refused("hearth completions tcl")
    );
    assert!(!refused("hearth save --stop") && !refused("hearth completions SHELL"));
}
