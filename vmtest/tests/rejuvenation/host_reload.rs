//! Host reloads, simulated with `--drill`: guests wait in memory without QEMU and keeper, and continue. A guest whose memory,
//! devices or disks have changed meanwhile does not; its machine boots instead, and says why.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hearth_recovery::rejuvenation::parked::{ParkPhase, ResumePhase};
use hearth_vmtest::clock::Reading;
use hearth_vmtest::fleet::FleetServer;
use hearth_vmtest::known::{count, counts_beyond, fill, start_counter, verify};
use hearth_vmtest::{Disk, Drives, Output, Result, TestVm, TestVmBuilder, artifacts, event, faults};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::programs::{instead_of_qemu, no_successor};

const WRITES: &str = "dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1 && sync";

fn machine(name: &str) -> TestVmBuilder {
    TestVm::busybox(name).for_both_qemus().memory_mib(256).disk(Disk::empty(16))
}

fn host_reload(vm: &TestVm, verb: &str, options: &[&str]) -> Result<Output> {
    let record = vm.folder().join("record.json").display().to_string();
    vm.cli_output(&[&["host-reload", verb, "--record", &record], options].concat())
}

fn must(output: Output) -> String {
    assert_eq!(output.status, 0, "{}", output.text());
    output.text()
}

/// Parks all machines in the runtime root of `vm`, and waits for the end of its keeper only.
pub fn park(vm: &TestVm) -> Result<String> {
    let said = must(host_reload(vm, "prepare", &["--drill"])?);
    assert!(vm.wait_keeper_end()?.success());
    Ok(said)
}

pub fn resume(vm: &TestVm) -> Result<String> {
    let said = must(host_reload(vm, "resume", &[])?);
    vm.wait_running()?;
    Ok(said)
}

/// This machine's part of the record.
fn outcome(vm: &TestVm) -> Result<Value> {
    Ok(outcomes(vm)?.into_iter().find(|line| line["name"] == vm.name()).expect("it was prepared"))
}

/// The record that this machine's commands use.
fn outcomes(vm: &TestVm) -> Result<Vec<Value>> {
    let said = must(host_reload(vm, "status", &["--json"])?);
    Ok(said.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect())
}

#[test]
fn parked_guest_continues_with_memory_and_disk() -> Result<()> {
    let vm = machine("park").cpus(2).boot()?;
    fill(&vm, 64)?;
    start_counter(&vm)?;
    let nonce = vm.nonce()?;
    vm.sh("probe fill /tmp/block 4194304 5 && dd if=/tmp/block of=/dev/vda bs=64k conv=fsync 2>&1")?;
    for reload in 0..2 {
        let counted = count(&vm)?;
        let qemu = vm.qemu_pid()?;
        park(&vm)?;
        // An ended process whose status nobody has collected has an empty command line.
        let command_line = fs::read(format!("/proc/{}/cmdline", qemu.as_raw_nonzero())).unwrap_or_default();
        assert!(command_line.is_empty(), "the parked machine's QEMU has ended");
        let said = outcome(&vm)?;
        assert_eq!((&said["outcome"], &said["runs"]), (&"parked".into(), &false.into()), "{said}");
        assert!(said["stands_ms"].is_u64(), "{said}");
        check_commands_show_it_parked(&vm)?;
        let said = resume(&vm)?;
        assert!(said.contains("park: resumed, paused for"), "{said}");
        assert_eq!(vm.nonce()?, nonce, "reload {reload}: it is the same guest");
        counts_beyond(&vm, counted)?;
        verify(&vm)?;
        vm.sh("dd if=/dev/vda of=/tmp/back bs=64k count=64 iflag=direct 2>&1 && cmp /tmp/block /tmp/back")?;
        vm.sh("dd if=/tmp/block of=/dev/vda bs=64k conv=fsync oflag=direct 2>&1")?;
        let said = outcome(&vm)?;
        assert_eq!((&said["outcome"], &said["runs"]), (&"resumed".into(), &true.into()), "{said}");
        let status = vm.status()?;
        assert_eq!((status.incarnation, status.unparked.map(|unparked| unparked.host_reloaded)), (1, Some(false)));
        assert!(said["stood_ms"].as_u64() >= Some(1), "{said}");
        end_keeper(&vm)?;
    }
    // A second resume does nothing.
    assert_eq!(must(host_reload(&vm, "resume", &[])?), "");
    let left: Vec<_> =
        fs::read_dir(vm.memory_folder()).expect("its folder").flatten().map(|file| file.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("parked")), "{left:?}");
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    Ok(())
}

