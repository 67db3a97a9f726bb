//! A machine under Hearth: a keeper process, driven through the command line and the console as an operator would.

mod api;
mod builder;
mod events;
mod files;
mod parked;
mod saved;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_api::{Age, EventRecord, Explanation, MachineState, MachineStatus, QemuStatus, RemountPlan};
use rustix::process::Pid;
use serde::de::DeserializeOwned;

pub use api::Api;
pub use builder::TestVmBuilder;
use events::Follower;
use files::Files;
pub use parked::Parked;
use saved::SavedGuest;

use crate::artifacts::{self, Debian};
use crate::console::Line;
use crate::error::{Error, Result, at};
use crate::event;
use crate::guest::{Drives, Guest, LOOK_AFTER, Output};
use crate::processes;
use crate::slots::Slot;
use crate::transcript::Ready;
use crate::wait::patience;

/// A machine with its keeper. Dropping it ends all of its processes.
pub struct TestVm {
    name: String,
    keeper: Mutex<Option<Child>>,
    guest: Guest,
    events: Follower,
    http_port: Option<u16>,
    files: Files,
    /// `None`: the machine uses the slot of another machine.
    _slot: Option<Slot>,
    /// The save that this machine's disks lie over.
    saved: Option<SavedGuest>,
}

impl TestVm {
    /// The small guest: busybox, ready in seconds.
    pub fn busybox(name: &str) -> TestVmBuilder {
        TestVmBuilder::new(name, artifacts::busybox(false))
    }

    /// The small guest with fio.
    pub fn busybox_with_fio(name: &str) -> TestVmBuilder {
        TestVmBuilder::new(name, artifacts::busybox(true))
    }

    /// The small guest with qemu-guest-agent installed but not started, and a channel to it.
    pub fn busybox_with_agent(name: &str) -> TestVmBuilder {
        TestVmBuilder::new(name, artifacts::busybox_with_agent()).setting("guest_agent", true)
    }

    /// The small guest with driver and tool of btrfs.
    pub fn busybox_with_btrfs(name: &str, linux: artifacts::Linux) -> TestVmBuilder {
        TestVmBuilder::new(name, artifacts::busybox_with_btrfs(linux))
    }

    /// The small guest with a newer kernel: Linux 6.12.
    pub fn busybox_on_linux_6_12(name: &str) -> TestVmBuilder {
        TestVmBuilder::new(name, artifacts::busybox_on_linux_6_12())
    }

    /// The Debian guest with systemd and nginx; its root is a copy of its own, the first disk.
    pub fn debian(name: &str) -> TestVmBuilder {
        TestVm::debian_with(name, Debian::Web)
    }

    /// One of the Debian guests.
    pub fn debian_with(name: &str, which: Debian) -> TestVmBuilder {
        TestVmBuilder::debian(name, which)
    }

    fn launch(name: &str, files: Files, http_port: Option<u16>, slot: Option<Slot>) -> Result<Self> {
        let vm = Self::prepare(name, files, http_port, slot)?;
        vm.start_keeper(&[])?;
        Ok(vm)
    }

    fn prepare(name: &str, files: Files, http_port: Option<u16>, slot: Option<Slot>) -> Result<Self> {
        let guest = Guest::open(name, Line::Call(files.console_socket(name)))?;
        let events = Follower::start(name, artifacts::hearth()?, files.runtime_root())?;
        Ok(Self {
            name: name.into(),
            keeper: Mutex::new(None),
            guest,
            events,
            http_port,
            files,
            _slot: slot,
            saved: None,
        })
    }

    /// `hearth restore SNAPSHOT --as NAME`, without waiting. The snapshot is of `self`, which must outlive the new machine.
    pub fn restore(&self, snapshot: &Path, name: &str, options: &[&str]) -> Result<Self> {
        self.restore_with(snapshot, name, options, &[])
    }

    /// Like [`Self::restore`], with variables in the keeper's environment.
    pub fn restore_with(
        &self,
        snapshot: &Path,
        name: &str,
        options: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let vm = Self::prepare(name, Files::make_beside(name, &self.files)?, None, None)?;
        let mut command = Command::new(artifacts::hearth()?);
        command.arg("restore").arg(snapshot).args(["--as", name]).args(options);
        command.arg("--folder").arg(vm.files.config().parent().unwrap_or(Path::new("/")));
        command.envs(variables.iter().copied());
        vm.spawn_keeper(command)?;
        Ok(vm)
    }

