//! A machine's surroundings: QEMU's versions, its userfaultfd and sandbox, firmware, networks, guest kernels.

use std::path::{Path, PathBuf};

use hearth_api::UserfaultStatus;
use hearth_vmtest::images::{self, File};
use hearth_vmtest::net::{Tap, free_port, passt_works};
use hearth_vmtest::web::{fetch, serve};
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, patience};
use toml::Value;

/// Whether a process has a userfaultfd open.
fn has_userfaultfd(pid: u32) -> bool {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process runs");
    let links = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.into_iter().any(|link| link == Path::new("anon_inode:[userfaultfd]"))
}

/// The QEMU that `QEMU=10` selects, if it was unpacked.
fn newer_qemu() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/qemu10/usr/bin/qemu-system-x86_64");
    path.canonicalize().ok().filter(|path| path.is_file())
}

const FILE_BYTES: usize = 8 << 20;
const FILE_PAGES: u64 = (FILE_BYTES / 4096) as u64;

fn with_file(builder: TestVmBuilder) -> TestVmBuilder {
    builder.disk(Disk::ext4(64).with_files([File::pattern("kept.bin", FILE_BYTES, 3)]))
}

const VERIFY: &str = "mkdir -p /d && mount /dev/vda /d && probe verify /d/kept.bin 3";

/// Reads a file, crashes the guest, and reads the file again, from memory.
fn reboots_warm(vm: &TestVm) -> Result<()> {
    vm.sh(VERIFY)?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    vm.sh(VERIFY)?;
    let ember = vm.status()?.ember;
    assert!(ember.pages_served >= FILE_PAGES * 9 / 10, "{ember:?}");
    vm.has_no_disk_errors()
}

/// Asserts that keeper and QEMU each hold the userfaultfd. Without QEMU's copy, page faults of a guest whose keeper died would be
/// answered with zeros.
fn userfaultfd_is_shared(vm: &TestVm) -> Result<()> {
    assert_eq!(vm.qemu()?.userfault, UserfaultStatus::HandedOver);
    let qemu = vm.qemu_pid()?.as_raw_nonzero().get() as u32;
    assert!(has_userfaultfd(qemu), "QEMU {qemu} has none");
    assert!(has_userfaultfd(vm.keeper_pid().expect("the keeper runs")), "the keeper has none");
    Ok(())
}

#[test]
fn qemu_has_userfaultfd_and_sandbox() -> Result<()> {
    let vm = with_file(TestVm::busybox("userfault")).boot()?;
    userfaultfd_is_shared(&vm)?;
    let qemu = vm.qemu_pid()?.as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{qemu}/status")).expect("QEMU runs");
    assert!(status.lines().any(|line| line == "Seccomp:\t2"), "{status}");
    assert!(status.lines().any(|line| line == "NoNewPrivs:\t1"), "{status}");
    reboots_warm(&vm)?;
    userfaultfd_is_shared(&vm)?;
    // The keeper's end does not close QEMU's copy.
    let qemu = vm.qemu_pid()?.as_raw_nonzero().get() as u32;
    vm.kill_keeper()?;
    assert!(has_userfaultfd(qemu));
    Ok(())
}

#[test]
fn newer_qemu_has_userfaultfd_and_reboots_warm() -> Result<()> {
    let Some(qemu) = newer_qemu() else {
        eprintln!("skipped: no second QEMU; `cargo xtask qemu10` unpacks one");
        return Ok(());
    };
    let vm = with_file(TestVm::busybox("newer")).setting("qemu", qemu.display().to_string()).boot()?;
    let version = vm.qemu()?.version;
    assert!(version.starts_with("10."), "{version}");
    userfaultfd_is_shared(&vm)?;
    reboots_warm(&vm)?;
    userfaultfd_is_shared(&vm)
}

#[test]
fn newer_linux_reboots_warm() -> Result<()> {
    let vm = with_file(TestVm::busybox_on_linux_6_12("linux")).boot()?;
    assert!(vm.sh("uname -r")?.starts_with("6.12."));
    reboots_warm(&vm)
}

