//! QEMU: the vhost-user messages that a QEMU sends to its disk, in the order of QEMU's own code.
//!
//! Messages wait in a script and are sent one at a time. Between two messages anything else may happen.
//!
//! While QEMU logs (for a migration), it sends its features and the addresses of its rings with the log's flags, and
//! waits for an answer. A device that is started gets the log after its queues and before they are enabled, and a new
//! log each time.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::guest::{AVAILABLE, Guest, Pages, QUEUE_SIZE, QUEUES, RAM_BYTES, USED, page_of};
use crate::storage::BLOCK;

/// Address at which QEMU maps guest memory.
const USER_BASE: u64 = 0x7f00_0000_0000;

pub const VERSION_1: u64 = 1 << 32;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const EVENT_INDEX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const FLUSH: u64 = 1 << 9;
/// Log all writes to guest memory.
const LOG_ALL: u64 = 1 << 26;
const LOG_BYTES: u64 = 4096;
/// Logs, replies, configuration, inflight regions.
const PROTOCOL: u64 = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 9 | 1 << 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    Owner,
    GetFeatures,
    GetProtocol,
    SetProtocol,
    SetFeatures,
    /// Sent only if there is no region yet.
    GetInflight,
    SetInflight,
    MemTable,
    LogBase,
    Size(usize),
    Base(usize),
    Addresses(usize),
    Kick(usize),
    Call(usize),
    Enable(usize),
    Stop(usize),
    WriteCache(bool),
    Reset,
    /// A message that QEMU never sends: another region, with fewer or smaller queues.
    SmallInflight {
        queues: u16,
        size: u16,
    },
    /// Sent with the region that the server returned.
    SetSmallInflight {
        queues: u16,
        size: u16,
    },
    OddSize(usize, u32),
}

/// Messages to QEMU.
#[derive(Debug)]
pub enum Received {
    Nothing,
    /// The answer to a message.
    Answer(Message),
    HungUp,
}

#[derive(Debug)]
struct Region {
    spec: Vec<u8>,
    file: OwnedFd,
}

pub struct Qemu {
    stream: Option<UnixStream>,
    pub script: VecDeque<Message>,
    awaited: Option<Message>,
    pub features: u64,
    inflight: Option<Region>,
    small: Option<Region>,
    /// Position at which each queue continues. None if its server died before it reported it.
    pub bases: Vec<Option<u16>>,
    /// Its queues are started, or will be.
    pub is_started: bool,
    /// A queue was started at this connection.
    pub has_kicked: bool,
    /// It logs the pages that its devices write.
    pub is_logging: bool,
    log: Option<File>,
    /// Pages from earlier logs.
    logged: Pages,
}

impl Qemu {
    pub fn new(features: u64) -> Self {
        Self {
            stream: None,
            script: VecDeque::new(),
            awaited: None,
            features,
            inflight: None,
            small: None,
            bases: vec![Some(0); QUEUES],
            is_started: false,
            has_kicked: false,
            is_logging: false,
            log: None,
            logged: 0,
        }
    }

    pub fn is_connected(&self) -> bool {
        self.stream.is_some()
    }

    /// It has nothing to send and waits for no answer.
    pub fn is_silent(&self) -> bool {
        self.script.is_empty() && self.awaited.is_none()
    }

    /// Waits for a queue to be stopped.
    pub fn waits_for_stop(&self) -> bool {
        matches!(self.awaited, Some(Message::Stop(_) | Message::Reset))
    }

    /// Connects; the negotiation comes next. False if nobody listens.
    pub fn connect(&mut self, socket: &Path) -> bool {
        let Ok(stream) = UnixStream::connect(socket) else { return false };
        stream.set_nonblocking(true).unwrap();
        self.stream = Some(stream);
        self.has_kicked = false;
        self.script = [Message::Owner, Message::GetFeatures, Message::GetProtocol, Message::SetProtocol].into();
        true
    }

    /// The connection is lost, whichever side closed it.
    pub fn hang_up(&mut self) {
        (self.stream, self.awaited) = (None, None);
        self.script.clear();
    }

    /// The server has died. QEMU stops the device, and then unmaps the used rings as written.
    pub fn lose_server(&mut self) {
        if self.is_logging && self.is_connected() && self.has_kicked {
            self.logged |= (0..QUEUES).fold(0, |pages, queue| pages | 1 << (page_of(queue) / BLOCK));
        }
        self.hang_up();
    }

