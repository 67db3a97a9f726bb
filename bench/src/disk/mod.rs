//! Bench `disk`: the cost of a request, hit and miss, and of tracking every block.
//!
//! - host side: the disk server alone, with a client in this process and no guest: the cost of a hit.
//! - formats: the same client and no guest; images of all formats, served by Hearth and by QEMU's storage daemon.
//! - in guest: two disks of the same machine with the same contents, one served by Hearth, one by QEMU itself
//!   (io_uring, cache=none, its own thread), read in turn: the cost of a miss, compared with the usual alternative.

mod client;
mod formats;
mod host_side;
pub mod image;
pub mod in_guest;
mod storage_daemon;

use std::path::PathBuf;

use crate::record::Record;
use crate::table::{Table, figure, figure_or_dash};

pub use formats::table as formats_table;
pub use host_side::HostSideError;
pub use in_guest::InGuestError;

pub const NAME: &str = "disk";

#[derive(Debug, thiserror::Error)]
pub enum DiskBenchError {
    #[error("host-side part of bench {NAME}")]
    HostSide(#[from] HostSideError),
    #[error("in-guest part of bench {NAME}")]
    InGuest(#[from] InGuestError),
}

pub struct Options {
    pub quick: bool,
    /// Folder for images and the record, on the disk that is measured.
    pub folder: PathBuf,
}

/// The server of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Hearth,
    Qemu,
}

impl Server {
    const BOTH: [Server; 2] = [Server::Hearth, Server::Qemu];

    fn name(self) -> &'static str {
        match self {
            Server::Hearth => "hearth",
            Server::Qemu => "qemu",
        }
    }
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), DiskBenchError> {
    host_side::measure(options, record)?;
    formats::measure(options, record)?;
    Ok(in_guest::measure(options, record)?)
}

/// The table without image formats, which have their own.
pub fn table(record: &Record) -> Table {
    let mut table = Table::new(["case", "metric", "unit", "median", "least", "most", "values"]);
    for row in record.rows.iter().filter(|row| !formats::is_case(&row.case)) {
        let least = row.values.iter().copied().reduce(f64::min);
        let most = row.values.iter().copied().reduce(f64::max);
        table.row([
            row.case.clone(),
            row.metric.clone(),
            row.unit.clone(),
            figure(row.median),
            figure_or_dash(least),
            figure_or_dash(most),
            row.values.len().to_string(),
        ]);
    }
    table
}
