//! Checks of whole configurations on this host, each with one error.

use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_recovery::lazy_restore::{Mode, Order};
use tempfile::TempDir;

use super::*;

/// A folder with a machine that can run, as far as this host allows.
struct Fixture {
    folder: TempDir,
    root: RuntimeRoot,
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("vmlinuz"), [&[0; 0x202], &b"HdrS"[..]].concat()).unwrap();
    fs::write(folder.path().join("root.img"), [0; 1 << 20]).unwrap();
    let root = RuntimeRoot::new(folder.path().join("run"));
    Fixture { folder, root }
}

const GOOD: &str = "
name = \"web\"
memory = \"32MiB\"
memory_folder = \"/dev/shm/hearth-check-test\"
[boot]
kernel = \"vmlinuz\"
[[disks]]
path = \"root.img\"
";

impl Fixture {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// As long as this is there, web has a keeper.
    fn keeper(&self) -> File {
        let runtime_folder = self.root.machine("web");
        fs::create_dir_all(&runtime_folder).unwrap();
        let lock = File::create(runtime_folder.join("keeper.lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        lock
    }

    fn config(&self, text: &str) -> Config {
        Config::parse(text, &self.path("web.toml"), &self.root).unwrap()
    }

    /// Problems other than QEMU's, which depend on the host and the user.
    fn problems(&self, text: &str, purpose: Purpose) -> Vec<String> {
        let mut problems = check(&self.config(text), &self.root, purpose);
        problems.retain(|problem| !problem.subject.starts_with("qemu") && problem.subject != "accelerator");
        let folder = format!("{}/", self.folder.path().display());
        problems.iter().map(|problem| problem.to_string().replace(&folder, "")).collect()
    }

    fn check(&self, text: &str, expect: &[&str]) {
        assert_eq!(self.problems(text, Purpose::Check), expect);
    }
}

#[test]
fn a_good_machine_has_no_problems() {
    fixture().check(GOOD, &[]);
}

#[test]
fn all_missing_files_are_reported_at_once() {
    let fixture = fixture();
    fs::remove_file(fixture.path("vmlinuz")).unwrap();
    fs::remove_file(fixture.path("root.img")).unwrap();
    fixture.check(&format!("{GOOD}[[nets]]\nkind = \"tap\"\nifname = \"hearth-none0\"\n"), &[
        "error: boot.kernel: vmlinuz does not exist; set it to a Linux kernel, for example /boot/vmlinuz",
        "error: disk disk0: disk image root.img does not exist; correct its path, or make the image with qemu-img create",
        "error: nets[0].ifname: interface hearth-none0 does not exist; create it: ip tuntap add hearth-none0 mode tap && ip link set hearth-none0 up",
    ]);
}

#[test]
fn a_policy_that_costs_connections_is_told() {
    fixture().check(
        &format!("{GOOD}[[nets]]\nkind = \"user\"\n[rejuvenate]\nevery = \"30d\"\n"),
        &["warning: nets[0].kind: a rejuvenation cuts the guest's connections on a \"user\" network; set kind to \"passt\" or \"tap\" to keep them"],
    );
}

#[test]
fn a_kernel_must_be_a_file() {
    let fixture = fixture();
    fs::remove_file(fixture.path("vmlinuz")).unwrap();
    fs::create_dir(fixture.path("vmlinuz")).unwrap();
    fixture.check(
        GOOD,
        &["error: boot.kernel: vmlinuz is not a file; set it to a Linux kernel, for example /boot/vmlinuz"],
    );
}

#[test]
fn an_image_may_not_serve_two_disks() {
    let fixture = fixture();
    fs::hard_link(fixture.path("root.img"), fixture.path("other.img")).unwrap();
    fixture.check(
        &format!("{GOOD}[[disks]]\nname = \"data\"\npath = \"other.img\"\n"),
        &["error: disk data: uses the same image as disk disk0; give each disk an image of its own"],
    );
}

/// Opens the image as another program that writes to it.
fn hold(path: PathBuf) -> Image {
    let (format, lock_patience) = (Format::Raw, Duration::ZERO);
    let options = ImageOptions { path, format, read_only: false, direct: false, lock_patience, owner: None };
    Image::open(&options).unwrap()
}

/// The last writes of a killed keeper may hold the lock for seconds.
#[test]
fn run_waits_for_the_lock_of_an_image() {
    let fixture = fixture();
    let holder = hold(fixture.path("root.img"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| fixture.problems(GOOD, Purpose::Run));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished(), "{:?}", waiting.join());
        drop(holder);
        assert_eq!(waiting.join().unwrap(), [""; 0]);
    });
    let page = include_str!("../../../../docs/disk.md");
    let promised = format!("the next keeper waits for that (up to {} s)", crate::machine::LOCK_PATIENCE.as_secs());
    assert!(page.contains(&promised), "{promised}");
}

