//! Paths: the checkout, cargo's output, and what xtask makes and keeps between runs.

use std::path::{Path, PathBuf};

/// The checkout. xtask always runs through cargo, so it works on the checkout that it was compiled from.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the checkout")
}

/// Folder of cargo's output, which `CARGO_TARGET_DIR` moves.
pub fn cargo_target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |folder| root().join(folder))
}

/// Folder of the guest images. It is not under `CARGO_TARGET_DIR`, because images depend on no build and several builds share
/// them.
pub fn guest() -> PathBuf {
    root().join("target/guest")
}

/// Folder of the debuggers for crash dumps, and of the kernels' symbols.
pub fn vmcore() -> PathBuf {
    root().join("target/vmcore")
}

/// Folder of the newer QEMU, unpacked beside the installed one.
pub fn qemu10() -> PathBuf {
    root().join("target/qemu10")
}

/// Folder of the packages for hosts.
pub fn deb() -> PathBuf {
    cargo_target().join("deb")
}

/// Folder of the emulated host with KVM.
pub fn nested() -> PathBuf {
    root().join("target/nested")
}
