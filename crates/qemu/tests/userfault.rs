//! The userfaultfd hand-over with a real QEMU: it arrives, works and stays in QEMU, and QEMU runs without it.
//!
//! This file plays the keeper's part, written from the drawing of the message alone: so each end is tested against the
//! drawing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use common::{LONG, Rig, alone, binaries};
use hearth_qemu::preload::{self, Preload};
use rustix::io::Errno;
use rustix::ioctl::{Updater, opcode};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg};

struct Handover {
    message: [u8; 128],
    descriptor: Option<OwnedFd>,
    /// The keeper's end of the helper's channel.
    channel: Option<OwnedFd>,
    connection: UnixStream,
}

fn take(listener: &UnixListener) -> Handover {
    let (mut connection, _) = listener.accept().unwrap();
    connection.set_read_timeout(Some(LONG)).unwrap();
    let mut message = [0; 128];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let part = &mut [IoSliceMut::new(&mut message)];
    let got = recvmsg(&connection, part, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut descriptors = Vec::new();
    for rights in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(come) = rights {
            descriptors.extend(come);
        }
    }
    let mut descriptors = descriptors.into_iter();
    let (descriptor, channel) = (descriptors.next(), descriptors.next());
    connection.read_exact(&mut message[got.bytes..]).unwrap();
    Handover { message, descriptor, channel, connection }
}

fn word(message: &[u8; 128], at: usize) -> i32 {
    i32::from_ne_bytes(message[at..at + 4].try_into().unwrap())
}

