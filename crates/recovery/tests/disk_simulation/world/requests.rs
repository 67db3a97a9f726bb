//! Requests: those of the guest, the image's operations for them, and the answers.

use std::ops::Range;

use super::{Then, World, log};
use crate::guest::{Answer, BLOCKS_A_REQUEST, Kind, QUEUES};
use crate::model::End;
use crate::qemu;
use crate::storage::{Outcome, SECTOR, SECTORS_A_BLOCK, lock};

impl World {
    pub(super) fn submit(&mut self) {
        // The guest's processors are paused during a hop.
        if self.then == Some(Then::Hop) {
            return;
        }
        let kind = self.random.pick(&[
            Kind::Read,
            Kind::Read,
            Kind::Read,
            Kind::Read,
            Kind::Write,
            Kind::Write,
            Kind::Write,
            Kind::Flush,
            Kind::Discard,
            Kind::WriteZeroes,
            Kind::Read,
            if self.next_id.is_multiple_of(16) { Kind::Odd } else { Kind::Identify },
        ]);
        let sectors = self.sectors();
        let queue = self.random.below(QUEUES as u64) as usize;
        self.submit_to(queue, kind, sectors);
    }

    pub(super) fn submit_to(&mut self, queue: usize, kind: Kind, sectors: Range<u64>) -> bool {
        let Some(guest) = &mut self.guest else { return false };
        let (id, stamp) = (self.next_id + 1, self.next_stamp + 1);
        let Some(request) = guest.submit(queue, id, kind, sectors.clone(), stamp, &mut self.random) else {
            return false;
        };
        (self.next_id, self.next_stamp) = (id, stamp);
        let storage = lock(&self.storage);
        match kind {
            Kind::Read => self.model.begin_read(id, sectors.clone()),
            Kind::Write => self.model.begin_write(id, sectors.clone(), stamp, &storage),
            Kind::Discard | Kind::WriteZeroes => self.model.begin_write(id, sectors.clone(), 0, &storage),
            Kind::Flush => {
                (request.answered, request.submitted) = (self.model.answered(), self.model.begin_flush());
            }
            Kind::Identify | Kind::Odd => {}
        }
        request.is_through = self.is_through || self.settings.features & (qemu::FLUSH | qemu::CONFIG_WCE) == 0;
        drop(storage);
        log!(self, "{id}: {kind:?} of {sectors:?} in queue {queue}, stamp {stamp}");
        true
    }

    /// Mostly whole blocks, some of them more often than others.
    pub(super) fn sectors(&mut self) -> Range<u64> {
        let all = self.model.sectors();
        let blocks = all / SECTORS_A_BLOCK;
        let some = if self.random.one_in(2) { blocks.min(10) } else { blocks };
        let mut start = self.random.below(some) * SECTORS_A_BLOCK;
        let mut length = (1 + self.random.below(BLOCKS_A_REQUEST)) * SECTORS_A_BLOCK;
        if self.random.one_in(2) {
            length = SECTORS_A_BLOCK;
        }
        if self.random.one_in(3) {
            start += self.random.below(SECTORS_A_BLOCK);
            length = 1 + self.random.below(length);
        }
        start..(start + length).min(all)
    }

    pub(super) fn apply(&mut self) {
        let mut storage = lock(&self.storage);
        let waiting = storage.waiting() as u64;
        if waiting == 0 {
            return;
        }
        let place = self.random.below(waiting) as usize;
        let failing = self.settings.failing.filter(|_| !self.is_ending);
        let fails = failing.is_some_and(|one_in| self.random.one_in(one_in));
        let is_full = self.is_full && !self.is_ending && storage.needs_space(place);
        let mut after = || self.random.below(BLOCKS_A_REQUEST * SECTORS_A_BLOCK);
        let outcome = match (fails, is_full) {
            (true, _) => Outcome::Fails { after: after() },
            (_, true) => Outcome::Full { after: after() },
            _ => Outcome::Well,
        };
        self.counts.out_of_space += u64::from(matches!(outcome, Outcome::Full { .. }));
        storage.apply(place, outcome, &mut self.random);
    }

    pub(super) fn report(&mut self) {
        let mut storage = lock(&self.storage);
        let unreported = storage.unreported() as u64;
        if unreported > 0 {
            storage.report(self.random.below(unreported) as usize);
        }
    }

    /// The guest reads its rings.
    pub(super) fn look(&mut self) {
        let before = self.counts.answers;
        for queue in 0..QUEUES {
            while let Some(found) = self.guest.as_mut().and_then(|guest| guest.look(queue)) {
                match found {
                    Ok(answer) => self.take(answer),
                    Err(_) if self.is_hostile => {}
                    Err(what) => self.fault(what),
                }
            }
        }
        if self.counts.answers > before {
            self.check_copies();
        }
    }

    pub(super) fn take(&mut self, answer: Answer) {
        let Answer { request, status, bytes, found } = answer;
        self.counts.answers += 1;
        self.note(request.id << 8 | u64::from(status));
        found.iter().for_each(|stamp| self.trace = self.trace.wrapping_mul(31) ^ u64::from(stamp.unwrap_or(77)));
        log!(self, "{}: answered {status}, {bytes} bytes, {found:?}", request.id);
        let storage = lock(&self.storage);
        let stops_short = self.settings.fills && self.was_stopped;
        let may_fail = self.settings.failing.is_some() || request.is_gone || stops_short;
        let length = ((request.sectors.end - request.sectors.start) * SECTOR) as u32;
        let expected = match request.kind {
            Kind::Read => length + 1,
            Kind::Identify => 21,
            _ => 1,
        };
        let checked = match (request.kind, status) {
            _ if self.is_hostile => {
                self.model.forget_read(request.id);
                self.model.end_write(request.id, End::Unknown, &storage);
                Ok(())
            }
            (Kind::Odd, 2) => Ok(()),
            (_, 0) if bytes != expected => Err(format!("{}: {bytes} bytes instead of {expected}", request.id)),
            (Kind::Read, 0) => self.model.end_read(request.id, &found, &storage),
            (Kind::Write | Kind::WriteZeroes, 0) if request.is_through => {
                self.model.end_write(request.id, End::Durable, &storage);
                self.model.check_durable(request.sectors.clone(), &self.model.answered(), &storage)
            }
            (Kind::Write | Kind::WriteZeroes, 0) => {
                self.model.end_write(request.id, End::Well, &storage);
                Ok(())
            }
            (Kind::Discard, 0) => {
                self.model.end_write(request.id, End::Unknown, &storage);
                Ok(())
            }
            (Kind::Flush, 0) => {
                self.model.end_flush(request.submitted);
                let all = 0..self.model.sectors().min(request.answered.len() as u64);
                self.model.check_durable(all, &request.answered, &storage)
            }
            (Kind::Identify, 0) => Ok(()),
            (_, 1) if may_fail => {
                self.model.forget_read(request.id);
                self.model.end_write(request.id, End::Unknown, &storage);
                Ok(())
            }
            _ => Err(format!("{}: {:?} ends with status {status}", request.id, request.kind)),
        };
        drop(storage);
        if let Err(what) = checked {
            self.fault(what);
        }
    }

    pub(super) fn scribble(&mut self) {
        let Some(guest) = &self.guest else { return };
        guest.scribble(&mut self.random);
        if self.random.one_in(4) {
            let stamp = self.next_stamp + 1;
            self.next_stamp = stamp;
            if let Some(id) = guest.scribble_over_write(stamp, &mut self.random) {
                log!(self, "{id}: its data becomes {stamp}");
                self.model.may_write(id, stamp);
            }
        }
    }
}
