//! Process: one QEMU, started by this keeper or by a dead one.
//!
//! QEMU runs in its own session, so that neither ^C in a terminal nor the keeper's death ends it. A pidfd reports its
//! end: unlike a pid, it never refers to another process.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, fcntl_get_seals, makedev, statx};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, WaitIdOptions, pidfd_getfd, pidfd_open,
    pidfd_send_signal, setrlimit, waitid,
};

use crate::launch::ram_file_option;
use crate::log::Log;
use crate::said::said;
use crate::sockets::Sockets;
use crate::{Binary, Launch, Transcript, confinement, environment};

/// Number of lines of QEMU's log in an error message.
const LAST_WORDS_LINES: usize = 5;
/// What QEMU says where it may not open a file, or a library could not be loaded.
const REFUSED: [&str; 3] = ["Permission denied", "Operation not permitted", "could not load"];
/// A machine with hundreds of disks has a quarter of that.
const COMMAND_LINE_BYTES_MAX: usize = 256 << 10;
/// Most that is read of what a process says of itself. libvirt's QEMU with hundreds of disks has a tenth of that.
const OWN_WORDS_BYTES_MAX: u64 = 1 << 20;
/// How the link to a memory file begins, in a process's descriptors.
const MEMORY_LINK: &str = "/memfd:";
/// Time limit for the end of a process: the kernel needs a second or two to free the memory of a large guest.
const END_PATIENCE: Duration = Duration::from_secs(30);

/// QEMUs that this process has started or adopted, and that lived when another one came.
static STARTED: Mutex<Vec<ProcessId>> = Mutex::new(Vec::new());

/// Identifies a process among all since the host's boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// Process ID.
    pub pid: u32,
    /// Start time in clock ticks since the host's boot (field 22 of /proc/PID/stat).
    pub start_ticks: u64,
}

impl ProcessId {
    /// Identity of this process. It stays the same after an exec.
    pub fn of_this_process() -> io::Result<Self> {
        let pid = std::process::id();
        Ok(Self { pid, start_ticks: start_ticks(pid)? })
    }
}

/// A running or ended QEMU. Dropping it ends a QEMU that this keeper started, unless `let_live` was called; so no early
/// return leaves an unknown QEMU behind. An adopted QEMU is left alone.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    pidfd: Arc<OwnedFd>,
    log: Arc<Log>,
    ends_when_dropped: bool,
    /// Whether this keeper started it with rules of `confinement`.
    confined: bool,
    /// None if the keeper that started this QEMU made no transcript.
    transcript: Option<Arc<Transcript>>,
}

/// Errors of starting and adopting a QEMU.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum ProcessError {
    #[error("{path}: the in-memory file for QEMU's output cannot be created")]
    Log { path: PathBuf, source: io::Error },
    #[error("{path}: cannot listen on this socket")]
    Socket { path: PathBuf, source: io::Error },
    #[error("{path}: cannot be started")]
    Spawn { path: PathBuf, source: io::Error },
    #[error("process {pid} has ended, or another process has its ID now")]
    Gone { pid: u32 },
}

