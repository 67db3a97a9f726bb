//! One QEMU at the socket: everything that vhost-user negotiates, and nothing of the disk behind it.
//!
//! The disk outlives connections, and a hand-over between two QEMUs has two of these at once (see `peers`); so whatever
//! dies with a QEMU (its memory map, queues, inflight region, dirty log) is here.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use super::Question;
use super::config::{self, Device, WRITEBACK_OFFSET, protocol};
use super::foreign::{EventCounter, MemoryFile};
use super::inflight::{self, Inflight, InflightError};
use super::memory::{GuestMap, MemoryError, REGIONS_MAX};
use super::poller::{Poller, Source, Watched};
use super::queue::{Agreed, Queue, QueueError, Taken};
use super::recorder::RamPart;
use super::ring::ENTRIES_MAX;
use super::wire::{Channel, Frame, InflightSpec, Message, WireError};

#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Inflight(#[from] InflightError),
    #[error("QEMU accepts features {0:#x} that were not offered")]
    Features(u64),
    #[error("QEMU writes {bytes} bytes at {offset} of the configuration; only the write cache can be set")]
    Config { offset: u32, bytes: usize },
    #[error("QEMU starts queue {queue} while another QEMU serves the guest")]
    NotItsTurn { queue: u32 },
    /// A QEMU that did not see that its server is another one. Any base would be wrong; without an answer it goes by what
    /// was answered, and the inflight region has the rest.
    #[error("QEMU stops queue {queue}, which it has not started here")]
    NotStarted { queue: u32 },
    /// A stopped queue finishes the requests of the server before this one, and a migration would miss what they write.
    #[error("QEMU stops queue {queue}, whose requests it wants logged, before it has given the log")]
    LogMissing { queue: u16 },
    #[error("QEMU gives another inflight region while queues that use the old one are served")]
    InflightOfRunning,
    #[error("QEMU gives or wants an inflight region for {queues} queues of {queue_size}, which is more than is served")]
    InflightSize { queues: u16, queue_size: u16 },
    #[error("a kick descriptor cannot be watched")]
    Kick(#[source] std::io::Error),
}

fn new_queues(device: Device, poller: &Poller) -> Vec<Queue> {
    (0..device.queues).map(|index| Queue::new(index, &poller.signaller)).collect()
}

/// Answer to a message.
enum Answer {
    /// An acknowledgement, if one was asked for.
    Done,
    Bytes(Vec<u8>),
    File(Vec<u8>, OwnedFd),
    /// Once the queues in question are drained, or the keeper has answered.
    Later(Pending),
}

impl Answer {
    fn u64(value: u64) -> Self {
        Self::Bytes(value.to_ne_bytes().to_vec())
    }
}

/// An answer that waits for requests in flight, or for the keeper.
#[derive(Clone, Copy)]
enum Pending {
    VringBase(u16),
    Reset,
    Memory,
    Inflight(InflightSpec, usize),
}

/// A stop of all queues, one after the other: until one is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    connection: u32,
    starts: u64,
}

struct Waiting {
    pending: Pending,
    request: u32,
    need_reply: bool,
}

pub struct Connection {
    pub id: u32,
    /// The process that connected.
    pub pid: u32,
    poller: Rc<Poller>,
    channel: Watched<Channel>,
    backend_channel: Option<Channel>,
    device: Device,
    pub memory: GuestMap,
    pub queues: Vec<Queue>,
    pub inflight: Option<Inflight>,
    disk: String,
    /// The inflight region of a QEMU that says nothing to this server, whose guest this one takes over. Until that goes on.
    pub left: Option<MemoryFile>,
    features: u64,
    protocol: u64,
    /// The guest has switched its write cache off. All connections of the guest share it.
    pub write_through: Arc<AtomicBool>,
    /// Set before each message: whether queues may be started now.
    pub may_start: bool,
    /// The frontend began to stop its queues, the first one before all others; taken by whoever notes it.
    pub stop_asked: Option<SystemTime>,
    waiting: Option<Waiting>,
    /// Whether the keeper is asked.
    pub asks: bool,
    /// What it is asked; taken by whoever asks it.
    pub question: Option<Question>,
    /// Whether it has answered.
    is_answered: bool,
    /// How often queues were started.
    starts: u64,
    /// The frontend's last word, or its coming.
    heard: Instant,
    /// The frontend's greeting is complete: it has set the call descriptor of its last queue, the last message of QEMU's
    /// `vhost_dev_init` (`hw/virtio/vhost.c`), or has started a queue.
    pub has_greeted: bool,
}

