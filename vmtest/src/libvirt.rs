//! A domain of libvirt with a guest of ours, and a libvirt of its own: virtlogd, libvirtd and all that they start live in namespaces
//! in which the folders of libvirt and of Hearth are empty. Their end is the end of everything in it.

use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hearth_api::{EventRecord, MachineStatus};
use tempfile::TempDir;

use crate::artifacts::{self, Boot};
use crate::console::Line;
use crate::error::{Error, Result, at};
use crate::guest::{Drives, Guest};
use crate::slots::{self, Slot};
use crate::wait::patience;

/// Folders of the host that are empty in the namespaces.
const PRIVATE: [&str; 9] = [
    "/etc/libvirt",
    "/var/lib/libvirt",
    "/var/cache/libvirt",
    "/var/log/libvirt",
    "/run/libvirt",
    "/etc/hearth",
    "/var/lib/hearth",
    "/run/hearth",
    "/dev/shm",
];
/// CPU features that QEMU does not emulate fast, as in [`artifacts::CPU_MODEL`].
const CPU: &str = "<cpu mode='maximum'><feature policy='disable' name='erms'/><feature policy='disable' name='fsrm'/>\
                   <feature policy='disable' name='cx16'/></cpu>";
/// Makes a `/dev` without KVM. Where root may use KVM and QEMU's user may not, libvirt asks QEMU anew what it can do before each step,
/// for 10 to 30 s.
const DEVICES: &str = "umount -l -R /dev\nmount -t tmpfs -o mode=0755 tmpfs /dev\nmkdir /dev/pts /dev/shm\n\
                       mknod -m 666 /dev/null c 1 3\nmknod -m 666 /dev/zero c 1 5\nmknod -m 666 /dev/full c 1 7\n\
                       mknod -m 666 /dev/random c 1 8\nmknod -m 666 /dev/urandom c 1 9\nmknod -m 666 /dev/tty c 5 0\n\
                       mount -t devpts -o newinstance,ptmxmode=666 devpts /dev/pts\nln -s pts/ptmx /dev/ptmx\n\
                       ln -s /proc/self/fd /dev/fd\nln -s /proc/self/fd/0 /dev/stdin\n";
const LOOK: Duration = Duration::from_millis(20);

/// A libvirt of its own, with one domain.
pub struct LibvirtVm {
    name: String,
    guest: Guest,
    /// The first process of the namespaces.
    inside: Mutex<Child>,
    folder: TempDir,
    /// Number of started guests.
    boots: Mutex<usize>,
    _slot: Slot,
}

/// A domain to define.
pub struct Domain<'a> {
    pub name: &'a str,
    /// `None`: UEFI boots from the first disk.
    pub boot: Option<Boot>,
    pub memory_mib: u64,
    pub cpus: u32,
    /// What libvirt does after a panic, such as `restart`.
    pub on_crash: &'a str,
    pub disks: &'a [DomainDisk<'a>],
    /// Pairs of a port of this host and of a port of the guest, to which it is forwarded.
    pub forwards: &'a [(u16, u16)],
    /// Whether it has a channel to qemu-guest-agent.
    pub has_agent: bool,
}

impl<'a> Domain<'a> {
    /// One whose guest is busybox.
    pub fn of_busybox(name: &'a str, memory_mib: u64, disks: &'a [DomainDisk<'a>]) -> Result<Self> {
        let (boot, on_crash) = (Some(artifacts::busybox(false)?), "destroy");
        Ok(Self { name, boot, memory_mib, cpus: 1, on_crash, disks, forwards: &[], has_agent: false })
    }
}

/// A disk of the domain.
pub struct DomainDisk<'a> {
    /// Its target, which is its name.
    pub target: &'a str,
    /// A file or a block device.
    pub image: &'a Path,
    /// `raw` or `qcow2`.
    pub format: &'a str,
    /// MiB and requests a second, of reads and writes together.
    pub limits: Option<(u64, u64)>,
}

