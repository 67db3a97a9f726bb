//! Keeper, QEMU, libvirtd and `hearth host` are killed at random moments, also while a crashed domain comes back: `make soak
//! NAME=libvirt`, and a few kills in every run of the tests. After each kill:
//!
//! - the domain is on or off as the table of deaths in `docs/libvirt.md` says;
//! - all that the guest had flushed is there, and all files are whole;
//! - fio, which verifies what it writes to a second disk, still runs and has found no wrong block;
//! - no process, socket or file is left over.
//!
//! What a service manager does is done here: killed daemons are started again, and a killed `hearth host` takes its children along.

use std::time::Duration;

use hearth_api::{DumpState, MachineState};
use hearth_vmtest::libvirt::LibvirtVm;
use hearth_vmtest::{Drives, Random, Result, known};

use super::{Files, assert_within_budget};

const NAME: &str = "kills";
/// The seed of the short run.
const SEED: u64 = 3;
const KILLS: usize = 3;
/// The domain is on its way back for about as long.
const MOMENTS_MS: usize = 2500;

/// Appends numbered records for as long as the guest lives. Each comes after a file of its own, which is read back from the disk.
/// What follows the last whole record was not flushed, and ext4 may have made it longer than what it wrote of it.
const WRITER: &str = r#"
mount -o noatime /dev/vda /mnt
(i=$(awk '$0 != sprintf("record %08d", NR) { exit } { n = NR } END { print n + 0 }' /mnt/records 2>/dev/null || echo 0)
truncate -s $((i * 16)) /mnt/records && echo $i >/tmp/began
while :; do
  i=$((i+1)); file=/mnt/w$((i % 4))
  probe fill $file 262144 $i && sync -f $file && echo 1 >/proc/sys/vm/drop_caches
  probe verify $file $i || echo $i >>/tmp/wrong
  printf 'record %08d\n' $i >>/mnt/records && sync -f /mnt/records && echo $i >/tmp/flushed.new && mv /tmp/flushed.new /tmp/flushed
done) >/dev/null 2>&1 &
"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Keeper,
    Qemu,
    Libvirtd,
    Host,
}

const VICTIMS: [Victim; 4] = [Victim::Keeper, Victim::Qemu, Victim::Libvirtd, Victim::Host];

impl Victim {
    /// What `pgrep -f` finds it by.
    fn pattern(self) -> &'static str {
        match self {
            Self::Keeper => "^[^ ]*hearth .*run /etc/hearth/",
            Self::Qemu => "^[^ ]*qemu-system",
            Self::Libvirtd => "^libvirtd",
            Self::Host => "^[^ ]*hearth host",
        }
    }

    fn pids(self, vm: &LibvirtVm) -> Result<Vec<String>> {
        let found = vm.command(&["pgrep", "-f", self.pattern()], "")?;
        Ok(String::from_utf8_lossy(&found.stdout).split_whitespace().map(str::to_owned).collect())
    }

    /// Kills it, if it runs, and does what a service manager does then.
    fn kill(self, vm: &LibvirtVm) -> Result<()> {
        for pid in self.pids(vm)? {
            let whom = if self == Self::Host { format!("-{pid}") } else { pid };
            // It may have ended just now.
            vm.command(&["kill", "-KILL", "--", &whom], "")?;
            vm.wait_until("its end", || Ok(!vm.command(&["kill", "-0", "--", &whom], "")?.status.success()))?;
        }
        match self {
            Self::Keeper => vm.start_keeper(),
            Self::Qemu => Ok(()),
            Self::Libvirtd => vm.start_libvirt(),
            Self::Host => vm.start_daemon(&["host"]),
        }
    }
}

struct Kills {
    files: Files,
    random: Random,
    /// Each round's kills, for the messages.
    log: Vec<String>,
}

impl Kills {
    fn begin(random: Random) -> Result<Option<Self>> {
        // Not a loop: how long it would wait is another test's.
        let crash = "loop_count = 1000\nloop_window_s = 1\ncompression = \"none\"";
        let Some(files) = Files::define_with_load(NAME)? else { return Ok(None) };
        files.start_with("", crash)?;
        files.vm.start_host()?;
        let kills = Self { files, random, log: Vec::new() };
        kills.start_writers()?;
        Ok(Some(kills))
    }

    fn start_writers(&self) -> Result<()> {
        self.vm().sh(WRITER)?;
        known::start_endless_fio_on(self.vm(), "/dev/vdb")
    }

    fn vm(&self) -> &LibvirtVm {
        &self.files.vm
    }

    /// The number of the last record that the guest has flushed, once there is one more.
    fn flushed(&self) -> Result<u32> {
        let more = "while [ ! -s /tmp/flushed ]; do sleep 0.1; done; to=$(($(cat /tmp/flushed) + 1))
            while [ $(cat /tmp/flushed) -lt $to ]; do sleep 0.1; done; cat /tmp/flushed";
        Ok(self.vm().sh(more)?.trim().parse().expect("the writer writes numbers"))
    }

    /// How many guests have booted.
    fn ready(&self) -> usize {
        self.vm().guest().ready().len()
    }

    fn wait_moment(&mut self) {
        std::thread::sleep(Duration::from_millis(self.random.below(MOMENTS_MS) as u64));
    }

