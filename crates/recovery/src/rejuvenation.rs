//! Rejuvenation: a new QEMU takes over a running guest. Its RAM stays where it is; only the device state is
//! transferred.
//!
//! ```text
//!            guest runs on the old QEMU              |   guest stands still    |  guest runs on the new one
//!   launch ---> admit ---> prepare ---> hand --------|------------> resume ----|---> retire
//!   a new QEMU  both are   both know    old stops,   |  the new one gets the   |  the old one is ended
//!   waits       connected  how          sends its    |  last bytes and runs:   |
//!               to disks                state        |  point of no return     |
//! ```
//! The stream does not go from QEMU to QEMU but through this process. So neither can hold up the other, and the guest's
//! clock can be set in the stream (see `clock`). The new QEMU does nothing without the last bytes. It gets them once
//! the old one has reported success and the journal says that the guest is the new one's. Then it runs the guest by
//! itself, without waiting for a command, which shortens the pause by 0.5 ms.
//!
//! Up to `resume` no failure loses anything: the new QEMU is ended and the old one continues. The guest's RAM is as the
//! old one left it, because a QEMU that waits for a guest writes nothing to its RAM. In `resume` the guest becomes the
//! new one's, and the old one must never run it again. The exception is a new QEMU that ended without RESUME, which it
//! sends before its guest runs (`has_run`). If a keeper dies between the journal's entry and the last bytes, the new
//! QEMU waits for them, because the old one keeps the channel open. So the next keeper finds out that it has not begun
//! (`has_begun`).
//!
//! `cpr-transfer` is no alternative: it needs QEMU 10 on both sides and memory that was made for it. Nor is `exec` into
//! the new program: a new QEMU that does not start would be the end of the guest.

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
use hearth_qemu::packet_gate::PacketGates;
use hearth_qemu::{Migration, Qmp, QmpError, QmpEvent, Stream, TimedEvent};

pub use clock::{ClockDebt, Ticker};
use order::Order;
use relay::{Bell, Transfer};
pub use standstill::Standstill;
use standstill::{first_stop, stops_of};

/// Time from setting the clock to the guest's next instruction, as measured.
const LOAD_ALLOWANCE: Duration = Duration::from_micros(3000);
/// A QEMU that has the whole state has loaded it within milliseconds.
const LOADED_WITHIN: Duration = Duration::from_secs(2);
/// Pause between two checks of a QEMU's run state.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Maximum time from the end of a QEMU's first connection to that of its last.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// Pause between two checks for the rest of a packet.
const PACKET_EVERY: Duration = Duration::from_micros(50);

/// Steps of a rejuvenation, in order; the same words in events, journal, errors and `hearth explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The new QEMU starts beside the old one, on the same RAM, and waits.
    Launch,
    /// Both are connected to each disk; the disks serve the old one.
    Admit,
    /// The old one is told where to send its state, and begins.
    Prepare,
    /// The old one stops; its state goes to the new one.
    Hand,
    /// The point of no return: the guest runs on the new one.
    Resume,
    /// The old one is ended.
    Retire,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 6] = [Self::Launch, Self::Admit, Self::Prepare, Self::Hand, Self::Resume, Self::Retire];

    /// Name of the phase in events, journal, errors and `hearth explain`.
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

