//! Memory monitor: the thread that keeps a machine's memory within its budget and maintains the ember.
//!
//! settle (once a death) -> sweep (release what was served) -> look (how much do the files hold?) -> trim (before the
//! limit) -> assay
//!
//! The monitor also looks while memory is granted page fault by page fault (`gate`). If the ember is already trimmed, a
//! fault waits for microseconds; if it is not, the fault waits for the release, about a millisecond.
//!
//! It has its own thread because a guest can fill memory at gigabytes a second while the machine's loop waits for QEMU.
//! The disks' threads cannot do it, because a release takes longer than a RAM hit may.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_disk::boot_set::BootSet;
use hearth_memory::PAGE_BYTES;
use hearth_recovery::admission::Admission;
use hearth_recovery::budget::{Budget, Growth, Usage};
use hearth_recovery::ember::Ember;
use hearth_recovery::images::Watch;
use hearth_recovery::incarnation::Incarnation;

use super::cache_map::{CacheMapFile, Reading};
use super::dump::GuestWaits;
use crate::event::MemoryMessage;

/// Time between two looks while there is an ember. A guest under KVM touches about 2 GiB/s of new memory: 4 MiB a look.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Time between two looks when only the living incarnation holds memory: there is nothing to release then.
const LOOK_EVERY_IDLE: Duration = Duration::from_millis(200);
/// Time between two reports of trimming, which happens every few milliseconds.
const TRIMMED_EVERY: Duration = Duration::from_secs(1);
/// While a cache map is read, no memory is settled, and blocks are trimmed for the next guest instead. A map is worth this share of them.
const BLOCKS_FOR_MAP: u64 = 16;
/// Pages tested ahead of reads in one round: about 0.4 ms of work.
const ASSAY_PAGES: u32 = 512;
/// Time between two samples of a young guest's memory.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Share of an incarnation's age between two samples of an older one: 50 samples in the first hour, 110 in the first month.
const SAMPLE_AGE: u32 = 8;

/// What else a machine keeps of dead guests, beside its ember.
#[derive(Default)]
pub struct Kept {
    pub boot_set: Option<Arc<BootSet>>,
    pub cache_map: Option<Arc<CacheMapFile>>,
}

/// Handle of the thread; dropping it ends the thread.
pub struct MemoryMonitor {
    shared: Arc<Shared>,
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    budget: Mutex<Budget>,
    ember: Arc<Ember>,
    boot_set: Option<Arc<BootSet>>,
    cache_map: Option<Arc<CacheMapFile>>,
    notes: Mutex<Option<Watch>>,
    live: Mutex<Option<Incarnation>>,
    admission: Mutex<Option<Arc<Admission>>>,
    settle_wanted: AtomicBool,
    is_over: AtomicBool,
    live_bytes: AtomicU64,
    ember_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    dump_buffer_bytes: Arc<AtomicU64>,
}

impl Shared {
    fn new(budget: Budget, ember: Arc<Ember>, Kept { boot_set, cache_map }: Kept) -> Self {
        Self {
            budget: Mutex::new(budget),
            ember,
            boot_set,
            cache_map,
            notes: Mutex::new(None),
            live: Mutex::new(None),
            admission: Mutex::new(None),
            settle_wanted: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            live_bytes: AtomicU64::new(0),
            ember_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            dump_buffer_bytes: Arc::default(),
        }
    }

    fn budget(&self) -> Budget {
        *self.budget.lock().expect("holders only copy and assign")
    }
}

