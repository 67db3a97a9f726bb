//! The loop of a disk's thread.
//!
//! sleep -> note what happened -> take requests -> let waiting ones go on -> submit -> reap -> wake the guest -> again
//! while there is progress -> watch the rings a moment -> wake a guest that overslept -> sleep
//!
//! Nothing is done from inside an event: events only note what is ready, and the round after them works in one order.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant, SystemTime};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::connection::{Connection, ConnectionError};
use super::counters::{Counters, DiskCounters, add};
use super::disk::Disk;
use super::foreign::{ForeignFd, MemoryFile};
use super::incoming::{Expected, IncomingConnection, IncomingConnections};
use super::inflight;
use super::listener::{SocketFile, listen};
use super::memory::MemoryError;
use super::peers::Peers;
use super::poller::{self, Event, Poller, Source, Watched, clear};
use super::recorder::Tracking;
use super::wire::WireError;
use super::{Ask, Backing, DiskOptions, ServerError, check};
use crate::clock::Clock;
use crate::gate::Gate;
use crate::image::FrozenImage;
use crate::pressure::Pressure;
use crate::write_log::WriteLog;

/// Rounds between two looks at everything else, so that a guest that never pauses cannot lock out the keeper.
const ROUNDS_MAX: usize = 32;
/// After its last request a guest's rings are watched this long before the thread sleeps: about what a wake-up costs, so
/// that watching in vain never costs much more than sleeping too early.
const WATCH: Duration = Duration::from_micros(30);
/// An engine that cannot take operations now is asked again after this time.
const SUBMIT_AGAIN: Duration = Duration::from_millis(1);
/// A server that leaves waits until its QEMU has been silent for this long,
const SILENCE: Duration = Duration::from_millis(300);
/// and at most for this long.
const LEAVE_PATIENCE: Duration = Duration::from_secs(5);
/// Connections taken from the backlog at one look, so that a flood of them cannot lock out everything else.
const VISITORS_A_LOOK: usize = 16;
/// More than any backlog holds (`net.core.somaxconn` is 4096).
const BACKLOG_MAX: usize = 1 << 16;
/// It looks this often meanwhile.
const LEAVE_LOOK: Duration = Duration::from_millis(5);
/// A stop does not wait longer than this for the image.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// Commands of the keeper to a disk.
pub(super) enum Command {
    Attach(Box<Option<Tracking>>, Sender<bool>),
    Answer(Box<Option<Tracking>>, Sender<()>),
    Drain(Sender<()>),
    Handover(bool, Sender<()>),
    HandoverFromSilent(OwnedFd, Sender<Result<(), String>>),
    Expect(Expected, Sender<()>),
    Resize(Sender<io::Result<u64>>),
    Gate(Option<Gate>, Sender<()>),
    WriteLog(Option<Arc<WriteLog>>, Sender<()>),
    /// None: something is in flight.
    Freeze(File, Sender<Option<io::Result<Arc<FrozenImage>>>>),
    /// Take no requests until the release, and answer when nothing is in flight. False: another hold is not over.
    Hold(Sender<bool>),
    Release,
    /// Stop, but let a QEMU finish its first messages.
    Leave,
    Stop,
}

/// Handle to a disk that is being served, for other threads.
pub struct Handle {
    pub(super) counters: Arc<Counters>,
    pub(super) pressure: Pressure,
    pub(super) commands: Sender<Command>,
    pub(super) wake: OwnedFd,
}

impl Handle {
    /// The disk's counters so far.
    pub fn counters(&self) -> DiskCounters {
        self.counters.read()
    }
}

/// How long a disk's thread may sleep if nothing happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Not at all: more work is waiting.
    None,
    /// At most this long: then something is due.
    AtMost(Duration),
    /// Until something happens.
    Endless,
}

/// A disk and its socket, without a thread: it is served while somebody calls `turn`. A [`DiskServer`](super::DiskServer) does
/// so on a thread of its own, and a simulation on its only one.
pub struct Worker {
    name: String,
    disk: Disk,
    peers: Peers,
    poller: Rc<Poller>,
    listener: Watched<SocketFile>,
    listening: bool,
    incoming: IncomingConnections,
    command_wake: Watched<Arc<OwnedFd>>,
    commands: Receiver<Command>,
    timer: Watched<OwnedFd>,
    _engine: Watched<OwnedFd>,
    /// Reused, so that a turn needs no allocation.
    events: Vec<Event>,
    /// The engine has something, or had: only looking clears its bell.
    engine_rung: bool,
    /// There was work since the rings were last watched.
    answered: bool,
    draining: Vec<Sender<()>>,
    hold: Option<Hold>,
    next_connection: u32,
    /// The inflight region of a silent QEMU, for the next connection.
    left: Option<MemoryFile>,
    /// When the server began to leave.
    leaving: Option<Instant>,
    stopping: bool,
    ask: Option<Ask>,
}

