//! A machine with a stand-in for QEMU, its keeper, and the test's control of each QMP command.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_api::{ApiError, MachineState, MachineStatus};
use hearth_vmtest::{Api, artifacts, patience, processes};
use rustix::process::Pid;
use tempfile::TempDir;

/// Name of the machine, and of a machine restored from its snapshot.
pub const NAMES: [&str; 2] = ["original", "copy"];
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Time between two requests: the keeper starts a thread for each one.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// Folders of two machines, and the living stand-ins for QEMU of both.
pub struct Bed {
    folder: TempDir,
    memory: TempDir,
    /// In host memory, as on most hosts.
    runtime_root: TempDir,
    pub hand: Hand,
}

impl Bed {
    pub fn make() -> Self {
        Self::make_with("")
    }

    /// As `make`, of machines with these settings.
    pub fn make_with(settings: &str) -> Self {
        let make = |parent: &Path| {
            tempfile::Builder::new().prefix("hearth-pairs-").tempdir_in(parent).expect("a folder of its own")
        };
        let in_memory = || make(Path::new("/dev/shm"));
        let (folder, memory, runtime_root) = (make(&std::env::temp_dir()), in_memory(), in_memory());
        let hand = Hand::listen(&memory.path().join("control.sock"));
        let bed = Self { folder, memory, runtime_root, hand };
        let image = bed.folder.path().join("disk.img");
        File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("a new file");
        // It only has a kernel's magic: the stand-in reads no more.
        let kernel = bed.folder.path().join("kernel");
        fs::write(&kernel, [&[0; 0x202], &b"HdrS"[..], &[0; 64]].concat()).expect("a new file");
        let text = format!(
            "name = \"{}\"\nmemory = \"32MiB\"\nmemory_folder = {:?}\nqemu = {:?}\naccelerator = \"tcg\"\n{settings}\n\
             [boot]\nkernel = {kernel:?}\n[[disks]]\nname = \"root\"\npath = {image:?}\n[crash]\nloop_count = 1000\ndump_folder = {:?}\nmin_free = \"1MiB\"\n",
            NAMES[0],
            bed.memory.path().join(NAMES[0]),
            env!("CARGO_BIN_EXE_fake-qemu"),
            bed.folder.path().join("dumps"),
        );
        fs::write(bed.folder.path().join("machine.toml"), text).expect("a new file");
        bed
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn memory_of(&self, name: &str) -> PathBuf {
        self.memory.path().join(name)
    }

    pub fn runtime_of(&self, name: &str) -> PathBuf {
        self.runtime_root.path().join(name)
    }

    pub fn hearth(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(artifacts::hearth().expect("hearth is built"));
        command.args(arguments).env("HEARTH_RUNTIME_ROOT", self.runtime_root.path()).current_dir(self.folder.path());
        command.stdin(Stdio::null());
        command
    }

    /// The machine's keeper, once the guest runs.
    pub fn running(&self) -> Keeper<'_> {
        self.running_with(&[])
    }

