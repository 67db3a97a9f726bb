//! Standstill: a guest that was paused for its save or dump, and goes on.
//!
//! (journal: paused) -> QEMU's thread pauses it -> ... -> it counts as running -> QEMU's thread lets it go on -> (journal: runs)
//!
//! QEMU is told all of it by its own thread (`Generation::tell`), one word after the other: whatever is told to a guest that goes on
//! comes after that, and a QEMU that hangs holds up nobody else. A keeper that dies meanwhile leaves a journal that says that the
//! guest may stand still.

use std::time::{Duration, Instant};

use hearth_api::{ApiError, ErrorWord, EventKind, MachineState};
use hearth_qemu::QmpError;
use hearth_recovery::journal::GuestNote;
use hearth_recovery::rejuvenation;

use super::Machine;
use super::state::{Input, PauseReason};
use crate::event::{Event, HeldFor};

/// A guest goes on within milliseconds; on a host that swaps it may be a second.
const GO_ON_PATIENCE: Duration = Duration::from_secs(5);

impl Machine {
    /// Has the guest go on, if it stands still.
    pub(super) fn resume_guest(&mut self, held_for: HeldFor) {
        if self.state.shown() == MachineState::Paused {
            self.apply_infallible(Input::Continued);
        }
        let tell = self.context.outside.tell.clone();
        let Some(life) = self.state.guest_mut() else { return };
        life.going_on += 1;
        let generation = life.generation.number;
        let told = life.generation.tell(move |qmp| {
            let note_resumed = match rejuvenation::roll_back(qmp, GO_ON_PATIENCE) {
                // It may be about to give up the migration that the guest was stopped for.
                Err(QmpError::Refused { .. }) => rejuvenation::roll_back(qmp, GO_ON_PATIENCE),
                tried => tried,
            };
            let why = match note_resumed {
                // One that ended is seen elsewhere.
                Ok(()) | Err(QmpError::Ended) => None,
                Err(error) => Some(error.to_string()),
            };
            // Fails only when the loop is gone.
            let _ = tell.send(Event::WentOn { generation, held_for, at: Instant::now(), why });
        });
        if let Err(error) = told {
            self.note_resumed(held_for, Instant::now(), Some(format!("cannot start a thread: {error}")));
        }
    }

    /// The guest runs again. `why`: it does not, for this reason.
    pub(super) fn note_resumed(&mut self, held_for: HeldFor, at: Instant, why: Option<String>) {
        if let Some(why) = why {
            let message = format!("the guest was paused for its {} and cannot continue: {why}", held_for.name());
            self.context.record(EventKind::Error { message });
            if self.state.is_undisturbed() {
                self.apply_infallible(Input::Paused { reason: PauseReason::CannotContinue });
            }
        }
        let Some(life) = self.state.guest_mut() else { return };
        life.going_on -= 1;
        if life.going_on == 0 && self.is_paused_by_us() {
            self.context.journal.guest = GuestNote::Runs;
            self.context.save_journal();
        }
        self.saves.note_resumed(at);
        self.thaw();
    }

    fn is_paused_by_us(&self) -> bool {
        matches!(self.context.journal.guest, GuestNote::Paused | GuestNote::PausedForDump { .. })
    }

    /// Refuses while the guest is paused for a save or a dump, or is just going on.
    pub(super) fn must_run(&self, what: &str) -> Result<(), ApiError> {
        if !self.is_paused_by_us() && self.state.guest().is_none_or(|life| life.going_on == 0) {
            return Ok(());
        }
        let message = format!("cannot {what}: the guest is paused for a save or a dump");
        Err(ApiError::new(ErrorWord::WrongState, message).hint("try again when it runs"))
    }
}
