//! A real QEMU of each available version: starting, QMP, its end, and adoption.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::{LONG, RAM_BYTES, Rig, alone, binaries, connect, end_of};
use hearth_qemu::launch::DiskDevice;
use hearth_qemu::{Process, ProcessError, ProcessId, Qmp, QmpError, QmpEvent, is_like_started, kernel_has_landlock};

#[test]
fn qemu_answers_and_keeps_its_sockets_private() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let living = rig.start(&binary);
        assert_eq!(living.qmp.run_state().unwrap(), "prelaunch", "QEMU {}", binary.version());
        let told = living.qmp.execute(qapi_qmp::query_version {}).unwrap().qemu;
        assert_eq!((told.major, told.minor), (binary.version().major.into(), binary.version().minor.into()));
        for socket in [&rig.launch.qmp_socket, &rig.launch.serial_socket] {
            let mode = std::fs::metadata(socket).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", socket.display());
        }
        UnixStream::connect(&rig.launch.serial_socket).unwrap();
    }
}

#[test]
fn sandbox_is_on() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let living = rig.start(&binary);
        let status = format!("/proc/{}/status", living.process.0.id().pid);
        let status = std::fs::read_to_string(status).unwrap();
        assert!(status.lines().any(|line| line == "Seccomp:\t2"), "QEMU {}: {status}", binary.version());
        // Its own filter, and the keeper's. (Kernels before 5.9 do not say how many there are.)
        let filters = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:\t"));
        assert!(filters.is_none_or(|filters| filters == "2"), "QEMU {}: {status}", binary.version());
    }
}

/// A guest that has taken over its QEMU could make these calls itself; here QMP makes QEMU do so.
#[test]
fn confined_qemu_opens_only_its_own_files() {
    if !kernel_has_landlock() {
        return eprintln!("skipped: this kernel has no Landlock");
    }
    let _alone = alone();
    for binary in binaries() {
        for confined in [true, false] {
            let mut rig = Rig::new();
            rig.launch.confined = confined;
            std::fs::write(rig.path("tag.key"), [1; 512]).unwrap();
            let living = rig.start(&binary);
            let monitor = |line: String| {
                let command = qapi_qmp::human_monitor_command { command_line: line, cpu_index: None };
                living.qmp.execute(command).unwrap()
            };
            let (key, new) = (rig.path("tag.key"), rig.path("new"));
            let read = monitor(format!("drive_add 0 if=none,id=x,readonly=on,format=raw,file={}", key.display()));
            let write = monitor(format!("pmemsave 0 16 \"{}\"", new.display()));
            let refused = [read, write].map(|said| said.contains("Permission denied"));
            assert_eq!(refused, [confined; 2], "QEMU {}", binary.version());
            assert_eq!(new.exists(), !confined, "QEMU {}", binary.version());
        }
    }
}

#[test]
fn started_qemus_and_others_of_their_program_are_known() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        // As if `qemu` named a program of any name, with its modules beside it.
        let (renamed, prefix) = (rig.path("bin/emulator"), binary.path().parent().unwrap().parent().unwrap());
        std::fs::create_dir(rig.path("bin")).unwrap();
        std::fs::copy(binary.path(), &renamed).unwrap();
        for beside in ["lib", "share"] {
            std::os::unix::fs::symlink(prefix.join(beside), rig.path(beside)).unwrap();
        }
        let mut other = Command::new(&renamed);
        other.args(["-M", "none", "-nodefaults", "-display", "none", "-S"]);
        let other = KillOnDrop(other.spawn().unwrap());
        assert!(!is_like_started(other.0.id()), "nothing was started");
        let living = rig.start(&hearth_qemu::Binary::find(Some(&renamed)).unwrap());
        let pids = [living.process.0.id().pid, other.0.id(), std::process::id()];
        assert_eq!(pids.map(is_like_started), [true, true, false], "QEMU {}", binary.version());
    }
}

struct KillOnDrop(std::process::Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[test]
fn qemu_becomes_the_configured_user() {
    let _alone = alone();
    if !rustix::process::geteuid().is_root() {
        // Only root can change the user; the command line has a unit test in `launch`.
        return;
    }
    for binary in binaries() {
        let mut rig = Rig::new();
        rig.launch.run_as = Some("nobody".into());
        let living = rig.start(&binary);
        let status = std::fs::read_to_string(format!("/proc/{}/status", living.process.0.id().pid)).unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        assert_eq!(field("Uid:"), "65534\t65534\t65534\t65534", "QEMU {}", binary.version());
        assert_eq!((field("NoNewPrivs:").as_str(), field("Seccomp:").as_str()), ("1", "2"));
    }
}

#[test]
fn qemu_runs_in_its_own_session() {
    let _alone = alone();
    let rig = Rig::new();
    let living = rig.start(&binaries()[0]);
    let pid = rustix::process::Pid::from_raw(living.process.0.id().pid as i32).unwrap();
    assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid);
}