impl Connection {
    pub fn new(
        id: u32,
        pid: u32,
        disk: &str,
        stream: UnixStream,
        poller: &Rc<Poller>,
        device: Device,
        ram: Arc<[RamPart]>,
    ) -> std::io::Result<Self> {
        let channel = Watched::new(poller, Channel::new(stream)?, Source::Connection { id })?;
        let mut memory = GuestMap::default();
        memory.track(ram);
        Ok(Self {
            id,
            pid,
            poller: Rc::clone(poller),
            channel,
            backend_channel: None,
            device,
            memory,
            queues: new_queues(device, poller),
            inflight: None,
            disk: disk.to_owned(),
            left: None,
            features: 0,
            protocol: 0,
            write_through: Arc::default(),
            may_start: true,
            stop_asked: None,
            waiting: None,
            asks: false,
            question: None,
            is_answered: false,
            starts: 0,
            heard: Instant::now(),
            has_greeted: false,
        })
    }

    /// Whether any queue was started and has not been stopped and drained since.
    pub fn is_started(&self) -> bool {
        self.queues.iter().any(Queue::is_started)
    }

    /// Whether the frontend has sent something within this time. Once its queues are served it has nothing more to send.
    pub fn is_talking(&self, silence: Duration) -> bool {
        self.heard.elapsed() < silence
    }

    /// The stop that waits for requests of this queue, if it is being stopped.
    pub fn stop_of(&self, queue: u16) -> Option<Stop> {
        let is_stopping = self.queues.get(usize::from(queue)).is_some_and(Queue::is_stopping);
        is_stopping.then_some(Stop { connection: self.id, starts: self.starts })
    }

    /// The keeper has answered: these files of the memory are tracked.
    pub fn answered(&mut self, tracked: Arc<[RamPart]>) {
        self.memory.track(tracked);
        self.is_answered = true;
    }

    /// Has the keeper asked, and its answer awaited.
    fn ask(&mut self, question: Question, pending: Pending) -> Answer {
        (self.question, self.is_answered) = (Some(question), false);
        Answer::Later(pending)
    }

    /// Firmware is simpler than a kernel's driver.
    fn has_simple_driver(&self) -> bool {
        self.features & (config::INDIRECT | config::EVENT_INDEX) == 0
    }

    /// Whether an answer waits for requests in flight, or for the keeper. No message is read meanwhile.
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    pub fn agreed(&self) -> Agreed {
        let has = |feature| self.features & feature != 0;
        Agreed {
            event_index: has(config::EVENT_INDEX),
            indirect: has(config::INDIRECT),
            enabled_at_start: !has(config::PROTOCOL_FEATURES),
            chain_limit: usize::from(self.device.queue_size),
        }
    }

    /// Whether a write must be durable before it is answered (virtio 1.2, 5.2.6.2).
    pub fn writes_through(&self) -> bool {
        if self.features & config::CONFIG_WCE != 0 {
            self.write_through.load(Relaxed)
        } else {
            self.features & config::FLUSH == 0
        }
    }

    /// Handles the next message, if there is one. An error ends the connection.
    pub fn handle_next(&mut self) -> Result<bool, ConnectionError> {
        if self.waiting.is_some() {
            return Ok(false);
        }
        let Some(frame) = self.channel.get_mut().receive()? else { return Ok(false) };
        self.heard = Instant::now();
        let (request, need_reply) = (frame.request, frame.need_reply);
        match self.answer_to(frame) {
            Ok(Answer::Done) => self.acknowledge(request, need_reply, 0)?,
            Ok(Answer::Bytes(bytes)) => self.channel.get().reply(request, &bytes, None)?,
            Ok(Answer::File(bytes, file)) => self.channel.get().reply(request, &bytes, Some(file.as_fd()))?,
            Ok(Answer::Later(pending)) => {
                self.waiting = Some(Waiting { pending, request, need_reply });
                self.channel.listen(false).map_err(WireError::Io)?;
            }
            Err(error) => {
                // A frontend that asked for an answer deserves the refusal before the line goes dead.
                let _ = self.acknowledge(request, need_reply, 1);
                return Err(error);
            }
        }
        Ok(true)
    }