    /// The same, with these environment variables.
    pub fn running_with(&self, variables: &[(&str, &str)]) -> Keeper<'_> {
        let mut command = self.hearth(&["run", "machine.toml"]);
        command.envs(variables.iter().copied());
        let mut keeper = self.spawn(NAMES[0], command);
        keeper.settled(Duration::ZERO).expect("it comes to rest").expect("it starts");
        keeper
    }

    /// Starts a keeper with these arguments of `hearth`, or runs another command.
    pub fn keeper(&self, name: &'static str, arguments: &[&str]) -> Keeper<'_> {
        self.spawn(name, self.hearth(arguments))
    }

    fn spawn(&self, name: &'static str, mut command: Command) -> Keeper<'_> {
        let log = File::options().create(true).append(true).open(self.path("keeper.log"));
        let log = log.expect("a file of its own");
        let said_before = log.metadata().expect("it is open").len();
        let output = log.try_clone().expect("an open file");
        let child = command.stdout(output).stderr(log).spawn().expect("hearth can be run");
        Keeper { bed: self, name, child, said_before }
    }

    /// Processes of either machine that are not keepers.
    pub fn qemus(&self) -> BTreeSet<u32> {
        let pids = processes::mentioning(self.memory.path()).into_iter();
        pids.map(|pid| pid.as_raw_nonzero().get() as u32).collect()
    }

    /// Everything that is left behind although no keeper runs and no guest is parked.
    pub fn left_behind(&self) -> Vec<String> {
        let mut left: Vec<String> = self.qemus().iter().map(|pid| format!("process {pid}")).collect();
        // Keepers that `hearth host-reload prepare` started have the runtime root in their arguments.
        left.extend(processes::mentioning(self.runtime_root.path()).iter().map(|pid| format!("keeper {pid:?}")));
        for name in NAMES {
            let is_waste = |file: &str| {
                let memory = ["ram-", "ledger-", "parked", "tables-"];
                let runtime =
                    ["valves-", "registers-", "disk-", "qmp-", "serial-", "agent-", "userfault-", "api.", "console."];
                memory.iter().chain(&runtime).any(|prefix| file.starts_with(prefix))
            };
            for folder in [self.memory_of(name), self.runtime_of(name)] {
                let files = fs::read_dir(&folder).into_iter().flatten().flatten();
                let names = files.map(|file| file.file_name().to_string_lossy().into_owned());
                left.extend(names.filter(|file| is_waste(file)).map(|file| format!("{name}: {file}")));
            }
        }
        left
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("keeper.log")).unwrap_or_default()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        [&self.folder, &self.memory, &self.runtime_root].iter().for_each(|folder| processes::end_all(folder.path()));
    }
}

/// A keeper that runs or has ended. Dropping it kills the keeper.
pub struct Keeper<'a> {
    bed: &'a Bed,
    pub name: &'static str,
    child: Child,
    /// Length of the log when the keeper was started.
    said_before: u64,
}

impl Keeper<'_> {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is a child")
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("it is a child")
    }

    /// The log since the keeper was started; other keepers on this bed write to it too.
    pub fn said(&self) -> String {
        self.bed.log().get(self.said_before as usize..).unwrap_or_default().to_owned()
    }

    pub fn status(&self) -> MachineStatus {
        self.api().status().expect("the keeper lives")
    }

    /// Pid of the QEMU that the status shows.
    pub fn qemu(&self) -> Option<u32> {
        self.status().qemu.map(|qemu| qemu.pid)
    }

    /// Whether a keeper answers, if only with an error.
    pub fn answers(&self) -> bool {
        self.api().ask("GET", "/v1/status", "").is_ok()
    }

    pub fn api(&self) -> Api {
        Api::new(self.bed.runtime_of(self.name).join("api.sock"))
    }

    /// Waits until the keeper has ended (None), or its machine has been at rest for this long. Returns the last status.
    /// Another keeper's answers do not count: this one may be slow to start, and find the machine free later.
    pub fn settled(&mut self, rest: Duration) -> Result<Option<MachineStatus>, String> {
        let (deadline, mut since) = (Instant::now() + patience(2), Instant::now());
        let mut last: Option<MachineStatus> = None;
        while Instant::now() < deadline {
            if self.ended().is_some() {
                return Ok(None);
            }
            let status = self.api().status().filter(|status| status.keeper.pid == self.pid());
            let machine = |status: &MachineStatus| (status.incarnation, status.qemu.clone(), status.state);
            let is_at_rest = status.as_ref().is_some_and(is_at_rest);
            if !is_at_rest || status.as_ref().map(machine) != last.as_ref().map(machine) {
                since = Instant::now();
            }
            last = status;
            if since.elapsed() >= rest && is_at_rest {
                return Ok(last);
            }
            std::thread::sleep(ASK_EVERY);
        }
        Err(format!("does not come to rest: {last:?}"))
    }
}

fn is_at_rest(status: &MachineStatus) -> bool {
    matches!(status.state, MachineState::Running | MachineState::Paused)
        && status.save.is_none()
        && status.parking_since.is_none()
        && status.rejuvenating_since.is_none()
        && status.dumps.iter().all(|dump| dump.state.is_over())
        && status.disks.iter().all(|disk| disk.connected)
}

