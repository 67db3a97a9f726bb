//! The emulated host: the busybox guest with the root image that `make test-nested` made.

use hearth_vmtest::images::{self, File};
use hearth_vmtest::{Drives, Output, PlainVm, Result, artifacts, patience};
use serde_json::json;

/// Mounts the image, and in it the file systems that programs expect. `/tmp` is not covered, since the checkout, with the images
/// that the tests boot, may be there. QEMU's emulated processor has AMD's virtualization.
const ENTER_THE_IMAGE: &str = "set -e; mkdir -p /host; mount -o ro /dev/vda /host; mount /dev/vdb /host/hearth
while read -r m; do grep -q \"^$m \" /proc/modules || insmod /host/modules/$m.ko; done </host/modules/order
mount -t devtmpfs dev /host/dev; mkdir -p /dev/shm; mount -t tmpfs -o size=90% shm /host/dev/shm
mount -t proc proc /host/proc; mount -t sysfs sys /host/sys
mount -t tmpfs run /host/run; mkdir /host/run/tmp
chmod 755 /host/hearth/hearth /host/hearth/nested; [ -c /dev/kvm ]";

/// When it enters a guest, the emulated processor sets an interrupt's bit without a lock (QEMU `helper_vmrun`), as another thread
/// may at the same time. A one-shot timer may be lost that way, and the host with it. A periodic one is only late by a tick.
const TICK: &str = "nohz=off highres=off";

/// Environment variable of tests that run on this host.
pub const EMULATED: &str = "HEARTH_EMULATED_HOST";

pub struct Host {
    vm: PlainVm,
    _disk: tempfile::TempDir,
}

impl Host {
    pub fn boot(name: &str) -> Result<Self> {
        Self::boot_with(name, "")
    }

    /// Boots with more words on the kernel's command line.
    pub fn boot_with(name: &str, words: &str) -> Result<Self> {
        let disk = tempfile::tempdir().unwrap();
        let image = disk.path().join("hearth.img");
        let program = |path: &str, from: &std::path::Path| {
            let contents = std::fs::read(from).unwrap();
            File { path: path.into(), contents }
        };
        let tests = std::env::current_exe().unwrap();
        images::ext4(&image, 256, &[program("hearth", &artifacts::hearth()?), program("nested", &tests)])?;
        let vm = PlainVm::busybox(name).memory_mib(3072).cmdline(&format!("{TICK} {words}"));
        // A host that panics must continue, so that it can print the reason.
        let vm = vm.drive(&artifacts::nested_host()?, "readonly=on").drive(&image, "").args(["-action", "panic=none"]);
        let vm = vm.boot()?;
        let host = Self { vm, _disk: disk };
        host.enter_the_image()?;
        Ok(host)
    }

    /// Enters the image, after each boot.
    pub fn enter_the_image(&self) -> Result<()> {
        self.vm.sh(ENTER_THE_IMAGE).map(drop)
    }

    pub fn vm(&self) -> &PlainVm {
        &self.vm
    }

    /// Runs the tests of this binary whose names begin so, and returns their output.
    pub fn run_tests(&self, names: &str) -> Result<Output> {
        self.answer(&command(names, "/run/tmp"))
    }

    /// Runs one test whose files must survive a change of this host's kernel.
    pub fn run_test(&self, name: &str) -> Result<Output> {
        self.answer(&command(name, "/hearth"))
    }

    /// Starts a test that ends the host.
    pub fn start_test(&self, name: &str) -> Result<()> {
        self.vm.guest().start(&command(name, "/hearth")).map(drop)
    }

    fn answer(&self, command: &str) -> Result<Output> {
        self.vm.run_within(command, patience(120)).inspect_err(|_| self.show_processor())
    }

    /// Prints the processor's state of a host that does not answer.
    fn show_processor(&self) {
        for look in ["info registers", "info lapic", "info registers"] {
            let seen = self.vm.qmp().execute("human-monitor-command", json!({ "command-line": look }));
            eprintln!("--- {look}\n{}", seen.unwrap_or_default().as_str().unwrap_or_default());
        }
        let panicked = self.panic_by_nmi();
        eprintln!("--- its kernel, after an NMI ({panicked:?})\n{}", self.vm.guest().kernel_log().join("\n"));
    }

    /// Makes the kernel panic, so that it prints what it was doing.
    fn panic_by_nmi(&self) -> Result<()> {
        self.vm.qmp().execute("inject-nmi", json!({}))?;
        let over = |line: &String| line.contains("end Kernel panic");
        self.vm.wait_console("the end of a panic", patience(5), |heard| heard.kernel().iter().any(over).then_some(()))
    }
}

/// Script that shows hanging tests: the kernel stack of each thread, and the logs of their machines.
const LOOK: &str = r#"echo "--- the tests have not ended"
for process in /proc/[0-9]*; do
    readlink $process/exe >/dev/null || continue
    echo "--- ${process#/proc/} $(tr "\0" " " <$process/cmdline)"
    for thread in $process/task/*; do
        echo "$(cat $thread/comm) $(grep State: $thread/status) $(cat $thread/wchan)"
        cat $thread/stack
    done
done
find /host/hearth /host/run/tmp -name "*.log" -o -name events.jsonl | while read -r log; do
    echo "--- $log"
    tail -n 60 $log
done
echo "--- the host"
echo w >/proc/sysrq-trigger; echo l >/proc/sysrq-trigger
dmesg | tail -n 80"#;

/// A command that ends before the wait for it does, so that a hang is examined from inside.
fn command(tests: &str, temporary: &str) -> String {
    let paths = format!("PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR={temporary} HEARTH_BIN=/hearth/hearth");
    let tests = format!("/hearth/nested --ignored --nocapture --test-threads=1 {tests}");
    let limit = patience(110).as_secs();
    format!(
        "chroot /host /bin/busybox env {paths} {EMULATED}=1 {tests} & tests=$!
        (sleep {limit}; {LOOK}; kill -9 $tests) & watch=$!
        wait $tests; status=$?; kill $watch 2>/dev/null; exit $status"
    )
}
