//! Deaf: a QEMU that does not see that its disks' server is another one, and never will again; its guest would wait for its disk
//! for ever.
//!
//! take-over -> QEMU reaches its disks, which it tries once a second -> it speaks to them | it says nothing: the guest stands still for a
//! moment and goes on, of which QEMU tells its disks everything -> it speaks | nor then: the operator is told
//!
//! A QEMU before 9.1 becomes deaf if its disk's server dies while the device does not run: the guest stands still, or its firmware or
//! kernel is just about to start it. What it does about the end of the connection it does then for a device that is none
//! (`vhost_user_async_close_bh` in QEMU's `hw/virtio/vhost-user.c`), and nobody listens to the next one.

use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_recovery::rejuvenation;

use super::Machine;
use super::generation::Generation;
use super::rejuvenate::PAUSE_PATIENCE;
use crate::event::Event;

/// A QEMU whose keeper died connects again within a second, also on a busy host within a few.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// One that hears says its first word when it connects.
const LISTEN_EVERY: Duration = Duration::from_secs(4);
const LOOKS: u32 = 5;

impl Machine {
    /// From now on whether the QEMU that was taken over speaks to its disks.
    pub(super) fn listen(&self, generation: u32, look: u32) {
        let (tell, name) = (self.parts.tell.clone(), format!("listen-{}", self.parts.config.name));
        let wait = move || {
            std::thread::sleep(LISTEN_EVERY);
            // Fails only when the loop is gone.
            let _ = tell.send(Event::Listen { generation, look });
        };
        if let Err(error) = std::thread::Builder::new().name(name).spawn(wait) {
            tracing::warn!(%error, "nobody looks whether QEMU speaks to its disks");
        }
    }

    /// It has had the time to.
    pub(super) fn must_have_spoken(&mut self, look: u32) {
        let names = self.parts.config.disks.iter().map(|disk| &disk.name);
        let names = names.chain(self.parts.config.nvram.iter().map(|device| &device.name));
        let silent: Vec<_> = names.zip(&self.disks).filter(|(_, disk)| !disk.counters().spoken).collect();
        let Some((name, _)) = silent.first() else { return };
        if look > LOOKS {
            let message = format!(
                "QEMU says nothing to disk {name}, for which the guest may wait for ever; `hearth reboot {} --force` starts the guest \
                 again, warm",
                self.parts.config.name
            );
            return self.record(EventKind::Error { message });
        }
        let is_connected = silent.iter().all(|(_, disk)| disk.counters().connected);
        let Some(life) = &mut self.life else { return };
        let number = life.generation.number;
        if life.generation.qmp.run_state().is_ok_and(|state| state != "running") {
            // It tells everything when it goes on, whenever that is.
            return self.listen(number, look);
        }
        if is_connected {
            tracing::warn!(
                disk = name,
                "QEMU says nothing to its disk: the guest stands still for a moment, so that it does"
            );
            life.generation.set_deaf();
            self.journal.qemu = Some(life.generation.identity());
            self.save_journal();
            if let Some(life) = &self.life {
                self.wake_disks(&life.generation);
            }
        }
        self.listen(number, look + 1);
    }

    /// A QEMU tries to reach its disks once a second.
    fn await_disks(&self) {
        let deadline = Instant::now() + RECONNECT_PATIENCE;
        while !self.disks.iter().all(|disk| disk.counters().connected) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// QEMU 7.2 does not see that its disk's server is another one if that happened while the guest stood still, and never
    /// will again; the guest would wait for its disk for ever. When the guest goes on, QEMU tells the server everything.
    pub(super) fn wake_disks(&self, generation: &Generation) {
        let qmp = &generation.qmp;
        self.await_disks();
        let stopped = match qmp.run_state().as_deref() {
            Ok("running") => qmp.pause(),
            _ => Ok(()),
        };
        self.await_disks();
        if let Err(error) = stopped.and_then(|()| rejuvenation::roll_back(qmp, PAUSE_PATIENCE)) {
            let message = format!("the guest was stopped for its hand-over and does not go on: {error}");
            self.record(EventKind::Error { message });
        }
    }
}