#[test]
fn restore_over_a_parked_guest_is_refused() -> Result<()> {
    let vm = machine("covered").running()?;
    let nonce = vm.nonce()?;
    let snapshot = vm.folder().join("snapshot");
    vm.save(&snapshot)?;
    park(&vm)?;
    let clone = vm.folder().join("clone").display().to_string();
    let refused = vm.cli_output(&["restore", &snapshot.display().to_string(), "--folder", &clone])?;
    let text = refused.text();
    let says = format!("covered: already has a guest, parked in {}", vm.memory_folder().display());
    assert!(refused.status != 0 && text.contains(&says), "{text}");
    assert!(!Path::new(&clone).exists(), "the refused restore leaves no folder");
    resume(&vm)?;
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    Ok(())
}

fn check_commands_show_it_parked(vm: &TestVm) -> Result<()> {
    let told = vm.cli_output(&["status", vm.name(), "--json"])?;
    assert_eq!(told.status, 3, "{}", told.text());
    let told: Value = serde_json::from_str(&told.text()).expect("JSON");
    let parked = &told["parked"];
    assert_eq!(parked["memory_folder"], vm.memory_folder().display().to_string(), "{told}");
    assert!(parked["ram_bytes"] == 256 << 20 && parked["resident_bytes"].as_u64() > Some(64 << 20), "{told}");
    assert!(parked["incarnation"] == 1 && parked["host_reloaded"] == false, "{told}");
    let listed: Value = serde_json::from_str(&vm.cli(&["ls", "--json"])?).expect("JSON");
    assert_eq!(listed[0]["parked"]["since"], parked["since"], "{listed}");
    let words = vm.cli(&["ls"])?;
    assert!(words.lines().any(|line| line.starts_with(&format!("{}  parked", vm.name()))), "{words}");
    let refused = vm.cli_output(&["reboot", vm.name()])?;
    let text = refused.text();
    assert!(refused.status == 3 && text.contains("resume it with `hearth host-reload resume`"), "{text}");
    Ok(())
}

/// Kills the keeper that `resume` started, and starts one that the test can wait for.
fn end_keeper(vm: &TestVm) -> Result<()> {
    vm.kill_foreign_keeper()?;
    vm.restart_keeper()?;
    vm.wait_running().map(drop)
}

/// A change to a parked guest, and the machine's message about it.
struct Fault {
    happens: fn(&TestVm, PathBuf),
    says: &'static str,
}

fn edit(path: &Path, change: impl FnOnce(&File, u64)) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("it is there");
    let length = file.metadata().expect("it has a size").len();
    change(&file, length);
}

/// Script of a QEMU that expects incoming guests to have another machine type.
const OTHER_MACHINE_TYPE: &str = "case \"$*\" in *-incoming*) for word; do shift
case \"$word\" in pc-q35-7.2,*) word=pc-q35-7.1${word#pc-q35-7.2};; esac; set -- \"$@\" \"$word\"; done;; esac
exec $qemu \"$@\"";

/// Sets a key of the machine's configuration, or removes it.
fn configure(vm: &TestVm, key: &str, value: Option<toml::Value>) {
    let file = vm.config_file();
    let mut table: toml::Table = fs::read_to_string(file).expect("it is read").parse().expect("it is TOML");
    match value {
        Some(value) => table.insert(key.to_owned(), value),
        None => table.remove(key),
    };
    fs::write(file, table.to_string()).expect("it is written");
}

/// Empties a folder in memory, as a power cut would.
fn empty(folder: &Path) {
    for entry in fs::read_dir(folder).expect("it is there") {
        fs::remove_file(entry.expect("an entry").path()).expect("it is removed");
    }
}

