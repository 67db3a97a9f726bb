//! Rejuvenation: a new QEMU takes over a living guest. Its RAM stays where it is; what goes over is the devices' state.
//!
//! ```text
//!            guest runs on the old QEMU              |   guest stands still    |  guest runs on the new one
//!   launch ---> admit ---> prepare ---> hand --------|-----------------> resume|---> retire
//!   a new QEMU  both are   both know    old stops,   |  the new one has        |  the old one is ended
//!   waits       at each    how          its state    |  all of it              |
//!               disk                    goes over    |             point of no return: resume
//! ```
//! Up to `resume` nothing is lost by any failure: the new QEMU is ended and the old one goes on, with the guest's RAM as it
//! left it, for a QEMU that waits for a guest writes nothing into its RAM. With `resume` the guest runs on the new one, and
//! the old one must never run again.
//!
//! The stream does not go from QEMU to QEMU but through here. So a target that hangs cannot hold up the source, it is known
//! when the state is whole before the target has seen any of it, and the guest's clock in it can be set (see `clock`).
//!
//! Not `cpr-transfer`: it needs QEMU 10 on both sides and memory that was made for it. Not `exec` into the new program: a
//! new QEMU that does not start would be the end of the guest.

mod clock;
pub mod downtime;
pub(crate) mod relay;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use hearth_disk::server::{DiskServer, ServerError};
use hearth_qemu::{Migration, Qmp, QmpError, QmpEvent, Said};

pub use clock::Ticker;

/// From the end of the state's way to the guest's next instruction, as measured: 0.9 to 1.9 ms.
const LOAD_ALLOWANCE: Duration = Duration::from_micros(1500);
/// Between two looks at an old QEMU that is on its way back to its guest.
const LOOK_EVERY: Duration = Duration::from_millis(2);

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
    /// How long the guest may stand still before the old QEMU goes on.
    pub patience: Duration,
}

/// Both QEMUs at each disk.
pub struct Admitted(Vec<AtDisk>);

struct AtDisk {
    /// How often anybody had connected.
    connections: u64,
    /// When its queues were last stopped, before this hop.
    stop_asked_us: u64,
}

/// Both QEMUs are ready; what they say comes here.
pub struct Prepared {
    source: UnixStream,
    target: UnixStream,
    heard: Receiver<Heard>,
}

/// The new QEMU has the guest, which stands still.
pub struct Handed {
    /// When it stopped: time since 1970.
    pub stopped_at: Duration,
    pub state_bytes: u64,
    /// By how much its clock was set forward, and by how much it should have been before this hop; none if it was not set.
    set_forward: Option<(Duration, ClockDebt)>,
    heard: Receiver<Heard>,
}

/// By how many nanoseconds a guest's clock is behind, or, if negative, ahead. What a hop sets it forward by is decided before
/// the new QEMU has it; what that was off by is left to the next hop, so that many hops add up to no more than one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockDebt(i64);

impl ClockDebt {
    /// What to set the clock forward by when the guest has lost `lost` on top of this. A clock is never set back.
    fn with(self, lost: Duration) -> Duration {
        Duration::from_nanos((nanoseconds(lost) + self.0).max(0).unsigned_abs())
    }

    /// What is left of it after the clock stood still for `pause` and was set forward.
    fn after(self, pause: Duration, set_forward: Duration) -> Self {
        Self(self.0 + nanoseconds(pause) - nanoseconds(set_forward))
    }
}

impl Handed {
    /// What the next hop owes, if the guest stood still for `pause`.
    pub fn debt_after(&self, pause: Duration) -> ClockDebt {
        self.set_forward.map_or_else(ClockDebt::default, |(by, debt)| debt.after(pause, by))
    }
}

fn nanoseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX / 4)
}

enum Heard {
    Old(Said),
    New(Said),
}

/// Lets a second QEMU connect to the disks, or no more.
pub fn set_handover(disks: &[DiskServer], allowed: bool) -> Result<(), ServerError> {
    disks.iter().try_for_each(|disk| disk.set_handover(allowed))
}

