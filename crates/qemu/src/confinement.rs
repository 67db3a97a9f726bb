//! Confinement: a QEMU that its guest has taken over opens no file but those of its launch (Landlock), makes no system call that only
//! harms others (seccomp), and has no capability of root's but the few that it needs.
//!
//! rules and filter from binary and launch -> fork -> its own /proc -> no_new_privs -> rules -> capabilities -> filter -> exec
//!
//! Sockets, taps, locks, the console, and the channels for registers and states come to QEMU as descriptors, which Landlock leaves
//! alone. So the list is short, and nothing that is opened later adds to it. Landlock also forbids QEMU to trace processes
//! outside, which would give it the keeper's memory and descriptors. Not a mount namespace: an ordinary user needs a user
//! namespace for one, and many hosts allow none.
//!
//! Rules that the kernel is too old for are left out: files since 5.13 (ABI 1), truncation since 6.2 (3), TCP since 6.7 (4),
//! commands to devices since 6.10 (5), signals and abstract sockets since 6.12 (6).

use std::env;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError,
    Scope, make_bitflags, path_beneath_rules,
};

use rustix::io::{FdFlags, fcntl_setfd};
use thread_filter::QemuFilter;

use crate::launch::{Boot, NetBackend};
use crate::{Binary, Launch};

/// Programs, libraries, modules and firmware of the host, and of the package managers that keep them elsewhere. (Where /lib is a
/// link to /usr/lib, the rule is that folder's.)
const SYSTEM: [&str; 9] = ["/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store", "/gnu/store"];
/// Libraries, modules and firmware beside the folder of a program that was unpacked and not installed. All of `share` would be much
/// more than that for a program in ~/.local/bin.
const BESIDE: [&str; 7] =
    ["lib", "lib64", "share/qemu", "share/qemu-firmware", "share/seabios", "share/seavgabios", "share/ipxe"];
/// Variables with folders of an unpacked program.
const FOLDER_VARIABLES: [&str; 2] = ["LD_LIBRARY_PATH", "QEMU_MODULE_DIR"];
const READABLE: [&str; 22] = [
    // The loader.
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    // The clock of a guest that keeps local time.
    "/etc/localtime",
    // The user that QEMU becomes.
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    // Libraries for ciphers refuse to start if they cannot read what the host allows.
    "/etc/crypto-policies",
    "/etc/gnutls",
    "/etc/gcrypt",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/openssl.cnf",
    // Random numbers, also the guest's.
    "/dev/urandom",
    "/dev/random",
    // Processors, NUMA nodes, huge pages, limits of mappings, parameters of KVM's modules, persistent memory.
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/filesystems",
    "/proc/sys/vm",
    "/proc/sys/crypto",
    "/sys/devices/system",
    "/sys/kernel/mm",
    "/sys/module",
    "/sys/bus/nd",
];
const USERFAULT_DEVICE: &str = "/dev/userfaultfd";
/// Virtual processors; page faults that the keeper handles; output that nobody wants.
const DEVICES: [&str; 3] = ["/dev/kvm", USERFAULT_DEVICE, "/dev/null"];
const RESOLVER: &str = "/etc/resolv.conf";
/// Where the file of name servers usually is, if /etc/resolv.conf is a link. The link may come later, or lead elsewhere then.
const RESOLVERS: [&str; 4] = ["/run/systemd/resolve", "/run/NetworkManager", "/run/resolvconf", "/run/netconfig"];
const OWN_PROCESS: &CStr = c"/proc/self";

/// Bits of capabilities (linux/capability.h).
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;
const CAP_NET_BIND_SERVICE: u32 = 10;
const CAP_SYS_PTRACE: u32 = 19;

/// The newest rules that this is tested with.
const FILES: ABI = ABI::V5;
const NETWORK: ABI = ABI::V4;
const SCOPES: ABI = ABI::V6;

/// For the last words of a QEMU that could not open something.
pub(crate) const HINT: &str = " (sandbox = false shows whether Hearth's rules for QEMU are the reason)";

