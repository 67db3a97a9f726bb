//! Memory: does the folder hold the RAM, and does the host, with what the other machines may still take?

use std::time::Duration;

use hearth_disk::nvram::resident_bytes;
use hearth_memory::room::{FileSystemKind, Room, RoomError, host_available_bytes, must_hold};
use hearth_recovery::rejuvenation::parked;

use super::{Life, existing};
use crate::client::Client;
use crate::config::Config;
use crate::machine::memory_owner;
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

/// A machine that does not say what it may take within this time is left out: it must not keep others from starting.
const PATIENCE: Duration = Duration::from_secs(2);

pub fn check(config: &Config, root: &RuntimeRoot, life: Life, problems: &mut Vec<Problem>) {
    // A guest that is parked there has its memory already.
    if life.holds_resources() || parked::is_there(&config.memory_folder) {
        return;
    }
    let folder = existing(&config.memory_folder);
    let wanted_bytes = wanted_bytes(config);
    match must_hold(folder, wanted_bytes) {
        Ok(room) => {
            suitable(config, room, problems);
            problems.extend(shared(config, &room, wanted_bytes, &promised(root, &config.name)));
        }
        Err(error) => {
            let subject = if matches!(error, RoomError::HostTooSmall { .. }) { "memory" } else { "memory_folder" };
            problems.push(Problem::error(subject, crate::chain(&error), ""));
        }
    }
}

/// Each machine has a memory folder of its own.
pub fn owner(config: &Config, problems: &mut Vec<Problem>) {
    if let Some(why) = memory_owner::look(&config.runtime_folder, &config.memory_folder) {
        let message = format!("{} is another machine's: {why}", config.memory_folder.display());
        problems.push(Problem::error("memory_folder", message, memory_owner::HINT));
    }
}

/// A guest that is larger than the last one.
pub fn check_growth(last: &Config, next: &Config, problems: &mut Vec<Problem>) {
    let more_bytes = next.most_memory_bytes().saturating_sub(last.most_memory_bytes());
    if more_bytes > 0
        && let Err(error) = must_hold(existing(&next.memory_folder), more_bytes)
    {
        problems.push(Problem::error("memory", crate::chain(&error), "the change waits for the next guest"));
    }
}

/// What is still to be taken: NVRAM whose memory outlived the machine's last stop is there.
pub(super) fn wanted_bytes(config: &Config) -> u64 {
    let there = |(name, bytes): (&str, u64)| resident_bytes(&config.memory_folder, name).min(bytes);
    config.most_memory_bytes() - config.nvram_in_memory().map(there).sum::<u64>()
}

pub(super) fn suitable(config: &Config, room: Room, problems: &mut Vec<Problem>) {
    if let FileSystemKind::Other { .. } = room.kind {
        let message = format!(
            "{} is not in host memory: the guest's RAM would be written to a disk",
            config.memory_folder.display()
        );
        problems.push(Problem::warning("memory_folder", message, "choose a folder on a tmpfs, such as /dev/shm"));
    }
}

/// What other machines may still take, although they have not yet.
#[derive(Debug, Default, PartialEq, Eq)]
struct Promised {
    bytes: u64,
    machines: Vec<String>,
}

fn promised(root: &RuntimeRoot, own_name: &str) -> Promised {
    let mut promised = Promised::default();
    for name in root.names().into_iter().filter(|name| name != own_name) {
        let Ok(status) = Client::new(root.api_socket(&name)).with_patience(PATIENCE).status() else { continue };
        let memory = status.memory;
        let most_bytes = memory.budget_bytes + memory.headroom_bytes;
        let held_bytes = memory.resident_bytes + memory.ember_bytes + memory.boot_set_bytes + memory.nvram_bytes;
        promised.bytes += most_bytes.saturating_sub(held_bytes);
        promised.machines.push(name);
    }
    promised
}

/// Memory that is free now but promised to others: each machine would start, and the first to grow would kill another.
fn shared(config: &Config, room: &Room, wanted_bytes: u64, promised: &Promised) -> Option<Problem> {
    if promised.bytes == 0 || !room.kind.is_host_memory() {
        return None;
    }
    // The folder's own limit matters to machines in the same file system only, but most use one; the host's to all.
    let free_bytes = host_available_bytes().ok()?.min(room.free_bytes.unwrap_or(u64::MAX));
    if wanted_bytes + promised.bytes <= free_bytes {
        return None;
    }
    let message = format!(
        "too little host memory: {} needs {} MiB, running machines ({}) may still take {} MiB, and {} MiB are free",
        config.name,
        wanted_bytes >> 20,
        promised.machines.join(", "),
        promised.bytes >> 20,
        free_bytes >> 20
    );
    Some(Problem::error("memory", message, "stop another machine or give this one less memory"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A tmpfs with 100 MiB free: less than any host that runs tests.
    const ROOM: Room = Room { kind: FileSystemKind::Tmpfs, free_bytes: Some(100 << 20), total_bytes: None };

    fn check(wanted_mib: u64, promised_mib: u64, room: &Room) -> Option<String> {
        let text = "name = \"web\"\nmemory = \"32MiB\"\n[boot]\nkernel = \"k\"\n";
        let config = Config::parse(text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap();
        let promised = Promised { bytes: promised_mib << 20, machines: vec!["db".into(), "mail".into()] };
        shared(&config, room, wanted_mib << 20, &promised).map(|problem| problem.to_string())
    }

    #[test]
    fn memory_promised_to_other_machines_is_not_given_twice() {
        assert_eq!(check(60, 40, &ROOM), None);
        assert_eq!(
            check(60, 41, &ROOM).unwrap(),
            "error: memory: too little host memory: web needs 60 MiB, running machines (db, mail) may still take 41 MiB, and 100 MiB are free; stop another machine or give this one less memory"
        );
        // Memory that is not the host's is not shared with machines on tmpfs.
        assert_eq!(check(60, 41, &Room { kind: FileSystemKind::Dax, ..ROOM }), None);
    }

    #[test]
    fn the_folder_that_will_be_made_is_judged_by_its_parent() {
        assert_eq!(existing(Path::new("/proc/nowhere/at/all")), Path::new("/proc"));
        assert_eq!(existing(Path::new("/")), Path::new("/"));
    }
}