impl LibvirtVm {
    /// Defines a domain with these disks, whose guest is busybox. Without root it prints a message and returns `None`.
    pub fn define(name: &str, memory_mib: u64, disks: &[DomainDisk<'_>]) -> Result<Option<Self>> {
        Self::define_domain(Domain::of_busybox(name, memory_mib, disks)?)
    }

    /// As `define`, with qemu-guest-agent installed in the guest but not started.
    pub fn define_with_agent(name: &str, memory_mib: u64, disks: &[DomainDisk<'_>]) -> Result<Option<Self>> {
        let boot = Some(artifacts::busybox_with_agent()?);
        Self::define_domain(Domain { boot, has_agent: true, ..Domain::of_busybox(name, memory_mib, disks)? })
    }

    /// Starts libvirt, and defines a domain. Without root it prints a message and returns `None`.
    pub fn define_domain(domain: Domain<'_>) -> Result<Option<Self>> {
        let name = domain.name;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: libvirt's own daemons need root");
            return Ok(None);
        }
        let slot = slots::take();
        let parent = std::env::temp_dir();
        let folder = at("create a folder in", &parent, tempfile::Builder::new().prefix("hearth-libvirt-").tempdir())?;
        // QEMU runs as a user of its own, and libvirt gives it the files that the domain names.
        open_to_all(folder.path())?;
        let socket = folder.path().join("serial.sock");
        let listener = at("listen on", &socket, UnixListener::bind(&socket))?;
        open_to_all(&socket)?;
        let guest = Guest::open(name, Line::Listen(listener))?;
        let as_root = !domain.disks.iter().all(|disk| all_may_enter_folder_of(disk.image));
        let inside = Mutex::new(begin(folder.path(), &artifacts::hearth()?, as_root)?);
        let (name, boots) = (name.to_owned(), Mutex::new(0));
        let vm = Self { name, guest, inside, folder, boots, _slot: slot };
        vm.wait_libvirt()?;
        let xml = vm.definition(domain)?;
        vm.must(&["virsh", "define", "/dev/stdin"], &xml)?;
        Ok(Some(vm))
    }

    fn definition(&self, domain: Domain<'_>) -> Result<String> {
        let Domain { name, boot, memory_mib, cpus, on_crash, disks, forwards, has_agent } = domain;
        let copy = |name: &str, from: &Path| -> Result<PathBuf> {
            let to = self.folder.path().join(name);
            at("copy", from, std::fs::copy(from, &to))?;
            open_to_all(&to)?;
            Ok(to)
        };
        let boot = match boot {
            Some(Boot { kernel, initrd, cmdline }) => format!(
                "<kernel>{}</kernel><initrd>{}</initrd><cmdline>{cmdline}</cmdline>",
                copy("kernel", &kernel)?.display(),
                copy("initrd", &initrd)?.display(),
            ),
            None => "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>\
                     <nvram template='/usr/share/OVMF/OVMF_VARS_4M.fd'/><boot dev='hd'/>"
                .to_owned(),
        };
        let disk = |DomainDisk { target, image, format, limits }: &DomainDisk<'_>| {
            let limits = limits.map_or_else(String::new, |(mib, requests)| {
                let bytes = mib << 20;
                format!(
                    "<iotune><total_bytes_sec>{bytes}</total_bytes_sec><total_iops_sec>{requests}</total_iops_sec></iotune>"
                )
            });
            let is_device = std::fs::metadata(image).is_ok_and(|found| found.file_type().is_block_device());
            let (kind, source) = if is_device { ("block", "dev") } else { ("file", "file") };
            format!(
                "<disk type='{kind}' device='disk'><driver name='qemu' type='{format}' cache='none' io='io_uring'/>\
                 <source {source}='{}'/><target dev='{target}' bus='virtio'/>{limits}</disk>",
                image.display()
            )
        };
        let disks: String = disks.iter().map(disk).collect();
        let forwards: String =
            forwards.iter().map(|(host, guest)| format!(",hostfwd=tcp:127.0.0.1:{host}-:{guest}")).collect();
        let agent = match has_agent {
            true => "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>",
            false => "",
        };
        let folder = self.folder.path().display();
        let qemu = which(&artifacts::qemu()?);
        Ok(format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n  <name>{name}</name>\n  \
             <memory unit='MiB'>{memory_mib}</memory>\n  <vcpu>{cpus}</vcpu>\n  \
             <os><type arch='x86_64' machine='q35'>hvm</type>{boot}</os>\n  <features><acpi/><apic/></features>\n  {CPU}\n  \
             <on_crash>{on_crash}</on_crash>\n  <devices>\n    <emulator>{}</emulator>\n    {disks}\n    {agent}\n    \
             <serial type='unix'><source mode='connect' path='{folder}/serial.sock'/></serial>\n    \
             <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>\n  </devices>\n  \
             <qemu:commandline><qemu:arg value='-netdev'/><qemu:arg value='user,id=net{forwards}'/>\
             <qemu:arg value='-device'/><qemu:arg value='virtio-net-pci,netdev=net,romfile=,addr=0x1d'/>\
             </qemu:commandline>\n</domain>\n",
            qemu.display(),
        ))
    }

    /// The machine's own folder, removed when it is dropped.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a command beside libvirt.
    pub fn command(&self, words: &[&str], input: &str) -> Result<Output> {
        let pid = self.inside().id();
        let mut command = Command::new("nsenter");
        let namespaces = [format!("--mount=/proc/{pid}/ns/mnt"), format!("--pid=/proc/{pid}/ns/pid_for_children")];
        command.args(namespaces).arg("--").args(words).env("LC_ALL", "C");
        command.env_remove("HEARTH_RUNTIME_ROOT");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|source| Error::Start { program: "nsenter".into(), source })?;
        if let Some(mut stdin) = child.stdin.take() {
            // A command that does not read it has ended.
            let _ = stdin.write_all(input.as_bytes());
        }
        child.wait_with_output().map_err(|source| Error::Start { program: words[0].into(), source })
    }

    /// Runs a command beside libvirt, which must succeed. Returns its output.
    pub fn must(&self, words: &[&str], input: &str) -> Result<String> {
        let output = self.command(words, input)?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        if output.status.success() {
            let [stdout, _] = said;
            return Ok(stdout);
        }
        Err(self.guest.fail(Error::Command { command: words.join(" "), status: output.status, said: said.concat() }))
    }

    /// Makes the node of a block device, which is not there otherwise.
    pub fn add_device(&self, node: &Path) -> Result<()> {
        let device = at("look at", node, std::fs::metadata(node))?.rdev();
        let numbers = [rustix::fs::major(device), rustix::fs::minor(device)].map(|number| number.to_string());
        self.must(&["mknod", &node.display().to_string(), "b", &numbers[0], &numbers[1]], "").map(drop)
    }

    /// Runs `hearth`, which must succeed. Returns its output.
    pub fn hearth(&self, words: &[&str]) -> Result<String> {
        self.must(&self.hearth_command(words)?.iter().map(String::as_str).collect::<Vec<_>>(), "")
    }

    /// Runs `hearth`. Returns its exit code and everything that it said.
    pub fn try_hearth(&self, words: &[&str]) -> Result<(i32, String)> {
        let words = self.hearth_command(words)?;
        let output = self.command(&words.iter().map(String::as_str).collect::<Vec<_>>(), "")?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        Ok((output.status.code().unwrap_or(-1), said))
    }

    fn hearth_command(&self, words: &[&str]) -> Result<Vec<String>> {
        let program = artifacts::hearth()?.display().to_string();
        Ok(std::iter::once(program).chain(words.iter().map(|word| (*word).to_owned())).collect())
    }

    /// Attaches the domain, and once more with these keys and these sections in its file.
    pub fn attach_with(&self, keys: &str, sections: &str) -> Result<()> {
        let attach = ["attach", &self.name, "--yes"];
        self.hearth(&attach)?;
        let path = format!("/etc/hearth/{}.toml", self.name);
        let text = self.must(&["cat", &path], "")?;
        self.must(&["tee", &path], &format!("{keys}\n{text}\n{sections}\n"))?;
        self.hearth(&attach).map(drop)
    }

    /// Runs `virsh` with the domain's name as its first argument. Returns its output.
    pub fn virsh(&self, verb: &str, more: &[&str]) -> Result<String> {
        self.must(&[&["virsh", "-q", verb, &self.name], more].concat(), "")
    }

    pub fn status(&self) -> Result<MachineStatus> {
        let text = self.hearth(&["status", &self.name, "--json"])?;
        serde_json::from_str(&text).map_err(|source| Error::NotJson {
            command: "hearth status".into(),
            text: text.clone(),
            source,
        })
    }

    pub fn events(&self) -> Result<Vec<EventRecord>> {
        let text = self.hearth(&["events", &self.name, "--json"])?;
        let parse = |line: &str| {
            serde_json::from_str(line).map_err(|source| Error::NotJson {
                command: "hearth events".into(),
                text: line.into(),
                source,
            })
        };
        text.lines().map(parse).collect()
    }

    /// Starts the domain, and waits until its guest is ready.
    pub fn start(&self) -> Result<()> {
        self.virsh("start", &[])?;
        self.wait_next_boot()
    }

    /// Waits for the boot after those that were waited for.
    pub fn wait_next_boot(&self) -> Result<()> {
        let boots = {
            let mut boots = self.boots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            *boots += 1;
            *boots
        };
        self.wait_boots(boots).map(drop)
    }

    /// The pid of the domain's QEMU, in the namespace.
    pub fn qemu_pid(&self) -> Result<String> {
        let file = format!("/run/libvirt/qemu/{}.pid", self.name);
        self.must(&["cat", &file], "").map(|pid| pid.trim().to_owned())
    }

    /// Kills the domain's QEMU, and waits until libvirt has seen it.
    pub fn kill_qemu(&self) -> Result<()> {
        self.must(&["kill", "-9", &self.qemu_pid()?], "")?;
        self.wait_state("shut off")
    }

    /// Waits until the domain is in this state.
    pub fn wait_state(&self, state: &str) -> Result<()> {
        self.wait_until(&format!("the domain is {state}"), || Ok(self.virsh("domstate", &[])?.trim() == state))
    }

    /// Waits until this is so.
    pub fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let (limit, began) = (patience(10), Instant::now());
        while !is_so()? {
            if began.elapsed() > limit {
                return Err(self.guest.timeout(what, limit));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Kills the domain's keeper.
    pub fn kill_keeper(&self) -> Result<()> {
        let pid = self.status()?.keeper.pid.to_string();
        self.must(&["kill", "-9", &pid], "").map(drop)
    }

    /// Starts a keeper as a service manager would, and waits until it answers.
    pub fn start_keeper(&self) -> Result<()> {
        self.run_keeper()?;
        self.wait_keeper()
    }

    fn wait_keeper(&self) -> Result<()> {
        self.wait_until("a keeper", || Ok(self.try_hearth(&["status", &self.name])?.0 == 0))
    }

    /// Starts a keeper as a service manager would.
    pub fn run_keeper(&self) -> Result<()> {
        self.start_daemon(&["run", &format!("/etc/hearth/{}.toml", self.name)])
    }

    /// Starts a keeper that is killed in place of a system call: the first that is a thread's call of this name with this number.
    pub fn start_keeper_killed_at(&self, (call, number): (&str, u32)) -> Result<()> {
        let injection = format!("inject={call}:signal=KILL:when={number}");
        let strace = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", &injection].map(str::to_owned);
        let keeper = self.hearth_command(&["run", &format!("/etc/hearth/{}.toml", self.name)])?;
        self.start_process(&[strace.to_vec(), keeper].concat())?;
        self.wait_keeper()
    }

    /// Starts the daemon that follows libvirt's events.
    pub fn start_host(&self) -> Result<()> {
        self.start_daemon(&["host"])?;
        self.wait_until("virsh follows", || Ok(self.command(&["pgrep", "-f", "virsh.*event"], "")?.status.success()))
    }

    /// Starts `hearth` with these words as a daemon, in a process group of its own.
    pub fn start_daemon(&self, words: &[&str]) -> Result<()> {
        self.start_process(&self.hearth_command(words)?)
    }

    fn start_process(&self, command: &[String]) -> Result<()> {
        let log = self.folder.path().join("keeper.log");
        let line = format!("setsid \"$@\" </dev/null >>'{}' 2>&1 &", log.display());
        let command: Vec<_> = ["sh", "-c", &line, "sh"].into_iter().chain(command.iter().map(String::as_str)).collect();
        self.must(&command, "").map(drop)
    }

    /// Starts libvirt's daemon again, which was killed.
    pub fn start_libvirt(&self) -> Result<()> {
        let pid_file = self.folder.path().join("libvirtd.pid").display().to_string();
        self.must(&["libvirtd", "-d", "-p", &pid_file], "").map(drop)
    }

    /// Has libvirt's daemon killed in place of a system call: of its calls of this name for this file, the one with this number.
    pub fn kill_libvirt_at(&self, (call, number): (&str, u32), file: &str) -> Result<()> {
        let injection = format!("inject={call}:signal=KILL:when={number}");
        let pid = self.must(&["pidof", "libvirtd"], "")?;
        let strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", file, "-e", &injection, "-p", pid.trim()];
        self.start_process(&strace.map(str::to_owned))?;
        let untraced = ["grep", "-q", "TracerPid:\t0$", &format!("/proc/{}/status", pid.trim())];
        self.wait_until("strace", || Ok(!self.command(&untraced, "")?.status.success()))
    }

    /// Waits until libvirt's daemon has died.
    pub fn wait_libvirt_end(&self) -> Result<()> {
        self.wait_until("libvirt's end", || Ok(!self.command(&["pidof", "libvirtd"], "")?.status.success()))
    }

    /// Does what the keeper says of a start that libvirt's daemon has lost by its death, if it says so. Returns whether it does.
    pub fn mend_lost_start(&self) -> Result<bool> {
        let state = format!("/run/libvirt/qemu/{}.xml", self.name);
        let remedy = format!("rm {state}; systemctl restart libvirtd");
        let (_, said) = self.try_hearth(&["status", &self.name])?;
        if !said.contains(&remedy) {
            return Ok(false);
        }
        self.must(&["rm", &state], "")?;
        self.must(&["pkill", "-x", "libvirtd"], "")?;
        self.wait_libvirt_end()?;
        self.start_libvirt().map(|()| true)
    }

    fn wait_libvirt(&self) -> Result<()> {
        // Until the host's libvirt is hidden, it would answer.
        let started = self.folder.path().join("libvirtd.pid");
        self.wait_until("libvirt", || {
            Ok(started.exists() && self.command(&["virsh", "-q", "list"], "")?.status.success())
        })
    }

    fn inside(&self) -> std::sync::MutexGuard<'_, Child> {
        self.inside.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn logs(&self) -> String {
        let named = |name: &str| format!("/var/log/libvirt/qemu/{name}.log");
        let (qemu, keeper) = (named(&self.name), format!("/run/hearth/{}/keeper.log", self.name));
        let output = self.command(&["tail", "-n", "30", &qemu, &keeper], "");
        let inside = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        let daemons = std::fs::read_to_string(self.folder.path().join("daemons.log")).unwrap_or_default();
        let own = std::fs::read_to_string(self.folder.path().join("keeper.log")).unwrap_or_default();
        let program = artifacts::hearth().unwrap_or_default().display().to_string();
        let events = self.command(&[&program, "events", &self.name], "");
        let events = events.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        format!("{inside}\n--- events\n{events}\n--- daemons\n{daemons}\n--- keepers\n{own}")
    }
}

impl Drives for LibvirtVm {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn check_alive(&self, _: &str) -> Result<()> {
        Ok(())
    }
}

impl Drop for LibvirtVm {
    fn drop(&mut self) {
        if std::thread::panicking() || self.guest.has_failed() {
            eprintln!("--- console\n{}\n--- logs\n{}", self.guest.console_tail(), self.logs());
        }
        let inside = self.inside.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Everything in the namespace of processes ends with its first one.
        let _ = inside.kill();
        let _ = inside.wait();
    }
}

/// Makes the namespaces, and starts libvirt in them. `as_root`: QEMU runs as root.
fn begin(folder: &Path, hearth: &Path, as_root: bool) -> Result<Child> {
    for path in PRIVATE {
        at("create", Path::new(path), std::fs::create_dir_all(path))?;
    }
    let mounts: String = PRIVATE.iter().map(|path| format!("mount -t tmpfs -o mode=0755 tmpfs {path}\n")).collect();
    let (folder, hearth) = (folder.display(), hearth.display());
    let user = if as_root { "echo 'user = \"root\"' >/etc/libvirt/qemu.conf\n" } else { "" };
    // Hooks are found only when libvirt starts. systemd would start keepers outside.
    let script = format!(
        "set -e\n{DEVICES}{mounts}[ ! -d /run/systemd ] || mount -t tmpfs tmpfs /run/systemd\n\
         mkdir -p /var/lib/libvirt/qemu /var/log/libvirt/qemu /etc/libvirt/hooks/qemu.d\n{user}\
         printf '#!/bin/sh\\nexec {hearth} hook \"$@\"\\n' >/etc/libvirt/hooks/qemu.d/hearth\n\
         chmod 755 /etc/libvirt/hooks/qemu.d/hearth\n\
         exec </dev/null >{folder}/daemons.log 2>&1\n\
         virtlogd -d -p {folder}/virtlogd.pid\n\
         libvirtd -d -p {folder}/libvirtd.pid\n\
         # Nobody else collects a QEMU that has ended, and libvirt waits for that.\n\
         while :; do sleep 1000; done\n"
    );
    let unshare = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"];
    let started = Command::new("unshare").args(unshare).args(["sh", "-c", &script]).spawn();
    started.map_err(|source| Error::Start { program: "unshare".into(), source })
}

/// Whether every user may enter the folder of this file: root's home, and those of many users, are closed to others.
fn all_may_enter_folder_of(file: &Path) -> bool {
    let mut folders = file.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty());
    folders.all(|folder| folder.metadata().is_ok_and(|metadata| metadata.permissions().mode() & 0o001 != 0))
}

fn open_to_all(path: &Path) -> Result<()> {
    at("open to all", path, std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)))
}

/// The path of a program.
fn which(program: &Path) -> PathBuf {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file());
    found.unwrap_or_else(|| program.to_owned())
}
