//! Order to restore a snapshot at the machine's start.

use std::path::PathBuf;

use hearth_recovery::lazy_restore::Mode;

use super::trace::Trace;

/// A snapshot to restore at the start.
#[derive(Clone, Debug)]
pub struct RestoreOrder {
    pub snapshot: PathBuf,
    /// Expected seal of the snapshot's memory: the machine's disks belong to that snapshot. None if any snapshot will
    /// do.
    pub seal: Option<String>,
    pub mode: Mode,
    /// Record the pages that the guest touches first, and fill in the rest only then.
    pub trace: Option<Trace>,
}
