//! Rules of the repository, as tests.

mod capabilities;
mod links;
mod messages;
mod named_tests;
mod words;

use std::path::{Path, PathBuf};

use crate::paths;

/// Ground crates, which do not depend on each other; `recovery` and the crates above compose them.
const GROUND: [&str; 5] = ["memory", "disk", "qemu", "store", "libvirt"];

/// All files with this extension in the checkout's source folders.
fn files(extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["crates", "vmtest", "bench", "xtask"] {
        collect(&paths::root().join(folder), extension, &mut found);
    }
    assert!(found.len() > 5, "the source folders moved: {found:?}");
    found
}

fn collect(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, extension, found);
        } else if path.extension().is_some_and(|its| its == extension) {
            found.push(path);
        }
    }
}

/// All files that are or could be committed.
fn all_files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![paths::root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap();
            match path.is_dir() {
                true if name == "target" || name == ".git" => {}
                true => folders.push(path),
                false if name == ".git" => {}
                false => found.push(path),
            }
        }
    }
    assert!(found.len() > 50, "the checkout moved: {found:?}");
    found
}

/// Names of the files that break a rule, relative to the checkout.
fn breaking(files: Vec<PathBuf>, breaks: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let broken = files.into_iter().filter(|file| breaks(&std::fs::read_to_string(file).unwrap()));
    broken.map(|file| file.strip_prefix(paths::root()).unwrap().to_owned()).collect()
}

#[test]
fn every_source_file_has_a_head() {
    let headless = breaking(files("rs"), |text| !text.starts_with("//! "));
    assert!(headless.is_empty(), "files without a head: {headless:?}");
}

#[test]
fn ground_crates_depend_on_no_hearth_crate() {
    for crate_name in GROUND {
        let manifest = paths::root().join("crates").join(crate_name).join("Cargo.toml");
        let manifest: toml::Table = std::fs::read_to_string(manifest).unwrap().parse().unwrap();
        let known: Vec<_> = ["dependencies", "dev-dependencies", "build-dependencies"]
            .iter()
            .filter_map(|section| manifest.get(*section)?.as_table())
            .flat_map(|section| section.keys().filter(|name| name.starts_with("hearth")))
            .collect();
        assert!(known.is_empty(), "{crate_name} depends on {known:?}");
    }
}

#[test]
fn every_dependency_is_declared_in_the_workspace() {
    let text = std::fs::read_to_string(paths::root().join("Cargo.toml")).unwrap();
    let workspace: toml::Table = text.parse().unwrap();
    let known = workspace["workspace"]["dependencies"].as_table().unwrap();
    for manifest in files("toml").into_iter().filter(|file| file.ends_with("Cargo.toml")) {
        let text = std::fs::read_to_string(&manifest).unwrap();
        let manifest_table: toml::Table = text.parse().unwrap();
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(section) = manifest_table.get(section).and_then(|section| section.as_table()) else { continue };
            // Crates of this workspace may be named by their path.
            let foreign = section.iter().filter(|(_, value)| value.get("path").is_none());
            for (name, _) in foreign {
                assert!(
                    known.contains_key(name),
                    "{}: {name} is not in the workspace's dependencies",
                    manifest.display()
                );
            }
        }
    }
}
