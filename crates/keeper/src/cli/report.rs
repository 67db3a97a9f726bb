//! `hearth report`: a machine's last recoveries as one HTML file.
//!
//! events (from the keeper, or from its file) -> recoveries -> page -> file
//!
//! If a keeper answers, its status adds exact times to the newest recovery.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use hearth_api::{EventRecord, rfc3339};
use serde_json::json;

use super::{CliError, Context, Exit, NameArgument, events};

mod history;
mod page;
#[cfg(test)]
mod tests;

use history::{History, PastRecovery};

/// The mark of a report is in its first lines.
const HEAD_BYTES: u64 = 1024;

#[derive(Debug, Args)]
pub struct ReportArguments {
    #[command(flatten)]
    machine: NameArgument,
    /// File to write, or "-" for standard output; default: NAME-report.html.
    ///
    /// An older report is replaced, and so is an empty file. Any other file is left alone, with an error.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub fn write(context: &mut Context<'_>, arguments: &ReportArguments) -> Result<Exit, CliError> {
    let name = &arguments.machine.name;
    let file = arguments.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}-report.html")));
    let is_output = file == Path::new("-");
    if is_output && context.json {
        return Err(CliError::NoJson { what: "a report on standard output".to_owned() });
    }
    let records = events::known(context, name, 0)?;
    // Without an answer the report is made of the events alone, and says so.
    let status = context.client(name).with_patience(events::PATIENCE).status().ok();
    let html = page::html(name, &records, status.as_ref(), &rfc3339(SystemTime::now()));
    if is_output {
        context.out.write_all(html.as_bytes())?;
        context.out.flush()?;
        return Ok(Exit::Done);
    }
    must_be_replaceable(&file)?;
    replace(&file, &html).map_err(|source| CliError::File { path: file.clone(), source })?;
    if context.json {
        context.write_json(&json!({ "file": super::absolute(file) }))?;
    } else {
        context.write_line(&format!("{name}: report written to {}; open it in a browser", file.display()))?;
    }
    Ok(Exit::Done)
}

/// How a machine's incarnations followed each other.
pub fn recoveries(records: &[EventRecord]) -> Vec<PastRecovery> {
    History::of(records).recoveries
}

/// Refuses to replace a file that is no report: a mistyped name must not cost a file.
fn must_be_replaceable(file: &Path) -> Result<(), CliError> {
    let failed = |source| CliError::File { path: file.to_owned(), source };
    let is_regular = match fs::metadata(file) {
        Ok(metadata) => metadata.is_file(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    let mut head = Vec::new();
    if is_regular {
        File::open(file).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head)).map_err(failed)?;
        if head.is_empty() || String::from_utf8_lossy(&head).contains(hearth_page::GENERATOR) {
            return Ok(());
        }
    }
    Err(CliError::NoReport { file: file.to_owned() })
}

/// Writes the file completely or not at all. Like events and dumps, only its owner can read it: it has text of the guest in it.
fn replace(file: &Path, html: &str) -> io::Result<()> {
    let mut fresh_name = file.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
    fresh_name.push(format!(".{}.new", std::process::id()));
    let fresh = file.with_file_name(fresh_name);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&fresh)
        .and_then(|mut opened| opened.write_all(html.as_bytes()))
        .and_then(|()| fs::rename(&fresh, file));
    if written.is_err() {
        // The incomplete file, if there is one.
        let _ = fs::remove_file(&fresh);
    }
    written
}
