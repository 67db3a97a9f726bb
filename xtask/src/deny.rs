//! Licences, duplicate crates and sources of the dependencies, checked against `deny.toml`.
//!
//! cargo-deny does this and more, but takes longer to compile than all of Hearth. If it is installed, it is used; otherwise this
//! module applies the same file. Security advisories need cargo-deny, because their database is on the network.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use crate::cache::{CacheError, at};
use crate::shell::{self, ShellError};
use crate::{cargo, paths};

#[derive(Debug, thiserror::Error)]
pub enum DenyError {
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("cannot parse deny.toml")]
    Rules(#[from] toml::de::Error),
    #[error("cannot parse the output of cargo metadata")]
    Metadata(#[from] serde_json::Error),
    #[error("dependencies break the rules in deny.toml:\n  {}", .0.join("\n  "))]
    Broken(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Bans {
    multiple_versions: Level,
    #[serde(rename = "wildcards")]
    _wildcards: Level,
    /// `name` or `name@version`.
    skip: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sources {
    unknown_registry: Level,
    unknown_git: Level,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Level {
    Allow,
    Deny,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// None for crates of this workspace.
    source: Option<String>,
}

/// Checks all rules, and reports all breaches together.
pub fn check() -> Result<(), DenyError> {
    if shell::find("cargo-deny").is_some() {
        return Ok(shell::run(cargo().args(["deny", "--offline", "check", "bans", "licenses", "sources"]))?);
    }
    let breaches = breaches(&rules(paths::root())?, &packages_built()?);
    if breaches.is_empty() { Ok(()) } else { Err(DenyError::Broken(breaches)) }
}

fn rules(root: &Path) -> Result<Rules, DenyError> {
    let file = root.join("deny.toml");
    Ok(toml::from_str(&at("read", &file, std::fs::read_to_string(&file))?)?)
}

/// Packages that are compiled for this host. The lock file has crates for other systems too, which do not matter.
fn packages_built() -> Result<Vec<Package>, DenyError> {
    let version = shell::output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap_or("x86_64-unknown-linux-gnu");
    let metadata = cargo().args(["metadata", "--format-version", "1", "--locked", "--filter-platform", host]).output();
    let metadata = metadata.map_err(|source| ShellError::Start { program: "cargo".into(), source })?;
    let metadata: Metadata = serde_json::from_slice(&metadata.stdout)?;
    Ok(metadata.packages)
}

fn breaches(rules: &Rules, packages: &[Package]) -> Vec<String> {
    let foreign = || packages.iter().filter(|package| package.source.is_some());
    let mut breaches: Vec<_> = foreign().filter_map(|package| licence_breach(&rules.licenses, package)).collect();
    breaches.extend(foreign().filter_map(|package| source_breach(&rules.sources, package)));
    if rules.bans.multiple_versions == Level::Deny {
        breaches.extend(doubled(&rules.bans, foreign()));
    }
    breaches
}

fn licence_breach(rules: &Licenses, package: &Package) -> Option<String> {
    let Some(text) = &package.license else {
        return Some(format!("{} {} names no licence", package.name, package.version));
    };
    // Older crates write MIT/Apache-2.0.
    let expression = spdx::Expression::parse_mode(text, spdx::ParseMode::LAX);
    let allowed = expression
        .is_ok_and(|expression| expression.evaluate(|requirement| rules.allow.contains(&requirement.to_string())));
    (!allowed).then(|| format!("{} {}: licence {text} is not allowed", package.name, package.version))
}

fn source_breach(rules: &Sources, package: &Package) -> Option<String> {
    const CRATES_IO: [&str; 2] =
        ["registry+https://github.com/rust-lang/crates.io-index", "sparse+https://index.crates.io/"];
    let source = package.source.as_deref()?;
    let (known, level) = match source.starts_with("git+") {
        true => (false, &rules.unknown_git),
        false => (CRATES_IO.contains(&source), &rules.unknown_registry),
    };
    (!known && *level == Level::Deny).then(|| format!("{} {} comes from {source}", package.name, package.version))
}

fn doubled<'a>(rules: &Bans, packages: impl Iterator<Item = &'a Package>) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        let skipped = |skip: &String| *skip == package.name || *skip == format!("{}@{}", package.name, package.version);
        if !rules.skip.iter().any(skipped) {
            versions.entry(&package.name).or_default().insert(&package.version);
        }
    }
    let doubled = versions.into_iter().filter(|(_, versions)| versions.len() > 1);
    doubled
        .map(|(name, versions)| {
            let versions = versions.into_iter().collect::<Vec<_>>().join(", ");
            format!("{name} has several versions, {versions}: unify them, or add one to skip with its reason")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, version: &str, license: &str, source: &str) -> Package {
        let license = (!license.is_empty()).then(|| license.to_owned());
        Package { name: name.into(), version: version.into(), license, source: Some(source.into()) }
    }

    fn check(packages: &[Package], expect: &[&str]) {
        let rules: Rules = toml::from_str(
            "[licenses]\nallow = ['MIT', 'Apache-2.0 WITH LLVM-exception']\n\
             [bans]\nmultiple-versions = 'deny'\nwildcards = 'allow'\nskip = ['old@1.0.0']\n\
             [sources]\nunknown-registry = 'deny'\nunknown-git = 'deny'",
        )
        .unwrap();
        let found = breaches(&rules, packages);
        assert_eq!(found.len(), expect.len(), "{found:?}");
        for (found, expect) in found.iter().zip(expect) {
            assert!(found.contains(expect), "{found}");
        }
    }

    const INDEX: &str = "registry+https://github.com/rust-lang/crates.io-index";

    #[test]
    fn or_needs_one_allowed_licence_and_all() {
        check(&[package("a", "1.0.0", "MIT/GPL-3.0", INDEX), package("b", "1.0.0", "GPL-3.0 OR MIT", INDEX)], &[]);
        check(
            &[package("c", "1.0.0", "MIT AND GPL-3.0", INDEX), package("d", "1.0.0", "", INDEX)],
            &["c 1.0.0", "d 1.0.0"],
        );
        check(&[package("e", "1.0.0", "Apache-2.0 WITH LLVM-exception", INDEX)], &[]);
        check(&[package("e", "1.0.0", "Apache-2.0", INDEX)], &["Apache-2.0"]);
    }

    #[test]
    fn foreign_sources_are_named() {
        check(&[package("a", "1.0.0", "MIT", "git+https://example.org/a")], &["comes from git+"]);
    }

    #[test]
    fn duplicate_crates_are_named_unless_skipped() {
        check(&[package("a", "1.0.0", "MIT", INDEX), package("a", "2.0.0", "MIT", INDEX)], &["a has several versions"]);
        check(&[package("old", "1.0.0", "MIT", INDEX), package("old", "2.0.0", "MIT", INDEX)], &[]);
    }

    #[test]
    fn rules_of_this_checkout_are_valid() {
        rules(paths::root()).unwrap();
    }
}