impl MemoryMonitor {
    pub fn start(
        machine: &str,
        budget: Budget,
        ember: Arc<Ember>,
        kept: Kept,
        tell: impl Fn(MemoryMessage) + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(budget, ember, kept));
        let (wake, woken) = channel();
        let work = shared.clone();
        let thread = std::thread::Builder::new()
            .name(format!("memory-{machine}"))
            .spawn(move || Round::new(&work, &tell).run(&woken))?;
        Ok(Self { shared, wake: Some(wake), thread: Some(thread) })
    }

    /// Sets the living incarnation.
    pub fn watch(&self, live: Option<Incarnation>) {
        *self.shared.live.lock().expect("the monitor never panics") = live;
        self.nudge();
    }

    /// Sets the memory that the machine may hold.
    pub fn set_budget(&self, budget: Budget) {
        *self.shared.budget.lock().expect("holders only copy and assign") = budget;
    }

    /// Counts the memory granted to the living incarnation as used.
    pub fn consider(&self, admission: Option<Arc<Admission>>) {
        *self.shared.admission.lock().expect("holders only assign") = admission;
        self.nudge();
    }

    /// Sets the notes of the disks' images that are renewed from now on. None: no notes.
    pub fn note_images(&self, notes: Option<Watch>) {
        *self.shared.notes.lock().expect("the monitor never panics") = notes;
    }

    /// Asks for `settle` after a new dead incarnation was banked.
    pub fn settle(&self) {
        self.shared.settle_wanted.store(true, Relaxed);
        self.nudge();
    }

    pub fn usage(&self) -> Usage {
        Usage {
            live_bytes: self.shared.live_bytes.load(Relaxed),
            ember_bytes: self.shared.ember_bytes.load(Relaxed),
            buffer_bytes: self.shared.dump_buffer_bytes.load(Relaxed),
            is_held: self.shared.ember.is_held(),
        }
    }

    /// Counter for the bytes in the dumps' buffers.
    pub fn dump_buffers(&self) -> Arc<AtomicU64> {
        self.shared.dump_buffer_bytes.clone()
    }

    /// Tells dumps, at any moment, whether the guest waits for memory, or has more than the budget because nothing makes it wait.
    pub fn guest_waits(&self) -> GuestWaits {
        let shared = self.shared.clone();
        Arc::new(move || {
            let admission = shared.admission.lock().expect("holders only assign");
            shared.is_over.load(Relaxed) || admission.as_ref().is_some_and(|admission| admission.is_waited_for())
        })
    }

    pub fn peak_bytes(&self) -> u64 {
        self.shared.peak_bytes.load(Relaxed)
    }

    /// Does not wait for its thread, which may be waiting for one that goes on.
    pub fn leave(mut self) {
        self.thread = None;
    }

    fn nudge(&self) {
        if let Some(wake) = &self.wake {
            // The thread only ends when this sender is dropped, so the message arrives.
            let _ = wake.send(());
        }
    }
}

impl Drop for MemoryMonitor {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the memory monitor's thread panicked");
        }
    }
}

/// The thread's state between two looks.
struct Round<'a> {
    shared: &'a Shared,
    tell: &'a dyn Fn(MemoryMessage),
    /// The living incarnation at the last look, and its memory.
    growth_from: Option<(u32, u64)>,
    /// Start of the last look.
    looked: Instant,
    warned: bool,
    /// Whether the ember was held for a dump at the last look.
    was_held: bool,
    trimmed_bytes: u64,
    trimmed_told: Instant,
    ember_told: bool,
    samples: Samples,
    /// Whether to settle once the cache map is read.
    settles: bool,
    /// The reading of the cache map.
    reading: Option<Reading>,
}

impl<'a> Round<'a> {
    fn new(shared: &'a Shared, tell: &'a dyn Fn(MemoryMessage)) -> Self {
        let now = Instant::now();
        Self {
            shared,
            tell,
            growth_from: None,
            looked: now,
            warned: false,
            was_held: false,
            trimmed_bytes: 0,
            trimmed_told: now,
            ember_told: true,
            samples: Samples::default(),
            settles: false,
            reading: None,
        }
    }

    fn run(&mut self, woken: &Receiver<()>) {
        loop {
            let busy = self.shared.ember_bytes.load(Relaxed) > 0;
            match woken.recv_timeout(if busy { LOOK_EVERY } else { LOOK_EVERY_IDLE }) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if let Err(error) = self.look() {
                tracing::warn!(%error, "cannot measure or release the machine's memory files");
            }
            self.renew_notes();
        }
    }

    fn renew_notes(&self) {
        let mut notes = self.shared.notes.lock().expect("holders only assign and renew");
        if let Some(Err(error)) = notes.as_mut().map(Watch::renew) {
            tracing::debug!(%error, "cannot note the images' state");
        }
    }

