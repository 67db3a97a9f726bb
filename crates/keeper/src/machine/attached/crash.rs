//! A guest that has crashed, where libvirt keeps its QEMU (`on_crash=preserve`), and the start of the next one.
//!
//! `hearth host` says so -> it has the registers read -> it has QEMU ended -> the memory is banked, and dumped beside the next guest
//! -> the wait of a crash loop, if there is one -> `hearth host` starts the domain
//!
//! Without `hearth host` nothing of this happens: the guest stands still in its QEMU. The dead guest's memory has no name, so a keeper
//! that ends gives up what its dump has not written.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_api::{ApiError, EndCause, ErrorWord, EventKind};
use hearth_recovery::journal::OrderNote;
use hearth_recovery::vmcore::dump::incomplete_path;
use hearth_recovery::vmcore::notes::Notes;

use super::{Attached, State};
use crate::config::OnPanic;
use crate::machine::crash_recovery::{CrashRecovery, can_dump, is_noted};
use crate::machine::state::BackOff;

/// A guest that has crashed, and stands still in its QEMU.
pub struct Crash {
    began: Instant,
    /// Whether `hearth host` ends it and starts the next one.
    recovers: bool,
    /// `hearth host` has had its registers read, and ends its QEMU now. Who ends it before that wants it to stay off.
    is_harvested: bool,
}

/// The start of the guest after one that has crashed. `hearth host` makes it.
pub struct NextStart {
    /// None: now.
    back_off: Option<BackOff>,
}

impl NextStart {
    pub fn back_off(&self) -> Option<&BackOff> {
        self.back_off.as_ref()
    }

    /// When the wait is over, if there is one.
    pub fn deadline(&self) -> Option<Instant> {
        self.back_off.as_ref().map(|back_off| back_off.until)
    }

    pub fn why(&self, domain: &str) -> String {
        match &self.back_off {
            Some(back_off) => back_off.why.clone(),
            None => format!("`hearth host` starts the next guest; if it does not run, `virsh start {domain}` does"),
        }
    }
}

impl Crash {
    pub fn why(&self, domain: &str) -> String {
        if self.recovers {
            return "its guest has crashed; `hearth host` has its registers read, and its QEMU ended".to_owned();
        }
        format!("its guest has crashed, and stands still as `on_panic` says; `virsh destroy {domain}` ends it")
    }
}

/// Cuts off what follows the registers in their file. Returns the bytes that are left.
fn cut_to_notes(path: &Path) -> Result<u64, String> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let end = Notes::end_in(&fs::read(path).map_err(failed)?).map_err(|error| crate::chain(&error))?;
    let file = fs::OpenOptions::new().write(true).open(path).map_err(failed)?;
    file.set_len(end).map(|()| end).map_err(failed)
}

impl Attached {
    /// The guest has crashed, and libvirt keeps its QEMU.
    pub(super) fn domain_crashed(&mut self) -> Result<(), ApiError> {
        let on_panic = self.context.config.on_panic;
        let recovers = on_panic != OnPanic::Pause;
        if let (State::Awaited { process: Some(_), .. }, true) = (&self.state, recovers) {
            // The guest has not come to its disks, so nothing of it is known or kept.
            self.context.record(EventKind::GuestPanicked);
            self.context.record(EventKind::DumpSkipped { why: "it had not used its disks yet".to_owned() });
            self.next_start = Some(NextStart { back_off: None });
            self.note_next_start(true);
            return Ok(());
        }
        self.must_run("recover")?;
        let State::Running(life) = &mut self.state else { return Ok(()) };
        if life.crash.is_none() {
            life.crash = Some(Crash { began: Instant::now(), recovers, is_harvested: false });
            let incarnation = life.incarnation.as_ref().map(|it| it.number);
            self.context.record(EventKind::GuestPanicked);
            match incarnation {
                _ if on_panic != OnPanic::DumpAndRecover => {}
                Some(number) if can_dump(&self.context) => CrashRecovery::note_dump(&mut self.context, number),
                Some(_) => {}
                None => self.context.record(EventKind::DumpSkipped { why: "its memory was not tracked".to_owned() }),
            }
        }
        if recovers {
            return Ok(());
        }
        let message = format!("{} is not recovered: on_panic = \"pause\"", self.context.config.name);
        Err(ApiError::new(ErrorWord::NotPossible, message).hint("`virsh destroy` ends its crashed guest"))
    }

    /// Notes for the next keeper whether `hearth host` is to start the domain again.
    pub(super) fn note_next_start(&mut self, is_wanted: bool) {
        self.context.journal.ordered = is_wanted.then_some(OrderNote::Reboot { cold: false });
        self.context.save_journal();
    }