impl Admitted {
    /// When the first disk was stopped in this hop. QEMU itself speaks of it only when all of them have drained.
    fn stopped_at(&self, disks: &[AtDisk]) -> Option<Duration> {
        let stopped = self.0.iter().zip(disks).filter(|(before, now)| before.stop_asked_us != now.stop_asked_us);
        stopped.map(|(_, now)| Duration::from_micros(now.stop_asked_us)).min()
    }
}

impl Hop<'_> {
    /// A new QEMU talks when its devices are made, so by now it has connected to every disk.
    pub fn admit(&self) -> Result<Admitted, RejuvenationError> {
        let state = self.old.run_state().map_err(RejuvenationError::Old)?;
        if state != "running" {
            return Err(RejuvenationError::NotRunning { state });
        }
        self.connections().map(Admitted)
    }

    fn connections(&self) -> Result<Vec<AtDisk>, RejuvenationError> {
        let look = |disk: &DiskServer| {
            let counters = disk.counters();
            let lost = |what| Err(RejuvenationError::Disk { disk: disk.name().to_owned(), what });
            match (counters.connected, counters.successor) {
                (true, true) => Ok(AtDisk { connections: counters.connections, stop_asked_us: counters.stop_asked_us }),
                (true, false) => lost("one of the two QEMUs is not connected"),
                (false, _) => lost("no QEMU is connected"),
            }
        };
        self.disks.iter().map(look).collect()
    }

    pub fn prepare(&self) -> Result<Prepared, RejuvenationError> {
        let (speaks, heard) = channel();
        self.old.listen(listener(speaks.clone(), Heard::Old));
        self.new.listen(listener(speaks, Heard::New));
        self.old.prepare_migration(self.patience).map_err(RejuvenationError::Old)?;
        self.new.prepare_migration(self.patience).map_err(RejuvenationError::New)?;
        let (target, theirs) = UnixStream::pair().map_err(RejuvenationError::Channel)?;
        self.new.migrate_incoming(OwnedFd::from(theirs).as_fd(), self.patience).map_err(RejuvenationError::New)?;
        let (source, theirs) = UnixStream::pair().map_err(RejuvenationError::Channel)?;
        // From here on the old one may stop its guest.
        self.old.migrate(OwnedFd::from(theirs).as_fd(), self.patience).map_err(RejuvenationError::Old)?;
        self.await_begun(&heard)?;
        Ok(Prepared { source, target, heard })
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

    /// `ticker`: what the guest counts time with besides QEMU's clock. `debt`: what the hop before left.
    pub fn hand(
        &self,
        admitted: &Admitted,
        prepared: Prepared,
        ticker: Option<Ticker>,
        debt: ClockDebt,
    ) -> Result<Handed, RejuvenationError> {
        let Prepared { source, target, heard } = prepared;
        let deadline = Instant::now() + self.patience;
        let patience = self.patience;
        let mut state = relay::receive(source, deadline)
            .map_err(|error| hangs_or("the old QEMU", patience, error, RejuvenationError::OldEnded))?;
        let said_stopped_at = self.await_source(&heard, deadline)?;
        let disks = self.connections()?;
        let stopped_at = admitted.stopped_at(&disks).map_or(said_stopped_at, |at| at.min(said_stopped_at));
        // Requests in flight are answered before a queue stops: if a disk's connection was lost meanwhile they were not.
        let same = |(before, now): (&AtDisk, &AtDisk)| before.connections == now.connections;
        if !admitted.0.iter().zip(&disks).all(same) {
            let what = "a connection was lost while the guest was handed over";
            let disk = self.disks.iter().map(DiskServer::name).collect::<Vec<_>>().join(", ");
            return Err(RejuvenationError::Disk { disk, what });
        }
        let by = debt.with(now().saturating_sub(stopped_at) + LOAD_ALLOWANCE);
        let is_set = clock::advance(&mut state, by, ticker);
        if !is_set {
            tracing::debug!("the guest's clock is not where it was expected in the state, and stays behind");
        }
        relay::send(target, &state, deadline)
            .map_err(|error| hangs_or("the new QEMU", patience, error, RejuvenationError::NewEnded))?;
        self.await_target(&heard, deadline)?;
        let run_state = self.new.run_state().map_err(RejuvenationError::New)?;
        if run_state != "paused" {
            return Err(RejuvenationError::NotRunning { state: run_state });
        }
        let set_forward = is_set.then_some((by, debt));
        Ok(Handed { stopped_at, state_bytes: state.len() as u64, set_forward, heard })
    }

    /// Until the old one says that all went well; when its guest stopped.
    fn await_source(&self, heard: &Receiver<Heard>, deadline: Instant) -> Result<Duration, RejuvenationError> {
        let mut stopped_at = None;
        loop {
            match self.next(heard, deadline, "the old QEMU")? {
                Heard::Old(Said { event: QmpEvent::Stopped, at }) => stopped_at = Some(at),
                Heard::Old(Said { event: QmpEvent::Migration(Migration::Completed), at }) => {
                    return Ok(stopped_at.unwrap_or(at));
                }
                Heard::Old(Said { event: QmpEvent::Migration(Migration::Failed { .. }), .. }) => {
                    return Err(self.why_old_failed());
                }
                _ => {}
            }
        }
    }

    fn why_old_failed(&self) -> RejuvenationError {
        let why = match self.old.migration() {
            Ok(Migration::Failed { why }) if !why.is_empty() => why,
            _ => "its log says why".to_owned(),
        };
        RejuvenationError::OldFailed { why }
    }

    fn await_target(&self, heard: &Receiver<Heard>, deadline: Instant) -> Result<(), RejuvenationError> {
        loop {
            match self.next(heard, deadline, "the new QEMU")? {
                Heard::New(Said { event: QmpEvent::Migration(Migration::Completed), .. }) => return Ok(()),
                Heard::New(Said { event: QmpEvent::Migration(Migration::Failed { .. }), .. }) => {
                    return Err(RejuvenationError::NewFailed);
                }
                _ => {}
            }
        }
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
    /// `Refused` is the one error after which the guest has certainly not run on the new QEMU.
    pub fn resume(&self, handed: &Handed) -> Result<Duration, QmpError> {
        self.new.resume()?;
        let deadline = Instant::now() + self.patience;
        while let Ok(heard) = handed.heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            if let Heard::New(Said { event: QmpEvent::Resumed, at }) = heard {
                return Ok(at.saturating_sub(handed.stopped_at));
            }
        }
        Ok(now().saturating_sub(handed.stopped_at))
    }
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

fn listener(speaks: Sender<Heard>, who: fn(Said) -> Heard) -> impl Fn(Said) -> bool + Send {
    move |said| speaks.send(who(said)).is_ok()
}

fn hangs_or(
    who: &'static str,
    patience: Duration,
    error: std::io::Error,
    ended: RejuvenationError,
) -> RejuvenationError {
    if error.kind() == std::io::ErrorKind::TimedOut { RejuvenationError::Hangs { who, patience } } else { ended }
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_hop_misjudges_the_next_one_makes_good() {
        let ms = Duration::from_millis;
        let mut debt = ClockDebt::default();
        let mut behind = 0;
        for (expected, real) in [(3, 5), (3, 2), (4, 40), (3, 1), (2, 2)] {
            let by = debt.with(ms(expected));
            debt = debt.after(ms(real), by);
            behind += nanoseconds(ms(real)) - nanoseconds(by);
            assert_eq!(debt, ClockDebt(behind), "all that is missing is owed");
        }
        assert_eq!(debt, ClockDebt::default(), "the last one was judged right");
    }

    #[test]
    fn no_clock_is_set_back() {
        let debt = ClockDebt::default().after(Duration::from_millis(1), Duration::from_millis(9));
        assert_eq!(debt.with(Duration::from_millis(3)), Duration::ZERO);
        assert_eq!(debt.after(Duration::from_millis(3), Duration::ZERO), ClockDebt(-5_000_000));
    }
}
