//! The package: its removal, and its unit under a service manager.

use hearth_api::{EventKind, MachineState};
use hearth_vmtest::{Drives, Result, artifacts};

use super::Files;

const PRERM: &str = include_str!("../../../packaging/debian/prerm");
const UNIT: &str = include_str!("../../../packaging/hearth@.service");

/// Runs the package's script as dpkg does before it removes the package. Returns whether it lets dpkg go on, and what it said.
fn remove(files: &Files) -> Result<(bool, String)> {
    remove_under(files, &[])
}

/// As `remove`, by a command that runs others.
fn remove_under(files: &Files, runner: &[&str]) -> Result<(bool, String)> {
    let script = files.vm.folder().join("prerm").display().to_string();
    files.vm.must(&["tee", &script], PRERM)?;
    let variables = ["DPKG_MAINTSCRIPT_NAME=prerm", "DPKG_MAINTSCRIPT_PACKAGE=hearth", "DPKG_ROOT="];
    let output =
        files.vm.command(&[runner, &["env"], &variables[..], &["sh", "-e", &script, "remove"]].concat(), "")?;
    Ok((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn removal_is_refused_while_a_machine_needs_hearth() -> Result<()> {
    let Some(files) = Files::define("needs")? else { return Ok(()) };
    let vm = &files.vm;
    let assert_refused = |words: &str| {
        let (may, said) = remove(&files)?;
        assert!(!may && said.contains(words), "{words} is missing in {said}");
        Ok::<_, hearth_vmtest::Error>(said)
    };
    assert_eq!(remove(&files)?, (true, String::new()));
    vm.hearth(&["attach", "needs", "--yes"])?;
    assert_refused("hearth detach needs")?;
    vm.start()?;
    assert_refused("hearth detach needs")?;
    vm.hearth(&["detach", "needs"])?;
    assert_refused("virsh shutdown needs")?;
    files.verify()?;
    vm.virsh("destroy", &[])?;
    vm.wait_until("its keeper has ended", || Ok(vm.try_hearth(&["status", "needs"])?.0 == 3))?;
    assert_eq!(remove(&files)?, (true, String::new()));

    // A machine of its own, which the package knows only by its keeper.
    let folder = vm.folder().join("machine").display().to_string();
    vm.hearth(&["import", "needs", "--folder", &folder])?;
    vm.start_daemon(&["run", &format!("{folder}/machine.toml")])?;
    vm.wait_until("its keeper", || Ok(vm.try_hearth(&["status", "needs"])?.0 == 0))?;
    let said = assert_refused("hearth stop needs")?;
    assert!(!said.contains("detach"), "{said}");
    vm.hearth(&["stop", "needs", "--force"])?;
    assert_eq!(remove(&files)?, (true, String::new()));

    // A user's machine, whose keeper's lock another command holds here, and a pipe that a user has made.
    let make = "mount -t tmpfs tmpfs /run/user; cd /run/user; mkdir -p 65534/hearth/own 65534/hearth/pipe; \
                touch 65534/hearth/own/keeper.lock; mkfifo 65534/hearth/pipe/keeper.lock; chown -R 65534 65534";
    vm.must(&["sh", "-ec", &format!("mkdir -p /run/user; {make}")], "")?;
    assert_eq!(remove(&files)?, (true, String::new()));
    let (may, said) = remove_under(&files, &["flock", "/run/user/65534/hearth/own/keeper.lock"])?;
    assert!(!may && said == "hearth runs own: stop it first, as user nobody: hearth stop own\n", "{said}");
    Ok(())
}

/// What systemd does at `systemctl restart hearth@NAME`: the unit's own command, a signal to the keeper, the next keeper.
fn restart_unit(files: &Files, name: &str) -> Result<()> {
    let vm = &files.vm;
    let pid = vm.status()?.keeper.pid.to_string();
    let stop = UNIT.lines().find_map(|line| line.strip_prefix("ExecStop=-")).expect("it has one");
    let stop = stop.replace("%i", name).replace("/usr/bin/hearth", &artifacts::hearth()?.display().to_string());
    // It may fail, and may have ended the keeper.
    vm.command(&["sh", "-c", &stop], "")?;
    vm.command(&["kill", "-TERM", &pid], "")?;
    vm.wait_until("the keeper has ended", || Ok(!vm.command(&["kill", "-0", &pid], "")?.status.success()))?;
    vm.start_keeper()
}

#[test]
fn restart_of_the_unit_only_replaces_the_keeper() -> Result<()> {
    let crash = "loop_count = 2\nloop_delay_s = 1000\ncompression = \"none\"";
    let Some(files) = Files::running_with("unit", "", crash)? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    let nonce = vm.nonce()?;
    restart_unit(&files, "unit")?;
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    files.verify()?;
    assert_eq!(vm.nonce()?, nonce, "the same guest");

    // A crash that nobody has seen to.
    vm.panic()?;
    vm.wait_state("crashed")?;
    restart_unit(&files, "unit")?;
    vm.start_host()?;
    vm.wait_next_boot()?;
    files.verify()?;

    // The wait of a crash loop, which the next keeper knows nothing of.
    vm.panic()?;
    vm.wait_until("the wait of a crash loop", || Ok(vm.status()?.next_start.is_some()))?;
    restart_unit(&files, "unit")?;
    vm.wait_next_boot()?;
    files.verify()?;
    assert_eq!(vm.status()?.state, MachineState::Running);
    let waits = |event: &EventKind| matches!(event, EventKind::CrashLoop { .. });
    assert!(vm.events()?.iter().any(|record| waits(&record.event)));
    Ok(())
}
