//! When all memory has arrived, nothing is kept for it: no handler of page faults, no thread, no file of the snapshot.

use std::fs;
use std::path::Path;

use hearth_vmtest::{Drives, Result, TestVm, event, processes};
use rustix::process::Pid;

use super::verify;

/// A machine's resources for guest memory that is still arriving.
#[derive(Debug, PartialEq, Eq)]
struct Kept {
    userfaultfds: usize,
    threads: Vec<String>,
    /// Names of the snapshot's files that keeper or QEMU have open.
    files: Vec<String>,
}

fn kept(vm: &TestVm, snapshot: &Path) -> Result<Kept> {
    let keeper = vm.keeper_pid().and_then(|pid| Pid::from_raw(pid as i32)).expect("it has a keeper");
    let open = |pid| processes::open_files(pid).expect("it lives");
    let (of_keeper, of_qemu) = (open(keeper), open(vm.qemu_pid()?));
    let is_userfaultfd = |path: &&std::path::PathBuf| path.ends_with("anon_inode:[userfaultfd]");
    let mut threads = processes::threads(keeper).expect("it lives");
    threads.retain(|name| ["faults-", "fill-", "prefetch-"].iter().any(|of| name.starts_with(of)));
    threads.sort();
    let of_snapshot = of_keeper.iter().chain(&of_qemu).filter_map(|path| path.strip_prefix(snapshot).ok());
    let mut files: Vec<_> = of_snapshot.map(|name| name.display().to_string()).collect();
    files.sort();
    Ok(Kept { userfaultfds: of_keeper.iter().filter(is_userfaultfd).count(), threads, files })
}

#[test]
fn complete_restore_needs_no_handler_or_snapshot() -> Result<()> {
    let vm = TestVm::busybox("kept").running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    super::fill(&vm, 64)?;
    vm.save(&snapshot)?;
    let nothing = kept(&vm, &snapshot)?;
    assert!(nothing.threads.is_empty() && nothing.files.is_empty(), "{nothing:?}");
    vm.stop_at_once()?;
    let eager = vm.restore(&snapshot, "eager", &["--eager"])?;
    eager.wait_running()?;
    assert_eq!(kept(&eager, &snapshot)?, nothing);
    eager.stop_at_once()?;
    let over = vm.folder().join("over");
    let until = format!("test -e {}", over.display());
    // The trace prevents the backfill until `over` exists, so that the restore stays unfinished.
    let clone = vm.restore(&snapshot, "lazy", &["--trace", "3600", "--until", &until])?;
    clone.wait_running()?;
    let during = kept(&clone, &snapshot)?;
    assert_eq!(
        (&during.threads[..], &during.files[..]),
        (&["faults-lazy", "fill-lazy"].map(String::from)[..], &["ram".to_owned()][..])
    );
    assert!(during.userfaultfds > nothing.userfaultfds, "{during:?}");
    fs::write(&over, "").expect("a file");
    clone.wait_event("all memory is there", event!(RestoreComplete))?;
    // Its threads were still ending at that event.
    clone.wait_status("a restore that keeps nothing", |_| kept(&clone, &snapshot).is_ok_and(|kept| kept == nothing))?;
    fs::remove_dir_all(&snapshot).expect("no process uses the snapshot");
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)?;
    let restore = clone.status()?.restore.expect("it was restored");
    assert!(restore.complete && restore.fault_us_p50_stored > Some(0), "{restore:?}");
    // The next save and the next keeper need nothing of the old snapshot.
    clone.save(&snapshot)?;
    clone.restart_keeper()?;
    clone.wait_running()?;
    clone.await_console()?;
    verify(&clone)
}
