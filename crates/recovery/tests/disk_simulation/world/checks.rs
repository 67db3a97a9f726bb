//! Checks: memory compared with the disk; and the end of a run, when every request is answered and the whole disk is
//! read.

use std::sync::{Arc, Mutex};

use hearth_disk::ledger::Ledger;
use hearth_disk::warm::{AfterServing, WarmSource};

use super::{BLOCKS_MAX, DISK, World};
use crate::guest::{BLOCKS_A_REQUEST, Guest, Kind, QUEUES};
use crate::storage::{SECTORS_A_BLOCK, lock};

/// More rounds than any run needs to come to rest.
const ROUNDS_TO_REST: u32 = 20_000;

impl World {
    /// Everything held in memory equals the disk.
    pub(super) fn check_memory(&mut self) {
        let storage = lock(&self.storage);
        let mut wrong = Vec::new();
        if let Some(set) = &self.warm.boot_set {
            for block in 0..BLOCKS_MAX + BLOCKS_A_REQUEST {
                if set.copy_of(DISK, block).is_some_and(|bytes| bytes != storage.block(block)) {
                    wrong.push(format!("the boot set holds another block {block} than the disk"));
                }
            }
        }
        let living = self.incarnation.iter().filter_map(|incarnation| incarnation.ledger.clone());
        let dead: Vec<Arc<Mutex<Ledger>>> = self.dead.lock().unwrap().iter().map(|dead| dead.ledger.clone()).collect();
        for ledger in living.chain(dead) {
            for entry in ledger.lock().unwrap().entries() {
                if entry.disk != DISK || self.tagger.tag(&storage.block(entry.block)) != entry.tag {
                    wrong.push(format!("a ledger has the tag of another block {} than the disk's", entry.block));
                }
            }
        }
        drop(storage);
        wrong.into_iter().for_each(|what| self.fault(what));
    }

    /// All blocks that the ember would serve equal the disk.
    pub(super) fn check_ember(&mut self) {
        for block in 0..BLOCKS_MAX {
            let expected = lock(&self.storage).block(block);
            let mut is_right = true;
            self.warm.ember.serve(DISK, block, AfterServing::Keep, &mut |bytes| is_right = *bytes == expected);
            if !is_right {
                self.fault(format!("the ember serves another block {block} than the disk's"));
            }
        }
    }

    /// Brings everything to its end: nothing fails any more, and nobody is killed.
    pub(super) fn come_to_rest(&mut self) -> Result<(), String> {
        lock(&self.storage).fuse = None;
        self.is_ending = true;
        if self.is_hostile {
            self.crash();
        }
        for _ in 0..ROUNDS_TO_REST {
            self.problem()?;
            if self.is_at_rest() {
                return Ok(());
            }
            self.go_on();
            self.send_messages();
            self.apply();
            self.report();
            self.turn();
            self.look();
            if let Some(alarm) = self.keeper.as_ref().and_then(|keeper| keeper.alarm) {
                let wait = alarm.saturating_duration_since(self.clock.now());
                self.clock.advance(wait);
            }
        }
        let waiting = self.guest.iter().flat_map(Guest::waiting);
        let waiting: Vec<_> = waiting.map(|request| (request.id, request.kind, &request.sectors)).collect();
        Err(format!("it does not come to rest: {waiting:?} are not answered, {:?} are not sent", self.qemu.script))
    }

    pub(super) fn is_at_rest(&self) -> bool {
        let served = self.guest.as_ref().is_some_and(|guest| !guest.is_waiting());
        let talks = !self.qemu.is_connected() || !self.qemu.is_silent() || !self.qemu.is_started;
        served && !talks && self.successor.is_none() && lock(&self.storage).is_idle()
    }

    /// Reads the whole disk through the guest.
    pub(super) fn read_all(&mut self) -> Result<(), String> {
        let all = self.model.sectors();
        for start in (0..all).step_by((BLOCKS_A_REQUEST * SECTORS_A_BLOCK) as usize) {
            let sectors = start..(start + BLOCKS_A_REQUEST * SECTORS_A_BLOCK).min(all);
            let queue = self.random.below(QUEUES as u64) as usize;
            while !self.submit_to(queue, Kind::Read, sectors.clone()) {}
            self.come_to_rest()?;
        }
        Ok(())
    }
}