/// Whether this kernel confines processes by such rules at all.
pub fn kernel_has_landlock() -> bool {
    matches!(empty_rules(&[]).map(Option::<OwnedFd>::from), Ok(Some(_)))
}

/// Why a QEMU opens what its user may open, although its launch asks for a confinement. None: it does not.
fn why_files_are_open(binary: &Binary) -> Option<&'static str> {
    if binary.is_script() {
        return Some("its program is a script, which may need other files");
    }
    (!kernel_has_landlock()).then_some("this kernel has no Landlock, or it is turned off")
}

/// Confines the program of `command`, a QEMU with this launch. None: it uses no files, networks or other user. Where the kernel has no
/// Landlock, that is said in the log once.
pub(crate) fn confine(command: &mut Command, binary: &Binary, launch: Option<&Launch>) -> io::Result<()> {
    let reason = why_files_are_open(binary);
    if let Some(reason) = reason {
        static SAID: Once = Once::new();
        SAID.call_once(|| tracing::warn!(reason, "QEMU may open every file that its user may"));
    }
    if binary.is_script() {
        return Ok(());
    }
    // Before the rules are made, so that those are of the same entries.
    let process_files = open_process_files();
    let rules: Option<OwnedFd> = match reason {
        Some(_) => None,
        None => rules(binary, launch).map_err(io::Error::other)?.into(),
    };
    let (capabilities, filter) = (capabilities(launch), QemuFilter::new()?);
    // SAFETY: between fork and exec this only makes system calls and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            rules.as_ref().map_or(Ok(()), |rules| restrict(rules.as_raw_fd(), &process_files))?;
            keep_only(capabilities)?;
            filter.apply()
        });
    }
    Ok(())
}

/// Capabilities that a QEMU of root's needs, as a set of bits. It gives them up with its user.
fn capabilities(launch: Option<&Launch>) -> u64 {
    // Its files may belong to any user. Landlock says which they are.
    let mut kept = 1 << CAP_DAC_OVERRIDE;
    if launch.is_some_and(|launch| launch.run_as.is_some()) {
        kept |= 1 << CAP_SETUID | 1 << CAP_SETGID;
    }
    // Ports below 1024 that are forwarded.
    if launch.is_some_and(has_user_net) {
        kept |= 1 << CAP_NET_BIND_SERVICE;
    }
    // Page faults that the keeper handles: kernels before 6.1 have no device for them.
    if !Path::new(USERFAULT_DEVICE).exists() {
        kept |= 1 << CAP_SYS_PTRACE;
    }
    kept
}

/// Gives up all other capabilities for the program that is executed next. A process that may not change the limit of its capabilities
/// has no root's to give up, or runs where somebody else has set that limit.
fn keep_only(kept: u64) -> io::Result<()> {
    // SAFETY: plain system calls.
    let prctl = |option, argument: u64| check(unsafe { libc::prctl(option, argument, 0u64, 0u64, 0u64) }.into());
    prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as u64)?;
    for capability in (0..u64::BITS).filter(|capability| kept & 1 << capability == 0) {
        match prctl(libc::PR_CAPBSET_DROP, capability.into()) {
            // The kernel knows no higher one.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => break,
            dropped => dropped?,
        };
    }
    Ok(())
}

fn rules(binary: &Binary, launch: Option<&Launch>) -> Result<RulesetCreated, RulesetError> {
    let run = make_bitflags!(AccessFs::{Execute | ReadFile | ReadDir});
    let read = make_bitflags!(AccessFs::{ReadFile | ReadDir});
    let write = make_bitflags!(AccessFs::{ReadFile | WriteFile});
    let device = make_bitflags!(AccessFs::{ReadFile | WriteFile | IoctlDev});
    // QEMU makes the socket of its screen itself. A name in the runtime folder could be one that the keeper needs: that of its own
    // socket, or of a file that it is about to write.
    let screen = launch.and_then(|launch| launch.screen_folder.as_deref());
    let nets = launch.map_or(&[][..], |launch| &launch.nets);
    empty_rules(&nets.iter().map(|net| &net.backend).collect::<Vec<_>>())?
        .add_rules(path_beneath_rules(SYSTEM, run))?
        .add_rules(path_beneath_rules(program_files(binary), run))?
        .add_rules(path_beneath_rules(READABLE, read))?
        .add_rules(path_beneath_rules(launch.map(files_to_read).unwrap_or_default(), read))?
        .add_rules(path_beneath_rules(launch.map(files_to_write).unwrap_or_default(), write))?
        .add_rules(path_beneath_rules(DEVICES, device))?
        .add_rules(path_beneath_rules(screen, AccessFs::MakeSock))
}

