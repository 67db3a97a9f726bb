//! Every way in which a hop can fail. Before its point of no return the guest continues where it was, with an error that says
//! why. After it, and if the guest's own QEMU has died, a warm reboot follows.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use hearth_api::MachineState;
use hearth_vmtest::clock::Reading;
use hearth_vmtest::{Disk, Drives, Output, Result, TestVm, artifacts, event, known};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};

use super::hops::last_pause_ms;
use super::programs::instead_of_qemu;

const ARGUMENTS: &str = "HEARTH_TEST_ARGUMENTS";
const MANNER: &str = "HEARTH_TEST_MANNER";

/// The disk under load.
const DEVICE: &str = "/dev/vdb";
const DIED: &str = "QEMU has died, so its guest cannot continue in another one; it reboots warm";

/// A machine with stand-ins for its next QEMU, all of which fail.
struct Stand {
    vm: TestVm,
    folder: tempfile::TempDir,
}

impl Stand {
    fn boot(name: &str) -> Result<Self> {
        TestVm::busybox(name).for_both_qemus().disk(Disk::empty(16)).running().map(Self::around)
    }

    fn around(vm: TestVm) -> Self {
        Self { vm, folder: tempfile::tempdir().expect("a folder") }
    }

    fn program(&self, script: &str) -> PathBuf {
        instead_of_qemu(self.folder.path(), script)
    }

    fn impostor(&self, manner: &str) -> PathBuf {
        impostor(self.folder.path(), manner)
    }

    #[track_caller]
    fn check(&self, qemu: &Path, phases: &str, expect: &str) -> Result<()> {
        check(&self.vm, qemu, phases, expect).map(drop)
    }

    /// Asserts that a hop to this QEMU ends the guest in one of these phases (`a|b`), that the error says so, and that the next
    /// guest starts warm.
    #[track_caller]
    fn check_reboot(&self, qemu: &Path, phases: &str) -> Result<()> {
        let vm = &self.vm;
        let (nonce, before) = (vm.nonce()?, vm.status()?.incarnation);
        let hop = vm.rejuvenate_to(qemu)?;
        assert!(hop.status == 1 && hop.text().contains(DIED), "{}", hop.text());
        let failed = event!(|event| RejuvenationFailed { phase, guest_lost, .. } if event.incarnation == before
            => (phase, guest_lost));
        let (failed_phase, guest_lost) = vm.wait_event("a hop that failed", failed)?;
        assert!(phases.split('|').any(|phase| failed_phase == phase) && guest_lost, "{failed_phase}");
        assert_ne!(vm.wait_incarnation(u64::from(before) + 1)?.nonce, nonce, "{phases}: the machine has rebooted");
        let warm = event!(|event| IncarnationStarted { warm, .. } if event.incarnation == before + 1 => warm);
        assert!(vm.wait_event("the next start", warm)?);
        vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1").map(drop)
    }
}

/// A program that runs this test binary in place of QEMU, with this behaviour.
pub fn impostor(folder: &Path, manner: &str) -> PathBuf {
    let this = std::env::current_exe().expect("this process runs");
    let script = format!(
        "{ARGUMENTS}=\"$*\" {MANNER}={manner} exec {} --exact failures::be_a_qemu --ignored --nocapture",
        this.display()
    );
    instead_of_qemu(folder, &script)
}

/// Asserts that a hop fails in one of these phases (`a|b`) with this message, and that the guest did not notice. Returns the
/// failure.
#[track_caller]
pub fn check(vm: &TestVm, qemu: &Path, phases: &str, expect: &str) -> Result<String> {
    let before = (vm.nonce()?, vm.qemu_pid()?);
    let hop = vm.rejuvenate_to(qemu)?;
    check_failed_hop(vm, &hop, &before, phases, expect)
}

/// `before`: the guest's nonce and its QEMU before the hop.
#[track_caller]
fn check_failed_hop(
    vm: &TestVm,
    hop: &Output,
    (nonce, qemu): &(String, Pid),
    phases: &str,
    expect: &str,
) -> Result<String> {
    assert_eq!(hop.status, 1, "{}", hop.text());
    let status = vm.status()?;
    let failure = status.last_rejuvenation.and_then(|hop| hop.failure).unwrap_or_default();
    let in_time = phases.split('|').any(|phase| failure.starts_with(&format!("{phase}: ")));
    assert!(in_time && failure.contains(expect), "{failure}");
    assert!(hop.text().contains("the guest continues on the old QEMU"), "{}", hop.text());
    assert_eq!(status.state, MachineState::Running);
    assert_eq!(vm.qemu_pid()?, *qemu);
    assert_eq!(vm.nonce()?, *nonce, "it is the same guest");
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    Ok(failure)
}