    fn answer_to(&mut self, frame: Frame) -> Result<Answer, ConnectionError> {
        match Message::parse(frame)? {
            Message::GetFeatures => Ok(Answer::u64(self.device.features)),
            Message::SetFeatures(features) => self.set_features(features),
            Message::GetProtocolFeatures => Ok(Answer::u64(self.device.protocol)),
            Message::SetProtocolFeatures(features) => self.set_protocol_features(features),
            Message::GetQueueNum => Ok(Answer::u64(u64::from(self.device.queues))),
            Message::GetMaxMemSlots => Ok(Answer::u64(REGIONS_MAX as u64)),
            Message::SetOwner | Message::ResetOwner | Message::SetLogFd => Ok(Answer::Done),
            Message::SetBackendChannel(fd) => {
                self.backend_channel = Some(Channel::new(fd).map_err(WireError::Io)?);
                Ok(Answer::Done)
            }
            Message::GetConfig { offset, bytes, flags } => Ok(self.get_config(offset, bytes, flags)),
            Message::SetConfig { offset, data } => self.set_config(offset, &data),
            // The first driver of a connection, which has told its memory, is no news.
            Message::GetInflight { spec, reply_bytes } if self.asks && self.starts > 0 => {
                let question = Question::Driver { is_simple: self.has_simple_driver() };
                Ok(self.ask(question, Pending::Inflight(spec, reply_bytes)))
            }
            Message::GetInflight { spec, reply_bytes } => {
                self.get_inflight(spec, reply_bytes).map(|(reply, file)| Answer::File(reply, file))
            }
            Message::SetInflight { spec, file } => {
                self.check_inflight(spec)?;
                if self.is_started() {
                    return Err(ConnectionError::InflightOfRunning);
                }
                let region = Inflight::open(spec, file)?;
                // A server before this one may have been told, or this one while there was another region.
                let is_through = self.write_through.load(Relaxed) || region.is_write_through();
                self.write_through.store(is_through, Relaxed);
                region.set_write_through(is_through);
                self.inflight = Some(region);
                Ok(Answer::Done)
            }
            Message::ResetDevice => {
                (0..self.device.queues).try_for_each(|queue| self.stop_queue(queue))?;
                Ok(Answer::Later(Pending::Reset))
            }
            memory @ (Message::SetMemTable(_)
            | Message::AddMemRegion(..)
            | Message::RemoveMemRegion(_)
            | Message::SetLogBase { .. }) => self.memory_message(memory),
            queue => self.queue_message(queue),
        }
    }

    fn memory_message(&mut self, message: Message) -> Result<Answer, ConnectionError> {
        match message {
            Message::SetMemTable(regions) => {
                self.memory.clear();
                for (spec, file) in regions {
                    self.memory.add(spec, file)?;
                }
            }
            Message::AddMemRegion(spec, file) => self.memory.add(spec, file)?,
            Message::RemoveMemRegion(spec) => self.memory.remove(spec)?,
            Message::SetLogBase { bytes, offset, file } => {
                self.memory.set_log(file, offset, bytes)?;
                // An answer is wanted in any case; QEMU ignores what it says, others expect their words back.
                return Ok(Answer::Bytes([bytes.to_ne_bytes(), offset.to_ne_bytes()].concat()));
            }
            _ => unreachable!("only messages about memory come here"),
        }
        for queue in &mut self.queues {
            // A queue whose rings are gone is broken, which is the guest's affair; the frontend may yet re-add them.
            let _ = queue.translate_again(&self.memory);
        }
        match self.asks.then(|| self.memory.untracked(self.pid)).flatten() {
            Some(told) => Ok(self.ask(Question::Memory(told), Pending::Memory)),
            None => Ok(Answer::Done),
        }
    }

