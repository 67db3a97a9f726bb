//! Upgrade of the keeper: whether the machine permits it, and how the keeper leaves the machine.

use std::sync::atomic::Ordering::Relaxed;

use hearth_api::{ApiError, ErrorWord, EventKind, UpgradeRequest};
use hearth_disk::server::DiskServer;
use hearth_recovery::journal::OrderNote;

use super::Machine;
use crate::upgrade::Successor;

const WHAT: &str = "upgrade the keeper";

impl Machine {
    /// Asks the new program whether it can take over. If it can, the loop ends.
    pub(super) fn begin_upgrade(&mut self, request: &UpgradeRequest) -> Result<(), ApiError> {
        let incarnation = self.may_hand_over()?;
        let successor = Successor::ask(request.program.as_deref(), &self.context.config, &self.context.root);
        let successor = successor.map_err(|error| {
            ApiError::new(ErrorWord::Failed, format!("the keeper was not replaced: {}", crate::chain(&error)))
                .hint("nothing was changed")
        })?;
        let (program, version) = (successor.program.display().to_string(), successor.version.clone());
        self.context.record(EventKind::KeeperHandsOver { program, version });
        self.rejuvenation.successor = Some((successor, incarnation));
        Ok(())
    }

    /// The living incarnation. Refuses if the machine cannot be handed over now.
    fn may_hand_over(&self) -> Result<u32, ApiError> {
        let life = self.must_live(WHAT)?;
        if self.state.has_order() || self.state.is_ending() || life.generation.process.has_ended() {
            let message = format!("cannot {WHAT}: the machine is stopping or rebooting");
            return Err(
                ApiError::new(ErrorWord::WrongState, message).hint("start its next keeper with the new program")
            );
        }
        self.must_be_at_rest(WHAT)?;
        if self.crash_recovery.dumps.is_busy() {
            let message = format!("cannot {WHAT}: a dump is running");
            return Err(ApiError::new(ErrorWord::WrongState, message).hint("`hearth status` shows its progress"));
        }
        Ok(life.incarnation.number)
    }

    /// The program that takes over, if that is still possible. Asking it took time, and the guest may have ended
    /// meanwhile; then this keeper must handle the end.
    pub(super) fn ready_successor(&mut self) -> Option<Successor> {
        let (successor, incarnation) = self.rejuvenation.successor.take()?;
        let why = match self.may_hand_over() {
            Ok(living) if living == incarnation => {
                self.context.outside.last_answer.hand_over(&self.context.config.name);
                return Some(successor);
            }
            // The next guest's QEMU is still connecting to its disks.
            Ok(_) => "the guest ended meanwhile".to_owned(),
            Err(refusal) => refusal.to_string(),
        };
        self.context.record(EventKind::KeeperUpgradeFailed { why });
        None
    }

    /// Leaves the machine as a dead keeper would, but waits for the disks' requests in flight.
    pub fn let_go(mut self) {
        if self.context.outside.terminated.load(Relaxed) {
            // The signal came too late for the loop.
            self.note_order(Some(OrderNote::Stop));
        }
        self.leave_to_next_keeper(DiskServer::leave);
    }
}
