//! A first machine, as `docs/first-machine.md` has it: its commands run as they stand, on a host that has none.
//!
//! The image is no cloud image but a disk of the tests that boots through SeaBIOS, and no cloud-init runs in its guest. So the test
//! compares the disk that the guest sees with the seed, and reads that.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use hearth_vmtest::fresh_host::FreshHost;
use hearth_vmtest::{Drives, Result, artifacts, boot_disk, patience};

const PAGE: &str = "../docs/first-machine.md";
const README: &str = "../README.md";

/// The commands of the page's block below this heading, without comments.
fn commands(heading: &str) -> Vec<String> {
    commands_after(PAGE, &format!("\n## {heading}\n"))
}

/// The commands of the first block after these words.
fn commands_after(page: &str, words: &str) -> Vec<String> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).expect("the page is there");
    let section = page.split(words).nth(1).expect("the words are there");
    let block = section.split("```").nth(1).expect("a block follows them");
    let lines = block.lines().map(|line| line.split("  #").next().unwrap_or_default().trim());
    lines.filter(|line| line.starts_with("hearth ")).map(str::to_owned).collect()
}

#[test]
fn commands_of_the_page_make_run_change_and_remove_a_machine() -> Result<()> {
    let Some(host) = FreshHost::make()? else { return Ok(()) };
    fs::create_dir(host.home().join(".ssh")).expect("our own folder");
    fs::write(host.home().join(".ssh/id.pub"), "ssh-ed25519 AAAAC3Nz me@host\n").expect("our own file");
    let image = host.home().join("debian-12.qcow2");
    boot_disk::bios(&image, &artifacts::busybox(false)?)?;
    let before = fs::metadata(&image).expect("it was made").modified().expect("files have times");

    let [new, run] = commands("A machine in one line").try_into().expect("two commands");
    let said = host.must(&new)?;
    assert!(said.contains(&run), "it names the next command: {said}");
    assert!(said.contains("ssh -p 2222 hearth@127.0.0.1"), "{said}");
    let again = host.shell(&new)?;
    assert!(again.status == 1 && again.text().contains("/etc/hearth/web.toml exists already"), "{}", again.text());
    host.start(&run, "run.log")?;
    host.wait_console("the guest", patience(120), |heard| heard.ready().first().map(|_| ()))?;

    assert!(host.guest().lines().iter().any(|line| line.contains("SeaBIOS")), "the firmware is on the console");

    // `hearth run` says what it does, and how to reach the guest.
    let log = fs::read_to_string(host.home().join("run.log")).expect("it is on this host");
    let reach =
        "web: its guest runs; console: `hearth console web`; 127.0.0.1:8080 -> port 80 of the guest; 127.0.0.1:2222";
    let steps = ["web: QEMU ", "web: incarnation started, cold", reach];
    assert!(steps.iter().all(|step| log.contains(step)), "{log}");

    // What cloud-init would find. The guest's kernel has no FAT.
    host.sh("grep -q 1 /sys/block/vdb/ro")?;
    let seed = "/var/lib/hearth/web/seed.img";
    let sum = |said: String| said.split_whitespace().next().unwrap_or_default().to_owned();
    assert_eq!(sum(host.sh("md5sum </dev/vdb")?), sum(host.must(&format!("md5sum <{seed}"))?));
    assert!(host.must(&format!("blkid -p {seed}"))?.contains("LABEL=\"cidata\""));
    let files = fs::read(host.folder("/var/lib/hearth/web/seed.img")).expect("it is on this host");
    let files = String::from_utf8_lossy(&files).into_owned();
    assert!(files.contains("#cloud-config\n") && files.contains("\"ssh-ed25519 AAAAC3Nz me@host\""));
    assert!(files.contains("local-hostname: \"web\"\n"));

    // What a shell offers for the last word.
    let offers = |words: &str, index: usize| {
        host.must(&format!("COMPLETE=bash _CLAP_COMPLETE_INDEX={index} _CLAP_IFS=, hearth -- hearth {words}"))
    };
    assert_eq!(offers("status w", 2)?, "web");
    assert!(offers("resize web ''", 3)?.starts_with("root,seed,"));
    assert_eq!(offers("set web crash.lev", 3)?, "crash.level=");

    let nonce = host.nonce()?;
    host.must("hearth rejuvenate web")?;
    assert_eq!(host.nonce()?, nonce, "the guest is the same under another QEMU");

    let refused = host.shell("hearth rm web --yes")?;
    assert!(refused.status == 1 && refused.text().contains("stop it first: `hearth stop web`"), "{}", refused.text());
    let [set, start, upgrade, reboot, stop, rm] = commands("Day by day").try_into().expect("six commands");
    host.must("hearth set web display=vnc")?;
    let viewed = host.shell("hearth view web")?;
    let next = "its next one will: `hearth upgrade-keeper web && hearth reboot web`";
    assert!(viewed.status == 1 && viewed.text().contains(next), "{}", viewed.text());
    let said = host.must(&set)?;
    assert!(
        said.contains("cpus = 2: waits for the next guest: `hearth upgrade-keeper web && hearth reboot web`"),
        "{said}"
    );
    assert!(host.must(&start)?.contains("web runs already"));
    host.must(&upgrade)?;
    host.must(&format!("{reboot} --force"))?;
    host.wait_console("the next guest", patience(120), |heard| heard.ready().get(1).map(|_| ()))?;
    assert_eq!(host.sh("nproc")?.trim(), "2");

    // The README begins with the same commands, and looks at that reboot.
    let [first, second, third, explain, status] =
        commands_after(README, "**A machine of Hearth's own**").try_into().expect("five commands");
    assert_eq!([&first, &second, &third], [&new, &start, &reboot]);
    assert!(host.must(&explain)?.contains("; warm"));
    assert!(host.must(&status)?.contains("\nember\n"));

    // The screen, which the change of `display` gave it.
    let mut greeting = [0; 12];
    let screen = UnixStream::connect(host.folder("/run/hearth/web/vnc.sock"));
    screen
        .and_then(|mut screen| screen.read_exact(&mut greeting))
        .expect("QEMU's user is another one than the socket's");
    assert_eq!(&greeting, b"RFB 003.008\n");
    let viewed = host.shell("unset DISPLAY WAYLAND_DISPLAY; hearth view web")?;
    assert!(
        viewed.status == 1 && viewed.text().contains("`ssh -NL 5900:/run/hearth/web/vnc.sock root@"),
        "{}",
        viewed.text()
    );
    let said = host.must("hearth set web display=")?;
    assert!(said.contains("display is removed: waits for the next guest"), "{said}");
    assert!(!host.must("cat /etc/hearth/web.toml")?.contains("display"));
    assert_eq!(host.must("hearth set web display=")?, "display has its default already\n");
    host.must(&format!("{stop} --force"))?;
    let stopped = host.shell("hearth status web")?;
    assert!(stopped.status == 3 && stopped.text().contains(&format!("start it with `{run}`")), "{}", stopped.text());
    let unit = host.shell(&start)?;
    assert!(unit.status == 1 && unit.text().contains(&format!("run it in the foreground: {run}")), "{}", unit.text());
    let asked = host.shell(&rm)?;
    assert!(asked.status == 1 && asked.text().contains("add --yes"), "{}", asked.text());
    host.must(&format!("{rm} --yes"))?;
    assert_eq!(host.must("find /etc/hearth /var/lib/hearth -mindepth 1")?, "");
    let after = fs::metadata(&image).expect("the image stays").modified().expect("files have times");
    assert_eq!(after, before, "the image is as it was");
    Ok(())
}