const FAULTS: [Fault; 9] = [
    Fault {
        happens: |_, ram| {
            faults::overwrite_pages(&ram, 1, 5).expect("a page is overwritten");
        },
        says: "its checksum differs",
    },
    Fault { happens: |_, ram| fs::remove_file(ram).expect("it is removed"), says: "cannot be opened as RAM file" },
    Fault {
        happens: |_, ram| edit(&ram, |file, length| file.set_len(length - 4096).expect("it is cut")),
        says: "bytes, and had",
    },
    Fault {
        happens: |vm, _| {
            edit(&vm.memory_folder().join("parked-state"), |file, length| {
                let mut byte = [0];
                file.read_exact_at(&mut byte, length / 2).expect("it is read");
                file.write_all_at(&[byte[0] ^ 1], length / 2).expect("it is written");
            });
        },
        says: "its checksum is wrong",
    },
    Fault {
        happens: |vm, _| {
            edit(&vm.memory_folder().join("parked.json"), |file, length| file.set_len(length / 2).expect("it is cut"));
        },
        says: "ends without a checksum",
    },
    Fault {
        happens: |vm, _| {
            edit(&vm.folder().join("disk0.img"), |file, length| {
                file.write_all_at(b"x", length - 1).expect("it is written");
            });
        },
        says: "disk0.img was changed since",
    },
    Fault { happens: |vm, _| empty(vm.memory_folder()), says: "its memory is lost: " },
    Fault {
        happens: |vm, _| fs::remove_file(vm.memory_folder().join("parked.json")).expect("it is removed"),
        says: "it was given up: parked.json was removed",
    },
    Fault {
        happens: |vm, _| {
            let qemu = instead_of_qemu(vm.folder(), OTHER_MACHINE_TYPE);
            configure(vm, "qemu", Some(qemu.display().to_string().into()));
        },
        says: "QEMU did not load the state of its devices",
    },
];

#[test]
fn changed_parked_guest_boots_instead_of_resuming() -> Result<()> {
    let vm = machine("changed").boot()?;
    vm.sh("echo kept | dd of=/dev/vda bs=512 seek=7 conv=notrunc,fsync,sync 2>&1")?;
    for Fault { happens, says } in FAULTS {
        let (nonce, incarnation) = (vm.nonce()?, vm.status()?.incarnation);
        park(&vm)?;
        happens(&vm, vm.ram_file(incarnation.into()));
        resume(&vm)?;
        let said = outcome(&vm)?;
        let why = said["why"].as_str().unwrap_or_default();
        assert!(said["outcome"] == "booted" && why.contains(says), "{says}: {said}");
        vm.wait_event(says, event!(ParkedLost { why } if why.contains(says)))?;
        let ready = vm.wait_incarnation(vm.status()?.incarnation.into())?;
        assert_ne!(ready.nonce, nonce, "{says}: the machine has booted");
        let kept = vm.sh("dd if=/dev/vda bs=512 skip=7 count=1 iflag=direct 2>/dev/null | head -n 1")?;
        assert_eq!(kept.trim(), "kept", "{says}: the disk is unchanged");
        end_keeper(&vm)?;
    }
    Ok(())
}

/// After a power cut only the host's disks are left: the machine's images, and the record.
#[test]
fn machines_boot_with_reason_after_power_loss() -> Result<()> {
    const WORDS: &str = "its memory is lost: ";
    let vm = machine("dark").running()?;
    let nonce = vm.nonce()?;
    vm.sh("echo kept | dd of=/dev/vda bs=512 seek=7 conv=notrunc,fsync,sync 2>&1")?;
    park(&vm)?;
    let runtime_folder = vm.runtime_root().join(vm.name());
    empty(vm.memory_folder());
    empty(&runtime_folder);
    let said = resume(&vm)?;
    assert!(said.contains(&format!("dark: booted, because its guest could not resume: {WORDS}")), "{said}");
    assert_ne!(vm.wait_boots(2)?.nonce, nonce, "the machine has booted");
    let kept = vm.sh("dd if=/dev/vda bs=512 skip=7 count=1 iflag=direct 2>/dev/null | head -n 1")?;
    assert_eq!(kept.trim(), "kept");
    let unparked = vm.status()?.unparked.expect("it was parked");
    assert!(unparked.lost.as_ref().is_some_and(|why| why.starts_with(WORDS)), "{unparked:?}");
    let told = vm.cli(&["events", vm.name()])?;
    assert!(told.contains(&format!("the parked guest cannot resume; the machine boots instead: {WORDS}")), "{told}");
    let log = fs::read_to_string(runtime_folder.join("keeper.log")).expect("its log");
    assert!(log.contains("the parked guest cannot resume"), "{log}");
    assert_eq!(outcome(&vm)?["outcome"], "booted");
    // The loss is reported once, since the record holds the outcome.
    end_keeper(&vm)?;
    assert!(vm.stop_at_once()?.success());
    empty(&runtime_folder);
    let record = vm.folder().join("record.json").display().to_string();
    vm.restart_keeper_with(&[("HEARTH_HOST_RELOAD_RECORD", &record)])?;
    assert_eq!(vm.wait_running()?.unparked, None);
    Ok(())
}

