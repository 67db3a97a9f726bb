//! Signalling an event counter of QEMU's, so that no state that it may be in holds up this thread.
//!
//! A write to a counter that is full waits until somebody reads it, unless the descriptor says otherwise; and what it says QEMU
//! can change at any moment, as it can fill the counter. Unlike reads, writes have no flag of their own against that
//! (`RWF_NOWAIT` is refused). But the kernel itself never waits: asked to signal the end of an operation on a counter
//! (`IOCB_FLAG_RESFD` of its asynchronous I/O), it adds one if there is room, and wakes whoever waits in any case. So here
//! nothing is read from `/dev/null`, and the end of that is signalled. It takes 0.4 us, where a write takes 0.2.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;

use super::foreign::EventCounter;

const READ: u16 = 0;
const SIGNAL: u32 = 1;
/// Ends that the kernel has room for. They are taken away when it has no more; these are few, since all hosts' keepers share
/// 65536 (`fs.aio-max-nr`), and in truth it makes room for at least 16.
const ENDS: i32 = 8;

/// struct iocb of the kernel (little-endian), and struct io_event.
#[repr(C)]
struct Operation {
    data: u64,
    key: u32,
    flags: i32,
    opcode: u16,
    priority: i16,
    file: i32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    what_is_signalled: u32,
    counter: i32,
}

const _: () = assert!(size_of::<Operation>() == 64 && std::mem::offset_of!(Operation, counter) == 60);
const _: () = assert!(cfg!(target_endian = "little"), "key and flags change places elsewhere");

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct End {
    fields: [u64; 4],
}

/// Contexts that no thread uses. To destroy one takes tens of milliseconds (the kernel waits for all processors to have
/// forgotten it), so they are used again, and end with the process.
static FREE: Mutex<Vec<libc::c_ulong>> = Mutex::new(Vec::new());

/// Signals event counters; one a thread.
pub struct Signaller {
    context: libc::c_ulong,
    nothing: File,
}

impl Signaller {
    pub fn new() -> io::Result<Self> {
        let nothing = File::open("/dev/null")?;
        let free = FREE.lock().expect("nothing panics that holds it").pop();
        let context = free.map_or_else(new_context, Ok)?;
        Ok(Self { context, nothing })
    }

    pub fn signal(&self, counter: &EventCounter) -> io::Result<()> {
        if self.submit(counter)? {
            return Ok(());
        }
        self.forget_ends()?;
        if self.submit(counter)? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// False: there is no room for its end.
    fn submit(&self, counter: &EventCounter) -> io::Result<bool> {
        let mut operation = Operation {
            data: 0,
            key: 0,
            flags: 0,
            opcode: READ,
            priority: 0,
            file: self.nothing.as_raw_fd(),
            buffer: 0,
            bytes: 0,
            offset: 0,
            reserved: 0,
            what_is_signalled: SIGNAL,
            counter: counter.as_fd().as_raw_fd(),
        };
        let operations = [&raw mut operation];
        // SAFETY: the context is ours and alive; the kernel reads one operation, which lives through the call, writes to its `key`
        // alone, and has ended it when it returns: `/dev/null` has nothing to wait for, and no byte is asked for.
        let submitted = unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, operations.as_ptr()) };
        match result(submitted) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn forget_ends(&self) -> io::Result<()> {
        let mut ends = [End::default(); 64];
        loop {
            let none = std::ptr::null_mut::<libc::timespec>();
            // SAFETY: the context is ours and alive, the kernel writes up to as many ends as there is room for, and waits for none.
            let taken =
                unsafe { libc::syscall(libc::SYS_io_getevents, self.context, 0, ends.len(), ends.as_mut_ptr(), none) };
            if result(taken)? < ends.len() as libc::c_long {
                return Ok(());
            }
        }
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        FREE.lock().expect("nothing panics that holds it").push(self.context);
    }
}

fn new_context() -> io::Result<libc::c_ulong> {
    let mut context = 0;
    // SAFETY: the kernel writes the new context's number there, and nothing else.
    result(unsafe { libc::syscall(libc::SYS_io_setup, ENDS, &raw mut context) })?;
    Ok(context)
}

fn result(returned: libc::c_long) -> io::Result<libc::c_long> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::server::foreign::ForeignFd;

    fn counter(initial: u64) -> (OwnedFd, EventCounter) {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &initial.to_ne_bytes()).unwrap();
        let counter = ForeignFd::from(fd.try_clone().unwrap()).event_counter().unwrap();
        (fd, counter)
    }

    fn read(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(fd, &mut count), Ok(8));
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_signal_counts() {
        let (fd, counter) = counter(1);
        let signaller = Signaller::new().unwrap();
        (0..1000).for_each(|_| signaller.signal(&counter).unwrap());
        assert_eq!(read(&fd), 1001);
    }

    #[test]
    fn a_full_counter_holds_up_nobody() {
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            let (fd, counter) = counter(u64::MAX - 1);
            let signaller = Signaller::new().unwrap();
            (0..3).for_each(|_| signaller.signal(&counter).unwrap());
            done.send(read(&fd)).unwrap();
        });
        assert_eq!(is_done.recv_timeout(Duration::from_secs(30)), Ok(u64::MAX));
    }
}