    /// Starts all queues.
    pub fn start(&mut self) {
        self.is_started = true;
        self.script.extend([Message::GetInflight, Message::SetInflight, Message::SetFeatures, Message::MemTable]);
        for queue in 0..QUEUES {
            let messages = [Message::Size, Message::Base, Message::Addresses, Message::Kick, Message::Call];
            self.script.extend(messages.map(|message| message(queue)));
        }
        self.script.extend(self.is_logging.then_some(Message::LogBase));
        self.script.extend((0..QUEUES).map(Message::Enable));
    }

    /// Stops all queues, one after the other.
    pub fn stop(&mut self) {
        self.is_started = false;
        self.script.extend((0..QUEUES).map(Message::Stop));
    }

    /// The guest's driver starts again, so QEMU needs another region.
    pub fn forget_rings(&mut self) {
        self.inflight = None;
        self.bases = vec![Some(0); QUEUES];
    }

    /// Starts or ends a log. A device that does not run gets it when it is started.
    pub fn set_logging(&mut self, on: bool) {
        self.is_logging = on;
        if self.is_connected() && self.is_started {
            self.script.extend(on.then_some(Message::LogBase));
            self.script.push_back(Message::SetFeatures);
            self.script.extend((0..QUEUES).map(Message::Addresses));
        }
    }

    /// Pages that were logged since the last call.
    pub fn take_log(&mut self) -> Pages {
        if let Some(log) = &self.log {
            let mut bits = [0; size_of::<Pages>()];
            log.read_exact_at(&mut bits, 0).unwrap();
            log.write_all_at(&[0; size_of::<Pages>()], 0).unwrap();
            self.logged |= Pages::from_le_bytes(bits);
        }
        std::mem::take(&mut self.logged)
    }

