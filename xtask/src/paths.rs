//! Where things are: the checkout, what cargo builds, and what xtask makes and keeps between runs.

use std::path::{Path, PathBuf};

/// The checkout. xtask is always run through cargo, so the place it was compiled from is the place it works on.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the checkout")
}

/// What cargo builds. `CARGO_TARGET_DIR` moves it.
pub fn cargo_target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |folder| root().join(folder))
}

/// Guest images. Not under `CARGO_TARGET_DIR`: they depend on no build, and several builds share them.
pub fn guest() -> PathBuf {
    root().join("target/guest")
}

/// Debuggers for crash dumps, and the kernels' symbols.
pub fn vmcore() -> PathBuf {
    root().join("target/vmcore")
}

/// The newer QEMU, unpacked beside the installed one.
pub fn qemu10() -> PathBuf {
    root().join("target/qemu10")
}

/// The host with KVM that is run under emulation.
pub fn nested() -> PathBuf {
    root().join("target/nested")
}
