//! The keeper's own life and death: killed under load, killed between two QEMUs, stopped in every possible way. The guest and its
//! disks must not notice more than a pause.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hearth_api::{EndCause, EventKind, MachineState, MachineStatus};
use hearth_vmtest::images::File;
use hearth_vmtest::{
    Disk, Drives, Random, Result, TestVm, artifacts, event, known, patience, processes, write_program,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

#[path = "keeper/edited.rs"]
mod edited;
#[path = "keeper/folders.rs"]
mod folders;
#[path = "keeper/full_folders.rs"]
mod full_folders;
#[path = "keeper/sandbox.rs"]
mod sandbox;
#[path = "keeper/starts.rs"]
mod starts;
#[path = "keeper/stuck.rs"]
mod stuck;
#[path = "keeper/users.rs"]
mod users;

/// Keepers killed in one run under load.
const KILLS: u64 = 5;
/// Largest number of writes that a keeper serves before it is killed.
const WRITES_BEFORE_KILL_MAX: u64 = 1200;

/// A guest's boot time on a quiet host, roughly.
const BOOT_MS: u64 = 3000;
/// The time in which firmware and kernel start the disk. A QEMU before 9.1 that loses its disk's server then does not notice the
/// next server.
const START_MS: u64 = 160;

/// fio reads each written block back and verifies it.
const FIO: &str = "fio --name=load --rw=randwrite --bsrange=4k-16k --ioengine=io_uring --iodepth=16 --direct=1 --thread \
    --verify=crc32c --verify_backlog=64 --verify_fatal=1";

/// Polls `hearth status` until `look` accepts it.
fn wait_status(vm: &TestVm, what: &str, look: impl Fn(&MachineStatus) -> bool) -> Result<MachineStatus> {
    let deadline = Instant::now() + patience(20);
    loop {
        let status = vm.status()?;
        if look(&status) {
            return Ok(status);
        }
        assert!(Instant::now() < deadline, "status never showed {what}: {status:?}");
    }
}

fn last_sequence(vm: &TestVm) -> u64 {
    vm.events().last().map_or(0, |event| event.sequence)
}

/// Runs `hearth run` again, and waits until the new keeper has taken over the living QEMU.
fn take_over(vm: &TestVm) -> Result<()> {
    let before = last_sequence(vm);
    vm.restart_keeper()?;
    vm.wait_event("take-over", event!(|event| KeeperTookOver if event.sequence > before))?;
    wait_status(vm, "the disks connected again", |status| status.disks.iter().all(|disk| disk.connected)).map(drop)
}

fn signal(vm: &TestVm) {
    let pid = vm.keeper_pid().and_then(|pid| Pid::from_raw(pid as i32)).expect("the keeper runs");
    kill_process(pid, Signal::TERM).expect("the keeper is a child of this process");
}

/// Files in the memory folder.
fn memory_files(vm: &TestVm) -> Vec<String> {
    let entries = std::fs::read_dir(vm.memory_folder()).expect("the memory folder outlives the machine");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn guest_under_load_survives_killed_keepers() -> Result<()> {
    let mut random = Random::seeded();
    let files = Disk::ext4(64).with_files([File::pattern("kept.bin", 20 << 20, 7)]);
    let vm = TestVm::busybox_with_fio("kills").disk(Disk::empty(48)).disk(files).boot()?;
    let nonce = vm.nonce()?;
    let qemu = vm.qemu_pid()?;
    // The last writes of a killed keeper make memory of their disk invalid, so this disk is only read.
    vm.sh("mkdir -p /d && mount -o ro /dev/vdb /d && probe verify /d/kept.bin 7")?;
    // Long enough for all the kills.
    start_fio(&vm, "/dev/vda", "--size=32m --loops=3")?;
    for round in 1..=KILLS {
        let writes = random.below(WRITES_BEFORE_KILL_MAX as usize) as u64 + 1;
        wait_status(&vm, &format!("{writes} writes in round {round}"), |status| status.disks[0].writes >= writes)?;
        vm.kill_keeper()?;
        take_over(&vm)?;
    }
    known::fio_goes_on(&vm)?;
    known::fio_ends_well(&vm)?;
    let status = vm.status()?;
    assert_eq!((status.incarnation, vm.qemu_pid()?), (1, qemu));
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    let complaints: Vec<_> = vm.guest().kernel_log().into_iter().filter(|line| line.contains("error")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    vm.has_no_disk_errors()?;
    let beginnings =
        vm.events().iter().filter(|event| matches!(event.event, EventKind::IncarnationStarted { .. })).count();
    assert_eq!(beginnings, 1, "a take-over starts no incarnation");
    // This keeper's ledger includes what earlier keepers recorded.
    vm.sh("umount /d; sync")?;
    vm.reset()?;
    vm.wait_incarnation(2)?;
    vm.sh("mkdir -p /d && mount /dev/vdb /d && probe verify /d/kept.bin 7")?;
    let status = vm.status()?;
    assert!(status.ember.pages_served >= 2560, "of 5120 pages: {:?}", status.ember);
    Ok(())
}

/// The console shows all that the guest prints, even while no keeper lives.
#[test]
fn no_console_output_is_lost_between_keepers() -> Result<()> {
    let vm = TestVm::busybox("talks").running()?;
    // The guest waits a second, so that this command's answer does not mix with its words.
    let talk = "sleep 1; word=0; while true; do echo \"word $word.\"; word=$((word + 1)); usleep 5000; done";
    vm.sh(&format!("({talk}) </dev/null >/dev/console 2>&1 &"))?;
    let words = || -> BTreeSet<usize> {
        let lines = vm.guest().lines();
        let number = |line: &String| line.strip_prefix("word ")?.strip_suffix('.')?.parse().ok();
        lines.iter().filter_map(number).collect()
    };
    for _ in 0..3 {
        let heard = words().last().copied().unwrap_or_default();
        vm.kill_keeper()?;
        take_over(&vm)?;
        let deadline = Instant::now() + patience(5);
        while words().last().copied().unwrap_or_default() < heard + 50 {
            assert!(Instant::now() < deadline, "the console is silent after word {heard}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let words = words();
    let lost: Vec<_> = (0..words.len()).filter(|word| !words.contains(word)).take(5).collect();
    assert!(lost.is_empty(), "lost: {lost:?} and maybe more, of {:?}", words.last());
    Ok(())
}

/// Kills keepers at any moment of a guest's boot: the boot completes. Set `ROUNDS=100` for a longer test.
#[test]
fn boot_survives_a_keeper_killed_anytime() -> Result<()> {
    let rounds: u32 = std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let mut random = Random::seeded();
    let vm = TestVm::busybox("boots").disk(Disk::empty(16)).boot()?;
    for incarnation in 2..2 + rounds {
        vm.reset()?;
        vm.wait_event("the next boot", event!(|event| IncarnationStarted if event.incarnation == incarnation))?;
        let moments_ms = if incarnation % 2 == 0 { BOOT_MS } else { START_MS };
        std::thread::sleep(Duration::from_millis(random.below(moments_ms as usize) as u64 + 1));
        vm.kill_keeper()?;
        take_over(&vm)?;
        vm.wait_incarnation(incarnation.into())?;
        vm.sh("dd if=/dev/vda of=/dev/null bs=1M count=1 iflag=direct")?;
    }
    assert_eq!(vm.status()?.incarnation, 1 + rounds);
    Ok(())
}

fn start_fio(vm: &TestVm, device: &str, length: &str) -> Result<()> {
    let load = format!("({FIO} --filename={device} {length} >/tmp/fio.log 2>&1; echo $? >/tmp/fio.status) &");
    vm.sh(&load).map(drop)
}

/// Waits until a process listens at a socket.
fn wait_listener(path: &Path) {
    let deadline = Instant::now() + patience(20);
    while UnixStream::connect(path).is_err() {
        assert!(Instant::now() < deadline, "nobody listens at {}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Makes the keeper die just when QEMU sends the first message to this disk's server.
fn lose_keeper_at_first_message(vm: &TestVm, disk: &str) -> Result<()> {
    let socket = vm.runtime_root().join(vm.name()).join(format!("disk-{disk}.sock"));
    let qemu = vm.qemu_pid()?;
    vm.freeze_qemu()?;
    // `take_over` would not do: this keeper waits for the frozen QEMU, which does not answer before the keeper dies.
    vm.restart_keeper()?;
    wait_listener(&socket);
    vm.kill_keeper()?;
    // The test plays the keeper's server, since the moment cannot be hit from outside.
    std::fs::remove_file(&socket).expect("its keeper was killed");
    let listener = UnixListener::bind(&socket).expect("the socket was removed");
    processes::thaw(qemu).expect("QEMU lives");
    let (mut server, _) = listener.accept().expect("QEMU connects again");
    // GET_FEATURES of vhost-user is a header of three words.
    server.read_exact(&mut [0; 12]).expect("QEMU sends its first message");
    std::fs::remove_file(&socket).expect("it was made above");
    Ok(())
}

/// A QEMU before 9.1 that loses its disk's server in the middle of the first messages does not use the next server, and crashes
/// if its guest is stopped and continued.
#[test]
fn disk_survives_server_death_during_first_messages() -> Result<()> {
    let vm = TestVm::busybox_with_fio("greeting").disk(Disk::empty(16)).disk(Disk::empty(48)).boot()?;
    let nonce = vm.nonce()?;
    start_fio(&vm, "/dev/vdb", "--size=8m --loops=2")?;
    wait_status(&vm, "the load", |status| status.disks[1].writes >= 100)?;
    lose_keeper_at_first_message(&vm, "disk1")?;
    vm.restart_keeper()?;
    vm.wait_event("another QEMU", |event| {
        matches!(event.event, EventKind::Rejuvenated { .. } | EventKind::IncarnationEnded { .. }).then_some(())
    })?;
    known::fio_ends_well(&vm)?;
    assert_eq!((vm.status()?.incarnation, vm.nonce()?), (1, nonce), "it is the same guest");
    vm.has_no_disk_errors()?;
    vm.rejuvenate()
}

/// No other QEMU can take over this guest, so the operator decides when to restart it.
#[test]
fn unusable_disk_is_named_if_qemu_must_stay() -> Result<()> {
    let keys = [("device", "pmem"), ("name", "log"), ("size", "16MiB")];
    let nvram: toml::Table = keys.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
    let vm = TestVm::busybox("named").setting("nvram", vec![nvram]).disk(Disk::empty(16)).boot()?;
    let (nonce, qemu) = (vm.nonce()?, vm.qemu_pid()?);
    lose_keeper_at_first_message(&vm, "disk0")?;
    vm.restart_keeper()?;
    let message = vm.wait_event("the silent disk", event!(Error { message } => message))?;
    assert!(message.contains("QEMU does not use disk disk0") && message.contains("nvram log"), "{message}");
    assert!(message.contains("`hearth reboot named --force`"), "{message}");
    assert_eq!((vm.nonce()?, vm.qemu_pid()?), (nonce, qemu), "it is the same guest");
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    vm.sh("dd if=/dev/vda of=/dev/null bs=1M count=1 iflag=direct").map(drop)
}

#[test]
fn disk_in_which_the_guest_wrote_a_qcow2_header_is_taken_over() -> Result<()> {
    let vm = TestVm::busybox("header").memory_mib(128).disk(Disk::empty(8)).boot()?;
    vm.sh(r"printf 'QFI\373' | dd of=/dev/vda bs=4 conv=fsync 2>/dev/null")?;
    take_over(&vm)?;
    assert_eq!(vm.sh("dd if=/dev/vda bs=3 count=1 2>/dev/null")?, "QFI");
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    vm.stop_at_once()?;
    vm.restart_keeper()?;
    vm.wait_running().map(drop)
}

/// A new keeper takes over a panicked guest that waits for the operator.
#[test]
fn paused_guest_is_taken_over_and_reboots_warm() -> Result<()> {
    let disk = Disk::ext4(64).with_files([File::pattern("kept.bin", 8 << 20, 3)]);
    let vm = TestVm::busybox("paused").setting("on_panic", "pause").disk(disk).boot()?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3")?;
    vm.panic()?;
    vm.wait_event("pause", event!(StateChanged { to: MachineState::Paused, .. }))?;
    let why = vm.status()?.state_why.expect("it is paused");
    assert!(why.contains("panicked") && why.contains("hearth reboot"), "{why}");
    vm.kill_keeper()?;
    take_over(&vm)?;
    wait_status(&vm, "paused again", |status| status.state == MachineState::Paused)?;
    vm.reboot()?;
    vm.wait_incarnation(2)?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3")?;
    let status = vm.status()?;
    assert_eq!(status.cause_of_last_end, Some(EndCause::Panic), "{status:?}");
    assert!(status.ember.pages_served >= 1800, "of 2048 pages: {:?}", status.ember);
    Ok(())
}

/// QEMU runs as another user, which can reach only a few of the keeper's files.
#[test]
fn unprivileged_qemu_reconnects_to_next_keeper() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make QEMU become another user");
        return Ok(());
    }
    let vm = TestVm::busybox("nobody").setting("qemu_user", "nobody").disk(Disk::empty(8)).boot()?;
    // The operator gives access to the parent of the runtime folder; the keeper to the folder itself.
    let parent = vm.runtime_root().parent().expect("the folder of all").to_owned();
    std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o711)).expect("our own folder");
    let qemu = vm.qemu_pid()?.as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{qemu}/status")).expect("QEMU runs");
    let ids = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim).map(str::to_owned);
    assert_eq!(ids("Uid:").as_deref(), Some("65534\t65534\t65534\t65534"));
    assert!(matches!(ids("Seccomp:").as_deref(), Some("2")), "the sandbox is on: {status}");
    let nonce = vm.nonce()?;
    vm.kill_keeper()?;
    vm.restart_keeper_with(&[("AWS_SECRET_ACCESS_KEY", "hush-hush")])?;
    vm.wait_event("take-over", event!(KeeperTookOver))?;
    vm.sh("dd if=/dev/zero of=/dev/vda bs=1M count=4 conv=fsync")?;
    assert_eq!(vm.nonce()?, nonce);
    let mode = |path: &Path| std::fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    let runtime = vm.runtime_root().join("nobody");
    assert_eq!(mode(&runtime), 0o710, "others of this host stay outside");
    for socket in ["api.sock", "console.sock", "disk-disk0.sock"] {
        assert_eq!(mode(&runtime.join(socket)), 0o600, "{socket}");
    }
    for folder in [&runtime, vm.memory_folder()] {
        for entry in std::fs::read_dir(folder).expect("it is there").map(|entry| entry.expect("an entry").path()) {
            assert_eq!(mode(&entry) & 0o077, 0, "{}", entry.display());
        }
    }
    vm.reset()?;
    vm.wait_incarnation(2)?;
    // QEMU does not get its keeper's secrets, and its files cannot grow beyond the guest's memory.
    let qemu = vm.qemu_pid()?.as_raw_nonzero();
    let of_qemu = |what: &str| std::fs::read(format!("/proc/{qemu}/{what}")).expect("QEMU runs");
    let (environment, limits) = (of_qemu("environ"), of_qemu("limits"));
    assert!(!String::from_utf8_lossy(&environment).contains("hush-hush"));
    let limits = String::from_utf8_lossy(&limits).into_owned();
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max file size")).expect("every kernel has it");
    assert!(limit.split_whitespace().next().is_some_and(|limit| limit.parse::<u64>().is_ok()), "{limits}");
    Ok(())
}

/// Whether a disk's server hangs up instead of answering. This process's pid is not QEMU's.
fn is_refused(socket: &Path) -> bool {
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    let Ok(mut connection) = UnixStream::connect(socket) else { return true };
    connection.set_read_timeout(Some(patience(20))).expect("it is not zero");
    // Fails if the server has already closed the connection.
    let asked = connection.write_all(&get_features);
    asked.is_err() || !matches!(connection.read(&mut [0; 20]), Ok(bytes) if bytes > 0)
}

/// A foreign process can open a disk's socket, as any with `qemu_user` may. It tries before, between and after two guests.
#[test]
fn foreign_processes_at_disk_sockets_are_refused() -> Result<()> {
    let vm = TestVm::busybox("strangers").disk(Disk::empty(8)).running()?;
    let socket = vm.runtime_root().join("strangers/disk-disk0.sock");
    assert!(socket.exists() && is_refused(&socket));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let knocking = scope.spawn(|| {
            let mut knocks = 0;
            while !over.load(Relaxed) {
                assert!(is_refused(&socket), "a foreign process was served");
                knocks += 1;
            }
            knocks
        });
        let rebooted = vm.kill_qemu().and_then(|()| vm.wait_incarnation(2));
        let read = rebooted.and_then(|_| vm.sh("dd if=/dev/vda of=/dev/null bs=1M count=8"));
        vm.kill_keeper()?;
        let taken_over = take_over(&vm);
        over.store(true, Relaxed);
        assert!(knocking.join().expect("no attempt was served") > 1);
        read.and(taken_over)
    })?;
    vm.sh("dd if=/dev/zero of=/dev/vda bs=1M count=4 conv=fsync")?;
    let (log, me) = (vm.keeper_log(), format!("pid={}", std::process::id()));
    let warned = |line: &&str| line.contains("closed a connection") && line.contains("disk-disk0.sock");
    assert!(log.lines().filter(warned).any(|line| line.contains(&me)), "{log}");
    vm.has_no_disk_errors()
}

#[test]
fn second_keeper_is_refused_and_sigterm_stops() -> Result<()> {
    let vm = TestVm::busybox("told").disk(Disk::empty(8)).boot()?;
    let config = vm.folder().join("machine.toml").display().to_string();
    let second = vm.cli_output(&["run", &config])?;
    assert_eq!(second.status, 75, "{}", second.text());
    assert!(second.text().contains("told: is already running"), "{}", second.text());
    assert!(memory_files(&vm).iter().any(|file| file == "ram-1"), "{:?}", memory_files(&vm));
    signal(&vm);
    assert_eq!(vm.wait_keeper_end()?.code(), Some(0));
    let causes = || vm.events().iter().filter_map(event!(IncarnationEnded { cause } => cause)).collect::<Vec<_>>();
    assert_eq!(causes(), [EndCause::OperatorStop], "{:#?}", vm.events());
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    // The machine's events survive its end.
    let events = vm.cli(&["events", "told"])?;
    assert!(events.contains("[1]  incarnation ended: stop was ordered"), "{events}");
    assert_eq!(vm.cli_output(&["status", "told"])?.status, 3);

    // Start the machine again; this time the guest powers itself off.
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    vm.guest().start("poweroff -f")?;
    assert_eq!(vm.wait_keeper_end()?.code(), Some(0));
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    assert_eq!(causes(), [EndCause::OperatorStop, EndCause::GuestShutdown]);
    Ok(())
}

/// A guest that ignores its power button is not waited for when the operator insists.
#[test]
fn second_signal_or_force_skips_the_guest() -> Result<()> {
    let vm = TestVm::busybox("deaf").running()?;
    vm.sh("killall acpid")?;
    signal(&vm);
    vm.wait_event("stopping", event!(StateChanged { to: MachineState::Stopping, .. }))?;
    // A guest that ignores the button continues until its time limit.
    vm.sh("true")?;
    signal(&vm);
    assert_eq!(vm.wait_keeper_end()?.code(), Some(0));
    assert_eq!(memory_files(&vm), [] as [&str; 0]);

    let before = last_sequence(&vm);
    vm.restart_keeper()?;
    vm.wait_event("the next start", event!(|event| IncarnationStarted if event.sequence > before))?;
    assert_eq!(vm.stop_at_once()?.code(), Some(0));
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    Ok(())
}

/// A stand-in for QEMU that waits for input before it becomes QEMU, so that the keeper can be killed just then.
struct Gate {
    began: std::fs::File,
}

impl Gate {
    /// Replaces `program` by the stand-in.
    fn close(program: &Path) -> Self {
        let folder = program.parent().expect("a program is in a folder");
        let fifo = folder.join("began");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo is everywhere");
        assert!(made.success());
        // Opened for reading and writing, so that neither side waits for the other.
        let began = std::fs::OpenOptions::new().read(true).write(true).open(&fifo).expect("a pipe of our own");
        let qemu = artifacts::qemu().expect("it ran before").display().to_string();
        let (fifo, never) = (fifo.display(), folder.join("never").display().to_string());
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in *guest=*) echo $$ >{fifo}; mkfifo {never} 2>&-; read -r _ <{never};; esac\nexec {qemu} \"$@\"\n"
        );
        let stand_in = folder.join("stand-in");
        write_program(&stand_in, &script);
        std::fs::rename(&stand_in, program).expect("a link of our own");
        Self { began }
    }

    /// Waits for the stand-in to start, and returns its pid.
    fn wait(&mut self) -> Pid {
        let mut line = Vec::new();
        let mut byte = [0];
        while byte != *b"\n" {
            self.began.read_exact(&mut byte).expect("the pipe stays open");
            line.extend(byte);
        }
        let pid = String::from_utf8_lossy(&line).trim().parse().ok().and_then(Pid::from_raw);
        pid.expect("the stand-in prints its pid")
    }
}