    fn new_log(&mut self) -> &File {
        self.logged = self.take_log();
        let log: File = memfd_create("log", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap().into();
        log.set_len(LOG_BYTES).unwrap();
        fcntl_add_seals(&log, SealFlags::SHRINK).unwrap();
        self.log.insert(log)
    }

    /// Sends the next message, if it may be sent now.
    pub fn send_next(&mut self, guest: &Guest) -> Option<Message> {
        if self.awaited.is_some() || self.stream.is_none() {
            return None;
        }
        let message = self.script.pop_front()?;
        self.send_message(message, guest);
        Some(message)
    }

    fn send_message(&mut self, message: Message, guest: &Guest) {
        let words = |values: &[u32]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        let longs = |values: &[u64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        let ring = |queue: usize| &guest.rings[queue];
        let inflight = |queues: u16, size: u16| {
            [&longs(&[0, 0])[..], &queues.to_ne_bytes(), &size.to_ne_bytes(), &[0; 4]].concat()
        };
        match message {
            Message::Owner => self.send(3, false, &[], None),
            Message::GetFeatures => self.ask(message, 1, &[]),
            Message::GetProtocol => self.ask(message, 15, &[]),
            Message::SetProtocol => self.send(16, false, &longs(&[PROTOCOL]), None),
            Message::SetFeatures => {
                let features = self.features | if self.is_logging { LOG_ALL } else { 0 };
                self.send_logged(message, 2, &longs(&[features]));
            }
            Message::LogBase => {
                let log = self.new_log().try_clone().unwrap();
                self.send(6, false, &longs(&[LOG_BYTES, 0]), Some(log.as_fd()));
                self.awaited = Some(message);
            }
            Message::GetInflight if self.inflight.is_some() => {}
            Message::GetInflight => self.ask(message, 31, &inflight(QUEUES as u16, QUEUE_SIZE)),
            Message::SmallInflight { queues, size } => self.ask(message, 31, &inflight(queues, size)),
            Message::SetInflight => self.set_inflight(self.inflight.as_ref().expect("it was asked for")),
            Message::SetSmallInflight { .. } => {
                if let Some(region) = &self.small {
                    self.set_inflight(region);
                }
            }
            Message::MemTable => {
                let region = [&words(&[1, 0])[..], &longs(&[0, RAM_BYTES, USER_BASE, 0])].concat();
                self.send(5, true, &region, Some(guest.ram.as_fd()));
                self.awaited = Some(message);
            }
            Message::Size(queue) => self.send(8, false, &words(&[queue as u32, u32::from(QUEUE_SIZE)]), None),
            Message::OddSize(queue, size) => self.send(8, false, &words(&[queue as u32, size]), None),
            Message::Base(queue) => {
                // QEMU does the same when no server could tell it.
                let base = self.bases[queue].unwrap_or_else(|| guest.used_index(queue));
                self.send(10, false, &words(&[queue as u32, u32::from(base)]), None);
            }
            Message::Addresses(queue) => {
                let base = USER_BASE + page_of(queue);
                let addresses = longs(&[base, base + USED, base + AVAILABLE, page_of(queue) + USED]);
                let payload = [words(&[queue as u32, u32::from(self.is_logging)]), addresses].concat();
                self.send_logged(message, 9, &payload);
            }
            Message::Kick(queue) => {
                self.has_kicked = true;
                self.bases[queue] = None;
                self.send(12, false, &longs(&[queue as u64]), Some(ring(queue).kick.as_fd()));
            }
            Message::Call(queue) => self.send(13, false, &longs(&[queue as u64]), Some(ring(queue).call.as_fd())),
            Message::Enable(queue) => self.send(18, false, &words(&[queue as u32, 1]), None),
            Message::Stop(queue) => self.ask(message, 11, &words(&[queue as u32, 0])),
            Message::Reset => {
                self.send(34, true, &[], None);
                self.awaited = Some(message);
            }
            Message::WriteCache(on) => {
                let config = [&words(&[32, 1, 0])[..], &[u8::from(on)]].concat();
                self.send(25, true, &config, None);
                self.awaited = Some(message);
            }
        }
    }

    fn set_inflight(&self, region: &Region) {
        self.send(32, false, &region.spec, Some(region.file.as_fd()));
    }

    /// Waits for an answer while it logs: it must know from when on the log is complete.
    fn send_logged(&mut self, message: Message, request: u32, payload: &[u8]) {
        self.send(request, self.is_logging, payload, None);
        self.awaited = self.is_logging.then_some(message);
    }

    fn ask(&mut self, message: Message, request: u32, payload: &[u8]) {
        self.send(request, false, payload, None);
        self.awaited = Some(message);
    }

    fn send(&self, request: u32, need_reply: bool, payload: &[u8], file: Option<BorrowedFd<'_>>) {
        let Some(stream) = &self.stream else { return };
        let flags = 1 | u32::from(need_reply) << 3;
        let head = [request, flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = file.map_or(Vec::new(), |file| vec![file]);
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
        }
        // QEMU notices that a server has closed the connection when it receives something.
        let _ = sendmsg(stream, &[IoSlice::new(&head), IoSlice::new(payload)], &mut ancillary, SendFlags::NOSIGNAL);
    }

    /// Checks whether a message has arrived.
    pub fn receive(&mut self) -> Received {
        let Some(stream) = &self.stream else { return Received::Nothing };
        let mut head = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut vectors = [std::io::IoSliceMut::new(&mut head)];
        match recvmsg(stream, &mut vectors, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.bytes == 12 => {}
            Err(rustix::io::Errno::AGAIN) => return Received::Nothing,
            _ => return Received::HungUp,
        }
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let mut payload = vec![0; u32::from_ne_bytes(head[8..].try_into().unwrap()) as usize];
        let mut stream = stream;
        stream.read_exact(&mut payload).unwrap();
        let Some(message) = self.awaited.take() else { return Received::Nothing };
        match message {
            Message::GetFeatures => {
                let offered = u64::from_ne_bytes(payload[..8].try_into().unwrap());
                assert_eq!(self.features & !offered, 0, "the disk does not offer what it offered before");
            }
            Message::GetInflight => self.inflight = file.map(|file| Region { spec: payload, file }),
            Message::SmallInflight { .. } => self.small = file.map(|file| Region { spec: payload, file }),
            Message::Stop(queue) => {
                self.bases[queue] = Some(u32::from_ne_bytes(payload[4..8].try_into().unwrap()) as u16);
            }
            _ => {}
        }
        Received::Answer(message)
    }
}
