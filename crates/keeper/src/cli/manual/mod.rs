//! Manual pages: `hearth(1)`, one page for each verb, and `hearth.toml(5)`.
//!
//! The command line's definition and the table of keys are the source; only the lists of files and of variables are written here.

mod keys;

use std::fs;
use std::io;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use super::pages::shown;
use super::{Cli, CliError, Context, EXAMPLES, EXIT_CODES, Exit};

/// Files of a machine that an operator meets. ARCHITECTURE.md lists all.
const FILES: [(&str, &str); 11] = [
    (
        "/etc/hearth/NAME.toml",
        "Configuration of the machine NAME: hearth.toml(5). Without root: `~/.config/hearth/NAME.toml`.",
    ),
    (
        "/run/hearth/NAME",
        "Sockets, the journal for the next keeper, the event log and QEMU's output (`qemu-N.log`). Without root: \
         `$XDG_RUNTIME_DIR/hearth/NAME`.",
    ),
    (
        "/dev/shm/hearth/NAME",
        "The guest's RAM, and what is kept of it. Without root: `/dev/shm/hearth-UID/NAME`. The key `memory_folder` chooses \
         another folder.",
    ),
    (
        "/var/lib/hearth/NAME",
        "What outlives the host's memory: the disk that `hearth new` made, saved boot sets, the last guest's cache map. \
         Without root: `~/.local/state/hearth/NAME`.",
    ),
    ("/var/lib/hearth/NAME/dumps", "Dumps of crashed guests."),
    (
        "/var/lib/hearth/host-reload.json",
        "Machines that were parked for another host kernel, and the outcome for each.",
    ),
    ("/var/cache/hearth/objects", "Cached objects of object stores. Without root: `~/.cache/hearth/objects`."),
    ("/etc/default/hearth-host", "Options of `hearth host` under systemd, as HEARTH_HOST_OPTIONS."),
    ("/etc/libvirt/hooks/qemu.d/hearth", "What libvirt calls before it starts an attached domain."),
    ("/usr/lib/systemd/system/hearth@.service", "Unit of one machine; `/usr/lib/systemd/user` has that of users."),
    ("/usr/share/doc/hearth", "The pages that help texts and manual pages name, and examples."),
];

const VARIABLES: [(&str, &str); 2] = [
    ("HEARTH_LOG", "Log level of a keeper: error, warn, info (default) or debug."),
    ("HEARTH_RUNTIME_ROOT", "As the option --runtime-root."),
];

/// Writes FOLDER/man1/hearth.1, hearth-VERB.1 for each verb that is not hidden, and FOLDER/man5/hearth.toml.5.
pub fn write(context: &mut Context<'_>, folder: &Path) -> Result<Exit, CliError> {
    let unusable = |source| CliError::File { path: folder.to_owned(), source };
    if !fs::metadata(folder).map_err(unusable)?.is_dir() {
        return Err(unusable(io::ErrorKind::NotADirectory.into()));
    }
    let mut command = Cli::command();
    command.build();
    write_page(context, folder, "man1", "hearth.1", &program(&command)?)?;
    for verb in shown(&command) {
        write_page(context, folder, "man1", &format!("hearth-{}.1", verb.get_name()), &of_verb(verb)?)?;
    }
    write_page(context, folder, "man5", "hearth.toml.5", &keys::page())?;
    Ok(Exit::Done)
}

fn write_page(context: &mut Context<'_>, folder: &Path, section: &str, name: &str, page: &str) -> Result<(), CliError> {
    let path = folder.join(section).join(name);
    let unusable = |source| CliError::File { path: path.clone(), source };
    fs::create_dir_all(folder.join(section)).map_err(unusable)?;
    fs::write(&path, page).map_err(unusable)?;
    context.write_line(&path.display().to_string())
}

