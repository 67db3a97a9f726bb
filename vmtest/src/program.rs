//! Scripts that tests put in the place of other programs, written so that they can be run at once.

use std::path::Path;
use std::process::Command;

/// Writes an executable script. A child process writes it: if this process had the file open for writing, a child that another
/// test forks at that moment would inherit the descriptor, and running the script would fail ("Text file busy").
pub fn write_program(path: &Path, text: &str) {
    let write = ["-c", "printf %s \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", text];
    let written = Command::new("sh").args(write).arg(path).status().expect("every system has a shell");
    assert!(written.success(), "cannot write {}", path.display());
}
