//! Thread filter: system calls that a thread which reads a guest's or QEMU's bytes never makes, and which then fail (seccomp). QEMU itself
//! has such a filter, too: its own denies little that is not obsolete.
//!
//! A list of what is denied, and not of what is allowed: a call that was forgotten in such a list would cost a machine its disk, on
//! some host with another libc or kernel. Denied calls fail with EPERM; nothing is killed. Threads that a filtered thread starts have
//! its filter. All threads of a keeper share their memory, so whoever controls one of them for long can make another act
//! for it: the filter stops what an exploit usually does first, and no more than that. It costs a system call 10 to 20 ns (Linux 6.18).
//!
//! What a ring of io_uring does is no system call. The disks' rings have restrictions of their own (`engine/uring.rs` in disk), and
//! no filtered thread can make another ring.

#![warn(missing_docs)]

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::io;
use std::sync::{Once, OnceLock};

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// What neither such a thread nor QEMU does.
const DENIED: [c_long; 55] = [
    // Reach into another process, or watch the host.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_perf_event_open,
    libc::SYS_bpf,
    libc::SYS_fanotify_init,
    libc::SYS_lookup_dcookie,
    libc::SYS_syslog,
    // Make a ring, whose operations no filter sees. (QEMU tries, and then waits in another way.)
    libc::SYS_io_uring_setup,
    // Change what files there are, or leave a namespace.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_open_by_handle_at,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_quotactl,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    // Gain rights.
    libc::SYS_capset,
    libc::SYS_personality,
    // The kernel's keys.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // Replace or change the kernel, its clock or its name.
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    // Reach hardware.
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    // Move pages of other processes.
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
];

/// What no such thread does, in addition.
const DENIED_TO_THREADS: [c_long; 17] = [
    // Start a program.
    libc::SYS_execve,
    libc::SYS_execveat,
    // Connect to anybody. Connections come from QEMU (accept, recvmsg), and requests to an object store have threads of their own.
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    // Handle page faults, which others are made to wait for.
    libc::SYS_userfaultfd,
    // Become another user.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
];

/// What QEMU does not do, in addition. What it starts, whose user it becomes and how it is scheduled is the business of its own filter.
const DENIED_TO_QEMU: [c_long; 13] = [
    // Reach memory, semaphores and queues of other programs of its user, for which no file has a name.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
];

/// System calls with the arguments that are denied to them. None: every call.
type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Denies this thread, and those that it starts, the calls that it never makes. The kernel then also gives it no new privileges. A
/// kernel or container that has no such filters is named in the log once, and the thread goes on without.
pub fn deny_unneeded() {
    static SAID: Once = Once::new();
    let denied = program().as_ref().map_err(ToString::to_string);
    let denied = denied.and_then(|program| seccompiler::apply_filter(program).map_err(|error| error.to_string()));
    if let Err(error) = denied {
        SAID.call_once(|| tracing::warn!(error, "threads run without a filter of system calls (seccomp)"));
    }
}

fn program() -> &'static Result<BpfProgram, BackendError> {
    static PROGRAM: OnceLock<Result<BpfProgram, BackendError>> = OnceLock::new();
    PROGRAM.get_or_init(|| compile(DENIED.iter().chain(&DENIED_TO_THREADS).map(|call| (*call, Vec::new())).collect()))
}

fn compile(denied: Rules) -> Result<BpfProgram, BackendError> {
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(denied, SeccompAction::Allow, refused, ARCH.try_into()?)?.try_into()
}

/// A filter for a QEMU that is about to start, in addition to its own (`-sandbox`).
#[derive(Debug)]
pub struct QemuFilter(BpfProgram);

impl QemuFilter {
    /// Makes the filter, and changes nothing.
    pub fn new() -> io::Result<Self> {
        let calls = DENIED.iter().chain(&DENIED_TO_QEMU).map(|call| (*call, Vec::new()));
        let filter = limits_of_others().and_then(|limits| compile(calls.chain([limits]).collect()));
        filter.map(Self).map_err(io::Error::other)
    }

