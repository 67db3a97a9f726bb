//! The side of QEMU alone: memory and devices through a file, as `virsh save` and `virsh restore` have it.

use std::path::PathBuf;
use std::time::Instant;

use hearth_vmtest::{Drives, PlainVm, PlainVmBuilder, patience};
use serde_json::{Value, json};

use super::{
    Bench, COUNTED_REQUESTS, LOOK_EVERY, MIB, Ports, QEMU, RestoreError, STEADY_REQUESTS, add_service, await_answers,
    case, copy_image, guest, waits::Waits,
};
use crate::host::page_cache;
use crate::host::profile::Profile;
use crate::load::Load;
use crate::record::Record;

const SEED: u64 = 200;

fn machine(source: hearth_vmtest::Error) -> RestoreError {
    RestoreError::Machine { side: QEMU, source }
}

/// A machine that was saved, and is there no more.
pub struct Saved<'a> {
    bench: &'a Bench<'a>,
    image: PathBuf,
    file: PathBuf,
    ports: Ports,
}

impl<'a> Saved<'a> {
    pub fn make(bench: &'a Bench<'a>) -> Result<Self, RestoreError> {
        let folder = bench.rig.folder();
        let saved = Saved { bench, image: folder.join("qemu.img"), file: folder.join("file"), ports: Ports::free() };
        copy_image(&saved.image)?;
        let vm = saved.builder("").boot().map_err(machine)?;
        guest::fill(&vm, bench.shape).map_err(machine)?;
        vm.sh("sync").map_err(machine)?;
        saved.to_file(&vm).map_err(machine)?;
        Ok(saved)
    }

    fn builder(&self, drive: &str) -> PlainVmBuilder {
        let forwards = self.ports.forwards().map(|(host, guest)| format!(",hostfwd=tcp:127.0.0.1:{host}-:{guest}"));
        let net = format!("user,id=net{}", forwards.concat());
        let builder = PlainVm::debian_database("plain").memory_mib(self.bench.shape.memory_mib);
        let builder = builder.accelerator(self.bench.rig.accelerator().name());
        let builder = builder.args(["-netdev", &net, "-device", "virtio-net-pci,netdev=net,romfile="]);
        builder.drive(&self.image, &format!("cache=none,aio=io_uring{drive}"))
    }

    /// The guest runs until its memory is written: a QEMU that is paused before would be restored paused.
    fn to_file(&self, vm: &PlainVm) -> hearth_vmtest::Result<()> {
        let events = json!({ "capabilities": [{ "capability": "events", "state": true }] });
        vm.qmp().execute("migrate-set-capabilities", events)?;
        vm.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 40 }))?;
        vm.qmp().execute("migrate", json!({ "uri": format!("exec:cat > {}", self.file.display()) }))?;
        let over = |event: &Value| matches!(event["data"]["status"].as_str(), Some("completed" | "failed"));
        let event = vm.qmp().find_event("MIGRATION", patience(20), over)?;
        if event["data"]["status"] == "completed" {
            return Ok(());
        }
        Err(hearth_vmtest::Error::Qmp { command: "migrate".into(), message: "failed".into() })
    }

    pub fn restore(&self, profile: Profile, round: u32, record: &mut Record) -> Result<Waits, RestoreError> {
        for path in [&self.file, &self.image] {
            page_cache::evict(path).map_err(|source| RestoreError::File { path: path.clone(), source })?;
        }
        let rig = self.bench.rig;
        rig.limit(profile)?;
        let read_before = rig.group_read_bytes()?;
        let failed = |source| RestoreError::Load { side: QEMU, source };
        let targets = guest::targets(self.ports, self.bench.shape, SEED + u64::from(round));
        let load = Load::start(targets).map_err(failed)?;
        let incoming = ["-incoming".to_owned(), format!("exec:cat {}", self.file.display())];
        // Every round finds the disk as it was saved.
        let vm = rig.launch(profile, |_| self.builder(",snapshot=on").args(incoming).start())?.map_err(machine)?;
        let running_s = await_running(&vm, &load)?;
        let first_answer_s = load.wait_back(patience(20)).map_err(failed)?;
        let read_after = rig.group_read_bytes()?;
        await_answers(&load, COUNTED_REQUESTS + STEADY_REQUESTS, QEMU)?;
        add_service(&load, QEMU, profile.name(), first_answer_s, record);
        if let Some((before, after)) = read_before.zip(read_after) {
            record.add(&case(QEMU, profile.name()), "bytes_read_mib", "MiB", (after - before) as f64 / MIB);
        }
        drop(vm);
        rig.limit(Profile::Asis)?;
        Ok(Waits::until(running_s))
    }
}

/// When QEMU has read everything.
fn await_running(vm: &PlainVm, load: &Load) -> Result<f64, RestoreError> {
    let deadline = Instant::now() + patience(60);
    loop {
        let status = vm.qmp().execute("query-status", json!({})).map_err(machine)?;
        let at_s = load.now_s();
        if status["running"] == true {
            return Ok(at_s);
        }
        if Instant::now() > deadline {
            return Err(RestoreError::NoFigure { side: QEMU, figure: "running", said: status.to_string() });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
