//! Rejuvenation: a new QEMU takes over a living guest. Its RAM stays where it is; what goes over is the devices' state.
//!
//! ```text
//!            guest runs on the old QEMU              |   guest stands still    |  guest runs on the new one
//!   launch ---> admit ---> prepare ---> hand --------|------------> resume ----|---> retire
//!   a new QEMU  both are   both know    old stops,   |  the new one gets the   |  the old one is ended
//!   waits       at each    how          its state    |  last bytes, goes on    |
//!               disk                    goes over    |  by itself: point of no return
//! ```
//! The stream does not go from QEMU to QEMU but through here. So neither can hold up the other, the guest's clock in it can be
//! set as it passes (see `clock`), and the target gets the last bytes of it, without which it does nothing, when the source has
//! said that all is well and it is noted whose the guest is. Then it goes on by itself, without a word to wait for: 0.5 ms less
//! of a pause.
//!
//! Up to `resume` nothing is lost by any failure: the new QEMU is ended and the old one goes on, with the guest's RAM as it
//! left it, for a QEMU that waits for a guest writes nothing into its RAM. In `resume` the guest is the new one's, and the old
//! one must never run again: unless the new one has ended and had not said RESUME, which it does before its guest runs
//! (`has_run`). A keeper that dies between the note and the last bytes leaves a new QEMU that waits for them, since the old one
//! keeps the channel open; so the next keeper finds out that it has not begun (`has_begun`).
//!
//! Not `cpr-transfer`: it needs QEMU 10 on both sides and memory that was made for it. Not `exec` into the new program: a
//! new QEMU that does not start would be the end of the guest.

mod clock;
pub mod downtime;
mod order;
pub mod parked;
pub(crate) mod relay;
mod standstill;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use hearth_disk::server::{DiskServer, ServerError};
use hearth_qemu::valve::Valves;
use hearth_qemu::{Migration, Qmp, QmpError, QmpEvent, Said};

pub use clock::{ClockDebt, Ticker};
use order::Order;
use relay::{Bell, Passage};
pub use standstill::Standstill;
use standstill::{first_stop, stops_of};

/// From when the clock is set to the guest's next instruction, as measured.
const LOAD_ALLOWANCE: Duration = Duration::from_micros(3000);
/// A QEMU that has all of a state has loaded it within milliseconds.
const LOADED_WITHIN: Duration = Duration::from_secs(2);
/// Between two looks at an old QEMU that is on its way back to its guest.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// From the end of a QEMU's first connection to that of its last.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// Between two looks for the rest of a packet.
const PACKET_EVERY: Duration = Duration::from_micros(50);

/// Steps of a rejuvenation, in order; the same words in events, journal, errors and `hearth explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The new QEMU starts beside the old one, on the same RAM, and waits.
    Launch,
    /// Both are at each disk; the old one serves.
    Admit,
    /// Both are told how the state will go over.
    Prepare,
    /// The old one stops; its state goes to the new one.
    Hand,
    /// The point of no return: the guest goes on, on the new one.
    Resume,
    /// The old one is ended.
    Retire,
}

impl Phase {
    pub const ALL: [Self; 6] = [Self::Launch, Self::Admit, Self::Prepare, Self::Hand, Self::Resume, Self::Retire];

