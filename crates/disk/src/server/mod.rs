//! The disk server: a thread with one loop that serves one disk to QEMU over vhost-user-blk.
//!
//! ```text
//! listener  commands  limiter's timer  engine  |  connection  kicks of its queues
//!     \________\_____________\____________\____|_______/___________/
//!                            poller (epoll)
//!                               |
//!  wire -> connection -> queue -> ring, chain -> request -> disk -> transfer -> image / warm memory / ledger
//!                          \-> inflight
//! ```
//!
//! One thread, so that a RAM hit is answered where the kick arrives (a hop between threads costs more than the hit),
//! and so that the order of "void, then change" needs no locks. State that dies with a QEMU is in `connection`; state
//! of the disk is in `disk`.

mod chain;
mod config;
mod connection;
mod counters;
mod death;
mod disk;
mod foreign;
#[cfg(test)]
mod fuzz;
mod incoming;
mod inflight;
mod listener;
mod memory;
mod peers;
mod poller;
mod queue;
mod recorder;
mod region;
mod request;
mod ring;
mod sigbus;
mod signaller;
mod transfer;
mod wire;
mod worker;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

pub use counters::DiskCounters;
pub use incoming::{Expected, Peer};
pub use inflight::memory_name as inflight_name;
pub use memory::{MemoryPlace, ToldFile, ToldMemory};
pub use recorder::{RamPart, Tracking};
pub use worker::{Handle, Pause, Worker};

use crate::block::DiskId;
use crate::buffer::BufferPool;
use crate::clock::Clock;
use crate::engine::Engine;
use crate::gate::Gate;
use crate::heartbeat::Heartbeat;
use crate::image::{Checkpoints, Committer, FrozenImage, Image, ImageError};
use crate::limit::Limits;
use crate::pressure::Pressure;
use crate::write_log::WriteLog;
use counters::Counters;
use death::Death;
use worker::Command;

/// Buffers of a disk: six of the longest requests that Linux makes, or all small ones that the engine takes, are at the
/// image at once. More would not be pinned: 8 MiB is the usual limit on locked memory.
const POOL_BYTES: usize = 8 << 20;
/// Operations at the image at once; flushes and discards need no buffer.
const DEPTH: u32 = 128;
/// A thread takes commands between two requests, all of which it has begun within milliseconds.
const COMMAND_PATIENCE: Duration = Duration::from_secs(30);
/// A guest under emulation sends neighbours every 50 us or so.
const HOLD_BACK: Duration = Duration::from_micros(250);

/// Name of a disk, and how it is served.
#[derive(Clone)]
pub struct DiskOptions {
    /// Which of the machine's disks it is.
    pub id: DiskId,
    /// Its name, for logs and errors.
    pub name: String,
    /// Serial number that the guest reads; at most 20 bytes.
    pub serial: String,
    /// Path of the socket to listen at.
    pub socket: PathBuf,
    /// Number of queues.
    pub queues: u16,
    /// Largest size of a queue, and largest number of descriptors in a request plus two. QEMU's queues may be smaller.
    pub queue_size: u16,
    /// The guest may only read.
    pub read_only: bool,
    /// Frontends may tell their memory piece by piece. Not for QEMU: it tells the next server only what has changed since
    /// it told the last one, if its guest stood still in between.
    pub memory_slots: bool,
    /// Rate limits.
    pub limits: Limits,
    /// Whether its blocks are tracked and served from memory. Not for a disk that is memory itself.
    pub tracked: bool,
    /// Gate before the guest's memory, if memory is short from the start.
    pub gate: Option<Gate>,
    /// Takes the disk's messages. Called by the disk's thread, so it must not wait.
    pub tell: Option<Tell>,
    /// Takes questions about a guest whose memory the keeper does not make itself. QEMU waits until `answer`. Called by the disk's
    /// thread, so it must not wait.
    pub ask: Option<Ask>,
    /// Processes that may connect, until `expect` says otherwise.
    pub expected: Expected,
    /// The guest has switched its write cache off, as was noted while another server had it. QEMU does not tell.
    pub write_through: bool,
}

