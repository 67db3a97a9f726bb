//! Errors of driving a machine. A failed test should need no second run to be understood, so errors carry the last lines of the
//! guest's console.

use std::path::PathBuf;
use std::process::ExitStatus;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} is missing: run `make setup`")]
    NoArtifact { path: PathBuf },
    #[error("the hearth binary is not at {path}: run `cargo build -p hearth` first, or set HEARTH_BIN")]
    NoHearth { path: PathBuf },
    #[error("QEMU=10 was asked for, but {path} is missing: run `cargo xtask qemu10`")]
    NoQemu10 { path: PathBuf },
    #[error("{path} is missing: run `make test-nested`")]
    NoNestedHost { path: PathBuf },
    #[error("{what} {path}")]
    File { what: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{program} cannot be started")]
    Start { program: String, source: std::io::Error },
    #[error("`{command}` failed with {status}:\n{said}")]
    Command { command: String, status: ExitStatus, said: String },
    #[error("no {what} within {seconds} s; last lines of the console:\n{console}")]
    Timeout { what: String, seconds: u64, console: String },
    #[error("{what} ended with {how} while waiting for {waited}; last lines of the console:\n{console}")]
    Ended { what: String, how: String, waited: String, console: String },
    #[error("the machine has no QEMU process: {status:?}")]
    NoQemu { status: Box<hearth_api::MachineStatus> },
    #[error("`{command}` ended with status {status}:\n{output}")]
    Cli { command: String, status: i32, output: String },
    #[error("in the guest, `{command}` ended with status {status}:\n{output}")]
    GuestCommand { command: String, status: i32, output: String },
    #[error("the command has {bytes} bytes, too many for the console: put it into a file on a disk")]
    CommandTooLong { bytes: usize },
    #[error("cannot write to the console")]
    Console(#[source] std::io::Error),
    #[error("`{command}` printed no JSON: {text:?}")]
    NotJson { command: String, text: String, source: serde_json::Error },
    #[error("cannot damage {asked} pages of {path}: it holds only {has}")]
    TooFewPages { path: PathBuf, has: u64, asked: u64 },
    #[error("QMP {command}: {message}")]
    Qmp { command: String, message: String },
}

/// Attaches the operation and the path to an I/O error.
pub fn at<T>(what: &'static str, path: &std::path::Path, result: std::io::Result<T>) -> Result<T> {
    result.map_err(|source| Error::File { what, path: path.to_owned(), source })
}