#[test]
fn interrupted_new_leaves_nothing() -> Result<()> {
    let Some(host) = FreshHost::make()? else { return Ok(()) };
    let program = host.home().join("bin/qemu-system-x86_64");
    // Once: a second signal ends it at once.
    let script =
        "#!/bin/sh\nmkdir $0.asked 2>/dev/null && kill -INT $PPID\nPATH=${PATH#*:} exec qemu-system-x86_64 \"$@\"\n";
    fs::write(&program, script).expect("our own file");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("our own file");
    host.must("truncate -s 1M image")?;
    let ended = host.shell("hearth new web --image image")?;
    assert!(ended.status == 1 && ended.text().contains("web: interrupted; nothing is left"), "{}", ended.text());
    assert_eq!(host.must("find /etc/hearth /var/lib/hearth -mindepth 1")?, "");
    Ok(())
}

#[test]
fn machine_with_uefi_has_variables_of_its_own() -> Result<()> {
    let Some(host) = FreshHost::make()? else { return Ok(()) };
    if !Path::new("/usr/share/OVMF/OVMF_VARS_4M.fd").is_file() {
        eprintln!("skipped: OVMF is missing (Debian: apt install ovmf)");
        return Ok(());
    }
    boot_disk::uefi(&host.home().join("boot.img"), &artifacts::busybox(false)?)?;
    host.must("hearth new web --image boot.img --uefi")?;
    let vars = "cmp -s /var/lib/hearth/web/uefi-vars.fd /usr/share/OVMF/OVMF_VARS_4M.fd; echo $?";
    assert_eq!(host.must(vars)?, "0\n");
    host.start("hearth run /etc/hearth/web.toml", "run.log")?;
    host.wait_console("the guest", patience(180), |heard| heard.ready().first().map(|_| ()))?;
    assert!(host.sh("ls /sys/firmware/efi")?.contains("efivars"), "UEFI has booted it");
    host.must("hearth stop web --force")?;
    assert_eq!(host.must(vars)?, "1\n", "the firmware has kept its variables");
    host.must("hearth rm web --yes")?;
    assert_eq!(host.must("find /etc/hearth /var/lib/hearth -mindepth 1")?, "");
    Ok(())
}
