//! A stand-in for QEMU without a guest. Its command line, QMP and vhost-user connections behave as those of QEMU 7.2, as far as a
//! keeper uses them. So a keeper can lead a machine through a whole life in milliseconds.
//!
//! A test controls it by listening at `control.sock`, beside the folder of the machine's memory:
//! ```text
//! fake -> test   command NAME          before each QMP command; nothing happens until the test answers
//! test -> fake   go                    carry out the command
//!                refuse                answer with an error
//!                silent                do not answer
//!                say TIMES JSON-STRING send this text TIMES times (0: until the connection closes), then carry out the command
//!                hand KIND             send events with descriptors of this kind (see `handed`), then carry out the command
//! test -> fake   guest reset|panic|off|watchdog        at any time: what the guest does
//!                guest panic-again     its QEMU repeats that it has crashed
//!                guest greets-slowly   from now on its QEMU pauses in the middle of its first messages to a disk
//!                guest write-through   it switches its write cache off; later lines wait until the disks have heard of it
//! ```
//! Without a test it carries out everything at once. It exits when the test does.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde_json::{Value, json};

/// State of the devices, as it is sent in a migration.
const STATE: [u8; 4096] = [b'S'; 4096];
const GUEST_PAGES: usize = 64;
const GUEST_WRITES_EVERY: Duration = Duration::from_millis(10);
/// VHOST_USER_GET_FEATURES, version 1, no payload.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
/// VHOST_USER_SET_CONFIG, version 1, to be acknowledged: at offset 32 one byte, the write cache, becomes 0.
const SET_WRITE_THROUGH: [u8; 25] = [25, 0, 0, 0, 9, 0, 0, 0, 13, 0, 0, 0, 32, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
/// VHOST_USER_SET_VRING_CALL, version 1, for queue 0, without a descriptor.
const SET_VRING_CALL: [u8; 20] = [13, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
/// Where that message has the number of its queue.
const QUEUE_AT: usize = 12;
/// A header and a number.
const ANSWER_BYTES: usize = 20;
/// Pause between two attempts to connect to a disk.
const RECONNECT_EVERY: Duration = Duration::from_millis(20);
/// The pause of one that greets slowly.
const GREETING_PAUSE: Duration = Duration::from_secs(1);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--version") {
        println!("QEMU emulator version 7.2.99 (a stand-in for tests)");
        return;
    }
    if arguments.iter().any(|argument| argument == "stdio") {
        // A query for the machine types that it knows.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        println!("{}", json!({ "return": [{ "name": "pc-q35-7.2", "alias": "q35" }] }));
        return;
    }
    let line = CommandLine::parse(&arguments);
    let ram = map_ram(&line.ram_file);
    for &number in line.sockets.values() {
        // SAFETY: an open descriptor that this process inherited for its own use.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        rustix::net::listen(socket, 1).expect("it is a socket");
    }
    let connect = |device: DiskDevice| {
        let (connected, wait) = channel();
        let (acknowledged, acknowledgements) = channel();
        let disk = Arc::new(Mutex::new(None));
        let greets_slowly = Arc::new(AtomicBool::new(false));
        let (connection, slowly) = (Arc::clone(&disk), Arc::clone(&greets_slowly));
        let chardev = device.chardev.clone();
        std::thread::spawn(move || stay_connected(&device, &connection, &slowly, &connected, &acknowledged));
        wait.recv().expect("the thread waits for its disk");
        Disk { chardev, connection: disk, greets_slowly, acknowledgements: Mutex::new(acknowledgements) }
    };
    let disks = line.disks.into_iter().map(connect).collect();
    let run_state = if line.incoming { "inmigrate" } else { "prelaunch" };
    let machine = Arc::new(Machine {
        shared: Mutex::new(Shared { run_state, migration: "none", client: None, handed: BTreeMap::new() }),
        starts_held: line.starts_held,
        disks,
    });
    let orders = Control::connect(&line.ram_file, &machine);
    if !line.incoming && !line.starts_held {
        machine.lock().run_state = "running";
    }
    let guest = Arc::clone(&machine);
    std::thread::spawn(move || guest.run_guest(ram));
    // SAFETY: an open descriptor that this process inherited for its own use, and no other code uses this one.
    let qmp = unsafe { UnixListener::from_raw_fd(line.sockets["qmp"]) };
    // Like QEMU, it serves one client at a time.
    while let Ok((client, _)) = qmp.accept() {
        serve(&machine, orders.as_ref(), client);
        machine.lock().client = None;
    }
}

