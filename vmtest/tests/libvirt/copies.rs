//! Copies of a disk of a domain that runs.

use std::path::Path;
use std::process::Command;

use hearth_vmtest::libvirt::{DomainDisk, LibvirtVm};
use hearth_vmtest::{Drives, Result, START_AGENT, artifacts, images};
use tempfile::TempDir;

use super::{MEMORY_MIB, image_folder, make_files, wait_off, wrap_virsh};

/// Writes records to the file system all the time.
const RECORDS: &str = r#"
mount -o noatime /dev/vda /mnt
(i=0
while :; do
  i=$((i+1)); printf 'record %08d\n' $i >>/mnt/records; cp /mnt/f1 /mnt/copy; sync -f /mnt/records
  echo $i >/tmp/written.new; mv /tmp/written.new /tmp/written
done) >/dev/null 2>&1 &
"#;
const MORE_RECORDS: &str = "while [ ! -s /tmp/written ]; do sleep 0.1; done; to=$(($(cat /tmp/written) + 3))
while [ $(cat /tmp/written) -lt $to ]; do sleep 0.1; done";

/// What the guest has written to a copy of its disk: the first so many records. Its file system is repaired first.
#[track_caller]
fn assert_records(copy: &Path) {
    let checked = Command::new("/usr/sbin/e2fsck").args(["-f", "-y"]).arg(copy).output().expect("e2fsck");
    assert!(matches!(checked.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&checked.stdout));
    images::check_ext4(copy, 0).expect("it is clean now");
    let read = Command::new("/usr/sbin/debugfs").args(["-R", "cat /records"]).arg(copy).output().expect("debugfs");
    let records = String::from_utf8_lossy(&read.stdout).into_owned();
    assert!(records.lines().count() > 2, "{records}");
    for (at, record) in records.lines().enumerate() {
        assert_eq!(record, format!("record {:08}", at + 1));
    }
}

/// Attached and started, with qemu-guest-agent installed in the guest but not started.
fn with_agent(name: &str, images: &TempDir) -> Result<Option<LibvirtVm>> {
    let image = images.path().join("data.img");
    make_files(&image)?;
    let disk = DomainDisk { target: "vda", image: &image, format: "raw", limits: None };
    let Some(vm) = LibvirtVm::define_with_agent(name, MEMORY_MIB, &[disk])? else { return Ok(None) };
    vm.hearth(&["attach", name, "--yes"])?;
    vm.start()?;
    Ok(Some(vm))
}

fn start_agent(vm: &LibvirtVm) -> Result<()> {
    vm.sh(START_AGENT)?;
    vm.wait_until("libvirt sees the agent", || Ok(vm.virsh("guestinfo", &["--os"]).is_ok()))
}