impl DiskOptions {
    /// A tracked disk with one queue and no limits, to which nobody may connect.
    pub fn new(id: DiskId, name: impl Into<String>, socket: impl Into<PathBuf>) -> Self {
        Self {
            id,
            name: name.into(),
            serial: String::new(),
            socket: socket.into(),
            queues: 1,
            queue_size: 256,
            read_only: false,
            memory_slots: false,
            limits: Limits::default(),
            tracked: true,
            gate: None,
            tell: None,
            ask: None,
            expected: Expected::default(),
            write_through: false,
        }
    }
}

/// A message of a disk to its keeper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The image's file system is full: requests wait.
    OutOfSpace {
        /// The error's text.
        why: String,
    },
    /// Everything that waited for space is done.
    SpaceAgain {
        /// How long the first request waited.
        waited: Duration,
    },
}

/// What the keeper decides while QEMU waits: what is to be tracked from now on.
#[derive(Clone, Debug)]
pub enum Question {
    /// QEMU has told of guest memory that is not tracked.
    Memory(ToldMemory),
    /// A driver begins anew with the device, in the same QEMU: after a reset, or after the guest has let go of it.
    Driver {
        /// It does without what a kernel's driver uses, as firmware does.
        is_simple: bool,
    },
}

/// Takes questions.
pub type Ask = Arc<dyn Fn(Question) + Send + Sync>;

/// Takes the messages of a disk.
pub type Tell = Arc<dyn Fn(Notice) + Send + Sync>;

/// Why a disk cannot be served, or does not do what was asked.
#[allow(missing_docs, reason = "each variant's message describes it")]
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("disk {disk}: {what}; use 1 to 256 queues of 16 to 1024 requests (a power of two)")]
    Shape { disk: String, what: String },
    #[error("disk {disk}: serial number {serial:?} is longer than 20 bytes")]
    Serial { disk: String, serial: String },
    #[error("disk {disk}: another process serves socket {socket}; stop it, or choose another runtime folder")]
    SocketInUse { disk: String, socket: PathBuf },
    #[error("disk {disk}: cannot listen at socket {socket}")]
    Listen { disk: String, socket: PathBuf, source: io::Error },
    #[error("disk {disk}: cannot {what}")]
    Start { disk: String, what: &'static str, source: io::Error },
    #[error("disk {disk}: cannot serve its image")]
    Image { disk: String, source: ImageError },
    #[error(
        "disk {disk}: QEMU is connected or requests are in flight; what is tracked can change only between two QEMUs"
    )]
    Busy { disk: String },
    #[error("disk {disk}: still in use after {waited:?}")]
    Timeout { disk: String, waited: Duration },
    #[error("disk {disk}: its thread has not answered for {waited:?}; the storage of its image hangs")]
    Silent { disk: String, waited: Duration },
    #[error("disk {disk}: cannot read the size of its image again")]
    Resize { disk: String, source: io::Error },
    #[error("disk {disk}: requests are in flight although its guest is paused")]
    NotIdle { disk: String },
    #[error("disk {disk}: its requests in flight have not ended for {waited:?}; its storage is slow, limited or full")]
    Unfinished { disk: String, waited: Duration },
    #[error("disk {disk}: another copy of it is about to begin")]
    HeldAlready { disk: String },
    #[error("disk {disk}: its unanswered requests cannot be taken over: {what}")]
    Left { disk: String, what: String },
    #[error("disk {disk}: its image cannot be copied")]
    Freeze { disk: String, source: io::Error },
    #[error("disk {disk}: its image cannot be opened again")]
    Reopen { disk: String, source: io::Error },
    #[error("disk {disk}: its thread has ended")]
    Gone { disk: String },
}

/// An image with the engine that moves its bytes.
pub struct Backing {
    /// The image.
    pub image: Image,
    /// Buffers of the engine.
    pub pool: Arc<BufferPool>,
    /// Moves bytes between buffers and image.
    pub engine: Box<dyn Engine>,
    /// Operations that the engine takes at once.
    pub depth: u32,
    /// How long a small read beside one that is in flight waits for neighbours.
    pub hold_back: Duration,
}

