//! Pages that are generated from tables in the code are committed, and must match the code.
//!
//! `UPDATE=1 cargo test -p hearth generated` rewrites them.

use std::fs;
use std::path::Path;

fn check(name: &str, expect: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    if std::env::var_os("UPDATE").is_some_and(|value| value == "1") {
        fs::write(&path, expect).expect("docs can be written");
        return;
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let line = found.lines().zip(expect.lines()).take_while(|(found, expect)| found == expect).count() + 1;
    assert!(
        found == expect,
        "docs/{name} is stale from line {line} on; rewrite it with: UPDATE=1 cargo test -p hearth generated"
    );
}

#[test]
fn generated_api_page_is_current() {
    check("api.md", &hearth_api::page());
}

#[test]
fn generated_openapi_file_is_current() {
    check("openapi.json", &hearth_api::openapi());
}

#[test]
fn generated_config_page_is_current() {
    check("config.md", &hearth_keeper::config_page());
}

#[test]
fn generated_metrics_page_is_current() {
    check("metrics.md", &hearth_keeper::metrics_page());
}

#[test]
fn generated_commands_page_is_current() {
    check("commands.md", &hearth_keeper::commands_page());
}