#[test]
fn clock_of_a_parked_guest_is_corrected() -> Result<()> {
    let vm = machine("clock").running()?;
    let earlier = Reading::take(&vm)?;
    park(&vm)?;
    std::thread::sleep(Duration::from_secs(3));
    resume(&vm)?;
    let behind_s = Reading::take(&vm)?.behind_s(&earlier);
    let stood_s = vm.status()?.unparked.and_then(|unparked| unparked.stood_ms).expect("it resumed") / 1e3;
    assert!(stood_s > 3.0, "{stood_s}");
    // However long a reading takes, the clock must be nearer to the host's than it was.
    assert!(*behind_s.start() < stood_s / 2.0 && *behind_s.end() > -stood_s / 2.0, "{behind_s:?} of {stood_s}");
    vm.sh(WRITES).map(drop)
}

/// NVRAM is kept like the guest's own memory, with a mirror or without, and is checked like it.
#[test]
fn nvram_is_parked_with_its_guest() -> Result<()> {
    let files = tempfile::tempdir().expect("a folder");
    let mirror = files.path().join("mirror").display().to_string();
    let device = |entries: &[(&str, &str)]| {
        let entries = entries.iter().map(|(key, value)| ((*key).to_owned(), toml::Value::from(*value)));
        toml::Value::from(entries.collect::<toml::Table>())
    };
    let nvram = vec![
        device(&[("name", "plain"), ("size", "4MiB"), ("mirror", "none")]),
        device(&[("name", "kept"), ("size", "4MiB"), ("mirror", "async"), ("mirror_file", &mirror)]),
    ];
    let vm = machine("nvram").setting("nvram", nvram).boot()?;
    let nonce = vm.nonce()?;
    let write = |what: &str| {
        let each =
            format!("echo {what} $d | dd of=/dev/$d bs=512 seek=100 conv=fsync,notrunc,sync 2>/dev/null || exit 1");
        vm.sh(&format!("for d in vdb vdc; do {each}; done"))
    };
    let read = || {
        let said = vm.sh(
            "for d in vdb vdc; do dd if=/dev/$d bs=512 skip=100 count=1 iflag=direct 2>/dev/null | head -n 1; done",
        );
        Ok::<_, hearth_vmtest::Error>(said?.replace('\0', ""))
    };
    write("one")?;
    park(&vm)?;
    let mirrored = fs::read(&mirror).expect("the mirror");
    assert!(mirrored[51200..].starts_with(b"one vdc"), "the mirror is complete while the machine is parked");
    resume(&vm)?;
    assert_eq!((vm.nonce()?, read()?), (nonce.clone(), "one vdb\none vdc\n".to_owned()));
    write("two")?;
    end_keeper(&vm)?;
    park(&vm)?;
    edit(&vm.memory_folder().join("nvram-plain"), |file, _| file.write_all_at(b"x", 9).expect("it is written"));
    resume(&vm)?;
    let said = outcome(&vm)?;
    let why = said["why"].as_str().unwrap_or_default();
    assert!(said["outcome"] == "booted" && why.contains("nvram-plain: is not what the guest left"), "{said}");
    assert_ne!(vm.wait_incarnation(2)?.nonce, nonce);
    assert_eq!(read()?, "two vdb\ntwo vdc\n", "the next guest reads the flushed data");
    Ok(())
}

