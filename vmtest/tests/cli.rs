//! The command line with machines that run, do not run, and cannot run: its output as text and as JSON, and its exit codes.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use hearth_api::EndCause;
use hearth_vmtest::images::File;
use hearth_vmtest::{Disk, Drives, Output, PlainVm, Result, TestVm, TestVmBuilder, artifacts, images, write_program};
use serde_json::Value;

/// Exit codes: the request failed, it was invalid, it may succeed later, the machine does not run.
const FAILED: i32 = 1;
const WRONG: i32 = 2;
const LATER: i32 = 75;
const NOT_RUNNING: i32 = 3;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
}

/// Asserts that `check` and `run` refuse the machine, and that both print `expect`.
fn check(builder: impl Fn() -> TestVmBuilder, expect: &str) -> Result<()> {
    check_code(LATER, builder, expect)
}

fn check_code(code: i32, builder: impl Fn() -> TestVmBuilder, expect: &str) -> Result<()> {
    let checked = builder().check()?;
    assert_eq!(checked.status, code, "{}", checked.text());
    assert!(checked.text().contains(expect), "{expect:?} is not in:\n{}", checked.text());
    let run = builder().run_to_the_end()?;
    assert_eq!(run.status, code, "{}", run.text());
    assert!(run.text().contains(expect), "{expect:?} is not in:\n{}", run.text());
    Ok(())
}

fn machine() -> TestVmBuilder {
    TestVm::busybox("web").disk(Disk::empty(8))
}

#[test]
fn check_names_each_problem_and_its_remedy() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let folder = home.path().display();
    check_code(WRONG, || machine().setting("memroy", "1GiB"), "memroy (line ")?;
    check_code(WRONG, || machine().setting("memroy", "1GiB"), "did you mean memory?")?;
    check_code(
        WRONG,
        || machine().setting("memory", "15TiB"),
        "too little host memory: 16200500 MiB are needed and the host has ",
    )?;
    let missing = format!("{folder}/no.img does not exist");
    check(|| machine().disk(Disk::in_place(&home.path().join("no.img"))), &missing)?;
    check(
        || machine().setting("qemu", format!("{folder}/no-qemu")),
        &format!("error: qemu: {folder}/no-qemu: there is no such program"),
    )?;
    let old = home.path().join("old-qemu");
    write_program(&old, "#!/bin/sh\necho 'QEMU emulator version 6.2.0 (Debian 1:6.2)'\n");
    check(
        || machine().setting("qemu", old.display().to_string()),
        "QEMU 6.2.0 is too old; Hearth needs 7.2.0 or later",
    )?;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let net =
        || [("kind", "user".into()), ("forward", toml::Value::Array(vec![format!("127.0.0.1:{port}:80").into()]))];
    check(|| machine().net(net()), &format!("error: nets[0].forward: TCP port 127.0.0.1:{port} is already in use"))
}

#[test]
fn check_lists_all_problems_also_as_json() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let file = home.path().join("web.toml");
    let text = "name = \"web\"\nmemory = \"64MiB\"\nqemu = \"/nowhere/qemu\"\n[boot]\nkernel = \"no-kernel\"\n\
        [[disks]]\npath = \"no.img\"\n[[nets]]\nkind = \"tap\"\nifname = \"no-tap0\"\n";
    std::fs::write(&file, text).expect("our own file");
    let hearth = |arguments: &[&str]| {
        let mut command = Command::new(artifacts::hearth().expect("hearth is built"));
        command.args(arguments).arg(&file).env("HEARTH_RUNTIME_ROOT", home.path()).stdin(Stdio::null());
        command.output().expect("hearth can be started")
    };
    let checked = hearth(&["check"]);
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert_eq!(checked.status.code(), Some(LATER));
    let subjects = ["boot.kernel", "disk disk0", "qemu", "nets[0].ifname"];
    for subject in subjects {
        assert!(said.contains(&format!("error: {subject}: ")), "{subject} is not in:\n{said}");
    }
    assert!(said.contains("the machine cannot run: 4 errors"), "{said}");
    let problems = json(&String::from_utf8_lossy(&hearth(&["check", "--json"]).stdout));
    let problems = problems.as_array().expect("a list");
    let errors = problems.iter().filter(|problem| problem["severity"] == "error");
    let named: Vec<_> = errors.map(|problem| problem["subject"].as_str().unwrap_or_default()).collect();
    assert_eq!(named, subjects);
    assert!(problems.iter().all(|problem| problem["message"].is_string()), "{problems:?}");
    Ok(())
}