impl Backing {
    /// The image's own engine, with buffers of the usual size.
    pub fn of(image: Image) -> Result<Self, BackingError> {
        Self::with(image, |_, engine| engine)
    }

    /// The image with an engine of the caller's instead of its own.
    pub fn over(
        image: Image,
        engine: impl FnOnce(&Arc<BufferPool>) -> io::Result<Box<dyn Engine>>,
    ) -> Result<Self, BackingError> {
        let pool = BufferPool::new(POOL_BYTES).map_err(BackingError::Buffers)?;
        let engine = engine(&pool).map_err(BackingError::Engine)?;
        Ok(Self { image, pool, engine, depth: DEPTH, hold_back: HOLD_BACK })
    }

    /// As `of`, with an engine around (or in place of) the image's own.
    pub fn with(
        image: Image,
        wrap: impl FnOnce(&Arc<BufferPool>, Box<dyn Engine>) -> Box<dyn Engine>,
    ) -> Result<Self, BackingError> {
        let pool = BufferPool::new(POOL_BYTES).map_err(BackingError::Buffers)?;
        let engine = image.engine(Arc::clone(&pool), DEPTH)?;
        let engine = wrap(&pool, engine);
        Ok(Self { image, pool, engine, depth: DEPTH, hold_back: HOLD_BACK })
    }
}

