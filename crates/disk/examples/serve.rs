//! Serves an image over vhost-user-blk, for trying things by hand:
//!
//! ```text
//! cargo run --example serve -- disk.sock disk.raw [qcow2] [read-only] [warm] [hold=N ...] [die-after=N]
//! qemu-system-x86_64 ... -object memory-backend-memfd,id=m,size=1G,share=on -machine q35,memory-backend=m \
//!     -chardev socket,id=c,path=disk.sock,reconnect=1 -device vhost-user-blk-pci,chardev=c
//! ```
//!
//! `warm` answers all reads from memory (the raw image is read once at the start and never changes then); `hold=N` keeps
//! back the end of operation N; `die-after=N` kills the process, unprepared, once N operations were started. When the
//! raw file gets another length, the guest is told.

use std::collections::HashMap;
use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::engine::flaky::{Fault, FlakyEngine, Plan};
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_disk::ledger::Ledger;
use hearth_disk::server::{Backing, DiskOptions, DiskServer, Expected, Tracking};
use hearth_disk::tag::{Tag, Tagger};
use hearth_disk::warm::{AfterServing, WarmMemory, WarmSource};

/// The whole image in memory, with its tags.
struct Copy {
    bytes: Vec<u8>,
    tags: Mutex<HashMap<u64, Tag>>,
}

impl Copy {
    fn of(image: &Path, tagger: &Tagger) -> std::io::Result<Self> {
        let bytes = std::fs::read(image)?;
        let blocks = bytes.as_chunks::<BLOCK_BYTES>().0.iter().enumerate();
        let tags = blocks.map(|(block, bytes)| (block as u64, tagger.tag(bytes))).collect();
        Ok(Self { bytes, tags: Mutex::new(tags) })
    }

    fn tags(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Tag>> {
        self.tags.lock().expect("nobody panics while holding it")
    }
}

impl WarmSource for Copy {
    fn serve(
        &self,
        _disk: DiskId,
        block: u64,
        _after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        let tag = self.tags().get(&block).copied()?;
        copy(self.bytes.as_chunks().0.get(block as usize)?);
        Some(tag)
    }

    fn may_hold(&self, _disk: DiskId, _blocks: Range<u64>) -> bool {
        true
    }

    fn forget(&self, _disk: DiskId, blocks: Range<u64>) {
        self.tags().retain(|block, _| !blocks.contains(block));
    }
}

/// Tracks no RAM file at all, so that the source is asked and nothing is recorded.
fn warm(image: &Path) -> Result<Tracking, Box<dyn Error>> {
    let tagger = Tagger::new(b"any key will do.");
    let ledger = std::env::temp_dir().join(format!("serve-{}.ledger", std::process::id()));
    let ledger = Arc::new(Mutex::new(Ledger::create(&ledger, 1)?));
    let warm = WarmMemory::only_serving(Arc::new(Copy::of(image, &tagger)?));
    Ok(Tracking { ram: Arc::default(), tagger, ledger, warm: Some(warm) })
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, path, words @ ..] = arguments.as_slice() else {
        return Err("usage: serve SOCKET IMAGE [qcow2] [read-only] [warm] [hold=N ...] [die-after=N]".into());
    };
    let has = |word: &str| words.iter().any(|found| found == word);
    let number = |word: &str, name: &str| word.strip_prefix(name).map(str::parse::<u64>).transpose();
    let plan = Plan::new(1);
    let mut die_after = None;
    for word in words {
        if let Some(held) = number(word, "hold=")? {
            plan.on(held, Fault::HoldEnd);
        }
        die_after = die_after.or(number(word, "die-after=")?);
    }
    let image = PathBuf::from(path);
    let format = if has("qcow2") { Format::Qcow2 } else { Format::Raw };
    let options = ImageOptions {
        path: image.clone(),
        format,
        read_only: has("read-only"),
        direct: true,
        lock_patience: Duration::from_secs(10),
        owner: None,
    };
    let opened = Image::open(&options)?;
    println!("{}", opened.describe());
    let backing = if words.iter().any(|word| word.contains('=')) {
        let engine_plan = plan.clone();
        Backing::with(opened, |_, engine| {
            Box::new(FlakyEngine::new(engine, engine_plan).expect("descriptors for the flaky engine"))
        })?
    } else {
        Backing::of(opened)?
    };
    let options = DiskOptions {
        serial: "hearth-example".into(),
        queues: 8,
        read_only: has("read-only"),
        memory_slots: true,
        expected: Expected::anyone(),
        ..DiskOptions::new(DiskId(0), "example", socket)
    };
    let tracking = if has("warm") { Some(warm(&image)?) } else { None };
    let server = DiskServer::start_with(options, backing, tracking)?;
    println!("serving {path} at {socket}");
    let mut bytes = std::fs::metadata(&image)?.len();
    loop {
        std::thread::sleep(Duration::from_millis(if die_after.is_some() { 1 } else { 1000 }));
        if die_after.is_some_and(|operations| plan.seen() >= operations) {
            println!("{:?}\ndying", server.counters());
            std::process::abort();
        }
        let now = std::fs::metadata(&image)?.len();
        if format == Format::Raw && now != std::mem::replace(&mut bytes, now) {
            println!("the image has {} bytes now", server.resize()?);
        }
        if die_after.is_none() {
            println!("{:?}", server.counters());
        }
    }
}
