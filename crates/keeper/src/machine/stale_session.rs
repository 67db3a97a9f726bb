//! Stale session: a QEMU that does not notice that its disks have a new server. Its guest would wait for its disk for
//! ever.
//!
//! take-over -> QEMU connects to its disks, which it tries once a second -> it uses them
//!                                                                       -> it sends nothing: see below -> it uses them
//!                                                                                                        -> an event
//!
//! A QEMU before 9.1 handles the end of a connection only for a device that runs (`vhost_user_async_close_bh` in QEMU's
//! `hw/virtio/vhost-user.c`). Otherwise it ignores the next connection. This happens in two cases:
//! - The server died while the device did not run: the guest was paused, or its firmware or kernel had not started the
//!   device. The keeper pauses the guest for a moment and continues it. QEMU then starts its devices and tells the
//!   server everything.
//! - QEMU had lost a server, and the next one died while QEMU was still connecting to it. `vhost_dev_init` fails then
//!   and clears the device, and any attempt to start the device again ends QEMU (`vhost_dev_prepare_inflight` reads
//!   through a null pointer: 7.2 to 9.0). So such a QEMU is never continued. Another QEMU takes the guest over, with
//!   the unanswered requests.
//!
//! From outside both cases look the same. So a keeper notes in the journal that it expects a greeting, QEMU's first
//! messages to a new server (`Journal::greeting`). The next keeper knows from it whether the greeting may have been cut
//! off.

use std::time::{Duration, Instant};

use hearth_api::{EventKind, RejuvenateRequest};
use hearth_disk::server::DiskServer;
use hearth_qemu::Qmp;
use hearth_recovery::rejuvenation;

use super::disks::{Disks, InUseCheck};
use super::generation::{Generation, PAUSE_PATIENCE};
use super::{Context, Machine};

/// How long to wait for a QEMU to connect again. It takes a second, or a few on a busy host.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// Time between two checks. The end of a greeting is noted this soon.
const LISTEN_EVERY: Duration = Duration::from_millis(200);
/// Checks before the keeper acts. A QEMU that uses its disks greets them when it connects; one that has not for this long
/// never will.
const ATTEMPTS_A_TRY: u32 = 20;
const TRIES: u32 = 5;

impl Disks {
    /// Notes that QEMU may greet its disks from now on. Call it before the disks are served to a QEMU that another
    /// keeper left.
    pub fn note_greeting(&mut self, context: &mut Context) {
        if context.journal.qemu.is_some() {
            self.greeting_cut_off = std::mem::replace(&mut context.journal.greeting, true);
            context.save_journal();
        }
    }

    /// Forgets the greeting: it has ended, or QEMU has ended or was replaced. The caller saves the journal.
    pub fn forget_greeting(&mut self, context: &mut Context) {
        (self.greeting_cut_off, context.journal.greeting) = (false, false);
    }

    /// Forgets the greeting if QEMU has completed it at all of its disks.
    pub fn end_greeting(&mut self, context: &mut Context) {
        if self.servers.iter().all(|disk| disk.counters().greeted) {
            self.forget_greeting(context);
        }
    }

    /// Waits until QEMU is connected to its disks, which it tries once a second, and knows it: its main loop learns of a
    /// connection a little later than the server. Started before that, a device fails, and QEMU with it (7.2 to 9.0).
    fn await_disks(&self, qmp: &Qmp) {
        let deadline = Instant::now() + RECONNECT_PATIENCE;
        let are_connected = || self.servers.iter().all(|disk| disk.counters().connected);
        // A QEMU that does not answer is not waited for.
        let knows = || qmp.has_connected(self.servers.iter().map(DiskServer::name)).unwrap_or(true);
        while !(are_connected() && knows()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Pauses the guest and continues it. QEMU 7.2 does not notice a new server of its disk that came while the guest
    /// was paused, and the guest would wait for its disk for ever. When the guest continues, QEMU tells the server
    /// everything.
    pub fn wake(&self, context: &Context, generation: &Generation) {
        let qmp = &generation.qmp;
        self.await_disks(qmp);
        let stopped = match qmp.run_state().as_deref() {
            // This QEMU may be one that must not be continued; `ensure_qemu_uses_disks` finds out.
            Ok("running") if self.greeting_cut_off => return,
            Ok("running") => qmp.pause(),
            _ => Ok(()),
        };
        self.await_disks(qmp);
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
            self.ensure_qemu_uses_disks(check.attempt);
        }
    }

    /// Notes that QEMU uses its disks, or makes it do so.
    pub(super) fn ensure_qemu_uses_disks(&mut self, attempt: u32) {
        let silent: Vec<_> = self.disks.servers.iter().filter(|disk| !disk.counters().greeted).collect();
        let Some(first) = silent.first() else {
            self.disks.forget_greeting(&mut self.context);
            return self.context.save_journal();
        };
        let name = first.name().to_owned();
        let is_connected = silent.iter().all(|disk| disk.counters().connected);
        let hops = self.rejuvenation.hop.is_some();
        let Some(life) = self.state.guest_mut() else { return };
        let number = life.generation.number;
        if hops {
            // It is about to be replaced.
            return self.listen(number, attempt);
        }
        if !attempt.is_multiple_of(ATTEMPTS_A_TRY) {
            return self.listen(number, attempt + 1);
        }
        if attempt > TRIES * ATTEMPTS_A_TRY {
            return self.report_silent_disk(&name, "");
        }
        if life.generation.qmp.run_state().is_ok_and(|state| state != "running") {
            // QEMU tells the server everything when it continues, whenever that is.
            return self.listen(number, attempt - ATTEMPTS_A_TRY + 1);
        }
        if is_connected && self.disks.greeting_cut_off {
            if let Err(refusal) = self.may_replace_qemu() {
                if attempt == ATTEMPTS_A_TRY {
                    self.report_silent_disk(&name, &format!(" ({refusal})"));
                }
                // What prevents the replacement may pass.
                return self.listen(number, ATTEMPTS_A_TRY + 1);
            }
            self.replace_silent_qemu(&name);
        } else if is_connected {
            tracing::warn!(disk = name, "QEMU does not use its disk: pausing the guest briefly to make it reconnect");
            life.generation.set_stale();
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

    fn report_silent_disk(&self, disk: &str, why: &str) {
        let message = format!(
            "QEMU does not use disk {disk}, so the guest may hang{why}; `hearth reboot {} --force` restarts the guest \
             warm",
            self.context.config.name
        );
        self.context.record(EventKind::Error { message });
    }

    /// Moves the guest of a QEMU that must not be continued to another QEMU.
    fn replace_silent_qemu(&mut self, disk: &str) {
        tracing::warn!(
            disk,
            "QEMU has not used its disk since a keeper died during its start: moving the guest to another QEMU"
        );
        self.rejuvenate(&RejuvenateRequest::default());
    }
}