/// No request is taken: somebody copies the image.
struct Hold {
    /// Who waits until nothing is in flight.
    reached: Option<Sender<bool>>,
}

/// Readable when there is something for the next turn.
impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}

impl Worker {
    /// Listens at the socket (mode 0600, replacing one that nobody listens at).
    pub fn open(
        options: DiskOptions,
        backing: Backing,
        tracking: Option<Tracking>,
        clock: Clock,
    ) -> Result<(Self, Handle), ServerError> {
        check(&options)?;
        let listener = listen(&options.name, &options.socket)?;
        let fail = |what| {
            let disk = options.name.clone();
            move |source| ServerError::Start { disk, what, source }
        };
        let wake = poller::wake_fd().map_err(fail("make an event counter"))?;
        let command_wake = wake.try_clone().map_err(fail("make an event counter"))?;
        let (commands, inbox) = mpsc::channel();
        let (counters, pressure) = (Arc::new(Counters::default()), Pressure::new(clock.now()));
        let handle = Handle { counters: Arc::clone(&counters), pressure: pressure.clone(), commands, wake };
        let disk = Disk::new(&options, backing, tracking, counters, pressure, clock);
        let door = (listener, options.expected.clone());
        let worker = Self::new(options.name.clone(), disk, door, command_wake, inbox);
        let mut worker = worker.map_err(fail("set up its loop"))?;
        worker.set_write_through(options.write_through);
        worker.ask = options.ask;
        Ok((worker, handle))
    }

    fn new(
        name: String,
        disk: Disk,
        (listener, expected): (SocketFile, Expected),
        command_wake: OwnedFd,
        commands: Receiver<Command>,
    ) -> io::Result<Self> {
        let poller = Poller::new()?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let engine = disk.notifier().try_clone_to_owned()?;
        Ok(Self {
            name,
            peers: Peers::new(Arc::clone(&disk.counters().write_through)),
            listener: Watched::new(&poller, listener, Source::Listener)?,
            listening: true,
            incoming: IncomingConnections::new(expected),
            command_wake: Watched::new(&poller, Arc::new(command_wake), Source::Command)?,
            commands,
            timer: Watched::new(&poller, timer, Source::Timer)?,
            _engine: Watched::new(&poller, engine, Source::Engine)?,
            events: Vec::new(),
            engine_rung: false,
            answered: false,
            draining: Vec::new(),
            hold: None,
            next_connection: 0,
            left: None,
            leaving: None,
            stopping: false,
            ask: None,
            disk,
            poller,
        })
    }

    /// Until it is told to stop; an error ends it before that.
    pub(super) fn run(mut self) -> Result<(), String> {
        let mut pause = Pause::Endless;
        while !self.stopping {
            if let Pause::AtMost(wait) = pause {
                self.set_timer(wait);
            }
            let at_once = pause == Pause::None || self.watch();
            let at_most = at_once.then_some(Duration::ZERO).or(self.leaving.map(|_| LEAVE_LOOK));
            pause = match self.turn(at_most) {
                Ok(pause) => pause,
                Err(error) => {
                    self.end();
                    return Err(format!("its loop cannot wait for events: {error}"));
                }
            };
            self.stopping |= self.leaving.is_some_and(|since| self.may_leave(since));
        }
        self.end();
        Ok(())
    }

    fn end(&mut self) {
        self.peers.ids().into_iter().for_each(|id| self.hang_up(id));
        self.incoming.expect(Expected::default());
        self.disk.drain(STOP_PATIENCE);
    }

    /// Sleeps until something happens, but no longer than `at_most`, and does all there is to do then. Returns how long the
    /// next sleep may be.
    pub fn turn(&mut self, at_most: Option<Duration>) -> io::Result<Pause> {
        let mut events = std::mem::take(&mut self.events);
        self.poller.wait(at_most, &mut events)?;
        self.disk.counters().heartbeat.begin();
        events.drain(..).for_each(|event| self.note(event));
        self.events = events;
        let pause = self.work();
        self.settle();
        self.disk.counters().heartbeat.end();
        Ok(pause)
    }

    /// Whether many descriptors wait to be closed, because their other end holds up the close. Then no disk of this process accepts
    /// a connection. This thread is woken when that is over.
    fn is_held_up(&self) -> bool {
        background_close::is_backed_up_for(self.command_wake.get())
    }

