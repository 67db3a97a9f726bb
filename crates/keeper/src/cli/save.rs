//! `hearth save`: its arguments, and what they ask for.

use std::path::PathBuf;

use clap::Args;
use hearth_api::{SaveRequest, SaveThen};

use super::{CliError, Context, Exit, NameArgument, WaitArgument, absolute, order};

#[derive(Debug, Args)]
pub struct SaveArguments {
    #[command(flatten)]
    machine: NameArgument,
    /// The folder; it must not exist.
    #[arg(long, short, value_name = "FOLDER", required_unless_present = "cancel")]
    output: Option<PathBuf>,
    /// Let the guest go on afterwards (this is the default).
    #[arg(long = "continue", conflicts_with = "stop")]
    go_on: bool,
    /// Stop the machine once all is saved.
    #[arg(long)]
    stop: bool,
    /// Compress memory with zstd: slower to save, and smaller.
    #[arg(long)]
    compress: bool,
    /// Call off a save that is under way.
    #[arg(long, conflicts_with_all = ["output", "go_on", "stop", "compress"])]
    cancel: bool,
    #[command(flatten)]
    wait: WaitArgument,
}

pub fn save(context: &mut Context<'_>, arguments: SaveArguments) -> Result<Exit, CliError> {
    let SaveArguments { machine, output, go_on, stop, compress, cancel, wait } = arguments;
    match output.filter(|_| !cancel) {
        // Calling it off is the one thing that needs no folder.
        None => order::cancel_save(context, &machine.name, !wait.no_wait),
        Some(folder) => {
            let then = if stop && !go_on { SaveThen::Stop } else { SaveThen::Continue };
            let request = SaveRequest { folder: absolute(folder), then, compress };
            order::save(context, &machine.name, &request, !wait.no_wait)
        }
    }
}
