//! World: a keeper, its disk, a guest and its QEMU, and everything that happens to them, in the order that a seed says.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_disk::block::DiskId;
use hearth_disk::boot_set::BootSet;
use hearth_disk::buffer::BufferPool;
use hearth_disk::clock::Clock;
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_disk::ledger::Ledger;
use hearth_disk::limit::Limits;
use hearth_disk::server::{Backing, DiskOptions, Expected, Pause, Tracking, Worker};
use hearth_disk::tag::Tagger;
use hearth_disk::warm::WarmSource;
use hearth_recovery::boot_set::WarmSources;
use hearth_recovery::ember::Ember;
use hearth_recovery::incarnation::{Incarnation, discard_files};
use hearth_recovery::warm_reboot;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::guest::{Answer, BLOCKS_A_REQUEST, Guest, Kind, QUEUE_SIZE, QUEUES, RAM_BYTES, SLOTS};
use crate::memory::{Dead, Memory};
use crate::model::{End, Id, Model};
use crate::qemu::{self, Heard, Qemu, Word};
use crate::random::Random;
use crate::storage::{
    BLOCK, FIRST_STAMP, Killed, Meter, Outcome, SECTOR, SECTORS_A_BLOCK, Shared, Stamp, Storage, lock,
};

pub const DISK: DiskId = DiskId(3);
const BLOCKS_MIN: u64 = 8;
const BLOCKS_MAX: u64 = 72;
/// More than any run needs to come to rest.
const ROUNDS_TO_REST: u32 = 20_000;

/// What may happen in a step, how often, and whether a seed may decide that it never happens, or often: runs that are
/// about few things come further with them.
type Action = (u64, bool, fn(&mut World));
const ACTIONS: [Action; 18] = [
    (230, false, World::turn),
    (130, false, World::speak),
    (180, false, World::submit),
    (150, false, World::apply),
    (130, false, World::report),
    (70, false, World::look),
    (35, false, World::pass_time),
    (25, true, World::scribble),
    (10, true, World::begin_stop),
    (6, true, World::begin_hop),
    (3, true, World::kill),
    (3, true, World::light_fuse),
    (3, true, World::crash),
    (3, true, World::resize),
    (4, true, World::save),
    (3, true, World::ready),
    (4, true, World::tend),
    (4, true, World::trouble),
];

/// Where `begin_hop` is among them.
const HOP: usize = 9;

/// What a seed decides beforehand.
struct Settings {
    weights: [u64; ACTIONS.len()],
    limits: Limits,
    pool_bytes: usize,
    depth: u32,
    hold_back: Duration,
    boot_set_bytes: Option<u64>,
    join_writes: bool,
    features: u64,
    /// The guest switches its write cache off.
    without_cache: bool,
    /// One operation of so many fails.
    failing: Option<u64>,
    /// The image's file system is full at times. Not with limits: what is tried again is not paid for again.
    fills: bool,
    /// A process that a dead QEMU left behind writes to its memory.
    haunted: bool,
    /// A QEMU says what it should not.
    hostile: bool,
}

/// What follows when all queues are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Restart,
    /// The guest's driver starts anew.
    Reset,
    Hop,
}

struct Keeper {
    worker: Worker,
    at_once: bool,
    alarm: Option<Instant>,
}

/// How often what happened, to see that a run is about something.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub answers: u64,
    pub kills: u64,
    pub crashes: u64,
    pub hops: u64,
    pub stops: u64,
    pub resizes: u64,
    pub saves: u64,
    pub out_of_space: u64,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.answers += other.answers;
        self.kills += other.kills;
        self.crashes += other.crashes;
        self.hops += other.hops;
        self.stops += other.stops;
        self.resizes += other.resizes;
        self.saves += other.saves;
        self.out_of_space += other.out_of_space;
    }

    pub fn has_all(&self) -> bool {
        let Self { answers, kills, crashes, hops, stops, resizes, saves, out_of_space } = *self;
        [answers, kills, crashes, hops, stops, resizes, saves, out_of_space].iter().all(|count| *count > 0)
    }
}

