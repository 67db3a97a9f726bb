//! Migration over QMP: a QEMU sends its guest's state, or receives one.
//!
//! ```text
//! target: offer -> incoming    source: offer -> outgoing -> STOP -> completed        target: RESUME -> completed
//! ```
//! A target that was started with `hold_still` reports `completed` alone, and continues after `cont`. RESUME is written
//! to the socket before the guest runs (`vm_prepare_start` in QEMU's `softmmu/cpus.c`). RAM stays in place
//! (`x-ignore-shared`). The stream goes through descriptors that both QEMUs receive. So there is no socket in a folder,
//! and a QEMU under another user needs no right to one. QEMU calls that capability experimental, but has had it since
//! 4.0. Of the two modes that need no such capability, QEMU 7.2 lacks one; the other stops the guest while the next
//! QEMU starts.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde_json::json;

use crate::qmp::{ANSWER_PATIENCE, Qmp, QmpError};
use crate::said::said;

/// Name of the migration descriptor in QEMU.
const CHANNEL: &str = "hearth-handover";
/// Name of the descriptor that QEMU keeps open.
const KEPT_OPEN: &str = "hearth-handover-kept";
/// Bandwidth limit far above any memory's, so that the state is sent without pauses.
const UNLIMITED_BYTES_PER_SECOND: u64 = 1 << 40;

/// State of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "`why` is QEMU's own message")]
pub enum Migration {
    /// No migration has begun.
    None,
    /// The migration runs; the text is QEMU's own state name.
    UnderWay(String),
    /// The migration has succeeded.
    Completed,
    /// The migration failed or was cancelled. `why` may be empty: QEMU 7.2 writes the reason only to its log.
    Failed { why: String },
}

impl Migration {
    /// Converts `status` and `error-desc` of `query-migrate`.
    pub(crate) fn of(status: &str, why: &str) -> Self {
        match status {
            "" | "none" => Self::None,
            "completed" => Self::Completed,
            "failed" | "cancelled" => Self::Failed { why: said(why) },
            other => Self::UnderWay(said(other)),
        }
    }
}

impl Qmp {
    /// Sets capabilities and parameters that source and target need. `patience` limits each command.
    pub fn prepare_migration(&self, patience: Duration) -> Result<(), QmpError> {
        let on = |name| json!({ "capability": name, "state": true });
        let capabilities = json!({ "capabilities": [on("x-ignore-shared"), on("events")] });
        self.ask("migrate-set-capabilities", capabilities, patience)?;
        let parameters = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_SECOND });
        self.ask("migrate-set-parameters", parameters, patience).map(drop)
    }

    /// Starts receiving a guest through this descriptor. QEMU must have been started with `incoming`.
    pub fn migrate_incoming(&self, channel: BorrowedFd<'_>, patience: Duration) -> Result<(), QmpError> {
        self.hand(CHANNEL, channel, patience)?;
        self.ask("migrate-incoming", json!({ "uri": format!("fd:{CHANNEL}") }), patience).map(drop)
    }

    /// Starts sending the guest through this descriptor. The call returns before the migration begins.
    pub fn migrate(&self, channel: BorrowedFd<'_>, patience: Duration) -> Result<(), QmpError> {
        self.hand(CHANNEL, channel, patience)?;
        self.ask("migrate", json!({ "uri": format!("fd:{CHANNEL}") }), patience).map(drop)
    }

    /// Makes QEMU keep this descriptor open too, so that the peer does not notice the end of this process.
    pub fn keep_open(&self, channel: BorrowedFd<'_>, patience: Duration) -> Result<(), QmpError> {
        self.hand(KEPT_OPEN, channel, patience)
    }

    /// Makes QEMU close the descriptor of `keep_open`.
    pub fn close_kept(&self) -> Result<(), QmpError> {
        self.ask("closefd", json!({ "fdname": KEPT_OPEN }), ANSWER_PATIENCE).map(drop)
    }

    /// Cancels a migration. Succeeds if there is none.
    pub fn migrate_cancel(&self) -> Result<(), QmpError> {
        self.ask("migrate_cancel", json!({}), ANSWER_PATIENCE).map(drop)
    }

    /// Asks for the state of the migration.
    pub fn migration(&self) -> Result<Migration, QmpError> {
        let said = self.ask("query-migrate", json!({}), ANSWER_PATIENCE)?;
        let text = |key: &str| said[key].as_str().unwrap_or_default();
        Ok(Migration::of(text("status"), text("error-desc")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_states_map_to_ours() {
        let check = |status, expect| assert_eq!(Migration::of(status, "why"), expect, "{status}");
        check("none", Migration::None);
        check("", Migration::None);
        check("completed", Migration::Completed);
        check("failed", Migration::Failed { why: "why".into() });
        check("cancelled", Migration::Failed { why: "why".into() });
        for word in ["setup", "active", "device", "pre-switchover", "from-the-future"] {
            check(word, Migration::UnderWay(word.into()));
        }
    }
}
