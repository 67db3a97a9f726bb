//! Freeze: before the guest is paused, its agent freezes its file systems, so that they are consistent on its disks.
//!
//! thread   agent answers? -> ... -> little is left -> agent answers? | freeze -> what was written meanwhile -> (settled)
//! loop                                                     (journal) |
//!
//! `machine::frozen` describes the thaw, and what happens if any of this fails.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use hearth_api::{EventKind, FreezeRequest};
use hearth_qemu::Endpoint;
use hearth_qemu::agent::{Agent, AgentError, Patience};
use hearth_recovery::snapshot::save::SaveError;

use super::super::Machine;
use super::Tell;
use super::progress::{Progress, Reporter};
use super::task::{SaveCommand, next};
use crate::drill::drill;
use crate::event::SaveMessage;

/// The part of a freeze that runs on the save's thread.
pub struct Freezer {
    /// The agent's socket.
    channel: Endpoint,
    patience: Duration,
}

impl Freezer {
    /// Fails if the agent does not answer. Asked before anything is copied, so that a missing agent is noticed early.
    pub fn must_be_answered(&self, progress: &Progress) -> Result<(), SaveError> {
        self.ask(progress, |patience| Agent::reach(&self.channel, patience)).map(drop)
    }

    /// Freezes the file systems. The connection ends with this call: the thaw needs a connection of its own.
    pub fn freeze(
        &self,
        commands: &Receiver<SaveCommand>,
        progress: &Progress,
        tell: &Tell,
        reporter: &Reporter<'_>,
    ) -> Result<(), SaveError> {
        let mut agent = self.ask(progress, |patience| Agent::reach(&self.channel, patience))?;
        tell.say(SaveMessage::Freezing);
        next(commands, progress)?;
        let began = Instant::now();
        let file_systems = self.ask(progress, |patience| agent.freeze(patience))?;
        let (folder, duration_ms) = (reporter.folder().to_owned(), began.elapsed().as_secs_f64() * 1e3);
        tell.say(SaveMessage::Frozen(EventKind::SaveFrozen { folder, file_systems, duration_ms }));
        Ok(())
    }

    fn ask<T>(
        &self,
        progress: &Progress,
        question: impl FnOnce(&Patience<'_>) -> Result<T, AgentError>,
    ) -> Result<T, SaveError> {
        let stop = || progress.must_go_on().is_err();
        let answer = question(&Patience { time: self.patience, stop: &stop });
        progress.must_go_on()?;
        answer.map_err(SaveError::Freeze)
    }
}

impl Machine {
    pub(super) fn freezer(&self, request: Option<FreezeRequest>) -> Option<Freezer> {
        let (request, life) = (request?, self.state.guest()?);
        let channel = life.generation.agent(&self.context.folders);
        Some(Freezer { channel, patience: Duration::from_millis(request.patience_ms) })
    }

    /// Notes in the journal that the file systems may be frozen: from here on they must be thawed, even if this keeper
    /// dies.
    pub(super) fn note_freezing(&mut self) {
        if !self.may_go_on_saving() {
            return;
        }
        self.saves.note_frozen(&mut self.context);
        self.context.save_journal();
        if let Some(saving) = &self.saves.current {
            saving.commands.give(SaveCommand::Noted);
        }
    }

    pub(super) fn frozen(&mut self, event: EventKind) {
        drill("freeze");
        if let (EventKind::SaveFrozen { file_systems, .. }, Some(frozen)) = (&event, &mut self.saves.frozen) {
            frozen.began(*file_systems);
        }
        self.context.record(event);
    }
}
