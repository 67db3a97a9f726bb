//! World: a keeper, its disk, a guest and its QEMU, and everything that happens to them in the order of a seed.

mod checks;
mod keeper;
mod machine;
mod requests;
mod saving;
mod settings;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_disk::block::DiskId;
use hearth_disk::clock::Clock;
use hearth_disk::tag::Tagger;
use hearth_disk::write_log::WriteLog;
use hearth_recovery::fast_remount::WarmSources;
use hearth_recovery::incarnation::Incarnation;

use crate::counts::Counts;
use crate::guest::{BLOCKS_A_REQUEST, Guest, QUEUES, SLOTS};
use crate::memory::Dead;
use crate::memory_copy::MemoryCopy;
use crate::model::{Id, Model};
use crate::qemu::Qemu;
use crate::random::Random;
use crate::storage::{BLOCK, FIRST_STAMP, Meter, Shared, Stamp, Storage, lock};
use keeper::{Keeper, open_warm};
use settings::{ACTIONS, Settings};

pub const DISK: DiskId = DiskId(3);
const BLOCKS_MIN: u64 = 8;
const BLOCKS_MAX: u64 = 72;

/// Action once all queues are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Restart,
    /// The guest's driver starts again.
    Reset,
    Hop,
}

/// Files in host memory.
fn new_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
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
    /// The old QEMU, which has handed over its guest and is still connected.
    leaving: Option<Qemu>,
    then: Option<Then>,
    /// Whether the guest has switched its write cache off.
    is_through: bool,
    /// The same, as the keeper noted it when the guest's current QEMU got it.
    noted_through: bool,
    /// QEMU has sent an invalid message. Its answers prove nothing.
    is_hostile: bool,
    /// Last message of a QEMU that has since died.
    last_message_was_stop: bool,
    /// The image is being copied.
    is_saving: bool,
    /// Copy of guest memory by the keeper, with its log of the disk's writes.
    saved: Option<(MemoryCopy, Arc<WriteLog>)>,
    /// Copy of guest memory by QEMU.
    migrated: Option<MemoryCopy>,
    /// When the countdown ends, the host loses its power, not only its keeper.
    fuse_cuts_power: bool,
    /// There is no space for writes.
    is_full: bool,
    /// QEMU has stopped queues: requests that wait for space then get an error.
    was_stopped: bool,
    /// Nothing fails any more.
    is_ending: bool,
    next_id: Id,
    next_stamp: Stamp,
    pub counts: Counts,
    /// Hash of everything that was observed, to compare two runs.
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

use log;

impl World {
    pub fn new(seed: u64, verbose: bool) -> Self {
        let mut random = Random::new(seed);
        let settings = Settings::new(&mut random);
        let clock = Clock::by_hand();
        let blocks = BLOCKS_MIN + random.below(BLOCKS_MAX - BLOCKS_MIN);
        let slots = QUEUES as u64 * u64::from(SLOTS);
        let meter = Meter::new(settings.limits, clock.clone(), (slots * (BLOCKS_A_REQUEST + 2) * BLOCK, slots));
        let storage = Storage::new(blocks, meter);
        let folder = new_folder();
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
            noted_through: false,
            is_hostile: false,
            last_message_was_stop: false,
            is_saving: false,
            saved: None,
            migrated: None,
            fuse_cuts_power: false,
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

    /// Takes this many steps, and then brings everything to its end.
    pub fn run(&mut self, steps: u32) -> Result<(), String> {
        for step in 0..steps {
            self.step();
            if step % 32 == 0 {
                self.check_memory();
                self.check_copies();
            }
            self.problem()?;
        }
        self.come_to_rest()?;
        self.read_all()?;
        self.read_all()?;
        self.check_memory();
        self.check_copies();
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

    /// Lets one event happen.
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

    /// Steps that keeper and QEMU take by themselves sooner or later.
    fn go_on(&mut self) {
        self.begin_migration();
        if self.keeper.is_none() {
            // A copy ends with its keeper, and the image's lock with it.
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

    fn pass_time(&mut self) {
        let time = Duration::from_micros(self.random.pick(&[1, 100, 300, 2_000, 20_000, 200_000]));
        self.clock.advance(time);
    }

    /// Rare events.
    fn trouble(&mut self) {
        match self.random.below(6) {
            0 => lock(&self.storage).refusals = 1,
            1 => self.send_odd_messages(),
            2 => drop(self.leaving.take()),
            3 => self.switch_write_cache(),
            _ => self.is_full = self.settings.fills && !self.is_full,
        }
    }
}
