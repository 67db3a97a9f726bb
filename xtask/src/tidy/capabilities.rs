//! A capability has one name: in `recovery`, in the keeper, in the commands, and for its page, VM tests and bench.

use std::path::Path;

use crate::paths;

const CAPABILITIES: [&str; 5] = ["warm_reboot", "crash_recovery", "rejuvenation", "lazy_restore", "fast_remount"];
/// Modules of `recovery` that capabilities share.
const SHARED: [&str; 11] =
    ["lib", "admission", "budget", "ember", "hold", "images", "incarnation", "journal", "random", "snapshot", "vmcore"];
/// Folders with a module for each capability.
const HAVE_ALL: [&str; 3] = ["crates/recovery/src", "crates/keeper/src/machine", "vmtest/tests"];
/// Folders in which a capability may have a module of its own.
const MAY_HAVE: [&str; 2] = ["crates/keeper/src/cli", "crates/api/src"];
/// Commands and routes have these names. Modules use the capability's.
const VERBS: [&str; 6] = ["reboot", "crash", "rejuvenate", "restore", "remount", "boot_set"];

/// Names of the modules in a folder, which may be files or folders.
fn modules(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(paths::root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<_> = entries.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The name of a capability's bench, which is in the names of its recorded results.
fn bench(capability: &str) -> &str {
    if capability == "fast_remount" { "remount" } else { capability }
}

fn is_module(folder: &Path, name: &str) -> bool {
    folder.join(format!("{name}.rs")).is_file() || folder.join(name).join("mod.rs").is_file()
}

#[test]
fn capabilities_have_the_same_name_everywhere() {
    let root = paths::root();
    for name in CAPABILITIES {
        let page = root.join(format!("docs/{}.md", name.replace('_', "-")));
        assert!(page.is_file(), "{name}: {} is missing", page.display());
        for folder in HAVE_ALL {
            assert!(is_module(&root.join(folder), name), "{name} has no module in {folder}");
        }
        assert!(is_module(&root.join("bench/src"), bench(name)), "{name} has no bench");
    }
    for folder in HAVE_ALL.iter().chain(&MAY_HAVE) {
        for name in modules(folder) {
            assert!(!VERBS.contains(&name.as_str()), "{folder}/{name}: name the module after its capability");
        }
    }
}

#[test]
fn recovery_has_capabilities_and_what_they_share() {
    for name in modules("crates/recovery/src") {
        let is_known = CAPABILITIES.contains(&name.as_str()) || SHARED.contains(&name.as_str());
        assert!(is_known, "{name} is neither a capability nor shared by them");
    }
}
