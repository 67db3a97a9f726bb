//! Machine: the guest and its QEMU, from boot to death: connections, stops, hops.

use hearth_recovery::incarnation::Incarnation;

use super::settings::HOP;
use super::{Then, World, log};
use crate::guest::{Guest, QUEUE_SIZE, QUEUES, RAM_BYTES};
use crate::qemu::{self, Heard, Qemu, Word};
use crate::storage::lock;

impl World {
    /// The next guest, if nothing of the last one moves any more.
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
        (self.is_through, self.is_hostile, self.then) = (false, false, None);
        self.connect();
    }

    /// Something that a drain waits for goes on.
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
        // It may be handed over before it has started, too.
        if self.settings.weights[HOP] > 0 && self.random.one_in(4) {
            self.begin_hop();
        }
    }

    pub(super) fn start(&mut self) {
        self.qemu.start();
        if self.settings.without_cache && !self.is_through {
            let at = self.qemu.script.iter().position(|word| *word == Word::MemTable).expect("a start has one");
            self.qemu.script.insert(at, Word::WriteCache(false));
        }
        if let Some(guest) = &mut self.guest {
            guest.event_index = self.qemu.features & qemu::EVENT_INDEX != 0;
        }
    }

    pub(super) fn hear(&mut self) {
        loop {
            match self.qemu.hear() {
                Heard::Nothing => break,
                Heard::HungUp if self.is_hostile => {
                    self.crash();
                    break;
                }
                Heard::HungUp => {
                    self.fault("QEMU is cut off".into());
                    self.qemu.hang_up();
                    break;
                }
                Heard::Answer(word) => {
                    log!(self, "answered: {word:?}");
                    self.note(0x1000);
                    if word == Word::MemTable && self.settings.without_cache {
                        self.is_through = true;
                    }
                }
            }
        }
        for qemu in [&mut self.successor, &mut self.leaving].into_iter().flatten() {
            while let Heard::Answer(_) = qemu.hear() {}
        }
    }

    pub(super) fn speak(&mut self) {
        let Some(guest) = &self.guest else { return };
        // Several words are heard at once more often than not.
        for _ in 0..=self.random.below(6) {
            let Some(word) = self.qemu.speak(guest) else { break };
            if self.verbose {
                eprintln!("says {word:?}");
            }
        }
        if let Some(successor) = &mut self.successor {
            successor.speak(guest);
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
        let is_half_started = self.qemu.script.iter().all(|word| matches!(word, Word::Enable(_)));
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
                let mut old = std::mem::replace(&mut self.qemu, successor);
                self.qemu.bases = std::mem::take(&mut old.bases);
                self.leaving = Some(old);
                self.start();
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
        // Also one that is still starting its queues.
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

    /// The guest dies, and its QEMU.
    pub(super) fn crash(&mut self) {
        if self.guest.take().is_none() {
            return;
        }
        log!(self, "the guest dies");
        self.counts.crashes += 1;
        self.last_word_was_stop = self.qemu.waits_for_stop();
        self.qemu.hang_up();
        (self.successor, self.leaving, self.then, self.is_hostile) = (None, None, None, false);
    }

    /// A QEMU that was taken over by somebody.
    pub(super) fn say_what_is_odd(&mut self) {
        if !self.settings.hostile || self.guest.is_none() || !self.qemu.is_connected() || self.successor.is_some() {
            return;
        }
        self.is_hostile = true;
        let queues = 1 + self.random.below(QUEUES as u64) as u16;
        let size = self.random.pick(&[1, 8, QUEUE_SIZE]);
        log!(self, "QEMU says what it should not");
        let words = match self.random.below(3) {
            0 => vec![Word::SmallInflight { queues, size }, Word::SetSmallInflight { queues, size }],
            1 => vec![Word::OddSize(self.random.below(QUEUES as u64 + 1) as usize, self.random.next() as u32 % 70_000)],
            _ => vec![Word::Reset],
        };
        words.into_iter().rev().for_each(|word| self.qemu.script.push_front(word));
    }
}
