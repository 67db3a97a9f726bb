//! A domain is attached, detached, and made a machine of its own; what libvirt does stays with libvirt.

use hearth_vmtest::{Drives, Result, artifacts};

use super::{Files, SEED, wait_off, wrap_virsh};

#[test]
fn attaching_changes_the_definition_and_detaching_restores_it() -> Result<()> {
    let Some(files) = Files::define("there")? else { return Ok(()) };
    let vm = &files.vm;
    let before = vm.virsh("dumpxml", &["--inactive"])?;
    let shown = vm.hearth(&["attach", "there", "--check"])?;
    for words in ["+    <disk type='vhostuser' device='disk'>", "vda: Hearth serves it from", "live migration"] {
        assert!(shown.contains(words), "{words} is missing in {shown}");
    }
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, before, "a check changes nothing");
    // Nobody can be asked here.
    let (code, said) = vm.try_hearth(&["attach", "there"])?;
    assert!(code == 1 && said.contains("add --yes"), "{said}");
    vm.hearth(&["attach", "there", "--yes"])?;
    let attached = vm.virsh("dumpxml", &["--inactive"])?;
    assert!(attached.contains("/run/hearth/there/disk-vda.sock"), "{attached}");
    let (code, said) = vm.try_hearth(&["import", "there"])?;
    assert!(code == 1 && said.contains("hearth detach there"), "{said}");
    // Once more changes nothing.
    vm.hearth(&["attach", "there", "--yes"])?;
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, attached);
    vm.start()?;
    files.verify()?;
    // While it runs: from its next start on.
    vm.hearth(&["detach", "there"])?;
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, before);
    files.verify()?;
    vm.virsh("destroy", &[])?;
    vm.wait_until("its keeper has ended", || Ok(vm.try_hearth(&["status", "there"])?.0 == 3))?;
    vm.start()?;
    files.verify()?;
    let (code, said) = vm.try_hearth(&["detach", "there"])?;
    assert!(code == 1 && said.contains("is not attached"), "{said}");
    let left = vm.must(&["sh", "-c", "ls /etc/hearth /var/lib/hearth"], "")?;
    assert!(!left.contains("there"), "{left}");
    Ok(())
}

#[test]
fn definition_that_changes_while_attach_works_is_kept() -> Result<()> {
    let Some(files) = Files::define("meanwhile")? else { return Ok(()) };
    let vm = &files.vm;
    // `attach` has read the definition when it asks libvirt whether the hook is called.
    let script = r#"case "$*" in
    *"create --paused"*) "$real" --connect qemu:///system desc meanwhile --config --title --new-desc changed >/dev/null ;;
esac
exec "$real" "$@"
"#;
    wrap_virsh(vm, script)?;
    let (code, said) = vm.try_hearth(&["attach", "meanwhile", "--yes"])?;
    assert!(code == 1 && said.contains("has changed meanwhile"), "{said}");
    let kept = vm.virsh("dumpxml", &["--inactive"])?;
    assert!(kept.contains("<title>changed</title>") && !kept.contains("vhostuser"), "{kept}");
    let left = vm.must(&["sh", "-c", "ls /etc/hearth /var/lib/hearth"], "")?;
    assert!(!left.contains("meanwhile"), "{left}");
    // Once more, and it is changed to what it is.
    vm.hearth(&["attach", "meanwhile", "--yes"])?;
    vm.hearth(&["detach", "meanwhile"])?;
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, kept);
    // One that libvirt would forget is not defined.
    vm.virsh("start", &["--paused"])?;
    vm.virsh("undefine", &[])?;
    let (code, said) = vm.try_hearth(&["attach", "meanwhile", "--yes"])?;
    assert!(code == 1 && said.contains("it is transient"), "{said}");
    vm.virsh("destroy", &[])?;
    let list = vm.must(&["virsh", "list", "--all", "--name"], "")?;
    assert!(!list.contains("meanwhile"), "{list}");
    Ok(())
}

