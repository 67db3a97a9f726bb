//! Checks that file names derived from disk and NVRAM names do not collide.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use hearth_disk::{arrival, nvram};
use hearth_memory::fresh_file;
use hearth_recovery::snapshot::disk_objects;

use crate::config::{Config, DevicesConfig};
use crate::folders::{disk_socket, disk_tables, restored_disk};
use crate::problem::Problem;

pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    let DevicesConfig { disks, nvram, pmem, .. } = &config.devices;
    let nvram = nvram.iter().map(|device| &device.name).chain(pmem.iter().map(|device| &device.name));
    let mut owners: HashMap<PathBuf, &String> = HashMap::new();
    for name in disks.iter().map(|disk| &disk.name).chain(nvram) {
        let taken = files(name).into_iter().find_map(|file| {
            let other = owners.insert(file.clone(), name)?;
            Some((other, file.file_name()?.to_string_lossy().into_owned()))
        });
        if let Some((other, file)) = taken {
            let message = format!("disks {other} and {name} would both use a file {file}");
            problems.push(Problem::error("disks", message, "give one of them another name"));
        }
    }
}

/// All file names that a disk or NVRAM of this name may use in shared folders. This includes files that the machine
/// does not have yet, because it may be saved and restored elsewhere.
fn files(name: &str) -> Vec<PathBuf> {
    let [runtime, memory, store, saved, restored] =
        ["runtime", "memory", "store", "saved", "restored"].map(|folder| Path::new(folder).to_owned());
    let [blocks, index] = disk_objects(name);
    let lasting = [
        disk_socket(&runtime, name),
        disk_tables(&memory, name),
        nvram::memory_file(&memory, name),
        store.join(&blocks),
        store.join(index),
        saved.join(&blocks),
        arrival::note_file(&saved.join(blocks)),
        restored_disk(&restored, name),
    ];
    lasting.into_iter().flat_map(|file| [file.clone(), fresh_file(&file)]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::runtime_root::RuntimeRoot;

    fn told(names: &[&str]) -> Vec<String> {
        let disks = names.iter().map(|name| format!("[[disks]]\nname = \"{name}\"\npath = \"{name}.img\"\n"));
        let text = format!("name = \"web\"\nmemory = \"64MiB\"\n{}", disks.collect::<String>());
        let config = Config::parse(&text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap();
        let mut problems = Vec::new();
        check(&config, &mut problems);
        problems.iter().map(ToString::to_string).collect()
    }

    /// All names that end as a derived one does, beside all others.
    #[test]
    fn disks_share_no_files() {
        let derived = files("a");
        let ends = derived.iter().filter_map(|file| file.file_name()?.to_str()?.split_once("-a").map(|(_, end)| end));
        let ends: HashSet<&str> = ends.collect();
        assert!(ends.is_superset(&[".index", ".arrival", ".new", ".sock", ".qcow2", ""].into()), "{ends:?}");
        let names: Vec<String> =
            ends.iter().flat_map(|one| ends.iter().map(move |two| format!("a{one}{two}"))).collect();
        let names: HashSet<String> = names.into_iter().chain(["b".to_owned(), "a-a".to_owned()]).collect();
        let mut refused = 0;
        for one in &names {
            for two in names.iter().filter(|two| *two != one) {
                let all: Vec<PathBuf> = files(one).into_iter().chain(files(two)).collect();
                let distinct = all.iter().collect::<HashSet<_>>().len() == all.len();
                let told = told(&[one, two]);
                assert_eq!(told.is_empty(), distinct, "{one} {two}: {told:?}");
                refused += usize::from(!distinct);
            }
        }
        assert!(refused > 0 && refused < names.len() * names.len() / 2, "{refused}");
        for name in [".index", ".arrival", ".new"] {
            assert_eq!(told(&["a", &format!("a{name}")]).len(), 1, "{name}");
        }
        assert_eq!(told(&["data", "data.2", "data-index", "data.index2", "index", "new"]), [""; 0]);
    }

    #[test]
    fn reserved_file_names_are_refused() {
        let text = "name = \"hops.lock\"\nmemory = \"64MiB\"\n[boot]\nkernel = \"k\"\n";
        let problems = Config::parse(text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap_err();
        assert_eq!(
            problems[0].to_string(),
            "error: name: hops.lock is reserved for a file of Hearth; choose another name"
        );
    }

    #[test]
    fn disks_that_share_a_file_are_named() {
        assert_eq!(
            told(&["a", "a.index"]),
            ["error: disks: disks a and a.index would both use a file disk-a.index; give one of them another name"]
        );
    }
}
