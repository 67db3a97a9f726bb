//! A first machine, as `docs/first-machine.md` has it: its commands run as they stand, on a host that has none.
//!
//! The image is no cloud image but a disk of the tests that boots through SeaBIOS, and no cloud-init runs in its guest. So the test
//! compares the disk that the guest sees with the seed, and reads that.

use std::fs;
use std::path::Path;

use hearth_vmtest::fresh_host::FreshHost;
use hearth_vmtest::{Drives, Result, artifacts, boot_disk, patience};

const PAGE: &str = "../docs/first-machine.md";

/// The commands of the page's block below this heading, without comments.
fn commands(heading: &str) -> Vec<String> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE)).expect("the page is there");
    let section = page.split(&format!("\n## {heading}\n")).nth(1).expect("the heading is there");
    let block = section.split("```").nth(1).expect("a block follows it");
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

    // What cloud-init would find. The guest's kernel has no FAT.
    host.sh("grep -q 1 /sys/block/vdb/ro")?;
    let seed = "/var/lib/hearth/web/seed.img";
    let sum = |said: String| said.split_whitespace().next().unwrap_or_default().to_owned();
    assert_eq!(sum(host.sh("md5sum </dev/vdb")?), sum(host.must(&format!("md5sum <{seed}"))?));
    assert!(host.must(&format!("blkid -p {seed}"))?.contains("LABEL=\"cidata\""));
    let files = fs::read(host.folder("/var/lib/hearth/web/seed.img")).expect("it is on this host");
    let files = String::from_utf8_lossy(&files).into_owned();
    assert!(files.contains("#cloud-config\n") && files.contains("\"ssh-ed25519 AAAAC3Nz me@host\""));
    assert!(files.contains("local-hostname: web\n"));

    // What a shell offers for the last word.
    let offers = |words: &str, index: usize| {
        host.must(&format!("COMPLETE=bash _CLAP_COMPLETE_INDEX={index} _CLAP_IFS=, hearth -- hearth {words}"))
    };
    assert_eq!(offers("status w", 2)?, "web");
    assert!(offers("resize web ''", 3)?.starts_with("root,seed,"));
    assert_eq!(offers("set web crash.lev", 3)?, "crash.level=");

    let refused = host.shell("hearth rm web --yes")?;
    assert!(refused.status == 1 && refused.text().contains("stop it first: `hearth stop web`"), "{}", refused.text());
    let [set, start, upgrade, reboot, stop, rm] = commands("Day by day").try_into().expect("six commands");
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
    host.must(&format!("{stop} --force"))?;
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