#[test]
fn image_that_was_moved_while_attached_stays_the_disk() -> Result<()> {
    let Some(files) = Files::define("moved")? else { return Ok(()) };
    let vm = &files.vm;
    let before = vm.virsh("dumpxml", &["--inactive"])?;
    vm.hearth(&["attach", "moved", "--yes"])?;
    let [old, new] = [files.image.clone(), files.image.with_extension("moved")].map(|path| path.display().to_string());
    vm.must(&["mv", &old, &new], "")?;
    vm.must(&["sed", "-i", &format!("s|{old}|{new}|; s|^queues = .*|&\\niops = 500|"), "/etc/hearth/moved.toml"], "")?;
    vm.hearth(&["attach", "moved", "--yes"])?;
    let file = vm.must(&["cat", "/etc/hearth/moved.toml"], "")?;
    assert!(file.contains(&new) && file.contains("iops = 500"), "{file}");
    vm.start()?;
    files.verify()?;
    vm.virsh("destroy", &[])?;
    wait_off(vm)?;
    vm.hearth(&["detach", "moved"])?;
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, before.replace(&old, &new));
    vm.start()?;
    files.verify()
}

#[test]
fn domain_is_detached_while_its_keeper_is_dead() -> Result<()> {
    let Some(files) = Files::running("late")? else { return Ok(()) };
    let vm = &files.vm;
    let left = || vm.must(&["sh", "-c", "ls /etc/hearth /var/lib/hearth"], "");
    files.verify()?;
    vm.kill_keeper()?;
    let said = vm.hearth(&["detach", "late"])?;
    assert!(said.contains("until then Hearth serves its disks"), "{said}");
    assert!(left()?.contains("late.toml"), "the next keeper needs them: {}", left()?);
    vm.start_keeper()?;
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    files.verify()?;
    // Its guest ends while there is no keeper either.
    vm.kill_keeper()?;
    vm.virsh("destroy", &[])?;
    vm.run_keeper()?;
    vm.wait_until("its files are gone", || Ok(!left()?.contains("late")))?;
    vm.start()?;
    files.verify()
}

#[test]
fn start_that_cannot_be_served_fails_with_a_remedy() -> Result<()> {
    let Some(files) = Files::define("broken")? else { return Ok(()) };
    let vm = &files.vm;
    vm.hearth(&["attach", "broken", "--yes"])?;
    let moved = files.image.with_extension("moved");
    std::fs::rename(&files.image, &moved).expect("the image can be moved");
    let (started, said) = try_virsh(&files, &["start", "broken"])?;
    assert!(!started && said.contains("data.img"), "{said}");
    std::fs::rename(&moved, &files.image).expect("and back");
    vm.must(&["sh", "-c", "echo odd = 1 >>/etc/hearth/broken.toml"], "")?;
    vm.try_hearth(&["stop", "broken"])?;
    let (_, said) = try_virsh(&files, &["start", "broken"])?;
    assert!(said.contains("correct /etc/hearth/broken.toml"), "{said}");
    vm.must(&["rm", "/etc/hearth/broken.toml"], "")?;
    let (_, said) = try_virsh(&files, &["start", "broken"])?;
    assert!(said.contains("hearth attach broken"), "{said}");
    vm.hearth(&["attach", "broken", "--yes"])?;
    vm.start()?;
    files.verify()
}