    fn note(&mut self, event: Event) {
        match event.source {
            Source::Command => self.command(),
            Source::Listener => self.accept(),
            Source::Engine => self.engine_rung = true,
            Source::Timer => drop(clear(self.timer.get().as_fd())),
            Source::Connection { id } => self.hear(id, event.gone),
            Source::Kick { connection, queue } => self.kicked(connection, queue),
        }
    }

    fn kicked(&mut self, connection: u32, queue: u16) {
        let live = self.peers.get(connection);
        let Some(queue) = live.and_then(|live| live.queues.get_mut(usize::from(queue))) else { return };
        if let Err(error) = queue.kicked() {
            tracing::warn!(disk = self.name, %error, "a kick descriptor cannot be read; QEMU is cut off");
            self.hang_up(connection);
        }
    }

    /// Watches the rings of a guest that was just answered. True: it has asked for more.
    fn watch(&mut self) -> bool {
        let begun = Instant::now();
        let answered = std::mem::take(&mut self.answered);
        let is_idle = answered && self.hold.is_none() && self.disk.is_idle();
        let Some(connection) = self.peers.serving().filter(|_| is_idle) else { return false };
        while begun.elapsed() < WATCH {
            if connection.has_requests() {
                return true;
            }
            std::hint::spin_loop();
        }
        connection.wake_overslept();
        false
    }

    /// One or more rounds.
    fn work(&mut self) -> Pause {
        for _ in 0..ROUNDS_MAX {
            let mut progress = false;
            let mut wait = None;
            if let Some(connection) = self.peers.serving() {
                let held = self.hold.is_some();
                for queue in (0..connection.queues.len() as u16).filter(|_| !held) {
                    progress |= self.disk.take_requests(connection, queue);
                }
                wait = self.disk.pump(connection, held);
                connection.wake_guest();
            }
            if let Err(error) = self.disk.submit() {
                tracing::warn!(disk = self.name, %error, "the disk's engine takes no operations now");
                wait = Some(wait.map_or(SUBMIT_AGAIN, |wait| wait.min(SUBMIT_AGAIN)));
            }
            progress |= self.disk.reap(self.peers.serving(), std::mem::take(&mut self.engine_rung));
            if let Some(connection) = self.peers.serving() {
                connection.wake_guest();
            }
            if !progress {
                return wait.map_or(Pause::Endless, Pause::AtMost);
            }
            self.answered = true;
        }
        Pause::None
    }

    fn set_timer(&self, wait: Duration) {
        // Zero would disarm it.
        let value = Timespec::try_from(wait.max(Duration::from_nanos(1))).expect("waits are seconds at most");
        let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
        if let Err(error) = timerfd_settime(self.timer.get(), TimerfdTimerFlags::empty(), &once) {
            tracing::error!(disk = self.name, %error, "the disk's timer cannot be set; a limited request may hang");
        }
    }

    /// After the work: what waited for it to be done.
    fn settle(&mut self) {
        let answered = self.peers.iter_mut().map(|connection| (connection.id, connection.answer_waiting()));
        let mut failed: Vec<_> = answered.filter_map(|(id, answer)| Some((id, answer.err()?))).collect();
        // It may connect again: what was in flight is in its inflight region, and memory may be there then.
        let without_memory = self.peers.iter_mut().filter(|connection| connection.memory.is_lost());
        failed.extend(without_memory.map(|connection| (connection.id, MemoryError::Lost.into())));
        failed.into_iter().for_each(|(id, error)| self.lost(id, error));
        self.welcome();
        let decided = !self.incoming.expected.undecided && !self.is_held_up();
        if decided != self.listening && self.listener.listen(decided).is_ok() {
            // Connections that come while it is not known who is expected wait in the listener's backlog.
            self.listening = decided;
        }
        if self.disk.is_still()
            && let Some(reached) = self.hold.as_mut().and_then(|hold| hold.reached.take())
        {
            let _ = reached.send(true); // Who no longer waits releases it.
        }
        if self.is_drained() {
            for waiter in self.draining.drain(..) {
                let _ = waiter.send(()); // Who no longer waits need not know.
            }
        }
    }

    /// QEMU before 9.1 never speaks to its disk again if it loses it in its first words (`vhost_dev_init` fails, and nobody
    /// listens to the socket that is connected again: `hw/virtio/vhost-user.c`, `vhost_user_async_close_bh`).
    fn may_leave(&mut self, since: Instant) -> bool {
        self.accept();
        let talks = self.peers.iter_mut().any(|connection| connection.is_talking(SILENCE));
        // A QEMU that has come back already waits until the last requests are on the disk.
        let may_wait_outside = self.peers.is_empty() && !self.disk.is_idle();
        since.elapsed() > LEAVE_PATIENCE || !talks && !may_wait_outside
    }

