//! Stale session: a QEMU that does not see that its disks' server is another one, and never will; its guest would wait for its
//! disk for ever.
//!
//! take-over -> QEMU connects to its disks, which it tries once a second -> it speaks to them
//!                                                                       -> it says nothing: see below -> it speaks
//!                                                                                                     -> the operator is told
//!
//! A QEMU before 9.1 handles the end of a connection only for a device that runs (`vhost_user_async_close_bh` in QEMU's
//! `hw/virtio/vhost-user.c`); otherwise nobody listens to the next connection. It comes to that in two ways:
//! - The server died while the device did not run: the guest stood still, or its firmware or kernel was about to start it. The
//!   guest is stopped for a moment and continued: then QEMU starts its devices, and tells the server everything.
//! - The server died while QEMU greeted it, after it had lost the one before. `vhost_dev_init` fails then and clears the device,
//!   and whatever starts it again ends QEMU (`vhost_dev_prepare_inflight` reads through a null pointer: 7.2 to 9.0). So such a
//!   QEMU is never continued. Another one takes the guest over, with the requests that nobody has answered.
//!
//! From outside both look the same. So a keeper notes in the journal that it waits for a greeting (`Journal::greeting`), and the
//! next one knows whether that may have been cut off.

use std::time::{Duration, Instant};

use hearth_api::{EventKind, RejuvenateRequest};
use hearth_recovery::rejuvenation;

use super::disks::Disks;
use super::generation::Generation;
use super::rejuvenate::PAUSE_PATIENCE;
use super::{Context, Machine};

/// A QEMU whose keeper died connects again within a second, also on a busy host within a few.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// A greeting that has ended is noted this soon.
const LISTEN_EVERY: Duration = Duration::from_millis(200);
/// A QEMU that listens sends its first message when it connects; one that has sent nothing for so many checks never will.
const ATTEMPTS_A_TRY: u32 = 20;
const TRIES: u32 = 5;

/// A check whether the adopted QEMU uses its disks.
pub struct InUseCheck {
    generation: u32,
    /// Counts the checks.
    attempt: u32,
    pub at: Instant,
}

impl Disks {
    /// Before the disks are served to a QEMU that another keeper left: from now on it may greet them.
    pub fn note_greeting(&mut self, context: &mut Context) {
        if context.journal.qemu.is_some() {
            self.greeting_cut_off = std::mem::replace(&mut context.journal.greeting, true);
            context.save_journal();
        }
    }

    /// QEMU is another one now, or there is none, or its greeting has ended. Whoever calls this saves the journal.
    pub fn forget_greeting(&mut self, context: &mut Context) {
        (self.greeting_cut_off, context.journal.greeting) = (false, false);
    }

    /// Forgets the greeting if QEMU has used all of its disks.
    pub fn end_greeting(&mut self, context: &mut Context) {
        if self.servers.iter().all(|disk| disk.counters().spoken) {
            self.forget_greeting(context);
        }
    }

    /// A QEMU tries to reach its disks once a second.
    fn await_disks(&self) {
        let deadline = Instant::now() + RECONNECT_PATIENCE;
        while !self.servers.iter().all(|disk| disk.counters().connected) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// QEMU 7.2 does not see that its disk's server is another one if that happened while the guest stood still, and never
    /// will again; the guest would wait for its disk for ever. When the guest goes on, QEMU tells the server everything.
    pub fn wake(&self, context: &Context, generation: &Generation) {
        let qmp = &generation.qmp;
        self.await_disks();
        let stopped = match qmp.run_state().as_deref() {
            // It may be one that must not be continued; `must_have_spoken` finds out.
            Ok("running") if self.greeting_cut_off => return,
            Ok("running") => qmp.pause(),
            _ => Ok(()),
        };
        self.await_disks();
        if let Err(error) = stopped.and_then(|()| rejuvenation::roll_back(qmp, PAUSE_PATIENCE)) {
            let message = format!("the guest was paused for its hand-over and cannot continue: {error}");
            context.record(EventKind::Error { message });
        }
    }
}

impl Machine {
    /// Checks, in a moment, whether the adopted QEMU uses its disks; `attempt` counts the checks.
    fn listen(&mut self, generation: u32, attempt: u32) {
        self.disks.next_check = Some(InUseCheck { generation, attempt, at: Instant::now() + LISTEN_EVERY });
    }

    /// A check is due. That of a QEMU that is gone is left out.
    pub(super) fn check_disks_in_use(&mut self, check: &InUseCheck) {
        if self.rejuvenation.parking.is_some() {
            self.listen(check.generation, check.attempt);
        } else if self.is_current(check.generation) {
            self.must_have_spoken(check.attempt);
        }
    }

    /// Notes that it does, or has it do so.
    pub(super) fn must_have_spoken(&mut self, attempt: u32) {
        let silent: Vec<_> = self.disks.servers.iter().filter(|disk| !disk.counters().spoken).collect();
        let Some(first) = silent.first() else {
            self.disks.forget_greeting(&mut self.context);
            return self.context.save_journal();
        };
        let name = first.name().to_owned();
        let is_connected = silent.iter().all(|disk| disk.counters().connected);
        let Some(life) = self.state.guest_mut() else { return };
        let number = life.generation.number;
        if !attempt.is_multiple_of(ATTEMPTS_A_TRY) {
            return self.listen(number, attempt + 1);
        }
        if attempt > TRIES * ATTEMPTS_A_TRY {
            return self.tell_silent(&name, "");
        }
        if life.generation.qmp.run_state().is_ok_and(|state| state != "running") {
            // It tells everything when it goes on, whenever that is.
            return self.listen(number, attempt - ATTEMPTS_A_TRY + 1);
        }
        if is_connected && self.disks.greeting_cut_off {
            if let Err(refusal) = self.may_replace_qemu() {
                if attempt == ATTEMPTS_A_TRY {
                    self.tell_silent(&name, &format!(" ({refusal})"));
                }
                // The obstacle may pass.
                return self.listen(number, ATTEMPTS_A_TRY + 1);
            }
            self.replace_silent(&name);
        } else if is_connected {
            tracing::warn!(disk = name, "QEMU does not use its disk: pausing the guest briefly to make it reconnect");
            life.generation.set_deaf();
            self.context.journal.qemu = Some(life.generation.identity());
            self.context.save_journal();
            if let Some(life) = self.state.guest() {
                self.disks.wake(&self.context, &life.generation);
            }
        }
        if self.is_current(number) {
            self.listen(number, attempt + 1);
        }
    }

    fn tell_silent(&self, disk: &str, why: &str) {
        let message = format!(
            "QEMU does not use disk {disk}, so the guest may hang{why}; `hearth reboot {} --force` restarts the guest \
             warm",
            self.context.config.name
        );
        self.context.record(EventKind::Error { message });
    }

    /// Gives the guest of a QEMU that must not be continued to another one.
    fn replace_silent(&mut self, disk: &str) {
        tracing::warn!(
            disk,
            "QEMU has not used its disk since a keeper died during its start: moving the guest to another QEMU"
        );
        if let Err(error) = self.rejuvenate(&RejuvenateRequest::default()) {
            tracing::error!(error = crate::chain(&error), "QEMU was not replaced");
        }
    }
}