#[test]
fn unusable_new_qemu_is_named() -> Result<()> {
    let stand = Stand::boot("impossible")?;
    stand.check(Path::new("/nowhere/qemu"), "launch", "/nowhere/qemu: there is no such program")?;
    stand.check(&stand.program("echo no memory >&2; exit 1"), "launch", "no memory")?;
    stand.check(&stand.program("kill -SEGV $$"), "launch", "the new QEMU")?;
    stand.vm.rejuvenate()
}

#[test]
fn different_new_qemu_refuses_the_guest() -> Result<()> {
    let stand = Stand::boot("different")?;
    let exchange = |from: &str, to: &str| {
        let script = format!(
            "for a; do shift; case \"$a\" in {from}) a={to};; esac; set -- \"$@\" \"$a\"; done; exec $qemu \"$@\""
        );
        stand.program(&script)
    };
    stand.check(&exchange("virtio-rng-pci,addr=3", "virtio-rng-pci,addr=4"), "hand|resume", "virtio-rng")?;
    stand.check(&exchange("pc-q35-7.2,*", "pc-q35-7.1,memory-backend=ram"), "hand|resume", "pc-q35-7.2")?;
    stand.vm.rejuvenate()
}

#[test]
fn new_qemu_that_hangs_or_dies_is_ended() -> Result<()> {
    let stand = Stand::boot("hanging")?;
    stand.check(&stand.impostor("silent"), "launch", "no answer within 15s")?;
    stand.check(&stand.impostor("without-disks"), "admit", "disk disk0: one of the two QEMUs is not connected")?;
    stand.check(&stand.impostor("deaf"), "launch", "no answer within 5s")?;
    stand.check(&stand.impostor("hangs"), "resume", "the new QEMU hangs")?;
    stand.check(&stand.impostor("dies"), "hand|resume", "the new QEMU ended")?;
    stand.vm.rejuvenate()
}

/// Waits for the end of the load, and asserts that another QEMU can take over then.
fn load_ends_without_a_lost_write(vm: &TestVm) -> Result<()> {
    known::fio_ends_well(vm)?;
    vm.rejuvenate()?;
    vm.has_no_disk_errors()
}

#[test]
fn disconnected_new_qemu_loses_no_write() -> Result<()> {
    let builder = TestVm::busybox_with_fio("dropped").cpus(2).disk(Disk::empty(16)).disk(Disk::empty(48));
    let stand = Stand::around(builder.boot()?);
    let vm = &stand.vm;
    known::start_fio_on(vm, DEVICE)?;
    for _ in 0..2 {
        // If it is slow to drop them, the old QEMU has sent all before, and the new one seems to hang.
        stand.check(&stand.impostor("drops-disks"), "hand|resume", "QEMU")?;
    }
    known::fio_goes_on(vm)?;
    load_ends_without_a_lost_write(vm)
}

/// The old QEMU loses its disks while it sends its state, with requests in flight.
#[test]
fn disconnected_old_qemu_loses_no_write() -> Result<()> {
    const MACHINES_MAX: u32 = 5;
    for _ in 0..MACHINES_MAX {
        match disconnect_old_qemu()? {
            Disconnected::Continues => return Ok(()),
            Disconnected::Aborts => {}
        }
    }
    panic!("QEMU aborted on each of {MACHINES_MAX} machines");
}

enum Disconnected {
    Continues,
    /// As a QEMU before 9.1 does if its log of written pages is about to begin (docs/rejuvenation.md).
    Aborts,
}

/// The moment cannot be hit exactly, so this repeats until one was early enough; on a busy host most are.
fn disconnect_old_qemu() -> Result<Disconnected> {
    const TRIES_MAX: u32 = 40;
    let builder = TestVm::busybox_with_fio("cut").cpus(2).disk(Disk::empty(16)).disk(Disk::empty(48));
    let stand = Stand::around(builder.boot()?);
    let vm = &stand.vm;
    let old = vm.qemu_pid()?;
    if disks_of(old).is_empty() {
        eprintln!("skipped: this user may not trace QEMU");
        return Ok(Disconnected::Continues);
    }
    known::start_fio_on(vm, DEVICE)?;
    let cuts = stand.impostor(&format!("cuts-{}", old.as_raw_nonzero()));
    let mut failures = Vec::new();
    while !failures.last().is_some_and(|failure: &String| failure.starts_with("hand: disk disk")) {
        assert!(failures.len() < TRIES_MAX as usize, "{failures:?}");
        let before = (vm.nonce()?, old);
        let hop = vm.rejuvenate_to(&cuts)?;
        if hop.text().contains(DIED) {
            let how = vm.wait_event("the end of QEMU", event!(QemuExited { how, .. } => how))?;
            assert_eq!(how, "signal 6");
            return Ok(Disconnected::Aborts);
        }
        failures.push(check_failed_hop(vm, &hop, &before, "hand|resume", "")?);
    }
    load_ends_without_a_lost_write(vm)?;
    Ok(Disconnected::Continues)
}

