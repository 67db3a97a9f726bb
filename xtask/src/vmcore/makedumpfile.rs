//! A makedumpfile that understands the newer guest kernel, run with the libraries of its own release.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::VmcoreError;
use crate::apt::Apt;
use crate::cache::{self, at};
use crate::paths;

/// 1.7.7 is the first that judges every page of Linux 6.12; this release has 1.7.8.
const RELEASE: &str = "forky";
const PACKAGES: [&str; 9] =
    ["makedumpfile", "libc6", "libdw1t64", "libelf1t64", "liblzo2-2", "libzstd1", "zlib1g", "libbz2-1.0", "liblzma5"];

/// The loader of that release, so that nothing of the host's is asked for.
const START: &str = r#"#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root
exec "$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/makedumpfile" "$@"
"#;

/// Makes `makedumpfile/makedumpfile`.
pub fn ensure() -> Result<(), VmcoreError> {
    cache::ensure(&paths::vmcore().join("makedumpfile"), &[RELEASE, START], |new| {
        let apt = Apt::open_release(&paths::vmcore().join(format!("apt-{RELEASE}")), RELEASE)?;
        apt.unpack(&PACKAGES, &new.join("root"))?;
        let start = new.join("makedumpfile");
        at("write", &start, fs::write(&start, START))?;
        Ok(at("make executable", &start, fs::set_permissions(&start, fs::Permissions::from_mode(0o755)))?)
    })
}