/// Whether a process is gone or a zombie.
fn is_over(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| stat.contains(") Z "))
}

fn real_qemu() -> std::path::PathBuf {
    let qemu = artifacts::qemu().expect("QEMU is installed");
    if qemu.is_absolute() {
        return qemu;
    }
    let path = std::env::var_os("PATH").expect("there is a PATH");
    std::env::split_paths(&path)
        .map(|folder| folder.join(&qemu))
        .find(|path| path.is_file())
        .expect("QEMU is installed")
}

/// The keeper is killed between two QEMUs. Nothing has guarded the disk since, so its memory is not used, and the QEMU that was
/// being started must not reach the disk.
#[test]
fn keeper_killed_between_qemus_causes_cold_start() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let program = home.path().join("qemu");
    std::os::unix::fs::symlink(real_qemu(), &program).expect("a link of our own");
    let disk = Disk::ext4(64).with_files([File::pattern("kept.bin", 8 << 20, 3)]);
    let builder = TestVm::busybox("between").disk(disk).http().setting("qemu", program.display().to_string());
    let vm = builder.boot()?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3")?;
    let mut gate = Gate::close(&program);
    vm.reset()?;
    let stray = gate.wait();
    vm.kill_keeper()?;
    std::fs::remove_file(&program).expect("a file of our own");
    std::os::unix::fs::symlink(real_qemu(), &program).expect("a link of our own");
    vm.restart_keeper()?;
    let warm = event!(|event| IncarnationStarted { warm, .. } if event.incarnation >= 2 => warm);
    assert!(!vm.wait_event("a cold start", warm)?);
    assert!(is_over(stray), "the keeper ends the stray process");
    let said = event!(Error { message } if message.contains("no keeper guarded the disks"));
    assert!(vm.events().iter().any(|event| said(event).is_some()), "{:#?}", vm.events());
    vm.wait_boots(2)?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3")?;
    assert_eq!(vm.status()?.ember.pages_kept, 0);

    // A stray QEMU already holds the machine's port; the keeper must recognise it as its own.
    let before_kill = vm.qemu_pid()?;
    vm.kill_keeper()?;
    let journal = vm.runtime_root().join("between/journal.json");
    let mut text: Value = serde_json::from_slice(&std::fs::read(&journal).expect("the journal")).expect("JSON");
    // The journal as it is before a started QEMU is recorded.
    text["qemu"] = Value::Null;
    let mut file = std::fs::File::create(&journal).expect("the journal");
    file.write_all(text.to_string().as_bytes()).expect("the journal");
    let before = last_sequence(&vm);
    vm.restart_keeper()?;
    vm.wait_event("another cold start", event!(|event| IncarnationStarted if event.sequence > before))?;
    assert_ne!(vm.qemu_pid()?, before_kill);
    vm.wait_boots(3)?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3").map(drop)
}

/// QEMU may end while no keeper is there to see it.
#[test]
fn guest_that_ended_without_keeper_starts_cold() -> Result<()> {
    let disk = Disk::ext4(64).with_files([File::pattern("kept.bin", 8 << 20, 3)]);
    let vm = TestVm::busybox("alone").disk(disk).boot()?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3")?;
    let qemu = vm.qemu_pid()?;
    vm.kill_keeper()?;
    kill_process(qemu, Signal::KILL).expect("QEMU runs");
    // The kernel needs time to free a guest's memory; until then a new keeper would find QEMU alive.
    let deadline = Instant::now() + patience(5);
    while !is_over(qemu) {
        assert!(Instant::now() < deadline, "QEMU does not end");
        std::thread::yield_now();
    }
    vm.restart_keeper()?;
    vm.wait_incarnation(2)?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3")?;
    let status = vm.status()?;
    assert_eq!(status.ember.pages_kept, 0, "{status:?}");
    assert!(status.disks[0].read_image_bytes >= (8 << 20), "{status:?}");
    Ok(())
}
