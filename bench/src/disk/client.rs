//! A vhost-user-blk client in this process, with one queue, one request at a time, and a RAM file as its memory.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use hearth_disk::block::BLOCK_BYTES;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// How long a request is polled for. A flush takes longer, and needs the processors for the kernel's own threads.
const SPIN: Duration = Duration::from_micros(500);
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot map {path}")]
    Map { path: PathBuf, source: io::Error },
    #[error("cannot {what}: {reason}")]
    Protocol { what: &'static str, reason: String },
    #[error("{request:?} ended with {result}")]
    Request { request: Request, result: i32 },
}

/// A request. `page` is the first page of the client's memory that its data uses.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    Read { block: u64, page: usize },
    Write { block: u64, blocks: usize, page: usize },
    Flush,
}

pub struct Client {
    // Order matters: the driver must be dropped before the memory that it uses.
    queue: Blkioq,
    _driver: Blkio,
    memory: Memory,
}

impl Client {
    /// Connects to a disk server. A RAM file is the memory that requests use.
    pub fn connect(socket: &Path, ram: &Path) -> Result<Self, ClientError> {
        let memory = Memory::map(ram).map_err(|source| ClientError::Map { path: ram.to_owned(), source })?;
        let failed = |what: &'static str| {
            move |error: blkio::Error| ClientError::Protocol { what, reason: error.message().to_owned() }
        };
        let mut driver = Blkio::new("virtio-blk-vhost-user").map_err(failed("make a driver"))?;
        let socket = socket.to_str().expect("the bench names its own files");
        driver.set_str("path", socket).map_err(failed("name the socket"))?;
        driver.connect().map_err(failed("connect"))?;
        let started = driver.start().map_err(failed("start"))?;
        driver.map_mem_region(&memory.region()).map_err(failed("share memory"))?;
        let no_queue = || ClientError::Protocol { what: "start", reason: "no queue".to_owned() };
        let queue = started.queues.into_iter().next().ok_or_else(no_queue)?;
        Ok(Client { queue, _driver: driver, memory })
    }

    /// Sends a request, waits for its answer, and returns the microseconds that it took.
    pub fn run(&mut self, request: Request) -> Result<f64, ClientError> {
        let mut completion = [const { MaybeUninit::<Completion>::uninit() }];
        let none = ReqFlags::empty();
        let begun = Instant::now();
        match request {
            Request::Read { block, page } => {
                let target = self.memory.pages(page, 1);
                self.queue.read(block * BLOCK_BYTES as u64, target, BLOCK_BYTES, 0, none);
            }
            Request::Write { block, blocks, page } => {
                let source = self.memory.pages(page, blocks);
                self.queue.write(block * BLOCK_BYTES as u64, source, blocks * BLOCK_BYTES, 0, none);
            }
            Request::Flush => self.queue.flush(0, none),
        }
        let (done, took) = loop {
            let spent = begun.elapsed();
            // Polls at first: the time to wake this process up is not the disk's.
            let done = match spent < SPIN {
                true => self.queue.do_io(&mut completion, 0, None, None),
                false => self.queue.do_io(&mut completion, 1, Some(&mut { PATIENCE }), None),
            };
            if !matches!(done, Ok(0)) || spent >= SPIN {
                break (done, begun.elapsed());
            }
            std::hint::spin_loop();
        };
        match done {
            // SAFETY: do_io filled as many completions as it says.
            Ok(1) => match unsafe { completion[0].assume_init_ref() }.ret {
                0 => Ok(took.as_secs_f64() * 1e6),
                result => Err(ClientError::Request { request, result }),
            },
            Ok(_) => Err(ClientError::Protocol { what: "send a request", reason: "no completion came".to_owned() }),
            Err(error) => Err(ClientError::Protocol { what: "send a request", reason: error.message().to_owned() }),
        }
    }

    /// Fills a page of the memory.
    pub fn put(&mut self, page: usize, bytes: &[u8; BLOCK_BYTES]) {
        let target = self.memory.pages(page, 1);
        // SAFETY: the page is within the mapping, and no request is in flight, since `run` waits.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), BLOCK_BYTES) };
    }

    /// The first eight bytes of a page.
    pub fn first_word(&self, page: usize) -> u64 {
        // SAFETY: the page is within the mapping, and no request is in flight, since `run` waits.
        u64::from_le(unsafe { self.memory.pages(page, 1).cast::<u64>().read_volatile() })
    }
}

/// A RAM file, mapped as a guest's memory would be.
struct Memory {
    file: File,
    address: *mut u8,
    bytes: usize,
}

impl Memory {
    fn map(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        let bytes = file.metadata()?.len() as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // Populated, like the RAM of a guest that has run for a while: its first touch must not count as the disk's cost.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new shared mapping at an address that the kernel chooses.
        let address = unsafe { mmap(std::ptr::null_mut(), bytes, access, flags, &file, 0)? };
        Ok(Memory { file, address: address.cast(), bytes })
    }

    fn pages(&self, page: usize, count: usize) -> *mut u8 {
        assert!((page + count) * BLOCK_BYTES <= self.bytes, "{count} pages from {page} exceed the client's memory");
        self.address.wrapping_add(page * BLOCK_BYTES)
    }

    fn region(&self) -> MemoryRegion {
        MemoryRegion {
            addr: self.address as usize,
            iova: 0,
            len: self.bytes,
            fd: self.file.as_raw_fd(),
            fd_offset: 0,
            flags: 0,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; the driver that used it was dropped first.
        let _ = unsafe { munmap(self.address.cast(), self.bytes) };
    }
}