    /// One or two kills, half of the time after a panic.
    fn round(&mut self) -> Result<()> {
        let flushed = self.flushed()?;
        let (mut boots, nonce) = (self.ready(), self.vm().nonce()?);
        let panics = self.random.below(2) == 0;
        let victims: Vec<_> = (0..=self.random.below(2)).map(|_| self.random.of(&VICTIMS)).collect();
        self.log.push(format!("{}{victims:?} after record {flushed}", if panics { "panic, " } else { "" }));
        eprintln!("kill {}: {}", self.log.len(), self.log[self.log.len() - 1]);
        if panics {
            self.vm().panic()?;
        }
        for victim in &victims {
            self.wait_moment();
            victim.kill(self.vm())?;
            if *victim == Victim::Qemu {
                // After a panic that may have been the next guest already.
                boots = self.ready();
            }
        }
        let is_killed = victims.contains(&Victim::Qemu);
        match (panics, is_killed) {
            (false, false) => assert_eq!(self.vm().nonce()?, nonce, "the guest goes on: {:?}", self.log),
            (false, true) => {
                self.vm().wait_state("shut off")?;
                assert!(!self.is_coming_back()?, "a QEMU that was killed stays off: {:?}", self.log);
                self.vm().virsh("start", &[])?;
            }
            (true, true) => self.start_unless_coming_back()?,
            (true, false) => {}
        }
        if panics || is_killed {
            self.vm().wait_until("the next guest", || {
                self.look_after_libvirt()?;
                Ok(self.ready() > boots)
            })?;
            self.start_writers()?;
            let began = self.vm().sh("while [ ! -s /tmp/began ]; do sleep 0.1; done; cat /tmp/began")?;
            let began: u32 = began.trim().parse().expect("the writer writes numbers");
            assert!(began >= flushed, "of {flushed} flushed records {began} are whole: {:?}", self.log);
        }
        self.check(flushed)
    }

    /// libvirt may have seen no crash, or the next guest may be the one that was killed.
    fn start_unless_coming_back(&self) -> Result<()> {
        self.vm().wait_until("the domain is on, or stays off", || {
            self.look_after_libvirt()?;
            let state = self.vm().virsh("domstate", &[])?;
            if state.trim() == "shut off" && !self.is_coming_back()? {
                // `hearth host` may be faster.
                self.vm().command(&["virsh", "-q", "start", NAME], "")?;
            }
            Ok(state.trim() == "running" && !Victim::Qemu.pids(self.vm())?.is_empty())
        })
    }

    /// libvirt 9.0 dies again if it was killed during a dump of registers: it does not know of the dump that QEMU says is over.
    fn look_after_libvirt(&self) -> Result<()> {
        if Victim::Libvirtd.pids(self.vm())?.is_empty() {
            self.vm().start_libvirt()?;
        }
        self.vm().mend_lost_start().map(drop)
    }

    /// Whether the keeper waits for the domain's next start.
    fn is_coming_back(&self) -> Result<bool> {
        let (code, said) = self.vm().try_hearth(&["status", NAME, "--json"])?;
        Ok(code == 0 && !said.contains(r#""state":"stopped""#))
    }

    /// `flushed`: the last record that must be there.
    fn check(&self, flushed: u32) -> Result<()> {
        let vm = self.vm();
        let last = self.flushed()?;
        assert!(last > flushed, "record {flushed} was flushed, and {last} is the last one: {:?}", self.log);
        let whole = format!(
            "awk '$0 != sprintf(\"record %08d\", NR) {{ print NR, $0; exit 1 }} END {{ exit NR < {last} }}' /mnt/records && \
             [ ! -e /tmp/wrong ] || {{ cat /tmp/wrong; exit 1; }}"
        );
        vm.sh(&whole)?;
        assert!(known::fio_is_content(vm)?, "{}", vm.sh("cat /tmp/fio.log")?);
        self.files.verify()?;
        vm.wait_until("the dumps end", || {
            let is_over = vm.status()?.dumps.iter().all(|dump| dump.state.is_over());
            Ok(is_over && vm.status()?.state == MachineState::Running)
        })?;
        let status = vm.status()?;
        assert!(status.dumps.iter().all(|dump| dump.state != DumpState::Waiting), "{status:?}");
        assert_eq!(status.memory.held_bytes, 0, "{status:?}");
        assert_within_budget(vm)?;
        for victim in VICTIMS {
            assert_eq!(victim.pids(vm)?.len(), 1, "{victim:?}: {:?}", self.log);
        }
        // A killed `hearth host` leaves them to the next one.
        vm.wait_until("no registers are left over", || {
            let left = vm.must(&["ls", &format!("/run/hearth/{NAME}")], "")?;
            Ok(!left.contains("registers") && !left.contains("harvest"))
        })?;
        Ok(())
    }

    /// The domain and its keeper end, and nothing of them is left.
    fn end(self) -> Result<()> {
        let vm = self.vm();
        vm.virsh("destroy", &[])?;
        super::wait_off(vm)?;
        vm.hearth(&["stop", NAME])?;
        for victim in [Victim::Keeper, Victim::Qemu] {
            assert_eq!(victim.pids(vm)?, [""; 0], "{victim:?}");
        }
        let left =
            vm.must(&["sh", "-c", "find /dev/shm /run/hearth -type s -o -name '*ledger*' -o -name '*ram*'"], "")?;
        assert_eq!(left.trim(), "");
        Ok(())
    }
}

#[test]
fn kills_at_random_moments_lose_nothing() -> Result<()> {
    let Some(mut kills) = Kills::begin(Random::seeded_or(SEED))? else { return Ok(()) };
    for _ in 0..KILLS {
        kills.round()?;
    }
    kills.end()
}

#[test]
#[ignore = "takes minutes: KILLS=200, unless said otherwise"]
fn hundreds_of_kills_lose_nothing() -> Result<()> {
    let rounds = std::env::var("KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
    let Some(mut kills) = Kills::begin(Random::seeded())? else { return Ok(()) };
    for _ in 0..rounds {
        kills.round()?;
    }
    kills.end()
}
