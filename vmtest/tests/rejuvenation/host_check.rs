//! `host-reload prepare` on a host whose kernel would take its guests along, as this one would.

use std::path::Path;

use hearth_api::MachineState;
use hearth_vmtest::{Disk, Drives, Result, TestVm};
use serde_json::Value;

/// A folder in memory that every Linux has, and that is lost with the kernel.
const FLEETING: &str = "/dev/shm";

#[test]
fn prepare_names_everything_the_reload_would_lose() -> Result<()> {
    let folder = tempfile::tempdir_in(FLEETING).expect("a folder");
    let image = folder.path().join("disk.img");
    std::fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("an image");
    let vm = TestVm::busybox("fleeting").memory_mib(256).disk(Disk::in_place(&image)).boot()?;
    assert!(vm.memory_folder().starts_with(FLEETING), "{}", vm.memory_folder().display());
    let record = folder.path().join("record.json");
    let prepare = ["host-reload", "prepare", "--record", &record.display().to_string()];
    let checked = vm.cli_output(&[&prepare[..], &["--check", "--json"]].concat())?;
    assert_eq!(checked.status, 1, "{}", checked.text());
    let text = checked.text();
    let verdicts: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let says = |machine: &Value, path: &Path, what: &str| {
        let verdict = verdicts.iter().find(|verdict| verdict["machine"] == *machine).expect("its verdict");
        let problems = verdict["problems"].as_array().expect("a list").iter().filter_map(Value::as_str);
        let is_named = problems.into_iter().any(|it| it.contains(&path.display().to_string()) && it.contains(what));
        assert!(is_named, "{what}: {verdict}");
    };
    let ends = "is on tmpfs (mounted at /dev/shm), which ends with this kernel: put it on a disk";
    says(&Value::Null, &record, ends);
    says(&vm.name().into(), &image, ends);
    says(&vm.name().into(), vm.memory_folder(), "is on tmpfs (mounted at /dev/shm): the guest's memory would be lost");

    let refused = vm.cli_output(&prepare)?;
    assert!(
        refused.status == 1 && refused.text().contains("cannot prepare, and nothing was stopped: "),
        "{}",
        refused.text()
    );
    assert!(!record.exists());
    assert_eq!(vm.status()?.state, MachineState::Running);
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1").map(drop)
}
