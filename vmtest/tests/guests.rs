//! The guests themselves, under plain QEMU: images, console protocol, probe. If these pass, a failed test of Hearth is not the
//! harness's fault.

use hearth_vmtest::artifacts::Debian;
use hearth_vmtest::images::File;
use hearth_vmtest::{Drives, PlainVm, Result, images, patience};

#[test]
fn command_output_with_any_bytes_is_complete() -> Result<()> {
    let vm = PlainVm::busybox("bytes").boot()?;
    // Kernel messages of every level appear in the middle of the output.
    vm.sh("echo 8 >/proc/sys/kernel/printk")?;
    let noise = "i=0; while [ $i -lt 50 ]; do echo \"[bracket] message $i\" >/dev/kmsg; i=$((i+1)); done";
    let output = vm.run(&format!("({noise}) & head -c 100000 /bin/busybox; exit 7"))?;
    assert_eq!(output.status, 7);
    let expected = vm.sh("head -c 100000 /bin/busybox | md5sum")?;
    let seen = vm.folder().join("seen");
    std::fs::write(&seen, &output.bytes).unwrap();
    let sum = std::process::Command::new("md5sum").stdin(std::fs::File::open(&seen).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&sum.stdout), expected);
    vm.wait_console("the noise", patience(5), |heard| {
        heard.kernel().iter().any(|message| message.contains("message 49")).then_some(())
    })
}

#[test]
fn a_panic_reaches_qemu() -> Result<()> {
    let vm = PlainVm::busybox("panic").args(["-action", "panic=pause"]).boot()?;
    vm.panic()?;
    vm.qmp().wait_event("GUEST_PANICKED", patience(10))?;
    assert_eq!(vm.qmp().execute("query-status", serde_json::json!({}))?["status"], "guest-panicked");
    Ok(())
}

#[test]
fn an_injected_interrupt_makes_the_kernel_panic() -> Result<()> {
    let vm = PlainVm::busybox("nmi").args(["-action", "panic=pause"]).boot()?;
    vm.qmp().execute("inject-nmi", serde_json::json!({}))?;
    vm.qmp().wait_event("GUEST_PANICKED", patience(10)).map(drop)
}

#[test]
fn power_button_shuts_down_the_small_guest() -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let image = home.path().join("disk.img");
    images::ext4(&image, 32, &[])?;
    let vm = PlainVm::busybox("button").drive(&image, "").boot()?;
    vm.sh("mount -t ext4 /dev/vda /mnt && echo kept >/mnt/file")?;
    vm.qmp().execute("system_powerdown", serde_json::json!({}))?;
    assert!(vm.wait_end()?.success());
    // The journal is empty.
    let header = std::process::Command::new("/usr/sbin/dumpe2fs").arg("-h").arg(&image).output().unwrap();
    let header = String::from_utf8_lossy(&header.stdout);
    assert!(header.contains("Filesystem state:         clean") && !header.contains("needs_recovery"), "{header}");
    Ok(())
}

#[test]
fn reset_boots_with_a_new_nonce() -> Result<()> {
    let vm = PlainVm::busybox("reset").boot()?;
    let first = vm.nonce()?;
    assert_eq!(vm.guest().ready()[0].nonce, first);
    vm.reset()?;
    let second = vm.wait_boots(2)?;
    assert_ne!(second.nonce, first);
    assert_eq!(vm.nonce()?, second.nonce);
    Ok(())
}

#[test]
fn files_made_on_host_verify_in_guest() -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let (ext4, xfs) = (home.path().join("ext4.img"), home.path().join("xfs.img"));
    let file = || File::pattern("data.bin", (3 << 20) + 5, 42);
    images::ext4(&ext4, 64, &[file()])?;
    images::xfs(&xfs, 300, &[file()])?;
    let vm = PlainVm::busybox("files").drive(&ext4, "").drive(&xfs, "").boot()?;
    for (device, kind) in [("vda", "ext4"), ("vdb", "xfs")] {
        vm.sh(&format!("mkdir /{kind} && mount -t {kind} /dev/{device} /{kind}"))?;
        let verified = vm.run(&format!("probe verify /{kind}/data.bin 42"))?;
        assert_eq!(verified.number("verified"), Some(((3 << 20) + 5) as f64), "{}", verified.text());
        // A changed byte is found, with its offset.
        vm.sh(&format!("printf x | dd of=/{kind}/data.bin bs=1 seek=1000001 conv=notrunc"))?;
        let broken = vm.run(&format!("probe verify /{kind}/data.bin 42"))?;
        assert_eq!((broken.status, broken.number("bad_offset")), (1, Some(1_000_000.0)), "{}", broken.text());
        let read = vm.run(&format!("probe drop-caches && probe read /{kind}/data.bin 65536"))?;
        assert!(read.number("mib_per_second").is_some_and(|speed| speed > 0.0), "{}", read.text());
    }
    Ok(())
}

#[test]
fn small_guest_has_fio_and_network() -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let image = home.path().join("disk.img");
    images::empty(&image, 32)?;
    let network = ["-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n"];
    let vm = PlainVm::busybox_with_fio("fio").drive(&image, "").args(network).boot()?;
    vm.sh("fio --name=v --filename=/dev/vda --rw=randwrite --bs=4k --size=8m --verify=crc32c --thread --direct=1")?;
    assert!(vm.sh("net-up && ip addr show dev eth0")?.contains("10.0.2.15"));
    Ok(())
}

#[test]
fn debian_serves_its_files() -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("root.img");
    images::copy(&Debian::Web.root()?, &root)?;
    let vm = PlainVm::debian("debian", Debian::Web).drive(&root, "").boot()?;
    assert_eq!(vm.sh("ls /var/www/html/files | wc -l")?.trim(), "512");
    assert_eq!(vm.sh("curl -s http://localhost/")?, "hearth\n");
    let served = "curl -s http://localhost/files/311.bin -o /run/311.bin && probe verify /run/311.bin 1";
    assert_eq!(vm.sh(served)?, "verified=1048576\n");
    assert_eq!(vm.sh("systemctl --failed --no-legend")?, "");
    assert_eq!(vm.sh("lsmod | grep -c ^pvpanic_pci")?, "1\n");
    vm.qmp().execute("system_powerdown", serde_json::json!({}))?;
    assert!(vm.wait_end()?.success());
    Ok(())
}

#[test]
fn failed_start_reports_the_reason() {
    let error =
        PlainVm::busybox("broken").args(["-device", "no-such-device"]).boot().map(drop).unwrap_err().to_string();
    assert!(error.contains("QEMU ended") && error.contains("no-such-device"), "{error}");
}