#[test]
fn parked_guest_is_kept_until_problem_is_fixed() -> Result<()> {
    let vm = machine("patient").running()?;
    let nonce = vm.nonce()?;
    park(&vm)?;
    let qemu = artifacts::qemu()?;
    let qemu = qemu.is_absolute().then(|| qemu.display().to_string().into());
    let wrong = no_successor(vm.folder()).display().to_string();
    configure(&vm, "qemu", Some(wrong.into()));
    let down = host_reload(&vm, "resume", &[])?;
    let text = down.text();
    assert!(down.status == 1 && text.contains("patient: down: its keeper ended"), "{text}");
    assert_eq!(outcome(&vm)?["outcome"], "down");
    let says = "QEMU does not respond";
    vm.wait_event(says, event!(Error { message } if message.contains(says)))?;
    configure(&vm, "qemu", qemu);
    // A change for the next guest does not stop the resume.
    configure(&vm, "cpus", Some(2.into()));
    resume(&vm)?;
    assert_eq!(outcome(&vm)?["outcome"], "resumed");
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    vm.sh(WRITES).map(drop)
}

#[test]
fn guest_continues_after_keeper_dies_while_parking() -> Result<()> {
    let vm = machine("dies").running()?;
    let nonce = vm.nonce()?;
    for phase in ParkPhase::ALL {
        let name = phase.name();
        vm.restart_keeper_with(&[("HEARTH_DRILL_DIE_AFTER", name)])?;
        vm.wait_running()?;
        // QEMU has connected to its disk. One before 9.1 may end when a disk that is just starting loses its server, which is not
        // tested here.
        vm.sh(WRITES)?;
        let prepared = host_reload(&vm, "prepare", &["--drill"])?;
        vm.wait_keeper_end()?;
        if phase == ParkPhase::Leave {
            must(prepared);
            resume(&vm)?;
        } else {
            let text = prepared.text();
            assert!(prepared.status == 1 && text.contains("dies: its keeper ended"), "{name}: {text}");
        }
        vm.wait_running()?;
        assert_eq!(vm.nonce()?, nonce, "{name}: it is the same guest");
        vm.sh(WRITES)?;
        end_keeper(&vm)?;
    }
    assert_eq!(vm.status()?.incarnation, 1);
    Ok(())
}

/// Script of a QEMU that learns late that it has connected to its disk's server.
const SLOW_TO_CONNECT: &str = "exec strace -D -f --seccomp-bpf -qq -o /dev/null -e trace=connect \
-e inject=connect:delay_exit=700000 $qemu \"$@\"";

/// The next keeper waits for QEMU, not only for its own server. Otherwise this QEMU would end.
#[test]
fn paused_guest_continues_if_qemu_connects_slowly() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let qemu = instead_of_qemu(folder.path(), SLOW_TO_CONNECT);
    let vm = machine("slow").setting("qemu", qemu.display().to_string()).boot()?;
    let nonce = vm.nonce()?;
    vm.restart_keeper_with(&[("HEARTH_DRILL_DIE_AFTER", ParkPhase::State.name())])?;
    vm.wait_running()?;
    vm.sh(WRITES)?;
    let prepared = host_reload(&vm, "prepare", &["--drill"])?;
    assert_eq!(prepared.status, 1, "{}", prepared.text());
    vm.wait_running()?;
    // A keeper's death that this QEMU does not notice: it lost the one before while the guest was paused.
    end_keeper(&vm)?;
    assert_eq!((vm.nonce()?, vm.status()?.incarnation), (nonce, 1), "it is the same guest");
    vm.sh(WRITES).map(drop)
}

#[test]
fn guest_is_kept_when_keeper_dies_resuming() -> Result<()> {
    let vm = machine("wakes").running()?;
    let nonce = vm.nonce()?;
    for phase in ResumePhase::ALL {
        let name = phase.name();
        park(&vm)?;
        vm.restart_keeper_with(&[("HEARTH_DRILL_DIE_AFTER", name)])?;
        assert!(!vm.wait_keeper_end()?.success(), "{name}: the keeper should have died");
        vm.restart_keeper()?;
        vm.wait_running()?;
        assert_eq!(vm.nonce()?, nonce, "{name}: it is the same guest");
        vm.sh(WRITES)?;
        must(host_reload(&vm, "resume", &[])?);
    }
    assert_eq!(vm.status()?.incarnation, 1);
    Ok(())
}