    fn queue_message(&mut self, message: Message) -> Result<Answer, ConnectionError> {
        match message {
            Message::SetVringNum { queue, size } => self.queue(queue)?.set_size(size)?,
            Message::SetVringBase { queue, index } => self.queue(queue)?.set_base(index)?,
            Message::SetVringAddr { queue, addresses } => {
                self.queue(queue)?;
                self.queues[queue as usize].set_addresses(addresses, &self.memory)?;
            }
            Message::SetVringKick { queue, fd } => self.start_queue(queue, fd)?,
            Message::SetVringCall { queue, fd } => {
                self.queue(queue)?.set_call(fd);
                self.has_greeted |= queue as usize + 1 == self.queues.len();
            }
            Message::SetVringErr { queue, fd } => self.queue(queue)?.set_error(fd),
            Message::SetVringEnable { queue, on } => self.queue(queue)?.set_enabled(on),
            Message::GetVringBase { queue } => {
                if !self.queue(queue)?.is_started() {
                    return Err(ConnectionError::NotStarted { queue });
                }
                self.stop_queue(queue as u16)?;
                if queue == 0 {
                    self.stop_asked = Some(SystemTime::now());
                }
                return Ok(Answer::Later(Pending::VringBase(queue as u16)));
            }
            _ => unreachable!("only messages about queues come here"),
        }
        Ok(Answer::Done)
    }

    fn queue(&mut self, queue: u32) -> Result<&mut Queue, QueueError> {
        self.queues.get_mut(queue as usize).ok_or(QueueError::Missing { queue })
    }

    fn start_queue(&mut self, queue: u32, kick: Option<EventCounter>) -> Result<(), ConnectionError> {
        if !self.may_start {
            return Err(ConnectionError::NotItsTurn { queue });
        }
        let agreed = self.agreed();
        let source = Source::Kick { connection: self.id, queue: queue as u16 };
        let kick = kick.map(|kick| Watched::new(&self.poller, kick, source)).transpose();
        let kick = kick.map_err(ConnectionError::Kick)?;
        let found = self.queues.get_mut(queue as usize).ok_or(QueueError::Missing { queue })?;
        self.starts += 1;
        self.has_greeted = true;
        self.left = None;
        Ok(found.start(kick, &self.memory, self.inflight.as_mut(), agreed)?)
    }

    fn stop_queue(&mut self, queue: u16) -> Result<(), ConnectionError> {
        let found = &mut self.queues[usize::from(queue)];
        if self.memory.lacks_log() && found.can_resume() {
            return Err(ConnectionError::LogMissing { queue });
        }
        found.stop();
        Ok(())
    }