/// `struct uffdio_api` of linux/userfaultfd.h.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// UFFDIO_API with missing and minor faults on shared memory. It fails for other descriptors and at a second call.
fn enable(userfault: &OwnedFd) -> rustix::io::Result<u64> {
    const MISSING_SHMEM: u64 = 1 << 5;
    const MINOR_SHMEM: u64 = 1 << 10;
    let mut api = Api { api: 0xaa, features: MISSING_SHMEM | MINOR_SHMEM, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`, which `Api` is.
    unsafe {
        rustix::ioctl::ioctl(userfault, Updater::<{ opcode::read_write::<Api>(0xaa, 0x3f) }, Api>::new(&mut api))?;
    }
    Ok(api.ioctls)
}

fn rig_with_preload() -> (Rig, UnixListener) {
    let mut rig = Rig::new();
    let library = preload::install(rig.log().parent().unwrap()).unwrap();
    let socket = rig.path("userfault.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    rig.launch.preload = Some(Preload { library, socket, gates: None, keeps_heap: false });
    (rig, listener)
}

#[test]
fn userfaultfd_arrives_works_and_stays_in_qemu() {
    let _alone = alone();
    for binary in binaries() {
        let (rig, listener) = rig_with_preload();
        let process = rig.spawn(&binary);
        let mut handover = take(&listener);
        assert_eq!(&handover.message[..8], b"HRTHUFFD");
        assert_eq!(word(&handover.message, 8), 2);
        let number = word(&handover.message, 12);
        let text = String::from_utf8_lossy(&handover.message[24..]);
        assert!(number >= 0, "this host gives no userfaultfd: {text}");
        handover.connection.write_all(b"K").unwrap();
        let (qmp, _events) = common::connect(&rig.launch.qmp_socket, &process.0);
        assert_eq!(qmp.run_state().unwrap(), "prelaunch", "QEMU {}", binary.version());
        let userfault = handover.descriptor.unwrap();
        assert_ne!(enable(&userfault).unwrap(), 0, "it offers no ioctls");
        let copy = format!("/proc/{}/fd/{number}", process.0.id().pid);
        assert_eq!(fs::read_link(&copy).unwrap().to_str(), Some("anon_inode:[userfaultfd]"));
        let environment = fs::read(format!("/proc/{}/environ", process.0.id().pid)).unwrap();
        // The kernel shows the environment that QEMU was started with: proof that the library was preloaded.
        assert!(environment.split(|&byte| byte == 0).any(|entry| entry.starts_with(b"LD_PRELOAD=")));
    }
}

/// The userfaultfd acts on QEMU's memory: QEMU's RAM can be registered with it.
#[test]
fn userfaultfd_acts_on_qemus_memory() {
    let _alone = alone();
    let (rig, listener) = rig_with_preload();
    let process = rig.spawn(&binaries()[0]);
    let mut handover = take(&listener);
    handover.connection.write_all(b"K").unwrap();
    let (_qmp, _events) = common::connect(&rig.launch.qmp_socket, &process.0);
    let userfault = handover.descriptor.unwrap();
    enable(&userfault).unwrap();
    let (start, bytes) = ram(process.0.id().pid, &rig.launch.ram_file);
    assert_eq!(bytes, common::RAM_BYTES);
    register(&userfault, start, bytes).unwrap();
}

/// Sends a request to the helper. Returns sequence and errno of its answer.
fn ask(channel: &OwnedFd, sequence: u64, address: u64, bytes: u64) -> (u64, i32) {
    let request: Vec<u8> = [sequence, address, bytes].into_iter().flat_map(u64::to_ne_bytes).collect();
    assert_eq!(rustix::net::send(channel, &request, SendFlags::NOSIGNAL).unwrap(), 24);
    let mut answer = [0; 32];
    let (got, _) = rustix::net::recv(channel, &mut answer, RecvFlags::empty()).unwrap();
    assert_eq!(got, 16);
    (u64::from_ne_bytes(answer[..8].try_into().unwrap()), i32::from_ne_bytes(answer[8..12].try_into().unwrap()))
}

#[test]
fn helper_drops_page_tables_but_no_memory() {
    let _alone = alone();
    for binary in binaries() {
        let (rig, listener) = rig_with_preload();
        let process = rig.spawn(&binary);
        let mut handover = take(&listener);
        handover.connection.write_all(b"K").unwrap();
        let (qmp, _events) = common::connect(&rig.launch.qmp_socket, &process.0);
        let pid = process.0.id().pid;
        let (channel, number) = (handover.channel.unwrap(), word(&handover.message, 20));
        let copy = fs::read_link(format!("/proc/{pid}/fd/{number}")).unwrap();
        assert!(copy.to_str().unwrap().starts_with("socket:"), "QEMU keeps no copy: {}", copy.display());
        let (address, bytes) = ram(pid, &rig.launch.ram_file);
        // The firmware uses memory as soon as it runs.
        qmp.resume().unwrap();
        let deadline = Instant::now() + LONG;
        while mapped_kib(pid, &rig.launch.ram_file) == 0 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        qmp.pause().unwrap();
        let resident = || fs::metadata(&rig.launch.ram_file).unwrap().blocks();
        let (before, mapped) = (resident(), mapped_kib(pid, &rig.launch.ram_file));
        assert!(mapped > 0, "the firmware has not begun");
        assert_eq!(ask(&channel, 7, address, bytes), (7, 0));
        assert_eq!((mapped_kib(pid, &rig.launch.ram_file), resident()), (0, before));
        let refused = Errno::NOMEM.raw_os_error();
        assert_eq!(ask(&channel, 8, 4096, 4096), (8, refused), "nothing is mapped there");
        rustix::net::send(&channel, b"?", SendFlags::NOSIGNAL).unwrap();
        let mut answer = [0; 16];
        rustix::net::recv(&channel, &mut answer, RecvFlags::empty()).unwrap();
        assert_eq!(i32::from_ne_bytes(answer[8..12].try_into().unwrap()), Errno::BADMSG.raw_os_error());
        assert_eq!(qmp.run_state().unwrap(), "paused");
    }
}

/// Address and length of QEMU's mapping of a file.
fn ram(pid: u32, file: &Path) -> (u64, u64) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let ram = maps.lines().find(|line| line.ends_with(file.to_str().unwrap())).unwrap();
    let (start, end) = ram.split_whitespace().next().unwrap().split_once('-').unwrap();
    let address = |text: &str| u64::from_str_radix(text, 16).unwrap();
    (address(start), address(end) - address(start))
}

/// How much of the mapping is in QEMU's page tables, in KiB.
fn mapped_kib(pid: u32, file: &Path) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let after = smaps.lines().skip_while(|line| !line.ends_with(file.to_str().unwrap()));
    let resident = after.skip(1).find_map(|line| line.strip_prefix("Rss:")).unwrap();
    resident.trim().trim_end_matches(" kB").parse().unwrap()
}

fn register(userfault: &OwnedFd, start: u64, bytes: u64) -> rustix::io::Result<()> {
    const MODE_MISSING: u64 = 1;
    /// `struct uffdio_register` of linux/userfaultfd.h.
    #[repr(C)]
    struct Register {
        start: u64,
        bytes: u64,
        mode: u64,
        ioctls: u64,
    }
    let mut register = Register { start, bytes, mode: MODE_MISSING, ioctls: 0 };
    // SAFETY: UFFDIO_REGISTER reads and writes one `struct uffdio_register`; QEMU is stopped and ends with this test.
    unsafe {
        rustix::ioctl::ioctl(
            userfault,
            Updater::<{ opcode::read_write::<Register>(0xaa, 0x00) }, Register>::new(&mut register),
        )
    }
}

#[test]
fn qemu_starts_without_a_keeper() {
    let _alone = alone();
    let (rig, listener) = rig_with_preload();
    // The socket's name still exists, but no process listens.
    drop(listener);
    let living = rig.start(&binaries()[0]);
    assert_eq!(living.qmp.run_state().unwrap(), "prelaunch");
    let words = living.process.0.last_words().unwrap();
    assert!(words.contains("hearth: ") && words.contains("Connection refused"), "{words}");
}

#[test]
fn qemu_starts_when_the_keeper_hangs_up() {
    let _alone = alone();
    let (rig, listener) = rig_with_preload();
    let process = rig.spawn(&binaries()[0]);
    let handover = take(&listener);
    drop(handover.connection);
    let (qmp, _events) = common::connect(&rig.launch.qmp_socket, &process.0);
    assert_eq!(qmp.run_state().unwrap(), "prelaunch");
    let words = process.0.last_words().unwrap();
    assert!(words.contains("hearth: ") && words.contains("the keeper did not take"), "{words}");
}

#[test]
fn child_programs_do_not_inherit_the_library() {
    let (rig, listener) = rig_with_preload();
    let preload = rig.launch.preload.as_ref().unwrap();
    // `env` takes QEMU's place: it prints the environment that a program started by QEMU would get.
    let child = std::process::Command::new("env")
        .env("LD_PRELOAD", &preload.library)
        .env("HEARTH_USERFAULT_SOCKET", &preload.socket)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The connection proves that the library was loaded.
    drop(take(&listener));
    let environment = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(environment.contains("PATH="), "{environment}");
    assert!(!environment.contains("LD_PRELOAD=") && !environment.contains("HEARTH_USERFAULT_SOCKET="), "{environment}");
}

/// A host on which only root may use userfaultfd, and a QEMU that is not root.
#[test]
fn qemu_reports_why_it_has_no_userfaultfd() {
    let _alone = alone();
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if !rustix::process::geteuid().is_root() || allowed.trim() != "0" {
        return;
    }
    let (rig, listener) = rig_with_preload();
    fs::set_permissions(rig.log().parent().unwrap(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let preload = rig.launch.preload.as_ref().unwrap();
    fs::set_permissions(&preload.socket, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    // Any program works here: the library runs before `main`.
    let mut child = std::process::Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "env"])
        .arg(format!("LD_PRELOAD={}", preload.library.display()))
        .arg(format!("HEARTH_USERFAULT_SOCKET={}", preload.socket.display()))
        .arg("true")
        .spawn()
        .unwrap();
    let handover = take(&listener);
    assert!(handover.descriptor.is_none());
    assert_eq!(word(&handover.message, 12), -1);
    assert_ne!(word(&handover.message, 16), 0);
    let why = String::from_utf8_lossy(&handover.message[24..]).trim_end_matches('\0').to_owned();
    assert!(why.contains("userfaultfd"), "{why}");
    drop(handover.connection);
    assert!(child.wait().unwrap().success());
}