    /// Restores a machine from the tests' own save of a guest, and waits until it is like any other running machine: its memory is
    /// complete, and its readiness was read. `settings` are those that the save does not have.
    fn from_save(name: &str, files: Files, slot: Option<Slot>, saved: SavedGuest, settings: &[String]) -> Result<Self> {
        let mut vm = Self::prepare(name, files, None, slot)?;
        let mut command = Command::new(artifacts::hearth()?);
        command.arg("restore").arg(saved.snapshot()).args(["--as", name, "--lazy", "--trust-config"]);
        command.arg("--folder").arg(vm.files.config().parent().unwrap_or(Path::new("/")));
        command.args(settings.iter().flat_map(|setting| ["--set", setting]));
        vm.saved = Some(saved);
        vm.spawn_keeper(command)?;
        vm.wait_running()?;
        vm.wait_event("all memory is there", event!(RestoreComplete))?;
        vm.await_greeting()?;
        Ok(vm)
    }

    /// Has the guest's agent announce its readiness again, for a guest that did so before its save.
    fn await_greeting(&self) -> Result<()> {
        for _ in 0..20 {
            self.guest().type_line("hello")?;
            if self.wait_console("a greeting", patience(1), |heard| heard.ready().first().cloned()).is_ok() {
                return Ok(());
            }
        }
        self.wait_boots(1).map(drop)
    }

    // --- what an operator does

    /// `hearth status NAME --json`.
    pub fn status(&self) -> Result<MachineStatus> {
        self.cli_json(&["status", &self.name, "--json"])
    }

    /// The QEMU that `hearth status` shows.
    pub fn qemu(&self) -> Result<QemuStatus> {
        let status = self.status()?;
        status.qemu.clone().ok_or_else(|| self.guest.fail(Error::NoQemu { status: Box::new(status) }))
    }

    /// Asserts that the guest's disk requests were all valid and succeeded.
    pub fn has_no_disk_errors(&self) -> Result<()> {
        let status = self.status()?;
        assert!(!status.disks.is_empty(), "it has disks");
        for disk in status.disks {
            assert_eq!((disk.io_errors, disk.bad_requests), (0, 0), "{disk:?}");
        }
        Ok(())
    }

    /// The keeper's API.
    pub fn api(&self) -> Api {
        Api::new(self.files.api_socket(&self.name))
    }

