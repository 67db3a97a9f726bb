//! The ioctls of a userfaultfd as functions. They act on the memory of the process that made the descriptor.
//!
//! No crate is used: these are five calls of a stable interface (linux/userfaultfd.h), and the available crate adds a C
//! binding generator to every build.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

const GROUP: u8 = 0xaa;
const API: Opcode = opcode::read_write::<Api>(GROUP, 0x3f);
const REGISTER: Opcode = opcode::read_write::<Register>(GROUP, 0x00);
const UNREGISTER: Opcode = opcode::read::<Range>(GROUP, 0x01);
const WAKE: Opcode = opcode::read::<Range>(GROUP, 0x02);
const COPY: Opcode = opcode::read_write::<Copy>(GROUP, 0x03);

const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_THREAD_ID: u64 = 1 << 8;
const FEATURES: u64 = FEATURE_MISSING_SHMEM | FEATURE_MISSING_HUGETLBFS | FEATURE_THREAD_ID;
/// WP_HUGETLBFS_SHMEM, WP_UNPOPULATED and WP_ASYNC: write protection of file pages, missing ones included, which the
/// kernel lifts at the first write. Needs Linux 6.7.
const FEATURES_OF_WRITES: u64 = 1 << 12 | 1 << 13 | 1 << 15;
const MODE_MISSING: u64 = 1;
const MODE_WRITE_PROTECT: u64 = 2;
const COPY_WAKES_NOBODY: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`; addresses are in QEMU.
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    bytes: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`. `copied` is a length in bytes or a negative errno.
#[repr(C)]
struct Copy {
    target: u64,
    source: u64,
    bytes: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffd_msg` of a page fault.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u32,
    padding: u32,
}
const _: () = assert!(size_of::<Message>() == 32);
const MESSAGES: usize = 16;

/// A thread of QEMU that waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Address of the fault, in QEMU.
    pub address: u64,
    /// Thread ID (UFFD_FEATURE_THREAD_ID).
    pub thread: u32,
}

/// When to wake the threads that wait for an installed page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// As soon as the page is installed.
    AtOnce,
    /// At the call of `SuppliedRam::wake`.
    Later,
}

/// Agrees on features with the kernel: once per userfaultfd, before any other call. A second call returns EINVAL.
pub fn enable(fd: impl AsFd) -> Result<(), Errno> {
    match agree(fd.as_fd(), FEATURES | FEATURES_OF_WRITES) {
        Err(Errno::INVAL) => agree(fd.as_fd(), FEATURES),
        agreed => agreed,
    }
}

fn agree(fd: BorrowedFd<'_>, features: u64) -> Result<(), Errno> {
    let mut api = Api { api: u64::from(GROUP), features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`, which `Api` is.
    unsafe { ioctl(fd, Updater::<API, Api>::new(&mut api)) }
}

/// Registers a range: a thread that touches a page which the file does not hold waits from now on.
pub fn register_missing(fd: impl AsFd, start: u64, bytes: u64) -> Result<(), Errno> {
    register(fd, start, bytes, MODE_MISSING)
}

/// Registers a range for write protection.
pub fn register_writes(fd: impl AsFd, start: u64, bytes: u64) -> Result<(), Errno> {
    register(fd, start, bytes, MODE_WRITE_PROTECT)
}

fn register(fd: impl AsFd, start: u64, bytes: u64, mode: u64) -> Result<(), Errno> {
    let mut register = Register { range: Range { start, bytes }, mode, ioctls: 0 };
    // SAFETY: UFFDIO_REGISTER reads and writes one `struct uffdio_register`, which `Register` is. It changes who serves
    // faults in another process and no memory of this one.
    unsafe { ioctl(fd, Updater::<REGISTER, Register>::new(&mut register)) }
}

/// Unregisters a range: the kernel serves it from now on, and threads that wait in it continue.
pub fn unregister(fd: impl AsFd, start: u64, bytes: u64) -> Result<(), Errno> {
    let mut range = Range { start, bytes };
    // SAFETY: UFFDIO_UNREGISTER reads one `struct uffdio_range`, which `Range` is. It changes no memory of this
    // process.
    unsafe { ioctl(fd, Updater::<UNREGISTER, Range>::new(&mut range)) }
}

/// Wakes the threads that wait in a range. They continue if the page is there by now, and report again if not.
pub fn wake(fd: impl AsFd, start: u64, bytes: u64) -> Result<(), Errno> {
    let mut range = Range { start, bytes };
    // SAFETY: UFFDIO_WAKE reads one `struct uffdio_range`, which `Range` is; it changes no memory.
    unsafe { ioctl(fd, Updater::<WAKE, Range>::new(&mut range)) }
}

/// Installs whole pages where none are. Returns the number of bytes installed, and an error unless that is all; `EXIST`
/// if a page is there already.
pub fn copy(fd: impl AsFd, target: u64, pages: &[u8], wake: Wake) -> (u64, Result<(), Errno>) {
    let bytes = pages.len() as u64;
    let mode = match wake {
        Wake::AtOnce => 0,
        Wake::Later => COPY_WAKES_NOBODY,
    };
    let mut copy = Copy { target, source: pages.as_ptr() as u64, bytes, mode, copied: 0 };
    // SAFETY: UFFDIO_COPY reads and writes one `struct uffdio_copy`, which `Copy` is. It reads `bytes` bytes at
    // `source`, which are borrowed here, and installs them only where the process that made the descriptor has no page.
    let done = unsafe { ioctl(fd, Updater::<COPY, Copy>::new(&mut copy)) };
    // A copy that ends early returns EAGAIN and the number of bytes copied.
    (u64::try_from(copy.copied).unwrap_or(0), done)
}

/// Reads all faults that are pending, if any.
pub fn read(fd: BorrowedFd<'_>, found: &mut Vec<Waiter>) -> Result<(), Errno> {
    loop {
        let mut messages = [Message::default(); MESSAGES];
        // SAFETY: `Message` is plain data without compiler padding: any byte values are valid.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(messages.as_mut_ptr().cast::<u8>(), size_of_val(&messages)) };
        let got = match rustix::io::read(fd, bytes) {
            Err(Errno::AGAIN) => return Ok(()),
            Err(Errno::INTR) => continue,
            got => got? / size_of::<Message>(),
        };
        let faults = messages[..got].iter().filter(|message| message.event == EVENT_PAGEFAULT);
        found.extend(faults.map(|message| Waiter { address: message.address, thread: message.thread }));
        if got < MESSAGES {
            return Ok(());
        }
    }
}