    fn set_features(&mut self, features: u64) -> Result<Answer, ConnectionError> {
        let unknown = features & !self.device.features;
        if unknown != 0 {
            return Err(ConnectionError::Features(unknown));
        }
        self.features = features;
        self.memory.set_log_all(features & config::LOG_ALL != 0);
        Ok(Answer::Done)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<Answer, ConnectionError> {
        let unknown = features & !self.device.protocol;
        if unknown != 0 {
            return Err(ConnectionError::Features(unknown));
        }
        self.protocol = features;
        Ok(Answer::Done)
    }

    /// Exactly as many bytes as asked for: QEMU asks for a prefix, whose length depends on its version.
    fn get_config(&self, offset: u32, bytes: u32, flags: u32) -> Answer {
        let mut space = [0; super::wire::CONFIG_BYTES_MAX as usize];
        space[..self.device.space.len()].copy_from_slice(&self.device.space);
        space[WRITEBACK_OFFSET] = u8::from(!self.write_through.load(Relaxed));
        let mut reply = Vec::with_capacity(12 + bytes as usize);
        for field in [offset, bytes, flags] {
            reply.extend_from_slice(&field.to_ne_bytes());
        }
        reply.extend_from_slice(&space[offset as usize..(offset + bytes) as usize]);
        Answer::Bytes(reply)
    }

    fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<Answer, ConnectionError> {
        match (offset as usize, data) {
            (WRITEBACK_OFFSET, [writeback]) => self.write_through.store(*writeback == 0, Relaxed),
            _ => return Err(ConnectionError::Config { offset, bytes: data.len() }),
        }
        if let Some(region) = &self.inflight {
            region.set_write_through(self.write_through.load(Relaxed));
        }
        Ok(Answer::Done)
    }

    /// A region is no larger than what is served: its size is what a hostile frontend can make us look through.
    fn check_inflight(&self, spec: InflightSpec) -> Result<(), ConnectionError> {
        let InflightSpec { queues, queue_size, .. } = spec;
        if queues > self.device.queues || queue_size > ENTRIES_MAX {
            return Err(ConnectionError::InflightSize { queues, queue_size });
        }
        Ok(())
    }

    fn get_inflight(&self, asked: InflightSpec, reply_bytes: usize) -> Result<(Vec<u8>, OwnedFd), ConnectionError> {
        let queues = asked.queues.min(self.device.queues);
        self.check_inflight(InflightSpec { queues, ..asked })?;
        let (spec, file) = match &self.left {
            Some(left) => {
                let copy = left.as_fd().try_clone_to_owned().map_err(InflightError::Memory)?;
                (inflight::spec_of(&copy, queues, asked.queue_size)?, copy)
            }
            None => inflight::create(&self.disk, queues, ENTRIES_MAX)?,
        };
        if self.write_through.load(Relaxed) {
            inflight::note_write_through(&file)?;
        }
        let mut reply = Vec::with_capacity(reply_bytes);
        reply.extend_from_slice(&spec.bytes.to_ne_bytes());
        reply.extend_from_slice(&spec.offset.to_ne_bytes());
        reply.extend_from_slice(&spec.queues.to_ne_bytes());
        reply.extend_from_slice(&asked.queue_size.to_ne_bytes());
        reply.resize(reply_bytes, 0);
        Ok((reply, file))
    }

    /// Sends the answer that waited, if its queues are drained now.
    pub fn answer_waiting(&mut self) -> Result<(), ConnectionError> {
        let Some(Waiting { pending, request, need_reply }) = self.waiting else { return Ok(()) };
        match pending {
            Pending::VringBase(queue) => {
                let found = &mut self.queues[usize::from(queue)];
                if !found.is_drained() {
                    return Ok(());
                }
                found.wake_guest(&self.memory);
                let base = found.retire();
                let reply = [u32::from(queue).to_ne_bytes(), u32::from(base).to_ne_bytes()].concat();
                self.channel.get().reply(request, &reply, None)?;
            }
            Pending::Memory | Pending::Inflight(..) if !self.is_answered => return Ok(()),
            Pending::Memory => self.acknowledge(request, need_reply, 0)?,
            Pending::Inflight(spec, reply_bytes) => {
                let (reply, file) = self.get_inflight(spec, reply_bytes)?;
                self.channel.get().reply(request, &reply, Some(file.as_fd()))?;
            }
            Pending::Reset => {
                if !self.queues.iter().all(Queue::is_drained) {
                    return Ok(());
                }
                self.reset();
                self.acknowledge(request, need_reply, 0)?;
            }
        }
        self.waiting = None;
        Ok(self.channel.listen(true).map_err(WireError::Io)?)
    }

    fn reset(&mut self) {
        self.queues = new_queues(self.device, &self.poller);
        self.inflight = None;
        self.write_through.store(false, Relaxed);
    }

    fn acknowledge(&self, request: u32, need_reply: bool, failed: u64) -> Result<(), WireError> {
        // Asked for only by one that agreed on answers, be it on an earlier connection: a QEMU that loses its server while
        // its guest stands still (7.2 at least) goes on with the next one without agreeing on anything again.
        if need_reply {
            self.channel.get().reply(request, &failed.to_ne_bytes(), None)?;
        }
        Ok(())
    }

    /// The image has another size: tells the guest, where QEMU lets us.
    pub fn resized(&mut self, device: Device) -> Result<(), WireError> {
        self.device = device;
        match &self.backend_channel {
            Some(channel) if self.protocol & protocol::CONFIG != 0 => channel.announce_config_change(),
            _ => {
                tracing::warn!("this QEMU cannot be told of a new disk size; the guest sees it after a reboot");
                Ok(())
            }
        }
    }

    /// The next request of a queue.
    pub fn take(&mut self, queue: u16) -> Option<Taken> {
        self.queues[usize::from(queue)].take(&self.memory, self.inflight.as_mut())
    }

    /// Answers a request.
    pub fn answer(&mut self, queue: u16, head: u16, bytes: u32) {
        self.queues[usize::from(queue)].answer(&self.memory, self.inflight.as_ref(), head, bytes);
    }

    /// Looks without waiting for a kick, up to the first queue that has something: the next round takes it.
    pub fn has_requests(&mut self) -> bool {
        let memory = &self.memory;
        self.queues.iter_mut().any(|queue| queue.look(memory))
    }

    pub fn wake_guest(&mut self) {
        for queue in &mut self.queues {
            queue.wake_guest(&self.memory);
        }
    }

    pub fn wake_overslept(&mut self) {
        for queue in &mut self.queues {
            queue.wake_overslept(&self.memory);
        }
    }
}