#[test]
fn image_in_use_names_its_user() {
    let fixture = fixture();
    let holder = hold(fixture.path("root.img"));
    let problems = fixture.problems(GOOD, Purpose::Check);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].starts_with("error: disk disk0: disk image root.img is in use by "), "{problems:?}");
    assert!(
        problems[0].ends_with("; stop the program that uses it, or set read_only = true on both sides"),
        "{problems:?}"
    );
    drop(holder);
    // A process forked by another test shares the lock until it executes its program.
    let deadline = Instant::now() + Duration::from_secs(30);
    while !fixture.problems(GOOD, Purpose::Check).is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    fixture.check(GOOD, &[]);
}

#[test]
fn qcow2_image_whose_format_was_forgotten_is_reported() {
    let fixture = fixture();
    let mut image = vec![0; 1 << 20];
    image[..4].copy_from_slice(b"QFI\xfb");
    fs::write(fixture.path("root.img"), image).unwrap();
    let forgotten = "disk disk0: disk image root.img begins with a qcow2 header; set format = \"qcow2\" if it is a qcow2 image, or format = \"raw\" if a guest wrote that header to its raw disk";
    fixture.check(GOOD, &[&format!("error: {forgotten}")]);
    fixture.check(&format!("{GOOD}format = \"raw\"\n"), &[]);

    let _keeper = fixture.keeper();
    let running = "warning: web: is already running; changes take effect at its next start";
    fixture.check(GOOD, &[running, &format!("error: {forgotten}")]);
    let _guest = hold(fixture.path("root.img"));
    fixture.check(GOOD, &[running]);
}

#[test]
fn memory_that_nobody_has_is_refused() {
    let fixture = fixture();
    let problems = fixture.problems(&GOOD.replace("32MiB", "16TiB"), Purpose::Check);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains("too little"), "{problems:?}");
}

#[test]
fn running_machine_keeps_its_own_resources() {
    let fixture = fixture();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let text = format!("{GOOD}[[nets]]\nforward = [\"{port}:80\"]\n");
    assert_eq!(fixture.problems(&text, Purpose::Check).len(), 1, "the port is taken");

    let lock = fixture.keeper();
    fixture.check(&text, &["warning: web: is already running; changes take effect at its next start"]);
    assert_eq!(
        fixture.problems(&text, Purpose::Run),
        ["error: web: is already running; see `hearth status web`; stop it with `hearth stop web`",]
    );
    drop(lock);
    assert_eq!(fixture.problems(&text, Purpose::Check).len(), 1, "the port is taken");
}

#[test]
fn earlier_folder_blocks_another_runtime_folder() {
    let fixture = fixture();
    let elsewhere = fixture.root.path().join("elsewhere");
    let text = format!("runtime_folder = \"{}\"\n{GOOD}", elsewhere.display());
    fixture.check(&text, &[]);
    fixture.root.enter("web", &elsewhere).unwrap();
    fixture.check(&text, &[]);
    let place = fixture.root.machine("web");
    fs::remove_file(&place).unwrap();
    fs::create_dir(&place).unwrap();
    fixture.check(
        &text,
        &["error: runtime_folder: run/web already exists; stop the machine if it runs there and remove the folder, or remove runtime_folder"],
    );
}