/// Why an image has no engine or buffers.
#[allow(missing_docs, reason = "each variant's message describes it")]
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    #[error("no memory for I/O buffers")]
    Buffers(#[source] io::Error),
    #[error("its engine cannot be started")]
    Engine(#[source] io::Error),
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// A disk that is being served. Dropping it stops it.
pub struct DiskServer {
    name: String,
    description: String,
    bytes: Arc<AtomicU64>,
    committer: Committer,
    image: Arc<File>,
    checkpoints: Checkpoints,
    socket: PathBuf,
    counters: Arc<Counters>,
    pressure: Pressure,
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    death: Arc<Death>,
}

/// A disk that is being served, as other threads see it. Outlives the server.
#[derive(Clone)]
pub struct Observer {
    name: String,
    counters: Arc<Counters>,
    committer: Committer,
    bytes: Arc<AtomicU64>,
    /// Not kept open: its lock would be kept, too.
    image: Weak<File>,
    checkpoints: Checkpoints,
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Observer {
    /// Name of the disk.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// As `DiskServer::counters`.
    pub fn counters(&self) -> DiskCounters {
        self.counters.read()
    }

    /// As `DiskServer::commit`.
    pub fn commit(&self) -> io::Result<()> {
        self.committer.commit()
    }

    /// Opens the image's file again, for reading and without its lock: the same file, whatever its path leads to by now.
    pub fn open_image(&self) -> Result<File, ServerError> {
        let disk = || self.name.clone();
        let image = self.image.upgrade().ok_or_else(|| ServerError::Gone { disk: disk() })?;
        let opened = File::open(format!("/proc/self/fd/{}", image.as_raw_fd()));
        opened.map_err(|source| ServerError::Reopen { disk: disk(), source })
    }

    /// As `DiskServer::bytes`.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// The disk's checkpoints. One is to begin, or to be read, while the disk is held.
    pub fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// The image as it is now, on its way into this file, which is new. The guest stands still; it may go on at once.
    pub fn freeze(&self, target: File) -> Result<Arc<FrozenImage>, ServerError> {
        let answer = ask(&self.name, &self.commands, &self.wake, |reply| Command::Freeze(target, reply))?;
        let disk = || self.name.clone();
        let frozen = wait(&self.name, &answer)?.ok_or_else(|| ServerError::NotIdle { disk: disk() })?;
        frozen.map_err(|source| ServerError::Freeze { disk: disk(), source })
    }

    /// Has the disk finish what is in flight, and take no more. Its guest waits meanwhile. The error leaves it as it was: one is what
    /// was begun has not ended within this time.
    pub fn hold(&self, patience: Duration) -> Result<Held<'_>, ServerError> {
        let disk = || self.name.clone();
        let answer = ask(&self.name, &self.commands, &self.wake, Command::Hold)?;
        match answer.recv_timeout(patience) {
            Ok(true) => Ok(Held(self)),
            Ok(false) => Err(ServerError::HeldAlready { disk: disk() }),
            Err(RecvTimeoutError::Timeout) => {
                self.release();
                Err(ServerError::Unfinished { disk: disk(), waited: patience })
            }
            Err(RecvTimeoutError::Disconnected) => Err(ServerError::Gone { disk: disk() }),
        }
    }

    fn release(&self) {
        // A thread that has ended holds nothing.
        let _ = self.commands.send(Command::Release);
        poller::wake(self.wake.as_fd());
    }
}

/// A disk that takes no requests until this is dropped. Nothing is in flight towards its image.
pub struct Held<'a>(&'a Observer);

impl Held<'_> {
    /// As `Observer::freeze`.
    pub fn freeze(&self, target: File) -> Result<Arc<FrozenImage>, ServerError> {
        self.0.freeze(target)
    }

    /// As `DiskServer::commit`.
    pub fn commit(&self) -> io::Result<()> {
        self.0.commit()
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Tells a disk's server who may connect, from any thread. Outlives the server.
pub struct PeerControl {
    name: String,
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
}

/// Whether a server has heard what it was told.
pub struct Heard {
    disk: String,
    answer: Receiver<()>,
}

impl PeerControl {
    /// Says who may connect from now on, without waiting until the disk's thread has heard it.
    pub fn expect(&self, expected: Expected) -> Result<Heard, ServerError> {
        let answer = ask(&self.name, &self.commands, &self.wake, |reply| Command::Expect(expected, reply))?;
        Ok(Heard { disk: self.name.clone(), answer })
    }
}

impl Heard {
    /// Waits until the disk's thread has heard it.
    pub fn wait(&self) -> Result<(), ServerError> {
        wait(&self.disk, &self.answer)
    }
}

impl DiskServer {
    /// Listens at the socket (mode 0600, replacing one that nobody listens at) and serves whoever is expected.
    pub fn start(options: DiskOptions, image: Image, tracking: Option<Tracking>) -> Result<Self, ServerError> {
        let disk = options.name.clone();
        let backing = Backing::of(image).map_err(|error| match error {
            BackingError::Buffers(source) | BackingError::Engine(source) => {
                ServerError::Start { disk, what: "allocate I/O buffers", source }
            }
            BackingError::Image(source) => ServerError::Image { disk, source },
        })?;
        Self::start_with(options, backing, tracking)
    }

    /// As `start`, with an engine of the caller's choice.
    pub fn start_with(options: DiskOptions, backing: Backing, tracking: Option<Tracking>) -> Result<Self, ServerError> {
        let (name, socket) = (options.name.clone(), options.socket.clone());
        let (description, bytes) = (backing.image.describe(), Arc::new(AtomicU64::new(backing.image.bytes())));
        let committer = backing.image.committer();
        let checkpoints = backing.image.checkpoints().clone();
        let image = backing.image.open_file().map(Arc::new);
        let image = image.map_err(|source| ServerError::Reopen { disk: name.clone(), source })?;
        let (started, start) = mpsc::channel();
        let death = Arc::new(Death::default());
        let thread_death = Arc::clone(&death);
        let serve = move || match Worker::open(options, backing, tracking, Clock::default()) {
            Ok((worker, handle)) => {
                let _ = started.send(Ok(handle));
                thread_filter::deny_unneeded();
                thread_death.of(|| worker.run());
            }
            Err(error) => drop(started.send(Err(error))),
        };
        let thread = std::thread::Builder::new().name(thread_name(&name)).spawn(serve);
        let thread =
            thread.map_err(|source| ServerError::Start { disk: name.clone(), what: "start its thread", source })?;
        let Handle { counters, pressure, commands, wake } =
            start.recv().map_err(|_| ServerError::Gone { disk: name.clone() })??;
        let (thread, wake) = (Some(thread), Arc::new(wake));
        Ok(Self {
            name,
            description,
            bytes,
            committer,
            image,
            checkpoints,
            socket,
            counters,
            pressure,
            commands,
            wake,
            thread,
            death,
        })
    }

    /// Calls `tell` with the reason if the disk's thread ends, or has ended, without being asked to. Nobody serves the disk then:
    /// its guest waits for the next server.
    pub fn watch(&self, tell: impl FnOnce(String) + Send + 'static) {
        self.death.watch(Box::new(tell));
    }

    /// Sets what the next connection's requests are recorded in. Refused while a connection is served.
    pub fn attach(&self, tracking: Option<Tracking>) -> Result<(), ServerError> {
        let answer = self.ask(|reply| Command::Attach(Box::new(tracking), reply))?;
        if self.wait(&answer)? { Ok(()) } else { Err(ServerError::Busy { disk: self.name.clone() }) }
    }

    /// Sets what is tracked from now on, in answer to [`DiskOptions::ask`]. `None`: nothing is.
    pub fn answer(&self, tracking: Option<Tracking>) -> Result<(), ServerError> {
        let answer = self.ask(|reply| Command::Answer(Box::new(tracking), reply))?;
        self.wait(&answer)
    }

    /// Waits until no QEMU is connected and nothing is in flight towards the image.
    pub fn drain(&self, at_most: Duration) -> Result<(), ServerError> {
        let answer = self.ask(Command::Drain)?;
        match answer.recv_timeout(at_most) {
            Ok(()) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(ServerError::Timeout { disk: self.name.clone(), waited: at_most }),
            Err(RecvTimeoutError::Disconnected) => Err(ServerError::Gone { disk: self.name.clone() }),
        }
    }

    /// Sets who may connect from now on. Connections of others are closed, also those that wait.
    pub fn expect(&self, expected: Expected) -> Result<(), ServerError> {
        let answer = self.ask(|reply| Command::Expect(expected, reply))?;
        self.wait(&answer)
    }

    /// As `expect`, without waiting until the disk's thread has done it.
    pub fn tell_expected(&self, expected: Expected) {
        // A thread that has ended serves nobody.
        let _ = self.ask(|reply| Command::Expect(expected, reply));
    }

    /// Does what `expect` does, for a thread that starts a QEMU.
    pub fn peer_control(&self) -> PeerControl {
        PeerControl { name: self.name.clone(), commands: self.commands.clone(), wake: self.wake.clone() }
    }

    /// Sets whether a second QEMU may connect to take over from the first. If not, one that waits is cut off.
    pub fn set_handover(&self, allowed: bool) -> Result<(), ServerError> {
        let answer = self.ask(|reply| Command::Handover(allowed, reply))?;
        self.wait(&answer)
    }

    /// Lets a second QEMU connect, to take over from one that is connected and silent. `left` is a copy of the memory file that
    /// [`inflight_name`] names: the first QEMU's inflight region with its unanswered requests, which the second one gets.
    pub fn set_handover_from_silent(&self, left: OwnedFd) -> Result<(), ServerError> {
        let answer = self.ask(|reply| Command::HandoverFromSilent(left, reply))?;
        self.wait(&answer)?.map_err(|what| ServerError::Left { disk: self.name.clone(), what })
    }

    /// Sets the gate before the guest's memory. Without one, what waits at it goes on.
    pub fn set_gate(&self, gate: Option<Gate>) -> Result<(), ServerError> {
        let answer = self.ask(|reply| Command::Gate(gate, reply))?;
        self.wait(&answer)
    }

    /// Sets the log in which pages of guest memory that this disk writes to are noted.
    pub fn set_write_log(&self, log: Option<Arc<WriteLog>>) -> Result<(), ServerError> {
        let answer = self.ask(|reply| Command::WriteLog(log, reply))?;
        self.wait(&answer)
    }

    /// The disk for other threads.
    pub fn observer(&self) -> Observer {
        Observer {
            name: self.name.clone(),
            counters: self.counters.clone(),
            committer: self.committer.clone(),
            bytes: self.bytes.clone(),
            image: Arc::downgrade(&self.image),
            checkpoints: self.checkpoints.clone(),
            commands: self.commands.clone(),
            wake: self.wake.clone(),
        }
    }

    /// Writes all that was reported to the guest into the image's file, tables too. The guest may run.
    pub fn commit(&self) -> io::Result<()> {
        self.committer.commit()
    }

    /// Reads the size of the image again and tells the guest. Returns it.
    pub fn resize(&self) -> Result<u64, ServerError> {
        let answer = self.ask(Command::Resize)?;
        let resized = self.wait(&answer)?;
        let bytes = resized.map_err(|source| ServerError::Resize { disk: self.name.clone(), source })?;
        self.bytes.store(bytes, Relaxed);
        Ok(bytes)
    }

    /// Size as the guest sees it.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Describes how the image is read and written, and why.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Heartbeat of its thread, for a watchdog. Outlives the server.
    pub fn heartbeat(&self) -> Heartbeat {
        self.counters.heartbeat.clone()
    }

    /// The disk's counters so far.
    pub fn counters(&self) -> DiskCounters {
        self.counters.read()
    }

    /// Whether this disk makes its guest wait, for other users of the same device. Outlives the server.
    pub fn pressure(&self) -> Pressure {
        self.pressure.clone()
    }

    /// Name of the disk.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Hangs up, waits for what is in flight, and removes the socket.
    pub fn stop(mut self) {
        self.end(Command::Stop);
    }

    /// Stops servers whose QEMU will talk to the next ones. A QEMU in the middle of its first messages is served until these are
    /// over, at most 5 s; its guest runs meanwhile.
    pub fn leave(servers: Vec<Self>) {
        servers.iter().for_each(|server| server.tell(Command::Leave));
        servers.into_iter().for_each(|mut server| server.end(Command::Leave));
    }

    /// Leaves them as they are: their threads serve on until the process ends, and nobody waits for them.
    pub fn abandon(servers: Vec<Self>) {
        servers.into_iter().for_each(|mut server| server.thread = None);
    }

    fn tell(&self, command: Command) {
        // A thread that has ended needs not be told.
        let _ = self.commands.send(command);
        poller::wake(self.wake.as_fd());
    }

    fn end(&mut self, how: Command) {
        let Some(thread) = self.thread.take() else { return };
        self.tell(how);
        if thread.join().is_err() {
            tracing::error!(disk = self.name, "the disk's thread had panicked");
        }
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<Receiver<T>, ServerError> {
        ask(&self.name, &self.commands, &self.wake, command)
    }

    fn wait<T>(&self, answer: &Receiver<T>) -> Result<T, ServerError> {
        wait(&self.name, answer)
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        self.end(Command::Stop);
    }
}

fn ask<T>(
    disk: &str,
    commands: &Sender<Command>,
    wake: &OwnedFd,
    command: impl FnOnce(Sender<T>) -> Command,
) -> Result<Receiver<T>, ServerError> {
    let (reply, answer) = mpsc::channel();
    commands.send(command(reply)).map_err(|_| ServerError::Gone { disk: disk.to_owned() })?;
    poller::wake(wake.as_fd());
    Ok(answer)
}

/// A command that timed out is still carried out when the thread comes to it, and before any later command.
fn wait<T>(disk: &str, answer: &Receiver<T>) -> Result<T, ServerError> {
    let disk = || disk.to_owned();
    answer.recv_timeout(COMMAND_PATIENCE).map_err(|error| match error {
        RecvTimeoutError::Timeout => ServerError::Silent { disk: disk(), waited: COMMAND_PATIENCE },
        RecvTimeoutError::Disconnected => ServerError::Gone { disk: disk() },
    })
}

fn check(options: &DiskOptions) -> Result<(), ServerError> {
    let disk = || options.name.clone();
    if options.serial.len() > request::SERIAL_BYTES {
        return Err(ServerError::Serial { disk: disk(), serial: options.serial.clone() });
    }
    let size = options.queue_size;
    if options.queues == 0 || options.queues > 256 {
        return Err(ServerError::Shape { disk: disk(), what: format!("{} queues", options.queues) });
    }
    if !size.is_power_of_two() || !(16..=1024).contains(&size) {
        return Err(ServerError::Shape { disk: disk(), what: format!("queues of {size} requests") });
    }
    Ok(())
}

/// Linux shows 15 bytes of a thread's name.
fn thread_name(disk: &str) -> String {
    format!("disk-{disk}").chars().filter(|c| *c != '\0').collect()
}