impl Process {
    /// Starts QEMU. If an argument is wrong, QEMU writes that to its log and closes QMP.
    pub fn spawn(binary: &Binary, launch: &Launch, log: &Path) -> Result<Self, ProcessError> {
        let log_failed = |source| ProcessError::Log { path: log.to_owned(), source };
        let (log, output) = Log::create(log).map_err(log_failed)?;
        let sockets = Sockets::bind(launch).map_err(|(path, source)| ProcessError::Socket { path, source })?;
        let mut command = Command::new(binary.path());
        environment::confine(&mut command)
            .args(launch.arguments(binary, sockets.numbers()))
            .envs(launch.environment())
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_err(log_failed)?)
            .stderr(output);
        own_session(&mut command);
        if let Some(bytes) = launch.file_bytes_max {
            limit_files(&mut command, bytes);
        }
        sockets.hand_to(&mut command);
        let spawn_failed = |source| ProcessError::Spawn { path: binary.path().to_owned(), source };
        if launch.confined {
            confinement::confine(&mut command, binary, Some(launch)).map_err(spawn_failed)?;
        }
        let mut child = command.spawn().map_err(spawn_failed)?;
        // The child is not reaped yet, so its pid is still valid.
        match identify(child.id()) {
            Ok((id, pidfd)) => {
                let transcript = Some(Arc::new(sockets.into_transcript()));
                let (pidfd, log) = (Arc::new(pidfd), Arc::new(log));
                remember(id);
                Ok(Self { id, pidfd, log, ends_when_dropped: true, confined: launch.confined, transcript })
            }
            Err(error) => {
                // A QEMU that cannot be watched must not run. It is our child, so both calls succeed.
                let _ = child.kill().and_then(|()| child.wait());
                Err(spawn_failed(error))
            }
        }
    }

    /// Adopts a QEMU that another keeper started. Fails if it has ended or its pid is reused.
    pub fn adopt(id: ProcessId, log: &Path) -> Result<Self, ProcessError> {
        let mut adopted = Self::adopt_foreign(id)?;
        adopted.transcript = Transcript::find(id.pid).ok().map(Arc::new);
        adopted.log = Arc::new(Log::find(id.pid, log));
        Ok(adopted)
    }

    /// As `adopt`, one that no keeper started: it has no log or transcript of ours, and its descriptors are not touched.
    pub fn adopt_foreign(id: ProcessId) -> Result<Self, ProcessError> {
        let gone = |_| ProcessError::Gone { pid: id.pid };
        let pidfd = open_pidfd(id.pid).map_err(gone)?;
        // The order matters: if the start time is right after the pidfd was opened, the pidfd refers to that process.
        if start_ticks(id.pid).map_err(gone)? != id.start_ticks || has_ended(&pidfd) {
            return Err(ProcessError::Gone { pid: id.pid });
        }
        remember(id);
        let (pidfd, log) = (Arc::new(pidfd), Arc::new(Log::none()));
        Ok(Self { id, pidfd, log, ends_when_dropped: false, confined: false, transcript: None })
    }

    /// Lets QEMU outlive this value and its keeper from now on: it belongs to a machine.
    pub fn let_live(&mut self) {
        self.ends_when_dropped = false;
    }

    /// Identity of the process.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Output of the guest's serial console.
    pub fn transcript(&self) -> Option<&Arc<Transcript>> {
        self.transcript.as_ref()
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        has_ended(&self.pidfd)
    }

    /// Kills the process. Does nothing if it has ended.
    pub fn kill(&self) {
        self.killer()();
    }

    /// Does what `kill` does, from any thread.
    pub fn killer(&self) -> impl Fn() + Send + Sync + use<> {
        let (pidfd, pid) = (self.pidfd.clone(), self.id.pid);
        move || match pidfd_send_signal(&*pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(pid, %error, "QEMU cannot be killed"),
        }
    }

    /// Waits for the end of the process. Returns false after `patience`.
    pub fn ends_within(&self, patience: Duration) -> bool {
        ends_within(
            &self.pidfd,
            Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() },
        )
    }

    /// Calls `ended` once, from its own thread, when the process has ended. The text is the exit status.
    pub fn watch(&self, ended: impl FnOnce(String) + Send + 'static) -> io::Result<()> {
        let (pidfd, log) = (self.pidfd.clone(), self.log.clone());
        std::thread::Builder::new().name(format!("qemu-watch-{}", self.id.pid)).spawn(move || {
            let mut poll_fds = [PollFd::new(&pidfd, PollFlags::IN)];
            while poll(&mut poll_fds, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
            let how = collect(&pidfd);
            log.keep();
            ended(how);
        })?;
        Ok(())
    }

    /// The last lines of QEMU's log, joined into one and fit for events, and what to try if it was confined and could not open
    /// something. None if the log is empty.
    pub fn last_words(&self) -> Option<String> {
        let text = self.log.text();
        let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let tail = &lines[lines.len().saturating_sub(LAST_WORDS_LINES)..];
        let words = (!tail.is_empty()).then(|| said(&tail.join(" / ")))?;
        let refused = self.confined && REFUSED.iter().any(|refused| words.contains(refused));
        Some(if refused { words + confinement::HINT } else { words })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.ends_when_dropped {
            return;
        }
        self.kill();
        if self.ends_within(END_PATIENCE) {
            // Reaps the child, unless the watching thread was faster.
            collect(&self.pidfd);
            self.log.keep();
        } else {
            tracing::error!(pid = self.id.pid, "a QEMU that never came to be the machine's does not end");
        }
    }
}

