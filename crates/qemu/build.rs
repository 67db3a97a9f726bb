//! Builds the preload library with the system's C compiler; the keeper embeds it.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let sources = ["preload", "heap", "helper", "valve"].map(|name| format!("src/preload/{name}.c"));
    for source in sources.iter().map(String::as_str).chain(["src/preload/helper.h"]) {
        println!("cargo::rerun-if-changed={source}");
    }
    println!("cargo::rerun-if-env-changed=CC");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let library = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("preload.so");
    let status = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-pthread", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-o"])
        .arg(&library)
        .args(&sources)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{compiler} {}: {status}", sources.join(" ")),
        Err(error) => panic!("{compiler}: {error}; install a C compiler (Debian: apt-get install gcc)"),
    }
}