pub struct World {
    random: Random,
    settings: Settings,
    clock: Clock,
    storage: Shared,
    model: Model,
    folder: tempfile::TempDir,
    tagger: Tagger,
    incarnation: Option<Incarnation>,
    number: u32,
    warm: Arc<WarmSources>,
    dead: Arc<Mutex<Vec<Dead>>>,
    keeper: Option<Keeper>,
    guest: Option<Guest>,
    qemu: Qemu,
    successor: Option<Qemu>,
    /// It has handed its guest over, and is still connected.
    leaving: Option<Qemu>,
    then: Option<Then>,
    /// The server knows that the write cache is off.
    is_through: bool,
    /// It has said what it should not. What it is answered says nothing.
    is_hostile: bool,
    /// Of a QEMU that has died since.
    last_word_was_stop: bool,
    is_saving: bool,
    /// There is no space for writes.
    is_full: bool,
    /// QEMU has stopped queues: what waits for space then gets its error.
    was_stopped: bool,
    /// Nothing fails any more.
    is_ending: bool,
    next_id: Id,
    next_stamp: Stamp,
    pub counts: Counts,
    /// Of everything that was seen, for comparing two runs.
    pub trace: u64,
    verbose: bool,
}

macro_rules! log {
    ($world:expr, $($text:tt)*) => {
        if $world.verbose {
            eprintln!($($text)*);
        }
    };
}

impl World {
    pub fn new(seed: u64, verbose: bool) -> Self {
        let mut random = Random::new(seed);
        let settings = Settings::new(&mut random);
        let clock = Clock::by_hand();
        let blocks = BLOCKS_MIN + random.below(BLOCKS_MAX - BLOCKS_MIN);
        let slots = QUEUES as u64 * u64::from(SLOTS);
        let meter = Meter::new(settings.limits, clock.clone(), (slots * (BLOCKS_A_REQUEST + 2) * BLOCK, slots));
        let storage = Storage::new(blocks, meter);
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let tagger = Tagger::new(b"a key like noise");
        let warm = open_warm(folder.path(), &settings, &tagger);
        let qemu = Qemu::new(settings.features);
        let mut world = Self {
            random,
            clock,
            storage,
            model: Model::new(blocks),
            folder,
            tagger,
            incarnation: None,
            number: 0,
            warm,
            dead: Arc::default(),
            keeper: None,
            guest: None,
            qemu,
            successor: None,
            leaving: None,
            then: None,
            is_through: false,
            is_hostile: false,
            last_word_was_stop: false,
            is_saving: false,
            is_full: false,
            was_stopped: false,
            is_ending: false,
            next_id: 0,
            next_stamp: FIRST_STAMP,
            counts: Counts::default(),
            trace: seed,
            verbose,
            settings,
        };
        world.open_keeper();
        world.boot();
        world
    }

    /// So many things happen, and then everything comes to its end.
    pub fn run(&mut self, steps: u32) -> Result<(), String> {
        for step in 0..steps {
            self.step();
            if step % 32 == 0 {
                self.check_memory();
            }
            self.problem()?;
        }
        self.come_to_rest()?;
        self.read_all()?;
        self.read_all()?;
        self.check_memory();
        self.check_ember();
        self.problem()
    }

    fn problem(&self) -> Result<(), String> {
        lock(&self.storage).problem.take().map_or(Ok(()), Err)
    }

    fn fault(&self, what: String) {
        lock(&self.storage).fault(what);
    }

    fn note(&mut self, what: u64) {
        self.trace = (self.trace ^ what).wrapping_mul(0x100_0000_01b3).rotate_left(17);
    }

    /// One thing happens.
    fn step(&mut self) {
        let all: u64 = self.settings.weights.iter().sum();
        let mut left = self.random.below(all);
        let weights = self.settings.weights.iter();
        let chosen = weights.zip(ACTIONS).find(|(weight, _)| {
            let is_this = left < **weight;
            left = left.saturating_sub(**weight);
            is_this
        });
        let (_, (_, _, act)) = chosen.expect("it is less than all of them");
        act(self);
        self.go_on();
    }