    pub fn name(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Admit => "admit",
            Self::Prepare => "prepare",
            Self::Hand => "hand",
            Self::Resume => "resume",
            Self::Retire => "retire",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RejuvenationError {
    #[error("disk {disk}: {what}")]
    Disk { disk: String, what: &'static str },
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error("no channel for the guest's state")]
    Channel(#[source] std::io::Error),
    #[error("the old QEMU does not give its guest away")]
    Old(#[source] QmpError),
    #[error("the new QEMU does not take the guest")]
    New(#[source] QmpError),
    #[error("the old QEMU gave up: {why}")]
    OldFailed { why: String },
    #[error("the new QEMU refused the guest's state")]
    NewFailed,
    #[error("the old QEMU ended")]
    OldEnded,
    #[error("the new QEMU ended when it got the guest's state")]
    NewEnded,
    #[error("the state was not over within {patience:?}; {who} hangs")]
    Hangs { who: &'static str, patience: Duration },
    #[error("the guest is {state:?} and not running")]
    NotRunning { state: String },
}

/// A hop of one guest between two QEMUs.
pub struct Hop<'a> {
    pub old: &'a Qmp,
    pub new: &'a Qmp,
    pub disks: &'a [DiskServer],
    /// Of the old one and of the new one; none without networks that have any.
    pub valves: Option<(&'a Valves, &'a Valves)>,
    /// The guest has a VM generation ID, which stays what it is.
    pub has_generation_id: bool,
    /// How long the guest may stand still before the old QEMU goes on.
    pub patience: Duration,
}

/// Both QEMUs at each disk.
pub struct Admitted {
    /// How often anybody had connected to each.
    connections: Vec<u64>,
    /// When its queues were last stopped, before this hop.
    stops: Vec<u64>,
}

/// Both QEMUs are ready; what they say comes here.
pub struct Prepared {
    passage: Passage,
    heard: Receiver<Heard>,
}

/// How far a state is on its way.
#[derive(Default)]
struct Way {
    stopped_at: Option<Duration>,
    /// The old QEMU says that it has given all.
    given_at: Option<Duration>,
    set_forward: Option<Duration>,
}

/// The new QEMU has all of the guest but the last bytes.
pub struct Handed {
    /// When it stopped: time since 1970.
    pub stopped_at: Duration,
    pub state_bytes: u64,
    passage: Passage,
    /// The guest has run on the new QEMU, or certainly has not; none while that is not known.
    ran: Option<bool>,
    /// By how much its clock was set forward, and by how much it should have been before this hop; none if it was not set.
    set_forward: Option<(Duration, ClockDebt)>,
    heard: Receiver<Heard>,
}

impl Handed {
    /// Whether the guest may have run on the new QEMU, which has been ended.
    pub fn has_run(&self) -> bool {
        let of_new = |heard| match heard {
            Heard::New(said) => Some(said.event),
            Heard::Old(_) => None,
        };
        self.ran.unwrap_or_else(|| has_said_resume(&self.heard, of_new))
    }

    /// What the next hop owes, if the guest stood still for `pause`.
    pub fn debt_after(&self, pause: Duration) -> ClockDebt {
        self.set_forward.map_or_else(ClockDebt::default, |(by, debt)| debt.after(pause, by))
    }
}

enum Heard {
    Old(Said),
    New(Said),
}

/// Lets a second QEMU connect to the disks, or no more.
pub fn set_handover(disks: &[DiskServer], allowed: bool) -> Result<(), ServerError> {
    disks.iter().try_for_each(|disk| disk.set_handover(allowed))
}

impl Hop<'_> {
    /// A new QEMU talks when its devices are made, so by now it has connected to every disk.
    pub fn admit(&self) -> Result<Admitted, RejuvenationError> {
        self.must_run()?;
        Ok(Admitted { connections: self.connections()?, stops: stops_of(self.disks) })
    }

    fn must_run(&self) -> Result<(), RejuvenationError> {
        match self.old.run_state().map_err(RejuvenationError::Old)? {
            state if state == "running" => Ok(()),
            state => Err(RejuvenationError::NotRunning { state }),
        }
    }

    fn connections(&self) -> Result<Vec<u64>, RejuvenationError> {
        let look = |disk: &DiskServer| {
            let counters = disk.counters();
            let lost = |what| Err(RejuvenationError::Disk { disk: disk.name().to_owned(), what });
            match (counters.connected, counters.successor) {
                (true, true) => Ok(counters.connections),
                (true, false) => lost("one of the two QEMUs is not connected"),
                (false, _) => lost("no QEMU is connected"),
            }
        };
        self.disks.iter().map(look).collect()
    }

    pub fn prepare(&self) -> Result<Prepared, RejuvenationError> {
        let (speaks, heard) = channel();
        let bell = Bell::new().map_err(RejuvenationError::Channel)?;
        self.old.listen(listener(speaks.clone(), bell.clone(), Heard::Old));
        self.new.listen(listener(speaks, bell.clone(), Heard::New));
        // From now on each change of it is heard.
        self.must_run()?;
        self.old.prepare_migration(self.patience).map_err(RejuvenationError::Old)?;
        self.new.prepare_migration(self.patience).map_err(RejuvenationError::New)?;
        let (target, theirs) = UnixStream::pair().map_err(RejuvenationError::Channel)?;
        self.new.migrate_incoming(OwnedFd::from(theirs).as_fd(), self.patience).map_err(RejuvenationError::New)?;
        self.old.keep_open(target.as_fd(), self.patience).map_err(RejuvenationError::Old)?;
        let (source, theirs) = UnixStream::pair().map_err(RejuvenationError::Channel)?;
        let passage = Passage::open(source, target, bell, clock::SECTION_BYTES);
        let mut passage = passage.map_err(RejuvenationError::Channel)?;
        if let Some((old, _)) = self.valves {
            old.shut();
        }
        // From here on the old one may stop its guest. Both steps have limits of their own.
        let (begun, taken) = passage.take_while(Instant::now() + 3 * self.patience, || {
            self.old.migrate(OwnedFd::from(theirs).as_fd(), self.patience).map_err(RejuvenationError::Old)?;
            self.await_begun(&heard)
        });
        begun?;
        taken.map_err(RejuvenationError::Channel)?;
        Ok(Prepared { passage, heard })
    }

    /// Until the old one keeps a log of written pages with its disks' servers. Were this process to die before that, a
    /// QEMU before 9.1 would abort, and its guest with it (`vhost_log_global_start` in QEMU's `hw/virtio/vhost.c`).
    fn await_begun(&self, heard: &Receiver<Heard>) -> Result<(), RejuvenationError> {
        let deadline = Instant::now() + self.patience;
        loop {
            match self.next(heard, deadline, "the old QEMU")? {
                Heard::Old(Said { event: QmpEvent::Migration(Migration::UnderWay(word)), .. }) if word == "active" => {
                    return Ok(());
                }
                Heard::Old(Said { event: QmpEvent::Migration(Migration::Failed { .. }), .. }) => {
                    return Err(self.why_old_failed());
                }
                _ => {}
            }
        }
    }

    /// All but the last bytes. `ticker`: what the guest counts time with besides QEMU's clock. `debt`: what the hop before left.
    pub fn hand(
        &self,
        admitted: &Admitted,
        prepared: Prepared,
        ticker: Option<Ticker>,
        debt: ClockDebt,
    ) -> Result<Handed, RejuvenationError> {
        let Prepared { mut passage, heard } = prepared;
        let deadline = Instant::now() + self.patience;
        let (mut way, mut order) = (Way::default(), Order::of(self.has_generation_id));
        loop {
            // Asked before it is looked at what has come: when the old one says that it has given all, all has come.
            self.hear(&heard, &mut way)?;
            passage.take().map_err(RejuvenationError::Channel)?;
            if way.set_forward.is_none() {
                let by = debt.with(now().saturating_sub(self.stopped_at(admitted, &way)) + LOAD_ALLOWANCE);
                way.set_forward = clock::advance(passage.between(), by, ticker).then_some(by);
            }
            let held = order.arrange(passage.between());
            passage.keep_back(held.max(clock::SECTION_BYTES));
            passage.give();
            if way.given_at.is_some() {
                break;
            }
            passage.wait(deadline).map_err(|error| self.hangs_or("the old QEMU", error))?;
        }
        self.must_be_undisturbed(admitted).map_err(|error| self.ended_or(error, &heard))?;
        self.await_packets(deadline)?;
        if way.set_forward.is_none() {
            tracing::debug!("the guest's clock is not where it was expected in the state, and stays behind");
        }
        Ok(Handed {
            stopped_at: self.stopped_at(admitted, &way),
            state_bytes: passage.received(),
            passage,
            ran: None,
            set_forward: way.set_forward.map(|by| (by, debt)),
            heard,
        })
    }

    /// What both have said by now.
    fn hear(&self, heard: &Receiver<Heard>, way: &mut Way) -> Result<(), RejuvenationError> {
        for said in heard.try_iter() {
            match said {
                Heard::Old(Said { event: QmpEvent::HungUp, .. }) => return Err(RejuvenationError::OldEnded),
                Heard::New(Said { event: QmpEvent::HungUp, .. }) => return Err(RejuvenationError::NewEnded),
                Heard::Old(Said { event: QmpEvent::Stopped, at }) => way.stopped_at = Some(at),
                Heard::Old(Said { event: QmpEvent::Migration(Migration::Completed), at }) => way.given_at = Some(at),
                Heard::Old(Said { event: QmpEvent::Migration(Migration::Failed { .. }), .. }) => {
                    return Err(self.why_old_failed());
                }
                // That it has all cannot be.
                Heard::New(Said {
                    event: QmpEvent::Migration(Migration::Failed { .. } | Migration::Completed) | QmpEvent::Resumed,
                    ..
                }) => return Err(RejuvenationError::NewFailed),
                Heard::Old(_) | Heard::New(_) => {}
            }
        }
        Ok(())
    }

    fn stopped_at(&self, admitted: &Admitted, way: &Way) -> Duration {
        let asked = first_stop(&admitted.stops, &stops_of(self.disks));
        asked.into_iter().chain(way.stopped_at).chain(way.given_at).min().unwrap_or_else(now)
    }

    /// Requests in flight are answered before a queue stops: if a disk's connection was lost meanwhile they were not.
    fn must_be_undisturbed(&self, admitted: &Admitted) -> Result<(), RejuvenationError> {
        if admitted.connections == self.connections()? {
            return Ok(());
        }
        let what = "a connection was lost while the guest was handed over";
        let disk = self.disks.iter().map(DiskServer::name).collect::<Vec<_>>().join(", ");
        Err(RejuvenationError::Disk { disk, what })
    }

    /// A QEMU that ends loses its disks, and may say goodbye after that: its end is the reason then.
    fn ended_or(&self, error: RejuvenationError, heard: &Receiver<Heard>) -> RejuvenationError {
        let deadline = Instant::now() + GOODBYE_WITHIN;
        loop {
            match self.next(heard, deadline, "a QEMU that lost a disk") {
                Ok(_) => {}
                Err(ended @ (RejuvenationError::OldEnded | RejuvenationError::NewEnded)) => return ended,
                Err(_) => return error,
            }
        }
    }

    /// Until the old one has the rest of a packet that it had begun to read. Whoever sent the one part has sent the other.
    fn await_packets(&self, deadline: Instant) -> Result<(), RejuvenationError> {
        while self.valves.is_some_and(|(old, _)| !old.are_between_packets()) {
            if Instant::now() > deadline {
                return Err(RejuvenationError::Hangs { who: "a network", patience: self.patience });
            }
            std::thread::sleep(PACKET_EVERY);
        }
        Ok(())
    }

    fn hangs_or(&self, who: &'static str, error: std::io::Error) -> RejuvenationError {
        match error.kind() {
            std::io::ErrorKind::TimedOut => RejuvenationError::Hangs { who, patience: self.patience },
            _ => RejuvenationError::Channel(error),
        }
    }

    fn why_old_failed(&self) -> RejuvenationError {
        let why = match self.old.migration() {
            Ok(Migration::Failed { why }) if !why.is_empty() => why,
            _ => "its log says why".to_owned(),
        };
        RejuvenationError::OldFailed { why }
    }

    fn next(&self, heard: &Receiver<Heard>, deadline: Instant, who: &'static str) -> Result<Heard, RejuvenationError> {
        match heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Heard::Old(Said { event: QmpEvent::HungUp, .. })) => Err(RejuvenationError::OldEnded),
            Ok(Heard::New(Said { event: QmpEvent::HungUp, .. })) => Err(RejuvenationError::NewEnded),
            Ok(heard) => Ok(heard),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(RejuvenationError::Hangs { who, patience: self.patience })
            }
        }
    }

    /// The point of no return. How long the guest stood still, as far as its QEMUs tell.
    ///
    /// After an error the new QEMU is to be ended; then `Handed::has_run` tells whose the guest is.
    pub fn resume(&self, handed: &mut Handed) -> Result<Duration, RejuvenationError> {
        let deadline = Instant::now() + self.patience;
        handed.passage.release();
        loop {
            handed.passage.give();
            for said in handed.heard.try_iter() {
                let Heard::New(said) = said else { continue };
                match said.event {
                    QmpEvent::Resumed => {
                        let pause = said.at.saturating_sub(handed.stopped_at);
                        let set_forward = handed.set_forward.map(|(by, _)| by);
                        tracing::debug!(?pause, ?set_forward, "the guest goes on");
                        handed.ran = Some(true);
                        // Not before: it would read packets as it did before it had the guest's network. The question wakes it
                        // up, and is answered when it has started its disks, for which it is still a successor.
                        if let Some((_, new)) = self.valves {
                            new.open_up();
                        }
                        return self.new.run_state().map(|_| pause).map_err(RejuvenationError::New);
                    }
                    QmpEvent::HungUp => {
                        handed.ran = Some(false);
                        return Err(RejuvenationError::NewEnded);
                    }
                    QmpEvent::Migration(Migration::Failed { .. }) => return Err(RejuvenationError::NewFailed),
                    // It says that it goes on before that: the guest has panicked, or was stopped by another hand.
                    QmpEvent::Migration(Migration::Completed) => {
                        let state = self.new.run_state().map_err(RejuvenationError::New)?;
                        return Err(RejuvenationError::NotRunning { state });
                    }
                    _ => {}
                }
            }
            handed.passage.wait(deadline).map_err(|error| self.hangs_or("the new QEMU", error))?;
        }
    }
}

/// Whether a QEMU that a dead keeper noted as the guest's has begun with it: one that never got the last bytes still waits.
/// If it has not, it has been ended.
pub fn has_begun(new: &Qmp, end: impl FnOnce()) -> Result<bool, QmpError> {
    let (speaks, heard) = channel();
    new.listen(move |said| speaks.send(said.event).is_ok());
    let deadline = Instant::now() + LOADED_WITHIN;
    while new.run_state()? == "inmigrate" {
        if Instant::now() > deadline {
            end();
            return Ok(has_said_resume(&heard, Some));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(true)
}

/// All that a QEMU that has been ended said; if its end is not heard, nobody knows.
fn has_said_resume<T>(heard: &Receiver<T>, of_it: impl Fn(T) -> Option<QmpEvent>) -> bool {
    let deadline = Instant::now() + GOODBYE_WITHIN;
    while let Ok(said) = heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        match of_it(said) {
            Some(QmpEvent::HungUp) => return false,
            Some(QmpEvent::Resumed) => return true,
            _ => {}
        }
    }
    true
}

/// Lets the old QEMU go on. The new one must have been ended before: both would run the guest otherwise.
pub fn roll_back(old: &Qmp, patience: Duration) -> Result<(), QmpError> {
    let deadline = Instant::now() + patience;
    loop {
        let state = old.run_state()?;
        match state.as_str() {
            "postmigrate" | "paused" => old.resume()?,
            "finish-migrate" if Instant::now() < deadline => {
                // Its stream is gone, and it will notice; this makes it sooner.
                let _ = old.migrate_cancel();
                std::thread::sleep(LOOK_EVERY);
            }
            "finish-migrate" => {
                let description = "the guest was stopped for its hand-over and does not go on".to_owned();
                return Err(QmpError::Refused { command: "cont", description });
            }
            "running" if matches!(old.migration()?, Migration::UnderWay(_)) && Instant::now() < deadline => {
                let _ = old.migrate_cancel();
                std::thread::sleep(LOOK_EVERY);
            }
            // Also what the guest came to by itself: it panicked, or is being shut down.
            _ => return Ok(()),
        }
    }
}

fn listener(speaks: Sender<Heard>, bell: Bell, who: fn(Said) -> Heard) -> impl Fn(Said) -> bool + Send {
    move |said| {
        let listens = speaks.send(who(said)).is_ok();
        bell.ring();
        listens
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