    /// A metric from `GET /metrics`. `None` if it has no value now.
    pub fn metric(&self, name: &str) -> Result<Option<f64>> {
        let api = self.api();
        let (_, text) = at("ask", api.socket(), api.ask("GET", "/metrics", ""))?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.rsplit(' ').next());
        Ok(value.and_then(|value| value.parse().ok()))
    }

    /// `hearth explain NAME --json`.
    pub fn explain(&self) -> Result<Explanation> {
        self.cli_json(&["explain", &self.name, "--json"])
    }

    /// `hearth reboot NAME`.
    pub fn reboot(&self) -> Result<()> {
        self.cli(&["reboot", &self.name]).map(drop)
    }

    /// `hearth reboot NAME --cold`.
    pub fn reboot_cold(&self) -> Result<()> {
        self.cli(&["reboot", &self.name, "--cold"]).map(drop)
    }

    /// `hearth reboot NAME --force`, which does not ask the guest.
    pub fn reboot_forced(&self) -> Result<()> {
        self.cli(&["reboot", &self.name, "--force"]).map(drop)
    }

    /// `hearth crash NAME`.
    pub fn crash(&self) -> Result<()> {
        self.cli(&["crash", &self.name]).map(drop)
    }

    /// `hearth rejuvenate NAME`, which must succeed.
    pub fn rejuvenate(&self) -> Result<()> {
        self.cli(&["rejuvenate", &self.name]).map(drop)
    }

    /// `hearth rejuvenate NAME --qemu PATH`, whether it succeeds or not.
    pub fn rejuvenate_to(&self, qemu: &Path) -> Result<Output> {
        self.cli_output(&["rejuvenate", &self.name, "--qemu", &qemu.display().to_string()])
    }

    /// `hearth save NAME -o FOLDER`, which must succeed.
    pub fn save(&self, folder: &Path) -> Result<()> {
        self.save_with(folder, &[])
    }

    /// `hearth save NAME -o FOLDER OPTIONS`, which must succeed.
    pub fn save_with(&self, folder: &Path, options: &[&str]) -> Result<()> {
        let folder = folder.display().to_string();
        self.cli(&[&["save", &self.name, "-o", &folder], options].concat()).map(drop)
    }

    /// `hearth save NAME -o FOLDER --stop`, which must succeed; waits until the keeper ends.
    pub fn save_and_stop(&self, folder: &Path) -> Result<ExitStatus> {
        self.cli(&["save", &self.name, "-o", &folder.display().to_string(), "--stop"])?;
        self.wait_keeper_end()
    }

    /// `hearth stop NAME`; waits until the keeper ends.
    pub fn stop(&self) -> Result<ExitStatus> {
        self.cli(&["stop", &self.name])?;
        self.wait_keeper_end()
    }

    /// `hearth stop NAME --force`; waits until the keeper ends.
    pub fn stop_at_once(&self) -> Result<ExitStatus> {
        self.cli(&["stop", &self.name, "--force"])?;
        self.wait_keeper_end()
    }

    /// Any `hearth` command, which must succeed. Returns its output.
    pub fn cli(&self, arguments: &[&str]) -> Result<String> {
        let output = self.cli_output(arguments)?;
        if output.status == 0 {
            return Ok(output.text());
        }
        let (command, status) = (format!("hearth {}", arguments.join(" ")), output.status);
        Err(self.guest.fail(Error::Cli { command, status, output: output.text() }))
    }

    /// Any `hearth` command. Returns its standard output, followed by its standard error.
    pub fn cli_output(&self, arguments: &[&str]) -> Result<Output> {
        self.files.cli(arguments)
    }

    /// `hearth age NAME --json`.
    pub fn age(&self) -> Result<Age> {
        self.cli_json(&["age", &self.name, "--json"])
    }

    /// `hearth remount-plan NAME --json`.
    pub fn remount_plan(&self) -> Result<RemountPlan> {
        self.cli_json(&["remount-plan", &self.name, "--json"])
    }

    fn cli_json<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        let text = self.cli(arguments)?;
        let command = || format!("hearth {}", arguments.join(" "));
        serde_json::from_str(&text).map_err(|source| Error::NotJson { command: command(), text: text.clone(), source })
    }

    /// Changes `machine.toml`.
    pub fn edit(&self, change: impl FnOnce(&mut toml::Table)) -> Result<()> {
        let path = self.files.config();
        let text = at("read", path, std::fs::read_to_string(path))?;
        let mut config = text.parse().expect("the harness wrote this file as TOML");
        change(&mut config);
        self.files.write_config(&config)
    }

    // --- what happens to a machine

    /// Kills the keeper (SIGKILL), as a crash would. QEMU and the guest stay as they are.
    pub fn kill_keeper(&self) -> Result<()> {
        let mut keeper = self.keeper();
        let Some(mut child) = keeper.take() else { return Ok(()) };
        at("kill the keeper of", self.files.config(), child.kill())?;
        at("wait for the keeper of", self.files.config(), child.wait()).map(drop)
    }

    /// Kills a keeper that another command started.
    pub fn kill_foreign_keeper(&self) -> Result<()> {
        let pid = Pid::from_raw(self.status()?.keeper.pid as i32);
        let pid = pid.ok_or_else(|| self.no_keeper("its end"))?;
        at("kill the keeper of", self.files.config(), processes::kill(pid))?;
        if processes::wait_end(pid, patience(20)) {
            Ok(())
        } else {
            Err(self.guest.timeout("end of the keeper", patience(20)))
        }
    }

    /// Kills the keeper and runs `hearth run` again for the same machine.
    pub fn restart_keeper(&self) -> Result<()> {
        self.restart_keeper_with(&[])
    }

    /// Like [`Self::restart_keeper`], with variables in the keeper's environment.
    pub fn restart_keeper_with(&self, variables: &[(&str, &str)]) -> Result<()> {
        self.kill_keeper()?;
        self.start_keeper(variables)
    }

    /// Kills QEMU (SIGKILL), as a crash would. The keeper has to notice.
    pub fn kill_qemu(&self) -> Result<()> {
        let pid = self.qemu_pid()?;
        at("kill the QEMU of", self.files.config(), processes::kill(pid))
    }

    /// Freezes QEMU (SIGSTOP), as on a host without processor time: the guest stops too.
    pub fn freeze_qemu(&self) -> Result<()> {
        let pid = self.qemu_pid()?;
        at("freeze the QEMU of", self.files.config(), processes::freeze(pid))
    }

    /// Freezes the keeper (SIGSTOP): QEMU and the guest continue without it.
    pub fn freeze_keeper(&self) -> Result<()> {
        self.signal_keeper(processes::freeze)
    }

    /// Continues a frozen keeper.
    pub fn thaw_keeper(&self) -> Result<()> {
        self.signal_keeper(processes::thaw)
    }

    /// Tells the keeper to stop (SIGTERM), without waiting for its end.
    pub fn terminate_keeper(&self) -> Result<()> {
        self.signal_keeper(processes::terminate)
    }

    fn signal_keeper(&self, signal: impl FnOnce(Pid) -> std::io::Result<()>) -> Result<()> {
        let pid = self.keeper_pid().and_then(|pid| Pid::from_raw(pid as i32));
        let pid = pid.ok_or_else(|| self.no_keeper("a signal"))?;
        at("signal the keeper of", self.files.config(), signal(pid))
    }

    /// QEMU's process ID from `hearth status`.
    pub fn qemu_pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(self.qemu()?.pid as i32).expect("no process has number 0"))
    }

    pub fn keeper_pid(&self) -> Option<u32> {
        self.keeper().as_ref().map(Child::id)
    }

    // --- waiting

    /// Waits until incarnation `number` runs and its guest is ready.
    pub fn wait_incarnation(&self, number: u64) -> Result<Ready> {
        let what = format!("start of incarnation {number}");
        let started = event!(|event| IncarnationStarted if u64::from(event.incarnation) == number);
        let started = self.wait_event(&what, started)?;
        let what = format!("readiness of incarnation {number}");
        // Only readiness after this incarnation's start counts: the test may not have waited for that of earlier ones.
        let since = events::time_of(&started);
        let look = |ready: &Ready| since.is_none_or(|since| ready.at > since);
        self.wait_console(&what, patience(20), |heard| heard.ready().iter().find(|ready| look(ready)).cloned())
    }

    /// Waits until `hearth status` shows a running machine with all disks connected, for a keeper that was just started.
    pub fn wait_running(&self) -> Result<MachineStatus> {
        self.wait_status("the machine runs", |status| {
            status.state == MachineState::Running && status.disks.iter().all(|disk| disk.connected)
        })
    }

    /// Waits until the guest answers on its console. Input typed while the console changes hands, or a guest boots, may
    /// be lost.
    pub fn await_console(&self) -> Result<()> {
        for _ in 0..20 {
            let asked = self.guest().start("true")?;
            let answered = self.wait_console("an answer", patience(2), |heard| heard.take_answer(asked));
            if answered.is_ok() {
                return Ok(());
            }
        }
        self.sh("true").map(drop)
    }

    /// Waits until a keeper answers with a status that `look` accepts.
    pub fn wait_status(&self, what: &str, look: impl Fn(&MachineStatus) -> bool) -> Result<MachineStatus> {
        let deadline = Instant::now() + patience(20);
        loop {
            // The keeper is asked directly: starting the command takes many times the processor time, and other machines need
            // it during a long wait.
            if let Some(status) = self.api().status().filter(&look) {
                return Ok(status);
            }
            self.check_alive(what)?;
            if Instant::now() > deadline {
                return Err(self.guest.timeout(what, patience(20)));
            }
            std::thread::sleep(LOOK_AFTER / 10);
        }
    }

    /// Waits for an event, past or future, in which `look` finds what it looks for. See [`event!`](crate::event).
    pub fn wait_event<T>(&self, what: &str, look: impl Fn(&EventRecord) -> Option<T>) -> Result<T> {
        self.wait_event_within(what, patience(20), look)
    }

    pub fn wait_event_within<T>(
        &self,
        what: &str,
        limit: Duration,
        look: impl Fn(&EventRecord) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            let alive = self.check_alive(what);
            if let Some(found) = self.events.wait(LOOK_AFTER, &look) {
                return Ok(found);
            }
            alive?;
            if Instant::now() > deadline {
                return Err(self.guest.timeout(&format!("event: {what}"), limit));
            }
        }
    }

    /// All events so far, in order.
    pub fn events(&self) -> Vec<EventRecord> {
        self.events.all()
    }

    /// Waits until the keeper ends by itself.
    pub fn wait_keeper_end(&self) -> Result<ExitStatus> {
        let Some(mut child) = self.keeper().take() else { return Err(self.no_keeper("its end")) };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let limit = patience(20);
        if pid.is_some_and(|pid| processes::wait_end(pid, limit)) {
            return at("wait for the keeper of", self.files.config(), child.wait());
        }
        *self.keeper() = Some(child);
        Err(self.guest.timeout("end of the keeper", limit))
    }

    // --- where things are

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port on 127.0.0.1 that is forwarded to the guest's port 80, if the builder was asked for one.
    pub fn http_port(&self) -> Option<u16> {
        self.http_port
    }

    /// The folder of the machine's images, `diskN.img`, unless it is [`TestVmBuilder::running`].
    pub fn folder(&self) -> &Path {
        self.files.folder()
    }

    /// `machine.toml`.
    pub fn config_file(&self) -> &Path {
        self.files.config()
    }

    /// The folder of the machine's RAM files.
    pub fn memory_folder(&self) -> &Path {
        self.files.memory_folder()
    }

    /// The folder for the machine's dumps, unless the test sets another.
    pub fn dump_folder(&self) -> PathBuf {
        self.files.dump_folder()
    }

    /// The runtime root, with one folder for each machine's name.
    pub fn runtime_root(&self) -> PathBuf {
        self.files.runtime_root()
    }

    /// Files in the runtime folder, sorted; without the logs of QEMUs, which stay.
    pub fn runtime_files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.runtime_root().join(&self.name)).into_iter().flatten();
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.filter(|name| !(name.starts_with("qemu-") && name.ends_with(".log"))).collect();
        names.sort();
        names
    }

    /// The RAM file of incarnation `number`.
    pub fn ram_file(&self, number: u64) -> PathBuf {
        self.memory_folder().join(format!("ram-{number}"))
    }

    /// The log of the machine's keepers.
    pub fn keeper_log(&self) -> String {
        self.files.keeper_log()
    }

    /// Kills the keeper and runs `hearth run` with another configuration of the same machine.
    pub fn run_configuration(&self, file: &Path) -> Result<()> {
        self.kill_keeper()?;
        let mut command = Command::new(artifacts::hearth()?);
        command.arg("run").arg(file);
        self.spawn_keeper(command)
    }

    fn start_keeper(&self, variables: &[(&str, &str)]) -> Result<()> {
        let mut command = Command::new(artifacts::hearth()?);
        command.arg("run").arg(self.files.config()).envs(variables.iter().copied());
        self.spawn_keeper(command)
    }

    fn spawn_keeper(&self, mut command: Command) -> Result<()> {
        command.env("HEARTH_RUNTIME_ROOT", self.files.runtime_root());
        let (out, err) = self.files.keeper_output()?;
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        *self.keeper() = Some(child.map_err(|source| Error::Start { program: "hearth".into(), source })?);
        Ok(())
    }

    fn keeper(&self) -> MutexGuard<'_, Option<Child>> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn no_keeper(&self, waited: &str) -> Error {
        self.ended("a kill or an earlier end".into(), waited)
    }

    fn ended(&self, how: String, waited: &str) -> Error {
        let console = format!("{}\n{}", self.guest.console_tail(), self.keeper_log());
        self.guest.fail(Error::Ended { what: "the keeper".into(), how, waited: waited.into(), console })
    }
}

impl Drives for TestVm {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn check_alive(&self, waited: &str) -> Result<()> {
        let status = match self.keeper().as_mut() {
            // A test that killed its keeper may still use the guest, as far as that works.
            None => return Ok(()),
            Some(child) => at("look after the keeper of", self.files.config(), child.try_wait())?,
        };
        status.map_or(Ok(()), |status| Err(self.ended(status.to_string(), waited)))
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        if std::thread::panicking() || self.guest.has_failed() {
            self.files.print_logs(&self.name, &self.guest.console_tail(), &self.events.all());
        }
        // The keeper is killed first: it would take QEMU's end for a crash and start the next incarnation.
        let _already_dead = self.kill_keeper();
        self.files.end_processes();
    }
}
