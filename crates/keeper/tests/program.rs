//! The program itself: what it prints, where, and its exit codes. No machine is started here.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::BootSet;
use hearth_disk::image::ImageFile;
use hearth_disk::tag::Tagger;
use hearth_keeper::{Hub, Place};
use hearth_qemu::Endpoint;
use hearth_recovery::fast_remount::saved;
use hearth_recovery::images::{DiskNote, at_rest};
use rustix::process::{Pid, Signal, kill_process};

fn hearth(root: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(arguments)
        .env("HEARTH_RUNTIME_ROOT", root)
        .env_remove("HEARTH_LOG")
        .output()
        .expect("cargo has built the program")
}

/// Exit code, standard output, standard error.
fn check(root: &Path, arguments: &[&str], code: i32, stdout: &str, stderr: &str) {
    let output = hearth(root, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let found = (output.status.code(), text(&output.stdout), text(&output.stderr));
    assert_eq!(found, (Some(code), stdout.to_owned(), stderr.to_owned()), "hearth {arguments:?}");
}

#[test]
fn stopped_machine_gives_exit_code_3() {
    let root = tempfile::tempdir().unwrap();
    let error = format!(
        "hearth: web is not running; no machine runs in {}; start one with `hearth run FILE`\n",
        root.path().display()
    );
    for verb in ["status", "explain", "reboot", "stop", "crash", "console", "events"] {
        check(root.path(), &[verb, "web"], 3, "", &error);
    }
    let nothing = format!("no machine in {}; start one with `hearth run FILE`\n", root.path().display());
    check(root.path(), &["ls"], 0, &nothing, "");
    check(root.path(), &["ls", "--json"], 0, "[]\n", "");
}

#[test]
fn json_that_would_be_ignored_is_refused() {
    let root = tempfile::tempdir().unwrap();
    for (arguments, what) in [
        (&["view", "web"][..], "`hearth view`"),
        (&["restore", "/srv/web-1", "--as", "web"], "`hearth restore`"),
        (&["report", "web", "-o", "-"], "a report on standard output"),
    ] {
        let error = format!("hearth: {what} prints no JSON: leave out --json\n");
        check(root.path(), &[arguments, &["--json"]].concat(), 2, "", &error);
    }
}

#[test]
fn top_needs_a_terminal() {
    let root = tempfile::tempdir().unwrap();
    let error = "hearth: `hearth top` needs a terminal; `hearth ls` lists the machines without one\n";
    check(root.path(), &["top"], 1, "", error);
}

#[test]
fn host_serves_page_and_metrics_without_libvirt() {
    let root = tempfile::tempdir().unwrap();
    let host = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.arg("host").args(arguments).env("HEARTH_RUNTIME_ROOT", root.path()).env("PATH", "/nowhere");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("cargo has built the program")
    };
    let output = host(&[]).wait_with_output().unwrap();
    let error = "hearth: virsh is not installed (Debian: apt install libvirt-clients)\n";
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(1), error));
    let textfile = root.path().join("hearth.prom");
    let mut child = host(&["--web", "127.0.0.1:0", "--textfile", textfile.to_str().unwrap()]);
    let mut address = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let address = address.trim().trim_start_matches("http://").trim_end_matches('/').to_owned();
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.write_all(format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"), "{answer}");
    await_file(&textfile);
    assert!(textfile.exists());
    assert_eq!(child.try_wait().unwrap(), None, "it goes on without virsh");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn host_waits_for_its_address_beside_its_other_work() {
    let root = tempfile::tempdir().unwrap();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["host", "--web", &address]).env("HEARTH_RUNTIME_ROOT", root.path()).env("PATH", "/nowhere");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("cargo has built the program");
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("no page yet; trying again")));
    assert!(said.any(|line| line.contains("domains are not looked after")), "it goes on");
    drop(other);
    let mut url = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
    assert_eq!(url, format!("http://{address}/\n"));
    TcpStream::connect(&address).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // An address that no host can have: link-local, without an interface.
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["host", "--web", "[fe80::1]:9180", "--allow-remote"]).env("HEARTH_RUNTIME_ROOT", root.path());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("cargo has built the program");
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.next().unwrap().starts_with("hearth: cannot listen at [fe80::1]:9180: "));
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[test]
fn absent_libvirt_is_asked_rarely_and_told_once() {
    let root = tempfile::tempdir().unwrap();
    let [tools, calls, errors] = ["tools", "calls", "errors"].map(|name| root.path().join(name));
    fs::create_dir(&tools).unwrap();
    let virsh = tools.join("virsh");
    let script = format!("#!/bin/sh\necho >>{}\necho 'error: no socket' >&2\nexit 1\n", calls.display());
    fs::write(&virsh, script).unwrap();
    fs::set_permissions(&virsh, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["host", "--runtime-root"]).arg(root.path()).env("PATH", &tools).stdout(Stdio::null());
    let begun = Instant::now();
    let mut child = command.stderr(fs::File::create(&errors).unwrap()).spawn().expect("cargo has built the program");
    // Two followers, at 0, 1 and 3 s.
    while fs::read(&calls).unwrap_or_default().len() < 6 && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let took = begun.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(took > Duration::from_millis(2500), "the pauses do not grow: {took:?}");
    let said = fs::read_to_string(&errors).unwrap();
    assert!(said.lines().count() == 1 && said.contains("virsh event: no socket"), "{said}");
}

