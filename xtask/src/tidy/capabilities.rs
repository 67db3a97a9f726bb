//! A capability has one name: of its module, its page, its VM tests and its bench.

use std::path::{Path, PathBuf};

use crate::paths;

/// What `recovery` is to hold in the end; those that are there already must be there everywhere.
const CAPABILITIES: [&str; 5] = ["warm_reboot", "crash_recovery", "rejuvenation", "lazy_restore", "fast_remount"];
/// What capabilities are made of.
const SHARED: [&str; 12] = [
    "lib",
    "admission",
    "boot_set",
    "budget",
    "ember",
    "hold",
    "images",
    "incarnation",
    "journal",
    "random",
    "snapshot",
    "vmcore",
];

/// Names of the modules in a folder, whether files or folders.
fn modules(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<_> = entries.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Where else a capability of this name must be found; each place may be a file or a folder.
fn places(name: &str) -> [Vec<PathBuf>; 3] {
    let root = paths::root();
    let module = |folder: &str, main: &str| {
        let folder = root.join(folder);
        vec![folder.join(format!("{name}.rs")), folder.join(name).join(main)]
    };
    let page = vec![root.join(format!("docs/{}.md", name.replace('_', "-")))];
    [page, module("vmtest/tests", "main.rs"), module("bench/src", "mod.rs")]
}

#[test]
fn a_capability_has_the_same_name_everywhere() {
    let modules = modules(&paths::root().join("crates/recovery/src"));
    let strangers: Vec<_> = modules.iter().filter(|name| !SHARED.contains(&name.as_str())).collect();
    assert!(!strangers.is_empty(), "no capability found: did the crate move?");
    for name in strangers {
        assert!(CAPABILITIES.contains(&name.as_str()), "{name} is neither a capability nor shared by them");
        for place in places(name) {
            assert!(place.iter().any(|path| path.is_file()), "{name}: none of {place:?} is there");
        }
    }
}