/// SeaBIOS finds nothing to boot and halts. The reset comes from QMP, but has the effect of a guest's: QEMU ends.
#[test]
fn reset_is_reported_and_ends_qemu() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let living = rig.start(&binary);
        living.qmp.execute(qapi_qmp::system_reset {}).unwrap();
        let event = living.wait_for(|event| matches!(event, QmpEvent::Shutdown { .. }));
        assert_eq!(event, QmpEvent::Shutdown { guest: false, reason: "host-qmp-system-reset".into() });
        assert_eq!(end_of(&living.process.0), "exit code 0");
        assert!(living.process.0.has_ended());
    }
}

#[test]
fn quit_is_reported_and_later_commands_fail() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let living = rig.start(&binary);
        living.qmp.execute(qapi_qmp::quit {}).unwrap();
        let event = living.wait_for(|event| matches!(event, QmpEvent::Shutdown { .. }));
        assert_eq!(event, QmpEvent::Shutdown { guest: false, reason: "host-qmp-quit".into() });
        assert_eq!(end_of(&living.process.0), "exit code 0");
        let refusal = living.qmp.run_state().unwrap_err();
        assert!(matches!(refusal, QmpError::Ended | QmpError::Send { .. }), "{refusal}");
    }
}

#[test]
fn stop_and_resume_are_reported() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let living = rig.start(&binary);
        living.qmp.execute(qapi_qmp::cont {}).unwrap();
        living.wait_for(|event| *event == QmpEvent::Resumed);
        living.qmp.execute(qapi_qmp::stop {}).unwrap();
        living.wait_for(|event| *event == QmpEvent::Stopped);
        assert_eq!(living.qmp.run_state().unwrap(), "paused");
    }
}

#[test]
fn registers_come_without_the_memory() {
    let _alone = alone();
    for binary in binaries() {
        let mut rig = Rig::new();
        rig.launch.cpus = 2;
        let living = rig.start(&binary);
        let paused = living.qmp.registers(LONG).unwrap();
        assert_eq!(&paused[..4], b"\x7fELF", "QEMU {}", binary.version());
        assert!((1_000..32_000).contains(&paused.len()), "{} bytes of {RAM_BYTES}", paused.len());
        assert_eq!(living.qmp.run_state().unwrap(), "prelaunch");
        living.qmp.resume().unwrap();
        assert_eq!(living.qmp.registers(LONG).unwrap().len(), paused.len());
        assert_eq!(living.qmp.run_state().unwrap(), "running");
    }
}

/// A stopped QEMU (SIGSTOP) must not block a caller that asks for registers.
#[test]
fn stopped_qemu_does_not_block_registers() {
    let _alone = alone();
    let rig = Rig::new();
    let living = rig.start(&binaries()[0]);
    let pid = rustix::process::Pid::from_raw(living.process.0.id().pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let refusal = living.qmp.registers(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(refusal, QmpError::Silent { command: "getfd", .. }), "{refusal}");
}

#[test]
fn qemu_accepts_nmi_sysrq_and_power_button() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let living = rig.start(&binary);
        living.qmp.inject_nmi().unwrap();
        living.qmp.type_sysrq_crash().unwrap();
        living.qmp.system_powerdown().unwrap();
    }
}

#[test]
fn refusals_carry_qemus_own_words() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let living = rig.start(&binary);
        let monitor = |line: &str| {
            let (command_line, cpu_index) = (line.to_owned(), None);
            living.qmp.execute(qapi_qmp::human_monitor_command { command_line, cpu_index })
        };
        assert!(monitor("info status").unwrap().contains("paused"));
        let device = qapi_qmp::device_del { id: "nothing".into() };
        let refusal = living.qmp.execute(device).unwrap_err().to_string();
        assert!(refusal.starts_with("QMP: device_del: Device 'nothing' not found"), "{refusal}");
        // The session still works.
        assert_eq!(living.qmp.run_state().unwrap(), "prelaunch");
    }
}