#[test]
fn a_qemu_without_a_keeper_keeps_its_ports() {
    let fixture = fixture();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let text = format!("{GOOD}[[nets]]\nforward = [\"{}:80\"]\n", listener.local_addr().unwrap().port());
    assert_eq!(fixture.problems(&text, Purpose::Run).len(), 1, "the port is taken");

    let mut journal = hearth_recovery::journal::Journal::new("web", 32 << 20);
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap();
    let mut qemu = hearth_recovery::journal::QemuIdentity {
        pid: std::process::id(),
        start_ticks: start.parse().unwrap(),
        generation: 1,
        version: String::new(),
        accelerator: String::new(),
        accelerator_why: String::new(),
        userfault_fd: None,
        helper_fd: None,
        stale: false,
        at_start: None,
        vmgenid: None,
        guest_agent: false,
    };
    journal.qemu = Some(qemu.clone());
    let runtime_folder = fixture.root.machine("web");
    fs::create_dir_all(&runtime_folder).unwrap();
    journal.save(&runtime_folder.join("journal.json")).unwrap();
    assert_eq!(fixture.problems(&text, Purpose::Run), [] as [&str; 0]);

    // Its process id was given to another process.
    qemu.start_ticks += 1;
    journal.qemu = Some(qemu);
    journal.save(&runtime_folder.join("journal.json")).unwrap();
    assert_eq!(fixture.problems(&text, Purpose::Run).len(), 1, "the port is taken");
}

#[test]
fn unusable_nvram_is_reported() {
    let fixture = fixture();
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let device = |name: &str, mirror: &str| {
        format!("[[nvram]]\nname = \"{name}\"\nsize = \"4KiB\"\nmirror = \"sync\"\nmirror_file = \"{mirror}\"\n")
    };
    fs::write(fixture.path("short"), "short").unwrap();
    fs::create_dir(memory.path().join("web")).unwrap();
    fs::write(memory.path().join("web/nvram-grown"), [0; 8192]).unwrap();
    let good = GOOD.replace("/dev/shm/hearth-check-test", &memory.path().display().to_string());
    fixture.check(&format!("{good}{}{}", device("fine", "will-be-made"), device("new", "fine")), &[]);
    assert!(!fixture.path("fine").exists() && !fixture.path("will-be-made").exists(), "a check makes nothing");
    let text = format!("{good}{}{}{}", device("lost", "nowhere/m"), device("other", "short"), device("grown", "m"));
    let grown = memory.path().join("web/nvram-grown").display().to_string();
    fixture.check(&text, &[
        "error: nvram: nvram lost: cannot open its mirror nowhere/m: No such file or directory (os error 2)",
        "error: nvram: nvram other: short has 5 bytes instead of 4096; set its size to that, or move the file away",
        &format!("error: nvram: nvram grown: {grown} has 8192 bytes instead of 4096; set its size to that, or move the file away"),
    ]);
}

#[test]
fn existing_nvram_needs_no_more_memory() {
    let fixture = fixture();
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let folder = memory.path().display().to_string();
    let config = fixture.config(&format!(
        "{}[[nvram]]\nname = \"log\"\nsize = \"1MiB\"\n",
        GOOD.replace("/dev/shm/hearth-check-test", &folder)
    ));
    assert_eq!(memory::needs(&config).folder_bytes, config.most_memory_bytes());
    fs::create_dir(memory.path().join("web")).unwrap();
    fs::write(memory.path().join("web/nvram-log"), vec![1; 1 << 20]).unwrap();
    assert_eq!(memory::needs(&config).folder_bytes, config.most_memory_bytes() - (1 << 20));
}

#[test]
fn memory_on_a_disk_is_a_warning() {
    let fixture = fixture();
    let config = fixture.config(GOOD);
    let room = |kind| hearth_memory::room::Room { kind, free_bytes: None, total_bytes: None };
    let mut problems = Vec::new();
    memory::suitable(&config, room(hearth_memory::room::FileSystemKind::Tmpfs), &mut problems);
    assert_eq!(problems, []);
    memory::suitable(&config, room(hearth_memory::room::FileSystemKind::Other { magic: 0xef53 }), &mut problems);
    let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        problems,
        [
            "warning: memory_folder: /dev/shm/hearth-check-test/web is not in host memory, so the guest's RAM would be written to a disk; choose a folder on a tmpfs, such as /dev/shm",
            "warning: memory_folder: /dev/shm/hearth-check-test/web is on ext4, where Linux reports no page faults: snapshots can be restored there with --eager only, and a guest that starts beside a dump may exceed its budget; choose a folder on a tmpfs, such as /dev/shm",
        ]
    );
    let mut problems = Vec::new();
    memory::suitable(&config, room(hearth_memory::room::FileSystemKind::Dax), &mut problems);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].hint.contains("host reload"), "{problems:?}");
}

