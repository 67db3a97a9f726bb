//! How a save ends: its thread ends, or the save is cancelled. Either way the guest continues.
//!
//! cancelled -> the guest goes on -> the thread notices, removes the folder and ends -> (`Over`) its failure is recorded
//!
//! A thread whose save is cancelled notices it after each MiB. If it waits for a disk to write what it was given, that
//! may take minutes. Nobody waits for it, but no other save can begin until it has ended; a machine that stops gives it two seconds.

use std::time::{Duration, Instant};

use hearth_api::{ApiError, ErrorWord, EventKind, SaveThen};
use hearth_recovery::journal::GuestNote;

use super::super::Machine;
use super::super::generation::Generation;
use super::super::state::Input;
use super::task::Written;
use super::{Held, Saves, Saving};
use crate::event::HeldFor;

/// How long a cancelled save may take to end before the machine stops without it.
const CALL_OFF_PATIENCE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Saving {
    /// Waits for the end of the thread, no longer than this. Returns whether it has ended.
    fn ends_within(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
        self.thread.is_finished()
    }
}

impl Saves {
    /// The guest runs again, since then.
    pub(in crate::machine) fn note_resumed(&mut self, at: Instant) {
        if let Some(Saving { held, .. }) = &mut self.current
            && let Held::GoingOn(paused) = held
        {
            *held = Held::Was(at.saturating_duration_since(*paused));
        }
    }
}

impl Machine {
    pub(in crate::machine) fn cancel_save_on_request(&mut self) -> Result<(), ApiError> {
        if self.saves.current.as_ref().is_none_or(Saving::is_cancelled) {
            return Err(ApiError::new(ErrorWord::WrongState, "there is no save to cancel"));
        }
        self.cancel_save("cancelled by the operator");
        Ok(())
    }

    /// Cancels the save, if there is one. It does not touch the guest any more.
    pub(in crate::machine) fn cancel_save(&mut self, why: &str) {
        let Some(saving) = self.saves.current.as_mut().filter(|saving| !saving.is_cancelled()) else { return };
        saving.progress.cancel(why);
        // It may be waiting for one.
        saving.commands.close();
        // In case it succeeds all the same.
        saving.then = SaveThen::Continue;
        let (generation, held) = (saving.generation, matches!(saving.held, Held::Since(_)));
        self.disks.stop_logging_writes();
        self.continue_guest_of(generation, held);
    }

    /// Waits for a cancelled save, because the machine stops, and leaves it behind if it does not end.
    pub(in crate::machine) fn abandon_save(&mut self) {
        if let Some(preparing) = self.saves.preparing.take() {
            // What it made is removed with it.
            let _ = preparing.result.recv_timeout(CALL_OFF_PATIENCE);
        }
        if self.saves.current.as_ref().is_some_and(|saving| saving.ends_within(CALL_OFF_PATIENCE)) {
            return self.conclude_save();
        }
        let Some(Saving { folder, .. }) = self.saves.current.take() else { return };
        let why = "the disk had not finished writing when the machine stopped; the incomplete folder has no manifest and may \
             be removed";
        self.context.record(EventKind::SaveFailed { folder: folder.display().to_string(), why: why.to_owned() });
    }

    /// Handles the end of the save's thread. Waits for the thread if it has not quite ended.
    pub(super) fn conclude_save(&mut self) {
        let Some(saving) = self.saves.current.take() else { return };
        let Saving { folder, then, generation, held, progress, thread, .. } = saving;
        let written = thread.join().expect("a panic of the job's thread ends the keeper");
        self.disks.stop_logging_writes();
        self.note_scan_over();
        let folder = folder.display().to_string();
        let lives = self.is_current(generation);
        let pause = match held {
            Held::NotYet => Duration::ZERO,
            Held::Since(paused) | Held::GoingOn(paused) => paused.elapsed(),
            Held::Was(pause) => pause,
        };
        match written {
            Ok(Written { ram, approach, pages_held, pages_on_disks }) => {
                self.context.record(EventKind::Saved {
                    folder,
                    pages: ram.pages,
                    bytes: ram.bytes,
                    pause_ms: pause.as_secs_f64() * 1e3,
                    duration_ms: progress.elapsed().as_secs_f64() * 1e3,
                    rounds: approach.map_or(0, |approach| approach.rounds),
                    settled: approach.is_some_and(|approach| approach.settled),
                    pages_held,
                    pages_on_disks,
                });
                if then == SaveThen::Stop && lives {
                    self.context.journal.guest = GuestNote::Runs;
                    return self.apply_infallible(Input::SavedToStop { now: Instant::now() });
                }
            }
            Err(error) => self.context.record(EventKind::SaveFailed { folder, why: crate::chain(&error) }),
        }
        self.continue_guest_of(generation, matches!(held, Held::Since(_)));
    }

    /// Continues the guest of this QEMU, if it still has one.
    fn continue_guest_of(&mut self, generation: u32, held: bool) {
        if !self.is_current(generation) {
            return;
        }
        if held {
            self.resume_after_save();
        } else {
            self.thaw();
        }
    }

    /// Continues the guest if it is paused, and thaws its file systems.
    pub(super) fn resume_after_save(&mut self) {
        if let Some(Saving { held, .. }) = &mut self.saves.current
            && let Held::Since(paused) = held
        {
            *held = Held::GoingOn(*paused);
        }
        self.resume_guest(HeldFor::Save);
    }

    /// Continues a guest that a dead keeper left paused: for a save, which failed with that keeper, or at the end of a
    /// restore.
    pub(in crate::machine) fn resume_paused_guest(&mut self, generation: &mut Generation) {
        generation.set_stale();
        self.disks.wake(&self.context, generation);
    }
}