struct CommandLine {
    ram_file: PathBuf,
    /// Listening sockets, by the name of their character device.
    sockets: BTreeMap<String, i32>,
    disks: Vec<DiskDevice>,
    starts_held: bool,
    incoming: bool,
}

struct DiskDevice {
    /// Name of its character device.
    chardev: String,
    socket: PathBuf,
    queues: u8,
}

impl CommandLine {
    fn parse(arguments: &[String]) -> Self {
        let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
        let key = |argument: &str, key: &str| {
            let key = format!("{key}=");
            argument.split(',').find_map(|part| part.strip_prefix(&key)).map(str::to_owned)
        };
        let chardevs = || arguments.iter().filter(|argument| argument.starts_with("socket,id="));
        let ram = arguments.iter().find(|argument| argument.starts_with("memory-backend-file,id=ram"));
        let socket = |chardev: &String| Some((key(chardev, "id")?, key(chardev, "fd")?.parse().ok()?));
        let disk = |socket: &String| {
            let chardev = key(socket, "id")?;
            let device = arguments.iter().find(|device| key(device, "chardev").as_ref() == Some(&chardev))?;
            let queues = key(device, "num-queues")?.parse().ok()?;
            Some(DiskDevice { socket: key(socket, "path")?.into(), queues, chardev })
        };
        Self {
            ram_file: ram.and_then(|ram| key(ram, "mem-path")).expect("a machine has memory").into(),
            sockets: chardevs().filter_map(socket).collect(),
            disks: chardevs().filter_map(disk).collect(),
            starts_held: has("-S"),
            incoming: has("-incoming"),
        }
    }
}

/// Maps the guest's memory, which the keeper looks for among QEMU's mappings.
fn map_ram(path: &Path) -> usize {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("the keeper made it");
    let bytes = file.metadata().expect("it is open").len() as usize;
    // SAFETY: a new mapping at an address that the kernel chooses; no reference into it exists.
    unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0) }
        .expect("a shared mapping of a regular file") as usize
}

/// A disk, as its server is told about it.
struct Disk {
    chardev: String,
    connection: Arc<Mutex<Option<UnixStream>>>,
    greets_slowly: Arc<AtomicBool>,
    /// One for each message that was to be acknowledged.
    acknowledgements: Mutex<Receiver<()>>,
}

impl Disk {
    /// As `query-chardev` tells it.
    fn chardev(&self) -> Value {
        let connection = self.connection.lock().expect("no thread panics while it holds the lock");
        let filename = if connection.is_some() { "unix:" } else { "disconnected:unix:" };
        json!({ "label": self.chardev, "filename": filename, "frontend-open": true })
    }

    fn set_write_through(&self) {
        let connection = self.connection.lock().expect("no thread panics while it holds the lock");
        let sent = connection.as_ref().is_some_and(|mut server| server.write_all(&SET_WRITE_THROUGH).is_ok());
        if sent {
            let acknowledgements = self.acknowledgements.lock().expect("no thread panics while it holds the lock");
            // The thread at the connection lives as long as this process.
            let _ = acknowledgements.recv();
        }
    }
}

/// The messages to a disk's server with which QEMU's greeting ends; it begins with `GET_FEATURES`.
fn greeting_end(queues: u8) -> Vec<u8> {
    let call = |queue| {
        let mut message = SET_VRING_CALL;
        message[QUEUE_AT] = queue;
        message
    };
    (0..queues).flat_map(call).collect()
}