    /// Applies it to this thread, also over an exec. To be called between fork and exec: it makes only system calls. A kernel or
    /// container that has no such filters is no error.
    pub fn apply(&self) -> io::Result<()> {
        match seccompiler::apply_filter(&self.0) {
            Ok(()) => Ok(()),
            Err(Error::Seccomp(error)) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => Ok(()),
            Err(Error::Seccomp(error) | Error::Prctl(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::Other.into()),
        }
    }
}

/// Limits of another process, of which that of its processor time kills it. (0 is the process itself.)
fn limits_of_others() -> Result<(c_long, Vec<SeccompRule>), BackendError> {
    let another = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, 0)?;
    Ok((libc::SYS_prlimit64, vec![SeccompRule::new(vec![another])?]))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::thread;

    use super::*;

    /// What `act` gives on a thread without and with the filter.
    fn on_threads<T: Send + 'static>(act: impl Fn() -> T + Send + Copy + 'static) -> (T, T) {
        let filtered = thread::spawn(move || {
            deny_unneeded();
            // A thread that it starts has the filter, too.
            thread::spawn(act).join().unwrap()
        });
        (thread::spawn(act).join().unwrap(), filtered.join().unwrap())
    }

    /// Error numbers of a call with arguments that do no harm: as far as the call gets by itself, and what the filter says.
    fn check(what: &str, call: c_long, arguments: [usize; 4]) {
        let [a, b, c, d] = arguments;
        let (plain, filtered) = on_threads(move || {
            // SAFETY: the arguments name no memory, no process but this one, and nothing that exists.
            let result = unsafe { libc::syscall(call, a, b, c, d) };
            if result < 0 { io::Error::last_os_error().raw_os_error().unwrap() } else { 0 }
        });
        assert_eq!(filtered, libc::EPERM, "{what}");
        if plain == filtered {
            eprintln!("this host denies {what} to everybody");
        }
    }

    #[test]
    fn denied_calls_fail_only_with_the_filter() {
        let nowhere = usize::MAX;
        check("execve", libc::SYS_execve, [0; 4]);
        check("execveat", libc::SYS_execveat, [nowhere, 0, 0, 0]);
        check("ptrace", libc::SYS_ptrace, [nowhere, 0, 0, 0]);
        check("process_vm_readv", libc::SYS_process_vm_readv, [std::process::id() as usize, 0, 0, 0]);
        check("socket", libc::SYS_socket, [libc::AF_INET as usize, libc::SOCK_STREAM as usize, 0, 0]);
        check("connect", libc::SYS_connect, [nowhere, 0, 0, 0]);
        check("io_uring_setup", libc::SYS_io_uring_setup, [0; 4]);
        check("unshare", libc::SYS_unshare, [0; 4]);
        check("setuid", libc::SYS_setuid, [own_user(), 0, 0, 0]);
        check("keyctl", libc::SYS_keyctl, [nowhere, 0, 0, 0]);
    }

    fn own_user() -> usize {
        // SAFETY: a plain system call.
        unsafe { libc::getuid() as usize }
    }

    #[test]
    fn filtered_thread_starts_no_program_and_connects_to_nobody() {
        let (plain, filtered) = on_threads(|| Command::new("true").status().is_ok());
        assert_eq!((plain, filtered), (true, false));
        let (plain, filtered) = on_threads(|| TcpListener::bind("127.0.0.1:0").is_ok());
        assert_eq!((plain, filtered), (true, false));
        let (plain, filtered) = on_threads(|| UnixStream::pair().is_ok());
        assert_eq!((plain, filtered), (true, false));
    }

    #[test]
    fn other_threads_and_their_work_are_not_affected() {
        let (plain, filtered) = on_threads(|| {
            let file = std::fs::File::open("/proc/self/status");
            file.is_ok() && thread::spawn(|| std::fs::read("/proc/self/comm").is_ok()).join().unwrap()
        });
        assert_eq!((plain, filtered), (true, true));
        assert!(Command::new("true").status().unwrap().success());
    }
}
