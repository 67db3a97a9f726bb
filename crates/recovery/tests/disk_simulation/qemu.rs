//! QEMU: what one says to its disk over vhost-user, word by word, in the order of QEMU's own code.
//!
//! Words wait in a script and are said one at a time; between two of them anything else may happen.

use std::collections::VecDeque;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::guest::{AVAILABLE, Guest, QUEUE_SIZE, QUEUES, RAM_BYTES, USED, page_of};

/// Where QEMU has guest memory mapped.
const USER_BASE: u64 = 0x7f00_0000_0000;

pub const VERSION_1: u64 = 1 << 32;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const EVENT_INDEX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const FLUSH: u64 = 1 << 9;
/// Replies, configuration, inflight regions.
const PROTOCOL: u64 = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 9 | 1 << 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    Owner,
    GetFeatures,
    GetProtocol,
    SetProtocol,
    SetFeatures,
    /// Only if there is no region yet.
    GetInflight,
    SetInflight,
    MemTable,
    Size(usize),
    Base(usize),
    Addresses(usize),
    Kick(usize),
    Call(usize),
    Enable(usize),
    Stop(usize),
    WriteCache(bool),
    Reset,
    /// What a QEMU never says: another region, of fewer queues, or of smaller ones.
    SmallInflight {
        queues: u16,
        size: u16,
    },
    /// The region that was got for that.
    SetSmallInflight {
        queues: u16,
        size: u16,
    },
    OddSize(usize, u32),
}

/// What comes back.
#[derive(Debug)]
pub enum Heard {
    Nothing,
    /// A word was answered.
    Answer(Word),
    HungUp,
}

#[derive(Debug)]
struct Region {
    spec: Vec<u8>,
    file: OwnedFd,
}