#[test]
fn dead_qemu_is_rebooted_instead_of_replaced() -> Result<()> {
    // After the third death the machine waits.
    let builder = TestVm::busybox("died").disk(Disk::empty(16)).crash_setting("loop_count", 3);
    let builder = builder.crash_setting("loop_window_s", 86_400).crash_setting("loop_delay_s", 3600);
    let stand = Stand::around(builder.crash_setting("loop_delay_max_s", 3600).boot()?);
    let vm = &stand.vm;
    let before_it_is_asked = format!("kill -KILL {}; exec $qemu \"$@\"", vm.qemu_pid()?.as_raw_nonzero());
    stand.check_reboot(&stand.program(&before_it_is_asked), "launch|admit")?;
    let while_it_gives = format!("kills-{}", vm.qemu_pid()?.as_raw_nonzero());
    stand.check_reboot(&stand.impostor(&while_it_gives), "hand|resume")?;
    vm.kill_qemu()?;
    vm.wait_event("a crash loop", event!(CrashLoop))?;
    let refused = vm.cli_output(&["rejuvenate", vm.name()])?;
    assert!(refused.status == 1 && refused.text().contains(DIED), "{}", refused.text());
    vm.reboot()?;
    vm.wait_incarnation(4)?;
    vm.rejuvenate()
}

#[test]
fn new_qemu_not_running_the_guest_is_ended() -> Result<()> {
    let stand = Stand::boot("all-but-running")?;
    stand.check(&stand.impostor("dies-with-all"), "resume", "the new QEMU ended")?;
    stand.check(&stand.impostor("fails-with-all"), "resume", "the new QEMU refused the guest's state")?;
    stand.check(&stand.impostor("stands-with-all"), "resume", "the guest is \"paused\" and not running")?;
    stand.check(&stand.impostor("hangs-with-all"), "resume", "the new QEMU hangs")?;
    stand.vm.rejuvenate()
}

/// The clock of a guest that continues where it was cannot be set. The next QEMU can set it, and later hops keep it right.
#[test]
fn next_hop_restores_clock_after_failed_hop() -> Result<()> {
    let stand = Stand::boot("owed")?;
    let vm = &stand.vm;
    let earlier = Reading::take(vm)?;
    stand.check(&stand.impostor("hangs-with-all"), "resume", "the new QEMU hangs")?;
    let stood_s = last_pause_ms(vm)? / 1e3;
    let behind_s = Reading::take(vm)?.behind_s(&earlier);
    assert!(*behind_s.end() > stood_s / 2.0, "{behind_s:?} of {stood_s}: the clock was not behind");
    for qemu in [artifacts::qemu_10()?, artifacts::installed_qemu()?, artifacts::qemu_10()?] {
        let hop = vm.rejuvenate_to(&qemu)?;
        assert_eq!(hop.status, 0, "{}", hop.text());
        // However long a reading takes, the clock must be nearer to the host's than it was.
        let behind_s = Reading::take(vm)?.behind_s(&earlier);
        let is_right = *behind_s.start() < stood_s / 2.0 && *behind_s.end() > -stood_s / 2.0;
        assert!(is_right, "{}: {behind_s:?} of {stood_s}", qemu.display());
    }
    Ok(())
}

#[test]
fn failure_past_no_return_reboots_warm() -> Result<()> {
    let stand = Stand::boot("no-return")?;
    let vm = &stand.vm;
    stand.check_reboot(&stand.impostor("runs-but-fails"), "resume")?;
    let (nonce, pid) = (vm.nonce()?, vm.qemu_pid()?);
    // A keeper that starts now looks for neither QEMU.
    vm.restart_keeper()?;
    vm.wait_running()?;
    assert_eq!((vm.nonce()?, vm.qemu_pid()?), (nonce, pid), "it is the same guest");
    vm.rejuvenate()
}