/// Greets a disk's server, and connects again whenever the server is gone.
fn stay_connected(
    device: &DiskDevice,
    connection: &Mutex<Option<UnixStream>>,
    greets_slowly: &AtomicBool,
    connected: &Sender<()>,
    acknowledged: &Sender<()>,
) {
    loop {
        if let Ok(mut server) = UnixStream::connect(&device.socket)
            && server.write_all(&GET_FEATURES).is_ok()
        {
            *connection.lock().expect("no thread panics while it holds the lock") = server.try_clone().ok();
            if greets_slowly.load(Relaxed) {
                std::thread::sleep(GREETING_PAUSE);
            }
            let _ = server.write_all(&greeting_end(device.queues));
            let _ = connected.send(());
            let mut answer = [0; ANSWER_BYTES];
            while server.read_exact(&mut answer).is_ok() {
                if answer[0] == SET_WRITE_THROUGH[0] {
                    let _ = acknowledged.send(());
                }
            }
            *connection.lock().expect("no thread panics while it holds the lock") = None;
        }
        std::thread::sleep(RECONNECT_EVERY);
    }
}

struct Machine {
    shared: Mutex<Shared>,
    starts_held: bool,
    disks: Vec<Disk>,
}

struct Shared {
    /// QEMU's name of the run state.
    run_state: &'static str,
    migration: &'static str,
    /// The client that gets events.
    client: Option<UnixStream>,
    /// Descriptors from `getfd`, by name.
    handed: BTreeMap<String, OwnedFd>,
}

impl Machine {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn event(&self, name: &str, data: Value) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let timestamp = json!({ "seconds": now.as_secs(), "microseconds": now.subsec_micros() });
        let line = format!("{}\r\n", json!({ "event": name, "data": data, "timestamp": timestamp }));
        let client = self.lock().client.as_ref().and_then(|client| client.try_clone().ok());
        // Fails once the client has hung up.
        let _ = client.map(|mut client| client.write_all(line.as_bytes()));
    }

    /// The guest writes to its memory, page by page, while it runs.
    fn run_guest(&self, ram: usize) -> ! {
        for page in (0..GUEST_PAGES).cycle() {
            if self.lock().run_state == "running" {
                // SAFETY: within the mapping of guest memory, which nobody here has a reference to.
                unsafe { ((ram + page * 4096) as *mut u8).write_volatile(page as u8 | 1) };
            }
            std::thread::sleep(GUEST_WRITES_EVERY);
        }
        unreachable!("a cycle does not end")
    }

    fn enter(&self, run_state: &'static str) {
        self.lock().run_state = run_state;
    }

    fn migration(&self, status: &'static str) {
        self.lock().migration = status;
        self.event("MIGRATION", json!({ "status": status }));
    }

    fn guest(&self, does: &str) {
        let runs = self.lock().run_state == "running";
        match does {
            "panic" if runs => {
                self.enter("guest-panicked");
                self.event("GUEST_PANICKED", json!({ "action": "pause" }));
                self.event("STOP", json!({}));
            }
            "panic-again" => self.event("GUEST_PANICKED", json!({ "action": "pause" })),
            "watchdog" if runs => {
                self.enter("watchdog");
                self.event("WATCHDOG", json!({ "action": "pause" }));
                self.event("STOP", json!({}));
            }
            "reset" if runs => self.end("guest-reset"),
            "off" if runs => self.end("guest-shutdown"),
            "greets-slowly" => self.disks.iter().for_each(|disk| disk.greets_slowly.store(true, Relaxed)),
            "write-through" if runs => self.disks.iter().for_each(Disk::set_write_through),
            _ => {}
        }
    }

    fn end(&self, reason: &str) -> ! {
        self.event("SHUTDOWN", json!({ "guest": true, "reason": reason }));
        std::process::exit(0);
    }

    /// Carries out a command, and returns QEMU's answer to it.
    fn perform(
        self: &Arc<Self>,
        command: &str,
        arguments: &Value,
        descriptor: Option<OwnedFd>,
    ) -> Result<Value, String> {
        let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
        let take = |name: String| self.lock().handed.remove(name.trim_start_matches("fd:")).ok_or("no such descriptor");
        match command {
            "query-status" => {
                let run_state = self.lock().run_state;
                return Ok(json!({ "status": run_state, "running": run_state == "running", "singlestep": false }));
            }
            "query-migrate" => {
                let status = self.lock().migration;
                return Ok(json!({ "status": status }));
            }
            "query-chardev" => return Ok(self.disks.iter().map(Disk::chardev).collect()),
            "human-monitor-command" => return Ok(json!("")),
            "getfd" => drop(self.lock().handed.insert(text("fdname"), descriptor.ok_or("no descriptor came along")?)),
            "closefd" => drop(take(text("fdname"))?),
            "stop" if self.lock().run_state == "running" => {
                self.enter("paused");
                self.event("STOP", json!({}));
            }
            "cont" => {
                if self.lock().run_state == "inmigrate" {
                    return Err("the guest is not there".to_owned());
                }
                self.enter("running");
                self.event("RESUME", json!({}));
            }
            "dump-guest-memory" => drop(File::from(take(text("protocol"))?).write_all(b"no registers")),
            "migrate" => {
                let (channel, machine) = (take(text("uri"))?, Arc::clone(self));
                std::thread::spawn(move || machine.give_away(channel));
            }
            "migrate-incoming" => {
                let (channel, machine) = (take(text("uri"))?, Arc::clone(self));
                self.lock().migration = "setup";
                std::thread::spawn(move || machine.let_in(channel));
            }
            "system_powerdown" => self.guest("off"),
            "inject-nmi" | "send-key" => self.guest("panic"),
            _ => {}
        }
        Ok(json!({}))
    }

    fn give_away(&self, channel: OwnedFd) {
        self.migration("setup");
        self.migration("active");
        if self.lock().run_state == "running" {
            self.event("STOP", json!({}));
        }
        self.enter("finish-migrate");
        let given = File::from(channel).write_all(&STATE);
        self.enter("postmigrate");
        self.migration(if given.is_ok() { "completed" } else { "failed" });
    }

    fn let_in(&self, channel: OwnedFd) {
        self.migration("active");
        let mut state = Vec::new();
        let _ = File::from(channel).read_to_end(&mut state);
        if state.len() != STATE.len() {
            self.migration("failed");
            std::process::exit(1);
        }
        if self.starts_held {
            self.enter("paused");
        } else {
            self.enter("running");
            self.event("RESUME", json!({}));
        }
        self.migration("completed");
    }
}