    fn accept(&mut self) {
        if self.incoming.expected.undecided || self.is_held_up() {
            return;
        }
        self.judge_backlog(VISITORS_A_LOOK);
        self.welcome();
    }

    /// Closes connections of strangers at once, also while nobody can be served: none is left to be served later.
    fn judge_backlog(&mut self, at_most: usize) {
        for _ in 0..at_most {
            if self.is_held_up() {
                return;
            }
            let socket = self.listener.get();
            match socket.listener().accept() {
                Ok((stream, _)) => self.incoming.arrived(&self.name, &socket.path, stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return tracing::warn!(disk = self.name, %error, "cannot accept QEMU"),
            }
        }
    }

    /// A new QEMU waits in the lobby until the last one's writes are on the disk.
    fn welcome(&mut self) {
        while self.peers.has_room(self.disk.is_idle()) && !self.is_held_up() {
            match self.incoming.next() {
                Some(incoming_connection) => self.serve(incoming_connection),
                None => return,
            }
        }
    }

    fn serve(&mut self, IncomingConnection { pid, stream }: IncomingConnection) {
        self.next_connection = self.next_connection.wrapping_add(1);
        let (id, ram) = (self.next_connection, self.disk.ram());
        match Connection::new(id, pid, &self.name, stream, &self.poller, self.disk.device(), ram) {
            Ok(mut connection) => {
                connection.left = self.left.take();
                connection.asks = self.ask.is_some();
                connection.memory.set_gate(self.disk.gate());
                connection.memory.set_write_log(self.disk.write_log.clone());
                tracing::debug!(disk = self.name, connection = id, pid, "QEMU connected");
                self.peers.add(connection);
                self.count_peers();
                add(&self.disk.counters().connections, 1);
            }
            Err(error) => tracing::warn!(disk = self.name, %error, "cannot serve QEMU"),
        }
    }

    /// Sets who may connect from now on. Connections of others are closed, those in the backlog as well.
    fn expect(&mut self, expected: Expected) {
        let undecided = expected.undecided;
        self.incoming.expect(Expected { undecided: false, ..expected });
        self.judge_backlog(BACKLOG_MAX);
        self.incoming.expected.undecided = undecided;
        let unexpected = self.peers.iter_mut().filter(|peer| !self.incoming.expected.includes(peer.pid));
        let unexpected: Vec<_> = unexpected.map(|peer| peer.id).collect();
        unexpected.into_iter().for_each(|id| self.hang_up(id));
    }

    fn hear(&mut self, id: u32, gone: bool) {
        let Some(connection) = self.peers.get(id) else { return };
        if gone && connection.is_waiting() {
            return self.lost(id, WireError::Closed.into());
        }
        for _ in 0..ROUNDS_MAX {
            let may_start = self.peers.may_start(id, self.disk.is_idle());
            let Some(connection) = self.peers.get(id) else { return };
            connection.may_start = may_start;
            let heard = connection.handle_next();
            if let Some(at) = connection.stop_asked.take() {
                let since_1970 = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                self.disk.counters().stop_asked_us.store(since_1970.as_micros() as u64, Ordering::Relaxed);
            }
            if let Some((question, ask)) = connection.question.take().zip(self.ask.as_ref()) {
                ask(question);
            }
            match heard {
                Ok(true) => {
                    self.peers.settle();
                    self.count_peers();
                }
                Ok(false) => return,
                Err(error) => return self.lost(id, error),
            }
        }
    }

    fn lost(&mut self, id: u32, error: ConnectionError) {
        match error {
            ConnectionError::Wire(WireError::Closed) => tracing::debug!(disk = self.name, "QEMU hung up"),
            error => {
                let error = error_text::chain(&error);
                tracing::warn!(disk = self.name, error, "QEMU broke the vhost-user protocol and is cut off");
            }
        }
        self.hang_up(id);
    }

    fn hang_up(&mut self, id: u32) {
        if let Some(connection) = self.peers.remove(id) {
            self.disk.abandon(connection.id);
            self.count_peers();
            connection.memory.unmap_apart();
        }
    }

    fn set_write_through(&self, on: bool) {
        self.disk.counters().write_through.store(on, Ordering::Relaxed);
    }

    fn count_peers(&mut self) {
        let have_greeted = !self.peers.is_empty() && self.peers.iter_mut().all(|connection| connection.has_greeted);
        self.disk.counters().greeted.store(have_greeted, Ordering::Relaxed);
        self.disk.counters().connected.store(!self.peers.is_empty(), Ordering::Relaxed);
        self.disk.counters().successor.store(self.peers.has_waiting(), Ordering::Relaxed);
    }

    /// As [`DiskServer::attach`](super::DiskServer::attach). False: somebody is served.
    pub fn attach(&mut self, tracking: Option<Tracking>) -> bool {
        let is_free = self.is_drained();
        if is_free {
            self.disk.attach(tracking);
            self.set_write_through(false);
        }
        is_free
    }

    /// As [`DiskServer::answer`](super::DiskServer::answer).
    pub fn answer(&mut self, tracking: Option<Tracking>) {
        self.disk.attach(tracking);
        let ram = self.disk.ram();
        self.peers.iter_mut().for_each(|connection| connection.answered(ram.clone()));
    }

    /// No QEMU is connected, and nothing is in flight.
    pub fn is_drained(&self) -> bool {
        self.peers.is_empty() && self.disk.is_idle()
    }

    /// As [`DiskServer::freeze`](super::DiskServer::freeze). None: requests are in flight.
    pub fn freeze(&self, target: File) -> Option<io::Result<Arc<FrozenImage>>> {
        self.disk.freeze(target)
    }

    /// As [`DiskServer::set_handover`](super::DiskServer::set_handover).
    pub fn set_handover(&mut self, allowed: bool) {
        self.peers.handover = allowed;
        self.left = None;
        if let Some(id) = self.peers.waiting_id().filter(|_| !allowed) {
            self.hang_up(id);
        }
    }

    /// As [`DiskServer::set_write_log`](super::DiskServer::set_write_log).
    pub fn set_write_log(&mut self, log: Option<Arc<WriteLog>>) {
        self.peers.iter_mut().for_each(|connection| connection.memory.set_write_log(log.clone()));
        self.disk.write_log = log;
    }

    /// As [`DiskServer::set_handover_from_silent`](super::DiskServer::set_handover_from_silent).
    pub fn set_handover_from_silent(&mut self, left: OwnedFd) -> Result<(), String> {
        let left = ForeignFd::from(left).sealed_memory()?;
        if inflight::is_write_through(&left).map_err(|error| error.to_string())? {
            self.set_write_through(true);
        }
        self.set_handover(true);
        self.left = Some(left);
        Ok(())
    }

    fn command(&mut self) {
        drop(clear(self.command_wake.get().as_fd()));
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Attach(tracking, reply) => drop(reply.send(self.attach(*tracking))),
                Command::Answer(tracking, reply) => {
                    self.answer(*tracking);
                    let _ = reply.send(());
                }
                Command::Drain(reply) => self.draining.push(reply),
                Command::Handover(allowed, reply) => {
                    self.set_handover(allowed);
                    let _ = reply.send(());
                }
                Command::HandoverFromSilent(left, reply) => drop(reply.send(self.set_handover_from_silent(left))),
                Command::Expect(expected, reply) => {
                    self.expect(expected);
                    let _ = reply.send(());
                }
                Command::Resize(reply) => drop(reply.send(self.resize())),
                Command::Gate(gate, reply) => {
                    self.peers.iter_mut().for_each(|connection| connection.memory.set_gate(gate.clone()));
                    self.disk.set_gate(gate);
                    let _ = reply.send(());
                }
                Command::WriteLog(log, reply) => {
                    self.set_write_log(log);
                    let _ = reply.send(());
                }
                Command::Freeze(target, reply) => drop(reply.send(self.freeze(target))),
                Command::Hold(reply) if self.hold.is_some() => drop(reply.send(false)),
                Command::Hold(reply) => self.hold = Some(Hold { reached: Some(reply) }),
                Command::Release => self.hold = None,
                Command::Leave => {
                    // Nobody comes any more.
                    let _ = std::fs::remove_file(&self.listener.get().path);
                    self.leaving = Some(Instant::now());
                }
                Command::Stop => self.stopping = true,
            }
        }
    }

    /// As [`DiskServer::resize`](super::DiskServer::resize).
    pub fn resize(&mut self) -> io::Result<u64> {
        let bytes = self.disk.resize()?;
        for connection in self.peers.iter_mut() {
            if let Err(error) = connection.resized(self.disk.device()) {
                tracing::warn!(disk = self.name, %error, "the guest could not be told of the new size");
            }
        }
        Ok(bytes)
    }
}
