//! Machine: the guest and its QEMU, from boot to death: connections, stops, hops.

use hearth_recovery::incarnation::Incarnation;

use super::keeper::Keeper;
use super::settings::HOP;
use super::{Then, World, log};
use crate::guest::{Guest, QUEUE_SIZE, QUEUES, RAM_BYTES};
use crate::qemu::{self, Message, Qemu, Received};
use crate::storage::lock;

impl World {
    /// Starts the next guest, if nothing of the last one is left in flight.
    pub(super) fn boot(&mut self) {
        let Some(keeper) = &self.keeper else { return };
        if !keeper.worker.is_drained() {
            return self.settle_one();
        }
        self.model.end_all(&lock(&self.storage));
        if let Some(dead) = self.incarnation.take() {
            self.warm.part(&dead);
            self.bank(dead);
        }
        self.number += 1;
        log!(self, "guest {} boots", self.number);
        let incarnation = Incarnation::create(self.folder.path(), self.number, RAM_BYTES, true).unwrap();
        self.guest = Some(Guest::new(&incarnation));
        self.incarnation = Some(incarnation);
        if let Some(set) = &self.warm.boot_set {
            set.begin();
        }
        let tracking = self.tracking();
        let keeper = self.keeper.as_mut().expect("it was there");
        assert!(keeper.worker.attach(tracking), "it was drained");
        self.qemu = Qemu::new(self.settings.features);
        (self.is_through, self.noted_through, self.is_hostile, self.then) = (false, false, false, None);
        self.connect();
    }

    /// Lets everything continue that a drain waits for.
    pub(super) fn settle_one(&mut self) {
        self.apply();
        self.report();
        self.turn();
    }

    pub(super) fn connect(&mut self) {
        log!(self, "QEMU connects");
        if !self.qemu.connect(&self.socket()) {
            return self.fault("a living keeper does not listen".into());
        }
        self.start();
        // The guest may be handed over before it has started, too.
        if self.settings.weights[HOP] > 0 && self.random.one_in(4) {
            self.begin_hop();
        }
    }

    pub(super) fn start(&mut self) {
        self.qemu.start();
        if self.settings.switches_cache && !self.is_through {
            let script = &mut self.qemu.script;
            let at = script.iter().position(|message| *message == Message::MemTable).expect("a start has one");
            script.insert(at, Message::WriteCache(false));
        }
        if let Some(guest) = &mut self.guest {
            guest.event_index = self.qemu.features & qemu::EVENT_INDEX != 0;
        }
    }

    /// The guest switches its write cache on or off.
    pub(super) fn switch_write_cache(&mut self) {
        let runs = self.guest.is_some() && self.then.is_none() && self.qemu.is_connected() && self.qemu.is_started;
        if !self.settings.switches_cache || !runs || !self.qemu.is_silent() {
            return;
        }
        let on = self.is_through;
        log!(self, "the guest switches its write cache: {on}");
        if let Some(guest) = self.guest.as_mut().filter(|_| on) {
            guest.rely_on_flushes();
            self.is_through = false;
        }
        self.qemu.script.push_back(Message::WriteCache(on));
    }

    pub(super) fn receive(&mut self) {
        loop {
            match self.qemu.receive() {
                Received::Nothing => break,
                Received::HungUp if self.is_hostile => {
                    self.crash();
                    break;
                }
                Received::HungUp => {
                    self.fault("QEMU is cut off".into());
                    self.qemu.hang_up();
                    break;
                }
                Received::Answer(message) => {
                    log!(self, "answered: {message:?}");
                    self.note(0x1000);
                    self.is_through |= message == Message::WriteCache(false);
                }
            }
        }
        for qemu in [&mut self.successor, &mut self.leaving].into_iter().flatten() {
            while let Received::Answer(_) = qemu.receive() {}
        }
    }

    pub(super) fn send_messages(&mut self) {
        let Some(guest) = &self.guest else { return };
        // The server mostly finds several messages at a time.
        for _ in 0..=self.random.below(6) {
            let Some(message) = self.qemu.send_next(guest) else { break };
            log!(self, "sends {message:?}");
        }
        if let Some(successor) = &mut self.successor {
            successor.send_next(guest);
        }
    }

