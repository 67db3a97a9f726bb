//! vhost-user on the wire: frames with file descriptors in, typed messages out.
//!
//! The protocol crate's request handler is not used: it blocks in the middle of a message, must answer before it
//! returns (a ring that is stopped has to finish its requests first, without blocking the other rings), and hides the
//! channel on which a resize is announced. Here a message is a plain value that was checked as a whole, so parsing is
//! testable without sockets and the reply may come later.

use std::io;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::foreign::{EventCounter, ForeignFd, MemoryFile};

const HEADER_BYTES: usize = 12;
/// The longest message that exists: configuration space, or a table of 64 memory regions, with room to spare.
const PAYLOAD_BYTES_MAX: usize = 4096;
/// Regions in one SET_MEM_TABLE (QEMU sends 8 at most; the limit of SCM_RIGHTS is 253).
const FDS_MAX: usize = 32;
/// Frames carry the protocol version in their low bits.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;
/// Set instead of a descriptor in SET_VRING_{KICK,CALL,ERR}.
const NO_FD: u64 = 1 << 8;
/// Configuration space of a virtio device, as far as the protocol carries it.
pub const CONFIG_BYTES_MAX: u32 = 256;
/// The backend's own request: the configuration space has changed.
const CONFIG_CHANGE: u32 = 2;

#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("QEMU hung up")]
    Closed,
    #[error("vhost-user socket")]
    Io(#[from] io::Error),
    #[error("vhost-user message {request} is malformed: {what}")]
    Malformed { request: u32, what: &'static str },
    #[error("vhost-user message {0} is not supported")]
    Unsupported(u32),
}

/// A message as it came, whole.
#[derive(Debug)]
pub struct Frame {
    pub request: u32,
    pub need_reply: bool,
    pub payload: Vec<u8>,
    pub fds: Vec<ForeignFd>,
}

/// A guest memory region as the frontend describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    pub guest: u64,
    pub bytes: u64,
    /// Where the frontend has it mapped; ring addresses are given in this space.
    pub user: u64,
    pub file_offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    pub descriptors: u64,
    pub used: u64,
    pub available: u64,
    /// Where writes to the used ring are logged, if they are.
    pub log: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightSpec {
    pub bytes: u64,
    pub offset: u64,
    pub queues: u16,
    pub queue_size: u16,
}

/// Everything a frontend may ask of a block device.
#[derive(Debug)]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(RegionSpec, MemoryFile)>),
    SetLogBase {
        bytes: u64,
        offset: u64,
        file: MemoryFile,
    },
    SetLogFd,
    SetVringNum {
        queue: u32,
        size: u32,
    },
    SetVringAddr {
        queue: u32,
        addresses: RingAddresses,
    },
    SetVringBase {
        queue: u32,
        index: u32,
    },
    GetVringBase {
        queue: u32,
    },
    SetVringKick {
        queue: u32,
        fd: Option<EventCounter>,
    },
    SetVringCall {
        queue: u32,
        fd: Option<EventCounter>,
    },
    SetVringErr {
        queue: u32,
        fd: Option<EventCounter>,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        queue: u32,
        on: bool,
    },
    SetBackendChannel(UnixStream),
    GetConfig {
        offset: u32,
        bytes: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        data: Vec<u8>,
    },
    /// `reply_bytes`: QEMU counts the padding of its struct (24), the specification does not (20).
    GetInflight {
        spec: InflightSpec,
        reply_bytes: usize,
    },
    SetInflight {
        spec: InflightSpec,
        file: MemoryFile,
    },
    ResetDevice,
    GetMaxMemSlots,
    AddMemRegion(RegionSpec, MemoryFile),
    RemoveMemRegion(RegionSpec),
}