/// Runs virsh, which would wait without end for a disk that nobody serves. Returns whether it succeeded, and what it said.
fn try_virsh(files: &Files, words: &[&str]) -> Result<(bool, String)> {
    let output = files.vm.command(&[&["timeout", "60", "virsh", "-q"], words].concat(), "")?;
    Ok((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// The start, `attach` and `detach` of this domain all name this remedy.
fn assert_refused(files: &Files, name: &str, remedy: &str) -> Result<()> {
    let (started, said) = try_virsh(files, &["start", name])?;
    assert!(!started && said.contains(remedy), "start: {said}");
    for words in [&["attach", name, "--yes"][..], &["detach", name]] {
        let (code, said) = files.vm.try_hearth(words)?;
        assert!(code == 1 && said.contains(remedy), "{words:?}: {code}: {said}");
    }
    Ok(())
}

#[test]
fn renamed_domain_is_refused_with_a_remedy() -> Result<()> {
    let Some(files) = Files::define("named")? else { return Ok(()) };
    let vm = &files.vm;
    vm.hearth(&["attach", "named", "--yes"])?;
    let rename = |from: &str, to: &str| vm.must(&["virsh", "-q", "domrename", from, to], "");
    rename("named", "other")?;
    assert_refused(&files, "other", "`virsh domrename other named`")?;
    let (code, said) = vm.try_hearth(&["detach", "named"])?;
    assert!(code == 1 && said.contains("`virsh domrename other named`"), "{said}");
    rename("other", "named")?;
    vm.hearth(&["detach", "named"])?;
    rename("named", "other")?;
    vm.hearth(&["attach", "other", "--yes"])?;
    vm.must(&["virsh", "-q", "start", "other"], "")?;
    vm.wait_next_boot()?;
    files.verify()
}

#[test]
fn undefined_domain_is_detached_and_leaves_nothing_to_the_next() -> Result<()> {
    let Some(files) = Files::define("gone")? else { return Ok(()) };
    let vm = &files.vm;
    let before = vm.virsh("dumpxml", &["--inactive"])?;
    let left = || vm.must(&["sh", "-c", "ls /etc/hearth /var/lib/hearth"], "");
    vm.hearth(&["attach", "gone", "--yes"])?;
    vm.start()?;
    vm.virsh("destroy", &[])?;
    wait_off(vm)?;
    vm.must(&["pkill", "-x", "libvirtd"], "")?;
    vm.wait_libvirt_end()?;
    let (code, said) = vm.try_hearth(&["detach", "gone"])?;
    assert!(code == 1 && said.contains("connect") && left()?.contains("gone.toml"), "{said}");
    vm.start_libvirt()?;
    vm.virsh("undefine", &[])?;
    let (code, said) = vm.try_hearth(&["rm", "gone", "--yes"])?;
    assert!(code == 1 && said.contains("`hearth detach gone`"), "{said}");

    // Another domain with the same name.
    let lines = before.lines().filter(|line| !line.contains("<uuid>"));
    vm.must(&["virsh", "define", "/dev/stdin"], &lines.collect::<Vec<_>>().join("\n"))?;
    let next = vm.virsh("dumpxml", &["--inactive"])?;
    let (code, said) = vm.try_hearth(&["attach", "gone", "--yes"])?;
    assert!(code == 1 && said.contains("`hearth detach gone`"), "{said}");
    vm.virsh("undefine", &[])?;
    let said = vm.hearth(&["detach", "gone"])?;
    assert!(said.contains(&files.image.display().to_string()) && files.image.exists(), "{said}");
    assert!(!left()?.contains("gone"), "{}", left()?);
    vm.wait_until("its keeper has ended", || Ok(vm.try_hearth(&["status", "gone"])?.0 == 3))?;
    let (code, said) = vm.try_hearth(&["detach", "gone"])?;
    assert!(code == 1 && said.contains("gone"), "libvirt's own error: {said}");
    vm.must(&["virsh", "define", "/dev/stdin"], &next)?;
    vm.hearth(&["attach", "gone", "--yes"])?;
    vm.start()?;
    files.verify()?;

    // The next one is there already.
    vm.virsh("destroy", &[])?;
    wait_off(vm)?;
    vm.virsh("undefine", &[])?;
    vm.must(&["virsh", "define", "/dev/stdin"], &before)?;
    vm.hearth(&["detach", "gone"])?;
    assert!(!left()?.contains("gone"), "{}", left()?);
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, before);
    vm.start()?;
    files.verify()
}

/// Its definition from attached times is all that there is of its attachment.
#[test]
fn definition_from_a_backup_is_refused_with_a_remedy() -> Result<()> {
    let Some(files) = Files::define("backup")? else { return Ok(()) };
    let vm = &files.vm;
    vm.hearth(&["attach", "backup", "--yes"])?;
    let attached = vm.virsh("dumpxml", &["--inactive"])?;
    vm.hearth(&["detach", "backup"])?;
    vm.must(&["virsh", "define", "/dev/stdin"], &attached)?;
    assert_refused(&files, "backup", "`virsh edit backup`")?;

    let (first, last) = (attached.find("<disk "), attached.rfind("</disk>"));
    let (first, last) = (first.expect("a disk"), last.expect("a disk") + "</disk>".len());
    let disk = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/><target dev='vda' bus='virtio'/>\
         </disk>",
        files.image.display()
    );
    vm.must(&["virsh", "define", "/dev/stdin"], &format!("{}{disk}{}", &attached[..first], &attached[last..]))?;
    vm.hearth(&["attach", "backup", "--yes"])?;
    vm.start()?;
    files.verify()
}

/// libvirt restores a saved guest with the disks that it was saved with, whatever the definition says by then.
#[test]
fn saved_guest_keeps_its_disks() -> Result<()> {
    let Some(files) = Files::define("saved")? else { return Ok(()) };
    let vm = &files.vm;
    vm.start()?;
    let nonce = vm.nonce()?;
    vm.virsh("managedsave", &[])?;
    let said = vm.hearth(&["attach", "saved", "--yes"])?;
    assert!(said.contains("the change counts from the start after that"), "{said}");
    vm.hearth(&["detach", "saved"])?;
    vm.hearth(&["attach", "saved", "--yes"])?;
    vm.virsh("start", &[])?;
    assert_eq!(vm.nonce()?, nonce, "the same guest");
    let (code, said) = vm.try_hearth(&["status", "saved"])?;
    assert_eq!(code, 3, "it has no keeper yet: {said}");
    vm.virsh("destroy", &[])?;
    vm.start()?;
    files.verify()?;
    let nonce = vm.nonce()?;

    vm.virsh("managedsave", &[])?;
    let definition = vm.virsh("dumpxml", &["--inactive"])?;
    let (code, said) = vm.try_hearth(&["detach", "saved"])?;
    assert!(code == 1 && said.contains("`virsh managedsave-remove saved`"), "{said}");
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, definition);
    vm.virsh("start", &[])?;
    assert_eq!(vm.nonce()?, nonce, "the same guest");
    vm.hearth(&["detach", "saved"])?;
    files.verify()?;
    // Its definition has no disks of Hearth's any more, and this guest has.
    vm.virsh("managedsave", &[])?;
    vm.virsh("start", &[])?;
    assert_eq!(vm.nonce()?, nonce, "the same guest");
    files.verify()?;
    vm.virsh("destroy", &[])?;
    vm.wait_until("its keeper has ended", || Ok(vm.try_hearth(&["status", "saved"])?.0 == 3))?;
    vm.start()?;
    files.verify()?;

    vm.hearth(&["attach", "saved", "--yes"])?;
    vm.virsh("destroy", &[])?;
    vm.start()?;
    vm.hearth(&["detach", "saved"])?;
    vm.virsh("managedsave", &[])?;
    vm.virsh("managedsave-remove", &[])?;
    vm.start()?;
    files.verify()?;
    let is_left = || vm.command(&["test", "-e", "/etc/hearth/saved.toml"], "").map(|output| output.status.success());
    vm.wait_until("Hearth's files have gone", || Ok(!is_left()?))
}

