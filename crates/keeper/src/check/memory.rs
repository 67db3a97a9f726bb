//! Checks that the memory folder and the host have enough memory, including what other machines may still use.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use hearth_disk::nvram::resident_bytes;
use hearth_memory::PAGE_BYTES;
use hearth_memory::room::{FileSystemKind, HostMemory, Needs, Room, RoomError, must_hold, page_bytes};
use hearth_recovery::lazy_restore::{Mode, Order};
use hearth_recovery::rejuvenation::parked;

use super::Life;
use crate::client::Client;
use crate::config::Config;
use crate::folders::{existing, memory_owner};
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

/// A machine that does not respond within this time is left out, because it must not keep others from starting.
const PATIENCE: Duration = Duration::from_secs(2);

pub fn check(config: &Config, root: &RuntimeRoot, life: Life, problems: &mut Vec<Problem>) {
    // A guest that is parked there has its memory already.
    if life.holds_resources() || parked::is_there(&config.folders.memory) {
        return;
    }
    let folder = existing(&config.folders.memory);
    problems.extend(restore_order(config).and_then(|mode| no_restore(config, mode)));
    let needs = needs(config);
    match must_hold(folder, needs) {
        Ok(room) => {
            suitable(config, room, problems);
            let Ok(host) = HostMemory::now() else { return };
            problems.extend(shared(config, &room, needs, host, &promised(root, &config.name, folder)));
        }
        Err(error) => {
            let of_host = matches!(error, RoomError::HostTooSmall { .. } | RoomError::MoreThanHost { .. });
            let subject = if of_host { "memory" } else { "memory_folder" };
            // Memory that the whole host does not have never becomes free.
            let make = if let RoomError::MoreThanHost { .. } = error { Problem::error } else { Problem::for_now };
            problems.push(make(subject, crate::chain(&error), ""));
        }
    }
}

/// How much memory the snapshot that the machine begins with is to load before the guest runs.
fn restore_order(config: &Config) -> Option<Mode> {
    // A start reports an unreadable order.
    let order = Order::load(&config.file).ok().flatten()?;
    let disks: Vec<&Path> = config.devices.disks.iter().map(|disk| disk.path.as_path()).collect();
    order.void_for(&config.file, &disks).is_none().then_some(order.mode)
}

/// Why a snapshot cannot be restored into this folder in this mode. It is found before QEMU starts, and an eager restore does not
/// replace it by itself: whoever asks for a second would get minutes.
pub fn no_restore(config: &Config, mode: Mode) -> Option<Problem> {
    let folder = existing(&config.folders.memory);
    let kind = Room::of(folder).ok()?.kind;
    let has_huge_pages = || page_bytes(folder).is_some_and(|bytes| bytes != PAGE_BYTES);
    let on = match (mode, kind) {
        (Mode::Eager, _) => return None,
        (_, FileSystemKind::Tmpfs) if has_huge_pages() => "a tmpfs with huge pages".to_owned(),
        (_, FileSystemKind::Tmpfs) => return None,
        _ => kind.to_string(),
    };
    let message = format!(
        "{} is on {on}, but memory can be loaded while the guest runs only on a tmpfs with ordinary pages",
        config.folders.memory.display()
    );
    let hint = "choose a folder on one, such as /dev/shm, or use `hearth restore --eager`, which loads all memory before the \
                guest runs";
    Some(Problem::error("memory_folder", message, hint))
}

/// Each machine has a memory folder of its own.
pub fn owner(config: &Config, problems: &mut Vec<Problem>) {
    if let Some(why) = memory_owner::look(&config.folders.runtime, &config.folders.memory) {
        let message = format!("{} belongs to another machine: {why}", config.folders.memory.display());
        problems.push(Problem::for_now("memory_folder", message, memory_owner::HINT));
    }
}

/// Checks memory for a guest that is larger than the last one.
pub fn check_growth(last: &Config, next: &Config, problems: &mut Vec<Problem>) {
    let more_bytes = next.most_memory_bytes().saturating_sub(last.most_memory_bytes());
    if more_bytes > 0
        && let Err(error) =
            must_hold(existing(&next.folders.memory), Needs { folder_bytes: more_bytes, keeper_bytes: 0 })
    {
        problems.push(Problem::error("memory", crate::chain(&error), "the change waits for the next guest"));
    }
}