    /// What keeper and QEMU do by themselves, sooner or later.
    fn go_on(&mut self) {
        if self.keeper.is_none() {
            // A copy dies with its keeper, and with it the image's lock.
            if !self.is_saving && self.random.one_in(8) {
                self.open_keeper();
            }
            return;
        }
        if self.guest.is_none() {
            if self.random.one_in(4) {
                self.boot();
            }
        } else if !self.qemu.is_connected() {
            if self.random.one_in(4) {
                self.connect();
            }
        } else if self.qemu.is_silent() && !self.qemu.is_started && self.random.one_in(3) {
            self.after_stop();
        } else if self.then.is_none() && self.qemu.is_started && self.successor.as_ref().is_some_and(Qemu::is_silent) {
            log!(self, "the successor waits; stop for a hop");
            if self.qemu.has_kicked && self.random.one_in(2) {
                return self.stop_half_started(Then::Hop);
            }
            self.then = Some(Then::Hop);
            self.stop_queues();
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    fn open_keeper(&mut self) {
        log!(self, "a keeper starts");
        if self.guest.is_some() {
            self.take_over();
        } else {
            self.start_cold();
        }
        let file = lock(&self.storage).file().try_clone().unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        let lock_patience = Duration::ZERO;
        let image =
            ImageOptions { path, format: Format::Raw, read_only: false, direct: false, lock_patience, owner: None };
        let image = Image::open(&image).unwrap();
        let bytes = image.bytes();
        let pool = BufferPool::new(self.settings.pool_bytes).unwrap();
        let engine = image.guard(Storage::engine(&self.storage, &pool));
        let Settings { depth, hold_back, limits, .. } = self.settings;
        let backing = Backing { image, pool, engine, depth, hold_back };
        lock(&self.storage).meter.restart();
        let options = DiskOptions {
            id: DISK,
            name: "simulated".into(),
            serial: "serial".into(),
            socket: self.socket(),
            queues: QUEUES as u16,
            queue_size: 64,
            read_only: false,
            memory_slots: false,
            limits,
            tracked: true,
            gate: None,
            tell: None,
            expected: Expected::anyone(),
        };
        let tracking = self.tracking();
        let (worker, _) = Worker::open(options, backing, tracking, self.clock.clone()).unwrap();
        self.keeper = Some(Keeper { worker, at_once: false, alarm: None });
        // A write that was late may have made the file longer than it was told to be.
        self.adopt_length(bytes / SECTOR);
    }

    /// The guest lives: what was kept for it in files is good.
    fn take_over(&mut self) {
        let numbers = self.warm.ember.incarnations();
        self.dead.lock().unwrap().clear();
        self.incarnation = Some(Incarnation::open(self.folder.path(), self.number).unwrap());
        // The old one's mappings go first, as those of a process that is gone.
        self.warm = open_warm(self.folder.path(), &self.settings, &self.tagger);
        for number in numbers {
            self.bank(Incarnation::open(self.folder.path(), number).unwrap());
        }
    }

    /// Nobody guarded the image.
    fn start_cold(&mut self) {
        for number in self.warm.ember.incarnations().into_iter().chain([self.number]) {
            discard_files(self.folder.path(), number);
        }
        self.dead.lock().unwrap().clear();
        self.incarnation = None;
        BootSet::discard(self.folder.path()).unwrap();
        self.warm = open_warm(self.folder.path(), &self.settings, &self.tagger);
    }

    fn bank(&mut self, dead: Incarnation) {
        let ram = File::options().write(true).open(dead.ram.path()).unwrap();
        let ledger = dead.ledger.clone().unwrap();
        self.dead.lock().unwrap().push(Dead { number: dead.number, ram, ledger });
        self.warm.ember.bank(dead).unwrap();
        self.forget_dropped();
    }

    /// Nobody keeps a ledger current that the ember has dropped.
    fn forget_dropped(&mut self) {
        let kept = self.warm.ember.incarnations();
        self.dead.lock().unwrap().retain(|dead| kept.contains(&dead.number));
    }

    fn tracking(&self) -> Option<Tracking> {
        let tracking = warm_reboot::tracking(self.incarnation.as_ref()?, &self.tagger, &self.warm)?;
        let memory: Arc<dyn WarmSource> = Arc::new(Memory {
            inner: Arc::clone(&self.warm),
            storage: Arc::clone(&self.storage),
            dead: Arc::clone(&self.dead),
            haunted: self.settings.haunted,
        });
        Some(Tracking { warm: Some(memory), ..tracking })
    }

    /// The next guest, if nothing of the last one moves any more.
    fn boot(&mut self) {
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
    fn settle_one(&mut self) {
        self.apply();
        self.report();
        self.turn();
    }

    fn connect(&mut self) {
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

    fn start(&mut self) {
        self.qemu.start();
        if self.settings.without_cache && !self.is_through {
            let at = self.qemu.script.iter().position(|word| *word == Word::MemTable).expect("a start has one");
            self.qemu.script.insert(at, Word::WriteCache(false));
        }
        if let Some(guest) = &mut self.guest {
            guest.event_index = self.qemu.features & qemu::EVENT_INDEX != 0;
        }
    }

    /// The keeper's loop goes on, if anything wakes it.
    fn turn(&mut self) {
        let Some(keeper) = &mut self.keeper else { return };
        let is_due = keeper.alarm.is_some_and(|alarm| alarm <= self.clock.now());
        if !keeper.at_once && !is_due && !is_readable(&keeper.worker) {
            return;
        }
        keeper.alarm = keeper.alarm.filter(|_| !is_due);
        lock(&self.storage).meter.is_stopping =
            self.qemu.waits_for_stop() || std::mem::take(&mut self.last_word_was_stop);
        let worker = &mut keeper.worker;
        match catch_unwind(AssertUnwindSafe(|| worker.turn(Some(Duration::ZERO)))) {
            Ok(Ok(pause)) => {
                keeper.at_once = pause == Pause::None;
                if let Pause::AtMost(wait) = pause {
                    keeper.alarm = Some(self.clock.now() + wait);
                }
                self.hear();
            }
            Ok(Err(error)) => self.fault(format!("the loop failed: {error}")),
            Err(payload) if payload.is::<Killed>() => {
                log!(self, "the keeper dies in the middle of its work");
                self.killed();
            }
            Err(payload) => resume_unwind(payload),
        }
    }

    fn hear(&mut self) {
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

    fn speak(&mut self) {
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

    fn submit(&mut self) {
        // Its processors stand still during a hop.
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

    fn submit_to(&mut self, queue: usize, kind: Kind, sectors: Range<u64>) -> bool {
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
            Kind::Flush => request.answered = self.model.answered(),
            Kind::Identify | Kind::Odd => {}
        }
        request.is_through = self.is_through || self.settings.features & (qemu::FLUSH | qemu::CONFIG_WCE) == 0;
        drop(storage);
        log!(self, "{id}: {kind:?} of {sectors:?} in queue {queue}, stamp {stamp}");
        true
    }

    /// Whole blocks for the most part, some of them more often than others.
    fn sectors(&mut self) -> Range<u64> {
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

    fn apply(&mut self) {
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

    fn report(&mut self) {
        let mut storage = lock(&self.storage);
        let unreported = storage.unreported() as u64;
        if unreported > 0 {
            storage.report(self.random.below(unreported) as usize);
        }
    }

    /// The guest looks at its rings.
    fn look(&mut self) {
        for queue in 0..QUEUES {
            while let Some(found) = self.guest.as_mut().and_then(|guest| guest.look(queue)) {
                match found {
                    Ok(answer) => self.take(answer),
                    Err(_) if self.is_hostile => {}
                    Err(what) => self.fault(what),
                }
            }
        }
    }

    fn take(&mut self, answer: Answer) {
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
            (Kind::Write | Kind::WriteZeroes, 0) => {
                self.model.end_write(request.id, End::Well, &storage);
                match request.is_through {
                    true => self.model.check_durable(request.sectors.clone(), &self.model.answered(), &storage),
                    false => Ok(()),
                }
            }
            (Kind::Discard, 0) => {
                self.model.end_write(request.id, End::Unknown, &storage);
                Ok(())
            }
            (Kind::Flush, 0) => {
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

    fn pass_time(&mut self) {
        let time = Duration::from_micros(self.random.pick(&[1, 100, 300, 2_000, 20_000, 200_000]));
        self.clock.advance(time);
    }

    fn scribble(&mut self) {
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

    /// The guest switches its device off, or its QEMU stops it.
    fn begin_stop(&mut self) {
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
    fn stop_half_started(&mut self, then: Then) {
        let is_half_started = self.qemu.script.iter().all(|word| matches!(word, Word::Enable(_)));
        if is_half_started && self.qemu.is_started {
            log!(self, "stop before all is enabled, then {then:?}");
            self.then = Some(then);
            self.counts.stops += 1;
            self.qemu.script.clear();
            self.stop_queues();
        }
    }

    fn stop_queues(&mut self) {
        self.was_stopped = true;
        self.qemu.stop();
    }

    fn after_stop(&mut self) {
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

    fn reset_driver(&mut self) {
        if let Some(guest) = &mut self.guest {
            guest.reset();
        }
        self.model.end_all(&lock(&self.storage));
        self.qemu.forget_rings();
        self.is_through = false;
    }

    fn begin_hop(&mut self) {
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

    fn kill(&mut self) {
        if self.keeper.is_some() {
            log!(self, "the keeper is killed");
            self.killed();
        }
    }

    fn light_fuse(&mut self) {
        if self.keeper.is_some() {
            lock(&self.storage).fuse = Some(self.random.below(40));
        }
    }

    fn killed(&mut self) {
        self.counts.kills += 1;
        drop(self.keeper.take());
        lock(&self.storage).abandon(&mut self.random);
        let was_connected = self.qemu.is_connected();
        self.qemu.hang_up();
        self.successor = None;
        if let Some(mut old) = self.leaving.take()
            && was_connected
            && !self.qemu.has_kicked
            && self.random.one_in(2)
        {
            log!(self, "the old QEMU goes on");
            old.hang_up();
            old.bases = vec![None; QUEUES];
            self.qemu = old;
        }
        // A known limitation: a successor that has no region yet cannot tell that the write cache is off, and nobody else does.
        self.is_through &= self.qemu.has_region();
        // Its processors go on: the hop has failed, or is over.
        if self.then.take() == Some(Then::Reset) {
            self.reset_driver();
        }
        if self.guest.is_none() {
            self.model.end_all(&lock(&self.storage));
        }
    }

    /// The guest dies, and its QEMU.
    fn crash(&mut self) {
        if self.guest.take().is_none() {
            return;
        }
        log!(self, "the guest dies");
        self.counts.crashes += 1;
        self.last_word_was_stop = self.qemu.waits_for_stop();
        self.qemu.hang_up();
        (self.successor, self.leaving, self.then, self.is_hostile) = (None, None, None, false);
    }

    fn resize(&mut self) {
        let Some(keeper) = self.keeper.as_mut().filter(|_| !self.is_saving) else { return };
        let blocks = BLOCKS_MIN + self.random.below(BLOCKS_MAX - BLOCKS_MIN);
        log!(self, "the disk gets {blocks} blocks");
        self.counts.resizes += 1;
        let mut storage = lock(&self.storage);
        storage.set_blocks(blocks);
        storage.fuse = None;
        drop(storage);
        let bytes = keeper.worker.resize().unwrap();
        assert_eq!(bytes, blocks * BLOCK);
        self.adopt_length(blocks * SECTORS_A_BLOCK);
    }

    fn adopt_length(&mut self, sectors: u64) {
        self.model.resize(sectors);
        if let Some(guest) = &mut self.guest {
            guest.shrink_to(sectors);
        }
    }

    /// The image is copied while the guest goes on.
    fn save(&mut self) {
        let Some(keeper) = self.keeper.as_mut().filter(|_| !self.is_saving) else { return };
        let target: File = memfd_create("copy", MemfdFlags::CLOEXEC).unwrap().into();
        let Some(frozen) = keeper.worker.freeze(target.try_clone().unwrap()) else { return };
        log!(self, "the image is copied");
        let frozen = frozen.unwrap();
        let read = |file: &File| {
            let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        let before = read(lock(&self.storage).file());
        self.is_saving = true;
        let mut steps = |most| {
            for _ in 0..self.random.below(most) {
                self.step();
            }
            self.keeper.is_some()
        };
        let is_alive = steps(40);
        let copied = is_alive && frozen.copy(|_| steps(20)).is_ok();
        self.is_saving = false;
        if copied && read(&target) != before {
            self.fault("the copy of the image is not of the moment when it was begun".into());
        }
        self.counts.saves += u64::from(copied);
    }

    fn ready(&mut self) {
        if let Some(set) = &self.warm.boot_set {
            set.ready();
        }
    }

    /// What the keeper does about an ember beside the disks.
    fn tend(&mut self) {
        let ember = &self.warm.ember;
        match self.random.below(4) {
            0 => drop(ember.settle().unwrap()),
            1 => drop(ember.assay(20)),
            2 => drop(ember.trim(self.random.below(6) * BLOCK).unwrap()),
            _ => drop(ember.sweep().unwrap()),
        }
        self.forget_dropped();
    }

    /// What happens now and then.
    fn trouble(&mut self) {
        match self.random.below(5) {
            0 => lock(&self.storage).refusals = 1,
            1 => self.say_what_is_odd(),
            2 => drop(self.leaving.take()),
            _ => self.is_full = self.settings.fills && !self.is_full,
        }
    }

    /// A QEMU that was taken over by somebody.
    fn say_what_is_odd(&mut self) {
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

    /// Everything that is held in memory is what the disk holds.
    fn check_memory(&mut self) {
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

    /// What the ember would serve is what the disk holds.
    fn check_ember(&mut self) {
        for block in 0..BLOCKS_MAX {
            let expected = lock(&self.storage).block(block);
            let mut is_right = true;
            let after = hearth_disk::warm::AfterServing::Keep;
            self.warm.ember.serve(DISK, block, after, &mut |bytes| is_right = *bytes == expected);
            if !is_right {
                self.fault(format!("the ember serves another block {block} than the disk's"));
            }
        }
    }

    /// Lets everything come to its end: nothing fails any more, and nobody is killed.
    fn come_to_rest(&mut self) -> Result<(), String> {
        lock(&self.storage).fuse = None;
        self.is_ending = true;
        if self.is_hostile {
            self.crash();
        }
        for round in 0..ROUNDS_TO_REST {
            // Another thread closes foreign descriptors. On a busy host nobody is let in until it has.
            if round > ROUNDS_TO_REST / 4 {
                std::thread::sleep(Duration::from_micros(100));
            }
            self.problem()?;
            if self.is_at_rest() {
                return Ok(());
            }
            self.go_on();
            self.speak();
            self.apply();
            self.report();
            self.turn();
            self.look();
            if let Some(alarm) = self.keeper.as_ref().and_then(|keeper| keeper.alarm) {
                let wait = alarm.saturating_duration_since(self.clock.now());
                self.clock.advance(wait);
            }
        }
        let waiting: Vec<_> = self.guest.iter().flat_map(Guest::waiting).collect();
        Err(format!("it does not come to rest: {waiting:?} are not answered, {:?} is to be said", self.qemu.script))
    }

    fn is_at_rest(&self) -> bool {
        let served = self.guest.as_ref().is_some_and(|guest| !guest.is_waiting());
        let talks = !self.qemu.is_connected() || !self.qemu.is_silent() || !self.qemu.is_started;
        served && !talks && self.successor.is_none() && lock(&self.storage).is_idle()
    }

    /// Reads the disk from its beginning to its end, through the guest.
    fn read_all(&mut self) -> Result<(), String> {
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

impl Settings {
    fn new(random: &mut Random) -> Self {
        let is_limited = random.one_in(3);
        let limits = match is_limited {
            true => Limits {
                bytes_per_second: random.one_in(2).then(|| random.pick(&[64 << 10, 1 << 20, 10 << 20])),
                operations_per_second: random.one_in(2).then(|| random.pick(&[10, 100, 1000])),
            },
            false => Limits::default(),
        };
        let mut features = qemu::VERSION_1 | qemu::PROTOCOL_FEATURES;
        for (feature, one_in) in [(qemu::EVENT_INDEX, 4), (qemu::INDIRECT, 2), (qemu::CONFIG_WCE, 3), (qemu::FLUSH, 6)]
        {
            features |= if random.one_in(one_in) { 0 } else { feature };
        }
        let boot_set_bytes = (!random.one_in(4)).then(|| random.pick(&[68 << 10, 200 << 10, 1 << 20]));
        let weights =
            ACTIONS.map(|(weight, varies, _)| if varies { weight * random.pick(&[0, 1, 1, 4]) } else { weight });
        Self {
            weights,
            limits,
            // Limits are counted by operation, so that these must not be cut for want of buffers.
            pool_bytes: if is_limited { 1 << 20 } else { random.pick(&[32 << 10, 128 << 10, 1 << 20]) },
            depth: random.pick(&[1, 2, 8, 128]),
            hold_back: random.pick(&[Duration::ZERO, Duration::from_micros(250)]),
            join_writes: random.one_in(2),
            boot_set_bytes,
            without_cache: features & qemu::CONFIG_WCE != 0 && random.one_in(4),
            features,
            failing: random.one_in(3).then(|| random.pick(&[5, 30])),
            haunted: random.one_in(4),
            hostile: random.one_in(6),
            fills: !is_limited && random.one_in(3),
        }
    }
}

fn open_warm(folder: &Path, settings: &Settings, tagger: &Tagger) -> Arc<WarmSources> {
    let ember = Arc::new(Ember::new(folder, tagger.clone()));
    let open = |bytes| Arc::new(BootSet::open(folder, bytes, tagger.clone()).unwrap());
    Arc::new(WarmSources { ember, boot_set: settings.boot_set_bytes.map(open), join_writes: settings.join_writes })
}

fn is_readable(worker: &Worker) -> bool {
    let fd = worker.as_fd();
    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}