/// Why the machine's state does not allow a request: the message of its answer.
#[track_caller]
pub fn refusal((number, body): (u16, String)) -> String {
    assert_eq!(number, 409, "{body}");
    serde_json::from_str::<ApiError>(&body).expect("an error").message
}

impl Drop for Keeper<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Decides the answer to each command.
pub type Orders = Box<dyn FnMut(&str) -> String + Send>;

/// The test's control of the stand-ins: each command passes, or the armed one is held.
#[derive(Clone, Default)]
pub struct Hand(Arc<Mutex<Grip>>);

#[derive(Default)]
struct Grip {
    qemus: BTreeMap<u32, UnixStream>,
    /// Commands since the count began.
    heard: Vec<String>,
    hold_at: Option<usize>,
    /// Pid of the QEMU whose command is held.
    held: Option<u32>,
    /// Decides the answers while no command is held. None: `go`.
    order: Option<Orders>,
}

impl Hand {
    fn listen(socket: &Path) -> Self {
        let (hand, listener) = (Self::default(), UnixListener::bind(socket).expect("a new socket"));
        let all = hand.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let hand = all.clone();
                std::thread::spawn(move || hand.attend(stream));
            }
        });
        hand
    }

    fn grip(&self) -> MutexGuard<'_, Grip> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attend(&self, stream: UnixStream) {
        let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else { return };
        let pid = peer.pid.as_raw_nonzero().get() as u32;
        self.grip().qemus.insert(pid, stream.try_clone().expect("an open socket"));
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let mut grip = self.grip();
            let command = line.trim_start_matches("command ").to_owned();
            let order = grip.order.as_mut().map_or_else(|| "go".to_owned(), |order| order(&command));
            grip.heard.push(command);
            if grip.hold_at == Some(grip.heard.len()) {
                grip.held = Some(pid);
            } else {
                grip.tell(pid, &order);
            }
        }
        let mut grip = self.grip();
        grip.qemus.remove(&pid);
        grip.held.take_if(|held| *held == pid);
    }

    /// Counts commands from now on, and holds the command with this number, from 1.
    pub fn arm(&self, hold_at: Option<usize>) {
        let mut grip = self.grip();
        grip.heard.clear();
        grip.hold_at = hold_at;
    }

    /// Lets all commands pass. Returns the number of the one that was to be held.
    pub fn disarm(&self) -> Option<usize> {
        self.grip().hold_at.take()
    }

    pub fn heard(&self) -> Vec<String> {
        self.grip().heard.clone()
    }

    /// The QEMU whose command is held.
    pub fn held(&self) -> Option<u32> {
        self.grip().held
    }

    /// Answers the held command with this order. No command is held afterwards.
    pub fn release(&self, order: &str) {
        let mut grip = self.grip();
        grip.hold_at = None;
        if let Some(pid) = grip.held.take() {
            grip.tell(pid, order);
        }
    }

    /// Sets the answers to commands from now on.
    pub fn order(&self, order: Option<Orders>) {
        self.grip().order = order;
    }

    /// Makes every guest that runs do this.
    pub fn guests(&self, does: &str) {
        let mut grip = self.grip();
        let pids: Vec<u32> = grip.qemus.keys().copied().collect();
        pids.iter().for_each(|&pid| grip.tell(pid, &format!("guest {does}")));
    }
}

impl Grip {
    fn tell(&mut self, pid: u32, word: &str) {
        if let Some(mut qemu) = self.qemus.get(&pid) {
            // A stand-in that has ended reads nothing.
            let _ = writeln!(qemu, "{word}");
        }
    }
}

/// Kills a process.
pub fn kill(pid: u32) {
    let pid = Pid::from_raw(pid as i32).expect("a pid is not 0");
    let _ = processes::kill(pid);
    processes::wait_end(pid, patience(5));
}

/// Waits until `look` is true, or the time is over.
pub fn wait(limit: Duration, mut look: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if look() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