impl Message {
    /// Checks a frame as a whole: length, values, number of descriptors.
    pub fn parse(frame: Frame) -> Result<Self, WireError> {
        let request = frame.request;
        let mut body = Body { request, rest: &frame.payload };
        let mut fds = Fds { request, fds: frame.fds };
        let message = match request {
            1 => Self::GetFeatures,
            2 => Self::SetFeatures(body.u64()?),
            3 => Self::SetOwner,
            4 => Self::ResetOwner,
            5 => Self::SetMemTable(mem_table(&mut body, &mut fds)?),
            6 => Self::SetLogBase { bytes: body.u64()?, offset: body.u64()?, file: fds.one(ForeignFd::sealed_memory)? },
            7 => {
                fds.one(ForeignFd::event_counter)?;
                Self::SetLogFd
            }
            8 => Self::SetVringNum { queue: body.u32()?, size: body.u32()? },
            9 => Self::SetVringAddr { queue: body.u32()?, addresses: ring_addresses(&mut body)? },
            10 => Self::SetVringBase { queue: body.u32()?, index: body.u32()? },
            11 => {
                let queue = body.u32()?;
                body.u32()?;
                Self::GetVringBase { queue }
            }
            12..=14 => ring_fd(request, body.u64()?, &mut fds)?,
            15 => Self::GetProtocolFeatures,
            16 => Self::SetProtocolFeatures(body.u64()?),
            17 => Self::GetQueueNum,
            18 => Self::SetVringEnable { queue: body.u32()?, on: body.u32()? != 0 },
            21 => Self::SetBackendChannel(fds.one(ForeignFd::unix_socket)?),
            24 | 25 => config(request, &mut body)?,
            31 => Self::GetInflight { reply_bytes: body.rest.len(), spec: inflight_spec(&mut body)? },
            32 => Self::SetInflight { spec: inflight_spec(&mut body)?, file: fds.one(ForeignFd::sealed_memory)? },
            34 => Self::ResetDevice,
            36 => Self::GetMaxMemSlots,
            37 => Self::AddMemRegion(single_region(&mut body)?, fds.one(ForeignFd::guest_memory)?),
            38 => {
                // Some frontends send the descriptor along; it is closed unused.
                fds.fds.clear();
                Self::RemoveMemRegion(single_region(&mut body)?)
            }
            other => return Err(WireError::Unsupported(other)),
        };
        body.end()?;
        fds.end()?;
        Ok(message)
    }
}

fn mem_table(body: &mut Body<'_>, fds: &mut Fds) -> Result<Vec<(RegionSpec, MemoryFile)>, WireError> {
    let count = body.u32()? as usize;
    body.u32()?;
    if count != fds.fds.len() {
        return Err(body.malformed("one descriptor a region is needed"));
    }
    fds.fds.drain(..).map(|fd| Ok((region(body)?, fd.guest_memory().map_err(|what| body.malformed(what))?))).collect()
}

fn single_region(body: &mut Body<'_>) -> Result<RegionSpec, WireError> {
    body.u64()?;
    region(body)
}

fn region(body: &mut Body<'_>) -> Result<RegionSpec, WireError> {
    Ok(RegionSpec { guest: body.u64()?, bytes: body.u64()?, user: body.u64()?, file_offset: body.u64()? })
}

fn ring_addresses(body: &mut Body<'_>) -> Result<RingAddresses, WireError> {
    let logged = body.u32()? & 1 != 0;
    let (descriptors, used, available, log) = (body.u64()?, body.u64()?, body.u64()?, body.u64()?);
    Ok(RingAddresses { descriptors, used, available, log: logged.then_some(log) })
}

fn ring_fd(request: u32, value: u64, fds: &mut Fds) -> Result<Message, WireError> {
    let queue = (value & 0xff) as u32;
    let fd = if value & NO_FD == 0 { Some(fds.one(ForeignFd::event_counter)?) } else { None };
    Ok(match request {
        12 => Message::SetVringKick { queue, fd },
        13 => Message::SetVringCall { queue, fd },
        _ => Message::SetVringErr { queue, fd },
    })
}

fn config(request: u32, body: &mut Body<'_>) -> Result<Message, WireError> {
    let (offset, bytes, flags) = (body.u32()?, body.u32()?, body.u32()?);
    let data = std::mem::take(&mut body.rest);
    if data.len() != bytes as usize {
        return Err(body.malformed("length of the configuration does not match"));
    }
    if offset.checked_add(bytes).is_none_or(|end| end > CONFIG_BYTES_MAX) {
        return Err(body.malformed("beyond the configuration space"));
    }
    Ok(match request {
        24 => Message::GetConfig { offset, bytes, flags },
        _ => Message::SetConfig { offset, data: data.to_vec() },
    })
}

fn inflight_spec(body: &mut Body<'_>) -> Result<InflightSpec, WireError> {
    let spec = InflightSpec { bytes: body.u64()?, offset: body.u64()?, queues: body.u16()?, queue_size: body.u16()? };
    if body.rest.len() <= 4 {
        body.rest = &[];
    }
    Ok(spec)
}