/// The guest's agent is asked through libvirt. Without one the copy is crash-consistent, and says so.
#[test]
fn disk_of_a_domain_is_copied_and_exported() -> Result<()> {
    let images = image_folder();
    let Some(vm) = with_agent("backup", &images)? else { return Ok(()) };
    let path = |name: &str| images.path().join(name);
    let copy =
        |name: &str| vm.try_hearth(&["copy-disk", "backup", "vda", path(name).to_str().expect("a path of ours")]);
    vm.sh(RECORDS)?;
    vm.sh(MORE_RECORDS)?;

    let (code, said) = copy("crash")?;
    assert!(
        code == 0 && said.contains("are not frozen: virsh domfsfreeze") && said.contains("crash-consistent"),
        "{said}"
    );
    assert_records(&path("crash"));
    start_agent(&vm)?;
    let (code, said) = copy("frozen")?;
    assert!(code == 0 && said.contains("file systems frozen") && !said.contains("crash-consistent"), "{said}");
    assert!(!images::ext4_needs_recovery(&path("frozen"))?, "a frozen file system has nothing to replay");
    assert_records(&path("frozen"));
    vm.sh(MORE_RECORDS)?;

    // A file that cannot be made: nobody has frozen the guest for it.
    let refused = format!(
        "mkdir {w}; printf '#!/bin/sh\necho \"$@\" >>{w}/log\nexec /usr/bin/virsh \"$@\"\n' >{w}/virsh; chmod 755 {w}/virsh
         touch {w}/log; export PATH={w}:$PATH
         if '{hearth}' copy-disk backup vda {taken}; then exit 1; fi
         if grep fsfreeze {w}/log; then exit 1; fi
         '{hearth}' copy-disk backup vda {w}/copy
         grep domfsfreeze {w}/log; grep domfsthaw {w}/log",
        w = path("wrapped").display(),
        hearth = artifacts::hearth()?.display(),
        taken = path("frozen").display(),
    );
    vm.must(&["sh", "-ec", &refused], "")?;

    // Served, read, and ended by a signal.
    let export = format!(
        "'{}' export backup vda >{out} 2>{out}.err & pid=$!
         for i in $(seq 600); do [ -s {out} ] && break; sleep 0.1; done
         qemu-img convert -f raw -O raw \"$(cat {out})\" {out}.img && kill $pid && wait $pid || {{ cat {out}.err; exit 1; }}",
        artifacts::hearth()?.display(),
        out = path("export").display()
    );
    vm.must(&["sh", "-c", &export], "")?;
    assert_records(&path("export.img"));
    vm.sh(MORE_RECORDS)?;
    let left = vm.must(&["sh", "-c", &format!("ls -A {} /run/hearth/backup", images.path().display())], "")?;
    assert!(!left.contains(".data.img") && !left.contains("export-"), "{left}");

    vm.virsh("destroy", &[])?;
    wait_off(&vm)?;
    let (code, said) = copy("off")?;
    assert!(code == 1 && said.contains("the domain does not run"), "{said}");
    assert!(!path("off").exists());
    Ok(())
}

/// The copy's command or the keeper gets a signal while the guest's file systems are frozen. They do not stay so. To thaw them the
/// guest needs its disk, so the service manager's next keeper comes first.
#[test]
fn signal_during_a_freeze_thaws_the_guest() -> Result<()> {
    let images = image_folder();
    let Some(vm) = with_agent("thaws", &images)? else { return Ok(()) };
    let signal = vm.folder().join("signal").display().to_string();
    let script = format!("\"$real\" \"$@\" || exit\ncase \" $* \" in *' domfsfreeze '*) . {signal} ;; esac\n");
    wrap_virsh(&vm, &script)?;
    vm.sh(RECORDS)?;
    start_agent(&vm)?;
    let copy = images.path().join("copy");
    let command = ["copy-disk", "thaws", "vda", copy.to_str().expect("a path of ours")];
    let next_keeper = format!(
        "(while kill -0 $keeper; do sleep 0.1; done; exec setsid {} run /etc/hearth/thaws.toml) </dev/null >{signal}.log 2>&1 &",
        artifacts::hearth()?.display()
    );
    // The command is virsh's parent.
    for (kill, then) in [("-HUP $PPID", ""), ("-HUP $keeper", &next_keeper), ("-KILL $keeper", &next_keeper)] {
        let keeper = vm.status()?.keeper.pid;
        vm.must(&["tee", &signal], &format!("touch {signal}.sent; keeper={keeper}; kill {kill}; {then}\n"))?;
        let (code, said) = vm.try_hearth(&command)?;
        assert!(code != 0 && !copy.exists() && !said.contains("may stay frozen"), "{kill}: {said}");
        vm.must(&["rm", &format!("{signal}.sent")], "")?;
        // A killed keeper leaves the file that it was writing.
        let _ = std::fs::remove_file(copy.with_extension("partial"));
        vm.sh(MORE_RECORDS)?;
    }
    vm.must(&["tee", &signal], "")?;
    let (code, said) = vm.try_hearth(&command)?;
    assert!(code == 0 && said.contains("file systems frozen"), "{said}");
    assert_records(&copy);
    Ok(())
}