#[test]
fn machine_that_cannot_run_has_failed_until_it_is_stopped() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("web.toml");
    let run = || hearth(root.path(), &["run", file.to_str().unwrap()]).status.code();
    let failure = || {
        let output = hearth(root.path(), &["events", "web"]);
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().last().filter(|line| line.ends_with("starting -> failed")).map(|_| text.clone())
    };
    assert_eq!((run(), failure()), (Some(2), None), "there is no such machine");
    assert!(!root.path().join("web").exists());
    fs::write(&file, "name = \"web\"\nmemory = \"a lot\"\n").unwrap();
    assert_eq!(run(), Some(2));
    assert!(failure().unwrap().contains("web.toml: the machine cannot run: memory: "), "{:?}", failure());
    let disk = root.path().join("no-disk");
    fs::write(&file, format!("name = \"web\"\nmemory = \"64MiB\"\n[[disks]]\npath = {disk:?}\n")).unwrap();
    assert_eq!(run(), Some(75));
    let events = failure().unwrap();
    assert!(events.contains("the machine cannot run now: disk disk0: disk image "), "{events}");
    assert_eq!(run(), Some(75));
    assert_eq!(failure().unwrap(), events, "each try would fill the log");
    // What systemd does after a failure.
    let mut systemds = Command::new(env!("CARGO_BIN_EXE_hearth"));
    systemds.args(["stop", "web"]).env("HEARTH_RUNTIME_ROOT", root.path()).env("SERVICE_RESULT", "exit-code");
    assert_eq!(systemds.output().unwrap().status.code(), Some(3));
    assert_eq!(failure().unwrap(), events);
    let stopped = hearth(root.path(), &["stop", "web"]);
    assert_eq!(stopped.status.code(), Some(0));
    assert!(String::from_utf8(stopped.stdout).unwrap().ends_with("failed -> stopped\n"));
    assert_eq!(failure(), None);
    assert_eq!(hearth(root.path(), &["stop", "web"]).status.code(), Some(3));
    assert_eq!(run(), Some(75));
    assert!(failure().is_some(), "it fails anew");
}

#[test]
fn events_control_no_terminal() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("web")).unwrap();
    let head = r#""sequence":1,"time":"2026-03-01T12:00:00.000Z","machine":"web","incarnation":1"#;
    let event = r#""kind":"error","message":"a\u001b]0;x\u0007b\u001b[2J\u009bc\nd""#;
    fs::write(root.path().join("web/events.jsonl"), format!("{{{head},{event}}}\n")).unwrap();
    let shown = "2026-03-01T12:00:00.000Z     1  [1]  error: a ]0;x b [2J c d\n";
    check(root.path(), &["events", "web"], 0, shown, "");
    let name = "a\u{1b}[2Jb";
    let error = String::from_utf8(hearth(root.path(), &["status", name]).stderr).unwrap();
    assert!(error.contains("a [2Jb is not running"), "{error}");
}

#[test]
fn wrong_configuration_lists_all_errors_with_code_2() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("web.toml");
    fs::write(&file, "memory = \"1GiB\"\nember = \"maybe\"\n").unwrap();
    let path = file.to_str().unwrap();
    let problems = "error: ember (line 2): \"maybe\" is not one of \"on\", \"off\"; for example ember = \"on\"
error: name: is missing; for example name = \"web\"
error: boot: has nothing to boot from; add a [boot] section with a kernel, or a [[disks]] section to boot from
";
    check(root.path(), &["check", path], 2, &format!("{problems}{path}: the machine cannot run: 3 errors\n"), "");
    check(root.path(), &["run", path], 2, "", &format!("{problems}hearth: {path}: the machine cannot run\n"));
}

#[test]
fn failed_start_keeps_the_saved_boot_set() {
    let root = tempfile::tempdir().unwrap();
    let [image, saved_set, memory, file] =
        ["disk.raw", "boot-set", "memory", "web.toml"].map(|name| root.path().join(name));
    fs::write(&image, vec![1; 1 << 20]).unwrap();
    fs::create_dir(&memory).unwrap();
    let boot_set =
        || BootSet::open(tempfile::tempdir().unwrap().path(), 1 << 20, Tagger::new(b"a key like noise")).unwrap();
    let noted = at_rest(&[DiskNote::of_open("disk0", vec![ImageFile::of(&image).unwrap()])]);
    let held = boot_set();
    assert!(held.put_back(DiskId(0), 7, &[1; BLOCK_BYTES]));
    assert_eq!(saved::save(&saved_set, &held, &noted).unwrap(), 1);
    let text = format!(
        "name = \"web\"\nmemory = \"128MiB\"\naccelerator = \"tcg\"\nextra_qemu_args = [\"-no-such-option\"]\n\
         [[disks]]\npath = {image:?}\n[remount]\nlimit = \"1MiB\"\npersist_file = {saved_set:?}\npersist = true\n"
    );
    fs::write(&file, text).unwrap();
    for _ in 0..2 {
        let output = hearth(root.path(), &["run", file.to_str().unwrap()]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && told.contains("no-such-option"), "{told}");
        let found = boot_set();
        assert_eq!(saved::load(&saved_set, &found, &noted).unwrap().map(|loaded| loaded.blocks), Some(1));
        saved::save(&saved_set, &found, &noted).unwrap();
    }
}

