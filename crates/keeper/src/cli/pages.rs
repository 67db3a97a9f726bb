//! Completion scripts, and the page of all commands (`docs/commands.md`), generated from the command line's definition.

use std::fmt::Write;

use clap::{Command, CommandFactory};
use clap_complete::env::Shells;

use super::{Cli, CliError, Context, EXIT_CODES, Exit, WITHOUT_JSON};

const HEAD: &str = "# Commands

*Generated from the command line's definition in `crates/keeper/src/cli`. Do not edit: `UPDATE=1 cargo test -p hearth
generated` rewrites it.*

Each one has a manual page, such as `man hearth-run` (`host-reload` and `vmcore` one for all of theirs), and the option `--help`.
Commands reach a machine through its [HTTP API](api.md) on a unix socket.

";

const TABLE_HEAD: &str = "
| command | what it does |
|---|---|
";

const EXIT_HEAD: &str = "
## Exit codes

| code | means | the systemd unit `hearth@NAME` |
|---|---|---|
";

const EXIT_TAIL: &str = "
A keeper that finds the machine's QEMU alive never ends with code 2, even if the file is wrong. Correct it, and the next keeper
takes the guest over.
";

/// The script has the shell ask this program, as `complete` answers it.
pub fn completions(context: &mut Context<'_>, shell: clap_complete::Shell) -> Result<Exit, CliError> {
    let mut script = Vec::new();
    let completer = Shells::builtins();
    let completer = completer.completer(&shell.to_string()).expect("the same crate has both lists");
    completer.write_registration("COMPLETE", "hearth", "hearth", "hearth", &mut script)?;
    context.out.write_all(&script)?;
    Ok(Exit::Done)
}

/// `docs/commands.md`. Ends with a newline.
pub fn reference() -> String {
    let mut page = HEAD.to_owned();
    line(&mut page, &json());
    page.push_str(TABLE_HEAD);
    let mut command = Cli::command();
    command.build();
    for verb in shown(&command) {
        match shown(verb).next() {
            None => row(&mut page, verb),
            Some(_) => shown(verb).for_each(|verb| row(&mut page, verb)),
        }
    }
    page.push_str(EXIT_HEAD);
    for (code, meaning, unit) in EXIT_CODES {
        line(&mut page, &format!("| {code} | {meaning} | {unit} |"));
    }
    page.push_str(EXIT_TAIL);
    page
}

/// Which commands take `--json`.
fn json() -> String {
    let command = Cli::command();
    let without: Vec<_> = shown(&command).map(Command::get_name).filter(|verb| WITHOUT_JSON.contains(verb)).collect();
    let without = without.join("`, `");
    format!(
        "All commands take `--json`, except `{without}`,\n\
         `restore` without `--disks-only`, and `report` to standard output: these refuse it."
    )
}

/// Subcommands of a command, without hidden ones.
pub fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|verb| verb.get_name() != "help" && !verb.is_hide_set())
}

/// A command with its arguments, and what it does.
fn row(page: &mut String, verb: &Command) {
    let has_options = verb.get_opts().any(|option| !option.is_global_set());
    let options = if has_options { " [OPTIONS]" } else { "" };
    let usage = verb.clone().render_usage().to_string().replace(" [OPTIONS]", options);
    // Cells end at a bar.
    let usage = usage.trim_start_matches("Usage: ").replace('|', "\\|");
    let about = verb.get_about().expect("each verb has a line that says what it does");
    line(page, &format!("| `{usage}` | {about} |"));
}

fn line(page: &mut String, text: &str) {
    writeln!(page, "{text}").expect("a string takes everything");
}
