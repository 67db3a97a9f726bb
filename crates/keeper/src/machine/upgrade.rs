//! Upgrade of the keeper: whether the machine permits it, and how the keeper leaves the machine.

use std::sync::atomic::Ordering::Relaxed;
use std::thread::Builder;

use hearth_api::{ApiError, ErrorWord, EventKind, UpgradeRequest};
use hearth_disk::server::DiskServer;
use hearth_recovery::journal::OrderNote;

use super::Machine;
use crate::control::{Answer, Reply};
use crate::event::Event;
use crate::upgrade::Successor;

const WHAT: &str = "upgrade the keeper";

fn not_replaced(why: &str) -> ApiError {
    ApiError::new(ErrorWord::Failed, format!("the keeper was not replaced: {why}"))
        .hint("correct this and try again; the keeper and its guest go on as before")
}

impl Machine {
    /// Has a thread ask the new program whether it can take over; `handle_successor` goes on.
    pub(super) fn begin_upgrade(&mut self, request: UpgradeRequest, answer: &Reply) -> Result<(), ApiError> {
        let incarnation = self.may_hand_over()?;
        let (config, root) = (self.context.config.clone(), self.context.root.clone());
        let (tell, answer) = (self.context.outside.tell.clone(), answer.clone());
        let ask = move || {
            let successor = Successor::ask(request.program.as_deref(), &config, &root);
            let successor = successor.map(Box::new).map_err(|error| not_replaced(&crate::chain(&error)));
            // Fails only when the loop is gone, and then nobody waits for the answer.
            let _ = tell.send(Event::Successor { incarnation, successor, answer });
        };
        let started = Builder::new().name(format!("upgrade-{}", self.context.config.name)).spawn(ask);
        started.map(drop).map_err(|error| not_replaced(&format!("cannot start a thread: {error}")))
    }

    /// The new program can take over, or cannot. If it can, the loop ends.
    pub(super) fn handle_successor(
        &mut self,
        incarnation: u32,
        successor: Result<Box<Successor>, ApiError>,
        answer: &Reply,
    ) {
        let may = successor.and_then(|successor| match self.may_hand_over()? {
            living if living == incarnation => Ok(successor),
            _ => Err(self.wrong_state(WHAT)),
        });
        let answered = match may {
            Ok(successor) => {
                let (program, version) = (successor.program.display().to_string(), successor.version.clone());
                self.context.record(EventKind::KeeperHandsOver { program, version });
                self.rejuvenation.successor = Some((*successor, incarnation));
                Ok(Answer::Accepted)
            }
            Err(refusal) => Err(refusal),
        };
        // The asker may have hung up.
        let _ = answer.send(answered);
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
