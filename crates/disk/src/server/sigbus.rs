//! Guest memory that is gone under its mapping must not end the keeper.
//!
//! QEMU can truncate the file of its guest's memory, and a tmpfs can be full when a hole of it is touched: an access to such a page
//! raises SIGBUS, which ends the process. The handler here finds the mapping, puts empty memory in its place and notes that it is
//! lost. The access ends as if nothing had happened, and its caller looks at the note afterwards. A signal about anything else
//! goes to the handler that was installed before.
//!
//! Why not without a signal: rings are looked at several times a request, and a system call for each would cost more than what
//! is served from memory. Memory that can be sealed against it is sealed (`foreign`); a file of a file system cannot.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings of all disks of this process: 64 regions each of two QEMUs at 31 disks, and more.
const MAPPINGS_MAX: usize = 4096;

/// A mapping that is looked after. `start` is written last and cleared first: it says whether the rest counts.
struct Place {
    taken: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static PLACES: [Place; MAPPINGS_MAX] = [const {
    Place {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; MAPPINGS_MAX];

/// The signal's handler before ours.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping is looked after while this lives, which must not be longer than the mapping.
pub struct Guard(&'static Place);

impl Guard {
    /// `start` and `bytes` are those of a mapping of a file.
    pub fn new(start: *mut u8, bytes: usize) -> io::Result<Self> {
        catch()?;
        let free = |place: &&Place| !place.taken.swap(true, Ordering::Acquire);
        let place = PLACES.iter().find(free).ok_or_else(|| io::Error::other("too many regions of guest memory"))?;
        place.lost.store(false, Ordering::Relaxed);
        place.end.store(start as usize + bytes, Ordering::Relaxed);
        place.start.store(start as usize, Ordering::Release);
        Ok(Self(place))
    }

    /// Was there a page that could not be had?
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.taken.store(false, Ordering::Release);
    }
}

fn catch() -> io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    // SAFETY: the old action is written by the kernel; the new one is a function that does only what a handler may do.
    unsafe {
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        if BEFORE.set(before.assume_init()).is_err() {
            return Ok(());
        }
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        if libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Runs inside of the access. Touches nothing but the list and the mapping, and keeps `errno`.
extern "C" fn handle(_signal: libc::c_int, about: *const libc::siginfo_t, _context: *const libc::c_void) {
    // SAFETY: the kernel passes what the signal is about, which for SIGBUS has an address.
    let (address, code) = unsafe { ((*about).si_addr() as usize, (*about).si_code) };
    // Memory that the host's hardware has lost is another matter.
    let found = if code == libc::BUS_ADRERR { mapping_at(address) } else { None };
    let replaced = found.is_some_and(|(place, start, end)| {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
        );
        // SAFETY: `errno` is this thread's. The range is a mapping that its owner is using at this moment, and goes on using; only
        // what is behind it changes.
        unsafe {
            let errno = *libc::__errno_location();
            let mapped = libc::mmap(start as *mut libc::c_void, end - start, protection, flags, -1, 0);
            *libc::__errno_location() = errno;
            place.lost.store(true, Ordering::Relaxed);
            mapped != libc::MAP_FAILED
        }
    });
    if let Some(before) = BEFORE.get().filter(|_| !replaced) {
        // The access is made again, and the signal comes again.
        // SAFETY: the action is one that the kernel gave out.
        unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
    }
}

fn mapping_at(address: usize) -> Option<(&'static Place, usize, usize)> {
    PLACES.iter().find_map(|place| {
        let start = place.start.load(Ordering::Acquire);
        let end = place.end.load(Ordering::Relaxed);
        let is_same = place.start.load(Ordering::Acquire) == start;
        (start != 0 && is_same && (start..end).contains(&address)).then_some((place, start, end))
    })
}
