//! Reading: a thread reads the map of a dead guest, and either puts it into the file for the next guest or keeps it for the next start.
//!
//! The memory monitor begins it when a guest was banked, settles the ember when it is over, and gives it up when the next guest needs
//! the memory.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_disk::ledger::Ledger;
use hearth_memory::RamFile;
use hearth_recovery::ember::Ember;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::warm_reboot::cache_map::{CacheMap, GiveUp};

use super::{Awaited, CacheMapFile};
use crate::event::{CacheMapSize, MemoryMessage};

/// How long the reading of a map may take: several times what it takes on a busy host (0.3 s a GiB). Meanwhile dead memory stays.
const PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE_PER_GIB: Duration = Duration::from_secs(1);
/// A thread cannot be joined with a limit.
const END_LOOK_EVERY: Duration = Duration::from_millis(5);

/// A map that a thread is reading.
pub struct Reading {
    /// Of this dead guest.
    pub incarnation: u32,
    thread: JoinHandle<MemoryMessage>,
    give_up: Arc<GiveUp>,
    began: Instant,
    patience: Duration,
}

impl Reading {
    /// Begins to read the map that is awaited, and puts it into the file. None: none is awaited, or its guest is not banked yet.
    pub fn begin(file: &Arc<CacheMapFile>, ember: &Ember) -> Option<Self> {
        let incarnation = file.awaited().as_ref()?.incarnation;
        let (ram, ledger) = ember.unsettled_memory(incarnation)?;
        Self::begin_of(file, ram, ledger)
    }

    /// As `begin`, of a guest with this memory.
    pub fn begin_of(file: &Arc<CacheMapFile>, ram: Arc<RamFile>, ledger: Arc<Mutex<Ledger>>) -> Option<Self> {
        let awaited = file.awaited().clone()?;
        let (of_thread, patience, give_up) = (file.clone(), patience(&ram), awaited.give_up.clone());
        let begun = Self::start(awaited.incarnation, patience, give_up, move || {
            let map = of_thread.map_of(ram, &ledger, &awaited);
            of_thread.finish(&awaited, map)
        });
        if begun.is_none() {
            file.clear();
        }
        begun
    }

    /// Begins to read the map of the machine's last guest, and keeps it for the next start.
    pub fn begin_keeping(
        file: Arc<CacheMapFile>,
        dead: &Incarnation,
        awaited: Awaited,
        ember: Arc<Ember>,
    ) -> Option<Self> {
        let (number, ram, ledger) = (dead.number, dead.ram.clone(), dead.ledger.clone()?);
        Self::start(number, patience(&ram), awaited.give_up.clone(), move || {
            let map = file.map_of(ram, &ledger, &awaited);
            // No settling follows at a stop: what a dump has written meanwhile is released now.
            drop(awaited);
            if let Err(error) = ember.let_go(number, 0..u64::MAX) {
                tracing::warn!(%error, "cannot release dead memory");
            }
            let map = map?;
            file.keep(&map).map_err(|error| format!("{} cannot be written: {error}", file.kept.display()))?;
            Ok(map)
        })
    }

    /// Begins to read a map that is made like this. It is given up when it takes longer than `patience`.
    pub fn start(
        incarnation: u32,
        patience: Duration,
        give_up: Arc<GiveUp>,
        read: impl FnOnce() -> Result<CacheMap, String> + Send + 'static,
    ) -> Option<Self> {
        let began = Instant::now();
        let timed = move || {
            thread_filter::deny_unneeded();
            let size =
                |map: CacheMap| CacheMapSize { pages: map.pages(), files: map.files(), bytes: map.text().len() as u64 };
            MemoryMessage::CacheMap { read: read().map(size), took: began.elapsed() }
        };
        let thread = std::thread::Builder::new().name("cache-map".to_owned()).spawn(timed);
        let failed = |error| tracing::warn!(%error, "cannot start the thread that reads the cache map");
        Some(Self { incarnation, thread: thread.map_err(failed).ok()?, give_up, began, patience })
    }

    /// Whether it is over. One that takes too long is given up, and soon is.
    pub fn is_over(&self) -> bool {
        if self.began.elapsed() > self.patience {
            self.give_up("it took too long");
        }
        self.thread.is_finished()
    }

    /// Whether it ends without a map: what it still reads does not count.
    pub fn is_given_up(&self) -> bool {
        self.give_up.why().is_some()
    }

    /// Ends it soon, without a map.
    pub fn give_up(&self, why: &'static str) {
        self.give_up.because(why);
    }

    /// Waits until it is over, and returns what became of it.
    pub fn end(self) -> Option<MemoryMessage> {
        let ended = self.thread.join();
        ended.map_err(|_| tracing::error!("the thread that reads the cache map panicked")).ok()
    }

    /// As `end`, but gives it up if it does not end by itself in this time.
    pub fn end_within(self, limit: Duration, why: &'static str) -> Option<MemoryMessage> {
        let until = Instant::now() + limit;
        while !self.is_over() && Instant::now() < until {
            std::thread::sleep(END_LOOK_EVERY);
        }
        self.give_up(why);
        self.end()
    }
}

fn patience(ram: &RamFile) -> Duration {
    PATIENCE + PATIENCE_PER_GIB * (ram.bytes() >> 30) as u32
}