/// Rules that forbid all that Landlock can forbid to a QEMU with these networks.
fn empty_rules(nets: &[&NetBackend]) -> Result<RulesetCreated, RulesetError> {
    let all = Ruleset::default().handle_access(AccessFs::from_all(FILES))?.scope(Scope::from_all(SCOPES))?;
    match forbidden_tcp(nets) {
        tcp if tcp.is_empty() => all,
        tcp => all.handle_access(tcp)?,
    }
    .create()
}

/// QEMU itself makes the connections of a user-mode network: to anywhere for its guest, and from forwarded ports to it.
fn forbidden_tcp(nets: &[&NetBackend]) -> BitFlags<AccessNet> {
    let mut forbidden = AccessNet::from_all(NETWORK);
    for net in nets {
        if let NetBackend::User { isolated, .. } = net {
            forbidden.remove(AccessNet::BindTcp);
            if !isolated {
                forbidden.remove(AccessNet::ConnectTcp);
            }
        }
    }
    forbidden
}

/// The program, and what a program that was unpacked brings along.
fn program_files(binary: &Binary) -> Vec<PathBuf> {
    let mut files = vec![binary.path().to_owned()];
    files.extend(binary.data_folders().iter().cloned());
    // The path may be a link to the program.
    let target = fs::canonicalize(binary.path()).ok();
    for program in [Some(binary.path()), target.as_deref()].into_iter().flatten() {
        files.extend(beside(program));
    }
    for variable in FOLDER_VARIABLES.iter().filter_map(env::var_os) {
        // An empty part would mean the current folder.
        files.extend(env::split_paths(&variable).filter(|folder| folder.is_absolute()));
    }
    files
}

fn beside(program: &Path) -> impl Iterator<Item = PathBuf> {
    let prefix = program.parent().and_then(Path::parent);
    prefix.into_iter().flat_map(|prefix| BESIDE.map(|folder| prefix.join(folder)))
}

fn files_to_read(launch: &Launch) -> Vec<PathBuf> {
    let mut files = match &launch.boot {
        Boot::Kernel { kernel, initrd, .. } => vec![Some(kernel.clone()), initrd.clone()],
        Boot::Firmware { code, .. } => vec![code.clone()],
    };
    files.push(launch.preload.as_ref().map(|preload| preload.library.clone()));
    if has_user_net(launch) {
        files.extend(resolver_folders(Path::new(RESOLVER)).into_iter().map(Some));
    }
    files.into_iter().flatten().collect()
}

fn has_user_net(launch: &Launch) -> bool {
    launch.nets.iter().any(|net| matches!(net.backend, NetBackend::User { .. }))
}

/// A user-mode network reads the host's name servers again when they change. They change by a new file in the place of the old
/// one, so a rule for the file would last only until then.
fn resolver_folders(file: &Path) -> Vec<PathBuf> {
    // A link may lead to a file that is not there yet.
    let named = fs::read_link(file).map_or(file.to_owned(), |target| file.with_file_name(target));
    let real = fs::canonicalize(file).ok();
    let folders = [Some(named), real].into_iter().flatten().filter_map(|file| Some(file.parent()?.to_owned()));
    folders.chain(RESOLVERS.map(PathBuf::from)).collect()
}