    fn look(&mut self) -> Result<(), hearth_memory::MemoryError> {
        // Release unusable memory first: otherwise trimming would take good pages in its place. A guest that reads from
        // the ember while this thread waits for a processor also leaves such memory.
        let settled = self.settle_if_wanted()?;
        self.shared.ember.sweep()?;
        let looked = Instant::now();
        let (usage, living) = self.measure()?;
        let last = std::mem::replace(&mut self.growth_from, living.map(|number| (number, usage.live_bytes)));
        // What an incarnation had before it was watched says nothing of its pace: one of libvirt's QEMU, or a restored one.
        let last = last.filter(|(number, _)| Some(*number) == living);
        let growth = last.map_or(0, |(_, live_bytes)| usage.live_bytes.saturating_sub(live_bytes));
        // Settling took 125 to 660 ms on a busy host. The guest's growth in that time says nothing about the next look,
        // which comes 2 ms later.
        let growth = if settled.is_some() { 0 } else { growth };
        // The period is counted from before the last measurement to after this one. If this thread had to wait for a
        // processor in between, a slow guest must not be mistaken for a fast one.
        let since = std::mem::replace(&mut self.looked, looked).elapsed();
        // What is settled after the reading is room enough for a leap.
        let may_leap = living.is_some() && self.being_read().is_none();
        let to_trim = self.shared.budget().to_trim(self.promised(usage), Growth { bytes: growth, since, may_leap });
        if self.map_costs_too_much(to_trim) {
            return self.look();
        }
        let trimmed = if to_trim > 0 { self.shared.ember.trim(to_trim)? } else { 0 };
        self.trimmed_bytes += trimmed;
        let guest_waits = self.review_admission();
        if let Some(reading) = &self.reading
            && self.is_spared_alone()
            && (trimmed < to_trim || guest_waits)
        {
            reading.give_up("the next guest needs the memory");
        }
        self.warn_if_over(usage);
        self.report_ember(usage.ember_bytes == 0);
        if let Some(living) = living
            && self.samples.is_due(living, looked)
        {
            self.tell_sample(living, usage);
        }
        if let Some(settled) = settled {
            (self.tell)(settled);
        } else if usage.ember_bytes > 0 {
            self.shared.ember.assay(ASSAY_PAGES);
        }
        Ok(())
    }

    /// The reading of a cache map, unless it was given up.
    fn being_read(&self) -> Option<&Reading> {
        self.reading.as_ref().filter(|reading| !reading.is_given_up())
    }

    /// Whether memory stays only because a cache map is being read. What a dump holds would not be released either.
    fn is_spared_alone(&self) -> bool {
        self.shared.ember.wants_spared() || !self.shared.ember.is_held()
    }

    /// Gives up the reading of a cache map if it would cost too many blocks to trim `to_trim` bytes meanwhile. Returns whether it did.
    fn map_costs_too_much(&self, to_trim: u64) -> bool {
        let Some(reading) = self.being_read() else { return false };
        let counts = self.shared.ember.counts();
        let gives_up = self.is_spared_alone() && counts.trimmed + to_trim / PAGE_BYTES > counts.kept / BLOCKS_FOR_MAP;
        if gives_up {
            reading.give_up("the next guest needs the memory");
        }
        gives_up
    }

