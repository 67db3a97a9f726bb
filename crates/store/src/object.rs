//! Object: reads an object by position. Each block is fetched once, however many readers ask for it, and then comes
//! from the cache.
//!
//! read_at: in the cache | being fetched: wait for it | fetch it, with those of its neighbours that are needed too.
//! read_ahead: queues requests for blocks that will be needed, and returns at once. A demand never waits for queued
//! requests.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::cache::CachedObject;
use crate::store::{run, runtime};
use crate::{Cache, Meta, Scheduler, Slot, Store, StoreError, Urgency};

/// Size of a block: the smallest request, and the unit of the cache. A page fault needs 64 KiB; a block takes 2 ms at
/// 125 MiB/s, and after a round trip a smaller one is no faster.
const BLOCK_BYTES: u64 = 256 << 10;
/// Maximum number of blocks in one request.
const REQUEST_BLOCKS: u64 = 8;
/// Maximum for requests ahead while a guest runs, which may have to wait for all of it.
const REQUEST_BLOCKS_BEHIND: u64 = 4;

/// One object, in the version that was opened; its length does not change.
#[derive(Debug)]
pub struct Object {
    store: Arc<Store>,
    name: String,
    meta: Meta,
    cached: CachedObject,
    /// Blocks that are being fetched.
    under_way: Mutex<HashSet<u64>>,
    landed: Condvar,
    scheduler: Arc<Scheduler>,
    /// Number of failed requests ahead.
    failures: AtomicU64,
}

/// Blocks that are being fetched while this lives.
struct Flight<'a> {
    object: &'a Object,
    blocks: Range<u64>,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut under_way = self.object.under_way();
        under_way.retain(|block| !self.blocks.contains(block));
        self.object.landed.notify_all();
    }
}

impl Object {
    /// Opens an object. Returns None if it does not exist.
    pub fn open(
        store: &Arc<Store>,
        cache: &Arc<Cache>,
        scheduler: &Arc<Scheduler>,
        name: &str,
    ) -> Result<Option<Arc<Self>>, StoreError> {
        let Some(meta) = store.meta(name)? else { return Ok(None) };
        let cached = cache.object(&store.url(name), &format!("{} {}", meta.version, meta.bytes));
        Ok(Some(Arc::new(Self {
            store: store.clone(),
            name: name.to_owned(),
            meta,
            cached,
            under_way: Mutex::default(),
            landed: Condvar::new(),
            scheduler: scheduler.clone(),
            failures: AtomicU64::new(0),
        })))
    }

    /// Metadata of the object when it was opened.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// URL of the object, for messages.
    pub fn url(&self) -> String {
        self.store.url(&self.name)
    }

    /// Fills `into` from this offset on. Fails if the range ends behind the object.
    pub fn read_at(&self, into: &mut [u8], offset: u64, urgency: Urgency) -> Result<(), StoreError> {
        self.read(into, offset, urgency, None)
    }

    /// Reads as `read_at` does, within a slot that the caller has taken.
    pub fn read_in_slot(&self, into: &mut [u8], offset: u64, slot: &Slot) -> Result<(), StoreError> {
        self.read(into, offset, slot.urgency(), Some(slot))
    }

    fn read(&self, into: &mut [u8], offset: u64, urgency: Urgency, slot: Option<&Slot>) -> Result<(), StoreError> {
        let end = offset.checked_add(into.len() as u64).filter(|&end| end <= self.meta.bytes);
        let Some(end) = end else {
            let why = format!("it ends at {}, before the bytes that are requested", self.meta.bytes);
            return Err(StoreError::Away { url: self.url(), why });
        };
        let (mut at, mut taken) = (offset, None);
        while at < end {
            let (block, within) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let length = (BLOCK_BYTES - within).min(end - at);
            let target = &mut into[(at - offset) as usize..][..length as usize];
            if self.cached.read(block, within, target) {
                at += length;
                continue;
            }
            if slot.is_none() && taken.is_none() {
                // A demand takes its slot before it waits, so that no background request begins. Others may find the
                // block fetched meanwhile.
                if urgency == Urgency::Demand || !self.await_landing(block) {
                    taken = Some(self.scheduler.take(urgency));
                }
                continue;
            }
            let Some(flight) = self.take_off(block..end.div_ceil(BLOCK_BYTES), true) else { continue };
            let range = self.bytes_of(&flight.blocks);
            let bytes = run(self.store.fetch(&self.name, range.clone()))?;
            let length = (range.end.min(end) - at) as usize;
            into[(at - offset) as usize..][..length].copy_from_slice(&bytes[(at - range.start) as usize..][..length]);
            self.keep(&flight.blocks, &bytes);
            at += length as u64;
        }
        Ok(())
    }