fn files_to_write(launch: &Launch) -> Vec<PathBuf> {
    let mut files = vec![launch.ram_file.clone()];
    files.extend(launch.pmem.iter().map(|pmem| pmem.file.clone()));
    files.extend(launch.preload.as_ref().and_then(|preload| preload.gates.clone()));
    if let Boot::Firmware { vars: Some(vars), .. } = &launch.boot {
        files.push(vars.clone());
    }
    files
}

/// Opens what has rules beneath /proc. A rule there lasts only as long as the kernel remembers the entry, which an open descriptor makes
/// it do.
fn open_process_files() -> Vec<OwnedFd> {
    let paths = READABLE.iter().filter(|path| path.starts_with("/proc/"));
    let opened = paths.map(|path| File::options().read(true).custom_flags(libc::O_PATH).open(path));
    // What this kernel does not have gets no rule either.
    opened.filter_map(Result::ok).map(OwnedFd::from).collect()
}

/// Restricts this process by the rules, and by one for its own folder in /proc, which it did not have before. The program that is
/// executed next keeps that folder and `kept` open.
fn restrict(rules: RawFd, kept: &[OwnedFd]) -> io::Result<()> {
    // SAFETY: the path is a constant that ends with a zero byte.
    let own = check(unsafe { libc::open(OWN_PROCESS.as_ptr(), libc::O_PATH) }.into())?;
    let rule =
        PathBeneath { allowed_access: make_bitflags!(AccessFs::{ReadFile | ReadDir}).bits(), parent_fd: own as RawFd };
    // SAFETY: the kernel reads one rule; the flags (the last argument) must be zero.
    check(unsafe { libc::syscall(libc::SYS_landlock_add_rule, rules, RULE_PATH_BENEATH, &raw const rule, 0) })?;
    for descriptor in kept {
        fcntl_setfd(descriptor, FdFlags::empty())?;
    }
    // SAFETY: a plain system call.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    // SAFETY: a plain system call. The rules' descriptor closes at exec.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules, 0) }).map(drop)
}

/// LANDLOCK_RULE_PATH_BENEATH.
const RULE_PATH_BENEATH: libc::c_int = 1;

/// The kernel's `landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: i32,
}

const _: () = assert!(size_of::<PathBeneath>() == 12);

