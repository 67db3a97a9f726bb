//! `hearth-refill`: runs in a guest that has just booted, and reads ahead what the last guest had in its page cache.
//!
//! Hearth's disk -> cache map -> file systems, as they are mounted -> threads that read ahead
//!
//! The map is on a small read-only disk that the machine has with `refill = "on"`. Files are opened by the number of their inode, so
//! none is looked up by name. The kernel reads the pages by itself, skips those that it already has, and puts them into the page
//! cache as with any other read. So nothing here can make a file's content wrong.

mod disk;
mod handle;
mod map;
mod mounts;
mod refill;

use std::process::ExitCode;

use rustix::process::{getpid, getsid};

/// Nice value: the boot that goes on meanwhile comes first.
const NICE: &str = "10";

fn main() -> ExitCode {
    // Where the kernel groups processes by session (autogroup, as on Debian), the nice value that the unit sets counts only within
    // the group, and this one among groups. A user's shell that starts this program keeps its own.
    if getsid(None).is_ok_and(|session| session == getpid()) {
        // Fails on kernels without such groups.
        let _ = std::fs::write("/proc/self/autogroup", NICE);
    }
    match run() {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("hearth-refill: {}", error_text::chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Why nothing can be brought back.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Disk(#[from] disk::DiskError),
    #[error("cannot read the list of mounts")]
    Mounts(#[source] std::io::Error),
}

fn run() -> Result<String, Error> {
    let Some(disk) = disk::find() else {
        return Ok("this machine has no disk with a cache map: nothing to do".to_owned());
    };
    let Some((text, source)) = disk::read_map(&disk)? else {
        return Ok("there is nothing to bring back".to_owned());
    };
    let report = refill::refill(&map::Map::parse(&text), source).map_err(Error::Mounts)?;
    Ok(report.to_string())
}
