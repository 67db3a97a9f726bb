//! Descriptors that came with a message: unknown until they are checked, and never waited for.
//!
//! foreign -> event counter, memory, socket | anything else is refused
//!
//! QEMU may have been taken over by its guest, and shares every descriptor that it gives. So its flags prove nothing
//! (`O_NONBLOCK` is gone a moment after it was set), and what it is decides what it may do to a thread that touches it: a file
//! of FUSE holds up whoever reads its size, maps it or only closes it, for as long as its server likes. The checks here ask the
//! kernel alone. A descriptor that fails them is closed in the background; while too much waits for that, no disk accepts a connection.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{AtFlags, FileType, SealFlags, StatxFlags, fcntl_get_seals, fstatfs, statx};
use rustix::io::ReadWriteFlags;
use rustix::net::AddressFamily;

/// `f_type` of memory that is no file system's and not made of huge pages.
const SHARED_MEMORY: u64 = 0x0102_1994;

/// A descriptor of which nothing is known. Dropping it does not wait for whoever is behind it.
#[derive(Debug)]
pub struct ForeignFd(Option<OwnedFd>);

impl From<OwnedFd> for ForeignFd {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            background_close::close_descriptor(fd);
        }
    }
}

impl ForeignFd {
    fn known(mut self) -> OwnedFd {
        self.0.take().expect("a descriptor is taken out once, at the end of its check")
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("a descriptor is taken out once, at the end of its check").as_fd()
    }

    /// An event counter, as QEMU has them for kicks, calls and errors.
    pub fn event_counter(self) -> Result<EventCounter, &'static str> {
        // A path begins with a slash, so no file can be called so.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", self.fd().as_raw_fd()));
        match link {
            Ok(kind) if kind.as_os_str() == "anon_inode:[eventfd]" => Ok(EventCounter(self.known())),
            _ => Err("a descriptor is not an event counter (eventfd)"),
        }
    }

    /// A file that guest memory may be mapped from.
    pub fn guest_memory(self) -> Result<MemoryFile, &'static str> {
        // Only memory has seals; other files have to be on a device of this host (DAX), which those of FUSE and NFS are not.
        if fcntl_get_seals(self.fd()).is_err() {
            let asked = StatxFlags::TYPE;
            let told = statx(self.fd(), "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, asked);
            let is_local = told.is_ok_and(|told| {
                told.stx_dev_major != 0 && FileType::from_raw_mode(told.stx_mode.into()) == FileType::RegularFile
            });
            if !is_local {
                return Err("a file is not memory (memfd, tmpfs, hugetlbfs), nor a file on a local device");
            }
        }
        Ok(MemoryFile(self.known()))
    }

    /// Memory for data of the protocol: nobody can take it away, so that a mapping of it is safe to touch.
    pub fn sealed_memory(self) -> Result<MemoryFile, &'static str> {
        // The order matters: only of memory may the file system be asked.
        let sealed = fcntl_get_seals(self.fd()).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        // Huge pages run out when they are touched, whatever their seals.
        if !sealed || !fstatfs(self.fd()).is_ok_and(|system| system.f_type as u64 == SHARED_MEMORY) {
            return Err("a file is not memory that is sealed against shrinking (memfd, F_SEAL_SHRINK)");
        }
        Ok(MemoryFile(self.known()))
    }

    /// The end of a channel between processes.
    pub fn unix_socket(self) -> Result<UnixStream, &'static str> {
        match rustix::net::sockopt::socket_domain(self.fd()) {
            Ok(AddressFamily::UNIX) => Ok(self.known().into()),
            _ => Err("a descriptor is not a Unix socket"),
        }
    }
}

/// An event counter of QEMU's. It may block whoever reads or writes it the usual way, also when it was ready just before.
#[derive(Debug)]
pub struct EventCounter(OwnedFd);