fn check(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::{VERSION_MIN, launch};

    /// Version of this kernel's rules.
    fn kernel_has(abi: ABI) -> bool {
        const VERSION: libc::c_long = 1;
        // SAFETY: with this flag the kernel reads nothing and returns a number.
        let has = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) };
        has >= abi as i64
    }

    /// A taken-over QEMU, for which a shell stands in, beside its keeper: this process.
    struct Stand {
        folder: tempfile::TempDir,
        listener: TcpListener,
        launch: Launch,
    }

    impl Stand {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            for name in ["ram-1", "vars", "kernel", "tag.key", "journal.json"] {
                fs::write(folder.path().join(name), "bytes").unwrap();
            }
            let file = |name: &str| folder.path().join(name);
            let boot = Boot::Firmware { code: Some(file("kernel")), vars: Some(file("vars")) };
            let launch = Launch { ram_file: file("ram-1"), boot, confined: true, ..launch::tests::launch() };
            Self { folder, listener: TcpListener::bind("127.0.0.1:0").unwrap(), launch }
        }

        /// Whether a shell that runs this succeeds.
        fn tries(&self, confined: bool, script: &str) -> bool {
            let mut command = Command::new("bash");
            command.args(["-c", script]).current_dir(self.folder.path());
            command.env("KEEPER", std::process::id().to_string());
            command.env("PORT", self.listener.local_addr().unwrap().port().to_string());
            if confined {
                confine(&mut command, &Binary::stand_in(VERSION_MIN, true), Some(&self.launch)).unwrap();
            }
            command.output().unwrap().status.success()
        }

        /// What only the confinement forbids.
        #[track_caller]
        fn check_refused(&self, what: &str, script: &str) {
            assert!(!self.tries(true, script), "{what}: it must be refused");
            assert!(self.tries(false, script), "{what}: it works without the confinement");
        }
    }

    #[test]
    fn confined_process_opens_only_its_files() {
        if !kernel_has(ABI::V1) {
            return eprintln!("skipped: this kernel has no Landlock");
        }
        let stand = Stand::new();
        for own in [
            "cat ram-1 && echo more 1<> ram-1",
            "cat vars && echo more 1<> vars",
            "cat kernel",
            "cat /proc/self/status",
            "ls /usr/share && cat /etc/passwd && head -c 1 /dev/urandom",
            ": > /dev/null",
        ] {
            assert!(stand.tries(true, own), "{own}");
        }
        stand.check_refused("the machine's secret", "cat tag.key");
        stand.check_refused("the keeper's files", "echo more >> journal.json");
        stand.check_refused("a read-only file", "echo more 1<> kernel");
        stand.check_refused("a new file", "echo new > new");
        stand.check_refused("other names of files", "mv tag.key other && mv other tag.key");
        stand.check_refused("removing a file", "rm journal.json");
        stand.check_refused("what the folder has", "ls .");
        stand.check_refused("the host's files", "cat /etc/hostname || cat /etc/shells");
        stand.check_refused("other processes", "cat /proc/$KEEPER/status");
        // Whether a process may trace another one is what decides here; nothing is traced.
        stand.check_refused("the keeper's memory", "exec 3< /proc/$KEEPER/mem");
    }

    #[test]
    fn screen_allows_sockets_in_its_own_folder_alone() {
        if !kernel_has(ABI::V1) {
            return eprintln!("skipped: this kernel has no Landlock");
        }
        let mut stand = Stand::new();
        let folder = stand.folder.path().join("screen-1");
        fs::create_dir(&folder).unwrap();
        stand.launch.screen_folder = Some(folder);
        let bind = |path: &str| {
            let program = "socket(my $s, PF_UNIX, SOCK_STREAM, 0); exit !bind($s, sockaddr_un($ARGV[0]))";
            format!("perl -MSocket -e '{program}' {path}")
        };
        assert!(stand.tries(true, &bind("screen-1/vnc")));
        stand.check_refused("a name that the keeper needs", &bind("journal.json.new"));
        stand.check_refused("the folder of the next QEMU", "mkdir screen-2");
    }

    #[test]
    fn newer_kernels_confine_more() {
        let stand = Stand::new();
        if kernel_has(ABI::V3) {
            stand.check_refused("taking away the guest's memory", "truncate -s 1 ram-1");
        }
        if kernel_has(ABI::V4) {
            stand.check_refused("a connection", "exec 3<> /dev/tcp/127.0.0.1/$PORT");
        }
        if kernel_has(ABI::V6) {
            stand.check_refused("a signal", "kill -0 $KEEPER");
        }
    }

    #[test]
    fn calls_that_only_harm_others_are_refused() {
        let stand = Stand::new();
        stand.check_refused("limits of the keeper, such as that of its time", "prlimit --pid $KEEPER --cpu");
        assert!(stand.tries(true, "ulimit -t && prlimit --pid 0 --cpu"), "its own limits");
        stand.check_refused("shared memory of others", "made=$(ipcmk -M 4096) && ipcrm -m ${made##* }");
        stand.check_refused("other namespaces", "unshare --user true");
    }

    #[test]
    fn root_keeps_few_capabilities() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root has capabilities");
        }
        let mut stand = Stand::new();
        stand.check_refused("a file's owner", "chown 1 ram-1");
        let has =
            |stand: &Stand, kept: u64| stand.tries(true, &format!("grep -q CapEff:.*{kept:016x} /proc/$$/status"));
        let device = if Path::new(USERFAULT_DEVICE).exists() { 0 } else { 1 << CAP_SYS_PTRACE };
        assert!(has(&stand, device | 0x2));
        stand.launch.run_as = Some("nobody".into());
        assert!(has(&stand, device | 0xc2));
    }

    #[test]
    fn rules_beneath_proc_are_held() {
        if !kernel_has(ABI::V1) {
            return eprintln!("skipped: this kernel has no Landlock");
        }
        let held = "held() { for fd in /proc/$$/fd/*; do [ $fd -ef $1 ] && return; done; false; }";
        for path in ["/proc/$$", "/proc/meminfo", "/proc/cpuinfo", "/proc/sys/vm"] {
            assert!(Stand::new().tries(true, &format!("{held}; held {path}")), "{path}");
        }
    }

    #[test]
    fn unpacked_program_brings_no_users_files() {
        let beside = |program: &str| beside(Path::new(program)).collect::<Vec<_>>();
        let folders = beside("/users/me/.local/bin/qemu-system-x86_64");
        assert!(
            folders.contains(&"/users/me/.local/share/qemu".into()) && folders.contains(&"/users/me/.local/lib".into())
        );
        for users in ["/users/me/.local/share/keyrings/login.keyring", "/users/me/.local/libexec/x"] {
            assert!(!folders.iter().any(|folder| Path::new(users).starts_with(folder)), "{users}");
        }
    }

    #[test]
    fn folders_of_name_servers_are_known_before_the_file_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let (file, other) = (folder.path().join("etc/resolv.conf"), folder.path().join("run"));
        fs::create_dir(folder.path().join("etc")).unwrap();
        let check = |expect: &Path| assert!(resolver_folders(&file).iter().any(|folder| folder == expect));
        check(file.parent().unwrap());
        for target in [other.join("resolv.conf"), "../run/resolv.conf".into()] {
            std::os::unix::fs::symlink(&target, &file).unwrap();
            check(file.with_file_name(&target).parent().unwrap());
            fs::remove_file(&file).unwrap();
        }
        assert!(resolver_folders(&file).contains(&"/run/systemd/resolve".into()));
    }

    #[test]
    fn user_mode_network_connects_and_finds_name_servers() {
        let mut stand = Stand::new();
        let backend = NetBackend::User { forward: Vec::new(), isolated: false };
        stand.launch.nets = vec![launch::NetDevice { mac: "52:54:00:00:00:01".into(), backend }];
        assert!(stand.tries(true, "exec 3<> /dev/tcp/127.0.0.1/$PORT"));
        assert!(stand.tries(true, "[ ! -e /etc/resolv.conf ] || cat /etc/resolv.conf"));
        assert!(!stand.tries(true, "cat tag.key") || !kernel_has(ABI::V1));
    }

    #[test]
    fn a_script_is_not_confined() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu");
        fs::write(&path, "#!/bin/sh\necho QEMU emulator version 8.0.0\n").unwrap();
        assert!(Command::new("chmod").arg("+x").arg(&path).status().unwrap().success());
        let script = Binary::find(Some(&path)).unwrap();
        assert_eq!(why_files_are_open(&script), Some("its program is a script, which may need other files"));
        let qemu = why_files_are_open(&Binary::stand_in(VERSION_MIN, true));
        assert_eq!(qemu.is_none(), kernel_has(ABI::V1));
    }

    #[track_caller]
    fn check_tcp(nets: &[NetBackend], expect: &[AccessNet]) {
        let expect = expect.iter().fold(BitFlags::empty(), |all, access| all | *access);
        assert_eq!(forbidden_tcp(&nets.iter().collect::<Vec<_>>()), expect, "{nets:?}");
    }

    #[test]
    fn only_user_mode_networks_use_tcp() {
        let user = |isolated| NetBackend::User { forward: Vec::new(), isolated };
        check_tcp(&[], &[AccessNet::BindTcp, AccessNet::ConnectTcp]);
        check_tcp(&[NetBackend::Tap { number: 3 }], &[AccessNet::BindTcp, AccessNet::ConnectTcp]);
        check_tcp(&[user(true)], &[AccessNet::ConnectTcp]);
        check_tcp(&[user(false)], &[]);
        check_tcp(&[user(true), user(false)], &[]);
    }
}