    /// The registers are in their file, or cannot be read for this reason, and libvirt is about to end QEMU.
    pub(super) fn domain_harvested(&mut self, why: Option<String>) -> Result<(), ApiError> {
        let crash = match &mut self.state {
            State::Running(life) => life.crash.as_mut(),
            // It had not used its disks, so nothing is kept of it.
            State::Awaited { .. } if self.next_start.is_some() => return Ok(()),
            _ => None,
        };
        let Some(Crash { began, is_harvested, .. }) = crash else {
            let message = format!("the guest of {} has not crashed", self.context.config.name);
            return Err(ApiError::new(ErrorWord::WrongState, message));
        };
        *is_harvested = true;
        let began = *began;
        self.note_next_start(true);
        let number = self.context.journal.incarnation;
        if !is_noted(&self.context, number) {
            // No dump takes them.
            CrashRecovery::forget_dump(&mut self.context, number);
            return Ok(());
        }
        let path = self.context.folders.registers(number);
        let kept = match why {
            Some(why) => Err(why),
            None => cut_to_notes(&path),
        };
        self.crash_recovery.registers_read(&self.context, began, kept);
        Ok(())
    }

    /// A guest has ended that lived for this long. Plans the next start, if the guest had crashed.
    pub(super) fn plan_next_start(&mut self, crash: Option<Crash>, lived: Duration, cause: EndCause) {
        let config = &self.context.config.crash.crash_loop;
        let delay = self.crash_recovery.crashes.ended(lived, cause, config);
        if !crash.is_some_and(|crash| crash.recovers && crash.is_harvested) {
            self.context.journal.ordered = None;
            return;
        }
        let at_once = format!("virsh start {}", self.context.config.name);
        let back_off = delay.map(|delay| BackOff::of_crash_loop(delay, config, &at_once));
        if let (Some(delay), Some(back_off)) = (delay, &back_off) {
            let next_start = back_off.next_start.clone();
            self.context.record(EventKind::CrashLoop { delay_s: delay.as_secs(), next_start });
        }
        self.next_start = Some(NextStart { back_off });
    }

    /// libvirt could not start the next guest. That counts as a crash.
    pub(super) fn start_failed(&mut self) {
        self.close();
        if self.next_start.is_none() {
            return;
        }
        let config = &self.context.config.crash.crash_loop;
        let delay = self.crash_recovery.crashes.ended(Duration::ZERO, EndCause::QemuDied, config);
        let name = &self.context.config.name;
        let why = format!("libvirt could not start the next guest: see /var/log/libvirt/qemu/{name}.log");
        let back_off = BackOff::of_failed_start(delay.unwrap_or_default(), why.clone());
        self.context.record(EventKind::StartWaits { why, next_start: back_off.next_start.clone() });
        self.next_start = Some(NextStart { back_off: Some(back_off) });
    }

    /// The wait before the next start is over.
    pub(super) fn end_back_off(&mut self) {
        let Some(back_off) = self.next_start.as_mut().and_then(|next| next.back_off.take()) else { return };
        self.release_at = self.keep_until();
        self.recovery.phase_ended(&self.context, "back-off", back_off.began, back_off.began.elapsed());
    }

    /// Continues with a crash that a dead keeper was told of. Its dumps cannot go on: the memory was its own.
    pub(super) fn take_over_crash(&mut self) {
        let living = if let State::Running(life) = &self.state { life.incarnation.as_ref() } else { None };
        let number = living.map(|it| it.number);
        let noted = self.context.journal.dumps.clone();
        for note in noted.iter().filter(|note| Some(note.incarnation) != number) {
            let why = "its keeper ended, and the dead guest's memory with it".to_owned();
            let incomplete = note.file.as_deref().map(incomplete_path).filter(|file| file.exists());
            let file = incomplete.map(|file| file.display().to_string());
            // A complete one was not reported any more.
            if !note.file.as_ref().is_some_and(|file| file.exists()) {
                self.context.record(match file {
                    Some(file) => EventKind::DumpIncomplete { file, why },
                    None => EventKind::DumpSkipped { why },
                });
            }
            CrashRecovery::forget_dump(&mut self.context, note.incarnation);
        }
        let is_ordered = self.context.journal.ordered.is_some();
        match &mut self.state {
            State::Running(life) if is_ordered => {
                life.crash = Some(Crash { began: Instant::now(), recovers: true, is_harvested: true });
            }
            State::Off if is_ordered => self.next_start = Some(NextStart { back_off: None }),
            _ => {}
        }
    }

    /// The guest that had crashed was reset, so nobody has to end it.
    pub(super) fn forget_crash(&mut self) {
        let State::Running(life) = &mut self.state else { return };
        if life.crash.take().is_some() {
            let number = self.context.journal.incarnation;
            CrashRecovery::forget_dump(&mut self.context, number);
            self.note_next_start(false);
        }
    }
}