/// Starts `prepare` with its output going to `out`.
fn start_prepare(vm: &TestVm, out: impl Into<Stdio>, options: &[&str]) -> Result<Child> {
    let mut command = Command::new(artifacts::hearth()?);
    command.env("HEARTH_RUNTIME_ROOT", vm.runtime_root()).args(["host-reload", "prepare", "--drill", "--record"]);
    command.arg(vm.folder().join("record.json")).args(options).stdout(out).stderr(Stdio::piped());
    Ok(command.spawn().expect("hearth can be started"))
}

#[test]
fn guests_resume_if_output_fails_or_cancelled() -> Result<()> {
    let vm = machine("unheard").running()?;
    let (nonce, fleet) = (vm.nonce()?, FleetServer::start(1).expect("a server"));
    let check_resumed = |prepare: Child, why: &str| -> Result<()> {
        let said = prepare.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        assert_eq!(said.status.code(), Some(1), "{text}");
        assert!(text.contains(&format!("host reload failed, the host keeps its kernel: {why}")), "{text}");
        assert!(vm.wait_keeper_end()?.success());
        vm.wait_running()?;
        assert_eq!(vm.nonce()?, nonce, "it is the same guest");
        assert_eq!(outcome(&vm)?["outcome"], "resumed");
        assert_eq!(fleet.holders(), Vec::<String>::new());
        end_keeper(&vm)
    };
    let options = ["--fleet-lock", fleet.url(), "--fleet-id", "host-1"];
    let full = OpenOptions::new().write(true).open("/dev/full").expect("it is there");
    // Output before the first guest is paused would fail, too.
    check_resumed(start_prepare(&vm, full, &[])?, "cannot write the output")?;
    let record = vm.folder().join("record.json");
    fs::remove_file(&record).expect("it is there");
    let prepare = start_prepare(&vm, Stdio::piped(), &options)?;
    while !record.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&prepare), Signal::INT).expect("it runs");
    check_resumed(prepare, "it was cancelled")?;
    assert_eq!(vm.status()?.incarnation, 1);
    Ok(())
}

#[test]
fn unfit_host_returns_its_fleet_slot() -> Result<()> {
    let vm = machine("late").running()?;
    let (before, fleet) = (vm.qemu_pid()?, FleetServer::start(0).expect("a server"));
    let file = vm.config_file().to_owned();
    let prepared = std::thread::scope(|scope| {
        let options = ["--drill", "--fleet-lock", fleet.url(), "--fleet-id", "host-1", "--fleet-wait", "1m"];
        let vm = &vm;
        let prepare = scope.spawn(move || host_reload(vm, "prepare", &options));
        while fleet.asked().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        fs::rename(&file, file.with_extension("aside")).expect("its configuration");
        fleet.add_slot();
        prepare.join().expect("prepare does not panic")
    })?;
    let text = prepared.text();
    assert!(prepared.status == 1 && text.contains("cannot prepare, and nothing was stopped: late: "), "{text}");
    assert_eq!(fleet.holders(), Vec::<String>::new());
    assert_eq!(fleet.asked().last().map(String::as_str), Some("/v1/steady-state default/host-1"));
    assert_eq!(vm.qemu_pid()?, before, "nothing was stopped");
    Ok(())
}

#[test]
fn one_failed_park_resumes_the_others() -> Result<()> {
    let first = machine("first").running()?;
    let second = machine("second").beside(&first).running()?;
    let third = machine("third").beside(&first).running()?;
    let nonces = [first.nonce()?, third.nonce()?];
    let stays = third.qemu_pid()?;
    // The frozen QEMU does not answer the request to pause its guest.
    second.freeze_qemu()?;
    let prepared = host_reload(&first, "prepare", &["--drill", "--parallel", "1"])?;
    let text = prepared.text();
    assert_eq!(prepared.status, 1, "{text}");
    assert!(text.contains("first: parked in"), "{text}");
    assert!(text.contains("first: resumed, paused for"), "{text}");
    assert!(text.contains("host reload failed, the host keeps its kernel: second: hold: "), "{text}");
    assert!(first.wait_keeper_end()?.success());
    first.wait_running()?;
    assert_eq!([first.nonce()?, third.nonce()?], nonces);
    assert_eq!(third.qemu_pid()?, stays, "the machine kept its QEMU");
    // Its QEMU hung and was ended, which causes a reboot.
    second.wait_incarnation(2)?;
    Ok(())
}

