//! A thread that hangs in its work: it stops at a system call, as if the answer never came. The other threads go on.
//!
//! attach -> give it work -> it stops at the first system call of its work -> it stays there until its process ends
//!
//! By ptrace(2), because a signal (SIGSTOP) stops all threads of a process. Not by a program like strace: where Yama guards
//! the host, only a parent may trace, and the test is the keeper's.

use std::io;
use std::sync::mpsc::{Sender, channel};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::wait::patience;

/// System calls that a loop makes between two pieces of work.
const BETWEEN: [libc::c_long; 7] = [
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_futex,
    libc::SYS_restart_syscall,
    libc::SYS_timerfd_settime,
    libc::SYS_write,
];
/// A stop at a system call (`PTRACE_O_TRACESYSGOOD`).
const AT_CALL: i32 = libc::SIGTRAP | 0x80;

/// Makes the thread hang in the work that `give_work` gives it. A process's first thread has the process's number.
pub fn hang(thread: Pid, give_work: impl FnOnce()) -> io::Result<()> {
    let (tell, told) = channel();
    // ptrace knows threads and not processes: when the thread that attached ends, the other one goes on.
    std::thread::Builder::new().name("tracer".into()).spawn(move || {
        let traced = trace(thread, &tell);
        let _ = traced.or_else(|error| tell.send(Err(error)));
    })?;
    let next = || told.recv_timeout(patience(5)).unwrap_or_else(|error| Err(io::Error::other(error)));
    next()?;
    give_work();
    next()
}

/// The thread with this name. Linux keeps 15 bytes of a name.
pub fn thread_of(process: Pid, name: &str) -> io::Result<Pid> {
    let kept = &name[..name.len().min(15)];
    for task in std::fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()))? {
        let task = task?;
        if std::fs::read_to_string(task.path().join("comm"))?.trim_end() == kept {
            let number = task.file_name().to_str().and_then(|number| number.parse().ok());
            return Ok(number.and_then(Pid::from_raw).expect("a thread's folder is called by its number"));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("no thread is called {name}")))
}

/// Tells when it is attached, and when the thread hangs. Returns at the thread's end.
fn trace(thread: Pid, tell: &Sender<io::Result<()>>) -> io::Result<()> {
    ptrace(libc::PTRACE_SEIZE, thread, libc::PTRACE_O_TRACESYSGOOD)?;
    ptrace(libc::PTRACE_INTERRUPT, thread, 0)?;
    let _ = tell.send(Ok(()));
    loop {
        let stop = next_stop(thread)?;
        if stop == AT_CALL && !BETWEEN.contains(&call_of(thread)?) {
            break;
        }
        // All other stops are signals to be delivered, except those that ptrace itself makes.
        let signal = if stop & libc::SIGTRAP == libc::SIGTRAP { 0 } else { stop };
        ptrace(libc::PTRACE_SYSCALL, thread, signal)?;
    }
    let _ = tell.send(Ok(()));
    // The end of a process's first thread is for the process's parent to take.
    waitid(WaitId::Pid(thread), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    Ok(())
}

fn next_stop(thread: Pid) -> io::Result<i32> {
    let status = waitid(WaitId::Pid(thread), WaitIdOptions::STOPPED | WaitIdOptions::EXITED)?;
    let stop = status.and_then(|status| status.trapping_signal());
    stop.ok_or_else(|| io::Error::other("the thread has ended"))
}

/// The system call at which a stopped thread stands.
fn call_of(thread: Pid) -> io::Result<libc::c_long> {
    let text = std::fs::read_to_string(format!("/proc/{}/syscall", thread.as_raw_nonzero()))?;
    let number = text.split(' ').next().and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("not in a system call: {text}")))
}

fn ptrace(request: libc::c_uint, thread: Pid, data: i32) -> io::Result<()> {
    let nowhere = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: these requests take no address, and their data is a number.
    match unsafe { libc::ptrace(request, thread.as_raw_nonzero().get(), nowhere, data as libc::c_long) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