/// The image belongs to another QEMU, which knows nothing of Hearth; only `/proc` shows that.
#[test]
fn image_in_use_by_plain_qemu_is_refused() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let image = home.path().join("shared.img");
    images::empty(&image, 8)?;
    let plain = PlainVm::busybox("owner").drive(&image, "").boot()?;
    let builder = || TestVm::busybox("web").disk(Disk::in_place(&image));
    let checked = builder().check()?;
    assert_eq!(checked.status, LATER, "{}", checked.text());
    let expect = format!("error: disk disk0: disk image {} is in use by process {} (", image.display(), plain.pid());
    assert!(checked.text().contains(&expect), "{}", checked.text());
    assert!(checked.text().contains("stop the program that uses it"), "{}", checked.text());
    plain.sh("dd if=/dev/zero of=/dev/vda bs=4096 count=4 conv=fsync").map(drop)
}

#[test]
fn running_machine_answers_every_command() -> Result<()> {
    let disk = Disk::ext4(64).with_files([File::pattern("kept.bin", 2 << 20, 3)]).setting("name", "data");
    let vm = TestVm::busybox("web").disk(disk).boot()?;
    vm.sh("mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3")?;

    let listed = json(&vm.cli(&["ls", "--json"])?);
    assert_eq!((&listed[0]["name"], &listed[0]["status"]["state"]), (&"web".into(), &"running".into()));
    let line = vm.cli(&["ls"])?;
    assert!(line.lines().any(|line| line.starts_with("web ") && line.contains("running")), "{line}");
    let page = vm.cli(&["status", "web"])?;
    assert!(page.starts_with("web  running, incarnation 1, up ") && page.contains("disk data"), "{page}");
    assert_eq!(vm.status()?.disks[0].name, "data");

    let explained = vm.cli(&["explain", "web"])?;
    assert!(!explained.trim().is_empty(), "it says that there was no recovery yet");
    assert_eq!(vm.explain()?.recovery, None);
    let config = json(&vm.cli(&["config", "web", "--json"])?);
    assert_eq!((&config["name"], &config["on_panic"]), (&"web".into(), &"recover".into()));

    let unknown = vm.cli_output(&["resize", "web", "root"])?;
    assert_eq!(unknown.status, FAILED);
    assert!(unknown.text().contains("web has no disk root; its disks are: data"), "{}", unknown.text());

    // After a recovery there is one to explain.
    vm.cli(&["reboot", "web", "--json"])?;
    vm.wait_incarnation(2)?;
    let recovery = vm.explain()?.recovery.expect("the machine has recovered");
    assert_eq!((recovery.cause, recovery.warm), (EndCause::OperatorReboot, true), "{recovery:?}");
    assert!(recovery.phases.len() >= 4, "{recovery:?}");
    let explained = vm.cli(&["explain", "web"])?;
    assert!(["drain", "bank", "attach", "launch"].iter().all(|phase| explained.contains(phase)), "{explained}");

    check_events_come_once_in_order(&vm)?;
    check_console_is_shared(&vm)?;
    Ok(())
}

/// Events come as text, as JSON, since a sequence number, and to a follower.
fn check_events_come_once_in_order(vm: &TestVm) -> Result<()> {
    let text = vm.cli(&["events", "web", "--json"])?;
    let events: Vec<Value> = text.lines().map(json).collect();
    let sequences: Vec<_> = events.iter().filter_map(|event| event["sequence"].as_u64()).collect();
    let expect: Vec<_> = (1..=sequences.len() as u64).collect();
    assert_eq!(sequences, expect);
    assert_eq!((&events[0]["kind"], &events[0]["machine"]), (&"started".into(), &"web".into()));
    // The memory is noted from time to time, for the report only: such events are not shown as text, and one may come at any time.
    let is_shown = |event: &&Value| event["kind"] != "memory_held";
    let shown: Vec<_> = events.iter().filter(is_shown).collect();
    let last = shown.last().and_then(|event| event["sequence"].as_u64()).expect("some are shown");
    let since = |sequence: u64| vm.cli(&["events", "web", "--since", &sequence.to_string()]);
    assert_eq!((since(last - 1)?.lines().count(), since(last)?), (1, String::new()));
    assert_eq!(vm.cli(&["events", "web"])?.lines().count(), shown.len());
    let followed: Vec<u64> = vm.events().iter().map(|record| record.sequence).collect();
    assert!(followed.starts_with(&sequences), "the follower got the same events: {followed:?}");
    Ok(())
}

