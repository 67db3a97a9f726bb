//! A capability has the same name in its module, its page, its VM tests and its bench.

use std::path::{Path, PathBuf};

use crate::paths;

/// The capabilities of `recovery`. Each one with a module must exist everywhere.
const CAPABILITIES: [&str; 5] = ["warm_reboot", "crash_recovery", "rejuvenation", "lazy_restore", "fast_remount"];
/// Modules that capabilities share.
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

/// Names of the modules in a folder, which may be files or folders.
fn modules(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<_> = entries.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The other places of a capability of this name, each with its possible paths.
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
fn capabilities_have_the_same_name_everywhere() {
    let modules = modules(&paths::root().join("crates/recovery/src"));
    let strangers: Vec<_> = modules.iter().filter(|name| !SHARED.contains(&name.as_str())).collect();
    assert!(!strangers.is_empty(), "no capability found: did the crate move?");
    for name in strangers {
        assert!(CAPABILITIES.contains(&name.as_str()), "{name} is neither a capability nor shared by them");
        for place in places(name) {
            assert!(place.iter().any(|path| path.is_file()), "{name}: none of {place:?} exists");
        }
    }
}
