//! Completion scripts and manual pages, generated from the command line's definition.

use std::fs::{self, File};
use std::path::Path;

use clap::CommandFactory;
use clap_complete::env::Shells;

use super::{Cli, CliError, Context, Exit};

/// The script has the shell ask this program, as `complete` answers it.
pub fn completions(context: &mut Context<'_>, shell: clap_complete::Shell) -> Result<Exit, CliError> {
    let mut script = Vec::new();
    let completer = Shells::builtins();
    let completer = completer.completer(&shell.to_string()).expect("the same crate has both lists");
    completer.write_registration("COMPLETE", "hearth", "hearth", "hearth", &mut script)?;
    context.out.write_all(&script)?;
    Ok(Exit::Done)
}

/// `hearth.1`, and `hearth-VERB.1` for each verb.
pub fn manual(context: &mut Context<'_>, folder: &Path) -> Result<Exit, CliError> {
    let unusable = |source| CliError::File { path: folder.to_owned(), source };
    if !fs::metadata(folder).map_err(unusable)?.is_dir() {
        return Err(unusable(std::io::ErrorKind::NotADirectory.into()));
    }
    let mut command = Cli::command();
    command.build();
    write_page(context, folder, command.clone(), "hearth")?;
    for verb in command.get_subcommands().filter(|verb| verb.get_name() != "help") {
        let name = format!("hearth-{}", verb.get_name());
        write_page(context, folder, verb.clone(), &name)?;
    }
    Ok(Exit::Done)
}

fn write_page(context: &mut Context<'_>, folder: &Path, command: clap::Command, name: &str) -> Result<(), CliError> {
    let path = folder.join(format!("{name}.1"));
    let unusable = |source| CliError::File { path: path.clone(), source };
    let mut file = File::create(&path).map_err(unusable)?;
    clap_mangen::Man::new(command).render(&mut file).map_err(unusable)?;
    context.write_line(&path.display().to_string())
}