/// `hearth(1)`.
fn program(command: &Command) -> io::Result<String> {
    let mut end = Roff::new();
    end.control("SH", ["COMMANDS"]);
    shown(command).for_each(|verb| entry(&mut end, &format!("hearth-{}(1)", verb.get_name()), &line(verb)));
    literal(end.control("SH", ["EXAMPLES"]), EXAMPLES.trim_start_matches("Examples:\n"));
    end.control("SH", ["EXIT STATUS"]);
    EXIT_CODES.iter().for_each(|(code, meaning, _)| entry(&mut end, &code.to_string(), meaning));
    end.control("SH", ["ENVIRONMENT"]);
    VARIABLES.iter().for_each(|(name, meaning)| entry(&mut end, name, meaning));
    end.control("SH", ["FILES"]);
    FILES.iter().for_each(|(path, meaning)| entry(&mut end, path, meaning));
    let others = end.control("SH", ["SEE ALSO"]);
    others.text([
        bold("hearth.toml"),
        roman("(5), "),
        bold("qemu-system-x86_64"),
        roman("(1), "),
        bold("virsh"),
        roman("(1)"),
    ]);
    Ok(beginning(command)? + &end.render())
}

/// The page of one verb.
fn of_verb(verb: &Command) -> io::Result<String> {
    let mut end = Roff::new();
    let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (examples, codes) = help.split_once("\n\nExit codes: ").unwrap_or((&help, "hearth(1) lists the exit codes."));
    if let Some((_, examples)) = examples.split_once(": ") {
        let lines: Vec<_> = examples.lines().map(str::trim).collect();
        literal(end.control("SH", ["EXAMPLES"]), &lines.join("\n"));
    }
    end.control("SH", ["EXIT STATUS"]).text([roman(codes)]);
    let others = end.control("SH", ["SEE ALSO"]);
    others.text([bold("hearth"), roman("(1), "), bold("hearth.toml"), roman("(5)")]);
    Ok(beginning(verb)? + &own_verbs(verb)? + &end.render())
}

/// The section of a verb's own verbs, which have no pages. Empty if it has none.
fn own_verbs(verb: &Command) -> io::Result<String> {
    let mut page = String::new();
    for (index, verb) in shown(verb).enumerate() {
        let mut head = Roff::new();
        if index == 0 {
            head.control("SH", ["COMMANDS"]);
        }
        let usage = verb.clone().render_usage().to_string();
        head.control("SS", [usage.trim_start_matches("Usage: ")])
            .text([roman(verb.get_long_about().map_or_else(|| line(verb), ToString::to_string))]);
        let own = verb.clone().mut_args(|argument| {
            let is_of_all = argument.is_global_set() || argument.get_id() == "help";
            if is_of_all { argument.hide(true) } else { argument }
        });
        let mut options = Vec::new();
        Man::new(own).render_options_section(&mut options)?;
        page += &head.render();
        page += &text(options).replace(".SH OPTIONS\n", "");
    }
    Ok(page)
}

/// What a command does, in one line.
fn line(command: &Command) -> String {
    command.get_about().expect("each verb has a line that says what it does").to_string()
}

/// The sections that the command line's definition has.
fn beginning(command: &Command) -> io::Result<String> {
    let man = Man::new(command.clone()).manual("Hearth").source(format!("hearth {}", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    Ok(text(page))
}

fn text(page: Vec<u8>) -> String {
    String::from_utf8(page).expect("the definition is text")
}

/// A term and what it means. `meaning`: as `inlines` reads it.
fn entry(page: &mut Roff, term: &str, meaning: &str) {
    page.control("TP", []).text([bold(term)]).text(inlines(meaning));
}

/// Lines that are shown as they are.
fn literal(page: &mut Roff, text: &str) {
    page.control("PP", []).control("nf", []);
    for line in text.lines() {
        page.text([roman(line)]);
    }
    page.control("fi", []);
}

/// Text of a page in Markdown: what is in `backticks` is bold, in *asterisks* italic.
fn inlines(text: &str) -> Vec<Inline> {
    let mut found = Vec::new();
    for (index, part) in text.split('`').enumerate() {
        if index % 2 == 1 {
            found.push(bold(part));
        } else {
            let emphasis = part.split('*').enumerate().filter(|(_, part)| !part.is_empty());
            found.extend(emphasis.map(|(index, part)| if index % 2 == 1 { italic(part) } else { roman(part) }));
        }
    }
    found
}