/// /proc stands for any file system that is not a tmpfs.
#[test]
fn pending_restore_needs_a_tmpfs() {
    let fixture = fixture();
    let file = fixture.path("web.toml");
    let order = |mode| {
        let made = Order::new(&file, &fixture.path("snapshot"), "seal", mode, &[fixture.path("root.img")]);
        made.unwrap().write().unwrap();
    };
    let on_disk = GOOD.replace("/dev/shm/hearth-check-test", "/proc/web");
    let refusal = "error: memory_folder: /proc/web is on a file system of type 0x9fa0, but memory can be loaded while the guest runs only on a tmpfs with ordinary pages; choose a folder on one, such as /dev/shm, or use `hearth restore --eager`, which loads all memory before the guest runs";
    let refused = |text: &str| fixture.problems(text, Purpose::Run).iter().any(|problem| problem == refusal);
    assert!(!refused(&on_disk), "the machine boots");
    for mode in [Mode::Lazy, Mode::WorkingSet] {
        order(mode);
        assert!(refused(&on_disk), "{:?}", fixture.problems(&on_disk, Purpose::Run));
        fixture.check(GOOD, &[]);
    }
    order(Mode::Eager);
    assert!(!refused(&on_disk));
    order(Mode::Lazy);
    fs::write(fixture.path("root.img"), vec![0; 2 << 20]).unwrap();
    assert!(!refused(&on_disk), "the order is void, so the machine boots");
}

/// What passes by itself must be told from what only an edit mends, because a service manager tries only the former again.
#[test]
fn only_edits_mend_a_wrong_file() {
    let fixture = fixture();
    let may_pass = |text: &str, subject: &str| {
        let problems = check(&fixture.config(text), &fixture.root, Purpose::Check);
        let found = problems.iter().find(|problem| problem.is_error() && problem.subject == subject);
        found.unwrap_or_else(|| panic!("no error about {subject}: {problems:?}")).may_pass
    };
    fs::write(fixture.path("text"), "text").unwrap();
    fs::write(fixture.path("image.qcow2"), [&b"QFI\xfb"[..], &[0; 65536]].concat()).unwrap();
    let second_disk = |name: &str, path: &str| format!("{GOOD}[[disks]]\nname = \"{name}\"\npath = \"{path}\"\n");
    let set = |line: &str| format!("{line}\n{GOOD}");
    let net = |line: &str| format!("{GOOD}[[nets]]\n{line}\n");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("forward = [\"{}:80\"]", listener.local_addr().unwrap().port());
    let wrong = [
        (second_disk("data", "root.img"), "disk data"),
        (second_disk("data", "image.qcow2"), "disk data"),
        (second_disk("data", "/"), "disk data"),
        (second_disk("disk0.index", "image.qcow2"), "disks"),
        (GOOD.replace("vmlinuz", "text"), "boot.kernel"),
        (GOOD.replace("\"vmlinuz\"", "\"/\""), "boot.kernel"),
        (set("accelerator = \"tcg\"\ncpu_model = \"banana\""), "qemu"),
        (set("accelerator = \"tcg\"\nmachine_type = \"pc-q35-99\""), "machine_type"),
        (set("machine_type = \"q35\""), "machine_type"),
        (GOOD.replace("32MiB", "16TiB"), "memory"),
        (net("kind = \"tap\"\nifname = \"a/b\""), "nets[0].ifname"),
        (set(&format!("runtime_folder = \"/{}\"", "x".repeat(100))), "runtime_folder"),
    ];
    for (text, subject) in wrong {
        assert!(!may_pass(&text, subject), "{subject} in:\n{text}");
    }
    let passing = [
        (GOOD.replace("vmlinuz", "missing"), "boot.kernel"),
        (GOOD.replace("root.img", "missing"), "disk disk0"),
        (set("qemu = \"/nowhere/qemu\""), "qemu"),
        (net(&taken), "nets[0].forward"),
        (net("kind = \"tap\"\nifname = \"hearth-none0\""), "nets[0].ifname"),
    ];
    for (text, subject) in passing {
        assert!(may_pass(&text, subject), "{subject} in:\n{text}");
    }
}
