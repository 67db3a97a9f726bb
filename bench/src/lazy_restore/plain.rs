//! The sides with QEMU alone: memory and devices go through a file, as with `virsh save` and `virsh restore`.

use std::path::PathBuf;
use std::time::Instant;

use hearth_vmtest::{Drives, PlainVm, PlainVmBuilder, artifacts, patience};
use serde_json::{Value, json};

use super::{Bench, COUNTED_REQUESTS, LOOK_EVERY, MIB, RestoreError, await_answers, case, guest, waits::Waits};
use crate::host::profile::Profile;
use crate::load::Load;
use crate::record::Record;
use crate::sides::Ports;
use hearth_vmtest::page_cache;

const SEED: u64 = 200;

/// Layout of memory in the file.
#[derive(Clone, Copy)]
pub enum Format {
    /// In the order of sending.
    Stream,
    /// Each page at a fixed place, so that it is read straight into memory. QEMU 9 and later.
    Mapped,
}

impl Format {
    pub const ALL: [Self; 2] = [Self::Stream, Self::Mapped];

    pub fn side(self) -> &'static str {
        match self {
            Self::Stream => "qemu-file",
            Self::Mapped => "qemu-mapped-ram",
        }
    }

    fn machine(self, source: hearth_vmtest::Error) -> RestoreError {
        RestoreError::Machine { side: self.side(), source }
    }
}

/// A machine that was saved and stopped.
pub struct Saved<'a> {
    bench: &'a Bench<'a>,
    format: Format,
    image: PathBuf,
    file: PathBuf,
    ports: Ports,
}

impl<'a> Saved<'a> {
    pub fn make(bench: &'a Bench<'a>, format: Format) -> Result<Self, RestoreError> {
        let file = |suffix: &str| bench.rig.folder().join(format!("{}{suffix}", format.side()));
        let saved = Saved { bench, format, image: file(".img"), file: file(""), ports: Ports::free() };
        guest::make_image(bench.shape, &saved.image)?;
        saved.fill_and_save().map_err(|error| format.machine(error))?;
        Ok(saved)
    }

    fn fill_and_save(&self) -> hearth_vmtest::Result<()> {
        let vm = self.builder("")?.boot()?;
        guest::fill(&vm, self.bench.shape)?;
        vm.sh("sync")?;
        self.to_file(&vm)
    }

    pub fn side(&self) -> &'static str {
        self.format.side()
    }

    fn builder(&self, drive: &str) -> hearth_vmtest::Result<PlainVmBuilder> {
        let builder = guest::plain(self.bench.shape, "plain").memory_mib(self.bench.shape.memory_mib);
        let builder = builder.accelerator(self.bench.rig.accelerator().name());
        let builder = self.ports.under_qemu(builder).drive(&self.image, &format!("cache=none,aio=io_uring{drive}"));
        match self.format {
            Format::Stream => Ok(builder),
            Format::Mapped => Ok(builder.qemu(&artifacts::qemu_10()?)),
        }
    }

    fn set_capabilities(&self, vm: &PlainVm) -> hearth_vmtest::Result<()> {
        let on = |capability: &str| json!({ "capability": capability, "state": true });
        let capabilities = match self.format {
            Format::Stream => vec![on("events")],
            Format::Mapped => vec![on("events"), on("mapped-ram")],
        };
        vm.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).map(drop)
    }

    /// Saves to the file while the guest runs: if QEMU were paused first, it would be restored paused.
    fn to_file(&self, vm: &PlainVm) -> hearth_vmtest::Result<()> {
        self.set_capabilities(vm)?;
        vm.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 40 }))?;
        let uri = match self.format {
            Format::Stream => format!("exec:cat > {}", self.file.display()),
            Format::Mapped => format!("file:{}", self.file.display()),
        };
        vm.qmp().execute("migrate", json!({ "uri": uri }))?;
        let over = |event: &Value| matches!(event["data"]["status"].as_str(), Some("completed" | "failed"));
        let event = vm.qmp().find_event("MIGRATION", patience(20), over)?;
        if event["data"]["status"] == "completed" {
            return Ok(());
        }
        Err(hearth_vmtest::Error::Qmp { command: "migrate".into(), message: "failed".into() })
    }

    /// Starts a QEMU that restores the guest from the file.
    fn start_restored(&self) -> hearth_vmtest::Result<PlainVm> {
        // Every round starts with the disk as it was saved.
        let builder = self.builder(",snapshot=on")?;
        match self.format {
            Format::Stream => builder.args(["-incoming", &format!("exec:cat {}", self.file.display())]).start(),
            Format::Mapped => {
                let vm = builder.args(["-incoming", "defer"]).start()?;
                self.set_capabilities(&vm)?;
                vm.qmp().execute("migrate-incoming", json!({ "uri": format!("file:{}", self.file.display()) }))?;
                Ok(vm)
            }
        }
    }

    pub fn restore(&self, profile: Profile, round: u32, record: &mut Record) -> Result<Waits, RestoreError> {
        let side = self.side();
        for path in [&self.file, &self.image] {
            page_cache::evict(path).map_err(|source| RestoreError::File { path: path.clone(), source })?;
        }
        let rig = self.bench.rig;
        rig.limit(profile)?;
        let read_before = rig.group_read_bytes()?;
        let failed = |source| RestoreError::Load { side, source };
        let targets = guest::targets(self.ports, self.bench.shape, SEED + u64::from(round));
        let load = Load::start(targets).map_err(failed)?;
        let vm = rig.launch(profile, |_| self.start_restored())?.map_err(|error| self.format.machine(error))?;
        let running_s = self.await_running(&vm, &load)?;
        let first_answer_s = load.wait_back(patience(20)).map_err(failed)?;
        let read_after = rig.group_read_bytes()?;
        await_answers(&load, COUNTED_REQUESTS + self.bench.shape.steady_requests, side)?;
        self.bench.add_service(&load, side, profile.name(), first_answer_s, record);
        if let Some((before, after)) = read_before.zip(read_after) {
            record.add(&case(side, profile.name()), "bytes_read_mib", "MiB", (after - before) as f64 / MIB);
        }
        drop(vm);
        rig.limit(Profile::Asis)?;
        Ok(Waits::until(running_s))
    }

    /// Waits until QEMU has read everything and the guest runs.
    fn await_running(&self, vm: &PlainVm, load: &Load) -> Result<f64, RestoreError> {
        let deadline = Instant::now() + patience(60);
        loop {
            let status = vm.qmp().execute("query-status", json!({})).map_err(|error| self.format.machine(error))?;
            let at_s = load.now_s();
            if status["running"] == true {
                return Ok(at_s);
            }
            if Instant::now() > deadline {
                return Err(RestoreError::NoFigure { side: self.side(), figure: "running", said: status.to_string() });
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