/// A second console shows recent and new output, and closing it does not affect the guest.
fn check_console_is_shared(vm: &TestVm) -> Result<()> {
    let mut command = Command::new(artifacts::hearth()?);
    command.args(["console", "web"]).env("HEARTH_RUNTIME_ROOT", vm.runtime_root());
    let mut console =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the binary that runs the machine");
    let mut out = console.stdout.take().expect("it is piped");
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    let ready = vm.guest().ready().last().map(|ready| ready.nonce.clone()).unwrap_or_default();
    while !String::from_utf8_lossy(&seen).contains(&ready) {
        let length = out.read(&mut buffer).expect("the console is open");
        assert_ne!(length, 0, "the console closed after {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..length]);
    }
    // Input from there reaches the guest. No other command has the number 999999.
    let mut keyboard = console.stdin.take().expect("it is piped");
    keyboard.write_all(b"\n999999 ZWNobyB0eXBlZA==\n").expect("the console is open");
    while !String::from_utf8_lossy(&seen).contains(">>>END 999999 0") {
        let length = out.read(&mut buffer).expect("the console is open");
        assert_ne!(length, 0, "the console closed after {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..length]);
    }
    console.kill().expect("it runs");
    console.wait().expect("it is a child of this process");
    assert_eq!(vm.sh("echo alive")?.trim(), "alive");
    Ok(())
}

/// On a real terminal, Ctrl-] leaves the console, the terminal's modes are restored, and the guest continues.
#[test]
fn ctrl_bracket_leaves_the_console() -> Result<()> {
    let vm = TestVm::busybox("web").running()?;
    let (hearth, root) = (artifacts::hearth()?.display().to_string(), vm.runtime_root().display().to_string());
    // `script` provides a terminal; the last command saves its modes for the comparison.
    let inner =
        format!("stty -g >before; HEARTH_RUNTIME_ROOT={root} {hearth} console web; echo code $?; stty -g >after");
    let mut script = Command::new("script")
        .args(["--quiet", "--return", "--command", &inner, "/dev/null"])
        .current_dir(vm.folder())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script is part of every Debian");
    let mut keyboard = script.stdin.take().expect("it is piped");
    let mut out = script.stdout.take().expect("it is piped");
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains("HEARTH-GUEST-READY") {
        let length = out.read(&mut buffer).expect("the terminal is open");
        assert_ne!(length, 0, "the terminal closed after {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..length]);
    }
    keyboard.write_all(b"\x1d").expect("the terminal is open");
    out.read_to_end(&mut seen).expect("the terminal is open");
    assert!(script.wait().expect("it is a child of this process").success());
    let seen = String::from_utf8_lossy(&seen);
    assert!(seen.contains("connected to web; Ctrl-] disconnects"), "{seen}");
    assert!(seen.contains("disconnected; web keeps running") && seen.contains("code 0"), "{seen}");
    let modes = |name: &str| std::fs::read_to_string(vm.folder().join(name)).expect("stty wrote it");
    assert_eq!(modes("before"), modes("after"));
    assert_eq!(vm.sh("echo alive")?.trim(), "alive");
    Ok(())
}

#[test]
fn commands_for_a_stopped_machine_exit_3() {
    let root = tempfile::tempdir().expect("a folder");
    let hearth = |arguments: &[&str], root: &Path| -> Output {
        let mut command = Command::new(artifacts::hearth().expect("hearth is built"));
        let output = command.args(arguments).env("HEARTH_RUNTIME_ROOT", root).output().expect("it can be started");
        Output { status: output.status.code().unwrap_or(-1), bytes: [output.stdout, output.stderr].concat() }
    };
    let verbs: [&[&str]; 8] = [
        &["status", "web"],
        &["explain", "web"],
        &["reboot", "web"],
        &["stop", "web"],
        &["crash", "web"],
        &["console", "web"],
        &["events", "web"],
        &["resize", "web", "disk0"],
    ];
    for verb in verbs {
        let prints_json = verb[0] != "console";
        for json in [&[][..], &["--json"][..]].into_iter().take(1 + usize::from(prints_json)) {
            let output = hearth(&[verb, json].concat(), root.path());
            assert_eq!(output.status, NOT_RUNNING, "{verb:?}: {}", output.text());
            assert!(output.text().contains("web is not running"), "{verb:?}: {}", output.text());
        }
    }
}