#[test]
fn killed_qemu_is_reported_as_ended() {
    let _alone = alone();
    let rig = Rig::new();
    let living = rig.start(&binaries()[0]);
    assert!(!living.process.0.has_ended());
    living.process.0.kill();
    assert_eq!(end_of(&living.process.0), "signal 9");
    assert!(living.process.0.has_ended());
    living.process.0.kill();
}

#[test]
fn invalid_argument_is_reported_at_once() {
    let _alone = alone();
    for binary in binaries() {
        let mut rig = Rig::new();
        rig.launch.extra_args.push("-no-such-option".into());
        let process = rig.spawn(&binary);
        let refusal = Qmp::connect(&rig.launch.qmp_socket, LONG, &process.0, |_| {}).unwrap_err();
        assert!(matches!(refusal, QmpError::Ended), "{refusal}");
        assert_eq!(end_of(&process.0), "exit code 1");
        let words = process.0.last_words().unwrap();
        assert!(words.contains("-no-such-option: invalid option"), "{words}");
    }
}

#[test]
fn qemu_without_disk_server_does_not_answer() {
    let _alone = alone();
    let mut rig = Rig::new();
    let socket = rig.path("disk.sock");
    rig.launch.disks = vec![DiskDevice { id: "root".into(), socket, queues: 1, queue_size: 128 }];
    let process = rig.spawn(&binaries()[0]);
    // QEMU waits for the disk's server before it answers.
    let patience = std::time::Duration::from_millis(50);
    let refusal = Qmp::connect(&rig.launch.qmp_socket, patience, &process.0, |_| {}).unwrap_err().to_string();
    assert!(refusal.contains("no answer within 50ms") || refusal.contains("QEMU has ended"), "{refusal}");
}

#[test]
fn qemu_of_dead_keeper_is_adopted() {
    let _alone = alone();
    for binary in binaries() {
        let rig = Rig::new();
        let first = rig.start(&binary);
        let id = first.process.0.id();
        // The dead keeper's session is closed with it.
        drop(first.qmp);
        let adopted = Process::adopt(id, &rig.log()).unwrap();
        let (qmp, _events) = connect(&rig.launch.qmp_socket, &adopted);
        assert_eq!(qmp.run_state().unwrap(), "prelaunch");
        adopted.kill();
        assert_eq!(end_of(&first.process.0), "signal 9");
        let refusal = Process::adopt(id, &rig.log()).unwrap_err().to_string();
        assert_eq!(refusal, format!("process {} has ended, or another process has its ID now", id.pid));
    }
}

#[test]
fn reused_pid_is_not_adopted() {
    let mut other = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let id = ProcessId { pid: other.id(), start_ticks: 1 };
    assert!(matches!(Process::adopt(id, Path::new("/no/log")), Err(ProcessError::Gone { .. })));
    // The other process is alive, neither killed nor reaped.
    assert!(other.try_wait().unwrap().is_none());
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn unusable_socket_path_is_named() {
    let _alone = alone();
    let binary = &binaries()[0];
    let mut rig = Rig::new();
    rig.launch.qmp_socket = rig.path("no/such/qmp.sock");
    let refusal = Process::spawn(binary, &rig.launch, &rig.log()).unwrap_err().to_string();
    assert!(refusal.ends_with("no/such/qmp.sock: cannot listen on this socket"), "{refusal}");
}

#[test]
fn qemu_is_found_by_its_ram_file() {
    let _alone = alone();
    let rig = Rig::new();
    let living = rig.start(&binaries()[0]);
    let mut onlooker =
        Command::new("tail").arg("-f").arg(&rig.launch.ram_file).stdout(std::process::Stdio::null()).spawn().unwrap();
    let found = || hearth_qemu::processes_naming(&rig.path("ram-"));
    assert_eq!(found(), [living.process.0.id().pid]);
    assert_eq!(hearth_qemu::processes_naming(&rig.path("ram-2")), [] as [u32; 0]);
    assert!(hearth_qemu::kill_stray(living.process.0.id().pid));
    assert_eq!(end_of(&living.process.0), "signal 9");
    assert_eq!(found(), [] as [u32; 0]);
    onlooker.kill().unwrap();
    onlooker.wait().unwrap();
}

#[test]
fn answers_reach_the_caller_that_asked() {
    let _alone = alone();
    let rig = Rig::new();
    let living = rig.start(&binaries()[0]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(living.qmp.run_state().unwrap(), "prelaunch");
                    let name = living.qmp.execute(qapi_qmp::query_name {}).unwrap().name;
                    assert_eq!(name.as_deref(), Some(rig.launch.name.as_str()));
                }
            });
        }
    });
}