    /// The guest switches its device off, or its QEMU stops it.
    pub(super) fn begin_stop(&mut self) {
        let may_stop = self.guest.is_some() && self.qemu.is_connected() && self.then.is_none();
        if may_stop && self.qemu.is_silent() && self.qemu.is_started {
            self.then = Some(if self.random.one_in(4) { Then::Reset } else { Then::Restart });
            log!(self, "stop, then {:?}", self.then);
            self.counts.stops += 1;
            self.stop_queues();
        } else if may_stop && self.qemu.has_kicked && !self.is_hostile && self.random.one_in(2) {
            self.stop_half_started(Then::Restart);
        }
    }

    /// A QEMU may be told to stop before it has enabled all of its queues.
    pub(super) fn stop_half_started(&mut self, then: Then) {
        let is_half_started = self.qemu.script.iter().all(|message| matches!(message, Message::Enable(_)));
        if is_half_started && self.qemu.is_started {
            log!(self, "stop before all is enabled, then {then:?}");
            self.then = Some(then);
            self.counts.stops += 1;
            self.qemu.script.clear();
            self.stop_queues();
        }
    }

    pub(super) fn stop_queues(&mut self) {
        self.was_stopped = true;
        self.qemu.stop();
    }

    pub(super) fn after_stop(&mut self) {
        match self.then.take() {
            Some(Then::Reset) => {
                self.reset_driver();
                self.start();
            }
            Some(Then::Hop) => {
                let Some(successor) = self.successor.take() else { return self.start() };
                if self.random.one_in(4) {
                    log!(self, "the hop fails");
                    return self.start();
                }
                log!(self, "the successor takes the guest");
                self.counts.hops += 1;
                self.noted_through = self.keeper.as_ref().is_some_and(Keeper::is_write_through);
                self.end_migration();
                let mut old = std::mem::replace(&mut self.qemu, successor);
                old.is_logging = false;
                self.qemu.bases = std::mem::take(&mut old.bases);
                self.leaving = Some(old);
                self.start();
                // The successor has nothing of the old QEMU yet.
                if self.random.one_in(6) {
                    self.kill();
                }
            }
            Some(Then::Restart) | None => self.start(),
        }
    }

    pub(super) fn reset_driver(&mut self) {
        if let Some(guest) = &mut self.guest {
            guest.reset();
        }
        self.model.end_all(&lock(&self.storage));
        self.qemu.forget_rings();
        self.is_through = false;
    }

    pub(super) fn begin_hop(&mut self) {
        let Some(keeper) = &mut self.keeper else { return };
        // This includes a QEMU that is still starting its queues.
        let is_ready = self.guest.is_some() && self.qemu.is_connected() && self.qemu.is_started;
        if !is_ready || self.successor.is_some() || self.leaving.is_some() || self.is_hostile {
            return;
        }
        log!(self, "a successor connects");
        keeper.worker.set_handover(true);
        let mut successor = Qemu::new(self.settings.features);
        successor.connect(&self.folder.path().join("disk.sock"));
        self.successor = Some(successor);
    }

    /// The guest and its QEMU die.
    pub(super) fn crash(&mut self) {
        if self.guest.is_none() {
            return;
        }
        log!(self, "the guest dies");
        self.counts.crashes += 1;
        self.last_message_was_stop = self.qemu.waits_for_stop();
        self.lose_guest();
        if let Some(keeper) = &mut self.keeper {
            keeper.worker.set_write_log(None);
        }
    }

    pub(super) fn lose_guest(&mut self) {
        self.qemu.hang_up();
        (self.guest, self.successor, self.leaving) = (None, None, None);
        (self.saved, self.migrated) = (None, None);
        (self.then, self.is_hostile) = (None, false);
    }

    /// A QEMU that its guest controls sends invalid messages.
    pub(super) fn send_odd_messages(&mut self) {
        if !self.settings.hostile || self.guest.is_none() || !self.qemu.is_connected() || self.successor.is_some() {
            return;
        }
        self.is_hostile = true;
        let queues = 1 + self.random.below(QUEUES as u64) as u16;
        let size = self.random.pick(&[1, 8, QUEUE_SIZE]);
        log!(self, "QEMU sends what it must not");
        let (queue, odd) = (self.random.below(QUEUES as u64 + 1) as usize, self.random.next() as u32 % 70_000);
        let messages = match self.random.below(3) {
            0 => vec![Message::SmallInflight { queues, size }, Message::SetSmallInflight { queues, size }],
            1 => vec![Message::OddSize(queue, odd)],
            _ => vec![Message::Reset],
        };
        messages.into_iter().rev().for_each(|message| self.qemu.script.push_front(message));
    }
}