    /// What the memory files hold, and the number of the living incarnation.
    fn measure(&self) -> Result<(Usage, Option<u32>), hearth_memory::MemoryError> {
        let live = self.shared.live.lock().expect("holders only assign").clone();
        let ember_bytes = self.shared.ember.resident_bytes()?;
        // A dead incarnation becomes part of the ember before the next one lives. Counting it twice would cost half the
        // ember. Ask after measuring the ember, so that it cannot be added in between.
        let banked = self.shared.ember.incarnations();
        let live = live.filter(|live| !banked.contains(&live.number));
        let live_bytes = live.as_ref().map_or(Ok(0), |live| live.resident_bytes())?;
        // Do not count what the ember gave up for the guest meanwhile twice either.
        let ember_bytes = ember_bytes.min(self.shared.ember.resident_bytes()?);
        let buffer_bytes = self.shared.dump_buffer_bytes.load(Relaxed);
        let usage = Usage { live_bytes, ember_bytes, buffer_bytes, is_held: self.shared.ember.is_held() };
        let boot_set_bytes = self.shared.boot_set.as_ref().map_or(0, |boot_set| boot_set.resident_bytes());
        self.shared.live_bytes.store(usage.live_bytes, Relaxed);
        self.shared.ember_bytes.store(usage.ember_bytes, Relaxed);
        self.shared.peak_bytes.fetch_max(usage.total_bytes() + boot_set_bytes, Relaxed);
        Ok((usage, live.map(|live| live.number)))
    }

    /// Grants what is possible now. After trimming, because memory beyond the budget for a dump must be regained first. Returns
    /// whether the guest still waits.
    fn review_admission(&self) -> bool {
        let Some(admission) = self.shared.admission.lock().expect("holders only assign").clone() else { return false };
        if let Err(error) = admission.review() {
            // The admission's own thread meets the same error, and reports it.
            tracing::debug!(%error, "cannot adjust memory admission");
        }
        admission.is_waited_for()
    }

    /// The usage if the guest had taken all memory that was granted: it may do so at any moment.
    fn promised(&self, usage: Usage) -> Usage {
        let admission = self.shared.admission.lock().expect("holders only assign");
        let granted = admission.as_ref().filter(|admission| !admission.is_over());
        // The guest cannot take memory that is in a dump's buffers.
        if let Some(granted) = granted {
            granted.reserve(usage.buffer_bytes);
        }
        let committed_bytes = granted.map_or(0, |admission| admission.committed_bytes());
        Usage { live_bytes: usage.live_bytes.max(committed_bytes), ..usage }
    }

    /// Settles when that was asked for, but not before the cache map was read: that needs the memory of the dead kernel, which
    /// settling releases. The map is read on a thread, because the budget must be kept meanwhile.
    fn settle_if_wanted(&mut self) -> Result<Option<MemoryMessage>, hearth_memory::MemoryError> {
        if self.reading.as_ref().is_some_and(Reading::is_over)
            && let Some(message) = self.reading.take().and_then(Reading::end)
        {
            (self.tell)(message);
        }
        if self.reading.is_none() && self.shared.settle_wanted.swap(false, Relaxed) {
            self.settles = true;
            self.reading = self.shared.cache_map.as_ref().and_then(|file| Reading::begin(file, &self.shared.ember));
        }
        if !self.settles || self.being_read().is_some() {
            return Ok(None);
        }
        // One that was given up: its thread may take long to end on a busy host.
        if let Some(reading) = &self.reading {
            self.shared.ember.spare_no_more(reading.incarnation);
        }
        self.settles = false;
        self.settle().map(Some)
    }

    fn settle(&self) -> Result<MemoryMessage, hearth_memory::MemoryError> {
        let began = Instant::now();
        let released_bytes = self.shared.ember.settle()?;
        Ok(MemoryMessage::Settled { released_bytes, began, took: began.elapsed() })
    }

    fn report_ember(&mut self, empty: bool) {
        let due = empty || self.trimmed_told.elapsed() >= TRIMMED_EVERY;
        if self.trimmed_bytes > 0 && due {
            (self.tell)(MemoryMessage::Trimmed { bytes: std::mem::take(&mut self.trimmed_bytes) });
            self.trimmed_told = Instant::now();
        }
        if empty && !self.ember_told {
            (self.tell)(MemoryMessage::EmberEmpty);
        }
        self.ember_told = empty;
    }

    fn tell_sample(&self, living: u32, usage: Usage) {
        (self.tell)(MemoryMessage::Held {
            living,
            resident_bytes: usage.live_bytes,
            dead_bytes: usage.ember_bytes + usage.buffer_bytes,
            limit_bytes: self.shared.budget().limit_bytes(usage.is_held),
        });
    }