pub struct Qemu {
    stream: Option<UnixStream>,
    pub script: VecDeque<Word>,
    awaited: Option<Word>,
    pub features: u64,
    inflight: Option<Region>,
    small: Option<Region>,
    /// Where each queue goes on. None: its server died before it said so.
    pub bases: Vec<Option<u16>>,
    /// Its queues are started, or about to be.
    pub is_started: bool,
    /// A queue was started at this connection.
    pub has_kicked: bool,
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
        }
    }

    pub fn is_connected(&self) -> bool {
        self.stream.is_some()
    }

    /// It has an inflight region, which it gives to each server.
    pub fn has_region(&self) -> bool {
        self.inflight.is_some()
    }

    /// Nothing more is to be said or heard.
    pub fn is_silent(&self) -> bool {
        self.script.is_empty() && self.awaited.is_none()
    }

    /// Waits for a queue to be stopped.
    pub fn waits_for_stop(&self) -> bool {
        matches!(self.awaited, Some(Word::Stop(_) | Word::Reset))
    }

    /// Connects, and is about to say who it is. False: nobody listens.
    pub fn connect(&mut self, socket: &Path) -> bool {
        let Ok(stream) = UnixStream::connect(socket) else { return false };
        stream.set_nonblocking(true).unwrap();
        self.stream = Some(stream);
        self.has_kicked = false;
        self.script = [Word::Owner, Word::GetFeatures, Word::GetProtocol, Word::SetProtocol].into();
        true
    }

    /// The connection is lost, from whichever side.
    pub fn hang_up(&mut self) {
        (self.stream, self.awaited) = (None, None);
        self.script.clear();
    }

    /// Starts all queues.
    pub fn start(&mut self) {
        self.is_started = true;
        self.script.extend([Word::GetInflight, Word::SetInflight, Word::SetFeatures, Word::MemTable]);
        for queue in 0..QUEUES {
            let words = [Word::Size, Word::Base, Word::Addresses, Word::Kick, Word::Call];
            self.script.extend(words.map(|word| word(queue)));
        }
        self.script.extend((0..QUEUES).map(Word::Enable));
    }

    /// Stops all queues, one after the other.
    pub fn stop(&mut self) {
        self.is_started = false;
        self.script.extend((0..QUEUES).map(Word::Stop));
    }

    /// The guest's driver starts anew, so that QEMU wants another region.
    pub fn forget_rings(&mut self) {
        self.inflight = None;
        self.bases = vec![Some(0); QUEUES];
    }

    /// Says the next word, if it may.
    pub fn speak(&mut self, guest: &Guest) -> Option<Word> {
        if self.awaited.is_some() || self.stream.is_none() {
            return None;
        }
        let word = self.script.pop_front()?;
        self.say(word, guest);
        Some(word)
    }

    fn say(&mut self, word: Word, guest: &Guest) {
        let words = |values: &[u32]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        let longs = |values: &[u64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        let ring = |queue: usize| &guest.rings[queue];
        let inflight = |queues: u16, size: u16| {
            [&longs(&[0, 0])[..], &queues.to_ne_bytes(), &size.to_ne_bytes(), &[0; 4]].concat()
        };
        match word {
            Word::Owner => self.send(3, false, &[], None),
            Word::GetFeatures => self.ask(word, 1, &[]),
            Word::GetProtocol => self.ask(word, 15, &[]),
            Word::SetProtocol => self.send(16, false, &longs(&[PROTOCOL]), None),
            Word::SetFeatures => self.send(2, false, &longs(&[self.features]), None),
            Word::GetInflight if self.inflight.is_some() => {}
            Word::GetInflight => self.ask(word, 31, &inflight(QUEUES as u16, QUEUE_SIZE)),
            Word::SmallInflight { queues, size } => self.ask(word, 31, &inflight(queues, size)),
            Word::SetInflight => self.set_inflight(self.inflight.as_ref().expect("it was asked for")),
            Word::SetSmallInflight { .. } => {
                if let Some(region) = &self.small {
                    self.set_inflight(region);
                }
            }
            Word::MemTable => {
                let region = [&words(&[1, 0])[..], &longs(&[0, RAM_BYTES, USER_BASE, 0])].concat();
                self.send(5, true, &region, Some(guest.ram.as_fd()));
                self.awaited = Some(word);
            }
            Word::Size(queue) => self.send(8, false, &words(&[queue as u32, u32::from(QUEUE_SIZE)]), None),
            Word::OddSize(queue, size) => self.send(8, false, &words(&[queue as u32, size]), None),
            Word::Base(queue) => {
                // As QEMU does when no server could tell it.
                let base = self.bases[queue].unwrap_or_else(|| guest.used_index(queue));
                self.send(10, false, &words(&[queue as u32, u32::from(base)]), None);
            }
            Word::Addresses(queue) => {
                let base = USER_BASE + page_of(queue);
                let addresses = longs(&[base, base + USED, base + AVAILABLE, 0]);
                self.send(9, false, &[words(&[queue as u32, 0]), addresses].concat(), None);
            }
            Word::Kick(queue) => {
                self.has_kicked = true;
                self.bases[queue] = None;
                self.send(12, false, &longs(&[queue as u64]), Some(ring(queue).kick.as_fd()));
            }
            Word::Call(queue) => self.send(13, false, &longs(&[queue as u64]), Some(ring(queue).call.as_fd())),
            Word::Enable(queue) => self.send(18, false, &words(&[queue as u32, 1]), None),
            Word::Stop(queue) => self.ask(word, 11, &words(&[queue as u32, 0])),
            Word::Reset => {
                self.send(34, true, &[], None);
                self.awaited = Some(word);
            }
            Word::WriteCache(on) => {
                let config = [&words(&[32, 1, 0])[..], &[u8::from(on)]].concat();
                self.send(25, false, &config, None);
            }
        }
    }

    fn set_inflight(&self, region: &Region) {
        self.send(32, false, &region.spec, Some(region.file.as_fd()));
    }

    fn ask(&mut self, word: Word, request: u32, payload: &[u8]) {
        self.send(request, false, payload, None);
        self.awaited = Some(word);
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
        // Whoever has hung up is heard of at the next look.
        let _ = sendmsg(stream, &[IoSlice::new(&head), IoSlice::new(payload)], &mut ancillary, SendFlags::NOSIGNAL);
    }

    /// Looks whether something has come.
    pub fn hear(&mut self) -> Heard {
        let Some(stream) = &self.stream else { return Heard::Nothing };
        let mut head = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut vectors = [std::io::IoSliceMut::new(&mut head)];
        match recvmsg(stream, &mut vectors, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.bytes == 12 => {}
            Err(rustix::io::Errno::AGAIN) => return Heard::Nothing,
            _ => return Heard::HungUp,
        }
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let mut payload = vec![0; u32::from_ne_bytes(head[8..].try_into().unwrap()) as usize];
        let mut stream = stream;
        stream.read_exact(&mut payload).unwrap();
        let Some(word) = self.awaited.take() else { return Heard::Nothing };
        match word {
            Word::GetFeatures => {
                let offered = u64::from_ne_bytes(payload[..8].try_into().unwrap());
                assert_eq!(self.features & !offered, 0, "the disk does not offer what it offered before");
            }
            Word::GetInflight => self.inflight = file.map(|file| Region { spec: payload, file }),
            Word::SmallInflight { .. } => self.small = file.map(|file| Region { spec: payload, file }),
            Word::Stop(queue) => {
                self.bases[queue] = Some(u32::from_ne_bytes(payload[4..8].try_into().unwrap()) as u16);
            }
            _ => {}
        }
        Heard::Answer(word)
    }
}
