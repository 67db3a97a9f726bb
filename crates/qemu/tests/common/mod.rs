//! A real QEMU for tests: without a guest, with little memory, in its own folder; it never outlives its test.

#![allow(dead_code, reason = "each file of tests is a program of its own and uses its own part of this")]

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use hearth_qemu::launch::{Boot, Launch};
use hearth_qemu::{Accelerator, Binary, EARLIER_MACHINE_TYPE, Process, Qmp, QmpEvent};

/// Limit for what should happen at once, on a host that is busy with other tests.
pub const LONG: Duration = Duration::from_secs(60);
/// Size of the guest's RAM in bytes.
pub const RAM_BYTES: u64 = 32 << 20;

/// The installed QEMU, and the newer one that setup unpacks beside the build, if it exists.
pub fn binaries() -> Vec<Binary> {
    let installed = Binary::find(None).expect("these tests need QEMU: apt-get install qemu-system-x86");
    let newer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/qemu10/usr/bin/qemu-system-x86_64");
    let newer = newer.exists().then(|| Binary::find(Some(&newer)).expect("what setup unpacked works"));
    [installed].into_iter().chain(newer).collect()
}

/// Lets one test at a time run a QEMU.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The launch of a test's QEMU, and its folder.
pub struct Rig {
    folder: tempfile::TempDir,
    /// The launch; tests change it before they start QEMU.
    pub launch: Launch,
}

impl Rig {
    /// Makes a folder and a launch of a stopped QEMU.
    pub fn new() -> Self {
        // RAM on a real tmpfs, as in production.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram_file = folder.path().join("ram-1");
        std::fs::File::create(&ram_file).unwrap().set_len(RAM_BYTES).unwrap();
        let launch = Launch {
            name: "test, with a comma".into(),
            ram_file,
            ram_bytes: RAM_BYTES,
            cpus: 1,
            cpu_model: None,
            accelerator: Accelerator::Tcg,
            machine_type: EARLIER_MACHINE_TYPE.to_owned(),
            boot: Boot::Firmware { code: None, vars: None },
            disks: Vec::new(),
            pmem: Vec::new(),
            nets: Vec::new(),
            serial_socket: folder.path().join("serial.sock"),
            qmp_socket: folder.path().join("qmp.sock"),
            agent_socket: None,
            screen_folder: None,
            preload: None,
            hold_still: false,
            incoming: false,
            sandbox: true,
            confined: true,
            run_as: None,
            watchdog: None,
            vmgenid: None,
            inherited: Vec::new(),
            file_bytes_max: Some(RAM_BYTES),
            extra_args: vec!["-S".into()],
        };
        Self { folder, launch }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn log(&self) -> PathBuf {
        self.path("qemu.log")
    }

    /// Starts QEMU without connecting to it.
    pub fn spawn(&self, binary: &Binary) -> Guarded {
        Guarded(Process::spawn(binary, &self.launch, &self.log()).unwrap())
    }

    /// Starts QEMU and connects to QMP.
    pub fn start(&self, binary: &Binary) -> Living {
        let process = self.spawn(binary);
        let (qmp, events) = connect(&self.launch.qmp_socket, &process.0);
        Living { process, qmp, events }
    }
}

/// Connects to QMP. Panics with QEMU's last words if that fails.
pub fn connect(socket: &Path, process: &Process) -> (Qmp, Receiver<QmpEvent>) {
    let (tell, events) = channel();
    // The test may have dropped the receiver already.
    let qmp = Qmp::connect(socket, LONG, process, move |event| drop(tell.send(event)));
    (qmp.unwrap_or_else(|error| panic!("{error}: {:?}", process.last_words())), events)
}

/// A process that ends with its test, even if the test panics.
pub struct Guarded(pub Process);

impl Drop for Guarded {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// A running QEMU with its QMP session and events.
pub struct Living {
    pub process: Guarded,
    pub qmp: Qmp,
    pub events: Receiver<QmpEvent>,
}

impl Living {
    /// Waits for an event; others may come before it.
    pub fn wait_for(&self, wanted: impl Fn(&QmpEvent) -> bool) -> QmpEvent {
        let mut seen = Vec::new();
        loop {
            match self.events.recv_timeout(LONG) {
                Ok(event) if wanted(&event) => return event,
                Ok(event) => seen.push(event),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("only {seen:?}; QEMU: {:?}", self.process.0.last_words())
                }
            }
        }
    }
}

/// Waits for the end of a process and returns its exit status as text.
pub fn end_of(process: &Process) -> String {
    let (tell, told) = channel();
    process.watch(move |how| drop(tell.send(how))).unwrap();
    told.recv_timeout(LONG).expect("the process ends")
}
