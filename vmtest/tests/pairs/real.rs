//! Pairs on real guests: two operations a random moment apart, and sometimes a death. A seeded sample.

use std::time::Duration;

use hearth_api::{MachineState, MachineStatus};
use hearth_vmtest::{Disk, Random, Result, TestVm, processes};

/// Commands of `hearth`. FOLDER is a new folder each time.
const OPERATIONS: [&[&str]; 10] = [
    &["reboot"],
    &["reboot", "--force"],
    &["crash"],
    &["save", "-o", "FOLDER"],
    &["save", "-o", "FOLDER", "--stop"],
    &["rejuvenate"],
    &["upgrade-keeper"],
    &["dump"],
    &["dump", "--pause"],
    &["stop", "--force"],
];
/// A hop and a save take some 300 ms.
const APART_MS: usize = 400;
const PAIRS: usize = 4;
const PAIRS_OF_SOAK: usize = 200;

fn perform(vm: &TestVm, operation: &[&str], folder: &str) {
    let words = operation.iter().map(|word| if *word == "FOLDER" { folder } else { word });
    let mut arguments: Vec<&str> = words.collect();
    arguments.insert(1, vm.name());
    // The command may be refused or cut off. The test checks what it leaves.
    let _ = vm.cli_output(&arguments);
}

fn is_at_rest(status: &MachineStatus) -> bool {
    status.state == MachineState::Running
        && status.save.is_none()
        && status.rejuvenating_since.is_none()
        && status.dumps.iter().all(|dump| dump.state.is_over())
}

fn play(vm: &TestVm, random: &mut Random, number: usize) -> Result<()> {
    let (first, second) = (random.of(&OPERATIONS), random.of(&OPERATIONS));
    let (apart, later) = (random.below(APART_MS) as u64, random.below(APART_MS / 4) as u64);
    let dies = random.of(&["", "", "keeper", "QEMU"]);
    eprintln!("pair {number}: {first:?}, {apart} ms later {second:?}, {later} ms later dies {dies:?}");
    let folder = |which: u8| vm.folder().join(format!("save-{number}-{which}")).display().to_string();
    std::thread::scope(|scope| -> Result<()> {
        scope.spawn(|| perform(vm, first, &folder(1)));
        std::thread::sleep(Duration::from_millis(apart));
        scope.spawn(|| perform(vm, second, &folder(2)));
        std::thread::sleep(Duration::from_millis(later));
        match dies {
            "keeper" => vm.kill_keeper(),
            "QEMU" => vm.kill_qemu().or(Ok(())),
            _ => Ok(()),
        }
    })?;
    // Start the next keeper if this one ended with its machine, or was killed.
    if vm.cli_output(&["status", vm.name()])?.status != 0 {
        vm.restart_keeper()?;
    }
    vm.wait_status("the machine is at rest", is_at_rest)?;
    vm.await_console()?;
    let qemu = vm.qemu_pid()?;
    assert_eq!(processes::mentioning(vm.memory_folder()), [qemu], "QEMUs that are nobody's");
    Ok(())
}

fn pairs(number: usize, mut random: Random) -> Result<()> {
    let vm = TestVm::busybox("pairs").memory_mib(128).disk(Disk::empty(16)).crash_setting("loop_count", 1000).boot()?;
    for number in 0..number {
        play(&vm, &mut random, number)?;
    }
    Ok(())
}

/// The same pairs each time, at other moments. The soak draws new pairs.
#[test]
fn pairs_on_a_real_guest_leave_it_running() -> Result<()> {
    pairs(PAIRS, Random::seeded_or(7))
}

#[test]
#[ignore = "a soak: make soak NAME=pairs"]
fn hundreds_of_pairs_on_a_real_guest() -> Result<()> {
    pairs(PAIRS_OF_SOAK, Random::seeded())
}