#[test]
#[ignore = "not a test: the keeper starts this as QEMU"]
fn be_a_qemu() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else { return };
    let manner = std::env::var(MANNER).expect("it comes with the arguments");
    let number = arguments.split("socket,id=qmp,fd=").nth(1).and_then(|rest| rest.split(',').next()?.parse().ok());
    // SAFETY: the keeper left this descriptor open for QEMU, which is this process.
    let listener = unsafe { UnixListener::from_raw_fd(number.expect("QEMU is given a socket")) };
    let (mut stream, _) = listener.accept().expect("the keeper connects");
    if manner == "silent" {
        forever();
    }
    let connects = |path: &str| {
        let mut disk = UnixStream::connect(path).expect("the disk's server listens");
        // A served connection is answered: GET_FEATURES of vhost-user is a header of three words, and its answer has eight more
        // bytes.
        disk.write_all(&[1_u32, 1, 0].map(u32::to_le_bytes).concat()).expect("the disk's server reads");
        disk.read_exact(&mut [0; 20]).expect("the disk's server answers");
        disk
    };
    let paths = arguments.split(",path=").skip(1).filter_map(|rest| rest.split(',').next());
    let mut disks: Vec<_> = if manner == "without-disks" { Vec::new() } else { paths.map(connects).collect() };
    writeln!(stream, "{}", json!({ "QMP": {} })).expect("the keeper reads");
    let mut descriptors = Vec::new();
    while let Some(line) = next_line(&stream, &mut descriptors) {
        let command: Value = serde_json::from_str(&line).expect("the keeper speaks JSON");
        let incoming = command["execute"] == "migrate-incoming";
        if incoming && manner == "deaf" {
            forever();
        }
        let answer = if command["execute"] == "query-status" { json!({ "status": "paused" }) } else { json!({}) };
        writeln!(stream, "{}", json!({ "return": answer, "id": command["id"] })).expect("the keeper reads");
        if !incoming {
            continue;
        }
        let mut state = std::fs::File::from(descriptors.pop().expect("a channel came before"));
        if manner == "drops-disks" {
            state.read_exact(&mut [0]).expect("the old QEMU sends its state");
            disks.clear();
        }
        if manner == "dies" {
            state.read_exact(&mut [0]).expect("the old QEMU sends its state");
            return;
        }
        if let Some(pid) = manner.strip_prefix("kills-").and_then(|pid| Pid::from_raw(pid.parse().ok()?)) {
            state.read_exact(&mut [0]).expect("the old QEMU sends its state");
            kill_process(pid, Signal::KILL).expect("the old QEMU lives");
        }
        if let Some(pid) = manner.strip_prefix("cuts-").and_then(|pid| Pid::from_raw(pid.parse().ok()?)) {
            state.read_exact(&mut [0]).expect("the old QEMU sends its state");
            let signal = |signal| kill_process(pid, signal).expect("the old QEMU lives");
            signal(Signal::STOP);
            for disk in disks_of(pid) {
                disk.shutdown(Shutdown::Both).expect("it is connected");
            }
            signal(Signal::CONT);
        }
        if manner.ends_with("-with-all") || manner == "runs-but-fails" {
            state.read_to_end(&mut Vec::new()).expect("all of it comes");
            let migration = |status: &str| json!({ "event": "MIGRATION", "data": { "status": status } });
            let says = match manner.as_str() {
                "dies-with-all" => return,
                "fails-with-all" => vec![migration("failed")],
                "stands-with-all" => vec![migration("completed")],
                "runs-but-fails" => vec![migration("failed"), json!({ "event": "RESUME" })],
                _ => Vec::new(),
            };
            let lines: String = says.iter().map(|said| format!("{said}\n")).collect();
            stream.write_all(lines.as_bytes()).expect("the keeper reads");
        }
        descriptors.push(state.into());
    }
}

/// A QEMU's connections to its disks' servers; empty without permission to trace it.
fn disks_of(qemu: Pid) -> Vec<UnixStream> {
    let process = pidfd_open(qemu, PidfdFlags::empty()).expect("it lives");
    let entries = std::fs::read_dir(format!("/proc/{}/fd", qemu.as_raw_nonzero())).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let fetched = numbers.filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok());
    let is_disk = |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("disk-"));
    let is_at_disk =
        |socket: &UnixStream| socket.peer_addr().is_ok_and(|address| address.as_pathname().is_some_and(is_disk));
    fetched.map(UnixStream::from).filter(is_at_disk).collect()
}

/// Reads a line. The descriptors that come along are kept: closing them would be an answer.
fn next_line(stream: &UnixStream, descriptors: &mut Vec<OwnedFd>) -> Option<String> {
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(found) = part {
                descriptors.extend(found);
            }
        }
        match received {
            Ok(message) if message.bytes == 1 && byte[0] == b'\n' => return String::from_utf8(line).ok(),
            Ok(message) if message.bytes == 1 => line.push(byte[0]),
            _ => return None,
        }
    }
}

fn forever() -> ! {
    loop {
        std::thread::park();
    }
}