    fn warn_if_over(&mut self, usage: Usage) {
        // The look that finds that the dump has ended measures the memory before it trims it. So the headroom counts
        // once more.
        let was_held = std::mem::replace(&mut self.was_held, usage.is_held);
        let limit_bytes = self.shared.budget().limit_bytes(usage.is_held || was_held);
        let over = usage.total_bytes() > limit_bytes;
        if over && !self.warned {
            (self.tell)(MemoryMessage::OverBudget { used_bytes: usage.total_bytes(), limit_bytes });
        }
        self.warned = over;
        self.shared.is_over.store(over, Relaxed);
    }
}

/// Says when to sample the memory for reports: often while an incarnation is young, then ever more rarely.
#[derive(Default)]
struct Samples {
    /// The incarnation, when it was first measured, and when it was last sampled.
    of: Option<(u32, Instant, Instant)>,
}

impl Samples {
    /// Whether to take a sample now. If so, the next one is due later.
    fn is_due(&mut self, living: u32, now: Instant) -> bool {
        let began = match self.of {
            Some((number, began, last)) if number == living => {
                if now - last < SAMPLE_EVERY.max((now - began) / SAMPLE_AGE) {
                    return false;
                }
                began
            }
            _ => now,
        };
        self.of = Some((living, began, now));
        true
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use hearth_disk::block::{BLOCK_BYTES, DiskId, RamPage};
    use hearth_disk::tag::Tagger;
    use hearth_disk::warm::{AfterServing, WarmSource};
    use hearth_recovery::warm_reboot::cache_map::GiveUp;

    use super::*;

    const BUDGET: Budget =
        Budget { ram_bytes: 64 << 20, slack_bytes: 1 << 20, headroom_bytes: 0, dump_buffer_bytes: 0 };
    /// Number of pages that a guest fills, half of its RAM. Two such guests exceed the budget; one with the usual
    /// headroom does not.
    const PAGES: u64 = (32 << 20) / PAGE_BYTES;
    const BYTES: [u8; BLOCK_BYTES] = [7; BLOCK_BYTES];

    /// An incarnation whose guest has filled half its RAM with disk blocks.
    fn half_full(folder: &Path, number: u32, tagger: &Tagger) -> Incarnation {
        let incarnation = Incarnation::create(folder, number, BUDGET.ram_bytes, true).unwrap();
        let ram = File::options().write(true).open(incarnation.ram.path()).unwrap();
        let ledger = incarnation.ledger.clone().unwrap();
        for page in 0..PAGES {
            ram.write_all_at(&BYTES, page * PAGE_BYTES).unwrap();
            ledger.lock().unwrap().record(RamPage(page as u32), DiskId(0), page, tagger.tag(&BYTES));
        }
        incarnation
    }

    struct Watched {
        monitor: MemoryMonitor,
        told: Receiver<MemoryMessage>,
        ember: Arc<Ember>,
        tagger: Tagger,
        folder: tempfile::TempDir,
    }

    impl Watched {
        fn new() -> Self {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            let tagger = Tagger::new(b"a key like noise");
            let ember = Arc::new(Ember::new(folder.path(), tagger.clone()));
            let (tell, told) = channel();
            let tell = move |word| tell.send(word).expect("the test outlives its monitor");
            let monitor = MemoryMonitor::start("web", BUDGET, ember.clone(), Kept::default(), tell).unwrap();
            Self { monitor, told, ember, tagger, folder }
        }

        fn half_full(&self, number: u32) -> Incarnation {
            half_full(self.folder.path(), number, &self.tagger)
        }

        /// Waits until the monitor has looked at the current memory and trimmed it.
        fn wait_settled(&self) {
            self.monitor.settle();
            let patience = Duration::from_secs(60);
            while !matches!(
                self.told.recv_timeout(patience).expect("the monitor settles"),
                MemoryMessage::Settled { .. }
            ) {}
        }
    }

    #[test]
    fn samples_become_rarer_and_start_anew_with_each_guest() {
        let (mut samples, start) = (Samples::default(), Instant::now());
        let mut told = |living, from_s: u64, to_s: u64| {
            let second = |second| start + Duration::from_secs(second);
            (from_s..to_s).filter(|&at| samples.is_due(living, second(at))).count()
        };
        assert_eq!(told(1, 0, 8), 8);
        let hour = told(1, 8, 3600);
        assert!((20..60).contains(&hour), "{hour}");
        let month = told(1, 3600, 30 * 86_400);
        assert!((20..70).contains(&month), "{month}");
        assert_eq!(told(2, 30 * 86_400, 30 * 86_400 + 8), 8);
    }

    #[test]
    fn a_dead_guest_counts_once_and_loses_nothing() {
        let machine = Watched::new();
        let dead = machine.half_full(1);
        machine.monitor.watch(Some(dead.clone()));
        machine.ember.bank(dead).unwrap();
        machine.wait_settled();
        assert_eq!((machine.ember.counts().trimmed, machine.ember.counts().remaining), (0, PAGES));
        assert!(machine.monitor.peak_bytes() <= BUDGET.limit_bytes(false), "{}", machine.monitor.peak_bytes());
    }

    #[test]
    fn unusable_memory_is_released_before_the_ember() {
        let machine = Watched::new();
        machine.ember.bank(full(machine.folder.path(), 1, &machine.tagger)).unwrap();
        machine.wait_settled();
        assert_eq!((machine.ember.counts().trimmed, machine.ember.counts().remaining), (0, PAGES));
    }

    /// A guest reads a quarter of its RAM from the ember between two looks. On a busy host looks are far apart.
    #[test]
    fn served_pages_do_not_count_as_ember() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let tagger = Tagger::new(b"a key like noise");
        let ember = Arc::new(Ember::new(folder.path(), tagger.clone()));
        ember.bank(half_full(folder.path(), 1, &tagger)).unwrap();
        let live = Incarnation::create(folder.path(), 2, BUDGET.ram_bytes, true).unwrap();
        let shared = Shared::new(BUDGET, ember.clone(), Kept::default());
        *shared.live.lock().unwrap() = Some(live.clone());
        let mut round = Round::new(&shared, &|_| {});
        round.look().unwrap();
        let ram = File::options().write(true).open(live.ram.path()).unwrap();
        for page in 0..PAGES / 2 {
            ember.serve(DiskId(0), page, AfterServing::Release, &mut |_| {}).unwrap();
            ram.write_all_at(&BYTES, page * PAGE_BYTES).unwrap();
        }
        round.looked = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
        round.look().unwrap();
        assert_eq!((ember.counts().trimmed, ember.counts().remaining), (0, PAGES / 2));
    }