/// Limits the size of all files that QEMU writes (RLIMIT_FSIZE): a file on tmpfs uses the host's memory.
fn limit_files(command: &mut Command, bytes: u64) {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    // SAFETY: setrlimit is a plain system call and touches nothing of the parent.
    unsafe {
        command.pre_exec(move || Ok(setrlimit(Resource::Fsize, limit)?));
    }
}

fn remember(qemu: ProcessId) {
    // Tests let their own process stand for one.
    if qemu.pid == std::process::id() {
        return;
    }
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    started.retain(is_alive);
    started.push(qemu);
}

/// Whether this is a QEMU that this process has started or adopted, or one that runs the same program, whatever that is called.
pub fn is_like_started(pid: u32) -> bool {
    let started = STARTED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let program = program_of(pid);
    let is_like = |qemu: &ProcessId| qemu.pid == pid || program.is_some() && program_of(qemu.pid) == program;
    started.iter().any(|qemu| is_alive(qemu) && is_like(qemu))
}

fn is_alive(process: &ProcessId) -> bool {
    start_ticks(process.pid).is_ok_and(|ticks| ticks == process.start_ticks)
}

/// Device and inode of a process's program. None if it hides it.
fn program_of(pid: u32) -> Option<(u64, u64)> {
    fs::metadata(format!("/proc/{pid}/exe")).ok().map(|program| (program.dev(), program.ino()))
}

fn own_session(command: &mut Command) {
    // SAFETY: setsid is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(|_| ()).map_err(io::Error::from));
    }
}

fn identify(pid: u32) -> io::Result<(ProcessId, OwnedFd)> {
    let pidfd = open_pidfd(pid)?;
    Ok((ProcessId { pid, start_ticks: start_ticks(pid)? }, pidfd))
}

/// Opens a pidfd for a pid.
pub(crate) fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Copies a process's descriptors of the memory files (memfd) with this name. Needs the right to trace the process.
pub fn memory_of(pid: u32, name: &str) -> io::Result<Vec<OwnedFd>> {
    let link = format!("{MEMORY_LINK}{name} (deleted)");
    memory_files_of(pid, |target, _| target.as_os_str() == link.as_str())
}

/// Copies a process's descriptor of the memory file (memfd) with this device and inode. Needs the right to trace the process.
pub fn memory_file_of(pid: u32, identity: (u64, u64)) -> io::Result<Option<OwnedFd>> {
    let is_it = |_: &Path, entry: &Path| identity_without_waiting(entry).is_ok_and(|found| found == identity);
    Ok(memory_files_of(pid, is_it)?.pop())
}

/// Device and inode. A file system that another program serves (FUSE) is not asked.
fn identity_without_waiting(path: &Path) -> io::Result<(u64, u64)> {
    let told = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok((makedev(told.stx_dev_major, told.stx_dev_minor), told.stx_ino))
}