/// Waits for a file, a minute at most.
fn await_file(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !path.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn textfile_tells_of_a_failed_start_and_goes_at_sigterm() {
    let root = tempfile::tempdir().unwrap();
    let [image, file, textfile] = ["disk.raw", "failing.toml", "hearth.prom"].map(|name| root.path().join(name));
    fs::write(&image, vec![1; 1 << 20]).unwrap();
    let text =
        "name = \"failing\"\nmemory = \"128MiB\"\naccelerator = \"tcg\"\nextra_qemu_args = [\"-no-such-option\"]\n";
    fs::write(&file, format!("{text}[[disks]]\npath = {image:?}\n")).unwrap();
    assert!(!hearth(root.path(), &["run", file.to_str().unwrap()]).status.success());
    let mut host = Command::new(env!("CARGO_BIN_EXE_hearth"));
    host.args(["host", "--textfile", textfile.to_str().unwrap()]);
    let mut host =
        host.env("HEARTH_RUNTIME_ROOT", root.path()).env("PATH", "/nowhere").stderr(Stdio::null()).spawn().unwrap();
    await_file(&textfile);
    let metrics = fs::read_to_string(&textfile);
    kill_process(Pid::from_child(&host), Signal::TERM).unwrap();
    let status = host.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()));
    assert!(!textfile.exists(), "it would look as if all were well");
    let metrics = metrics.unwrap();
    assert!(metrics.contains("\nhearth_machine_failed{machine=\"failing\"} 1\n"), "{metrics}");
}

#[test]
fn wrong_command_line_gives_exit_code_2() {
    let root = tempfile::tempdir().unwrap();
    for arguments in [&[][..], &["frobnicate"], &["status"], &["reboot", "web", "--warm"]] {
        let output = hearth(root.path(), arguments);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn help_and_version_are_no_errors() {
    let root = tempfile::tempdir().unwrap();
    let version = format!("hearth {}\n", env!("CARGO_PKG_VERSION"));
    check(root.path(), &["--version"], 0, &version, "");
    let help = hearth(root.path(), &["--help"]);
    let text = String::from_utf8(help.stdout).unwrap();
    assert_eq!(help.status.code(), Some(0));
    for word in ["Examples:", "Exit codes:", "HEARTH_RUNTIME_ROOT", "hearth explain web"] {
        assert!(text.contains(word), "no {word} in\n{text}");
    }
}

#[test]
fn closed_pipe_is_not_an_error() {
    let root = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["completions", "bash"])
        .env("HEARTH_RUNTIME_ROOT", root.path())
        .stdout(writer)
        .output()
        .unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(0), String::new()));
}

/// On a terminal made by `script`: special keys reach the guest, and Ctrl-] leaves the console.
#[test]
fn console_relays_until_detach() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("web")).unwrap();
    let serial = root.path().join("serial");
    let listener = UnixListener::bind(&serial).unwrap();
    let hub = Hub::start(&root.path().join("web/console.sock")).unwrap();
    hub.attach(Place { qemu: Endpoint::unchecked(serial), transcript: None });
    let (mut guest, _) = listener.accept().unwrap();
    guest.write_all(b"login: ").unwrap();

    let mut script = Command::new("script")
        .args(["--quiet", "--return", "--command"])
        .arg(format!("{} console web", env!("CARGO_BIN_EXE_hearth")))
        .arg("/dev/null")
        .env("HEARTH_RUNTIME_ROOT", root.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script is part of every Debian");
    let mut keys = script.stdin.take().unwrap();
    let mut screen = script.stdout.take().unwrap();
    let mut seen = String::new();
    // The guest's prompt comes through the console: from then on the terminal is in raw mode.
    while !seen.contains("login: ") {
        let mut buffer = [0; 256];
        let length = screen.read(&mut buffer).unwrap();
        assert_ne!(length, 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    keys.write_all(b"a\x03b\r").unwrap();
    let mut typed = [0; 4];
    guest.read_exact(&mut typed).unwrap();
    assert_eq!(&typed, b"a\x03b\r");
    keys.write_all(b"\x1d").unwrap();
    screen.read_to_string(&mut seen).unwrap();
    assert!(
        seen.contains("connected to web; Ctrl-] disconnects") && seen.contains("disconnected; web keeps running"),
        "{seen}"
    );
    assert!(script.wait().unwrap().success());
}