/// Why a hop failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum RejuvenationError {
    #[error("disk {disk}: {what}")]
    Disk { disk: String, what: &'static str },
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error("the channel for the guest's state cannot be created")]
    Channel(#[source] std::io::Error),
    #[error("the old QEMU does not hand over its guest")]
    Old(#[source] QmpError),
    #[error("the new QEMU does not accept the guest")]
    New(#[source] QmpError),
    #[error("the old QEMU gave up: {why}")]
    OldFailed { why: String },
    #[error("the new QEMU refused the guest's state")]
    NewFailed,
    #[error("the old QEMU ended")]
    OldEnded,
    #[error("the new QEMU ended when it got the guest's state")]
    NewEnded,
    #[error("the state was not transferred within {patience:?}; {who} hangs")]
    Hangs { who: &'static str, patience: Duration },
    #[error("the guest is {state:?} and not running")]
    NotRunning { state: String },
}

/// A hop of one guest between two QEMUs.
pub struct Hop<'a> {
    /// The QEMU that runs the guest.
    pub old: &'a Qmp,
    /// The QEMU that will run it.
    pub new: &'a Qmp,
    /// The guest's disks.
    pub disks: &'a [DiskServer],
    /// Packet gates of the old and of the new QEMU; `None` if no network has any.
    pub gates: Option<(&'a PacketGates, &'a PacketGates)>,
    /// Whether the guest has a VM generation ID. A hop does not change it.
    pub has_generation_id: bool,
    /// Maximum time that the guest may stand still before the old QEMU continues.
    pub patience: Duration,
}

/// Both QEMUs are connected to each disk.
pub struct Admitted {
    /// How often a QEMU had connected to each disk.
    connections: Vec<u64>,
    /// When each disk's queues were last stopped before this hop.
    stops: Vec<u64>,
}

/// Both QEMUs are ready; their messages arrive here.
pub struct Prepared {
    transfer: Transfer,
    heard: Receiver<Heard>,
}

/// Progress of the state's transfer.
#[derive(Default)]
struct Way {
    stopped_at: Option<Duration>,
    /// When the old QEMU reported that it has sent everything.
    given_at: Option<Duration>,
    set_forward: Option<Duration>,
}

/// The new QEMU has the whole guest except the last bytes.
pub struct Handed {
    /// When the guest stopped: time since 1970.
    pub stopped_at: Duration,
    /// Size of the device state that was transferred.
    pub state_bytes: u64,
    transfer: Transfer,
    /// Whether the guest has run on the new QEMU; `None` while that is not known.
    ran: Option<bool>,
    /// How far its clock was set forward, and the debt before this hop; `None` if it was not set.
    set_forward: Option<(Duration, ClockDebt)>,
    heard: Receiver<Heard>,
}

impl Handed {
    /// Whether the guest may have run on the new QEMU. That QEMU must have been ended.
    pub fn has_run(&self) -> bool {
        let of_new = |heard| match heard {
            Heard::New(said) => Some(said.event),
            Heard::Old(_) => None,
        };
        self.ran.unwrap_or_else(|| has_said_resume(&self.heard, of_new))
    }

    /// Debt for the next hop, if the guest stood still for `pause`.
    pub fn debt_after(&self, pause: Duration) -> ClockDebt {
        self.set_forward.map_or_else(ClockDebt::default, |(by, debt)| debt.after(pause, by))
    }
}

enum Heard {
    Old(TimedEvent),
    New(TimedEvent),
}

/// Allows a second QEMU to connect to the disks, or forbids it.
pub fn set_handover(disks: &[DiskServer], allowed: bool) -> Result<(), ServerError> {
    disks.iter().try_for_each(|disk| disk.set_handover(allowed))
}

/// The channel at whose other end the new QEMU waits for a guest.
pub struct Target(UnixStream);

/// Tells both QEMUs what they must know before a hop, and lets the new one wait for the guest. The guest is not affected.
/// `patience` limits each command.
pub fn prepare_both(old: &Qmp, new: &Qmp, patience: Duration) -> Result<Target, RejuvenationError> {
    old.prepare_migration(patience).map_err(RejuvenationError::Old)?;
    new.prepare_migration(patience).map_err(RejuvenationError::New)?;
    let (target, theirs) = UnixStream::pair().map_err(RejuvenationError::Channel)?;
    new.migrate_incoming(OwnedFd::from(theirs).as_fd(), patience).map_err(RejuvenationError::New)?;
    Ok(Target(target))
}

impl Hop<'_> {
    /// Checks that both QEMUs are connected to every disk. A new QEMU answers once its devices exist, so it has
    /// connected by now.
    pub fn admit(&self) -> Result<Admitted, RejuvenationError> {
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

    /// Opens the old QEMU's channel for the state and starts its migration. `target` is from `prepare_both`. From then on the
    /// guest may stop at any time.
    pub fn prepare(&self, Target(target): Target) -> Result<Prepared, RejuvenationError> {
        let (speaks, heard) = channel();
        let bell = Bell::new().map_err(RejuvenationError::Channel)?;
        self.old.listen(listener(speaks.clone(), bell.clone(), Heard::Old));
        self.new.listen(listener(speaks, bell.clone(), Heard::New));
        // From now on each change of the run state is received.
        self.must_run()?;
        self.old.keep_open(target.as_fd(), self.patience).map_err(RejuvenationError::Old)?;
        let (source, theirs) = Stream::pair().map_err(RejuvenationError::Channel)?;
        let transfer = Transfer::open(source, target, bell, clock::SECTION_BYTES);
        let mut transfer = transfer.map_err(RejuvenationError::Channel)?;
        if let Some((old, _)) = self.gates {
            old.shut();
        }
        // From here on the old QEMU may stop its guest. Both steps have limits of their own.
        let (begun, taken) = transfer.take_while(Instant::now() + 3 * self.patience, || {
            self.old.migrate(OwnedFd::from(theirs).as_fd(), self.patience).map_err(RejuvenationError::Old)?;
            self.await_begun(&heard)
        });
        begun?;
        taken.map_err(RejuvenationError::Channel)?;
        Ok(Prepared { transfer, heard })
    }

    /// Waits until the old QEMU logs written pages with its disks' servers. If this process died before that, a QEMU
    /// before 9.1 would abort, and its guest with it (`vhost_log_global_start` in QEMU's `hw/virtio/vhost.c`).
    fn await_begun(&self, heard: &Receiver<Heard>) -> Result<(), RejuvenationError> {
        let deadline = Instant::now() + self.patience;
        loop {
            match self.next(heard, deadline, "the old QEMU")? {
                Heard::Old(TimedEvent { event: QmpEvent::Migration(Migration::UnderWay(word)), .. })
                    if word == "active" =>
                {
                    return Ok(());
                }
                Heard::Old(TimedEvent { event: QmpEvent::Migration(Migration::Failed { .. }), .. }) => {
                    return Err(self.why_old_failed());
                }
                _ => {}
            }
        }
    }

    /// Transfers everything except the last bytes. `ticker` counts what the guest keeps time with besides QEMU's clock.
    /// `debt` is left from the hop before.
    pub fn hand(
        &self,
        admitted: &Admitted,
        prepared: Prepared,
        ticker: Option<Ticker>,
        debt: ClockDebt,
    ) -> Result<Handed, RejuvenationError> {
        let Prepared { mut transfer, heard } = prepared;
        let deadline = Instant::now() + self.patience;
        let (mut way, mut order) = (Way::default(), Order::of(self.has_generation_id));
        loop {
            // Messages are handled before the stream is read: when the old QEMU reports that it has sent everything,
            // all has arrived.
            self.hear(&heard, &mut way)?;
            transfer.take().map_err(RejuvenationError::Channel)?;
            if way.set_forward.is_none() {
                let by = debt.with(now().saturating_sub(self.stopped_at(admitted, &way)) + LOAD_ALLOWANCE);
                way.set_forward = clock::advance(transfer.between(), by, ticker).then_some(by);
            }
            let held = order.arrange(transfer.between());
            transfer.keep_back(held.max(clock::SECTION_BYTES));
            transfer.give();
            if way.given_at.is_some() {
                break;
            }
            transfer.wait(deadline).map_err(|error| self.hangs_or("the old QEMU", error))?;
        }
        self.must_be_undisturbed(admitted).map_err(|error| self.ended_or(error, &heard))?;
        self.await_packets(deadline)?;
        if way.set_forward.is_none() {
            tracing::debug!("the guest's clock is not where it was expected in the state, and stays behind");
        }
        Ok(Handed {
            stopped_at: self.stopped_at(admitted, &way),
            state_bytes: transfer.received(),
            transfer,
            ran: None,
            set_forward: way.set_forward.map(|by| (by, debt)),
            heard,
        })
    }

    /// Handles what both QEMUs have reported so far.
    fn hear(&self, heard: &Receiver<Heard>, way: &mut Way) -> Result<(), RejuvenationError> {
        for said in heard.try_iter() {
            match said {
                Heard::Old(TimedEvent { event: QmpEvent::HungUp, .. }) => return Err(RejuvenationError::OldEnded),
                Heard::New(TimedEvent { event: QmpEvent::HungUp, .. }) => return Err(RejuvenationError::NewEnded),
                Heard::Old(TimedEvent { event: QmpEvent::Stopped, at }) => way.stopped_at = Some(at),
                Heard::Old(TimedEvent { event: QmpEvent::Migration(Migration::Completed), at }) => {
                    way.given_at = Some(at)
                }
                Heard::Old(TimedEvent { event: QmpEvent::Migration(Migration::Failed { .. }), .. }) => {
                    return Err(self.why_old_failed());
                }
                // It cannot have everything yet.
                Heard::New(TimedEvent {
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

    /// Requests in flight are answered before a queue stops, unless a disk's connection was lost meanwhile.
    fn must_be_undisturbed(&self, admitted: &Admitted) -> Result<(), RejuvenationError> {
        if admitted.connections == self.connections()? {
            return Ok(());
        }
        let what = "a connection was lost while the guest was handed over";
        let disk = self.disks.iter().map(DiskServer::name).collect::<Vec<_>>().join(", ");
        Err(RejuvenationError::Disk { disk, what })
    }

    /// A QEMU that ends loses its disks, and its end may be reported after that: then its end is the reason.
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

    /// Waits until the old QEMU has the rest of a packet that it began to read. The sender of the first part has sent
    /// the other.
    fn await_packets(&self, deadline: Instant) -> Result<(), RejuvenationError> {
        while self.gates.is_some_and(|(old, _)| !old.are_between_packets()) {
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
            Ok(Heard::Old(TimedEvent { event: QmpEvent::HungUp, .. })) => Err(RejuvenationError::OldEnded),
            Ok(Heard::New(TimedEvent { event: QmpEvent::HungUp, .. })) => Err(RejuvenationError::NewEnded),
            Ok(heard) => Ok(heard),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(RejuvenationError::Hangs { who, patience: self.patience })
            }
        }
    }

    /// Passes the last bytes: the point of no return. Returns how long the guest stood still, as its QEMUs report it.
    ///
    /// After an error the caller ends the new QEMU; then `Handed::has_run` tells which QEMU the guest belongs to.
    pub fn resume(&self, handed: &mut Handed) -> Result<Duration, RejuvenationError> {
        let deadline = Instant::now() + self.patience;
        handed.transfer.release();
        loop {
            handed.transfer.give();
            for said in handed.heard.try_iter() {
                let Heard::New(said) = said else { continue };
                match said.event {
                    QmpEvent::Resumed => {
                        let pause = said.at.saturating_sub(handed.stopped_at);
                        let set_forward = handed.set_forward.map(|(by, _)| by);
                        tracing::debug!(?pause, ?set_forward, "the guest goes on");
                        handed.ran = Some(true);
                        // Not before: the new QEMU would read packets without the guest's network state. The query
                        // wakes it up. It is answered when QEMU has started its disks, for which it is still a
                        // successor.
                        if let Some((_, new)) = self.gates {
                            new.open_up();
                        }
                        return self.new.run_state().map(|_| pause).map_err(RejuvenationError::New);
                    }
                    QmpEvent::HungUp => {
                        handed.ran = Some(false);
                        return Err(RejuvenationError::NewEnded);
                    }
                    QmpEvent::Migration(Migration::Failed { .. }) => return Err(RejuvenationError::NewFailed),
                    // It reports RESUME before this. So the guest has panicked, or something else stopped it.
                    QmpEvent::Migration(Migration::Completed) => {
                        let state = self.new.run_state().map_err(RejuvenationError::New)?;
                        return Err(RejuvenationError::NotRunning { state });
                    }
                    _ => {}
                }
            }
            handed.transfer.wait(deadline).map_err(|error| self.hangs_or("the new QEMU", error))?;
        }
    }
}

/// Whether a QEMU that a dead keeper recorded as the guest's has begun to run it. A QEMU that never got the last bytes
/// still waits, and is ended with `end`.
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

/// Whether a QEMU that was ended has sent RESUME. Returns true if its end is not reported, because then nobody knows.
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

/// Lets the old QEMU continue. The new one must have been ended before; otherwise both would run the guest.
pub fn roll_back(old: &Qmp, patience: Duration) -> Result<(), QmpError> {
    let deadline = Instant::now() + patience;
    loop {
        let state = old.run_state()?;
        match state.as_str() {
            "postmigrate" | "paused" => old.resume()?,
            "finish-migrate" if Instant::now() < deadline => {
                // Its stream is gone, which it will notice; this makes it sooner.
                let _ = old.migrate_cancel();
                std::thread::sleep(LOOK_EVERY);
            }
            "finish-migrate" => {
                let description = "the guest was stopped for its hand-over and does not continue".to_owned();
                return Err(QmpError::Refused { command: "cont", description });
            }
            "running" if matches!(old.migration()?, Migration::UnderWay(_)) && Instant::now() < deadline => {
                let _ = old.migrate_cancel();
                std::thread::sleep(LOOK_EVERY);
            }
            // Also the states that the guest reached by itself: it panicked, or is shutting down.
            _ => return Ok(()),
        }
    }
}

fn listener(speaks: Sender<Heard>, bell: Bell, who: fn(TimedEvent) -> Heard) -> impl Fn(TimedEvent) -> bool + Send {
    move |said| {
        let listens = speaks.send(who(said)).is_ok();
        bell.ring();
        listens
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