impl EventCounter {
    /// Sets it to zero. One that is zero already stays so: somebody else was faster.
    pub fn clear(&self) -> io::Result<()> {
        let mut count = [0; 8];
        let space = &mut [io::IoSliceMut::new(&mut count)];
        // Unlike the flag of the descriptor, which QEMU shares, this one is of the call. The offset: none.
        match rustix::io::preadv2(&self.0, space, u64::MAX, ReadWriteFlags::NOWAIT) {
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for EventCounter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A file of memory. Asking for its size, mapping and closing it does not wait.
#[derive(Debug)]
pub struct MemoryFile(OwnedFd);

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<MemoryFile> for std::fs::File {
    fn from(file: MemoryFile) -> Self {
        file.0.into()
    }
}

#[cfg(test)]
impl MemoryFile {
    /// Fresh, sealed.
    pub fn new(bytes: u64) -> Self {
        let file = Self::new_unsealed(bytes);
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        ForeignFd::from(file.0).sealed_memory().unwrap()
    }

    pub(crate) fn new_unsealed(bytes: u64) -> Self {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        ForeignFd::from(fd).guest_memory().unwrap()
    }

    pub fn try_clone(&self) -> Self {
        Self(self.0.try_clone().unwrap())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::event::{EventfdFlags, eventfd};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use background_close::BACKLOG_MAX;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

    use super::*;
    use crate::block::DiskId;
    use crate::clock::Clock;
    use crate::image::{Format, Image, ImageOptions};
    use crate::server::{Backing, DiskOptions, Expected, Handle, Pause, Worker};

    fn memory(seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    fn open(path: &str) -> OwnedFd {
        File::open(path).unwrap().into()
    }

    /// Checks which kinds a descriptor is accepted as: event counter, guest memory, sealed memory, socket.
    #[track_caller]
    fn check(make: impl Fn() -> OwnedFd, expected: [bool; 4]) {
        let foreign = || ForeignFd::from(make());
        let found = [
            foreign().event_counter().is_ok(),
            foreign().guest_memory().is_ok(),
            foreign().sealed_memory().is_ok(),
            foreign().unix_socket().is_ok(),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn descriptors_pass_only_for_what_they_are() {
        check(|| eventfd(0, EventfdFlags::empty()).unwrap(), [true, false, false, false]);
        check(|| memory(SealFlags::empty()), [false, true, false, false]);
        check(|| memory(SealFlags::SHRINK), [false, true, true, false]);
        check(|| tempfile::tempfile_in("/dev/shm").unwrap().into(), [false, true, false, false]);
        check(|| UnixStream::pair().unwrap().0.into(), [false, false, false, true]);
        let nothing = [false; 4];
        check(|| rustix::pipe::pipe().unwrap().0, nothing);
        check(|| rustix::pipe::pipe().unwrap().1, nothing);
        check(|| std::net::TcpListener::bind("127.0.0.1:0").unwrap().into(), nothing);
        check(|| rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap(), nothing);
        ["/", "/dev/null", "/dev/zero", "/dev/shm", "/proc/self/mem", "/proc/self/maps"]
            .into_iter()
            .for_each(|path| check(|| open(path), nothing));
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let named = folder.path().join("anon_inode:[eventfd]");
        File::create(&named).unwrap();
        check(|| open(named.to_str().unwrap()), [false, true, false, false]);
    }

    fn worker(folder: &std::path::Path) -> (Worker, Handle) {
        let path = folder.join("image");
        std::fs::write(&path, [0; 4096]).unwrap();
        let lock_patience = Duration::ZERO;
        let image =
            ImageOptions { path, format: Format::Raw, read_only: false, direct: false, lock_patience, owner: None };
        let options = DiskOptions::new(DiskId(0), "test", folder.join("socket"));
        let options = DiskOptions { expected: Expected::anyone(), ..options };
        Worker::open(options, Backing::of(Image::open(&image).unwrap()).unwrap(), None, Clock::default()).unwrap()
    }

    /// Closing it takes until the lock is free.
    struct Held(Arc<Mutex<()>>);

    impl Drop for Held {
        fn drop(&mut self) {
            drop(self.0.lock());
        }
    }

    #[test]
    fn connections_wait_until_descriptors_are_closed() {
        let folder = tempfile::tempdir().unwrap();
        let (mut worker, handle) = worker(folder.path());
        let lock = Arc::new(Mutex::new(()));
        let held = lock.lock().unwrap();
        (0..BACKLOG_MAX).for_each(|_| background_close::close(Held(lock.clone())));
        let _connection = UnixStream::connect(folder.path().join("socket")).unwrap();
        assert_eq!(worker.turn(Some(Duration::ZERO)).unwrap(), Pause::Endless, "it is woken");
        assert_eq!(handle.counters().connections, 0);
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(60);
        while handle.counters().connections == 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the connection is never accepted");
            worker.turn(Some(left)).unwrap();
        }
    }

    #[test]
    fn empty_blocking_counter_is_cleared_without_waiting() {
        let counter = ForeignFd::from(eventfd(3, EventfdFlags::empty()).unwrap()).event_counter().unwrap();
        (0..3).for_each(|_| counter.clear().unwrap());
        assert!(rustix::io::write(&counter, &1u64.to_ne_bytes()).is_ok());
        counter.clear().unwrap();
    }
}
