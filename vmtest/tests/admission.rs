//! Admission: while memory is short, a guest gets it as it becomes free, and the machine's files never hold more than the budget.
//! These tests hold memory back with a file in the machine's memory folder. It counts like dead memory that must not be released
//! yet.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use hearth_api::AdmissionStatus;
use hearth_vmtest::residency::{Seen, Watch};
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, images, patience};

const RAM_MIB: u64 = 512;
/// Default of `budget_slack`.
const SLACK_PERCENT: u64 = 3;
/// Memory held back. The rest is enough to boot, but not for what the tests do then.
const BALLAST_MIB: u64 = 360;
/// Memory released in one step.
const STEP_MIB: u64 = 24;
const FILL_MIB: u64 = 340;

/// Memory that only the test releases.
struct Ballast {
    file: File,
    mib: u64,
}

impl Ballast {
    fn new(vm: &TestVm) -> Self {
        let mut file =
            File::create(vm.memory_folder().join("ballast")).expect("the machine has made its memory folder");
        (0..BALLAST_MIB).for_each(|_| file.write_all(&vec![1; 1 << 20]).expect("the host has enough memory"));
        Self { file, mib: BALLAST_MIB }
    }

    /// Releases a step. Returns false when nothing is left.
    fn release_step(&mut self) -> bool {
        let left = self.mib.saturating_sub(STEP_MIB);
        self.file.set_len(left << 20).expect("a file can be made shorter");
        std::mem::replace(&mut self.mib, left) > 0
    }
}

/// A machine in its second incarnation with too little memory, and the measurement of its memory folder.
struct Short {
    vm: TestVm,
    ballast: Ballast,
    watch: Watch,
}

impl Short {
    fn new(name: &str, disk: Disk) -> Result<Self> {
        let vm = TestVm::busybox(name).memory_mib(RAM_MIB).setting("admission", "always").disk(disk).boot()?;
        vm.sh("head -c 8388608 /dev/vda >/dev/null")?;
        let ballast = Ballast::new(&vm);
        let watch = Watch::start(vm.memory_folder())?;
        vm.panic()?;
        vm.wait_incarnation(2)?;
        let admission = admission(&vm)?;
        assert!(admission.on, "{admission:?}");
        Ok(Self { vm, ballast, watch })
    }

    fn wait_until_guest_waits(&self) -> Result<AdmissionStatus> {
        let deadline = Instant::now() + patience(20);
        loop {
            let admission = admission(&self.vm)?;
            if admission.waiting > 0 {
                return Ok(admission);
            }
            assert!(Instant::now() < deadline, "the guest never waited: {admission:?}");
        }
    }

    /// Releases memory step by step, as a slow dump would, until the guest has answered.
    fn release_until_answered(&mut self, id: u64) -> Result<()> {
        let deadline = Instant::now() + patience(60);
        loop {
            let more = self.ballast.release_step();
            if let Some(answer) = self.vm.guest().take_answer(id) {
                assert_eq!(answer.status, 0, "{}", answer.text());
                return Ok(());
            }
            assert!(more || Instant::now() < deadline, "the guest does not continue: {:?}", admission(&self.vm)?);
        }
    }
}

fn admission(vm: &TestVm) -> Result<AdmissionStatus> {
    Ok(vm.status()?.memory.admission.expect("QEMU handed its page faults over"))
}

#[track_caller]
fn assert_within_budget(seen: Seen) {
    println!("{seen:?}, {} % of the RAM", seen.peak_bytes * 100 / (RAM_MIB << 20));
    assert!(seen.peak_bytes <= (RAM_MIB << 20) * (100 + SLACK_PERCENT) / 100, "{seen:?}");
    assert!(seen.peak_bytes >= (RAM_MIB << 20) * 9 / 10, "the memory was never short: {seen:?}");
}

/// A command that fills memory that the guest's kernel considers free, and reads all of it again.
fn fill() -> String {
    let bytes = FILL_MIB << 20;
    format!("mkdir /m && mount -t tmpfs -o size=100% m /m && probe fill /m/f {bytes} 7 && probe verify /m/f 7")
}

#[test]
fn guest_waits_for_memory_without_data_loss() -> Result<()> {
    let mut short = Short::new("admission", Disk::empty(64))?;
    let id = short.vm.guest().start(&fill())?;
    let before = short.wait_until_guest_waits()?;
    short.release_until_answered(id)?;
    let after = admission(&short.vm)?;
    println!("while it waited {before:?}, afterwards {after:?}");
    assert!(after.guest_wait_ms > 0, "{after:?}");
    assert_within_budget(short.watch.end()?);
    Ok(())
}

#[test]
fn next_keeper_serves_a_guest_waiting_for_memory() -> Result<()> {
    let mut short = Short::new("admission-keeper", Disk::empty(64))?;
    let nonce = short.vm.nonce()?;
    let id = short.vm.guest().start(&fill())?;
    short.wait_until_guest_waits()?;
    short.vm.restart_keeper()?;
    short.vm.wait_event("the take-over", event!(KeeperTookOver))?;
    let resumed = short.wait_until_guest_waits()?;
    assert!(resumed.on, "{resumed:?}");
    short.release_until_answered(id)?;
    assert_eq!(short.vm.nonce()?, nonce, "the same guest answers");
    assert_within_budget(short.watch.end()?);
    Ok(())
}

#[test]
fn next_qemu_follows_one_killed_waiting_for_memory() -> Result<()> {
    let short = Short::new("admission-qemu", Disk::empty(64))?;
    // Blocks for its dead memory to keep: without dead memory beside it, the next guest needs no admission.
    short.vm.sh("head -c 8388608 /dev/vda >/dev/null")?;
    short.vm.guest().start(&fill())?;
    short.wait_until_guest_waits()?;
    short.vm.kill_qemu()?;
    short.vm.wait_incarnation(3)?;
    assert!(admission(&short.vm)?.on);
    assert_within_budget(short.watch.end()?);
    Ok(())
}

/// A disk's write into memory that the guest never touched takes memory like the guest's own access.
#[test]
fn disks_wait_for_memory_like_the_guest() -> Result<()> {
    let big = images::File::pattern("big", (FILL_MIB as usize) << 20, 5);
    let mut short = Short::new("admission-disk", Disk::ext4(FILL_MIB + 100).with_files([big]))?;
    let id = short.vm.guest().start("mount -o ro,noload /dev/vda /mnt && probe verify /mnt/big 5")?;
    short.release_until_answered(id)?;
    let after = admission(&short.vm)?;
    println!("{after:?}");
    assert_within_budget(short.watch.end()?);
    Ok(())
}

/// A guest that asks for no more memory after its predecessor's dump still gets all of it.
#[test]
fn idle_guest_is_admitted_when_the_dump_ends() -> Result<()> {
    let vm = TestVm::busybox("admission-idle").memory_mib(256).dumps().disk(Disk::empty(64)).boot()?;
    // These are disk blocks, which the dump skips and the ember keeps.
    vm.sh("head -c 67108864 /dev/vda >/dev/null")?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    assert!(vm.status()?.memory.admission.is_some(), "the guest gets memory unit by unit");
    vm.wait_event("the dump's end", event!(DumpComplete))?;
    vm.wait_status("admission's end", |status| status.memory.admission.is_some_and(|admission| !admission.on))?;
    vm.rejuvenate()?;
    vm.save(&vm.folder().join("snapshot"))
}