/// Copies those descriptors of memory files (memfd) of a process that are wanted: by what is open, and by the entry in /proc. Other
/// descriptors are not touched, because whoever is behind them may not answer.
fn memory_files_of(pid: u32, is_wanted: impl Fn(&Path, &Path) -> bool) -> io::Result<Vec<OwnedFd>> {
    let process = open_pidfd(pid)?;
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?.path();
        let is_it = |target: PathBuf| {
            target.as_os_str().as_bytes().starts_with(MEMORY_LINK.as_bytes()) && is_wanted(&target, &entry)
        };
        // Another thread may close it meanwhile.
        if fs::read_link(&entry).is_ok_and(is_it)
            && let Some(number) = entry.file_name().and_then(|name| name.to_str()?.parse().ok())
        {
            match pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
                Err(rustix::io::Errno::BADF) => {}
                // Only memory has seals. Another file may have come in its place, or have such a name.
                fetched => match fetched? {
                    memory if fcntl_get_seals(&memory).is_ok() => found.push(memory),
                    other => background_close::close_descriptor(other),
                },
            }
        }
    }
    Ok(found)
}

/// Start time of a process, in clock ticks since the host's boot.
pub(crate) fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may contain anything: count the fields after its end.
    let after_name = stat.rsplit_once(')').map(|(_, rest)| rest);
    let field = after_name.and_then(|rest| rest.split_ascii_whitespace().nth(19));
    field.and_then(|ticks| ticks.parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn has_ended(pidfd: &impl AsFd) -> bool {
    ends_within(pidfd, Timespec::default())
}

fn ends_within(pidfd: &impl AsFd, patience: Timespec) -> bool {
    let mut poll_fds = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(poll(&mut poll_fds, Some(&patience)), Ok(ready) if ready > 0)
}

/// Reaps a child and returns its exit status as text. A child of libvirt, or of another keeper, is not ours.
fn collect(pidfd: &OwnedFd) -> String {
    match waitid(rustix::process::WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED) {
        Ok(Some(status)) if status.exited() => format!("exit code {}", status.exit_status().unwrap_or_default()),
        Ok(Some(status)) => format!("signal {}", status.terminating_signal().unwrap_or_default()),
        _ => "its exit code is known only to libvirt, or to the keeper that started it".to_owned(),
    }
}

/// Pids of the QEMUs whose RAM file's path starts with `path`: their keeper died before it recorded them. Other
/// programs with this path in their arguments are not included.
pub fn processes_naming(path: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let option = format!(",{}", ram_file_option(path));
    let mut space = vec![0; COMMAND_LINE_BYTES_MAX];
    let is_qemu_with_it = |pid: &u32| {
        let mut arguments = command_line(*pid, &mut space).split(|&byte| byte == 0).map(String::from_utf8_lossy);
        arguments.any(|argument| argument.starts_with("memory-backend-file,") && argument.contains(&option))
    };
    pids.filter(is_qemu_with_it).collect()
}

/// A process's command line; empty if it has ended. Read in one call, because a host may have thousands of processes and a
/// machine's start looks at all of them.
fn command_line(pid: u32, space: &mut [u8]) -> &[u8] {
    let read = fs::File::open(format!("/proc/{pid}/cmdline")).and_then(|mut file| file.read(space));
    &space[..read.unwrap_or(0)]
}

/// The words of a process's command line; none if it has ended.
pub fn arguments_of(pid: u32) -> Vec<String> {
    let arguments = read_own_words(pid, "cmdline").unwrap_or_default();
    arguments.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// The beginning of a file in /proc that a process can make as long as it likes, because it says where in its memory that is
/// (PR_SET_MM_MAP).
fn read_own_words(pid: u32, file: &str) -> io::Result<Vec<u8>> {
    let mut words = Vec::new();
    fs::File::open(format!("/proc/{pid}/{file}"))?.take(OWN_WORDS_BYTES_MAX).read_to_end(&mut words)?;
    Ok(words)
}

/// Runtime folder of the machine that a QEMU belongs to. None if that is unknown.
pub fn runtime_folder_of(pid: u32) -> Option<PathBuf> {
    let environment = read_own_words(pid, "environ").ok()?;
    let library = environment.split(|&byte| byte == 0).find_map(|variable| variable.strip_prefix(b"LD_PRELOAD="))?;
    Path::new(OsStr::from_bytes(library)).parent().map(Path::to_owned)
}

/// Kills a process that `processes_naming` found, and waits until it has released its ports, memory and disks. Returns
/// false if it does not end.
pub fn kill_stray(pid: u32) -> bool {
    // If it has ended meanwhile, there is nothing to do.
    let Ok(pidfd) = open_pidfd(pid) else { return true };
    let _ = pidfd_send_signal(&pidfd, Signal::KILL);
    ends_within(&pidfd, Timespec { tv_sec: END_PATIENCE.as_secs() as i64, tv_nsec: 0 })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn start_time_identifies_a_process() {
        let ticks = start_ticks(std::process::id()).unwrap();
        assert_ne!(ticks, 0);
        assert_eq!(start_ticks(std::process::id()).unwrap(), ticks);
        assert!(start_ticks(0).is_err());
    }

    #[test]
    fn only_memory_is_fetched() {
        let memory = memfd_create("fetched", MemfdFlags::CLOEXEC).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let identity = |fd: &dyn AsRawFd| {
            identity_without_waiting(Path::new(&format!("/proc/self/fd/{}", fd.as_raw_fd()))).unwrap()
        };
        let found = |identity| memory_file_of(std::process::id(), identity).unwrap().is_some();
        let about = file.as_file().metadata().unwrap();
        assert_eq!(identity(file.as_file()), (about.dev(), about.ino()));
        assert_eq!((found(identity(&memory)), found(identity(file.as_file()))), (true, false));
        assert_eq!(memory_of(std::process::id(), "fetched").unwrap().len(), 1);
    }

    #[test]
    fn endless_words_of_a_process_are_cut() {
        let long = "x".repeat(100_000);
        let mut child = Command::new("sh");
        // The kernel gives all words 2 MiB together. They are there when the shell says something.
        let child = child.args(["-c", "echo; read wait"]).args(vec![&long; 11]);
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let arguments = arguments_of(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(arguments.iter().map(|word| word.len() + 1).sum::<usize>() as u64, OWN_WORDS_BYTES_MAX + 1);
        assert_eq!(arguments[..4], ["sh", "-c", "echo; read wait", &long]);
    }

    #[test]
    fn last_words_are_the_last_five_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu.log");
        let (id, pidfd) = identify(std::process::id()).unwrap();
        let (log, output) = Log::create(&path).unwrap();
        let (pidfd, log) = (Arc::new(pidfd), Arc::new(log));
        let mut process = Process { id, pidfd, log, ends_when_dropped: false, confined: true, transcript: None };
        assert_eq!(process.last_words(), None);
        rustix::io::write(&output, b"one\ntwo\n\n three \nfour\nfive\nsix\n").unwrap();
        assert_eq!(process.last_words().as_deref(), Some("two / three / four / five / six"));
        rustix::io::write(&output, format!("\x1b]0;x\x07{}\n", "y".repeat(70_000)).as_bytes()).unwrap();
        let words = process.last_words().unwrap();
        assert!(words.len() < 1100 && words.starts_with("three / four / five / six /  ]0;x yyy"), "{words}");
        rustix::io::write(&output, b"1\n2\n3\n4\nvars: Permission denied\n").unwrap();
        assert_eq!(
            process.last_words().unwrap(),
            format!("1 / 2 / 3 / 4 / vars: Permission denied{}", confinement::HINT)
        );
        process.confined = false;
        assert_eq!(process.last_words().unwrap(), "1 / 2 / 3 / 4 / vars: Permission denied");
    }
}
