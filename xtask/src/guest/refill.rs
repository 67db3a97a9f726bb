//! The helper that brings a guest's file cache back: one static program and the systemd unit that starts it, as a package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::GuestError;
use crate::cache::{self, at};
use crate::deb::{self, Package};
use crate::{paths, shell};

const CONTROL: &str = include_str!("../../../guest/refill/debian/control");
const AFTER_INSTALL: &str = include_str!("../../../guest/refill/debian/postinst");
const AFTER_REMOVAL: &str = include_str!("../../../guest/refill/debian/postrm");
const UNIT: &str = include_str!("../../../guest/refill/hearth-refill.service");

/// What the package is made from, as the stamp of everything that has it.
pub const SOURCES: [&str; 13] = [
    CONTROL,
    AFTER_INSTALL,
    AFTER_REMOVAL,
    UNIT,
    include_str!("../../../guest/refill/Cargo.toml"),
    include_str!("../../../guest/refill/src/disk.rs"),
    include_str!("../../../guest/refill/src/handle.rs"),
    include_str!("../../../guest/refill/src/main.rs"),
    include_str!("../../../guest/refill/src/map.rs"),
    include_str!("../../../guest/refill/src/mounts.rs"),
    include_str!("../../../guest/refill/src/refill.rs"),
    include_str!("../../../crates/error-text/src/lib.rs"),
    include_str!("refill.rs"),
];

/// The program alone.
pub const PROGRAM: &str = "hearth-refill";
/// The package.
pub const PACKAGE: &str = "hearth-refill.deb";

/// Compiles the helper and packs it; returns the folder of program and package. It is static, so that guest and host need not
/// share a libc.
pub fn ensure() -> Result<PathBuf, GuestError> {
    let folder = paths::guest().join("refill");
    cache::ensure(&folder, &SOURCES, |new| {
        let program = new.join(PROGRAM);
        compile(&new.join("build"), &program)?;
        pack(new.join("package"), &program, &new.join(PACKAGE))
    })?;
    Ok(folder)
}

fn compile(target: &Path, program: &Path) -> Result<(), GuestError> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(paths::root()).env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols");
    cargo.args(["build", "--quiet", "--release", "--target=x86_64-unknown-linux-gnu", "-p", PROGRAM]);
    shell::output(cargo.arg("--target-dir").arg(target))?;
    let built = target.join("x86_64-unknown-linux-gnu/release").join(PROGRAM);
    at("copy", &built, fs::copy(&built, program))?;
    Ok(at("remove", target, fs::remove_dir_all(target))?)
}

fn pack(tree: PathBuf, program: &Path, package: &Path) -> Result<(), GuestError> {
    let packed = Package::new(tree, PROGRAM, deb::VERSION)?;
    let program_bytes = at("read", program, fs::read(program))?;
    packed.file(&format!("usr/lib/hearth/{PROGRAM}"), &program_bytes, 0o755)?;
    packed.file("usr/lib/systemd/system/hearth-refill.service", UNIT.as_bytes(), 0o644)?;
    packed.control(CONTROL)?;
    packed.script("postinst", AFTER_INSTALL)?;
    packed.script("postrm", AFTER_REMOVAL)?;
    Ok(packed.build(package)?)
}
