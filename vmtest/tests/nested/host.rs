//! The emulated host: the busybox guest, which goes on in the image that `make test-nested` made.

use hearth_vmtest::images::{self, File};
use hearth_vmtest::{Drives, Output, PlainVm, Result, artifacts, patience};
use serde_json::json;

/// Mounts the image and what programs expect around it; nothing over `/tmp`, where the checkout, and so what its tests boot, may
/// lie. QEMU's emulated processor has the virtualization of AMD's.
const GO_ON_IN_THE_IMAGE: &str = "set -e; mkdir -p /host; mount -o ro /dev/vda /host; mount /dev/vdb /host/hearth
while read -r m; do grep -q \"^$m \" /proc/modules || insmod /host/modules/$m.ko; done </host/modules/order
mount -t devtmpfs dev /host/dev; mkdir -p /dev/shm; mount -t tmpfs -o size=90% shm /host/dev/shm
mount -t proc proc /host/proc; mount -t sysfs sys /host/sys
mount -t tmpfs run /host/run; mkdir /host/run/tmp
chmod 755 /host/hearth/hearth /host/hearth/nested; [ -c /dev/kvm ]";

/// The emulated processor sets the bit of an interrupt without a lock when it enters a guest (QEMU `helper_vmrun`), as another
/// thread may just then: a timer that rings once may be lost, and with it the host. One that ticks is late by a tick.
const TICK: &str = "nohz=off highres=off";

/// In the environment of tests that this host runs.
pub const EMULATED: &str = "HEARTH_EMULATED_HOST";

pub struct Host {
    vm: PlainVm,
    _disk: tempfile::TempDir,
}

impl Host {
    pub fn boot(name: &str) -> Result<Self> {
        Self::boot_with(name, "")
    }

    /// With more words on its kernel's command line.
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
        // One that panics when asked to stays, and says the rest.
        let vm = vm.drive(&artifacts::nested_host()?, "readonly=on").drive(&image, "").args(["-action", "panic=none"]);
        let vm = vm.boot()?;
        let host = Self { vm, _disk: disk };
        host.go_on_in_the_image()?;
        Ok(host)
    }

    /// After each boot.
    pub fn go_on_in_the_image(&self) -> Result<()> {
        self.vm.sh(GO_ON_IN_THE_IMAGE).map(drop)
    }

    pub fn vm(&self) -> &PlainVm {
        &self.vm
    }

    /// Runs tests of this binary by the beginning of their names; what they said.
    pub fn run_tests(&self, names: &str) -> Result<Output> {
        self.answer(&command(names, "/run/tmp"))
    }

    /// The same for one test whose files are to outlive this host's kernel.
    pub fn run_test(&self, name: &str) -> Result<Output> {
        self.answer(&command(name, "/hearth"))
    }

    /// The same for a test that ends the host.
    pub fn start_test(&self, name: &str) -> Result<()> {
        self.vm.guest().start(&command(name, "/hearth")).map(drop)
    }

    fn answer(&self, command: &str) -> Result<Output> {
        self.vm.run_within(command, patience(50)).inspect_err(|_| self.show_processor())
    }

    /// Of a host that says nothing.
    fn show_processor(&self) {
        for look in ["info registers", "info lapic", "info registers"] {
            let seen = self.vm.qmp().execute("human-monitor-command", json!({ "command-line": look }));
            eprintln!("--- {look}\n{}", seen.unwrap_or_default().as_str().unwrap_or_default());
        }
        let panicked = self.panic_by_nmi();
        eprintln!("--- its kernel, after an NMI ({panicked:?})\n{}", self.vm.guest().kernel_log().join("\n"));
    }

    /// The kernel then tells what it was at.
    fn panic_by_nmi(&self) -> Result<()> {
        self.vm.qmp().execute("inject-nmi", json!({}))?;
        let over = |line: &String| line.contains("end Kernel panic");
        self.vm.wait_console("the end of a panic", patience(5), |heard| heard.kernel().iter().any(over).then_some(()))
    }
}

/// What tests are at that have not ended, each thread in the kernel, and what their machines have said.
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

/// Ends before its answer is given up: a hang is looked at from inside then.
fn command(tests: &str, temporary: &str) -> String {
    let paths = format!("PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR={temporary} HEARTH_BIN=/hearth/hearth");
    let tests = format!("/hearth/nested --ignored --nocapture --test-threads=1 {tests}");
    let limit = patience(34).as_secs();
    format!(
        "chroot /host /bin/busybox env {paths} {EMULATED}=1 {tests} & tests=$!
        (sleep {limit}; {LOOK}; kill -9 $tests) & watch=$!
        wait $tests; status=$?; kill $watch 2>/dev/null; exit $status"
    )
}