/// Reads the fields of a payload in order (native byte order: both ends are on this host).
struct Body<'a> {
    request: u32,
    rest: &'a [u8],
}

impl Body<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (field, rest) = self.rest.split_first_chunk::<N>().ok_or(self.malformed("too short"))?;
        self.rest = rest;
        Ok(*field)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_ne_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_ne_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_ne_bytes(self.take()?))
    }

    fn end(&self) -> Result<(), WireError> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.malformed("too long")) }
    }

    fn malformed(&self, what: &'static str) -> WireError {
        WireError::Malformed { request: self.request, what }
    }
}

/// Descriptors that came with a message: each is used once, none may be left.
struct Fds {
    request: u32,
    fds: Vec<ForeignFd>,
}

impl Fds {
    /// The next one, if it is what the message needs.
    fn one<T>(&mut self, check: impl FnOnce(ForeignFd) -> Result<T, &'static str>) -> Result<T, WireError> {
        let fd = self.fds.pop().ok_or("a file descriptor is missing");
        fd.and_then(check).map_err(|what| WireError::Malformed { request: self.request, what })
    }

    fn end(&self) -> Result<(), WireError> {
        if self.fds.is_empty() {
            Ok(())
        } else {
            Err(WireError::Malformed { request: self.request, what: "too many file descriptors" })
        }
    }
}

/// One end of a vhost-user socket. Never blocks.
pub struct Channel {
    /// Gone when this is dropped.
    stream: Option<UnixStream>,
    inbox: Vec<u8>,
    fds: Vec<ForeignFd>,
}

impl Channel {
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream: Some(stream), inbox: Vec::with_capacity(HEADER_BYTES + 64), fds: Vec::new() })
    }

    /// The next message, if it is there as a whole.
    pub fn receive(&mut self) -> Result<Option<Frame>, WireError> {
        loop {
            let wanted = self.wanted()?;
            if self.inbox.len() == wanted && wanted >= HEADER_BYTES && self.inbox.len() >= self.frame_bytes()? {
                return Ok(Some(self.frame()));
            }
            if !self.fill(wanted)? {
                return Ok(None);
            }
        }
    }

    /// How long the inbox has to be before it can be judged again: never past the frame, since descriptors belong to
    /// the message whose bytes they came with.
    fn wanted(&self) -> Result<usize, WireError> {
        if self.inbox.len() < HEADER_BYTES { Ok(HEADER_BYTES) } else { self.frame_bytes() }
    }

    fn frame_bytes(&self) -> Result<usize, WireError> {
        let (request, flags, bytes) = (self.field(0), self.field(4), self.field(8) as usize);
        if flags & VERSION_MASK != VERSION || flags & FLAG_REPLY != 0 {
            return Err(WireError::Malformed { request, what: "wrong version, or a reply" });
        }
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(WireError::Malformed { request, what: "longer than any message" });
        }
        Ok(HEADER_BYTES + bytes)
    }

    fn field(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.inbox[at..at + 4].try_into().expect("a field has 4 bytes"))
    }

    fn frame(&mut self) -> Frame {
        let (request, flags) = (self.field(0), self.field(4));
        let payload = self.inbox[HEADER_BYTES..].to_vec();
        self.inbox.clear();
        Frame { request, need_reply: flags & FLAG_NEED_REPLY != 0, payload, fds: std::mem::take(&mut self.fds) }
    }

    /// Reads towards `wanted`; false: nothing there now.
    fn fill(&mut self, wanted: usize) -> Result<bool, WireError> {
        let have = self.inbox.len();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        self.inbox.resize(wanted, 0);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let stream = self.stream.as_ref().expect("it is there until the channel is dropped");
        let received = recvmsg(stream, &mut [io::IoSliceMut::new(&mut self.inbox[have..])], &mut control, flags);
        let bytes = received.as_ref().map_or(0, |message| message.bytes);
        self.inbox.truncate(have + bytes);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds.map(ForeignFd::from));
            }
        }
        match received {
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::INTR) => Ok(true),
            Err(Errno::CONNRESET) => Err(WireError::Closed),
            Err(error) => Err(WireError::Io(error.into())),
            Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > FDS_MAX => {
                Err(WireError::Malformed { request: 0, what: "too many file descriptors" })
            }
            Ok(_) if bytes == 0 => Err(WireError::Closed),
            Ok(_) => Ok(true),
        }
    }

    /// Answers a message.
    pub fn reply(&self, request: u32, payload: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), WireError> {
        self.send(request, VERSION | FLAG_REPLY, payload, fd)
    }

    /// Tells the frontend (on the backend's own channel) to read the configuration again. No reply is asked for: while
    /// QEMU handles it, it talks on the main channel, and who waits here would not hear that.
    pub fn announce_config_change(&self) -> Result<(), WireError> {
        self.send(CONFIG_CHANGE, VERSION, &[], None)
    }

    fn send(&self, request: u32, flags: u32, payload: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), WireError> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        for field in [request, flags, payload.len() as u32] {
            bytes.extend_from_slice(&field.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "the buffer has room for one descriptor");
        }
        // A frontend that does not read its replies is cut off rather than waited for.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = sendmsg(self.as_fd(), &[io::IoSlice::new(&bytes)], &mut control, flags)
            .map_err(|error| if error == Errno::PIPE { WireError::Closed } else { WireError::Io(error.into()) })?;
        if sent == bytes.len() {
            Ok(())
        } else {
            Err(WireError::Io(io::Error::new(io::ErrorKind::WouldBlock, "QEMU does not read its replies")))
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_ref().expect("it is there until the channel is dropped").as_fd()
    }
}