    /// An incarnation whose guest has filled its RAM, half of it with disk blocks.
    fn full(folder: &Path, number: u32, tagger: &Tagger) -> Incarnation {
        let incarnation = half_full(folder, number, tagger);
        let ram = File::options().write(true).open(incarnation.ram.path()).unwrap();
        (PAGES..2 * PAGES).for_each(|page| ram.write_all_at(&BYTES, page * PAGE_BYTES).unwrap());
        incarnation
    }

    #[test]
    fn full_dead_guest_loses_nothing_before_it_is_settled() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let tagger = Tagger::new(b"a key like noise");
        let ember = Arc::new(Ember::new(folder.path(), tagger.clone()));
        let dead = full(folder.path(), 1, &tagger);
        let shared = Shared::new(BUDGET, ember.clone(), Kept::default());
        *shared.live.lock().unwrap() = Some(dead.clone());
        let mut round = Round::new(&shared, &|_| {});
        round.look().unwrap();
        ember.bank(dead).unwrap();
        let counts = || (ember.counts().trimmed, ember.counts().remaining);
        round.look().unwrap();
        assert_eq!(counts(), (0, PAGES), "nobody lives");
        *shared.live.lock().unwrap() = Some(Incarnation::create(folder.path(), 2, BUDGET.ram_bytes, true).unwrap());
        shared.settle_wanted.store(true, Relaxed);
        round.look().unwrap();
        assert_eq!(counts(), (0, PAGES), "the rest is released first");
    }

    /// The reading of a cache map that ends only when it is given up keeps the dead guest's other memory.
    #[test]
    fn cache_map_costs_few_blocks() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let tagger = Tagger::new(b"a key like noise");
        let ember = Arc::new(Ember::new(folder.path(), tagger.clone()));
        ember.bank(full(folder.path(), 1, &tagger)).unwrap();
        let live = Incarnation::create(folder.path(), 2, BUDGET.ram_bytes, true).unwrap();
        let ram = File::options().write(true).open(live.ram.path()).unwrap();
        let shared = Shared::new(BUDGET, ember.clone(), Kept::default());
        *shared.live.lock().unwrap() = Some(live);
        let give_up = Arc::new(GiveUp::default());
        let of_thread = give_up.clone();
        let read = move || {
            while of_thread.why().is_none() {
                std::thread::sleep(LOOK_EVERY);
            }
            Err("given up".to_owned())
        };
        let mut round = Round::new(&shared, &|_| {});
        round.reading = Reading::start(1, Duration::from_secs(3600), give_up.clone(), read);
        round.settles = true;
        round.look().unwrap();
        assert_eq!(ember.counts().trimmed, 0, "no room is made for a leap");
        let mut grown_bytes = 0;
        while give_up.why().is_none() {
            ram.write_all_at(&[7; 128 << 10], grown_bytes).unwrap();
            grown_bytes += 128 << 10;
            round.looked = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
            round.look().unwrap();
        }
        while round.reading.is_some() || round.settles {
            round.look().unwrap();
        }
        let trimmed = ember.counts().trimmed;
        assert!(trimmed < PAGES / 8, "{trimmed}");
        assert!(ember.resident_bytes().unwrap() <= PAGES * PAGE_BYTES, "the rest was settled");
    }

    #[test]
    fn memory_of_a_guest_that_was_not_watched_is_no_growth() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let tagger = Tagger::new(b"a key like noise");
        let ember = Arc::new(Ember::new(folder.path(), tagger.clone()));
        ember.bank(half_full(folder.path(), 1, &tagger)).unwrap();
        let shared = Shared::new(BUDGET, ember.clone(), Kept::default());
        let mut round = Round::new(&shared, &|_| {});
        round.look().unwrap();
        let live = Incarnation::create(folder.path(), 2, BUDGET.ram_bytes, true).unwrap();
        let ram = File::options().write(true).open(live.ram.path()).unwrap();
        ram.write_all_at(&vec![7; 12 << 20], 0).unwrap();
        *shared.live.lock().unwrap() = Some(live);
        round.look().unwrap();
        assert_eq!((ember.counts().trimmed, ember.counts().remaining), (0, PAGES));
    }

    #[test]
    fn growth_while_settling_costs_no_ember() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let tagger = Tagger::new(b"a key like noise");
        let ember = Arc::new(Ember::new(folder.path(), tagger.clone()));
        ember.bank(half_full(folder.path(), 1, &tagger)).unwrap();
        let live = Incarnation::create(folder.path(), 2, BUDGET.ram_bytes, true).unwrap();
        let ram = File::options().write(true).open(live.ram.path()).unwrap();
        ram.write_all_at(&vec![7; 12 << 20], 0).unwrap();
        let shared = Shared::new(BUDGET, ember.clone(), Kept::default());
        *shared.live.lock().unwrap() = Some(live);
        shared.settle_wanted.store(true, Relaxed);
        Round::new(&shared, &|_| {}).look().unwrap();
        assert_eq!((ember.counts().trimmed, ember.counts().remaining), (0, PAGES));
    }

    #[test]
    fn ember_shrinks_as_the_next_guest_grows() {
        let machine = Watched::new();
        machine.ember.bank(machine.half_full(1)).unwrap();
        machine.monitor.watch(Some(machine.half_full(2)));
        machine.wait_settled();
        let used_bytes = (PAGES * PAGE_BYTES) + machine.ember.resident_bytes().unwrap();
        assert!(machine.ember.counts().trimmed > 0, "{:?}", machine.ember.counts());
        assert!(used_bytes <= BUDGET.limit_bytes(false), "{used_bytes}");
    }
}