/// Memory still to be allocated. NVRAM whose memory outlived the machine's last stop exists already.
pub(super) fn needs(config: &Config) -> Needs {
    let there = |(name, bytes): (&str, u64)| resident_bytes(&config.folders.memory, name).min(bytes);
    let there_bytes = config.devices.nvram_in_memory().map(there).sum::<u64>();
    // The boot set is no file.
    let keeper_bytes = config.remount_bytes();
    Needs { folder_bytes: config.most_memory_bytes() - keeper_bytes - there_bytes, keeper_bytes }
}

pub(super) fn suitable(config: &Config, room: Room, problems: &mut Vec<Problem>) {
    if let FileSystemKind::Other { .. } = room.kind {
        let message = format!(
            "{} is not in host memory, so the guest's RAM would be written to a disk",
            config.folders.memory.display()
        );
        problems.push(Problem::warning("memory_folder", message, "choose a folder on a tmpfs, such as /dev/shm"));
    }
    if !room.kind.reports_faults() {
        let message = format!(
            "{} is on {}, where Linux reports no page faults: snapshots can be restored there with --eager only, and a guest \
             that starts beside a dump may exceed its budget",
            config.folders.memory.display(),
            room.kind
        );
        let hint = match room.kind {
            FileSystemKind::Dax => {
                "keep it if the guest is to survive a host reload; otherwise choose a folder on a tmpfs"
            }
            _ => "choose a folder on a tmpfs, such as /dev/shm",
        };
        problems.push(Problem::warning("memory_folder", message, hint));
    }
}

/// Memory that other machines may still use, but have not yet.
#[derive(Debug, Default, PartialEq, Eq)]
struct Promised {
    machines: Vec<Machine>,
}

#[derive(Debug, PartialEq, Eq)]
struct Machine {
    name: String,
    kind: FileSystemKind,
    /// Its memory folder is in the same file system.
    is_beside: bool,
    needs: Needs,
}

fn promised(root: &RuntimeRoot, own_name: &str, folder: &Path) -> Promised {
    let others = root.names().into_iter().filter(|name| name != own_name);
    Promised { machines: others.filter_map(|name| machine(root, name, folder)).collect() }
}

/// None: it does not answer.
fn machine(root: &RuntimeRoot, name: String, beside: &Path) -> Option<Machine> {
    let client = Client::new(root.api_socket(&name)).with_patience(PATIENCE);
    let (memory, config) = (client.status().ok()?.memory, client.config().ok()?);
    let folder = Path::new(config["memory_folder"].as_str()?);
    let boot_set_bytes = config["remount"]["limit_bytes"].as_u64().unwrap_or(0);
    let most_bytes = (memory.budget_bytes + memory.headroom_bytes).saturating_sub(boot_set_bytes);
    let held_bytes = memory.resident_bytes + memory.ember_bytes + memory.nvram_bytes;
    let device = |folder: &Path| fs::metadata(folder).map(|metadata| metadata.dev()).ok();
    Some(Machine {
        name,
        kind: Room::of(folder).ok()?.kind,
        is_beside: device(folder) == device(beside),
        needs: Needs {
            folder_bytes: most_bytes.saturating_sub(held_bytes),
            keeper_bytes: boot_set_bytes.saturating_sub(memory.boot_set_bytes),
        },
    })
}

/// Free memory may be promised to other machines. Without this check every machine would start, and the first to grow
/// would kill another.
fn shared(config: &Config, room: &Room, needs: Needs, host: HostMemory, promised: &Promised) -> Option<Problem> {
    let of_host = |machine: &Machine| machine.needs.host_bytes(machine.kind);
    let in_folder = |machine: &Machine| if machine.is_beside { machine.needs.folder_bytes } else { 0 };
    // The host first, because a larger folder does not help a host that is too small.
    let lacking = promised.lack(needs.host_bytes(room.kind), host.available_bytes, of_host);
    if let Some(lacking) = lacking {
        let message = format!("too little host memory: {} {lacking}", config.name);
        return Some(Problem::for_now("memory", message, "stop one of them or give this machine less memory"));
    }
    let lacking = promised.lack(needs.folder_bytes, room.free_bytes?, in_folder)?;
    let folder = config.folders.memory.display();
    let message = format!("too little space in {folder}: {} {lacking} in its file system", config.name);
    let hint = format!("{}; or stop one of them", room.kind.remedy());
    Some(Problem::for_now("memory_folder", message, hint))
}

