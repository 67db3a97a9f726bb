//! The emulated host: the busybox guest, which goes on in the image that `make test-nested` made.

use hearth_vmtest::images::{self, File};
use hearth_vmtest::{Drives, Output, PlainVm, Result, artifacts, patience};

/// Mounts the image and what programs expect around it; nothing over `/tmp`, where the checkout, and so what its tests boot, may
/// lie. QEMU's emulated processor has the virtualization of AMD's.
const GO_ON_IN_THE_IMAGE: &str = "set -e; mkdir -p /host; mount -o ro /dev/vda /host; mount /dev/vdb /host/hearth
while read -r m; do grep -q \"^$m \" /proc/modules || insmod /host/modules/$m.ko; done </host/modules/order
mount -t devtmpfs dev /host/dev; mkdir -p /dev/shm; mount -t tmpfs -o size=90% shm /host/dev/shm
mount -t proc proc /host/proc; mount -t sysfs sys /host/sys
mount -t tmpfs run /host/run; mkdir /host/run/tmp
chmod 755 /host/hearth/hearth /host/hearth/nested; [ -c /dev/kvm ]";

pub struct Host {
    vm: PlainVm,
    _disk: tempfile::TempDir,
}

impl Host {
    pub fn boot(name: &str) -> Result<Self> {
        let disk = tempfile::tempdir().unwrap();
        let image = disk.path().join("hearth.img");
        let program = |path: &str, from: &std::path::Path| {
            let contents = std::fs::read(from).unwrap();
            File { path: path.into(), contents }
        };
        let tests = std::env::current_exe().unwrap();
        images::ext4(&image, 256, &[program("hearth", &artifacts::hearth()?), program("nested", &tests)])?;
        let vm = PlainVm::busybox(name).memory_mib(3072);
        let vm = vm.drive(&artifacts::nested_host()?, "readonly=on").drive(&image, "").boot()?;
        vm.sh(GO_ON_IN_THE_IMAGE)?;
        Ok(Self { vm, _disk: disk })
    }

    /// Runs tests of this binary by the beginning of their names; what they said.
    pub fn run_tests(&self, names: &str) -> Result<Output> {
        const ENVIRONMENT: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/run/tmp HEARTH_BIN=/hearth/hearth";
        let tests = format!("/hearth/nested --ignored --nocapture --test-threads=1 {names}");
        self.vm.run_within(&format!("chroot /host /bin/sh -c '{ENVIRONMENT} {tests}'"), patience(50))
    }
}