/// The connection to the test in control, which is asked before each command.
struct Control {
    test: Mutex<UnixStream>,
    orders: Mutex<Receiver<String>>,
}

impl Control {
    fn connect(ram_file: &Path, machine: &Arc<Machine>) -> Option<Self> {
        let folder = ram_file.parent()?.parent()?;
        let test = UnixStream::connect(folder.join("control.sock")).ok()?;
        let lines = BufReader::new(test.try_clone().ok()?).lines();
        let (ordered, orders) = channel();
        let machine = Arc::clone(machine);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                match line.strip_prefix("guest ") {
                    Some(does) => machine.guest(does),
                    None => drop(ordered.send(line)),
                }
            }
            std::process::exit(0);
        });
        Some(Self { test: Mutex::new(test), orders: Mutex::new(orders) })
    }

    fn ask(&self, command: &str) -> String {
        let line = format!("command {command}\n");
        let sent = self.test.lock().expect("no thread panics while it holds the lock").write_all(line.as_bytes());
        let order =
            sent.ok().and_then(|()| self.orders.lock().expect("no thread panics while it holds the lock").recv().ok());
        order.unwrap_or_else(|| std::process::exit(0))
    }
}

/// Serves a client until it hangs up.
fn serve(machine: &Arc<Machine>, control: Option<&Control>, client: UnixStream) {
    let Ok(mut input) = client.try_clone() else { return };
    let version = json!({ "qemu": { "micro": 99, "minor": 2, "major": 7 }, "package": "" });
    let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
    if (&client).write_all(format!("{greeting}\r\n").as_bytes()).is_err() {
        return;
    }
    let (mut text, mut descriptors) = (Vec::new(), VecDeque::new());
    while receive(&mut input, &mut text, &mut descriptors) {
        while let Some(end) = text.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let Ok(message) = serde_json::from_slice::<Value>(&line) else { continue };
            let command = message["execute"].as_str().unwrap_or_default();
            let order = control.map_or_else(|| "go".to_owned(), |control| control.ask(command));
            let descriptor = (command == "getfd").then(|| descriptors.pop_front()).flatten();
            if order == "silent" {
                continue;
            }
            if let Some(order) = order.strip_prefix("say ") {
                say_often(&client, order);
            }
            if let Some(kind) = order.strip_prefix("hand ") {
                hand_over(&client, kind);
            }
            let answer = match order.as_str() {
                "refuse" => Err("the test told this QEMU to refuse".to_owned()),
                _ => machine.perform(command, &message["arguments"], descriptor),
            };
            let answer = match answer {
                Ok(answer) => json!({ "return": answer, "id": message["id"] }),
                Err(why) => json!({ "error": { "class": "GenericError", "desc": why }, "id": message["id"] }),
            };
            if (&client).write_all(format!("{answer}\r\n").as_bytes()).is_err() {
                return;
            }
            if command == "qmp_capabilities" {
                machine.lock().client = client.try_clone().ok();
            }
        }
    }
}