impl Promised {
    /// Whether other machines leave too little free memory, in words.
    fn lack(&self, needed_bytes: u64, free_bytes: u64, of: impl Fn(&Machine) -> u64) -> Option<String> {
        let promised_bytes: u64 = self.machines.iter().map(&of).sum();
        if promised_bytes == 0 || needed_bytes + promised_bytes <= free_bytes {
            return None;
        }
        let names: Vec<_> = self.machines.iter().filter(|one| of(one) > 0).map(|one| one.name.as_str()).collect();
        Some(format!(
            "needs {} MiB, running machines ({}) may still use {} MiB, and {} MiB are free",
            needed_bytes >> 20,
            names.join(", "),
            promised_bytes >> 20,
            free_bytes >> 20
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tmpfs with 100 MiB free.
    const ROOM: Room = Room { kind: FileSystemKind::Tmpfs, free_bytes: Some(100 << 20), total_bytes: None };
    const HOST: HostMemory = HostMemory { total_bytes: 1 << 30, available_bytes: 150 << 20 };

    fn config() -> Config {
        let text = "name = \"web\"\nmemory = \"32MiB\"\nmemory_folder = \"/ram/web\"\n[boot]\nkernel = \"k\"\n";
        Config::parse(text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap()
    }

    /// One other machine is in the same tmpfs, and one in another.
    fn check(wanted_mib: u64, beside_mib: u64, elsewhere_mib: u64, room: &Room) -> Option<String> {
        let needs = |mib: u64| Needs { folder_bytes: mib << 20, keeper_bytes: 0 };
        let machine = |name: &str, is_beside, mib: u64| Machine {
            name: name.to_owned(),
            kind: FileSystemKind::Tmpfs,
            is_beside,
            needs: needs(mib),
        };
        let machines = vec![machine("db", true, beside_mib), machine("mail", false, elsewhere_mib)];
        let promised = Promised { machines };
        shared(&config(), room, needs(wanted_mib), HOST, &promised).map(|problem| problem.to_string())
    }

    #[test]
    fn promised_memory_is_not_counted_as_free() {
        assert_eq!(check(60, 40, 50, &ROOM), None);
        assert_eq!(
            check(60, 40, 51, &ROOM).unwrap(),
            "error: memory: too little host memory: web needs 60 MiB, running machines (db, mail) may still use 91 MiB, and 150 MiB are free; stop one of them or give this machine less memory"
        );
        assert_eq!(
            check(60, 41, 0, &ROOM).unwrap(),
            "error: memory_folder: too little space in /ram/web: web needs 60 MiB, running machines (db) may still use 41 MiB, and 100 MiB are free in its file system; enlarge that tmpfs (mount -o remount,size=...) or choose another folder; or stop one of them"
        );
        // Memory that is not the host's is shared with machines in the same file system only.
        assert_eq!(check(60, 40, 110, &Room { kind: FileSystemKind::Dax, ..ROOM }), None);
    }

    #[test]
    fn each_file_system_holds_what_lies_in_it() {
        let text = "name = \"web\"\nmemory = \"32MiB\"\nbudget_slack = \"1MiB\"\non_panic = \"recover\"\n[boot]\nkernel = \"k\"\n\
                    [remount]\nlimit = \"8MiB\"\n[[nvram]]\nsize = \"4MiB\"\n";
        let config = Config::parse(text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap();
        assert_eq!(needs(&config), Needs { folder_bytes: 37 << 20, keeper_bytes: 8 << 20 });
    }

    #[test]
    fn missing_folder_is_judged_by_its_parent() {
        assert_eq!(existing(Path::new("/proc/nowhere/at/all")), Path::new("/proc"));
        assert_eq!(existing(Path::new("/")), Path::new("/"));
    }
}