impl Drop for Channel {
    /// Unread messages in the socket may hold descriptors that hold up whoever closes them.
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // The other end sees it now.
            let _ = stream.shutdown(Shutdown::Both);
            background_close::close(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn frame(request: u32, payload: &[u8], fds: usize) -> Frame {
        let null = || std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let fds = (0..fds).map(|_| null().into()).collect();
        Frame { request, need_reply: false, payload: payload.to_vec(), fds }
    }

    #[test]
    fn messages_of_the_wrong_shape_are_refused() {
        let check = |request, bytes, fds, expected: &str| {
            let error = Message::parse(frame(request, &vec![0; bytes], fds)).unwrap_err();
            assert!(error.to_string().contains(expected), "message {request}: {error}");
        };
        check(2, 7, 0, "too short");
        check(2, 9, 0, "too long");
        check(1, 0, 1, "too many file descriptors");
        check(5, 8, 1, "one descriptor a region");
        check(6, 16, 0, "descriptor is missing");
        check(12, 8, 0, "descriptor is missing");
        check(6, 16, 1, "sealed");
        check(12, 8, 1, "eventfd");
        check(21, 0, 1, "Unix socket");
        check(37, 40, 1, "is not memory");
        check(24, 13, 0, "does not match");
        check(32, 16, 1, "too short");
        check(99, 0, 0, "message 99 is not supported");
    }

    #[test]
    fn configuration_beyond_its_space_is_refused() {
        let mut payload = Vec::new();
        for field in [250u32, 8, 0] {
            payload.extend_from_slice(&field.to_ne_bytes());
        }
        payload.extend_from_slice(&[0; 8]);
        assert!(Message::parse(frame(24, &payload, 0)).unwrap_err().to_string().contains("beyond"));
    }

    #[test]
    fn message_in_small_pieces_is_put_together() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut channel = Channel::new(near).unwrap();
        let mut bytes: Vec<u8> = [2u32, VERSION | FLAG_NEED_REPLY, 8].iter().flat_map(|f| f.to_ne_bytes()).collect();
        bytes.extend_from_slice(&0x1122u64.to_ne_bytes());
        for (at, byte) in bytes.iter().enumerate() {
            assert!(channel.receive().unwrap().is_none(), "before byte {at}");
            far.write_all(&[*byte]).unwrap();
        }
        let frame = channel.receive().unwrap().unwrap();
        assert!(frame.need_reply);
        assert!(matches!(Message::parse(frame).unwrap(), Message::SetFeatures(0x1122)));
        drop(far);
        assert!(matches!(channel.receive(), Err(WireError::Closed)));
    }

    #[test]
    fn an_endless_message_is_refused_at_its_header() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut channel = Channel::new(near).unwrap();
        far.write_all(&[2u32, VERSION, u32::MAX].iter().flat_map(|f| f.to_ne_bytes()).collect::<Vec<u8>>()).unwrap();
        assert!(matches!(channel.receive(), Err(WireError::Malformed { .. })));
    }
}