    /// Queues requests for these bytes unless they are cached. Failures are not reported: a read asks again.
    pub fn read_ahead(self: &Arc<Self>, bytes: Range<u64>, urgency: Urgency) {
        let blocks = bytes.start / BLOCK_BYTES..bytes.end.min(self.meta.bytes).div_ceil(BLOCK_BYTES);
        let request_blocks = if urgency > Urgency::WorkingSet { REQUEST_BLOCKS_BEHIND } else { REQUEST_BLOCKS };
        let mut from = blocks.start;
        while from < blocks.end {
            let to = blocks.end.min((from / request_blocks + 1) * request_blocks);
            let request = from..to;
            from = to;
            if request.clone().all(|block| self.cached.has(block)) {
                continue;
            }
            let (object, failures) = (self.clone(), self.failures.load(Relaxed));
            runtime().spawn(async move {
                // The blocks are not marked as being fetched yet: a read that needs them sooner does not wait for this
                // slot.
                let _slot = object.scheduler.wait(urgency).await;
                if object.failures.load(Relaxed) != failures {
                    // A request failed since: this one would take as long to fail, and others would wait behind it.
                    return;
                }
                // Blocks that a read has fetched meanwhile are skipped.
                let mut rest = request;
                while let Some(first) = rest.find(|block| !object.cached.has(*block)) {
                    let Some(flight) = object.take_off(first..rest.end, false) else { continue };
                    rest.start = flight.blocks.end;
                    match object.store.fetch(&object.name, object.bytes_of(&flight.blocks)).await {
                        Ok(bytes) => object.keep(&flight.blocks, &bytes),
                        Err(error) => {
                            object.failures.fetch_add(1, Relaxed);
                            return tracing::debug!(%error, "not read ahead");
                        }
                    }
                }
            });
        }
    }

    /// Removes these bytes from the cache because they are wrong; the next read fetches them again.
    pub fn forget(&self, bytes: Range<u64>) {
        (bytes.start / BLOCK_BYTES..bytes.end.div_ceil(BLOCK_BYTES)).for_each(|block| self.cached.remove(block));
    }

    /// Marks the first block, and those behind it that are neither cached nor being fetched, as being fetched. Returns
    /// None if the first one is being fetched already, with `wait` after the end of that fetch.
    fn take_off(&self, blocks: Range<u64>, wait: bool) -> Option<Flight<'_>> {
        let mut under_way = self.under_way();
        if under_way.contains(&blocks.start) {
            drop(under_way);
            if wait {
                self.await_landing(blocks.start);
            }
            return None;
        }
        let is_free = |block: &u64| !under_way.contains(block) && (*block == blocks.start || !self.cached.has(*block));
        let count = blocks.clone().take(REQUEST_BLOCKS as usize).take_while(is_free).count() as u64;
        let blocks = blocks.start..blocks.start + count;
        under_way.extend(blocks.clone());
        Some(Flight { object: self, blocks })
    }

    /// Waits while a block is being fetched. Returns false if it is not.
    fn await_landing(&self, block: u64) -> bool {
        let under_way = self.under_way();
        let is_under_way = under_way.contains(&block);
        drop(self.landed.wait_while(under_way, |under_way| under_way.contains(&block)));
        is_under_way
    }

    fn keep(&self, blocks: &Range<u64>, bytes: &[u8]) {
        for (block, bytes) in blocks.clone().zip(bytes.chunks(BLOCK_BYTES as usize)) {
            self.cached.add(block, bytes);
        }
    }

    fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        blocks.start * BLOCK_BYTES..(blocks.end * BLOCK_BYTES).min(self.meta.bytes)
    }

    fn under_way(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
