//! The hub's thread: one `poll` over QEMU, the clients, the listener and the hub's requests.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::Duration;

use hearth_qemu::{Endpoint, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::transcript_reader::TranscriptReader;
use super::typed::{Typed, unread_cost};
use super::{CLIENT_BYTES_MAX, CLIENTS_MAX, Order, Place, SCROLLBACK_BYTES, TYPED_BYTES_MAX};
use crate::peer;

/// Interval of connection attempts. A QEMU takes some 50 ms to start.
const CONNECT_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Interval of checks whether QEMU has taken all input.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
const READ_BYTES: usize = 16 << 10;
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

pub struct Relay {
    listener: UnixListener,
    woken: UnixStream,
    orders: Receiver<Order>,
    /// Address of the QEMU to connect to; none once connected.
    wanted: Option<Place>,
    qemu: Option<Stream>,
    transcript_reader: Option<TranscriptReader>,
    successor: Option<Successor>,
    typed: Typed,
    scrollback: VecDeque<u8>,
    clients: Vec<Client>,
}

/// The QEMU that is about to take over. Meanwhile neither QEMU gets input.
struct Successor {
    place: Place,
    /// None until connected.
    stream: Option<Stream>,
    /// Gets a message when the QEMU may take over.
    ready: Option<Sender<()>>,
}

struct Client {
    /// Dropping it does not wait for descriptors that it may have sent.
    stream: Stream,
    /// Output that this client has not read yet.
    pending: VecDeque<u8>,
    /// Whether it has closed its input; it may still read.
    mute: bool,
    gone: bool,
}

/// The events that `poll` returned.
struct Ready {
    woken: PollFlags,
    listener: PollFlags,
    qemu: PollFlags,
    clients: Vec<PollFlags>,
}

impl Relay {
    pub fn new(listener: UnixListener, woken: UnixStream, orders: Receiver<Order>) -> Self {
        Self {
            listener,
            woken,
            orders,
            wanted: None,
            qemu: None,
            transcript_reader: None,
            successor: None,
            typed: Typed::new(),
            scrollback: VecDeque::new(),
            clients: Vec::new(),
        }
    }

    /// Runs until the hub is dropped.
    pub fn run(mut self) {
        while self.round() {}
    }

    /// One wait and its work. False when the hub was dropped.
    pub(super) fn round(&mut self) -> bool {
        let ready = match self.wait() {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "the console is lost: its sockets cannot be waited for");
                return false;
            }
        };
        // Before clients, because a client that was told that its guest runs types into that guest.
        if !ready.woken.is_empty() && !self.take_orders() {
            return false;
        }
        self.reach_qemu();
        self.reach_successor();
        self.move_output(ready.qemu);
        self.serve_clients(&ready.clients);
        self.move_input(ready.qemu);
        self.clients.retain(|client| !client.gone);
        if !ready.listener.is_empty() {
            self.welcome();
        }
        true
    }

    fn wait(&self) -> io::Result<Ready> {
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        for client in &self.clients {
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::IN, !client.mute && self.typed.len() < TYPED_BYTES_MAX);
            wanted.set(PollFlags::OUT, !client.pending.is_empty());
            fds.push(PollFd::new(&client.stream, wanted));
        }
        if let Some(qemu) = &self.qemu {
            let mut wanted = PollFlags::IN;
            wanted.set(PollFlags::OUT, !self.typed.is_empty() && self.successor.is_none());
            fds.push(PollFd::new(qemu, wanted));
        }
        let expecting = self.successor.as_ref().is_some_and(|successor| successor.ready.is_some());
        let timeout = if expecting { Some(&LOOK_EVERY) } else { self.wanted.is_some().then_some(&CONNECT_EVERY) };
        loop {
            match poll(&mut fds, timeout) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let flags: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        let clients = flags[2..2 + self.clients.len()].to_vec();
        let qemu = flags.get(2 + self.clients.len()).copied().unwrap_or(PollFlags::empty());
        Ok(Ready { woken: flags[0], listener: flags[1], qemu, clients })
    }

    /// False when the hub was dropped.
    fn take_orders(&mut self) -> bool {
        // The bytes only wake the thread.
        let _ = self.woken.read(&mut [0; 64]);
        loop {
            match self.orders.try_recv() {
                Ok(Order::Attach(place)) => {
                    self.let_go();
                    self.wanted = Some(place);
                }
                Ok(Order::Detach) => {
                    self.let_go();
                    self.wanted = None;
                }
                Ok(Order::Expect(place, ready)) => {
                    self.successor = Some(Successor { place, stream: None, ready: Some(ready) });
                    self.reach_successor();
                }
                Ok(Order::EndSwitch { taken_over, done }) => {
                    self.end_switch(taken_over);
                    // The sender may no longer wait.
                    let _ = done.send(());
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// The last output of a QEMU matters, above all a panic's last lines.
    fn let_go(&mut self) {
        while self.qemu.is_some() && self.read_qemu() {}
        self.disconnect_qemu();
    }

    fn disconnect_qemu(&mut self) {
        self.qemu = None;
        self.typed.forget();
        if let Some(mut transcript_reader) = self.transcript_reader.take()
            && !transcript_reader.is_joined()
        {
            self.spread(&transcript_reader.news());
        }
    }

    fn reach_qemu(&mut self) {
        let Some(place) = &self.wanted else { return };
        // QEMU does not listen yet, or a dead keeper's connection still blocks it: the next round tries again.
        if let Ok(stream) = connect_now(&place.qemu) {
            self.qemu = Some(stream);
            self.transcript_reader = self.wanted.take().and_then(|place| place.transcript).map(TranscriptReader::new);
            // It may have no more output.
            let news = self.transcript_reader.as_mut().map(TranscriptReader::news).unwrap_or_default();
            let before = self.scrollback.len();
            self.spread(&news);
            if before > 0 {
                self.remember();
            }
        }
    }

    fn reach_successor(&mut self) {
        let Some(successor) = &mut self.successor else { return };
        if successor.stream.is_none() {
            successor.stream = connect_now(&successor.place.qemu).ok();
        }
        let all_taken = self.qemu.as_ref().is_none_or(|qemu| unread_cost(qemu) == 0);
        if successor.stream.is_some()
            && all_taken
            && let Some(ready) = successor.ready.take()
        {
            let _ = ready.send(());
        }
    }

    /// Reads the old QEMU's last output, then switches. Unread input goes to whichever QEMU continues.
    fn end_switch(&mut self, taken_over: bool) {
        let Some(successor) = self.successor.take() else { return };
        if taken_over {
            while self.qemu.is_some() && self.read_qemu() {}
            if let Some(old) = &self.qemu {
                self.typed.take_back(old);
            }
            self.qemu = successor.stream;
            if self.qemu.is_some() {
                self.transcript_reader = successor.place.transcript.map(TranscriptReader::from_start);
                self.remember();
            } else {
                (self.transcript_reader, self.wanted) = (None, Some(successor.place));
            }
        }
    }

    fn move_output(&mut self, ready: PollFlags) {
        if !ready.is_empty() {
            self.read_qemu();
        }
    }

    /// Passes one piece of output to all clients. False if there was none.
    fn read_qemu(&mut self) -> bool {
        let Some(qemu) = &mut self.qemu else { return false };
        let mut buffer = [0; READ_BYTES];
        match qemu.read(&mut buffer) {
            Ok(length) if length > 0 => {
                self.pass_on(buffer[..length].to_vec());
                true
            }
            Err(error) if is_passing(&error) => false,
            Ok(_) | Err(_) => {
                self.disconnect_qemu();
                false
            }
        }
    }

    fn pass_on(&mut self, came: Vec<u8>) {
        let output = match (&mut self.transcript_reader, &mut self.qemu) {
            (Some(transcript_reader), Some(qemu)) if !transcript_reader.is_joined() => {
                transcript_reader.join(came, |came| read_more(qemu, came))
            }
            _ => came,
        };
        self.spread(&output);
    }

    fn remember(&mut self) {
        if let Some(transcript_reader) = &mut self.transcript_reader {
            transcript_reader.begin_with(self.scrollback.make_contiguous());
        }
    }

    fn spread(&mut self, output: &[u8]) {
        self.scrollback.extend(output);
        let excess = self.scrollback.len().saturating_sub(SCROLLBACK_BYTES);
        self.scrollback.drain(..excess);
        if self.transcript_reader.as_ref().is_some_and(TranscriptReader::needs_room) {
            self.remember();
        }
        for client in &mut self.clients {
            client.pending.extend(output);
            client.send();
            if client.pending.len() > CLIENT_BYTES_MAX {
                tracing::debug!("a client of the console does not read and is dropped");
                client.gone = true;
            }
        }
    }

    fn serve_clients(&mut self, ready: &[PollFlags]) {
        for (client, ready) in self.clients.iter_mut().zip(ready) {
            if ready.contains(PollFlags::OUT) {
                client.send();
            }
            if ready.contains(PollFlags::IN) {
                client.listen(&mut self.typed);
            } else if ready.intersects(PollFlags::HUP | PollFlags::ERR) {
                client.gone = true;
            }
        }
        // A QEMU that is about to be connected gets the input, because its guest may already be reported as running.
        if self.qemu.is_none() && self.wanted.is_none() {
            self.typed.forget();
        }
    }

    fn move_input(&mut self, ready: PollFlags) {
        let Some(qemu) = &mut self.qemu else { return };
        // There is new input, or input that waits for QEMU.
        let wants = ready.contains(PollFlags::OUT) || !self.typed.is_empty();
        if wants && self.successor.is_none() && !self.typed.send(qemu) {
            self.disconnect_qemu();
        }
    }

    fn welcome(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if is_passing(&error) => return,
                Err(error) => {
                    tracing::warn!(%error, "a client of the console was lost while it connected");
                    // Most likely too many open files; retrying at once would only use up a processor.
                    std::thread::sleep(ACCEPT_PAUSE);
                    return;
                }
            };
            let is_qemu = peer::is_qemu(&stream);
            let stream = Stream::from(stream);
            if is_qemu {
                tracing::warn!("a QEMU connected to the console and was refused");
                continue;
            }
            if self.clients.len() == CLIENTS_MAX || stream.set_nonblocking(true).is_err() {
                tracing::debug!("a client of the console is turned away: {CLIENTS_MAX} are there");
                continue;
            }
            let mut client = Client { stream, pending: self.scrollback.clone(), mute: false, gone: false };
            client.send();
            self.clients.push(client);
        }
    }
}

impl Client {
    fn send(&mut self) {
        if !drain_into(&mut self.pending, &mut self.stream) {
            self.gone = true;
        }
    }

    fn listen(&mut self, typed: &mut Typed) {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.mute = true,
            Ok(length) => typed.extend(&buffer[..length]),
            Err(error) if is_passing(&error) => {}
            Err(_) => self.gone = true,
        }
    }
}

/// Reads all available bytes. The next read reports the end of the stream.
fn read_more(stream: &mut Stream, came: &mut Vec<u8>) {
    let mut buffer = [0; READ_BYTES];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        came.extend(&buffer[..length]);
    }
}

/// Writes as much as possible without waiting. False if the other side is gone.
fn drain_into(bytes: &mut VecDeque<u8>, stream: &mut Stream) -> bool {
    while !bytes.is_empty() {
        match stream.write(bytes.as_slices().0) {
            Ok(length) => drop(bytes.drain(..length)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        }
    }
    true
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Connects without waiting, because a QEMU with a full queue would block the thread.
fn connect_now(qemu: &Endpoint) -> io::Result<Stream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(&qemu.socket)?)?;
    let stream = Stream::from(UnixStream::from(socket));
    qemu.check(&stream)?;
    Ok(stream)
}