/// A boot sector that prints a readiness line to the first serial port, with another number at each boot. It holds 89 bytes of
/// assembled 16-bit code, and the text.
fn boot_sector() -> Vec<u8> {
    #[rustfmt::skip]
    const CODE: [u8; 89] = [
        0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, // cli; ds = ss = 0; sp = 7c00
        0xbe, 0x59, 0x7c, 0xe8, 0x2f, 0x00,                         // print(PREFIX)
        0x0f, 0x31, 0x66, 0x89, 0xc5, 0xbf, 0x04, 0x00,             // ebp = rdtsc; four times:
        0x66, 0x89, 0xeb, 0xb9, 0x08, 0x00, 0x66, 0xc1, 0xc3, 0x04, //   ebx = ebp; eight times: rol ebx, 4
        0x88, 0xd8, 0x24, 0x0f, 0x3c, 0x0a, 0x72, 0x02, 0x04, 0x27, //     the low four bits
        0x04, 0x30, 0xe8, 0x19, 0x00, 0xe2, 0xeb,                   //     as a digit, put
        0x4f, 0x75, 0xe2, 0xbe, 0x74, 0x7c, 0xe8, 0x03, 0x00,       // print(SUFFIX)
        0xf4, 0xeb, 0xfd,                                           // hlt, for ever
        0xac, 0x84, 0xc0, 0x74, 0x05, 0xe8, 0x03, 0x00, 0xeb, 0xf6, // print: put each byte
        0xc3,                                                       //   until a zero
        0x50, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x20, 0x74, 0xfb, 0x58, // put: wait until COM1 takes a byte
        0xba, 0xf8, 0x03, 0xee, 0xc3,                               //   and give it one
    ];
    let mut sector = [&CODE[..], b"\nHEARTH-GUEST-READY nonce=\0", b" boot=0\n\0"].concat();
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

fn boot_from(firmware: &str, vars: Option<&Path>) -> Value {
    let mut boot = toml::Table::from_iter([("firmware".to_owned(), Value::from(firmware))]);
    boot.extend(vars.map(|vars| ("firmware_vars".to_owned(), Value::from(vars.display().to_string()))));
    Value::from(boot)
}

#[test]
fn bios_boots_from_the_first_disk() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let image = home.path().join("boot.img");
    let mut contents = boot_sector();
    contents.resize(1 << 20, 0);
    std::fs::write(&image, contents).expect("our own file");
    let vm = TestVm::busybox("bios").setting("boot", boot_from("bios", None)).disk(Disk::in_place(&image)).boot()?;
    assert!(vm.status()?.disks[0].read_image_bytes >= 512);
    vm.reboot_forced()?;
    let second = vm.wait_incarnation(2)?;
    assert_ne!(second.nonce, vm.guest().ready()[0].nonce);
    Ok(())
}

/// Firmware in flash with a store for its variables runs, and looks for something to boot.
#[test]
fn uefi_starts_and_writes_its_variables() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let vars = home.path().join("vars.fd");
    let Some(template) = images::firmware_vars(&vars) else { return Ok(()) };
    let boot = boot_from("uefi", Some(&vars));
    let vm = TestVm::busybox("uefi").setting("boot", boot).disk(Disk::empty(8)).start()?;
    vm.wait_console("the firmware's boot manager", patience(30), |heard| {
        heard.tail(60).contains("BdsDxe").then_some(())
    })?;
    assert_ne!(std::fs::read(&vars).expect("the store"), std::fs::read(template).expect("the template"));
    assert_eq!(vm.stop_at_once()?.code(), Some(0));
    Ok(())
}

#[test]
fn forwarded_host_port_reaches_the_guest() -> Result<()> {
    let vm = with_file(TestVm::busybox("user")).http().boot()?;
    let address = format!("127.0.0.1:{}", vm.http_port().expect("the builder has a forwarded port"));
    vm.sh("net-up")?;
    serve(&vm, "user")?;
    assert!(fetch(&address).ends_with("\r\n\r\nuser\n"), "{}", fetch(&address));
    // The next QEMU forwards the same port.
    vm.panic()?;
    vm.wait_incarnation(2)?;
    vm.sh("net-up")?;
    serve(&vm, "again")?;
    assert!(fetch(&address).ends_with("\r\n\r\nagain\n"));
    assert_eq!(vm.status()?.nets[0].kind, "user");
    Ok(())
}

#[test]
fn passt_port_reaches_the_guest() -> Result<()> {
    if !passt_works() {
        eprintln!("skipped: passt does not run here");
        return Ok(());
    }
    let port = free_port();
    let forward = Value::Array(vec![format!("127.0.0.1:{port}:80").into()]);
    let vm = TestVm::busybox("passt").net([("kind", "passt".into()), ("forward", forward)]).boot()?;
    vm.sh("net-up")?;
    serve(&vm, "passt")?;
    assert!(fetch(&format!("127.0.0.1:{port}")).ends_with("\r\n\r\npasst\n"));
    vm.panic()?;
    vm.wait_incarnation(2)?;
    vm.sh("net-up")?;
    serve(&vm, "again")?;
    assert!(fetch(&format!("127.0.0.1:{port}")).ends_with("\r\n\r\nagain\n"));
    Ok(())
}

#[test]
fn tap_reaches_the_guest() -> Result<()> {
    let Some(tap) = Tap::make() else {
        eprintln!("skipped: this user cannot make network interfaces here");
        return Ok(());
    };
    let vm = TestVm::busybox("tap").net([("kind", "tap".into()), ("ifname", tap.name().into())]).boot()?;
    vm.sh(&tap.guest_set_up())?;
    serve(&vm, "tap")?;
    assert!(fetch(&format!("{}:80", tap.guest_address())).ends_with("\r\n\r\ntap\n"));
    Ok(())
}