#[test]
fn keep_going_names_machines_not_parked() -> Result<()> {
    let first = machine("parks").running()?;
    let second = machine("cannot").beside(&first).running()?;
    let third = machine("orphan").beside(&first).running()?;
    let nonces = [first.nonce()?, second.nonce()?];
    let stays = second.qemu_pid()?;
    // The second machine's configuration is missing; the third machine has no keeper.
    let file = second.config_file().to_owned();
    let aside = file.with_extension("aside");
    fs::rename(&file, &aside).expect("its configuration");
    third.kill_keeper()?;
    let prepared = host_reload(&first, "prepare", &["--drill", "--keep-going"])?;
    let text = prepared.text();
    assert_eq!(prepared.status, 1, "{text}");
    for says in ["parks: parked in", "cannot: not parked: ", "is missing", "orphan: not parked: its keeper has died"] {
        assert!(text.contains(says), "{says}: {text}");
    }
    assert!(text.contains("1 parked, 2 not"), "{text}");
    assert!(first.wait_keeper_end()?.success());
    let noted = outcomes(&first)?;
    let noted: Vec<_> = noted.iter().map(|line| (line["name"].as_str(), line["outcome"].as_str())).collect();
    assert_eq!(noted, [(Some("cannot"), Some("not_parked")), (Some("parks"), Some("parked"))]);
    resume(&first)?;
    assert_eq!([first.nonce()?, second.nonce()?], nonces);
    assert_eq!(second.qemu_pid()?, stays, "the machine kept its QEMU");
    fs::rename(&aside, &file).expect("its configuration");
    Ok(())
}

#[test]
fn unfit_host_is_refused_before_anything_stops() -> Result<()> {
    let vm = machine("unfit").running()?;
    let before = (vm.nonce()?, vm.qemu_pid()?);
    let checked = host_reload(&vm, "prepare", &["--check"])?;
    let text = checked.text();
    assert_eq!(checked.status, 1, "{text}");
    assert!(text.contains("the guest's memory would be lost with this kernel"), "{text}");
    assert!(text.contains("(host)  no ") && text.contains("kexec"), "{text}");
    for options in [&[][..], &["--keep-going"]] {
        let refused = host_reload(&vm, "prepare", options)?;
        let text = refused.text();
        assert!(refused.status == 1 && text.contains("cannot prepare, and nothing was stopped: this host: "), "{text}");
    }
    let refused = host_reload(&vm, "prepare", &["--drill", "--kexec"])?;
    assert!(refused.status == 2 && refused.text().contains("cannot be used with"), "{}", refused.text());
    assert_eq!(host_reload(&vm, "status", &[])?.status, 1, "nothing was recorded");
    let fit = must(host_reload(&vm, "prepare", &["--check", "--drill"])?);
    assert!(fit.lines().any(|line| line.split_whitespace().eq(["unfit", "yes"])), "{fit}");
    assert_eq!((vm.nonce()?, vm.qemu_pid()?), before);
    Ok(())
}

#[test]
fn fleet_lock_is_held_from_prepare_to_resume() -> Result<()> {
    let vm = machine("fleet").running()?;
    let before = (vm.nonce()?, vm.qemu_pid()?);
    let (full, free) = (FleetServer::start(0).expect("a server"), FleetServer::start(1).expect("a server"));
    let options = |url| {
        ["--drill", "--fleet-lock", url, "--fleet-group", "workers", "--fleet-id", "host-1", "--fleet-wait", "0s"]
    };
    let refused = host_reload(&vm, "prepare", &options(full.url()))?;
    let text = refused.text();
    assert!(refused.status == 1 && text.contains("refused: semaphore currently full"), "{text}");
    assert_eq!(full.asked(), ["/v1/pre-reboot workers/host-1"]);
    assert_eq!((vm.nonce()?, vm.qemu_pid()?), before, "nothing was stopped");

    must(host_reload(&vm, "prepare", &options(free.url()))?);
    assert!(vm.wait_keeper_end()?.success());
    assert_eq!(free.holders(), ["workers/host-1"]);
    resume(&vm)?;
    assert_eq!(free.holders(), Vec::<String>::new());
    assert_eq!(free.asked(), ["/v1/pre-reboot workers/host-1", "/v1/steady-state workers/host-1"]);
    assert_eq!(vm.nonce()?, before.0);
    Ok(())
}