#[test]
fn requests_that_are_libvirts_are_refused() -> Result<()> {
    let Some(files) = Files::running("whose")? else { return Ok(()) };
    let vm = &files.vm;
    for (words, remedy) in [
        (&["reboot", "whose"][..], "virsh reboot whose"),
        (&["crash", "whose"], "virsh inject-nmi whose"),
        (&["stop", "whose"], "virsh shutdown whose"),
        (&["rejuvenate", "whose"], "only a machine whose QEMU Hearth starts"),
        (&["save", "whose", "-o", "/tmp/whose"], "virsh save whose"),
        (&["upgrade-keeper", "whose"], "systemctl restart hearth@whose"),
    ] {
        let (code, said) = vm.try_hearth(words)?;
        assert!(code == 1 && said.contains(remedy), "{words:?}: {code}: {said}");
    }
    // The memory of the last guest is given back on request.
    files.verify()?;
    vm.virsh("destroy", &[])?;
    wait_off(vm)?;
    vm.hearth(&["stop", "whose"])?;
    let left = vm.must(&["sh", "-c", "ls /dev/shm/hearth/whose 2>&1 || true"], "")?;
    assert!(!left.contains("ledger"), "{left}");
    Ok(())
}

/// The machine of its own that `hearth import` makes, with the same disk. libvirt's domain stays, and works again afterwards.
#[test]
fn shut_off_domain_becomes_a_machine_of_its_own() -> Result<()> {
    let Some(files) = Files::define("moves")? else { return Ok(()) };
    let vm = &files.vm;
    let definition = vm.virsh("dumpxml", &["--inactive"])?;
    let folder = vm.folder().join("machine").display().to_string();
    let import = ["import", "moves", "--folder", &folder];
    vm.start()?;
    let (code, said) = vm.try_hearth(&import)?;
    assert!(code == 1 && said.contains("virsh shutdown moves") && !vm.folder().join("machine").exists(), "{said}");
    vm.virsh("managedsave", &[])?;
    let (code, said) = vm.try_hearth(&import)?;
    assert!(code == 1 && said.contains("virsh managedsave-remove moves"), "{said}");
    vm.virsh("managedsave-remove", &[])?;
    let said = vm.hearth(&import)?;
    for words in ["vda: ", "data.img (raw)", "uuid: a machine has none", "memballoon: ", "Start it with `hearth run"] {
        assert!(said.contains(words), "{words} is missing in {said}");
    }
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, definition, "the domain is unchanged");
    let (code, said) = vm.try_hearth(&import)?;
    assert!(code == 1 && said.contains("File exists"), "{said}");
    let file = format!("{folder}/machine.toml");
    vm.hearth(&["check", &file])?;

    let program = artifacts::hearth()?.display().to_string();
    let log = vm.folder().join("keeper.log").display().to_string();
    vm.start_daemon(&["run", &file])?;
    vm.wait_until("it runs", || {
        let (code, said) = vm.try_hearth(&["status", "moves", "--json"])?;
        Ok(code == 0 && said.contains(r#""state":"running""#))
    })?;
    let verify = format!(
        "{{ grep -q ' /mnt ' /proc/mounts || mount /dev/vda /mnt; }} && for f in /mnt/f*; do probe verify $f {SEED} || exit 1; \
         done; sync; echo the files are w''hole >/dev/console"
    );
    // Its console takes commands as those of other test guests do.
    let ask = format!(
        "echo \"$1\" | base64 -w0 >{log}.command; {{ echo; echo 1 $(cat {log}.command); sleep 2; }} | \
         timeout 4 '{program}' console moves"
    );
    vm.wait_until("the machine's guest has its files", || {
        let said = vm.command(&["sh", "-c", &ask, "sh", &verify], "")?;
        Ok(String::from_utf8_lossy(&said.stdout).contains("the files are whole"))
    })?;
    // Two guests never have the disk.
    assert!(!vm.command(&["virsh", "start", "moves"], "")?.status.success());
    vm.hearth(&["stop", "moves", "--force"])?;
    vm.start()?;
    files.verify()
}
