//! `hearth save --freeze`: the guest's agent freezes its file systems at the moment that is saved, and they never stay frozen:
//! not when
//! the agent fails, not when the keeper is killed, and not in a restored guest.

use std::fs;
use std::path::Path;

use hearth_api::{MachineState, MachineStatus};
use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::{Disk, Drives, Result, START_AGENT, TestVm, artifacts, event, images, patience};

use super::object_store::{Stand, address};

/// Writes to the file system all the time, and counts its writes in a file.
const WRITER: &str = r#"
mount -t ext4 /dev/vda /mnt
(i=0
while :; do
  i=$((i+1))
  mkdir -p /mnt/$((i % 50)); dd if=/dev/urandom of=/mnt/$((i % 50))/$i bs=16k count=1 2>/dev/null
  rm -f /mnt/$(((i + 1) % 50))/*
  [ $((i % 5)) = 0 ] && sync -f /mnt/$((i % 50))
  echo $i >/tmp/written.new; mv /tmp/written.new /tmp/written
done) >/dev/null 2>&1 &
"#;

/// Waits until the writer has made progress.
fn await_writer(vm: &TestVm) -> Result<()> {
    let wait = "while [ ! -s /tmp/written ]; do sleep 0.1; done; from=$(cat /tmp/written)
        while [ $(cat /tmp/written) -lt $((from + 10)) ]; do sleep 0.1; done";
    vm.sh_within(wait, patience(60)).map(drop)
}

fn machine(name: &str) -> Result<TestVm> {
    at_work(TestVm::busybox_with_agent(name).for_both_qemus().disk(Disk::ext4(64)).boot()?)
}

fn at_work(vm: TestVm) -> Result<TestVm> {
    vm.sh(START_AGENT)?;
    vm.sh(WRITER)?;
    await_writer(&vm)?;
    Ok(vm)
}

fn is_thawed(status: &MachineStatus) -> bool {
    status.frozen.is_none() && status.save.is_none() && status.state == MachineState::Running
}

fn count_of(vm: &TestVm, kind: &str) -> Result<usize> {
    let events = vm.cli(&["events", vm.name(), "--json"])?;
    Ok(events.lines().filter(|line| line.contains(&format!("\"{kind}\""))).count())
}

/// Whether the snapshot's disk has a journal to replay; if not, it must be clean.
fn needs_recovery(snapshot: &Path) -> Result<bool> {
    let snapshot = Snapshot::open(snapshot).expect("it was saved");
    let disk = snapshot.disk_path(&snapshot.manifest.disks[0].name);
    let needs = images::ext4_needs_recovery(&disk)?;
    if !needs {
        images::check_ext4(&disk, 0)?;
    }
    assert_eq!(snapshot.manifest.frozen, !needs);
    Ok(needs)
}

#[test]
fn frozen_file_systems_are_clean_and_thaw_everywhere() -> Result<()> {
    let vm = machine("frozen")?;
    let (nonce, as_it_ran, frozen) = (vm.nonce()?, vm.folder().join("as-it-ran"), vm.folder().join("frozen"));
    vm.save(&as_it_ran)?;
    vm.save_with(&frozen, &["--freeze"])?;
    assert_eq!(vm.wait_event("a frozen save", event!(SaveFrozen { file_systems, .. } => file_systems))?, 1);
    let thawed = event!(Thawed { file_systems, frozen_ms } => (file_systems, frozen_ms));
    let (count, frozen_ms) = vm.wait_event("thawed file systems", thawed)?;
    assert!(count == 1 && frozen_ms > Some(0.0), "{count}, {frozen_ms:?}");
    await_writer(&vm)?;
    assert!(needs_recovery(&as_it_ran)?, "a file system that is written to needs its journal");
    assert!(!needs_recovery(&frozen)?);
    vm.stop_at_once()?;
    for (name, option) in [("lazily", "--lazy"), ("eagerly", "--eager")] {
        let clone = vm.restore(&frozen, name, &[option])?;
        clone.wait_running()?;
        assert_eq!(clone.wait_event("thawed file systems", thawed)?, (1, None));
        clone.await_console()?;
        await_writer(&clone)?;
        assert_eq!(clone.nonce()?, nonce);
        clone.wait_event("all memory is there", event!(RestoreComplete))?;
        clone.stop_at_once()?;
    }
    Ok(())
}

#[test]
fn frozen_file_systems_are_clean_in_a_store() -> Result<()> {
    let stand = Stand::new();
    let vm = at_work(stand.machine(TestVm::busybox_with_agent("farfrozen").disk(Disk::ext4(64)))?)?;
    let nonce = vm.nonce()?;
    vm.save_with(Path::new(&address("one")), &["--freeze"])?;
    vm.wait_status("thawed file systems", is_thawed)?;
    await_writer(&vm)?;
    vm.stop_at_once()?;
    let clone = stand.clone(&vm, "near", "cache", &["--lazy"])?;
    clone.wait_running()?;
    assert_eq!(clone.wait_event("thawed file systems", event!(Thawed { file_systems, .. } => file_systems))?, 1);
    clone.await_console()?;
    await_writer(&clone)?;
    assert_eq!(clone.nonce()?, nonce);
    clone.wait_event("a complete disk", event!(DiskComplete))?;
    let disks: Vec<_> =
        fs::read_dir(clone.folder().join("machine/saved-disks")).expect("they were fetched").flatten().collect();
    assert_eq!(disks.len(), 1, "{disks:?}");
    assert!(!images::ext4_needs_recovery(&disks[0].path())?);
    images::check_ext4(&disks[0].path(), 0)
}

#[test]
fn agent_channel_survives_hops_keepers_and_parking() -> Result<()> {
    let vm = machine("channel")?;
    let mut saves = 0;
    let mut check = |what: &str| -> Result<()> {
        let folder = vm.folder().join(what);
        vm.save_with(&folder, &["--freeze"])?;
        saves += 1;
        vm.wait_status(what, is_thawed)?;
        assert_eq!((count_of(&vm, "save_frozen")?, needs_recovery(&folder)?), (saves, false), "{what}");
        await_writer(&vm)
    };
    for (name, qemu) in [("newer", artifacts::qemu_10()?), ("back", artifacts::installed_qemu()?)] {
        let hop = vm.rejuvenate_to(&qemu)?;
        assert!(hop.status == 0, "{hop:?}");
        check(name)?;
    }
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    check("taken-over")?;
    let record = vm.folder().join("record.json").display().to_string();
    vm.cli(&["host-reload", "prepare", "--drill", "--record", &record])?;
    vm.wait_keeper_end()?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    check("parked")?;
    Ok(())
}

/// The keeper dies with the guest's file systems frozen.
#[test]
fn next_keeper_thaws_frozen_file_systems() -> Result<()> {
    let vm = machine("killedfrozen")?;
    let nonce = vm.nonce()?;
    vm.restart_keeper_with(&[("HEARTH_DRILL_DIE_AFTER", "freeze")])?;
    vm.wait_running()?;
    vm.await_console()?;
    let folder = vm.folder().join("snapshot");
    let ended = vm.cli_output(&["save", vm.name(), "-o", &folder.display().to_string(), "--freeze"])?;
    assert!(ended.status != 0, "{}", ended.text());
    assert!(Snapshot::open(&folder).is_err());
    vm.restart_keeper()?;
    vm.wait_running()?;
    let thawed = event!(Thawed { file_systems, .. } => file_systems);
    assert_eq!(vm.wait_event("thawed file systems", thawed)?, 1, "the file system was frozen");
    vm.await_console()?;
    await_writer(&vm)?;
    assert_eq!(vm.nonce()?, nonce);
    vm.save_with(&vm.folder().join("another"), &["--freeze"])
}

/// A small agent. Its argument is its reaction to `freeze`; the requests that it got are in /tmp/asked.
const FAKE_AGENT: &str = r#"
cat >/tmp/agent <<'EOF'
echo $$ >/tmp/agent.pid
port=$(ls /dev/vport*p1)
exec <>$port >&0
while :; do
  # The other end is not connected.
  read -r line || { sleep 0.1 <&- >&-; continue; }
  case "$line" in
  *guest-sync-delimited*) id=${line##*'"id":'}; printf '\377{"return": %s}\n' ${id%%[!0-9]*} ;;
  *guest-fsfreeze-freeze*) echo freeze >>/tmp/asked; eval "$1" ;;
  *guest-fsfreeze-thaw*) echo thaw >>/tmp/asked; echo '{"return": 1}' ;;
  esac
done
EOF
"#;

struct Faulty<'a> {
    vm: &'a TestVm,
    saves: usize,
}

impl Faulty<'_> {
    /// Replaces the agent. `None`: no agent runs.
    fn agent(&self, says: Option<&str>) -> Result<()> {
        // Only one process at a time can open the port.
        self.vm
            .sh("[ ! -e /tmp/agent.pid ] || kill $(cat /tmp/agent.pid); rm -f /tmp/asked /tmp/agent.pid; sleep 0.5")?;
        match says {
            Some(says) => {
                self.vm.sh(&format!("(setsid sh /tmp/agent '{says}' &) </dev/null >/dev/null 2>&1")).map(drop)
            }
            None => Ok(()),
        }
    }

    /// Asserts that a save fails for this reason, and leaves nothing.
    fn check(&mut self, says: Option<&str>, expect: &str) -> Result<()> {
        self.agent(says)?;
        self.saves += 1;
        let folder = self.vm.folder().join(format!("snapshot{}", self.saves));
        let save =
            self.vm.cli_output(&["save", self.vm.name(), "-o", &folder.display().to_string(), "--freeze", "2s"])?;
        assert!(save.status != 0 && save.text().contains(expect), "{says:?}: {}", save.text());
        assert!(save.text().contains("or save without `--freeze`"), "{}", save.text());
        assert!(!folder.exists(), "{says:?}");
        self.settles(says.is_some())
    }

    /// Waits until the guest runs with thawed file systems. An agent that was asked to freeze was also asked to thaw.
    fn settles(&self, is_asked: bool) -> Result<()> {
        self.vm.wait_status("a running guest with thawed file systems", is_thawed)?;
        let asked = self.vm.sh("cat /tmp/asked 2>/dev/null; true")?;
        assert_eq!(asked, if is_asked { "freeze\nthaw\n" } else { "" });
        Ok(())
    }
}

#[test]
fn failing_agent_leaves_the_guest_as_it_was() -> Result<()> {
    let vm = TestVm::busybox_with_agent("faulty").disk(Disk::ext4(32)).boot()?;
    let nonce = vm.nonce()?;
    vm.sh(FAKE_AGENT)?;
    let mut faulty = Faulty { vm: &vm, saves: 0 };
    faulty.check(None, "the guest agent did not answer within 2s (guest-sync-delimited)")?;
    let refusal = r#"echo "{\"error\": {\"class\": \"GenericError\", \"desc\": \"a hook failed\"}}""#;
    faulty.check(Some(refusal), "the guest agent refuses (guest-fsfreeze-freeze): a hook failed")?;
    faulty.check(Some("echo rubbish"), "is invalid (guest-fsfreeze-freeze): rubbish")?;
    faulty.check(Some("head -c 300000 /dev/zero"), "sent more than 65536 bytes without an answer")?;
    let late = r#"sleep 4; echo "{\"return\": 1}""#;
    faulty.check(Some(late), "the guest agent did not answer within 2s (guest-fsfreeze-freeze)")?;
    assert_eq!(vm.nonce()?, nonce);

    // A save is cancelled, and then a keeper killed, while the agent is busy.
    let slow = r#"sleep 6; echo "{\"return\": 1}""#;
    let begin = |name: &str| -> Result<()> {
        let folder = vm.folder().join(name).display().to_string();
        vm.cli(&["save", vm.name(), "-o", &folder, "--freeze", "1m", "--no-wait"])?;
        vm.wait_status("a request to the agent", |status| status.frozen.is_some())?;
        vm.sh("while [ ! -e /tmp/asked ]; do sleep 0.1; done").map(drop)
    };
    faulty.agent(Some(slow))?;
    begin("cancelled")?;
    vm.cli(&["save", vm.name(), "--cancel"])?;
    let again =
        vm.cli_output(&["save", vm.name(), "-o", &vm.folder().join("again").display().to_string(), "--freeze"])?;
    assert!(again.status != 0 && again.text().contains("still frozen for an earlier save"), "{}", again.text());
    // The request to thaw goes through the next QEMU.
    vm.rejuvenate()?;
    faulty.settles(true)?;
    assert!(!vm.folder().join("cancelled").exists());
    faulty.agent(Some(slow))?;
    begin("killed")?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    faulty.settles(true)?;
    assert!(Snapshot::open(&vm.folder().join("killed")).is_err());

    faulty.agent(Some(r#"echo "{\"return\": 1}""#))?;
    let folder = vm.folder().join("snapshot");
    vm.save_with(&folder, &["--freeze", "--stop"])?;
    vm.wait_keeper_end()?;
    assert!(Snapshot::open(&folder).expect("it was saved").manifest.frozen);
    let clone = vm.restore(&folder, "clone", &[])?;
    clone.wait_running()?;
    clone.await_console()?;
    clone.wait_status("thawed file systems", is_thawed)?;
    assert_eq!((clone.sh("cat /tmp/asked")?.as_str(), clone.nonce()?), ("freeze\nthaw\n", nonce));
    Ok(())
}

#[test]
fn freeze_without_channel_names_the_remedy() -> Result<()> {
    let vm = TestVm::busybox("channelless").for_both_qemus().boot()?;
    let folder = vm.folder().join("snapshot");
    let save = || vm.cli_output(&["save", vm.name(), "-o", &folder.display().to_string(), "--freeze"]);
    let refused = save()?.text();
    assert!(
        refused.contains("no channel to a guest agent") && refused.contains("`guest_agent = true` at the top"),
        "{refused}"
    );
    let config = vm.folder().join("machine.toml");
    let text = fs::read_to_string(&config).expect("it is there");
    fs::write(&config, format!("guest_agent = true\n{text}")).expect("it can be written");
    vm.restart_keeper()?;
    vm.wait_running()?;
    let refused = save()?.text();
    assert!(refused.contains("without a channel to its agent") && refused.contains("`hearth reboot`"), "{refused}");
    let hop = vm.rejuvenate_to(&artifacts::installed_qemu()?)?;
    assert!(hop.status == 0, "the next QEMU has no such device either: {hop:?}");
    vm.reboot_forced()?;
    vm.wait_boots(2)?;
    vm.sh("ls /dev/vport*p1")?;
    assert!(!folder.exists());
    Ok(())
}
