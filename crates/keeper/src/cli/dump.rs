//! `hearth dump`: its arguments, and what they ask for.

use std::path::PathBuf;

use clap::Args;
use hearth_api::{DumpCompression, DumpFormat, DumpRequest};

use super::{CliError, Context, Exit, NameArgument, WaitArgument, absolute, order};

#[derive(Debug, Args)]
pub struct DumpArguments {
    #[command(flatten)]
    machine: NameArgument,
    /// Keep the guest running during the dump (default).
    #[arg(long, conflicts_with = "pause")]
    live: bool,
    /// Pause the guest until the dump is written.
    #[arg(long)]
    pause: bool,
    /// Pages to leave out, as makedumpfile's level (default: as configured).
    ///
    /// The level is a sum: 1 zero pages, 2 cache, 4 private cache, 8 user data, 16 free pages.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=31))]
    level: Option<u8>,
    /// Format of the dump file (default: as configured).
    #[arg(long, value_enum)]
    format: Option<DumpFormat>,
    /// Compression of a kdump file's pages (default: as configured).
    #[arg(long, value_enum)]
    compress: Option<DumpCompression>,
    /// File to write; must not exist (default: in the dump folder).
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Resume a waiting dump, for example after freeing disk space.
    #[arg(long, conflicts_with_all = ["live", "pause", "level", "format", "compress", "output", "discard"])]
    resume: bool,
    /// Discard what dumps have not written yet.
    ///
    /// The files stay, marked incomplete.
    #[arg(long, conflicts_with_all = ["live", "pause", "level", "format", "compress", "output"])]
    discard: bool,
    #[command(flatten)]
    wait: WaitArgument,
}

pub fn perform(context: &mut Context<'_>, arguments: DumpArguments) -> Result<Exit, CliError> {
    let (name, wait) = (&arguments.machine.name, !arguments.wait.no_wait);
    if arguments.resume {
        return order::resume_dump(context, name, wait);
    }
    if arguments.discard {
        return order::discard_dump(context, name, wait);
    }
    let request = DumpRequest {
        pause: arguments.pause,
        level: arguments.level,
        format: arguments.format,
        compression: arguments.compress,
        output: arguments.output.map(|path| absolute(path).display().to_string()),
    };
    order::dump(context, name, &request, wait)
}
