//! The guest's screen, seen as a VNC viewer sees it, over everything that replaces its QEMU.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_vmtest::{Disk, Output, Result, TestVm, artifacts, event, write_program};

use super::host_reload::{park, resume};

const VERSION: &[u8; 12] = b"RFB 003.008\n";
/// Two pictures of the same text differ in the blinking cursor: at most so many bytes.
const CURSOR_BYTES: usize = 9 * 16 * 4;

fn socket(vm: &TestVm) -> PathBuf {
    vm.runtime_root().join(vm.name()).join("vnc.sock")
}

/// A picture of the screen: its width, its height and its pixels, as RFB 3.8 (RFC 6143) has them.
fn picture(socket: &Path) -> std::io::Result<(u16, u16, Vec<u8>)> {
    let mut server = UnixStream::connect(socket)?;
    server.set_read_timeout(Some(hearth_vmtest::patience(20)))?;
    let take = |server: &mut UnixStream, bytes: usize| {
        let mut taken = vec![0; bytes];
        server.read_exact(&mut taken).map(|()| taken)
    };
    assert_eq!(take(&mut server, 12)?, VERSION);
    server.write_all(VERSION)?;
    assert_eq!(take(&mut server, 2)?, [1, 1], "one security type: none");
    server.write_all(&[1])?;
    assert_eq!(take(&mut server, 4)?, [0; 4], "it lets us in");
    server.write_all(&[1])?;
    let screen = take(&mut server, 24)?;
    let number = |bytes: &[u8]| u16::from_be_bytes(bytes.try_into().expect("two bytes"));
    let (width, height) = (number(&screen[..2]), number(&screen[2..4]));
    take(&mut server, usize::from(screen[23]))?;
    // All of it, not only what changes.
    server.write_all(&[&[3, 0, 0, 0, 0, 0], &screen[..4]].concat())?;
    let mut pixels = vec![0; usize::from(width) * usize::from(height) * 4];
    let mut missing = pixels.len();
    while missing > 0 {
        let rectangles = number(&take(&mut server, 4)?[2..]);
        for _ in 0..rectangles {
            let head = take(&mut server, 12)?;
            let [x, y, w, h] = [0, 2, 4, 6].map(|at| usize::from(number(&head[at..at + 2])));
            assert_eq!(head[8..], [0; 4], "raw");
            for row in y..y + h {
                let at = (row * usize::from(width) + x) * 4;
                pixels[at..at + w * 4].copy_from_slice(&take(&mut server, w * 4)?);
            }
            missing = missing.saturating_sub(w * h * 4);
        }
    }
    Ok((width, height, pixels))
}

/// The picture that a viewer sees, which is not black.
fn seen(vm: &TestVm) -> (u16, u16, Vec<u8>) {
    let picture = picture(&socket(vm)).expect("the screen answers");
    assert!(picture.2.iter().filter(|byte| **byte != 0).count() > CURSOR_BYTES, "something is on it");
    picture
}

#[track_caller]
fn check_same(one: &(u16, u16, Vec<u8>), other: &(u16, u16, Vec<u8>), when: &str) {
    assert_eq!((one.0, one.1), (other.0, other.1), "{when}");
    let differ = one.2.iter().zip(&other.2).filter(|(one, other)| one != other).count();
    assert!(differ <= CURSOR_BYTES, "{differ} bytes of the picture differ {when}");
}

/// Only the owner gets to the socket.
fn check_private(vm: &TestVm) {
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o077;
    let socket = fs::canonicalize(socket(vm)).expect("the link leads to it");
    assert_eq!((mode(&socket), mode(socket.parent().expect("a folder"))), (0, 0));
    assert_eq!(fs::metadata(&socket).expect("it is there").uid(), rustix::process::geteuid().as_raw());
}

/// `hearth view` with nothing but these variables.
fn view(vm: &TestVm, variables: &[(&str, &Path)]) -> Result<Output> {
    let mut command = Command::new(artifacts::hearth()?);
    command.args(["view", vm.name()]).env_clear().env("HEARTH_RUNTIME_ROOT", vm.runtime_root());
    let output = command.envs(variables.iter().copied()).output().expect("hearth runs");
    Ok(Output { status: output.status.code().unwrap_or(-1), bytes: [output.stdout, output.stderr].concat() })
}

/// A viewer gets the path of the socket; without a desktop or a viewer, the operator is told what to do.
fn check_view(vm: &TestVm) -> Result<()> {
    let socket = socket(vm).display().to_string();
    let remote = view(vm, &[])?;
    assert!(remote.status == 1 && remote.text().contains(&format!("ssh -NL 5900:{socket} ")), "{}", remote.text());
    let programs = vm.folder().join("viewers");
    fs::create_dir(&programs).expect("our own folder");
    let desktop = [("DISPLAY", Path::new(":0")), ("PATH", &*programs)];
    let bare = view(vm, &desktop)?;
    assert!(bare.status == 1 && bare.text().contains("apt install tigervnc-viewer"), "{}", bare.text());
    write_program(&programs.join("vncviewer"), "#!/bin/sh\necho viewer of $1\n");
    assert_eq!(view(vm, &desktop)?.text(), format!("viewer of {socket}\n"));
    Ok(())
}

#[test]
fn screen_outlives_hops_keepers_parks_and_reboots() -> Result<()> {
    let vm = TestVm::busybox("screen").for_both_qemus().setting("display", "vnc").disk(Disk::empty(8)).boot()?;
    let first = seen(&vm);
    check_private(&vm);
    check_view(&vm)?;
    assert!(vm.keeper_log().contains("; screen: `hearth view screen`"));
    for qemu in [artifacts::qemu_10()?, artifacts::installed_qemu()?] {
        let hop = vm.rejuvenate_to(&qemu)?;
        assert_eq!(hop.status, 0, "{}", hop.text());
        check_same(&first, &seen(&vm), "after a hop");
        check_private(&vm);
    }
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_status("its disk is connected", |status| status.disks.iter().all(|disk| disk.connected))?;
    check_same(&first, &seen(&vm), "under the next keeper");
    park(&vm)?;
    resume(&vm)?;
    check_same(&first, &seen(&vm), "after a host reload");

    let snapshot = vm.folder().join("saved");
    vm.save(&snapshot)?;
    let copy = vm.restore(&snapshot, "screen-2", &["--lazy"])?;
    copy.wait_event("all memory is there", event!(RestoreComplete))?;
    check_same(&first, &seen(&copy), "in a restored guest");
    copy.stop_at_once()?;

    vm.reboot()?;
    vm.wait_incarnation(2)?;
    seen(&vm);
    // The keeper that resumed it is no child of this process.
    vm.cli(&["stop", vm.name(), "--force"])?;
    assert_eq!(view(&vm, &[])?.status, 3, "it is not running");
    let screens = vm.runtime_files().into_iter().filter(|name| name.starts_with("vnc") || name.starts_with("screen"));
    assert_eq!(screens.count(), 0);
    Ok(())
}