fn say_often(mut client: &UnixStream, order: &str) {
    let Some((times, text)) = order.split_once(' ') else { return };
    let (times, text) = (times.parse::<u64>().unwrap_or(1), serde_json::from_str::<String>(text).unwrap_or_default());
    let mut said = 0;
    while (times == 0 || said < times) && client.write_all(text.as_bytes()).is_ok() {
        said += 1;
    }
}

/// Number of messages with descriptors that `hand` sends.
const HANDED_MESSAGES: usize = 8;
/// Number of descriptors in each of them (SCM_MAX_FD in Linux).
const HANDED_AT_ONCE: usize = 253;
/// How long closing a socket blocks while nobody reads its data.
const LINGERS: Duration = Duration::from_secs(3600);

/// A descriptor of the given kind, and those that must stay open beside it.
fn handed(kind: &str) -> std::io::Result<(OwnedFd, Vec<OwnedFd>)> {
    Ok(match kind {
        "sockets" => {
            let (given, other) = UnixStream::pair()?;
            (given.into(), vec![other.into()])
        }
        "folders" => (File::open("/")?.into(), Vec::new()),
        "pipe" => {
            let (unread, given) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK)?;
            while rustix::io::write(&given, &[0; 4096]).is_ok() {}
            (given, vec![unread])
        }
        "counter" => {
            let given = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty())?;
            rustix::io::write(&given, &(u64::MAX - 1).to_ne_bytes())?;
            (given, Vec::new())
        }
        "lingering" => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let mut given = TcpStream::connect(listener.local_addr()?)?;
            given.set_nonblocking(true)?;
            while given.write(&[0; 65536]).is_ok() {}
            given.set_nonblocking(false)?;
            rustix::net::sockopt::set_socket_linger(&given, Some(LINGERS))?;
            (given.into(), vec![listener.into()])
        }
        other => return Err(std::io::Error::other(format!("{other}: unknown kind of descriptor"))),
    })
}

/// Sends the client many copies of a descriptor, and keeps none open.
fn hand_over(client: &UnixStream, kind: &str) {
    let (given, beside) = handed(kind).expect("descriptors of this kind can be made");
    let line = format!("{}\r\n", json!({ "event": "NEWS", "data": {} }));
    let descriptors = [given.as_fd(); HANDED_AT_ONCE];
    for _ in 0..HANDED_MESSAGES {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED_AT_ONCE))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)), "the buffer has space for them");
        // Fails once the client has closed the connection.
        let _ = sendmsg(client, &[IoSlice::new(line.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL);
    }
    // These stay open until the process exits.
    std::mem::forget(beside);
}

/// Reads more of the client's text and descriptors. Returns false once the client has hung up.
fn receive(client: &mut UnixStream, text: &mut Vec<u8>, descriptors: &mut VecDeque<OwnedFd>) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let (mut ancillary, mut piece) = (RecvAncillaryBuffer::new(&mut space), [0; 4096]);
    let got = recvmsg(client.as_fd(), &mut [IoSliceMut::new(&mut piece)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            descriptors.extend(more);
        }
    }
    let bytes = got.map_or(0, |got| got.bytes);
    text.extend_from_slice(&piece[..bytes]);
    bytes > 0
}
