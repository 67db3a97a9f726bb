//! Migration in QMP: a QEMU gives its guest's state away, or takes one.
//!
//! ```text
//! target: offer -> incoming    source: offer -> outgoing -> STOP -> completed        target: RESUME -> completed
//! ```
//! A target that was started to hold still says `completed` alone, and goes on after a `cont`. RESUME is said, and written to
//! the socket, before anything of the guest runs (`vm_prepare_start` in QEMU's `softmmu/cpus.c`).
//! RAM stays where it is (`x-ignore-shared`). The stream goes through descriptors that both are handed, so that no socket
//! lies in a folder and a QEMU of another user needs no right to one. That capability is called experimental; QEMU has had
//! it since 4.0, and of the two modes that would do without it one is not in 7.2, and the other has the guest stand still
//! while QEMU starts.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde_json::json;

use crate::qmp::{ANSWER_PATIENCE, Qmp, QmpError};

/// The name by which a QEMU knows the descriptor it was handed.
const CHANNEL: &str = "hearth-handover";
/// By which it knows the end that it keeps open.
const KEPT_OPEN: &str = "hearth-handover-kept";
/// More than any memory moves: the state is sent without a pause.
const UNLIMITED_BYTES_PER_SECOND: u64 = 1 << 40;

/// Where a migration is, in the words that matter here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Migration {
    None,
    /// In QEMU's own word.
    UnderWay(String),
    Completed,
    /// `why` may be empty: QEMU 7.2 says it in its log only.
    Failed {
        why: String,
    },
}

impl Migration {
    pub(crate) fn of(status: &str, why: &str) -> Self {
        match status {
            "" | "none" => Self::None,
            "completed" => Self::Completed,
            "failed" | "cancelled" => Self::Failed { why: why.to_owned() },
            other => Self::UnderWay(other.to_owned()),
        }
    }
}

impl Qmp {
    /// What both sides have to agree on before a migration. `patience` is for each command.
    pub fn prepare_migration(&self, patience: Duration) -> Result<(), QmpError> {
        let on = |name| json!({ "capability": name, "state": true });
        let capabilities = json!({ "capabilities": [on("x-ignore-shared"), on("events")] });
        self.ask("migrate-set-capabilities", capabilities, patience)?;
        let parameters = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_SECOND });
        self.ask("migrate-set-parameters", parameters, patience).map(drop)
    }

    /// Takes the guest that comes through this descriptor. QEMU was started with `incoming`.
    pub fn migrate_incoming(&self, channel: BorrowedFd<'_>, patience: Duration) -> Result<(), QmpError> {
        self.hand(CHANNEL, channel, patience)?;
        self.ask("migrate-incoming", json!({ "uri": format!("fd:{CHANNEL}") }), patience).map(drop)
    }

    /// Gives the guest away through this descriptor. The answer comes before anything has happened.
    pub fn migrate(&self, channel: BorrowedFd<'_>, patience: Duration) -> Result<(), QmpError> {
        self.hand(CHANNEL, channel, patience)?;
        self.ask("migrate", json!({ "uri": format!("fd:{CHANNEL}") }), patience).map(drop)
    }

    /// Has QEMU keep this open, too: whoever is at the other end does not learn of the end of this process by it.
    pub fn keep_open(&self, channel: BorrowedFd<'_>, patience: Duration) -> Result<(), QmpError> {
        self.hand(KEPT_OPEN, channel, patience)
    }

    /// QEMU may close it now.
    pub fn close_kept(&self) -> Result<(), QmpError> {
        self.ask("closefd", json!({ "fdname": KEPT_OPEN }), ANSWER_PATIENCE).map(drop)
    }

    /// Fine if there is nothing to cancel.
    pub fn migrate_cancel(&self) -> Result<(), QmpError> {
        self.ask("migrate_cancel", json!({}), ANSWER_PATIENCE).map(drop)
    }

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
    fn what_qemu_calls_it_is_one_of_four() {
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
